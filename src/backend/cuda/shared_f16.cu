/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: route shared, f16 K and V, head_dim 64 and 128. */
#include "backend/cuda/shared_launch.cuh"

PKV_CUDA_SHARED_SET(pkv_cuda_shared_f16, pkv_kv_f16)
