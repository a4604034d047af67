/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One row of 8-bit activations by quantised weights as they lie: eight columns at a time, a block
 * of each, dots reduced by a tree so that column c ends in lane c. Included by files built with
 * AVX2 or more; with VNNI a product of bytes and its sums are one instruction, and as they are
 * exact the bits are the same.
 */
#ifndef PKV_BACKEND_CPU_DENSE_ROW_AVX2_H
#define PKV_BACKEND_CPU_DENSE_ROW_AVX2_H

#include "backend/cpu/dense_tile_avx2.h"

/* Lane c of the result is the sum of the four lanes of column c: of p[c]'s lower half, or of
   p[c - 4]'s upper one. Blends and one shuffle a step, where horizontal adds would take two. */
PKV_ALWAYS_INLINE __m256i reduce_columns(const __m256i p[4]) {
  __m256i two[2];
  for (int i = 0; i < 2; i++) {
    const __m256i swapped =
        _mm256_shuffle_epi32(_mm256_blend_epi32(p[2 * i + 1], p[2 * i], 0xaa), 0xb1);
    two[i] = _mm256_add_epi32(_mm256_blend_epi32(p[2 * i], p[2 * i + 1], 0xaa), swapped);
  }
  const __m256i swapped = _mm256_shuffle_epi32(_mm256_blend_epi32(two[1], two[0], 0xcc), 0x4e);
  return _mm256_add_epi32(_mm256_blend_epi32(two[0], two[1], 0xcc), swapped);
}

/* Halves of two columns side by side, of which the sum is wanted: a's below, b's above. */
PKV_ALWAYS_INLINE __m256i below(__m256i a, __m256i b) {
  return _mm256_blend_epi32(a, b, 0xf0);
}

PKV_ALWAYS_INLINE __m256i above(__m256i a, __m256i b) {
  return _mm256_permute2x128_si256(a, b, 0x21);
}

/* acc of eight columns after one more block, of which `dot` are the exact sums of codes. */
PKV_ALWAYS_INLINE __m256 fold(pkv_wtype type, __m256 acc, __m256i dot, __m256 d, __m256 m,
                              const pkv_dense_x *x, int64_t at) {
  if (pkv_block_offset(type) != 0)
    dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(pkv_block_offset(type) * x->sum[at]));
  const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(x->scale + at));
  acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, acc);
  if (pkv_block_has_min(type))
    acc = _mm256_fmadd_ps(m, _mm256_broadcast_ss(x->scaled_sum + at), acc);
  return acc;
}

/*
 * The fifth bits of eight rows' blocks, so laid out that one shuffle, one mask and one minimum make
 * 16s of those of two rows. Of each row in order its 32 bits and the same 4 bits further left:
 * every wanted bit is then one of the upper four of some byte.
 */
typedef struct fifth_bits {
  __m256i rows[2]; /* 0, 1 and 4, 5; 2, 3 and 6, 7 */
} fifth_bits;

PKV_ALWAYS_INLINE fifth_bits load_fifth_bits(const unsigned char *const rows[8], int64_t offset) {
  __m128i v[8];
  for (int i = 0; i < 8; i++)
    v[i] = _mm_cvtsi32_si128((int32_t)pkv_load_u32(rows[i] + offset));
  const __m128i a =
      _mm_unpacklo_epi64(_mm_unpacklo_epi32(v[0], v[1]), _mm_unpacklo_epi32(v[2], v[3]));
  const __m128i b =
      _mm_unpacklo_epi64(_mm_unpacklo_epi32(v[4], v[5]), _mm_unpacklo_epi32(v[6], v[7]));
  const __m256i bits = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  const __m256i moved = _mm256_slli_epi32(bits, 4);
  return (fifth_bits){{_mm256_unpacklo_epi32(bits, moved), _mm256_unpackhi_epi32(bits, moved)}};
}

/* Of columns c and c + 4, elements 0..15 (half 0) or 16..31 of each: 16 where the bit is set. */
PKV_ALWAYS_INLINE __m256i sixteens(const fifth_bits *fifth, int c, int half) {
  const char at = (char)(8 * (c & 1) + 2 * half), next = (char)(at + 1);
  const char moved = (char)(at + 4), moved_next = (char)(at + 5);
  const __m256i which = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(moved, moved, moved, moved, at, at, at, at, moved_next, moved_next, moved_next,
                    moved_next, next, next, next, next));
  const __m256i bit = _mm256_set1_epi32((int32_t)0x80402010u);
  const __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(fifth->rows[c / 2], which), bit);
  return _mm256_min_epu8(v, _mm256_set1_epi8(16));
}

/* Dots of eight columns over a block whose codes lie in 16 bytes: two columns share a vector. */
PKV_ALWAYS_INLINE __m256i nibble_dots(pkv_wtype type, const unsigned char *const rows[8],
                                      const int8_t *q, int64_t b) {
  const bool five = type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1;
  const int64_t at = (b + 1) * pkv_block_bytes(type) - 16;
  const __m256i x0 = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)q));
  const __m256i x1 =
      _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(q + 16)));
  const __m256i nibble = _mm256_set1_epi8(15);
  fifth_bits fifth;
  if (five) fifth = load_fifth_bits(rows, at - 4);
  __m256i p[4];
  for (int c = 0; c < 4; c++) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(rows[c] + at));
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(rows[c + 4] + at));
    const __m256i raw = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    __m256i w0 = _mm256_and_si256(raw, nibble);
    __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
    if (five) {
      w0 = _mm256_or_si256(w0, sixteens(&fifth, c, 0));
      w1 = _mm256_or_si256(w1, sixteens(&fifth, c, 1));
    }
#if defined(__AVX512VNNI__)
    p[c] = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), w0, x0), w1, x1);
#else
    const __m256i pairs =
        _mm256_add_epi16(_mm256_maddubs_epi16(w0, x0), _mm256_maddubs_epi16(w1, x1));
    p[c] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
  }
  return reduce_columns(p);
}

/* Dots of 32 codes and activations in the lanes of a vector: of pairs of codes in 16 bits (AVX2,
   unsigned codes), else of fours in 32. */
PKV_ALWAYS_INLINE __m256i code_dots(pkv_wtype type, const unsigned char *row, __m256i xq,
                                    int64_t b) {
  const __m256i w = pkv_row_codes(type, row, b);
#if defined(__AVX512VNNI__)
  if (!pkv_codes_signed(type)) return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, xq);
#endif
  if (!pkv_codes_signed(type)) return _mm256_maddubs_epi16(w, xq);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(xq, w));
  return _mm256_madd_epi16(pairs, pkv_pair_scales(type, row, b));
}

/* Dots of eight columns over a block of 32 bytes of codes, or over part b of a super-block. */
PKV_ALWAYS_INLINE __m256i byte_dots(pkv_wtype type, const unsigned char *const rows[8],
                                    const int8_t *q, int64_t b) {
  const __m256i xq = _mm256_loadu_si256((const __m256i *)(const void *)q);
#if defined(__AVX512VNNI__)
  const bool wide = true;
#else
  const bool wide = pkv_codes_signed(type);
#endif
  __m256i p[4];
  for (int c = 0; c < 4; c++) {
    const __m256i v0 = code_dots(type, rows[c], xq, b), v1 = code_dots(type, rows[c + 4], xq, b);
    if (wide)
      p[c] = _mm256_add_epi32(below(v0, v1), above(v0, v1));
    else
      p[c] =
          _mm256_madd_epi16(_mm256_add_epi16(below(v0, v1), above(v0, v1)), _mm256_set1_epi16(1));
  }
  return reduce_columns(p);
}

/* acc of eight columns after block b of a row of activations. */
PKV_ALWAYS_INLINE __m256 add_block(pkv_wtype type, __m256 acc, pkv_super_scale *super,
                                   const unsigned char *const rows[8], const pkv_dense_x *x,
                                   int64_t row, int64_t b) {
  const int8_t *q = x->q + row * x->k + b * PKV_QK;
  const bool bytes = pkv_is_super(type) || type == PKV_WTYPE_Q8_0;
  __m256 d, m;
  pkv_prefetch_next(type, rows[0], x->blocks, b);
  const __m256i dot = bytes ? byte_dots(type, rows, q, b) : nibble_dots(type, rows, q, b);
  pkv_row_scales(&d, &m, super, type, rows, b);
  return fold(type, acc, dot, d, m, x, row * x->blocks + b);
}

PKV_ALWAYS_INLINE __m256 row_of_columns(pkv_wtype type, const unsigned char *const rows[8],
                                        const pkv_dense_x *x, int64_t row) {
  pkv_super_scale super;
  __m256 acc = _mm256_setzero_ps();
  if (!pkv_is_super(type)) {
    for (int64_t b = 0; b < x->blocks; b++)
      acc = add_block(type, acc, &super, rows, x, row, b);
    return acc;
  }
  /* Unrolled, so that shifts and places within a super-block are constants. */
  for (int64_t first = 0; first < x->blocks; first += PKV_SUPER_PARTS) {
    const int64_t b = first & ~(int64_t)(PKV_SUPER_PARTS - 1); /* which it is: for the compiler */
#pragma GCC unroll 8
    for (int64_t part = 0; part < PKV_SUPER_PARTS; part++)
      acc = add_block(type, acc, &super, rows, x, row, b + part);
  }
  return acc;
}

PKV_ALWAYS_INLINE void decode_tile(pkv_wtype type, const pkv_dense_job *job, int64_t col0,
                                   int64_t col1, int64_t row) {
  for (int64_t col = col0; col < col1; col += PKV_LANES) {
    const unsigned char *rows[8];
    pkv_row_pointers(rows, &job->p->w, col, col1);
    pkv_store_columns(job->p, row, col, col1 - col, row_of_columns(type, rows, job->x, row));
  }
}

#endif
