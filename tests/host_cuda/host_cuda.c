/* SPDX-License-Identifier: Apache-2.0 */
/* The invented runtime of cuda_runtime_api.h. */
#include "cuda_runtime_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_EVENTS 64

struct host_stream {
  double us; /* since the stream began, or since its capture did */
  double before;
  struct host_graph *graph; /* being captured */
};

struct host_event {
  double us;
};

struct host_graph {
  double us;
  int events;
  struct host_event *event[MOST_EVENTS];
  double at[MOST_EVENTS];
};

void (*host_cuda_loaded)(const void *at, size_t bytes);

double host_cuda_cost(const char *kernel) {
  /* 4 blocks a multiprocessor are the faster null read where there are 4 of these */
  if (strncmp(kernel, "null_read", 9) == 0) return 10.0;
  return 1.0;
}

void host_cuda_spend(cudaStream_t stream, double us) {
  if (stream != NULL) stream->us += us;
}

cudaError_t cudaGetLastError(void) {
  return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e) {
  return e == cudaSuccess ? "cudaSuccess" : "cudaErrorOfTheHost";
}

const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess ? "no error" : "refused by the test's runtime";
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount && device == 0 ? HOST_CUDA_SMS : 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  (void)snprintf(properties->name, sizeof properties->name, "Host %d, invented", device);
  properties->multiProcessorCount = HOST_CUDA_SMS;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13010;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *free_bytes = (size_t)256 << 20;
  *total = (size_t)512 << 20;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *ptr, int byte, size_t bytes, cudaStream_t stream) {
  (void)stream;
  memset(ptr, byte, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = calloc(1, sizeof **stream);
  return *stream != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(stream);
  return cudaSuccess;
}

/* A stream that captures cannot be waited for. */
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream != NULL && stream->graph != NULL ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  (void)mode;
  if (stream->graph != NULL) return cudaErrorStreamCaptureUnsupported;
  stream->graph = calloc(1, sizeof *stream->graph);
  stream->before = stream->us;
  stream->us = 0;
  return stream->graph != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  if (stream->graph == NULL) return cudaErrorStreamCaptureUnsupported;
  *graph = stream->graph;
  (*graph)->us = stream->us;
  stream->us = stream->before;
  stream->graph = NULL;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, uint64_t flags) {
  (void)flags;
  *exec = calloc(1, sizeof **exec);
  if (*exec == NULL) return cudaErrorMemoryAllocation;
  **exec = *graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (int i = 0; i < exec->events; i++)
    exec->event[i]->us = stream->us + exec->at[i];
  stream->us += exec->us;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  free(exec);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = calloc(1, sizeof **event);
  return *event != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

/* In a capture only external events keep their time. */
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  struct host_graph *graph = stream->graph;
  if (graph == NULL) {
    event->us = stream->us;
    return cudaSuccess;
  }
  if (flags != cudaEventRecordExternal || graph->events == MOST_EVENTS)
    return cudaErrorStreamCaptureUnsupported;
  graph->event[graph->events] = event;
  graph->at[graph->events++] = stream->us;
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = (float)((to->us - from->us) * 1e-3);
  return cudaSuccess;
}
