/* SPDX-License-Identifier: Apache-2.0 */
/*
 * As much of CUDA's runtime as src/measure needs, on the host: memory is the host's, kernels run at
 * once and one thread after another, also while a stream "captures". Time is invented: each kernel
 * takes what host_cuda_cost says, events and graphs add that up. So the benchmark's logic can be
 * tested, to the last figure, without a device. See host_cuda.c.
 */
#ifndef PKV_TEST_CUDA_RUNTIME_API_H
#define PKV_TEST_CUDA_RUNTIME_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorStreamCaptureUnsupported = 900
} cudaError_t;

typedef struct host_stream *cudaStream_t;
typedef struct host_event *cudaEvent_t;
typedef struct host_graph *cudaGraph_t;
typedef struct host_graph *cudaGraphExec_t;
typedef enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal
} cudaStreamCaptureMode;

#define cudaDevAttrMultiProcessorCount 16

#define cudaEventRecordDefault  0u
#define cudaEventRecordExternal 1u

struct cudaDeviceProp {
  char name[256];
  int multiProcessorCount;
};

cudaError_t cudaGetLastError(void);
const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaMemsetAsync(void *ptr, int byte, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, uint64_t flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

/* --- the invented device --- */

#define HOST_CUDA_SMS 4

/* Adds microseconds to a stream's time. */
__attribute__((visibility("default"))) void host_cuda_spend(cudaStream_t stream, double us);
/* Microseconds of one launch of the named kernel. */
double host_cuda_cost(const char *kernel);
/* Called for each vector that the null read loads; NULL: not. */
extern void (*host_cuda_loaded)(const void *at, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
