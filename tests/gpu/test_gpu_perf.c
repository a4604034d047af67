/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times with a bound each, from what users of other libraries reported (numbers as in
 * docs/notes/gpu-tests.md). Run when named only: other work on the machine makes them fail. Layers
 * of one graph with caches of their own, so that the L2 is cold; medians; the null read of the same
 * pages in the same graph is the measure, so that the bounds hold for any device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "gpu/gpu_case.h"
#include "measure/meter.h"
#include "support/tree_batch.h"

enum { WARMUPS = 3, REPEATS = 15, MOST_LAYERS = 48, NULLS = 3 };
#define COLD_BYTES (INT64_C(400) << 20)
#define POOL_BYTES (INT64_C(9) << 30)

static pkv_meter *meter;
static unsigned char *pool; /* of POOL_BYTES, finite numbers */

typedef struct perf_shape {
  int32_t kv_heads, group, head_dim, page;
  pkv_dtype kv;
} perf_shape;

typedef struct perf_result {
  double us, null_us, gb_s; /* of one layer; useful bytes */
  int32_t parts;
} perf_result;

/* One batch on the device. */
typedef struct perf_batch {
  pkv_cache cache[MOST_LAYERS];
  pkv_attention_args args;
  pkv_meter_batch view;
  pkv_device_plan *plan;
  int32_t layers;
  int64_t bytes; /* of a layer */
  void *table, *seq_len, *first_page, *q, *out;
} perf_batch;

static void *device(size_t bytes, const void *from) {
  void *p = NULL;
  OK(pkv_device_alloc(&p, gpu, bytes, err));
  if (from != NULL) OK(pkv_device_copy(gpu, p, from, bytes, meter->stream, err));
  OK(pkv_device_synchronize(gpu, meter->stream, err));
  return p;
}

/* HND pages in a shuffled order, layer after layer in the pool. */
static void batch_place(perf_batch *b, const perf_shape *s, const int32_t *lens, int32_t rows) {
  int64_t pages = 0, most = 1;
  int32_t *first = calloc((size_t)rows + 1, sizeof *first);
  for (int32_t r = 0; r < rows; r++) {
    const int32_t need = (lens[r] + s->page - 1) / s->page;
    first[r + 1] = first[r] + need;
    most = need > most ? need : most;
  }
  pages = first[rows] > 0 ? first[rows] : 1;
  int32_t *order = malloc((size_t)pages * sizeof *order),
          *table = malloc((size_t)(rows * most) * 4);
  pkv_rng rng;
  pkv_rng_init(&rng, 3);
  for (int64_t i = 0; i < pages; i++)
    order[i] = (int32_t)i;
  for (int64_t i = pages - 1; i > 0; i--) {
    const int64_t j = (int64_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    const int32_t swap = order[i];
    order[i] = order[j];
    order[j] = swap;
  }
  for (int32_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < most; i++)
      table[r * most + i] = i < first[r + 1] - first[r] ? order[first[r] + i] : -1;
  const int64_t stride = (int64_t)s->page * s->kv_heads * s->head_dim;
  const int64_t side = pages * stride * (int64_t)pkv_dtype_bytes(s->kv);
  int64_t layers = COLD_BYTES / (2 * side) + 2;
  if (layers > MOST_LAYERS) layers = MOST_LAYERS;
  assert_true(layers * 2 * side <= POOL_BYTES);
  b->layers = (int32_t)layers;
  for (int32_t l = 0; l < b->layers; l++) {
    pkv_cache *c = &b->cache[l];
    *c = (pkv_cache)PKV_CACHE_INIT;
    c->dtype = s->kv;
    c->k = pool + 2 * l * side;
    c->v = pool + (2 * l + 1) * side;
    c->pages = pages;
    c->page_tokens = s->page;
    c->kv_heads = s->kv_heads;
    c->head_dim = s->head_dim;
    c->k_token_stride = c->v_token_stride = s->head_dim;
    c->k_head_stride = c->v_head_stride = (int64_t)s->page * s->head_dim;
    c->k_page_stride = c->v_page_stride = stride;
  }
  b->table = device((size_t)(rows * most) * sizeof *table, table);
  b->seq_len = device((size_t)rows * sizeof *lens, lens);
  b->first_page = device(((size_t)rows + 1) * sizeof *first, first);
  b->view = (pkv_meter_batch){.rows = rows, .q_len = 1, .stride = most};
  b->view.query_heads = s->kv_heads * s->group;
  b->view.table = b->table;
  b->view.seq_len = b->seq_len;
  b->view.first_page = b->first_page;
  b->view.pages_read = first[rows];
  free(order);
  free(table);
  free(first);
}

static pkv_shape shape_of(const perf_shape *s) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = s->kv_heads;
  shape.query_heads = s->kv_heads * s->group;
  shape.head_dim = s->head_dim;
  shape.page_tokens = s->page;
  return shape;
}

static void batch_init(perf_batch *b, const perf_shape *s, const int32_t *lens, int32_t rows) {
  int32_t longest = 1;
  memset(b, 0, sizeof *b);
  batch_place(b, s, lens, rows);
  for (int32_t r = 0; r < rows; r++) {
    longest = lens[r] > longest ? lens[r] : longest;
    b->bytes += (int64_t)lens[r] * s->kv_heads * s->head_dim * 2 * (int64_t)pkv_dtype_bytes(s->kv);
  }
  const pkv_shape shape = shape_of(s);
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  const size_t out = (size_t)rows * (size_t)(shape.query_heads * s->head_dim) * 2;
  b->q = device(out, NULL);
  b->out = device(out, NULL);
  b->args = (pkv_attention_args)PKV_ATTENTION_ARGS_INIT;
  b->args.block_table = b->table;
  b->args.max_pages = (int32_t)b->view.stride;
  b->args.q = b->q;
  b->args.out = b->out;
  b->args.q_dtype = b->args.out_dtype = PKV_DTYPE_F16;
  OK(pkv_device_plan_create(&b->plan, gpu, &shape, &options, s->kv, rows, longest, err));
  pkv_device_plan_set_overlap(b->plan, 2);
  OK(pkv_device_plan_build(b->plan, rows, b->seq_len, meter->stream, err));
  OK(pkv_device_synchronize(gpu, meter->stream, err));
}

static void batch_deinit(perf_batch *b) {
  void *all[] = {b->table, b->seq_len, b->first_page, b->q, b->out};
  pkv_device_plan_destroy(b->plan);
  for (size_t i = 0; i < COUNT(all); i++)
    pkv_device_free(gpu, all[i]);
}

typedef struct work {
  perf_batch *b;
  int32_t waves; /* of the null read; 0 = attention */
} work;

static pkv_status enqueue(void *ctx, int32_t call, pkv_error *err) {
  const work *w = ctx;
  const pkv_cache *cache = &w->b->cache[call % w->b->layers];
  if (w->waves > 0) return meter->ops->null_read(meter, cache, &w->b->view, w->waves, err);
  pkv_attention_args args = w->b->args;
  args.cache = cache;
  return pkv_device_attention(gpu, w->b->plan, &args, meter->stream, err);
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static double median(double *us) {
  qsort(us, REPEATS, sizeof *us, by_size);
  return us[REPEATS / 2];
}

/* Time of one layer beside the fastest of three null reads. */
static perf_result measure(const perf_shape *s, const int32_t *lens, int32_t rows) {
  static const int32_t waves[NULLS] = {2, 4, 8};
  perf_batch b;
  work works[NULLS + 1];
  pkv_meter_section sections[NULLS + 1];
  double us[(NULLS + 1) * REPEATS];
  perf_result r = {0};
  batch_init(&b, s, lens, rows);
  for (int i = 0; i <= NULLS; i++) {
    works[i] = (work){&b, i < NULLS ? waves[i] : 0};
    sections[i] = (pkv_meter_section){enqueue, &works[i], b.layers};
  }
  OK(meter->ops->graph(meter, us, sections, NULLS + 1, 0, WARMUPS, REPEATS, err));
  for (int i = 0; i < NULLS; i++) {
    const double t = median(us + i * REPEATS) / b.layers;
    if (i == 0 || t < r.null_us) r.null_us = t;
  }
  r.us = median(us + NULLS * REPEATS) / b.layers;
  r.gb_s = (double)b.bytes / r.us / 1e3;
  const pkv_shape shape = shape_of(s);
  OK(pkv_device_parts(&r.parts, gpu, &shape, s->kv, err));
  batch_deinit(&b);
  return r;
}

/* ------------------------------------------------------------------ bounds */

static const perf_shape usual = {8, 4, 128, 16, PKV_DTYPE_F16};
static int missed; /* bounds of the running test */

/* A line for each bound; a test that missed one fails at its end, with all its lines printed. */
static void bound(const char *name, double got, double most) {
  const bool good = got <= most;
  printf("  %-46s %8.3f  (at most %.3f)%s\n", name, got, most, good ? "" : "  MISSED");
  if (!good) missed++;
}

static void verdict(void) {
  const int n = missed;
  missed = 0;
  if (n > 0) fail_msg("%d bounds missed", n);
}

static void fill_lens(int32_t *lens, int32_t rows, int32_t value) {
  for (int32_t r = 0; r < rows; r++)
    lens[r] = value;
}

/* Time over the null read's, with what it was measured on. */
static perf_result against_null(const char *name, const perf_shape *s, const int32_t *lens,
                                int32_t rows, double most) {
  const perf_result r = measure(s, lens, rows);
  char text[96];
  snprintf(text, sizeof text, "%s: %.1f us, %.0f GB/s, x null", name, r.us, r.gb_s);
  bound(text, r.us / r.null_us, most);
  return r;
}

static void test_c01_long_row_among_many(void **state) {
  (void)state;
  NEED_GPU();
  int32_t lens[192];
  double first = 0.0;
  static const int32_t place[] = {0, 191, 97, 13};
  for (size_t i = 0; i < COUNT(place); i++) {
    char name[48];
    fill_lens(lens, 192, 2048);
    lens[place[i]] = 131072;
    snprintf(name, sizeof name, "128K row at %d of 192", place[i]);
    const perf_result r = against_null(name, &usual, lens, 192, 1.15);
    if (i == 0) first = r.us;
    bound("  time over that of the first order", r.us / first, 1.05);
  }
  verdict();
}

static void test_c02_long_and_short_row(void **state) {
  (void)state;
  NEED_GPU();
  const int32_t two[] = {131072, 512}, one[] = {131584};
  bound("{131072, 512} over {131584}", measure(&usual, two, 2).us / measure(&usual, one, 1).us,
        1.10);
  verdict();
}

static void test_c03_no_step_at_33_rows(void **state) {
  (void)state;
  NEED_GPU();
  int32_t lens[34];
  double before = 0.0;
  fill_lens(lens, 34, 1024);
  lens[5] = 65536;
  for (int32_t rows = 32; rows <= 34; rows++) {
    const double us = measure(&usual, lens, rows).us;
    char name[64];
    snprintf(name, sizeof name, "%d rows, %.1f us, over one row less", rows, us);
    if (rows > 32) bound(name, us / before, 1.10);
    before = us;
  }
  verdict();
}

static void test_c04_one_row_from_16k(void **state) {
  (void)state;
  NEED_GPU();
  for (int32_t len = 1024; len <= 1 << 20; len *= 2) {
    char name[32];
    snprintf(name, sizeof name, "one row of %d", len);
    (void)against_null(name, &usual, &len, 1, len >= 16384 ? 1.0 / 0.85 : 10.0);
  }
  verdict();
}

static void test_c05_one_kv_head(void **state) {
  (void)state;
  NEED_GPU();
  const perf_shape s = {1, 8, 128, 16, PKV_DTYPE_F16};
  const int32_t len = 262144;
  const perf_result r = against_null("one row of 256K, one KV head", &s, &len, 1, 1.0 / 0.85);
  bound("multiprocessors over parts", (double)meter->info.multiprocessors / r.parts, 1.0);
  verdict();
}

static void test_c06_many_rows_one_kv_head(void **state) {
  (void)state;
  NEED_GPU();
  const perf_shape s = {1, 8, 128, 16, PKV_DTYPE_F16};
  int32_t lens[64];
  pkv_rng rng;
  pkv_rng_init(&rng, 6);
  for (int32_t rows = 32; rows <= 64; rows += 32) {
    fill_lens(lens, rows, 32768);
    (void)against_null("32K uniform, one KV head", &s, lens, rows, 1.0 / 0.85);
    for (int32_t r = 0; r < rows; r++)
      lens[r] = (int32_t)pkv_rng_range(&rng, 1000, 64536);
    (void)against_null("32K ragged, one KV head", &s, lens, rows, 1.0 / 0.85);
  }
  verdict();
}

static void test_c07_no_spikes_over_batch_sizes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lengths[] = {512, 4096};
  const perf_shape s = {8, 5, 128, 16, PKV_DTYPE_F16};
  int32_t lens[64];
  for (size_t i = 0; i < COUNT(lengths); i++) {
    double before = 0.0, worst = 0.0;
    int32_t at = 0;
    fill_lens(lens, 64, lengths[i]);
    for (int32_t rows = 1; rows <= 64; rows++) {
      const double us = measure(&s, lens, rows).us;
      /* the bytes grow by 1 / rows: what counts is the growth beyond them */
      const double step = rows > 1 ? us / before / (rows > 8 ? 1.0 : (double)rows / (rows - 1)) : 0;
      if (step > worst) {
        worst = step;
        at = rows;
      }
      before = us;
    }
    char name[64];
    snprintf(name, sizeof name, "length %d: worst step, at %d rows", lengths[i], at);
    bound(name, worst, 1.15);
  }
  verdict();
}

/* Rows shorter than a tile: what counts is what a row costs beside its bytes. */
static void test_short_rows(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lengths[] = {30, 100, 200};
  static int32_t lens[4096];
  for (size_t i = 0; i < COUNT(lengths); i++)
    for (int32_t rows = 256; rows <= 4096; rows *= 4) {
      char name[48];
      snprintf(name, sizeof name, "%d rows of %d", rows, lengths[i]);
      fill_lens(lens, rows, lengths[i]);
      (void)against_null(name, &usual, lens, rows, rows > 256 ? 1.35 : 10.0);
    }
  verdict();
}

static void test_c20_room_for_more_rows(void **state) {
  (void)state;
  NEED_GPU();
  int32_t lens[512] = {0};
  lens[0] = 8192;
  lens[1] = 2048;
  const double two = measure(&usual, lens, 2).us;
  bound("2 live rows of 64 over 2 of 2", measure(&usual, lens, 64).us / two, 1.10);
  bound("2 live rows of 512 over 2 of 2", measure(&usual, lens, 512).us / two, 2.0);
  verdict();
}

static void test_c26_page_sizes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t pages[] = {128, 64, 32, 1};
  int32_t lens[32];
  perf_shape s = usual;
  fill_lens(lens, 32, 8192);
  const double sixteen = measure(&s, lens, 32).us;
  for (size_t i = 0; i < COUNT(pages); i++) {
    char name[48];
    s.page = pages[i];
    const double us = measure(&s, lens, 32).us;
    snprintf(name, sizeof name, "page %d, %.1f us, over page 16's", pages[i], us);
    bound(name, us / sixteen, pages[i] == 1 ? 1.0 / 0.85 : 1.10);
    snprintf(name, sizeof name, "page 16's over page %d's", pages[i]);
    bound(name, sixteen / us, 1.0 / 0.9);
  }
  verdict();
}

static void test_c48_fp8_against_f16(void **state) {
  (void)state;
  NEED_GPU();
  int32_t lens[4];
  perf_shape s = usual;
  fill_lens(lens, 4, 65536);
  const double f16 = measure(&s, lens, 4).us;
  s.kv = PKV_DTYPE_FP8_E4M3;
  bound("64K: fp8 over f16", measure(&s, lens, 4).us / f16, 1.0 / 1.6);
  verdict();
}

/* ------------------------------------------------------------------ appending */

enum { APPENDS = 24, APPEND_PAGES = 4096 };

/* Appends to caches of the pool in turn, each with sources of its own. */
typedef struct append_work {
  pkv_cache cache[APPENDS];
  pkv_append_args args[APPENDS];
} append_work;

static pkv_status enqueue_append(void *ctx, int32_t call, pkv_error *err) {
  append_work *w = ctx;
  return pkv_device_append(gpu, &w->args[call], meter->stream, err);
}

/* Microseconds of one append of 8 heads of 128 to pages of 16 tokens in any order. */
static double time_append(int32_t tokens, pkv_dtype kv, const pkv_rope *rope, void *slots) {
  static append_work w;
  const int64_t side = (int64_t)APPEND_PAGES * 16 * 8 * 128 * (int64_t)pkv_dtype_bytes(kv);
  const int64_t source = (int64_t)tokens * 8 * 128 * 2;
  double us[REPEATS];
  for (int i = 0; i < APPENDS; i++) {
    pkv_cache *c = &w.cache[i];
    *c = (pkv_cache)PKV_CACHE_INIT;
    c->dtype = kv;
    c->k = pool + 2 * i * (side + source);
    c->v = (unsigned char *)c->k + side;
    c->pages = APPEND_PAGES;
    c->page_tokens = 16;
    c->kv_heads = 8;
    c->head_dim = 128;
    c->k_token_stride = c->v_token_stride = 128;
    c->k_head_stride = c->v_head_stride = 16 * 128;
    c->k_page_stride = c->v_page_stride = 8 * 16 * 128;
    w.args[i] = (pkv_append_args)PKV_APPEND_ARGS_INIT;
    w.args[i].cache = c;
    w.args[i].tokens = tokens;
    w.args[i].slots = slots;
    w.args[i].k = (unsigned char *)c->v + side;
    w.args[i].v = (const unsigned char *)w.args[i].k + source;
    w.args[i].dtype = PKV_DTYPE_F16;
    w.args[i].rope = rope;
  }
  const pkv_meter_section section = {enqueue_append, &w, APPENDS};
  OK(meter->ops->graph(meter, us, &section, 1, 0, WARMUPS, REPEATS, err));
  return median(us) / APPENDS;
}

/* What reading and writing its bytes takes beside a launch. */
static void test_append(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t counts[] = {1, 64, 512, 4096};
  static const pkv_dtype types[] = {PKV_DTYPE_F16, PKV_DTYPE_FP8_E4M3};
  int64_t *slots = malloc(sizeof *slots * 4096);
  int32_t *positions = malloc(sizeof *positions * 4096);
  pkv_rng rng;
  pkv_rng_init(&rng, 8);
  for (int32_t i = 0; i < 4096; i++) {
    slots[i] = (int64_t)i * 16 + (int64_t)pkv_rng_below(&rng, 16);
    positions[i] = i * 7;
  }
  for (int32_t i = 4095; i > 0; i--) {
    const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    const int64_t swap = slots[i];
    slots[i] = slots[j];
    slots[j] = swap;
  }
  void *at = device(sizeof *slots * 4096, slots);
  pkv_rope rope = PKV_ROPE_INIT;
  rope.positions = device(sizeof *positions * 4096, positions);
  for (size_t k = 0; k < COUNT(types); k++)
    for (int turned = 0; turned < 2; turned++)
      for (size_t i = 0; i < COUNT(counts); i++) {
        const double us = time_append(counts[i], types[k], turned ? &rope : NULL, at);
        const double bytes = (double)counts[i] * 2048 * (2.0 + (double)pkv_dtype_bytes(types[k]));
        char name[80];
        snprintf(name, sizeof name, "append %d tokens to %s%s: %.1f us, x floor", counts[i],
                 pkv_dtype_name(types[k]), turned ? ", turned" : "", us);
        bound(name, us / (5.2 + bytes / 4.63e6), turned ? 2.75 : 1.75);
      }
  pkv_device_free(gpu, at);
  pkv_device_free(gpu, (void *)(uintptr_t)rope.positions);
  free(slots);
  free(positions);
  verdict();
}

/* ------------------------------------------------------------------ graphs */

#define CUDA(call)                                                                                 \
  do {                                                                                             \
    const cudaError_t cuda_error = (call);                                                         \
    if (cuda_error != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(cuda_error));      \
  } while (0)

static cudaGraphExec_t capture_step(perf_batch *b) {
  cudaStream_t stream = meter->stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  OK(pkv_device_plan_build(b->plan, b->view.rows, b->seq_len, stream, err));
  for (int32_t i = 0; i < b->layers; i++) {
    pkv_attention_args args = b->args;
    args.cache = &b->cache[i];
    OK(pkv_device_attention(gpu, b->plan, &args, stream, err));
  }
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return exec;
}

static double time_graph(cudaGraphExec_t exec) {
  cudaStream_t stream = meter->stream;
  cudaEvent_t from, to;
  double us[REPEATS];
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  for (int i = -WARMUPS; i < REPEATS; i++) {
    float ms = 0.0f;
    CUDA(cudaEventRecord(from, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (i >= 0) us[i] = (double)ms * 1e3;
  }
  CUDA(cudaEventDestroy(from));
  CUDA(cudaEventDestroy(to));
  return median(us);
}

/* 19: a graph captured with one token a row is as fast at 100K as one captured there. */
static void test_c19_captured_short_replayed_long(void **state) {
  (void)state;
  NEED_GPU();
  const int32_t longs[] = {100000, 50000, 1, 700}, ones[] = {1, 1, 1, 1};
  perf_batch b;
  batch_init(&b, &usual, longs, 4);
  cudaGraphExec_t at_long = capture_step(&b);
  CUDA(cudaMemcpy(b.seq_len, ones, sizeof ones, cudaMemcpyHostToDevice));
  cudaGraphExec_t at_short = capture_step(&b);
  (void)time_graph(at_short);
  CUDA(cudaMemcpy(b.seq_len, longs, sizeof longs, cudaMemcpyHostToDevice));
  bound("captured at 1, replayed at 100K, over captured there",
        time_graph(at_short) / time_graph(at_long), 1.10);
  CUDA(cudaGraphExecDestroy(at_short));
  CUDA(cudaGraphExecDestroy(at_long));
  batch_deinit(&b);
  verdict();
}

/* ------------------------------------------------------------------ trees */

enum { TREE_BUILDS = 32 };

static cudaGraphExec_t capture_trees(pkv_device_plan *plan, const tree_batch *b, void *lens,
                                     const pkv_sharing *sharing, int builds) {
  cudaStream_t stream = meter->stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < builds; i++)
    OK(pkv_device_plan_build_shared(plan, b->rows, lens, sharing, stream, err));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return exec;
}

/* Microseconds that one more plan takes in a graph; finishes and frees the batch. */
static double time_tree(tree_batch *b, uint32_t flags) {
  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = NULL;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  options.route = PKV_ROUTE_SHARED;
  tree_batch_finish(b, 5);
  pkv_sharing sharing = tree_batch_sharing(b);
  const size_t rows = (size_t)b->rows;
  void *lens = device(rows * 4, b->seq_len);
  void *table = device(rows * (size_t)b->max_pages * 4, b->table);
  sharing.block_table = table;
  sharing.flags = flags;
  OK(pkv_device_plan_create(&plan, gpu, &shape, &options, PKV_DTYPE_F16, b->rows, 1 << 15, err));
  cudaGraphExec_t one = capture_trees(plan, b, lens, &sharing, 1);
  cudaGraphExec_t many = capture_trees(plan, b, lens, &sharing, 1 + TREE_BUILDS);
  const double us = (time_graph(many) - time_graph(one)) / TREE_BUILDS;
  CUDA(cudaGraphExecDestroy(one));
  CUDA(cudaGraphExecDestroy(many));
  pkv_device_plan_destroy(plan);
  pkv_device_free(gpu, lens);
  pkv_device_free(gpu, table);
  tree_batch_deinit(b);
  return us;
}

/* Rows behind `groups` prefixes of 640 pages. */
static double time_prefixes(int32_t rows, int32_t groups, uint32_t flags) {
  tree_batch b;
  tree_batch_init(&b, 16);
  for (int32_t g = 0; g < groups; g++) {
    const int32_t root = tree_batch_node(&b, -1, 10240);
    for (int32_t i = 0; i < rows / groups; i++)
      tree_batch_row(&b, root, 64 + i % 200);
  }
  return time_tree(&b, flags);
}

static void test_tree_planning(void **state) {
  (void)state;
  NEED_GPU();
  bound("256 rows behind 640 pages, us", time_prefixes(256, 1, 0u), 15.0);
  bound("the same, chained", time_prefixes(256, 1, PKV_TABLE_CHAINED), 15.0);
  bound("256 rows in 8 groups", time_prefixes(256, 8, 0u), 15.0);
  bound("1024 rows behind 640 pages", time_prefixes(1024, 1, 0u), 40.0);
  bound("1024 rows in 8 groups", time_prefixes(1024, 8, 0u), 40.0);
  bound("256 rows that share nothing", time_prefixes(256, 256, 0u), 15.0);
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t system = tree_batch_node(&b, -1, 1024);
  for (int i = 0; i < 8; i++) {
    const int32_t shots = tree_batch_node(&b, system, 4096);
    for (int k = 0; k < 32; k++)
      tree_batch_row(&b, tree_batch_node(&b, shots, k % 4 * 256), 100 + k);
  }
  bound("256 rows, two levels", time_tree(&b, 0u), 15.0);
  tree_batch_init(&b, 16);
  for (int32_t i = 0, at = -1; i < 256; i++) {
    tree_batch_row(&b, at, 70);
    at = tree_batch_node(&b, at, 64);
  }
  bound("256 rows, a staggered chain", time_tree(&b, 0u), 40.0);
  verdict();
}

/* ------------------------------------------------------------------ layers that share */

/* One batch planned twice: shared, and row by row. */
typedef struct share_work {
  perf_batch b;
  pkv_device_plan *plan[2];
} share_work;

typedef struct share_section {
  share_work *w;
  int route; /* of plan */
} share_section;

static pkv_status enqueue_shared(void *ctx, int32_t call, pkv_error *err) {
  const share_section *s = ctx;
  pkv_attention_args args = s->w->b.args;
  args.cache = &s->w->b.cache[call % s->w->b.layers];
  return pkv_device_attention(gpu, s->w->plan[s->route], &args, meter->stream, err);
}

static void share_caches(perf_batch *b, const tree_batch *t) {
  const int64_t stride = (int64_t)t->page_tokens * 8 * 128, side = t->pages * stride * 2;
  int64_t layers = COLD_BYTES / (2 * side) + 2;
  if (layers > MOST_LAYERS) layers = MOST_LAYERS;
  assert_true(layers * 2 * side <= POOL_BYTES);
  b->layers = (int32_t)layers;
  for (int32_t l = 0; l < b->layers; l++) {
    pkv_cache *c = &b->cache[l];
    *c = (pkv_cache)PKV_CACHE_INIT;
    c->dtype = PKV_DTYPE_F16;
    c->k = pool + 2 * l * side;
    c->v = pool + (2 * l + 1) * side;
    c->pages = t->pages;
    c->page_tokens = t->page_tokens;
    c->kv_heads = 8;
    c->head_dim = 128;
    c->k_token_stride = c->v_token_stride = 128;
    c->k_head_stride = c->v_head_stride = (int64_t)t->page_tokens * 128;
    c->k_page_stride = c->v_page_stride = stride;
  }
}

static void share_init(share_work *w, const tree_batch *t) {
  static const pkv_route routes[] = {PKV_ROUTE_SHARED, PKV_ROUTE_BALANCED};
  perf_batch *b = &w->b;
  const size_t rows = (size_t)t->rows, out = rows * 32 * 128 * 2;
  memset(w, 0, sizeof *w);
  share_caches(b, t);
  b->table = device(rows * (size_t)t->max_pages * 4, t->table);
  b->seq_len = device(rows * 4, t->seq_len);
  b->q = device(out, NULL);
  b->out = device(out, NULL);
  b->args = (pkv_attention_args)PKV_ATTENTION_ARGS_INIT;
  b->args.block_table = b->table;
  b->args.max_pages = t->max_pages;
  b->args.q = b->q;
  b->args.out = b->out;
  b->args.q_dtype = b->args.out_dtype = PKV_DTYPE_F16;
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  shape.page_tokens = t->page_tokens;
  pkv_sharing sharing = tree_batch_sharing(t);
  sharing.block_table = b->table;
  for (int i = 0; i < 2; i++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = routes[i];
    OK(pkv_device_plan_create(&w->plan[i], gpu, &shape, &options, PKV_DTYPE_F16, t->rows, 1 << 17,
                              err));
    pkv_device_plan_set_overlap(w->plan[i], 2);
    if (i == 0)
      OK(pkv_device_plan_build_shared(w->plan[i], t->rows, b->seq_len, &sharing, meter->stream,
                                      err));
    else
      OK(pkv_device_plan_build(w->plan[i], t->rows, b->seq_len, meter->stream, err));
  }
  OK(pkv_device_synchronize(gpu, meter->stream, err));
}

/* Microseconds a layer, shared and row by row, in one graph each, in turns. Frees the batch. */
static void time_shared(double us[2], tree_batch *t) {
  share_work w;
  share_section sections_of[2];
  pkv_meter_section sections[2];
  double times[2 * REPEATS];
  tree_batch_finish(t, 7);
  share_init(&w, t);
  for (int i = 0; i < 2; i++) {
    sections_of[i] = (share_section){&w, i};
    sections[i] = (pkv_meter_section){enqueue_shared, &sections_of[i], w.b.layers};
  }
  OK(meter->ops->graph(meter, times, sections, 2, 0, WARMUPS, REPEATS, err));
  for (int i = 0; i < 2; i++) {
    us[i] = median(times + i * REPEATS) / w.b.layers;
    pkv_device_plan_destroy(w.plan[i]);
  }
  void *all[] = {w.b.table, w.b.seq_len, w.b.q, w.b.out};
  for (size_t i = 0; i < COUNT(all); i++)
    pkv_device_free(gpu, all[i]);
  tree_batch_deinit(t);
}

/* What reading each page once and multiplying takes on an H200: 4.63 TB/s, 600 TFLOP/s. */
static double share_limit(double tokens, double row_tokens) {
  const double read = tokens * 4096 / 4.63e6, multiply = 4.0 * 32 * 128 * row_tokens / 600e6;
  return 5.2 + (read > multiply ? read : multiply);
}

static void test_shared_layers(void **state) {
  (void)state;
  NEED_GPU();
  static const struct {
    int32_t groups, rows, prefix, own;
  } cells[] = {{1, 8, 4096, 256},   {1, 32, 4096, 256},   {1, 64, 8192, 512},
               {1, 100, 10240, 64}, {1, 256, 2048, 256},  {8, 32, 2048, 256},
               {8, 100, 10240, 64}, {8, 100, 10240, 160}, {8, 100, 2048, 160}};
  for (size_t i = 0; i < COUNT(cells); i++) {
    const int32_t rows = cells[i].groups * cells[i].rows;
    char name[80];
    double us[2];
    tree_batch t;
    tree_batch_init(&t, 16);
    for (int32_t g = 0; g < cells[i].groups; g++) {
      const int32_t root = tree_batch_node(&t, -1, cells[i].prefix);
      for (int32_t r = 0; r < cells[i].rows; r++)
        tree_batch_row(&t, root, cells[i].own);
    }
    time_shared(us, &t);
    const double limit =
        share_limit((double)cells[i].groups * cells[i].prefix + (double)rows * cells[i].own,
                    (double)rows * cells[i].prefix);
    snprintf(name, sizeof name, "%d x %d, %d + %d: %.1f us, rows %.1f, x limit", cells[i].groups,
             cells[i].rows, cells[i].prefix, cells[i].own, us[0], us[1]);
    bound(name, us[0] / limit, 1.35);
  }
  verdict();
}

/* Rows that share nothing: the route's own cost. */
static void test_shared_without_sharing(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t cells[][2] = {{32, 2048}, {64, 1024}, {256, 512}, {16, 16384}};
  for (size_t i = 0; i < COUNT(cells); i++) {
    char name[64];
    double us[2];
    tree_batch t;
    tree_batch_init(&t, 16);
    for (int32_t r = 0; r < cells[i][0]; r++)
      tree_batch_row(&t, -1, cells[i][1] + r % 17);
    time_shared(us, &t);
    snprintf(name, sizeof name, "%d rows of %d that share nothing: %.1f us, over %.1f", cells[i][0],
             cells[i][1], us[0], us[1]);
    bound(name, us[0] / us[1], 1.02);
  }
  verdict();
}

/* ------------------------------------------------------------------ group */

static int setup(void **state) {
  pkv_error err = {0};
  (void)state;
  if (gpu_opt.fake || pkv_meter_create(&meter, &err) != PKV_OK) {
    printf("no device: %s\n", err.text);
    return gpu_opt.need_gpu ? -1 : 0;
  }
  gpu = meter->executor;
  void *p = NULL;
  if (pkv_device_alloc(&p, gpu, (size_t)POOL_BYTES, &err) != PKV_OK ||
      meter->ops->set(meter, p, 0x38, (size_t)POOL_BYTES, &err) != PKV_OK) {
    printf("%s\n", err.text);
    return -1;
  }
  pool = p;
  printf("  %s, %d multiprocessors\n", meter->info.device, meter->info.multiprocessors);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  pkv_device_free(gpu, pool);
  pkv_meter_destroy(meter);
  gpu = NULL;
  meter = NULL;
  return 0;
}

int gpu_suite_perf(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_c01_long_row_among_many),
      cmocka_unit_test(test_c02_long_and_short_row),
      cmocka_unit_test(test_c03_no_step_at_33_rows),
      cmocka_unit_test(test_c04_one_row_from_16k),
      cmocka_unit_test(test_c05_one_kv_head),
      cmocka_unit_test(test_c06_many_rows_one_kv_head),
      cmocka_unit_test(test_c07_no_spikes_over_batch_sizes),
      cmocka_unit_test(test_c19_captured_short_replayed_long),
      cmocka_unit_test(test_short_rows),
      cmocka_unit_test(test_c20_room_for_more_rows),
      cmocka_unit_test(test_c26_page_sizes),
      cmocka_unit_test(test_c48_fp8_against_f16),
      cmocka_unit_test(test_append),
      cmocka_unit_test(test_tree_planning),
      cmocka_unit_test(test_shared_layers),
      cmocka_unit_test(test_shared_without_sharing),
  };
  return cmocka_run_group_tests_name("perf", tests, setup, teardown);
}
