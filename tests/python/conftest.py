# SPDX-License-Identifier: Apache-2.0
"""Where the tests run: NumPy everywhere, torch on the CPU where it is, CUDA with -m gpu."""

import py_support
import pytest


def pytest_configure(config):
    if "markexpr" in dir(config.option) and not config.option.markexpr:
        config.option.markexpr = "not gpu and not full and not vllm"


KINDS = ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)]
if not py_support.missing("torch"):
    KINDS.insert(1, "torch")


@pytest.fixture(params=KINDS)
def kind(request):
    """What holds the arrays; without torch there is one skip for all (test_handles.py)."""
    reason = py_support.missing(request.param)
    if reason:
        pytest.skip(reason)
    return py_support.Kind(request.param)
