/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and graphs for the suites: CUDA's, or the invented device's. Failures fail the test. */
#ifndef PKV_TEST_GPU_STREAM_H
#define PKV_TEST_GPU_STREAM_H

#include "gpu/gpu_suite.h"

typedef struct gpu_graph gpu_graph;

/* One that does not wait for the default stream. */
void *gpu_stream_create(void);
void gpu_stream_destroy(void *stream);
/* All streams. */
void gpu_wait(void);
void gpu_capture_begin(void *stream);
gpu_graph *gpu_capture_end(void *stream);
void gpu_graph_launch(gpu_graph *graph, void *stream);
void gpu_graph_destroy(gpu_graph *graph);

#endif
