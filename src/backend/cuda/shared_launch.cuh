/* SPDX-License-Identifier: Apache-2.0 */
/* The launches of route shared for one K/V type; the shared_*.cu files are nothing but this. */
#ifndef PKV_CUDA_SHARED_LAUNCH_CUH
#define PKV_CUDA_SHARED_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/node.cuh"

template <typename K, int HD> static int32_t pkv_private_shared_bytes(int32_t stages) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  return PKV_WARPS * stages * C::stage_bytes + pkv_fold<HD>::bytes;
}

template <typename K, int HD> static cudaError_t pkv_shared_prepare(int32_t stages) {
  typedef typename K::template of<HD>::mma MMA;
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute((const void *)pkv_cuda_node<MMA, HD>, limit,
                                       pkv_node_config<HD>::shared_bytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute((const void *)pkv_cuda_private<K, HD>, limit,
                             pkv_private_shared_bytes<K, HD>(stages));
  return e;
}

static cudaError_t pkv_shared_one(const void *kernel, dim3 grid, int threads, int bytes,
                                  int dependent, const pkv_cuda_shared_params *s,
                                  cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  void *arguments[] = {(void *)s};
  config.gridDim = grid;
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = (size_t)bytes;
  config.stream = stream;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

/* Nodes, beside them the private parts, then the paths. */
template <typename K, int HD>
static cudaError_t pkv_shared_launch(const pkv_cuda_shared_params *s, int32_t dependent,
                                     cudaStream_t stream) {
  typedef typename K::template of<HD>::mma MMA;
  const pkv_cuda_decode_params *p = &s->base;
  const unsigned tiles = (unsigned)((p->q_len * p->group + 7) / 8);
  if (p->rows == 0) return cudaSuccess;
  cudaError_t e =
      pkv_shared_one((const void *)pkv_cuda_node<MMA, HD>, dim3((unsigned)s->parts),
                     PKV_NODE_THREADS, pkv_node_config<HD>::shared_bytes, dependent, s, stream);
  if (e == cudaSuccess)
    e = pkv_shared_one((const void *)pkv_cuda_private<K, HD>, dim3(2 * (unsigned)s->parts, tiles),
                       PKV_THREADS, pkv_private_shared_bytes<K, HD>(p->stages), 1, s, stream);
  if (e == cudaSuccess)
    e = pkv_shared_one(pkv_cuda_paths_kernel(HD),
                       dim3((unsigned)p->rows, (unsigned)p->cache.kv_heads), PKV_THREADS, 0, 1, s,
                       stream);
  return e;
}

#define PKV_CUDA_SHARED_SET(name, kv)                                                              \
  extern "C" const pkv_cuda_shared_ops name[2];                                                    \
  const pkv_cuda_shared_ops name[2] = {{pkv_shared_launch<kv, 64>, pkv_shared_prepare<kv, 64>},    \
                                       {pkv_shared_launch<kv, 128>, pkv_shared_prepare<kv, 128>}};

#endif
