/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Warpgroup matrix products of sm_90a: 64 rows, K of 16, operands in shared memory under the
 * 128-byte swizzle.
 */
#ifndef PKV_CUDA_WGMMA_CUH
#define PKV_CUDA_WGMMA_CUH

#include "backend/cuda/mma.cuh"

/* PKV_WITHOUT_WGMMA: a build whose nodes' kernel is that of other targets, to test it on sm_90a. */
#if __CUDA_ARCH_FEAT_SM90_ALL && !defined(PKV_WITHOUT_WGMMA)
#define PKV_HAVE_WGMMA 1
#endif

/* A matrix in shared memory of rows of 128 bytes, groups of 8 rows 1 KiB apart. `block`: bytes to
   the next 64 elements along the contiguous direction, where that one is M or N. */
static __device__ __forceinline__ uint64_t pkv_wgmma_matrix(uint32_t at, uint32_t block) {
  return (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(block >> 4) << 16 |
         (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
static __device__ __forceinline__ void pkv_wgmma_fence() {
#ifdef PKV_HAVE_WGMMA
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}
static __device__ __forceinline__ void pkv_wgmma_commit() {
#ifdef PKV_HAVE_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}
template <int N> static __device__ __forceinline__ void pkv_wgmma_wait() {
#ifdef PKV_HAVE_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
#endif
}
/* Makes this thread's writes to shared memory visible to the products. */
static __device__ __forceinline__ void pkv_wgmma_see_writes() {
#ifdef PKV_HAVE_WGMMA
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

/* d[N / 2] (+)= a b^T: rows lane / 4 (+ 8) of the warp's 16, columns 8 j + 2 (lane & 3) (+ 1) in
   d[4 j ..]. ss: both in shared memory, K contiguous, keep = 0 starts from zero. rs: a in
   registers, b with N contiguous. */
#define PKV_WGMMA_SS_128(type)                                                                     \
  static __device__ __forceinline__ void pkv_wgmma_ss_128(float *d, uint64_t a, uint64_t b,        \
                                                          int keep) {                              \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                               \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"                          \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                    \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"          \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"          \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "        \
        "%64, %65, p, 1, 1, 0, 0;\n}\n"                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),      \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),  \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),            \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),            \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),            \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),            \
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),            \
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),            \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),            \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),            \
          "+f"(d[62]), "+f"(d[63])                                                                 \
        : "l"(a), "l"(b), "r"(keep));                                                              \
  }
#define PKV_WGMMA_RS_64(type)                                                                      \
  static __device__ __forceinline__ void pkv_wgmma_rs_64(float *d, const uint32_t *a,              \
                                                         uint64_t b) {                             \
    asm volatile(                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"                           \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                    \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "        \
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                                 \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),      \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),  \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),            \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),            \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
  }
#define PKV_WGMMA_RS_128(type)                                                                     \
  static __device__ __forceinline__ void pkv_wgmma_rs_128(float *d, const uint32_t *a,             \
                                                          uint64_t b) {                            \
    asm volatile(                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"                          \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                    \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"          \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"          \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "        \
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                                 \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),      \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),  \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),            \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),            \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),            \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),            \
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),            \
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),            \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),            \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),            \
          "+f"(d[62]), "+f"(d[63])                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
  }

#ifdef PKV_HAVE_WGMMA
namespace pkv_wgmma_f16 {
PKV_WGMMA_SS_128("f16")
PKV_WGMMA_RS_64("f16")
PKV_WGMMA_RS_128("f16")
} // namespace pkv_wgmma_f16
namespace pkv_wgmma_bf16 {
PKV_WGMMA_SS_128("bf16")
PKV_WGMMA_RS_64("bf16")
PKV_WGMMA_RS_128("bf16")
} // namespace pkv_wgmma_bf16
#endif

#endif
