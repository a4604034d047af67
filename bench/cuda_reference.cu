/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA benchmark measures against, for f16 pages of 16 tokens in HND layout: the null
 * read (the
 * same pages through the same block table, reduced to a checksum) and the answer in double.
 */
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda_reference.h"

#define PAGE 16

/* K and V from a counter: normal numbers, the same on every machine. */
static __global__ void fill(__half *x, int64_t count, uint64_t seed) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = (uint64_t)i * 0x9E3779B97F4A7C15ull + seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float u = (float)(z & 0xffffff) / 16777216.0f + 1e-7f,
                v = (float)((z >> 24) & 0xffffff) / 16777216.0f;
    x[i] = __float2half(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

static __device__ __forceinline__ uint4 load(const uint4 *p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

/* Each warp reads an equal run of (page, head) boxes; first_page[rows + 1] are prefix sums. */
static __global__ void __launch_bounds__(256)
    null_read(const uint4 *k, const uint4 *v, const int32_t *table, int64_t stride,
              const int32_t *first_page, int rows, int heads, int vectors, uint32_t *sink) {
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
  const int64_t warps = gridDim.x * blockDim.x / 32, boxes = (int64_t)first_page[rows] * heads;
  const int64_t from = boxes * warp / warps, to = boxes * (warp + 1) / warps;
  int low = 0, high = rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (first_page[middle + 1] <= from / heads)
      low = middle + 1;
    else
      high = middle;
  }
  uint32_t sum = 0;
  int row = low;
  for (int64_t box = from; box < to; ++box) {
    const int page = (int)(box / heads), head = (int)(box % heads);
    while (first_page[row + 1] <= page)
      ++row;
    const int64_t at =
        ((int64_t)table[row * stride + page - first_page[row]] * heads + head) * vectors;
#pragma unroll 8
    for (int i = lane; i < vectors; i += 32) {
      uint4 r = load(k + at + i);
      sum ^= r.x ^ r.y ^ r.z ^ r.w;
      r = load(v + at + i);
      sum ^= r.x ^ r.y ^ r.z ^ r.w;
    }
  }
  if (sum == 0x12345677u) *sink = sum;
}

/* One block a (row, query head); three passes over the logits, all in double. */
static __global__ void __launch_bounds__(256)
    answer(double *out, const __half *q, const __half *k, const __half *v, const int32_t *table,
           int64_t stride, const int32_t *seq_len, int heads, int group, int d) {
  __shared__ double shared[256], acc[256];
  const int row = blockIdx.x, head = blockIdx.y / group, len = seq_len[row], tid = threadIdx.x;
  const __half *mine = q + ((int64_t)row * heads * group + blockIdx.y) * d;
  auto at = [&](const __half *base, int t) {
    return base + (((int64_t)table[row * stride + t / PAGE] * heads + head) * PAGE + t % PAGE) * d;
  };
  auto logit = [&](int t) {
    double s = 0;
    for (int i = 0; i < d; ++i)
      s += (double)__half2float(mine[i]) * (double)__half2float(at(k, t)[i]);
    return s / sqrt((double)d);
  };
  double top = -CUDART_INF;
  for (int t = tid; t < len; t += 256)
    top = fmax(top, logit(t));
  shared[tid] = top;
  acc[tid] = 0;
  __syncthreads();
  for (int s = 128; s; s /= 2) {
    if (tid < s) shared[tid] = fmax(shared[tid], shared[tid + s]);
    __syncthreads();
  }
  top = shared[0];
  double sum = 0;
  for (int t0 = 0; t0 < len; t0 += 256) {
    __syncthreads();
    const double p = t0 + tid < len ? exp(logit(t0 + tid) - top) : 0.0;
    shared[tid] = p;
    sum += p;
    __syncthreads();
    if (tid < d)
      for (int j = 0; j < 256 && t0 + j < len; ++j)
        acc[tid] += shared[j] * (double)__half2float(at(v, t0 + j)[tid]);
  }
  __syncthreads();
  shared[tid] = sum;
  __syncthreads();
  for (int s = 128; s; s /= 2) {
    if (tid < s) shared[tid] += shared[tid + s];
    __syncthreads();
  }
  if (tid < d)
    out[((int64_t)row * heads * group + blockIdx.y) * d + tid] = len ? acc[tid] / shared[0] : 0.0;
}

extern "C" cudaError_t bench_fill(void *x, int64_t count, uint64_t seed) {
  fill<<<2048, 256>>>((__half *)x, count, seed);
  return cudaDeviceSynchronize();
}

extern "C" cudaError_t bench_null_read(const bench_case *c, const void *k, const void *v, int sms,
                                       cudaStream_t stream) {
  null_read<<<sms * 8, 256, 0, stream>>>((const uint4 *)k, (const uint4 *)v, c->table, c->stride,
                                         c->first_page, c->rows, c->heads, PAGE * c->head_dim / 8,
                                         c->sink);
  return cudaGetLastError();
}

extern "C" cudaError_t bench_answer(const bench_case *c, double *out, const void *q, const void *k,
                                    const void *v) {
  answer<<<dim3(c->rows, c->heads * c->group), 256>>>(out, (const __half *)q, (const __half *)k,
                                                      (const __half *)v, c->table, c->stride,
                                                      c->seq_len, c->heads, c->group, c->head_dim);
  return cudaDeviceSynchronize();
}
