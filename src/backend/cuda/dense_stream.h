/* SPDX-License-Identifier: Apache-2.0 */
/* Between the launcher of products that stream 16-bit weights (dense_stream.c) and their kernels
   (dense_stream.cu). */
#ifndef PKV_CUDA_DENSE_STREAM_H
#define PKV_CUDA_DENSE_STREAM_H

#include <cuda.h>

#include "backend/device_dense.h"

#define PKV_STREAM_K        64  /* elements of a unit: 128 bytes a row, one swizzled line */
#define PKV_STREAM_ROWS     64  /* of w, of a tile */
#define PKV_STREAM_WORKERS  128 /* threads that multiply: a warpgroup; a warp more copies */
#define PKV_STREAM_BARRIERS 16  /* bytes of a stage's two; of a cluster's one, padded */

/* Passed by value. */
typedef struct pkv_stream_args {
  CUtensorMap w; /* element, 8 rows, half of a group of 16, group */
  CUtensorMap x; /* element, row */
  void *y;
  float *parts;    /* [CTAs, columns / 8, workers, 4] sums of tiles that another CTA ends */
  uint32_t *ready; /* [CTAs] 1: parts lie there; zeros between launches */
  int64_t y_stride;
  int32_t m, n;
  int32_t units; /* of a tile */
  int32_t tiles;
  int32_t split;  /* CTAs of a tile's cluster; 1: no clusters */
  int32_t stages; /* of the ring */
  int32_t act, y_f32, accumulate, gate;
} pkv_stream_args;

#ifdef __cplusplus
extern "C" {
#endif
/* Of up to 8 and up to 16 rows of x; f16 and bf16. */
extern const void *const pkv_stream_kernels[2][2];
#ifdef __cplusplus
}
#endif

static inline PKV_HD int32_t pkv_stream_stage_bytes(int32_t columns) {
  return (PKV_STREAM_ROWS + columns) * PKV_STREAM_K * 2;
}
/* Where a cluster's CTAs put sums for each other. */
static inline PKV_HD int32_t pkv_stream_slot_bytes(int32_t split) {
  return split > 1 ? split * PKV_STREAM_WORKERS * 16 : 0;
}

#endif
