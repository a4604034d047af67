/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Root-mean-square norms of the residual stream, with what is added to it first.
 *
 * One CTA a row; a thread keeps its float4s in registers between the sum and the result, so that a
 * row of x is read once. Bytes a row: 4 n read, 2 n written; with delta 8 n read and 6 n written.
 * 128 bytes of shared memory.
 */
#include "backend/cuda/dense_common.cuh"

#define QUADS 4 /* float4s of a thread, at most */

/* Columns of its q-th float4. */
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

/* x += delta, or norm(delta) * delta_weight. */
static __device__ __forceinline__ void add_delta(float4 x[QUADS], const pkv_dense_norm_params &p,
                                                 int64_t row, float *shared) {
  const float *delta = p.delta + row * p.n;
  float4 d[QUADS];
  float sum = 0.0f;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      d[q] = quad_at(delta, column(q));
      sum += squares(d[q]);
    }
  const float scale =
      p.delta_weight ? rsqrtf(dense_cta_sum(sum, shared) / (float)p.n + p.eps) : 1.0f;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n)
      x[q] = plus(x[q],
                  p.delta_weight ? times(d[q], quad_at(p.delta_weight, column(q)), scale) : d[q]);
}

static __global__ void __launch_bounds__(1024)
    dense_norm(const __grid_constant__ pkv_dense_norm_params p) {
  __shared__ float shared[DENSE_MOST_WARPS];
  dense_release();
  dense_wait();
  const int64_t row = blockIdx.x;
  float *from = p.x + (p.rows ? (int64_t)p.rows[row] : row) * p.n;
  const bool changes = p.bias != nullptr || p.delta != nullptr;
  float4 x[QUADS];
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      x[q] = quad_at(from, column(q));
      if (p.bias) x[q] = plus(x[q], quad_at(p.bias, column(q)));
    }
  if (p.delta) add_delta(x, p, row, shared);
  float sum = 0.0f;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      if (changes && !p.rows) *(float4 *)(from + column(q)) = x[q];
      sum += squares(x[q]);
    }
  if (!p.weight) return;
  const float scale = rsqrtf(dense_cta_sum(sum, shared) / (float)p.n + p.eps);
  const int64_t to = row * p.n;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      const float4 y = times(x[q], quad_at(p.weight, column(q)), scale);
      dense_store2(p.y, to + column(q), make_float2(y.x, y.y), p.act);
      dense_store2(p.y, to + column(q) + 2, make_float2(y.z, y.w), p.act);
    }
}

extern "C" cudaError_t pkv_dense_launch_norm(const pkv_dense_norm_params *p, int32_t dependent,
                                             cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  const int quads = p->n / 4, most = p->n > 8192 ? 1024 : 512;
  const int threads = quads >= most ? most : (quads + 31) / 32 * 32;
  pkv_dense_norm_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_norm, dim3((unsigned)p->m), (unsigned)threads,
                                0, dependent != 0, arguments, stream);
}
