/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of one to four rows with 16-bit weights, at the speed of reading them.
 *
 * A warp takes two rows of w (of a gated product gate i and up i), a CTA eight warps. Lane l reads
 * the 16 bytes of elements 256 c + 8 l of both rows, eight chunks c ahead: 256 bytes a lane and
 * 64 KiB a CTA on their way. The first eight chunks are asked for before the wait for the kernel
 * ahead, which never writes weights: memory works while that kernel ends. No shared memory; x comes
 * through the first-level cache. Bytes: 2 n k, and x once a multiprocessor.
 */
#include "backend/cuda/dense_common.cuh"

#define WARPS  8
#define AHEAD  8
#define CHUNK  256 /* elements that a warp reads of a row at once */
#define A_LANE 8

struct two_rows {
  const uint16_t *row[2]; /* at this lane's elements */
};

static __device__ __forceinline__ uint4 read_once(const uint16_t *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <typename T>
static __device__ __forceinline__ float dot8(const uint4 &w, const uint4 &x, float sum) {
#pragma unroll
  for (int i = 0; i < A_LANE; i += 2) {
    const float2 a = dense_pair<T>::load((const T *)&w + i);
    const float2 b = dense_pair<T>::load((const T *)&x + i);
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
  }
  return sum;
}

/* One row of y: both sums of the pair. */
static __device__ __forceinline__ void put(const pkv_dense_matmul_params &p, int64_t pair,
                                           int64_t row, float first, float second) {
  if (p.gate != PKV_DENSE_NO_GATE) {
    const float y = dense_gated(first, second, p.gate);
    const int64_t at = row * p.y_stride + pair;
    if (p.act == PKV_DTYPE_F16)
      ((__half *)p.y)[at] = __float2half_rn(y);
    else
      ((__nv_bfloat16 *)p.y)[at] = __float2bfloat16_rn(y);
    return;
  }
  const int64_t at = row * p.y_stride + 2 * pair;
  if (!p.y_f32) {
    dense_store2(p.y, at, make_float2(first, second), p.act);
    return;
  }
  float2 *to = (float2 *)((float *)p.y + at);
  const float2 old = p.accumulate ? *to : make_float2(0.0f, 0.0f);
  *to = make_float2(old.x + first, old.y + second);
}

template <typename T, int M>
static __global__ void __launch_bounds__(32 * WARPS, 2)
    dense_vector(const __grid_constant__ pkv_dense_matmul_params p) {
  const int lane = (int)threadIdx.x % 32;
  const int64_t pair = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, k = p.w.k;
  const bool gated = p.gate != PKV_DENSE_NO_GATE;
  dense_release();
  if (pair >= p.w.n / 2) { /* an early end would count as the kernel's end before the wait */
    dense_wait();
    return;
  }
  const uint16_t *first = (const uint16_t *)p.w.data + (gated ? pair : 2 * pair) * k;
  const uint16_t *second = first + (gated ? p.w.n / 2 * k : k);
  uint4 a[AHEAD], b[AHEAD];
#pragma unroll
  for (int c = 0; c < AHEAD; ++c) {
    const int64_t at = c * CHUNK + lane * A_LANE;
    a[c] = at < k ? read_once(first + at) : make_uint4(0, 0, 0, 0);
    b[c] = at < k ? read_once(second + at) : make_uint4(0, 0, 0, 0);
  }
  dense_wait();
  float sum[M][2] = {};
  for (int64_t base = lane * A_LANE; base < k; base += AHEAD * CHUNK) {
#pragma unroll
    for (int c = 0; c < AHEAD; ++c) {
      const int64_t at = base + c * CHUNK, next = at + AHEAD * CHUNK;
      if (at < k) {
#pragma unroll
        for (int r = 0; r < M; ++r) {
          if (r >= p.m) break;
          const uint4 x = *(const uint4 *)((const uint16_t *)p.x + r * p.x_stride + at);
          sum[r][0] = dot8<T>(a[c], x, sum[r][0]);
          sum[r][1] = dot8<T>(b[c], x, sum[r][1]);
        }
      }
      if (next < k) {
        a[c] = read_once(first + next);
        b[c] = read_once(second + next);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const float one = dense_warp_sum(sum[r][0]), two = dense_warp_sum(sum[r][1]);
    if (lane == r && r < p.m) put(p, pair, r, one, two);
  }
}

extern "C" int pkv_dense_vector_takes(const pkv_dense_matmul_params *p) {
  const pkv_wtype act = p->act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
  return p->m >= 1 && p->m <= PKV_DENSE_VECTOR_ROWS && p->w.type == act && p->w.n % 2 == 0 &&
         p->w.k % A_LANE == 0 && p->w.row_bytes == 2 * p->w.k && p->x_stride % A_LANE == 0 &&
         p->y_stride % 2 == 0 && (uintptr_t)p->w.data % 16 == 0 && (uintptr_t)p->x % 16 == 0 &&
         (uintptr_t)p->y % 8 == 0;
}

extern "C" cudaError_t pkv_dense_launch_vector(const pkv_dense_matmul_params *p, int32_t dependent,
                                               cudaStream_t stream) {
  static const void *const kernels[2][2] = {
      {(const void *)dense_vector<__half, 1>, (const void *)dense_vector<__half, 4>},
      {(const void *)dense_vector<__nv_bfloat16, 1>, (const void *)dense_vector<__nv_bfloat16, 4>}};
  const void *kernel = kernels[p->act == PKV_DTYPE_BF16][p->m > 1];
  pkv_dense_matmul_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel(kernel, dim3((unsigned)((p->w.n / 2 + WARPS - 1) / WARPS)),
                                32 * WARPS, 0, dependent != 0, arguments, stream);
}
