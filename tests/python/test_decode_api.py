# SPDX-License-Identifier: Apache-2.0
"""BatchDecode against float64: both ways to name pages, layouts, types, every option."""

import math

import numpy as np
import persistentkv as pkv
import pytest
from py_support import Kind, Pages, bf16_bits, bf16_floats, decode, encode

LENGTHS = [5, 0, 64, 131, 16, 1, 300]
TOLERANCE = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1e-2}


def queries(rng, rows, heads, dim, dtype):
    bits = encode(rng.standard_normal((rows, heads, dim), np.float32), dtype)
    return bits, decode(bits, dtype)


def close(got, wanted, tolerance):
    assert np.array_equal(np.isneginf(got), np.isneginf(wanted)), (got, wanted)
    finite = np.isfinite(wanted)
    error = np.abs(got[finite] - wanted[finite])
    bound = tolerance + tolerance * np.abs(wanted[finite])
    assert (error <= bound).all(), (error.max(), tolerance)


def case(
    kind, seed=0, dtype="float16", kv=None, layout="NHD", heads=(8, 2), dim=64, page=16, q_len=1
):
    rng = np.random.default_rng(seed)
    pages = Pages(rng, LENGTHS, heads[1], dim, page, kv or dtype, layout)
    bits, floats = queries(rng, len(LENGTHS) * q_len, heads[0], dim, dtype)
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim, "page_size": page}
    return pages, kind.put(bits, dtype), floats, shape


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("five", [False, True])
def test_csr_and_dense_agree_with_the_reference(kind, layout, dtype, five):
    pages, q, floats, shape = case(kind, dtype=dtype, layout=layout)
    if kind.name == "cuda" and dtype == "float32":
        with pytest.raises(pkv.PkvError, match="a device's caches are f16, bf16 or fp8_e4m3"):
            pkv.BatchDecode().plan(*pages.csr(kind), *shape.values(), q_data_type=dtype)
        return
    wanted, natural = pages.expected(floats)
    results = []
    for dense in (False, True):
        decoder = pkv.BatchDecode(kv_layout=layout)
        if dense:
            table, lengths = pages.dense(kind)
            decoder.plan(block_tables=table, seq_lens=lengths, q_data_type=dtype, **shape)
        else:
            decoder.plan(*pages.csr(kind), *shape.values(), q_data_type=dtype)
        out, lse = decoder.run(q, pages.cache(kind, five), return_lse=True)
        close(kind.floats(out), wanted, TOLERANCE[dtype])
        close(kind.floats(lse), natural / math.log(2), 1e-3)
        results.append(kind.floats(out))
    assert np.array_equal(*results)


@pytest.mark.parametrize("page", [1, 8, 16, 48])
@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (7, 1), (32, 1)])
def test_pages_and_groups(kind, page, heads):
    pages, q, floats, shape = case(kind, page=page, heads=heads, dim=72)
    decoder = pkv.BatchDecode(lse_base="e")
    decoder.plan(*pages.csr(kind), *shape.values())
    out, lse = decoder.run_return_lse(q, pages.cache(kind))
    wanted, natural = pages.expected(floats)
    close(kind.floats(out), wanted, 1.5e-3)
    close(kind.floats(lse), natural, 1e-3)


def test_fp8_with_scales(kind):
    pages, q, floats, shape = case(kind, kv="float8_e4m3fn")
    decoder = pkv.BatchDecode()
    decoder.plan(*pages.csr(kind), *shape.values(), kv_data_type="float8_e4m3fn")
    out = decoder.run(q, pages.cache(kind), k_scale=0.5, v_scale=3.0)
    wanted, _ = pages.expected(floats, scale=0.5 / 8)
    close(kind.floats(out), 3 * wanted, 2e-3)
    each = kind.put(np.array([0.25, 2.0], np.float32))
    out = kind.floats(decoder.run(q, pages.cache(kind), v_scale=each))
    wanted, _ = pages.expected(floats)
    close(out, wanted * np.repeat([0.25, 2.0], 4)[None, :, None], 2e-3)


def test_numbers_as_scales_of_16_bit_caches(kind):
    pages, q, floats, shape = case(kind)
    decoder = pkv.BatchDecode()
    decoder.plan(*pages.csr(kind), *shape.values())
    out = decoder.run(q, pages.cache(kind), q_scale=2.0, k_scale=0.25, v_scale=0.5)
    wanted, _ = pages.expected(floats, scale=0.5 / 8)
    close(kind.floats(out), 0.5 * wanted, 1.5e-3)
    with pytest.raises(pkv.NotSupported, match="fp8"):
        decoder.run(q, pages.cache(kind), k_scale=kind.put(np.ones(2, np.float32)))


def test_window_cap_sinks_scale_and_queries(kind):
    pages, q, floats, shape = case(kind, q_len=3)
    sinks = np.linspace(-2, 3, 8).astype(np.float32)
    decoder = pkv.BatchDecode(lse_base="e")
    decoder.plan(
        *pages.csr(kind),
        *shape.values(),
        window_left=39,
        logits_soft_cap=5.0,
        sm_scale=0.3,
        q_len_per_req=3,
    )
    out, lse = decoder.run(q, pages.cache(kind), return_lse=True, sinks=kind.put(sinks))
    wanted, natural = pages.expected(floats, scale=0.3, soft_cap=5.0, window=40, sinks=sinks)
    close(kind.floats(out), wanted, 1.5e-3)
    close(kind.floats(lse), natural, 1e-3)


def test_out_and_lse_are_written_in_place_with_strides(kind):
    pages, q, floats, shape = case(kind)
    wanted, natural = pages.expected(floats)
    wide, lse = kind.empty((7, 8, 128), "float16"), kind.empty((7, 11), "float32")
    decoder = pkv.BatchDecode(lse_base="e")
    decoder.plan(*pages.csr(kind), *shape.values())
    got = decoder.run(q, pages.cache(kind), out=wide[:, :, 32:96], lse=lse[:, :8])
    assert got[1] is not None
    close(kind.floats(wide[:, :, 32:96]), wanted, 1.5e-3)
    close(kind.floats(lse[:, :8]), natural, 1e-3)
    for untouched in (wide[:, :, :32], wide[:, :, 96:], lse[:, 8:]):
        assert (kind.floats(untouched) == 7.0).all()


def test_strided_and_interleaved_caches(kind):
    """K and V interleaved a token (as some engines lay them out): views with their own strides."""
    pages, q, floats, shape = case(kind)
    both = kind.put(np.concatenate([pages.k, pages.v], 3), "float16")
    decoder = pkv.BatchDecode()
    decoder.plan(*pages.csr(kind), *shape.values())
    out = decoder.run(q, (both[..., :64], both[..., 64:]))
    close(kind.floats(out), pages.expected(floats)[0], 1.5e-3)


def test_one_object_serves_many_steps_of_growing_size(kind):
    rng = np.random.default_rng(3)
    decoder = pkv.BatchDecode(max_batch_size=2, max_seq_len=64)
    for lengths in ([3], [40, 7, 9], [2000, 1], [5] * 40, []):
        pages = Pages(rng, lengths, 2, 64, 16, "float16")
        bits, floats = queries(rng, len(lengths), 8, 64, "float16")
        decoder.plan(*pages.csr(kind), 8, 2, 64, 16)
        out = decoder.run(kind.put(bits), pages.cache(kind))
        if lengths:
            close(kind.floats(out), pages.expected(floats)[0], 1.5e-3)
        assert tuple(out.shape) == (len(lengths), 8, 64)


@pytest.mark.parametrize(
    "route", ["balanced", "split", "workqueue", "bucket_exact", "bucket_padded"]
)
def test_routes_agree_and_explain_themselves(kind, route):
    pages, q, floats, shape = case(kind)
    decoder = pkv.BatchDecode(route=route)
    decoder.plan(*pages.csr(kind), *shape.values())
    close(kind.floats(decoder.run(q, pages.cache(kind))), pages.expected(floats)[0], 1.5e-3)
    said = decoder.explain()
    assert said.route == route == decoder.resolved_backend
    assert said.rows == 7 and said.launches >= 1 and said.useful_kv_bytes > 0
    assert route in str(said)


def test_a_prefix_that_rows_share_is_read_once(kind):
    rng = np.random.default_rng(2)
    pages = Pages(rng, [512 + n for n in (3, 40, 17, 64)], 2, 64, 16, "float16")
    for row in range(1, 4):  # the first 32 pages of all rows are row 0's
        pages.indices[pages.indptr[row] : pages.indptr[row] + 32] = pages.indices[:32]
    bits, floats = queries(rng, 4, 8, 64, "float16")
    wanted, natural = pages.expected(floats)
    for chained in (False, True):
        decoder = pkv.BatchDecode(route="shared", chained=chained, lse_base="e")
        decoder.plan(*pages.csr(kind), 8, 2, 64, 16)
        try:
            out, lse = decoder.run(kind.put(bits), pages.cache(kind), return_lse=True)
        except pkv.NotSupported as e:
            assert kind.name == "cuda" and "shared" in str(e)
            pytest.skip(str(e))
        close(kind.floats(out), wanted, 1.5e-3)
        close(kind.floats(lse), natural, 1e-3)
        said = decoder.explain()
        assert said.route == "shared" and said.nodes == 1 and said.dedup_ratio > 3
        assert "1 shared prefixes read once" in str(said)


def test_policies_choose_a_route_and_say_why(kind):
    pages, q, floats, shape = case(kind)
    decoder = pkv.BatchDecode(policy="roofline")
    decoder.plan(*pages.csr(kind), *shape.values())
    close(kind.floats(decoder.run(q, pages.cache(kind))), pages.expected(floats)[0], 1.5e-3)
    assert decoder.explain().reason != "as asked"


@pytest.mark.parametrize("controls", [{"fixed_split_size": 8}, {"disable_split_kv": True}])
def test_batch_invariant_bits_do_not_depend_on_neighbours(kind, controls):
    rng = np.random.default_rng(5)
    pages = Pages(rng, [700, 3000, 64, 129, 2000], 2, 64, 16, "float16")
    bits, _ = queries(rng, 5, 8, 64, "float16")
    alone = []
    for rows in (5, 2, 1):
        decoder = pkv.BatchDecode()
        indptr, indices, last = pages.indptr[: rows + 1], pages.indices, pages.last[:rows]
        arrays = (kind.put(np.array(x)) for x in (indptr, indices, last))
        decoder.plan(*arrays, 8, 2, 64, 16, **controls)
        out = decoder.run(kind.put(bits[:rows]), pages.cache(kind))
        alone.append(kind.floats(out)[0])
    assert np.array_equal(alone[0], alone[1]) and np.array_equal(alone[0], alone[2])


def test_bfloat16_as_uint16_views():
    pages, q, floats, shape = case(Kind("numpy"), dtype="bfloat16")
    decoder = pkv.BatchDecode()
    decoder.plan(*pages.csr(Kind("numpy")), *shape.values(), q_data_type="bfloat16")
    out = decoder.run(q, pages.cache(Kind("numpy")))
    assert out.dtype == np.uint16
    close(bf16_floats(out), pages.expected(floats)[0], 1e-2)
    undeclared = pkv.BatchDecode()
    undeclared.plan(*pages.csr(Kind("numpy")), *shape.values(), q_data_type="float32")
    with pytest.raises(pkv.InvalidArgument, match="uint16.*declared"):
        undeclared.run(q, pages.cache(Kind("numpy")))


def test_merge_states_of_halves_is_the_whole(kind):
    if kind.name == "cuda":
        with pytest.raises(pkv.NotSupported, match="host memory"):
            pkv.merge_states(
                kind.put(np.ones((1, 2, 3, 8), np.float32)), kind.put(np.ones((1, 2, 3)))
            )
        return
    rng = np.random.default_rng(9)
    pages = Pages(rng, [96, 64], 2, 64, 16, "float16")
    bits, floats = queries(rng, 2, 8, 64, "float16")
    halves = []
    for first, end in ((0, 2), (2, None)):
        spans = [pages.indices[pages.indptr[r] : pages.indptr[r + 1]][first:end] for r in range(2)]
        indptr = np.cumsum([0] + [len(s) for s in spans]).astype(np.int32)
        decoder = pkv.BatchDecode()
        arrays = (indptr, np.concatenate(spans), np.full(2, 16, np.int32))
        decoder.plan(*(kind.put(x) for x in arrays), 8, 2, 64, 16, o_data_type="float32")
        halves.append(decoder.run(kind.put(bits), pages.cache(kind), return_lse=True))
    (va, sa), (vb, sb) = halves
    out, lse = pkv.merge_state(va, sa, vb, sb)
    wanted, natural = pages.expected(floats)
    close(kind.floats(out), wanted, 1e-4)
    close(kind.floats(lse), natural / math.log(2), 1e-4)


def test_merge_keeps_types_and_ignores_empty_states():
    v = np.full((1, 2, 1, 8), np.nan, np.float32)
    v[:, 0] = 3
    s = np.array([[[1.0], [-np.inf]]], np.float32)
    for dtype in (np.float32, np.float16):
        out, lse = pkv.merge_states(v.astype(dtype), s, lse_base="e")
        assert out.dtype == dtype and (out == 3).all() and lse[0, 0] == 1
    out, _ = pkv.merge_states(bf16_bits(v), s)
    assert out.dtype == np.uint16 and (bf16_floats(out) == 3).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_append_then_read_back(kind, layout, dtype, source):
    rng = np.random.default_rng(1)
    shape = (6, 16, 2, 8) if layout == "NHD" else (6, 2, 16, 8)
    k_pages, v_pages = (kind.put(encode(np.zeros(shape, np.float32), dtype), dtype) for _ in "kv")
    # Keys and values inside wider rows, as a fused projection leaves them.
    values = rng.standard_normal((5, 7, 8)).astype(np.float16)  # what e4m3_bits can take exactly
    rows = encode(values.astype(np.float32), source)
    k, v = (decode(rows[:, at : at + 2], source) for at in (1, 4))
    rows = kind.put(rows, source)
    slots = np.array([0, 17, -1, 95, 40], np.int64)
    pages = (k_pages, v_pages)
    pkv.append(rows[:, 1:3], rows[:, 4:6], pages, kind.put(slots), layout, kv_data_type=dtype)
    for new, held in ((k, k_pages), (v, v_pages)):
        if kind.name == "numpy":
            got = decode(held, dtype)
        else:
            got = kind.floats(held)
        got = got if layout == "NHD" else got.transpose(0, 2, 1, 3)
        flat = got.reshape(96, 2, 8)
        wanted = np.zeros_like(flat)
        for i, slot in enumerate(slots):
            if slot >= 0:
                wanted[slot] = decode(encode(new[i], dtype), dtype)
        assert np.array_equal(flat, wanted)


def test_append_paged_kv_cache_finds_the_slots(kind):
    cache = kind.put(np.zeros((4, 2, 16, 1, 8), np.float16))
    new = np.arange(1, 25, dtype=np.float16).reshape(3, 1, 8)
    rows, positions = np.array([0, 1, 1], np.int32), np.array([17, 0, 3], np.int32)
    indices, indptr = np.array([3, 1, 2], np.int32), np.array([0, 2, 3], np.int32)
    arrays = [kind.put(x) for x in (new, -new, rows, positions)]
    pkv.append_paged_kv_cache(
        *arrays, cache, kind.put(indices), kind.put(indptr), None, kv_layout="NHD"
    )
    held = kind.floats(cache)
    assert np.array_equal(held[1, 0, 1], new[0].astype(np.float32))
    assert np.array_equal(held[2, 1, 3], -new[2].astype(np.float32))
    assert np.count_nonzero(held) == 48


def test_mixed_numbers_of_queries(kind):
    rng = np.random.default_rng(8)
    lengths, queries_of = [70, 5, 33, 33, 200, 9], [1, 1, 7, 7, 1, 9]
    pages = Pages(rng, lengths, 2, 64, 16, "bfloat16", "HND")
    bits, floats = queries(rng, sum(queries_of), 8, 64, "bfloat16")
    indptr = np.cumsum([0] + queries_of).astype(np.int32)
    batch = pkv.BatchAttention(kv_layout="HND", lse_base="e")
    arrays = (kind.put(x) for x in (indptr, pages.indptr, pages.indices, pages.seq_lens))
    batch.plan(*arrays, 8, 2, 64, 64, 16)
    out, lse = batch.run(kind.put(bits, "bfloat16"), pages.cache(kind))
    for row, n in enumerate(lengths):
        part = slice(indptr[row], indptr[row + 1])
        from py_support import attention

        wanted, natural = attention(floats[part], *pages.row(row), n)
        close(kind.floats(out)[part], wanted, 1e-2)
        close(kind.floats(lse)[part], natural, 1e-3)
    assert len(batch.explain()) == 4
