/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How K and V of each element type get from shared memory into the operands of m16n8k16, which
 * query elements stand opposite, and which output columns a lane then holds.
 *
 * 16-bit types use the plain layout. e4m3 pages stay 8 bits wide in shared memory: a 32-bit
 * register
 * of an 8x8 matrix load holds four neighbouring elements, so the k index of the first product and
 * the
 * columns of the second are permuted instead of the data; the conversion to f16 is exact.
 */
#ifndef PKV_CUDA_KV_TYPES_CUH
#define PKV_CUDA_KV_TYPES_CUH

#include "backend/cuda/mma.cuh"

/* Swizzle of 16-byte chunks so that the 8 rows of a matrix load hit different banks. */
template <int CHUNKS> static __device__ __forceinline__ int pkv_swizzle(int token, int chunk) {
  return CHUNKS >= 8 ? chunk ^ (token & 7) : chunk ^ ((token >> 1) & 3);
}

template <typename MMA, int HD> struct pkv_kv16 {
  typedef MMA mma;
  typedef typename MMA::scalar element;
  static constexpr int bytes = 2;
  static constexpr int chunks = HD / 8;

  /* First element of the pair that lane's fragment word `half` (0: k, 1: k + 8) of step k16
     needs. */
  static __device__ __forceinline__ int q_pair(int step, int half, int lane) {
    return step * 16 + half * 8 + 2 * (lane & 3);
  }
  /* b[0..1]: tokens 0-7, b[2..3]: tokens 8-15 of the slice, for step k16. */
  static __device__ __forceinline__ void load_k(uint32_t b[4], uint32_t slice, int step, int lane) {
    const int t = (lane & 7) + ((lane & 16) >> 1), half = (lane >> 3) & 1;
    pkv_ldmatrix(b,
                 slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, 2 * step + half)) * 16));
  }
  /* b[0..1] and b[2..3]: the two n8 blocks of 16 head dimensions. */
  static __device__ __forceinline__ void load_v(uint32_t b[4], uint32_t slice, int pair, int lane) {
    const int t = lane & 15, half = lane >> 4;
    pkv_ldmatrix_trans(
        b, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, 2 * pair + half)) * 16));
  }
  /* The four values a lane holds of one query row in a pair of n8 blocks, as two runs of two. */
  static __device__ __forceinline__ void store_pair(float *row, int pair, int lane, float a0,
                                                    float a1, float b0, float b1) {
    *(float2 *)(row + pair * 16 + 2 * (lane & 3)) = make_float2(a0, a1);
    *(float2 *)(row + pair * 16 + 8 + 2 * (lane & 3)) = make_float2(b0, b1);
  }
};

/* e4m3 against f16 operands. */
template <int HD> struct pkv_kv8 {
  typedef pkv_half_type mma;
  typedef uint8_t element;
  static constexpr int bytes = 1;
  static constexpr int chunks = HD / 16;

  static __device__ __forceinline__ int q_pair(int step, int half, int lane) {
    return step * 16 + 4 * (lane & 3) + 2 * half;
  }
  static __device__ __forceinline__ void load_k(uint32_t b[4], uint32_t slice, int step, int lane) {
    /* one load gives tokens 0-15 of 16 elements in two registers: matrices tokens 0-7, 8-15 */
    const int t = lane & 15;
    uint32_t r[2];
    pkv_ldmatrix2(r, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, step)) * 16));
    pkv_e4m3_to_half(b[0], b[1], r[0]);
    pkv_e4m3_to_half(b[2], b[3], r[1]);
  }
  static __device__ __forceinline__ void load_v(uint32_t b[4], uint32_t slice, int pair, int lane) {
    const int t = lane & 15;
    uint32_t r[2], lo[2], hi[2];
    pkv_ldmatrix2_trans(r, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, pair)) * 16));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pkv_e4m3_to_half(lo[i], hi[i], r[i]); /* (t, d), (t, d + 1); t + 1 */
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b[i] = __byte_perm(lo[i], hi[i], 0x5410);     /* even dimensions of tokens t, t + 1 */
      b[2 + i] = __byte_perm(lo[i], hi[i], 0x7632); /* odd */
    }
  }
  static __device__ __forceinline__ void store_pair(float *row, int pair, int lane, float a0,
                                                    float a1, float b0, float b1) {
    *(float4 *)(row + pair * 16 + 4 * (lane & 3)) = make_float4(a0, b0, a1, b1);
  }
};

typedef struct pkv_kv_f16 {
  template <int HD> struct of : pkv_kv16<pkv_half_type, HD> {};
} pkv_kv_f16;
typedef struct pkv_kv_bf16 {
  template <int HD> struct of : pkv_kv16<pkv_bf16_type, HD> {};
} pkv_kv_bf16;
typedef struct pkv_kv_e4m3 {
  template <int HD> struct of : pkv_kv8<HD> {};
} pkv_kv_e4m3;

#endif
