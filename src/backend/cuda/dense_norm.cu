/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Root-mean-square norms of the residual stream, with what is added to it first.
 *
 * One CTA a row; a thread keeps its float4s in registers between the sum and the result, so that a
 * row of x is read once. Bytes a row: 4 n read, 2 n written; with delta 8 n read and 6 n written.
 * 128 bytes of shared memory.
 */
#include "backend/cuda/dense_quads.cuh"

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
  const float scale = p.delta_weight ? norm_scale(sum, p, shared) : 1.0f;
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
  write_normed(p, row, x, norm_scale(sum, p, shared));
}

extern "C" cudaError_t pkv_dense_launch_norm(const pkv_dense_norm_params *p, int32_t dependent,
                                             cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  pkv_dense_norm_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_norm, dim3((unsigned)p->m), quad_threads(p->n),
                                0, dependent != 0, arguments, stream);
}
