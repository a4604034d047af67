/* SPDX-License-Identifier: Apache-2.0 */
/* Written by tools/gen_cuda_sets.py: e4m3 K and V, head_dim up to 256. */
#include "backend/cuda/decode_launch.cuh"

PKV_CUDA_DECODE_SET(pkv_cuda_decode_e4m3_256, pkv_kv_e4m3, 256)
