/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How K and V of each element type get from shared memory into the operands of m16n8k16, which
 * query elements stand opposite, and which head dimensions a lane then holds. K and V^T are the
 * M side (tokens, head dimensions), query rows the N side: 8 of them cost one instruction.
 *
 * 16-bit types use the plain layout. e4m3 pages stay 8 bits wide in shared memory: a 32-bit
 * register
 * of an 8x8 matrix load holds four neighbouring elements, so the k index of the first product and
 * the
 * rows of the second are permuted instead of the data; the conversion to f16 is exact.
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
  /* The 16 tokens of the slice against 16 elements, step k16. */
  static __device__ __forceinline__ void load_k(uint32_t a[4], uint32_t slice, int step, int lane) {
    const int t = lane & 15, half = lane >> 4;
    pkv_ldmatrix(a,
                 slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, 2 * step + half)) * 16));
  }
  /* 16 head dimensions against the 16 tokens. */
  static __device__ __forceinline__ void load_v(uint32_t a[4], uint32_t slice, int block,
                                                int lane) {
    const int t = (lane & 7) + ((lane & 16) >> 1), half = (lane >> 3) & 1;
    pkv_ldmatrix_trans(
        a, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, 2 * block + half)) * 16));
  }
  /* Head dimension of the lane's row in half `half` of a block. */
  static __device__ __forceinline__ int dim_of(int block, int half, int lane) {
    return block * 16 + half * 8 + lane / 4;
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
  static __device__ __forceinline__ void load_k(uint32_t a[4], uint32_t slice, int step, int lane) {
    /* one load gives tokens 0-15 of 16 elements in two registers: matrices tokens 0-7, 8-15 */
    const int t = lane & 15;
    uint32_t r[2];
    pkv_ldmatrix2(r, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, step)) * 16));
    pkv_e4m3_to_half(a[0], a[2], r[0]);
    pkv_e4m3_to_half(a[1], a[3], r[1]);
  }
  static __device__ __forceinline__ void load_v(uint32_t a[4], uint32_t slice, int block,
                                                int lane) {
    const int t = lane & 15;
    uint32_t r[2], lo[2], hi[2];
    pkv_ldmatrix2_trans(r, slice + (uint32_t)((t * chunks + pkv_swizzle<chunks>(t, block)) * 16));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pkv_e4m3_to_half(lo[i], hi[i], r[i]); /* (t, d), (t, d + 1); t + 1 */
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = __byte_perm(lo[i], hi[i], 0x5410);     /* even dimensions of tokens t, t + 1 */
      a[2 * i + 1] = __byte_perm(lo[i], hi[i], 0x7632); /* odd */
    }
  }
  static __device__ __forceinline__ int dim_of(int block, int half, int lane) {
    return block * 16 + 2 * (lane / 4) + half;
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
