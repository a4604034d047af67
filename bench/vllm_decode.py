#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM with and without libpkv's decode attention, on one GPU, with random weights.

    vllm_decode.py measure --backend stock --out R.jsonl --cells p10k:2,p2k:3,plain:3
    vllm_decode.py measure --backend ours  --out R.jsonl --cells p10k:3,p2k:3,plain:3
    vllm_decode.py measure --backend stock --turns T --turn 0/2 ... &
    vllm_decode.py measure --backend ours  --turns T --turn 1/2 ...       # interleaved
    vllm_decode.py compare R.jsonl [--csv FILE] [--plot FILE.svg] [--commit SHA]
    vllm_decode.py small --backend stock --out S.jsonl
    vllm_decode.py small --backend ours  --out S.jsonl --against S.jsonl
    vllm_decode.py pressure --out S.jsonl
    vllm_decode.py same S.jsonl [--names smoke,tokens,pressure]
    vllm_decode.py near 16BIT.jsonl FP8.jsonl
    vllm_decode.py overhead --out O.jsonl

Each result is appended to --out as one line of JSON at once: what a killed run measured is kept,
another run adds to it. bench/go_vllm.sh runs everything, each engine in a process with a time
limit.

measure: Llama-3-8B's shape. Cells, each with its number of repetitions: `plain`: milliseconds a
decode step of six batches; `p10k`, `p2k`: the shared-prefix workload of the Feather paper, 800
requests in 8 groups of 100, tokens a second, all in one batch; `p10k_groups`, `p2k_groups`: one
group at a time (homogeneous batches), another one each repetition; one of the plain six by name.
--seconds: no repetition is begun that would end later. --turns FILE --turn I/N: N engines side by
side on one GPU, all with the same cells, and only one of them measures at any moment, repetition by
repetition; FILE must not be there before. --label: another name for a backend with other settings,
`ours:noshare` say.
small: a small model with weights that tell tokens apart. First `smoke`: 32 rows on one prefix, and
with --against it ends there when they are not the other backend's; then `tokens`: greedy answers to
200 prompts on shared prefixes; for ours then 100 rows on one prefix for 1,000 steps, and `large`:
the answers that pressure compares with.
pressure: a cache so small that rows are preempted and admitted again: all answers come, and are
those of the large cache.
same: answers are equal, or at the first difference stock's log-probability of our token is within
0.1 of its best (bf16 arithmetic in another order).
near: how far answers with an fp8 cache lie from stock's with a 16-bit one: mean difference of the
log-probabilities of the best tokens, as long as the answers are the same.
overhead: planning and one layer from Python, waited for, beside the GPU's own time. Needs no vLLM.

A comparison in which libpkv served less than 99 % of the decode rows is void, and says so.
"""

import argparse
import csv
import glob
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

GROUPS, GROUP_ROWS = 8, 100
WORKLOADS = {"p10k": (10240, 32), "p2k": (2048, 32)}
PLAIN = {
    "b1_1k": [1024],
    "b1_16k": [16384],
    "b1_64k": [65000],
    "b8_bimodal": [32000, 800] * 4,
    "b32_2k": [2048] * 32,
    "b64_1k": [1024] * 64,
}
TIE = 0.1  # nats
NEEDED_SHARE = 0.99

LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
}


# --- models ------------------------------------------------------------------------------------


def model_folder(name, shape):
    folder = os.path.join(tempfile.gettempdir(), f"pkv-{name}")
    os.makedirs(folder, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": shape["vocab_size"] - 2,
        "eos_token_id": shape["vocab_size"] - 1,
        "hidden_act": "silu",
        "attention_bias": False,
        **shape,
    }
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    return folder


def write_weights(folder, shape):
    """Seeded weights whose logits spread over several nats, so that greedy answers mean much: a
    wrong attention moves them by nats. Below 4, where bf16 logits lie 0.016 apart: one step of
    rounding must not look like more than a tie."""
    import torch
    from safetensors.torch import save_file

    path = os.path.join(folder, "model.safetensors")
    if os.path.exists(path):
        return
    generator = torch.Generator().manual_seed(7)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]

    def normal(rows, columns, gain=1.0):
        scale = gain / columns**0.5
        return (torch.randn((rows, columns), generator=generator) * scale).bfloat16()

    tensors = {
        "model.embed_tokens.weight": normal(shape["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": normal(shape["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}"
        # Queries and keys strong enough that attention picks tokens out.
        tensors[f"{at}.self_attn.q_proj.weight"] = normal(q, hidden, 1.7)
        tensors[f"{at}.self_attn.k_proj.weight"] = normal(kv, hidden, 1.7)
        tensors[f"{at}.self_attn.v_proj.weight"] = normal(kv, hidden)
        tensors[f"{at}.self_attn.o_proj.weight"] = normal(hidden, q, 2.0)
        tensors[f"{at}.mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = normal(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})


def load(args, folder, **options):
    """(LLM, seconds)"""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.entrypoints.llm import LLM

    if args.backend == "ours":
        from persistentkv.vllm import backend_name

        options["attention_backend"] = backend_name()
    given = {
        "model": folder,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.88,
        "tensor_parallel_size": args.tensor_parallel,
        "seed": 0,
    }
    given.update(options)
    if args.kv_gib:  # not what is free: engines side by side would count each other's memory
        given["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
        given["gpu_memory_utilization"] = 0.1
    began = time.time()
    llm = LLM(**given)
    print(f"loaded in {time.time() - began:.0f} s", flush=True)
    return llm


def graphs(sizes):
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def environment(args):
    import torch
    import vllm

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = "?"
    return {
        "backend": args.backend,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0),
        "driver": driver.split("\n")[0].strip(),
    }


def counters_of_workers():
    """What the processes of several GPUs wrote of all they did, warming up included."""
    paths = glob.glob(os.environ.get("PERSISTENTKV_VLLM_COUNTERS", "/nonexistent") + ".*.json")
    found = [json.load(open(path, encoding="utf-8")) for path in paths]
    total = {"processes": len(found)}
    for key in ("steps", "shared_steps", "served_row_layers", "fallback_row_layers"):
        total[key] = sum(one[key] for one in found)
    of = total["served_row_layers"] + total["fallback_row_layers"]
    total["served_share"] = total["served_row_layers"] / of if of else 0.0
    return total


def counters(args, reset=False):
    """What libpkv served since the last reset; {} for stock."""
    if args.backend != "ours":
        return {}
    if args.tensor_parallel > 1:
        return counters_of_workers()
    from persistentkv.vllm import COUNTERS

    found = COUNTERS.snapshot()
    if reset:
        COUNTERS.reset()
    return found


def generate(llm, prompts, tokens, **options):
    """(seconds, outputs)"""
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )
    inputs = [{"prompt_token_ids": p} for p in prompts]
    began = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return time.perf_counter() - began, outputs


def record(args, what, **values):
    """Appends a line: what, where, values."""
    line = {"what": what, **args.facts, **values}
    with open(args.out, "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
    shown = {k: v for k, v in values.items() if k not in ("answers", "counters")}
    print(what, args.facts["backend"], shown, flush=True)


def records(paths, what):
    found = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            lines = [json.loads(line) for line in f if line.strip()]
        found += [line for line in lines if line["what"] == what]
    return found


# --- measure -----------------------------------------------------------------------------------


class Clock:
    """Whether another repetition fits, judged by the longest of its kind so far."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.longest = 0.0

    def repetitions(self, count, cell):
        self.longest = 0.0
        for i in range(count):
            if time.monotonic() + self.longest > self.end:
                print(f"{cell}: {i} of {count} repetitions, no time for more", flush=True)
                return
            began = time.monotonic()
            yield i
            self.longest = max(self.longest, time.monotonic() - began)


class Turns:
    """Engines that share a GPU measure one after the other: a file holds whose turn it is."""

    def __init__(self, path, turn):
        self.path = path
        at, _, of = turn.partition("/")
        self.at, self.of = int(at), int(of or 1)
        self.waits = 120.0  # for an engine that may have died

    def number(self):
        """-1: the file says something else, and nobody begins."""
        try:
            with open(self.path, encoding="utf-8") as f:
                text = f.read().strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() else -1

    def mine(self):
        """Also when the engines before this one have left."""
        number = self.number()
        if number < 0:
            return False
        while number % self.of != self.at and os.path.exists(f"{self.path}.left{number % self.of}"):
            number += 1
        return number % self.of == self.at

    def leave(self):
        """This engine measures nothing more: the others do not wait for it."""
        if self.path is not None:
            open(f"{self.path}.left{self.at}", "w", encoding="utf-8").close()

    def __enter__(self):
        if self.path is None:
            return
        began = time.monotonic()
        while not self.mine():
            if time.monotonic() - began > self.waits:
                print(f"turn {self.number()} does not end; on without turns")
                self.path = None
                return
            time.sleep(0.002)

    def __exit__(self, *_):
        if self.path is None:
            return
        with open(self.path + ".next", "w", encoding="utf-8") as f:
            number = self.number()
            f.write(str(number + (self.at - number) % self.of + 1))
        os.replace(self.path + ".next", self.path)


def plain_cell(args, llm, token, name, repetitions):
    steps = args.steps
    prompts = [[token() for _ in range(n)] for n in PLAIN[name]]
    if time.monotonic() > args.clock.end:
        return
    with args.turn:
        generate(llm, prompts, 1)  # fills the prefix cache
    for _ in args.clock.repetitions(repetitions, name):
        with args.turn:
            counters(args, reset=True)
            short, _ = generate(llm, prompts, 2)
            long, _ = generate(llm, prompts, steps + 2)
        ms = (long - short) / steps * 1e3
        record(args, "cell", cell=name, step_ms=ms, steps=steps, counters=counters(args))


class Workload:
    """800 requests on 8 prefixes; the prompts are in the prefix cache once made."""

    def __init__(self, llm, token, name):
        prefix_tokens, own_tokens = WORKLOADS[name]
        prefixes = [[token() for _ in range(prefix_tokens)] for _ in range(GROUPS)]
        requests = [
            (g, prefixes[g] + [token() for _ in range(own_tokens)])
            for g in range(GROUPS)
            for _ in range(GROUP_ROWS)
        ]
        random.Random(3).shuffle(requests)
        self.everything = [tokens for _, tokens in requests]
        self.groups = [[t for h, t in requests if h == g] for g in range(GROUPS)]
        generate(llm, [p + [token()] * 8 for p in prefixes], 1)
        generate(llm, self.everything, 1)

    @staticmethod
    def rate(llm, batch, tokens):
        """Decoded tokens a second; the first token of each row, with the rest of its prefill, is
        taken off."""
        first, _ = generate(llm, batch, 1)
        whole, _ = generate(llm, batch, tokens)
        return len(batch) * (tokens - 1) / (whole - first)


def workload(args, llm, made, cell, token, repetitions):
    name, _, groups = cell.partition("_")
    if name not in made:
        with args.turn:
            made[name] = Workload(llm, token, name)
    work = made[name]
    key, batches = "mixed_tps", [work.everything]
    if groups:
        key, batches = "homogeneous_tps", work.groups
    for i in args.clock.repetitions(repetitions, cell):
        batch = batches[i % len(batches)]
        with args.turn:
            counters(args, reset=True)
            rate = work.rate(llm, batch, args.tokens)
        values = {key: rate, "decode_tokens": args.tokens, "rows": len(batch)}
        record(args, "cell", cell=name, **values, counters=counters(args))


def measure(args):
    given = [cell.partition(":") for cell in args.cells.split(",")]
    cells = [(name, int(count or 3)) for name, _, count in given]
    for name, _ in cells:
        if name not in ("plain", *PLAIN) and name.removesuffix("_groups") not in WORKLOADS:
            raise SystemExit(f"--cells: {name} is not known")
    args.clock, args.turn = Clock(args.seconds), Turns(args.turns, args.turn)
    llm = load(
        args,
        model_folder("llama3-8b-shape", LLAMA3_8B),
        load_format="dummy",
        max_model_len=70000,
        max_num_seqs=800,
        max_num_batched_tokens=16384,
        compilation_config=graphs([1, 8, 32, 64, 100, 128, 256, 512, 800]),
    )
    args.facts = environment(args)
    if args.label:
        args.facts["backend"] = args.label
    token, made = random.Random(1), {}

    def draw():
        return token.randrange(1000, 120000)

    generate(llm, [[draw() for _ in range(64)]], 4)
    for name, repetitions in cells:
        if name == "plain":
            for one in PLAIN:
                plain_cell(args, llm, draw, one, repetitions)
        elif name in PLAIN:
            plain_cell(args, llm, draw, name, repetitions)
        else:
            workload(args, llm, made, name, draw, repetitions)
    args.turn.leave()
    return 0


# --- tokens ------------------------------------------------------------------------------------


def shared_prompts(count, seed, vocabulary=SMALL["vocab_size"]):
    """Prompts on a few prefixes of several lengths, some prefixes of prefixes."""
    rnd = random.Random(seed)

    def draw(n):
        return [rnd.randrange(vocabulary - 2) for _ in range(n)]

    trunk = draw(1000)
    prefixes = [trunk[:160], trunk[:160] + draw(333), trunk, draw(64), []]
    return [rnd.choice(prefixes) + draw(rnd.randrange(1, 200)) for _ in range(count)]


def small_model(args, **options):
    folder = model_folder("small", SMALL)
    write_weights(folder, SMALL)
    given = {
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.3,
        "compilation_config": graphs([1, 2, 4, 8, 16, 32, 64, 100, 128, 256]),
    }
    return load(args, folder, **{**given, **options})


def answers(args, llm, name, prompts, tokens):
    """Greedy answers as a line {name, answers: [{tokens, logprobs: [{token: value}]}]}."""
    counters(args, reset=True)
    seconds, outputs = generate(llm, prompts, tokens, logprobs=5)
    found = []
    for output in outputs:
        best = output.outputs[0]
        steps = [{int(k): round(v.logprob, 4) for k, v in step.items()} for step in best.logprobs]
        found.append({"tokens": list(best.token_ids), "logprobs": steps})
    count, seconds = len(found), round(seconds, 2)
    facts = {"name": name, "rows": count, "seconds": seconds, "counters": counters(args)}
    record(args, "answers", **facts, answers=found)
    return found


def small(args):
    llm = small_model(args, kv_cache_dtype=args.kv_cache_dtype)
    args.facts = {**environment(args), "kv_cache_dtype": args.kv_cache_dtype}
    generate(llm, [[5] * 40], 2)
    rnd = random.Random(4)
    prefix = [rnd.randrange(4000) for _ in range(2048)]
    rows = [prefix + [rnd.randrange(4000) for _ in range(9)] for _ in range(32)]
    generate(llm, [prefix + [1]], 1)  # the rows share its blocks from here on
    answers(args, llm, "smoke", rows, 16)
    if args.against and judge([args.against, args.out], "smoke"):
        return 1
    answers(args, llm, "tokens", shared_prompts(200, seed=11), 64)
    if args.backend == "ours":
        rows = [prefix[:160] + [rnd.randrange(4000) for _ in range(9)] for _ in range(100)]
        counters(args, reset=True)
        seconds, outputs = generate(llm, rows, 1000)
        steps = sum(len(o.outputs[0].token_ids) for o in outputs)
        values = {"tokens": steps, "seconds": seconds, "counters": counters(args)}
        record(args, "steps", rows=100, **values)
        answers(args, llm, "large", shared_prompts(100, seed=5), 200)
        if steps != 100000:
            return 1
    return 0


def pressure(args):
    # 100 rows of up to 1,400 tokens want some 4,000 blocks of 16 beside the shared ones.
    llm = small_model(args, num_gpu_blocks_override=600)
    args.facts = environment(args)
    found = answers(args, llm, "pressure", shared_prompts(100, seed=5), 200)
    return 0 if all(len(a["tokens"]) == 200 for a in found) else 1


def differences(stock, ours):
    """(equal answers, near ties, [texts of the others])"""
    equal, ties, wrong = 0, 0, []
    for i, (a, b) in enumerate(zip(stock, ours, strict=True)):
        if a["tokens"] == b["tokens"]:
            equal += 1
            continue
        if len(a["tokens"]) != len(b["tokens"]):
            wrong.append(f"prompt {i}: {len(a['tokens'])} tokens and {len(b['tokens'])}")
            continue
        both = zip(a["tokens"], b["tokens"], strict=True)
        at = next(n for n, pair in enumerate(both) if pair[0] != pair[1])
        known = {int(k): v for k, v in a["logprobs"][at].items()}
        gap = max(known.values()) - known.get(b["tokens"][at], -1e9)
        if gap <= TIE:
            ties += 1
        else:
            wrong.append(f"prompt {i}, token {at}: {gap:.3g} nats below stock's choice")
    return equal, ties, wrong


def judge(paths, name):
    """0 when ours are the other backend's answers by the rule; `pressure` is compared with the
    large cache of the same backend."""
    lines = records(dict.fromkeys(paths), "answers")
    ours = [a for a in lines if a["name"] == name and a["backend"] == "ours"]
    if name == "pressure":
        base = [a for a in lines if a["name"] == "large" and a["backend"] == "ours"]
    else:
        base = [a for a in lines if a["name"] == name and a["backend"] == "stock"]
    if not ours or not base:
        print(f"{name}: {len(ours)} runs of ours, {len(base)} to compare with")
        return 1
    equal, ties, wrong = differences(base[-1]["answers"], ours[-1]["answers"])
    counts = ours[-1]["counters"]
    share, shared = counts["served_share"], counts["shared_steps"]
    print(
        f"{name}: {equal} answers equal, {ties} part at a tie (<= {TIE} nats), "
        f"{len(wrong)} differ; libpkv served {100 * share:.2f} % of the decode rows, "
        f"{shared} of {counts['steps']} steps planned as a tree of prefixes"
    )
    # Rows on one prefix that were planned one by one would make what follows pointless.
    void = share < NEEDED_SHARE or (name == "smoke" and shared == 0)
    print("\n".join([*wrong[:5], *[f"VOID: {counts}"] * void]), flush=True)
    return 1 if wrong or void else 0


def same(args):
    return max(judge(args.files, name) for name in args.names.split(","))


def distance(base, others):
    """(mean, count) of differences of log-probabilities while the tokens so far are equal."""
    found = []
    for a, b in zip(base, others, strict=True):
        for i in range(1, len(a["tokens"])):  # the first token is prefill's
            if a["tokens"][:i] != b["tokens"][:i]:
                break
            here = {int(k): v for k, v in a["logprobs"][i].items()}
            there = {int(k): v for k, v in b["logprobs"][i].items()}
            found += [abs(here[k] - there[k]) for k in here.keys() & there.keys()]
    return (statistics.fmean(found) if found else 0.0), len(found)


def near(args):
    """1 when ours lie more than a tenth farther from the 16-bit cache's answers than stock's."""
    lines, far = records(args.files, "answers"), 0
    for name in ("smoke", "tokens"):
        last = {(a["backend"], a["kv_cache_dtype"] == "fp8"): a for a in lines if a["name"] == name}
        base, means = last["stock", False]["answers"], {}
        for backend in ("stock", "ours"):
            means[backend], count = distance(base, last[backend, True]["answers"])
            print(f"{name} {backend}: {means[backend]:.4f} nats over {count} log-probabilities")
        far |= means["ours"] > 1.1 * means["stock"]
    return int(far)


# --- compare -----------------------------------------------------------------------------------


def rows_of(cells):
    """[(cell, unit, stock, ours, gain, repetitions of both)]: gain > 1 is better; stock and gain
    are None where only ours ran."""
    out = []
    units = {
        "step_ms": "ms a step",
        "mixed_tps": "tokens/s, mixed",
        "homogeneous_tps": "tokens/s, homogeneous",
    }
    for cell in dict.fromkeys(line["cell"] for line in cells):
        for key, unit in units.items():
            of = [line for line in cells if line["cell"] == cell and key in line]
            stock = [line[key] for line in of if line["backend"] == "stock"]
            ours = [line[key] for line in of if line["backend"] == "ours"]
            if not ours:
                continue
            x, y = statistics.median(stock) if stock else None, statistics.median(ours)
            gain = None if x is None else x / y if key == "step_ms" else y / x
            raw = ";".join(
                f"{name}=" + " ".join(f"{value:.4f}" for value in values)
                for name, values in (("stock", stock), ("ours", ours))
            )
            out.append((cell, unit, x, y, gain, raw))
    return out


def shown(value, digits):
    return "" if value is None else f"{value:,.{digits}f}"


def compare(args):
    cells = records(args.files, "cell")
    ours = [line for line in cells if line["backend"] == "ours"]
    if not ours:
        print("nothing of ours to compare")
        return 1
    share = min(line["counters"]["served_share"] for line in ours)
    void = share < NEEDED_SHARE
    rows, facts = rows_of(cells), ours[-1]
    print(f"{facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}; medians")
    print("| cell | unit | stock | with libpkv | gain |\n" + "| --- " * 5 + "|")
    for cell, unit, x, y, gain, _ in rows:
        print(f"| {cell} | {unit} | {shown(x, 2)} | {shown(y, 2)} | {shown(gain, 2)} |")
    print(f"libpkv served at least {100 * share:.2f} % of the decode rows" + ": VOID" * void)
    if args.csv and not void:
        with open(args.csv, "w", newline="", encoding="utf-8") as f:
            out = csv.writer(f)
            head = "commit device driver vllm torch cell unit stock ours gain served_share raw"
            out.writerow(head.split())
            for cell, unit, x, y, gain, raw in rows:
                where = [args.commit, *(facts[k] for k in ("device", "driver", "vllm", "torch"))]
                figures = ["" if value is None else f"{value:.4f}" for value in (x, y, gain)]
                out.writerow([*where, cell, unit, *figures, share, raw])
    if args.plot and not void:
        plot(rows, facts, args.plot)
    return 1 if void else 0


def plot(rows, ours, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row[4] is not None]
    names = [f"{cell}\n{unit}" for cell, unit, *_ in rows]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.2))
    axes.barh(names, [row[4] for row in rows], color="#35618f")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"gain over stock vLLM {ours['vllm']} ({ours['device']})")
    for i, row in enumerate(rows):
        axes.text(row[4], i, f" {row[4]:.2f}", va="center")
    figure.tight_layout()
    figure.savefig(path)


# --- overhead ----------------------------------------------------------------------------------


def overhead(args):
    """Microseconds of a step that plans and runs one layer: called from Python and waited for, the
    two launches in a graph waited for, and what an empty wait costs."""
    import torch
    from persistentkv import default_executor
    from persistentkv.executor import current_stream
    from persistentkv.vllm.decode_plans import DecodePlans, LayerCall, PlanClass
    from persistentkv.vllm.engine_cache import c_cache

    from persistentkv import _abi  # isort: skip

    args.facts = {"backend": "ours", "device": torch.cuda.get_device_name(0)}
    os.environ["PERSISTENTKV_VLLM_SHARED"] = "0"
    plan_class = PlanClass(32, 8, 128, 16, 0, _abi.DTYPE_BF16)
    plans = DecodePlans(default_executor("cuda:0"), plan_class, 256, 8192)
    kv = torch.randn((4096, 2, 16, 8, 128), device="cuda").bfloat16()
    call = LayerCall(c_cache(kv, 8, 128), 0.088)
    for rows, length in ((1, 1024), (32, 2048), (256, 256)):
        pages = length // 16
        table = torch.randint(0, 4096, (rows, pages), dtype=torch.int32, device="cuda")
        lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        q = torch.randn((rows, 32, 128), device="cuda").bfloat16()
        out = torch.empty_like(q)

        def step():
            stream = current_stream(0)
            plans.build(rows, 1, lengths, table, stream)
            plans.attend(rows, 1, call.arguments(q, out, table), stream)

        def timed(work, count=300):
            found = []
            for i in range(count + 20):
                began = time.perf_counter()
                work()
                torch.cuda.synchronize()
                found.append((time.perf_counter() - began) * 1e6)
            return statistics.median(found[20:])

        step()
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            for _ in range(20):
                step()
        gpu = timed(graph.replay) / 20
        python, wait = timed(step), timed(lambda: None)
        values = {"python_us": python, "gpu_us": gpu, "wait_us": wait, "over_us": python - gpu}
        record(args, "overhead", rows=rows, length=length, **values)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("measure", "small", "pressure", "overhead"):
        verb = verbs.add_parser(name)
        verb.add_argument("--out", required=True, metavar="JSONL")
        verb.add_argument("--backend", choices=("stock", "ours"), default="ours")
        verb.add_argument("--tensor-parallel", type=int, default=1)
        verb.add_argument("--kv-gib", type=float, default=0.0, help="of the KV cache")
    verb = verbs.choices["measure"]
    verb.add_argument("--cells", default="p10k:3,p2k:3,plain:3,p10k_groups:3,p2k_groups:3")
    verb.add_argument("--tokens", type=int, default=256)
    verb.add_argument("--steps", type=int, default=256)
    verb.add_argument("--seconds", type=float, default=3600.0)
    verb.add_argument("--turns", metavar="FILE")
    verb.add_argument("--turn", default="0/1", metavar="I/N")
    verb.add_argument("--label")
    verbs.choices["small"].add_argument("--kv-cache-dtype", default="auto")
    verbs.choices["small"].add_argument("--against", metavar="JSONL")
    for name in ("compare", "same", "near"):
        verbs.add_parser(name).add_argument("files", nargs="+", metavar="JSONL")
    verbs.choices["same"].add_argument("--names", default="smoke,tokens,pressure")
    verbs.choices["compare"].add_argument("--csv")
    verbs.choices["compare"].add_argument("--plot")
    verbs.choices["compare"].add_argument("--commit", default="unknown")
    args = parser.parse_args()
    run = {
        "measure": measure,
        "small": small,
        "pressure": pressure,
        "overhead": overhead,
        "compare": compare,
        "same": same,
        "near": near,
    }
    try:
        code = run[args.verb](args) or 0
    except Exception:
        traceback.print_exc()
        names = ("VLLM_", "PERSISTENTKV_", "PKV_", "CUDA_", "NCCL_", "HF_", "PYTHONPATH", "TMPDIR")
        print({k: v for k, v in os.environ.items() if k.startswith(names)}, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if args.verb in ("measure", "small", "pressure") and args.tensor_parallel == 1:
        os._exit(code)  # an engine takes seconds to end, and everything is written
    return code


if __name__ == "__main__":
    sys.exit(main())
