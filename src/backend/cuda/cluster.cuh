/* SPDX-License-Identifier: Apache-2.0 */
/* Clusters of CTAs (sm_90 and later): who one is, meeting, and reading each other's shared memory.
 */
#ifndef PKV_CUDA_CLUSTER_CUH
#define PKV_CUDA_CLUSTER_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t pkv_cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
#endif
  return rank;
}
/* All threads of the cluster; what they wrote before is seen after. */
static __device__ __forceinline__ void pkv_cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
#endif
}
/* A word of 4 or 8 bytes in the shared memory of CTA `rank`, at the place of this CTA's own. */
template <typename T> static __device__ __forceinline__ T pkv_cluster_word(const T *own, int rank) {
  uint64_t bits = 0;
#if __CUDA_ARCH__ >= 900
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(own);
  if constexpr (sizeof(T) == 8) {
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\n"
                 "ld.shared::cluster.u64 %0, [a];\n}\n"
                 : "=l"(bits)
                 : "r"(at), "r"(rank)
                 : "memory");
    return *reinterpret_cast<const T *>(&bits);
  } else {
    uint32_t low;
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\n"
                 "ld.shared::cluster.u32 %0, [a];\n}\n"
                 : "=r"(low)
                 : "r"(at), "r"(rank)
                 : "memory");
    return *reinterpret_cast<const T *>(&low);
  }
#else
  return *reinterpret_cast<const T *>(&bits);
#endif
}

#endif
