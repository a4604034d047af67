/* SPDX-License-Identifier: Apache-2.0 */
/* The one way kernels that may overlap the one ahead of them are launched. */
#ifndef PKV_CUDA_LAUNCH_KERNEL_CUH
#define PKV_CUDA_LAUNCH_KERNEL_CUH

#include <cuda_runtime.h>

/* `arguments` point to the kernel's parameters, of exactly their types; bytes of dynamic shared
   memory; dependent: the launch may begin before the kernel ahead of it has ended (sm_90). */
static inline cudaError_t pkv_cuda_launch_kernel(const void *kernel, dim3 grid, unsigned threads,
                                                 size_t bytes, bool dependent, void **arguments,
                                                 cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

#endif
