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
so a request's prefill is its last block. The clock starts when all are in the queue: hashing and
checking 800 prompts takes the host as long as half of what follows, and is the same for all.
    p10k, p2k       10,240 and 2,048 shared tokens and 32 of its own, every answer of 64 tokens
    p10k_r, p2k_r   answers of 1 to 200 tokens, the same ones for every variant

A run loads the model once and changes the order between measurements, variants in turn. Each
measurement is a line of the file at once; `run` leaves out those that the file has already, so a
run that was cut off goes on where it was. Every repetition begins with another variant. Learners
keep their table from one repetition to the next. Numbers of --backend ours with served_share below
0.99 are void, and `table` says so. `--scheduler stock` is vLLM's own class, for the cost of ours.

Of a measurement are kept: tokens a second, steps, rows and prefixes a step, tokens prefilled, the
median step with and without admissions, time in schedule() and in Python's collector.
"""

import argparse
import csv
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import vllm_decode as decode  # noqa: E402

CLASS = "persistentkv.vllm.scheduler.PersistentKVScheduler"
BATCH, GROUPS, GROUP_ROWS, OWN, ANSWER = 100, 8, 100, 32, 64
CELLS = {"p10k": (10240, False), "p2k": (2048, False), "p10k_r": (10240, True)}
CELLS["p2k_r"] = (2048, True)
OLDEST = {"ageing": "oldest"}
# A backlog of 800 in batches of 100: what bounds bypasses at 32 undoes every grouping (docs).
WAIT = {"bypass_limit": -1, "max_wait_s": 60.0}
LEARNERS = ("ucb", "q-learning")
# A token of Llama-3-8B's cache is 128 KB: 0.0283 us at 4.63 TB/s, 0.021 us from the L2 cache, which
# holds a layer's part of 14,600 tokens.
ONCE = {"cost_base_us": 5000, "cost_row_us": 8, "cost_token_us": 0.0283}
AGAIN = {**ONCE, "reread_us": 0.0283, "reread_l2_us": 0.021, "l2_tokens": 14600}
VARIANTS = {
    "fcfs": {"order": "fcfs"},
    "tree": {"order": "tree"},
    "tree-oldest": {"order": "tree", **OLDEST},
    "tree-wait": {"order": "tree", **WAIT},
    "tree-marginal": {"order": "tree", "policy": "marginal", **WAIT, **ONCE},
    "tree-marginal-reread": {"order": "tree", "policy": "marginal", **WAIT, **AGAIN},
    "cht": {"order": "cht", **WAIT},
    "cht-static": {"order": "cht", "policy": "static", **WAIT},
    "cht-static-chain": {"order": "cht", "policy": "static-chain", **WAIT},
    "cht-ucb": {"order": "cht", "policy": "ucb", **WAIT},
    "cht-q-learning": {"order": "cht", "policy": "q-learning", **WAIT},
    "lpm": {"order": "lpm", **WAIT},
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
    """Steps of the engine, from one call of schedule() to the next, and the time in those calls.

    One engine runs in this process, so that the calls follow each other without a gap.
    """

    def __init__(self, scheduler):
        self.scheduler, self.prefix_of = scheduler, {}
        self.reset({})
        inner = scheduler.schedule

        def schedule(*args, **kwargs):
            began = time.perf_counter()
            out = inner(*args, **kwargs)
            self.note(began, time.perf_counter(), out)
            return out

        scheduler.schedule = schedule

    def reset(self, prefix_of):
        """`prefix_of`: a request's number, as the engine names it, to the number of its prefix."""
        self.prefix_of, self.prefixes_now = prefix_of, 0
        self.began, self.joined = [], []
        self.seconds, self.steps, self.rows, self.prefixes, self.tokens = 0.0, 0, 0, 0, 0

    def note(self, began, ended, out):
        joined = bool(out.scheduled_new_reqs) or bool(out.scheduled_cached_reqs.resumed_req_ids)
        self.began.append(began)
        self.joined.append(joined)
        self.seconds += ended - began
        rows = len(out.num_scheduled_tokens)
        if rows == 0:
            return
        if joined or out.finished_req_ids:
            # The engine adds a suffix to the names that it was given.
            names = (name.partition("-")[0] for name in out.num_scheduled_tokens)
            self.prefixes_now = len({self.prefix_of.get(name) for name in names})
        self.steps += 1
        self.rows += rows
        self.prefixes += self.prefixes_now
        self.tokens += out.total_num_scheduled_tokens - rows

    def found(self, ended):
        """{name: value}; a step ends where the next begins."""
        ends = [*self.began[1:], ended]
        spent = [b - a for a, b in zip(self.began, ends)]
        # What a step asked for is waited for in the next call but one: both count as its.
        near = [self.joined[i] or self.joined[i - 1] for i in range(1, len(spent))]
        near = [*self.joined[:1], *near]
        plain = [s for s, n in zip(spent, near) if not n]
        return {
            "steps": self.steps,
            "rows_step": self.rows / max(1, self.steps),
            "prefixes_step": self.prefixes / max(1, self.steps),
            "prefill_tokens": self.tokens,
            "decode_ms": statistics.median(plain or [0.0]) * 1e3,
            "admitting_s": sum(s for s, n in zip(spent, near) if n),
            "schedule_us_step": self.seconds / max(1, self.steps) * 1e6,
        }


class Collector:
    """Seconds in Python's collector while it is entered."""

    def __init__(self):
        self.seconds, self.since = 0.0, 0.0

    def _called(self, phase, _):
        if phase == "start":
            self.since = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self.since

    def __enter__(self):
        self.seconds = 0.0
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, *_):
        gc.callbacks.remove(self._called)


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


def give(llm, prompts, answers):
    """All of them into the queue: {name: number of its prefix}."""
    from vllm.sampling_params import SamplingParams

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in answers
    ]
    inputs = [{"prompt_token_ids": p} for p in prompts]
    names = llm.enqueue(inputs, sampling, use_tqdm=False)
    heads = {head: i for i, head in enumerate(sorted({tuple(p[:8]) for p in prompts}))}
    return {str(n).partition("-")[0]: heads[tuple(p[:8])] for n, p in zip(names, prompts)}


def serve(llm, answers):
    """Seconds until all that was given has its answer."""
    began = time.perf_counter()
    outputs = llm.wait_for_completion(use_tqdm=False)
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


def settings_of(variant, folder):
    """For the scheduler's use(); a learner's table lies in `folder`."""
    chosen = dict(VARIANTS[variant])
    if chosen.get("policy") in LEARNERS:
        chosen["learner"] = os.path.join(folder, variant)
    return chosen


def plan(args, cells, variants):
    """[(cell, repetition, variant)] that the file does not have yet."""
    done = {key_of(line) for line in lines_of(args.out)}
    wanted = []
    for cell in cells:
        for rep in range(args.reps):
            first = rep * len(variants) // args.reps
            turned = variants[first:] + variants[:first]
            wanted += [(cell, rep, v) for v in turned]
    return [w for w in wanted if (args.backend, w[0], w[2], w[1]) not in done]


def measure(args, llm, scheduler, timed, turn, cell, variant, folder):
    """{name: value} of one repetition; the turn is held from the first step on."""
    prompts, answers = workload(*CELLS[cell], args.answer)
    if VARIANTS[variant] is not None:
        scheduler.use(settings_of(variant, folder))
    began = time.perf_counter()
    with Collector() as collector:
        prefix_of = give(llm, prompts, answers)
    given = {"giving_s": time.perf_counter() - began, "giving_collector_s": collector.seconds}
    del prompts
    gc.collect()
    gc.freeze()
    with turn:
        timed.reset(prefix_of)
        decode.counters(args, reset=True)
        with collector:
            seconds = serve(llm, answers)
        found = given | timed.found(time.perf_counter())
    gc.unfreeze()
    found["seconds"], found["tokens_s"] = seconds, sum(answers) / seconds
    found["schedule_share"] = timed.seconds / seconds
    found["collector_s"] = collector.seconds
    found["served_share"] = decode.counters(args).get("served_share")
    if VARIANTS[variant] is not None:
        sched = scheduler.waiting.sched
        found["sched"] = sched.stats()
        if VARIANTS[variant].get("policy") in LEARNERS:
            sched.save_learner(os.path.join(folder, variant))
    return found


def run(args):
    cells, variants = args.cells.split(","), args.variants.split(",")
    for name, known in ((cells, CELLS), (variants, VARIANTS)):
        unknown = [x for x in name if x not in known]
        if unknown:
            raise SystemExit(f"{unknown[0]} is none of {', '.join(known)}")
    if (args.scheduler == "stock") != (variants == ["vllm"]):
        raise SystemExit("the variant 'vllm' and --scheduler stock go together")
    wanted = plan(args, cells, variants)
    if not wanted:
        print("nothing left to measure")
        return 0
    llm, scheduler = load(args)
    timed, facts = Timed(scheduler), decode.environment(args)
    turn = decode.Turns(args.turns, args.turn)
    ends, longest, warm = time.monotonic() + args.seconds, 0.0, None
    folder = tempfile.mkdtemp()
    for cell, rep, variant in wanted:
        if time.monotonic() + longest > ends:
            print(f"no time for {cell} {variant} {rep}; run again for the rest", flush=True)
            turn.leave()
            return 3
        if warm != cell:
            prompts, answers = workload(*CELLS[cell], 1)
            ones = [1] * len(answers)
            with turn:
                give(llm, prompts, ones)
                serve(llm, ones)
            warm = cell
        began = time.monotonic()
        found = measure(args, llm, scheduler, timed, turn, cell, variant, folder)
        longest = max(longest, time.monotonic() - began)
        line = {"what": "sched", **facts, "cell": cell, "variant": variant, "rep": rep}
        line |= {"answer": args.answer, **found}
        with open(args.out, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        shown = ", ".join(f"{n} {line[n]:.4g}" for n in SHOWN)
        print(f"{cell} {args.backend} {variant} {rep}: {shown}", flush=True)
    turn.leave()
    return 0


SHOWN = ("tokens_s", "steps", "rows_step", "prefixes_step", "decode_ms", "admitting_s")
SHOWN += ("schedule_share", "collector_s")
MIDDLE = ("tokens_s", *SHOWN[1:-2], "prefill_tokens", "schedule_share", "schedule_us_step")


def table(args):
    found, void = {}, set()
    for line in lines_of(args.file):
        found.setdefault((line["cell"], line["backend"], line["variant"]), []).append(line)
        if line["backend"] == "ours" and (line["served_share"] or 0) < decode.NEEDED_SHARE:
            void.add((line["cell"], line["backend"], line["variant"]))
    rows = []
    heads = ["cell", "attention", "scheduling", "tokens/s (least to most)", "of fcfs"]
    heads += ["rows, prefixes a step", "ms a decode step", "s with admissions", "in schedule()"]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for key, lines in sorted(found.items()):
        middle = {name: statistics.median(line[name] for line in lines) for name in MIDDLE}
        rates = sorted(line["tokens_s"] for line in lines)
        base = found.get((key[0], key[1], "fcfs"), [])
        gain = 0.0
        if base:
            gain = middle["tokens_s"] / statistics.median(line["tokens_s"] for line in base)
        note = " VOID" if key in void else ""
        print(
            f"| {' | '.join(key)}{note} | {middle['tokens_s']:.0f} ({rates[0]:.0f} to "
            f"{rates[-1]:.0f}) | {gain:.2f} | {middle['rows_step']:.0f}, "
            f"{middle['prefixes_step']:.1f} | {middle['decode_ms']:.2f} | "
            f"{middle['admitting_s']:.2f} | {100 * middle['schedule_share']:.1f} % |"
        )
        first = lines[0]
        rows.append(
            [args.commit, first["device"], first["driver"], first["vllm"], *key, first["answer"]]
            + [len(lines), f"{gain:.3f}", f"{rates[0]:.1f}", f"{rates[-1]:.1f}"]
            + [f"{middle[name]:.5g}" for name in MIDDLE]
            + [" ".join(f"{line['tokens_s']:.1f}" for line in lines)]
            + [" ".join(f"{line['giving_s']:.2f}" for line in lines)]
        )
    if args.csv and not void:
        with open(args.csv, "w", encoding="utf-8", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            head = "commit device driver vllm cell attention scheduling answer count of_fcfs"
            head += " tokens_s_least tokens_s_most"
            writer.writerow([*head.split(), *MIDDLE, "raw", "raw_giving_s"])
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
