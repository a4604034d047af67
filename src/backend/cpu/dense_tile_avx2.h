/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles of quantised weights for products with 8-bit activations: rows of a weight matrix become
 * bytes interleaved by fours. Included by files built with AVX2 or more.
 */
#ifndef PKV_BACKEND_CPU_DENSE_TILE_AVX2_H
#define PKV_BACKEND_CPU_DENSE_TILE_AVX2_H

#include "backend/cpu/dense_avx2.h"

#define PKV_LANES       8
#define PKV_TILE        16 /* columns of an unpacked tile */
#define PKV_TILE_BLOCKS 32 /* blocks of k unpacked at a time: 16 KiB of codes */

/* Eight rows read side by side look random to the hardware's prefetchers. So block b of a group of
   eight asks for its share of the next group too, in the order in which it lies in memory: measured
   twice the bandwidth on weights beyond the cache. Past the end a prefetch does nothing. */
PKV_ALWAYS_INLINE void pkv_prefetch_next(pkv_wtype type, const unsigned char *group, int64_t blocks,
                                         int64_t b) {
  const int64_t bytes = 8 * pkv_block_bytes(type);
  const uintptr_t at = (uintptr_t)group + (uintptr_t)(bytes * (blocks + b));
  for (int64_t line = 0; line < bytes; line += 64)
    _mm_prefetch((const char *)(at + (uintptr_t)line), _MM_HINT_T0);
}

static inline void pkv_store_columns(const pkv_matmul_params *p, int64_t row, int64_t col,
                                     int64_t count, __m256 acc) {
  if (count >= PKV_LANES) {
    float *y = p->y + row * p->y_stride + col;
    if (p->bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(p->bias + col));
    if (p->accumulate) acc = _mm256_add_ps(_mm256_loadu_ps(y), acc);
    _mm256_storeu_ps(y, acc);
    return;
  }
  float lanes[PKV_LANES];
  _mm256_storeu_ps(lanes, acc);
  for (int64_t i = 0; i < count; i++)
    pkv_dense_store(p, row, col + i, lanes[i]);
}

/* Rows of the weight from `col` on; past the last one it is repeated, its results are dropped. */
static inline void pkv_row_pointers(const unsigned char *rows[8], const pkv_weight *w, int64_t col,
                                    int64_t col1) {
  for (int64_t c = 0; c < 8; c++) {
    const int64_t i = col + c < col1 ? col + c : col1 - 1;
    rows[c] = (const unsigned char *)w->data + i * w->row_bytes;
  }
}

typedef struct pkv_tile {
  _Alignas(
      64) int8_t codes[PKV_TILE_BLOCKS][8][2][32]; /* [block][four of k][half][column][k % 4] */
  _Alignas(64) float d[PKV_TILE_BLOCKS][PKV_TILE], m[PKV_TILE_BLOCKS][PKV_TILE];
} pkv_tile;

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

PKV_ALWAYS_INLINE void pkv_unpack_tile(pkv_wtype type, pkv_tile *t, const pkv_weight *w,
                                       int64_t col, int64_t col1, int64_t block0, int64_t blocks) {
  for (int half = 0; half < 2; half++) {
    const unsigned char *rows[8];
    pkv_row_pointers(rows, w, col + 8 * half, col1);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t offset = (block0 + b) * pkv_block_bytes(type);
      pkv_prefetch_next(type, rows[0], w->k / PKV_QK, block0 + b);
      __m256i v[8];
      for (int c = 0; c < 8; c++)
        v[c] = pkv_block_codes(type, rows[c] + offset);
      pkv_transpose8(v);
      for (int g = 0; g < 8; g++)
        _mm256_store_si256((__m256i *)(void *)t->codes[b][g][half], v[g]);
      __m256 d, m;
      pkv_block_scales(&d, &m, type, rows, offset);
      _mm256_store_ps(&t->d[b][8 * half], d);
      if (pkv_block_has_min(type)) _mm256_store_ps(&t->m[b][8 * half], m);
    }
  }
}

#endif
