/* SPDX-License-Identifier: Apache-2.0 */
/* Pools: order of pages, copies in every layout, failing allocations, sizes past 2^31. */
#include "kv/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "support/test_alloc.h"

static pkv_error err;

#define OK(call)                                                                                   \
  do {                                                                                             \
    const pkv_status got = (call);                                                                 \
    if (got != PKV_OK) fail_msg("%s: %s \"%s\"", #call, pkv_status_name(got), err.text);           \
  } while (0)

static void order_of_pages(void **state) {
  (void)state;
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 1, o.head_dim = 8, o.page_tokens = 2, o.pages = 8;
  pkv_pool *pool;
  pkv_table *t;
  int32_t ids[8];
  OK(pkv_pool_create(&pool, &o, &err));
  OK(pkv_pool_alloc(ids, pool, 5, &err));
  for (int32_t i = 0; i < 5; i++)
    assert_int_equal(ids[i], i); /* new pages ascend */
  const int32_t gone[2] = {1, 3};
  OK(pkv_pool_release(pool, gone, 2, &err));
  OK(pkv_pool_alloc(ids, pool, 3, &err));
  assert_int_equal(ids[0], 3); /* last in, first out, before any new page */
  assert_int_equal(ids[1], 1);
  assert_int_equal(ids[2], 5);
  pkv_pool_destroy(pool);
  /* A row that was freed gets the same pages in the same order again. */
  OK(pkv_pool_create(&pool, &o, &err));
  OK(pkv_table_create(&t, pool, 2, 4, NULL, &err));
  assert_int_equal(pkv_table_stride(t), pkv_table_row(t, 1) - pkv_table_row(t, 0));
  for (int round = 0; round < 3; round++) {
    OK(pkv_table_extend(t, 1, 7, &err));
    for (int32_t i = 0; i < 4; i++)
      assert_int_equal(pkv_table_row(t, 1)[i], i);
    OK(pkv_table_truncate(t, 1, 0, &err));
    for (int32_t i = 0; i < 4; i++)
      assert_int_equal(pkv_table_row(t, 1)[i], -1);
  }
  pkv_table_destroy(t);
  pkv_pool_destroy(pool);
}

static void statistics(void **state) {
  (void)state;
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 2, o.head_dim = 16, o.pages = 10, o.layers = 3;
  pkv_pool *pool;
  pkv_pool_stats s;
  int32_t ids[10];
  OK(pkv_pool_create(&pool, &o, &err));
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.pages_total, 10);
  assert_int_equal(s.pages_free, 10);
  assert_int_equal(s.storage_bytes, 3 * 2 * 10 * 16 * 2 * 16 * 2);
  OK(pkv_pool_alloc(ids, pool, 6, &err));
  OK(pkv_pool_retain(pool, ids, 4, &err));
  OK(pkv_pool_retain(pool, ids, 2, &err));
  OK(pkv_pool_release(pool, ids + 3, 3, &err));
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.pages_free, 6);
  assert_int_equal(s.pages_in_use, 4);
  assert_int_equal(s.pages_shared, 3);
  assert_int_equal(s.peak_in_use, 6);
  pkv_pool_get_stats(NULL, pool);
  pkv_pool_get_stats(&s, NULL);
  assert_int_equal(s.pages_total, 0);
  pkv_pool_destroy(pool);
}

/* ---- copies ---- */

static size_t at(const pkv_cache *c, int is_v, int64_t page, int64_t token, int64_t head) {
  const int64_t e =
      is_v ? page * c->v_page_stride + token * c->v_token_stride + head * c->v_head_stride
           : page * c->k_page_stride + token * c->k_token_stride + head * c->k_head_stride;
  return (size_t)e * pkv_dtype_bytes(c->dtype);
}

/* Fills the first tokens of a page, all layers, with bytes drawn from a seed; or checks them. */
static void page_bytes(const pkv_pool *pool, int32_t page, int32_t tokens, uint64_t seed,
                       int check) {
  for (int32_t l = 0; l < pool->layers; l++) {
    pkv_cache c;
    OK(pkv_pool_cache(&c, pool, l, &err));
    const size_t size = (size_t)c.head_dim * pkv_dtype_bytes(c.dtype);
    for (int v = 0; v < 2; v++)
      for (int32_t t = 0; t < tokens; t++)
        for (int32_t h = 0; h < c.kv_heads; h++) {
          unsigned char *p = (unsigned char *)(v ? c.v : c.k) + at(&c, v, page, t, h);
          pkv_rng rng;
          pkv_rng_init(&rng,
                       (((seed * 64 + (uint64_t)l) * 2 + (uint64_t)v) * 2048 + (uint64_t)t) * 64 +
                           (uint64_t)h);
          for (size_t i = 0; i < size; i++) {
            const unsigned char x = (unsigned char)pkv_rng_next(&rng);
            if (!check)
              p[i] = x;
            else if (p[i] != x)
              fail_msg("page %d layer %d %c token %d head %d byte %zu: %d, expected %d", page, l,
                       v ? 'v' : 'k', t, h, i, p[i], x);
          }
        }
  }
}

/* Forks a row in the middle of a page and extends both; each keeps its own tokens. */
static void copy_once(pkv_pool *pool, int32_t page_tokens) {
  pkv_table *t;
  pkv_pool_stats s;
  OK(pkv_table_create(&t, pool, 2, 2, NULL, &err));
  const int32_t filled = page_tokens - 1;
  OK(pkv_table_extend(t, 0, filled, &err));
  const int32_t first = pkv_table_row(t, 0)[0];
  page_bytes(pool, first, page_tokens, 1, 0);
  OK(pkv_table_fork(t, 1, 0, filled, &err));
  assert_int_equal(pkv_table_row(t, 1)[0], first);
  OK(pkv_table_extend(t, 1, 1, &err));
  const int32_t second = pkv_table_row(t, 1)[0];
  assert_int_not_equal(first, second);
  page_bytes(pool, second, filled, 1, 1);
  page_bytes(pool, second, page_tokens, 2, 0);
  page_bytes(pool, first, page_tokens, 1, 1);
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.copies, 1);
  assert_int_equal(s.pages_shared, 0);
  pkv_table_destroy(t);
}

static void copies_in_every_layout(void **state) {
  (void)state;
  const int32_t sizes[] = {2, 3, 16, 64, 1024};
  for (int d = 0; d < 4; d++)
    for (int layout = 0; layout < 2; layout++)
      for (int heads = 1; heads <= 3; heads += 2)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
          pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
          o.dtype = (pkv_dtype)d;
          o.layout = (pkv_layout)layout;
          o.layers = 2;
          o.kv_heads = heads;
          o.head_dim = i % 2 ? 8 : 24;
          o.page_tokens = sizes[i];
          o.pages = 3;
          pkv_pool *pool;
          OK(pkv_pool_create(&pool, &o, &err));
          copy_once(pool, sizes[i]);
          pkv_pool_destroy(pool);
        }
}

/* Pages of one token are never partly filled: never a copy. */
static void pages_of_one_token(void **state) {
  (void)state;
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 1, o.head_dim = 8, o.page_tokens = 1, o.pages = 20;
  pkv_pool *pool;
  pkv_table *t;
  pkv_pool_stats s;
  OK(pkv_pool_create(&pool, &o, &err));
  OK(pkv_table_create(&t, pool, 3, 20, NULL, &err));
  OK(pkv_table_extend(t, 0, 5, &err));
  OK(pkv_table_fork(t, 1, 0, 5, &err));
  OK(pkv_table_fork(t, 2, 1, 3, &err));
  for (int32_t r = 0; r < 3; r++)
    OK(pkv_table_extend(t, r, 2, &err));
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.copies, 0);
  assert_int_equal(s.pages_in_use, 11);
  assert_int_equal(s.pages_shared, 5);
  pkv_table_destroy(t);
  pkv_pool_destroy(pool);
}

/* K head-major, V token-major with gaps, in one buffer: the copy follows each one's strides. */
static void copies_in_wrapped_memory(void **state) {
  (void)state;
  enum { PAGE = 5, HEADS = 3, DIM = 16, STRIDE = 700 };
  static uint16_t buffer[4 * STRIDE];
  pkv_cache c = PKV_CACHE_INIT;
  c.dtype = PKV_DTYPE_BF16;
  c.k = buffer;
  c.k_page_stride = c.v_page_stride = STRIDE;
  c.k_head_stride = 101, c.k_token_stride = 20;
  c.v = buffer + 310;
  c.v_head_stride = DIM, c.v_token_stride = 53;
  c.pages = 4, c.page_tokens = PAGE, c.kv_heads = HEADS, c.head_dim = DIM;
  c.k_scale = 0.5f;
  static const float head_scale[HEADS] = {1.0f, 2.0f, 3.0f};
  c.v_head_scale = head_scale;
  pkv_pool *pool;
  OK(pkv_pool_wrap(&pool, &c, 1, NULL, &err));
  pkv_cache seen;
  OK(pkv_pool_cache(&seen, pool, 0, &err));
  assert_ptr_equal(seen.k, buffer);
  assert_ptr_equal(seen.v_head_scale, head_scale);
  assert_true(seen.k_scale == 0.5f && seen.v_scale == 1.0f);
  pkv_pool_stats s;
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.storage_bytes, 0);
  copy_once(pool, PAGE);
  pkv_pool_destroy(pool);
}

/* K and V in two buffers whose pages are not equally far apart. */
static void copies_with_two_page_strides(void **state) {
  (void)state;
  static float k[3 * 200], v[3 * 333];
  pkv_cache c = PKV_CACHE_INIT;
  c.k = k, c.v = v;
  c.k_page_stride = 200, c.v_page_stride = 333;
  c.k_token_stride = 16, c.v_token_stride = 81;
  c.k_head_stride = 64, c.v_head_stride = 40;
  c.pages = 3, c.page_tokens = 4, c.kv_heads = 2, c.head_dim = 16;
  pkv_pool *pool;
  OK(pkv_pool_wrap(&pool, &c, 1, NULL, &err));
  copy_once(pool, 4);
  pkv_pool_destroy(pool);
}

/* ---- allocations that fail ---- */

static pkv_status make_pool(void *ctx, const pkv_allocator *a) {
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 2, o.head_dim = 8, o.pages = 9, o.layers = 3;
  o.allocator = a;
  pkv_pool *pool = (pkv_pool *)ctx;
  const pkv_status status = pkv_pool_create(&pool, &o, NULL);
  if ((status == PKV_OK) != (pool != NULL)) return PKV_E_INTERNAL;
  pkv_pool_destroy(pool);
  return status;
}

static pkv_status wrap_pool(void *ctx, const pkv_allocator *a) {
  static float k[64], v[64];
  pkv_cache c = PKV_CACHE_INIT;
  c.k = k, c.v = v;
  c.pages = 8, c.page_tokens = 1, c.kv_heads = 1, c.head_dim = 8;
  c.k_page_stride = c.v_page_stride = 8;
  pkv_pool *pool = (pkv_pool *)ctx;
  const pkv_status status = pkv_pool_wrap(&pool, &c, 1, a, NULL);
  if ((status == PKV_OK) != (pool != NULL)) return PKV_E_INTERNAL;
  pkv_pool_destroy(pool);
  return status;
}

static pkv_status make_table(void *ctx, const pkv_allocator *a) {
  pkv_table *table = NULL;
  const pkv_status status = pkv_table_create(&table, ctx, 4, 3, a, NULL);
  if ((status == PKV_OK) != (table != NULL)) return PKV_E_INTERNAL;
  if (status == PKV_OK && pkv_table_extend(table, 2, 20, NULL) != PKV_OK) return PKV_E_INTERNAL;
  pkv_table_destroy(table);
  return status;
}

static void create_torture(void **state) {
  (void)state;
  int any;
  assert_int_equal(test_alloc_torture(make_pool, &any), 5);
  assert_int_equal(test_alloc_torture(wrap_pool, &any), 4);
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 2, o.head_dim = 8, o.pages = 9;
  pkv_pool *pool;
  OK(pkv_pool_create(&pool, &o, &err));
  assert_int_equal(test_alloc_torture(make_table, pool), 4);
  pkv_pool_stats s;
  pkv_pool_get_stats(&s, pool);
  assert_int_equal(s.pages_free, 9);
  pkv_pool_destroy(pool);
}

/* ---- sizes past 2^31 ---- */

/* Address space without a promise of memory behind it. */
static void *map_alloc(void *ctx, size_t size, size_t align) {
  (void)ctx;
  (void)align; /* a page of memory is aligned to more */
  void *p =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static void map_free(void *ctx, void *ptr, size_t size) {
  (void)ctx;
  munmap(ptr, size);
}

static const pkv_allocator map_allocator = {map_alloc, map_free, NULL};

static int64_t resident_bytes(void) {
  long size = 0, resident = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  if (f == NULL || fscanf(f, "%ld %ld", &size, &resident) != 2) resident = 0;
  if (f != NULL) fclose(f);
  return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

/* 1100 pages of 2^21 elements: the last page and a copy out of it lie past 2^31 elements. */
static void more_than_2_31_elements(void **state) {
  (void)state;
  enum { PAGES = 1100 };
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 8, o.head_dim = 256, o.page_tokens = 1024, o.pages = PAGES;
  o.allocator = &map_allocator;
  for (int layout = 0; layout < 2; layout++) {
    o.layout = (pkv_layout)layout;
    pkv_pool *pool;
    pkv_table *t;
    static int32_t ids[PAGES];
    const int64_t before = resident_bytes();
    OK(pkv_pool_create(&pool, &o, &err));
    assert_true(pool->storage_bytes > (size_t)2 * 2 * (size_t)INT32_MAX);
    const int64_t touched = resident_bytes() - before;
    if (touched > 8 << 20) fail_msg("making the pool touched %lld bytes", (long long)touched);
    OK(pkv_pool_alloc(ids, pool, PAGES, &err));
    assert_int_equal(ids[PAGES - 1], PAGES - 1);
    OK(pkv_pool_release(pool, ids + PAGES - 3, 1, &err)); /* PAGES - 3: where the copy will go */
    OK(pkv_table_create(&t, pool, 2, 1, NULL, &err));
    OK(pkv_table_attach(t, 0, ids + PAGES - 1, 1, 5, &err));
    page_bytes(pool, PAGES - 1, 6, 7, 0);
    page_bytes(pool, PAGES - 2, 6, 8, 0);
    OK(pkv_table_extend(t, 0, 1, &err));
    assert_int_equal(pkv_table_row(t, 0)[0], PAGES - 3);
    int64_t slot;
    OK(pkv_table_slots(&slot, t, 0, 5, 1, &err));
    assert_int_equal(slot, (PAGES - 3) * 1024 + 5);
    page_bytes(pool, PAGES - 3, 5, 7, 1);
    page_bytes(pool, PAGES - 1, 6, 7, 1);
    page_bytes(pool, PAGES - 2, 6, 8, 1);
    pkv_table_destroy(t);
    pkv_pool_destroy(pool);
  }
}

/* Strides of tokens or of heads, in bytes, past 2^32. */
static void far_strides(void **state) {
  (void)state;
  const int64_t far = ((int64_t)1 << 32) + 64, bytes = 3 * far;
  void *memory = map_alloc(NULL, (size_t)bytes, 64);
  if (memory == NULL) {
    print_message("skipped: no address space for %lld bytes\n", (long long)bytes);
    skip();
  }
  for (int heads_far = 0; heads_far < 2; heads_far++) {
    pkv_cache c = PKV_CACHE_INIT;
    c.dtype = PKV_DTYPE_FP8_E4M3;
    c.k = memory, c.v = (char *)memory + 2048;
    c.k_page_stride = c.v_page_stride = 64;
    c.k_token_stride = c.v_token_stride = heads_far ? 16 : far;
    c.k_head_stride = c.v_head_stride = heads_far ? far : 16;
    c.pages = 3, c.page_tokens = 3, c.kv_heads = 2, c.head_dim = 8;
    pkv_pool *pool;
    OK(pkv_pool_wrap(&pool, &c, 1, NULL, &err));
    copy_once(pool, 3);
    pkv_pool_destroy(pool);
  }
  map_free(NULL, memory, (size_t)bytes);
}

/* As many pages as an id can name: made at once, without touching the counts. */
static void most_pages(void **state) {
  (void)state;
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.dtype = PKV_DTYPE_FP8_E4M3;
  o.kv_heads = 1, o.head_dim = 8, o.page_tokens = 1, o.pages = INT32_MAX;
  o.allocator = &map_allocator;
  pkv_pool *pool;
  const pkv_status status = pkv_pool_create(&pool, &o, &err);
  if (status == PKV_E_NOMEM) { /* an address space limit */
    print_message("skipped: %s\n", err.text);
    skip();
  }
  OK(status);
  int32_t ids[3];
  OK(pkv_pool_alloc(ids, pool, 3, &err));
  assert_int_equal(pkv_pool_refcount(pool, 2), 1);
  assert_int_equal(pkv_pool_refcount(pool, INT32_MAX - 1), 0);
  assert_int_equal(pkv_pool_refcount(pool, INT32_MAX), -1);
  pool->fresh = INT32_MAX - 1; /* as if all but one had been in use; those in between stay so */
  OK(pkv_pool_alloc(ids, pool, 1, &err));
  assert_int_equal(ids[0], INT32_MAX - 1);
  pkv_cache c;
  OK(pkv_pool_cache(&c, pool, 0, &err));
  unsigned char *last = (unsigned char *)c.v + at(&c, 1, ids[0], 0, 0);
  memset(last, 0x77, 8);
  assert_ptr_equal(last + 8, (unsigned char *)c.k + (size_t)16 * INT32_MAX);
  assert_int_equal(pkv_pool_alloc(ids, pool, 1, &err), PKV_E_NO_PAGES);
  pkv_pool_destroy(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(order_of_pages),
      cmocka_unit_test(statistics),
      cmocka_unit_test(copies_in_every_layout),
      cmocka_unit_test(pages_of_one_token),
      cmocka_unit_test(copies_in_wrapped_memory),
      cmocka_unit_test(create_torture),
      cmocka_unit_test(far_strides),
      cmocka_unit_test(copies_with_two_page_strides),
      cmocka_unit_test(more_than_2_31_elements),
      cmocka_unit_test(most_pages),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
