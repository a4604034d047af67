/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels that stream weights are launched: in clusters, and beside the kernel ahead. */
#ifndef PKV_CUDA_DENSE_CLUSTERS_H
#define PKV_CUDA_DENSE_CLUSTERS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

/* cluster: CTAs of one, 1: none; `ctas` is a multiple of it. arguments: pointers to the kernel's
   parameters. */
static inline cudaError_t pkv_dense_launch_clusters(const void *kernel, int32_t ctas,
                                                    int32_t threads, int32_t shared_bytes,
                                                    int32_t cluster, int32_t dependent,
                                                    void **arguments, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {0};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = (unsigned)cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {0};
  config.gridDim.x = (unsigned)ctas;
  config.blockDim.x = (unsigned)threads;
  config.gridDim.y = config.gridDim.z = config.blockDim.y = config.blockDim.z = 1;
  config.dynamicSmemBytes = (size_t)shared_bytes;
  config.stream = stream;
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1u : 0u) + (dependent ? 1u : 0u);
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

#endif
