/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers: each puts one kernel on a stream and returns what the runtime said. */
#ifndef PKV_CUDA_LAUNCH_H
#define PKV_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/cuda_params.h"
#include "backend/cuda/tensor_map.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pkv_cuda_kernel {
  PKV_CUDA_DECODE = 0,       /* x: parts */
  PKV_CUDA_DECODE_PLAIN = 1, /* x: parts; what pkv_plain_params says */
  PKV_CUDA_DECODE_ITEMS = 2, /* x: items */
  PKV_CUDA_MERGE = 3         /* x: merges */
} pkv_cuda_kernel;

/* Shared memory of the device, bytes: of an SM, the most a CTA may ask for, and what each
   CTA costs besides. */
typedef struct pkv_cuda_shared_memory {
  int32_t an_sm, a_cta, reserved_a_cta;
} pkv_cuda_shared_memory;

/* One set of kernels: a K/V type and a head dimension (rounded up to 64, 128 or 256). */
typedef struct pkv_cuda_decode_ops {
  /* dependent: the launch may begin before the kernel ahead of it has ended. */
  cudaError_t (*launch)(pkv_cuda_kernel kernel, const pkv_cuda_decode_params *p, int32_t x,
                        int32_t dependent, cudaStream_t stream);
  /* Raises the kernels' shared-memory limits. *ctas: an SM, of kernels that take tile_rows query
     rows together (8 or 16), 0 where they do not fit; *stages: of their ring. Once a device. */
  cudaError_t (*prepare)(int32_t *ctas, int32_t *stages, const pkv_cuda_shared_memory *memory,
                         int32_t tile_rows);
  int32_t head_dim; /* of the states in slots */
} pkv_cuda_decode_ops;

/* merge.cu: the seed's merge (grid of x merges, threads 128), the paths of route shared. */
const void *pkv_cuda_merge_kernel(int32_t head_dim);
const void *pkv_cuda_paths_kernel(int32_t head_dim);

/* Route shared: all launches of a layer. */
typedef struct pkv_cuda_shared_ops {
  /* major: compute capability of the device. dependent: the first launch may begin before the
     kernel ahead of it has ended. */
  cudaError_t (*launch)(const pkv_cuda_shared_params *s, const pkv_cuda_tensor_maps *maps,
                        int32_t major, int32_t dependent, cudaStream_t stream);
  /* Raises the kernels' shared-memory limits. *tensors: whether that device's reads the maps. */
  cudaError_t (*prepare)(int32_t *tensors, int32_t stages, int32_t major);
} pkv_cuda_shared_ops;

/* NULL when no kernel covers type and head dimension. */
const pkv_cuda_shared_ops *pkv_cuda_shared_ops_of(pkv_dtype dtype, int32_t head_dim);

/* NULL when no kernel covers the type (f32). */
const pkv_cuda_decode_ops *pkv_cuda_decode_ops_of(pkv_dtype dtype, int32_t head_dim);

/* What a planner kernel writes besides the plan's bytes. */
typedef struct pkv_cuda_workspace {
  uint32_t *counters; /* set to 0 */
  int64_t counter_count;
  void *slots; /* set to PKV_CUDA_EMPTY; NULL: left as they are */
  int64_t slot_bytes;
  int32_t *fault; /* set to 0 */
  void *zeros;    /* set to 0, where slots are set */
  int64_t zero_bytes;
} pkv_cuda_workspace;

/* Raises the planner's shared-memory limit. Once a device. */
cudaError_t pkv_cuda_planner_prepare(void);
/* header and plan: see pkv_plan_prepare. sms: how many CTAs may help with the workspace. */
cudaError_t pkv_cuda_launch_planner(const struct pkv_plan *header, void *plan,
                                    const int32_t *seq_len, int32_t max_seq_len,
                                    const pkv_cuda_workspace *workspace, int32_t sms,
                                    int32_t dependent, cudaStream_t stream);

/* Whether this build's kernels load on the current device. */
cudaError_t pkv_cuda_kernels_load(void);
cudaError_t pkv_cuda_launch_append(const pkv_append_params *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
