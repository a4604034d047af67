/* SPDX-License-Identifier: Apache-2.0 */
/* The few machine instructions the kernels need, each as one inline function (sm_80 and later). */
#ifndef PKV_CUDA_MMA_CUH
#define PKV_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "pkv/pkv.h"

/* 16 bytes from global to shared memory, past L1. bytes < 16: the rest is zero, 0 reads nothing. */
static __device__ __forceinline__ void pkv_copy16(uint32_t shared, const void *global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
static __device__ __forceinline__ void pkv_copy16(uint32_t shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared), "l"(global));
}
/* Pages are read once: they should not drive plan, table and partial states out of L2. */
static __device__ __forceinline__ uint64_t pkv_read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
static __device__ __forceinline__ void pkv_copy16(uint32_t shared, const void *global, int bytes,
                                                  uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(shared),
               "l"(global), "r"(bytes), "l"(policy));
}
static __device__ __forceinline__ void pkv_copy_commit() {
  asm volatile("cp.async.commit_group;\n" ::);
}
template <int N> static __device__ __forceinline__ void pkv_copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N));
}

static __device__ __forceinline__ void pkv_ldmatrix(uint32_t r[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
static __device__ __forceinline__ void pkv_ldmatrix_trans(uint32_t r[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

static __device__ __forceinline__ void pkv_ldmatrix2(uint32_t r[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared));
}
static __device__ __forceinline__ void pkv_ldmatrix2_trans(uint32_t r[2], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared));
}

/* Barriers in shared memory that copies arrive at (mbarrier). */
static __device__ __forceinline__ void pkv_barrier_init(uint32_t at, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(at), "r"(count) : "memory");
}
static __device__ __forceinline__ void pkv_barrier_arrive(uint32_t at) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}\n" ::"r"(at) : "memory");
}
/* Waits until the phase of that parity is complete. */
static __device__ __forceinline__ void pkv_barrier_wait(uint32_t at, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nPKV_AGAIN%=:\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra PKV_AGAIN%=;\n}\n" ::"r"(at),
      "r"(parity)
      : "memory");
#endif
}

/* After the inits: the copy engine may use the barriers. */
static __device__ __forceinline__ void pkv_barrier_open() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
/* Arrives and expects that many bytes of tensor copies before the phase can end. */
static __device__ __forceinline__ void pkv_barrier_expect(uint32_t at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(at), "r"(bytes)
               : "memory");
#endif
}

/* Four e4m3 values, lowest byte first, to two pairs of f16. Exact. */
static __device__ __forceinline__ void pkv_e4m3_to_half(uint32_t &lo, uint32_t &hi, uint32_t four) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}\n"
      : "=r"(lo), "=r"(hi)
      : "r"(four));
#else
  /* The 7 magnitude bits, moved to f16's place, are the value / 256; NaN becomes 480. */
  const uint32_t a = __byte_perm(four, 0, 0x1404), b = __byte_perm(four, 0, 0x3424);
  const __half2 up = __float2half2_rn(256.0f);
  const uint32_t am = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 1);
  const uint32_t bm = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 1);
  const __half2 ah = __hmul2(*reinterpret_cast<const __half2 *>(&am), up);
  const __half2 bh = __hmul2(*reinterpret_cast<const __half2 *>(&bm), up);
  lo = *reinterpret_cast<const uint32_t *>(&ah);
  hi = *reinterpret_cast<const uint32_t *>(&bh);
#endif
}

/* What differs between the two 16-bit types. */
struct pkv_half_type {
  typedef __half scalar;
  static constexpr int dtype = PKV_DTYPE_F16;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
  }
  static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
struct pkv_bf16_type {
  typedef __nv_bfloat16 scalar;
  static constexpr int dtype = PKV_DTYPE_BF16;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
  }
  static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0,
                                             uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/* Transposes an 8x8 matrix of 16-bit values that lies in the warp's registers. */
static __device__ __forceinline__ uint32_t pkv_transpose8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

/* A read that stays where it is written: its latency is to pass under what follows. */
static __device__ __forceinline__ uint32_t pkv_load_ahead(const void *at) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];\n" : "=r"(x) : "l"(at));
  return x;
}

/* x, as if it came from elsewhere: what is computed of it stays behind this, so that one way of a
   kernel does not hold registers for another. */
static __device__ __forceinline__ int pkv_from_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/* Through L2: what other CTAs have written. */
static __device__ __forceinline__ float4 pkv_load_state(const void *at) {
  return __ldcg((const float4 *)at);
}

/* Words in shared memory through which warps of a CTA meet. */
static __device__ __forceinline__ int pkv_shared_acquire(uint32_t at) {
  int x;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];\n" : "=r"(x) : "r"(at) : "memory");
  return x;
}
static __device__ __forceinline__ void pkv_shared_release(uint32_t at, int x) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
}
static __device__ __forceinline__ int pkv_shared_add(uint32_t at, int x) {
  int before;
  asm volatile("atom.acq_rel.cta.shared.add.s32 %0, [%1], %2;\n"
               : "=r"(before)
               : "r"(at), "r"(x)
               : "memory");
  return before;
}

/* Programmatic dependent launch; nothing before sm_90. */
static __device__ __forceinline__ void pkv_grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
static __device__ __forceinline__ void pkv_grid_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

static __device__ __forceinline__ float pkv_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

#endif
