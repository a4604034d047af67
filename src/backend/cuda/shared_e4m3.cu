/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: route shared, e4m3 K and V, head_dim 128. */
#include "backend/cuda/shared_launch.cuh"

PKV_CUDA_SHARED_SET_128(pkv_cuda_shared_e4m3, pkv_kv_e4m3)
