# SPDX-License-Identifier: Apache-2.0
"""bench/vllm_sched.py on vLLM's scheduler and a model that answers at once: what it counts."""

import json
import os
import sys
import types

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import vllm_sched as driver  # noqa: E402
from vllm_sched_harness import make, request, step  # noqa: E402

from persistentkv.vllm.scheduler import PersistentKVScheduler  # noqa: E402  # isort: skip

pytestmark = pytest.mark.vllm


class Engine:
    """What the driver calls of vllm.LLM, on one of vLLM's schedulers."""

    def __init__(self, scheduler):
        self.scheduler, self.made, self.held = scheduler, 0, []

    def enqueue(self, inputs, sampling, use_tqdm):
        names = []
        for one, params in zip(inputs, sampling):
            names.append(f"{self.made}-random")
            self.made += 1
            made = request(names[-1], one["prompt_token_ids"], answer=params.max_tokens)
            self.scheduler.add_request(made)
            self.held.append(made)
        return names

    def wait_for_completion(self, use_tqdm):
        while self.scheduler.has_unfinished_requests():
            step(self.scheduler)
        held, self.held = self.held, []
        return [
            types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=r.output_token_ids)])
            for r in held
        ]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Of two repetitions: 24 requests on 3 prefixes, 8 rows a batch."""
    monkeypatch.setattr(driver, "GROUPS", 3)
    monkeypatch.setattr(driver, "GROUP_ROWS", 8)
    monkeypatch.setitem(driver.CELLS, "small", (160, False))
    scheduler = make(PersistentKVScheduler, tmp_path, rows=8, blocks=400)
    monkeypatch.setattr(driver, "load", lambda args: (Engine(scheduler), scheduler))
    facts = {"backend": "stock", "vllm": "0", "torch": "0", "device": "none", "driver": "0"}
    monkeypatch.setattr(driver.decode, "environment", lambda args: facts)
    out = str(tmp_path / "out.jsonl")
    names = "fcfs,tree-wait,cht-ucb"
    argv = ["x", "run", "--backend", "stock", "--out", out, "--cells", "small", "--reps", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--answer", "5", "--variants", names])
    assert driver.main() == 0
    with open(out, encoding="utf-8") as f:
        return [json.loads(line) for line in f], out


def test_counts_rows_prefixes_and_prefill(lines):
    found, _ = lines
    assert [line["variant"] for line in found[::3]] == ["fcfs", "tree-wait"]  # turned
    for line in found:
        assert line["rows_step"] == 8 and line["steps"] == 15
        assert line["prefill_tokens"] == 24 * 15  # the last block of each but its last token
        assert line["sched"]["finished"] == 24
        assert 0 < line["schedule_share"] < 1 and line["admitting_s"] < line["seconds"]
    prefixes = {line["variant"]: line["prefixes_step"] for line in found}
    assert prefixes["fcfs"] > 2 and prefixes["tree-wait"] == 1


def test_table_of_medians_and_ranges(lines, capsys, monkeypatch, tmp_path):
    found, out = lines
    table = str(tmp_path / "t.csv")
    monkeypatch.setattr(sys, "argv", ["x", "table", out, "--csv", table])
    assert driver.main() == 0
    rates = sorted(line["tokens_s"] for line in found if line["variant"] == "fcfs")
    assert f"({rates[0]:.0f} to {rates[1]:.0f})" in capsys.readouterr().out
    with open(table, encoding="utf-8") as f:
        assert sum("small" in line for line in f) == 3
