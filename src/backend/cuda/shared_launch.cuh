/* SPDX-License-Identifier: Apache-2.0 */
/* The launches of route shared for one K/V type; the shared_*.cu files are nothing but this. */
#ifndef PKV_CUDA_SHARED_LAUNCH_CUH
#define PKV_CUDA_SHARED_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/node.cuh"

/* Whether the nodes' kernel of a device of that compute capability is the one with wgmma. */
static inline bool pkv_shared_has_wgmma(int32_t major) {
#ifdef PKV_WITHOUT_WGMMA
  (void)major;
  return false;
#else
  return major == 9;
#endif
}

/* What the nodes' kernel needs. */
template <typename K, int HD>
static void pkv_node_needs(unsigned *threads, int32_t *bytes, int32_t major) {
  typedef typename K::template of<HD> KV;
  typedef pkv_node_config<HD, KV::bytes> wide;
  const bool wgmma = pkv_shared_has_wgmma(major);
  *threads = wgmma ? wide::threads : pkv_node_ring<KV>::threads;
  *bytes = wgmma ? wide::shared_bytes : pkv_node_ring<KV>::bytes;
}

template <typename K, int HD>
static cudaError_t pkv_shared_prepare(int32_t *tensors, int32_t stages, int32_t major) {
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  unsigned threads;
  int32_t bytes;
  pkv_node_needs<K, HD>(&threads, &bytes, major);
  *tensors = pkv_shared_has_wgmma(major);
  cudaError_t e = cudaFuncSetAttribute((const void *)pkv_cuda_node<K, HD>, limit, bytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute((const void *)pkv_cuda_private<K, HD>, limit,
                             pkv_decode_shared_bytes<K, HD>(stages));
  return e;
}

/* Nodes, beside them the private parts, then the paths. */
template <typename K, int HD>
static cudaError_t pkv_shared_launch(const pkv_cuda_shared_params *s,
                                     const pkv_cuda_tensor_maps *maps, int32_t major,
                                     int32_t dependent, cudaStream_t stream) {
  const pkv_cuda_decode_params *p = &s->base;
  const unsigned tiles = (unsigned)((p->q_len * p->group + 7) / 8);
  const bool overlaps = major >= 9;
  unsigned threads;
  int32_t bytes;
  if (p->rows == 0) return cudaSuccess;
  pkv_node_needs<K, HD>(&threads, &bytes, major);
  void *arguments[] = {(void *)s, (void *)maps};
  cudaError_t e =
      pkv_cuda_launch_kernel((const void *)pkv_cuda_node<K, HD>, dim3((unsigned)s->parts), threads,
                             (size_t)bytes, overlaps && dependent, arguments, stream);
  if (e == cudaSuccess)
    e = pkv_cuda_launch_kernel(
        (const void *)pkv_cuda_private<K, HD>, dim3(2 * (unsigned)s->parts, tiles), PKV_THREADS,
        (size_t)pkv_decode_shared_bytes<K, HD>(p->stages), overlaps, arguments, stream);
  if (e == cudaSuccess)
    e = pkv_cuda_launch_kernel(pkv_cuda_paths_kernel(HD),
                               dim3((unsigned)p->rows, (unsigned)p->cache.kv_heads), PKV_THREADS, 0,
                               overlaps, arguments, stream);
  return e;
}

#define PKV_CUDA_SHARED_OPS(kv, hd)                                                                \
  { pkv_shared_launch<kv, hd>, pkv_shared_prepare<kv, hd> }
/* Head dimensions 64 and 128. */
#define PKV_CUDA_SHARED_SET(name, kv)                                                              \
  extern "C" const pkv_cuda_shared_ops name[2];                                                    \
  const pkv_cuda_shared_ops name[2] = {PKV_CUDA_SHARED_OPS(kv, 64), PKV_CUDA_SHARED_OPS(kv, 128)};
/* 128 alone. */
#define PKV_CUDA_SHARED_SET_128(name, kv)                                                          \
  extern "C" const pkv_cuda_shared_ops name;                                                       \
  const pkv_cuda_shared_ops name = PKV_CUDA_SHARED_OPS(kv, 128);

#endif
