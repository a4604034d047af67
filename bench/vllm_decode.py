#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM with and without libpkv's decode attention, on one GPU, with random weights.

    vllm_decode.py measure --backend stock --out stock.json [--cells plain,p10k,p2k] [--reps 3]
    vllm_decode.py measure --backend ours  --out ours.json
    vllm_decode.py compare stock.json ours.json [--csv FILE] [--plot FILE.svg] [--commit SHA]
    vllm_decode.py tokens --backend stock --out stock_tokens.json       (then ours, then:)
    vllm_decode.py same stock_tokens.json ours_tokens.json
    vllm_decode.py pressure --out pressure.json

measure: Llama-3-8B's shape; `plain`: milliseconds a decode step of six batches; `p10k`, `p2k`: the
shared-prefix workload of the Feather paper, 800 requests in 8 groups of 100, tokens a second, all
in one batch (mixed) and group after group (homogeneous).
tokens: a small model with weights that tell tokens apart; greedy answers to 200 prompts on shared
prefixes. same: equal, or at the first difference stock's log-probability of our token is within
0.1 of its best (bf16 arithmetic in another order).
pressure: 100 rows on one prefix for 1,000 steps; then a cache so small that rows are preempted and
admitted again: all answers come, and are those of the large cache by the same rule.

A comparison in which libpkv served less than 99 % of the decode rows is void, and says so.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

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
    "head_dim": 64,
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
    """Seeded weights whose logits spread over several nats, so that greedy answers mean much."""
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
        "lm_head.weight": normal(shape["vocab_size"], hidden, 3.0),
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
    began = time.time()
    llm = LLM(**{**given, **options})
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


def counters(args, reset=False):
    """What libpkv served since the last reset; {} for stock."""
    if args.backend != "ours":
        return {}
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


def save(path, result):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)


# --- measure -----------------------------------------------------------------------------------


def plain_cells(args, llm, token, result):
    steps = args.steps
    for name, lengths in PLAIN.items():
        prompts = [[token() for _ in range(n)] for n in lengths]
        generate(llm, prompts, 1)  # fills the prefix cache
        found = []
        for _ in range(args.reps):
            short, _ = generate(llm, prompts, 2)
            long, _ = generate(llm, prompts, steps + 2)
            found.append((long - short) / steps * 1e3)
        result["cells"][name] = {"step_ms": found}
        print(name, [round(x, 3) for x in found], flush=True)
        save(args.out, result)


def workload(args, llm, token, result, name):
    prefix_tokens, own_tokens = WORKLOADS[name]
    prefixes = [[token() for _ in range(prefix_tokens)] for _ in range(GROUPS)]
    requests = [
        (g, prefixes[g] + [token() for _ in range(own_tokens)])
        for g in range(GROUPS)
        for _ in range(GROUP_ROWS)
    ]
    random.Random(3).shuffle(requests)
    rows = len(requests)
    everything = [tokens for _, tokens in requests]
    generate(llm, [p + [token()] * 8 for p in prefixes], 1)
    generate(llm, everything, 1)  # prefixes and suffixes are cached from here on
    mixed, homogeneous = [], []
    for _ in range(args.reps):
        first, _ = generate(llm, everything, 1)
        whole, _ = generate(llm, everything, args.tokens)
        mixed.append(rows * (args.tokens - 1) / (whole - first))
        one = many = 0.0
        for g in range(GROUPS if args.homogeneous else 0):
            group = [tokens for h, tokens in requests if h == g]
            one += generate(llm, group, 1)[0]
            many += generate(llm, group, args.tokens)[0]
        if args.homogeneous:
            homogeneous.append(rows * (args.tokens - 1) / (many - one))
        cell = {"decode_tokens": args.tokens, "mixed_tps": mixed, "homogeneous_tps": homogeneous}
        result["cells"][name] = cell
        print(name, {k: v[-1:] if isinstance(v, list) else v for k, v in cell.items()}, flush=True)
        save(args.out, result)


def measure(args):
    llm = load(
        args,
        model_folder("llama3-8b-shape", LLAMA3_8B),
        load_format="dummy",
        max_model_len=70000,
        max_num_seqs=800,
        max_num_batched_tokens=16384,
        compilation_config=graphs([1, 8, 32, 64, 100, 128, 256, 512, 800]),
    )
    token = random.Random(1)

    def draw():
        return token.randrange(1000, 120000)

    generate(llm, [[draw() for _ in range(64)]], 4)
    counters(args, reset=True)
    result = {**environment(args), "cells": {}}
    for name in args.cells.split(","):
        if name == "plain":
            plain_cells(args, llm, draw, result)
        else:
            workload(args, llm, draw, result, name)
    result["counters"] = counters(args)
    save(args.out, result)


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


def answers(llm, prompts, tokens):
    """[[(token, its log-probability's distance from the best, {token: log-probability})]]"""
    _, outputs = generate(llm, prompts, tokens, logprobs=20)
    found = []
    for output in outputs:
        best = output.outputs[0]
        steps = [{int(k): v.logprob for k, v in step.items()} for step in best.logprobs]
        found.append({"tokens": list(best.token_ids), "logprobs": steps})
    return found


def tokens(args):
    llm = small_model(args, kv_cache_dtype=args.kv_cache_dtype)
    counters(args, reset=True)
    result = {**environment(args), "kv_cache_dtype": args.kv_cache_dtype}
    result["answers"] = answers(llm, shared_prompts(200, seed=11), 64)
    result["counters"] = counters(args)
    save(args.out, result)


def differences(stock, ours):
    """(equal answers, near ties, [texts of the others])"""
    equal, ties, wrong = 0, 0, []
    for i, (a, b) in enumerate(zip(stock, ours, strict=True)):
        if a["tokens"] == b["tokens"]:
            equal += 1
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


def same(args):
    stock, ours = (json.load(open(path, encoding="utf-8")) for path in args.files)
    equal, ties, wrong = differences(stock["answers"], ours["answers"])
    share = ours["counters"]["served_share"]
    print(f"{equal} answers equal, {ties} part at a tie (<= {TIE} nats), {len(wrong)} differ")
    print("\n".join(wrong[:10]))
    print(f"libpkv served {100 * share:.2f} % of the decode rows")
    return 1 if wrong or share < NEEDED_SHARE else 0


# --- pressure ----------------------------------------------------------------------------------


def pressure_part(args):
    """One engine a process: "large" has all the cache it likes, "small" a seventh of the need."""
    # 100 rows of up to 1,700 tokens want some 4,000 blocks of 16 beside the shared ones.
    options = {} if args.part == "large" else {"num_gpu_blocks_override": 600}
    llm = small_model(args, **options)
    counters(args, reset=True)
    result = {**environment(args), "steps": 0}
    prompts = shared_prompts(100, seed=5)
    if args.part == "large":
        rnd = random.Random(2)
        rows = [prompts[0][:160] + [rnd.randrange(4000) for _ in range(9)] for _ in range(100)]
        seconds, outputs = generate(llm, rows, 1000)
        result["steps"] = sum(len(o.outputs[0].token_ids) for o in outputs)
        print(f"100 rows on one prefix: {result['steps']} tokens in {seconds:.1f} s", flush=True)
    result["answers"] = answers(llm, prompts, 200)
    result["counters"] = counters(args)
    save(args.out, result)
    return 0


def pressure(args):
    if args.part:
        return pressure_part(args)
    parts = {}
    for part in ("large", "small"):
        path = f"{args.out}.{part}"
        words = [sys.executable, os.path.abspath(__file__), "pressure", "--part", part]
        subprocess.run([*words, "--backend", args.backend, "--out", path], check=True)
        with open(path, encoding="utf-8") as f:
            parts[part] = json.load(f)
    equal, ties, wrong = differences(parts["large"]["answers"], parts["small"]["answers"])
    steps = parts["large"]["steps"]
    result = {"steps": steps, "equal": equal, "ties": ties, "wrong": wrong}
    result["counters"] = {part: parts[part]["counters"] for part in parts}
    save(args.out, result)
    print(f"small cache: {equal} equal, {ties} at a tie, {len(wrong)} differ")
    complete = steps == 100000 and all(len(a["tokens"]) == 200 for a in parts["small"]["answers"])
    return 0 if complete and not wrong else 1


# --- compare -----------------------------------------------------------------------------------


def rows_of(stock, ours):
    """[(cell, unit, stock, ours, gain)]: gain > 1 is better."""
    out = []
    for cell, a in stock["cells"].items():
        b = ours["cells"].get(cell)
        if b is None:
            continue
        for key, unit in (
            ("step_ms", "ms a step"),
            ("mixed_tps", "tokens/s, mixed"),
            ("homogeneous_tps", "tokens/s, homogeneous"),
        ):
            if a.get(key) and b.get(key):
                x, y = statistics.median(a[key]), statistics.median(b[key])
                out.append((cell, unit, x, y, x / y if key == "step_ms" else y / x))
    return out


def compare(args):
    stock, ours = (json.load(open(path, encoding="utf-8")) for path in args.files)
    share = ours["counters"]["served_share"]
    void = share < NEEDED_SHARE
    rows = rows_of(stock, ours)
    print(f"{ours['device']}, vLLM {ours['vllm']}, torch {ours['torch']}; medians")
    print("| cell | unit | stock | with libpkv | gain |\n| --- | --- | --- | --- | --- |")
    for cell, unit, x, y, gain in rows:
        print(f"| {cell} | {unit} | {x:,.2f} | {y:,.2f} | {gain:.2f} |")
    print(f"libpkv served {100 * share:.2f} % of the decode rows" + (": VOID" if void else ""))
    if args.csv and not void:
        with open(args.csv, "w", newline="", encoding="utf-8") as f:
            out = csv.writer(f)
            head = "commit device driver vllm torch cell unit stock ours gain served_share"
            out.writerow(head.split())
            for cell, unit, x, y, gain in rows:
                facts = [args.commit, *(ours[k] for k in ("device", "driver", "vllm", "torch"))]
                out.writerow([*facts, cell, unit, f"{x:.4f}", f"{y:.4f}", f"{gain:.4f}", share])
    if args.plot and not void:
        plot(rows, ours, args.plot)
    return 1 if void else 0


def plot(rows, ours, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = [f"{cell}\n{unit}" for cell, unit, *_ in rows]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.2))
    axes.barh(names, [row[-1] for row in rows], color="#35618f")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"gain over stock vLLM {ours['vllm']} ({ours['device']})")
    for i, row in enumerate(rows):
        axes.text(row[-1], i, f" {row[-1]:.2f}", va="center")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("measure", "tokens", "pressure"):
        verb = verbs.add_parser(name)
        verb.add_argument("--out", required=True)
        verb.add_argument("--backend", choices=("stock", "ours"), default="ours")
    verbs.choices["measure"].add_argument("--cells", default="plain,p10k,p2k")
    verbs.choices["measure"].add_argument("--reps", type=int, default=3)
    verbs.choices["measure"].add_argument("--tokens", type=int, default=256)
    verbs.choices["measure"].add_argument("--steps", type=int, default=64)
    verbs.choices["measure"].add_argument(
        "--no-homogeneous", dest="homogeneous", action="store_false"
    )
    verbs.choices["tokens"].add_argument("--kv-cache-dtype", default="auto")
    verbs.choices["pressure"].add_argument("--part", choices=("large", "small"))
    for name in ("compare", "same"):
        verbs.add_parser(name).add_argument("files", nargs=2, metavar="JSON")
    verbs.choices["compare"].add_argument("--csv")
    verbs.choices["compare"].add_argument("--plot")
    verbs.choices["compare"].add_argument("--commit", default="unknown")
    args = parser.parse_args()
    run = {
        "measure": measure,
        "tokens": tokens,
        "pressure": pressure,
        "compare": compare,
        "same": same,
    }
    return run[args.verb](args) or 0


if __name__ == "__main__":
    sys.exit(main())
