/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles of quantised weights for products with 8-bit activations: rows of a weight matrix become
 * bytes interleaved by fours. Included by files built with AVX2 or more.
 */
#ifndef PKV_BACKEND_CPU_DENSE_TILE_AVX2_H
#define PKV_BACKEND_CPU_DENSE_TILE_AVX2_H

#include "backend/cpu/dense_super_avx2.h"

#define PKV_LANES       8
#define PKV_TILE        16 /* columns of an unpacked tile */
#define PKV_TILE_BLOCKS 32 /* blocks of k unpacked at a time: 16 KiB of codes */

/* Beyond what is asked for first: a first-level cache has few requests under way at a time, and
   waits for them less when the lines come from its neighbour. */
#define PKV_FETCH_AHEAD 8192

/* Eight rows read side by side look random to the hardware's prefetchers. So block b of a group of
   eight asks for its share of the next group too, in the order in which it lies in memory, and the
   second-level cache for what follows: twice the bandwidth on weights beyond the cache, and a fifth
   to a third more. Past the end a prefetch does nothing. */
PKV_ALWAYS_INLINE void pkv_prefetch_next(pkv_wtype type, const unsigned char *group, int64_t blocks,
                                         int64_t b) {
  /* Of a super-block an eighth is a block's share. */
  const int64_t bytes = (pkv_is_super(type) ? 1 : 8) * pkv_block_bytes(type);
  const uintptr_t at = (uintptr_t)group + (uintptr_t)(bytes * (blocks + b));
  for (int64_t line = 0; line < bytes; line += 64)
    _mm_prefetch((const char *)(at + (uintptr_t)line), _MM_HINT_T0);
  for (int64_t line = 0; line < bytes; line += 64)
    _mm_prefetch((const char *)(at + PKV_FETCH_AHEAD + (uintptr_t)line), _MM_HINT_T1);
}

/*
 * A few rows of activations take about as long as the unpacking of their tile: what the next tile
 * needs is then asked for between the dots, evenly, so that memory does not idle meanwhile. Twice
 * the speed of eight rows of Q8_0 beyond the cache.
 */
typedef struct pkv_fetch {
  const unsigned char *at; /* where the part of this call starts */
  int64_t bytes;           /* a block; 0 = nothing is asked for */
} pkv_fetch;

/* The part of call `call` out of `calls`, each over `blocks` blocks from block0 on. */
PKV_ALWAYS_INLINE pkv_fetch pkv_fetch_part(pkv_wtype type, const pkv_weight *w, int64_t next_col,
                                           int64_t block0, int64_t blocks, int64_t call,
                                           int64_t calls) {
  const int64_t block = (pkv_is_super(type) ? 2 : 16) * pkv_block_bytes(type);
  const int64_t bytes = calls > PKV_FETCH_CALLS ? 0 : (block + calls - 1) / calls;
  const uintptr_t at = (uintptr_t)w->data + (uintptr_t)(next_col * w->row_bytes);
  return (pkv_fetch){
      (const unsigned char *)(at + (uintptr_t)(block0 * block + call * blocks * bytes)), bytes};
}

PKV_ALWAYS_INLINE void pkv_fetch_block(const pkv_fetch *f, int64_t b) {
  for (int64_t line = 0; line < f->bytes; line += 64)
    _mm_prefetch((const char *)((uintptr_t)f->at + (uintptr_t)(b * f->bytes + line)), _MM_HINT_T0);
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
  /* Q6_K: scales of the two halves of a block, each as two equal 16-bit numbers. */
  _Alignas(64) uint32_t s[PKV_TILE_BLOCKS][2][PKV_TILE];
} pkv_tile;

PKV_ALWAYS_INLINE void pkv_unpack_pair_scales(pkv_tile *t, const unsigned char *const rows[8],
                                              int half, int64_t to, int64_t block) {
  const int64_t at = block / PKV_SUPER_PARTS * pkv_block_bytes(PKV_WTYPE_Q6_K) + 192 +
                     2 * (block % PKV_SUPER_PARTS);
  for (int c = 0; c < 8; c++) {
    for (int i = 0; i < 2; i++) {
      const uint32_t scale = (uint32_t)(int8_t)rows[c][at + i] & 0xffffu;
      t->s[to][i][8 * half + c] = scale | scale << 16;
    }
  }
}

/* block0 is a multiple of PKV_TILE_BLOCKS, and with it the start of a super-block. fetch: ask for
   what is unpacked next. */
PKV_ALWAYS_INLINE void pkv_unpack_tile(pkv_wtype type, pkv_tile *t, const pkv_weight *w,
                                       int64_t col, int64_t col1, int64_t block0, int64_t blocks,
                                       bool fetch) {
  pkv_super_scale super;
  for (int half = 0; half < 2; half++) {
    const unsigned char *rows[8];
    pkv_row_pointers(rows, w, col + 8 * half, col1);
    for (int64_t b = 0; b < blocks; b++) {
      if (fetch) pkv_prefetch_next(type, rows[0], w->k / PKV_QK, block0 + b);
      __m256i v[8];
      for (int c = 0; c < 8; c++)
        v[c] = pkv_row_codes(type, rows[c], block0 + b);
      pkv_transpose8(v);
      for (int g = 0; g < 8; g++)
        _mm256_store_si256((__m256i *)(void *)t->codes[b][g][half], v[g]);
      __m256 d, m;
      pkv_row_scales(&d, &m, &super, type, rows, block0 + b);
      _mm256_store_ps(&t->d[b][8 * half], d);
      if (pkv_block_has_min(type)) _mm256_store_ps(&t->m[b][8 * half], m);
      if (type == PKV_WTYPE_Q6_K) pkv_unpack_pair_scales(t, rows, half, b, block0 + b);
    }
  }
}

#endif
