# SPDX-License-Identifier: Apache-2.0
"""check_hardening.py FILE...: what a program or library of ours must be, by its headers.

Position-independent, its address tables read-only after the start (RELRO and immediate binding), no
segment both writable and executable, and no executable stack."""
import re
import subprocess
import sys


def faults(text):
    """What `readelf -hldW` says against a file."""
    found = []
    if not re.search(r"Type:\s+DYN", text):
        found.append("is not position-independent")
    if "GNU_RELRO" not in text:
        found.append("has no RELRO")
    if not re.search(r"\(FLAGS\).*BIND_NOW|\(FLAGS_1\).*NOW", text):
        found.append("binds late")
    stack = re.search(r"GNU_STACK\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+([RWE ]+?)\s+0x", text)
    if stack is None or "E" in stack[1]:
        found.append("may have an executable stack")
    for flags in re.findall(r"LOAD\s+\S+\s+\S+\s+\S+\s+\S+\s+\S+\s+([RWE ]+?)\s+0x", text):
        if "W" in flags and "E" in flags:
            found.append("has a segment that can be written and run")
    return found


def main():
    bad = 0
    for file in sys.argv[1:]:
        text = subprocess.run(["readelf", "-hldW", file], capture_output=True, text=True,
                              check=True).stdout
        for fault in faults(text):
            bad += 1
            print(f"{file} {fault}")
    print(f"{len(sys.argv) - 1} files, {bad} faults")
    return 1 if bad or len(sys.argv) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
