/* SPDX-License-Identifier: Apache-2.0 */
/* The launcher of dense_group.cu. */
#ifndef PKV_DENSE_GROUP_H
#define PKV_DENSE_GROUP_H

#include <cuda_runtime_api.h>

#include "backend/device_dense.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_DENSE_GROUP_RANKS 8

/* What the ranks tell each other. A CTA of one rank meets the CTAs of the same index of the others;
   met [ctas]: how often it did; told [ctas, PKV_DENSE_GROUP_RANKS]: how often others came. */
typedef struct pkv_dense_group_params {
  pkv_dense_norm_params norm; /* this rank's; delta: see deltas */
  int32_t rank, ranks;
  const float *deltas[PKV_DENSE_GROUP_RANKS];
  uint32_t *told[PKV_DENSE_GROUP_RANKS];
  uint32_t *met;
} pkv_dense_group_params;

/* One CTA that meets those of the other ranks: what comes behind it sees what they did before. With
   norm unused. */
cudaError_t pkv_dense_launch_meet(const pkv_dense_group_params *p, cudaStream_t stream);
/* At most `ctas` CTAs, which have to fit the device together; the same number on all ranks. */
cudaError_t pkv_dense_launch_group_norm(const pkv_dense_group_params *p, int32_t ctas,
                                        int32_t dependent, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
