/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of one set of decode kernels; the decode_*.cu files are nothing but this. */
#ifndef PKV_CUDA_DECODE_LAUNCH_CUH
#define PKV_CUDA_DECODE_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/decode.cuh"

template <typename K, int HD>
static cudaError_t pkv_decode_launch(pkv_cuda_kernel kernel, const pkv_cuda_decode_params *p,
                                     int32_t x, int32_t dependent, cudaStream_t stream) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  if (x == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  const int tiles = (p->q_len * p->group + PKV_CUDA_TILE_ROWS - 1) / PKV_CUDA_TILE_ROWS;
  config.gridDim = dim3((unsigned)x, (unsigned)tiles);
  config.blockDim = dim3(PKV_THREADS);
  config.dynamicSmemBytes = kernel == PKV_CUDA_MERGE ? 0 : C::shared_bytes;
  config.stream = stream;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  switch (kernel) {
  case PKV_CUDA_DECODE:
    return cudaLaunchKernelEx(&config, pkv_cuda_decode<K, HD>, *p);
  case PKV_CUDA_DECODE_INVARIANT:
    return cudaLaunchKernelEx(&config, pkv_cuda_decode_invariant<K, HD>, *p);
  case PKV_CUDA_DECODE_ITEMS:
    return cudaLaunchKernelEx(&config, pkv_cuda_decode_items<K, HD>, *p);
  default:
    return cudaLaunchKernelEx(&config, pkv_cuda_merge<HD>, *p);
  }
}

template <typename K, int HD> static cudaError_t pkv_decode_prepare(int32_t *ctas) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute(pkv_cuda_decode<K, HD>, limit, C::shared_bytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(pkv_cuda_decode_invariant<K, HD>, limit, C::shared_bytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(pkv_cuda_decode_items<K, HD>, limit, C::shared_bytes);
  int count = 0;
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, pkv_cuda_decode<K, HD>, PKV_THREADS,
                                                      C::shared_bytes);
  *ctas = count;
  return e;
}

#define PKV_CUDA_DECODE_SET(name, kv, hd)                                                          \
  extern "C" const pkv_cuda_decode_ops name;                                                       \
  const pkv_cuda_decode_ops name = {pkv_decode_launch<kv, hd>, pkv_decode_prepare<kv, hd>, hd,     \
                                    pkv_fold<hd>::slot_floats};

#endif
