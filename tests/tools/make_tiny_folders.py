#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, as folders and as GGUF files, and their expected logits.

    python3 tests/tools/make_tiny_folders.py                 writes tests/data/tiny_folders
    python3 tests/tools/make_tiny_folders.py --transformers  compares with that package instead

Needs numpy, safetensors and gguf (to write), or torch and transformers (to compare). The tests read
the files and need nothing. A case is a folder tests/data/tiny_folders/<case> (config.json, weights)
with expected.f32: the logits of every token of the sequence ids(case), computed here in float64 by
a plain reading of the family's definition, float32, little-endian, [TOKENS, VOCAB]. <case>.gguf is
the same model with GGUF's keys and names, qwen3-00001-of-00003.gguf and so on one in shards.

Weights are multiples of 1/64, norms of 1/128: exact in bf16, f16 and f32.
"""
import json
import os
import shutil
import sys

import numpy as np

VOCAB, TOKENS = 40, 24
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "tiny_folders")

BASE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# name: config, dtype, files
CASES = {
    "llama3": ({"model_type": "llama", "head_dim": 16, "rope_scaling": LLAMA3,
                "tie_word_embeddings": True}, "BF16", 2),
    "llama_linear": ({"model_type": "llama", "attention_bias": True, "head_dim": 8,
                      "rope_scaling": {"type": "linear", "factor": 4.0}}, "F16", 1),
    "llama_yarn": ({"model_type": "llama", "head_dim": 16, "rope_scaling": YARN}, "F32", 1),
    "mistral": ({"model_type": "mistral", "head_dim": 8, "sliding_window": 7,
                 "num_hidden_layers": 3}, "BF16", 1),
    "qwen2": ({"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1,
              "rope_theta": 1e6, "tie_word_embeddings": True,
               "use_sliding_window": False, "sliding_window": 8}, "BF16", 1),
    "qwen3": ({"model_type": "qwen3", "head_dim": 8, "attention_bias": False,
               "rope_theta": 1e6}, "BF16", 3),
    "gemma3": ({"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 4,
                "num_key_value_heads": 1, "sliding_window": 6, "query_pre_attn_scalar": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6,
                "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "tie_word_embeddings": True, "rms_norm_eps": 1e-6}, "BF16", 1),
}


def config_of(case):
    c = dict(BASE, **CASES[case][0])
    if c["model_type"] == "gemma3_text":
        del c["hidden_act"]
    return c


def rng_of(case):
    return np.random.default_rng(list(case.encode()))


def ids(case):
    """The sequence: also in tests/diff/test_tiny_folders.c."""
    n = sum(case.encode())
    return [(7 * i * i + 3 * i + n) % VOCAB for i in range(TOKENS)]


def weights(case):
    """Names as the family's folders have them; matrices are [outputs, inputs]."""
    c, rng, w = config_of(case), rng_of(case), {}
    dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    width, ffn = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    gemma = c["model_type"] == "gemma3_text"

    def matrix(n, k):
        return rng.integers(-64, 65, (n, k)) / 64.0

    def norm(n):
        return rng.integers(-32, 33, n) / 128.0 + (0.0 if gemma else 1.0)

    w["model.embed_tokens.weight"] = matrix(VOCAB, width)
    w["model.norm.weight"] = norm(width)
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = matrix(VOCAB, width)
    for i in range(c["num_hidden_layers"]):
        at = "model.layers.%d." % i
        sizes = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width),
                 "o_proj": (width, q)}
        for name, (n, k) in sizes.items():
            w[at + "self_attn." + name + ".weight"] = matrix(n, k)
            if c.get("attention_bias") or (c["model_type"] == "qwen2" and name != "o_proj"):
                w[at + "self_attn." + name + ".bias"] = rng.integers(-64, 65, n) / 64.0
        for name, (n, k) in {"gate_proj": (ffn, width), "up_proj": (ffn, width),
                             "down_proj": (width, ffn)}.items():
            w[at + "mlp." + name + ".weight"] = matrix(n, k)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            w[at + name + ".weight"] = norm(width)
        if gemma or c["model_type"] == "qwen3":
            w[at + "self_attn.q_norm.weight"] = norm(dim)
            w[at + "self_attn.k_norm.weight"] = norm(dim)
    return w


# ---- the reference -------------------------------------------------------------------------


def frequencies(dim, base, scaling):
    """Radians a token of each pair, and what the rotated pairs are multiplied by."""
    f = base ** (-np.arange(0, dim, 2) / dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "linear":
        return f / scaling["factor"], 1.0
    if kind == "llama3":
        wave = 2 * np.pi / f
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = np.clip((original / wave - low) / (high - low), 0, 1)
        return (1 - smooth) * f / scaling["factor"] + smooth * f, 1.0
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]

        def pair(turns):
            return dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))
        low, high = max(np.floor(pair(32)), 0), min(np.ceil(pair(1)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return f / scaling["factor"] * ramp + f * (1 - ramp), 0.1 * np.log(scaling["factor"]) + 1
    return f, 1.0


def rotate(x, f, length):
    """x [tokens, heads, dim]: element j turns with element j + dim / 2."""
    angle = np.arange(x.shape[0])[:, None] * f
    c, s = length * np.cos(angle)[:, None, :], length * np.sin(angle)[:, None, :]
    a, b = np.split(x, 2, axis=2)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=2)


def logits(case):
    c, w = config_of(case), weights(case)
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim", c["hidden_size"] // heads)
    gemma = c["model_type"] == "gemma3_text"
    scale = c["query_pre_attn_scalar"] ** -0.5 if gemma else dim ** -0.5
    t = TOKENS

    def rms(x, name):
        y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c["rms_norm_eps"])
        return y * (w[name] + (1.0 if gemma else 0.0))

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def act(x):
        if gemma:
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))
        return x / (1 + np.exp(-x))

    x = w["model.embed_tokens.weight"][ids(case)]
    if gemma:
        x = x * float(np.float32(np.sqrt(c["hidden_size"])))
    for i in range(c["num_hidden_layers"]):
        at = "model.layers.%d." % i
        types = c.get("layer_types")
        local = types[i] == "sliding_attention" if types else c["model_type"] == "mistral"
        f, length = frequencies(dim, c["rope_theta"], c.get("rope_scaling"))
        if gemma and local:
            f, length = frequencies(dim, c["rope_local_base_freq"], None)
        n = rms(x, at + "input_layernorm.weight")
        q, k, v = (linear(n, at + "self_attn.%s_proj" % s).reshape(t, -1, dim) for s in "qkv")
        if at + "self_attn.q_norm.weight" in w:
            q, k = rms(q, at + "self_attn.q_norm.weight"), rms(k, at + "self_attn.k_norm.weight")
        q, k = rotate(q, f, length), rotate(k, f, length)
        behind = np.arange(t)[:, None] - np.arange(t)[None, :]
        hidden = (behind < 0) | (behind >= (c["sliding_window"] if local else t))
        out = np.zeros_like(q)
        for h in range(heads):
            g = h * kv_heads // heads
            scores = np.where(hidden, -np.inf, q[:, h] @ k[:, g].T * scale)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h] = p / p.sum(axis=1, keepdims=True) @ v[:, g]
        y = linear(out.reshape(t, -1), at + "self_attn.o_proj")
        if gemma:
            x = x + rms(y, at + "post_attention_layernorm.weight")
            n = rms(x, at + "pre_feedforward_layernorm.weight")
        else:
            x = x + y
            n = rms(x, at + "post_attention_layernorm.weight")
        y = linear(act(linear(n, at + "mlp.gate_proj")) * linear(n, at + "mlp.up_proj"),
                   at + "mlp.down_proj")
        x = x + (rms(y, at + "post_feedforward_layernorm.weight") if gemma else y)
    head = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
    return rms(x, "model.norm.weight") @ w[head].T


# ---- folders -------------------------------------------------------------------------------


def raw(x, dtype):
    if dtype == "BF16":
        return (np.ascontiguousarray(x, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(x, {"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_folder(case):
    import safetensors
    _, dtype, files = CASES[case]
    path, w = os.path.join(ROOT, case), weights(case)
    os.makedirs(path)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config_of(case), f, indent=1)
        f.write("\n")
    full = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    names = sorted(w)
    weight_map = {}
    for i in range(files):
        name = "model.safetensors" if files == 1 else "model-%05d-of-%05d.safetensors" % (
            i + 1, files)
        data = {n: np.frombuffer(raw(w[n], dtype), np.uint8) for n in names[i::files]}
        part = {n: safetensors.TensorSpec(dtype=full, shape=list(w[n].shape),
                                          data_ptr=d.ctypes.data, data_len=d.size)
                for n, d in data.items()}
        weight_map.update({n: name for n in part})
        with open(os.path.join(path, name), "wb") as f:
            f.write(safetensors.serialize(part, metadata={"format": "pt"}))
    if files > 1:
        with open(os.path.join(path, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {"total_size": 0}, "weight_map": weight_map}, f, indent=0)
            f.write("\n")


# ---- GGUF ----------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm"}
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm",
               "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}


def adjacent(x, heads):
    """Rows of q or k so that pairs of a rotation lie side by side."""
    dim = x.shape[0] // heads
    order = np.arange(dim).reshape(2, dim // 2).T.reshape(-1)
    return x.reshape((heads, dim) + x.shape[1:])[:, order].reshape(x.shape)


def write_gguf(case, shards=False):
    import gguf
    c = config_of(case)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(c["model_type"], c["model_type"])
    dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    out = gguf.GGUFWriter(os.path.join(ROOT, case + ".gguf"), arch,
                          split_max_tensors=9 if shards else 0)
    out.add_block_count(c["num_hidden_layers"])
    out.add_embedding_length(c["hidden_size"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_context_length(c["max_position_embeddings"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv(c["num_key_value_heads"])
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    out.add_rope_freq_base(c["rope_theta"])
    out.add_string("tokenizer.ggml.model", "none")
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        out.add_string(arch + ".rope.scaling.type", kind)
        out.add_float32(arch + ".rope.scaling.factor", scaling["factor"])
    if kind == "yarn":
        out.add_uint32(arch + ".rope.scaling.original_context_length",
                       scaling["original_max_position_embeddings"])
    if kind == "llama3":
        plain, _ = frequencies(dim, c["rope_theta"], None)
        scaled, _ = frequencies(dim, c["rope_theta"], scaling)
        out.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    if c["model_type"] in ("mistral", "gemma3_text"):
        out.add_uint32(arch + ".attention.sliding_window", c["sliding_window"])
    gemma = arch == "gemma3"
    if gemma:
        out.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        out.add_float32("gemma3.attention.scale", c["query_pre_attn_scalar"] ** -0.5)
        out.add_float32("gemma3.rope.freq_base_swa", c["rope_local_base_freq"])
    for name, x in sorted(weights(case).items()):
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            number, stem = stem[len("model.layers."):].split(".", 1)
            layer = "blk." + number + "."
        if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = "num_attention_heads" if stem[10] == "q" else "num_key_value_heads"
            x = adjacent(x, c[heads])
        if gemma and "norm" in stem:
            x = x + 1.0
        stem = (gemma and GEMMA_NAMES.get(stem)) or GGUF_NAMES[stem]
        out.add_tensor(layer + stem + "." + kind,
                       x.astype(np.float32 if x.ndim == 1 else np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


# ---- the other reference -------------------------------------------------------------------


def compare():
    import torch
    import transformers
    worst = 0.0
    for case in CASES:
        path = os.path.join(ROOT, case)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            got = model(torch.tensor([ids(case)])).logits[0].numpy().astype(np.float64)
        want = logits(case)
        part = np.abs(got - want).max() / np.abs(want).max()
        worst = max(worst, part)
        print("%-14s largest difference %.3g of the largest logit %.3g" % (
            case, part, np.abs(want).max()))
    return 0 if worst < 1e-4 else 1


def main():
    if sys.argv[1:] == ["--transformers"]:
        return compare()
    shutil.rmtree(ROOT, ignore_errors=True)
    for case in CASES:
        write_folder(case)
        write_gguf(case)
        with open(os.path.join(ROOT, case, "expected.f32"), "wb") as f:
            f.write(logits(case).astype("<f4").tobytes())
    write_gguf("qwen3", shards=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
