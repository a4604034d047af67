# SPDX-License-Identifier: Apache-2.0
"""One of our schedulers in a real configuration of vLLM, its requests, and a model that answers."""

import json
import os

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


def make(cls, folder, *, rows=4, blocks=2000, policy="fcfs", caching=True, sched=None, tokens=4096):
    """A scheduler of class `cls`; `sched` is its part of --additional-config."""
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(MODEL, f)
    model = ModelConfig(model=str(folder), dtype="float16", seed=0, skip_tokenizer_init=True)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            async_scheduling="Sync" not in cls.__name__,
            is_encoder_decoder=False,
            watermark=0.0,
            policy=policy,
        ),
        additional_config={} if sched is None else {"persistentkv_sched": sched},
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache.num_gpu_blocks = blocks
    register_all_kvcache_specs(config)
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    scheduler.use_v2_model_runner = False
    return scheduler


_hasher = None


def request(name, tokens, *, priority=0, arrival=None, answer=3):
    global _hasher
    if _hasher is None:
        init_none_hash(sha256)
        _hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(
        request_id=str(name),
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        priority=priority,
        arrival_time=arrival,
        block_hasher=_hasher,
    )


def step(scheduler):
    """One step: what was scheduled for the first time or again; every finished prefill answers."""
    out = scheduler.schedule()
    names = list(out.num_scheduled_tokens)
    sampled = []
    for name in names:
        r = scheduler.requests[name]
        sampled.append([7] if r.num_computed_tokens >= r.num_tokens else [])
    scheduler.update_from_output(
        out,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    new = [r.req_id for r in out.scheduled_new_reqs]
    return new + sorted(out.scheduled_cached_reqs.resumed_req_ids)


def run(scheduler, limit=2000):
    """Until nothing is left: names in the order of their admission."""
    order = []
    for _ in range(limit):
        if not scheduler.has_unfinished_requests():
            return order
        order += step(scheduler)
    raise AssertionError(f"{scheduler.get_num_unfinished_requests()} requests never ended")
