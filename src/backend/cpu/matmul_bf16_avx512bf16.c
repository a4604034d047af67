/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of BF16 weights and activations rounded to bf16, on AVX-512 BF16: an instruction
 * multiplies 32 pairs of elements and adds them into 16 lanes. Each lane is two fused
 * multiply-adds, the upper element first, as measured: the bits of the other files.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_half_avx2.h"

static void narrow(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  const int64_t stride = pkv_half_stride(x->k);
  for (int64_t r = row0; r < row1; r++) {
    for (int64_t k0 = 0; k0 < stride; k0 += 16) {
      const int64_t left = x->k - k0;
      const uint32_t mask = left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1u : 0u;
      const float *from = x->x + r * x->x_stride + (left > 0 ? k0 : 0);
      const __m512 v = _mm512_maskz_loadu_ps((__mmask16)mask, from);
      const __m256bh h = _mm512_cvtneps_pbh(v);
      memcpy(x->half + r * stride + k0, &h, sizeof h);
    }
  }
}

PKV_ALWAYS_INLINE __m512bh load_pairs(const void *p) {
  __m512bh v;
  memcpy(&v, p, sizeof v);
  return v;
}

PKV_ALWAYS_INLINE void add_pairs(int rows, int columns, __m512 acc[][PKV_HALF_COLUMNS],
                                 const pkv_half_tile *t, int64_t k0) {
  __m512bh x[PKV_HALF_ROWS];
  for (int r = 0; r < rows; r++)
    x[r] = load_pairs(t->x + r * t->x_stride + k0);
  for (int c = 0; c < columns; c++) {
    const __m512bh w = load_pairs(t->w[c] + 2 * k0);
    for (int r = 0; r < rows; r++)
      acc[r][c] = _mm512_dpbf16_ps(acc[r][c], w, x[r]);
  }
}

PKV_ALWAYS_INLINE void dots(int rows, int columns, float out[][PKV_HALF_COLUMNS],
                            const pkv_half_tile *t) {
  __m512 acc[PKV_HALF_ROWS][PKV_HALF_COLUMNS];
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++)
      acc[r][c] = _mm512_setzero_ps();
  }
  int64_t k0 = 0;
  for (; k0 + PKV_QK <= t->k; k0 += PKV_QK) {
    pkv_half_fetch(t, k0);
    add_pairs(rows, columns, acc, t, k0);
  }
  if (k0 < t->k) {
    unsigned char padded[PKV_HALF_COLUMNS][2 * PKV_QK];
    const pkv_half_tile tail = pkv_half_tail(t, padded, columns, k0);
    add_pairs(rows, columns, acc, &tail, 0);
  }
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) {
      const __m256 low = _mm512_castps512_ps256(acc[r][c]);
      out[r][c] = pkv_half_sum(_mm256_add_ps(low, _mm512_extractf32x8_ps(acc[r][c], 1)));
    }
  }
}

static void dots_1x8(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t) {
  dots(1, 8, out, t);
}

static void dots_2x8(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t) {
  dots(2, 8, out, t);
}

static void dots_4x4(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t) {
  dots(4, 4, out, t);
}

static void tile_bf16(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                      int64_t row1) {
  static const pkv_half_shape shapes[] = {{4, 4, dots_4x4}, {2, 8, dots_2x8}, {1, 8, dots_1x8}};
  for (int i = 0; i < 3 && row0 < row1; i++) {
    const int64_t rows = (row1 - row0) / shapes[i].rows * shapes[i].rows;
    if (rows > 0) pkv_half_product(job, &shapes[i], col0, col1, row0, row0 + rows);
    row0 += rows;
  }
}

const pkv_dense_kernels pkv_dense_avx512bf16 = {pkv_dense_quantize_avx2,
                                                narrow,
                                                pkv_dense_tile_f32_avx2,
                                                pkv_dense_tile_i8_avx512vnni,
                                                tile_bf16,
                                                pkv_dense_dequantize_avx2,
                                                pkv_dense_rms_norm_avx2,
                                                pkv_dense_rope_adjacent_avx2,
                                                pkv_dense_swiglu_avx2,
                                                pkv_dense_geglu_avx2,
                                                pkv_dense_add_avx2};

#endif
