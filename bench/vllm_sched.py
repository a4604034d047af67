#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM with the orders and stop policies of our scheduler, on one GPU, with random weights.

    vllm_sched.py run --backend stock --out sched.jsonl [--variants LIST] [--cells LIST] [--reps 3]
    vllm_sched.py run --backend ours  --out sched.jsonl
    vllm_sched.py run --backend stock --scheduler stock --variants vllm --out sched.jsonl
    vllm_sched.py table sched.jsonl [--csv FILE] [--commit SHA]

Which of the two gives the gain: batches of one prefix, or attention that reads a prefix once?
Llama-3-8B's shape; 800 requests on 8 prefixes in random order, all given at once, at most 100 rows
a batch, so that the order decides which prefixes meet. The prompts are in the prefix cache before,
so a request's prefill is its last block.
    p10k, p2k       10,240 and 2,048 shared tokens and 32 of its own, every answer of 64 tokens
    p10k_r, p2k_r   answers of 1 to 200 tokens, the same ones for every variant

A run loads the model once and changes the order between measurements, variants in turn. Each
measurement is a line of the file at once; `run` leaves out those that the file has already, so a
run that was cut off goes on where it was. Numbers of --backend ours with served_share below 0.99
are void, and `table` says so. `--scheduler stock` is vLLM's own class, for the cost of ours.
"""

import argparse
import csv
import json
import os
import random
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import vllm_decode as decode  # noqa: E402

CLASS = "persistentkv.vllm.scheduler.PersistentKVScheduler"
BATCH, GROUPS, GROUP_ROWS, OWN, ANSWER = 100, 8, 100, 32, 64
CELLS = {"p10k": (10240, False), "p2k": (2048, False), "p10k_r": (10240, True)}
CELLS["p2k_r"] = (2048, True)
OLDEST = {"ageing": "oldest"}
# A token of Llama-3-8B's cache is 128 KB: 0.0283 us at 4.63 TB/s, 0.021 us from the L2 cache, which
# holds a layer's part of 14,600 tokens.
ONCE = {"cost_base_us": 5000, "cost_row_us": 8, "cost_token_us": 0.0283}
AGAIN = {**ONCE, "reread_us": 0.0283, "reread_l2_us": 0.021, "l2_tokens": 14600}
VARIANTS = {
    "fcfs": {"order": "fcfs"},
    "tree": {"order": "tree"},
    "tree-oldest": {"order": "tree", **OLDEST},
    "tree-marginal": {"order": "tree", "policy": "marginal", **OLDEST, **ONCE},
    "tree-marginal-reread": {"order": "tree", "policy": "marginal", **OLDEST, **AGAIN},
    "cht": {"order": "cht", **OLDEST},
    "cht-static": {"order": "cht", "policy": "static", **OLDEST},
    "cht-static-chain": {"order": "cht", "policy": "static-chain", **OLDEST},
    "cht-ucb": {"order": "cht", "policy": "ucb", **OLDEST},
    "cht-q-learning": {"order": "cht", "policy": "q-learning", **OLDEST},
    "lpm": {"order": "lpm", **OLDEST},
    "vllm": None,  # its own class
}


def load(args):
    folder = decode.model_folder("llama3-8b-shape", decode.LLAMA3_8B)
    options = {} if args.scheduler == "stock" else {"scheduler_cls": CLASS}
    llm = decode.load(
        args,
        folder,
        load_format="dummy",
        max_model_len=16384,
        max_num_seqs=BATCH,
        max_num_batched_tokens=8192,
        compilation_config=decode.graphs([1, 8, 32, 64, BATCH]),
        **options,
    )
    return llm, llm.llm_engine.engine_core.engine_core.scheduler


class Timed:
    """Adds up the time in the scheduler's own calls, and counts its steps."""

    def __init__(self, scheduler):
        self.seconds, self.steps, self.rows = 0.0, 0, 0
        inner = scheduler.schedule

        def schedule(*args, **kwargs):
            began = time.perf_counter()
            out = inner(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            self.steps += bool(out.num_scheduled_tokens)
            self.rows += len(out.num_scheduled_tokens)
            return out

        scheduler.schedule = schedule

    def reset(self):
        self.seconds, self.steps, self.rows = 0.0, 0, 0


def workload(prefix, ragged, answer=ANSWER, vocabulary=100000):
    """([prompt], [tokens of the answer]) of 800 requests in random order."""
    rng = random.Random(prefix)
    heads = [[rng.randrange(vocabulary) for _ in range(prefix)] for _ in range(GROUPS)]
    prompts = [
        heads[g] + [rng.randrange(vocabulary) for _ in range(OWN)]
        for g in range(GROUPS)
        for _ in range(GROUP_ROWS)
    ]
    rng.shuffle(prompts)
    answers = [rng.randint(1, 200) if ragged else answer for _ in prompts]
    return prompts, answers


def generate(llm, prompts, answers):
    """Seconds."""
    from vllm.sampling_params import SamplingParams

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in answers
    ]
    inputs = [{"prompt_token_ids": p} for p in prompts]
    began = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    spent = time.perf_counter() - began
    made = [len(o.outputs[0].token_ids) for o in outputs]
    if made != answers:
        raise RuntimeError(f"{sum(a != b for a, b in zip(made, answers))} answers are too short")
    return spent


def lines_of(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def key_of(line):
    return line["backend"], line["cell"], line["variant"], line["rep"]


def run(args):
    cells, variants = args.cells.split(","), args.variants.split(",")
    for name, known in ((cells, CELLS), (variants, VARIANTS)):
        unknown = [x for x in name if x not in known]
        if unknown:
            raise SystemExit(f"{unknown[0]} is none of {', '.join(known)}")
    if (args.scheduler == "stock") != (variants == ["vllm"]):
        raise SystemExit("the variant 'vllm' and --scheduler stock go together")
    done = {key_of(line) for line in lines_of(args.out)}
    wanted = [
        (cell, rep, variant)
        for cell in cells
        for rep in range(args.reps)
        for variant in variants
        if (args.backend, cell, variant, rep) not in done
    ]
    if not wanted:
        print("nothing left to measure")
        return 0
    llm, scheduler = load(args)
    timed, facts = Timed(scheduler), decode.environment(args)
    turn = decode.Turns(args.turns, args.turn)
    ends, longest, warm = time.monotonic() + args.seconds, 0.0, None
    for cell, rep, variant in wanted:
        if time.monotonic() + longest > ends:
            print(f"no time for {cell} {variant} {rep}; run again for the rest", flush=True)
            turn.leave()
            return 3
        prompts, answers = workload(*CELLS[cell], args.answer)
        if warm != cell:
            with turn:
                generate(llm, prompts, [1] * len(prompts))
            warm = cell
        if VARIANTS[variant] is not None:
            scheduler.use(VARIANTS[variant])
        timed.reset()
        decode.counters(args, reset=True)
        began = time.monotonic()
        with turn:
            seconds = generate(llm, prompts, answers)
        longest = max(longest, time.monotonic() - began)
        line = {
            "what": "sched",
            **facts,
            "cell": cell,
            "variant": variant,
            "rep": rep,
            "answer": args.answer,
            "seconds": seconds,
            "tokens_s": sum(answers) / seconds,
            "steps": timed.steps,
            "rows_step": timed.rows / max(1, timed.steps),
            "schedule_share": timed.seconds / seconds,
            "schedule_us_step": timed.seconds / max(1, timed.steps) * 1e6,
            "served_share": decode.counters(args).get("served_share"),
        }
        if VARIANTS[variant] is not None:
            line["sched"] = scheduler.waiting.sched.stats()
        with open(args.out, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        print(f"{cell} {args.backend} {variant} {rep}: {line['tokens_s']:.0f} tokens/s", flush=True)
    turn.leave()
    return 0


def table(args):
    found, void = {}, set()
    for line in lines_of(args.file):
        found.setdefault((line["cell"], line["backend"], line["variant"]), []).append(line)
        if line["backend"] == "ours" and (line["served_share"] or 0) < decode.NEEDED_SHARE:
            void.add((line["cell"], line["backend"], line["variant"]))
    rows = []
    print("| cell | attention | scheduling | tokens/s | of fcfs | rows a step | in schedule() |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for key, lines in sorted(found.items()):
        middle = {
            name: statistics.median(line[name] for line in lines)
            for name in ("tokens_s", "rows_step", "schedule_share", "schedule_us_step")
        }
        base = found.get((key[0], key[1], "fcfs"), [])
        gain = 0.0
        if base:
            gain = middle["tokens_s"] / statistics.median(line["tokens_s"] for line in base)
        note = " VOID" if key in void else ""
        print(
            f"| {' | '.join(key)}{note} | {middle['tokens_s']:.0f} | {gain:.2f} | "
            f"{middle['rows_step']:.1f} | {100 * middle['schedule_share']:.2f} % |"
        )
        first = lines[0]
        rows.append(
            [args.commit, first["device"], first["driver"], first["vllm"], *key, len(lines)]
            + [f"{middle['tokens_s']:.1f}", f"{gain:.3f}", f"{middle['rows_step']:.2f}"]
            + [f"{middle['schedule_share']:.5f}", f"{middle['schedule_us_step']:.1f}"]
            + [" ".join(f"{line['tokens_s']:.1f}" for line in lines)]
        )
    if args.csv and not void:
        with open(args.csv, "w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            head = "commit,device,driver,vllm,cell,attention,scheduling,count,tokens_s,of_fcfs,"
            head += "rows_step,schedule_share,schedule_us_step,raw"
            writer.writerow(head.split(","))
            f.write(f"# command: bench/vllm_sched.py table {args.file}\n")
            writer.writerows(rows)
    return 1 if void else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run")
    one.add_argument("--backend", choices=("stock", "ours"), required=True)
    one.add_argument("--scheduler", choices=("stock", "ours"), default="ours")
    one.add_argument("--out", required=True)
    one.add_argument("--cells", default="p10k,p10k_r,p2k")
    one.add_argument("--variants", default=",".join(v for v in VARIANTS if v != "vllm"))
    one.add_argument("--reps", type=int, default=3)
    one.add_argument("--seconds", type=float, default=1e9, help="end within so many")
    one.add_argument("--answer", type=int, default=ANSWER, help="tokens of p10k, p2k")
    one.add_argument("--turns", metavar="FILE", help="as vllm_decode.py's, with --turn")
    one.add_argument("--turn", default="0/1", metavar="I/N")
    one.add_argument("--tensor-parallel", type=int, default=1)
    one.add_argument("--kv-gib", type=float, default=0.0, help="of the KV cache")
    two = verbs.add_parser("table")
    two.add_argument("file")
    two.add_argument("--csv")
    two.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    return run(args) if args.verb == "run" else table(args)


if __name__ == "__main__":
    sys.exit(main())
