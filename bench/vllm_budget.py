#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Should the waiting queue in vLLM be given the free blocks as a page budget? Counted on the CPU.

    PYTHONPATH=python:tests/python vllm_budget.py [--csv FILE]

Requests on 8 prefixes go through vLLM's own scheduler with our class, and a model that answers at
once. `none` is what the class does: no budget. `free`: the library may pick what fits into the free
blocks, prompt and whole answer. `prompt`: the same, but the answer counts for nothing. Counted are
steps, scheduled tokens (what is computed again included) and preemptions; seconds are those of a
cost: 5 ms a step, 8 us a row, 0.04 us a token of context and row, 40 us for 1,000 scheduled tokens.
"""

import argparse
import csv
import random
import sys
import tempfile

from persistentkv.vllm.scheduler import PersistentKVScheduler
from vllm_sched_harness import make, request, step

BLOCKS = {"roomy": 4000, "tight": 1200, "scarce": 500}
ORDERS = ("tree", "fcfs")


def requests_of(count, seed):
    rng = random.Random(seed)
    heads = [[rng.randrange(1000) for _ in range(rng.choice((160, 480, 960)))] for _ in range(8)]
    return [
        (heads[rng.randrange(8)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 200))],
         rng.randrange(1, 200))
        for _ in range(count)
    ]


def budgeted(scheduler, mode):
    """Makes the queue's questions carry a budget."""
    sched = scheduler.waiting.sched
    plain, insert, pool = sched.choice, sched.insert, scheduler.kv_cache_manager.block_pool

    def choice():
        return plain(pool.get_num_free_blocks())

    def inserted(id, **given):
        if mode == "prompt":
            given["output_tokens"] = 0
        insert(id, **given)

    if mode != "none":
        sched.choice, sched.insert = choice, inserted


def measure(order, blocks, mode, requests):
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make(
            PersistentKVScheduler, folder, rows=64, blocks=blocks, tokens=2048,
            sched={"order": order, "ageing": "oldest"},
        )
    budgeted(scheduler, mode)
    for i, (prompt, answer) in enumerate(requests):
        scheduler.add_request(request(i, prompt, answer=answer))
    steps = tokens = 0
    seconds = 0.0
    held = list(scheduler.requests.values())
    while scheduler.has_unfinished_requests():
        before = {r.request_id: r.num_computed_tokens for r in held}
        step(scheduler)
        rows = len(scheduler.running)
        now = sum(max(0, r.num_computed_tokens - before[r.request_id]) for r in held)
        context = sum(r.num_computed_tokens for r in scheduler.running)
        steps, tokens = steps + 1, tokens + now
        seconds += 5e-3 + 8e-6 * rows + 0.04e-6 * context + 40e-9 * now
        if steps > 100000:
            raise RuntimeError("it does not end")
    preempted = sum(r.num_preemptions for r in held)
    return steps, tokens, preempted, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv")
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    rows = [("order", "pool", "blocks", "budget", "steps", "tokens", "preemptions", "seconds")]
    given = requests_of(args.requests, seed=5)
    for order in ORDERS:
        for pool, blocks in BLOCKS.items():
            for mode in ("none", "free", "prompt"):
                found = measure(order, blocks, mode, given)
                rows.append((order, pool, blocks, mode, *found[:3], f"{found[3]:.3f}"))
                print(*rows[-1], flush=True)
    if args.csv:
        with open(args.csv, "w", encoding="utf-8", newline="") as f:
            f.write(f"# command: bench/vllm_budget.py --requests {args.requests}\n")
            csv.writer(f, lineterminator="\n").writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
