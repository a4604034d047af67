/* SPDX-License-Identifier: Apache-2.0 */
/* What the dense kernels share: 16-bit types as floats, sums, dependent launch. */
#ifndef PKV_DENSE_COMMON_CUH
#define PKV_DENSE_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/dense_launch.h"
#include "backend/cuda/launch_kernel.cuh"

#define DENSE_MOST_WARPS 32

template <typename T> struct dense_pair;
template <> struct dense_pair<__half> {
  static __device__ __forceinline__ float2 load(const __half *p) {
    return __half22float2(*(const __half2 *)p);
  }
  static __device__ __forceinline__ void store(__half *p, float2 v) {
    *(__half2 *)p = __float22half2_rn(v);
  }
};
template <> struct dense_pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 load(const __nv_bfloat16 *p) {
    return __bfloat1622float2(*(const __nv_bfloat162 *)p);
  }
  static __device__ __forceinline__ void store(__nv_bfloat16 *p, float2 v) {
    *(__nv_bfloat162 *)p = __float22bfloat162_rn(v);
  }
};

/* Two elements of either type, at a multiple of 4 bytes. */
static __device__ __forceinline__ float2 dense_load2(const void *base, int64_t at, pkv_dtype act) {
  return act == PKV_DTYPE_F16 ? dense_pair<__half>::load((const __half *)base + at)
                              : dense_pair<__nv_bfloat16>::load((const __nv_bfloat16 *)base + at);
}

static __device__ __forceinline__ void dense_store2(void *base, int64_t at, float2 v,
                                                    pkv_dtype act) {
  if (act == PKV_DTYPE_F16)
    dense_pair<__half>::store((__half *)base + at, v);
  else
    dense_pair<__nv_bfloat16>::store((__nv_bfloat16 *)base + at, v);
}

static __device__ __forceinline__ float dense_gated(float gate, float up, pkv_dense_gate kind) {
  if (kind == PKV_DENSE_SILU) return gate / (1.0f + expf(-gate)) * up;
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + tanhf(inner)) * up;
}

/* The kernel behind may begin to start: it waits for the end of this one before it reads. */
static __device__ __forceinline__ void dense_release() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* What the kernels ahead wrote is there. */
static __device__ __forceinline__ void dense_wait() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

static __device__ __forceinline__ float dense_warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

/* The sum over all threads, in every thread. shared: [DENSE_MOST_WARPS], free again on return. */
static __device__ __forceinline__ float dense_cta_sum(float x, float *shared) {
  const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
  x = dense_warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[warp] = x;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < warps; ++i)
    sum += shared[i];
  __syncthreads();
  return sum;
}

#endif
