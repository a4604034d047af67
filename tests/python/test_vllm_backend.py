# SPDX-License-Identifier: Apache-2.0
"""The plug-in inside vLLM's own classes, on CPU tensors: registration, metadata, decode, prefill.

FlashAttention has no CPU kernel: a float32 stand-in of the one function that the engine's backend
calls takes its place, so that everything around it is vLLM's.
"""

import types

import numpy as np
import pytest

from persistentkv.vllm import COUNTERS, backend_name, register
from py_support import attention

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 8, 2, 64, 16, 64


@pytest.fixture(scope="session")
def backend():
    """The class as vLLM finds it after its plug-ins were loaded."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    register()  # a second time must not matter
    return AttentionBackendEnum[backend_name()].get_class()


def test_the_entry_point_is_installed():
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "persistentkv"]
    assert found and found[0].load() is register


def test_the_backend_has_its_name_and_claims(backend):
    from vllm.v1.attention.backend import AttentionCGSupport

    assert backend.get_name() == backend_name()
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert not builder.supports_update_block_table
    assert backend.get_impl_cls().can_return_lse_for_decode
    reasons = backend.validate_configuration.__doc__  # exists in every release we support
    assert reasons is None or isinstance(reasons, str)


def test_metadata_fields_of_this_release_are_known():
    from persistentkv.vllm import paged_backend

    assert paged_backend._UNKNOWN == []


def flash_attn_stand_in(q, k, v, out, cu_seqlens_q, seqused_k, block_table, **options):
    """float32 attention by rows, with the arguments that the engine's backend passes."""
    window = options.get("window_size") or [-1, -1]
    k, v = (x.float().numpy() for x in (k, v))
    for row in range(len(seqused_k)):
        first, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        n = int(seqused_k[row])
        ids = block_table[row, : -(-n // k.shape[1])].numpy()
        keys, values = (x[ids].reshape(-1, *k.shape[2:])[:n] for x in (k, v))
        part, _ = attention(
            q[first:end].float().numpy(),
            keys,
            values,
            n,
            scale=options["softmax_scale"],
            soft_cap=options["softcap"],
            window=window[0] + 1,
            sinks=None if options.get("s_aux") is None else options["s_aux"].float().numpy(),
        )
        out[first:end] = torch.from_numpy(part).to(out.dtype)
    flash_attn_stand_in.calls.append(len(seqused_k))


flash_attn_stand_in.calls = []


@pytest.fixture
def engine(backend, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    flash_attn_stand_in.calls.clear()
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_stand_in, raising=False)
    COUNTERS.reset()
    return backend


def implementation(backend, window=None, cap=None, sinks=None, dtype="auto", **changes):
    given = {
        "num_heads": HEADS,
        "head_size": DIM,
        "scale": 0.125,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": window,
        "kv_cache_dtype": dtype,
        "logits_soft_cap": cap,
        "sinks": sinks,
    }
    impl = backend.get_impl_cls()(**{**given, **changes})
    for one in (impl, impl._engine):
        one.vllm_flash_attn_version = 2  # none is found without a GPU
    one = torch.ones(1)
    return types.SimpleNamespace(
        impl=impl,
        num_heads=HEADS,
        _q_scale=one,
        _k_scale=one,
        _v_scale=one,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


def config(layers, speculative=0, max_num_seqs=16):
    model = types.SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: DIM,
        max_model_len=512,
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


def cache_spec():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.bfloat16
    )


def make_builder(backend, layers, **options):
    return backend.get_builder_cls()(
        cache_spec(), list(layers), config(layers, **options), torch.device("cpu")
    )


def kv_cache():
    """As this release of vLLM shapes it."""
    generator = torch.Generator().manual_seed(5)
    if backend_name() == "CUSTOM":
        shape = (BLOCKS, 2, PAGE, KV_HEADS, DIM)
    else:
        shape = (BLOCKS, KV_HEADS, PAGE, 2 * DIM)
    return torch.randn(shape, generator=generator).bfloat16()


def batch(rows, padded=0):
    """CommonAttentionMetadata of rows [(seq_len, query tokens)], then padding rows of 0."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    seq_lens = [n for n, _ in rows] + [0] * padded
    query_lens = [q for _, q in rows] + [0] * padded
    starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
    tokens = int(starts[-1])
    if padded:  # a captured graph's batch: as many tokens as rows
        tokens = (len(rows) + padded) * query_lens[0]
    generator = torch.Generator().manual_seed(len(rows))
    table = torch.randint(1, BLOCKS, (len(seq_lens), 32), generator=generator, dtype=torch.int32)
    table[len(rows) :] = 0
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
    )


def run(layer, builder, common, cache, extra=0):
    """(output, reference) of a step of one layer, padding tokens left out."""
    from persistentkv.vllm.engine_cache import split

    tokens = common.num_actual_tokens + extra
    generator = torch.Generator().manual_seed(9)
    qkv = torch.randn((tokens, HEADS + 2 * KV_HEADS, DIM), generator=generator).bfloat16()
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    out = torch.full((tokens, HEADS, DIM), 9.0).bfloat16()
    metadata = builder.build(0, common)
    layer.impl.forward(layer, q, k, v, cache, metadata, out)
    wanted = torch.zeros((tokens, HEADS, DIM))
    sinks = layer.impl.sinks
    keys, values = (x.float().numpy() for x in split(cache, KV_HEADS, DIM))
    for row in range(common.num_reqs):
        first, end = (int(x) for x in common.query_start_loc[row : row + 2])
        n = int(common.seq_lens[row])
        ids = common.block_table_tensor[row, : -(-n // PAGE)].numpy()
        part, _ = attention(
            q[first:end].float().numpy(),
            keys[ids].reshape(-1, KV_HEADS, DIM)[:n],
            values[ids].reshape(-1, KV_HEADS, DIM)[:n],
            n,
            scale=0.125,
            soft_cap=layer.impl.logits_soft_cap or 0,
            window=layer.impl.sliding_window[0] + 1,
            sinks=None if sinks is None else sinks.float().numpy(),
        )
        wanted[first:end] = torch.from_numpy(part)
    real = int(common.query_start_loc[-1])
    error = (out[:real].float() - wanted[:real]).abs() / (1 + wanted[:real].abs())
    assert error.max().item() < 1e-2, error.max()
    return out, metadata


DECODE = [(33, 1), (1, 1), (200, 1), (64, 1)]
MIXED = [(33, 1), (200, 1), (40, 40), (100, 17)]


def test_decode_is_ours_alone(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer})
    assert builder.reorder_batch_threshold == 1
    _, metadata = run(layer, builder, batch(DECODE), kv_cache())
    assert metadata.decode_rows == 4 and metadata.prefill is None
    assert flash_attn_stand_in.calls == []
    assert COUNTERS.share() == 1 and COUNTERS.decode_rows == 4


def test_padding_rows_of_a_graph_cost_nothing_and_are_not_counted(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer})
    out, metadata = run(layer, builder, batch(DECODE, padded=4), kv_cache())
    assert metadata.decode_rows == 8 and flash_attn_stand_in.calls == []
    assert not out[4:].any()
    assert COUNTERS.decode_rows == 4


def test_mixed_batches_split(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer})
    out, metadata = run(layer, builder, batch(MIXED), kv_cache(), extra=7)
    assert metadata.decode_rows == 2 and metadata.prefill.num_actual_tokens == 57
    assert flash_attn_stand_in.calls == [2]
    assert (out[-7:] == 9).all()
    assert COUNTERS.decode_rows == 2 and COUNTERS.prefill_rows == 2 and COUNTERS.share() == 1


def test_prefill_alone_is_the_engine_s(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer})
    _, metadata = run(layer, builder, batch([(40, 40), (100, 17)]), kv_cache())
    assert metadata.decode_rows == 0 and flash_attn_stand_in.calls == [2]


@pytest.mark.parametrize("options", [{"window": 50}, {"cap": 3.0}, {"window": 8, "cap": 2.0}])
@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_windows_and_caps(engine, options, rows):
    layer = implementation(engine, **options)
    run(layer, make_builder(engine, {"a": layer}), batch(rows), kv_cache())
    assert COUNTERS.share() == 1


def test_sinks(engine, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    layer = implementation(engine, sinks=torch.linspace(-1, 2, HEADS).bfloat16())
    layer.impl.forward(layer, *[torch.zeros((1, HEADS, DIM))] * 4, None, torch.ones(1, HEADS, DIM))
    run(layer, make_builder(engine, {"a": layer}), batch(MIXED), kv_cache())
    assert COUNTERS.share() == 1


def test_one_plan_a_window_serves_its_layers(engine):
    layers = {str(i): implementation(engine, window=40 if i % 2 else None) for i in range(4)}
    builder = make_builder(engine, layers)
    common, cache = batch(DECODE), kv_cache()
    for layer in layers.values():
        _, metadata = run(layer, builder, common, cache)
    assert sorted(metadata.plans) == [0, 40]
    assert COUNTERS.served == 4 * 4 * 4 and COUNTERS.fallback == 0


@pytest.mark.parametrize("rows", [[(33, 3), (3, 3), (70, 3)], [(33, 3), (70, 3), (90, 60)]])
def test_speculative_rows(engine, rows):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer}, speculative=2)
    assert builder.reorder_batch_threshold == 3
    _, metadata = run(layer, builder, batch(rows), kv_cache())
    assert metadata.decode_q_len == 3 and metadata.decode_rows == sum(q == 3 for _, q in rows)


def test_a_layer_that_is_not_served_is_the_engine_s_and_counted(engine):
    good, bad = implementation(engine), implementation(engine)
    bad.impl.give_up("as a test")
    layers = {"good": good, "bad": bad}
    builder = make_builder(engine, layers)
    for rows in (DECODE, MIXED):
        flash_attn_stand_in.calls.clear()
        run(bad, builder, batch(rows), kv_cache())
        assert flash_attn_stand_in.calls == [4]
        run(good, builder, batch(rows), kv_cache())
    assert COUNTERS.served == COUNTERS.fallback > 0
    assert set(COUNTERS.reasons) == {"as a test"}


def test_a_batch_that_is_not_served_is_the_engine_s_and_counted(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer}, max_num_seqs=3)
    run(layer, builder, batch([(20, 1)] * 9), kv_cache())
    assert flash_attn_stand_in.calls == [9] and COUNTERS.share() == 0
    assert COUNTERS.fallback == 9 and "9 rows" in next(iter(COUNTERS.reasons))


def test_a_graph_s_capture_is_not_counted(engine):
    builder = make_builder(engine, {"a": implementation(engine)})
    assert builder.build_for_cudagraph_capture(batch(DECODE)).decode_rows == 4
    assert COUNTERS.steps == 0


def test_cascade_attention_is_never_asked_for(engine):
    builder = make_builder(engine, {"a": implementation(engine)})
    assert builder.use_cascade_attention() is False


def test_an_unknown_window_class_is_an_error_not_a_guess(engine):
    layer = implementation(engine)
    builder = make_builder(engine, {"a": layer})
    other = implementation(engine, window=5)
    with pytest.raises(KeyError):
        run(other, builder, batch(DECODE), kv_cache())


def test_fp8_caches_get_16_bit_queries_for_decode_and_fp8_ones_for_prefill(engine, monkeypatch):
    from persistentkv.vllm import paged_backend
    from vllm.v1.attention.backends import flash_attn

    from py_support import e4m3_bits, e4m3_floats

    for name in ("flash_attn_supports_quant_query_input", "flash_attn_supports_kv_cache_dtype"):
        monkeypatch.setattr(flash_attn, name, lambda *a, **k: True, raising=False)
    quantised = []

    def fp8_query(query, scale):
        quantised.append(query.shape[0])
        return query

    monkeypatch.setattr(paged_backend, "_fp8_query", fp8_query)
    layer = implementation(engine, dtype="fp8")
    assert not layer.impl.supports_quant_query_input
    assert layer.impl._engine.supports_quant_query_input
    layer._k_scale_float, layer._v_scale_float = 0.5, 2.0
    layer._k_scale, layer._v_scale = torch.tensor([0.5]), torch.tensor([2.0])
    floats = kv_cache().float().numpy()
    bits = torch.from_numpy(e4m3_bits(floats))
    builder = make_builder(engine, {"a": layer})
    common = batch(MIXED)
    metadata = builder.build(0, common)
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn((3, common.num_actual_tokens, HEADS, DIM), generator=generator).bfloat16()
    out = torch.zeros_like(q)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda **options: None)
    layer.impl.forward(layer, q, k, v, bits, metadata, out)
    assert quantised == [57]
    from persistentkv.vllm.engine_cache import split

    keys, values = (e4m3_floats(x.numpy()) for x in split(bits, KV_HEADS, DIM))
    for row in range(2):
        n = int(common.seq_lens[row])
        ids = common.block_table_tensor[row, : -(-n // PAGE)].numpy()
        wanted, _ = attention(
            q[row : row + 1].float().numpy(),
            0.5 * keys[ids].reshape(-1, KV_HEADS, DIM)[:n],
            2.0 * values[ids].reshape(-1, KV_HEADS, DIM)[:n],
            n,
            scale=0.125,
        )
        error = np.abs(out[row].float().numpy() - wanted[0]) / (1 + np.abs(wanted[0]))
        assert error.max() < 1e-2, error.max()
