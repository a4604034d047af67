/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: bf16 K and V, head_dim up to 64. */
#include "backend/cuda/decode_launch.cuh"

PKV_CUDA_DECODE_SET(pkv_cuda_decode_bf16_64, pkv_kv_bf16, 64)
