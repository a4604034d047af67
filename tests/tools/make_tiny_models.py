#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Expected logits of the tiny models of tests/support/tiny_llama.c, by a plain numpy llama.

    python3 tests/tools/make_tiny_models.py          writes tests/data/tiny_models.f32
    python3 tests/tools/make_tiny_models.py --check  computes them again and compares

Computed in float64. Needs numpy; the tests themselves read the file and need nothing. The file
holds, for seeds 0 .. 49 one after another, the logits of every token of the model's sequence:
float32, little-endian, [tokens, vocab].

How a model follows from its seed (all integers are unsigned, 64 bits, and wrap)
    mix(z)                 splitmix64's step and finaliser
    draw(seed, stream, i)  mix(mix(seed << 32 | stream) + i)
    pick(i, n)             draw(seed, 0, i) mod n: shapes (see Model), ids from i = 100, rope
                           factors from i = 1000
    tensors                numbered 1, 2, ... in the order of Model.weights: that is their stream;
                           a matrix whose rows are whole blocks takes type
                           draw(seed, stream, 2^40) mod 8 of TYPES, others mod 3
    float types            element i is ((draw(seed, stream, i) & 255) - 128) / 2^(6 + l), where
                           l = floor(log2 k) / 2: exact in all three
    quantised types        block b: scale 2^-e (1 + (draw(b * 8) & 1023) / 1024), e = 6 + l, 3 + l
                           or 2 + l (8, 5, 4 bits); minimum -8 or -16 times the scale (Q4_1,
                           Q5_1); the other bytes from draw(b * 8 + 1), ..., low byte first
    vectors                base + ((draw & 255) - 128) / 512, base 1 for norms and 0 for biases
"""
import os
import sys

import numpy as np

SEEDS = 50
MAX_TOKENS = 40
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
M64 = (1 << 64) - 1
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "tiny_models.f32")


def mix(z):
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M64
    return z ^ z >> 31


def draw(seed, stream, index):
    return mix((mix(seed << 32 | stream) + index) & M64)


def draws(seed, stream, count):
    """draw(seed, stream, 0 .. count - 1) as one array."""
    with np.errstate(over="ignore"):
        z = np.uint64(mix(seed << 32 | stream)) + np.arange(count, dtype=np.uint64)
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def quantised(kind, seed, stream, k, n):
    """Matrix [n, k] of a block type, dequantised."""
    blocks = n * k // 32
    words = draws(seed, stream, blocks * 8).reshape(blocks, 8)
    exponent = {"8": 6, "5": 3, "4": 2}[kind[1]] + (k.bit_length() - 1) // 2
    scale = 2.0 ** -exponent * (1 + (words[:, 0] & np.uint64(1023)).astype(np.float64) / 1024)
    raw = np.ascontiguousarray(words[:, 1:]).astype("<u8").view(np.uint8).reshape(blocks, 56)
    if kind == "Q8_0":
        return (raw[:, :32].view(np.int8) * scale[:, None]).reshape(n, k)
    high = 0
    if kind[1] == "5":
        bits = np.unpackbits(raw[:, :4], axis=1, bitorder="little")
        high, raw = bits * 16, raw[:, 4:]
    codes = np.concatenate([raw[:, :16] & 15, raw[:, :16] >> 4], axis=1) + high
    middle = 8 if kind[1] == "4" else 16
    return ((codes.astype(np.float64) - middle) * scale[:, None]).reshape(n, k)


class Model:
    def __init__(self, seed):
        self.seed, self.stream = seed, 1

        def pick(i, n):
            return draw(seed, 0, i) % n

        self.layers = 1 + pick(0, 3)
        self.head_dim = 8 * (1 + pick(1, 8))
        self.kv_heads = 1 + pick(2, 4)
        self.query_heads = self.kv_heads * (1 + pick(3, 8 // self.kv_heads))
        self.width = 32 * (1 + pick(4, 8))
        self.ffn = 32 * (1 + pick(5, 10))
        self.rope_dim = 2 * (1 + pick(6, self.head_dim // 2))
        if pick(7, 2):
            self.rope_dim = self.head_dim
        self.vocab = 16 + pick(8, 48)
        self.tied = pick(9, 2)
        self.biases = pick(10, 4) == 0
        self.rope_freqs = pick(11, 4) == 0
        self.rope_base = [1e4, 1e5, 5e5][pick(12, 3)]
        self.rope_factor = 4.0 if pick(13, 4) == 0 else 1.0
        self.eps = float(np.float32(1e-5 if pick(14, 2) else 1e-6))
        self.tokens = 1 + pick(15, MAX_TOKENS)
        self.ids = [pick(100 + i, self.vocab) for i in range(self.tokens)]
        half = self.rope_dim // 2
        self.factors = np.ones(half)
        if self.rope_freqs:
            self.factors = np.array([1 + pick(1000 + i, 8) / 4 for i in range(half)])
        self.weights()

    def matrix(self, k, n):
        stream, self.stream = self.stream, self.stream + 1
        r = draw(self.seed, stream, 1 << 40)
        kind = TYPES[r % 8 if k % 32 == 0 else r % 3]
        if kind[0] == "Q":
            return quantised(kind, self.seed, stream, k, n)
        whole = (draws(self.seed, stream, n * k) & np.uint64(255)).astype(np.float64) - 128
        return (whole / 2.0 ** (6 + (k.bit_length() - 1) // 2)).reshape(n, k)

    def vector(self, n, base):
        stream, self.stream = self.stream, self.stream + 1
        whole = (draws(self.seed, stream, n) & np.uint64(255)).astype(np.float64) - 128
        return base + whole / 512

    def weights(self):
        q, kv, w = self.query_heads * self.head_dim, self.kv_heads * self.head_dim, self.width
        self.embed = self.matrix(w, self.vocab)
        self.norm = self.vector(w, 1.0)
        self.output = self.embed if self.tied else self.matrix(w, self.vocab)
        self.blocks = []
        for _ in range(self.layers):
            b = {"attn_norm": self.vector(w, 1.0), "q": self.matrix(w, q),
                 "k": self.matrix(w, kv), "v": self.matrix(w, kv), "o": self.matrix(q, w),
                 "ffn_norm": self.vector(w, 1.0), "gate": self.matrix(w, self.ffn),
                 "up": self.matrix(w, self.ffn), "down": self.matrix(self.ffn, w)}
            sizes = {"q": q, "k": kv, "v": kv, "o": w}
            for name, n in sizes.items():
                b[name + "_bias"] = self.vector(n, 0.0) if self.biases else np.zeros(n)
            self.blocks.append(b)

    def rms(self, x, weight):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * weight

    def rope(self, x):
        """x [tokens, heads, head_dim]: pairs (2j, 2j + 1) of the first rope_dim elements turn."""
        half = self.rope_dim // 2
        frequency = self.rope_base ** (-2.0 * np.arange(half) / self.rope_dim)
        frequency = frequency / self.rope_factor / self.factors
        angle = np.arange(x.shape[0])[:, None] * frequency
        c, s = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
        out = x.copy()
        a, b = x[:, :, 0:self.rope_dim:2], x[:, :, 1:self.rope_dim:2]
        out[:, :, 0:self.rope_dim:2] = a * c - b * s
        out[:, :, 1:self.rope_dim:2] = b * c + a * s
        return out

    def attend(self, q, k, v):
        t, group = q.shape[0], self.query_heads // self.kv_heads
        out = np.zeros_like(q)
        for h in range(self.query_heads):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(self.head_dim)
            scores[np.triu_indices(t, 1)] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, h] = p / p.sum(axis=1, keepdims=True) @ v[:, h // group]
        return out

    def logits(self):
        t, x = self.tokens, self.embed[self.ids]
        for b in self.blocks:
            n = self.rms(x, b["attn_norm"])
            q, k, v = ((n @ b[i].T + b[i + "_bias"]).reshape(t, -1, self.head_dim) for i in "qkv")
            heads = self.attend(self.rope(q), self.rope(k), v).reshape(t, -1)
            x = x + heads @ b["o"].T + b["o_bias"]
            n = self.rms(x, b["ffn_norm"])
            gate = n @ b["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (n @ b["up"].T)) @ b["down"].T
        return self.rms(x, self.norm) @ self.output.T


def main():
    data = b"".join(Model(seed).logits().astype("<f4").tobytes() for seed in range(SEEDS))
    if sys.argv[1:] == ["--check"]:
        with open(PATH, "rb") as f:
            kept = np.frombuffer(f.read(), "<f4")
        worst = np.abs(kept - np.frombuffer(data, "<f4")).max()
        print("largest difference", worst)
        return 0 if worst < 1e-5 else 1
    with open(PATH, "wb") as f:
        f.write(data)
    print(len(data), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
