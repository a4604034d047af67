# SPDX-License-Identifier: Apache-2.0
"""BatchDecode: attention of a batch of decode rows over a paged cache, planned once a step."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any

import numpy as np

from . import _abi
from ._arrays import (
    View,
    code_of,
    dtype_code,
    dtype_title,
    empty_like,
    integers,
    is_tensor,
    view,
)
from ._lib import lib, sized
from .cache import LAYOUTS, c_cache, pair_of
from .errors import InvalidArgument, NotSupported, OutOfRange, WrongState
from .executor import Executor, default_executor
from .plans import (
    ROUTES,
    DevicePlan,
    Explanation,
    HostPlan,
    OptionsKey,
    ShapeKey,
    Table,
    explanation,
    route_name,
    rows_from_csr,
    stats_of,
)

POLICIES = {"static": _abi.POLICY_STATIC, "roofline": _abi.POLICY_ROOFLINE}


def lse_is_base2(lse_base: Any) -> bool:
    if lse_base in (2, "2"):
        return True
    if lse_base in ("e", math.e):
        return False
    raise InvalidArgument(f"lse_base is {lse_base!r}, wanted 2 or 'e'")


class BatchDecode:
    """Decode attention on a paged KV cache: plan() once a step, run() once a layer.

    The calls are those of FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``: what that class
    takes by name is taken here, what cannot be granted raises :class:`NotSupported` and says why.
    NumPy arrays and CPU tensors are computed on the CPU, CUDA tensors on their device and torch's
    current stream.

    Args:
        float_workspace_buffer: accepted and not used; the plan owns its workspace.
        kv_layout: "NHD": a page is [page_size, kv_heads, head_dim]; "HND": [kv_heads, page_size,
            head_dim].
        use_cuda_graph: the sizes are frozen at the first plan(), so that a captured run() stays
            valid; give max_batch_size and max_seq_len. Then plan() writes into the same device
            memory each step: outside the graph, or captured with it when block_tables and
            seq_lens are device tensors.
        backend: "auto" only; use `route` for ours.
        lse_base: logarithm of the returned LSE, 2 (FlashInfer's) or "e".
        route: "auto" ("balanced"); or "shared" (prefixes that rows have in common are found in the
            block table and read once), balanced, split, workqueue, bucket_exact, bucket_padded.
        chained: the promise of a caller with a prefix cache that equal pages at an index mean equal
            pages at all indices before it; "shared" finds prefixes faster then.
        policy: instead of a route: "static" or "roofline" choose one from the lengths.
        executor: what runs it; None = the process's shared one of the device that plan() sees.
        max_batch_size, max_seq_len: limits, so that later plans need no new memory; 0 = grow.

    Threads: an object serves one call at a time, others wait; two streams need two objects.
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        *,
        lse_base: Any = 2,
        route: str = "auto",
        policy: str | None = None,
        chained: bool = False,
        executor: Executor | None = None,
        max_batch_size: int = 0,
        max_seq_len: int = 0,
        **unknown: Any,
    ) -> None:
        del float_workspace_buffer, use_tensor_cores  # ours does not need to be told
        del paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        if kv_layout not in LAYOUTS:
            raise InvalidArgument(f"kv_layout is {kv_layout!r}, wanted NHD or HND")
        if backend != "auto":
            raise NotSupported(f"backend is {backend!r}: only 'auto' is known here")
        if route not in ROUTES or route == "flashinfer":
            raise InvalidArgument(f"route is {route!r}, known are {', '.join(ROUTES)}")
        if policy is not None and policy not in POLICIES:
            raise InvalidArgument(f"policy is {policy!r}, known are {', '.join(POLICIES)}")
        _refuse_set(unknown)
        self._layout = kv_layout
        self._frozen = use_cuda_graph
        self._base2 = lse_is_base2(lse_base)
        self._route, self._policy, self._chained = route, policy, chained
        self._executor = executor
        self._limits = (max_batch_size, max_seq_len)
        self._host = HostPlan()
        self._device_plan: DevicePlan | None = None
        self._graph_table: Any = None
        self._planned = False
        self._reason = ""
        self._lock = threading.RLock()

    # --- plan ---------------------------------------------------------------------------------

    def plan(
        self,
        indptr: Any = None,
        indices: Any = None,
        last_page_len: Any = None,
        num_qo_heads: int = 0,
        num_kv_heads: int = 0,
        head_dim: int = 0,
        page_size: int = 0,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        max_seq_len: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        stream: Any = None,
        **unknown: Any,
    ) -> None:
        """Prepares a step from the rows' lengths and pages; serves every layer of that shape.

        Give either FlashInfer's three arrays or the dense pair; int32 both, host or device.

        Args:
            indptr: [rows + 1]; row r owns indices[indptr[r] : indptr[r + 1]].
            indices: [pages in all], page ids.
            last_page_len: [rows], tokens in a row's last page, 1 .. page_size.
            block_tables: [rows, max_pages]; entries past ceil(seq_len / page_size) are not read.
            seq_lens: [rows], tokens of a row, its new ones included; 0 = an empty row. On a device
                plan() then reads nothing on the host, and pages and lengths may change under it
                until the planner's kernel has run.
            num_qo_heads, num_kv_heads, head_dim, page_size: of the model and cache; num_qo_heads
                is a multiple of num_kv_heads, at most 32 times; head_dim a multiple of 8 up to 256.
            window_left: earlier keys that a query sees besides its own; -1 = all.
            logits_soft_cap: c > 0: a logit becomes c * tanh(logit / c).
            q_data_type, kv_data_type, o_data_type: "float16", "bfloat16", "float32", kv also
                "float8_e4m3fn"; strings, NumPy or torch dtypes. kv_data_type None = data_type, or
                q's; o_data_type None = q's.
            sm_scale: None = 1 / sqrt(head_dim).
            max_seq_len: with device seq_lens: what no length exceeds; None = the table's width.
            fixed_split_size: pages; batch-invariant: a row's bits then depend on nothing beside
                it. fixed_split_size * page_size must be a multiple of 64.
            disable_split_kv: batch-invariant, rows are not cut at all.
            q_len_per_req: query tokens a row, the last of its seq_len; causal among them.
            stream: CUDA only; None = torch's current stream.
        """
        del rope_scale, rope_theta, non_blocking
        if pos_encoding_mode != "NONE":
            raise NotSupported(
                f"pos_encoding_mode is {pos_encoding_mode!r}: rotate q and k before the call (NONE)"
            )
        _refuse_set(unknown)
        if sm_scale is not None and sm_scale == 0:
            raise InvalidArgument("sm_scale is 0")
        with self._lock:
            self._planned = False
            self._shape = ShapeKey(
                num_qo_heads, num_kv_heads, head_dim, page_size, q_len_per_req, window_left + 1
            )
            if window_left < -1 or page_size < 1:
                raise InvalidArgument(f"window_left is {window_left}, page_size {page_size}")
            kv = kv_data_type if kv_data_type is not None else data_type
            self._q_dtype = dtype_code(q_data_type, "q_data_type")
            self._kv_dtype = self._q_dtype if kv is None else dtype_code(kv, "kv_data_type")
            self._o_dtype = (
                self._q_dtype if o_data_type is None else dtype_code(o_data_type, "o_data_type")
            )
            self._soft_cap = logits_soft_cap or 0.0
            self._sm_scale = sm_scale
            self._invariance = _chunk(fixed_split_size, disable_split_kv, page_size)
            if block_tables is not None:
                self._plan_dense(block_tables, seq_lens, max_seq_len, stream)
            else:
                self._plan_csr(indptr, indices, last_page_len, stream)
            self._planned = True

    begin_forward = plan

    def _plan_csr(self, indptr: Any, indices: Any, last_page_len: Any, stream: Any) -> None:
        if indptr is None or indices is None or last_page_len is None:
            raise InvalidArgument("plan() wants indptr, indices, last_page_len, or block_tables")
        device = view(indices, "indices").device if is_tensor(indices) else None
        table, seq_len = rows_from_csr(
            integers(indptr, "indptr"),
            integers(indices, "indices"),
            integers(last_page_len, "last_page_len"),
            self._shape.page_tokens,
        )
        if device is None or device == "cpu":
            executor = self._use(self._executor.device if self._executor else "cpu")
        else:
            executor = self._use(device)
        if executor.kind == "cpu":
            self._set_host_rows(table, seq_len)
        else:
            self._set_device_rows(executor, table, seq_len, stream)

    def _plan_dense(self, tables: Any, seq_lens: Any, max_seq_len: int | None, stream: Any) -> None:
        if seq_lens is None:
            raise InvalidArgument("plan() with block_tables wants seq_lens")
        if not is_tensor(tables):
            tables = np.asarray(tables, dtype=np.int32)
        seen = view(tables, "block_tables")
        if len(seen.shape) != 2 or seen.element != "int32":
            raise InvalidArgument(
                f"block_tables is {seen.element} {seen.shape}, wanted int32 [rows, max_pages]"
            )
        if seen.shape[1] > 1 and seen.strides[1] != 1:
            raise InvalidArgument("block_tables: the pages of a row must be contiguous")
        executor = self._use(seen.device)
        if executor.kind == "cpu":
            table = tables.numpy() if seen.is_torch else tables
            self._set_host_rows(table, integers(seq_lens, "seq_lens", seen.shape[0]))
            return
        lengths = view(seq_lens, "seq_lens")
        if lengths.device != seen.device:
            if lengths.device != "cpu":
                raise InvalidArgument(f"seq_lens on {lengths.device}, the table on {seen.device}")
            host = integers(seq_lens, "seq_lens", seen.shape[0])
            self._set_device_rows(executor, tables, host, stream)
            return
        if lengths.element != "int32" or lengths.shape != (seen.shape[0],):
            raise InvalidArgument(
                f"seq_lens is {lengths.element} {lengths.shape}, wanted int32 [{seen.shape[0]}]"
            )
        width = seen.shape[1] * self._shape.page_tokens
        longest = width if max_seq_len is None else min(max_seq_len, width)
        self._set_table(tables, seen)
        plan = self._device_plan_for(executor, self._options(None), seen.shape[0], longest)
        at = executor.stream(stream)
        plan.build(seen.shape[0], lengths.pointer, at, self._table, self._chained)
        self._rows, self._lengths = seen.shape[0], seq_lens

    def _use(self, device: str) -> Executor:
        given = self._executor
        if given is not None and given.device != device:
            raise InvalidArgument(f"the executor is on {given.device}, the arrays on {device}")
        self._on = given or default_executor(device)
        return self._on

    def _options(self, seq_len: np.ndarray | None) -> OptionsKey:
        """The route and its parameters; a policy needs the lengths on the host."""
        route, splits, self._reason = ROUTES[self._route], 0, "as asked"
        if self._route == "auto":
            route, self._reason = _abi.ROUTE_BALANCED, "balanced is the default"
        if self._policy is not None:
            if seq_len is None:
                raise NotSupported("a policy needs the lengths on the host")
            route, splits, self._reason = self._choose(seq_len)
        flags, chunk = self._invariance
        return OptionsKey(route=route, flags=flags, splits=splits, chunk_tokens=chunk)

    def _choose(self, seq_len: np.ndarray) -> tuple[int, int, str]:
        choice, shape = sized(_abi.Choice), self._shape.struct()
        profile = sized(_abi.Profile)
        lib.call(
            "pkv_policy_choose",
            ctypes.byref(choice),
            POLICIES[self._policy or "static"],
            _abi.ROUTE_BALANCED,
            ctypes.byref(shape),
            self._kv_dtype,
            len(seq_len),
            seq_len.ctypes.data,
            ctypes.byref(profile),
        )
        return choice.route, choice.splits, choice.reason.decode("utf-8", "replace")

    def _set_host_rows(self, table: np.ndarray, seq_len: np.ndarray) -> None:
        stride = table.strides[0] // 4 if table.shape[0] > 1 else table.shape[1]
        self._table = Table(table, table.ctypes.data, stride, table.shape[1])
        options = self._options(seq_len)
        self._host.build(self._shape, options, seq_len, self._table, self._chained)
        self._rows, self._lengths = len(seq_len), seq_len

    def _set_table(self, tables: Any, seen: View) -> None:
        stride = seen.strides[0] if seen.shape[0] > 1 else seen.shape[1]
        self._table = Table(tables, seen.pointer, stride, seen.shape[1])

    def _set_device_rows(
        self, executor: Executor, table: Any, seq_len: np.ndarray, stream: Any
    ) -> None:
        """Lengths known on the host, work on the device."""
        import torch

        if isinstance(table, np.ndarray):
            table = self._on_device_table(torch, executor, table)
        self._set_table(table, view(table, "block_tables"))
        options = self._options(seq_len)
        rows, longest = len(seq_len), int(seq_len.max(initial=0))
        at = executor.stream(stream)
        plan = self._device_plan_for(executor, options, rows, longest)
        if options.route in (_abi.ROUTE_BALANCED, _abi.ROUTE_SHARED):
            lengths = torch.from_numpy(seq_len).to(f"cuda:{executor.index}")
            plan.build(rows, lengths.data_ptr(), at, self._table, self._chained)
            self._lengths = lengths
        else:
            self._host.build(self._shape, options, seq_len)
            plan.upload(self._host, at)
            self._lengths = seq_len
        self._rows = rows

    def _on_device_table(self, torch: Any, executor: Executor, table: np.ndarray) -> Any:
        """A copy on the device; in graph mode always in the same memory."""
        host = torch.from_numpy(table)
        device = f"cuda:{executor.index}"
        if not self._frozen:
            return host.to(device)
        if self._graph_table is None:
            rows = max(self._limits[0], table.shape[0])
            pages = -(-self._limits[1] // self._shape.page_tokens)
            self._graph_table = torch.full(
                (rows, max(pages, table.shape[1])), -1, dtype=torch.int32, device=device
            )
        if table.shape[0] > self._graph_table.shape[0] or (
            table.shape[1] > self._graph_table.shape[1]
        ):
            raise OutOfRange(
                f"a table of {table.shape} in CUDA graph mode, room for "
                f"{tuple(self._graph_table.shape)}: give max_batch_size and max_seq_len"
            )
        self._graph_table[: table.shape[0], : table.shape[1]].copy_(host)
        return self._graph_table[: table.shape[0]]

    def _device_plan_for(
        self, executor: Executor, options: OptionsKey, rows: int, longest: int
    ) -> DevicePlan:
        """The device plan of these limits: the one there is, or a new and larger one."""
        old = self._device_plan
        same = (
            old is not None
            and old.executor is executor
            and (old.shape, old.options, old.kv_dtype) == (self._shape, options, self._kv_dtype)
        )
        if old is not None and same and old.fits(rows, longest):
            return old
        if old is not None and self._frozen:
            raise OutOfRange(
                f"{rows} rows of up to {longest} tokens in CUDA graph mode: it was planned for "
                f"{old.max_rows} rows of {old.max_seq_len}, shape {old.shape}"
            )
        grown = (old.max_rows, old.max_seq_len) if old is not None and same else (0, 0)
        self._device_plan = DevicePlan(
            executor,
            self._shape,
            options,
            self._kv_dtype,
            max(rows, grown[0], self._limits[0]),
            max(longest + longest // 4, grown[1], self._limits[1]),
        )
        return self._device_plan

    # --- run ----------------------------------------------------------------------------------

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        stream: Any = None,
        **unknown: Any,
    ) -> Any:
        """Attention of one layer.

        Args:
            q: [rows * q_len_per_req, num_qo_heads, head_dim]; any strides, the last 1.
            paged_kv_cache: (k, v), each [pages, page_size, kv_heads, head_dim] (NHD) or [pages,
                kv_heads, page_size, head_dim] (HND), or one array [pages, 2, ...]. Any strides,
                K and V each their own.
            q_scale: a factor on q.
            k_scale, v_scale: what stored values are multiplied by. fp8: a number, or float32
                [kv_heads]; other dtypes: a number.
            out: like q, written in place and returned; None = a new array.
            lse: float32 [rows * q_len_per_req, num_qo_heads], written in place; implies
                return_lse.
            return_lse: give (out, lse), lse = log of the softmax's denominator, in the base of the
                constructor's lse_base (2 by default); -inf for a row without keys.
            sinks: float32 [num_qo_heads]: one more logit in the denominator, without a value.
            stream: CUDA only; None = torch's current stream.

        Returns:
            out, or (out, lse).
        """
        del enable_pdl
        _refuse_set(unknown)
        with self._lock:
            if not self._planned:
                raise WrongState("run() before a plan() that succeeded")
            if window_left is not None and window_left + 1 != self._shape.window:
                raise InvalidArgument(f"window_left is {window_left}, plan() was told another")
            return self._run(
                q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, sinks, stream
            )

    forward = run

    def run_return_lse(self, q: Any, paged_kv_cache: Any, **options: Any) -> Any:
        """run() with return_lse."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def _run(
        self,
        q: Any,
        paged_kv_cache: Any,
        scales: tuple[Any, Any, Any],
        out: Any,
        lse: Any,
        return_lse: bool,
        sinks: Any,
        stream: Any,
    ) -> Any:
        shape, executor = self._shape, self._on
        rows = self._rows * shape.q_len
        wanted = (rows, shape.query_heads, shape.head_dim)
        queries = self._vectors(q, "q", wanted)
        views = pair_of(paged_kv_cache)
        if views[0].device != executor.device:
            raise InvalidArgument(f"the cache is on {views[0].device}, plan() on {executor.device}")
        q_scale, k_scale, v_scale = scales
        if self._kv_dtype == _abi.DTYPE_FP8_E4M3:
            factor, after = q_scale or 1.0, None
            cache, alive = c_cache(views, self._layout, self._kv_dtype, k_scale, v_scale)
        else:
            # A number on 16-bit keys is a number on the scores, on values one on the result.
            factor = (q_scale or 1.0) * (1.0 if k_scale is None else _number(k_scale, "k_scale"))
            after = None if v_scale is None else _number(v_scale, "v_scale")
            cache, alive = c_cache(views, self._layout, self._kv_dtype)
        if out is None:
            out = empty_like(queries, wanted, dtype_title(self._o_dtype))
        result = self._vectors(out, "out", wanted)
        args = sized(_abi.AttentionArgs)
        args.cache = ctypes.addressof(cache)
        args.block_table, args.block_table_stride = self._table.pointer, self._table.stride
        args.max_pages = self._table.max_pages
        args.q_dtype, args.q = code_of(queries, "q", self._q_dtype), queries.pointer
        args.out_dtype, args.out = code_of(result, "out", self._o_dtype), result.pointer
        if rows:
            args.q_token_stride, args.q_head_stride = queries.strides[0], queries.strides[1]
            args.out_token_stride, args.out_head_stride = result.strides[0], result.strides[1]
        args.soft_cap = self._soft_cap
        if self._sm_scale is not None or factor != 1.0:
            scale = 1.0 / math.sqrt(shape.head_dim) if self._sm_scale is None else self._sm_scale
            args.scale = scale * factor
        lse = self._lse(args, lse, return_lse, queries, rows)
        sinks = self._sinks(args, sinks, executor.device)
        self._call(executor, args, stream)
        del alive, sinks
        if after is not None and after != 1.0:
            _scale_in_place(out, after)
        return out if lse is None else (out, lse)

    def _call(self, executor: Executor, args: Any, stream: Any) -> None:
        if executor.kind == "cpu":
            args.plan = self._host.address
            args.workspace = self._host.workspace_at
            args.workspace_bytes = self._host.workspace_bytes
            run = lib.function("pkv_attention_run")
            executor.run(run, executor.handle, ctypes.byref(args))
        else:
            assert self._device_plan is not None
            self._device_plan.attend(ctypes.byref(args), executor.stream(stream))

    def _vectors(self, x: Any, name: str, wanted: tuple[int, int, int]) -> View:
        seen = view(x, name)
        if seen.device != self._on.device:
            raise InvalidArgument(f"{name} is on {seen.device}, plan() on {self._on.device}")
        if seen.shape != wanted:
            raise InvalidArgument(f"{name} has shape {seen.shape}, wanted {wanted}")
        if seen.strides[2] != 1 and wanted[2] > 1 and wanted[0] > 0:
            raise InvalidArgument(f"{name}: its last dimension must be contiguous")
        if name == "out" and not seen.is_torch and not x.flags.writeable:
            raise InvalidArgument("out is read-only")
        return seen

    def _lse(self, args: Any, lse: Any, return_lse: bool, like: View, rows: int) -> Any:
        if lse is None and not return_lse:
            return None
        wanted = (rows, self._shape.query_heads)
        if lse is None:
            lse = empty_like(like, wanted, "float32")
        seen = view(lse, "lse")
        if seen.shape != wanted or seen.element != "float32" or seen.device != like.device:
            raise InvalidArgument(
                f"lse is {seen.element} {seen.shape} on {seen.device}, wanted float32 {wanted} on "
                f"{like.device}"
            )
        if rows > 0 and seen.strides[1] != 1 and wanted[1] > 1:
            raise InvalidArgument("lse: the heads of a token must be contiguous")
        args.lse, args.lse_base2 = seen.pointer, int(self._base2)
        args.lse_token_stride = seen.strides[0] if rows > 1 else 0
        return lse

    def _sinks(self, args: Any, sinks: Any, device: str) -> Any:
        if sinks is None:
            return None
        if is_tensor(sinks):
            sinks = sinks.float().contiguous()
        else:
            sinks = np.ascontiguousarray(sinks, dtype=np.float32)
        seen = view(sinks, "sinks")
        if seen.shape != (self._shape.query_heads,) or seen.device != device:
            raise InvalidArgument(
                f"sinks is {seen.shape} on {seen.device}, wanted [{self._shape.query_heads}] on "
                f"{device}"
            )
        args.sinks = seen.pointer
        return sinks

    # --- what it did --------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """What the present plan does in one layer, in counts and bytes. On a device it waits."""
        with self._lock:
            if not self._planned:
                raise WrongState("explain() before a plan() that succeeded")
            if self._on.kind == "cpu":
                stats = stats_of(self._host.address, self._kv_dtype)
            else:
                assert self._device_plan is not None
                stats = self._device_plan.stats(self._on.stream())
            return explanation(stats, self._on, self._reason)

    @property
    def resolved_backend(self) -> str:
        """The route of the present plan."""
        return self.explain().route if self._planned else route_name(ROUTES[self._route])


class BatchDecodeWithPagedKVCacheWrapper(BatchDecode):
    """:class:`BatchDecode` under FlashInfer's name."""


def _number(value: Any, name: str) -> float:
    if hasattr(value, "shape") and tuple(value.shape) not in ((), (1,)):
        raise NotSupported(f"{name} with one value a head needs an fp8 cache")
    return float(value)


def _scale_in_place(out: Any, factor: float) -> None:
    if not is_tensor(out) and out.dtype.kind != "f":
        raise NotSupported("v_scale with a bfloat16 result in uint16: scale it yourself")
    out *= factor


def _refuse_set(unknown: dict[str, Any]) -> None:
    """Arguments of other versions are fine as long as they ask for nothing."""
    for name, value in unknown.items():
        if value not in (None, False):
            raise NotSupported(f"{name}={value!r} is not known here")


def _chunk(fixed_split_size: int | None, whole: bool, page_size: int) -> tuple[int, int]:
    """(flags, chunk_tokens) of FlashInfer's two batch-invariance controls."""
    if whole:
        return _abi.PLAN_BATCH_INVARIANT, 1 << 30
    if fixed_split_size is None or fixed_split_size <= 0:
        return 0, 0
    return _abi.PLAN_BATCH_INVARIANT, fixed_split_size * page_size
