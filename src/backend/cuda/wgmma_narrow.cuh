/* SPDX-License-Identifier: Apache-2.0 */
/* Warpgroup matrix products with few columns: d[64, N] += a[64, 16] b[N, 16]^T, both operands in
   shared memory, K contiguous (wgmma.cuh). d: as pkv_wgmma_ss_128's. */
#ifndef PKV_CUDA_WGMMA_NARROW_CUH
#define PKV_CUDA_WGMMA_NARROW_CUH

#include "backend/cuda/wgmma.cuh"

#ifdef PKV_HAVE_WGMMA
template <int N> struct pkv_narrow_columns {};

#define PKV_WGMMA_NARROW(type)                                                                     \
  static __device__ __forceinline__ void run(pkv_narrow_columns<8>, float *d, uint64_t a,          \
                                             uint64_t b) {                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {%0, %1, %2, %3}, "  \
                 "%4, %5, p, 1, 1, 0, 0;\n}\n"                                                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "l"(a), "l"(b));                                                                \
  }                                                                                                \
  static __device__ __forceinline__ void run(pkv_narrow_columns<16>, float *d, uint64_t a,         \
                                             uint64_t b) {                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                       \
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}\n"                  \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),         \
                   "+f"(d[6]), "+f"(d[7])                                                          \
                 : "l"(a), "l"(b));                                                                \
  }

template <typename T> struct pkv_narrow;
template <> struct pkv_narrow<pkv_half_type> { PKV_WGMMA_NARROW("f16") };
template <> struct pkv_narrow<pkv_bf16_type> { PKV_WGMMA_NARROW("bf16") };
#endif

#endif
