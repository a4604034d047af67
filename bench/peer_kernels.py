# SPDX-License-Identifier: Apache-2.0
"""Other people's decode attention, each as a contender over one batch.

A contender has name, layout, out [rows, query heads, d], run(layer), plan() or None (what must be
done once a step), plan_in_graph (plan() may be captured), and note. Whatever a peer refuses is
raised; the caller records it.
"""

import math
import os
import sys

import torch
from peer_cells import HEAD_DIM, KV_HEADS, PAGE, QUERY_HEADS

WORKSPACE_BYTES = 512 << 20
KIT = None  # folder that use_kit() was given
_workspaces = {}


def use_kit(folder):
    """Makes the unpacked kit importable, without a compiler and without a home folder."""
    global KIT
    KIT = folder = os.path.abspath(folder)
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", os.path.join(folder, "cache"))
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    sys.path.insert(0, folder)


def workspace(name, device):
    """Zeroed once, kept: graphs and semaphores refer to it."""
    if name not in _workspaces:
        _workspaces[name] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[name]


class Contender:
    plan = None
    plan_in_graph = False
    note = ""

    def __init__(self, name, batch, layout):
        self.name, self.batch, self.layout = name, batch, layout
        self.out = torch.full_like(batch.q, float("nan"))

    def pair(self, layer):
        return self.batch.k(layer, self.layout), self.batch.v(layer, self.layout)


class FlashInferDecode(Contender):
    """BatchDecodeWithPagedKVCacheWrapper: CUDA cores, tensor cores (fa2, fa3), or cuDNN."""

    def __init__(self, name, batch, layout, **options):
        import flashinfer.decode as fi

        super().__init__(name, batch, layout)
        self.wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
            workspace(name, batch.device), layout.upper(), **options
        )
        self.backend = options.get("backend", "auto")

    def plan(self):
        b = self.batch
        more = {"block_tables": b.table} if self.backend == "cudnn" else {}
        self.wrapper.plan(
            b.indptr, b.indices, b.last, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE,
            pos_encoding_mode="NONE", q_data_type=b.dtype, kv_data_type=b.dtype, **more,
        )  # fmt: skip
        self.note = self.wrapper.resolved_backend

    def run(self, layer):
        self.wrapper.run(self.batch.q, self.pair(layer), out=self.out)


class FlashInferHolistic(Contender):
    """BatchAttention: one persistent kernel."""

    def __init__(self, name, batch, layout):
        from flashinfer.attention import BatchAttention

        super().__init__(name, batch, layout)
        key = f"{name}.{layout}"
        if key not in _workspaces:
            _workspaces[key] = BatchAttention(layout.upper(), str(batch.device))
        self.wrapper = _workspaces[key]
        self.lse = torch.empty(batch.rows, QUERY_HEADS, device=batch.device)

    def plan(self):
        b = self.batch
        self.wrapper.plan(
            b.query_starts, b.indptr_device, b.indices, b.seq_len, QUERY_HEADS, KV_HEADS, HEAD_DIM,
            HEAD_DIM, PAGE, causal=True, q_data_type=b.dtype, kv_data_type=b.dtype,
        )  # fmt: skip

    def run(self, layer):
        self.wrapper.run(self.batch.q, self.pair(layer), out=self.out, lse=self.lse)


class FlashInferXqa(Contender):
    """xqa_batch_decode_with_kv_cache: a dense block table, nothing to plan."""

    def __init__(self, name, batch, layout):
        import flashinfer.decode as fi

        super().__init__(name, batch, layout)
        self.call, self.space = fi.xqa_batch_decode_with_kv_cache, workspace(name, batch.device)

    def run(self, layer):
        b = self.batch
        self.call(
            b.q, self.pair(layer), self.space, b.table, b.seq_len, b.cell.longest,
            bmm1_scale=1 / math.sqrt(HEAD_DIM), kv_layout=self.layout.upper(), out=self.out,
        )  # fmt: skip


class FlashInferCascade(Contender):
    """MultiLevelCascadeAttentionWrapper over the cell's own tree."""

    def __init__(self, name, batch, layout, backend=None):
        from flashinfer.cascade import MultiLevelCascadeAttentionWrapper

        super().__init__(name, batch, layout)
        if not batch.cell.shared:
            raise NotImplementedError("nothing is shared in this cell")
        levels = batch.cell.levels
        self.wrapper = MultiLevelCascadeAttentionWrapper(
            len(levels), workspace(name, batch.device), layout.upper()
        )
        if backend:
            for level in self.wrapper._batch_prefill_wrappers:
                level._requested_backend = level._backend = backend
        self.arrays = [[], [], [], []]
        for level, pages in zip(levels, batch.node_pages):
            starts = [first for first, _, _ in level] + [batch.rows]
            counts = torch.tensor([0] + [len(p) for p in pages]).cumsum(0)
            last = [(tokens - 1) % PAGE + 1 for _, _, tokens in level]
            ids = torch.cat([torch.from_numpy(p) for p in pages]).to(batch.device)
            for array, x in zip(self.arrays, (torch.tensor(starts), counts, ids,
                                              torch.tensor(last))):  # fmt: skip
                array.append(x.int())

    def plan(self):
        b = self.batch
        self.wrapper.plan(*self.arrays, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE,
                          q_data_type=b.dtype, kv_data_type=b.dtype)  # fmt: skip
        self.note = "+".join(w._backend for w in self.wrapper._batch_prefill_wrappers)

    def run(self, layer):
        self.out = self.wrapper.run(self.batch.q, self.pair(layer))


class FlashAttention3(Contender):
    """As vLLM calls it for decode: varlen, a block table, splits found on the device. `splits` is
    the bound vLLM gives under CUDA graphs (32), or 0 for the kernel's own rule."""

    plan_in_graph = True

    def __init__(self, name, batch, layout, splits):
        super().__init__(name, batch, layout)
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            torch.ops.load_library(os.path.join(KIT or "", "fa3/_vllm_fa3_C.abi3.so"))
        self.splits, self.metadata = splits, None

    def plan(self):
        b = self.batch
        self.metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            b.rows, 1, b.cell.longest, QUERY_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, b.dtype,
            b.seq_len, b.query_starts, None, None, None, None, PAGE, 0, True, -1, -1, False,
            self.splits, None, 0,
        )  # fmt: skip

    def run(self, layer):
        b = self.batch
        k, v = self.pair(layer)
        if self.layout == "hnd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        torch.ops._vllm_fa3_C.fwd(
            b.q, k, v, None, None, None, self.out, b.query_starts, None, None, None, b.seq_len, 1,
            b.cell.longest, b.table, None, None, None, None, None, None, None, None,
            1 / math.sqrt(HEAD_DIM), True, -1, -1, 0.0, True, self.metadata, self.splits, None, 0,
            None, 1, 0, None,
        )  # fmt: skip


class Plain(Contender):
    """torch on any device, a row at a time: for trying compare_peers.py out without a GPU."""

    def run(self, layer):
        group = QUERY_HEADS // KV_HEADS
        for row, n in enumerate(self.batch.lens):
            pages = torch.from_numpy(self.batch.row_pages[row]).long()
            k, v = (x[pages] if self.layout == "nhd" else x[pages].transpose(1, 2)
                    for x in self.pair(layer))  # fmt: skip
            k, v = (x.reshape(-1, KV_HEADS, HEAD_DIM)[:n].float() for x in (k, v))
            q = self.batch.q[row].float().view(KV_HEADS, group, HEAD_DIM)
            weights = (q @ k.permute(1, 2, 0) / math.sqrt(HEAD_DIM)).softmax(-1)
            self.out[row] = (weights @ v.transpose(0, 1)).view(QUERY_HEADS, HEAD_DIM)


def _decode(**options):
    return lambda name, batch, layout: FlashInferDecode(name, batch, layout, **options)


PEERS = {
    "fi_tc": _decode(use_tensor_cores=True),
    "fi_cuda": _decode(use_tensor_cores=False),
    "fi_holistic": FlashInferHolistic,
    "fi_xqa": FlashInferXqa,
    "fi_fa3": _decode(use_tensor_cores=True, backend="fa3"),
    "fi_cudnn": _decode(backend="cudnn"),
    "fi_cascade": FlashInferCascade,
    "fi_cascade_fa2": lambda n, b, x: FlashInferCascade(n, b, x, backend="fa2"),
    "fa3": lambda n, b, x: FlashAttention3(n, b, x, splits=32),
    "fa3_own": lambda n, b, x: FlashAttention3(n, b, x, splits=0),
    "plain": Plain,
}
USUAL = ["fi_tc", "fi_cuda", "fi_holistic", "fi_xqa", "fa3", "fa3_own", "fi_cudnn", "fi_fa3"]
CASCADES = ["fi_cascade", "fi_cascade_fa2"]


def versions():
    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    except Exception as e:
        found["flashinfer"] = f"not importable: {e}"
    if KIT and os.path.exists(os.path.join(KIT, "fa3")):
        found["fa3"] = "of vllm 0.24.0"
    return found
