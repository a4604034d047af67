/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of quantised weights and 8-bit activations for many rows on AVX-512 with VNNI: one
 * instruction multiplies four activations with sixteen columns and adds in 32 bits, so nothing can
 * overflow. Tiles, integer dots and float operations are those of the AVX2 file: the same bits. A
 * single row is bound by memory and stays with AVX2.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_tile_avx2.h"

#define MAX_ROWS 128
#define ROWS     8 /* of a register tile */

/* The instruction wants unsigned codes: those of Q8_0 are moved up by 128. */
PKV_ALWAYS_INLINE int32_t offset_of(pkv_wtype type) {
  return type == PKV_WTYPE_Q8_0 ? 128 : pkv_block_offset(type);
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

/* acc [count][16] over the tile's blocks, rows from `row` on. */
PKV_ALWAYS_INLINE void tile_rows(pkv_wtype type, int count, float (*acc)[PKV_TILE],
                                 const pkv_tile *t, const pkv_dense_x *x, int64_t row,
                                 int64_t block0, int64_t blocks) {
  __m512 sum[ROWS];
  for (int r = 0; r < count; r++)
    sum[r] = _mm512_load_ps(acc[r]);
  for (int64_t b = 0; b < blocks; b++) {
    const int8_t *q = x->q + row * x->k + (block0 + b) * PKV_QK;
    const __m512 d = _mm512_load_ps(t->d[b]), m = _mm512_load_ps(t->m[b]);
    __m512i dot[ROWS];
    for (int r = 0; r < count; r++)
      dot[r] = _mm512_setzero_si512();
    for (int g = 0; g < 8; g++) {
      const __m512i w = _mm512_load_si512(t->codes[b][g]);
      for (int r = 0; r < count; r++) {
        const int32_t four = (int32_t)pkv_load_u32(q + r * x->k + 4 * g);
        dot[r] = _mm512_dpbusd_epi32(dot[r], w, _mm512_set1_epi32(four));
      }
    }
    for (int r = 0; r < count; r++) {
      const int64_t at = (row + r) * x->blocks + block0 + b;
      if (offset_of(type) != 0)
        dot[r] = _mm512_sub_epi32(dot[r], _mm512_set1_epi32(offset_of(type) * x->sum[at]));
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x->scale[at]));
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), scale, sum[r]);
      if (pkv_block_has_min(type))
        sum[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->scaled_sum[at]), sum[r]);
    }
  }
  for (int r = 0; r < count; r++)
    _mm512_store_ps(acc[r], sum[r]);
}

/* All rows of a block of rows: in eights, then what is left in fours, twos, one. */
PKV_ALWAYS_INLINE void all_rows(pkv_wtype type, float (*acc)[PKV_TILE], const pkv_tile *t,
                                const pkv_dense_x *x, int64_t row, int64_t rows, int64_t block0,
                                int64_t blocks) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8)
    tile_rows(type, 8, acc + r, t, x, row + r, block0, blocks);
  if (rows & 4) {
    tile_rows(type, 4, acc + r, t, x, row + r, block0, blocks);
    r += 4;
  }
  if (rows & 2) {
    tile_rows(type, 2, acc + r, t, x, row + r, block0, blocks);
    r += 2;
  }
  if (rows & 1) tile_rows(type, 1, acc + r, t, x, row + r, block0, blocks);
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
      pkv_unpack_tile(type, &t, &job->p->w, col, col1, b0, blocks, true);
      if (type == PKV_WTYPE_Q8_0) make_unsigned(&t, blocks);
      all_rows(type, acc, &t, x, row0, rows, b0, blocks);
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

void pkv_dense_tile_i8_avx512vnni(const pkv_dense_job *job, int64_t col0, int64_t col1,
                                  int64_t row0, int64_t row1) {
  /* Q6_K has a scale for each 16 elements, which the AVX2 file applies for nothing. */
  if (row1 - row0 == 1 || job->p->w.type == PKV_WTYPE_Q6_K) {
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
