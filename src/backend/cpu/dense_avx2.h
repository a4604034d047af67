/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the AVX2 files of the dense operations share (the AVX-512 file too): unpacking of weight
 * blocks. Included by files built with AVX2, FMA and F16C only.
 */
#ifndef PKV_BACKEND_CPU_DENSE_AVX2_H
#define PKV_BACKEND_CPU_DENSE_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "backend/cpu/dense_kernels.h"

#define PKV_ALWAYS_INLINE static inline __attribute__((always_inline))

void pkv_dense_tile_i8_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                            int64_t row1);
void pkv_dense_tile_f32_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                             int64_t row1);
void pkv_dense_tile_bf16_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                              int64_t row1);
void pkv_dense_tile_i8_avx512vnni(const pkv_dense_job *job, int64_t col0, int64_t col1,
                                  int64_t row0, int64_t row1);
void pkv_dense_narrow_avx2(const pkv_dense_x *x, int64_t row0, int64_t row1);
void pkv_dense_quantize_avx2(const pkv_dense_x *x, int64_t row0, int64_t row1);
void pkv_dense_dequantize_avx2(float *y, const pkv_weight *w, int64_t row, int64_t k0,
                               int64_t count, float scale);

void pkv_dense_rms_norm_avx2(float *y, const float *x, const float *weight, int64_t n, float eps);
void pkv_dense_rope_adjacent_avx2(float *x, int32_t heads, int32_t head_dim, int32_t rope_dim,
                                  const float *cs);
void pkv_dense_swiglu_avx2(float *y, const float *gate, const float *up, int64_t count);
void pkv_dense_geglu_avx2(float *y, const float *gate, const float *up, int64_t count);
void pkv_dense_add_avx2(float *y, const float *x, int64_t count);

/* Passes over a tile up to which they ask for the next one: with more, the dots take so long that
   it does not matter. */
#define PKV_FETCH_CALLS 8

/* Bytes of a block: of 32 elements, or of a super-block of 256. */
PKV_ALWAYS_INLINE int64_t pkv_block_bytes(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_0   ? 18
         : type == PKV_WTYPE_Q4_1 ? 20
         : type == PKV_WTYPE_Q5_0 ? 22
         : type == PKV_WTYPE_Q5_1 ? 24
         : type == PKV_WTYPE_Q4_K ? 144
         : type == PKV_WTYPE_Q5_K ? 176
         : type == PKV_WTYPE_Q6_K ? 210
                                  : 34;
}

PKV_ALWAYS_INLINE bool pkv_block_has_min(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q5_1 || type == PKV_WTYPE_Q4_K ||
         type == PKV_WTYPE_Q5_K;
}

/* What is subtracted from the stored codes. */
PKV_ALWAYS_INLINE int32_t pkv_block_offset(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_0 ? 8 : (type == PKV_WTYPE_Q5_0 ? 16 : 0);
}

PKV_ALWAYS_INLINE uint32_t pkv_load_u32(const void *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* Bit j of `bits` as 16 or 0 in byte j. */
PKV_ALWAYS_INLINE __m256i pkv_spread_bits(uint32_t bits) {
  const __m256i which = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2,
                                         2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i mask = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), which);
  v = _mm256_cmpeq_epi8(_mm256_and_si256(v, mask), mask);
  return _mm256_and_si256(v, _mm256_set1_epi8(16));
}

/* The 32 codes of a block in element order: 0..15, 0..31, or signed bytes (Q8_0). */
PKV_ALWAYS_INLINE __m256i pkv_block_codes(pkv_wtype type, const unsigned char *src) {
  if (type == PKV_WTYPE_Q8_0) return _mm256_loadu_si256((const __m256i *)(const void *)(src + 2));
  const int64_t at = pkv_block_bytes(type) - 16;
  const __m128i raw = _mm_loadu_si128((const __m128i *)(const void *)(src + at));
  /* Both halves get all 16 bytes; the upper half is shifted to its high nibbles. */
  const __m256i shift = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  __m256i v = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(raw), shift);
  v = _mm256_and_si256(v, _mm256_set1_epi8(15));
  if (type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1)
    v = _mm256_or_si256(v, pkv_spread_bits(pkv_load_u32(src + at - 4)));
  return v;
}

/* d (and m) of the blocks at `offset` of eight rows, as floats in the order of the rows. */
PKV_ALWAYS_INLINE void pkv_block_scales(__m256 *d, __m256 *m, pkv_wtype type,
                                        const unsigned char *const rows[8], int64_t offset) {
  /* In this order d and m of all rows come apart by one shuffle each. */
  static const int order[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  const bool pairs = pkv_block_has_min(type);
  __m128i v[8];
  for (int i = 0; i < 8; i++)
    v[i] = _mm_cvtsi32_si128((int32_t)pkv_load_u32(rows[pairs ? order[i] : i] + offset));
  const __m128i a =
      _mm_unpacklo_epi64(_mm_unpacklo_epi32(v[0], v[1]), _mm_unpacklo_epi32(v[2], v[3]));
  const __m128i b =
      _mm_unpacklo_epi64(_mm_unpacklo_epi32(v[4], v[5]), _mm_unpacklo_epi32(v[6], v[7]));
  if (pairs) {
    const __m256 first = _mm256_cvtph_ps(a), second = _mm256_cvtph_ps(b);
    *d = _mm256_shuffle_ps(first, second, 0x88);
    *m = _mm256_shuffle_ps(first, second, 0xdd);
    return;
  }
  const __m128i low = _mm_set1_epi32(0xffff);
  *d = _mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(a, low), _mm_and_si128(b, low)));
  *m = _mm256_setzero_ps();
}

#endif
