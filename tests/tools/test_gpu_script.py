# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_tests.sh with programs that are none: on a machine with a GPU a skipped test fails, and
so does FlashInfer's absence, however it shows."""

import os
import subprocess
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TESTS = r"""#!/bin/sh
case "$*" in
--probe) exit ${PROBE:-0} ;;
--list) echo router ;;
*) [ -z "$SEES" ] || echo "$LD_LIBRARY_PATH" >"$SEES"
   echo "[==========] Running 2 test(s)."
   echo "[  PASSED  ] ${PASSED:-2} test(s)."
   [ -z "$SKIPPED" ] || echo "[  SKIPPED ] $SKIPPED test(s), listed below:" ;;
esac
"""
PKV = r"""#!/bin/sh
case "$1" in
doctor) echo "gpu"; echo "  kernels  ready" ;;
*) echo "lengths            5  ${CHOSEN:-flashinfer}     26.8"; exit ${STATUS:-0} ;;
esac
"""


class Script(unittest.TestCase):
    def run_script(self, with_kernels=True, **env):
        with tempfile.TemporaryDirectory() as folder:
            bin_folder = os.path.join(folder, "tests")
            os.mkdir(bin_folder)
            for path, text in ((os.path.join(bin_folder, "gpu_tests"), TESTS),
                               (os.path.join(folder, "pkv"), PKV)):  # fmt: skip
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(path, 0o755)
            if with_kernels:
                with open(os.path.join(folder, "pkv_flashinfer.so"), "w", encoding="utf-8"):
                    pass
            done = subprocess.run(
                [os.path.join(ROOT, "tools/gpu_tests.sh"), "--bin", bin_folder, "--no-sanitizer",
                 "--log", os.path.join(folder, "log")],
                env={**os.environ, "LD_LIBRARY_PATH": "", **env}, capture_output=True, timeout=60,
                check=False)  # fmt: skip
            return done.returncode, done.stdout.decode()

    def test_all_there(self):
        code, out = self.run_script()
        self.assertEqual(code, 0, out)
        self.assertIn("flashinfer: runs as a route of the policy", out)
        self.assertIn("4 passed, 0 failed, ", out)

    def test_flashinfer_is_missing(self):
        for env in ({"CHOSEN": "balanced"}, {"STATUS": "1"}):
            code, out = self.run_script(**env)
            self.assertEqual(code, 1, out)
            self.assertIn("flashinfer is missing or does not run", out)
            self.assertIn("3 passed, 1 failed, ", out)

    def test_a_skipped_test_fails(self):
        code, out = self.run_script(PASSED="1", SKIPPED="1")
        self.assertEqual(code, 1, out)
        self.assertIn("1 skipped although there is a GPU", out)

    def test_kernels_of_a_build_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            sees = os.path.join(folder, "sees")
            for there in (True, False):
                self.run_script(with_kernels=there, SEES=sees)
                with open(sees, encoding="utf-8") as file:
                    self.assertEqual("tests/.." in file.read(), there)

    def test_no_device(self):
        code, out = self.run_script(PROBE="77")
        self.assertEqual(code, 0, out)
        self.assertIn("0 passed, 0 failed, 2 skipped", out)


if __name__ == "__main__":
    unittest.main()
