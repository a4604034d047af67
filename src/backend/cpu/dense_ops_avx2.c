/* SPDX-License-Identifier: Apache-2.0 */
/* The small operations on AVX2, with the roundings of the scalar kernels; and the table. */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_avx2.h"

#include <math.h>

#include "backend/cpu/dense_math.h"

static double sum_double_lanes(__m256d low, __m256d high) {
  /* (l0+l4, l1+l5, l2+l6, l3+l7), then the even ones, then the odd ones. */
  const __m256d s = _mm256_add_pd(low, high);
  const __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
  return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
}

void pkv_dense_rms_norm_avx2(float *y, const float *x, const float *weight, int64_t n, float eps) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
    low = _mm256_fmadd_pd(a, a, low); /* the product of two floats is exact in double */
    high = _mm256_fmadd_pd(b, b, high);
  }
  double tail[8] = {0.0};
  for (int64_t j = i; j < n; j++)
    tail[j - i] = (double)x[j] * (double)x[j];
  low = _mm256_add_pd(low, _mm256_loadu_pd(tail));
  high = _mm256_add_pd(high, _mm256_loadu_pd(tail + 4));
  const float scale = pkv_rms_scale(sum_double_lanes(low, high), n, eps);
  const __m256 s = _mm256_set1_ps(scale);
  for (i = 0; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), s);
    _mm256_storeu_ps(y + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
  }
  for (; i < n; i++)
    y[i] = x[i] * scale * weight[i];
}

void pkv_dense_rope_adjacent_avx2(float *x, int32_t heads, int32_t head_dim, int32_t rope_dim,
                                  const float *cs) {
  for (int32_t h = 0; h < heads; h++) {
    float *head = x + (int64_t)h * head_dim;
    int32_t i = 0;
    for (; i + 8 <= rope_dim; i += 8) {
      const __m256 v = _mm256_loadu_ps(head + i), t = _mm256_loadu_ps(cs + i);
      const __m256 cosine = _mm256_moveldup_ps(t), sine = _mm256_movehdup_ps(t);
      const __m256 crossed = _mm256_mul_ps(_mm256_permute_ps(v, 0xb1), sine);
      _mm256_storeu_ps(head + i, _mm256_fmaddsub_ps(v, cosine, crossed));
    }
    for (; i < rope_dim; i += 2) {
      const float a = head[i], b = head[i + 1];
      head[i] = fmaf(a, cs[i], -(b * cs[i + 1]));
      head[i + 1] = fmaf(b, cs[i], a * cs[i + 1]);
    }
  }
}

/* pkv_exp_clamped, eight at a time. Operands of min and max are ordered so that NaN passes. */
static __m256 exp_clamped(__m256 x) {
  x = _mm256_min_ps(_mm256_set1_ps(PKV_EXP_LIMIT), x);
  x = _mm256_max_ps(_mm256_set1_ps(-PKV_EXP_LIMIT), x);
  const __m256 magic = _mm256_set1_ps(PKV_ROUND_MAGIC);
  const __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(PKV_LOG2_E), magic);
  const __m256 n = _mm256_sub_ps(shifted, magic);
  __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-PKV_LN2_HIGH), x);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(-PKV_LN2_LOW), r);
  __m256 p = _mm256_set1_ps(PKV_EXP_C7);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_C6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_C5));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_C4));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_C3));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_C2));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23),
                                        _mm256_set1_epi32(0x3f800000));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(bits));
}

void pkv_dense_swiglu_avx2(float *y, const float *gate, const float *up, int64_t count) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    const __m256 e = exp_clamped(_mm256_xor_ps(g, sign));
    const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, e));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
  }
  for (; i < count; i++)
    y[i] = gate[i] / (1.0f + pkv_exp_clamped(-gate[i])) * up[i];
}

void pkv_dense_geglu_avx2(float *y, const float *gate, const float *up, int64_t count) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  const __m256 a = _mm256_set1_ps(PKV_GELU_A), b = _mm256_set1_ps(PKV_GELU_B);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    const __m256 t = _mm256_mul_ps(g, _mm256_fmadd_ps(_mm256_mul_ps(g, g), b, a));
    const __m256 e = exp_clamped(_mm256_xor_ps(t, sign));
    const __m256 gelu = _mm256_div_ps(g, _mm256_add_ps(one, e));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(gelu, _mm256_loadu_ps(up + i)));
  }
  for (; i < count; i++)
    y[i] = pkv_gelu_tanh(gate[i]) * up[i];
}

void pkv_dense_add_avx2(float *y, const float *x, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(y + i), _mm256_loadu_ps(x + i)));
  for (; i < count; i++)
    y[i] += x[i];
}

const pkv_dense_kernels pkv_dense_avx2 = {pkv_dense_quantize_avx2,  pkv_dense_narrow_avx2,
                                          pkv_dense_tile_f32_avx2,  pkv_dense_tile_i8_avx2,
                                          pkv_dense_tile_bf16_avx2, pkv_dense_dequantize_avx2,
                                          pkv_dense_rms_norm_avx2,  pkv_dense_rope_adjacent_avx2,
                                          pkv_dense_swiglu_avx2,    pkv_dense_geglu_avx2,
                                          pkv_dense_add_avx2};

#endif
