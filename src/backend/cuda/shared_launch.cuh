/* SPDX-License-Identifier: Apache-2.0 */
/* The launches of route shared for one K/V type; the shared_*.cu files are nothing but this. */
#ifndef PKV_CUDA_SHARED_LAUNCH_CUH
#define PKV_CUDA_SHARED_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/node.cuh"

template <typename K, int HD> static cudaError_t pkv_shared_prepare(int32_t stages) {
  typedef typename K::template of<HD>::mma MMA;
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute((const void *)pkv_cuda_node<MMA, HD>, limit,
                                       pkv_node_config<HD>::shared_bytes);
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
  typedef typename K::template of<HD>::mma MMA;
  const pkv_cuda_decode_params *p = &s->base;
  const unsigned tiles = (unsigned)((p->q_len * p->group + 7) / 8);
  if (p->rows == 0) return cudaSuccess;
  void *arguments[] = {(void *)s, (void *)maps};
  cudaError_t e = pkv_cuda_launch_kernel(
      (const void *)pkv_cuda_node<MMA, HD>, dim3((unsigned)s->parts), pkv_node_config<HD>::threads,
      (size_t)pkv_node_config<HD>::shared_bytes, dependent, arguments, stream);
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

#define PKV_CUDA_SHARED_SET(name, kv)                                                              \
  extern "C" const pkv_cuda_shared_ops name[2];                                                    \
  const pkv_cuda_shared_ops name[2] = {{pkv_shared_launch<kv, 64>, pkv_shared_prepare<kv, 64>},    \
                                       {pkv_shared_launch<kv, 128>, pkv_shared_prepare<kv, 128>}};

#endif
