/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PKV_CUDA_ADVANCE_H
#define PKV_CUDA_ADVANCE_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "backend/device_ops.h"

/* pkv_device_ops.advance. */
cudaError_t pkv_cuda_launch_advance(const pkv_device_advance *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
