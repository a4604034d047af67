/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The small kernels over rows: embeddings, gates, random weights, the likeliest token.
 *
 *   embed   a CTA a row; reads and writes each element once
 *   gate    8 elements a thread, 16 bytes an access; 3 x 2 bytes an element
 *   random  8 elements a thread
 *   argmax  a CTA a row of logits; 4 bytes an element
 */
#include "backend/cuda/dense_common.cuh"

#define THREADS   256
#define SEARCHERS 1024
#define RUN       8

static __device__ __forceinline__ float element(const void *row, int64_t at, pkv_wtype type) {
  if (type == PKV_WTYPE_F32) return ((const float *)row)[at];
  if (type == PKV_WTYPE_F16) return __half2float(((const __half *)row)[at]);
  return __bfloat162float(((const __nv_bfloat16 *)row)[at]);
}

static __global__ void __launch_bounds__(THREADS)
    dense_embed(const __grid_constant__ pkv_dense_embed_params p) {
  dense_release();
  dense_wait();
  const int64_t row = blockIdx.x, id = p.ids[row], k = p.w.k;
  const bool known = id >= 0 && id < p.w.n;
  const unsigned char *from = (const unsigned char *)p.w.data + (known ? id : 0) * p.w.row_bytes;
  for (int64_t i = threadIdx.x; i < k; i += THREADS)
    p.y[row * k + i] = known ? element(from, i, p.w.type) * p.scale : 0.0f;
}

extern "C" cudaError_t pkv_dense_launch_embed(const pkv_dense_embed_params *p, int32_t dependent,
                                              cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  pkv_dense_embed_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_embed, dim3((unsigned)p->m), THREADS, 0,
                                dependent != 0, arguments, stream);
}

static __global__ void __launch_bounds__(THREADS)
    dense_gate(const __grid_constant__ pkv_dense_matmul_params p) {
  dense_release();
  dense_wait();
  const int64_t half = p.w.n / 2, at = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * RUN;
  if (at >= half) return;
  const uint16_t *gate = (const uint16_t *)p.gate_scratch + (int64_t)blockIdx.x * p.w.n + at;
  uint16_t *to = (uint16_t *)p.y + (int64_t)blockIdx.x * p.y_stride + at;
  const uint4 g = *(const uint4 *)gate, u = *(const uint4 *)(gate + half);
  uint4 out;
#pragma unroll
  for (int i = 0; i < RUN; i += 2) {
    const float2 a = dense_load2(&g, i, p.act), b = dense_load2(&u, i, p.act);
    dense_store2(&out, i, make_float2(dense_gated(a.x, b.x, p.gate), dense_gated(a.y, b.y, p.gate)),
                 p.act);
  }
  *(uint4 *)to = out;
}

extern "C" cudaError_t pkv_dense_launch_gate(const pkv_dense_matmul_params *p, int32_t dependent,
                                             cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  const int64_t runs = (p->w.n / 2 + RUN - 1) / RUN;
  pkv_dense_matmul_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_gate,
                                dim3((unsigned)p->m, (unsigned)((runs + THREADS - 1) / THREADS)),
                                THREADS, 0, dependent != 0, arguments, stream);
}

static __global__ void __launch_bounds__(THREADS)
    dense_random(const __grid_constant__ pkv_dense_random_params p) {
  const int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * RUN, count = p.n * p.k;
  for (int64_t i = first; i < first + RUN && i < count; ++i) {
    const int64_t number = p.first + i / p.k * p.stride + i % p.k;
    const float x = pkv_random_weight(p.seed, (uint64_t)number, p.deviation);
    if (p.act == PKV_DTYPE_F16)
      ((__half *)p.data)[i] = __float2half_rn(x);
    else
      ((__nv_bfloat16 *)p.data)[i] = __float2bfloat16_rn(x);
  }
}

extern "C" cudaError_t pkv_dense_launch_random(const pkv_dense_random_params *p,
                                               cudaStream_t stream) {
  const int64_t count = p->n * p->k, a_cta = THREADS * RUN;
  if (count == 0) return cudaSuccess;
  dense_random<<<(unsigned)((count + a_cta - 1) / a_cta), THREADS, 0, stream>>>(*p);
  return cudaGetLastError();
}

/* The better of two candidates: the larger logit, of equal ones the lower id. */
static __device__ __forceinline__ void keep_better(float &best, int32_t &id, float other,
                                                   int32_t other_id) {
  if (other > best || (other == best && other_id < id)) best = other, id = other_id;
}

static __global__ void __launch_bounds__(SEARCHERS)
    dense_argmax(const __grid_constant__ pkv_dense_sample_params p) {
  __shared__ float bests[SEARCHERS / 32];
  __shared__ int32_t ids[SEARCHERS / 32];
  dense_release();
  dense_wait();
  const float *row = p.logits + (int64_t)blockIdx.x * p.stride;
  float best = -INFINITY;
  int32_t id = INT32_MAX;
  bool finite = true;
  for (int32_t i = (int32_t)threadIdx.x; i < p.vocab; i += SEARCHERS) {
    finite = finite && isfinite(row[i]);
    keep_better(best, id, row[i], i);
  }
  const bool all = __syncthreads_and(finite);
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    keep_better(best, id, __shfl_xor_sync(0xffffffffu, best, i),
                __shfl_xor_sync(0xffffffffu, id, i));
  const int warp = (int)threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) bests[warp] = best, ids[warp] = id;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < SEARCHERS / 32; ++i)
    keep_better(best, id, bests[i], ids[i]);
  p.ids[blockIdx.x] = all ? id : -1;
}

extern "C" cudaError_t pkv_dense_launch_argmax(const pkv_dense_sample_params *p, int32_t dependent,
                                               cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  pkv_dense_sample_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_argmax, dim3((unsigned)p->m), SEARCHERS, 0,
                                dependent != 0, arguments, stream);
}
