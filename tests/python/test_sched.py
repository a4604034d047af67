# SPDX-License-Identifier: Apache-2.0
"""The scheduler from Python: calls, states, orders, callbacks, and errors as exceptions."""

import gc
import os
import weakref

import numpy as np
import persistentkv as pkv
import pytest
from persistentkv import sched as binding


def drain(sched, budget=-1):
    """Ids in the order in which they are admitted."""
    out = []
    while (pick := sched.best(budget)).verdict == "add":
        sched.admit(pick.id)
        out.append(pick.id)
    return out


def grouped(rng, groups=3, members=4, prefix=256, tail=40):
    """{id: tokens}, ids in turn from each group: 0, 3, 6, ... are of group 0."""
    heads = [rng.integers(0, 1000, prefix, np.int32) for _ in range(groups)]
    return {
        m * groups + g: np.concatenate([heads[g], rng.integers(0, 1000, tail, np.int32)])
        for m in range(members)
        for g in range(groups)
    }


def test_names_are_the_librarys():
    for kind, names in (("order", binding.ORDERS), ("policy", binding.POLICIES)):
        name_of = pkv.lib.function(f"pkv_sched_{kind}_name")
        assert tuple(name_of(i).decode() for i in range(len(names))) == names
        assert name_of(len(names)) == b"?"


@pytest.mark.parametrize("order", ["tree", "cht", "lpm", "dfs-weight"])
def test_sharing_orders_take_a_groups_requests_together(order):
    sched = pkv.Scheduler(order, chunk_tokens=64, bypass_limit=-1)
    for i, tokens in grouped(np.random.default_rng(1)).items():
        sched.insert(i, tokens)
    sched.admit(0)
    groups = [i % 3 for i in drain(sched)]
    assert groups[:3] == [0] * 3
    if order in ("tree", "cht"):  # the others sort once, when nothing else is covered yet
        assert groups[3:] in ([1] * 4 + [2] * 4, [2] * 4 + [1] * 4)


def test_fcfs_and_priority():
    for order, wanted in (("fcfs", [1, 2, 3, 4]), ("priority", [4, 2, 1, 3])):
        sched = pkv.Scheduler(order)
        for i, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
            sched.insert(i, [i] * 10, priority=priority)
        assert drain(sched) == wanted


def test_hashes_give_the_order_of_tokens():
    prompts = grouped(np.random.default_rng(2))
    by_tokens, by_hashes = (pkv.Scheduler("tree", chunk_tokens=16) for _ in range(2))
    for i, tokens in prompts.items():
        by_tokens.insert(i, tokens)
        by_hashes.insert(i, hashes=pkv.digests(tokens, 16), prompt_tokens=len(tokens))
    assert drain(by_tokens) == drain(by_hashes)
    # No hashes: shared with nobody, so by age.
    alone = pkv.Scheduler("tree", chunk_tokens=16)
    for i, tokens in prompts.items():
        alone.insert(i, hashes=[], prompt_tokens=len(tokens))
    assert drain(alone) == sorted(prompts)


def test_digests_are_cumulative():
    tokens = np.arange(100, dtype=np.int32)
    one, other = pkv.digests(tokens, 16), pkv.digests(np.append(tokens[:40], tokens[:60]), 16)
    assert len(one) == 7 and one.dtype == np.uint64
    assert list(one[:2]) == list(other[:2]) and not np.any(one[2:] == other[2:])
    assert not np.array_equal(one, pkv.digests(tokens, 16, "tokenwise"))
    assert len(pkv.digests([], 16)) == 0
    with pytest.raises(pkv.InvalidArgument, match="chunk is 0"):
        pkv.digests(tokens, 0)


def test_states_from_insert_to_finish():
    sched = pkv.Scheduler("fcfs")
    assert sched.state(9) == "unknown" and sched.best().verdict == "empty"
    sched.insert(9, [1, 2, 3])
    sched.insert(10, [1, 2, 3])
    assert (sched.state(9), len(sched), 9 in sched) == ("waiting", 2, True)
    sched.admit(9)
    assert sched.state(9) == "active"
    sched.preempt(9)
    assert sched.state(9) == "preempted" and sched.best().id == 10
    sched.resume(9)
    assert sched.best().id == 9
    sched.admit(9)
    sched.finish(9)
    sched.cancel(10)
    assert (sched.state(9), sched.state(10), len(sched)) == ("unknown", "unknown", 0)
    stats = sched.stats()
    assert (stats["inserted"], stats["admitted"], stats["finished"]) == (2, 2, 1)
    assert stats["cancelled"] == 1 and sum(stats["by_reason"].values()) == 1  # of `best`


def test_a_pick_says_what_is_shared():
    sched = pkv.Scheduler("tree", chunk_tokens=16, page_tokens=16)
    prefix = list(range(64))
    sched.insert(1, prefix + [1] * 36)
    sched.insert(2, prefix + [2] * 36)
    sched.admit(1)
    pick = sched.best()
    assert (pick.id, pick.reason, pick.verdict) == (2, "order", "add")
    assert (pick.prompt_tokens, pick.shared_tokens, pick.new_tokens) == (100, 64, 36)
    assert (pick.new_pages, pick.chain_before, pick.chain_after) == (3, 7, 4)
    entries = {e.id: e for e in sched.snapshot()}
    assert (entries[1].state, entries[2].state) == ("active", "waiting")
    assert (entries[2].shared_tokens, entries[1].shared_tokens) == (64, 100)


def test_page_budget_and_ageing():
    sched = pkv.Scheduler("fcfs", page_tokens=16)
    sched.insert(1, [1] * 160)
    assert sched.best(9).verdict == "blocked" and sched.best(10).verdict == "add"
    # A stranger among sharers is passed over twice, then it is its turn.
    sched = pkv.Scheduler("tree", bypass_limit=2, chunk_tokens=16)
    for i in range(6):
        sched.insert(i, [7] * 64 + [i] * 16 if i != 1 else [3] * 80)
    assert drain(sched).index(1) == 3
    assert sched.stats()["by_reason"]["bypasses"] == 1


def test_cost_and_clock_are_called():
    seen, now = [], [5_000_000_000]

    def cost(batch):
        seen.append(batch)
        return 1.0 if batch.rows < 3 else 10.0  # a third row does not pay

    sched = pkv.Scheduler("tree", "marginal", cost=cost, clock=lambda: now[0], chunk_tokens=16)
    for i in range(4):
        sched.insert(i, [1] * 32 + [i] * 16)
    now[0] += 250
    assert sched.best().waited_ns == 250
    assert drain(sched) == [0, 1]
    assert sched.best().verdict == "stop"
    assert seen and all(isinstance(b, binding.Batch) for b in seen)
    assert max(b.rows for b in seen) == 3


def test_exceptions_of_callbacks_come_out():
    def cost(batch):
        raise KeyError("no such shape")

    sched = pkv.Scheduler("tree", "marginal", cost=cost, chunk_tokens=16)
    for i in range(3):
        sched.insert(i, [1] * 32 + [i] * 16)
    sched.admit(0)
    sched.admit(1)
    with pytest.raises(KeyError, match="no such shape"):
        sched.best()
    sched.admit(2)  # and it goes on


def test_refusals_are_exceptions_with_the_librarys_text():
    sched = pkv.Scheduler("tree", max_requests=2, max_prompt_tokens=100)
    sched.insert(1, [1])
    with pytest.raises(pkv.WrongState, match="request 1 is held already"):
        sched.insert(1, [1])
    with pytest.raises(pkv.WrongState, match="7"):
        sched.finish(7)
    with pytest.raises(pkv.OutOfRange, match="prompt_tokens is 101, at most 100"):
        sched.insert(2, [1] * 101)
    sched.insert(2, [1])
    with pytest.raises(pkv.OutOfRange, match="max_requests"):
        sched.insert(3, [1])
    assert len(sched) == 2
    for arguments in ({}, {"tokens": [1], "hashes": [1], "prompt_tokens": 1}, {"hashes": [1]}):
        with pytest.raises(pkv.InvalidArgument):
            sched.insert(5, **arguments)
    with pytest.raises(pkv.InvalidArgument, match="2\\^64"):
        sched.insert(1 << 64, [1])
    with pytest.raises(pkv.InvalidArgument, match="one dimension"):
        sched.insert(5, [[1]])
    with pytest.raises(pkv.InvalidArgument, match="page_budget"):
        sched.best(-2)


def test_options_are_checked():
    for arguments, text in (
        ({"order": "best"}, "order is 'best', known are tree"),
        ({"policy": "no"}, "known are always"),
        ({"ageing": "x"}, "known are each, oldest"),
        ({"chunk": 3}, "no option is called 'chunk'"),
        ({"chunk_tokens": 1 << 20}, "chunk_tokens"),
        ({"chunk_tokens": 1.5}, "chunk_tokens is 1.5"),
        ({"max_requests": 1 << 40}, "max_requests"),
        ({"max_wait_s": "long"}, "max_wait_s is 'long'"),
    ):
        with pytest.raises(pkv.InvalidArgument, match=text):
            pkv.Scheduler(**arguments)


def test_learners_tables(tmp_path):
    path = tmp_path / "table"
    teacher = pkv.Scheduler("cht", "ucb", chunk_tokens=16, seed=3)
    for i in range(40):
        teacher.insert(i, [i % 2] * 64 + [i] * 16)
    drain(teacher)
    teacher.reward(8, 0.01)
    teacher.save_learner(path)
    pupil = pkv.Scheduler("cht", "ucb", chunk_tokens=16)
    pupil.load_learner(path)
    again = tmp_path / "again"
    pupil.save_learner(again)
    assert again.read_bytes() == path.read_bytes()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(pkv.InvalidArgument):
        pupil.load_learner(path)
    with pytest.raises(pkv.NotSupported):
        pkv.Scheduler("cht", "always").save_learner(path)


def test_closed_forked_and_collected():
    sched = pkv.Scheduler()
    sched.insert(1, [1])
    child = os.fork()
    if child == 0:
        try:
            sched.best()
        except pkv.WrongState as e:
            os._exit(0 if "before a fork" in str(e) else 3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    with sched:
        pass
    with pytest.raises(pkv.WrongState, match="closed"):
        sched.best()
    sched.close()
    other = pkv.Scheduler("tree", "marginal", cost=lambda batch: 1.0)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_many_random_calls_keep_the_books():
    rng = np.random.default_rng(11)
    sched = pkv.Scheduler("tree", "marginal", chunk_tokens=16, bypass_limit=4)
    states, prompts = {}, grouped(rng, 5, 8)
    for step in range(3000):
        i = int(rng.integers(0, 40))
        state = states.get(i, "unknown")
        if state == "unknown":
            sched.insert(i, prompts[i])
            states[i] = "waiting"
        elif state == "waiting" and step % 2:
            pick = sched.best()
            assert states[pick.id] == "waiting"
            sched.admit(pick.id)
            states[pick.id] = "active"
        elif state == "active":
            if rng.integers(0, 2):
                sched.preempt(i)
                states[i] = "preempted"
            else:
                sched.finish(i)
                del states[i]
        elif state == "preempted":
            sched.resume(i)
            states[i] = "waiting"
        else:
            sched.cancel(i)
            del states[i]
        if step % 100 == 0:
            assert {e.id: e.state for e in sched.snapshot()} == states
    assert len(sched) == len(states)
