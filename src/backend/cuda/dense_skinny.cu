/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of 5 to 64 rows with 16-bit weights: memory's speed with tensor cores.
 *
 * A CTA takes 32 rows of w (of a gated product 16 of gate and 16 of up), its 8 warps steps of 32
 * elements of k in turn. m16n8k16 with w on the side of 16: lane 4 g + q reads the 16 bytes of
 * elements 8 q .. 8 q + 7 of rows g, g + 8, g + 16, g + 24, and of x rows g, g + 8, ... That is not
 * the order in which the instruction numbers k, but the same one on both sides, and a sum does not
 * care: nothing passes through shared memory but the warps' sums at the end, which are added in
 * the order of the warps. AHEAD steps of w are on their way, the first of them before the wait for
 * the kernel ahead, which never writes weights. 34 KiB of shared memory at 64 rows.
 */
#include "backend/cuda/dense_common.cuh"

#define WARPS  8
#define A_CTA  32 /* rows of w */
#define STEP   32 /* elements of k */
#define PADDED (A_CTA + 1)
#define HALVES (WARPS / 2)

template <int TILES> struct steps_ahead { static const int count = TILES == 4 ? 2 : 3; };

static __device__ __forceinline__ uint4 read_once(const uint16_t *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

template <typename T>
static __device__ __forceinline__ void multiply(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<__half>(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float c[4], uint32_t a0, uint32_t a1,
                                                        uint32_t a2, uint32_t a3, uint32_t b0,
                                                        uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 16 rows of w against 8 of x, 32 elements: two instructions. */
template <typename T>
static __device__ __forceinline__ void multiply_step(float c[4], const uint4 &top, const uint4 &low,
                                                     const uint4 &x) {
  multiply<T>(c, top.x, low.x, top.y, low.y, x.x, x.y);
  multiply<T>(c, top.z, low.z, top.w, low.w, x.z, x.w);
}

/* Sums of the warps into part[0 .. 3], in pairs: warp i and i + 4. */
template <int TILES>
static __device__ __forceinline__ void gather(float (*part)[8 * TILES * PADDED],
                                              const float acc[2][TILES][4], int warp, int lane) {
  const int g = lane / 4, q = lane % 4;
  for (int half = 1; half >= 0; --half) {
    if (warp / HALVES == half) {
      float *to = part[warp % HALVES];
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = (8 * t + 2 * q + i % 2) * PADDED + 16 * s + g + 8 * (i / 2);
            to[at] = half ? acc[s][t][i] : acc[s][t][i] + to[at];
          }
    }
    __syncthreads();
  }
}

template <int TILES>
static __device__ __forceinline__ float sum_of(const float (*part)[8 * TILES * PADDED], int at) {
  return (part[0][at] + part[1][at]) + (part[2][at] + part[3][at]);
}

/* Element `column` of row `row` of y. */
static __device__ __forceinline__ void put(const pkv_dense_matmul_params &p, int64_t row,
                                           int64_t column, float y) {
  const int64_t at = row * p.y_stride + column;
  if (p.y_f32) {
    float *to = (float *)p.y + at;
    *to = p.accumulate ? *to + y : y;
  } else if (p.act == PKV_DTYPE_F16) {
    ((__half *)p.y)[at] = __float2half_rn(y);
  } else {
    ((__nv_bfloat16 *)p.y)[at] = __float2bfloat16_rn(y);
  }
}

template <typename T, int TILES>
static __global__ void __launch_bounds__(32 * WARPS, TILES > 4 ? 1 : 2)
    dense_skinny(const __grid_constant__ pkv_dense_matmul_params p) {
  constexpr int AHEAD = steps_ahead<TILES>::count;
  __shared__ float part[HALVES][8 * TILES * PADDED];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4;
  const bool gated = p.gate != PKV_DENSE_NO_GATE;
  const int64_t k = p.w.k, tile = blockIdx.x;
  const int64_t top = gated ? tile * 16 : tile * A_CTA;
  const int64_t low = gated ? p.w.n / 2 + tile * 16 : tile * A_CTA + 16;
  const uint16_t *const w = (const uint16_t *)p.w.data + 8 * (lane % 4);
  const uint16_t *const rows[4] = {w + (top + g) * k, w + (top + g + 8) * k, w + (low + g) * k,
                                   w + (low + g + 8) * k};
  const int steps = (int)(k / STEP);
  dense_release();
  uint4 ahead[AHEAD][4];
#pragma unroll
  for (int u = 0; u < AHEAD; ++u)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (warp + WARPS * u < steps)
        ahead[u][i] = read_once(rows[i] + (int64_t)(warp + WARPS * u) * STEP);
  dense_wait();

  const uint16_t *x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) /* rows behind the last one are read as it, and not used */
    x[t] = (const uint16_t *)p.x + (int64_t)min(8 * t + g, p.m - 1) * p.x_stride + 8 * (lane % 4);
  float acc[2][TILES][4] = {};
  for (int base = warp; base < steps; base += WARPS * AHEAD) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const int step = base + WARPS * u, next = step + WARPS * AHEAD;
      if (step >= steps) break;
      uint4 now[4], of_x[TILES];
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        of_x[t] = *(const uint4 *)(x[t] + (int64_t)step * STEP);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        now[i] = ahead[u][i];
        if (next < steps) ahead[u][i] = read_once(rows[i] + (int64_t)next * STEP);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        multiply_step<T>(acc[0][t], now[0], now[1], of_x[t]);
        multiply_step<T>(acc[1][t], now[2], now[3], of_x[t]);
      }
    }
  }
  gather<TILES>(part, acc, warp, lane);
  const int columns = gated ? A_CTA / 2 : A_CTA;
  for (int i = (int)threadIdx.x; i < columns * p.m; i += 32 * WARPS) {
    const int row = i / columns, column = i % columns, at = row * PADDED + column;
    const float y = sum_of<TILES>(part, at);
    put(p, row, tile * columns + column,
        gated ? dense_gated(y, sum_of<TILES>(part, at + 16), p.gate) : y);
  }
}

extern "C" int pkv_dense_skinny_takes(const pkv_dense_matmul_params *p) {
  const pkv_wtype act = p->act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
  return p->m >= 1 && p->m <= PKV_DENSE_SKINNY_ROWS && p->w.type == act && p->w.n % A_CTA == 0 &&
         p->w.k % STEP == 0 && p->w.k / STEP < INT32_MAX && p->w.row_bytes == 2 * p->w.k &&
         p->x_stride % 8 == 0 && (uintptr_t)p->w.data % 16 == 0 && (uintptr_t)p->x % 16 == 0;
}

extern "C" cudaError_t pkv_dense_launch_skinny(const pkv_dense_matmul_params *p, int32_t dependent,
                                               cudaStream_t stream) {
  static const void *const kernels[2][3] = {
      {(const void *)dense_skinny<__half, 2>, (const void *)dense_skinny<__half, 4>,
       (const void *)dense_skinny<__half, 8>},
      {(const void *)dense_skinny<__nv_bfloat16, 2>, (const void *)dense_skinny<__nv_bfloat16, 4>,
       (const void *)dense_skinny<__nv_bfloat16, 8>}};
  const void *kernel = kernels[p->act == PKV_DTYPE_BF16][p->m <= 16 ? 0 : p->m <= 32 ? 1 : 2];
  pkv_dense_matmul_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel(kernel, dim3((unsigned)(p->w.n / A_CTA)), 32 * WARPS, 0,
                                dependent != 0, arguments, stream);
}
