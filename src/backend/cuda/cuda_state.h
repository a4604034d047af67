/* SPDX-License-Identifier: Apache-2.0 */
/* What a CUDA executor knows of its device, for the files of this room. */
#ifndef PKV_CUDA_STATE_H
#define PKV_CUDA_STATE_H

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/cuda_status.h"
#include "backend/device_dense.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pkv_cuda_products pkv_cuda_products; /* cuda_products.h */

typedef struct pkv_cuda_state {
  int device, sms, major;
  pkv_cuda_shared_memory shared_memory;
  int32_t desk_bytes, dependent; /* as pkv_cuda_tree_prepare says */
  void *tensor_encoder;          /* NULL where the driver has none */
  int32_t tensors;               /* whether route shared reads tensor maps */
  int check;                     /* PKV_CUDA_CHECK: synchronise after each launch */
  pkv_cuda_products *products;   /* NULL until a model asks for them */
  void *stream_sums;             /* scratch of products that stream weights; as products */
} pkv_cuda_state;

#define PKV_CUDA(err, call)                                                                        \
  do {                                                                                             \
    const cudaError_t pkv_cuda_error = (call);                                                     \
    if (pkv_cuda_error != cudaSuccess) return pkv_cuda_fail((err), pkv_cuda_error, #call);         \
  } while (0)

static inline pkv_cuda_state *pkv_cuda_state_of(const pkv_executor *executor) {
  return (pkv_cuda_state *)executor->device_state;
}

/* Invalidated also where it cannot be told. */
static inline enum cudaStreamCaptureStatus pkv_cuda_capture_of(cudaStream_t stream) {
  enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess ? status
                                                               : cudaStreamCaptureStatusInvalidated;
}

/* After a launch: its own status, and with PKV_CUDA_CHECK that of its execution. */
static inline pkv_status pkv_cuda_launched(const pkv_executor *executor, cudaError_t e,
                                           const char *kernel, cudaStream_t stream,
                                           pkv_error *err) {
  if (e != cudaSuccess) return pkv_cuda_fail(err, e, kernel);
  if (!pkv_cuda_state_of(executor)->check) return PKV_OK;
  if (pkv_cuda_capture_of(stream) == cudaStreamCaptureStatusActive) return PKV_OK;
  e = cudaStreamSynchronize(stream);
  return e == cudaSuccess ? PKV_OK : pkv_cuda_fail(err, e, kernel);
}

/* cuda_dense.c */
extern const pkv_dense_ops pkv_cuda_dense_ops;
void pkv_cuda_dense_deinit(pkv_executor *executor);

#ifdef __cplusplus
}
#endif
#endif
