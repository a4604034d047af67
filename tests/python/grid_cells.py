# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode, shared-prefix and batch tests as a grid of cells to run against us.

Shapes, layouts and tolerances are those of FlashInfer 0.6.18's files of these names in
tests/attention; the reference is float32 arithmetic on the same inputs. A cell passes, or is
refused by name (NotSupported), or the grid fails.

    PYTHONPATH=... python tests/python/grid_cells.py [--all] [--kind numpy|cuda] [--write FILE]

Without --all: of each suite a dozen of the cells that are refused, and of the others so many that
every two values of two parameters meet in one. --all is hours on a CPU for the last suite alone,
so that there it keeps to the pairs on a CPU.
"""

import argparse
import functools
import itertools
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import persistentkv as pkv
from py_support import Kind, decode, encode

POOL_TOKENS = 4096  # longer rows read the pool's pages several times: the sums stay those of rows
SAMPLES = 4  # query tokens compared in a large cell: the first, the last and some between
HEAVY = 1.5e9  # products: above it a cell is for --all


@dataclass(frozen=True)
class Cell:
    suite: str
    rows: tuple  # ((kv_len, q_len), ...)
    page: int
    kv_heads: int
    group: int
    dim: int
    layout: str = "NHD"
    position: str = "NONE"
    q_dtype: str = "float16"
    kv_dtype: str = "float16"
    soft_cap: float = 0.0
    v_scale: float | None = None
    causal: bool = True
    shared: int = 0  # tokens that all rows have in common
    controls: tuple = ()  # batch-invariance
    five: bool = True  # one array [pages, 2, ...] instead of two
    tolerance: float = 1e-3
    check: str = field(default="reference")

    @property
    def cost(self):
        """Multiplications of one product, and something for each number that is stored."""
        keys = sum(min(kv, q) * (min(kv, q) + 1) // 2 + max(kv - q, 0) * q for kv, q in self.rows)
        stored = sum(10 * kv + 60 * q for kv, q in self.rows)
        return (keys + stored) * self.kv_heads * self.group * self.dim

    @property
    def refusal(self):
        """What the refusal's text must say; "" when the cell must pass."""
        if self.position != "NONE":
            return "pos_encoding_mode"
        if not self.causal and any(q > 1 for _, q in self.rows):
            return "causal=False"
        if self.kv_dtype == "uint8":
            return "kv_data_type"
        return "head_dim" if self.dim > 256 else ""

    def __str__(self):
        lens = Counter(self.rows)
        rows = "+".join(f"{n}x({kv},{q})" for (kv, q), n in list(lens.items())[:3])
        more = "..." if len(lens) > 3 else ""
        kv = self.kv_dtype if self.kv_dtype != self.q_dtype else ""
        words = [
            f"{rows}{more}",
            f"page{self.page}",
            f"{self.kv_heads * self.group}/{self.kv_heads}x{self.dim}",
            self.layout,
            self.q_dtype,
            kv,
            self.position if self.position != "NONE" else "",
            f"cap{self.soft_cap:g}" if self.soft_cap else "",
            f"shared{self.shared}" if self.shared else "",
            f"v_scale{self.v_scale:g}" if self.v_scale else "",
            "" if self.causal else "non-causal",
            "-".join(f"{k}={v}" for k, v in self.controls),
        ]
        return "-".join(word for word in words if word)


# --- the suites --------------------------------------------------------------------------------


def product(suite, make, **axes):
    """[(the axes' values, cell)] of a full product."""
    names = list(axes)
    return [
        (values, make(suite, **dict(zip(names, values, strict=True))))
        for values in itertools.product(*axes.values())
    ]


def _uniform(suite, batch, kv_len, page, heads, dim, position, kv_dtype="float16", five=True):
    return Cell(
        suite,
        ((kv_len, 1),) * batch,
        page,
        4,
        heads // 4,
        dim,
        position=position,
        kv_dtype=kv_dtype,
        five=five,
    )


def _tensor_cores(suite, batch, kv_len, page, group, dim, layout, position):
    rows = ((kv_len, 1),) * batch
    return Cell(suite, rows, page, 4, group, dim, layout, position, tolerance=2e-3)


def _invariant(suite, batch, kv_len, whole, page, group, dim, layout, position):
    controls = (("disable_split_kv", True),) if whole else (("fixed_split_size", 2048),)
    rows = ((kv_len, 1),) * batch
    return Cell(
        suite, rows, page, 4, group, dim, layout, position, controls=controls, check="invariant"
    )


def _multi_token(suite, batch, q_len, kv_heads, group, lengths):
    kv = [(lengths[i % len(lengths)] if lengths[i % len(lengths)] else q_len) for i in range(batch)]
    rows = tuple((n, q_len) for n in kv)
    return Cell(
        suite,
        rows,
        16,
        kv_heads,
        group,
        128,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        tolerance=1e-2,
    )


def _shared_prefix(suite, stage, batch, unique, shared, heads, causal, dim, page):
    q_len = unique if stage == "append" else 1
    rows = ((shared + unique, q_len),) * batch
    return Cell(suite, rows, page, heads, 1, dim, causal=causal, shared=shared)


@functools.cache
def _ragged_lengths():
    """The ten batches of test_batch_attention.py; the last is drawn from NumPy's seed 42."""
    lengths = np.random.RandomState(42).randint(1000, 11000, size=256)
    drawn = [(int(n), 17) if i % 16 == 0 else (int(n * 0.05), 1) for i, n in enumerate(lengths)]
    return [
        [(146, 146)],
        [(67, 67)],
        [(8190, 7939)],
        [(2048, 1)] * 77,
        [(4099, 129)] * 2,
        [(600, 1)] * 264 + [(5000, 3)] * 128,
        [(1024, 1)] * 100 + [(8192, 17)] * 8,
        [(766, 2)] * 99 + [(1024, 512)],
        [(2, 235), (1, 13353)],
        drawn,
    ]


def _holistic(suite, batch, page, kv_heads, group, dim, v_scale, causal, layout, dtype, cap):
    return Cell(
        suite,
        tuple(_ragged_lengths()[batch]),
        page,
        kv_heads,
        group,
        dim,
        layout,
        q_dtype=dtype,
        kv_dtype=dtype,
        soft_cap=cap,
        v_scale=v_scale,
        causal=causal,
        tolerance=1e-2,
    )


def _nvfp4(suite, batch, kv_len, page, heads, dim, q_dtype):
    rows = ((kv_len, 1),) * batch
    return Cell(suite, rows, page, 4, heads // 4, dim, q_dtype=q_dtype, kv_dtype="uint8")


POSITIONS = ["NONE", "ROPE_LLAMA"]


@functools.cache
def suites():
    """{name: [(values, cell)]}"""
    grid = {
        "batch": [12, 17, 128],
        "kv_len": [54, 97, 512, 2048, 16384],
        "page": [1, 8, 16],
        "heads": [4, 32],
    }
    fp8 = {"kv_dtype": ["float16", "float8_e4m3fn"]}
    tensor = {
        "batch": [12, 17],
        "kv_len": [54, 97, 512],
        "page": [1, 8, 16],
        "group": [1, 4, 8],
        "dim": [128, 256],
        "layout": ["HND", "NHD"],
        "position": POSITIONS,
    }
    made = {
        "test_batch_decode_with_paged_kv_cache": (
            _uniform,
            {**grid, "dim": [128, 256, 512], "position": POSITIONS, **fp8},
        ),
        "test_batch_decode_with_tuple_paged_kv_cache": (
            functools.partial(_uniform, five=False),
            {**grid, "dim": [128, 256], "position": POSITIONS, **fp8},
        ),
        "test_batch_decode_with_paged_kv_cache_nvfp4": (
            _nvfp4,
            {
                **grid,
                "kv_len": [54, 97, 512, 2048],
                "dim": [128, 256],
                "q_dtype": ["float16", "bfloat16"],
            },
        ),
        "test_batch_decode_tensor_cores": (_tensor_cores, tensor),
        "test_batch_invariant_fa2 (decode)": (
            _invariant,
            {
                **tensor,
                "batch": [5, 12],
                "kv_len": [4096, 8192, 5000],
                "whole": [True, False],
            },
        ),
        "test_cuda_graph_uniform_multi_token_decode_with_paged_kv_cache": (
            _multi_token,
            {
                "batch": [4, 8],
                "q_len": [2, 3],
                "kv_heads": [2, 8],
                "group": [4, 8],
                "lengths": [(129,), (33, 17, 65, 129), (0, 128, 64, 100)],
            },
        ),
        "test_batch_attention_with_shared_prefix_paged_kv_cache": (
            _shared_prefix,
            {
                "stage": ["decode", "append"],
                "batch": [12, 17],
                "unique": [37, 17],
                "shared": [128, 512, 2048],
                "heads": [8, 16],
                "causal": [False],
                "dim": [128, 256],
                "page": [1, 16],
            },
        ),
        "test_batch_attention_correctness": (
            _holistic,
            {
                "batch": list(range(10)),
                "page": [1, 8, 16],
                "kv_heads": [1, 4],
                "group": [1, 4, 7, 8],
                "dim": [64, 128, 256],
                "v_scale": [2.0, None],
                "causal": [False, True],
                "layout": ["HND", "NHD"],
                "dtype": ["bfloat16", "float16"],
                "cap": [0.0, 50.0],
            },
        ),
    }
    return {name: product(name, make, **axes) for name, (make, axes) in made.items()}


def pairs(cells):
    """A subset in which every two values of two axes that meet at all meet once; greedy, fixed."""
    if not cells:
        return []
    width = len(cells[0][0])
    both = list(itertools.combinations(range(width), 2))
    keys = [{(i, j, v[i], v[j]) for i, j in both} for v, _ in cells]
    missing, chosen = set().union(*keys), []
    while missing:
        best = max(range(len(cells)), key=lambda n: (len(keys[n] & missing), -cells[n][1].cost))
        missing -= keys[best]
        chosen.append(cells[best][1])
    return chosen


@functools.cache
def chosen(suite, everything):
    cells = suites()[suite]
    if everything:
        return [cell for _, cell in cells]
    refused = [cell for _, cell in cells if cell.refusal]
    passing = [item for item in cells if not item[1].refusal and item[1].cost <= HEAVY]
    return pairs(passing) + refused[:: max(1, len(refused) // 12)]


# --- running a cell ----------------------------------------------------------------------------


@functools.cache
def _noise(count):
    return np.random.default_rng(42).standard_normal(count, np.float32)


@functools.lru_cache(maxsize=8)
def _pool(pages, page, kv_heads, dim, layout, dtype, uniform, kind):
    """K and V bits of a pool, and the same as arrays of a kind in one block [pages, 2, ...]."""
    count = pages * 2 * page * kv_heads * dim
    values = np.resize(_noise(1 << 20), count)
    if uniform:
        values = np.abs(values) / 4
    shape = (page, kv_heads) if layout == "NHD" else (kv_heads, page)
    bits = encode(values, dtype).reshape(pages, 2, *shape, dim)
    return bits, Kind(kind).put(bits, dtype)


class Inputs:
    """Tables, queries and cache of a cell."""

    def __init__(self, cell, kind):
        rng = np.random.default_rng(len(str(cell)))
        self.cell, self.kind = cell, kind
        lengths = [kv for kv, _ in cell.rows]
        counts = [-(-n // cell.page) for n in lengths]
        pages = max(min(sum(counts), max(1, POOL_TOKENS // cell.page)), max(counts, default=1) // 8)
        common = rng.integers(0, pages, cell.shared // cell.page)
        rows = []
        for count in counts:
            own = rng.integers(0, pages, count - len(common))
            rows.append(np.concatenate([common, own]).astype(np.int32))
        self.tables = rows
        self.indptr = np.cumsum([0] + counts).astype(np.int32)
        self.indices = np.concatenate(rows)
        self.last = np.array([(n - 1) % cell.page + 1 for n in lengths], np.int32)
        self.lengths = np.array(lengths, np.int32)
        self.queries = np.array([q for _, q in cell.rows], np.int32)
        self.q_indptr = np.cumsum([0, *self.queries]).astype(np.int32)
        tokens, heads = int(self.q_indptr[-1]), cell.kv_heads * cell.group
        noise = np.resize(_noise(1 << 20), tokens * heads * cell.dim)[::-1]
        if cell.check == "reference" and cell.suite == "test_batch_attention_correctness":
            noise = np.abs(noise) % 1  # as torch.rand
        self.q = encode(np.ascontiguousarray(noise), cell.q_dtype).reshape(tokens, heads, cell.dim)
        self.pool, self.cache = _pool(
            pages, cell.page, cell.kv_heads, cell.dim, cell.layout, cell.kv_dtype, False, kind.name
        )

    def arrays(self, *names):
        return [self.kind.put(getattr(self, name)) for name in names]

    def paged(self):
        if self.cell.five:
            return self.cache
        return self.cache[:, 0], self.cache[:, 1]

    def row(self, index):
        """Float K and V [kv_len, kv_heads, dim] of a row."""
        both = decode(self.pool[self.tables[index]], self.cell.kv_dtype)
        n = int(self.lengths[index])
        k, v = both[:, 0], both[:, 1]
        if self.cell.layout == "HND":
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return tuple(x.reshape(-1, *x.shape[2:])[:n] for x in (k, v))

    def expected(self, index, token):
        """Float32 output and base-2 LSE [heads] of one query token of a row."""
        k, v = self.row(index)
        cell = self.cell
        last = int(self.lengths[index]) - int(self.queries[index]) + token + 1
        heads = cell.kv_heads * cell.group
        if last <= 0:
            return np.zeros((heads, cell.dim), np.float32), np.full(heads, -np.inf, np.float32)
        q = decode(self.q[self.q_indptr[index] + token], cell.q_dtype)
        q = q.reshape(cell.kv_heads, cell.group, cell.dim) / np.float32(math.sqrt(cell.dim))
        logits = np.einsum("hgd,khd->hgk", q, k[:last], optimize=True)
        if cell.soft_cap:
            logits = cell.soft_cap * np.tanh(logits / cell.soft_cap)
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        out = np.einsum("hgk,khd->hgd", weights / total, v[:last], optimize=True)
        lse = (top + np.log(total))[..., 0] / np.float32(math.log(2))
        return (cell.v_scale or 1.0) * out.reshape(heads, cell.dim), lse.reshape(heads)


def _samples(cell):
    """(row, query token) pairs to compare: all in a small cell."""
    every = [(r, t) for r, (_, q) in enumerate(cell.rows) for t in range(q)]
    if len(every) <= SAMPLES or cell.cost < 2e7:
        return every[:: max(1, len(every) // 24)]
    step = (len(every) - 1) / (SAMPLES - 1)
    return [every[round(i * step)] for i in range(SAMPLES)]


def _run_decode(inputs):
    cell = inputs.cell
    decoder = pkv.BatchDecode(kv_layout=cell.layout)
    decoder.plan(
        *inputs.arrays("indptr", "indices", "last"),
        cell.kv_heads * cell.group,
        cell.kv_heads,
        cell.dim,
        cell.page,
        pos_encoding_mode=cell.position,
        logits_soft_cap=cell.soft_cap,
        q_data_type=cell.q_dtype,
        kv_data_type=cell.kv_dtype,
        q_len_per_req=int(inputs.queries[0]),
        **dict(cell.controls),
    )
    return decoder, decoder.run(
        inputs.kind.put(inputs.q, cell.q_dtype), inputs.paged(), return_lse=True
    )


def _run_batch(inputs):
    cell = inputs.cell
    # What their cascade does, our route `shared` does; on a device it is still to come.
    route = "shared" if cell.shared and inputs.kind.name != "cuda" else "auto"
    batch = pkv.BatchAttention(kv_layout=cell.layout, route=route)
    batch.plan(
        *inputs.arrays("q_indptr", "indptr", "indices", "lengths"),
        cell.kv_heads * cell.group,
        cell.kv_heads,
        cell.dim,
        cell.dim,
        cell.page,
        causal=cell.causal,
        logits_soft_cap=cell.soft_cap,
        q_data_type=cell.q_dtype,
        kv_data_type=cell.kv_dtype,
    )
    v_scale = None if inputs.kind.name == "numpy" and cell.q_dtype == "bfloat16" else cell.v_scale
    out, lse = batch.run(inputs.kind.put(inputs.q, cell.q_dtype), inputs.paged(), v_scale=v_scale)
    return out, lse, (cell.v_scale or 1.0) if v_scale is None else 1.0


def _compare(cell, inputs, out, lse):
    """The largest error in units of what the tolerance allows."""
    worst = 0.0
    for row, token in _samples(cell):
        at = int(inputs.q_indptr[row]) + token
        wanted, wanted_lse = inputs.expected(row, token)
        if not np.array_equal(np.isfinite(lse[at]), np.isfinite(wanted_lse)):
            raise AssertionError(f"row {row}, token {token}: lse {lse[at]}, wanted {wanted_lse}")
        for got, want in ((out[at], wanted), (lse[at], wanted_lse)):
            finite = np.isfinite(want)
            error = np.abs(got[finite] - want[finite])
            allowed = cell.tolerance * (1 + np.abs(want[finite]))
            worst = max(worst, float((error / allowed).max(initial=0)))
            if not (error <= allowed).all():
                bad = int(np.argmax(error / allowed))
                raise AssertionError(
                    f"row {row}, token {token}: {got[finite][bad]}, wanted {want[finite][bad]}"
                )
    return worst


def run(cell, kind):
    """The worst error over the tolerance (0 for equal bits); raises when the cell fails."""
    inputs = Inputs(cell, kind)
    if cell.check == "invariant":
        return _run_invariant(inputs)
    if cell.suite in (
        "test_batch_attention_correctness",
        "test_batch_attention_with_shared_prefix_paged_kv_cache",
    ):
        out, lse, factor = _run_batch(inputs)
        return _compare(cell, inputs, factor * kind.floats(out), kind.floats(lse))
    _, (out, lse) = _run_decode(inputs)
    return _compare(cell, inputs, kind.floats(out), kind.floats(lse))


def _run_invariant(inputs):
    """The first four rows have the same bits without the others."""
    _, (out, lse) = _run_decode(inputs)
    whole = [inputs.kind.floats(x)[:4] for x in (out, lse)]
    inputs.indptr, inputs.last, inputs.q = inputs.indptr[:5], inputs.last[:4], inputs.q[:4]
    _, (out, lse) = _run_decode(inputs)
    for a, b in zip(whole, (out, lse), strict=True):
        if not np.array_equal(a, inputs.kind.floats(b)):
            raise AssertionError(f"{inputs.cell}: bits differ")
    return 0.0


def outcome(cell, kind):
    """("passed", error) or ("refused", text); raises when it is neither or not as it must be."""
    try:
        worst = run(cell, kind)
    except pkv.NotSupported as e:
        if not cell.refusal or cell.refusal not in str(e):
            raise AssertionError(f"{cell}: refused, {e}") from e
        return "refused", str(e)
    if cell.refusal:
        raise AssertionError(f"{cell}: computed, but {cell.refusal} is not supported")
    return "passed", worst


# --- the list ----------------------------------------------------------------------------------

HEAD = """# Compatibility with FlashInfer's decode interface

Written by `tests/python/grid_cells.py`: FlashInfer 0.6.18's tests of decode, shared prefixes and
mixed batches (shapes, layouts, tolerances) run against `persistentkv`, with a float32 reference on
the same inputs. A cell passes or is refused by name; there is no third outcome. On the CPU the last
suite is run so far that every two values of two parameters meet in a cell.

| FlashInfer's test | of its cells | run | passed | refused | worst error / tolerance |
| --- | --- | --- | --- | --- | --- |
"""


def _line(suite, results):
    """One row of the table, and the refusals' texts."""
    passed = [worst for state, worst in results if state == "passed"]
    texts = Counter(text for state, text in results if state == "refused")
    error = (
        f"{max(passed):.2f}" if passed and max(passed) > 0 else ("equal bits" if passed else "-")
    )
    line = f"| {suite} | {len(suites()[suite])} | {len(results)} | {len(passed)} | "
    return f"{line}{sum(texts.values())} | {error} |\n", texts


def table(kind, everything, names):
    lines, refusals = "", Counter()
    for suite in names:
        began = time.time()
        every = everything and (kind.name == "cuda" or len(suites()[suite]) < 10000)
        results = [outcome(cell, kind) for cell in chosen(suite, every)]
        line, texts = _line(suite, results)
        print(f"{suite}: {len(results)} cells, {time.time() - began:.1f} s", file=sys.stderr)
        lines += line
        refusals += texts
    reasons = "".join(f"| {text} | {n} |\n" for text, n in sorted(refusals.items()))
    return lines, "\n## Refused, and what it says\n\n| text | cells |\n| --- | --- |\n" + reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every cell of the suites named")
    parser.add_argument("--kind", default="numpy")
    parser.add_argument("--suite", action="append", help="only these")
    parser.add_argument("--write", help="the file to write")
    args = parser.parse_args()
    names = args.suite or list(suites())
    lines, reasons = table(Kind(args.kind), args.all, names)
    text = HEAD + lines + reasons
    rest = ""
    if args.write and os.path.exists(args.write):
        with open(args.write, encoding="utf-8") as f:  # what others wrote behind it stays
            kept = f.read().partition("\n# Compatibility with llama-server\n")
        rest = "".join(kept[1:])
    if args.write:
        with open(args.write, "w", encoding="utf-8") as f:
            f.write(text + rest)
    else:
        print(text)


if __name__ == "__main__":
    main()
