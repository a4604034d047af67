/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda_fp16.h beside it. */
#ifndef PKV_TEST_CUDA_BF16_H
#define PKV_TEST_CUDA_BF16_H

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t x;
};
static inline float __bfloat162float(__nv_bfloat16 h) {
  return pkv_bf16_to_f32(h.x);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return __nv_bfloat16{pkv_f32_to_bf16(f)};
}

#endif
