# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer, as libpkv sees it: K and V by pointer and strides.

The tensor's logical shape changed with the releases; its memory layout (NHD, HND, layers inside
blocks) shows in the strides and needs no case of its own.
"""

from __future__ import annotations

from typing import Any

from .. import _abi
from .._lib import sized
from ..errors import NotSupported

_DTYPES = {
    "torch.float16": _abi.DTYPE_F16,
    "torch.bfloat16": _abi.DTYPE_BF16,
    "torch.uint8": _abi.DTYPE_FP8_E4M3,
    "torch.float8_e4m3fn": _abi.DTYPE_FP8_E4M3,
    "torch.float32": _abi.DTYPE_F32,
}


def split(kv_cache: Any, kv_heads: int, head_size: int) -> tuple[Any, Any]:
    """(K, V), each a view [blocks, tokens, kv_heads, head_size].

    Known: [blocks, 2, tokens, heads, d] (0.24), [2, blocks, tokens, heads, d] (earlier), and
    [blocks, heads, tokens, 2 d] (from 0.27 on).
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 4 and shape[1] == kv_heads and shape[3] == 2 * head_size:
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., :head_size], by_token[..., head_size:]
    if len(shape) == 5 and shape[3:] == (kv_heads, head_size):
        if shape[1] == 2:
            return kv_cache[:, 0], kv_cache[:, 1]
        if shape[0] == 2:
            return kv_cache[0], kv_cache[1]
    raise NotSupported(
        f"a KV cache of shape {shape} for {kv_heads} heads of {head_size} is not known"
    )


def c_cache(kv_cache: Any, kv_heads: int, head_size: int) -> Any:
    """pkv_cache of the tensor, scales not set; borrowed."""
    cache = sized(_abi.Cache)
    k, v = split(kv_cache, kv_heads, head_size)
    dtype = _DTYPES.get(str(k.dtype))
    if dtype is None:
        raise NotSupported(f"a KV cache of {k.dtype}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise NotSupported("a KV cache whose head dimension is not contiguous")
    cache.dtype, cache.k, cache.v = dtype, k.data_ptr(), v.data_ptr()
    cache.pages, cache.page_tokens, cache.kv_heads, cache.head_dim = k.shape
    for which, one in (("k", k), ("v", v)):
        for axis, name in enumerate(("page", "token", "head")):
            setattr(cache, f"{which}_{name}_stride", one.stride(axis))
    return cache
