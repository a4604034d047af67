# SPDX-License-Identifier: Apache-2.0
"""`python3 -m persistentkv`: what is installed and what it runs on here."""

import sys

from . import Executor, PkvError, lib


def main() -> int:
    print(f"libpkv {lib.version}: {lib.path}")
    ok = False
    for device in ("cpu", "cuda"):
        try:
            executor = Executor(device)
        except PkvError as e:
            print(f"{device}: {e}")
            continue
        ok = True
        print(f"{executor.device}: {executor.isa}, {executor.threads} threads")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
