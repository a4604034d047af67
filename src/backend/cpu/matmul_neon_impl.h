/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products on NEON, included by two files: one for every AArch64 processor, one for those
 * with the dot product of bytes (NEON_TABLE names the table of each). Four columns of a weight are
 * unpacked at a time, 32 blocks of k, and meet the rows two by two. Integer dots are exact and a
 * lane sees the float operations of the scalar kernel block by block: the same bits.
 */
#include "backend/cpu/dense_kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/dense_math.h"
#include "base/dtype.h"

#define COLUMNS     4
#define TILE_BLOCKS 32  /* of k, unpacked at a time: 4 KiB of codes */
#define MAX_ROWS    128 /* that share an unpacked tile */
#define CHUNK       512 /* elements of k as floats at a time */
#define INLINE      static inline __attribute__((always_inline))

/* ---- dots of bytes ---- */

/* Lane i += the sum of four products from 4 i on. */
INLINE int32x4_t dot_bytes(int32x4_t acc, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, w, x);
#else
  /* A pair of products is at most 2 * 128 * 127 and fits 16 bits. */
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}

/* Lane c is the sum of v[c]'s lanes. */
INLINE int32x4_t reduce_columns(const int32x4_t v[COLUMNS]) {
  return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

/* ---- activations ---- */

static void quantize_block(const pkv_dense_x *x, int64_t row, int64_t block) {
  const float *src = x->x + row * x->x_stride + block * PKV_QK;
  const int64_t at = row * x->blocks + block;
  int8_t *q = x->q + row * x->k + block * PKV_QK;
  uint32x4_t bits = vdupq_n_u32(0);
  for (int i = 0; i < PKV_QK; i += 4)
    bits = vmaxq_u32(bits, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(src + i))));
  const uint32_t largest_bits = vmaxvq_u32(bits); /* NaN is above all, its sign is gone */
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  const bool finite = largest_bits < 0x7f800000u;
  const bool zero = !finite || largest < PKV_QUANT_TINY;
  const float inverse = zero ? 0.0f : 127.0f / largest;
  int32_t sum = 0;
  for (int i = 0; i < PKV_QK; i += 8) {
    int16x8_t eight = vdupq_n_s16(0);
    if (i == PKV_QK / 2) x->first[at] = sum;
    if (!zero) {
      const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(src + i), inverse));
      const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(src + i + 4), inverse));
      eight = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    }
    sum += vaddvq_s16(eight);
    vst1_s8(q + i, vmovn_s16(eight));
  }
  x->scale[at] = finite ? (zero ? 0.0f : largest / 127.0f) : NAN;
  x->scaled_sum[at] = x->scale[at] * (float)sum;
  x->sum[at] = sum;
}

static void neon_quantize(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  for (int64_t r = row0; r < row1; r++)
    for (int64_t b = 0; b < x->blocks; b++)
      quantize_block(x, r, b);
}

/* ---- blocks of weights ---- */

typedef struct neon_block {
  int8x16_t q[2]; /* signed codes, the offset of Q4_0 and Q5_0 taken off */
  float d, m;
  int32_t s[2]; /* Q6_K: scales of the halves */
} neon_block;

INLINE float half_at(const unsigned char *p) {
  return pkv_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}

INLINE bool has_min(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q5_1 || type == PKV_WTYPE_Q4_K ||
         type == PKV_WTYPE_Q5_K;
}

/* 16 where bit j of `bits` is set, for j = 0 .. 15. */
INLINE uint8x16_t fifth_bits(const unsigned char *bits) {
  static const uint8_t which[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t spread = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
  return vandq_u8(vtstq_u8(spread, vld1q_u8(which)), vdupq_n_u8(16));
}

/* Types of 32 elements: nibbles of 16 bytes, low ones first; `high`: 32 further bits, or NULL. */
INLINE void load_nibbles(neon_block *out, const unsigned char *qs, const unsigned char *high,
                         int8_t offset) {
  const uint8x16_t raw = vld1q_u8(qs);
  uint8x16_t q[2] = {vandq_u8(raw, vdupq_n_u8(15)), vshrq_n_u8(raw, 4)};
  for (int i = 0; i < 2; i++) {
    if (high != NULL) q[i] = vorrq_u8(q[i], fifth_bits(high + 2 * i));
    out->q[i] = vsubq_s8(vreinterpretq_s8_u8(q[i]), vdupq_n_s8(offset));
  }
}

INLINE void load_part_45(neon_block *out, pkv_wtype type, const unsigned char *src, int part) {
  const unsigned char *six = src + 4;
  const unsigned char *codes = src + (type == PKV_WTYPE_Q4_K ? 16 : 48) + 32 * (part / 2);
  const int i = part & 3;
  uint32_t scale = six[i] & 63u, minimum = six[i + 4] & 63u;
  if (part >= 4) {
    scale = (six[i + 8] & 15u) | (uint32_t)(six[i] >> 6) << 4;
    minimum = (uint32_t)(six[i + 8] >> 4) | (uint32_t)(six[i + 4] >> 6) << 4;
  }
  const int8x16_t down = vdupq_n_s8((int8_t)(-4 * (part & 1))), fifth = vdupq_n_s8((int8_t)-part);
  for (int h = 0; h < 2; h++) {
    uint8x16_t q = vandq_u8(vshlq_u8(vld1q_u8(codes + 16 * h), down), vdupq_n_u8(15));
    if (type == PKV_WTYPE_Q5_K) {
      const uint8x16_t bit = vandq_u8(vshlq_u8(vld1q_u8(src + 16 + 16 * h), fifth), vdupq_n_u8(1));
      q = vorrq_u8(q, vshlq_n_u8(bit, 4));
    }
    out->q[h] = vreinterpretq_s8_u8(q);
  }
  out->d = half_at(src) * (float)scale;
  out->m = -(half_at(src + 2) * (float)minimum);
}

INLINE void load_part_6(neon_block *out, const unsigned char *src, int part) {
  const int half = part / 4, quarter = part % 4;
  const unsigned char *low = src + 64 * half + 32 * (quarter & 1), *high = src + 128 + 32 * half;
  const int8x16_t down = vdupq_n_s8((int8_t)(-4 * (quarter >> 1)));
  const int8x16_t pair = vdupq_n_s8((int8_t)(-2 * quarter));
  for (int h = 0; h < 2; h++) {
    const uint8x16_t q = vandq_u8(vshlq_u8(vld1q_u8(low + 16 * h), down), vdupq_n_u8(15));
    const uint8x16_t top = vandq_u8(vshlq_u8(vld1q_u8(high + 16 * h), pair), vdupq_n_u8(3));
    const int8x16_t code = vreinterpretq_s8_u8(vorrq_u8(q, vshlq_n_u8(top, 4)));
    out->q[h] = vsubq_s8(code, vdupq_n_s8(32));
    out->s[h] = (int8_t)src[192 + 2 * part + h];
  }
  out->d = half_at(src + 208);
}

/* Block b of 32 elements of a row. */
INLINE void load_block(neon_block *out, pkv_wtype type, const unsigned char *row, int64_t b) {
  out->m = 0.0f;
  out->s[0] = out->s[1] = 1;
  if (type == PKV_WTYPE_Q4_K || type == PKV_WTYPE_Q5_K) {
    load_part_45(out, type, row + b / 8 * (type == PKV_WTYPE_Q4_K ? 144 : 176), (int)(b % 8));
    return;
  }
  if (type == PKV_WTYPE_Q6_K) {
    load_part_6(out, row + b / 8 * 210, (int)(b % 8));
    return;
  }
  const int64_t bytes = type == PKV_WTYPE_Q4_0   ? 18
                        : type == PKV_WTYPE_Q4_1 ? 20
                        : type == PKV_WTYPE_Q5_0 ? 22
                        : type == PKV_WTYPE_Q5_1 ? 24
                                                 : 34;
  const unsigned char *src = row + b * bytes;
  out->d = half_at(src);
  if (has_min(type)) out->m = half_at(src + 2);
  if (type == PKV_WTYPE_Q4_0) load_nibbles(out, src + 2, NULL, 8);
  if (type == PKV_WTYPE_Q4_1) load_nibbles(out, src + 4, NULL, 0);
  if (type == PKV_WTYPE_Q5_0) load_nibbles(out, src + 6, src + 2, 16);
  if (type == PKV_WTYPE_Q5_1) load_nibbles(out, src + 8, src + 4, 0);
  if (type == PKV_WTYPE_Q8_0) {
    out->q[0] = vreinterpretq_s8_u8(vld1q_u8(src + 2));
    out->q[1] = vreinterpretq_s8_u8(vld1q_u8(src + 18));
  }
}

/* ---- 8-bit products ---- */

typedef struct neon_tile {
  int8_t codes[TILE_BLOCKS][COLUMNS][PKV_QK];
  float d[TILE_BLOCKS][COLUMNS], m[TILE_BLOCKS][COLUMNS];
  int32_t s[TILE_BLOCKS][2][COLUMNS];
} neon_tile;

/* Past the last column it is repeated, its results are dropped. */
INLINE void unpack_tile(pkv_wtype type, neon_tile *t, const pkv_weight *w, int64_t col,
                        int64_t col1, int64_t block0, int64_t blocks) {
  for (int64_t c = 0; c < COLUMNS; c++) {
    const int64_t i = col + c < col1 ? col + c : col1 - 1;
    const unsigned char *row = (const unsigned char *)w->data + i * w->row_bytes;
    for (int64_t b = 0; b < blocks; b++) {
      neon_block v;
      load_block(&v, type, row, block0 + b);
      vst1q_s8(t->codes[b][c], v.q[0]);
      vst1q_s8(t->codes[b][c] + 16, v.q[1]);
      t->d[b][c] = v.d;
      t->m[b][c] = v.m;
      t->s[b][0][c] = v.s[0];
      t->s[b][1][c] = v.s[1];
    }
  }
}

/* Exact dots of one row with the four columns over block b. */
INLINE int32x4_t tile_dots(pkv_wtype type, const neon_tile *t, int64_t b, const int8_t *q) {
  const int8x16_t x0 = vld1q_s8(q), x1 = vld1q_s8(q + 16);
  int32x4_t sum[COLUMNS], high[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) {
    const int8x16_t w0 = vld1q_s8(t->codes[b][c]), w1 = vld1q_s8(t->codes[b][c] + 16);
    sum[c] = dot_bytes(vdupq_n_s32(0), w0, x0);
    if (type == PKV_WTYPE_Q6_K)
      high[c] = dot_bytes(vdupq_n_s32(0), w1, x1);
    else
      sum[c] = dot_bytes(sum[c], w1, x1);
  }
  if (type != PKV_WTYPE_Q6_K) return reduce_columns(sum);
  const int32x4_t scaled = vmulq_s32(reduce_columns(sum), vld1q_s32(t->s[b][0]));
  return vmlaq_s32(scaled, reduce_columns(high), vld1q_s32(t->s[b][1]));
}

/* acc [rows][4] over the tile's blocks, rows from `row` on. */
INLINE void tile_rows(pkv_wtype type, int rows, float (*acc)[COLUMNS], const neon_tile *t,
                      const pkv_dense_x *x, int64_t row, int64_t block0, int64_t blocks) {
  float32x4_t sum[2];
  for (int r = 0; r < rows; r++)
    sum[r] = vld1q_f32(acc[r]);
  for (int64_t b = 0; b < blocks; b++) {
    const float32x4_t d = vld1q_f32(t->d[b]), m = vld1q_f32(t->m[b]);
    for (int r = 0; r < rows; r++) {
      const int64_t at = (row + r) * x->blocks + block0 + b;
      const int32x4_t dot = tile_dots(type, t, b, x->q + (row + r) * x->k + (block0 + b) * PKV_QK);
      sum[r] = vfmaq_f32(sum[r], vcvtq_f32_s32(dot), vmulq_n_f32(d, x->scale[at]));
      if (has_min(type)) sum[r] = vfmaq_n_f32(sum[r], m, x->scaled_sum[at]);
    }
  }
  for (int r = 0; r < rows; r++)
    vst1q_f32(acc[r], sum[r]);
}

INLINE void tile_of(pkv_wtype type, const pkv_dense_job *job, int64_t col0, int64_t col1,
                    int64_t row0, int64_t row1) {
  const pkv_dense_x *x = job->x;
  const int64_t rows = row1 - row0;
  neon_tile t;
  float acc[MAX_ROWS][COLUMNS];
  for (int64_t col = col0; col < col1; col += COLUMNS) {
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int64_t b0 = 0; b0 < x->blocks; b0 += TILE_BLOCKS) {
      const int64_t left = x->blocks - b0, blocks = left < TILE_BLOCKS ? left : TILE_BLOCKS;
      unpack_tile(type, &t, &job->p->w, col, col1, b0, blocks);
      int64_t r = 0;
      for (; r + 2 <= rows; r += 2)
        tile_rows(type, 2, acc + r, &t, x, row0 + r, b0, blocks);
      if (r < rows) tile_rows(type, 1, acc + r, &t, x, row0 + r, b0, blocks);
    }
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < COLUMNS && col + c < col1; c++)
        pkv_dense_store(job->p, row0 + r, col + c, acc[r][c]);
  }
}

/* One copy of the code for each type. */
#define DEFINE_TILE(name, type)                                                                    \
  static void name(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,             \
                   int64_t row1) {                                                                 \
    for (int64_t r = row0; r < row1; r += MAX_ROWS)                                                \
      tile_of(type, job, col0, col1, r, r + MAX_ROWS < row1 ? r + MAX_ROWS : row1);                \
  }

DEFINE_TILE(tile_q4_0, PKV_WTYPE_Q4_0)
DEFINE_TILE(tile_q4_1, PKV_WTYPE_Q4_1)
DEFINE_TILE(tile_q5_0, PKV_WTYPE_Q5_0)
DEFINE_TILE(tile_q5_1, PKV_WTYPE_Q5_1)
DEFINE_TILE(tile_q8_0, PKV_WTYPE_Q8_0)
DEFINE_TILE(tile_q4_k, PKV_WTYPE_Q4_K)
DEFINE_TILE(tile_q5_k, PKV_WTYPE_Q5_K)
DEFINE_TILE(tile_q6_k, PKV_WTYPE_Q6_K)

static void neon_tile_i8(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                         int64_t row1) {
  static const pkv_dense_tile_fn by_type[] = {
      [PKV_WTYPE_Q4_0] = tile_q4_0, [PKV_WTYPE_Q4_1] = tile_q4_1, [PKV_WTYPE_Q5_0] = tile_q5_0,
      [PKV_WTYPE_Q5_1] = tile_q5_1, [PKV_WTYPE_Q8_0] = tile_q8_0, [PKV_WTYPE_Q4_K] = tile_q4_k,
      [PKV_WTYPE_Q5_K] = tile_q5_k, [PKV_WTYPE_Q6_K] = tile_q6_k};
  by_type[job->p->w.type](job, col0, col1, row0, row1);
}

/* ---- float products ---- */

#define FLOAT_ROWS 16

/* Eight lanes over k as two registers, lane j taking k = j mod 8. */
INLINE void float_dots(int rows, float (*lanes)[COLUMNS][8], float (*w)[CHUNK], const float *x,
                       int64_t stride, int64_t count) {
  float32x4_t acc[2][COLUMNS][2];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < COLUMNS; c++)
      for (int h = 0; h < 2; h++)
        acc[r][c][h] = vld1q_f32(lanes[r][c] + 4 * h);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int c = 0; c < COLUMNS; c++) {
      for (int h = 0; h < 2; h++) {
        const float32x4_t wv = vld1q_f32(w[c] + i + 4 * h);
        for (int r = 0; r < rows; r++)
          acc[r][c][h] = vfmaq_f32(acc[r][c][h], wv, vld1q_f32(x + r * stride + i + 4 * h));
      }
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < COLUMNS; c++) {
      for (int h = 0; h < 2; h++)
        vst1q_f32(lanes[r][c] + 4 * h, acc[r][c][h]);
      for (int64_t j = i; j < count; j++)
        lanes[r][c][j - i] = fmaf(w[c][j], x[r * stride + j], lanes[r][c][j - i]);
    }
  }
}

static void neon_tile_f32(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                          int64_t row1) {
  const pkv_dense_x *x = job->x;
  float lanes[FLOAT_ROWS][COLUMNS][8], weights[COLUMNS][CHUNK];
  for (int64_t col = col0; col < col1; col += COLUMNS) {
    const int64_t columns = col1 - col < COLUMNS ? col1 - col : COLUMNS;
    for (int64_t first = row0; first < row1; first += FLOAT_ROWS) {
      const int64_t rows = row1 - first < FLOAT_ROWS ? row1 - first : FLOAT_ROWS;
      memset(lanes, 0, sizeof lanes);
      for (int64_t k0 = 0; k0 < x->k; k0 += CHUNK) {
        const int64_t count = x->k - k0 < CHUNK ? x->k - k0 : CHUNK;
        for (int64_t c = 0; c < COLUMNS; c++) /* past the last one it is repeated */
          pkv_dense_dequantize_scalar(weights[c], &job->p->w, col + (c < columns ? c : 0), k0,
                                      count, 1.0f);
        int64_t r = 0;
        const float *at = x->x + first * x->x_stride + k0;
        for (; r + 2 <= rows; r += 2)
          float_dots(2, lanes + r, weights, at + r * x->x_stride, x->x_stride, count);
        if (r < rows) float_dots(1, lanes + r, weights, at + r * x->x_stride, x->x_stride, count);
      }
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
          pkv_dense_store(job->p, first + r, col + c, pkv_sum_lanes(lanes[r][c]));
    }
  }
}

const pkv_dense_kernels NEON_TABLE = {
    neon_quantize,
    pkv_dense_narrow_scalar,
    neon_tile_f32,
    neon_tile_i8,
    pkv_dense_tile_bf16_scalar,
    pkv_dense_dequantize_scalar,
    pkv_dense_rms_norm_scalar,
    pkv_dense_rope_adjacent_scalar,
    pkv_dense_swiglu_scalar,
    pkv_dense_geglu_scalar,
    pkv_dense_add_scalar,
};
