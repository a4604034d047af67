/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New tokens' K and V, converted to the cache's type and written to their slots. One CTA a token; a
 * thread takes head dimensions in turn. Slots outside the pool, and -1, are skipped.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/cuda_launch.h"

#define APPEND_THREADS 256

static __device__ __forceinline__ void store(void *base, int64_t at, float x, pkv_dtype dtype) {
  switch (dtype) {
  case PKV_DTYPE_F32:
    ((float *)base)[at] = x;
    break;
  case PKV_DTYPE_F16:
    ((__half *)base)[at] = __float2half_rn(x);
    break;
  case PKV_DTYPE_BF16:
    ((__nv_bfloat16 *)base)[at] = __float2bfloat16_rn(x);
    break;
  case PKV_DTYPE_FP8_E4M3:
    ((__nv_fp8_storage_t *)base)[at] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    break;
  }
}

static __global__ void __launch_bounds__(APPEND_THREADS)
    append(const __grid_constant__ pkv_append_params p) {
  const int64_t token = blockIdx.x, slot = p.slots[token];
  const int64_t page = slot < 0 ? -1 : slot / p.cache.page_tokens;
  if (page < 0 || page >= p.cache.pages) return;
  const int64_t in_page = slot - page * p.cache.page_tokens;
  for (int i = threadIdx.x; i < p.cache.kv_heads * p.cache.head_dim; i += APPEND_THREADS) {
    const int head = i / p.cache.head_dim, d = i - head * p.cache.head_dim;
    const float ks = p.cache.k_scale * (p.cache.k_head_scale ? p.cache.k_head_scale[head] : 1.0f);
    const float vs = p.cache.v_scale * (p.cache.v_head_scale ? p.cache.v_head_scale[head] : 1.0f);
    const int64_t k_at = page * p.cache.k_page_stride + in_page * p.cache.k_token_stride +
                         head * p.cache.k_head_stride + d;
    const int64_t v_at = page * p.cache.v_page_stride + in_page * p.cache.v_token_stride +
                         head * p.cache.v_head_stride + d;
    const bool scaled = p.cache.dtype == PKV_DTYPE_FP8_E4M3;
    store(p.cache.k, k_at, p.k[token * p.k_token_stride + i] / (scaled ? ks : 1.0f), p.cache.dtype);
    store(p.cache.v, v_at, p.v[token * p.v_token_stride + i] / (scaled ? vs : 1.0f), p.cache.dtype);
  }
}

extern "C" cudaError_t pkv_cuda_launch_append(const pkv_append_params *p, cudaStream_t stream) {
  if (p->tokens == 0) return cudaSuccess;
  append<<<(unsigned)p->tokens, APPEND_THREADS, 0, stream>>>(*p);
  return cudaGetLastError();
}
