/* SPDX-License-Identifier: Apache-2.0 */
#include "measure/layer_bench.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "backend/device_dense.h"
#include "base/alloc.h"
#include "base/sort.h"
#include "base/status.h"

#define PAGE 16
#define LEAST_COLD                                                                                 \
  ((int64_t)3 << 30) /* bytes that a graph reads before it comes back to the first */
#define MOST    32   /* layers of a graph */
#define EPSILON 1e-6f

/* Device memory of one kind, a part a layer. */
typedef struct part {
  void *memory;
  int64_t each; /* bytes */
} part;

typedef struct bench {
  pkv_meter *meter;
  const pkv_layer_shape *shape;
  int32_t rows, length, layers, pages;
  int64_t q, kv; /* widths */
  part qkv, o, gate_up, down, cache;
  void *x, *ones, *normed, *rotated, *attended, *gate_scratch, *gated; /* activations */
  int32_t *table, *seq_len, *positions;                                /* device */
  int64_t *slots;
  double *frequency;
  pkv_device_plan *plan;
} bench;

static pkv_status take(bench *b, void **out, int64_t bytes, pkv_error *err) {
  return pkv_device_alloc(out, b->meter->executor, (size_t)bytes, err);
}

static pkv_status fill(bench *b, void *to, int64_t elements, uint64_t seed, float deviation,
                       pkv_error *err) {
  const pkv_dense_random_params p =
      pkv_dense_random_run(to, PKV_DTYPE_BF16, elements, seed, deviation);
  return b->meter->executor->dense->weight_random(b->meter->executor, &p, b->meter->stream, err);
}

static pkv_status take_weights(bench *b, part *p, int64_t n, int64_t k, uint64_t seed,
                               pkv_error *err) {
  p->each = n * k * 2;
  PKV_TRY(take(b, &p->memory, p->each * b->layers, err));
  return fill(b, p->memory, n * k * b->layers, seed, pkv_random_deviation(k), err);
}

/* ---- what a graph touches ---- */

static pkv_status take_memory(bench *b, pkv_error *err) {
  const pkv_layer_shape *s = b->shape;
  const int64_t width = s->width, ffn = s->feed_forward, m = b->rows;
  const int64_t tokens = (int64_t)b->pages * PAGE;
  PKV_TRY(take_weights(b, &b->qkv, b->q + 2 * b->kv, width, 1, err));
  PKV_TRY(take_weights(b, &b->o, width, b->q, 2, err));
  PKV_TRY(take_weights(b, &b->gate_up, 2 * ffn, width, 3, err));
  PKV_TRY(take_weights(b, &b->down, width, ffn, 4, err));
  b->cache.each = tokens * b->kv * 4;
  PKV_TRY(take(b, &b->cache.memory, b->cache.each * b->layers, err));
  PKV_TRY(fill(b, b->cache.memory, b->cache.each / 2 * b->layers, 5, 1.0f, err));
  PKV_TRY(take(b, &b->x, m * width * 4, err));
  PKV_TRY(take(b, &b->ones, width * 4, err));
  PKV_TRY(take(b, &b->normed, m * width * 2, err));
  PKV_TRY(take(b, &b->rotated, m * (b->q + 2 * b->kv) * 2, err));
  PKV_TRY(take(b, &b->attended, m * b->q * 2, err));
  PKV_TRY(take(b, &b->gate_scratch, m * 2 * ffn * 2, err));
  return take(b, &b->gated, m * ffn * 2, err);
}

static pkv_status send(bench *b, void **out, const void *from, size_t bytes, pkv_error *err) {
  PKV_TRY(take(b, out, (int64_t)bytes, err));
  PKV_TRY(pkv_device_copy(b->meter->executor, *out, from, bytes, b->meter->stream, err));
  return pkv_device_synchronize(b->meter->executor, b->meter->stream, err);
}

/* Host arrays of the batch: rows' pages lie all over the cache. */
static pkv_status fill_batch(bench *b, int32_t *table, int32_t *seq_len, int32_t *positions,
                             int64_t *slots, pkv_error *err) {
  const int32_t each = b->pages / b->rows;
  void *at = NULL;
  for (int32_t i = 0; i < b->pages; i++)
    table[i] = (int32_t)((int64_t)i % each * b->rows + i / each);
  for (int32_t r = 0; r < b->rows; r++) {
    seq_len[r] = b->length;
    positions[r] = b->length - 1;
    slots[r] = (int64_t)table[r * each + positions[r] / PAGE] * PAGE + positions[r] % PAGE;
  }
  PKV_TRY(send(b, &at, table, (size_t)b->pages * sizeof *table, err));
  b->table = at;
  PKV_TRY(send(b, &at, seq_len, (size_t)b->rows * sizeof *seq_len, err));
  b->seq_len = at;
  PKV_TRY(send(b, &at, positions, (size_t)b->rows * sizeof *positions, err));
  b->positions = at;
  PKV_TRY(send(b, &at, slots, (size_t)b->rows * sizeof *slots, err));
  b->slots = at;
  return PKV_OK;
}

static pkv_status fill_constants(bench *b, float *ones, pkv_error *err) {
  double frequency[PKV_ROPE_PAIRS];
  void *at = NULL;
  for (int32_t i = 0; i < b->shape->width; i++)
    ones[i] = 1.0f;
  for (int32_t j = 0; j < b->shape->head_dim / 2; j++)
    frequency[j] = pow(500000.0, -2.0 * j / b->shape->head_dim);
  PKV_TRY(pkv_device_copy(b->meter->executor, b->ones, ones, (size_t)b->shape->width * sizeof *ones,
                          b->meter->stream, err));
  PKV_TRY(send(b, &at, frequency, (size_t)(b->shape->head_dim / 2) * sizeof *frequency, err));
  b->frequency = at;
  return PKV_OK;
}

static pkv_status make_batch(bench *b, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t rows = (size_t)b->rows, pages = (size_t)b->pages, width = (size_t)b->shape->width;
  const size_t bytes = rows * 16 + pages * 4 + width * 4;
  int64_t *slots = pkv_alloc_zeroed(&a, 1, bytes);
  PKV_CHECK(err, slots, PKV_E_NOMEM, "no memory for a batch of %d rows", (int)b->rows);
  int32_t *seq_len = (int32_t *)(slots + rows), *positions = seq_len + rows;
  int32_t *table = positions + rows;
  pkv_status status = fill_batch(b, table, seq_len, positions, slots, err);
  if (status == PKV_OK) status = fill_constants(b, (float *)(table + pages), err);
  pkv_free(&a, slots, bytes);
  return status;
}

static pkv_status make_plan(bench *b, pkv_error *err) {
  pkv_shape shape = PKV_SHAPE_INIT;
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  shape.query_heads = b->shape->query_heads;
  shape.kv_heads = b->shape->kv_heads;
  shape.head_dim = b->shape->head_dim;
  shape.page_tokens = PAGE;
  PKV_TRY(pkv_device_plan_create(&b->plan, b->meter->executor, &shape, &options, PKV_DTYPE_BF16,
                                 b->rows, b->length, err));
  PKV_TRY(pkv_device_plan_build(b->plan, b->rows, b->seq_len, b->meter->stream, err));
  pkv_device_plan_set_overlap(b->plan, 2);
  return pkv_device_synchronize(b->meter->executor, b->meter->stream, err);
}

/* ---- a layer ---- */

static pkv_cache cache_of(const bench *b, int32_t layer) {
  pkv_cache c = PKV_CACHE_INIT;
  c.dtype = PKV_DTYPE_BF16;
  c.pages = b->pages;
  c.page_tokens = PAGE;
  c.kv_heads = b->shape->kv_heads;
  c.head_dim = b->shape->head_dim;
  c.k_scale = c.v_scale = 1.0f;
  c.k_token_stride = c.v_token_stride = c.head_dim;
  c.k_head_stride = c.v_head_stride = PAGE * c.head_dim;
  c.k_page_stride = c.v_page_stride = PAGE * b->kv;
  c.k = (char *)b->cache.memory + layer * b->cache.each;
  c.v = (char *)c.k + b->cache.each / 2;
  return c;
}

static pkv_status multiply(bench *b, const part *w, int32_t layer, int64_t n, int64_t k,
                           const void *x, void *y, bool adds, bool gated, pkv_error *err) {
  pkv_dense_matmul_params p = {0};
  p.w = (pkv_weight){.type = PKV_WTYPE_BF16, .n = n, .k = k, .row_bytes = 2 * k};
  p.w.data = (char *)w->memory + layer * w->each;
  p.act = PKV_DTYPE_BF16;
  p.m = b->rows;
  p.x = x;
  p.x_stride = k;
  p.y = y;
  p.y_stride = gated ? n / 2 : n;
  p.y_f32 = p.accumulate = adds;
  p.gate = gated ? PKV_DENSE_SILU : PKV_DENSE_NO_GATE;
  p.gate_scratch = b->gate_scratch;
  return b->meter->executor->dense->matmul(b->meter->executor, &p, b->meter->stream, err);
}

static pkv_status norm(bench *b, pkv_error *err) {
  const pkv_dense_norm_params p = {.act = PKV_DTYPE_BF16,
                                   .m = b->rows,
                                   .n = b->shape->width,
                                   .eps = EPSILON,
                                   .x = b->x,
                                   .weight = b->ones,
                                   .y = b->normed};
  return b->meter->executor->dense->norm(b->meter->executor, &p, b->meter->stream, err);
}

static pkv_status rotate(bench *b, int32_t layer, pkv_error *err) {
  pkv_dense_rope_params p = {0};
  p.act = PKV_DTYPE_BF16;
  p.m = b->rows;
  p.query_heads = b->shape->query_heads;
  p.kv_heads = b->shape->kv_heads;
  p.head_dim = b->shape->head_dim;
  p.qkv = b->rotated;
  p.stride = b->q + 2 * b->kv;
  p.q_norm = p.k_norm = b->shape->head_norms ? b->ones : NULL;
  p.eps = EPSILON;
  p.dims = b->shape->head_dim;
  p.frequency = b->frequency;
  p.length = 1.0f;
  p.positions = b->positions;
  p.slots = b->slots;
  p.cache = cache_of(b, layer);
  return b->meter->executor->dense->rope(b->meter->executor, &p, b->meter->stream, err);
}

static pkv_status attend(void *ctx, int32_t call, pkv_error *err) {
  bench *b = ctx;
  const pkv_cache cache = cache_of(b, call);
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  args.cache = &cache;
  args.block_table = b->table;
  args.block_table_stride = args.max_pages = b->pages / b->rows;
  args.q_dtype = args.out_dtype = PKV_DTYPE_BF16;
  args.q = b->rotated;
  args.q_token_stride = b->q + 2 * b->kv;
  args.q_head_stride = b->shape->head_dim;
  args.out = b->attended;
  return pkv_device_attention(b->meter->executor, b->plan, &args, b->meter->stream, err);
}

static pkv_status run_layer(void *ctx, int32_t call, pkv_error *err) {
  bench *b = ctx;
  const int64_t width = b->shape->width, ffn = b->shape->feed_forward;
  PKV_TRY(norm(b, err));
  PKV_TRY(multiply(b, &b->qkv, call, b->q + 2 * b->kv, width, b->normed, b->rotated, false, false,
                   err));
  PKV_TRY(rotate(b, call, err));
  PKV_TRY(attend(b, call, err));
  PKV_TRY(multiply(b, &b->o, call, width, b->q, b->attended, b->x, true, false, err));
  PKV_TRY(norm(b, err));
  PKV_TRY(multiply(b, &b->gate_up, call, 2 * ffn, width, b->normed, b->gated, false, true, err));
  return multiply(b, &b->down, call, width, ffn, b->gated, b->x, true, false, err);
}

/* ---- all of it ---- */

static double median_of(double *us) {
  pkv_sort_doubles(us, PKV_LAYER_REPEATS);
  return us[PKV_LAYER_REPEATS / 2];
}

static pkv_status run(pkv_layer_times *out, bench *b, pkv_error *err) {
  double us[2 * PKV_LAYER_REPEATS];
  const pkv_meter_section sections[2] = {{run_layer, b, b->layers}, {attend, b, b->layers}};
  PKV_TRY(b->meter->executor->dense->prepare(b->meter->executor, err));
  PKV_TRY(take_memory(b, err));
  PKV_TRY(make_batch(b, err));
  PKV_TRY(make_plan(b, err));
  PKV_TRY(run_layer(b, 0, err)); /* outside of a capture: libraries load and choose */
  PKV_TRY(b->meter->ops->graph(b->meter, us, sections, 2, 0, 3, PKV_LAYER_REPEATS, err));
  out->layer_us = median_of(us) / b->layers;
  out->attention_us = median_of(us + PKV_LAYER_REPEATS) / b->layers;
  return PKV_OK;
}

static void release(bench *b) {
  void *const all[] = {
      b->qkv.memory, b->o.memory, b->gate_up.memory, b->down.memory, b->cache.memory, b->x,
      b->ones,       b->normed,   b->rotated,        b->attended,    b->gate_scratch, b->gated,
      b->table,      b->seq_len,  b->positions,      b->slots,       b->frequency};
  (void)!pkv_device_synchronize(b->meter->executor, b->meter->stream, NULL);
  pkv_device_plan_destroy(b->plan);
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
    pkv_device_free(b->meter->executor, all[i]);
}

pkv_status pkv_layer_bench(pkv_layer_times *out, pkv_meter *meter, const pkv_layer_shape *shape,
                           int32_t rows, int32_t length, pkv_error *err) {
  bench b = {.meter = meter, .shape = shape, .rows = rows, .length = length};
  PKV_CHECK(err, meter->executor->dense, PKV_E_UNSUPPORTED, "the device has no dense functions");
  b.q = (int64_t)shape->query_heads * shape->head_dim;
  b.kv = (int64_t)shape->kv_heads * shape->head_dim;
  b.pages = rows * ((length + PAGE - 1) / PAGE);
  const int64_t weights =
      2 * (shape->width * (2 * b.q + 2 * b.kv) + 3 * (int64_t)shape->width * shape->feed_forward);
  const int64_t kv = (int64_t)rows * length * b.kv * 4;
  *out = (pkv_layer_times){0.0, 0.0, (double)weights, (double)kv, 0};
  b.layers = (int32_t)((LEAST_COLD + weights + kv - 1) / (weights + kv));
  if (b.layers < 2) b.layers = 2;
  if (b.layers > MOST) b.layers = MOST;
  out->layers = b.layers;
  const pkv_status status = run(out, &b, err);
  release(&b);
  return status;
}
