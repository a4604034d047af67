/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode attention on the GPU over the cells of a file (lines: name, then row lengths): one
 * layer's time
 * in a graph of several layers with caches of their own (cold L2), beside the null read in the
 * same run;
 * the planner's marginal time; host wall time of plan and one layer. Every output is checked
 * against
 * double first. Shape: 32 query heads, 8 KV heads, head_dim 128, f16, page 16, HND, permuted pages.
 *
 *   cuda_decode CELLS [CSV] [commit]
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_reference.h"
#include "pkv/device.h"

enum { HEADS = 8, GROUP = 4, DIM = 128, PAGE = 16, REPEATS = 25, MAX_ROWS = 4096 };

#define CUDA(call)                                                                                 \
  do {                                                                                             \
    const cudaError_t e = (call);                                                                  \
    if (e != cudaSuccess) die(#call, cudaGetErrorString(e));                                       \
  } while (0)
#define PKV(call)                                                                                  \
  do {                                                                                             \
    pkv_error err = {0};                                                                           \
    if ((call) != PKV_OK) die(#call, err.text);                                                    \
  } while (0)

static void die(const char *what, const char *why) {
  fprintf(stderr, "cuda_decode: %s: %s\n", what, why);
  exit(1);
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

typedef struct bench {
  pkv_executor *executor;
  cudaStream_t stream;
  int sms;
  char device[128], driver[32];
  void *k, *v; /* room for all layers */
  size_t room;
} bench;

typedef struct cell {
  char name[64];
  int32_t lens[MAX_ROWS], rows, longest, pages;
  int64_t tokens;
  int32_t layers;
  bench_case on_device;
  void *q, *out, *seq_len;
  pkv_device_plan *plan;
  size_t layer_bytes; /* of K, and of V */
} cell;

static void *upload(const void *from, size_t bytes) {
  void *to;
  CUDA(cudaMalloc(&to, bytes));
  CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  return to;
}

static int read_cell(cell *c, FILE *in) {
  static char line[65536];
  memset(c, 0, sizeof *c);
  if (fgets(line, sizeof line, in) == NULL) return 0;
  char *at = line;
  int used;
  if (sscanf(at, "%63s%n", c->name, &used) != 1) return 0;
  at += used;
  while (c->rows < MAX_ROWS && sscanf(at, "%d%n", &c->lens[c->rows], &used) == 1) {
    const int32_t len = c->lens[c->rows++];
    c->tokens += len;
    c->pages += (len + PAGE - 1) / PAGE;
    if (len > c->longest) c->longest = len;
    at += used;
  }
  return c->rows > 0;
}

static void place_pages(cell *c) {
  const int32_t width = (c->longest + PAGE - 1) / PAGE;
  int32_t *ids = malloc((size_t)c->pages * sizeof *ids);
  int32_t *table = malloc((size_t)c->rows * (size_t)width * sizeof *table);
  int32_t *first = malloc((size_t)(c->rows + 1) * sizeof *first);
  uint64_t s = 7;
  for (int32_t i = 0; i < c->pages; i++)
    ids[i] = i;
  for (int32_t i = c->pages - 1; i > 0; i--) {
    s = s * 6364136223846793005u + 1442695040888963407u;
    const int32_t j = (int32_t)((s >> 33) % (uint64_t)(i + 1)), t = ids[i];
    ids[i] = ids[j];
    ids[j] = t;
  }
  for (int32_t i = 0; i < c->rows * width; i++)
    table[i] = -1;
  first[0] = 0;
  for (int32_t r = 0; r < c->rows; r++) {
    const int32_t count = (c->lens[r] + PAGE - 1) / PAGE;
    for (int32_t i = 0; i < count; i++)
      table[r * width + i] = ids[first[r] + i];
    first[r + 1] = first[r] + count;
  }
  c->on_device.table = upload(table, (size_t)c->rows * (size_t)width * sizeof *table);
  c->on_device.first_page = upload(first, (size_t)(c->rows + 1) * sizeof *first);
  c->on_device.stride = width;
  free(ids);
  free(table);
  free(first);
}

static void setup(cell *c, const bench *b) {
  const size_t q_elements = (size_t)c->rows * HEADS * GROUP * DIM;
  c->layer_bytes = (size_t)c->pages * HEADS * PAGE * DIM * 2;
  const size_t wanted = ((size_t)3 << 30) / (2 * c->layer_bytes) + 1,
               fit = b->room / c->layer_bytes;
  c->layers = (int32_t)(wanted > 32 ? 32 : wanted < 2 ? 2 : wanted);
  if ((size_t)c->layers > fit) c->layers = (int32_t)fit;
  place_pages(c);
  CUDA(cudaMalloc(&c->q, q_elements * 2));
  CUDA(bench_fill(c->q, (int64_t)q_elements, 5));
  CUDA(cudaMalloc(&c->out, q_elements * 2));
  CUDA(cudaMemset(c->out, 0xff, q_elements * 2));
  c->seq_len = upload(c->lens, (size_t)c->rows * sizeof(int32_t));
  c->on_device.seq_len = c->seq_len;
  c->on_device.rows = c->rows;
  c->on_device.heads = HEADS;
  c->on_device.group = GROUP;
  c->on_device.head_dim = DIM;
  void *sink;
  CUDA(cudaMalloc(&sink, 4));
  c->on_device.sink = sink;
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = HEADS * GROUP;
  shape.kv_heads = HEADS;
  shape.head_dim = DIM;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.segment_cost = 24;
  PKV(pkv_device_plan_create(&c->plan, b->executor, &shape, &options, PKV_DTYPE_F16, c->rows,
                             c->longest, &err));
  PKV(pkv_device_plan_build(c->plan, c->rows, c->seq_len, b->stream, &err));
  pkv_device_plan_set_overlap(c->plan, 1); /* as the layers of a step would */
}

static void teardown(cell *c) {
  pkv_device_plan_destroy(c->plan);
  CUDA(cudaFree((void *)c->on_device.table));
  CUDA(cudaFree((void *)c->on_device.first_page));
  CUDA(cudaFree(c->on_device.sink));
  CUDA(cudaFree(c->q));
  CUDA(cudaFree(c->out));
  CUDA(cudaFree(c->seq_len));
}

static void attend(cell *c, const bench *b, int32_t layer) {
  pkv_cache cache = PKV_CACHE_INIT;
  cache.dtype = PKV_DTYPE_F16;
  cache.k = (char *)b->k + (size_t)layer * c->layer_bytes;
  cache.v = (char *)b->v + (size_t)layer * c->layer_bytes;
  cache.k_page_stride = cache.v_page_stride = HEADS * PAGE * DIM;
  cache.k_head_stride = cache.v_head_stride = PAGE * DIM;
  cache.k_token_stride = cache.v_token_stride = DIM;
  cache.pages = c->pages;
  cache.page_tokens = PAGE;
  cache.kv_heads = HEADS;
  cache.head_dim = DIM;
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  args.cache = &cache;
  args.block_table = c->on_device.table;
  args.max_pages = (int32_t)c->on_device.stride;
  args.q = c->q;
  args.q_dtype = args.out_dtype = PKV_DTYPE_F16;
  args.out = c->out;
  PKV(pkv_device_attention(b->executor, c->plan, &args, b->stream, &err));
}

static void null_read(cell *c, const bench *b, int32_t layer) {
  CUDA(bench_null_read(&c->on_device, (char *)b->k + (size_t)layer * c->layer_bytes,
                       (char *)b->v + (size_t)layer * c->layer_bytes, b->sms, b->stream));
}

/* Planning, then a layer: what a step adds over the layers alone. */
static void plan_and_attend(cell *c, const bench *b, int32_t layer) {
  PKV(pkv_device_plan_build(c->plan, c->rows, c->seq_len, b->stream, &err));
  attend(c, b, layer);
}

static int by_value(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

/* Median microseconds of one layer in a replayed graph of all layers. */
static double graph_us(cell *c, const bench *b, void (*layer)(cell *, const bench *, int32_t)) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t start, stop;
  float times[REPEATS];
  CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeGlobal));
  for (int32_t l = 0; l < c->layers; l++)
    layer(c, b, l);
  CUDA(cudaStreamEndCapture(b->stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&stop));
  for (int i = -3; i < REPEATS; i++) {
    CUDA(cudaEventRecord(start, b->stream));
    CUDA(cudaGraphLaunch(exec, b->stream));
    CUDA(cudaEventRecord(stop, b->stream));
    CUDA(cudaEventSynchronize(stop));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 0) times[i] = ms * 1000.0f / (float)c->layers;
  }
  CUDA(cudaEventDestroy(start));
  CUDA(cudaEventDestroy(stop));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  qsort(times, REPEATS, sizeof *times, by_value);
  return (double)times[REPEATS / 2];
}

/* Median of plan + one layer + synchronize, called from the host. */
static double wall_us(cell *c, const bench *b) {
  float times[REPEATS];
  for (int i = -3; i < REPEATS; i++) {
    CUDA(cudaStreamSynchronize(b->stream));
    const double start = now_us();
    plan_and_attend(c, b, (i + 3) % c->layers);
    CUDA(cudaStreamSynchronize(b->stream));
    if (i >= 0) times[i] = (float)(now_us() - start);
  }
  qsort(times, REPEATS, sizeof *times, by_value);
  return (double)times[REPEATS / 2];
}

static double from_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double x = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  if (exponent == 31) return NAN;
  return h & 0x8000 ? -x : x;
}

/* Relative l2 error of the last layer's output against double. */
static double error_of(cell *c, const bench *b) {
  const size_t n = (size_t)c->rows * HEADS * GROUP * DIM;
  double *want_device, *want = malloc(n * sizeof *want), off = 0, all = 0;
  uint16_t *got = malloc(n * sizeof *got);
  attend(c, b, 0);
  CUDA(cudaStreamSynchronize(b->stream));
  CUDA(cudaMalloc((void **)&want_device, n * sizeof *want));
  CUDA(bench_answer(&c->on_device, want_device, c->q, b->k, b->v));
  CUDA(cudaMemcpy(want, want_device, n * sizeof *want, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(got, c->out, n * sizeof *got, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < n; i++) {
    const double d = from_f16(got[i]) - want[i];
    off += d * d;
    all += want[i] * want[i];
  }
  CUDA(cudaFree(want_device));
  free(want);
  free(got);
  return sqrt(off / all);
}

static void run_cell(cell *c, const bench *b, FILE *csv, const char *commit) {
  setup(c, b);
  const double error = error_of(c, b);
  if (!(error < 1e-3)) die(c->name, "the output is wrong");
  const double before = graph_us(c, b, null_read), layer = graph_us(c, b, attend);
  const double planned = graph_us(c, b, plan_and_attend), after = graph_us(c, b, null_read);
  const double null = before < after ? before : after, wall = wall_us(c, b);
  const double bytes = 2.0 * (double)c->tokens * HEADS * DIM * 2, floor_us = 5.2 + bytes / 4.63e6;
  printf("%-18s %9.2f %9.2f %9.2f %8.3f %8.3f %9.2f %9.2f %9.1e\n", c->name, floor_us, null, layer,
         layer / floor_us, layer / null, planned - layer, wall, error);
  fflush(stdout);
  if (csv)
    fprintf(csv, "%s,%s,%s,%s,balanced,%.3f,%.3f,%.3f,%.0f,%.3f,%.3g,null_read_us=%.3f\n", commit,
            b->device, b->driver, c->name, layer, planned - layer, wall, bytes, floor_us, error,
            null);
  teardown(c);
}

int main(int argc, char **argv) {
  static cell c;
  bench b = {0};
  struct cudaDeviceProp properties;
  int driver = 0;
  if (argc < 2) die("usage", "cuda_decode CELLS [CSV] [commit]");
  FILE *in = fopen(argv[1], "r"), *csv = argc > 2 ? fopen(argv[2], "w") : NULL;
  if (in == NULL) die(argv[1], "cannot be read");
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.device = PKV_DEVICE_CUDA;
  PKV(pkv_executor_create(&b.executor, &options, &err));
  CUDA(cudaGetDeviceProperties(&properties, 0));
  CUDA(cudaDriverGetVersion(&driver));
  snprintf(b.device, sizeof b.device, "%s", properties.name);
  snprintf(b.driver, sizeof b.driver, "%d", driver);
  b.sms = properties.multiProcessorCount;
  b.room = (size_t)6 << 30;
  CUDA(cudaStreamCreate(&b.stream));
  CUDA(cudaMalloc(&b.k, b.room));
  CUDA(cudaMalloc(&b.v, b.room));
  CUDA(bench_fill(b.k, (int64_t)(b.room / 2), 1));
  CUDA(bench_fill(b.v, (int64_t)(b.room / 2), 2));
  if (csv)
    fputs("commit,device,driver,cell,route,gpu_us,plan_us,wall_us,bytes,floor_us,error,peers\n",
          csv);
  printf("%-18s %9s %9s %9s %8s %8s %9s %9s %9s\n", "cell", "floor", "null", "balanced", "/floor",
         "/null", "plan", "wall", "error");
  while (read_cell(&c, in))
    run_cell(&c, &b, csv, argc > 3 ? argv[3] : "?");
  if (csv) fclose(csv);
  fclose(in);
  pkv_executor_destroy(b.executor);
  return 0;
}
