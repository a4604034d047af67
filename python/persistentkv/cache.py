# SPDX-License-Identifier: Apache-2.0
"""The paged cache as the caller holds it, and writing new tokens into it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from . import _abi
from ._arrays import View, code_of, dtype_code, integers, is_tensor, view
from ._lib import lib, sized
from .errors import InvalidArgument, NotSupported
from .executor import Executor, default_executor

LAYOUTS = ("NHD", "HND")


def pair_of(paged_kv_cache: Any) -> tuple[View, View]:
    """Views of K and V, 4-D each, of a tuple or of one array [pages, 2, ...]."""
    if isinstance(paged_kv_cache, (tuple, list)):
        if len(paged_kv_cache) != 2:
            raise InvalidArgument(f"paged_kv_cache: {len(paged_kv_cache)} arrays, wanted (k, v)")
        k, v = paged_kv_cache
    else:
        shape: tuple[int, ...] = tuple(getattr(paged_kv_cache, "shape", ()))
        if len(shape) != 5 or shape[1] != 2:
            raise InvalidArgument(
                f"paged_kv_cache has shape {shape}, wanted (k, v) or [pages, 2, ...]"
            )
        k, v = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    views = view(k, "k cache"), view(v, "v cache")
    for one, name in zip(views, ("k cache", "v cache")):
        if len(one.shape) != 4:
            raise InvalidArgument(f"{name} has shape {one.shape}, wanted four dimensions")
    if views[0].shape != views[1].shape or views[0].element != views[1].element:
        raise InvalidArgument(
            f"k cache is {views[0].element} {views[0].shape}, v cache {views[1].element} "
            f"{views[1].shape}: they must be alike"
        )
    if views[0].device != views[1].device:
        raise InvalidArgument(f"k cache is on {views[0].device}, v cache on {views[1].device}")
    return views


def _scale(cache: Any, which: str, scale: Any, kv_heads: int, device: str) -> Any:
    """Sets a per-tensor or per-head scale; returns what must stay alive."""
    if scale is None:
        return None
    if not hasattr(scale, "shape") or tuple(scale.shape) == ():
        setattr(cache, f"{which}_scale", float(scale))
        return None
    if is_tensor(scale):
        scale = scale.float().contiguous()
    else:
        scale = np.ascontiguousarray(scale, dtype=np.float32)
    seen = view(scale, f"{which}_scale")
    if seen.shape != (kv_heads,) or seen.device != device:
        raise InvalidArgument(
            f"{which}_scale is {seen.shape} on {seen.device}, wanted a number or "
            f"[{kv_heads}] on {device}"
        )
    setattr(cache, f"{which}_head_scale", seen.pointer)
    return scale


def c_cache(
    views: tuple[View, View],
    layout: str,
    declared: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Any, Any]:
    """(pkv_cache, what must stay alive during the call)."""
    k, v = views
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    cache = sized(_abi.Cache)
    cache.dtype = code_of(k, "k cache", declared)
    cache.k, cache.v = k.pointer, v.pointer
    cache.pages, cache.page_tokens = k.shape[0], k.shape[token]
    cache.kv_heads, cache.head_dim = k.shape[head], k.shape[3]
    for which, one in (("k", k), ("v", v)):
        if one.strides[3] != 1 and one.shape[3] > 1:
            raise InvalidArgument(
                f"{which} cache: its last dimension has stride {one.strides[3]}, must be 1"
            )
        setattr(cache, f"{which}_page_stride", one.strides[0])
        setattr(cache, f"{which}_token_stride", one.strides[token])
        setattr(cache, f"{which}_head_stride", one.strides[head])
    alive = [
        _scale(cache, which, scale, cache.kv_heads, k.device)
        for which, scale in (("k", k_scale), ("v", v_scale))
    ]
    return cache, alive


_SOURCES = {
    "float32": _abi.DTYPE_F32,
    "float16": _abi.DTYPE_F16,
    "bfloat16": _abi.DTYPE_BF16,
    "uint16": _abi.DTYPE_BF16,  # its bits
}


def _source(x: Any, name: str, device: str, heads: int, dim: int) -> View:
    """[tokens, heads, dim], the last dimension contiguous."""
    seen = view(x, name)
    if seen.device != device:
        raise InvalidArgument(f"{name} is on {seen.device}, the cache on {device}")
    if len(seen.shape) != 3 or seen.shape[1:] != (heads, dim):
        raise InvalidArgument(f"{name} has shape {seen.shape}, wanted [tokens, {heads}, {dim}]")
    if seen.element not in _SOURCES:
        raise NotSupported(f"{name} holds {seen.element}, supported are {', '.join(_SOURCES)}")
    if seen.shape[0] and dim > 1 and seen.strides[2] != 1:
        raise InvalidArgument(f"{name}: its last dimension must be contiguous")
    return seen


def append(
    k: Any,
    v: Any,
    paged_kv_cache: Any,
    slots: Any,
    kv_layout: str = "NHD",
    *,
    kv_data_type: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    executor: Executor | None = None,
    stream: Any = None,
) -> None:
    """Writes the keys and values of new tokens into their pages.

    Args:
        k, v: [tokens, kv_heads, head_dim], float32, float16 or bfloat16 (uint16 arrays hold its
            bits), alike; any strides, the last dimension contiguous.
        paged_kv_cache: (k, v) or one array [pages, 2, ...]; a page is [page_size, kv_heads,
            head_dim] (NHD) or [kv_heads, page_size, head_dim] (HND). Any strides; the last
            dimension is contiguous.
        slots: int64 [tokens]: page * page_size + offset in the page; -1 skips the token.
        kv_data_type: what integer arrays hold: uint16 "bfloat16", uint8 "float8_e4m3fn".
        k_scale, v_scale: fp8 only, a number or float32 [kv_heads]: what is stored is the value
            divided by it.
        stream: CUDA only: a torch stream; None = the current one.

    Raises:
        OutOfRange: a slot beyond the cache (on the CPU; on a device such tokens are skipped).
    """
    if kv_layout not in LAYOUTS:
        raise InvalidArgument(f"kv_layout is {kv_layout!r}, wanted NHD or HND")
    views = pair_of(paged_kv_cache)
    device = views[0].device
    executor = executor or default_executor(device)
    declared = None if kv_data_type is None else dtype_code(kv_data_type, "kv_data_type")
    cache, alive = c_cache(views, kv_layout, declared, k_scale, v_scale)
    heads, dim = cache.kv_heads, cache.head_dim
    from_k, from_v = _source(k, "k", device, heads, dim), _source(v, "v", device, heads, dim)
    if from_k.shape != from_v.shape or from_k.element != from_v.element:
        raise InvalidArgument(
            f"k is {from_k.element} {from_k.shape}, v {from_v.element} {from_v.shape}"
        )
    if not is_tensor(slots):
        slots = np.ascontiguousarray(slots, dtype=np.int64)
    where = view(slots, "slots")
    tokens = from_k.shape[0]
    if where.element != "int64" or where.shape != (tokens,) or where.device != device:
        raise InvalidArgument(
            f"slots is {where.element} {where.shape} on {where.device}, wanted int64 [{tokens}] on "
            f"{device}"
        )
    if tokens > 1 and where.strides != (1,):
        raise InvalidArgument("slots must be contiguous")
    args = sized(_abi.AppendArgs)
    args.cache = ctypes.addressof(cache)
    args.tokens, args.slots = tokens, where.pointer
    args.dtype = _SOURCES[from_k.element]
    args.k, args.v = from_k.pointer, from_v.pointer
    for which, one in (("k", from_k), ("v", from_v)):
        if tokens > 1:
            setattr(args, f"{which}_token_stride", one.strides[0])
        if tokens and heads > 1:
            setattr(args, f"{which}_head_stride", one.strides[1])
    with executor.calling() as handle:
        if executor.kind == "cpu":
            lib.call("pkv_append", handle, ctypes.byref(args))
        else:
            at = executor.stream(stream)
            lib.call("pkv_device_append", handle, ctypes.byref(args), at)
    del alive


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    **options: Any,
) -> None:
    """FlashInfer's call of that name: token i goes to position positions[i] of row
    batch_indices[i], whose pages are kv_indices[kv_indptr[row] : kv_indptr[row + 1]].

    The index arrays are read on the host (device tensors are waited for); `options` are those of
    :func:`append`, which takes slots on the device.
    """
    del kv_last_page_len  # the positions say all
    views = pair_of(paged_kv_cache)
    page_tokens = views[0].shape[1 if kv_layout == "NHD" else 2]
    rows, at = integers(batch_indices, "batch_indices"), integers(positions, "positions")
    pages, indptr = integers(kv_indices, "kv_indices"), integers(kv_indptr, "kv_indptr")
    if rows.shape != at.shape:
        raise InvalidArgument(f"batch_indices is {rows.shape}, positions {at.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= indptr.shape[0] - 1 or at.min() < 0):
        raise InvalidArgument("batch_indices or positions lie outside kv_indptr's rows")
    entry = indptr[rows].astype(np.int64) + at // page_tokens
    if rows.size and (entry >= indptr[rows + 1]).any():
        bad = int(np.argmax(entry >= indptr[rows + 1]))
        raise InvalidArgument(f"position {at[bad]} lies beyond the pages of row {rows[bad]}")
    slots: Any = pages[entry].astype(np.int64) * page_tokens + at % page_tokens
    if views[0].is_torch:
        import torch

        slots = torch.from_numpy(slots).to(views[0].owner.device)
    append(append_key, append_value, paged_kv_cache, slots, kv_layout, **options)
