# SPDX-License-Identifier: Apache-2.0
"""Helpers of the Python tests: element types NumPy lacks, arrays of each kind, a reference."""

import functools
import math

import numpy as np
import persistentkv as pkv


def bf16_bits(x):
    """float32 -> bfloat16's bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def _e4m3_table():
    """The 127 finite values of codes 0 .. 126."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, normal).astype(np.float32)


@functools.cache
def _e4m3_codes():
    """The nearest code of every float16 (of the NaNs: a NaN)."""
    table, halves = _e4m3_table(), np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = np.abs(halves.astype(np.float32))
    between = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(between, values).astype(np.uint8)
    above = np.searchsorted(between, values, side="right").astype(np.uint8)
    code = np.where(code % 2, above, code)  # of two that are as near the even one
    code[np.isnan(values)] = 127
    return code | (np.signbit(halves).astype(np.uint8) << 7)


@functools.cache
def _e4m3_values():
    positive = np.append(_e4m3_table(), np.float32(np.nan))
    return np.concatenate([positive, -positive])


def e4m3_bits(x):
    """float32 -> e4m3 codes, by way of float16."""
    return _e4m3_codes()[np.ascontiguousarray(x).astype(np.float16).view(np.uint16)]


def e4m3_floats(bits):
    return _e4m3_values()[bits]


def encode(x, dtype):
    """float32 -> the bits of a dtype, as NumPy can hold them."""
    if dtype == "bfloat16":
        return bf16_bits(x)
    if dtype == "float8_e4m3fn":
        return e4m3_bits(x)
    return np.ascontiguousarray(x, dtype)


def decode(bits, dtype):
    if dtype == "bfloat16":
        return bf16_floats(bits)
    if dtype == "float8_e4m3fn":
        return e4m3_floats(bits)
    return bits.astype(np.float32)


@functools.cache
def missing(kind):
    """Why arrays of this kind cannot be tested here; "" when they can."""
    if kind == "numpy":
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if kind == "torch":
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        pkv.Executor("cuda")
    except pkv.PkvError as e:
        return f"libpkv has no CUDA device: {e}"
    return ""


class Kind:
    """Arrays of one kind, made from NumPy bits and read back as float32."""

    def __init__(self, name):
        self.name = name

    def put(self, bits, dtype=None):
        """NumPy bits -> an array of this kind; dtype says what integers hold."""
        if self.name == "numpy":
            return bits
        import torch

        tensor = torch.from_numpy(np.array(bits))
        if dtype in ("bfloat16", "float8_e4m3fn"):
            tensor = tensor.view(getattr(torch, dtype))
        return tensor.cuda() if self.name == "cuda" else tensor

    def floats(self, x):
        if self.name == "numpy":
            return bf16_floats(x) if x.dtype == np.uint16 else x.astype(np.float32)
        return x.float().cpu().numpy()

    def empty(self, shape, dtype):
        bits = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}.get(dtype, dtype)
        poison = np.full(shape, 0xFF, np.uint8) if bits == np.uint8 else np.full(shape, 7.0)
        return self.put(poison.astype(bits), dtype)


def attention(q, k, v, seq_len, scale=None, soft_cap=0.0, window=0, sinks=None):
    """Float64 attention of one row.

    q [tokens, heads, dim], the last tokens of the row; k, v [seq_len, kv_heads, dim], floats.
    Returns (out [tokens, heads, dim], natural lse [tokens, heads]).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = scale or 1 / math.sqrt(dim)
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        position = seq_len - tokens + t
        first = max(0, position + 1 - window) if window else 0
        if position < first:
            continue
        seen = slice(first, position + 1)
        for h in range(heads):
            logits = k[seen, h // group] @ q[t, h] * scale
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            top = logits.max() if sinks is None else max(logits.max(), sinks[h])
            weights = np.exp(logits - top)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
            out[t, h] = weights @ v[seen, h // group] / total
            lse[t, h] = top + math.log(total)
    return out, lse


class Pages:
    """A paged cache with rows in it, as bits and as floats, unowned pages and tails poisoned."""

    def __init__(self, rng, seq_lens, kv_heads, dim, page, dtype, layout="NHD", spare=2):
        counts = [-(-int(n) // page) for n in seq_lens]
        order = rng.permutation(sum(counts) + spare).astype(np.int32)
        self.page, self.layout, self.dtype = page, layout, dtype
        self.seq_lens = np.asarray(seq_lens, np.int32)
        self.indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.indices = order[: self.indptr[-1]]
        self.last = np.where(self.seq_lens > 0, (self.seq_lens - 1) % page + 1, 0).astype(np.int32)
        shape = (len(order), page, kv_heads, dim)
        self.k, self.v = (rng.standard_normal(shape, np.float32) for _ in range(2))
        self.k, self.v = (encode(x, dtype) for x in (self.k, self.v))
        poison = {"bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F}.get(dtype, np.nan)
        for row, last in enumerate(self.last):
            if last:
                tail = self.indices[self.indptr[row + 1] - 1]
                self.k[tail, last:] = poison
                self.v[tail, last:] = poison
        self.k[order[self.indptr[-1] :]] = poison
        self.v[order[self.indptr[-1] :]] = poison

    def cache(self, kind, five=False):
        """(k, v) or one array [pages, 2, ...] of a kind."""
        k, v = self.k, self.v
        if self.layout == "HND":
            k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (k, v))
        if five:
            return kind.put(np.stack([k, v], 1), self.dtype)
        return kind.put(k, self.dtype), kind.put(v, self.dtype)

    def csr(self, kind):
        return tuple(kind.put(x) for x in (self.indptr, self.indices, self.last))

    def dense(self, kind, extra=1):
        width = int(np.diff(self.indptr).max(initial=0)) + extra
        table = np.full((len(self.seq_lens), width), 2147480000, np.int32)
        for row in range(len(self.seq_lens)):
            ids = self.indices[self.indptr[row] : self.indptr[row + 1]]
            table[row, : len(ids)] = ids
        return kind.put(table), kind.put(self.seq_lens)

    def row(self, index):
        """Float K and V [seq_len, kv_heads, dim] of a row."""
        ids = self.indices[self.indptr[index] : self.indptr[index + 1]]
        n = int(self.seq_lens[index])
        k, v = (decode(x[ids], self.dtype) for x in (self.k, self.v))
        return k.reshape(-1, *k.shape[2:])[:n], v.reshape(-1, *v.shape[2:])[:n]

    def expected(self, q, **options):
        """Reference of all rows; q floats [rows * q_len, heads, dim]."""
        rows = len(self.seq_lens)
        parts = np.split(q, rows)
        both = [
            attention(parts[i], *self.row(i), int(self.seq_lens[i]), **options) for i in range(rows)
        ]
        return np.concatenate([a for a, _ in both]), np.concatenate([b for _, b in both])
