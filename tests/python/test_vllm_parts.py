# SPDX-License-Identifier: Apache-2.0
"""The parts of the vLLM plug-in that know no vLLM: cache layouts, plans, counters, refusals."""

import ctypes
import json
import types

import numpy as np
import persistentkv as pkv
import pytest
from persistentkv import _abi
from persistentkv.plans import stats_of
from persistentkv.vllm import NAMES, backend_name, refusal
from persistentkv.vllm.decode_plans import (
    DecodePlans,
    LayerCall,
    PlanClass,
    shared_rows,
    wants,
)
from persistentkv.vllm.engine_cache import c_cache, split
from persistentkv.vllm.layer_support import batch_refusal, layer_refusal, scales_refusal
from persistentkv.vllm.served import Counters
from py_support import attention, missing

torch_only = pytest.mark.skipif(bool(missing("torch")), reason=missing("torch"))

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16


def close(out, wanted):
    """bfloat16 against float64."""
    error = np.abs(out.float().numpy() - wanted) / (1 + np.abs(wanted))
    assert error.max() < 1e-2, error.max()


def layouts(torch, blocks=24, dtype="bfloat16"):
    """{name: cache as an engine allocates it}: logical shape by release, memory by layout."""
    generator = torch.Generator().manual_seed(3)

    def memory(*shape):
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    found = {
        "0.24 NHD": memory(blocks, 2, PAGE, KV_HEADS, DIM),
        "0.24 HND": memory(blocks, 2, KV_HEADS, PAGE, DIM).transpose(2, 3),
        "0.24 layers in blocks": memory(blocks, 5, 2, PAGE, KV_HEADS, DIM)[:, 3],
        "0.24 heads over layers": memory(blocks, KV_HEADS, 5, 2, PAGE, DIM)[:, :, 1].permute(
            0, 2, 3, 1, 4
        ),
        "0.20 NHD": memory(2, blocks, PAGE, KV_HEADS, DIM),
        "0.33 LBHNC": memory(blocks, KV_HEADS, PAGE, 2 * DIM),
        "0.33 LBNHC": memory(blocks, PAGE, KV_HEADS, 2 * DIM).transpose(1, 2),
        "0.33 BLHNC": memory(blocks, 4, KV_HEADS, PAGE, 2 * DIM)[:, 2],
        "0.33 BLNHC": memory(blocks, 4, PAGE, KV_HEADS, 2 * DIM)[:, 2].transpose(1, 2),
        "0.33 BHLNC": memory(blocks, KV_HEADS, 4, PAGE, 2 * DIM)[:, :, 2],
        "0.33 LHBNC": memory(KV_HEADS, blocks, PAGE, 2 * DIM).transpose(0, 1),
    }
    return found


LAYOUTS = [
    "0.24 NHD",
    "0.24 HND",
    "0.24 layers in blocks",
    "0.24 heads over layers",
    "0.20 NHD",
    "0.33 LBHNC",
    "0.33 LBNHC",
    "0.33 BLHNC",
    "0.33 BLNHC",
    "0.33 BHLNC",
    "0.33 LHBNC",
]


def expected(torch, cache, table, lengths, q, q_len=1, **options):
    """Float64 reference over a cache of any layout: [rows * q_len, heads, dim]."""
    k, v = (x.float().numpy() for x in split(cache, KV_HEADS, DIM))
    out, lse = [], []
    for row, n in enumerate(lengths):
        ids = table[row, : -(-n // PAGE)]
        keys, values = (x[ids].reshape(-1, KV_HEADS, DIM)[:n] for x in (k, v))
        part = q[row * q_len : (row + 1) * q_len].float().numpy()
        a, b = attention(part, keys, values, n, **options)
        out.append(a)
        lse.append(b)
    return np.concatenate(out), np.concatenate(lse)


@torch_only
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_on_every_layout(layout, q_len):
    import torch

    cache = layouts(torch)[layout]
    lengths = [60, 3, 16, 0, 33]
    table = (
        torch.randperm(24, generator=torch.Generator().manual_seed(q_len))[:20].int().reshape(5, 4)
    )
    wide = torch.zeros((5, 9), dtype=torch.int32)
    wide[:, 1:5] = table
    generator = torch.Generator().manual_seed(1)
    # Queries and outputs inside wider rows, as a fused projection leaves them.
    qkv = torch.randn((5 * q_len, HEADS + 4, DIM), generator=generator).bfloat16()
    q, out = qkv[:, 2 : 2 + HEADS], torch.full((5 * q_len, HEADS, DIM), 7.0).bfloat16()
    plans = DecodePlans(
        pkv.default_executor("cpu"),
        PlanClass(HEADS, KV_HEADS, DIM, PAGE, 0, _abi.DTYPE_BF16),
        max_rows=8,
        max_seq_len=100,
        q_lens=(1, 3),
    )
    seq_lens = torch.tensor([*lengths, 99, 99], dtype=torch.int32)
    assert plans.ready(5, q_len) and not plans.ready(9, q_len) and not plans.ready(5, 2)
    plans.build(5, q_len, seq_lens, wide[:, 1:5], 0)
    call = LayerCall(c_cache(cache, KV_HEADS, DIM), scale=0.2)
    lse = torch.empty((5 * q_len, HEADS), dtype=torch.float32)
    plans.attend(5, q_len, call.arguments(q, out, wide[:, 1:5], lse), 0)
    wanted, natural = expected(torch, cache, table.numpy(), lengths, q, q_len, scale=0.2)
    close(out, wanted)
    finite = np.isfinite(natural)
    assert np.array_equal(finite, np.isfinite(lse.numpy()))
    assert np.abs(lse.numpy()[finite] - natural[finite]).max() < 1e-3


@torch_only
@pytest.mark.parametrize("shared", ["1", "0"])
def test_rows_with_a_common_prefix(shared, monkeypatch):
    import torch

    monkeypatch.setenv("PERSISTENTKV_VLLM_SHARED", shared)
    cache = layouts(torch, blocks=80)["0.33 LBNHC"]
    common = torch.randperm(40, generator=torch.Generator().manual_seed(6))[:20].int()
    own = 40 + torch.arange(40, dtype=torch.int32).reshape(20, 2)
    table = torch.cat([common.repeat(20, 1), own], 1).contiguous()
    lengths = [320 + 1 + i for i in range(19)] + [0]
    plans = DecodePlans(
        pkv.default_executor("cpu"),
        PlanClass(HEADS, KV_HEADS, DIM, PAGE, 0, _abi.DTYPE_BF16),
        max_rows=20,
        max_seq_len=352,
    )
    assert plans.share == (shared == "1")
    plans.build(20, 1, torch.tensor(lengths, dtype=torch.int32), table, 0)
    q = torch.randn((20, HEADS, DIM), generator=torch.Generator().manual_seed(4)).bfloat16()
    out = torch.empty_like(q)
    call = LayerCall(c_cache(cache, KV_HEADS, DIM), scale=0.125)
    plans.attend(20, 1, call.arguments(q, out, table), 0)
    wanted, _ = expected(torch, cache, table.numpy(), lengths, q, scale=0.125)
    close(out, wanted)
    stats = stats_of(plans._plans[1, plans.share].address, _abi.DTYPE_BF16)
    assert (stats.nodes > 0) == plans.share and (stats.dedup_ratio > 5) == plans.share


@torch_only
def test_calls_of_a_layer_that_differ():
    """Strides, types, tables and lse of one call say nothing about the next."""
    import torch

    cache = layouts(torch)["0.33 LBNHC"]
    lengths, generator = [40, 5, 17], torch.Generator().manual_seed(8)
    table = torch.randperm(24, generator=generator)[:9].int().reshape(3, 3)
    wide = torch.full((3, 7), -1, dtype=torch.int32)
    wide[:, 2:5] = table
    plans = DecodePlans(
        pkv.default_executor("cpu"),
        PlanClass(HEADS, KV_HEADS, DIM, PAGE, 0, _abi.DTYPE_BF16),
        max_rows=3,
        max_seq_len=64,
    )
    plans.build(3, 1, torch.tensor(lengths, dtype=torch.int32), table, 0)
    call = LayerCall(c_cache(cache, KV_HEADS, DIM), scale=0.2)
    narrow = torch.randn((3, HEADS, DIM), generator=generator)
    inside = torch.zeros((3, HEADS + 3, DIM))
    inside[:, 1 : 1 + HEADS] = narrow
    queries = {"float32": narrow, "bfloat16": narrow.bfloat16()}
    queries["inside"] = inside.bfloat16()[:, 1 : 1 + HEADS]
    lse = torch.zeros((3, HEADS + 2))[:, :HEADS]
    for name in ("bfloat16", "inside", "float32", "inside", "bfloat16"):
        for pages in (table, wide[:, 2:5]):
            for wants_lse in (True, False):
                q = queries[name]
                out = torch.full((3, HEADS, 2 * DIM), 7.0, dtype=q.dtype)[:, :, :DIM]
                before = lse.clone()
                given = lse if wants_lse else None
                plans.attend(3, 1, call.arguments(q, out, pages, given), 0)
                wanted, natural = expected(torch, cache, table.numpy(), lengths, q, scale=0.2)
                close(out, wanted)
                if wants_lse:
                    assert np.abs(lse.numpy() - natural).max() < 1e-3
                    lse += 1
                else:
                    assert torch.equal(lse, before)


@torch_only
def test_arguments_keep_their_cache():
    import torch

    cache = layouts(torch, blocks=4)["0.33 LBNHC"]
    q, table = torch.zeros((1, HEADS, DIM)).bfloat16(), torch.zeros((1, 1), dtype=torch.int32)
    kept = [
        LayerCall(c_cache(cache, KV_HEADS, DIM), scale=1.0).arguments(q, q, table)._obj
        for _ in range(50)  # the memory of a cache that is gone is soon another's
    ]
    assert len({args.cache for args in kept}) == len(kept)
    for args in kept:
        assert _abi.Cache.from_address(args.cache).struct_size == ctypes.sizeof(_abi.Cache)


@torch_only
def test_unknown_caches_are_refused_by_shape():
    import torch

    for shape in ((24, 3, PAGE, KV_HEADS, DIM), (24, PAGE, KV_HEADS, DIM), (24, 2, PAGE, 3, DIM)):
        with pytest.raises(pkv.NotSupported, match="of shape"):
            split(torch.zeros(shape), KV_HEADS, DIM)
    with pytest.raises(pkv.NotSupported, match="int32"):
        c_cache(torch.zeros((4, 2, PAGE, KV_HEADS, DIM), dtype=torch.int32), KV_HEADS, DIM)


def layer(**changes):
    given = {
        "attn_type": "decoder",
        "alibi_slopes": None,
        "head_size": 128,
        "num_heads": 32,
        "num_kv_heads": 8,
        "kv_cache_dtype": "auto",
        "dcp_world_size": 1,
        "batch_invariant_enabled": False,
    }
    return types.SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"head_size": 512}, "512"),
        ({"head_size": 100}, "100"),
        ({"num_heads": 66, "num_kv_heads": 2}, "66 query heads"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4"),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"batch_invariant_enabled": True}, "BATCH_INVARIANT"),
    ],
)
def test_layers_that_are_not_served_say_why(changes, text):
    assert layer_refusal(layer()) == ""
    assert text in layer_refusal(layer(**changes))


@torch_only
def test_scales_and_batches_that_are_not_served_say_why():
    import torch

    scales = types.SimpleNamespace(
        _k_scale=torch.ones(1), _v_scale=torch.ones(8), _q_scale=torch.ones(1)
    )
    assert scales_refusal(scales, 8, "fp8") == "" == scales_refusal(scales, 4, "auto")
    assert "_v_scale of 8" in scales_refusal(scales, 4, "fp8_e4m3")
    scales._q_scale = torch.ones(8)
    assert "_q_scale" in scales_refusal(scales, 8, "fp8")
    int32 = torch.zeros(1, dtype=torch.int32)
    batch = types.SimpleNamespace(seq_lens=int32, block_table_tensor=int32, causal=True)
    assert batch_refusal(batch, 0) == ""
    assert "cascade" in batch_refusal(batch, 16)
    assert "causal" in batch_refusal(types.SimpleNamespace(**{**vars(batch), "causal": False}), 0)
    assert "lengths" in batch_refusal(
        types.SimpleNamespace(**{**vars(batch), "seq_lens": int32.long()}), 0
    )


def test_names_and_versions():
    assert backend_name("0.24.0") == "CUSTOM" and backend_name("0.33.1") == "PERSISTENTKV"
    for version in ("0.23.0", "0.25.1", "1.24.0", "main"):
        assert version in refusal(version) and "0.24, 0.33" in refusal(version)
        with pytest.raises(RuntimeError, match="not registered"):
            backend_name(version)
    assert len(NAMES) == 2


def test_counters_add_up_and_are_written(tmp_path):
    counters = Counters()
    assert counters.share() == 0
    counters.step(10, 2, served_layers=30, fallbacks={"ALiBi": 2})
    counters.step(5, 0, served_layers=30, fallbacks={"ALiBi": 2}, shared=True)
    got = json.loads(open(counters.write(str(tmp_path / "counts")), encoding="utf-8").read())
    assert got["served_row_layers"] == 450 and got["fallback_row_layers"] == 30
    assert got["fallback_reasons"] == {"ALiBi": 30} and got["decode_rows"] == 15
    assert got["steps"] == 2 and got["shared_steps"] == 1 and got["prefill_rows"] == 2
    assert abs(got["served_share"] - 450 / 480) < 1e-12
    counters.reset()
    assert counters.snapshot()["steps"] == 0


def test_counters_are_written_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSISTENTKV_VLLM_COUNTERS", str(tmp_path / "c"))
    counters = Counters()
    counters._written = -1e9
    counters.step(1, 0, 1, {})
    counters.step(1, 0, 1, {})
    files = list(tmp_path.iterdir())
    assert len(files) == 1 and json.loads(files[0].read_text())["steps"] == 1


def test_switches(monkeypatch):
    assert wants("OVERLAP", True) and not wants("OVERLAP", False)
    monkeypatch.setenv("PERSISTENTKV_VLLM_OVERLAP", "0")
    assert not wants("OVERLAP", True)


@pytest.mark.parametrize("value, rows", [("", 16), ("2", 2), ("0", 2), ("64", 64), ("few", 16)])
def test_rows_from_which_prefixes_are_looked_for(value, rows, monkeypatch):
    monkeypatch.setenv("PERSISTENTKV_VLLM_SHARED_ROWS", value)
    assert shared_rows() == rows


@torch_only
def test_without_shared_plans_rows_are_read_one_by_one(monkeypatch):
    from persistentkv.vllm import decode_plans

    monkeypatch.setattr(decode_plans, "share_refusal", lambda *_: "as a test")
    plan_class = PlanClass(HEADS, KV_HEADS, DIM, PAGE, 0, _abi.DTYPE_BF16)
    plans = DecodePlans(pkv.default_executor("cpu"), plan_class, max_rows=2, max_seq_len=64)
    assert not plans.share and not plans.shares(2)
