/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's inside, for the room's own files and its tests. */
#ifndef PKV_KV_POOL_H
#define PKV_KV_POOL_H

#include "base/alloc.h"

/*
 * Pages below `fresh` have been handed out at least once; only their counts are initialised. The
 * others are free and untouched, so that a pool of any size is made in constant time and memory.
 */
struct pkv_pool {
  pkv_allocator allocator;
  pkv_cache *caches; /* [layers]; scales resolved */
  int32_t layers;
  int32_t tables; /* live ones */
  int64_t pages, fresh;
  int32_t *refs;      /* [pages], owners; 0 = free */
  int32_t *free_ids;  /* [pages], a stack of free pages below fresh */
  int64_t free_count; /* of the stack */
  int64_t shared, peak, copies;
  /* Copies a page of storage that the host cannot reach; NULL: plain memory. */
  void (*copy)(void *ctx, int32_t to, int32_t from);
  void *copy_ctx;
  void *storage; /* owned, or NULL when wrapped */
  size_t storage_bytes;
};

static inline int64_t pkv_pool_free_pages(const pkv_pool *pool) {
  return pool->free_count + (pool->pages - pool->fresh);
}

/* The same as pkv_pool_alloc when enough pages are known to be free. */
void pkv_pool_take(int32_t *ids, pkv_pool *pool, int64_t count);
/* One owner less of a page that has one. */
void pkv_pool_drop(pkv_pool *pool, int32_t page);
/* From now on pages are copied, whole, by `copy`. */
void pkv_pool_set_copy(pkv_pool *pool, void (*copy)(void *ctx, int32_t to, int32_t from),
                       void *ctx);
/* A number that is another one whenever the row's pages are; 0 = it never had any. */
uint64_t pkv_table_change(const pkv_table *table, int32_t row);
/* Copies the first `tokens` tokens of a page in all layers. */
void pkv_pool_copy_page(pkv_pool *pool, int32_t to, int32_t from, int32_t tokens);

#endif
