/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers: each puts one kernel on a stream and returns what the runtime said. */
#ifndef PKV_CUDA_LAUNCH_H
#define PKV_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/cuda_params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pkv_cuda_kernel {
  PKV_CUDA_DECODE = 0,           /* x: parts */
  PKV_CUDA_DECODE_INVARIANT = 1, /* x: parts */
  PKV_CUDA_DECODE_ITEMS = 2,     /* x: items */
  PKV_CUDA_MERGE = 3             /* x: merges */
} pkv_cuda_kernel;

/* One set of kernels: a K/V type and a head dimension (rounded up to 64, 128 or 256). */
typedef struct pkv_cuda_decode_ops {
  /* dependent: the launch may begin before the kernel ahead of it has ended. */
  cudaError_t (*launch)(pkv_cuda_kernel kernel, const pkv_cuda_decode_params *p, int32_t x,
                        int32_t dependent, cudaStream_t stream);
  /* Raises the shared-memory limits; CTAs of `balanced` an SM. Once a device. */
  cudaError_t (*prepare)(int32_t *ctas);
  int32_t head_dim, slot_floats;
} pkv_cuda_decode_ops;

/* NULL when no kernel covers the type (f32). */
const pkv_cuda_decode_ops *pkv_cuda_decode_ops_of(pkv_dtype dtype, int32_t head_dim);

cudaError_t pkv_cuda_launch_planner(const struct pkv_plan *header, void *plan,
                                    const int32_t *seq_len, int32_t max_seq_len, uint32_t *counters,
                                    int64_t counter_count, int32_t *fault, cudaStream_t stream);
/* Whether this build's kernels load on the current device. */
cudaError_t pkv_cuda_kernels_load(void);
cudaError_t pkv_cuda_launch_append(const pkv_append_params *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
