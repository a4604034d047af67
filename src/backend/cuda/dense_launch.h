/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of the dense kernels: each puts one kernel on a stream and returns what the runtime
   said. dependent: the launch may begin before the kernel ahead of it has ended. */
#ifndef PKV_DENSE_LAUNCH_H
#define PKV_DENSE_LAUNCH_H

#include <cuda_runtime_api.h>

#include "backend/device_dense.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_DENSE_MOST_WIDTH 16384 /* of a row that is normed */

cudaError_t pkv_dense_launch_embed(const pkv_dense_embed_params *p, int32_t dependent,
                                   cudaStream_t stream);
cudaError_t pkv_dense_launch_norm(const pkv_dense_norm_params *p, int32_t dependent,
                                  cudaStream_t stream);
cudaError_t pkv_dense_launch_rope(const pkv_dense_rope_params *p, int32_t dependent,
                                  cudaStream_t stream);
/* y[m, n / 2] = f(from[m, first half of n]) * from[m, second half]. */
cudaError_t pkv_dense_launch_gate(const pkv_dense_matmul_params *p, int32_t dependent,
                                  cudaStream_t stream);
cudaError_t pkv_dense_launch_random(const pkv_dense_random_params *p, cudaStream_t stream);
cudaError_t pkv_dense_launch_argmax(const pkv_dense_sample_params *p, int32_t dependent,
                                    cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
