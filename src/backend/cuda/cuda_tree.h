/* SPDX-License-Identifier: Apache-2.0 */
/* The launcher of the planner of `shared`; apart, as its host twin's headers change often and the
   decode kernels need none of them. */
#ifndef PKV_CUDA_TREE_H
#define PKV_CUDA_TREE_H

#include <cuda_runtime_api.h>

#include "plan/tree_desk.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The planner of `shared`. */
typedef struct pkv_cuda_tree_params {
  pkv_tree_input input; /* but keys, leader, units, which lie in memory */
  void *memory;         /* pkv_tree_memory_bytes(rows and units of the plan's limits) */
  int64_t most_units;   /* of the plan's limits */
  uint32_t *counters;   /* zeroed, as the fault word */
  int64_t counter_count;
  int32_t *fault;
  int32_t desk_bytes, dependent; /* as pkv_cuda_tree_prepare says */
  /* The launch ahead in the stream is the planner's: the first kernel here runs beside it. */
  int32_t beside_planner;
  int32_t zeroed; /* and leaves the front of `memory` zero */
} pkv_cuda_tree_params;

/* Shared memory that the planner may have, after raising its limit; whether launches may depend. */
cudaError_t pkv_cuda_tree_prepare(int32_t *desk_bytes, int32_t *dependent);
cudaError_t pkv_cuda_launch_tree(const pkv_cuda_tree_params *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
