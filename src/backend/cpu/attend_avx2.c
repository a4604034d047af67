/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AVX2 + FMA + F16C: eight lanes. Four query rows by two tokens fill the score kernel (eight chains
 * cover the latency of the product), four by two vectors the value kernel; three rows take four
 * tokens, so that groups of three use all registers.
 */
#include "backend/cpu/cpu_isa.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define VL         8
#define ATTEND_OPS pkv_cpu_avx2_ops
#define ATTEND_ISA PKV_ISA_AVX2
/* e4m3 bits moved into an f16 are 2^8 too small. */
#define VF_FP8_FACTOR   256.0f
#define QK_TOKENS(rows) ((rows) == 4 ? 2 : 4)
#define PV_CHUNKS(rows) ((rows) == 4 ? 2 : (rows) == 1 ? 8 : 4)
#define WIDE_CHUNKS     2
#define PANEL_VECTORS   3
#define WIDE_FROM       16
#define WIDE_TOKENS     4
#define UNROLL          _Pragma("GCC unroll 8")

typedef __m256 vf;

static inline vf vf_set1(float a) {
  return _mm256_set1_ps(a);
}
static inline vf vf_zero(void) {
  return _mm256_setzero_ps();
}
static inline vf vf_load(const float *p) {
  return _mm256_loadu_ps(p);
}
static inline void vf_store(float *p, vf a) {
  _mm256_storeu_ps(p, a);
}
static inline vf vf_add(vf a, vf b) {
  return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
  return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
  return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
  return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b) {
  return _mm256_max_ps(a, b);
}
static inline vf vf_abs(vf a) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vf vf_copysign(vf a, vf sign) {
  return _mm256_or_ps(a, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
static inline vf vf_exponent(vf t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}

/* Lanes of four vectors by adjacent pairs, then halves: ((0+1)+(2+3)) + ((4+5)+(6+7)). */
static inline __m128 sum4(vf a, vf b, vf c, vf d) {
  const vf pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}
static inline void vf_sum4(float *out, vf a, vf b, vf c, vf d) {
  _mm_storeu_ps(out, sum4(a, b, c, d));
}
static inline float vf_sum(vf a) {
  return _mm_cvtss_f32(sum4(a, a, a, a));
}
static inline float vf_top(vf a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

static inline vf vf_kv(pkv_dtype dtype, const unsigned char *p) {
  if (dtype == PKV_DTYPE_F32) return _mm256_loadu_ps((const float *)(const void *)p);
  if (dtype == PKV_DTYPE_F16) return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
  if (dtype == PKV_DTYPE_BF16) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  /* e4m3 through f16: sign to the top, the rest 7 bits up; 0x7f and 0xff become NaN. */
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)p));
  const __m128i rest = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), x), 8);
  const __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
  const __m128i h = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(rest, 7), sign), nan);
  return _mm256_cvtph_ps(h);
}

static inline __m128i bf16_of(vf a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

/* f32, f16 and bf16, eight at a time; returns how many were written. */
static inline int64_t vf_narrow(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                                float divisor) {
  int64_t i = 0;
  unsigned char *out = dst;
  const vf by = vf_set1(divisor);
  for (; i + VL <= count; i += VL) {
    vf x = vf_load(src + i);
    if (divisor != 1.0f) x = vf_div(x, by);
    if (dtype == PKV_DTYPE_F32) _mm256_storeu_ps((float *)(void *)(out + i * 4), x);
    if (dtype == PKV_DTYPE_F16)
      _mm_storeu_si128((void *)(out + i * 2), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    if (dtype == PKV_DTYPE_BF16) _mm_storeu_si128((void *)(out + i * 2), bf16_of(x));
  }
  return i;
}

static inline uint32_t vf_unequal(vf a, vf b) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ));
}

/* Rows k and k + 4 share a vector; its halves are turned over as 4 x 4 blocks. */
static inline void vf_transpose4(vf out[4], const float *const rows[VL], int32_t at) {
  vf a[4];
  for (int k = 0; k < 4; k++)
    a[k] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[k] + at)),
                                _mm_loadu_ps(rows[k + 4] + at), 1);
  const vf low01 = _mm256_unpacklo_ps(a[0], a[1]), low23 = _mm256_unpacklo_ps(a[2], a[3]);
  const vf high01 = _mm256_unpackhi_ps(a[0], a[1]), high23 = _mm256_unpackhi_ps(a[2], a[3]);
  out[0] = _mm256_shuffle_ps(low01, low23, 0x44);
  out[1] = _mm256_shuffle_ps(low01, low23, 0xee);
  out[2] = _mm256_shuffle_ps(high01, high23, 0x44);
  out[3] = _mm256_shuffle_ps(high01, high23, 0xee);
}

/* A macro: gcc takes a function that only prefetches for one without effect and drops its calls. */
#define vf_prefetch(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)

#include "backend/cpu/attend_impl.h"

#endif
