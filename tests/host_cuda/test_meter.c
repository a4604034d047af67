/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark's kernels (src/measure/meter_kernels.cu), run by the host: the null read loads
 * every vector that some query sees and nothing else; data are the same in every layout; the answer
 * agrees with the reference executor; a needle comes back exactly. The runtime is that of this
 * folder.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "cuda_runtime_api.h"
#include "measure/meter_kernels.h"

#define MOST_ROWS  400
#define FEW_ROWS   8
#define MOST_PAGES 4096

typedef struct meter_case {
  int32_t page_tokens, kv_heads, group, head_dim, q_len, window, layout, rows;
  pkv_dtype dtype;
  int32_t lengths[MOST_ROWS];
  int32_t max_pages;
  int32_t *table, *first_page, *owned, *borrowed; /* borrowed: NULL where none is */
  unsigned char *storage;
  size_t bytes;
  pkv_cache cache;
  pkv_meter_batch batch;
} meter_case;

static pkv_meter *meter;
static pkv_error err;

#define OK(call)                                                                                   \
  do {                                                                                             \
    if ((call) != PKV_OK) fail_msg("%s", err.text);                                                \
  } while (0)

static int32_t first_token(const meter_case *c, int32_t length) {
  const int32_t first = length - c->q_len + 1 - c->window;
  return c->window > 0 && first > 0 ? first : 0;
}

/* Pages of all rows in one permutation, one page in five owned by nobody. */
static void place(meter_case *c, pkv_rng *rng) {
  int32_t pages = 0, ids[MOST_PAGES], next = 0;
  c->max_pages = 1;
  for (int32_t r = 0; r < c->rows; r++) {
    const int32_t need = (c->lengths[r] + c->page_tokens - 1) / c->page_tokens;
    if (need > c->max_pages) c->max_pages = need;
    pages += need;
  }
  c->cache.pages = pages + pages / 4 + 1;
  assert_true(c->cache.pages <= MOST_PAGES);
  for (int32_t i = 0; i < c->cache.pages; i++) {
    const int32_t j = (int32_t)pkv_rng_below(rng, (uint64_t)i + 1);
    ids[i] = ids[j];
    ids[j] = i;
  }
  c->table = calloc((size_t)(c->rows * c->max_pages), sizeof(int32_t));
  c->first_page = calloc((size_t)c->rows + 1, sizeof(int32_t));
  c->owned = calloc((size_t)c->cache.pages, sizeof(int32_t));
  for (int32_t r = 0; r < c->rows; r++) {
    const int32_t length = c->lengths[r], need = (length + c->page_tokens - 1) / c->page_tokens;
    for (int32_t p = 0; p < c->max_pages; p++) {
      int32_t *id = &c->table[r * c->max_pages + p];
      *id = p < need ? ids[next++] : -1;
      if (p < need) c->owned[*id] = p < need - 1 ? c->page_tokens : length - p * c->page_tokens;
    }
    c->first_page[r + 1] =
        c->first_page[r] + (length > 0 ? need - first_token(c, length) / c->page_tokens : 0);
  }
}

static void open_case(meter_case *c, pkv_rng *rng) {
  const int64_t t = c->page_tokens, h = c->kv_heads, d = c->head_dim;
  const bool hnd = c->layout == 0, both = c->layout == 2;
  c->cache = (pkv_cache)PKV_CACHE_INIT;
  place(c, rng);
  const size_t side = (size_t)(c->cache.pages * t * h * d) * pkv_dtype_bytes(c->dtype);
  c->bytes = 2 * side;
  assert_int_equal(posix_memalign((void **)&c->storage, 64, c->bytes), 0);
  memset(c->storage, 0, c->bytes);
  c->cache.dtype = c->dtype;
  c->cache.k = c->storage;
  c->cache.v = c->storage + (both ? side / (size_t)c->cache.pages : side);
  c->cache.k_page_stride = c->cache.v_page_stride = t * h * d * (both ? 2 : 1);
  c->cache.k_token_stride = c->cache.v_token_stride = hnd ? d : h * d;
  c->cache.k_head_stride = c->cache.v_head_stride = hnd ? t * d : d;
  c->cache.page_tokens = c->page_tokens;
  c->cache.kv_heads = c->kv_heads;
  c->cache.head_dim = c->head_dim;
  c->cache.k_scale = c->dtype == PKV_DTYPE_FP8_E4M3 ? 0.5f : 1.0f;
  c->cache.v_scale = c->dtype == PKV_DTYPE_FP8_E4M3 ? 0.25f : 1.0f;
  c->batch = (pkv_meter_batch){.rows = c->rows,
                               .q_len = c->q_len,
                               .window = c->window,
                               .query_heads = c->kv_heads * c->group,
                               .stride = c->max_pages,
                               .table = c->table,
                               .seq_len = c->lengths,
                               .first_page = c->first_page,
                               .owned = c->owned,
                               .pages_read = c->first_page[c->rows]};
  OK(meter->ops->fill(meter, &c->cache, &c->batch, 42, &err));
}

static void close_case(meter_case *c) {
  free(c->table);
  free(c->first_page);
  free(c->owned);
  free(c->borrowed);
  free(c->storage);
}

static void draw(meter_case *c, pkv_rng *rng) {
  static const int32_t pages[] = {1, 2, 3, 7, 16, 32, 100}, dims[] = {8, 24, 64, 72, 128, 256};
  static const pkv_dtype dtypes[] = {PKV_DTYPE_F16, PKV_DTYPE_BF16, PKV_DTYPE_FP8_E4M3};
  memset(c, 0, sizeof *c);
  c->page_tokens = pages[pkv_rng_below(rng, 7)];
  c->head_dim = dims[pkv_rng_below(rng, 6)];
  c->dtype = dtypes[pkv_rng_below(rng, 3)];
  c->kv_heads = (int32_t)pkv_rng_range(rng, 1, 3);
  c->group = (int32_t)pkv_rng_range(rng, 1, 3);
  c->layout = (int32_t)pkv_rng_below(rng, 3);
  c->q_len = pkv_rng_below(rng, 2) ? 1 : (int32_t)pkv_rng_range(rng, 1, 4);
  c->window = pkv_rng_below(rng, 2) ? 0 : (int32_t)pkv_rng_range(rng, 1, 90);
  const bool many = pkv_rng_below(rng, 8) == 0;
  c->rows = (int32_t)pkv_rng_range(rng, 1, many ? MOST_ROWS : FEW_ROWS);
  for (int32_t r = 0; r < c->rows; r++)
    c->lengths[r] = pkv_rng_below(rng, 5) ? (int32_t)pkv_rng_range(rng, 1, many ? 7 : 230) : 0;
}

/* What the null read loaded: a count for each byte of the case's storage. */
static meter_case *watched;
static unsigned char *loads;

static void loaded(const void *at, size_t bytes) {
  const unsigned char *p = at;
  if (p < watched->storage || p + bytes > watched->storage + watched->bytes)
    fail_msg("a load outside the cache");
  memset(loads + (p - watched->storage), 1, bytes);
}

/* Of each row some leading pages are read for another one. */
static void borrow(meter_case *c, pkv_rng *rng) {
  c->borrowed = calloc((size_t)c->rows, sizeof(int32_t));
  for (int32_t r = 0; r < c->rows; r++) {
    const int32_t length = c->lengths[r], pages = (length + c->page_tokens - 1) / c->page_tokens;
    const int32_t seen = length > 0 ? first_token(c, length) / c->page_tokens : 0;
    c->borrowed[r] = (int32_t)pkv_rng_below(rng, (uint64_t)pages + 1);
    const int32_t first = c->borrowed[r] > seen ? c->borrowed[r] : seen;
    c->first_page[r + 1] = c->first_page[r] + pages - first;
  }
  c->batch.borrowed = c->borrowed;
  c->batch.pages_read = c->first_page[c->rows];
}

static void expect_row(meter_case *c, unsigned char *want, int32_t row) {
  const size_t e = pkv_dtype_bytes(c->dtype), line = (size_t)c->head_dim * e;
  const int32_t own = c->borrowed ? c->borrowed[row] * c->page_tokens : 0;
  int32_t t = first_token(c, c->lengths[row]);
  for (t = t > own ? t : own; t < c->lengths[row]; t++)
    for (int32_t h = 0; h < c->kv_heads; h++) {
      const int64_t page = c->table[row * c->max_pages + t / c->page_tokens];
      const int64_t at = page * c->cache.k_page_stride +
                         t % c->page_tokens * c->cache.k_token_stride + h * c->cache.k_head_stride;
      memset(want + ((unsigned char *)c->cache.k - c->storage) + (size_t)at * e, 1, line);
      memset(want + ((unsigned char *)c->cache.v - c->storage) + (size_t)at * e, 1, line);
    }
}

static void test_null_read_reads_what_is_seen(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 11);
  for (int i = 0; i < 150; i++) {
    meter_case c;
    draw(&c, &rng);
    open_case(&c, &rng);
    unsigned char *want = calloc(c.bytes, 1);
    loads = calloc(c.bytes, 1);
    watched = &c;
    if (i % 4 == 0) borrow(&c, &rng);
    for (int32_t row = 0; row < c.rows; row++)
      expect_row(&c, want, row);
    host_cuda_loaded = loaded;
    uint32_t sink;
    if (i % 2 == 0 || c.q_len > 1 || c.window > 0)
      OK(meter->ops->null_read(meter, &c.cache, &c.batch, 4, &err));
    else /* as other programs call it */
      assert_int_equal(pkv_meter_null_read(c.cache.k, c.cache.v, c.table, c.max_pages, c.lengths,
                                           c.first_page, c.rows, c.batch.pages_read, c.kv_heads,
                                           c.head_dim, c.page_tokens, c.layout, (int32_t)c.dtype,
                                           &sink, 4, NULL),
                       cudaSuccess);
    host_cuda_loaded = NULL;
    for (size_t b = 0; b < c.bytes; b++)
      if (loads[b] != want[b])
        fail_msg("case %d (page %d, %d heads of %d, layout %d, window %d): byte %zu read %d times, "
                 "expected %d",
                 i, c.page_tokens, c.kv_heads, c.head_dim, c.layout, c.window, b, loads[b],
                 want[b]);
    free(want);
    free(loads);
    close_case(&c);
  }
}

static bool is_nan(const void *base, pkv_dtype dtype, int64_t i) {
  const float x = pkv_load(base, dtype, i);
  return x != x;
}

static void test_fill_owns_and_poisons(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 12);
  for (int i = 0; i < 30; i++) {
    meter_case c;
    draw(&c, &rng);
    open_case(&c, &rng);
    for (int64_t page = 0; page < c.cache.pages; page++)
      for (int32_t t = 0; t < c.page_tokens; t++) {
        const int64_t at = page * c.cache.k_page_stride + t * c.cache.k_token_stride;
        assert_int_equal(is_nan(c.cache.k, c.dtype, at), t >= c.owned[page]);
        assert_int_equal(is_nan(c.cache.v, c.dtype, at), t >= c.owned[page]);
      }
    close_case(&c);
  }
}

/* Attention by the reference executor, on the case. */
static float *reference(const meter_case *c, const float *q) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_plan_options plan_options = PKV_PLAN_OPTIONS_INIT;
  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  pkv_executor *executor;
  size_t bytes;
  void *memory, *workspace;
  const size_t count = (size_t)(c->rows * c->q_len * c->batch.query_heads * c->head_dim);
  float *out = calloc(count, sizeof *out);
  options.isa = PKV_ISA_REFERENCE;
  shape.query_heads = c->batch.query_heads;
  shape.kv_heads = c->kv_heads;
  shape.head_dim = c->head_dim;
  shape.page_tokens = c->page_tokens;
  shape.q_len = c->q_len;
  shape.window = c->window;
  OK(pkv_executor_create(&executor, &options, &err));
  OK(pkv_plan_size(&bytes, &args.workspace_bytes, &shape, &plan_options, c->rows, 300, &err));
  assert_int_equal(posix_memalign(&memory, 64, bytes), 0);
  assert_int_equal(posix_memalign(&workspace, 64, args.workspace_bytes + 64), 0);
  OK(pkv_plan_build(&args.plan, memory, bytes, &shape, &plan_options, c->rows, c->lengths, &err));
  args.cache = &c->cache;
  args.block_table = c->table;
  args.max_pages = c->max_pages;
  args.q = q;
  args.out = out;
  args.workspace = workspace;
  OK(pkv_attention_run(executor, &args, &err));
  pkv_executor_destroy(executor);
  free(memory);
  free(workspace);
  return out;
}

static void test_answer_is_the_reference(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 13);
  for (int i = 0; i < 60; i++) {
    meter_case c;
    draw(&c, &rng);
    if (i % 10 == 0) c.lengths[0] = 1200; /* more than two chunks */
    open_case(&c, &rng);
    const size_t count = (size_t)(c.rows * c.q_len * c.batch.query_heads * c.head_dim);
    float *q = calloc(count, sizeof *q);
    double *answer = calloc(count, sizeof *answer);
    for (size_t x = 0; x < count; x++)
      q[x] = (float)pkv_rng_normal(&rng);
    OK(meter->ops->answer(meter, answer, &c.cache, &c.batch, c.lengths, q, PKV_DTYPE_F32, &err));
    if (c.lengths[0] < 300) {
      float *want = reference(&c, q);
      for (size_t x = 0; x < count; x++)
        if (!(answer[x] - (double)want[x] < 1e-6 && (double)want[x] - answer[x] < 1e-6))
          fail_msg("case %d, element %zu: %g, the reference has %g", i, x, answer[x],
                   (double)want[x]);
      free(want);
    }
    free(q);
    free(answer);
    close_case(&c);
  }
}

/* The needle's V comes back where it is the output, and what `fill` wrote after it is gone. */
static void test_needles(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 14);
  for (int i = 0; i < 40; i++) {
    meter_case c;
    int32_t position[MOST_ROWS];
    float error = 0;
    draw(&c, &rng);
    open_case(&c, &rng);
    const int32_t heads = c.batch.query_heads;
    const size_t count = (size_t)(c.rows * c.q_len * heads * c.head_dim);
    float *out = calloc(count, sizeof *out);
    unsigned char *before = malloc(c.bytes);
    memcpy(before, c.storage, c.bytes);
    for (int32_t r = 0; r < c.rows; r++)
      position[r] = c.lengths[r] > 0 ? (int32_t)pkv_rng_below(&rng, (uint64_t)c.lengths[r]) : -1;
    OK(meter->ops->needle(meter, &c.cache, &c.batch, position, 3.0f, 42, &err));
    for (size_t x = 0; x < count; x++) {
      const int32_t r = (int32_t)(x / (size_t)(c.q_len * heads * c.head_dim));
      const int32_t head = (int32_t)(x / (size_t)c.head_dim) % heads / c.group;
      const int32_t lane = (int32_t)(x % (size_t)c.head_dim), at = position[r];
      if (at < 0) continue;
      const int64_t page = c.table[r * c.max_pages + at / c.page_tokens];
      const int64_t v = page * c.cache.v_page_stride + at % c.page_tokens * c.cache.v_token_stride +
                        head * c.cache.v_head_stride + lane;
      const float k = pkv_load(c.cache.k, c.dtype, v) * c.cache.k_scale;
      assert_true(k == 3.0f * pkv_meter_sign(lane));
      out[x] = pkv_load(c.cache.v, c.dtype, v) * c.cache.v_scale;
    }
    OK(meter->ops->needle_error(meter, &error, &c.cache, &c.batch, position, out, PKV_DTYPE_F32,
                                &err));
    assert_true(error == 0.0f);
    int32_t row = 0;
    while (row < c.rows && position[row] < 0)
      row++;
    if (row < c.rows) { /* in the row's last query, last element */
      out[(size_t)(row + 1) * (count / (size_t)c.rows) - 1] += 0.5f;
      OK(meter->ops->needle_error(meter, &error, &c.cache, &c.batch, position, out, PKV_DTYPE_F32,
                                  &err));
      assert_true(error > 0.499f && error < 0.501f);
      memset(&out[(size_t)row * (count / (size_t)c.rows)], 0xff, sizeof *out);
      OK(meter->ops->needle_error(meter, &error, &c.cache, &c.batch, position, out, PKV_DTYPE_F32,
                                  &err));
      assert_true(error > 1e30f);
    }
    OK(meter->ops->needle(meter, &c.cache, &c.batch, position, 0.0f, 42, &err));
    assert_memory_equal(before, c.storage, c.bytes);
    free(out);
    free(before);
    close_case(&c);
  }
}

static void test_device_is_described(void **state) {
  (void)state;
  assert_string_equal(meter->info.device, "Host 0  invented"); /* no comma */
  assert_non_null(strstr(meter->info.driver, "CUDA 13.1"));
  assert_int_equal(meter->info.multiprocessors, HOST_CUDA_SMS);
}

static int open_meter(void **state) {
  (void)state;
  if (pkv_meter_create(&meter, &err) == PKV_OK) return 0;
  fprintf(stderr, "%s\n", err.text);
  return -1;
}

static int close_meter(void **state) {
  (void)state;
  pkv_meter_destroy(meter);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_null_read_reads_what_is_seen),
      cmocka_unit_test(test_fill_owns_and_poisons),
      cmocka_unit_test(test_answer_is_the_reference),
      cmocka_unit_test(test_needles),
      cmocka_unit_test(test_device_is_described),
  };
  return cmocka_run_group_tests(tests, open_meter, close_meter);
}
