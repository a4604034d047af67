# SPDX-License-Identifier: Apache-2.0
"""Plans and what they stand on: memory sized from limits once, then one build a step."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _abi
from ._arrays import aligned
from ._lib import lib, sized
from .errors import InvalidArgument, NotSupported
from .executor import Executor

ROUTES = {
    "auto": _abi.ROUTE_AUTO,
    "bucket_exact": _abi.ROUTE_BUCKET_EXACT,
    "bucket_padded": _abi.ROUTE_BUCKET_PADDED,
    "split": _abi.ROUTE_SPLIT,
    "workqueue": _abi.ROUTE_WORKQUEUE,
    "balanced": _abi.ROUTE_BALANCED,
    "shared": _abi.ROUTE_SHARED,
    "flashinfer": _abi.ROUTE_FLASHINFER,
}


def route_name(route: int) -> str:
    return lib.function("pkv_route_name")(route).decode()


class ShapeKey(NamedTuple):
    """What all layers that share a plan have in common (pkv_shape)."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    q_len: int
    window: int  # keys a query sees, its own included; 0 = all

    def struct(self) -> Any:
        shape = sized(_abi.Shape)
        for name, value in self._asdict().items():
            setattr(shape, name, value)
        return shape


class OptionsKey(NamedTuple):
    """How to plan (pkv_plan_options); 0 is the library's default."""

    route: int = _abi.ROUTE_BALANCED
    flags: int = 0
    parts: int = 0
    splits: int = 0
    chunk_tokens: int = 0

    def struct(self) -> Any:
        options = sized(_abi.PlanOptions)
        for name, value in self._asdict().items():
            setattr(options, name, value)
        return options


@dataclass(frozen=True)
class Explanation:
    """What one step with the present plan does in one layer. Bytes are of K and V together."""

    device: str
    isa: str
    threads: int
    route: str
    reason: str
    rows: int
    launches: int
    tasks: int
    partial_states: int
    merge_state_bytes: int
    useful_kv_bytes: int
    padded_kv_bytes: int
    max_part_cost: int
    total_cost: int
    plan_bytes: int
    workspace_bytes: int
    nodes: int  # shared prefixes that are read once
    unique_kv_bytes: int  # useful bytes with each node's counted once
    dedup_ratio: float  # useful / unique
    tile_fill: float  # query rows in the nodes' tiles, of all their places

    def __str__(self) -> str:
        runs_on = self.device if self.threads == 0 else f"{self.isa}, {self.threads} threads"
        shared = ""
        if self.nodes:
            shared = f", {self.nodes} shared prefixes read once ({self.dedup_ratio:.2f} times less)"
        return (
            f"{self.route} on {runs_on} ({self.reason}): {self.rows} rows, {self.tasks} tasks in "
            f"{self.launches} launches, {self.unique_kv_bytes} bytes of K and V read"
            f" (+{self.padded_kv_bytes} padding){shared}, {self.partial_states} partial states of "
            f"{self.merge_state_bytes} bytes"
        )


def stats_of(plan_address: int, kv_dtype: int) -> Any:
    stats = sized(_abi.PlanStats)
    lib.call("pkv_plan_get_stats", ctypes.byref(stats), plan_address, kv_dtype)
    return stats


def explanation(stats: Any, executor: Executor, reason: str) -> Explanation:
    names = [name for name in Explanation.__dataclass_fields__ if hasattr(stats, name)]
    values = {name: getattr(stats, name) for name in names if name != "route"}
    return Explanation(
        device=executor.device,
        isa=executor.isa,
        threads=executor.threads,
        route=route_name(stats.route),
        reason=reason,
        **values,
    )


class Table(NamedTuple):
    """A dense block table: int32 [rows, max_pages] at an address."""

    owner: Any
    pointer: int
    stride: int
    max_pages: int


def sharing_of(table: Table, chained: bool) -> Any:
    """pkv_sharing that finds equal leading pages in a table; the table must stay alive."""
    sharing = sized(_abi.Sharing)
    sharing.flags = _abi.TABLE_CHAINED if chained else 0
    sharing.block_table, sharing.block_table_stride = table.pointer, table.stride
    sharing.max_pages = table.max_pages
    return sharing


class _SharedBuild:
    """The call that plans shared prefixes, and its struct, filled in anew where a table differs."""

    def __init__(self) -> None:
        self.build = lib.function("pkv_device_plan_build_shared")
        self._of: tuple[int, int, int, bool] = (0, 0, 0, False)
        self._sharing: Any = None
        self._at: Any = None

    def sharing_of(self, table: Table, chained: bool) -> Any:
        key = (table.pointer, table.stride, table.max_pages, chained)
        if self._sharing is None or key != self._of:
            self._sharing = sharing_of(table, chained)
            self._at = ctypes.byref(self._sharing)
            self._of = key
        return self._at


class HostPlan:
    """A plan in host memory, with the workspace that it needs on the CPU."""

    def __init__(self) -> None:
        self.address = 0
        self._memory: np.ndarray | None = None
        self._at, self._bytes = 0, 0
        self._workspace: np.ndarray | None = None
        self.workspace_at, self.workspace_bytes = 0, 0

    def build(
        self,
        shape: ShapeKey,
        options: OptionsKey,
        seq_len: np.ndarray,
        table: Table | None = None,
        chained: bool = False,
    ) -> None:
        """`table` (on the host) says what rows share; the shared route wants it."""
        c_shape, c_options = shape.struct(), options.struct()
        rows, longest = len(seq_len), int(seq_len.max(initial=0))
        plan_bytes, workspace_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        self.address = 0
        lib.call(
            "pkv_plan_size",
            ctypes.byref(plan_bytes),
            ctypes.byref(workspace_bytes),
            ctypes.byref(c_shape),
            ctypes.byref(c_options),
            rows,
            max(longest, 0),
        )
        if plan_bytes.value > self._bytes:
            self._bytes = plan_bytes.value + plan_bytes.value // 4  # lengths grow step by step
            self._memory, self._at = aligned(self._bytes)
        if workspace_bytes.value > self.workspace_bytes:
            self.workspace_bytes = workspace_bytes.value + workspace_bytes.value // 4
            self._workspace, self.workspace_at = aligned(self.workspace_bytes)
        built = ctypes.c_void_p()
        arguments: list[Any] = [
            ctypes.byref(built),
            self._at,
            self._bytes,
            ctypes.byref(c_shape),
            ctypes.byref(c_options),
            rows,
            seq_len.ctypes.data,
        ]
        if options.route == _abi.ROUTE_SHARED and table is not None:
            sharing = sharing_of(table, chained)
            lib.call("pkv_plan_build_shared", *arguments, ctypes.byref(sharing))
        else:
            lib.call("pkv_plan_build", *arguments)
        self.address = built.value or 0


def _destroy_device_plan(pid: int, handle: int) -> None:
    if os.getpid() == pid:
        lib.function("pkv_device_plan_destroy")(handle)


class DevicePlan:
    """A plan that lives on the device: created for limits, rebuilt there from lengths."""

    def __init__(
        self,
        executor: Executor,
        shape: ShapeKey,
        options: OptionsKey,
        kv_dtype: int,
        max_rows: int,
        max_seq_len: int,
        overlap: bool = False,
    ) -> None:
        if not lib.has("pkv_device_plan_create"):
            raise NotSupported("this libpkv has no device plans")
        self.executor = executor
        self.shape, self.options, self.kv_dtype = shape, options, kv_dtype
        self.max_rows, self.max_seq_len = max_rows, max_seq_len
        handle = ctypes.c_void_p()
        c_shape, c_options = shape.struct(), options.struct()
        with executor.calling() as on:
            lib.call(
                "pkv_device_plan_create",
                ctypes.byref(handle),
                on,
                ctypes.byref(c_shape),
                ctypes.byref(c_options),
                kv_dtype,
                max_rows,
                max_seq_len,
            )
        self.handle = handle.value or 0
        # The executor must outlive the plan: the finalizer keeps it.
        finalizer = weakref.finalize(self, _finish_device_plan, executor, os.getpid(), self.handle)
        finalizer.atexit = False
        lib.function("pkv_device_plan_set_overlap")(self.handle, int(overlap))
        self._build: Any = lib.function("pkv_device_plan_build")
        self._attention: Any = lib.function("pkv_device_attention")
        self._shared: _SharedBuild | None = None
        if options.route == _abi.ROUTE_SHARED and lib.has("pkv_device_plan_build_shared"):
            self._shared = _SharedBuild()

    def fits(self, rows: int, max_seq_len: int) -> bool:
        return rows <= self.max_rows and max_seq_len <= self.max_seq_len

    def build(
        self,
        rows: int,
        seq_len: int,
        stream: int,
        table: Table | None = None,
        chained: bool = False,
    ) -> None:
        """Plans from `rows` lengths at a device address, on the stream; the shared route from the
        table (there too) as well."""
        if self.options.route != _abi.ROUTE_SHARED or table is None:
            self.executor.run(self._build, self.handle, rows, seq_len, stream)
            return
        shared = self._shared
        if shared is None:
            raise NotSupported("this libpkv has no shared plans on a device")
        sharing = shared.sharing_of(table, chained)
        self.executor.run(shared.build, self.handle, rows, seq_len, sharing, stream)

    def attend(self, args: Any, stream: int) -> None:
        """One layer: args = byref of pkv_attention_args without plan and workspace."""
        executor = self.executor
        executor.run(self._attention, executor.handle, self.handle, args, stream)

    def upload(self, host: HostPlan, stream: int) -> None:
        with self.executor.calling():
            lib.call("pkv_device_plan_upload", self.handle, host.address, stream)
            # The host's memory is reused by the next build.
            lib.call("pkv_device_synchronize", self.executor.handle, stream)

    def stats(self, stream: int) -> Any:
        """Downloads the plan and counts; waits for the stream."""
        size = ctypes.c_size_t()
        with self.executor.calling():
            error = _abi.Error()
            download = lib.function("pkv_device_plan_download")
            status = download(None, 0, ctypes.byref(size), self.handle, stream, ctypes.byref(error))
            if status not in (_abi.OK, _abi.E_TOO_SMALL):
                raise lib.failure(status, error)
            memory, at = aligned(size.value)
            lib.call(
                "pkv_device_plan_download",
                at,
                size.value,
                ctypes.byref(size),
                self.handle,
                stream,
            )
        stats = stats_of(at, self.kv_dtype)
        del memory
        return stats

    def fault(self, stream: int) -> int:
        """The last row whose table held a page id outside the cache; -1 = none. Waits."""
        row = ctypes.c_int32()
        with self.executor.calling():
            lib.call("pkv_device_plan_fault", ctypes.byref(row), self.handle, stream)
        return row.value


def _finish_device_plan(executor: Executor, pid: int, handle: int) -> None:
    if os.getpid() != pid or sys.is_finalizing():
        return
    with executor.calling():
        _destroy_device_plan(pid, handle)


def rows_from_csr(
    indptr: np.ndarray, indices: np.ndarray, last_page_len: np.ndarray, page_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(block table int32 [rows, max_pages], seq_len int32 [rows]) of FlashInfer's three arrays."""
    pages = np.diff(indptr)
    if indptr.shape[0] < 1 or (pages < 0).any():
        raise InvalidArgument("indptr must have rows + 1 entries that never decrease")
    if indptr[0] < 0 or indptr[-1] > indices.shape[0]:
        raise InvalidArgument(
            f"indptr runs from {indptr[0]} to {indptr[-1]}, indices has {indices.shape[0]} entries"
        )
    rows = pages.shape[0]
    if last_page_len.shape[0] != rows:
        raise InvalidArgument(f"last_page_len has {last_page_len.shape[0]} entries for {rows} rows")
    wrong = (pages > 0) & ((last_page_len < 1) | (last_page_len > page_tokens))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InvalidArgument(
            f"last_page_len[{row}] is {last_page_len[row]}, possible are 1 to {page_tokens}"
        )
    lengths = (pages.astype(np.int64) - 1) * page_tokens + last_page_len
    lengths[pages == 0] = 0
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise InvalidArgument(f"a row of {lengths.max()} tokens is beyond int32")
    width = max(int(pages.max(initial=0)), 1)
    table = np.full((rows, width), -1, dtype=np.int32)
    table[np.arange(width) < pages[:, None]] = indices[indptr[0] : indptr[-1]]
    return table, lengths.astype(np.int32)
