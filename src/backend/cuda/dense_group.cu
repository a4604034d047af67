/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The norm of dense_norm.cu where what is added to the stream lies in parts on several devices,
 * which read each other's memory.
 *
 * CTA i of each rank takes rows i, i + grid, ... It tells the other ranks' CTAs i that this rank's
 * sums are there (the kernel ahead has ended) and waits until it has heard so from all of them.
 * Then it adds the ranks' sums in the order of ranks: the same bits everywhere. All CTAs of a grid
 * are on the device together and tell before they wait, so that no two ranks wait for each other.
 * Who has heard from a rank knows that the rank's launch before this one has ended: what that one
 * read may be written to.
 *
 * A rank that does not come within WAIT_NS ends the launch with a trap: the process hears of it.
 * Bytes a row: 4 n of each other rank over the link, 12 n and 2 n here. 128 bytes of shared memory.
 */
#include "backend/cuda/dense_group.h"
#include "backend/cuda/dense_quads.cuh"

#define WAIT_NS 5000000000ull

/* Once more; what the count is now is known there alone, which spares a wait here. */
static __device__ __forceinline__ void tell(uint32_t *there) {
  asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(there) : "memory");
}

static __device__ __forceinline__ uint32_t hear(const uint32_t *here) {
  uint32_t times;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(times) : "l"(here) : "memory");
  return times;
}

static __device__ __forceinline__ uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

/* Thread r of the CTA meets rank r. */
static __device__ __forceinline__ void meet(const pkv_dense_group_params &p) {
  const int cta = (int)blockIdx.x, other = (int)threadIdx.x;
  if (other < p.ranks && other != p.rank) {
    const uint32_t *here = p.told[p.rank] + cta * PKV_DENSE_GROUP_RANKS + other;
    tell(p.told[other] + cta * PKV_DENSE_GROUP_RANKS + p.rank);
    const uint32_t times = p.met[cta] + 1;
    const uint64_t begin = clock_ns();
    while ((int32_t)(hear(here) - times) < 0)
      if (clock_ns() - begin > WAIT_NS) __trap();
  }
  __syncthreads();
  if (threadIdx.x == 0) p.met[cta]++;
}

/* The ranks' sums of a row's columns. Loads come first: those over the link overlap. */
static __device__ __forceinline__ float4 summed(const pkv_dense_group_params &p, int64_t at) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part[PKV_DENSE_GROUP_RANKS];
#pragma unroll
  for (int r = 0; r < PKV_DENSE_GROUP_RANKS; ++r)
    if (r < p.ranks) part[r] = __ldcg((const float4 *)(p.deltas[r] + at));
#pragma unroll
  for (int r = 0; r < PKV_DENSE_GROUP_RANKS; ++r)
    if (r < p.ranks) sum = r == 0 ? part[0] : plus(sum, part[r]);
  return sum;
}

static __device__ __forceinline__ void norm_row(const pkv_dense_group_params &g, int64_t row,
                                                float *shared) {
  const pkv_dense_norm_params &p = g.norm;
  float4 x[QUADS], d[QUADS];
  float sum = 0.0f;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      d[q] = summed(g, row * p.n + column(q));
      x[q] = quad_at(p.x + row * p.n, column(q));
      if (p.bias) x[q] = plus(x[q], quad_at(p.bias, column(q)));
      sum += squares(d[q]);
    }
  const float by = p.delta_weight ? norm_scale(sum, p, shared) : 1.0f;
  sum = 0.0f;
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
    if (column(q) < p.n) {
      x[q] =
          plus(x[q], p.delta_weight ? times(d[q], quad_at(p.delta_weight, column(q)), by) : d[q]);
      *(float4 *)(p.x + row * p.n + column(q)) = x[q];
      sum += squares(x[q]);
    }
  if (!p.weight) return;
  write_normed(p, row, x, norm_scale(sum, p, shared));
}

static __global__ void __launch_bounds__(1024)
    dense_group_norm(const __grid_constant__ pkv_dense_group_params p) {
  __shared__ float shared[DENSE_MOST_WARPS];
  dense_release();
  dense_wait();
  meet(p);
  for (int64_t row = blockIdx.x; row < p.norm.m; row += gridDim.x)
    norm_row(p, row, shared);
}

static __global__ void __launch_bounds__(32)
    dense_meet(const __grid_constant__ pkv_dense_group_params p) {
  meet(p);
}

extern "C" cudaError_t pkv_dense_launch_meet(const pkv_dense_group_params *p, cudaStream_t stream) {
  pkv_dense_group_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_meet, dim3(1), 32, 0, false, arguments, stream);
}

extern "C" cudaError_t pkv_dense_launch_group_norm(const pkv_dense_group_params *p, int32_t ctas,
                                                   int32_t dependent, cudaStream_t stream) {
  const unsigned grid = (unsigned)(p->norm.m < ctas ? p->norm.m : ctas);
  pkv_dense_group_params copy = *p;
  void *arguments[] = {&copy};
  if (p->norm.m == 0) return cudaSuccess;
  return pkv_cuda_launch_kernel((const void *)dense_group_norm, dim3(grid), quad_threads(p->norm.n),
                                0, dependent != 0, arguments, stream);
}
