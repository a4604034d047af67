/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The meter on CUDA. Every runtime call is checked; a failure becomes a status with the call's
 * name, and the runtime's sticky error is cleared. Work runs on one stream of the meter's own.
 */
#include "measure/meter.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "backend/device_ops.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/status.h"
#include "measure/meter_kernels.h"

#define DRIVER_FILE "/proc/driver/nvidia/version"

typedef struct cuda_meter {
  pkv_meter meter; /* first: handles are converted */
  cudaStream_t stream;
  uint32_t *sink; /* device */
} cuda_meter;

static cuda_meter *of(pkv_meter *meter) {
  return (cuda_meter *)meter;
}

static pkv_status failed(pkv_error *err, cudaError_t e, const char *call) {
  (void)cudaGetLastError();
  return pkv_fail(err, e == cudaErrorMemoryAllocation ? PKV_E_NOMEM : PKV_E_DEVICE, "meter",
                  "%s: %s (%s)", call, cudaGetErrorName(e), cudaGetErrorString(e));
}

#define CUDA_TRY(err, call)                                                                        \
  do {                                                                                             \
    const cudaError_t cuda_try_error = (call);                                                     \
    if (cuda_try_error != cudaSuccess) return failed((err), cuda_try_error, #call);                \
  } while (0)

/* --- data -------------------------------------------------------------------------------- */

static pkv_status meter_set(pkv_meter *meter, void *ptr, int byte, size_t bytes, pkv_error *err) {
  CUDA_TRY(err, cudaMemsetAsync(ptr, byte, bytes, of(meter)->stream));
  return PKV_OK;
}

static pkv_status meter_poison(pkv_meter *meter, pkv_device_plan *plan, pkv_error *err) {
  return meter_set(meter, plan->slots, 0xff, plan->slot_bytes, err);
}

static pkv_status meter_fill(pkv_meter *meter, const pkv_cache *cache, const pkv_meter_batch *batch,
                             uint64_t seed, pkv_error *err) {
  CUDA_TRY(err, pkv_meter_launch_fill(cache, batch->owned, seed, of(meter)->stream));
  return PKV_OK;
}

/* The rows' positions on the device; free them after the stream has used them. */
static pkv_status upload(pkv_meter *meter, void **to, const void *from, size_t bytes,
                         pkv_error *err) {
  PKV_TRY(pkv_device_alloc(to, meter->executor, bytes, err));
  pkv_status status = pkv_device_copy(meter->executor, *to, from, bytes, meter->stream, err);
  if (status == PKV_OK) status = pkv_device_synchronize(meter->executor, meter->stream, err);
  if (status == PKV_OK) return PKV_OK;
  pkv_device_free(meter->executor, *to);
  *to = NULL;
  return status;
}

static pkv_status meter_needle(pkv_meter *meter, const pkv_cache *cache,
                               const pkv_meter_batch *batch, const int32_t *position, float value,
                               uint64_t seed, pkv_error *err) {
  void *at = NULL;
  PKV_TRY(upload(meter, &at, position, (size_t)batch->rows * sizeof *position, err));
  const cudaError_t e = pkv_meter_launch_needle(cache, batch, at, value, seed, of(meter)->stream);
  pkv_status status = e == cudaSuccess ? PKV_OK : failed(err, e, "needle");
  if (status == PKV_OK) status = pkv_device_synchronize(meter->executor, meter->stream, err);
  pkv_device_free(meter->executor, at);
  return status;
}

static pkv_status meter_needle_error(pkv_meter *meter, float *error, const pkv_cache *cache,
                                     const pkv_meter_batch *batch, const int32_t *position,
                                     const void *out, pkv_dtype out_dtype, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t count = (size_t)batch->rows * (size_t)batch->q_len * (size_t)batch->query_heads;
  void *at = NULL, *each = NULL;
  float *host = pkv_alloc(&a, count * sizeof *host);
  PKV_CHECK(err, host, PKV_E_NOMEM, "no memory for %zu errors", count);
  pkv_status status = upload(meter, &at, position, (size_t)batch->rows * sizeof *position, err);
  if (status == PKV_OK)
    status = pkv_device_alloc(&each, meter->executor, count * sizeof *host, err);
  if (status == PKV_OK) {
    const cudaError_t e =
        pkv_meter_launch_needle_error(each, cache, batch, at, out, out_dtype, of(meter)->stream);
    if (e != cudaSuccess) status = failed(err, e, "needle_error");
  }
  if (status == PKV_OK)
    status = pkv_device_copy(meter->executor, host, each, count * sizeof *host, meter->stream, err);
  if (status == PKV_OK) status = pkv_device_synchronize(meter->executor, meter->stream, err);
  *error = INFINITY;
  if (status == PKV_OK) {
    *error = 0.0f;
    for (size_t i = 0; i < count; i++)
      if (!(host[i] <= *error)) *error = host[i];
  }
  pkv_device_free(meter->executor, each);
  pkv_device_free(meter->executor, at);
  pkv_free(&a, host, count * sizeof *host);
  return status;
}

static pkv_status meter_answer(pkv_meter *meter, double *answer, const pkv_cache *cache,
                               const pkv_meter_batch *batch, const int32_t *seq_len, const void *q,
                               pkv_dtype q_dtype, pkv_error *err) {
  const size_t queries = (size_t)batch->q_len * (size_t)batch->query_heads;
  const size_t bytes = (size_t)batch->rows * queries * (size_t)cache->head_dim * sizeof(double);
  void *scratch = NULL, *out = NULL;
  size_t longest = 1;
  for (int32_t row = 0; row < batch->rows; row++)
    if ((size_t)seq_len[row] > longest) longest = (size_t)seq_len[row];
  const size_t chunks = (longest + PKV_METER_CHUNK - 1) / PKV_METER_CHUNK;
  const size_t doubles = (longest + chunks * ((size_t)cache->head_dim + 2)) * queries;
  pkv_status status = pkv_device_alloc(&out, meter->executor, bytes, err);
  if (status == PKV_OK)
    status = pkv_device_alloc(&scratch, meter->executor, doubles * sizeof(double), err);
  /* the allocations' zeroing is on another stream */
  if (status == PKV_OK) status = pkv_device_synchronize(meter->executor, NULL, err);
  for (int32_t row = 0; row < batch->rows && status == PKV_OK; row++) {
    const cudaError_t e = pkv_meter_launch_answer(out, scratch, cache, batch, row, seq_len[row], q,
                                                  q_dtype, of(meter)->stream);
    if (e != cudaSuccess) status = failed(err, e, "answer");
  }
  if (status == PKV_OK)
    status = pkv_device_copy(meter->executor, answer, out, bytes, meter->stream, err);
  if (status == PKV_OK) status = pkv_device_synchronize(meter->executor, meter->stream, err);
  pkv_device_free(meter->executor, scratch);
  pkv_device_free(meter->executor, out);
  return status;
}

static pkv_status meter_null_read(pkv_meter *meter, const pkv_cache *cache,
                                  const pkv_meter_batch *batch, int32_t waves, pkv_error *err) {
  CUDA_TRY(err, pkv_meter_launch_null_read(of(meter)->sink, cache, batch,
                                           waves * meter->info.multiprocessors, of(meter)->stream));
  return PKV_OK;
}

/* --- time -------------------------------------------------------------------------------- */

/* A captured graph and the events inside it or around it. */
typedef struct timed_graph {
  cudaGraphExec_t exec;
  cudaEvent_t *event; /* [events] */
  size_t events;
} timed_graph;

static void graph_deinit(timed_graph *g) {
  const pkv_allocator a = pkv_allocator_default();
  if (g->exec != NULL) (void)cudaGraphExecDestroy(g->exec);
  for (size_t i = 0; i < g->events && g->event != NULL; i++)
    if (g->event[i] != NULL) (void)cudaEventDestroy(g->event[i]);
  pkv_free(&a, g->event, g->events * sizeof *g->event);
  memset(g, 0, sizeof *g);
}

static pkv_status graph_events(timed_graph *g, size_t count, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  g->event = pkv_alloc_zeroed(&a, count, sizeof *g->event);
  PKV_CHECK(err, g->event, PKV_E_NOMEM, "no memory for %zu events", count);
  g->events = count;
  for (size_t i = 0; i < count; i++)
    CUDA_TRY(err, cudaEventCreate(&g->event[i]));
  return PKV_OK;
}

/* What goes into a graph while the stream captures. inside: events between the sections. */
static pkv_status enqueue(cuda_meter *m, const timed_graph *g, const pkv_meter_section *sections,
                          int32_t count, bool inside, pkv_error *err) {
  if (inside)
    CUDA_TRY(err, cudaEventRecordWithFlags(g->event[0], m->stream, cudaEventRecordExternal));
  for (int32_t s = 0; s < count; s++) {
    for (int32_t call = 0; call < sections[s].calls; call++)
      PKV_TRY(sections[s].work(sections[s].ctx, call, err));
    if (inside)
      CUDA_TRY(err, cudaEventRecordWithFlags(g->event[s + 1], m->stream, cudaEventRecordExternal));
  }
  return PKV_OK;
}

static pkv_status capture(cuda_meter *m, timed_graph *g, const pkv_meter_section *sections,
                          int32_t count, bool inside, pkv_error *err) {
  cudaGraph_t graph = NULL;
  CUDA_TRY(err, cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal));
  pkv_status status = enqueue(m, g, sections, count, inside, err);
  cudaError_t e = cudaStreamEndCapture(m->stream, &graph);
  if (e != cudaSuccess && status == PKV_OK) status = failed(err, e, "cudaStreamEndCapture");
  if (status == PKV_OK) {
    e = cudaGraphInstantiate(&g->exec, graph, 0);
    if (e != cudaSuccess) status = failed(err, e, "cudaGraphInstantiate");
  }
  if (graph != NULL) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  return status;
}

static pkv_status elapsed(double *us, cudaEvent_t from, cudaEvent_t to, pkv_error *err) {
  float ms = 0.0f;
  CUDA_TRY(err, cudaEventElapsedTime(&ms, from, to));
  *us = (double)ms * 1e3;
  return PKV_OK;
}

static pkv_status replay_inside(cuda_meter *m, timed_graph *g, double *us, int32_t count,
                                int32_t warmups, int32_t repeats, pkv_error *err) {
  for (int32_t i = -warmups; i < repeats; i++) {
    CUDA_TRY(err, cudaGraphLaunch(g->exec, m->stream));
    CUDA_TRY(err, cudaStreamSynchronize(m->stream));
    for (int32_t s = 0; s < count && i >= 0; s++)
      PKV_TRY(elapsed(&us[(int64_t)s * repeats + i], g->event[s], g->event[s + 1], err));
  }
  return PKV_OK;
}

/* One graph a section, replayed in turn; the first of each round moves on. */
static pkv_status replay_apart(cuda_meter *m, timed_graph *graphs, double *us, int32_t count,
                               int32_t warmups, int32_t repeats, pkv_error *err) {
  for (int32_t i = -warmups; i < repeats; i++)
    for (int32_t n = 0; n < count; n++) {
      const int32_t s = (n + i + warmups) % count;
      CUDA_TRY(err, cudaEventRecord(graphs[s].event[0], m->stream));
      CUDA_TRY(err, cudaGraphLaunch(graphs[s].exec, m->stream));
      CUDA_TRY(err, cudaEventRecord(graphs[s].event[1], m->stream));
      CUDA_TRY(err, cudaStreamSynchronize(m->stream));
      if (i >= 0)
        PKV_TRY(
            elapsed(&us[(int64_t)s * repeats + i], graphs[s].event[0], graphs[s].event[1], err));
    }
  return PKV_OK;
}

static pkv_status meter_graph(pkv_meter *meter, double *us, const pkv_meter_section *sections,
                              int32_t count, int32_t apart, int32_t warmups, int32_t repeats,
                              pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int32_t graphs = apart ? count : 1;
  timed_graph *g = pkv_alloc_zeroed(&a, (size_t)graphs, sizeof *g);
  PKV_CHECK(err, g, PKV_E_NOMEM, "no memory for %d graphs", graphs);
  pkv_status status = PKV_OK;
  for (int32_t i = 0; i < graphs && status == PKV_OK; i++) {
    status = graph_events(&g[i], apart ? 2 : (size_t)count + 1, err);
    if (status == PKV_OK)
      status = capture(of(meter), &g[i], apart ? &sections[i] : sections, apart ? 1 : count, !apart,
                       err);
  }
  if (status == PKV_OK)
    status = apart ? replay_apart(of(meter), g, us, count, warmups, repeats, err)
                   : replay_inside(of(meter), g, us, count, warmups, repeats, err);
  for (int32_t i = 0; i < graphs; i++)
    graph_deinit(&g[i]);
  pkv_free(&a, g, (size_t)graphs * sizeof *g);
  return status;
}

static pkv_status meter_events(pkv_meter *meter, double *us, const pkv_meter_section *section,
                               int32_t warmups, int32_t repeats, pkv_error *err) {
  cuda_meter *m = of(meter);
  timed_graph g = {0};
  pkv_status status = graph_events(&g, 2, err);
  for (int32_t i = -warmups; i < repeats && status == PKV_OK; i++) {
    cudaError_t e = cudaEventRecord(g.event[0], m->stream);
    for (int32_t call = 0; call < section->calls && status == PKV_OK; call++)
      status = section->work(section->ctx, call, err);
    if (e == cudaSuccess) e = cudaEventRecord(g.event[1], m->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(m->stream);
    if (e != cudaSuccess && status == PKV_OK) status = failed(err, e, "event times");
    if (status == PKV_OK && i >= 0) status = elapsed(&us[i], g.event[0], g.event[1], err);
  }
  graph_deinit(&g);
  return status;
}

static pkv_status meter_launches(pkv_meter *meter, double *us, const pkv_meter_section *section,
                                 int32_t warmups, int32_t repeats, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  cuda_meter *m = of(meter);
  timed_graph *g = pkv_alloc_zeroed(&a, (size_t)section->calls, sizeof *g);
  PKV_CHECK(err, g, PKV_E_NOMEM, "no memory for %d graphs", section->calls);
  pkv_status status = PKV_OK;
  for (int32_t call = 0; call < section->calls && status == PKV_OK; call++) {
    cudaGraph_t graph = NULL;
    cudaError_t e = cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal);
    if (e == cudaSuccess) {
      status = section->work(section->ctx, call, err);
      e = cudaStreamEndCapture(m->stream, &graph);
    }
    if (e == cudaSuccess && status == PKV_OK) e = cudaGraphInstantiate(&g[call].exec, graph, 0);
    if (graph != NULL) (void)cudaGraphDestroy(graph);
    if (e != cudaSuccess && status == PKV_OK) status = failed(err, e, "graph of one call");
  }
  /* a graph's first launch takes longer than the others */
  for (int32_t call = 0; call < section->calls && status == PKV_OK; call++) {
    const cudaError_t e = cudaGraphLaunch(g[call].exec, m->stream);
    if (e != cudaSuccess) status = failed(err, e, "cudaGraphLaunch");
  }
  for (int32_t i = -warmups; i < repeats && status == PKV_OK; i++) {
    cudaError_t e = cudaStreamSynchronize(m->stream);
    const int64_t start = pkv_clock_ns();
    if (e == cudaSuccess) e = cudaGraphLaunch(g[(i + warmups) % section->calls].exec, m->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(m->stream);
    if (i >= 0) us[i] = (double)(pkv_clock_ns() - start) * 1e-3;
    if (e != cudaSuccess) status = failed(err, e, "cudaGraphLaunch");
  }
  for (int32_t call = 0; call < section->calls; call++)
    graph_deinit(&g[call]);
  pkv_free(&a, g, (size_t)section->calls * sizeof *g);
  return status;
}

/* --- the handle -------------------------------------------------------------------------- */

static void meter_destroy(pkv_meter *meter) {
  const pkv_allocator a = pkv_allocator_default();
  cuda_meter *m = of(meter);
  pkv_device_free(meter->executor, m->sink);
  if (m->stream != NULL) (void)cudaStreamDestroy(m->stream);
  pkv_executor_destroy(meter->executor);
  pkv_free(&a, m, sizeof *m);
}

static const pkv_meter_ops ops = {meter_destroy, meter_set,          meter_poison,  meter_fill,
                                  meter_needle,  meter_needle_error, meter_answer,  meter_null_read,
                                  meter_graph,   meter_events,       meter_launches};

/* Device names and versions go into CSV fields. */
static void plain_text(char *text) {
  for (; *text != '\0'; text++)
    if (*text == ',' || *text == '"' || (unsigned char)*text < ' ') *text = ' ';
}

/* "580.65.06 CUDA 13.0": of the kernel driver where it says so, and the newest CUDA it serves. */
static void describe_driver(char *text, size_t bytes, int version) {
  char line[256] = "", number[32] = "";
  FILE *file = fopen(DRIVER_FILE, "re");
  if (file != NULL) {
    if (fgets(line, sizeof line, file) == NULL) line[0] = '\0';
    (void)fclose(file);
  }
  for (const char *at = line; *at != '\0'; at += strspn(at, " \t")) {
    const size_t size = strcspn(at, " \t\n");
    if (size > 3 && size < sizeof number && strspn(at, "0123456789.") == size) {
      memcpy(number, at, size);
      number[size] = ' ';
      break;
    }
    at += size;
    if (*at == '\n') break;
  }
  (void)snprintf(text, bytes, "%sCUDA %d.%d", number, version / 1000, version % 1000 / 10);
}

static pkv_status init(cuda_meter *m, pkv_error *err) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  struct cudaDeviceProp properties;
  int device = 0, version = 0;
  size_t free_bytes = 0, total = 0;
  void *sink = NULL;
  options.device = PKV_DEVICE_CUDA;
  PKV_TRY(pkv_executor_create(&m->meter.executor, &options, err));
  CUDA_TRY(err, cudaGetDevice(&device));
  CUDA_TRY(err, cudaGetDeviceProperties(&properties, device));
  CUDA_TRY(err, cudaDriverGetVersion(&version));
  CUDA_TRY(err, cudaMemGetInfo(&free_bytes, &total));
  (void)snprintf(m->meter.info.device, sizeof m->meter.info.device, "%.90s", properties.name);
  describe_driver(m->meter.info.driver, sizeof m->meter.info.driver, version);
  plain_text(m->meter.info.device);
  plain_text(m->meter.info.driver);
  m->meter.info.multiprocessors = properties.multiProcessorCount;
  m->meter.info.free_bytes = (int64_t)free_bytes;
  CUDA_TRY(err, cudaStreamCreate(&m->stream));
  m->meter.stream = m->stream;
  PKV_TRY(pkv_device_alloc(&sink, m->meter.executor, 64, err));
  m->sink = sink;
  return PKV_OK;
}

pkv_status pkv_meter_create(pkv_meter **out, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  cuda_meter *m = pkv_alloc_zeroed(&a, 1, sizeof *m);
  *out = NULL;
  PKV_CHECK(err, m, PKV_E_NOMEM, "no memory for the meter");
  m->meter.ops = &ops;
  const pkv_status status = init(m, err);
  if (status != PKV_OK) {
    meter_destroy(&m->meter);
    return status;
  }
  *out = &m->meter;
  return PKV_OK;
}
