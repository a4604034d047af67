/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda_fp16.h beside it. */
#ifndef PKV_TEST_CUDA_FP8_H
#define PKV_TEST_CUDA_FP8_H

#include "cuda_fp16.h"

typedef uint8_t __nv_fp8_storage_t;
enum { __NV_E4M3, __NV_SATFINITE };
static inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, int) {
  return __half_raw{pkv_f32_to_f16(pkv_e4m3_to_f32(x))};
}
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, int, int) {
  return pkv_f32_to_e4m3(x);
}

#endif
