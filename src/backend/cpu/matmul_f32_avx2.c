/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with float activations on AVX2: weights become floats (in place for F32), and each
 * output is eight lanes over k, lane j taking k = j mod 8 in rising order. Register tiles of 4 rows
 * x 2 columns or 1 row x 8 columns change who is computed together, never the order within one
 * output.
 */
#include "backend/cpu/dense_kernels.h"

#if defined(__x86_64__)

#include "backend/cpu/dense_super_avx2.h"

#define COLUMNS  8   /* of a tile */
#define CHUNK    512 /* elements of k dequantised at a time: 16 KiB */
#define MAX_ROWS 64

/* Lanes beyond `count` (1..7) are off. */
static __m256i tail_mask(int64_t count) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)count), index);
}

PKV_ALWAYS_INLINE __m256 scaled(__m256 v, __m256 scale) {
  return _mm256_mul_ps(v, scale);
}

PKV_ALWAYS_INLINE void dequantize_blocks(pkv_wtype type, float *y, const unsigned char *src,
                                         int64_t blocks, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t b = 0; b < blocks; b++) {
    const unsigned char *p = src + b * pkv_block_bytes(type);
    const uint32_t head = pkv_load_u32(p);
    const __m256 d = _mm256_set1_ps(_cvtsh_ss((unsigned short)(head & 0xffffu)));
    const __m256 m = _mm256_set1_ps(_cvtsh_ss((unsigned short)(head >> 16)));
    const __m256i offset = _mm256_set1_epi32(pkv_block_offset(type));
    _Alignas(32) int8_t codes[PKV_QK];
    _mm256_store_si256((__m256i *)(void *)codes, pkv_block_codes(type, p));
    for (int i = 0; i < 4; i++) {
      const __m128i eight = _mm_loadl_epi64((const __m128i *)(const void *)(codes + 8 * i));
      const __m256i q = _mm256_sub_epi32(_mm256_cvtepi8_epi32(eight), offset);
      __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(q), d);
      if (pkv_block_has_min(type)) v = _mm256_add_ps(v, m);
      _mm256_storeu_ps(y + b * PKV_QK + 8 * i, scaled(v, factor));
    }
  }
}

/* Blocks [first, first + blocks) of 32 of a row. */
PKV_ALWAYS_INLINE void dequantize_parts(pkv_wtype type, float *y, const unsigned char *row,
                                        int64_t first, int64_t blocks, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t b = first; b < first + blocks; b++) {
    const unsigned char *super = row + b / PKV_SUPER_PARTS * pkv_block_bytes(type);
    const int part = (int)(b % PKV_SUPER_PARTS);
    const float base = pkv_super_d(type, super);
    float d[2], m = 0.0f;
    if (type == PKV_WTYPE_Q6_K) {
      d[0] = base * (float)(int8_t)super[192 + 2 * part];
      d[1] = base * (float)(int8_t)super[193 + 2 * part];
    } else {
      uint64_t scales, minima;
      pkv_super_six_bits(&scales, &minima, super);
      d[0] = d[1] = base * (float)(scales >> 8 * part & 63u);
      m = -(pkv_super_d(type, super + 2) * (float)(minima >> 8 * part & 63u));
    }
    _Alignas(32) int8_t codes[PKV_QK];
    _mm256_store_si256((__m256i *)(void *)codes, pkv_super_codes(type, super, part));
    for (int i = 0; i < 4; i++) {
      const __m128i eight = _mm_loadl_epi64((const __m128i *)(const void *)(codes + 8 * i));
      const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
      __m256 v = _mm256_mul_ps(q, _mm256_set1_ps(d[i / 2]));
      if (pkv_block_has_min(type)) v = _mm256_add_ps(v, _mm256_set1_ps(m));
      _mm256_storeu_ps(y + (b - first) * PKV_QK + 8 * i, scaled(v, factor));
    }
  }
}

static float half_to_float(const unsigned char *p, pkv_wtype type) {
  const uint32_t h = (uint32_t)p[0] | (uint32_t)p[1] << 8;
  if (type == PKV_WTYPE_F16) return _cvtsh_ss((unsigned short)h);
  const uint32_t bits = h << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static void widen_halves(pkv_wtype type, float *y, const unsigned char *src, int64_t count,
                         float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * i));
    const __m256 v = type == PKV_WTYPE_F16
                         ? _mm256_cvtph_ps(h)
                         : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    _mm256_storeu_ps(y + i, scaled(v, factor));
  }
  for (; i < count; i++)
    y[i] = half_to_float(src + 2 * i, type) * scale;
}

void pkv_dense_dequantize_avx2(float *y, const pkv_weight *w, int64_t row, int64_t k0,
                               int64_t count, float scale) {
  const unsigned char *src = (const unsigned char *)w->data + row * w->row_bytes;
  const int64_t block = k0 / PKV_QK, blocks = count / PKV_QK;
  switch (w->type) {
  case PKV_WTYPE_F32:
    for (int64_t i = 0; i < count; i++) {
      float f;
      memcpy(&f, src + 4 * (k0 + i), sizeof f);
      y[i] = f * scale;
    }
    break;
  case PKV_WTYPE_F16:
  case PKV_WTYPE_BF16:
    widen_halves(w->type, y, src + 2 * k0, count, scale);
    break;
  case PKV_WTYPE_Q4_0:
    dequantize_blocks(PKV_WTYPE_Q4_0, y, src + block * 18, blocks, scale);
    break;
  case PKV_WTYPE_Q4_1:
    dequantize_blocks(PKV_WTYPE_Q4_1, y, src + block * 20, blocks, scale);
    break;
  case PKV_WTYPE_Q5_0:
    dequantize_blocks(PKV_WTYPE_Q5_0, y, src + block * 22, blocks, scale);
    break;
  case PKV_WTYPE_Q5_1:
    dequantize_blocks(PKV_WTYPE_Q5_1, y, src + block * 24, blocks, scale);
    break;
  case PKV_WTYPE_Q8_0:
    dequantize_blocks(PKV_WTYPE_Q8_0, y, src + block * 34, blocks, scale);
    break;
  case PKV_WTYPE_Q4_K:
    dequantize_parts(PKV_WTYPE_Q4_K, y, src, block, blocks, scale);
    break;
  case PKV_WTYPE_Q5_K:
    dequantize_parts(PKV_WTYPE_Q5_K, y, src, block, blocks, scale);
    break;
  case PKV_WTYPE_Q6_K:
    dequantize_parts(PKV_WTYPE_Q6_K, y, src, block, blocks, scale);
    break;
  }
}

typedef struct float_tile {
  const float *w[COLUMNS]; /* `count` floats of each column */
  int64_t count;
} float_tile;

/* lanes[row][column] += products over the tile's elements; rows x columns registers. */
PKV_ALWAYS_INLINE void dot_tile(int rows, int columns, __m256 (*lanes)[COLUMNS],
                                const float_tile *t, int first_column, const float *x,
                                int64_t stride) {
  __m256 acc[4][COLUMNS];
  const float *const *w = t->w + first_column;
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++)
      acc[r][c] = lanes[r][first_column + c];
  }
  int64_t i = 0;
  for (; i + 8 <= t->count; i += 8) {
    __m256 xv[4];
    for (int r = 0; r < rows; r++)
      xv[r] = _mm256_loadu_ps(x + r * stride + i);
    for (int c = 0; c < columns; c++) {
      const __m256 wv = _mm256_loadu_ps(w[c] + i);
      for (int r = 0; r < rows; r++)
        acc[r][c] = _mm256_fmadd_ps(wv, xv[r], acc[r][c]);
    }
  }
  if (i < t->count) {
    const __m256i mask = tail_mask(t->count - i);
    for (int c = 0; c < columns; c++) {
      const __m256 wv = _mm256_maskload_ps(w[c] + i, mask);
      for (int r = 0; r < rows; r++)
        acc[r][c] = _mm256_fmadd_ps(wv, _mm256_maskload_ps(x + r * stride + i, mask), acc[r][c]);
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++)
      lanes[r][first_column + c] = acc[r][c];
  }
}

static void dot_rows(__m256 (*lanes)[COLUMNS], const float_tile *t, const float *x, int64_t stride,
                     int64_t rows) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int c = 0; c < COLUMNS; c += 2)
      dot_tile(4, 2, lanes + r, t, c, x + r * stride, stride);
  }
  for (; r < rows; r++)
    dot_tile(1, 8, lanes + r, t, 0, x + r * stride, stride);
}

static float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* At most MAX_ROWS rows and COLUMNS columns. */
static void small_tile(const pkv_dense_job *job, int64_t col, int64_t columns, int64_t row,
                       int64_t rows) {
  const pkv_weight *w = &job->p->w;
  const pkv_dense_x *x = job->x;
  __m256 lanes[MAX_ROWS][COLUMNS];
  _Alignas(64) float weights[COLUMNS][CHUNK];
  for (int64_t r = 0; r < rows; r++) {
    for (int c = 0; c < COLUMNS; c++)
      lanes[r][c] = _mm256_setzero_ps();
  }
  const bool in_place = w->type == PKV_WTYPE_F32;
  const int64_t step = in_place ? x->k : CHUNK;
  for (int64_t k0 = 0; k0 < x->k; k0 += step) {
    float_tile t;
    t.count = x->k - k0 < step ? x->k - k0 : step;
    for (int64_t c = 0; c < COLUMNS; c++) {
      const int64_t i = c < columns ? col + c : col; /* repeated, its results are dropped */
      if (in_place) {
        t.w[c] = (const float *)(const void *)((const unsigned char *)w->data + i * w->row_bytes);
      } else {
        t.w[c] = c < columns ? weights[c] : weights[0];
        if (c < columns) pkv_dense_dequantize_avx2(weights[c], w, i, k0, t.count, 1.0f);
      }
    }
    dot_rows(lanes, &t, x->x + row * x->x_stride + k0, x->x_stride, rows);
  }
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < columns; c++)
      pkv_dense_store(job->p, row + r, col + c, sum_lanes(lanes[r][c]));
  }
}

void pkv_dense_tile_f32_avx2(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                             int64_t row1) {
  for (int64_t col = col0; col < col1; col += COLUMNS) {
    const int64_t columns = col1 - col < COLUMNS ? col1 - col : COLUMNS;
    for (int64_t row = row0; row < row1; row += MAX_ROWS)
      small_tile(job, col, columns, row, row1 - row < MAX_ROWS ? row1 - row : MAX_ROWS);
  }
}

#endif
