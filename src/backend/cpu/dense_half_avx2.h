/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of BF16 weights and bf16 activations: how a work item is cut into tiles that registers
 * hold. Included by files built with AVX2 or more.
 */
#ifndef PKV_BACKEND_CPU_DENSE_HALF_AVX2_H
#define PKV_BACKEND_CPU_DENSE_HALF_AVX2_H

#include "backend/cpu/dense_avx2.h"

#define PKV_HALF_COLUMNS 8 /* most of a tile */
#define PKV_HALF_ROWS    4

/* One tile: rows of weights and of activations, both along k. */
typedef struct pkv_half_tile {
  const unsigned char *w[PKV_HALF_COLUMNS];
  const uint16_t *x;
  int64_t x_stride, k;
  const unsigned char *ahead; /* what to ask memory for meanwhile */
  int64_t ahead_bytes;        /* for each 32 elements of k */
} pkv_half_tile;

typedef void (*pkv_half_dots)(float out[][PKV_HALF_COLUMNS], const pkv_half_tile *t);

typedef struct pkv_half_shape {
  int64_t rows, columns;
  pkv_half_dots dots;
} pkv_half_shape;

PKV_ALWAYS_INLINE void pkv_half_fetch(const pkv_half_tile *t, int64_t k0) {
  const uintptr_t at = (uintptr_t)t->ahead + (uintptr_t)(k0 / PKV_QK * t->ahead_bytes);
  for (int64_t line = 0; line < t->ahead_bytes; line += 64)
    _mm_prefetch((const char *)(at + (uintptr_t)line), _MM_HINT_T0);
}

/* The elements from k0 on as a tile of its own, zeros behind them; activations have theirs. */
PKV_ALWAYS_INLINE pkv_half_tile pkv_half_tail(const pkv_half_tile *t,
                                              unsigned char padded[][2 * PKV_QK], int columns,
                                              int64_t k0) {
  pkv_half_tile tail = {.x = t->x + k0, .x_stride = t->x_stride, .k = PKV_QK};
  for (int c = 0; c < columns; c++) {
    memset(padded[c], 0, 2 * PKV_QK);
    memcpy(padded[c], t->w[c] + 2 * k0, (size_t)(2 * (t->k - k0)));
    tail.w[c] = padded[c];
  }
  return tail;
}

/* Eight lanes, of which each is the sum of two: the tree of cpu_dense.h. */
PKV_ALWAYS_INLINE float pkv_half_sum(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/*
 * All tiles of one shape; rows are a multiple of the shape's. Columns past the last one are that
 * one again, and dropped. A group of columns meets all rows before the next group comes, of which
 * each tile asks for its share.
 */
static inline void pkv_half_product(const pkv_dense_job *job, const pkv_half_shape *shape,
                                    int64_t col0, int64_t col1, int64_t row0, int64_t row1) {
  const pkv_weight *w = &job->p->w;
  const unsigned char *data = w->data;
  const int64_t calls = (row1 - row0) / shape->rows, steps = (w->k + PKV_QK - 1) / PKV_QK;
  pkv_half_tile t = {.k = w->k, .x_stride = pkv_half_stride(w->k)};
  if (calls <= PKV_FETCH_CALLS) t.ahead_bytes = (shape->columns * 2 * PKV_QK + calls - 1) / calls;
  for (int64_t col = col0; col < col1; col += shape->columns) {
    const int64_t columns = col1 - col < shape->columns ? col1 - col : shape->columns;
    for (int64_t c = 0; c < shape->columns; c++)
      t.w[c] = data + (c < columns ? col + c : col1 - 1) * w->row_bytes;
    for (int64_t row = row0; row < row1; row += shape->rows) {
      float out[PKV_HALF_ROWS][PKV_HALF_COLUMNS];
      t.x = job->x->half + row * t.x_stride;
      const int64_t done = (row - row0) / shape->rows * steps * t.ahead_bytes;
      t.ahead = (const unsigned char *)((uintptr_t)(data + col * w->row_bytes) +
                                        (uintptr_t)(shape->columns * w->row_bytes + done));
      shape->dots(out, &t);
      for (int64_t r = 0; r < shape->rows; r++) {
        for (int64_t c = 0; c < columns; c++)
          pkv_dense_store(job->p, row + r, col + c, out[r][c]);
      }
    }
  }
}

#endif
