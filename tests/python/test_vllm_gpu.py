# SPDX-License-Identifier: Apache-2.0
"""The plug-in inside vLLM's own classes on a GPU: the batches of vLLM's test of attention backends,
windows and caps beside its FlashAttention, and decode steps in a replayed CUDA graph."""

import pytest
from py_support import missing

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
from vllm_harness import Harness, check  # noqa: E402 - it imports both

# tests/v1/attention/test_attention_backends.py: (seq_len, query tokens) by row
BATCHES = {
    "small_decode": [(32, 1), (40, 1)],
    "small_prefill": [(32, 8), (40, 8)],
    "mixed_small": [(32, 1), (40, 1), (48, 5), (56, 5)],
    "medium_decode": [(n, 1) for n in (128, 256, 512, 1024) * 2],
    "medium_prefill": [(n, 16) for n in (256, 512, 1024, 2048)],
    "mixed_medium": [(512, 1), (1024, 1), (2048, 1), (512, 7), (1024, 7), (2048, 7)],
    "large_decode": [(2048, 1)] * 32,
    "large_prefill": [(4096, 32)] * 8,
    "single_decode": [(1024, 1)],
    "single_prefill": [(1024, 64)],
}
LIMITS = {"max_num_seqs": 64, "max_model_len": 8192}


@pytest.fixture(scope="module")
def backend():
    reason = missing("cuda")
    if reason:
        pytest.skip(reason)
    from persistentkv.vllm import backend_name
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    return AttentionBackendEnum[backend_name()].get_class()


@pytest.mark.parametrize("name", list(BATCHES))
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_batches(backend, name, parallel):
    """Qwen3-0.6B's heads (16 on 8, of 128), divided as tensor parallelism divides them."""
    harness = Harness(backend, "cuda", 16 // parallel, 8 // parallel, 128, blocks=300)
    layer = harness.layer()
    builder = harness.builder({"a": layer}, **LIMITS)
    assert not builder._refusals, builder._refusals
    _, metadata = harness.run(layer, builder, harness.batch(BATCHES[name]), harness.cache())
    assert metadata.decode_rows == sum(q == 1 for _, q in BATCHES[name])


@pytest.mark.parametrize("options", [{"window": 100}, {"cap": 20.0}, {"window": 64, "cap": 5.0}])
@pytest.mark.parametrize("name", ["mixed_medium", "medium_decode"])
def test_windows_and_caps(backend, options, name):
    harness = Harness(backend, "cuda", 16, 8, 128, blocks=300)
    layer = harness.layer(**options)
    builder = harness.builder({"a": layer}, **LIMITS)
    harness.run(layer, builder, harness.batch(BATCHES[name]), harness.cache())


@pytest.mark.parametrize("rows", [[(33, 3), (3, 3), (700, 3)], [(33, 3), (70, 3), (900, 60)]])
def test_speculative_rows(backend, rows):
    harness = Harness(backend, "cuda", 16, 8, 128, blocks=300)
    layer = harness.layer()
    builder = harness.builder({"a": layer}, speculative=2, **LIMITS)
    _, metadata = harness.run(layer, builder, harness.batch(rows), harness.cache())
    assert metadata.decode_q_len == 3


def test_fp8_beside_float64(backend):
    """Values that e4m3 holds exactly, so that only the arithmetic differs."""
    harness = Harness(backend, "cuda", 16, 8, 128, blocks=300)
    layer = harness.layer(dtype="fp8")
    builder = harness.builder({"a": layer}, **LIMITS)
    assert not builder._refusals, builder._refusals
    fp8 = harness.cache().to(torch.float8_e4m3fn)
    common = harness.batch(BATCHES["medium_decode"])
    q, k, v = harness.queries(common.num_actual_tokens)
    out = torch.zeros((len(q), 16, 128), device="cuda").bfloat16()
    layer.impl.forward(layer, q, k, v, fp8.view(torch.uint8), builder.build(0, common), out)
    check(out, harness.expected(layer, common, fp8.to(torch.bfloat16), q))


@pytest.mark.parametrize("name", ["medium_decode", "large_decode", "long_decode"])
def test_fp8_is_nearer_to_float64_than_the_engine(backend, name):
    """One cache, the queries in 16 bits: what differs is each side's arithmetic. The engine
    multiplies queries and probabilities in e4m3, libpkv in 16 bits."""
    from persistentkv.vllm.paged_backend import PersistentKVMetadataBuilder

    rows = BATCHES.get(name) or [(n, 1) for n in (8000, 30, 4097, 1)]
    harness = Harness(backend, "cuda", 32, 8, 128, blocks=600)
    layer = harness.layer(dtype="fp8")
    builder = harness.builder({"a": layer}, **LIMITS)
    fp8 = harness.cache().to(torch.float8_e4m3fn)
    cache, common = fp8.view(torch.uint8), harness.batch(rows)
    q, k, v = harness.queries(common.num_actual_tokens)
    ours, engine = (torch.zeros((len(q), 32, 128), device="cuda").bfloat16() for _ in range(2))
    layer.impl.forward(layer, q, k, v, cache, builder.build(0, common), ours)
    whole = super(PersistentKVMetadataBuilder, builder).build(0, common)
    layer.impl._by_engine(layer, (q, k, v, cache, whole, engine), None, None)
    wanted = harness.expected(layer, common, fp8.to(torch.bfloat16), q)
    size = wanted.square().mean().sqrt()
    errors = {
        side: ((out.float().cpu() - wanted).square().mean().sqrt() / size).item()
        for side, out in (("libpkv", ours), ("the engine", engine))
    }
    print(f"fp8, {name}: rms error over rms of float64: {errors}")
    assert errors["libpkv"] < 4e-3 and errors["libpkv"] < errors["the engine"] / 2, errors


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("pages", [0, 4])
def test_rows_on_one_prefix(backend, rows, pages):
    """`pages` blocks that all rows share; few rows are planned without looking."""
    harness = Harness(backend, "cuda", 32, 8, 128, blocks=300)
    layer = harness.layer()
    builder = harness.builder({"a": layer}, **LIMITS)
    common = harness.batch([(1000 + 7 * i, 1) for i in range(rows)])
    common.block_table_tensor[:, :pages] = common.block_table_tensor[0, :pages].clone()
    _, metadata = harness.run(layer, builder, common, harness.cache())
    assert metadata.plans[0].shares(rows) == (rows >= 16)


@pytest.mark.parametrize("pages", [0, 4])
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_captured_step_serves_other_lengths(backend, overlap, pages, monkeypatch):
    """Two layers of one plan captured for eight rows; replayed with others, fewer and longer, with
    and without blocks that all rows share."""
    monkeypatch.setenv("PERSISTENTKV_VLLM_OVERLAP", overlap)
    monkeypatch.setenv("PERSISTENTKV_VLLM_SHARED_ROWS", "2")
    harness = Harness(backend, "cuda", 32, 8, 128, blocks=300)
    layers = {"a": harness.layer(), "b": harness.layer()}
    builder = harness.builder(layers, **LIMITS)
    caches = [harness.cache(), harness.cache() * 0.5]
    common = harness.batch([(8000, 1)] * 8)  # as wide as the limits
    q, k, v = harness.queries(8)
    outs = [torch.zeros((8, 32, 128), device="cuda").bfloat16() for _ in layers]

    def step(metadata):
        for layer, cache, out in zip(layers.values(), caches, outs, strict=True):
            layer.impl.forward(layer, q, k, v, cache, metadata, out)

    metadata = builder.build_for_cudagraph_capture(common)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(metadata)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(metadata)

    for rows in ([(100, 1)] * 8, [(7000, 1), (1, 1), (64, 1)], [(n, 1) for n in range(1, 9)]):
        now = harness.batch(rows, padded=8 - len(rows))
        now.block_table_tensor[:, :pages] = now.block_table_tensor[0, :pages].clone()
        # The engine's buffers keep their place: what changes is what lies in them.
        common.seq_lens.copy_(now.seq_lens)
        common.block_table_tensor.zero_()
        table = now.block_table_tensor
        common.block_table_tensor[:, : table.shape[1]].copy_(table)
        builder.build(0, common)
        for out in outs:
            out.fill_(9)
        graph.replay()
        torch.cuda.synchronize()
        for layer, cache, out in zip(layers.values(), caches, outs, strict=True):
            check(out, harness.expected(layer, now, cache, q))
            assert not out[len(rows) :].any()
