# SPDX-License-Identifier: Apache-2.0
"""The attention backend: vLLM's FlashAttention backend with libpkv in the place of its decode.

Each class is the engine's own with one thing replaced, so that everything that is not decode (cache
layout and writes, prefill, capabilities) stays what it is. Needs vLLM; vLLM imports it by name.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from .. import _abi
from ..executor import current_stream
from . import backend_name
from .decode_plans import DecodePlans, LayerCall, PlanClass
from .engine_cache import c_cache
from .layer_support import (
    batch_refusal,
    executor_of,
    layer_refusal,
    model_refusal,
    scales_refusal,
)
from .served import COUNTERS

logger = logging.getLogger("vllm.persistentkv")

_FP8 = ("fp8", "fp8_e4m3")


class PersistentKVBackend(FlashAttentionBackend):
    """FLASH_ATTN with decode by libpkv."""

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @staticmethod
    def get_impl_cls() -> type[PersistentKVImpl]:
        return PersistentKVImpl

    @staticmethod
    def get_builder_cls() -> type[PersistentKVMetadataBuilder]:
        return PersistentKVMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # The number of query tokens a row is planned from the host's copy.
        return False


@dataclass
class PersistentKVMetadata(FlashAttentionMetadata):
    """What the layers of a step need.

    The first decode_rows rows (decode_tokens tokens) are libpkv's, planned in `plans` by window;
    `prefill` is FlashAttention's metadata of the others. The inherited fields describe the whole
    batch for layers that FlashAttention serves alone; scheduled for it when there are such layers
    or no decode rows.
    """

    decode_rows: int = 0
    decode_tokens: int = 0
    decode_q_len: int = 1
    plans: dict[int, DecodePlans] | None = None
    prefill: FlashAttentionMetadata | None = None


_BASE_FIELDS = fields(FlashAttentionMetadata)
# Fields of the base class that are about cascade attention, which is never used with ours.
_CASCADE = {
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
}
_KNOWN = {
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
    *_CASCADE,
}
_UNKNOWN = [
    f.name
    for f in _BASE_FIELDS
    if f.default is MISSING and f.default_factory is MISSING and f.name not in _KNOWN
]


def _unscheduled(common: Any) -> dict[str, Any]:
    """The base class's required fields of a batch, without FlashAttention's scheduling."""
    values = {
        "num_actual_tokens": common.num_actual_tokens,
        "max_query_len": common.max_query_len,
        "query_start_loc": common.query_start_loc,
        "max_seq_len": common.max_seq_len,
        "seq_lens": common.seq_lens,
        "block_table": common.block_table_tensor,
        "slot_mapping": common.slot_mapping,
        **_CASCADE,
    }
    return {f.name: values[f.name] for f in _BASE_FIELDS if f.name in values}


def _prefill_part(common: Any, rows: int, tokens: int) -> Any:
    """The batch without its first rows."""
    starts = common.query_start_loc[rows:] - tokens
    starts_cpu = common.query_start_loc_cpu[rows:] - tokens
    changes = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts_cpu,
        "seq_lens": common.seq_lens[rows:],
        "num_reqs": common.num_reqs - rows,
        "num_actual_tokens": common.num_actual_tokens - tokens,
        "block_table_tensor": common.block_table_tensor[rows:],
        "slot_mapping": common.slot_mapping[tokens:],
    }
    by_row = (
        "is_prefilling",
        "seq_lens_cpu_upper_bound",
        "_seq_lens_cpu",
        "_num_computed_tokens_cpu",
        "encoder_seq_lens",
        "encoder_seq_lens_cpu",
        "req_idx",
        "replayssm_decode_base_cpu",
    )
    for name in by_row:
        value = getattr(common, name, None)
        if value is not None:
            changes[name] = value[rows:]
    for name in ("_num_computed_tokens_cache", "_token_to_req_indices_cache"):
        if hasattr(common, name):
            changes[name] = None
    if getattr(common, "positions", None) is not None:
        changes["positions"] = common.positions[tokens:]
    return common.replace(**changes)


class PersistentKVMetadataBuilder(FlashAttentionMetadataBuilder):
    """Plans the decode rows on the device, from lengths that stay there."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = False
    supports_draft_decode_metadata_update = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> None:
        return None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
        self._max_rows = max(
            scheduler.max_num_seqs, getattr(compilation, "max_cudagraph_capture_size", 0) or 0
        )
        self._max_seq_len = vllm_config.model_config.max_model_len
        self._classes: dict[int, DecodePlans] = {}
        self._served_layers = 0
        self._refusals: dict[str, int] = {}
        self._counting = True
        self._logged: set[str] = set()
        self._collect(kv_cache_spec, layer_names, vllm_config)

    def _collect(self, spec: Any, layer_names: list[str], vllm_config: Any) -> None:
        """One set of plans for each window among the layers; what is not served, with reasons."""
        context = vllm_config.compilation_config.static_forward_context
        executor, why_not = executor_of(self.device)
        if _UNKNOWN:
            why_not = f"fields of this vLLM's metadata that are not known: {_UNKNOWN}"
        why_not = why_not or model_refusal(vllm_config.model_config)
        for name in layer_names:
            impl = context[name].impl
            reason = why_not or _impl_refusal(impl)
            reason = reason or scales_refusal(context[name], impl.num_kv_heads, impl.kv_cache_dtype)
            if not reason and executor is not None:
                plan_class = _class_of(impl, spec)
                try:
                    self._plans_of(executor, plan_class)
                except Exception as e:  # noqa: BLE001 - whatever it is, FlashAttention serves
                    reason = f"no plan for it: {e}"
            if reason:
                impl.give_up(reason)
                self._refusals[reason] = self._refusals.get(reason, 0) + 1
                self._log(f"{name}: decode by FlashAttention, not by libpkv: {reason}", reason)
            else:
                self._served_layers += 1

    def _plans_of(self, executor: Any, plan_class: PlanClass) -> DecodePlans:
        plans = self._classes.get(plan_class.window)
        if plans is None:
            q_lens = tuple(sorted({1, self.reorder_batch_threshold or 1}))
            plans = DecodePlans(executor, plan_class, self._max_rows, self._max_seq_len, q_lens)
            self._classes[plan_class.window] = plans
        if plans.plan_class != plan_class:
            raise ValueError(f"layers of one group differ: {plan_class} and {plans.plan_class}")
        return plans

    def _log(self, text: str, key: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            logger.warning(text)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        # A captured decode graph must never meet a batch that was planned for something else.
        return False

    # --- a step -------------------------------------------------------------------------------

    def _decode_part(self, common: Any, common_prefix_len: int) -> tuple[int, int, str]:
        """(rows, query tokens a row, why not) of the leading rows that libpkv takes."""
        if not self._classes:
            return 0, 1, "no layer is served"
        reason = batch_refusal(common, common_prefix_len)
        if reason:
            return 0, 1, reason
        rows, _, _, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold or 1, require_uniform=True
        )
        if rows == 0:
            return 0, 1, ""
        q_len = int(common.query_start_loc_cpu[1] - common.query_start_loc_cpu[0])
        if q_len < 1 or rows * q_len > common.num_actual_tokens:
            return 0, 1, f"{rows} rows of {q_len} query tokens in {common.num_actual_tokens}"
        if not all(plans.ready(rows, q_len) for plans in self._classes.values()):
            limits = f"{self._max_rows} rows of 1 or {self.reorder_batch_threshold} query tokens"
            return 0, 1, f"{rows} rows of {q_len} query tokens (planned for {limits})"
        return rows, q_len, ""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PersistentKVMetadata:
        common = common_attn_metadata
        rows, q_len, reason = self._decode_part(common, common_prefix_len)
        if reason:
            self._log(f"a batch goes to FlashAttention whole: {reason}", reason.split(" ")[-1])
        all_rows = rows == common.num_reqs
        if rows == 0 or self._refusals:
            whole = super().build(common_prefix_len, common, fast_build)
            values = {f.name: getattr(whole, f.name) for f in _BASE_FIELDS}
        else:
            values = _unscheduled(common)
        metadata = PersistentKVMetadata(**values)
        if rows:
            tokens = rows * q_len
            stream = 0
            if self.device.type == "cuda":
                stream = current_stream(common.seq_lens.get_device())
            for plans in self._classes.values():
                plans.build(rows, q_len, common.seq_lens, common.block_table_tensor, stream)
            metadata.decode_rows, metadata.decode_tokens = rows, tokens
            metadata.decode_q_len, metadata.plans = q_len, self._classes
            if not all_rows:
                # The base class schedules into one buffer: the second batch must not overwrite
                # what the first one's layers read. Mixed batches are never in a captured graph.
                if metadata.scheduler_metadata is not None:
                    metadata.scheduler_metadata = metadata.scheduler_metadata.clone()
                rest = _prefill_part(common, rows, tokens)
                metadata.prefill = super().build(0, rest, fast_build)
        if self._counting:
            self._count(common, rows, reason)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PersistentKVMetadata:
        self._counting = False
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._counting = True

    def _count(self, common: Any, rows: int, reason: str) -> None:
        lengths = np.diff(common.query_start_loc_cpu.numpy())
        if rows:
            decode_rows = int(np.count_nonzero(lengths[:rows]))
            served, fallbacks = self._served_layers, self._refusals
        else:
            threshold = self.reorder_batch_threshold or 1
            decode_rows = int(np.count_nonzero((lengths > 0) & (lengths <= threshold)))
            served, fallbacks = 0, dict(self._refusals)
            if self._served_layers:
                why = reason or "decode rows behind other rows"
                fallbacks[why] = fallbacks.get(why, 0) + self._served_layers
        others = int(np.count_nonzero(lengths)) - decode_rows
        shared = bool(rows) and any(plans.shares(rows) for plans in self._classes.values())
        COUNTERS.step(decode_rows, others, served, fallbacks, shared)


def _impl_refusal(impl: Any) -> str:
    if not isinstance(impl, PersistentKVImpl):
        return f"an implementation of another kind, {type(impl).__name__}"
    return impl.refusal


def _class_of(impl: Any, spec: Any) -> PlanClass:
    dtype = _abi.DTYPE_F16 if spec.dtype == torch.float16 else _abi.DTYPE_BF16
    if impl.kv_cache_dtype in _FP8:
        dtype = _abi.DTYPE_FP8_E4M3
    window = impl.sliding_window
    left = -1 if window is None else window[0]
    return PlanClass(
        impl.num_heads, impl.num_kv_heads, impl.head_size, spec.block_size, left + 1, dtype
    )


class PersistentKVImpl(FlashAttentionImpl):
    """A layer: decode rows by libpkv, the rest by the engine's FlashAttention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = layer_refusal(self)
        # FlashAttention multiplies fp8 queries with an fp8 cache, libpkv 16-bit ones: ask the
        # layer for 16 bits and quantise what goes to FlashAttention here.
        self._engine = self
        if not self.refusal and self.kv_cache_dtype in _FP8:
            engine = copy.copy(self)
            engine.__class__ = FlashAttentionImpl
            self._engine = engine
            self.supports_quant_query_input = False
        self._window = 0 if self.sliding_window is None else self.sliding_window[0] + 1
        self._call: LayerCall | None = None
        self._call_of: tuple[int, ...] = ()
        self._seen: Callable[[], Any] = _nothing  # the tensor that it was looked up for last
        self._sinks: torch.Tensor | None = None

    def give_up(self, reason: str) -> None:
        """Leaves the layer to FlashAttention."""
        self.refusal = self.refusal or reason

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As FlashAttentionImpl.forward: query [tokens, heads, d] -> output, in place."""
        metadata = attn_metadata
        if metadata is None:
            self._prepare(layer)
        decode = 0 if metadata is None or self.refusal else getattr(metadata, "decode_tokens", 0)
        if decode == 0 or output_scale is not None or output_block_scale is not None:
            tensors = (query, key, value, kv_cache, metadata, output)
            return self._by_engine(layer, tensors, output_scale, output_block_scale)
        call = self._layer_call(layer, kv_cache)
        table = metadata.block_table
        arguments = call.arguments(query, output, table)
        stream = 0
        if query.is_cuda:
            stream = current_stream(query.get_device())
        plans, rows = metadata.plans[self._window], metadata.decode_rows
        plans.attend(rows, metadata.decode_q_len, arguments, stream)
        if metadata.prefill is not None:
            rest = (query[decode:], key[decode:], value[decode:], kv_cache, metadata.prefill)
            self._by_engine(layer, (*rest, output[decode:]), None, None)
        return output

    def _by_engine(
        self,
        layer: torch.nn.Module,
        tensors: tuple[Any, ...],
        output_scale: torch.Tensor | None,
        output_block_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        query, *others, metadata, output = tensors
        if self._engine is self:
            run = super().forward
        else:
            run = self._engine.forward
            if metadata is not None and self._engine.supports_quant_query_input:
                query = _fp8_query(query, layer._q_scale)
        return run(layer, query, *others, metadata, output, output_scale, output_block_scale)

    def _prepare(self, layer: torch.nn.Module) -> None:
        """What must not be made while a graph is captured; the profiling run comes first."""
        if self.sinks is not None and self._sinks is None:
            self._sinks = self.sinks.detach().float().contiguous()

    def _layer_call(self, layer: torch.nn.Module, kv_cache: torch.Tensor) -> LayerCall:
        if self._call is not None and kv_cache is self._seen():
            return self._call
        key = (kv_cache.data_ptr(), *kv_cache.shape, *kv_cache.stride())
        if self._call is None or key != self._call_of:
            self._prepare(layer)
            scales = {}
            if self.kv_cache_dtype in _FP8:
                scales = {"k_scale": _scale(layer, "k"), "v_scale": _scale(layer, "v")}
            self._call = LayerCall(
                c_cache(kv_cache, self.num_kv_heads, self.head_size),
                self.scale,
                self.logits_soft_cap or 0.0,
                sinks=self._sinks,
                **scales,
            )
            self._call_of = key
        self._seen = weakref.ref(kv_cache)
        return self._call


def _nothing() -> None:
    return None


def _scale(layer: Any, which: str) -> Any:
    """A number, or float32 [kv_heads] on the device."""
    scale = getattr(layer, f"_{which}_scale")
    if scale.numel() == 1:
        return float(getattr(layer, f"_{which}_scale_float"))
    return scale.float().contiguous()


def _fp8_query(query: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, d] in e4m3, as the layer would have quantised it."""
    from vllm import _custom_ops as ops

    flat = query.reshape(query.shape[0], -1)
    quantised, _ = ops.scaled_fp8_quant(flat, scale)
    return quantised.view(query.shape)
