# SPDX-License-Identifier: Apache-2.0
"""The sum at the end of a test run counts what the programs say, and what they could not say."""

import os
import sys
import unittest
import xml.etree.ElementTree as ET

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
from ctest_totals import program_totals, pytest_totals

CMOCKA = """[==========] Running 4 test(s).
[       OK ] a
[  SKIPPED ] b
[==========] 4 test(s) run.
[       O[  PASSED  ] 2 test(s).
[  SKIPPED ] 1 test(s), listed below:
[  SKIPPED ] b

 1 SKIPPED TEST(S)
"""
CMOCKA_FAILED = "[  FAILED  ] 1 test(s), listed below:\n[  FAILED  ] c\n\n 1 FAILED TEST(S)\n"


class Totals(unittest.TestCase):
    def test_cmocka(self):
        self.assertEqual(program_totals("run", CMOCKA), [2, 0, 1])
        self.assertEqual(program_totals("fail", CMOCKA + CMOCKA_FAILED), [2, 1, 1])
        self.assertEqual(program_totals("run", CMOCKA + CMOCKA), [4, 0, 2])

    def test_unittest(self):
        self.assertEqual(program_totals("run", "....\nRan 4 tests in 0.1s\n\nOK\n"), [4, 0, 0])
        words = "Ran 9 tests in 0.1s\n\nFAILED (failures=2, errors=1, skipped=3)\n"
        self.assertEqual(program_totals("fail", words), [3, 3, 3])

    def test_other_programs_count_one(self):
        self.assertEqual(program_totals("run", "fine"), [1, 0, 0])
        self.assertEqual(program_totals("fail", "boom"), [0, 1, 0])
        self.assertEqual(program_totals("notrun", ""), [0, 0, 1])

    def test_a_crash_after_or_without_closing_lines_is_a_failure(self):
        self.assertEqual(program_totals("fail", CMOCKA), [2, 1, 1])
        self.assertEqual(program_totals("fail", "[ RUN      ] a\nSegmentation fault"), [0, 1, 0])

    def test_pytest_says_it_in_attributes(self):
        suite = '<testsuite errors="1" failures="2" skipped="3" tests="10"/>'
        root = ET.fromstring(f"<testsuites>{suite}</testsuites>")
        self.assertEqual(pytest_totals(root), [4, 3, 3])


if __name__ == "__main__":
    unittest.main()
