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


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def cells(share):
    facts = {"what": "cell", "device": "d", "driver": "1", "vllm": "0.24.0", "torch": "2.11"}
    stock = [{**facts, "backend": "stock", "cell": "a", "step_ms": x} for x in (4, 5, 9)]
    stock.append({**facts, "backend": "stock", "cell": "b", "mixed_tps": 10.0})
    stock.append({**facts, "backend": "stock", "cell": "c", "mixed_tps": 1.0})
    facts.update(backend="ours", counters={"served_share": 1.0})
    ours = [{**facts, "cell": "a", "step_ms": x} for x in (2.5, 2, 9)]
    ours.append({**facts, "cell": "b", "mixed_tps": 50.0, "counters": {"served_share": share}})
    return [*stock, *ours]


@pytest.mark.parametrize("share, verdict", [(0.995, 0), (0.98, 1)])
def test_comparison_of_medians_and_when_it_is_void(driver, tmp_path, capsys, share, verdict):
    lines = cells(share)
    files = [write(tmp_path / "x", *lines[:5]), write(tmp_path / "y", *lines[5:])]
    table = str(tmp_path / "t.csv")
    args = types.SimpleNamespace(files=files, csv=table, plot=None, commit="abc")
    assert driver.compare(args) == verdict
    said = capsys.readouterr().out
    assert "| a | ms a step | 5.00 | 2.50 | 2.00 |" in said
    assert "| b | tokens/s, mixed | 10.00 | 50.00 | 5.00 |" in said
    assert ("VOID" in said) == bool(verdict) and "| c |" not in said
    assert os.path.exists(table) != bool(verdict)


@pytest.mark.parametrize(
    "name, base", [("smoke", "smoke"), ("tokens", "tokens"), ("pressure", "large")]
)
def test_answers_of_a_file_are_judged(driver, tmp_path, capsys, name, base):
    counts = {"served_share": 1.0, "shared_steps": 3, "steps": 4}
    backend = "ours" if name == "pressure" else "stock"
    good, bad = [answer([1], {1: -0.1})], [answer([2], {2: -0.1})]
    first = {"what": "answers", "backend": backend, "name": base, "answers": good}
    ours = {"what": "answers", "backend": "ours", "name": name, "answers": good, "counters": counts}
    path = write(tmp_path / "a", {"what": "cell"}, first)
    assert driver.judge([path], name) == 1
    path = write(tmp_path / "a", {"what": "cell"}, first, {**ours, "answers": bad}, ours)
    assert driver.judge([path, path], name) == 0
    path = write(tmp_path / "a", first, {**ours, "answers": bad})
    assert driver.judge([path], name) == 1
    path = write(tmp_path / "a", first, {**ours, "counters": {**counts, "served_share": 0.5}})
    assert driver.judge([path], name) == 1
    path = write(tmp_path / "a", first, {**ours, "counters": {**counts, "shared_steps": 0}})
    assert driver.judge([path], name) == int(name == "smoke")
    assert "3 of 4 steps planned" in capsys.readouterr().out


def test_repetitions_that_would_end_late_are_not_begun(driver, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    clock, begun = driver.Clock(25), []
    for i in clock.repetitions(5, "cell"):
        begun.append(i)
        now[0] += 10
    assert begun == [0, 1] and list(clock.repetitions(3, "next"))[:1] == [0]


def test_prompts_share_prefixes_and_are_seeded(driver):
    prompts = driver.shared_prompts(50, seed=1)
    assert prompts == driver.shared_prompts(50, seed=1)
    starts = [tuple(p[:160]) for p in prompts if len(p) > 200]
    assert len(set(starts)) < len(starts)


def test_distance_while_answers_are_the_same(driver):
    base = [answer([1, 2, 3], {1: 0.0}, {2: -1.0}, {3: -2.0})]
    ours = [answer([1, 4, 3], {1: -9.0}, {2: -1.5, 4: -1.0}, {3: -9.0})]
    assert driver.distance(base, ours) == (0.5, 1)
    assert driver.distance(base, base) == (0.0, 2)


def test_homogeneous_batches_are_one_group_each(driver, monkeypatch, tmp_path):
    """A second for the first token and one for each 10 others, whatever the batch."""
    batches = []

    def generate(llm, prompts, tokens, **options):
        batches.append((prompts, tokens))
        return 1.0 + (tokens - 1) / 10, None

    monkeypatch.setattr(driver, "generate", generate)
    monkeypatch.setattr(driver, "WORKLOADS", {"p": (20, 2)})
    out, token = str(tmp_path / "r"), iter(range(10**6))
    args = types.SimpleNamespace(backend="stock", tokens=101, out=out, facts={"backend": "stock"})
    args.clock, args.turn = driver.Clock(100), driver.Turns(None, "0/1")
    made = {}
    driver.workload(args, None, made, "p_groups", lambda: next(token), 3)
    driver.workload(args, None, made, "p", lambda: next(token), 1)
    lines = driver.records([out], "cell")
    assert [line["rows"] for line in lines] == [100, 100, 100, 800]
    assert [line.get("homogeneous_tps") for line in lines[:3]] == [pytest.approx(1000)] * 3
    assert lines[3]["mixed_tps"] == pytest.approx(8000) and lines[3]["cell"] == "p"
    groups = [{p[0] for p in prompts} for prompts, _ in batches[2:]]
    assert [len(g) for g in groups] == [1] * 6 + [8] * 2
    assert len({*groups[0], *groups[2], *groups[4]}) == 3


def test_engines_take_turns_until_one_has_left(driver, tmp_path):
    path = str(tmp_path / "turns")
    one, two = driver.Turns(path, "0/2"), driver.Turns(path, "1/2")
    order = []
    for engine, name in ((one, "a"), (two, "b"), (one, "a")):
        assert engine.mine()
        with engine:
            order.append(name)
        assert not engine.mine()
    assert two.mine() and order == ["a", "b", "a"]
    two.leave()
    for _ in range(3):
        assert one.mine()
        with one:
            pass
    three = driver.Turns(None, "0/1")
    with three:
        three.leave()
