/* SPDX-License-Identifier: Apache-2.0 */
/* Bad input to pools and tables: status, the argument's name in the text, nothing changed. */
#include "kv/pool.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/cache.h"
#include "support/test_alloc.h"

static pkv_error err;

/* `call` fails with `expected`, and its text holds `word`. */
#define REFUSED(call, expected, word)                                                              \
  do {                                                                                             \
    memset(&err, 0, sizeof err);                                                                   \
    const pkv_status got = (call);                                                                 \
    if (got != (expected) || err.status != got || strstr(err.text, (word)) == NULL ||              \
        err.where == NULL)                                                                         \
      fail_msg("%s: %s \"%s\", expected %s with \"%s\"", #call, pkv_status_name(got), err.text,    \
               pkv_status_name(expected), (word));                                                 \
  } while (0)

#define ACCEPTED(call)                                                                             \
  do {                                                                                             \
    memset(&err, 0, sizeof err);                                                                   \
    const pkv_status got = (call);                                                                 \
    if (got != PKV_OK) fail_msg("%s: %s \"%s\"", #call, pkv_status_name(got), err.text);           \
  } while (0)

static pkv_pool_options small_options(void) {
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.kv_heads = 2;
  o.head_dim = 16;
  o.page_tokens = 4;
  o.pages = 6;
  o.layers = 2;
  return o;
}

static void create_options(void **state) {
  (void)state;
  pkv_pool *pool = (pkv_pool *)&err;
  const pkv_pool_options good = small_options();
  REFUSED(pkv_pool_create(NULL, &good, &err), PKV_E_INVALID, "out");
  REFUSED(pkv_pool_create(&pool, NULL, &err), PKV_E_INVALID, "NULL");
  assert_null(pool);
#define BAD(field, value, status, word)                                                            \
  do {                                                                                             \
    pkv_pool_options o = good;                                                                     \
    o.field = (value);                                                                             \
    REFUSED(pkv_pool_create(&pool, &o, &err), status, word);                                       \
    assert_null(pool);                                                                             \
  } while (0)
  BAD(struct_size, 4, PKV_E_INVALID, "struct_size is 4");
  BAD(dtype, (pkv_dtype)9, PKV_E_INVALID, "options->dtype is 9");
  BAD(layout, (pkv_layout)7, PKV_E_INVALID, "options->layout is 7");
  BAD(layers, -1, PKV_E_INVALID, "options->layers is -1");
  BAD(kv_heads, 0, PKV_E_INVALID, "options->kv_heads is 0");
  BAD(head_dim, 0, PKV_E_UNSUPPORTED, "options->head_dim is 0");
  BAD(head_dim, 12, PKV_E_UNSUPPORTED, "options->head_dim is 12");
  BAD(head_dim, 264, PKV_E_UNSUPPORTED, "options->head_dim is 264");
  BAD(page_tokens, -3, PKV_E_INVALID, "options->page_tokens is -3");
  BAD(page_tokens, 1025, PKV_E_INVALID, "options->page_tokens is 1025");
  BAD(pages, 0, PKV_E_INVALID, "options->pages is 0");
  BAD(pages, (int64_t)INT32_MAX + 1, PKV_E_INVALID, "options->pages is 2147483648");
  BAD(k_scale, -1.0f, PKV_E_INVALID, "options->k_scale is -1");
  BAD(v_scale, NAN, PKV_E_INVALID, "options->v_scale");
  BAD(v_scale, INFINITY, PKV_E_INVALID, "options->v_scale is inf");
#undef BAD
  pkv_pool_options huge = good;
  huge.kv_heads = INT32_MAX;
  huge.pages = INT32_MAX;
  huge.page_tokens = 1024;
  huge.head_dim = 256;
  REFUSED(pkv_pool_create(&pool, &huge, &err), PKV_E_LIMIT, "options->pages");
  assert_int_equal(pkv_pool_create(&pool, &huge, NULL), PKV_E_LIMIT); /* no error to fill */
}

static void create_defaults(void **state) {
  (void)state;
  pkv_pool_options o = small_options();
  o.layers = 0;
  o.page_tokens = 0;
  pkv_pool *pool;
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  pkv_cache c;
  ACCEPTED(pkv_pool_cache(&c, pool, 0, &err));
  assert_int_equal(c.page_tokens, 16);
  assert_true(c.k_scale == 1.0f && c.v_scale == 1.0f);
  assert_int_equal(c.k_token_stride, 16);
  assert_int_equal(c.k_head_stride, 2 * 256); /* K and V of a head side by side */
  assert_int_equal(c.k_page_stride, 2 * 512);
  assert_int_equal((const unsigned char *)c.v - (const unsigned char *)c.k, 256 * 2);
  REFUSED(pkv_pool_cache(&c, pool, 1, &err), PKV_E_RANGE, "layer is 1");
  REFUSED(pkv_pool_cache(&c, pool, -1, &err), PKV_E_RANGE, "layer is -1");
  REFUSED(pkv_pool_cache(NULL, pool, 0, &err), PKV_E_INVALID, "out");
  REFUSED(pkv_pool_cache(&c, NULL, 0, &err), PKV_E_INVALID, "pool");
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  pkv_pool_destroy(pool);
  o.layout = PKV_LAYOUT_NHD;
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  ACCEPTED(pkv_pool_cache(&c, pool, 0, &err));
  assert_int_equal(c.v_token_stride, 32);
  assert_int_equal(c.v_head_stride, 16);
  assert_int_equal(c.v_page_stride, 2 * 512);
  pkv_pool_destroy(pool);
  /* 64 KiB a page of four layers: half of 8 KiB more keeps pages off the same cache lines. */
  o = small_options();
  o.kv_heads = 8, o.head_dim = 128, o.pages = 2, o.dtype = PKV_DTYPE_F16, o.layers = 4;
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  ACCEPTED(pkv_pool_cache(&c, pool, 3, &err));
  assert_int_equal(c.k_page_stride * 2, 65536 + 4096);
  assert_int_equal((const unsigned char *)c.k - (const unsigned char *)pool->storage, 3 * 16384);
  pkv_pool_destroy(pool);
  pkv_pool_destroy(NULL);
}

/* A view of [pages 5][token 4][head 3][d 8], K and V apart. */
static float storage[2][5 * 4 * 3 * 8];

static pkv_cache view(void) {
  pkv_cache c = PKV_CACHE_INIT;
  c.k = storage[0];
  c.v = storage[1];
  c.pages = 5;
  c.page_tokens = 4;
  c.kv_heads = 3;
  c.head_dim = 8;
  c.k_head_stride = c.v_head_stride = 8;
  c.k_token_stride = c.v_token_stride = 24;
  c.k_page_stride = c.v_page_stride = 96;
  return c;
}

static void cache_views(void **state) {
  (void)state;
  const pkv_cache good = view();
  ACCEPTED(pkv_cache_check(&good, "cache->", &err));
  REFUSED(pkv_cache_check(NULL, "cache->", &err), PKV_E_INVALID, "cache is NULL");
#define BAD(field, value, status, word)                                                            \
  do {                                                                                             \
    pkv_cache c = good;                                                                            \
    c.field = (value);                                                                             \
    REFUSED(pkv_cache_check(&c, "caches[2].", &err), status, word);                                \
  } while (0)
  static const float bad_scales[3] = {1.0f, 0.0f, 1.0f}, nan_scales[3] = {1.0f, 1.0f, NAN};
  BAD(struct_size, 0, PKV_E_INVALID, "struct_size is 0");
  BAD(k, NULL, PKV_E_INVALID, "caches[2].k is NULL");
  BAD(v, NULL, PKV_E_INVALID, "caches[2].v is NULL");
  BAD(k, (char *)storage[0] + 2, PKV_E_INVALID, "caches[2].k is not aligned");
  BAD(v, (char *)storage[1] + 1, PKV_E_INVALID, "caches[2].v is not aligned");
  BAD(dtype, (pkv_dtype)-1, PKV_E_INVALID, "caches[2].dtype is -1");
  BAD(pages, 0, PKV_E_INVALID, "caches[2].pages is 0");
  BAD(pages, INT64_MAX, PKV_E_INVALID, "caches[2].pages");
  BAD(page_tokens, 0, PKV_E_INVALID, "caches[2].page_tokens is 0");
  BAD(page_tokens, 1025, PKV_E_INVALID, "caches[2].page_tokens is 1025");
  BAD(kv_heads, 0, PKV_E_INVALID, "caches[2].kv_heads is 0");
  BAD(head_dim, 4, PKV_E_UNSUPPORTED, "caches[2].head_dim is 4");
  BAD(k_page_stride, -96, PKV_E_INVALID, "caches[2].k_page_stride is -96");
  BAD(v_token_stride, -1, PKV_E_INVALID, "caches[2].v_token_stride is -1");
  BAD(v_head_stride, INT64_MIN, PKV_E_INVALID, "caches[2].v_head_stride");
  BAD(k_page_stride, 95, PKV_E_INVALID, "caches[2].k_page_stride is 95");
  BAD(v_page_stride, 0, PKV_E_INVALID, "caches[2].v_page_stride is 0");
  BAD(k_token_stride, 23, PKV_E_INVALID, "caches[2].k_token_stride is 23");
  BAD(v_head_stride, 7, PKV_E_INVALID, "caches[2].v_head_stride is 7");
  BAD(k_head_stride, 24, PKV_E_INVALID, "overlap"); /* token and head on the same stride */
  BAD(k_page_stride, INT64_MAX / 4, PKV_E_INVALID, "caches[2].k_page_stride");
  BAD(v_page_stride, INT64_MAX / 15, PKV_E_INVALID, "caches[2].v_page_stride");
  BAD(v_token_stride, INT64_MAX, PKV_E_INVALID, "v_token_stride");
  BAD(k_scale, -0.5f, PKV_E_INVALID, "caches[2].k_scale is -0.5");
  BAD(v_scale, NAN, PKV_E_INVALID, "caches[2].v_scale");
  BAD(k_head_scale, bad_scales, PKV_E_INVALID, "caches[2].k_head_scale[1] is 0");
  BAD(v_head_scale, nan_scales, PKV_E_INVALID, "caches[2].v_head_scale[2]");
#undef BAD
}

/* Forms in real use that must be accepted. */
static void cache_forms(void **state) {
  (void)state;
  pkv_cache c = view();
  c.k_head_stride = 32, c.k_token_stride = 8; /* HND beside NHD */
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  c = view();
  c.k_page_stride = 24, c.k_token_stride = 5 * 24; /* pages innermost of the outer axes */
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  c.k_page_stride = 25; /* the last page's head then reaches into the next token */
  REFUSED(pkv_cache_check(&c, "cache->", &err), PKV_E_INVALID, "overlap");
  c = view();
  c.page_tokens = 1, c.pages = 20, c.k_page_stride = c.v_page_stride = 24; /* token-major */
  c.k_token_stride = 0, c.v_token_stride = 12345;                          /* no second token */
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  c = view();
  c.kv_heads = 1, c.k_head_stride = 0, c.v_head_stride = 3;
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  c = view();
  c.v = c.k; /* reading one memory as both is allowed, owning it is not (below) */
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
  c = view();
  c.pages = INT32_MAX, c.k_page_stride = c.v_page_stride = (int64_t)1 << 28;
  ACCEPTED(pkv_cache_check(&c, "cache->", &err));
}

static void wrap_arguments(void **state) {
  (void)state;
  pkv_pool *pool = (pkv_pool *)&err;
  static float other[2][5 * 4 * 3 * 8];
  pkv_cache c[2] = {view(), view()};
  c[1].k = other[0], c[1].v = other[1];
  REFUSED(pkv_pool_wrap(NULL, c, 2, NULL, &err), PKV_E_INVALID, "out");
  REFUSED(pkv_pool_wrap(&pool, NULL, 2, NULL, &err), PKV_E_INVALID, "caches");
  assert_null(pool);
  REFUSED(pkv_pool_wrap(&pool, c, 0, NULL, &err), PKV_E_INVALID, "layers is 0");
#define BAD(field, value, word)                                                                    \
  do {                                                                                             \
    pkv_cache t[2] = {c[0], c[1]};                                                                 \
    t[1].field = (value);                                                                          \
    REFUSED(pkv_pool_wrap(&pool, t, 2, NULL, &err), PKV_E_INVALID, word);                          \
    assert_null(pool);                                                                             \
  } while (0)
  BAD(k, NULL, "caches[1].k is NULL");
  BAD(dtype, PKV_DTYPE_F16, "caches[1].dtype is 1, caches[0] has 0");
  BAD(pages, 4, "caches[1].pages is 4");
  BAD(page_tokens, 3, "caches[1].page_tokens is 3");
  BAD(kv_heads, 2, "caches[1].kv_heads is 2");
  BAD(v_page_stride, 95, "caches[1].v_page_stride");
  BAD(v, c[1].k, "caches[1].v overlaps caches[1].k");
  BAD(k, c[0].k, "caches[1].k overlaps caches[0].k");
  BAD(v, c[0].k, "caches[1].v overlaps caches[0].k");
  BAD(k, (float *)c[0].v + 8, "caches[1].k overlaps caches[0].v");
#undef BAD
  ACCEPTED(pkv_pool_wrap(&pool, c, 2, NULL, &err));
  pkv_pool_destroy(pool);
}

/* K|V and layers interleaved in one buffer: told from those that overlap. */
static void wrap_interleaved(void **state) {
  (void)state;
  static float buffer[5 * 2 * 2 * 96 + 64];
  const struct {
    const char *what;
    int64_t page, token, head, kv, layer;
    int ok;
  } forms[] = {
      {"page, layer, kv, token, head", 384, 24, 8, 96, 192, 1},
      {"page, kv, layer, token, head", 384, 24, 8, 192, 96, 1},
      {"page, token, layer, kv, head", 384, 96, 8, 24, 48, 1},
      {"page, token, head, layer, kv", 384, 96, 32, 8, 16, 1},
      {"page, head, token, kv, layer", 384, 32, 128, 8 * 2, 8, 1},
      {"layer, page, kv, token, head", 192, 24, 8, 96, 5 * 192, 1},
      {"V starts inside K's page", 384, 24, 8, 95, 192, 0},
      {"layers half a page apart", 384, 24, 8, 96, 48, 0},
      {"V lies on the next page's K", 192, 24, 8, 192, 5 * 192, 0},
  };
  for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
    pkv_cache c[2] = {view(), view()};
    for (int l = 0; l < 2; l++) {
      c[l].k = buffer + l * forms[i].layer;
      c[l].v = buffer + l * forms[i].layer + forms[i].kv;
      c[l].k_page_stride = c[l].v_page_stride = forms[i].page;
      c[l].k_token_stride = c[l].v_token_stride = forms[i].token;
      c[l].k_head_stride = c[l].v_head_stride = forms[i].head;
    }
    pkv_pool *pool;
    const pkv_status status = pkv_pool_wrap(&pool, c, 2, NULL, &err);
    if ((status == PKV_OK) != forms[i].ok)
      fail_msg("%s: %s \"%s\"", forms[i].what, pkv_status_name(status), err.text);
    pkv_pool_destroy(pool);
  }
  /* K token-major and V head-major within one page; then V one page further on. */
  pkv_cache c = view();
  c.k = buffer;
  c.v = buffer + 96;
  c.k_page_stride = c.v_page_stride = 192;
  c.v_token_stride = 8, c.v_head_stride = 32;
  pkv_pool *pool;
  ACCEPTED(pkv_pool_wrap(&pool, &c, 1, NULL, &err));
  pkv_pool_destroy(pool);
  c.v = buffer + 192 + 96;
  ACCEPTED(pkv_pool_wrap(&pool, &c, 1, NULL, &err));
  pkv_pool_destroy(pool);
  c.v = buffer + 192 + 95;
  REFUSED(pkv_pool_wrap(&pool, &c, 1, NULL, &err), PKV_E_INVALID, "caches[0].v overlaps");
  c.v = buffer + 192 + 97; /* its end lies on the next page's K */
  REFUSED(pkv_pool_wrap(&pool, &c, 1, NULL, &err), PKV_E_INVALID, "caches[0].v overlaps");
  c.v = buffer + 96;
  c.v_page_stride = 200; /* page 1 of V ends on page 2 of K */
  REFUSED(pkv_pool_wrap(&pool, &c, 1, NULL, &err), PKV_E_INVALID, "caches[0].v overlaps");
}

static void page_arguments(void **state) {
  (void)state;
  const pkv_pool_options o = small_options();
  pkv_pool *pool;
  int32_t ids[8];
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  REFUSED(pkv_pool_alloc(ids, NULL, 1, &err), PKV_E_INVALID, "pool");
  REFUSED(pkv_pool_alloc(NULL, pool, 1, &err), PKV_E_INVALID, "ids");
  REFUSED(pkv_pool_alloc(ids, pool, -1, &err), PKV_E_INVALID, "count is -1");
  REFUSED(pkv_pool_alloc(ids, pool, 7, &err), PKV_E_NO_PAGES, "count is 7, 6 of 6");
  ACCEPTED(pkv_pool_alloc(NULL, pool, 0, &err));
  ACCEPTED(pkv_pool_alloc(ids, pool, 4, &err)); /* 0 1 2 3 */
  REFUSED(pkv_pool_alloc(ids + 4, pool, 3, &err), PKV_E_NO_PAGES, "count is 3, 2 of 6");
  ACCEPTED(pkv_pool_retain(pool, ids, 1, &err)); /* page 0 has two owners */
  const struct {
    int32_t ids[4];
    int64_t count;
    pkv_status retain, release;
    const char *word;
  } cases[] = {
      {{0, 1, 6, 0}, 4, PKV_E_RANGE, PKV_E_RANGE, "ids[2] is 6"},
      {{-1, 1, 6, 0}, 4, PKV_E_RANGE, PKV_E_RANGE, "ids[0] is -1"},
      {{0, INT32_MIN, 0, 0}, 2, PKV_E_RANGE, PKV_E_RANGE, "ids[1] is -2147483648"},
      {{1, 2, 3, 4}, 4, PKV_E_STATE, PKV_E_STATE, "ids[3] is page 4, which is free"},
      {{1, 0, 1, 2}, 4, PKV_OK, PKV_E_STATE, "ids[2] is page 1"},
      {{0, 1, 0, 0}, 4, PKV_OK, PKV_E_STATE, "ids[3] is page 0"},
      {{0, 1, 0, 0}, -4, PKV_E_INVALID, PKV_E_INVALID, "count is -4"},
  };
  pkv_pool_stats before, after;
  pkv_pool_get_stats(&before, pool);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    REFUSED(pkv_pool_release(pool, cases[i].ids, cases[i].count, &err), cases[i].release,
            cases[i].word);
    if (cases[i].retain != PKV_OK)
      REFUSED(pkv_pool_retain(pool, cases[i].ids, cases[i].count, &err), cases[i].retain,
              cases[i].word);
    pkv_pool_get_stats(&after, pool);
    assert_memory_equal(&before, &after, sizeof after);
    for (int32_t p = 0; p < 6; p++)
      assert_int_equal(pkv_pool_refcount(pool, p), p == 0 ? 2 : p < 4 ? 1 : 0);
  }
  REFUSED(pkv_pool_release(pool, NULL, 1, &err), PKV_E_INVALID, "ids");
  REFUSED(pkv_pool_retain(NULL, ids, 1, &err), PKV_E_INVALID, "pool");
  assert_int_equal(pkv_pool_refcount(pool, -1), -1);
  assert_int_equal(pkv_pool_refcount(pool, 6), -1);
  assert_int_equal(pkv_pool_refcount(NULL, 0), -1);
  pkv_pool_destroy(pool); /* with live pages */
}

static void counts_at_their_ends(void **state) {
  (void)state;
  const pkv_pool_options o = small_options();
  pkv_pool *pool;
  pkv_pool_stats after;
  int32_t ids[8];
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  ACCEPTED(pkv_pool_alloc(ids, pool, 4, &err)); /* 0 1 2 3 */
  ACCEPTED(pkv_pool_retain(pool, ids, 1, &err));
  /* A full count refuses one more owner and gives back those counted before it. */
  pool->refs[2] = INT32_MAX;
  const int32_t list[4] = {1, 3, 1, 2};
  REFUSED(pkv_pool_retain(pool, list, 4, &err), PKV_E_LIMIT, "ids[3] is page 2");
  assert_int_equal(pool->refs[1], 1);
  assert_int_equal(pool->refs[3], 1);
  pool->refs[2] = 1;
  /* The same id as often as it has owners. */
  const int32_t twice[3] = {0, 2, 0};
  ACCEPTED(pkv_pool_release(pool, twice, 3, &err));
  pkv_pool_get_stats(&after, pool);
  assert_int_equal(after.pages_free, 4);
  assert_int_equal(after.pages_shared, 0);
  assert_int_equal(after.peak_in_use, 4);
  ACCEPTED(pkv_pool_alloc(ids, pool, 4, &err));
  for (int i = 0; i < 4; i++) /* no page is handed out twice */
    for (int j = 0; j < i; j++)
      assert_int_not_equal(ids[i], ids[j]);
  pkv_pool_destroy(pool);
}

static void table_arguments(void **state) {
  (void)state;
  const pkv_pool_options o = small_options();
  pkv_pool *pool;
  pkv_table *t = (pkv_table *)&err;
  int64_t slots[16];
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  REFUSED(pkv_table_create(NULL, pool, 2, 2, NULL, &err), PKV_E_INVALID, "out");
  REFUSED(pkv_table_create(&t, NULL, 2, 2, NULL, &err), PKV_E_INVALID, "pool");
  assert_null(t);
  REFUSED(pkv_table_create(&t, pool, 0, 2, NULL, &err), PKV_E_INVALID, "rows is 0");
  REFUSED(pkv_table_create(&t, pool, 2, -1, NULL, &err), PKV_E_INVALID, "max_pages is -1");
  REFUSED(pkv_table_create(&t, pool, INT32_MAX, INT32_MAX, NULL, &err), PKV_E_NOMEM, "rows");
  ACCEPTED(pkv_table_create(&t, pool, 3, 3, NULL, &err));
  REFUSED(pkv_table_extend(NULL, 0, 1, &err), PKV_E_INVALID, "table");
  REFUSED(pkv_table_extend(t, 3, 1, &err), PKV_E_RANGE, "row is 3");
  REFUSED(pkv_table_extend(t, -1, 1, &err), PKV_E_RANGE, "row is -1");
  REFUSED(pkv_table_extend(t, 0, -2, &err), PKV_E_INVALID, "tokens is -2");
  REFUSED(pkv_table_extend(t, 0, 13, &err), PKV_E_LIMIT, "tokens is 13");
  REFUSED(pkv_table_extend(t, 0, INT32_MAX, &err), PKV_E_LIMIT, "tokens is 2147483647");
  ACCEPTED(pkv_table_extend(t, 0, 10, &err)); /* 3 pages */
  REFUSED(pkv_table_extend(t, 0, INT32_MAX, &err), PKV_E_LIMIT, "row 0 of 10 tokens");
  REFUSED(pkv_table_truncate(t, 0, 11, &err), PKV_E_RANGE, "tokens is 11, row 0 holds 10");
  REFUSED(pkv_table_truncate(t, 0, -1, &err), PKV_E_RANGE, "tokens is -1");
  REFUSED(pkv_table_truncate(t, 9, 0, &err), PKV_E_RANGE, "row is 9");
  REFUSED(pkv_table_fork(t, 0, 1, 0, &err), PKV_E_STATE, "dst is 0");
  REFUSED(pkv_table_fork(t, 1, 0, 11, &err), PKV_E_RANGE, "tokens is 11");
  REFUSED(pkv_table_fork(t, 1, 0, -1, &err), PKV_E_RANGE, "tokens is -1");
  REFUSED(pkv_table_fork(t, 1, 3, 1, &err), PKV_E_RANGE, "src is 3");
  REFUSED(pkv_table_fork(t, 3, 1, 1, &err), PKV_E_RANGE, "dst is 3");
  REFUSED(pkv_table_fork(t, 0, 0, 3, &err), PKV_E_STATE, "dst is 0");
  const int32_t pages[4] = {0, 1, 5, 2};
  REFUSED(pkv_table_attach(t, 0, pages, 1, 4, &err), PKV_E_STATE, "row is 0");
  REFUSED(pkv_table_attach(t, 1, pages, 1, 5, &err), PKV_E_INVALID, "page_count is 1, 5 tokens");
  REFUSED(pkv_table_attach(t, 1, pages, 2, 4, &err), PKV_E_INVALID, "page_count is 2, 4 tokens");
  REFUSED(pkv_table_attach(t, 1, pages, 4, 16, &err), PKV_E_LIMIT, "page_count is 4");
  REFUSED(pkv_table_attach(t, 1, pages, 0, -1, &err), PKV_E_INVALID, "tokens is -1");
  REFUSED(pkv_table_attach(t, 1, NULL, 1, 1, &err), PKV_E_INVALID, "pages");
  REFUSED(pkv_table_attach(t, 1, pages, 3, 12, &err), PKV_E_STATE, "ids[2] is page 5");
  assert_int_equal(pkv_pool_refcount(pool, 0), 1);
  assert_int_equal(pkv_table_seq_len(t, 1), 0);
  REFUSED(pkv_table_slots(slots, t, 0, 0, 11, &err), PKV_E_RANGE, "count 11");
  REFUSED(pkv_table_slots(slots, t, 0, -1, 1, &err), PKV_E_RANGE, "first is -1");
  REFUSED(pkv_table_slots(slots, t, 0, 5, INT32_MAX, &err), PKV_E_RANGE, "first is 5");
  REFUSED(pkv_table_slots(slots, t, 0, 0, -1, &err), PKV_E_INVALID, "count is -1");
  REFUSED(pkv_table_slots(NULL, t, 0, 0, 1, &err), PKV_E_INVALID, "slots");
  REFUSED(pkv_table_slots(slots, t, 4, 0, 1, &err), PKV_E_RANGE, "row is 4");
  assert_int_equal(pkv_table_seq_len(t, 3), -1);
  assert_int_equal(pkv_table_seq_len(t, -1), -1);
  assert_null(pkv_table_row(t, 3));
  assert_null(pkv_table_row(NULL, 0));
  pkv_table_destroy(t);
  pkv_table_destroy(NULL);
  assert_int_equal(pkv_pool_free_pages(pool), 6);
  pkv_pool_destroy(pool);
}

/* Out of pages: nothing changes, with and without a copy that would have been needed. */
static void no_pages(void **state) {
  (void)state;
  const pkv_pool_options o = small_options(); /* 6 pages of 4 */
  pkv_pool *pool;
  pkv_table *t;
  ACCEPTED(pkv_pool_create(&pool, &o, &err));
  ACCEPTED(pkv_table_create(&t, pool, 3, 6, NULL, &err));
  ACCEPTED(pkv_table_extend(t, 0, 18, &err));  /* 5 pages, the last holds 2 */
  ACCEPTED(pkv_table_fork(t, 1, 0, 18, &err)); /* the same 5 */
  int32_t rows[2][6];
  memcpy(rows[0], pkv_table_row(t, 0), sizeof rows[0]);
  memcpy(rows[1], pkv_table_row(t, 1), sizeof rows[1]);
  /* One page is free: enough for the copy, or for a new page, not for both. */
  REFUSED(pkv_table_extend(t, 1, 3, &err), PKV_E_NO_PAGES, "row 1 needs 2 more pages, 1 of 6");
  REFUSED(pkv_table_extend(t, 2, 5, &err), PKV_E_NO_PAGES, "row 2 needs 2 more pages");
  assert_memory_equal(rows[0], pkv_table_row(t, 0), sizeof rows[0]);
  assert_memory_equal(rows[1], pkv_table_row(t, 1), sizeof rows[1]);
  assert_int_equal(pkv_table_seq_len(t, 1), 18);
  assert_int_equal(pkv_pool_free_pages(pool), 1);
  pkv_pool_stats stats;
  pkv_pool_get_stats(&stats, pool);
  assert_int_equal(stats.copies, 0);
  assert_int_equal(stats.pages_shared, 5);
  ACCEPTED(pkv_table_extend(t, 1, 2, &err)); /* the copy alone */
  pkv_pool_get_stats(&stats, pool);
  assert_int_equal(stats.copies, 1);
  assert_int_equal(stats.pages_free, 0);
  assert_int_equal(stats.pages_shared, 4);
  ACCEPTED(pkv_table_extend(t, 0, 2, &err)); /* now alone on its page: no copy */
  pkv_pool_get_stats(&stats, pool);
  assert_int_equal(stats.copies, 1);
  ACCEPTED(pkv_table_extend(t, 0, 0, &err));
  REFUSED(pkv_table_extend(t, 0, 1, &err), PKV_E_NO_PAGES, "0 of 6");
  pkv_table_destroy(t);
  pkv_pool_destroy(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(create_options),  cmocka_unit_test(create_defaults),
      cmocka_unit_test(cache_views),     cmocka_unit_test(cache_forms),
      cmocka_unit_test(wrap_arguments),  cmocka_unit_test(wrap_interleaved),
      cmocka_unit_test(page_arguments),  cmocka_unit_test(counts_at_their_ends),
      cmocka_unit_test(table_arguments), cmocka_unit_test(no_pages),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
