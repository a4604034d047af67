/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of quantised weights and 8-bit activations on AVX-512 with VNNI: one instruction
 * multiplies four activations with sixteen columns and adds in 32 bits, so nothing can overflow.
 * Tiles, integer dots and float operations are those of the AVX2 file: the same bits.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_row_avx2.h"
#include "backend/cpu/dense_tile_avx2.h"

#define MAX_ROWS 128
#define ROWS     8 /* of a register tile */

/* The instruction wants unsigned codes: signed ones are moved up by 128. */
PKV_ALWAYS_INLINE int32_t offset_of(pkv_wtype type) {
  return pkv_codes_signed(type) ? 128 : pkv_block_offset(type);
}

static void make_unsigned(pkv_tile *t, int64_t blocks) {
  const __m512i top = _mm512_set1_epi8((char)-128);
  for (int64_t b = 0; b < blocks; b++) {
    for (int g = 0; g < 8; g++) {
      void *at = t->codes[b][g];
      _mm512_store_si512(at, _mm512_xor_si512(_mm512_load_si512(at), top));
    }
  }
}

/* Exact dots of `count` rows and 16 columns over fours [g0, g1) of a block. */
PKV_ALWAYS_INLINE void dots(int count, __m512i dot[ROWS], const pkv_tile *t, int64_t b,
                            const int8_t *q, int64_t stride, int g0, int g1) {
  for (int r = 0; r < count; r++)
    dot[r] = _mm512_setzero_si512();
  for (int g = g0; g < g1; g++) {
    const __m512i w = _mm512_load_si512(t->codes[b][g]);
    for (int r = 0; r < count; r++) {
      const int32_t four = (int32_t)pkv_load_u32(q + r * stride + 4 * g);
      dot[r] = _mm512_dpbusd_epi32(dot[r], w, _mm512_set1_epi32(four));
    }
  }
}

PKV_ALWAYS_INLINE __m512 minus_sum(__m512i dot, int32_t offset, int32_t sum) {
  if (offset != 0) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(offset * sum));
  return _mm512_cvtepi32_ps(dot);
}

/* Scales of 16 elements, which a tile holds as two equal 16-bit numbers, as floats. */
PKV_ALWAYS_INLINE __m512 half_scales(const pkv_tile *t, int64_t b, int half) {
  const __m512i both = _mm512_load_si512(t->s[b][half]);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16));
}

/* A block of Q6_K as floats: scale times dot of each half, summed. All of it is whole numbers below
   2^24, so nothing is rounded. */
PKV_ALWAYS_INLINE void scaled_dots(int count, __m512 out[ROWS], const pkv_tile *t, int64_t b,
                                   const pkv_dense_x *x, int64_t row, int64_t block) {
  const int8_t *q = x->q + row * x->k + block * PKV_QK;
  const int32_t offset = offset_of(PKV_WTYPE_Q6_K);
  __m512i dot[ROWS];
  dots(count, dot, t, b, q, x->k, 0, 4);
  const __m512 low = half_scales(t, b, 0), high = half_scales(t, b, 1);
  for (int r = 0; r < count; r++) {
    const int32_t first = x->first[(row + r) * x->blocks + block];
    out[r] = _mm512_mul_ps(minus_sum(dot[r], offset, first), low);
  }
  dots(count, dot, t, b, q, x->k, 4, 8);
  for (int r = 0; r < count; r++) {
    const int64_t at = (row + r) * x->blocks + block;
    const int32_t last = x->sum[at] - x->first[at];
    out[r] = _mm512_fmadd_ps(minus_sum(dot[r], offset, last), high, out[r]);
  }
}

/* acc [count][16] over the tile's blocks, rows from `row` on. */
PKV_ALWAYS_INLINE void tile_rows(pkv_wtype type, int count, float (*acc)[PKV_TILE],
                                 const pkv_tile *t, const pkv_dense_x *x, int64_t row,
                                 int64_t block0, int64_t blocks, pkv_fetch fetch) {
  __m512 sum[ROWS];
  for (int r = 0; r < count; r++)
    sum[r] = _mm512_load_ps(acc[r]);
  for (int64_t b = 0; b < blocks; b++) {
    pkv_fetch_block(&fetch, b);
    const __m512 d = _mm512_load_ps(t->d[b]), m = _mm512_load_ps(t->m[b]);
    __m512 dot[ROWS];
    if (type == PKV_WTYPE_Q6_K) {
      scaled_dots(count, dot, t, b, x, row, block0 + b);
    } else {
      __m512i whole[ROWS];
      dots(count, whole, t, b, x->q + row * x->k + (block0 + b) * PKV_QK, x->k, 0, 8);
      for (int r = 0; r < count; r++)
        dot[r] = minus_sum(whole[r], offset_of(type), x->sum[(row + r) * x->blocks + block0 + b]);
    }
    for (int r = 0; r < count; r++) {
      const int64_t at = (row + r) * x->blocks + block0 + b;
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x->scale[at]));
      sum[r] = _mm512_fmadd_ps(dot[r], scale, sum[r]);
      if (pkv_block_has_min(type))
        sum[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->scaled_sum[at]), sum[r]);
    }
  }
  for (int r = 0; r < count; r++)
    _mm512_store_ps(acc[r], sum[r]);
}

/* Calls of tile_rows for so many rows. */
PKV_ALWAYS_INLINE int64_t fetch_calls(int64_t rows) {
  return rows / ROWS + (rows >> 2 & 1) + (rows >> 1 & 1) + (rows & 1);
}

/* All rows of a block of rows: in eights, then what is left in fours, twos, one. next_col: of which
   each call asks for its share. */
PKV_ALWAYS_INLINE void all_rows(pkv_wtype type, float (*acc)[PKV_TILE], const pkv_tile *t,
                                const pkv_dense_job *job, int64_t row, int64_t rows, int64_t block0,
                                int64_t blocks, int64_t next_col) {
  const int64_t calls = fetch_calls(rows);
  int64_t r = 0;
  for (int64_t call = 0; call < calls; call++) {
    const pkv_fetch f = pkv_fetch_part(type, &job->p->w, next_col, block0, blocks, call, calls);
    const int64_t left = rows - r, count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (count == 8) tile_rows(type, 8, acc + r, t, job->x, row + r, block0, blocks, f);
    if (count == 4) tile_rows(type, 4, acc + r, t, job->x, row + r, block0, blocks, f);
    if (count == 2) tile_rows(type, 2, acc + r, t, job->x, row + r, block0, blocks, f);
    if (count == 1) tile_rows(type, 1, acc + r, t, job->x, row + r, block0, blocks, f);
    r += count;
  }
}

PKV_ALWAYS_INLINE void batch_tile(pkv_wtype type, const pkv_dense_job *job, int64_t col0,
                                  int64_t col1, int64_t row0, int64_t row1) {
  const pkv_dense_x *x = job->x;
  const int64_t rows = row1 - row0;
  pkv_tile t;
  _Alignas(64) float acc[MAX_ROWS][PKV_TILE];
  if (!pkv_block_has_min(type)) memset(t.m, 0, sizeof t.m);
  for (int64_t col = col0; col < col1; col += PKV_TILE) {
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int64_t b0 = 0; b0 < x->blocks; b0 += PKV_TILE_BLOCKS) {
      const int64_t left = x->blocks - b0;
      const int64_t blocks = left < PKV_TILE_BLOCKS ? left : PKV_TILE_BLOCKS;
      const bool fetch = col == col0 || fetch_calls(rows) > PKV_FETCH_CALLS;
      pkv_unpack_tile(type, &t, &job->p->w, col, col1, b0, blocks, fetch);
      if (pkv_codes_signed(type)) make_unsigned(&t, blocks);
      all_rows(type, acc, &t, job, row0, rows, b0, blocks, col + PKV_TILE);
    }
    for (int64_t r = 0; r < rows; r++) {
      pkv_store_columns(job->p, row0 + r, col, col1 - col, _mm256_load_ps(acc[r]));
      if (col1 - col > PKV_LANES)
        pkv_store_columns(job->p, row0 + r, col + PKV_LANES, col1 - col - PKV_LANES,
                          _mm256_load_ps(acc[r] + PKV_LANES));
    }
  }
}

/* One copy of the code for each type. */
#define DEFINE_TILE(name, type)                                                                    \
  static void name(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,             \
                   int64_t row1) {                                                                 \
    if (row1 - row0 == 1) {                                                                        \
      decode_tile(type, job, col0, col1, row0);                                                    \
      return;                                                                                      \
    }                                                                                              \
    for (int64_t r = row0; r < row1; r += MAX_ROWS)                                                \
      batch_tile(type, job, col0, col1, r, r + MAX_ROWS < row1 ? r + MAX_ROWS : row1);             \
  }

DEFINE_TILE(tile_q4_0, PKV_WTYPE_Q4_0)
DEFINE_TILE(tile_q4_1, PKV_WTYPE_Q4_1)
DEFINE_TILE(tile_q5_0, PKV_WTYPE_Q5_0)
DEFINE_TILE(tile_q5_1, PKV_WTYPE_Q5_1)
DEFINE_TILE(tile_q8_0, PKV_WTYPE_Q8_0)
DEFINE_TILE(tile_q4_k, PKV_WTYPE_Q4_K)
DEFINE_TILE(tile_q5_k, PKV_WTYPE_Q5_K)
DEFINE_TILE(tile_q6_k, PKV_WTYPE_Q6_K)

void pkv_dense_tile_i8_avx512vnni(const pkv_dense_job *job, int64_t col0, int64_t col1,
                                  int64_t row0, int64_t row1) {
  /* One row of signed codes needs AVX2's instructions, which see 16 registers of these 32. */
  if (row1 - row0 == 1 && job->p->w.type == PKV_WTYPE_Q8_0) {
    pkv_dense_tile_i8_avx2(job, col0, col1, row0, row1);
    return;
  }
  switch (job->p->w.type) {
  case PKV_WTYPE_Q4_0:
    tile_q4_0(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q4_1:
    tile_q4_1(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q5_0:
    tile_q5_0(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q5_1:
    tile_q5_1(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q4_K:
    tile_q4_k(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q5_K:
    tile_q5_k(job, col0, col1, row0, row1);
    break;
  case PKV_WTYPE_Q6_K:
    tile_q6_k(job, col0, col1, row0, row1);
    break;
  default:
    tile_q8_0(job, col0, col1, row0, row1);
    break;
  }
}

const pkv_dense_kernels pkv_dense_avx512vnni = {
    pkv_dense_quantize_avx2,  pkv_dense_narrow_avx2,
    pkv_dense_tile_f32_avx2,  pkv_dense_tile_i8_avx512vnni,
    pkv_dense_tile_bf16_avx2, pkv_dense_dequantize_avx2,
    pkv_dense_rms_norm_avx2,  pkv_dense_rope_adjacent_avx2,
    pkv_dense_swiglu_avx2,    pkv_dense_geglu_avx2,
    pkv_dense_add_avx2};

#endif
