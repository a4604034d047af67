/* SPDX-License-Identifier: Apache-2.0 */
/* Plain C kernels of the dense operations: what every machine can run, and the definition of the
   roundings that the vector kernels repeat. */
#include "backend/cpu/dense_kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/dense_math.h"
#include "base/dtype.h"

/* A block as signed integers times d plus m. Q4/Q5: elements 0..15 lie in the low nibbles, 16..31
   in the high ones; bit e of the 32-bit qh is the fifth bit of element e. */
typedef struct block_values {
  int32_t q[PKV_QK];
  int32_t s[2]; /* integer scales of the first and last 16 elements: 1 but for Q6_K */
  float d, m;
} block_values;

static uint16_t load_u16(const unsigned char *p) {
  return (uint16_t)(p[0] | (p[1] << 8));
}

static uint32_t load_u32(const unsigned char *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void load_nibbles(int32_t *q, const unsigned char *qs, uint32_t high, int32_t offset) {
  for (int32_t j = 0; j < 16; j++) {
    q[j] = (int32_t)((qs[j] & 15u) | ((high >> j) & 1u) << 4) - offset;
    q[j + 16] = (int32_t)((uint32_t)(qs[j] >> 4) | ((high >> (j + 16)) & 1u) << 4) - offset;
  }
}

/*
 * Part 0..7 of a super-block of Q4_K or Q5_K: d, minimum, twelve bytes of scales, (fifth bits,)
 * nibbles. Parts 2j and 2j + 1 are the low and the high nibbles of the same 32 bytes; their fifth
 * bits are bits 2j and 2j + 1 of 32 further ones. The scales and minima of the first four parts are
 * the low six bits of eight bytes; those of the last four have their low halves in the last four
 * bytes and two more bits at the top of the first eight.
 */
static void load_part(block_values *out, pkv_wtype type, const unsigned char *src, int32_t part) {
  const unsigned char *six = src + 4;
  const unsigned char *codes = src + (type == PKV_WTYPE_Q4_K ? 16 : 48) + 32 * (part / 2);
  const int32_t i = part & 3;
  uint32_t scale = six[i] & 63u, minimum = six[i + 4] & 63u;
  if (part >= 4) {
    scale = (six[i + 8] & 15u) | (uint32_t)(six[i] >> 6) << 4;
    minimum = (uint32_t)(six[i + 8] >> 4) | (uint32_t)(six[i + 4] >> 6) << 4;
  }
  for (int32_t j = 0; j < PKV_QK; j++) {
    out->q[j] = codes[j] >> 4 * (part & 1) & 15;
    if (type == PKV_WTYPE_Q5_K) out->q[j] |= (src[16 + j] >> part & 1) << 4;
  }
  out->d = pkv_f16_to_f32(load_u16(src)) * (float)scale;
  out->m = -(pkv_f16_to_f32(load_u16(src + 2)) * (float)minimum);
}

/*
 * The same of Q6_K: 128 bytes of low nibbles, 64 of upper pairs of bits, 16 signed scales, d. Each
 * half of the super-block has 64 bytes of nibbles and 32 of pairs of bits; its four parts are the
 * two low rows of nibbles, then the two high ones, with the pairs of bits from the lowest up.
 */
static void load_part_q6(block_values *out, const unsigned char *src, int32_t part) {
  const int32_t half = part / 4, quarter = part % 4;
  const unsigned char *low = src + 64 * half + 32 * (quarter & 1), *high = src + 128 + 32 * half;
  for (int32_t j = 0; j < PKV_QK; j++) {
    const int32_t nibble = low[j] >> 4 * (quarter >> 1) & 15;
    out->q[j] = (nibble | (high[j] >> 2 * quarter & 3) << 4) - 32;
  }
  out->s[0] = (int8_t)src[192 + 2 * part];
  out->s[1] = (int8_t)src[193 + 2 * part];
  out->d = pkv_f16_to_f32(load_u16(src + 208));
}

/* Block b of 32 elements of a row. */
static void load_block(block_values *out, pkv_wtype type, const unsigned char *row, int64_t b) {
  int64_t elements = 1, bytes = 4;
  (void)pkv_dense_block(type, &elements, &bytes);
  const int64_t parts = elements / PKV_QK;
  const unsigned char *src = row + b / parts * bytes;
  out->d = pkv_f16_to_f32(load_u16(src));
  out->m = 0.0f;
  out->s[0] = out->s[1] = 1;
  switch (type) {
  case PKV_WTYPE_Q4_K:
  case PKV_WTYPE_Q5_K:
    load_part(out, type, src, (int32_t)(b % parts));
    break;
  case PKV_WTYPE_Q6_K:
    load_part_q6(out, src, (int32_t)(b % parts));
    break;
  case PKV_WTYPE_Q4_0:
    load_nibbles(out->q, src + 2, 0, 8);
    break;
  case PKV_WTYPE_Q4_1:
    out->m = pkv_f16_to_f32(load_u16(src + 2));
    load_nibbles(out->q, src + 4, 0, 0);
    break;
  case PKV_WTYPE_Q5_0:
    load_nibbles(out->q, src + 6, load_u32(src + 2), 16);
    break;
  case PKV_WTYPE_Q5_1:
    out->m = pkv_f16_to_f32(load_u16(src + 2));
    load_nibbles(out->q, src + 8, load_u32(src + 4), 0);
    break;
  default: /* Q8_0 */
    for (int32_t j = 0; j < PKV_QK; j++)
      out->q[j] = (int8_t)src[2 + j];
    break;
  }
}

static bool has_min(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q5_1 || type == PKV_WTYPE_Q4_K ||
         type == PKV_WTYPE_Q5_K;
}

static float load_float(const unsigned char *row, pkv_wtype type, int64_t i) {
  if (type == PKV_WTYPE_F16) return pkv_f16_to_f32(load_u16(row + 2 * i));
  if (type == PKV_WTYPE_BF16) return pkv_bf16_to_f32(load_u16(row + 2 * i));
  float f;
  memcpy(&f, row + 4 * i, sizeof f);
  return f;
}

void pkv_dense_dequantize_scalar(float *y, const pkv_weight *w, int64_t row, int64_t k0,
                                 int64_t count, float scale) {
  const unsigned char *src = (const unsigned char *)w->data + row * w->row_bytes;
  int64_t elements = 1, bytes = 4;
  (void)pkv_dense_block(w->type, &elements, &bytes);
  if (elements == 1) {
    for (int64_t i = 0; i < count; i++)
      y[i] = load_float(src, w->type, k0 + i) * scale;
    return;
  }
  const bool with_min = has_min(w->type);
  for (int64_t b = 0; b < count / PKV_QK; b++) {
    block_values v;
    load_block(&v, w->type, src, k0 / PKV_QK + b);
    for (int32_t j = 0; j < PKV_QK; j++) {
      float f = (float)v.q[j] * (v.d * (float)v.s[j / 16]);
      if (with_min) f += v.m;
      y[b * PKV_QK + j] = f * scale;
    }
  }
}

static void scalar_quantize(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  for (int64_t r = row0; r < row1; r++) {
    for (int64_t b = 0; b < x->blocks; b++) {
      const float *src = x->x + r * x->x_stride + b * PKV_QK;
      int8_t *q = x->q + r * x->k + b * PKV_QK;
      const int64_t at = r * x->blocks + b;
      float largest = 0.0f;
      bool finite = true;
      for (int32_t j = 0; j < PKV_QK; j++) {
        if (!isfinite(src[j])) finite = false;
        if (fabsf(src[j]) > largest) largest = fabsf(src[j]);
      }
      const bool zero = largest < PKV_QUANT_TINY || !finite;
      const float inverse = zero ? 0.0f : 127.0f / largest;
      int32_t sum = 0;
      for (int32_t j = 0; j < PKV_QK; j++) {
        if (j == PKV_QK / 2) x->first[at] = sum;
        q[j] = zero ? 0 : (int8_t)pkv_round_small(src[j] * inverse);
        sum += q[j];
      }
      x->scale[at] = finite ? (zero ? 0.0f : largest / 127.0f) : NAN;
      x->scaled_sum[at] = x->scale[at] * (float)sum;
      x->sum[at] = sum;
    }
  }
}

static void scalar_tile_i8(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                           int64_t row1) {
  const pkv_weight *w = &job->p->w;
  const pkv_dense_x *x = job->x;
  const bool with_min = has_min(w->type);
  for (int64_t col = col0; col < col1; col++) {
    const unsigned char *src = (const unsigned char *)w->data + col * w->row_bytes;
    for (int64_t r = row0; r < row1; r++) {
      float acc = 0.0f;
      for (int64_t b = 0; b < x->blocks; b++) {
        block_values v;
        load_block(&v, w->type, src, b);
        const int8_t *q = x->q + r * x->k + b * PKV_QK;
        int32_t dot = 0;
        for (int32_t j = 0; j < PKV_QK; j++)
          dot += v.q[j] * q[j] * v.s[j / 16];
        const int64_t at = r * x->blocks + b;
        acc = fmaf((float)dot, v.d * x->scale[at], acc);
        if (with_min) acc = fmaf(v.m, x->scaled_sum[at], acc);
      }
      pkv_dense_store(job->p, r, col, acc);
    }
  }
}

#define CHUNK    512 /* elements of a weight row dequantised at a time */
#define ROWS_MAX 16

static void scalar_tile_f32(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                            int64_t row1) {
  const pkv_dense_x *x = job->x;
  for (int64_t col = col0; col < col1; col++) {
    for (int64_t first = row0; first < row1; first += ROWS_MAX) {
      const int64_t rows = row1 - first < ROWS_MAX ? row1 - first : ROWS_MAX;
      float lanes[ROWS_MAX][8];
      memset(lanes, 0, sizeof lanes);
      for (int64_t k0 = 0; k0 < x->k; k0 += CHUNK) {
        const int64_t count = x->k - k0 < CHUNK ? x->k - k0 : CHUNK;
        float weights[CHUNK];
        pkv_dense_dequantize_scalar(weights, &job->p->w, col, k0, count, 1.0f);
        for (int64_t r = 0; r < rows; r++) {
          const float *xr = x->x + (first + r) * x->x_stride + k0;
          for (int64_t i = 0; i < count; i++) {
            lanes[r][i & 7] = fmaf(weights[i], xr[i], lanes[r][i & 7]);
          }
        }
      }
      for (int64_t r = 0; r < rows; r++) {
        pkv_dense_store(job->p, first + r, col, pkv_sum_lanes(lanes[r]));
      }
    }
  }
}

void pkv_dense_narrow_scalar(const pkv_dense_x *x, int64_t row0, int64_t row1) {
  const int64_t stride = pkv_half_stride(x->k);
  for (int64_t r = row0; r < row1; r++) {
    uint16_t *to = x->half + r * stride;
    const float *from = x->x + r * x->x_stride;
    for (int64_t i = 0; i < x->k; i++)
      to[i] = fabsf(from[i]) < FLT_MIN ? 0 : pkv_f32_to_bf16(from[i]);
    memset(to + x->k, 0, (size_t)(stride - x->k) * sizeof *to);
  }
}

static float dot_bf16(const unsigned char *row, const uint16_t *x, int64_t k) {
  float lanes[16] = {0.0f};
  for (int64_t k0 = 0; k0 < k; k0 += PKV_QK) {
    uint16_t w[PKV_QK] = {0};
    memcpy(w, row + 2 * k0, (size_t)(k - k0 < PKV_QK ? k - k0 : PKV_QK) * sizeof *w);
    for (int32_t j = 0; j < 16; j++) {
      const uint16_t *q = x + k0 + 2 * j;
      lanes[j] = fmaf(pkv_bf16_to_f32(w[2 * j + 1]), pkv_bf16_to_f32(q[1]), lanes[j]);
      lanes[j] = fmaf(pkv_bf16_to_f32(w[2 * j]), pkv_bf16_to_f32(q[0]), lanes[j]);
    }
  }
  for (int32_t j = 0; j < 8; j++)
    lanes[j] += lanes[j + 8];
  return pkv_sum_lanes(lanes);
}

void pkv_dense_tile_bf16_scalar(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                                int64_t row1) {
  const pkv_weight *w = &job->p->w;
  const int64_t stride = pkv_half_stride(w->k);
  for (int64_t col = col0; col < col1; col++) {
    const unsigned char *row = (const unsigned char *)w->data + col * w->row_bytes;
    for (int64_t r = row0; r < row1; r++)
      pkv_dense_store(job->p, r, col, dot_bf16(row, job->x->half + r * stride, w->k));
  }
}

void pkv_dense_rms_norm_scalar(float *y, const float *x, const float *weight, int64_t n,
                               float eps) {
  double lanes[8] = {0.0};
  for (int64_t i = 0; i < n; i++)
    lanes[i & 7] += (double)x[i] * (double)x[i];
  const double sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                     ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  const float scale = pkv_rms_scale(sum, n, eps);
  for (int64_t i = 0; i < n; i++)
    y[i] = x[i] * scale * weight[i];
}

void pkv_dense_rope_adjacent_scalar(float *x, int32_t heads, int32_t head_dim, int32_t rope_dim,
                                    const float *cs) {
  for (int32_t h = 0; h < heads; h++) {
    float *head = x + (int64_t)h * head_dim;
    for (int32_t i = 0; i < rope_dim; i += 2) {
      const float a = head[i], b = head[i + 1];
      head[i] = fmaf(a, cs[i], -(b * cs[i + 1]));
      head[i + 1] = fmaf(b, cs[i], a * cs[i + 1]);
    }
  }
}

void pkv_dense_swiglu_scalar(float *y, const float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    y[i] = gate[i] / (1.0f + pkv_exp_clamped(-gate[i])) * up[i];
  }
}

void pkv_dense_geglu_scalar(float *y, const float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    y[i] = pkv_gelu_tanh(gate[i]) * up[i];
}

void pkv_dense_add_scalar(float *y, const float *x, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    y[i] += x[i];
}

const pkv_dense_kernels pkv_dense_scalar = {scalar_quantize,
                                            pkv_dense_narrow_scalar,
                                            scalar_tile_f32,
                                            scalar_tile_i8,
                                            pkv_dense_tile_bf16_scalar,
                                            pkv_dense_dequantize_scalar,
                                            pkv_dense_rms_norm_scalar,
                                            pkv_dense_rope_adjacent_scalar,
                                            pkv_dense_swiglu_scalar,
                                            pkv_dense_geglu_scalar,
                                            pkv_dense_add_scalar};
