/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of BF16 weights and activations rounded to bf16, on AVX2: the upper and the lower of
 * two neighbours become floats by a mask and a shift, so that lanes are pairs, as they are for the
 * instruction that AVX-512 BF16 has.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_avx2.h"
#include "backend/cpu/dense_half_avx2.h"

/* Below 2^-126: zero. Else to nearest, half to even; NaN stays NaN. */
static __m256i narrow_eight(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  up = _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(nan));
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_srli_epi32(_mm256_andnot_si256(tiny, up), 16);
}

void pkv_dense_narrow_avx2(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  const int64_t stride = pkv_half_stride(x->k);
  for (int64_t r = row0; r < row1; r++) {
    uint16_t *to = x->half + r * stride;
    const float *row = x->x + r * x->x_stride;
    for (int64_t k0 = 0; k0 < stride; k0 += 16) {
      _Alignas(32) float tail[16] = {0.0f};
      const float *from = tail;
      if (x->k - k0 >= 16)
        from = row + k0;
      else if (x->k > k0)
        memcpy(tail, row + k0, (size_t)(x->k - k0) * sizeof *row);
      const __m256i low = narrow_eight(_mm256_loadu_ps(from));
      const __m256i high = narrow_eight(_mm256_loadu_ps(from + 8));
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
      _mm256_storeu_si256((__m256i *)(void *)(to + k0), both);
    }
  }
}

PKV_ALWAYS_INLINE __m256 upper(__m256i pair) {
  return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32((int32_t)0xffff0000u)));
}

PKV_ALWAYS_INLINE __m256 lower(__m256i pair) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
}

PKV_ALWAYS_INLINE __m256i load_pairs(const void *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}

/* acc += 16 elements of each row and column, of which the first is `half` 16s from k0 on. */
PKV_ALWAYS_INLINE void add_pairs(int rows, int columns, __m256 acc[][PKV_HALF_COLUMNS][2], int half,
                                 const pkv_half_tile *t, int64_t k0) {
  __m256 x1[2], x0[2];
  for (int r = 0; r < rows; r++) {
    const __m256i x = load_pairs(t->x + r * t->x_stride + k0 + 16 * half);
    x1[r] = upper(x);
    x0[r] = lower(x);
  }
  for (int c = 0; c < columns; c++) {
    const __m256i w = load_pairs(t->w[c] + 2 * k0 + 32 * half);
    for (int r = 0; r < rows; r++) {
      acc[r][c][half] = _mm256_fmadd_ps(upper(w), x1[r], acc[r][c][half]);
      acc[r][c][half] = _mm256_fmadd_ps(lower(w), x0[r], acc[r][c][half]);
    }
  }
}

PKV_ALWAYS_INLINE void dots(int rows, int columns, float out[][PKV_HALF_COLUMNS],
                            const pkv_half_tile *t) {
  __m256 acc[2][PKV_HALF_COLUMNS][2];
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++)
      acc[r][c][0] = acc[r][c][1] = _mm256_setzero_ps();
  }
  int64_t k0 = 0;
  for (; k0 + PKV_QK <= t->k; k0 += PKV_QK) {
    pkv_half_fetch(t, k0);
    add_pairs(rows, columns, acc, 0, t, k0);
    add_pairs(rows, columns, acc, 1, t, k0);
  }
  if (k0 < t->k) {
    unsigned char padded[PKV_HALF_COLUMNS][2 * PKV_QK];
    const pkv_half_tile tail = pkv_half_tail(t, padded, columns, k0);
    add_pairs(rows, columns, acc, 0, &tail, 0);
    add_pairs(rows, columns, acc, 1, &tail, 0);
  }
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++)
      out[r][c] = pkv_half_sum(_mm256_add_ps(acc[r][c][0], acc[r][c][1]));
  }
}

static void dots_1x4(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t) {
  dots(1, 4, out, t);
}

static void dots_2x2(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t) {
  dots(2, 2, out, t);
}

void pkv_dense_tile_bf16_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                              int64_t row1) {
  const int64_t rows = row1 - row0, even = rows & ~(int64_t)1;
  const pkv_half_shape two = {2, 2, dots_2x2}, one = {1, 4, dots_1x4};
  if (even > 0) pkv_half_product(job, &two, col0, col1, row0, row0 + even);
  if (rows > even) pkv_half_product(job, &one, col0, col1, row0 + even, row1);
}

#endif
