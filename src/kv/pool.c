/* SPDX-License-Identifier: Apache-2.0 */
/* Pages with reference counts, and the storage behind them. */
#include "kv/pool.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "kv/cache.h"

/* ---- pages ---- */

void pkv_pool_take(int32_t *ids, pkv_pool *pool, int64_t count) {
  PKV_ASSERT(count <= pkv_pool_free_pages(pool));
  for (int64_t i = 0; i < count; i++) {
    /* The page freed last is the one most likely still in the caches. */
    const int32_t page =
        pool->free_count > 0 ? pool->free_ids[--pool->free_count] : (int32_t)pool->fresh++;
    pool->refs[page] = 1;
    ids[i] = page;
  }
  const int64_t in_use = pool->pages - pkv_pool_free_pages(pool);
  if (in_use > pool->peak) pool->peak = in_use;
}

static void add_owner(pkv_pool *pool, int32_t page) {
  if (++pool->refs[page] == 2) pool->shared++;
}

void pkv_pool_drop(pkv_pool *pool, int32_t page) {
  PKV_ASSERT(pool->refs[page] > 0);
  const int32_t left = --pool->refs[page];
  if (left == 1) pool->shared--;
  if (left == 0) pool->free_ids[pool->free_count++] = page;
}

/* Takes back the last pkv_pool_drop that is not taken back yet. */
static void undo_drop(pkv_pool *pool, int32_t page) {
  if (pool->refs[page] == 0) {
    pool->free_count--;
    pool->refs[page] = 1;
  } else {
    add_owner(pool, page);
  }
}

pkv_status pkv_pool_alloc(int32_t *ids, pkv_pool *pool, int64_t count, pkv_error *err) {
  PKV_CHECK(err, pool != NULL, PKV_E_INVALID, "pool is NULL");
  PKV_CHECK(err, count >= 0, PKV_E_INVALID, "count is %lld, which is negative", (long long)count);
  PKV_CHECK(err, ids != NULL || count == 0, PKV_E_INVALID, "ids is NULL");
  PKV_CHECK(err, count <= pkv_pool_free_pages(pool), PKV_E_NO_PAGES,
            "count is %lld, %lld of %lld pages are free", (long long)count,
            (long long)pkv_pool_free_pages(pool), (long long)pool->pages);
  pkv_pool_take(ids, pool, count);
  return PKV_OK;
}

int32_t pkv_pool_refcount(const pkv_pool *pool, int32_t page) {
  if (pool == NULL || page < 0 || page >= pool->pages) return -1;
  return page < pool->fresh ? pool->refs[page] : 0;
}

static pkv_status check_ids(const pkv_pool *pool, const int32_t *ids, int64_t count,
                            pkv_error *err) {
  PKV_CHECK(err, pool != NULL, PKV_E_INVALID, "pool is NULL");
  PKV_CHECK(err, count >= 0, PKV_E_INVALID, "count is %lld, which is negative", (long long)count);
  PKV_CHECK(err, ids != NULL || count == 0, PKV_E_INVALID, "ids is NULL");
  for (int64_t i = 0; i < count; i++) {
    const int32_t owners = pkv_pool_refcount(pool, ids[i]);
    PKV_CHECK(err, owners >= 0, PKV_E_RANGE, "ids[%lld] is %d, the pool has pages 0 to %lld",
              (long long)i, ids[i], (long long)pool->pages - 1);
    PKV_CHECK(err, owners > 0, PKV_E_STATE, "ids[%lld] is page %d, which is free", (long long)i,
              ids[i]);
  }
  return PKV_OK;
}

pkv_status pkv_pool_retain(pkv_pool *pool, const int32_t *ids, int64_t count, pkv_error *err) {
  PKV_TRY(check_ids(pool, ids, count, err));
  for (int64_t i = 0; i < count; i++) {
    if (pool->refs[ids[i]] < INT32_MAX) {
      add_owner(pool, ids[i]);
      continue;
    }
    for (int64_t j = i; j-- > 0;)
      pkv_pool_drop(pool, ids[j]);
    return PKV_FAIL(err, PKV_E_LIMIT, "ids[%lld] is page %d, which cannot have more than %d owners",
                    (long long)i, ids[i], INT32_MAX);
  }
  return PKV_OK;
}

pkv_status pkv_pool_release(pkv_pool *pool, const int32_t *ids, int64_t count, pkv_error *err) {
  PKV_TRY(check_ids(pool, ids, count, err));
  for (int64_t i = 0; i < count; i++) {
    if (pool->refs[ids[i]] > 0) {
      pkv_pool_drop(pool, ids[i]);
      continue;
    }
    /* An id that stands here more often than it has owners. */
    for (int64_t j = i; j-- > 0;)
      undo_drop(pool, ids[j]);
    return PKV_FAIL(err, PKV_E_STATE,
                    "ids[%lld] is page %d, which stands in ids more often than its %d owners",
                    (long long)i, ids[i], pool->refs[ids[i]]);
  }
  return PKV_OK;
}

void pkv_pool_get_stats(pkv_pool_stats *out, const pkv_pool *pool) {
  if (out == NULL) return;
  memset(out, 0, sizeof *out);
  if (pool == NULL) return;
  out->pages_total = pool->pages;
  out->pages_free = pkv_pool_free_pages(pool);
  out->pages_in_use = pool->pages - out->pages_free;
  out->pages_shared = pool->shared;
  out->peak_in_use = pool->peak;
  out->copies = pool->copies;
  out->storage_bytes = pool->storage_bytes;
}

/* ---- copies ---- */

/* `tokens` tokens of a page of K or V, in bytes; what lies together moves in one copy. */
static void copy_one(unsigned char *base, int64_t to, int64_t from, int64_t token_stride,
                     int64_t head_stride, int32_t tokens, int32_t heads, size_t vector) {
  if (token_stride == (int64_t)vector) {
    for (int32_t h = 0; h < heads; h++)
      memcpy(base + to + h * head_stride, base + from + h * head_stride, (size_t)tokens * vector);
    return;
  }
  const bool packed = head_stride == (int64_t)vector;
  const size_t bytes = packed ? (size_t)heads * vector : vector;
  for (int32_t t = 0; t < tokens; t++)
    for (int32_t h = 0; h < (packed ? 1 : heads); h++) {
      const int64_t at = t * token_stride + h * head_stride;
      memcpy(base + to + at, base + from + at, bytes);
    }
}

void pkv_pool_set_copy(pkv_pool *pool, void (*copy)(void *ctx, int32_t to, int32_t from),
                       void *ctx) {
  pool->copy = copy;
  pool->copy_ctx = ctx;
}

void pkv_pool_copy_page(pkv_pool *pool, int32_t to, int32_t from, int32_t tokens) {
  if (pool->copy) pool->copy(pool->copy_ctx, to, from);
  for (int32_t i = 0; i < pool->layers && !pool->copy; i++) {
    const pkv_cache *c = &pool->caches[i];
    const int64_t size = (int64_t)pkv_dtype_bytes(c->dtype);
    const size_t vector = (size_t)c->head_dim * (size_t)size;
    copy_one(c->k, to * c->k_page_stride * size, from * c->k_page_stride * size,
             c->k_token_stride * size, c->k_head_stride * size, tokens, c->kv_heads, vector);
    copy_one(c->v, to * c->v_page_stride * size, from * c->v_page_stride * size,
             c->v_token_stride * size, c->v_head_stride * size, tokens, c->kv_heads, vector);
  }
  pool->copies++;
}

/* ---- making and ending ---- */

static size_t ids_bytes(const pkv_pool *pool) {
  return (size_t)pool->pages * sizeof(int32_t);
}

void pkv_pool_destroy(pkv_pool *pool) {
  if (pool == NULL) return;
  PKV_ASSERT(pool->tables == 0);
  const pkv_allocator a = pool->allocator;
  pkv_free(&a, pool->storage, pool->storage_bytes);
  pkv_free(&a, pool->refs, ids_bytes(pool));
  pkv_free(&a, pool->free_ids, ids_bytes(pool));
  pkv_free(&a, pool->caches, (size_t)pool->layers * sizeof *pool->caches);
  pkv_free(&a, pool, sizeof *pool);
}

/* A pool without storage; the caller fills `caches`. */
static pkv_status pool_new(pkv_pool **out, int32_t layers, int64_t pages,
                           const pkv_allocator *allocator, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_pool *pool = pkv_alloc_zeroed(&a, 1, sizeof *pool);
  PKV_CHECK(err, pool != NULL, PKV_E_NOMEM, "no memory for a pool");
  pool->allocator = a;
  pool->layers = layers;
  pool->pages = pages;
  pool->caches = pkv_alloc_zeroed(&a, (size_t)layers, sizeof *pool->caches);
  pool->refs = pkv_alloc(&a, ids_bytes(pool));
  pool->free_ids = pkv_alloc(&a, ids_bytes(pool));
  if (pool->caches == NULL || pool->refs == NULL || pool->free_ids == NULL) {
    pkv_pool_destroy(pool);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for the counts of %lld pages and %d layers",
                    (long long)pages, layers);
  }
  *out = pool;
  return PKV_OK;
}

/* The options with their defaults, as the view of one layer; storage pointers still NULL. */
static pkv_status shape_of(pkv_cache *c, const pkv_pool_options *o, pkv_error *err) {
  PKV_CHECK_STRUCT(err, o, pkv_pool_options);
  PKV_CHECK(err, pkv_dtype_bytes(o->dtype) != 0, PKV_E_INVALID,
            "options->dtype is %d, which is no pkv_dtype", (int)o->dtype);
  PKV_CHECK(err, o->layout == PKV_LAYOUT_HND || o->layout == PKV_LAYOUT_NHD, PKV_E_INVALID,
            "options->layout is %d, which is no pkv_layout", (int)o->layout);
  PKV_CHECK(err, o->layers >= 0, PKV_E_INVALID, "options->layers is %d, which is negative",
            o->layers);
  *c = (pkv_cache)PKV_CACHE_INIT;
  c->dtype = o->dtype;
  c->pages = o->pages;
  c->page_tokens = o->page_tokens == 0 ? 16 : o->page_tokens;
  c->kv_heads = o->kv_heads;
  c->head_dim = o->head_dim;
  c->k_scale = o->k_scale;
  c->v_scale = o->v_scale;
  PKV_TRY(pkv_cache_check_shape(c, "options->", err));
  return PKV_OK;
}

/*
 * Where pages lie: [page][layer][head][K, V][token][d], or [page][layer][K, V][token][head][d] in
 * NHD. What one page of tokens needs in all layers lies together: huge pages hold what is in use
 * and nothing else, and K of a head runs on into its V, as they are read one after the other
 * (docs/notes/cpu-attention.md).
 */
#define ODD_PAGES ((int64_t)8192) /* a page's bytes are no multiple of it, from here on .. */
#define ODD_FROM  ((int64_t)65536)

/* Strides of `c`; *layer and *total are the bytes of a layer's part of a page and of all pages. */
static pkv_status place_pages(pkv_cache *c, int64_t *layer, size_t *total, pkv_layout layout,
                              int32_t layers, pkv_error *err) {
  /* At most 2^31 heads of 2^18 elements: the products of a layer do not overflow. */
  const int64_t tokens = c->page_tokens, heads = c->kv_heads, dim = c->head_dim;
  const int64_t size = (int64_t)pkv_dtype_bytes(c->dtype);
  const bool hnd = layout == PKV_LAYOUT_HND;
  c->k_token_stride = c->v_token_stride = hnd ? dim : heads * dim;
  c->k_head_stride = c->v_head_stride = hnd ? 2 * tokens * dim : dim;
  *layer = 2 * tokens * heads * dim * size;
  int64_t page = 0, all = 0;
  bool fits = !__builtin_mul_overflow(*layer, layers, &page);
  /* Pages at a power of two from one another would fall on the same few lines of the caches. */
  if (fits && page >= ODD_FROM && page % ODD_PAGES == 0)
    fits = !__builtin_add_overflow(page, ODD_PAGES / 2, &page);
  fits = fits && !__builtin_mul_overflow(page, c->pages, &all) && all <= PTRDIFF_MAX;
  PKV_CHECK(err, fits, PKV_E_LIMIT,
            "options->pages is %lld with %d layers: more than the address space",
            (long long)c->pages, layers);
  c->k_page_stride = c->v_page_stride = page / size;
  *total = (size_t)all;
  return PKV_OK;
}

static float scale_or_one(float scale) {
  return scale == 0.0f ? 1.0f : scale;
}

pkv_status pkv_pool_create(pkv_pool **out, const pkv_pool_options *options, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  pkv_cache c;
  PKV_TRY(shape_of(&c, options, err));
  const int32_t layers = options->layers == 0 ? 1 : options->layers;
  int64_t layer = 0;
  size_t total = 0;
  PKV_TRY(place_pages(&c, &layer, &total, options->layout, layers, err));
  pkv_pool *pool;
  PKV_TRY(pool_new(&pool, layers, c.pages, options->allocator, err));
  pool->storage = pkv_alloc_storage(&pool->allocator, total);
  if (pool->storage == NULL) {
    pkv_pool_destroy(pool);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for %lld pages of %d layers (%zu bytes)",
                    (long long)c.pages, layers, total);
  }
  pool->storage_bytes = total;
  c.k_scale = scale_or_one(c.k_scale);
  c.v_scale = scale_or_one(c.v_scale);
  const int64_t one = (int64_t)c.page_tokens * c.head_dim;
  const int64_t k_run = options->layout == PKV_LAYOUT_HND ? one : one * c.kv_heads;
  for (int32_t i = 0; i < layers; i++) {
    c.k = (unsigned char *)pool->storage + i * layer;
    c.v = (unsigned char *)c.k + (size_t)k_run * pkv_dtype_bytes(c.dtype);
    pool->caches[i] = c;
  }
  *out = pool;
  return PKV_OK;
}

static pkv_status same_shape(const pkv_cache *caches, int32_t i, pkv_error *err) {
  const pkv_cache *a = &caches[i], *b = &caches[0];
  const struct {
    const char *name;
    int64_t got, first;
  } list[] = {
      {"dtype", (int64_t)a->dtype, (int64_t)b->dtype}, {"pages", a->pages, b->pages},
      {"page_tokens", a->page_tokens, b->page_tokens}, {"kv_heads", a->kv_heads, b->kv_heads},
      {"head_dim", a->head_dim, b->head_dim},
  };
  for (size_t j = 0; j < sizeof list / sizeof list[0]; j++)
    PKV_CHECK(err, list[j].got == list[j].first, PKV_E_INVALID,
              "caches[%d].%s is %lld, caches[0] has %lld", i, list[j].name, (long long)list[j].got,
              (long long)list[j].first);
  return PKV_OK;
}

/* No K or V of layer i may lie in that of a layer up to i. */
static pkv_status check_apart(const pkv_cache *caches, int32_t i, pkv_error *err) {
  for (int32_t j = 0; j <= i; j++)
    for (int pair = 0; pair < 4; pair++) {
      const int i_is_v = pair & 1, j_is_v = pair >> 1;
      if (i == j && !(i_is_v && !j_is_v)) continue;
      PKV_CHECK(err, pkv_cache_apart(&caches[i], i_is_v, &caches[j], j_is_v), PKV_E_INVALID,
                "caches[%d].%c overlaps caches[%d].%c", i, i_is_v ? 'v' : 'k', j,
                j_is_v ? 'v' : 'k');
    }
  return PKV_OK;
}

pkv_status pkv_pool_wrap(pkv_pool **out, const pkv_cache *caches, int32_t layers,
                         const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, caches != NULL, PKV_E_INVALID, "caches is NULL");
  PKV_CHECK(err, layers >= 1, PKV_E_INVALID, "layers is %d, at least 1 is needed", layers);
  for (int32_t i = 0; i < layers; i++) {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "caches[%d].", i);
    PKV_TRY(pkv_cache_check(&caches[i], prefix, err));
    PKV_TRY(same_shape(caches, i, err));
    PKV_TRY(check_apart(caches, i, err));
  }
  pkv_pool *pool;
  PKV_TRY(pool_new(&pool, layers, caches[0].pages, allocator, err));
  for (int32_t i = 0; i < layers; i++) {
    pool->caches[i] = caches[i];
    pool->caches[i].k_scale = scale_or_one(caches[i].k_scale);
    pool->caches[i].v_scale = scale_or_one(caches[i].v_scale);
  }
  *out = pool;
  return PKV_OK;
}

pkv_status pkv_pool_cache(pkv_cache *out, const pkv_pool *pool, int32_t layer, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  PKV_CHECK(err, pool != NULL, PKV_E_INVALID, "pool is NULL");
  PKV_CHECK(err, layer >= 0 && layer < pool->layers, PKV_E_RANGE,
            "layer is %d, the pool has layers 0 to %d", layer, pool->layers - 1);
  *out = pool->caches[layer];
  return PKV_OK;
}
