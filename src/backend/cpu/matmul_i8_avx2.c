/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of quantised weights and 8-bit activations on AVX2.
 *
 * One row of activations (decode): dense_row_avx2.h. More rows unpack a tile of 16 columns once
 * into bytes interleaved by fours, so that a broadcast of four activations meets eight columns in
 * one instruction. Both give the same bits: the integer dots are exact, and lane c then
 * sees the same float operations, block by block.
 *
 * No 16-bit sum can overflow: activations lie within +-127; a pair of 4-bit products is at most
 * 2 * 15 * 127 = 3,810, eight pairs 30,480; a pair of 5-bit products 7,874, four pairs 31,496; a
 * pair of 8-bit products 2 * 128 * 127 = 32,512; a pair of signed 6-bit products 2 * 32 * 127 =
 * 8,128, four pairs 32,512. The limit is 32,767. A block of Q6_K with its scales (+-128) is at most
 * 32 * 32 * 127 * 128 = 16,646,144: exact as a float too.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_row_avx2.h"
#include "backend/cpu/dense_tile_avx2.h"

#include <math.h>

#include "backend/cpu/dense_math.h"

#define MAX_ROWS 128

/* ---- activations ------------------------------------------------------------------------- */

/* Sums of the first and of the last four lanes, in lanes 0 and 1. */
static __m128i sum_halves(__m256i v) {
  const __m256i two = _mm256_add_epi32(v, _mm256_shuffle_epi32(v, 0x4e));
  const __m256i one = _mm256_add_epi32(two, _mm256_shuffle_epi32(two, 0xb1));
  return _mm_unpacklo_epi32(_mm256_castsi256_si128(one), _mm256_extracti128_si256(one, 1));
}

static uint32_t max_u32(__m256i v) {
  __m128i s = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(s);
}

static __m256i round_scaled(__m256 v, __m256 factor) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(v, factor)); /* to nearest, half to even */
}

static void quantize_block(const pkv_dense_x *x, int64_t row, int64_t block) {
  const float *src = x->x + row * x->x_stride + block * PKV_QK;
  const int64_t at = row * x->blocks + block;
  __m256 v[4];
  __m256i bits = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_loadu_ps(src + 8 * i);
    bits = _mm256_max_epu32(bits, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  }
  const uint32_t largest_bits = max_u32(bits);
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  const bool finite = largest_bits < 0x7f800000u;
  const bool zero = !finite || largest < PKV_QUANT_TINY;
  __m256i q = _mm256_setzero_si256();
  if (!zero) {
    const __m256 f = _mm256_set1_ps(127.0f / largest);
    const __m256i low = _mm256_packs_epi32(round_scaled(v[0], f), round_scaled(v[1], f));
    const __m256i high = _mm256_packs_epi32(round_scaled(v[2], f), round_scaled(v[3], f));
    q = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
  const __m128i halves = sum_halves(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  const int32_t first = _mm_cvtsi128_si32(halves), sum = first + _mm_extract_epi32(halves, 1);
  _mm256_storeu_si256((__m256i *)(void *)(x->q + row * x->k + block * PKV_QK), q);
  x->scale[at] = finite ? (zero ? 0.0f : largest / 127.0f) : NAN;
  x->scaled_sum[at] = x->scale[at] * (float)sum;
  x->sum[at] = sum;
  x->first[at] = first;
}

void pkv_dense_quantize_avx2(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  for (int64_t r = row0; r < row1; r++) {
    for (int64_t b = 0; b < x->blocks; b++)
      quantize_block(x, r, b);
  }
}

/* ---- many rows --------------------------------------------------------------------------- */

/* Keeps the compiler from adding in another order: gcc would hold all products of a block to add
   them as a tree, most of them on the stack, for which batches paid half of their speed. */
PKV_ALWAYS_INLINE __m256i in_order(__m256i v) {
  __asm__("" : "+x"(v));
  return v;
}

/* pairs += products of four elements of k: of `count` rows from q on, and of 16 columns. */
PKV_ALWAYS_INLINE void add_four(pkv_wtype type, int count, __m256i pairs[][2],
                                const int8_t codes[2][32], const int8_t *q, int64_t stride) {
  const __m256i w0 = _mm256_load_si256((const __m256i *)(const void *)codes[0]);
  const __m256i w1 = _mm256_load_si256((const __m256i *)(const void *)codes[1]);
  const bool sign = pkv_codes_signed(type);
  for (int r = 0; r < count; r++) {
    const __m256i x = _mm256_set1_epi32((int32_t)pkv_load_u32(q + r * stride));
    const __m256i p0 = sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(w0), _mm256_sign_epi8(x, w0))
                            : _mm256_maddubs_epi16(w0, x);
    const __m256i p1 = sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(w1), _mm256_sign_epi8(x, w1))
                            : _mm256_maddubs_epi16(w1, x);
    pairs[r][0] = in_order(_mm256_add_epi16(pairs[r][0], p0));
    pairs[r][1] = in_order(_mm256_add_epi16(pairs[r][1], p1));
  }
}

/* Exact dots of `count` rows and 16 columns over one block of k. */
PKV_ALWAYS_INLINE void tile_dots(pkv_wtype type, int count, __m256i dot[][2], const pkv_tile *t,
                                 int64_t b, const int8_t *q, int64_t stride) {
  const __m256i ones = _mm256_set1_epi16(1);
  const int8_t(*codes)[2][32] = t->codes[b];
  /* Fours of k whose 16-bit sums still fit. */
  const int span = type == PKV_WTYPE_Q8_0                                                       ? 1
                   : type == PKV_WTYPE_Q4_0 || type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q4_K ? 8
                                                                                                : 4;
  const int step = pkv_codes_signed(type) ? 1 : 4; /* registers do not last for more */
  for (int r = 0; r < count; r++)
    dot[r][0] = dot[r][1] = _mm256_setzero_si256();
  for (int g0 = 0; g0 < 8; g0 += span) {
    __m256i pairs[4][2];
    for (int r = 0; r < count; r++)
      pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
    for (int g = g0; g < g0 + span; g += step) {
      for (int i = 0; i < step; i++)
        add_four(type, count, pairs, codes[g + i], q + 4 * (g + i), stride);
    }
    __m256i s[2] = {ones, ones};
    for (int half = 0; type == PKV_WTYPE_Q6_K && half < 2; half++)
      s[half] = _mm256_load_si256((const __m256i *)(const void *)&t->s[b][g0 / 4][8 * half]);
    for (int r = 0; r < count; r++) {
      dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(pairs[r][0], s[0]));
      dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(pairs[r][1], s[1]));
    }
  }
}

/* acc [count][16] over the tile's blocks, rows from `row` on. */
PKV_ALWAYS_INLINE void tile_rows(pkv_wtype type, int count, float (*acc)[PKV_TILE],
                                 const pkv_tile *t, const pkv_dense_x *shared, int64_t row,
                                 int64_t block0, int64_t blocks, pkv_fetch fetch) {
  const pkv_dense_x copy = *shared, *const x = &copy; /* which no store can change */
  __m256 sum[4][2];
  for (int r = 0; r < count; r++) {
    sum[r][0] = _mm256_load_ps(acc[r]);
    sum[r][1] = _mm256_load_ps(acc[r] + 8);
  }
  for (int64_t b = 0; b < blocks; b++) {
    __m256i dot[4][2];
    pkv_fetch_block(&fetch, b);
    tile_dots(type, count, dot, t, b, x->q + row * x->k + (block0 + b) * PKV_QK, x->k);
    for (int r = 0; r < count; r++) {
      const int64_t at = (row + r) * x->blocks + block0 + b;
      for (int half = 0; half < 2; half++) {
        sum[r][half] = fold(type, sum[r][half], dot[r][half], _mm256_load_ps(&t->d[b][8 * half]),
                            _mm256_load_ps(&t->m[b][8 * half]), x, at);
      }
    }
  }
  for (int r = 0; r < count; r++) {
    _mm256_store_ps(acc[r], sum[r][0]);
    _mm256_store_ps(acc[r] + 8, sum[r][1]);
  }
}

PKV_ALWAYS_INLINE void batch_tile(pkv_wtype type, const pkv_dense_job *job, int64_t col0,
                                  int64_t col1, int64_t row0, int64_t row1) {
  const pkv_dense_x *x = job->x;
  const pkv_weight *w = &job->p->w;
  const int64_t rows = row1 - row0, calls = (rows + 3) / 4;
  pkv_tile t;
  _Alignas(64) float acc[MAX_ROWS][PKV_TILE];
  if (!pkv_block_has_min(type)) memset(t.m, 0, sizeof t.m);
  for (int64_t col = col0; col < col1; col += PKV_TILE) {
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int64_t b0 = 0; b0 < x->blocks; b0 += PKV_TILE_BLOCKS) {
      const int64_t blocks = x->blocks - b0 < PKV_TILE_BLOCKS ? x->blocks - b0 : PKV_TILE_BLOCKS;
      pkv_unpack_tile(type, &t, w, col, col1, b0, blocks, col == col0 || calls > PKV_FETCH_CALLS);
      for (int64_t r = 0; r < rows; r += 4) {
        const pkv_fetch fetch = pkv_fetch_part(type, w, col + PKV_TILE, b0, blocks, r / 4, calls);
        const int64_t left = rows - r;
        if (left >= 4) tile_rows(type, 4, acc + r, &t, x, row0 + r, b0, blocks, fetch);
        if (left == 3) tile_rows(type, 3, acc + r, &t, x, row0 + r, b0, blocks, fetch);
        if (left == 2) tile_rows(type, 2, acc + r, &t, x, row0 + r, b0, blocks, fetch);
        if (left == 1) tile_rows(type, 1, acc + r, &t, x, row0 + r, b0, blocks, fetch);
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      pkv_store_columns(job->p, row0 + r, col, col1 - col, _mm256_load_ps(acc[r]));
      if (col1 - col > 8)
        pkv_store_columns(job->p, row0 + r, col + 8, col1 - col - 8, _mm256_load_ps(acc[r] + 8));
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

void pkv_dense_tile_i8_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                            int64_t row1) {
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

#endif
