/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_device_batch.h"

#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"

#define COLD_BYTES   (INT64_C(2) << 30)
#define MOST_LAYERS  512
#define LEAST_LAYERS 4
#define HOLE_EVERY   16

static int64_t page_in_pool(int64_t id) {
  return id + id / HOLE_EVERY;
}

static int32_t first_seen(const pkv_shape *shape, int32_t length) {
  const int32_t first = length - shape->q_len + 1 - shape->window;
  return shape->window > 0 && first > 0 ? first : 0;
}

/* A new block on the device with `bytes` from the host. */
static pkv_status upload(void **to, pkv_meter *meter, const void *from, size_t bytes,
                         pkv_error *err) {
  PKV_TRY(pkv_device_alloc(to, meter->executor, bytes, err));
  PKV_TRY(pkv_device_copy(meter->executor, *to, from, bytes, meter->stream, err));
  return pkv_device_synchronize(meter->executor, meter->stream, err);
}

static void set_strides(pkv_cache *c, int32_t layout) {
  const int64_t t = c->page_tokens, h = c->kv_heads, d = c->head_dim;
  c->k_page_stride = t * h * d * (layout == BENCH_INTERLEAVED ? 2 : 1);
  c->k_token_stride = layout == BENCH_HND ? d : h * d;
  c->k_head_stride = layout == BENCH_HND ? t * d : d;
  c->v_page_stride = c->k_page_stride;
  c->v_token_stride = c->k_token_stride;
  c->v_head_stride = c->k_head_stride;
}

/* How many layers, and memory for them. */
static pkv_status take_pool(bench_device_batch *d, bench_device_pool *pool, int32_t layout,
                            pkv_error *err) {
  pkv_cache *c = &d->first;
  const int64_t side =
      c->pages * c->page_tokens * c->kv_heads * c->head_dim * (int64_t)pkv_dtype_bytes(c->dtype);
  d->layer_bytes = 2 * side;
  int64_t layers = COLD_BYTES / d->layer_bytes + 1;
  if (layers < LEAST_LAYERS) layers = LEAST_LAYERS;
  if (layers > MOST_LAYERS) layers = MOST_LAYERS;
  if (layers > pool->limit / d->layer_bytes) layers = pool->limit / d->layer_bytes;
  PKV_CHECK(err, layers >= 2, PKV_E_LIMIT, "two layers of %lld bytes, there is room for %lld",
            (long long)d->layer_bytes, (long long)pool->limit);
  d->layers = (int32_t)layers;
  if (pool->bytes < layers * d->layer_bytes) {
    pkv_device_free(d->meter->executor, pool->memory);
    pool->memory = NULL;
    pool->bytes = 0;
    PKV_TRY(pkv_device_alloc(&pool->memory, d->meter->executor, (size_t)(layers * d->layer_bytes),
                             err));
    pool->bytes = layers * d->layer_bytes;
  }
  c->k = pool->memory;
  c->v = (unsigned char *)pool->memory + (layout == BENCH_INTERLEAVED ? side / c->pages : side);
  return PKV_OK;
}

pkv_cache bench_device_batch_cache(const bench_device_batch *d, int32_t layer) {
  pkv_cache cache = d->first;
  cache.k = (unsigned char *)cache.k + layer * d->layer_bytes;
  cache.v = (unsigned char *)cache.v + layer * d->layer_bytes;
  return cache;
}

pkv_attention_args bench_device_batch_args(const bench_device_batch *d, const pkv_cache *cache) {
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  args.cache = cache;
  args.block_table = d->table;
  args.max_pages = d->batch->max_pages;
  args.q = d->q;
  args.q_dtype = args.out_dtype = d->q_dtype;
  args.out = d->out;
  return args;
}

/* Arrays of the host while a batch is laid out. */
typedef struct layout {
  int32_t *table;   /* [rows, max_pages] */
  int32_t *first;   /* [rows + 1] */
  int32_t *owned;   /* [pages of the cache] */
  int32_t *readers; /* [pages of the cache]: rows that have it */
  size_t entries, pages;
} layout;

static pkv_status layout_init(layout *l, const bench_device_batch *d, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t rows = (size_t)d->batch->rows;
  l->entries = rows * (size_t)d->batch->max_pages;
  l->pages = (size_t)d->first.pages;
  l->table = pkv_alloc(&a, l->entries * sizeof *l->table);
  l->first = pkv_alloc_zeroed(&a, rows + 1, sizeof *l->first);
  l->owned = pkv_alloc_zeroed(&a, l->pages, sizeof *l->owned);
  l->readers = pkv_alloc_zeroed(&a, l->pages, sizeof *l->readers);
  PKV_CHECK(err, l->table && l->first && l->owned && l->readers, PKV_E_NOMEM,
            "no memory for %lld pages", (long long)d->first.pages);
  return PKV_OK;
}

static void layout_deinit(layout *l, const bench_device_batch *d) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, l->table, l->entries * sizeof *l->table);
  pkv_free(&a, l->first, ((size_t)d->batch->rows + 1) * sizeof *l->first);
  pkv_free(&a, l->owned, l->pages * sizeof *l->owned);
  pkv_free(&a, l->readers, l->pages * sizeof *l->readers);
}

static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* One row's entries, pages that are read for it first, and who owns what. */
static void lay_row(layout *l, bench_device_batch *d, const pkv_shape *shape, int32_t row) {
  const bench_batch *b = d->batch;
  const int32_t length = b->lengths[row], tokens = shape->page_tokens;
  const int32_t pages = (length + tokens - 1) / tokens, from = first_seen(shape, length);
  const int64_t token_bytes =
      2 * (int64_t)shape->kv_heads * shape->head_dim * (int64_t)pkv_dtype_bytes(d->first.dtype);
  for (int32_t p = 0; p < b->max_pages; p++) {
    const size_t at = (size_t)row * (size_t)b->max_pages + (size_t)p;
    int32_t *const id = &l->table[at];
    *id = p < pages ? (int32_t)page_in_pool(b->ids[at]) : -1;
    if (p >= pages) continue;
    l->owned[*id] = p < pages - 1 ? tokens : length - p * tokens;
    l->readers[*id]++;
  }
  const int64_t skipped = larger(from / tokens, b->borrowed[row]);
  l->first[row + 1] = l->first[row] + (int32_t)(pages > skipped ? pages - skipped : 0);
  d->useful_bytes += (length - from) * token_bytes;
  d->unique_bytes += (length - larger(from, (int64_t)b->borrowed[row] * tokens)) * token_bytes;
  if (length > d->longest) d->longest = length;
}

/* How many leading pages of each row others have, and what their products cost. */
static void count_shared(bench_device_batch *d, const layout *l, const pkv_shape *shape) {
  const bench_batch *b = d->batch;
  const int32_t tokens = shape->page_tokens;
  for (int32_t row = 0; row < b->rows; row++) {
    const int32_t *const ids = l->table + (int64_t)row * b->max_pages;
    const int32_t length = b->lengths[row], from = first_seen(shape, length);
    int32_t n = 0;
    while (n < b->max_pages && ids[n] >= 0 && l->readers[ids[n]] > 1)
      n++;
    d->shared[row] = n;
    const int64_t seen = larger((int64_t)n * tokens - from, 0);
    d->shared_flops +=
        4.0 * (double)seen * shape->q_len * shape->query_heads * (double)shape->head_dim;
  }
}

/* Table, lengths, pages that are read, and who owns what. */
static pkv_status place(bench_device_batch *d, const pkv_shape *shape, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const bench_batch *b = d->batch;
  const size_t rows = (size_t)b->rows;
  layout l = {0};
  pkv_status status = layout_init(&l, d, err);
  d->shared = pkv_alloc_zeroed(&a, rows, sizeof *d->shared);
  if (status == PKV_OK && d->shared == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d rows", b->rows);
  if (status == PKV_OK) {
    for (int32_t row = 0; row < b->rows; row++)
      lay_row(&l, d, shape, row);
    count_shared(d, &l, shape);
    d->view.pages_read = l.first[b->rows];
  }
  const struct {
    void **to;
    const void *from;
    size_t bytes;
  } copies[] = {{&d->table, l.table, l.entries * sizeof(int32_t)},
                {&d->first_page, l.first, (rows + 1) * sizeof(int32_t)},
                {&d->borrowed, b->borrowed, rows * sizeof(int32_t)},
                {&d->owned, l.owned, l.pages * sizeof(int32_t)},
                {&d->seq_len, b->lengths, rows * sizeof(int32_t)}};
  for (size_t i = 0; i < sizeof copies / sizeof *copies && status == PKV_OK; i++)
    status = upload(copies[i].to, d->meter, copies[i].from, copies[i].bytes, err);
  layout_deinit(&l, d);
  return status;
}

/* Normal numbers, and the pattern that finds needles. */
static pkv_status make_queries(bench_device_batch *d, const pkv_shape *shape, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int64_t count =
      (int64_t)d->batch->rows * shape->q_len * shape->query_heads * shape->head_dim;
  pkv_rng rng;
  d->q_bytes = (size_t)count * pkv_dtype_bytes(d->q_dtype);
  void *q = pkv_alloc(&a, d->q_bytes);
  PKV_CHECK(err, q, PKV_E_NOMEM, "no memory for %zu bytes of queries", d->q_bytes);
  pkv_rng_init(&rng, d->seed + 1);
  for (int64_t i = 0; i < count; i++)
    pkv_store(q, d->q_dtype, i, (float)pkv_rng_normal(&rng));
  pkv_status status = upload(&d->q, d->meter, q, d->q_bytes, err);
  for (int64_t i = 0; i < count; i++)
    pkv_store(q, d->q_dtype, i, pkv_meter_sign((int32_t)(i % shape->head_dim)));
  if (status == PKV_OK) status = upload(&d->needle_q, d->meter, q, d->q_bytes, err);
  if (status == PKV_OK) status = pkv_device_alloc(&d->out, d->meter->executor, d->q_bytes, err);
  pkv_free(&a, q, d->q_bytes);
  return status;
}

pkv_status bench_device_batch_init(bench_device_batch *out, pkv_meter *meter,
                                   bench_device_pool *pool, const bench_frame *frame,
                                   const bench_batch *batch, pkv_error *err) {
  const pkv_shape *shape = &frame->shape;
  memset(out, 0, sizeof *out);
  out->meter = meter;
  out->batch = batch;
  out->seed = (uint64_t)frame->o->seed;
  out->first = (pkv_cache)PKV_CACHE_INIT;
  out->first.dtype = (pkv_dtype)frame->o->dtype;
  out->first.pages = page_in_pool(batch->pages) + 1;
  out->first.page_tokens = shape->page_tokens;
  out->first.kv_heads = shape->kv_heads;
  out->first.head_dim = shape->head_dim;
  const bool fp8 = out->first.dtype == PKV_DTYPE_FP8_E4M3;
  out->first.k_scale = fp8 ? 0.5f : 1.0f;
  out->first.v_scale = fp8 ? 0.25f : 1.0f;
  out->q_dtype = out->first.dtype == PKV_DTYPE_BF16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
  set_strides(&out->first, frame->o->layout);
  PKV_TRY(take_pool(out, pool, frame->o->layout, err));
  PKV_TRY(place(out, shape, err));
  PKV_TRY(make_queries(out, shape, err));
  out->view.rows = batch->rows;
  out->view.q_len = shape->q_len;
  out->view.window = shape->window;
  out->view.query_heads = shape->query_heads;
  out->view.stride = batch->max_pages;
  out->view.table = out->table;
  out->view.seq_len = out->seq_len;
  out->view.first_page = out->first_page;
  out->view.borrowed = out->shared_flops > 0 ? out->borrowed : NULL;
  out->view.owned = out->owned;
  for (int32_t layer = 0; layer < out->layers; layer++) {
    const pkv_cache cache = bench_device_batch_cache(out, layer);
    PKV_TRY(meter->ops->fill(meter, &cache, &out->view, out->seed + 2 * (uint64_t)layer, err));
  }
  return pkv_device_synchronize(meter->executor, meter->stream, err);
}

void bench_device_batch_deinit(bench_device_batch *d) {
  const pkv_allocator a = pkv_allocator_default();
  void *const blocks[] = {d->table, d->seq_len, d->first_page, d->borrowed,
                          d->owned, d->q,       d->needle_q,   d->out};
  if (d->batch != NULL) pkv_free(&a, d->shared, (size_t)d->batch->rows * sizeof *d->shared);
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks && d->meter != NULL; i++)
    pkv_device_free(d->meter->executor, blocks[i]);
  memset(d, 0, sizeof *d);
}

/* Of the row's pages as they follow each other: round by round, or of `count` evenly spread. */
static int64_t spread(int64_t pages, int32_t round, int32_t rounds) {
  if (pages <= rounds) return round % pages;
  return rounds > 1 ? round * (pages - 1) / (rounds - 1) : 0;
}

/* In a batch that shares: the page's needle is where all that have it expect it, or nowhere. */
static int32_t common_position(const bench_device_batch *d, const pkv_shape *shape, int32_t row,
                               int64_t page, uint64_t round, int32_t first, int32_t last) {
  const bench_batch *b = d->batch;
  const int32_t tokens = shape->page_tokens, length = b->lengths[row];
  const uint64_t id = (uint64_t)b->ids[(int64_t)row * b->max_pages + page];
  int64_t at = page * tokens + (int64_t)(pkv_hash_uniform(d->seed, id, round) * tokens);
  const bool tail = (page + 1) * tokens > length; /* only its own row has it */
  if (tail && at > last && last / tokens == page) at = last;
  return at < first || at > last ? -1 : (int32_t)at;
}

static int32_t shared_position(const bench_device_batch *d, const pkv_shape *shape, int32_t row,
                               int32_t round, int32_t rounds, int32_t first, int32_t last) {
  const int64_t pages = last / shape->page_tokens + 1, half = (rounds + 1) / 2;
  int64_t page = spread(d->batch->max_pages, round / 2, (int32_t)half);
  if (round % 2) page = pages - 1 - round / 2;
  if (page < 0 || page >= pages || (round % 2 && page < d->shared[row])) return -1;
  return common_position(d, shape, row, page, (uint64_t)round, first, last);
}

void bench_needle_positions(int32_t *position, const bench_device_batch *d, const pkv_shape *shape,
                            int32_t round, int32_t rounds) {
  const int32_t tokens = shape->page_tokens;
  for (int32_t row = 0; row < d->batch->rows; row++) {
    const int32_t length = d->batch->lengths[row], last = length - shape->q_len;
    const int32_t first = shape->window > 0 && length > shape->window ? length - shape->window : 0;
    position[row] = -1;
    if (last < first) continue;
    if (d->shared_flops > 0) {
      position[row] = shared_position(d, shape, row, round, rounds, first, last);
      continue;
    }
    const int64_t pages = last / tokens - first / tokens + 1;
    const int64_t page = first / tokens + spread(pages, round, rounds);
    const double where = pkv_hash_uniform(d->seed, (uint64_t)row, (uint64_t)round);
    int64_t at = page * tokens + (int64_t)(where * tokens);
    at = at < first ? first : at > last ? last : at;
    position[row] = (int32_t)at;
  }
}
