/* SPDX-License-Identifier: Apache-2.0 */
/* What norms of rows have in common: a CTA a row, whose threads keep float4s of it in registers. */
#ifndef PKV_CUDA_DENSE_QUADS_CUH
#define PKV_CUDA_DENSE_QUADS_CUH

#include "backend/cuda/dense_common.cuh"

#define QUADS 4 /* float4s of a thread, at most */

/* Threads for rows of n. */
static inline unsigned quad_threads(int n) {
  const int quads = n / 4, most = n > 8192 ? 1024 : 512;
  return (unsigned)(quads >= most ? most : (quads + 31) / 32 * 32);
}

/* Columns of a thread's q-th float4. */
static __device__ __forceinline__ int column(int q) {
  return 4 * (q * (int)blockDim.x + (int)threadIdx.x);
}

static __device__ __forceinline__ float4 quad_at(const float *row, int at) {
  return *(const float4 *)(row + at);
}

static __device__ __forceinline__ float squares(float4 v) {
  return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

static __device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

static __device__ __forceinline__ float4 times(float4 a, float4 w, float scale) {
  return make_float4(a.x * scale * w.x, a.y * scale * w.y, a.z * scale * w.z, a.w * scale * w.w);
}

/* What a row of the CTA's sum of squares is divided by the root of, inverted. */
static __device__ __forceinline__ float norm_scale(float sum, const pkv_dense_norm_params &p,
                                                   float *shared) {
  return rsqrtf(dense_cta_sum(sum, shared) / (float)p.n + p.eps);
}

/* y [row] = norm(x) * weight. */
static __device__ __forceinline__ void write_normed(const pkv_dense_norm_params &p, int64_t row,
                                                    const float4 x[QUADS], float scale) {
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      const float4 y = times(x[q], quad_at(p.weight, column(q)), scale);
      dense_store2(p.y, row * p.n + column(q), make_float2(y.x, y.y), p.act);
      dense_store2(p.y, row * p.n + column(q) + 2, make_float2(y.z, y.w), p.act);
    }
}

#endif
