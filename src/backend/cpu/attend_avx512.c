/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AVX-512 (F, BW, DQ, VL): sixteen lanes and 32 registers, so that four query rows meet four
 * tokens in the score kernel and four vectors in the value kernel. Head dimensions that are an odd
 * multiple of eight end in a half vector.
 */
#include "backend/cpu/cpu_isa.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define VL         16
#define ATTEND_OPS pkv_cpu_avx512_ops
#define ATTEND_ISA PKV_ISA_AVX512
/* e4m3 bits moved into an f16 are 2^8 too small. */
#define VF_FP8_FACTOR   256.0f
#define QK_TOKENS(rows) 4
#define PV_CHUNKS(rows) 4
#define WIDE_CHUNKS     4
#define PANEL_VECTORS   2
#define WIDE_FROM       16
#define WIDE_TOKENS     8
#define UNROLL          _Pragma("GCC unroll 8")

typedef __m512 vf;

static inline vf vf_set1(float a) {
  return _mm512_set1_ps(a);
}
static inline vf vf_zero(void) {
  return _mm512_setzero_ps();
}
static inline vf vf_load(const float *p) {
  return _mm512_loadu_ps(p);
}
static inline vf vf_load_half(const float *p) {
  return _mm512_maskz_loadu_ps(0xff, p);
}
static inline void vf_store(float *p, vf a) {
  _mm512_storeu_ps(p, a);
}
static inline vf vf_add(vf a, vf b) {
  return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
  return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
  return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
  return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b) {
  return _mm512_max_ps(a, b);
}
static inline vf vf_abs(vf a) {
  return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a);
}
static inline vf vf_copysign(vf a, vf sign) {
  return _mm512_or_ps(a, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
}
static inline vf vf_exponent(vf t) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}

/* Lower and upper half first, then as eight lanes: pairs, then halves. */
static inline __m256 fold_halves(vf a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
static inline __m128 sum4(vf a, vf b, vf c, vf d) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(fold_halves(a), fold_halves(b)),
                                      _mm256_hadd_ps(fold_halves(c), fold_halves(d)));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}
static inline void vf_sum4(float *out, vf a, vf b, vf c, vf d) {
  _mm_storeu_ps(out, sum4(a, b, c, d));
}
static inline float vf_sum(vf a) {
  return _mm_cvtss_f32(sum4(a, a, a, a));
}
static inline float vf_top(vf a) {
  return _mm512_reduce_max_ps(a);
}

static inline vf bf16_lanes(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
/* e4m3 through f16: sign to the top, the rest 7 bits up; 0x7f and 0xff become NaN. */
static inline vf fp8_lanes(__m128i bytes) {
  const __m256i x = _mm256_cvtepu8_epi16(bytes), low = _mm256_set1_epi16(0x7f);
  const __m256i rest = _mm256_and_si256(x, low);
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(low, x), 8);
  const __m256i nan = _mm256_cmpeq_epi16(rest, low);
  return _mm512_cvtph_ps(_mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(rest, 7), sign), nan));
}
static inline vf vf_kv(pkv_dtype dtype, const unsigned char *p) {
  if (dtype == PKV_DTYPE_F32) return _mm512_loadu_ps(p);
  if (dtype == PKV_DTYPE_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
  if (dtype == PKV_DTYPE_BF16) return bf16_lanes(_mm256_loadu_si256((const void *)p));
  return fp8_lanes(_mm_loadu_si128((const void *)p));
}
static inline vf vf_kv_half(pkv_dtype dtype, const unsigned char *p) {
  if (dtype == PKV_DTYPE_F32) return _mm512_maskz_loadu_ps(0xff, p);
  if (dtype == PKV_DTYPE_FP8_E4M3) return fp8_lanes(_mm_loadl_epi64((const void *)p));
  const __m256i h = _mm256_zextsi128_si256(_mm_loadu_si128((const void *)p));
  return dtype == PKV_DTYPE_F16 ? _mm512_cvtph_ps(h) : bf16_lanes(h);
}

static inline __m256i bf16_of(vf a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  const __m512i safe = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(safe, 16));
}

/* f32, f16 and bf16, sixteen at a time; returns how many were written. */
static inline int64_t vf_narrow(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                                float divisor) {
  int64_t i = 0;
  unsigned char *out = dst;
  const vf by = vf_set1(divisor);
  for (; i + VL <= count; i += VL) {
    vf x = vf_load(src + i);
    if (divisor != 1.0f) x = vf_div(x, by);
    if (dtype == PKV_DTYPE_F32) _mm512_storeu_ps(out + i * 4, x);
    if (dtype == PKV_DTYPE_F16)
      _mm256_storeu_si256((void *)(out + i * 2), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    if (dtype == PKV_DTYPE_BF16) _mm256_storeu_si256((void *)(out + i * 2), bf16_of(x));
  }
  return i;
}

static inline uint32_t vf_unequal(vf a, vf b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ);
}

/* Rows k, k + 4, k + 8, k + 12 share a vector; its quarters are turned over as 4 x 4 blocks. */
static inline void vf_transpose4(vf out[4], const float *const rows[VL], int32_t at) {
  vf a[4];
  for (int k = 0; k < 4; k++) {
    a[k] = _mm512_castps128_ps512(_mm_loadu_ps(rows[k] + at));
    a[k] = _mm512_mask_broadcast_f32x4(a[k], 0x00f0, _mm_loadu_ps(rows[k + 4] + at));
    a[k] = _mm512_mask_broadcast_f32x4(a[k], 0x0f00, _mm_loadu_ps(rows[k + 8] + at));
    a[k] = _mm512_mask_broadcast_f32x4(a[k], 0xf000, _mm_loadu_ps(rows[k + 12] + at));
  }
  const vf low01 = _mm512_unpacklo_ps(a[0], a[1]), low23 = _mm512_unpacklo_ps(a[2], a[3]);
  const vf high01 = _mm512_unpackhi_ps(a[0], a[1]), high23 = _mm512_unpackhi_ps(a[2], a[3]);
  out[0] = _mm512_shuffle_ps(low01, low23, 0x44);
  out[1] = _mm512_shuffle_ps(low01, low23, 0xee);
  out[2] = _mm512_shuffle_ps(high01, high23, 0x44);
  out[3] = _mm512_shuffle_ps(high01, high23, 0xee);
}

/* A macro: gcc takes a function that only prefetches for one without effect and drops its calls. */
#define vf_prefetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)

#include "backend/cpu/attend_impl.h"

#endif
