/* SPDX-License-Identifier: Apache-2.0 */
/* The words of CUDA C++ that src/measure/meter_kernels.cu uses, for a host compiler. */
#ifndef PKV_TEST_CUDA_FP16_H
#define PKV_TEST_CUDA_FP16_H

#include <math.h>

extern "C" {
#include "base/dtype.h"
}

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct host_dim {
  unsigned x;
};
static host_dim gridDim, blockDim, blockIdx, threadIdx;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

/* A small grid, whatever was asked for: the kernels stride. */
#define HOST_BLOCKS 3u
#define PKV_LAUNCH(kernel, blocks, stream, ...)                                                    \
  do {                                                                                             \
    gridDim.x = (unsigned)(blocks) < HOST_BLOCKS ? (unsigned)(blocks) : HOST_BLOCKS;               \
    blockDim.x = THREADS;                                                                          \
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)                                     \
      for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++)                                  \
        kernel(__VA_ARGS__);                                                                       \
    host_cuda_spend((stream), host_cuda_cost(#kernel));                                            \
  } while (0)

#define PKV_METER_LOAD(p)                                                                          \
  (host_cuda_loaded != NULL ? host_cuda_loaded((p), sizeof *(p)) : (void)0, *(p))

struct __half_raw {
  uint16_t x;
};
struct __half {
  uint16_t x;
  __half() : x(0) {
  }
  explicit __half(__half_raw r) : x(r.x) {
  }
};

static inline float __half2float(__half h) {
  return pkv_f16_to_f32(h.x);
}
static inline __half __float2half_rn(float f) {
  return __half(__half_raw{pkv_f32_to_f16(f)});
}
static inline float cospif(float x) {
  return (float)cos(3.14159265358979323846 * (double)x);
}

#endif
