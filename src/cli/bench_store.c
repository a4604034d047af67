/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_store.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/dtype.h"
#include "base/rng.h"

#define TABLE_ROWS 1024 /* different rows of head_dim numbers, dealt out at random */
#define TASK_PAGES 16
#define TASK_BYTES (1 << 19)
#define HUGE_PAGE  ((size_t)2 << 20)

/* An allocator over whole huge pages, for large blocks only. */
static size_t huge_bytes(size_t size) {
  return (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

static void *huge_alloc(void *ctx, size_t size, size_t align) {
  const pkv_allocator a = pkv_allocator_default();
  if (size < HUGE_PAGE) return a.alloc(a.ctx, size, align);
  (void)ctx;
  /* one huge page more than needed, so that an aligned part of it can be kept */
  unsigned char *all = mmap(NULL, huge_bytes(size) + HUGE_PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((void *)all == MAP_FAILED) return NULL;
  const size_t before = (HUGE_PAGE - (uintptr_t)all % HUGE_PAGE) % HUGE_PAGE;
  if (before > 0) (void)munmap(all, before);
  (void)munmap(all + before + huge_bytes(size), HUGE_PAGE - before);
  (void)madvise(all + before, huge_bytes(size), MADV_HUGEPAGE);
  return all + before;
}

static void huge_free(void *ctx, void *ptr, size_t size) {
  const pkv_allocator a = pkv_allocator_default();
  (void)ctx;
  if (size < HUGE_PAGE)
    a.free(a.ctx, ptr, size);
  else
    (void)munmap(ptr, huge_bytes(size));
}

/* From a page's K and V to the next page's. */
static size_t page_bytes(const pkv_cache *c) {
  return (size_t)c->k_page_stride * pkv_dtype_bytes(c->dtype);
}

pkv_status bench_store_init(bench_store *out, const pkv_shape *shape, pkv_dtype dtype,
                            pkv_layout layout, int64_t pages, bool huge, uint64_t seed,
                            pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_pool_options options = PKV_POOL_OPTIONS_INIT;
  memset(out, 0, sizeof *out);
  out->q_len = shape->q_len;
  out->window = shape->window;
  options.dtype = dtype;
  options.layout = layout;
  options.kv_heads = shape->kv_heads;
  options.head_dim = shape->head_dim;
  options.page_tokens = shape->page_tokens;
  const pkv_allocator huge_pages = {huge_alloc, huge_free, NULL};
  if (huge) options.allocator = &huge_pages;
  options.pages = pages;
  PKV_TRY(pkv_pool_create(&out->pool, &options, err));
  out->cache = (pkv_cache)PKV_CACHE_INIT;
  PKV_TRY(pkv_pool_cache(&out->cache, out->pool, 0, err));

  const size_t row_bytes = (size_t)shape->head_dim * pkv_dtype_bytes(dtype);
  unsigned char *rows = pkv_alloc(&a, TABLE_ROWS * row_bytes);
  PKV_CHECK(err, rows, PKV_E_NOMEM, "no memory for %zu bytes", TABLE_ROWS * row_bytes);
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int64_t i = 0; i < (int64_t)TABLE_ROWS * shape->head_dim; i++)
    pkv_store(rows, dtype, i, (float)pkv_rng_normal(&rng));
  /* a page of the pool is dense in either layout: its rows of head_dim one after another */
  const int64_t count = 2 * (int64_t)shape->page_tokens * shape->kv_heads;
  for (int64_t page = 0; page < pages; page++) {
    unsigned char *to = (unsigned char *)out->cache.k + (size_t)page * page_bytes(&out->cache);
    for (int64_t i = 0; i < count; i++)
      memcpy(to + (size_t)i * row_bytes, rows + (pkv_rng_next(&rng) % TABLE_ROWS) * row_bytes,
             row_bytes);
  }
  pkv_free(&a, rows, TABLE_ROWS * row_bytes);
  return PKV_OK;
}

void bench_store_deinit(bench_store *store) {
  pkv_pool_destroy(store->pool);
  memset(store, 0, sizeof *store);
}

void bench_store_place(int32_t *ids, bench_store *store, const bench_batch *batch) {
  const int64_t count = (int64_t)batch->rows * batch->max_pages;
  for (int64_t i = 0; i < count; i++)
    ids[i] =
        batch->ids[i] < 0 ? -1 : (int32_t)((batch->ids[i] + store->shift) % store->cache.pages);
  store->placed = store->shift;
  store->shift = (store->shift + batch->pages) % store->cache.pages;
}

/* The first token of a row that some query sees. */
static int64_t first_token(const bench_store *store, int32_t length) {
  const int64_t first = (int64_t)length - store->q_len + 1 - store->window;
  return store->window > 0 && first > 0 ? first : 0;
}

int64_t bench_store_bytes(const bench_store *store, const bench_batch *batch) {
  int64_t tokens = 0;
  for (int32_t row = 0; row < batch->rows; row++) {
    const int64_t seen = first_token(store, batch->lengths[row]);
    const int64_t borrowed = (int64_t)batch->borrowed[row] * store->cache.page_tokens;
    tokens += batch->lengths[row] - (seen > borrowed ? seen : borrowed);
  }
  return tokens * 2 * store->cache.kv_heads * store->cache.head_dim *
         (int64_t)pkv_dtype_bytes(store->cache.dtype);
}

/*
 * `next` is what will be read after it, or NULL to leave prefetching to the hardware, which sees a
 * long run but not across a table. Into the second level: measured best here, non-temporal worst.
 */
static uint64_t sum_bytes(const unsigned char *at, size_t bytes, const unsigned char *next) {
  uint64_t a = 0, b = 0, c = 0, d = 0, w[8];
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    if (next != NULL) __builtin_prefetch(next + i, 0, 2);
    memcpy(w, at + i, 64);
    a += w[0] + w[4];
    b += w[1] + w[5];
    c += w[2] + w[6];
    d += w[3] + w[7];
  }
  for (; i < bytes; i++)
    a += (uint64_t)at[i] << 8 * (i % 8);
  return a + b + c + d;
}

typedef struct read_job {
  const bench_store *store;
  const bench_batch *batch;
  const int32_t *ids;
  int64_t tasks_a_row; /* of the longest row */
  int64_t at, bytes;   /* plain read: where in the pages, how much */
  _Atomic uint64_t sum;
} read_job;

/* The first `count` tokens of a page, K and V of all heads: one run, but for a cut page. */
static uint64_t sum_page(const pkv_cache *c, const unsigned char *page, const unsigned char *next,
                         int64_t count) {
  const size_t row = (size_t)c->head_dim * pkv_dtype_bytes(c->dtype);
  const size_t tokens = (size_t)c->page_tokens, heads = (size_t)c->kv_heads;
  if (count == c->page_tokens) return sum_bytes(page, 2 * tokens * heads * row, next);
  const bool hnd = c->k_token_stride == c->head_dim;
  const size_t runs = hnd ? 2 * heads : 2, run = tokens * (hnd ? 1 : heads) * row;
  uint64_t sum = 0;
  for (size_t i = 0; i < runs; i++)
    sum += sum_bytes(page + i * run, (size_t)count * (run / tokens), next + i * run);
  return sum;
}

/* Up to TASK_PAGES pages of one row. */
static void null_task(void *ctx, int64_t item, int32_t worker) {
  (void)worker;
  read_job *job = ctx;
  const pkv_cache *c = &job->store->cache;
  const int64_t row = item / job->tasks_a_row;
  const int64_t length = job->batch->lengths[row];
  const int32_t *ids = job->ids + row * job->batch->max_pages;
  /* a window starts with a whole page: less than a page more than attention has to read */
  const int64_t seen = first_token(job->store, (int32_t)length) / c->page_tokens;
  const int64_t borrowed = job->batch->borrowed[row], first = seen > borrowed ? seen : borrowed;
  int64_t page = item % job->tasks_a_row * TASK_PAGES, end = page + TASK_PAGES;
  const int64_t pages = (length + c->page_tokens - 1) / c->page_tokens;
  uint64_t sum = 0;
  if (page < first) page = first;
  if (end > pages) end = pages;
  for (; page < end; page++) {
    const int64_t left = length - page * c->page_tokens;
    const int64_t count = left < c->page_tokens ? left : c->page_tokens;
    const size_t at = (size_t)ids[page] * page_bytes(c);
    const size_t next = (size_t)ids[page + 1 < end ? page + 1 : page] * page_bytes(c);
    const unsigned char *kv = c->k;
    sum += sum_page(c, kv + at, kv + next, count);
  }
  atomic_fetch_add_explicit(&job->sum, sum, memory_order_relaxed);
}

uint64_t bench_null_read(pkv_workers *workers, const bench_store *store, const bench_batch *batch,
                         const int32_t *ids) {
  read_job job = {.store = store, .batch = batch, .ids = ids};
  job.tasks_a_row = (batch->max_pages + TASK_PAGES - 1) / TASK_PAGES;
  pkv_workers_run(workers, null_task, &job, batch->rows * job.tasks_a_row);
  return atomic_load(&job.sum);
}

static void plain_task(void *ctx, int64_t item, int32_t worker) {
  (void)worker;
  read_job *job = ctx;
  const unsigned char *kv = job->store->cache.k;
  const int64_t begin = item * TASK_BYTES, left = job->bytes - begin;
  const size_t size = (size_t)(left < TASK_BYTES ? left : TASK_BYTES);
  const uint64_t sum = sum_bytes(kv + job->at + begin, size, NULL);
  atomic_fetch_add_explicit(&job->sum, sum, memory_order_relaxed);
}

uint64_t bench_plain_read(pkv_workers *workers, const bench_store *store, int64_t bytes) {
  const pkv_cache *c = &store->cache;
  const int64_t one = (int64_t)page_bytes(c);
  read_job job = {.store = store, .bytes = bytes, .at = store->placed * one};
  if (job.at + job.bytes > c->pages * one) job.at = c->pages * one - job.bytes;
  if (job.at < 0) job.at = 0;
  pkv_workers_run(workers, plain_task, &job, (job.bytes + TASK_BYTES - 1) / TASK_BYTES);
  return atomic_load(&job.sum);
}
