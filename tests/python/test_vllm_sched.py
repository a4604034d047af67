# SPDX-License-Identifier: Apache-2.0
"""Our waiting queue and scheduler classes inside vLLM's own scheduler, on the CPU."""

import random

import pytest

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm")
from persistentkv.sched import Scheduler  # noqa: E402
from persistentkv.vllm.scheduler import (  # noqa: E402
    PersistentKVScheduler,
    PersistentKVSyncScheduler,
    settings,
)
from persistentkv.vllm.waiting_queue import WaitingQueue  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_sched_harness import BLOCK, make, request, run, step  # noqa: E402

CLASSES = [PersistentKVScheduler, PersistentKVSyncScheduler]
SHARING = ["tree", "cht", "lpm", "dfs-weight"]


def prompt(group, member, prefix=64):
    return [group + 1] * prefix + [100 + member] * 20


def groups(count=3, members=4, answer=3):
    """In turn one of each group."""
    return [
        request(f"{g}.{m}", prompt(g, m), answer=answer)
        for m in range(members)
        for g in range(count)
    ]


def waiting_queue(order="fcfs", by_priority=False, **options):
    sched = Scheduler(order, chunk_tokens=BLOCK, **options)
    return WaitingQueue(sched, BLOCK, 4096, by_priority)


def names(requests):
    return [r.request_id for r in requests]


# ---- the queue alone ----


def test_first_come_first_served():
    queue = waiting_queue()
    rs = [request(i, [i] * 40) for i in range(5)]
    assert not queue and len(queue) == 0
    for r in rs:
        queue.add_request(r)
    assert queue and len(queue) == 5 and list(queue) == rs and queue[1] is rs[1]
    assert queue.peek_request() is rs[0] and queue.pop_request() is rs[0]
    queue.remove_request(rs[2])
    queue.remove_requests([rs[3], rs[0], request("stranger", [1])])
    assert list(queue) == [rs[1], rs[4]] and rs[1] in queue and rs[0] not in queue
    with pytest.raises(ValueError, match="not in the waiting queue"):
        queue.remove_request(rs[2])
    assert [queue.pop_request(), queue.pop_request()] == [rs[1], rs[4]]
    for empty in (queue.pop_request, queue.peek_request):
        with pytest.raises(IndexError):
            empty()


@pytest.mark.parametrize("order", ["fcfs", *SHARING])
def test_what_is_put_back_goes_first(order):
    queue = waiting_queue(order)
    rs = [request(i, prompt(i % 2, i)) for i in range(6)]
    for r in rs:
        queue.add_request(r)
    popped = [queue.pop_request() for _ in range(3)]
    for r in popped:
        r.status = RequestStatus.RUNNING
    queue.begin_step(popped)
    queue.prepend_request(popped[2])
    queue.prepend_request(popped[1])
    assert len(queue) == 5 and list(queue)[:2] == popped[1:]
    assert queue.pop_request() is popped[1]
    queue.prepend_requests([popped[2], popped[1]])  # in reverse
    assert list(queue)[:2] == popped[1:]
    for r in popped[1:]:
        assert queue.pop_request() is r
    assert len(queue) == 3


def test_with_priorities_by_urgency_then_arrival_time():
    queue = waiting_queue("priority", by_priority=True)
    given = [("a", 1, 5.0), ("b", 0, 9.0), ("c", 1, 3.0), ("d", 0, 9.0), ("e", 1, 4.0)]
    rs = {n: request(n, [1] * 20, priority=p, arrival=t) for n, p, t in given}
    for r in rs.values():
        queue.add_request(r)
    assert names(queue) == ["b", "d", "c", "e", "a"]
    assert queue.pop_request() is rs["b"]
    rs["b"].status = RequestStatus.RUNNING
    queue.begin_step([rs["b"]])
    early = request("f", [1] * 20, priority=0, arrival=1.0)  # before one that runs
    queue.add_request(early)
    queue.prepend_request(rs["b"])
    assert names(queue) == ["f", "b", "d", "c", "e", "a"]
    assert [queue.pop_request().request_id for _ in range(6)] == list("fbdcea")


def test_priorities_out_of_the_librarys_range():
    queue = waiting_queue("priority", by_priority=True)
    for n, p in (("low", 1 << 40), ("mid", 0), ("high", -(1 << 40))):
        queue.add_request(request(n, [1] * 20, priority=p, arrival=1.0))
    assert names(queue) == ["high", "mid", "low"]
    many = waiting_queue("priority", by_priority=True)
    for p in range(1100):  # more different ones than the library has room for
        many.add_request(request(p, [1] * 20, priority=p, arrival=float(p)))
    assert len(many) == 1100
    assert [int(many.pop_request().request_id) for _ in range(1100)] == list(range(1100))


def counted(queue):
    """The queue, and a list that grows with every insertion into the library."""
    told, insert = [], queue.sched.insert
    queue.sched.insert = lambda id, **given: (told.append(id), insert(id, **given))[1]
    return told


def rank(r):
    return r.priority, r.arrival_time, r.request_id


ARRIVALS = {
    "in any order": lambda i, rng: rng.random(),
    "late by a little": lambda i, rng: i + 8 * rng.random(),
    "one clock ahead of the others": lambda i, rng: i + 1e6 * (i == 0),
    "the last first": lambda i, rng: -float(i),
}


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_whatever_the_arrival_times_a_request_is_inserted_once(arrival):
    """The head is asked for after each, as a step does."""
    queue = waiting_queue("priority", by_priority=True)
    told, rng = counted(queue), random.Random(3)
    rs = [
        request(i, [1] * 20, priority=rng.randint(0, 3), arrival=ARRIVALS[arrival](i, rng))
        for i in range(2000)
    ]
    least = rs[0]
    for r in rs:
        queue.add_request(r)
        least = min(least, r, key=rank)
        assert queue.peek_request() is least
    assert list(queue) == sorted(rs, key=rank)
    assert len(told) == len(rs)


@pytest.mark.parametrize("seed", range(4))
def test_with_priorities_as_a_sorted_list(seed):
    """Against a list: additions, pops that run or are put aside, returns, removals, ends."""
    queue = waiting_queue("priority", by_priority=True)
    rng, waits, runs, aside = random.Random(seed), [], [], []
    for i in range(1500):
        what = rng.random()
        if what < 0.45:
            r = request(i, [1] * 20, priority=rng.randint(0, 2), arrival=rng.random())
            queue.add_request(r)
            waits.append(r)
        elif what < 0.7 and waits:
            r = min(waits, key=rank)
            assert queue.pop_request() is r
            waits.remove(r)
            stays = rng.random() < 0.7
            r.status = RequestStatus.RUNNING if stays else RequestStatus.WAITING
            (runs if stays else aside).append(r)
        elif what < 0.85 and (runs or aside):
            of = rng.choice([of for of in (runs, aside) if of])
            r = of.pop(rng.randrange(len(of)))
            r.status = RequestStatus.PREEMPTED
            queue.prepend_request(r)
            waits.append(r)
        elif what < 0.9 and runs:
            queue.ended(runs.pop(rng.randrange(len(runs))))
        elif what < 0.95 and waits:
            queue.remove_request(waits.pop(rng.randrange(len(waits))))
        elif aside and rng.random() < 0.5:  # vLLM starts it from a queue of its own
            r = aside.pop()
            r.status = RequestStatus.RUNNING
            runs.append(r)
        if i % 3 == 0:
            queue.begin_step(runs)
        assert len(queue) == len(waits)
        assert not waits or queue.peek_request() is min(waits, key=rank)
    assert list(queue) == sorted(waits, key=rank)
    while waits:
        queue.remove_request(waits.pop())
    for r in runs + aside:
        queue.ended(r)
    assert len(queue.sched) == 0 and not queue._arrivals and not queue._entries


def test_late_requests_that_find_no_room():
    queue = waiting_queue("priority", by_priority=True, max_requests=4)
    for i, arrival in enumerate([5.0, 9.0, 4.0, 3.0, 2.0, 1.0]):
        queue.add_request(request(i, [1] * 20, arrival=arrival))
    assert len(queue) == 6 and queue.peek_request().request_id == "3"
    assert sorted(int(queue.pop_request().request_id) for _ in range(6)) == list(range(6))
    assert len(queue) == 0


def test_more_requests_than_the_library_holds():
    queue = waiting_queue("tree", max_requests=4)
    rs = [request(i, [1] * 40) for i in range(10)]
    for r in rs:
        queue.add_request(r)
    assert len(queue) == 10 and list(queue) == rs
    queue.remove_request(rs[7])
    seen = []
    while queue:
        r = queue.pop_request()
        seen.append(r)
        queue.ended(r)
    assert seen == rs[:7] + rs[8:]
    assert queue.sched.stats()["peak_used_bytes"] > 0 and len(queue.sched) == 0


def test_a_popped_request_that_does_not_run_is_no_part_of_the_batch():
    queue = waiting_queue("tree")
    odd, even = request("odd", prompt(1, 0)), request("even", prompt(2, 1))
    rs = [odd, even, request("x", prompt(1, 2)), request("y", prompt(2, 3))]
    for r in rs:
        queue.add_request(r)
    assert queue.pop_request() is odd  # and is put aside: its status stays WAITING
    assert queue.sched.stats()["active"] == 1
    assert queue.peek_request() is even
    assert queue.sched.stats()["active"] == 0 and len(queue) == 3
    queue.prepend_request(odd)
    assert len(queue) == 4 and queue.peek_request() is odd
    # One that vLLM starts from another queue of its own is noticed.
    assert queue.pop_request() is odd
    assert queue.peek_request() is even
    odd.status = RequestStatus.RUNNING
    queue.begin_step([odd])
    assert queue.sched.stats()["active"] == 1 and queue.peek_request().request_id == "x"


def test_a_stop_leaves_the_length_and_says_no():
    queue = waiting_queue("tree", policy="marginal", cost=lambda b: 1.0 if b.rows < 3 else 9.0)
    rs = [request(i, prompt(1, i)) for i in range(4)]
    for r in rs:
        queue.add_request(r)
    for _ in range(2):
        assert queue
        queue.pop_request().status = RequestStatus.RUNNING
    assert not queue and len(queue) == 2 and list(queue) == rs[2:]
    queue.prepend_request(rs[1])
    assert queue and queue.peek_request() is rs[1]  # preempted: not the policy's to refuse


# ---- vLLM's schedulers on it ----


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("order", SHARING)
def test_groups_are_admitted_together(cls, order, tmp_path):
    scheduler = make(cls, tmp_path, rows=4, sched={"order": order})
    rs = groups()
    for r in rs:
        scheduler.add_request(r)
    assert scheduler.get_request_counts() == (0, 12)
    first = step(scheduler)
    together = {n.split(".")[0] for n in first}
    # lpm and dfs-weight rank by what is covered when a pass begins: nothing at the first.
    assert len(first) == 4 and (len(together) == 1 or order in ("lpm", "dfs-weight"))
    order_of = first + run(scheduler)
    assert sorted(order_of) == sorted(names(rs))
    stats = scheduler.waiting.sched.stats()
    assert (stats["waiting"], stats["active"], stats["preempted"]) == (0, 0, 0)
    assert scheduler.get_request_counts() == (0, 0) and not scheduler.requests


@pytest.mark.parametrize("cls", CLASSES)
def test_fcfs_admits_as_vllms_own_scheduler(cls, tmp_path):
    stock = cls.__mro__[2]
    assert stock.__module__.startswith("vllm.")
    orders = []
    for one, sched in ((cls, {"order": "fcfs"}), (stock, None)):
        scheduler = make(one, tmp_path, rows=3, blocks=14, sched=sched)
        rng = random.Random(5)
        order = []
        for i in range(30):
            r = request(i, [i + 1] * rng.randint(20, 70), answer=rng.randint(1, 40))
            scheduler.add_request(r)
            if i % 3 == 0:
                order += step(scheduler)
            if i % 7 == 6:
                scheduler.finish_requests(str(i - 2), RequestStatus.FINISHED_ABORTED)
        orders.append(order + run(scheduler))
    assert orders[0] == orders[1]
    assert len(orders[0]) > len(set(orders[0]))  # some were preempted and came again


@pytest.mark.parametrize("cls", CLASSES)
def test_priority_admits_as_vllms_own_scheduler(cls, tmp_path):
    orders = []
    for one, sched in ((cls, {"order": "priority"}), (cls.__mro__[2], None)):
        scheduler = make(one, tmp_path, rows=3, blocks=14, policy="priority", sched=sched)
        rng = random.Random(6)
        order = []
        for i in range(40):
            tokens = [i + 1] * rng.randint(20, 70)
            urgency, when = rng.randint(0, 3), rng.random()
            scheduler.add_request(
                request(i, tokens, priority=urgency, arrival=when, answer=rng.randint(1, 40))
            )
            if i % 3 == 0:
                order += step(scheduler)
        orders.append(order + run(scheduler))
    assert orders[0] == orders[1]
    assert len(orders[0]) > len(set(orders[0]))


@pytest.mark.parametrize("policy", ["always", "static", "static-chain", "ucb", "q-learning"])
@pytest.mark.parametrize("order", ["tree", "cht"])
def test_every_policy_comes_to_an_end(order, policy, tmp_path):
    sched = {
        "order": order,
        "policy": policy,
        "static_new_tokens": 10,
        "bypass_limit": 4,
    }
    scheduler = make(PersistentKVScheduler, tmp_path, rows=6, blocks=40, sched=sched)
    rs = groups(4, 8, answer=12)
    for r in rs:
        scheduler.add_request(r)
    assert set(run(scheduler)) == set(names(rs))
    if policy in ("ucb", "q-learning"):
        assert scheduler.waiting.sched.stats()["rewards"] > 0


@pytest.mark.parametrize("policy, waits", [("static", 1), ("always", 0), ("late", 0)])
def test_a_policy_holds_a_stranger_back_for_some_time(policy, waits, tmp_path):
    sched = {"policy": "static", "static_new_tokens": 30}
    if policy == "always":
        sched["policy"] = "always"
    if policy == "late":
        sched["max_wait_s"] = 1e-9  # then it is not the policy's to refuse
    scheduler = make(PersistentKVScheduler, tmp_path, rows=16, sched=sched)
    sharers = [request(f"s{i}", prompt(1, i), answer=5) for i in range(12)]
    for r in [sharers[0], request("stranger", [500] * 200), *sharers[1:]]:
        scheduler.add_request(r)
    step(scheduler)
    assert scheduler.get_request_counts() == (13 - waits, waits)
    assert scheduler.get_num_unfinished_requests() == 13
    run(scheduler)


def test_the_cost_of_reading_again():
    from persistentkv.sched import Batch
    from persistentkv.vllm.scheduler import step_cost

    given = {"cost_base_us": 10.0, "cost_row_us": 1.0, "cost_token_us": 0.5}
    batch = Batch(rows=4, chain_tokens=100, total_tokens=520, unique_tokens=220, common_tokens=100)
    assert step_cost(given) is None
    cost = step_cost({**given, "reread_us": 0.5, "reread_l2_us": 0.1, "l2_tokens": 200})
    assert cost(batch) == pytest.approx((10 + 4 + 110 + 300 * 0.1) * 1e-6)
    cost = step_cost({**given, "reread_us": 0.5, "reread_l2_us": 0.1, "l2_tokens": 25})
    assert cost(batch) == pytest.approx((10 + 4 + 110 + 300 * (0.1 / 4 + 0.5 * 3 / 4)) * 1e-6)


def test_marginal_with_a_cost_of_its_own(tmp_path):
    sched = {
        "policy": "marginal",
        "reread_us": 0.03,
        "reread_l2_us": 0.02,
        "l2_tokens": 100,
    }
    scheduler = make(PersistentKVScheduler, tmp_path, rows=8, sched=sched)
    rs = groups(3, 6)
    for r in rs:
        scheduler.add_request(r)
    assert sorted(run(scheduler)) == sorted(names(rs))


def test_without_prefix_caching_the_order_is_by_age(tmp_path):
    scheduler = make(PersistentKVScheduler, tmp_path, rows=2, caching=False)
    rs = groups(2, 3)
    for r in rs:
        r.block_hashes.clear()  # as vLLM makes them then
        scheduler.add_request(r)
    assert run(scheduler) == names(rs)


def test_aborting_everything_leaves_nothing(tmp_path):
    scheduler = make(PersistentKVScheduler, tmp_path, rows=2)
    rs = groups(2, 4)
    for r in rs:
        scheduler.add_request(r)
    step(scheduler)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_request_counts() == (0, 0)
    assert len(scheduler.waiting.sched) == 0


def test_settings_from_environment_and_configuration(tmp_path):
    environment = {"PERSISTENTKV_VLLM_SCHED": "order=cht, policy=ucb,ucb_bonus=12.5,"}
    found = settings({"persistentkv_sched": {"policy": "static"}}, environment)
    assert (found["order"], found["policy"], found["ucb_bonus"]) == (
        "cht",
        "static",
        12.5,
    )
    assert settings({}, {})["order"] == "tree"
    for additional, variable in (
        ({"persistentkv_sched": {"chunk_tokens": 3}}, ""),
        ({"persistentkv_sched": "tree"}, ""),
        ({}, "order"),
        ({}, "ordre=tree"),
    ):
        with pytest.raises(ValueError):
            settings(additional, {"PERSISTENTKV_VLLM_SCHED": variable})
    for policy, order in (("priority", "fcfs"), ("fcfs", "priority")):
        with pytest.raises(ValueError, match="policy"):
            make(PersistentKVScheduler, tmp_path, policy=policy, sched={"order": order})


def test_the_learners_table_is_kept_and_a_damaged_one_is_not_used(tmp_path, caplog):
    path = tmp_path / "table"
    sched = {"order": "cht", "policy": "ucb", "learner": str(path)}
    scheduler = make(PersistentKVScheduler, tmp_path, sched=sched)
    for r in groups(2, 4):
        scheduler.add_request(r)
    run(scheduler)
    scheduler.shutdown()
    assert path.exists()
    make(PersistentKVScheduler, tmp_path, sched=sched)
    path.write_bytes(b"nonsense")
    make(PersistentKVScheduler, tmp_path, sched=sched)


def test_vllm_finds_the_class_by_its_name(tmp_path):
    from vllm.config import SchedulerConfig

    config = SchedulerConfig(
        max_model_len=100,
        is_encoder_decoder=False,
        scheduler_cls="persistentkv.vllm.scheduler.PersistentKVScheduler",
    )
    assert config.get_scheduler_cls() is PersistentKVScheduler
