# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes around one attention layer: fake configuration, real metadata and kernels."""

import types

import numpy as np
import torch
from persistentkv.vllm import backend_name
from persistentkv.vllm.engine_cache import split
from py_support import attention

TOLERANCE = 1e-2  # of vLLM's own test of attention backends, bfloat16


class Harness:
    """A layer's shape on a device, and what vLLM would hand to it."""

    def __init__(self, backend, device="cpu", heads=8, kv_heads=2, dim=64, page=16, blocks=64):
        self.backend, self.device = backend, torch.device(device)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.page, self.blocks = page, blocks

    def layer(self, window=None, cap=None, sinks=None, dtype="auto"):
        impl = self.backend.get_impl_cls()(
            num_heads=self.heads,
            head_size=self.dim,
            scale=0.125,
            num_kv_heads=self.kv_heads,
            alibi_slopes=None,
            sliding_window=window,
            kv_cache_dtype=dtype,
            logits_soft_cap=cap,
            sinks=sinks,
        )
        if self.device.type == "cpu":
            for one in (impl, impl._engine):
                one.vllm_flash_attn_version = 2  # none is found without a GPU
        one = torch.ones(1, device=self.device)
        return types.SimpleNamespace(
            impl=impl,
            num_heads=self.heads,
            _q_scale=one,
            _k_scale=one,
            _v_scale=one,
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )

    def config(self, layers, speculative=0, max_num_seqs=16, max_model_len=512):
        model = types.SimpleNamespace(
            get_num_attention_heads=lambda parallel: self.heads,
            get_num_kv_heads=lambda parallel: self.kv_heads,
            get_head_size=lambda: self.dim,
            max_model_len=max_model_len,
            dtype=torch.bfloat16,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=types.SimpleNamespace(model_type="llama"),
        )
        spec = types.SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False)
        return types.SimpleNamespace(
            model_config=model,
            parallel_config=types.SimpleNamespace(
                cp_kv_cache_interleave_size=1, decode_context_parallel_size=1
            ),
            cache_config=types.SimpleNamespace(cache_dtype="auto"),
            compilation_config=types.SimpleNamespace(
                cudagraph_mode=types.SimpleNamespace(has_full_cudagraphs=lambda: False),
                max_cudagraph_capture_size=8,
                static_forward_context=layers,
            ),
            attention_config=types.SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
            scheduler_config=types.SimpleNamespace(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=1024
            ),
            kernel_config=types.SimpleNamespace(enable_jit_warmup=False),
            speculative_config=spec if speculative else None,
            use_v2_model_runner=False,
        )

    def builder(self, layers, **options):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(
            block_size=self.page,
            num_kv_heads=self.kv_heads,
            head_size=self.dim,
            dtype=torch.bfloat16,
        )
        config = options.get("config") or self.config(layers, **options)
        builder = self.backend.get_builder_cls()(spec, list(layers), config, self.device)
        # FlashAttention schedules ahead for the window that it finds in vLLM's layers; these are
        # not such.
        builder.aot_schedule = False
        return builder

    def cache(self):
        """As this release of vLLM shapes it."""
        generator = torch.Generator().manual_seed(5)
        if backend_name() == "CUSTOM":
            shape = (self.blocks, 2, self.page, self.kv_heads, self.dim)
        else:
            shape = (self.blocks, self.kv_heads, self.page, 2 * self.dim)
        return torch.randn(shape, generator=generator).bfloat16().to(self.device)

    def batch(self, rows, padded=0):
        """CommonAttentionMetadata of rows [(seq_len, query tokens)], then padding rows of 0."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        seq_lens = [n for n, _ in rows] + [0] * padded
        query_lens = [q for _, q in rows] + [0] * padded
        starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
        tokens = int(starts[-1])
        if padded:  # a captured graph's batch: as many tokens as rows
            tokens = (len(rows) + padded) * query_lens[0]
        generator = torch.Generator().manual_seed(len(rows))
        width = max(32, -(-max(seq_lens) // self.page))
        shape = (len(seq_lens), width)
        table = torch.randint(1, self.blocks, shape, generator=generator, dtype=torch.int32)
        table[len(rows) :] = 0
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts.clone(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            num_reqs=len(seq_lens),
            num_actual_tokens=tokens,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=self.device),
        )

    def queries(self, tokens, seed=9):
        """(q, k, v) inside one tensor, as a fused projection leaves them."""
        generator = torch.Generator().manual_seed(seed)
        shape = (tokens, self.heads + 2 * self.kv_heads, self.dim)
        qkv = torch.randn(shape, generator=generator).bfloat16().to(self.device)
        return qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)

    def expected(self, layer, common, cache, q):
        """Float64, [tokens of real rows, heads, dim]."""
        impl = layer.impl
        starts = common.query_start_loc_cpu.tolist()
        wanted = torch.zeros((starts[-1], self.heads, self.dim))
        keys, values = (x.float().cpu().numpy() for x in split(cache, self.kv_heads, self.dim))
        table, lengths = common.block_table_tensor.cpu().numpy(), common.seq_lens.tolist()
        floats = q.float().cpu().numpy()
        for row, n in enumerate(lengths):
            ids = table[row, : -(-n // self.page)]
            part, _ = attention(
                floats[starts[row] : starts[row + 1]],
                keys[ids].reshape(-1, self.kv_heads, self.dim)[:n],
                values[ids].reshape(-1, self.kv_heads, self.dim)[:n],
                n,
                scale=impl.scale,
                soft_cap=impl.logits_soft_cap or 0,
                window=impl.sliding_window[0] + 1,
                sinks=None if impl.sinks is None else impl.sinks.float().cpu().numpy(),
            )
            wanted[starts[row] : starts[row + 1]] = torch.from_numpy(part)
        return wanted

    def run(self, layer, builder, common, cache, extra=0):
        """(output, metadata) of a step of one layer, checked; `extra` tokens of padding behind."""
        q, k, v = self.queries(common.num_actual_tokens + extra)
        out = torch.full((len(q), self.heads, self.dim), 9.0, device=self.device).bfloat16()
        metadata = builder.build(0, common)
        layer.impl.forward(layer, q, k, v, cache, metadata, out)
        check(out, self.expected(layer, common, cache, q))
        return out, metadata


def check(out, wanted):
    """The tokens of real rows; the others are padding."""
    got = out[: len(wanted)].float().cpu()
    error = ((got - wanted).abs() / (1 + wanted.abs())).max().item()
    assert error < TOLERANCE, error
