# SPDX-License-Identifier: Apache-2.0
"""BatchAttention: rows with different numbers of query tokens in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import dtype_code, dtype_title, empty_like, integers, is_tensor, view
from .decode import BatchDecode
from .errors import InvalidArgument, NotSupported
from .executor import Executor
from .plans import Explanation


class BatchAttention:
    """Mixed batches, after FlashInfer's class of that name: prefill chunks beside decode rows.

    A plan of ours has one number of query tokens a row, so neighbours with the same number share
    one, and run() makes as many calls as there are such runs: sort rows by it.

    Args:
        kv_layout: "NHD" or "HND", as for :class:`BatchDecode`.
        lse_base: 2 or "e".
        route: as for :class:`BatchDecode`; "shared" reads prefixes that rows of one run share once.
        executor: None = the process's shared one of the arrays' device.
    """

    def __init__(
        self,
        kv_layout: str = "NHD",
        device: Any = None,
        *,
        lse_base: Any = 2,
        route: str = "auto",
        executor: Executor | None = None,
    ) -> None:
        del device
        self._options: dict[str, Any] = {
            "lse_base": lse_base,
            "route": route,
            "executor": executor,
        }
        self._layout = kv_layout
        self._parts: list[tuple[slice, BatchDecode]] = []
        self._decoders: list[BatchDecode] = []
        self._tokens = 0

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = True,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "bfloat16",
        kv_data_type: Any = "bfloat16",
        use_profiler: bool = False,
    ) -> None:
        """Prepares a step.

        Args:
            qo_indptr: int32 [rows + 1]; row r has query tokens qo_indptr[r] .. qo_indptr[r + 1].
            kv_indptr, kv_indices: int32; row r's pages are kv_indices[kv_indptr[r] : ...].
            kv_len_arr: int32 [rows], tokens of a row, its query tokens included.
            causal: a query token sees no later key. False is the same for one query token, and
                refused for more.
        """
        del use_profiler
        if head_dim_qk != head_dim_vo:
            raise NotSupported(f"head_dim_qk {head_dim_qk} and head_dim_vo {head_dim_vo} differ")
        queries, pages = np.diff(integers(qo_indptr, "qo_indptr")), integers(kv_indptr, "kv_indptr")
        lengths = integers(kv_len_arr, "kv_len_arr", len(queries))
        if not causal and (queries > 1).any():
            raise NotSupported("causal=False with more than one query token a row")
        if (queries < 0).any() or pages.shape[0] != len(queries) + 1:
            raise InvalidArgument(f"qo_indptr has {len(queries)} rows, kv_indptr {len(pages) - 1}")
        last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
        starts = np.concatenate([[0], np.cumsum(queries)])
        kind = dtype_title(dtype_code(q_data_type, "q_data_type"))
        self._parts, self._tokens, self._element = [], int(starts[-1]), kind
        self._shape = (num_qo_heads, head_dim_qk)
        for first, end in _runs(queries):
            if queries[first] == 0:
                continue
            counts = -(-lengths[first:end] // page_size)
            if (counts > np.diff(pages[first : end + 1])).any():
                raise InvalidArgument(f"rows {first} .. {end - 1}: too few pages for kv_len_arr")
            decoder = self._decoder(len(self._parts))
            decoder.plan(
                *_csr(pages[first : end + 1], counts, kv_indices, last[first:end]),
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                sm_scale=sm_scale,
                q_len_per_req=int(queries[first]),
            )
            self._parts.append((slice(int(starts[first]), int(starts[end])), decoder))

    def _decoder(self, index: int) -> BatchDecode:
        while len(self._decoders) <= index:
            self._decoders.append(BatchDecode(kv_layout=self._layout, **self._options))
        return self._decoders[index]

    def run(
        self,
        q: Any,
        kv_cache: Any,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float | None = None,
    ) -> tuple[Any, Any]:
        """q [tokens, num_qo_heads, head_dim] -> (out like q, lse float32 [tokens, num_qo_heads]).

        The other arguments are those of :meth:`BatchDecode.run`.
        """
        del logits_soft_cap  # plan() has it
        seen = view(q, "q")
        if seen.shape != (self._tokens, *self._shape):
            raise InvalidArgument(
                f"q has shape {seen.shape}, wanted {(self._tokens, *self._shape)}"
            )
        if out is None:
            out = empty_like(seen, seen.shape, self._element)
        if lse is None:
            lse = empty_like(seen, seen.shape[:2], "float32")
        for part, decoder in self._parts:
            decoder.run(
                q[part], kv_cache, out=out[part], lse=lse[part], k_scale=k_scale, v_scale=v_scale
            )
        return out, lse

    def explain(self) -> list[Explanation]:
        """One for each run of rows with equal numbers of query tokens."""
        return [decoder.explain() for _, decoder in self._parts]


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """[first, end) of each run of equal values."""
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)]
    return [(a, b) for a, b in zip(bounds, bounds[1:]) if b > a]


def _csr(
    indptr: np.ndarray, counts: np.ndarray, indices: Any, last: np.ndarray
) -> tuple[Any, Any, Any]:
    """The three arrays of a run of rows, spare pages left out."""
    if np.array_equal(np.diff(indptr), counts):
        return indptr, indices, last
    host = integers(indices, "kv_indices")
    parts = [host[a : a + n] for a, n in zip(indptr[:-1], counts)]
    kept: Any = np.concatenate(parts) if parts else host[:0]
    if is_tensor(indices):
        import torch

        kept = torch.from_numpy(kept).to(indices.device)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), kept, last
