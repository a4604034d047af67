/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Super-blocks of 256 weights (Q4_K, Q5_K, Q6_K) as eight blocks of 32 codes each, so that the
 * loops over blocks serve them too: block b of a row is part b % 8 of super-block b / 8. Scales of
 * a super-block are unpacked for eight rows at once, when its first part comes. Included by files
 * built with AVX2 or more.
 */
#ifndef PKV_BACKEND_CPU_DENSE_SUPER_AVX2_H
#define PKV_BACKEND_CPU_DENSE_SUPER_AVX2_H

#include "backend/cpu/dense_avx2.h"

#define PKV_SUPER_PARTS 8

PKV_ALWAYS_INLINE bool pkv_is_super(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_K || type == PKV_WTYPE_Q5_K || type == PKV_WTYPE_Q6_K;
}

/* Codes that are signed bytes; the others are unsigned and at most 31. */
PKV_ALWAYS_INLINE bool pkv_codes_signed(pkv_wtype type) {
  return type == PKV_WTYPE_Q8_0 || type == PKV_WTYPE_Q6_K;
}

PKV_ALWAYS_INLINE __m256i pkv_load_codes(const unsigned char *p) {
  return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Each byte moved right by `bits` (0..7), what came over from its neighbour masked off. */
PKV_ALWAYS_INLINE __m256i pkv_bytes_right(__m256i v, int bits, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(v, bits), _mm256_set1_epi8((char)mask));
}

/* The 32 codes of part `part` in element order: 0..15, 0..31 or -32..31. */
PKV_ALWAYS_INLINE __m256i pkv_super_codes(pkv_wtype type, const unsigned char *super, int part) {
  if (type == PKV_WTYPE_Q6_K) {
    const int half = part / 4, quarter = part % 4;
    const __m256i low = pkv_load_codes(super + 64 * half + 32 * (quarter & 1));
    const __m256i high = pkv_load_codes(super + 128 + 32 * half);
    const __m256i q = _mm256_or_si256(pkv_bytes_right(low, 4 * (quarter >> 1), 15),
                                      _mm256_slli_epi16(pkv_bytes_right(high, 2 * quarter, 3), 4));
    return _mm256_sub_epi8(q, _mm256_set1_epi8(32));
  }
  const unsigned char *codes = super + (type == PKV_WTYPE_Q4_K ? 16 : 48) + 32 * (part / 2);
  const __m256i q = pkv_bytes_right(pkv_load_codes(codes), 4 * (part & 1), 15);
  if (type == PKV_WTYPE_Q4_K) return q;
  const __m256i fifth = pkv_bytes_right(pkv_load_codes(super + 16), part, 1);
  return _mm256_or_si256(q, _mm256_slli_epi16(fifth, 4));
}

/* Which part of which super-block block b is. By bits, so that the part of 8 s + 3 is known. */
PKV_ALWAYS_INLINE int pkv_super_part(int64_t b) {
  return (int)(b & (PKV_SUPER_PARTS - 1));
}

PKV_ALWAYS_INLINE int64_t pkv_super_offset(pkv_wtype type, int64_t b) {
  return (b & ~(int64_t)(PKV_SUPER_PARTS - 1)) / PKV_SUPER_PARTS * pkv_block_bytes(type);
}

/* The codes of block b of a row, whatever its type. */
PKV_ALWAYS_INLINE __m256i pkv_row_codes(pkv_wtype type, const unsigned char *row, int64_t b) {
  if (!pkv_is_super(type)) return pkv_block_codes(type, row + b * pkv_block_bytes(type));
  return pkv_super_codes(type, row + pkv_super_offset(type, b), pkv_super_part(b));
}

/* Q4_K, Q5_K: the 6-bit scales and minima of the eight parts, a byte each. */
PKV_ALWAYS_INLINE void pkv_super_six_bits(uint64_t *scales, uint64_t *minima,
                                          const unsigned char *super) {
  const uint32_t a = pkv_load_u32(super + 4), b = pkv_load_u32(super + 8);
  const uint32_t c = pkv_load_u32(super + 12);
  *scales = (uint64_t)(a & 0x3f3f3f3fu) | (uint64_t)((c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u))
                                              << 32;
  *minima = (uint64_t)(b & 0x3f3f3f3fu) |
            (uint64_t)((c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)) << 32;
}

PKV_ALWAYS_INLINE __m256 pkv_bytes_times(uint64_t bytes, float f) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(f));
}

/* The half-precision float of a super-block that all its scales are multiplied by. */
PKV_ALWAYS_INLINE float pkv_super_d(pkv_wtype type, const unsigned char *super) {
  const unsigned char *at = type == PKV_WTYPE_Q6_K ? super + 208 : super;
  return _cvtsh_ss((unsigned short)(at[0] | at[1] << 8));
}

/* Eight rows of eight dwords become eight dwords of eight rows. */
PKV_ALWAYS_INLINE void pkv_transpose8(__m256i v[8]) {
  __m256i a[8], b[8];
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
    v[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
  }
}

/* Scales and minima of one super-block, [part][row]. Of Q6_K only d[0] is set: its scales of 16
   elements stay integers and meet the integer dots. */
typedef struct pkv_super_scale {
  _Alignas(32) float d[PKV_SUPER_PARTS][8];
  _Alignas(32) float m[PKV_SUPER_PARTS][8];
} pkv_super_scale;

PKV_ALWAYS_INLINE void pkv_super_load(pkv_super_scale *out, pkv_wtype type,
                                      const unsigned char *const rows[8], int64_t offset) {
  if (type == PKV_WTYPE_Q6_K) {
    for (int c = 0; c < 8; c++)
      out->d[0][c] = pkv_super_d(type, rows[c] + offset);
    return;
  }
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256i d[8], m[8];
  for (int c = 0; c < 8; c++) {
    const unsigned char *p = rows[c] + offset;
    uint64_t scales, minima;
    pkv_super_six_bits(&scales, &minima, p);
    d[c] = _mm256_castps_si256(pkv_bytes_times(scales, pkv_super_d(type, p)));
    const __m256 lows = pkv_bytes_times(minima, pkv_super_d(type, p + 2));
    m[c] = _mm256_castps_si256(_mm256_xor_ps(lows, sign));
  }
  pkv_transpose8(d);
  pkv_transpose8(m);
  for (int i = 0; i < PKV_SUPER_PARTS; i++) {
    _mm256_store_ps(out->d[i], _mm256_castsi256_ps(d[i]));
    _mm256_store_ps(out->m[i], _mm256_castsi256_ps(m[i]));
  }
}

/* d (and m) of block b of eight rows, whatever the type; blocks come in rising order from a first
   part on. */
PKV_ALWAYS_INLINE void pkv_row_scales(__m256 *d, __m256 *m, pkv_super_scale *scale, pkv_wtype type,
                                      const unsigned char *const rows[8], int64_t b) {
  if (!pkv_is_super(type)) {
    pkv_block_scales(d, m, type, rows, b * pkv_block_bytes(type));
    return;
  }
  const int part = pkv_super_part(b);
  if (part == 0) pkv_super_load(scale, type, rows, pkv_super_offset(type, b));
  *d = _mm256_load_ps(scale->d[type == PKV_WTYPE_Q6_K ? 0 : part]);
  *m = type == PKV_WTYPE_Q6_K ? _mm256_setzero_ps() : _mm256_load_ps(scale->m[part]);
}

/* What pairs of products are multiplied by while they are added: one, or of Q6_K the scale of the
   16 elements that each belongs to. */
PKV_ALWAYS_INLINE __m256i pkv_pair_scales(pkv_wtype type, const unsigned char *row, int64_t b) {
  if (type != PKV_WTYPE_Q6_K) return _mm256_set1_epi16(1);
  /* Two bytes, each moved to the upper half of its words and down again with its sign. */
  const unsigned char *at = row + pkv_super_offset(type, b) + 192 + 2 * pkv_super_part(b);
  short both;
  memcpy(&both, at, sizeof both);
  const __m256i place = _mm256_setr_epi8(-1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1,
                                         1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1);
  return _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_set1_epi16(both), place), 8);
}

#endif
