/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/gpu_stream.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#ifdef PKV_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "gpu/gpu_case.h"
#include "support/fake_device.h"

struct gpu_graph {
  fake_graph *fake;
#ifdef PKV_HAVE_CUDA
  cudaGraphExec_t exec;
#endif
};

#ifdef PKV_HAVE_CUDA
#define CUDA(call)                                                                                 \
  do {                                                                                             \
    const cudaError_t cuda_error = (call);                                                         \
    if (cuda_error != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(cuda_error));      \
  } while (0)
#else
#define CUDA(call) fail_msg("no CUDA in this build")
#endif

void *gpu_stream_create(void) {
  if (gpu_opt.fake) return fake_stream_create();
  void *stream = NULL;
  CUDA(cudaStreamCreateWithFlags((cudaStream_t *)&stream, cudaStreamNonBlocking));
  return stream;
}

void gpu_stream_destroy(void *stream) {
  if (gpu_opt.fake)
    fake_stream_destroy(stream);
  else
    CUDA(cudaStreamDestroy(stream));
}

void gpu_wait(void) {
  if (!gpu_opt.fake) CUDA(cudaDeviceSynchronize());
}

void gpu_capture_begin(void *stream) {
  if (gpu_opt.fake)
    fake_capture_begin(stream);
  else
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
}

gpu_graph *gpu_capture_end(void *stream) {
  gpu_graph *graph = calloc(1, sizeof *graph);
  assert_non_null(graph);
  if (gpu_opt.fake) {
    graph->fake = fake_capture_end(stream);
    return graph;
  }
#ifdef PKV_HAVE_CUDA
  cudaGraph_t captured;
  CUDA(cudaStreamEndCapture(stream, &captured));
  CUDA(cudaGraphInstantiate(&graph->exec, captured, 0));
  CUDA(cudaGraphDestroy(captured));
#endif
  return graph;
}

void gpu_graph_launch(gpu_graph *graph, void *stream) {
  if (gpu_opt.fake)
    OK(fake_graph_launch(graph->fake, err));
  else
    CUDA(cudaGraphLaunch(graph->exec, stream));
  (void)stream;
}

void gpu_graph_destroy(gpu_graph *graph) {
  if (gpu_opt.fake)
    fake_graph_destroy(graph->fake);
  else
    CUDA(cudaGraphExecDestroy(graph->exec));
  free(graph);
}
