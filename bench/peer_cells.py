# SPDX-License-Identifier: Apache-2.0
"""The cells of compare_peers.py: batches, their tensors on the device, and the answer in double.

A cell is a list of row lengths, or a tree of shared prefixes. All contenders get the same memory:
K and V of a layer are one block of random numbers, read as NHD [page, token, head, d] or as HND
[page, head, token, d] according to who reads it (so the right answer depends on the layout).
"""

import json
import math
import re

import numpy as np
import torch

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
PAGE_ELEMENTS = PAGE * KV_HEADS * HEAD_DIM  # of K, and of V
COLD_BYTES, MIN_LAYERS, MAX_LAYERS = 1 << 30, 4, 256
SPARE_PAGES = 8  # in the cache, owned by no row
READ_US, READ_TB_S, FLOPS = 5.2, 4.63, 600e12  # of an H200: the floor and the limit
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# Cells where the targets are tightest come first.
FIRST = ["b1_1024", "b1_4096", "b1_8192", "b1_16384", "b1_32768", "b1_65536", "b1_131072",
         "b8_uniform", "b8_bimodal", "b8_zipf", "b8_bucketed", "b32_uniform", "b128_uniform4k",
         "cliff33", "ragged192"]  # fmt: skip
# (children of each node of the level above) x (tokens each), from the root down.
TREES = ["tree_8x2048_32x256", "tree_8x10240_100x64", "tree_1x2048_8x1024_16x256"]


class Cell:
    """name, lens [rows]; levels: for each level of the tree its nodes (first row, rows, tokens),
    or one level of single rows."""

    def __init__(self, name, levels):
        self.name, self.levels = name, levels
        self.rows = sum(rows for _, rows, _ in levels[-1])
        lens = np.zeros(self.rows, np.int64)
        for level in levels:
            for first, rows, tokens in level:
                lens[first : first + rows] += tokens
        self.lens = [int(n) for n in lens]
        self.longest = max(self.lens)
        nodes = [node for level in levels for node in level]
        self.tokens = sum(tokens for _, _, tokens in nodes)  # each page once
        self.pages = sum(-(-tokens // PAGE) for _, _, tokens in nodes)
        self.bytes = self.tokens * KV_HEADS * HEAD_DIM * 2 * 2
        self.flops = sum(4 * rows * QUERY_HEADS * tokens * HEAD_DIM
                         for _, rows, tokens in nodes if rows > 1)  # fmt: skip
        self.shared = len(levels) > 1

    @property
    def floor_us(self):
        """Reading each page once; for a tree the limit, with the products of shared nodes."""
        return READ_US + max(self.bytes / READ_TB_S / 1e6, self.flops / FLOPS * 1e6)

    @property
    def layers(self):
        bytes_ = (self.pages + SPARE_PAGES) * PAGE_ELEMENTS * 4
        return min(max(-(-COLD_BYTES // bytes_), MIN_LAYERS), MAX_LAYERS)

    @property
    def elements(self):
        """Of K in all layers."""
        return self.layers * (self.pages + SPARE_PAGES) * PAGE_ELEMENTS


def ragged(name, lens):
    return Cell(name, [[(row, 1, int(n)) for row, n in enumerate(lens)]])


def tree(name, shape):
    rows = math.prod(children for children, _ in shape)
    levels, nodes = [], 1
    for children, tokens in shape:
        nodes *= children
        each = rows // nodes
        levels.append([(i * each, each, tokens) for i in range(nodes)])
    if any(tokens % PAGE for level in levels[:-1] for _, _, tokens in level):
        raise ValueError(f"{name}: shared nodes must be whole pages of {PAGE}")
    return Cell(name, levels)


def by_name(name, anchors):
    if match := re.fullmatch(r"shared_b(\d+)_p(\d+)_s(\d+)", name):
        rows, prefix, suffix = map(int, match.groups())
        return tree(name, [(1, prefix), (rows, suffix)])
    if re.fullmatch(r"tree(_\d+x\d+){2,}", name):
        return tree(name, [tuple(map(int, part.split("x"))) for part in name.split("_")[1:]])
    if match := re.fullmatch(r"rows_(\d+)x(\d+)", name):
        return ragged(name, [int(match[2])] * int(match[1]))
    if name in anchors and "lens" in anchors[name]:
        return ragged(name, anchors[name]["lens"])
    raise ValueError(f"no such cell: {name} (known: those of the anchors file, shared_bN_pN_sN, "
                     "tree_AxN_BxN..., rows_BxN)")  # fmt: skip


def read_anchors(path):
    """{cell: {"lens": [...], peer: {"gpu_us": ...}}}"""
    with open(path, encoding="utf-8") as file:
        return json.load(file)["cells"]


def select(names, shared, anchors):
    if not names:
        usual = [n for n in anchors if n.startswith("shared_") == shared]
        names = sorted(usual, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
        names += TREES if shared else []
    return [by_name(name, anchors) for name in names]


class Store:
    """Room for K and V of all layers of any cell, filled once."""

    def __init__(self, elements, dtype, device, seed=1):
        generator = torch.Generator(device).manual_seed(seed)
        self.k, self.v = (torch.empty(elements, dtype=dtype, device=device) for _ in range(2))
        for x in (self.k, self.v):
            x.normal_(generator=generator)


class Batch:
    """A cell's tensors. table pads with a page of the cache that nobody owns; bare_table with -1.
    node_tables: for each level (table, lengths) of its nodes."""

    def __init__(self, cell, store, seed=7):
        device, dtype = store.k.device, store.k.dtype
        self.cell, self.store, self.device, self.dtype = cell, store, device, dtype
        self.rows, self.layers, self.lens = cell.rows, cell.layers, cell.lens
        self.pages = cell.pages + SPARE_PAGES
        rng = np.random.default_rng(seed)
        ids = rng.permutation(self.pages).astype(np.int32)
        self.spare = int(ids[-1])
        self.rng = rng
        page_lists = [[] for _ in range(cell.rows)]
        self.node_pages, at = [], 0
        for level in cell.levels:
            self.node_pages.append([])
            for first, rows, tokens in level:
                count = -(-tokens // PAGE)
                mine, at = ids[at : at + count], at + count
                self.node_pages[-1].append(mine)
                for row in range(first, first + rows):
                    page_lists[row].append(mine)
        self.row_pages = [np.concatenate(pages) for pages in page_lists]
        counts = [len(pages) for pages in self.row_pages]
        self.width = max(counts)
        bare = np.full((cell.rows, self.width), -1, np.int32)
        for row, pages in enumerate(self.row_pages):
            bare[row, : len(pages)] = pages
        self.host_table = bare
        self.bare_table = torch.from_numpy(bare).to(device)
        self.table = torch.where(self.bare_table < 0, self.spare, self.bare_table).int()
        self.seq_len = torch.tensor(cell.lens, dtype=torch.int32, device=device)
        self.indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        self.indptr_device = self.indptr.to(device)
        self.indices = torch.from_numpy(np.concatenate(self.row_pages)).to(device)
        self.last = torch.tensor([(n - 1) % PAGE + 1 for n in cell.lens], dtype=torch.int32)
        self.query_starts = torch.arange(cell.rows + 1, dtype=torch.int32, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        self.q = torch.empty(cell.rows, QUERY_HEADS, HEAD_DIM, dtype=dtype, device=device)
        self.q.normal_(generator=generator)

    def _view(self, room, layer, layout):
        elements = self.pages * PAGE_ELEMENTS
        shape = (PAGE, KV_HEADS) if layout == "nhd" else (KV_HEADS, PAGE)
        return room[layer * elements : (layer + 1) * elements].view(self.pages, *shape, HEAD_DIM)

    def k(self, layer, layout):
        return self._view(self.store.k, layer, layout)

    def v(self, layer, layout):
        return self._view(self.store.v, layer, layout)

    def by_token(self, layout):
        """Views of K and V of layer 0 as [page, token, head, d]."""
        pair = self.k(0, layout), self.v(0, layout)
        return pair if layout == "nhd" else tuple(x.transpose(1, 2) for x in pair)

    def answer(self, layout):
        """[rows, query heads, d] in double, from layer 0 as it is now."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=self.device)
        k_all, v_all = self.by_token(layout)
        group = QUERY_HEADS // KV_HEADS
        for row, n in enumerate(self.lens):
            pages = torch.from_numpy(self.row_pages[row]).to(self.device).long()
            k, v = (x[pages].reshape(-1, KV_HEADS, HEAD_DIM)[:n].double().transpose(0, 1)
                    for x in (k_all, v_all))  # fmt: skip
            q = self.q[row].double().view(KV_HEADS, group, HEAD_DIM)
            weights = (q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)).softmax(-1)
            out[row] = (weights @ v).view(QUERY_HEADS, HEAD_DIM)
        return out

    def hide_needles(self, layout):
        """In each row and KV head four keys (the first, the last, one at a page's start, one
        anywhere) that each outweigh all others for one query head of the group."""
        k, v = self.by_token(layout)
        group = QUERY_HEADS // KV_HEADS
        queries = self.q.view(self.rows, KV_HEADS, group, HEAD_DIM)
        for g in range(group):
            at = [[n // 2 // PAGE * PAGE, int(self.rng.integers(n)), 0, n - 1][g % 4]
                  for n in self.lens]  # fmt: skip
            page = torch.tensor([int(self.host_table[r, t // PAGE]) for r, t in enumerate(at)],
                                device=self.device)  # fmt: skip
            token = torch.tensor([t % PAGE for t in at], device=self.device)
            k[page, token] = 2 * queries[:, :, g]
            v[page, token] = float(4 + g) * (-1) ** g

    def poison(self, layout):
        """NaN in every token of layer 0 that no row owns."""
        owned = torch.zeros(self.pages, dtype=torch.long, device=self.device)
        for level, pages in zip(self.cell.levels, self.node_pages):
            for (_, _, tokens), mine in zip(level, pages):
                count = torch.full((len(mine),), PAGE, dtype=torch.long)
                count[-1] = (tokens - 1) % PAGE + 1
                owned[torch.from_numpy(mine).to(self.device).long()] = count.to(self.device)
        unowned = torch.arange(PAGE, device=self.device) >= owned[:, None]
        for x in self.by_token(layout):
            x[unowned] = float("nan")

    def save(self):
        """Layer 0, for restore()."""
        n = self.pages * PAGE_ELEMENTS
        return self.store.k[:n].clone(), self.store.v[:n].clone()

    def restore(self, saved):
        self.store.k[: len(saved[0])] = saved[0]
        self.store.v[: len(saved[1])] = saved[1]


def error_of(out, answer):
    """Largest relative l2 error of a row; inf where an output is not finite."""
    difference = (out.double() - answer).flatten(1).norm(dim=1)
    worst = float((difference / answer.flatten(1).norm(dim=1)).max())
    return worst if math.isfinite(worst) else math.inf
