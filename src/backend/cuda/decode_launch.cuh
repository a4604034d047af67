/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of one set of decode kernels; the decode_*.cu files are nothing but this. */
#ifndef PKV_CUDA_DECODE_LAUNCH_CUH
#define PKV_CUDA_DECODE_LAUNCH_CUH

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/decode.cuh"
#include "backend/cuda/launch_kernel.cuh"

/* The kernel for a launch, all of which take pkv_cuda_decode_params by value. */
template <typename K, int HD>
static const void *pkv_decode_kernel_of(pkv_cuda_kernel kernel, int32_t tile_rows) {
  switch (kernel) {
  case PKV_CUDA_DECODE:
    return tile_rows > 8 ? (const void *)pkv_cuda_decode<K, HD, 2>
                         : (const void *)pkv_cuda_decode<K, HD, 1>;
  case PKV_CUDA_DECODE_PLAIN:
    return (const void *)pkv_cuda_decode_plain<K, HD>;
  case PKV_CUDA_DECODE_ITEMS:
    return (const void *)pkv_cuda_decode_items<K, HD>;
  default:
    return pkv_cuda_merge_kernel(HD);
  }
}

template <typename K, int HD>
static cudaError_t pkv_decode_launch(pkv_cuda_kernel kernel, const pkv_cuda_decode_params *p,
                                     int32_t x, int32_t dependent, cudaStream_t stream) {
  if (x == 0) return cudaSuccess;
  void *arguments[] = {(void *)p};
  const int tiles = (p->q_len * p->group + p->tile_rows - 1) / p->tile_rows;
  const int32_t bytes = kernel == PKV_CUDA_MERGE ? 0 : pkv_decode_shared_bytes<K, HD>(p->stages);
  return pkv_cuda_launch_kernel(pkv_decode_kernel_of<K, HD>(kernel, p->tile_rows),
                                dim3((unsigned)x, (unsigned)tiles), PKV_THREADS, (size_t)bytes,
                                dependent, arguments, stream);
}

/* The most stages with `ctas` CTAs an SM; below 2 the kernel does not fit. */
template <typename K, int HD>
static int32_t pkv_decode_stages(const pkv_cuda_shared_memory *m, int32_t ctas) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  const int32_t each = m->an_sm / ctas - m->reserved_a_cta;
  const int32_t room = each < m->a_cta ? each : m->a_cta;
  const int32_t stages = (room - 128 - pkv_fold<HD>::bytes) / (PKV_WARPS * C::stage_bytes);
  return stages < C::max_stages ? stages : C::max_stages;
}

template <typename K, int HD>
static void pkv_decode_form(int32_t *ctas, int32_t *stages, const pkv_cuda_shared_memory *memory,
                            int32_t tile_rows) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  *ctas = C::ctas(tile_rows > 8 ? 2 : 1);
  *stages = pkv_decode_stages<K, HD>(memory, *ctas);
  if (*stages < 2 && *ctas > 1) {
    *ctas = 1;
    *stages = pkv_decode_stages<K, HD>(memory, 1);
  }
  if (*stages < 2) *ctas = 0;
}

/* The limits are those of the form with the longer rings: plans of both live side by side. */
template <typename K, int HD>
static cudaError_t pkv_decode_prepare(int32_t *ctas, int32_t *stages,
                                      const pkv_cuda_shared_memory *memory, int32_t tile_rows) {
  int32_t other_ctas, most;
  pkv_decode_form<K, HD>(ctas, stages, memory, tile_rows);
  pkv_decode_form<K, HD>(&other_ctas, &most, memory, tile_rows > 8 ? 8 : 16);
  if (*ctas == 0) return cudaSuccess;
  if (*stages > most) most = *stages;
  for (int32_t kernel = 0; kernel < PKV_CUDA_MERGE; ++kernel)
    for (int32_t rows = 8; rows <= 16; rows += 8) {
      const cudaError_t e = cudaFuncSetAttribute(
          pkv_decode_kernel_of<K, HD>((pkv_cuda_kernel)kernel, rows),
          cudaFuncAttributeMaxDynamicSharedMemorySize, pkv_decode_shared_bytes<K, HD>(most));
      if (e != cudaSuccess) return e;
    }
  return cudaSuccess;
}

#define PKV_CUDA_DECODE_SET(name, kv, hd)                                                          \
  extern "C" const pkv_cuda_decode_ops name;                                                       \
  const pkv_cuda_decode_ops name = {pkv_decode_launch<kv, hd>, pkv_decode_prepare<kv, hd>, hd};

#endif
