# SPDX-License-Identifier: Apache-2.0
"""Plans of the decode rows: one for each window class and number of query tokens, sized once for
the engine's limits, rebuilt each step on the current stream, shared by all layers of the class.

Knows torch, not vLLM. CPU tensors are computed by the CPU backend: that is how the plug-in's logic
is tested without a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any, NamedTuple

from .. import _abi
from .._arrays import integers
from .._lib import lib, sized
from ..errors import PkvError
from ..executor import Executor
from ..plans import DevicePlan, HostPlan, OptionsKey, ShapeKey, Table
from .engine_cache import c_cache

logger = logging.getLogger("vllm.persistentkv")

_QUERY = {
    "torch.float16": _abi.DTYPE_F16,
    "torch.bfloat16": _abi.DTYPE_BF16,
    "torch.float32": _abi.DTYPE_F32,
}


def wants(name: str, default: bool) -> bool:
    """An on/off switch from the environment."""
    value = os.environ.get(f"PERSISTENTKV_VLLM_{name}", "")
    return default if value == "" else value not in ("0", "off", "no", "false")


class PlanClass(NamedTuple):
    """What layers must have in common to share a plan."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    window: int  # keys a query sees, its own included; 0 = all
    kv_dtype: int

    def shape(self, q_len: int) -> ShapeKey:
        return ShapeKey(*self[:4], q_len, self.window)


def share_refusal(executor: Executor, plan_class: PlanClass) -> str:
    """Why shared prefixes cannot be planned and read on this executor; "" when they can.

    Asked by doing it: one row of one token, once for each class.
    """
    if executor.kind == "cpu":
        return "" if lib.has("pkv_plan_build_shared") else "this libpkv has no shared plans"
    import torch

    where = f"cuda:{executor.index}"
    heads, dim, page = plan_class.kv_heads, plan_class.head_dim, plan_class.page_tokens
    element = {_abi.DTYPE_F16: torch.float16, _abi.DTYPE_BF16: torch.bfloat16}
    kv = torch.zeros(
        (1, 2, page, heads, dim), dtype=element.get(plan_class.kv_dtype, torch.uint8), device=where
    )
    query = torch.zeros(
        (1, plan_class.query_heads, dim),
        dtype=element.get(plan_class.kv_dtype, torch.bfloat16),
        device=where,
    )
    table = torch.zeros((1, 1), dtype=torch.int32, device=where)
    lengths = torch.ones(1, dtype=torch.int32, device=where)
    stream = torch.cuda.current_stream(executor.index).cuda_stream
    options = OptionsKey(route=_abi.ROUTE_SHARED)
    try:
        plan = DevicePlan(executor, plan_class.shape(1), options, plan_class.kv_dtype, 1, page)
        plan.build(1, lengths.data_ptr(), stream, _table(table))
        call = LayerCall(c_cache(kv, heads, dim), scale=1.0)
        plan.attend(call.arguments(query, query, table), stream)
        with executor.calling() as handle:
            lib.call("pkv_device_synchronize", handle, stream)
    except PkvError as e:
        return str(e)
    return ""


def _table(block_table: Any) -> Table:
    return Table(block_table, block_table.data_ptr(), block_table.stride(0), block_table.shape[1])


def shared_rows() -> int:
    """From so many rows on a batch is planned as a tree of shared prefixes, 2 at least.

    Below, looking for them costs a step more than most batches save: 2 % of one with 8 rows that
    share nothing (docs/results.md).
    """
    value = os.environ.get("PERSISTENTKV_VLLM_SHARED_ROWS", "")
    if not value.isdecimal():
        if value:
            logger.warning("PERSISTENTKV_VLLM_SHARED_ROWS is %r, no number: 16 is taken", value)
        return 16
    return max(2, int(value))


class DecodePlans:
    """The plans of one class.

    Which of two routes a batch takes is a matter of its number of rows alone, padding included, so
    that a captured graph and the build() before its replay always mean the same plan.

    Args:
        executor: of the worker's device.
        max_rows, max_seq_len: the engine's limits; memory is taken for them, once.
        q_lens: numbers of query tokens a row to have plans ready for.
    """

    def __init__(
        self,
        executor: Executor,
        plan_class: PlanClass,
        max_rows: int,
        max_seq_len: int,
        q_lens: tuple[int, ...] = (1,),
    ) -> None:
        self.executor, self.plan_class = executor, plan_class
        self.max_rows, self.max_seq_len = max_rows, max_seq_len
        self.share = wants("SHARED", True)
        if self.share:
            why_not = share_refusal(executor, plan_class)
            if why_not:
                logger.warning("shared prefixes are read row by row: %s", why_not)
                self.share = False
        self._shared_rows = shared_rows()
        self._overlap = wants("OVERLAP", True)
        self._q_lens = frozenset(q_lens)
        self._plans: dict[tuple[int, bool], DevicePlan | HostPlan] = {}
        for q_len in q_lens:
            for shares in {self.shares(1), self.shares(max_rows)}:
                self._plans[q_len, shares] = self._plan(q_len, shares)

    def shares(self, rows: int) -> bool:
        """Whether a batch of so many rows is planned as a tree of shared prefixes."""
        return self.share and rows >= self._shared_rows

    def _options(self, shares: bool) -> OptionsKey:
        return OptionsKey(route=_abi.ROUTE_SHARED if shares else _abi.ROUTE_BALANCED)

    def _plan(self, q_len: int, shares: bool) -> DevicePlan | HostPlan:
        if self.executor.kind == "cpu":
            return HostPlan()
        return DevicePlan(
            self.executor,
            self.plan_class.shape(q_len),
            self._options(shares),
            self.plan_class.kv_dtype,
            self._most_rows(shares),
            self.max_seq_len,
            overlap=self._overlap,
        )

    def _most_rows(self, shares: bool) -> int:
        """What a plan of this kind has to have room for."""
        if self.share and not shares:
            return min(self.max_rows, self._shared_rows - 1)
        return self.max_rows

    def ready(self, rows: int, q_len: int) -> bool:
        """Whether there is a plan for that."""
        return rows <= self.max_rows and q_len in self._q_lens

    def build(self, rows: int, q_len: int, seq_lens: Any, block_table: Any, stream: int) -> None:
        """Plans `rows` rows of q_len tokens: int32 tensors seq_lens [>= rows], block_table
        [>= rows, pages] on the device. Rows without tokens have length 0."""
        shares = self.shares(rows)
        plan = self._plans[q_len, shares]
        # Ids are not promised to be chained: a block may be computed twice before it is cached.
        if isinstance(plan, HostPlan):
            lengths = integers(seq_lens[:rows], "seq_lens", rows)
            table = _table(block_table)
            plan.build(self.plan_class.shape(q_len), self._options(shares), lengths, table)
        else:
            table = _table(block_table) if shares else None
            plan.build(rows, seq_lens.data_ptr(), stream, table)

    def attend(self, rows: int, q_len: int, args: Any, stream: int) -> None:
        """One layer of the batch that was built last with `rows` and q_len: args as
        LayerCall.arguments() gives them."""
        plan = self._plans[q_len, self.shares(rows)]
        if isinstance(plan, HostPlan):
            struct = args._obj
            struct.plan = plan.address
            struct.workspace, struct.workspace_bytes = plan.workspace_at, plan.workspace_bytes
            executor = self.executor
            executor.run(lib.function("pkv_attention_run"), executor.handle, args)
        else:
            plan.attend(args, stream)


class LayerCall:
    """What does not change between the steps of a layer: cache, scales, scale, cap, sinks."""

    def __init__(
        self,
        cache: Any,
        scale: float,
        soft_cap: float = 0.0,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        sinks: Any = None,
    ) -> None:
        self._alive = (k_scale, v_scale, sinks)
        self.cache = cache
        if cache.dtype == _abi.DTYPE_FP8_E4M3:
            for which, one in (("k", k_scale), ("v", v_scale)):
                if hasattr(one, "data_ptr"):  # float32 [kv_heads] on the device
                    setattr(cache, f"{which}_head_scale", one.data_ptr())
                else:
                    setattr(cache, f"{which}_scale", float(one))
        args = sized(_abi.AttentionArgs)
        args.cache = ctypes.addressof(cache)
        args.keeps = cache  # an address keeps nothing alive; args may outlive this object
        args.scale, args.soft_cap = scale, soft_cap
        if sinks is not None:
            args.sinks = sinks.data_ptr()
        self._args, self._at = args, ctypes.byref(args)
        self._like: tuple[Any, ...] = ()  # the call that the struct describes

    def arguments(self, query: Any, output: Any, block_table: Any, lse: Any = None) -> Any:
        """byref of the struct for one call, the same one each time: query, output [tokens, heads,
        d] with the last dimension contiguous; lse float32 [tokens, heads] in natural logarithms,
        or None."""
        args = self._args
        like = (
            query.stride(),
            query.dtype,
            output.stride(),
            output.dtype,
            block_table.stride(),
            block_table.shape[1],
        )
        if lse is not None or like != self._like:
            self._describe(query, output, block_table, lse)
            self._like = () if lse is not None else like
        args.q, args.out = query.data_ptr(), output.data_ptr()
        args.block_table = block_table.data_ptr()
        return self._at

    def _describe(self, query: Any, output: Any, block_table: Any, lse: Any) -> None:
        """Everything but the three addresses: calls of a layer differ in those alone, mostly."""
        args = self._args
        args.q_dtype, args.out_dtype = _QUERY[str(query.dtype)], _QUERY[str(output.dtype)]
        args.q_token_stride, args.q_head_stride = query.stride(0), query.stride(1)
        args.out_token_stride, args.out_head_stride = output.stride(0), output.stride(1)
        args.max_pages, args.block_table_stride = block_table.shape[1], block_table.stride(0)
        args.lse = None if lse is None else lse.data_ptr()
        args.lse_token_stride = 0 if lse is None else lse.stride(0)
