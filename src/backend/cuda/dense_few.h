/* SPDX-License-Identifier: Apache-2.0 */
/* Between the launcher of products of few rows (dense_few.c) and their kernels (dense_few.cuh). */
#ifndef PKV_CUDA_DENSE_FEW_H
#define PKV_CUDA_DENSE_FEW_H

#include "backend/device_dense.h"

/* Passed by value. */
typedef struct pkv_few_args {
  const unsigned char *w;
  int64_t w_step; /* bytes between strips of 8 rows */
  const void *x;
  void *y;
  int64_t x_stride, y_stride;
  int32_t m, n, k;
  int32_t tiles;  /* of 16 rows of w */
  int32_t chunks; /* of a row */
  int32_t split;  /* CTAs of a cluster */
  int32_t act, y_f32, accumulate, gate;
} pkv_few_args;

/* Shared memory: the largest magnitude of each row of x, then sums. */
#define PKV_FEW_SUMS_AT 64
#define PKV_FEW_PITCH   20 /* floats between columns of the sums: no bank conflicts */
#define PKV_FEW_GROUP   16 /* tiles whose sums the CTAs of a cluster exchange at once */

/* The kernels of one weight type: up to 8 and up to 16 rows of x. */
typedef struct pkv_few_set {
  const void *kernel[2];
  int32_t warps, chunk_k;
} pkv_few_set;

#ifdef __cplusplus
extern "C" {
#endif
extern const pkv_few_set pkv_few_q4_0, pkv_few_q4_1, pkv_few_q4_k, pkv_few_q5_0, pkv_few_q5_1,
    pkv_few_q5_k, pkv_few_q6_k, pkv_few_q8_0;
#ifdef __cplusplus
}
#endif

#endif
