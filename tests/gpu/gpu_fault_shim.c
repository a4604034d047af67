/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/gpu_fault_shim.h"

#include <cuda_runtime_api.h>

gpu_fault_state gpu_faults;
static cudaError_t last;

static bool fails(cudaError_t error) {
  const int call = ++gpu_faults.calls, at = gpu_faults.fail_at;
  const bool now = at != 0 && (call == at || (gpu_faults.fail_on && call > at));
  if (now) last = error;
  return now;
}

/* `name` with these parameters, which it passes on in these arguments. */
#define WRAP(name, error, parameters, arguments)                                                   \
  cudaError_t __real_##name parameters;                                                            \
  cudaError_t __wrap_##name parameters;                                                            \
  cudaError_t __wrap_##name parameters {                                                           \
    return fails(error) ? (error) : __real_##name arguments;                                       \
  }
/* The same of a call after which others count on its being done. */
#define WRAP_DONE(name, parameters, arguments)                                                     \
  cudaError_t __real_##name parameters;                                                            \
  cudaError_t __wrap_##name parameters;                                                            \
  cudaError_t __wrap_##name parameters {                                                           \
    const cudaError_t done = __real_##name arguments;                                              \
    return fails(cudaErrorUnknown) ? cudaErrorUnknown : done;                                      \
  }
#define NO_MEMORY cudaErrorMemoryAllocation
#define UNKNOWN   cudaErrorUnknown
#define NO_LAUNCH cudaErrorLaunchOutOfResources

WRAP(cudaMalloc, NO_MEMORY, (void **p, size_t bytes), (p, bytes))
WRAP(cudaHostAlloc, NO_MEMORY, (void **p, size_t bytes, unsigned flags), (p, bytes, flags))
WRAP(cudaMemcpy, UNKNOWN, (void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind),
     (to, from, bytes, kind))
WRAP(cudaMemcpyAsync, UNKNOWN,
     (void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream),
     (to, from, bytes, kind, stream))
WRAP(cudaMemset, UNKNOWN, (void *to, int byte, size_t bytes), (to, byte, bytes))
WRAP(cudaMemsetAsync, UNKNOWN, (void *to, int byte, size_t bytes, cudaStream_t stream),
     (to, byte, bytes, stream))
WRAP(cudaStreamCreateWithFlags, NO_MEMORY, (cudaStream_t * stream, unsigned flags), (stream, flags))
WRAP(cudaEventCreate, NO_MEMORY, (cudaEvent_t * event), (event))
WRAP(cudaEventRecord, UNKNOWN, (cudaEvent_t event, cudaStream_t stream), (event, stream))
WRAP(cudaGraphInstantiate, NO_MEMORY,
     (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags), (exec, graph, flags))
WRAP(cudaGraphUpload, UNKNOWN, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
WRAP(cudaGraphLaunch, NO_LAUNCH, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
WRAP(cudaStreamBeginCapture, UNKNOWN, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
     (stream, mode))
WRAP(cudaStreamIsCapturing, UNKNOWN, (cudaStream_t stream, enum cudaStreamCaptureStatus *capturing),
     (stream, capturing))
WRAP(cudaLaunchKernel, NO_LAUNCH,
     (const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
     (kernel, grid, block, args, shared, stream))
WRAP(cudaLaunchKernelExC, NO_LAUNCH,
     (const cudaLaunchConfig_t *config, const void *kernel, void **args), (config, kernel, args))
WRAP(cudaFuncSetAttribute, UNKNOWN, (const void *kernel, enum cudaFuncAttribute what, int value),
     (kernel, what, value))
WRAP(cudaFuncGetAttributes, UNKNOWN, (struct cudaFuncAttributes * out, const void *kernel),
     (out, kernel))
WRAP(cudaDeviceGetAttribute, UNKNOWN, (int *value, enum cudaDeviceAttr what, int device),
     (value, what, device))
WRAP(cudaGetDeviceCount, UNKNOWN, (int *count), (count))
WRAP(cudaGetDevice, UNKNOWN, (int *device), (device))
WRAP(cudaSetDevice, UNKNOWN, (int device), (device))
WRAP(cudaMemGetInfo, UNKNOWN, (size_t * left, size_t *all), (left, all))
WRAP_DONE(cudaStreamSynchronize, (cudaStream_t stream), (stream))
WRAP_DONE(cudaEventSynchronize, (cudaEvent_t event), (event))

cudaError_t __real_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t __wrap_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
/* The capture ends, and there is no graph. */
cudaError_t __wrap_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  const cudaError_t done = __real_cudaStreamEndCapture(stream, graph);
  if (!fails(cudaErrorStreamCaptureInvalidated)) return done;
  if (done == cudaSuccess && *graph != NULL) (void)cudaGraphDestroy(*graph);
  *graph = NULL;
  return cudaErrorStreamCaptureInvalidated;
}

cudaError_t __real_cudaGetLastError(void);
cudaError_t __wrap_cudaGetLastError(void);
cudaError_t __wrap_cudaGetLastError(void) {
  const cudaError_t ours = last, theirs = __real_cudaGetLastError();
  last = cudaSuccess;
  return ours != cudaSuccess ? ours : theirs;
}
