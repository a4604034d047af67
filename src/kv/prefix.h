/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole pages that can be found again by the tokens in them and before them.
 *
 * An entry is a page of the pool with one reference of the cache's own. It is found by a chained
 * digest, and taken only where its tokens, its key and the entry before it are the ones asked for:
 * a collision never gives wrong pages. Entries are locked while requests use them; unlocked ones
 * are idle and lie in one list by last use. A path is unlocked from its end to its start, so that
 * in this list an entry is always older than the one before it in the text: the oldest has no
 * successors, and evicting it takes constant time.
 */
#ifndef PKV_KV_PREFIX_H
#define PKV_KV_PREFIX_H

#include <stdbool.h>

#include "base/alloc.h"

/* Single-owner, with its pool. Calls after create allocate nothing. */
typedef struct pkv_prefix pkv_prefix;

/* What but the tokens decides over K and V; entries of different keys never meet. */
typedef struct pkv_prefix_key {
  uint64_t salt, adapter;
} pkv_prefix_key;

/* What is asked for: chained digests [pages] and tokens [pages * page_tokens]. */
typedef struct pkv_prefix_path {
  const uint64_t *digests;
  const int32_t *tokens;
  pkv_prefix_key key;
} pkv_prefix_path;

typedef struct pkv_prefix_stats {
  int64_t entries, idle; /* idle: not locked, may be evicted */
  int64_t shared;        /* locked more than once */
  int64_t evictions, collisions;
} pkv_prefix_stats;

/* keep: idle entries stay until evicted; false: they leave at once. The pool must outlive it. */
pkv_status pkv_prefix_create(pkv_prefix **out, pkv_pool *pool, bool keep,
                             const pkv_allocator *allocator, pkv_error *err);
/* Gives all pages back. NULL is allowed. */
void pkv_prefix_destroy(pkv_prefix *prefix);

/* Where chains of a key start. */
uint64_t pkv_prefix_seed(pkv_prefix_key key);
/* The digest of a page behind one of digest `before` (or the seed). */
uint64_t pkv_prefix_digest(uint64_t before, const int32_t *tokens, int32_t page_tokens);

/* How many of the first `count` pages are here; their ids go to pages[]. *idle of them are idle. */
int32_t pkv_prefix_match(int32_t *pages, int32_t *idle, pkv_prefix *prefix,
                         const pkv_prefix_path *path, int32_t count);
/* Locks (unlocks) the entries of a path: pages[0 .. count), as matched or inserted. */
void pkv_prefix_lock(pkv_prefix *prefix, const int32_t *pages, int32_t count);
void pkv_prefix_unlock(pkv_prefix *prefix, const int32_t *pages, int32_t count);
/* Makes pages[at] the entry of number `at` of the path, behind the locked entries before it, and
   locks it. False: an equal one is here already; nothing has changed. */
bool pkv_prefix_insert(pkv_prefix *prefix, const int32_t *pages, int32_t at,
                       const pkv_prefix_path *path);
/* The same for one page behind the locked entry `parent` (-1 = first), by its tokens. */
bool pkv_prefix_put(pkv_prefix *prefix, int32_t page, int32_t parent, uint64_t digest,
                    const int32_t *tokens, pkv_prefix_key key);
/* Gives up to `count` pages back to the pool, least recently used first; returns how many. */
int64_t pkv_prefix_evict(pkv_prefix *prefix, int64_t count);
void pkv_prefix_get_stats(pkv_prefix_stats *out, const pkv_prefix *prefix);

/* One entry, for saving it and for tests. */
typedef struct pkv_prefix_entry {
  int32_t page, parent; /* -1 = starts a chain */
  int32_t locks;
  uint64_t digest;
  const int32_t *tokens; /* [page_tokens] */
  pkv_prefix_key key;
} pkv_prefix_entry;
/* False: this page is no entry. */
bool pkv_prefix_get(pkv_prefix_entry *out, const pkv_prefix *prefix, int32_t page);
/* Idle pages, most recently used first (so that one stands before its successors) into
   pages[capacity]; returns their number. */
int64_t pkv_prefix_idle(int32_t *pages, int64_t capacity, const pkv_prefix *prefix);
/* Every rule that must hold, the pool's counts included (tests): NULL, or what does not. */
const char *pkv_prefix_check(const pkv_prefix *prefix);

#endif
