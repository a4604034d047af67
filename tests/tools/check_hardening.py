# SPDX-License-Identifier: Apache-2.0
"""check_hardening.py [--optimised] FILE...: what our programs and libraries are, by their headers.

Position-independent, its address tables read-only after the start (RELRO and immediate binding), no
segment both writable and executable, no executable stack, stacks guarded; with --optimised also
copies checked (_FORTIFY_SOURCE), which needs an optimised build."""
import re
import subprocess
import sys


# The C library's checked forms: __memcpy_chk and its like, but for the stack's own.
CHECKED = re.compile(r" __(?!stack_chk)\w+_chk(@| |$)", re.M)


def faults(text, optimised):
    """What `readelf -hldW --dyn-syms` says against a file."""
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
    if "__stack_chk_fail" not in text:
        found.append("does not guard its stack")
    if optimised and not CHECKED.search(text):
        found.append("does not check its copies (_FORTIFY_SOURCE)")
    return found


def main():
    bad = 0
    optimised = sys.argv[1:2] == ["--optimised"]
    files = sys.argv[2 if optimised else 1:]
    for file in files:
        text = subprocess.run(["readelf", "-hldW", "--dyn-syms", file], capture_output=True,
                              text=True, check=True).stdout
        for fault in faults(text, optimised):
            bad += 1
            print(f"{file} {fault}")
    print(f"{len(files)} files, {bad} faults")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main())
