/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: f16 K and V, head_dim up to 256. */
#include "backend/cuda/decode_launch.cuh"

PKV_CUDA_DECODE_SET(pkv_cuda_decode_f16_256, pkv_kv_f16, 256)
