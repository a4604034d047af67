/* SPDX-License-Identifier: Apache-2.0 */
/* The launches of route shared for one K/V type; the shared_*.cu files are nothing but this. */
#ifndef PKV_CUDA_SHARED_LAUNCH_CUH
#define PKV_CUDA_SHARED_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/node.cuh"

template <typename K, int HD> static cudaError_t pkv_shared_prepare(int32_t stages) {
  typedef typename K::template of<HD> KV;
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute((const void *)pkv_cuda_node<typename KV::mma, HD, KV::bytes>,
                                       limit, pkv_node_config<HD, KV::bytes>::shared_bytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute((const void *)pkv_cuda_private<K, HD>, limit,
                             pkv_decode_shared_bytes<K, HD>(stages));
  return e;
}

/* Nodes, beside them the private parts, then the paths. */
template <typename K, int HD>
static cudaError_t pkv_shared_launch(const pkv_cuda_shared_params *s,
                                     const pkv_cuda_tensor_maps *maps, int32_t dependent,
                                     cudaStream_t stream) {
  typedef typename K::template of<HD> KV;
  typedef pkv_node_config<HD, KV::bytes> C;
  const pkv_cuda_decode_params *p = &s->base;
  const unsigned tiles = (unsigned)((p->q_len * p->group + 7) / 8);
  if (p->rows == 0) return cudaSuccess;
  void *arguments[] = {(void *)s, (void *)maps};
  cudaError_t e = pkv_cuda_launch_kernel(
      (const void *)pkv_cuda_node<typename KV::mma, HD, KV::bytes>, dim3((unsigned)s->parts),
      C::threads, (size_t)C::shared_bytes, dependent, arguments, stream);
  if (e == cudaSuccess)
    e = pkv_cuda_launch_kernel(
        (const void *)pkv_cuda_private<K, HD>, dim3(2 * (unsigned)s->parts, tiles), PKV_THREADS,
        (size_t)pkv_decode_shared_bytes<K, HD>(p->stages), true, arguments, stream);
  if (e == cudaSuccess)
    e = pkv_cuda_launch_kernel(pkv_cuda_paths_kernel(HD),
                               dim3((unsigned)p->rows, (unsigned)p->cache.kv_heads), PKV_THREADS, 0,
                               true, arguments, stream);
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
