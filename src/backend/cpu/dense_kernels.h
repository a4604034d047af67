/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between the drivers of the dense operations (which check, prepare activations and cut the work)
 * and the inner kernels of one instruction set. Private to src/backend/cpu.
 */
#ifndef PKV_BACKEND_CPU_DENSE_KERNELS_H
#define PKV_BACKEND_CPU_DENSE_KERNELS_H

#include <stdbool.h>

#include "backend/backend.h"

#define PKV_QK    32  /* elements of a quantised block; also of a block of 8-bit activations */
#define PKV_SUPER 256 /* elements of a super-block: Q4_K, Q5_K, Q6_K */

/* Activations of one call: the floats, and in the 8-bit mode their rounded form. */
typedef struct pkv_dense_x {
  const float *x; /* [m, x_stride] */
  int64_t x_stride;
  int64_t m, k, blocks; /* blocks = k / PKV_QK */
  int8_t *q;            /* [m, blocks * PKV_QK], -127 .. 127 */
  float *scale;         /* [m, blocks] dx */
  float *scaled_sum;    /* [m, blocks] dx * float(sum) */
  int32_t *sum, *first; /* [m, blocks] of a block's codes, of its first 16 */
  uint16_t *half;       /* [m, pkv_half_stride(k)] as bf16, zeros behind a row */
} pkv_dense_x;

static inline int64_t pkv_half_stride(int64_t k) {
  return (k + PKV_QK - 1) / PKV_QK * PKV_QK;
}

/* One product; a kernel computes columns [col0, col1) of rows [row0, row1). */
typedef struct pkv_dense_job {
  const pkv_matmul_params *p;
  const pkv_dense_x *x;
} pkv_dense_job;

typedef void (*pkv_dense_tile_fn)(const pkv_dense_job *job, int64_t col0, int64_t col1,
                                  int64_t row0, int64_t row1);

typedef struct pkv_dense_kernels {
  void (*quantize)(const pkv_dense_x *x, int64_t row0, int64_t row1);
  void (*narrow)(const pkv_dense_x *x, int64_t row0, int64_t row1); /* fills x->half */
  pkv_dense_tile_fn tile_f32, tile_i8, tile_bf16;
  /* y[0..count) = scale * elements [k0, k0 + count) of a weight row; k0 on a block boundary. */
  void (*dequantize)(float *y, const pkv_weight *w, int64_t row, int64_t k0, int64_t count,
                     float scale);
  void (*rms_norm)(float *y, const float *x, const float *weight, int64_t n, float eps);
  /* One row: heads heads of head_dim, pairs (2j, 2j + 1); cs [rope_dim / 2, 2]. */
  void (*rope_adjacent)(float *x, int32_t heads, int32_t head_dim, int32_t rope_dim,
                        const float *cs);
  void (*swiglu)(float *y, const float *gate, const float *up, int64_t count);
  void (*geglu)(float *y, const float *gate, const float *up, int64_t count);
  void (*add)(float *y, const float *x, int64_t count);
} pkv_dense_kernels;

extern const pkv_dense_kernels pkv_dense_scalar;
#if defined(__x86_64__)
extern const pkv_dense_kernels pkv_dense_avx2, pkv_dense_avx512vnni, pkv_dense_avx512bf16;
#endif
#if defined(__aarch64__)
extern const pkv_dense_kernels pkv_dense_neon, pkv_dense_neondot; /* with the byte dot product */
#endif

/* The scalar table's, for others: compilers for AArch64 make NEON of them by themselves. */
void pkv_dense_narrow_scalar(const pkv_dense_x *x, int64_t row0, int64_t row1);
void pkv_dense_tile_bf16_scalar(const pkv_dense_job *job, int64_t col0, int64_t col1, int64_t row0,
                                int64_t row1);
void pkv_dense_dequantize_scalar(float *y, const pkv_weight *w, int64_t row, int64_t k0,
                                 int64_t count, float scale);
void pkv_dense_rms_norm_scalar(float *y, const float *x, const float *weight, int64_t n, float eps);
void pkv_dense_rope_adjacent_scalar(float *x, int32_t heads, int32_t head_dim, int32_t rope_dim,
                                    const float *cs);
void pkv_dense_swiglu_scalar(float *y, const float *gate, const float *up, int64_t count);
void pkv_dense_geglu_scalar(float *y, const float *gate, const float *up, int64_t count);
void pkv_dense_add_scalar(float *y, const float *x, int64_t count);

/* The kernels of an executor's instruction set. */
const pkv_dense_kernels *pkv_dense_kernels_of(const pkv_executor *executor);

/* Elements and bytes of a block; false for a type we do not compute with. */
bool pkv_dense_block(pkv_wtype type, int64_t *elements, int64_t *bytes);

/* y = r (+ bias) or y += r (+ bias), rounded in this order. */
static inline void pkv_dense_store(const pkv_matmul_params *p, int64_t row, int64_t col, float r) {
  float *y = p->y + row * p->y_stride + col;
  if (p->bias) r += p->bias[col];
  *y = p->accumulate ? *y + r : r;
}

#endif
