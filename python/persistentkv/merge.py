# SPDX-License-Identifier: Apache-2.0
"""Merging attention over disjoint sets of keys, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._arrays import is_tensor, view
from ._lib import lib
from .decode import lse_is_base2
from .errors import InvalidArgument, NotSupported


def _host_floats(x: Any, name: str) -> np.ndarray:
    seen = view(x, name)
    if seen.device != "cpu":
        raise NotSupported(f"{name} is on {seen.device}: merging is for host memory")
    if seen.element == "uint16":
        bits = x.numpy() if seen.is_torch else x
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if is_tensor(x):
        x = x.detach().float().numpy()
    return x.astype(np.float32, copy=False)


def _like(result: np.ndarray, original: Any) -> Any:
    """The float32 result in the original's kind and type."""
    if is_tensor(original):
        import torch

        if original.dtype == torch.uint16:
            raise InvalidArgument("v: use torch.bfloat16 instead of uint16")
        return torch.from_numpy(result).to(original.dtype)
    if original.dtype == np.uint16:
        bits = result.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(result), 0x7FC0, rounded).astype(np.uint16)
    return result.astype(original.dtype)


def merge_states(v: Any, s: Any, lse_base: Any = 2) -> tuple[Any, Any]:
    """Attention over the union of disjoint key sets, from that over each.

    Args:
        v: [tokens, states, heads, head_dim], each state's normalised output; NumPy or CPU torch,
            float32, float16, bfloat16 (uint16 in NumPy).
        s: float32 [tokens, states, heads], each state's LSE; -inf: the state has no keys, its v is
            not read.
        lse_base: of s and of the result, 2 (FlashInfer's, and run()'s default) or "e".

    Returns:
        (v [tokens, heads, head_dim] of v's type, s float32 [tokens, heads]). Folded in the order
        of the states.
    """
    base2 = lse_is_base2(lse_base)
    values, sums = _host_floats(v, "v"), _host_floats(s, "s")
    if values.ndim != 4 or sums.shape != values.shape[:3]:
        raise InvalidArgument(
            f"v is {values.shape}, s {sums.shape}; wanted [tokens, states, heads, head_dim] and "
            f"[tokens, states, heads]"
        )
    tokens, states, heads, dim = values.shape
    values = np.ascontiguousarray(values.transpose(1, 0, 2, 3))
    sums = np.ascontiguousarray(sums.transpose(1, 0, 2) * np.float32(math.log(2) if base2 else 1))
    out = np.empty((tokens, heads, dim), dtype=np.float32)
    total = np.empty((tokens, heads), dtype=np.float32)
    lib.call(
        "pkv_merge_states",
        out.ctypes.data,
        total.ctypes.data,
        values.ctypes.data,
        sums.ctypes.data,
        states,
        tokens,
        heads,
        dim,
    )
    if base2:
        total *= np.float32(1 / math.log(2))
    if is_tensor(s):
        import torch

        return _like(out, v), torch.from_numpy(total)
    return _like(out, v), total


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any, lse_base: Any = 2) -> tuple[Any, Any]:
    """:func:`merge_states` of two: v [tokens, heads, head_dim], s [tokens, heads] each."""
    if is_tensor(v_a):
        import torch

        return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1), lse_base)
    return merge_states(np.stack([v_a, v_b], 1), np.stack([s_a, s_b], 1), lse_base)
