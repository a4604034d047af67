# SPDX-License-Identifier: Apache-2.0
"""The documents do not lie: C blocks compile, links and named files exist, verbs are known."""

import os
import re
import subprocess
import unittest

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../.."))


def documents():
    found = [f for f in os.listdir(ROOT) if f.endswith(".md")]
    for where, _, names in os.walk(os.path.join(ROOT, "docs")):
        found += [os.path.relpath(os.path.join(where, n), ROOT) for n in names if n.endswith(".md")]
    return sorted(found)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


class Docs(unittest.TestCase):
    def test_c_blocks_compile(self):
        blocks = re.findall(r"^```c\n(.*?)^```", read("README.md"), re.M | re.S)
        self.assertTrue(blocks)
        for block in blocks:
            command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
            command += ["-I", os.path.join(ROOT, "include"), "-x", "c", "-"]
            done = subprocess.run(command, input=block, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_links_lead_somewhere(self):
        for path in documents():
            folder = os.path.join(ROOT, os.path.dirname(path))
            for target in re.findall(r"\]\(([^)#:]+)\)", read(path)):
                with self.subTest(document=path, target=target):
                    self.assertTrue(os.path.exists(os.path.join(folder, target)))

    def test_named_files_exist(self):
        pattern = r"`((?:src|include|tools|tests|docs|cmake|bench)/[\w/.-]+\.\w+)`"
        for path in documents():
            for name in re.findall(pattern, read(path)):
                with self.subTest(document=path, name=name):
                    self.assertTrue(os.path.exists(os.path.join(ROOT, name)))

    def test_named_tests_exist(self):
        """`test_program/name` in a table of docs/robustness.md is test_name in that file."""
        files = {}
        for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
            for name in names:
                if name.startswith("test_") and name.endswith((".c", ".py")):
                    path = os.path.relpath(os.path.join(folder, name), ROOT)
                    files.setdefault(name.rsplit(".", 1)[0], []).append(path)
        named = re.findall(r"`(test_\w+)/(\w+)`", read("docs/robustness.md"))
        self.assertGreater(len(set(named)), 100)
        for program, name in sorted(set(named)):
            with self.subTest(program=program, name=name):
                found = [re.search(rf"(void|def) test_{name}\(", read(path))
                         for path in files.get(program, ())]
                self.assertTrue(any(found))

    def test_verbs_are_known(self):
        script = read("run")
        for path in documents():
            for verb in re.findall(r"\./run ([a-z][a-z-]*)", read(path)):
                with self.subTest(document=path, verb=verb):
                    self.assertRegex(script, rf"(?m)^  {verb}\b")


if __name__ == "__main__":
    unittest.main()
