# SPDX-License-Identifier: Apache-2.0
"""Adds up a ctest run: what each cmocka or unittest program reports, one for any other program.

    ctest_totals.py REPORT.xml      (ctest --output-junit, or pytest --junitxml)

Prints a line for each program with failures or skips, names what was skipped, and last
"PASSED FAILED SKIPPED".
"""

import re
import sys
import xml.etree.ElementTree as ET

_CMOCKA = {
    "passed": re.compile(r"\[  PASSED  \] (?:\S+: )?(\d+) test\(s\)"),
    "failed": re.compile(r"\[  FAILED  \] (?:\S+: )?(\d+) test\(s\)"),
    "skipped": re.compile(r"\[  SKIPPED \] (?:\S+: )?(\d+) test\(s\)"),
}
_SKIPPED_NAME = re.compile(r"^\[  SKIPPED \] (\w+)$", re.M)


def _cmocka(output):
    """[passed, failed, skipped] summed over the program's groups, or None."""
    if not _CMOCKA["passed"].search(output):
        return None
    return [sum(map(int, _CMOCKA[k].findall(output))) for k in ("passed", "failed", "skipped")]


def _unittest(output):
    ran = re.search(r"^Ran (\d+) tests? in", output, re.M)
    if not ran:
        return None
    last = output[ran.end() :]
    numbers = {k: int(n) for k, n in re.findall(r"(failures|errors|skipped)=(\d+)", last)}
    bad = numbers.get("failures", 0) + numbers.get("errors", 0)
    skipped = numbers.get("skipped", 0)
    return [int(ran[1]) - bad - skipped, bad, skipped]


def program_totals(status, output):
    """ctest's status (run, fail, notrun, disabled) and the program's own words -> three numbers."""
    totals = _cmocka(output) or _unittest(output)
    if status == "run":
        return totals or [1, 0, 0]
    if status != "fail":
        return [0, 0, 1]
    totals = totals or [0, 0, 0]
    if totals[1] == 0:  # it died after, or without, its closing lines
        totals[1] = 1
    return totals


def pytest_totals(root):
    """The three numbers of pytest's report; an expected failure counts as left out."""
    number = lambda suite, key: int(suite.get(key, "0"))
    total = [0, 0, 0]
    for suite in root.iter("testsuite"):
        bad = number(suite, "failures") + number(suite, "errors")
        skipped = number(suite, "skipped")
        ran = number(suite, "tests") - bad - skipped
        total = [a + b for a, b in zip(total, [ran, bad, skipped])]
    return total


def main():
    root = ET.parse(sys.argv[1]).getroot()
    if root.tag == "testsuites":
        print(*pytest_totals(root))
        return
    total = [0, 0, 0]
    for case in root.iter("testcase"):
        output = case.findtext("system-out") or ""
        counts = program_totals(case.get("status"), output)
        total = [a + b for a, b in zip(total, counts)]
        if counts[1] or counts[2]:
            print(f"{case.get('name')}: {counts[0]} ok, {counts[1]} bad, {counts[2]} left out")
        for name in sorted(set(_SKIPPED_NAME.findall(output))):
            print(f"  skip: {case.get('name')}: {name}")
    print(*total)


if __name__ == "__main__":
    main()
