/* SPDX-License-Identifier: Apache-2.0 */
/* Which set of decode kernels covers a K/V type and a head dimension. */
#include "backend/cuda/cuda_launch.h"

extern const pkv_cuda_decode_ops pkv_cuda_decode_f16_64, pkv_cuda_decode_f16_128,
    pkv_cuda_decode_f16_256, pkv_cuda_decode_bf16_64, pkv_cuda_decode_bf16_128,
    pkv_cuda_decode_bf16_256, pkv_cuda_decode_e4m3_64, pkv_cuda_decode_e4m3_128,
    pkv_cuda_decode_e4m3_256;

const pkv_cuda_decode_ops *pkv_cuda_decode_ops_of(pkv_dtype dtype, int32_t head_dim) {
  const int size = head_dim <= 64 ? 0 : head_dim <= 128 ? 1 : 2;
  static const pkv_cuda_decode_ops *const sets[3][3] = {
      {&pkv_cuda_decode_f16_64, &pkv_cuda_decode_f16_128, &pkv_cuda_decode_f16_256},
      {&pkv_cuda_decode_bf16_64, &pkv_cuda_decode_bf16_128, &pkv_cuda_decode_bf16_256},
      {&pkv_cuda_decode_e4m3_64, &pkv_cuda_decode_e4m3_128, &pkv_cuda_decode_e4m3_256}};
  switch (dtype) {
  case PKV_DTYPE_F16:
    return sets[0][size];
  case PKV_DTYPE_BF16:
    return sets[1][size];
  case PKV_DTYPE_FP8_E4M3:
    return sets[2][size];
  case PKV_DTYPE_F32:
    break;
  }
  return NULL;
}

extern const pkv_cuda_shared_ops pkv_cuda_shared_f16[2], pkv_cuda_shared_bf16[2],
    pkv_cuda_shared_e4m3;

const pkv_cuda_shared_ops *pkv_cuda_shared_ops_of(pkv_dtype dtype, int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return NULL;
  if (dtype == PKV_DTYPE_F16) return &pkv_cuda_shared_f16[head_dim / 128];
  if (dtype == PKV_DTYPE_BF16) return &pkv_cuda_shared_bf16[head_dim / 128];
  if (dtype == PKV_DTYPE_FP8_E4M3 && head_dim == 128) return &pkv_cuda_shared_e4m3;
  return NULL;
}
