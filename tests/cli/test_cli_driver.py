# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that is missing, too old or of no use: what the commands say of it, and how they
end.

usage: test_cli_driver.py PKV FOLDER_OF_USELESS_DRIVER   (see tests/host_cuda/useless_driver.c)
"""
import os
import subprocess
import sys
import tempfile
import unittest

PKV, FOLDER = sys.argv[1:3]
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "tiny_folders",
                    "llama3.gguf")
CASES = (({"USELESS_VERSION": "11040"}, "the driver is for CUDA 11.4, older than this build's "),
         ({"USELESS_VERSION": "0"}, "there is no CUDA driver (libcuda.so.1) here"),
         ({"USELESS_ERROR": "100"}, "the driver sees no CUDA device (CUDA_VISIBLE_DEVICES may "),
         ({"USELESS_ERROR": "3"}, "cudaErrorInitializationError"),
         ({"USELESS_ERROR": "803"}, "cudaErrorSystemDriverMismatch"),
         ({"USELESS_ERROR": "999"}, "cudaErrorUnknown"))


def run(*args, folder=FOLDER, **env):
    env = dict(os.environ, LD_LIBRARY_PATH=folder, **env)
    done = subprocess.run([PKV, *args], capture_output=True, timeout=120, check=False, env=env,
                          stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Driver(unittest.TestCase):
    def test_refused(self):
        """Whoever asks for the device is told why there is none, and gets nothing else."""
        for env, words in CASES:
            for args in (["bench", "model", "--model", TINY, "--device", "cuda"],
                         ["serve", TINY, "--device", "cuda", "--port", "0"],
                         ["bench", "attention", "--device", "cuda"]):
                with self.subTest(env=env, command=args[0]):
                    code, out, err = run(*args, **env)
                    self.assertIn("cudaGetDeviceCount: " + words, err)
                    self.assertEqual(code, 1, err)
                    self.assertNotRegex(out, r"\d (us|ms|s|tokens/s)\b")  # no figure

    def test_doctor(self):
        """It says so and goes on: a machine without a device is a machine."""
        for env, words in CASES:
            code, out, err = run("doctor", **env)
            self.assertEqual((code, err), (0, ""))
            self.assertIn(words, out)

    def test_damaged(self):
        """A library that is none."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "libcuda.so.1"), "wb") as file:
                file.write(b"\x7fELF and no more")
            code, out, err = run("serve", TINY, "--device", "cuda", "--port", "0", folder=folder)
            self.assertEqual((code, out), (1, ""), err)
            self.assertIn("cudaGetDeviceCount: ", err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
