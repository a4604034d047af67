# SPDX-License-Identifier: Apache-2.0
"""bench/vllm_decode.py judges as it says: ties, differences, void comparisons."""

import importlib.util
import json
import os
import types

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture(scope="module")
def driver():
    path = os.path.join(ROOT, "bench", "vllm_decode.py")
    spec = importlib.util.spec_from_file_location("vllm_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(tokens, *steps):
    return {"tokens": tokens, "logprobs": [{str(k): v for k, v in s.items()} for s in steps]}


def test_ties_and_differences(driver):
    stock = [
        answer([1, 2], {1: -0.1}, {2: -0.2}),
        answer([1, 2], {1: -0.1}, {2: -1.0, 5: -1.05}),
        answer([1, 2], {1: -0.1}, {2: -1.0, 5: -1.5}),
        answer([1, 2], {1: -0.1}, {2: -1.0}),
    ]
    ours = [answer([1, 2]), answer([1, 5]), answer([1, 5]), answer([1, 9])]
    equal, ties, wrong = driver.differences(stock, ours)
    assert (equal, ties, len(wrong)) == (1, 1, 2)
    assert "prompt 2, token 1: 0.5" in wrong[0]


def results(share):
    facts = {"device": "d", "driver": "1", "vllm": "0.24.0", "torch": "2.11"}
    stock = {**facts, "cells": {"a": {"step_ms": [4, 5, 9]}, "b": {"mixed_tps": [10.0]}}}
    ours = {
        **facts,
        "cells": {"a": {"step_ms": [2.5, 2, 9]}, "b": {"mixed_tps": [50.0], "homogeneous_tps": []}},
        "counters": {"served_share": share},
    }
    return stock, ours


@pytest.mark.parametrize("share, verdict", [(0.995, 0), (0.98, 1)])
def test_comparison_of_medians_and_when_it_is_void(driver, tmp_path, capsys, share, verdict):
    paths = []
    for name, content in zip(("stock", "ours"), results(share), strict=True):
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text(json.dumps(content))
    table = str(tmp_path / "t.csv")
    args = types.SimpleNamespace(files=paths, csv=table, plot=None, commit="abc")
    assert driver.compare(args) == verdict
    said = capsys.readouterr().out
    assert "| a | ms a step | 5.00 | 2.50 | 2.00 |" in said
    assert "| b | tokens/s, mixed | 10.00 | 50.00 | 5.00 |" in said
    assert ("VOID" in said) == bool(verdict)
    assert os.path.exists(table) != bool(verdict)


def test_prompts_share_prefixes_and_are_seeded(driver):
    prompts = driver.shared_prompts(50, seed=1)
    assert prompts == driver.shared_prompts(50, seed=1)
    starts = [tuple(p[:160]) for p in prompts if len(p) > 200]
    assert len(set(starts)) < len(starts)
