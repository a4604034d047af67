# SPDX-License-Identifier: Apache-2.0
"""Why libpkv does not serve a layer, or one batch of it; then vLLM's own backend does. No vLLM."""

from __future__ import annotations

from typing import Any

from ..errors import PkvError
from ..executor import Executor, default_executor

KV_DTYPES = ("auto", "float16", "bfloat16", "half", "fp8", "fp8_e4m3")


def layer_refusal(impl: Any) -> str:
    """Of an attention implementation as vLLM constructed it; "" when libpkv serves it."""
    if str(getattr(impl.attn_type, "value", impl.attn_type)) != "decoder":
        return f"attention of type {impl.attn_type}"
    if impl.alibi_slopes is not None:
        return "ALiBi"
    if impl.head_size % 8 or not 8 <= impl.head_size <= 256:
        return f"head size {impl.head_size} (multiples of 8 up to 256)"
    if impl.num_heads % impl.num_kv_heads or impl.num_heads // impl.num_kv_heads > 32:
        return f"{impl.num_heads} query heads on {impl.num_kv_heads} KV heads (groups up to 32)"
    if impl.kv_cache_dtype not in KV_DTYPES:
        return f"a KV cache of {impl.kv_cache_dtype}"
    if getattr(impl, "dcp_world_size", 1) > 1:
        return "decode context parallelism"
    if getattr(impl, "batch_invariant_enabled", False):
        return "VLLM_BATCH_INVARIANT (prefill and decode would not be one kernel)"
    return ""


def scales_refusal(layer: Any, kv_heads: int, kv_cache_dtype: str) -> str:
    """Of a layer's fp8 scales."""
    if not kv_cache_dtype.startswith("fp8"):
        return ""
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(layer, name, None)
        if scale is not None and scale.numel() not in (1, kv_heads):
            return f"{name} of {scale.numel()} values for {kv_heads} KV heads"
    query = getattr(layer, "_q_scale", None)
    if query is not None and query.numel() != 1:
        return f"_q_scale of {query.numel()} values"
    return ""


def executor_of(device: Any) -> tuple[Executor | None, str]:
    """(executor, "") of a torch device, or (None, why not)."""
    name = device.type if device.index is None or device.type == "cpu" else str(device)
    try:
        return default_executor(name), ""
    except PkvError as e:
        return None, f"libpkv on {name}: {e}"


def model_refusal(model_config: Any) -> str:
    """Of a whole model: what would have batches that batch_refusal() names. A captured graph cannot
    change its mind, so such models are left to the engine from the start."""
    if getattr(model_config, "is_mm_prefix_lm", False) is True:
        return "a model with bidirectional ranges of multimodal prefixes"
    if getattr(model_config, "rswa_window", None) is not None:
        return "a model with reference sliding windows"
    return ""


def batch_refusal(common: Any, common_prefix_len: int) -> str:
    """Of a batch as a whole."""
    if common_prefix_len > 0:
        return "cascade attention of the engine"
    if getattr(common, "causal", True) is not True:
        return "attention that is not causal"
    if getattr(common, "mm_req_doc_ranges", None) is not None:
        return "bidirectional ranges of a multimodal prefix"
    if getattr(common, "rswa_prefix_lens", None) is not None:
        return "reference sliding windows"
    if str(common.seq_lens.dtype) != "torch.int32":
        return f"lengths in {common.seq_lens.dtype}"
    if str(common.block_table_tensor.dtype) != "torch.int32":
        return f"a block table in {common.block_table_tensor.dtype}"
    return ""
