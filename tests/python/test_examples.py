# SPDX-License-Identifier: Apache-2.0
"""Every program in examples/python runs; 77 means that it lacks something here."""

import glob
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = sorted(glob.glob(os.path.join(ROOT, "examples", "python", "*.py")))


def test_there_are_examples():
    assert len(PROGRAMS) >= 3


@pytest.mark.parametrize("path", PROGRAMS, ids=os.path.basename)
def test_example(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
