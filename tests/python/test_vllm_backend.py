# SPDX-License-Identifier: Apache-2.0
"""The plug-in inside vLLM's own classes, on CPU tensors: registration, metadata, decode, prefill.

FlashAttention has no CPU kernel: a float32 stand-in of the one function that the engine's backend
calls takes its place, so that everything around it is vLLM's.
"""

import numpy as np
import pytest
from persistentkv.vllm import COUNTERS, backend_name, register
from py_support import attention

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
from vllm_harness import Harness  # noqa: E402 - it imports both


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
    return Harness(backend)


DECODE = [(33, 1), (1, 1), (200, 1), (64, 1)]
MIXED = [(33, 1), (200, 1), (40, 40), (100, 17)]


def test_decode_is_ours_alone(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    assert builder.reorder_batch_threshold == 1
    _, metadata = engine.run(layer, builder, engine.batch(DECODE), engine.cache())
    assert metadata.decode_rows == 4 and metadata.prefill is None
    assert flash_attn_stand_in.calls == []
    assert COUNTERS.share() == 1 and COUNTERS.decode_rows == 4


def test_padding_rows_of_a_graph_cost_nothing_and_are_not_counted(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    out, metadata = engine.run(layer, builder, engine.batch(DECODE, padded=4), engine.cache())
    assert metadata.decode_rows == 8 and flash_attn_stand_in.calls == []
    assert not out[4:].any()
    assert COUNTERS.decode_rows == 4


def test_mixed_batches_split(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    out, metadata = engine.run(layer, builder, engine.batch(MIXED), engine.cache(), extra=7)
    assert metadata.decode_rows == 2 and metadata.prefill.num_actual_tokens == 57
    assert flash_attn_stand_in.calls == [2]
    assert (out[-7:] == 9).all()
    assert COUNTERS.decode_rows == 2 and COUNTERS.prefill_rows == 2 and COUNTERS.share() == 1


def test_prefill_alone_is_the_engine_s(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    _, metadata = engine.run(layer, builder, engine.batch([(40, 40), (100, 17)]), engine.cache())
    assert metadata.decode_rows == 0 and flash_attn_stand_in.calls == [2]


@pytest.mark.parametrize("options", [{"window": 50}, {"cap": 3.0}, {"window": 8, "cap": 2.0}])
@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_windows_and_caps(engine, options, rows):
    layer = engine.layer(**options)
    engine.run(layer, engine.builder({"a": layer}), engine.batch(rows), engine.cache())
    assert COUNTERS.share() == 1


def test_sinks(engine, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    layer = engine.layer(sinks=torch.linspace(-1, 2, engine.heads).bfloat16())
    layer.impl.forward(
        layer,
        *[torch.zeros((1, engine.heads, engine.dim))] * 4,
        None,
        torch.ones(1, engine.heads, engine.dim),
    )
    engine.run(layer, engine.builder({"a": layer}), engine.batch(MIXED), engine.cache())
    assert COUNTERS.share() == 1


def test_one_plan_a_window_serves_its_layers(engine):
    layers = {str(i): engine.layer(window=40 if i % 2 else None) for i in range(4)}
    builder = engine.builder(layers)
    common, cache = engine.batch(DECODE), engine.cache()
    for layer in layers.values():
        _, metadata = engine.run(layer, builder, common, cache)
    assert sorted(metadata.plans) == [0, 40]
    assert COUNTERS.served == 4 * 4 * 4 and COUNTERS.fallback == 0


@pytest.mark.parametrize("rows", [[(33, 3), (3, 3), (70, 3)], [(33, 3), (70, 3), (90, 60)]])
def test_speculative_rows(engine, rows):
    layer = engine.layer()
    builder = engine.builder({"a": layer}, speculative=2)
    assert builder.reorder_batch_threshold == 3
    _, metadata = engine.run(layer, builder, engine.batch(rows), engine.cache())
    assert metadata.decode_q_len == 3 and metadata.decode_rows == sum(q == 3 for _, q in rows)


def test_a_layer_that_is_not_served_is_the_engine_s_and_counted(engine):
    good, bad = engine.layer(), engine.layer()
    bad.impl.give_up("as a test")
    layers = {"good": good, "bad": bad}
    builder = engine.builder(layers)
    for rows in (DECODE, MIXED):
        flash_attn_stand_in.calls.clear()
        engine.run(bad, builder, engine.batch(rows), engine.cache())
        assert flash_attn_stand_in.calls == [4]
        engine.run(good, builder, engine.batch(rows), engine.cache())
    assert COUNTERS.served == COUNTERS.fallback > 0
    assert set(COUNTERS.reasons) == {"as a test"}


def test_the_schedules_of_two_batches_are_kept_apart(engine, monkeypatch):
    """FlashAttention schedules into one buffer: a refused layer's must outlive the prefill's."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Base

    buffer, original = torch.zeros(1, dtype=torch.int32), Base.build

    def scheduled(self, prefix, common, fast_build=False):
        metadata = original(self, prefix, common, fast_build)
        buffer[0] = common.num_reqs
        metadata.scheduler_metadata = buffer
        return metadata

    monkeypatch.setattr(Base, "build", scheduled)
    good, bad = engine.layer(), engine.layer()
    bad.impl.give_up("as a test")
    metadata = engine.builder({"good": good, "bad": bad}).build(0, engine.batch(MIXED))
    assert metadata.scheduler_metadata.tolist() == [4]
    assert metadata.prefill.scheduler_metadata.tolist() == [2]


def test_models_whose_batches_may_be_refused_are_the_engine_s(engine, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    # 0.33 stages ranges for such models in memory that only a driver can pin.
    monkeypatch.setattr(flash_attn, "PIN_MEMORY", False, raising=False)
    layer = engine.layer()
    config = engine.config({"a": layer})
    config.model_config.is_mm_prefix_lm = True
    builder = engine.builder({"a": layer}, config=config)
    engine.run(layer, builder, engine.batch(DECODE), engine.cache())
    assert flash_attn_stand_in.calls == [4] and "multimodal" in next(iter(COUNTERS.reasons))


@pytest.mark.parametrize("rows, least, shared", [(1, 2, 0), (2, 2, 1), (12, 2, 1), (12, "", 0)])
def test_rows_on_one_prefix_are_planned_as_a_tree(engine, rows, least, shared, monkeypatch):
    """Blocks as the prefix cache hands them out; few rows are not looked at for sharing."""
    monkeypatch.setenv("PERSISTENTKV_VLLM_SHARED_ROWS", str(least))
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    common = engine.batch([(100 + i, 1) for i in range(rows)])
    common.block_table_tensor[:, :5] = common.block_table_tensor[0, :5].clone()
    _, metadata = engine.run(layer, builder, common, engine.cache())
    assert COUNTERS.shared_steps == shared and COUNTERS.share() == 1
    assert metadata.plans[0].shares(rows) == bool(shared)


def test_a_batch_that_is_not_served_is_the_engine_s_and_counted(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer}, max_num_seqs=3)
    engine.run(layer, builder, engine.batch([(20, 1)] * 9), engine.cache())
    assert flash_attn_stand_in.calls == [9] and COUNTERS.share() == 0
    assert COUNTERS.fallback == 9 and "9 rows" in next(iter(COUNTERS.reasons))


def test_a_graph_s_capture_is_not_counted(engine):
    builder = engine.builder({"a": engine.layer()})
    assert builder.build_for_cudagraph_capture(engine.batch(DECODE)).decode_rows == 4
    assert COUNTERS.steps == 0


def test_cascade_attention_is_never_asked_for(engine):
    builder = engine.builder({"a": engine.layer()})
    assert builder.use_cascade_attention() is False


def test_an_unknown_window_class_is_an_error_not_a_guess(engine):
    layer = engine.layer()
    builder = engine.builder({"a": layer})
    other = engine.layer(window=5)
    with pytest.raises(KeyError):
        engine.run(other, builder, engine.batch(DECODE), engine.cache())


def test_fp8_caches_get_16_bit_queries_for_decode_and_fp8_ones_for_prefill(engine, monkeypatch):
    from persistentkv.vllm import paged_backend
    from py_support import e4m3_bits, e4m3_floats
    from vllm.v1.attention.backends import flash_attn

    for name in ("flash_attn_supports_quant_query_input", "flash_attn_supports_kv_cache_dtype"):
        monkeypatch.setattr(flash_attn, name, lambda *a, **k: True, raising=False)
    quantised = []

    def fp8_query(query, scale):
        quantised.append(query.shape[0])
        return query

    monkeypatch.setattr(paged_backend, "_fp8_query", fp8_query)
    layer = engine.layer(dtype="fp8")
    assert not layer.impl.supports_quant_query_input
    assert layer.impl._engine.supports_quant_query_input
    layer._k_scale_float, layer._v_scale_float = 0.5, 2.0
    layer._k_scale, layer._v_scale = torch.tensor([0.5]), torch.tensor([2.0])
    floats = engine.cache().float().numpy()
    bits = torch.from_numpy(e4m3_bits(floats))
    builder = engine.builder({"a": layer})
    common = engine.batch(MIXED)
    metadata = builder.build(0, common)
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(
        (3, common.num_actual_tokens, engine.heads, engine.dim), generator=generator
    ).bfloat16()
    out = torch.zeros_like(q)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda **options: None)
    layer.impl.forward(layer, q, k, v, bits, metadata, out)
    assert quantised == [57]
    from persistentkv.vllm.engine_cache import split

    keys, values = (e4m3_floats(x.numpy()) for x in split(bits, engine.kv_heads, engine.dim))
    for row in range(2):
        n = int(common.seq_lens[row])
        ids = common.block_table_tensor[row, : -(-n // engine.page)].numpy()
        wanted, _ = attention(
            q[row : row + 1].float().numpy(),
            0.5 * keys[ids].reshape(-1, engine.kv_heads, engine.dim)[:n],
            2.0 * values[ids].reshape(-1, engine.kv_heads, engine.dim)[:n],
            n,
            scale=0.125,
        )
        error = np.abs(out[row].float().numpy() - wanted[0]) / (1 + np.abs(wanted[0]))
        assert error.max() < 1e-2, error.max()
