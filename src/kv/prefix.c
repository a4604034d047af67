/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table of pages with a list by last use. A page id is its entry's index. */
#include "kv/prefix.h"

#include <string.h>

#include "base/hash.h"
#include "kv/pool.h"

typedef struct entry {
  uint64_t digest;
  pkv_prefix_key key;
  int32_t parent;       /* page before it, -1 = none */
  int32_t next_hash;    /* in the bucket, -1 = none */
  int32_t older, newer; /* in the list of idle ones, -1 = none */
  int32_t locks;
  int32_t state; /* IN while it is an entry */
} entry;

#define IN 1

struct pkv_prefix {
  pkv_allocator allocator;
  pkv_pool *pool;
  bool keep;
  int32_t page_tokens;
  int64_t pages;
  /* By page. Only those the pool has ever handed out (pool->fresh) are initialised, up to `ready`:
     a large pool costs address space only. */
  entry *entries;
  int32_t *tokens; /* [pages, page_tokens] */
  int64_t ready;
  int32_t *buckets; /* page + 1, 0 = empty */
  uint64_t mask;
  int32_t oldest, newest;
  pkv_prefix_stats stats;
};

static size_t bucket_count(int64_t pages) {
  size_t count = 64;
  while (count < (size_t)pages)
    count *= 2;
  return count;
}

pkv_status pkv_prefix_create(pkv_prefix **out, pkv_pool *pool, bool keep,
                             const pkv_allocator *allocator, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  *out = NULL;
  pkv_prefix *const p = pkv_alloc_zeroed(&a, 1, sizeof *p);
  PKV_CHECK(err, p != NULL, PKV_E_NOMEM, "no memory for a prefix cache");
  p->allocator = a;
  p->pool = pool;
  p->keep = keep;
  p->pages = pool->pages;
  p->page_tokens = pool->caches[0].page_tokens;
  p->oldest = p->newest = -1;
  const size_t buckets = bucket_count(p->pages);
  p->mask = buckets - 1;
  size_t entry_bytes = 0, token_bytes = 0;
  const bool fits =
      pkv_mul_size(&entry_bytes, (size_t)p->pages, sizeof *p->entries) &&
      pkv_mul_size(&token_bytes, (size_t)p->pages, (size_t)p->page_tokens * sizeof *p->tokens);
  if (fits) {
    p->entries = pkv_alloc(&a, entry_bytes);
    p->tokens = pkv_alloc(&a, token_bytes);
    p->buckets = pkv_alloc_zeroed(&a, buckets, sizeof *p->buckets);
  }
  if (p->entries == NULL || p->tokens == NULL || p->buckets == NULL) {
    pkv_prefix_destroy(p);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for the prefix cache of %lld pages",
                    (long long)pool->pages);
  }
  *out = p;
  return PKV_OK;
}

void pkv_prefix_destroy(pkv_prefix *prefix) {
  pkv_prefix *const p = prefix;
  if (p == NULL) return;
  const pkv_allocator a = p->allocator;
  for (int64_t i = 0; i < p->ready; i++)
    if (p->entries[i].state == IN) pkv_pool_drop(p->pool, (int32_t)i);
  pkv_free(&a, p->entries, (size_t)p->pages * sizeof *p->entries);
  pkv_free(&a, p->tokens, (size_t)p->pages * (size_t)p->page_tokens * sizeof *p->tokens);
  pkv_free(&a, p->buckets, (size_t)(p->mask + 1) * sizeof *p->buckets);
  pkv_free(&a, p, sizeof *p);
}

uint64_t pkv_prefix_seed(pkv_prefix_key key) {
  return pkv_hash_bytes(&key, sizeof key, 0);
}

uint64_t pkv_prefix_digest(uint64_t before, const int32_t *tokens, int32_t page_tokens) {
  const size_t bytes = (size_t)page_tokens * sizeof *tokens;
  return pkv_hash_mix(before, pkv_hash_bytes(tokens, bytes, 0), (size_t)page_tokens);
}

static int32_t *tokens_of(const pkv_prefix *p, int32_t page) {
  return p->tokens + (int64_t)page * p->page_tokens;
}

static int32_t find(pkv_prefix *p, int32_t parent, uint64_t digest, const int32_t *tokens,
                    pkv_prefix_key key) {
  const size_t bytes = (size_t)p->page_tokens * sizeof *tokens;
  for (int32_t page = p->buckets[digest & p->mask] - 1; page >= 0;
       page = p->entries[page].next_hash) {
    const entry *const e = &p->entries[page];
    if (e->digest != digest) continue;
    if (e->parent == parent && e->key.salt == key.salt && e->key.adapter == key.adapter &&
        memcmp(tokens_of(p, page), tokens, bytes) == 0)
      return page;
    p->stats.collisions++;
  }
  return -1;
}

int32_t pkv_prefix_match(int32_t *pages, int32_t *idle, pkv_prefix *prefix,
                         const pkv_prefix_path *path, int32_t count) {
  int32_t parent = -1, found = 0;
  *idle = 0;
  while (found < count) {
    const int32_t page = find(prefix, parent, path->digests[found],
                              path->tokens + (int64_t)found * prefix->page_tokens, path->key);
    if (page < 0) break;
    *idle += prefix->entries[page].locks == 0;
    pages[found++] = parent = page;
  }
  return found;
}

static void unlink_idle(pkv_prefix *p, int32_t page) {
  entry *const e = &p->entries[page];
  if (e->older >= 0)
    p->entries[e->older].newer = e->newer;
  else
    p->oldest = e->newer;
  if (e->newer >= 0)
    p->entries[e->newer].older = e->older;
  else
    p->newest = e->older;
  e->older = e->newer = -1;
  p->stats.idle--;
}

static void link_newest(pkv_prefix *p, int32_t page) {
  entry *const e = &p->entries[page];
  e->older = p->newest;
  e->newer = -1;
  if (p->newest >= 0)
    p->entries[p->newest].newer = page;
  else
    p->oldest = page;
  p->newest = page;
  p->stats.idle++;
}

/* Out of the table; the pool gets its reference back. Not locked and in no list. */
static void forget(pkv_prefix *p, int32_t page) {
  entry *const e = &p->entries[page];
  int32_t *at = &p->buckets[e->digest & p->mask];
  if (*at - 1 == page) {
    *at = e->next_hash + 1;
  } else {
    int32_t before = *at - 1;
    while (p->entries[before].next_hash != page)
      before = p->entries[before].next_hash;
    p->entries[before].next_hash = e->next_hash;
  }
  e->state = 0;
  p->stats.entries--;
  pkv_pool_drop(p->pool, page);
}

void pkv_prefix_lock(pkv_prefix *prefix, const int32_t *pages, int32_t count) {
  for (int32_t i = 0; i < count; i++) {
    entry *const e = &prefix->entries[pages[i]];
    PKV_ASSERT(e->state == IN);
    if (e->locks == 0) unlink_idle(prefix, pages[i]);
    if (++e->locks == 2) prefix->stats.shared++;
  }
}

void pkv_prefix_unlock(pkv_prefix *prefix, const int32_t *pages, int32_t count) {
  for (int32_t i = count; i-- > 0;) {
    entry *const e = &prefix->entries[pages[i]];
    PKV_ASSERT(e->state == IN && e->locks > 0);
    if (--e->locks == 1) prefix->stats.shared--;
    if (e->locks > 0) continue;
    if (prefix->keep)
      link_newest(prefix, pages[i]);
    else
      forget(prefix, pages[i]);
  }
}

bool pkv_prefix_put(pkv_prefix *prefix, int32_t page, int32_t parent, uint64_t digest,
                    const int32_t *tokens, pkv_prefix_key key) {
  pkv_prefix *const p = prefix;
  if (find(p, parent, digest, tokens, key) >= 0) return false;
  while (p->ready <= page)
    p->entries[p->ready++].state = 0;
  entry *const e = &p->entries[page];
  PKV_ASSERT(e->state != IN && p->pool->refs[page] > 0);
  PKV_ASSERT(parent < 0 || (p->entries[parent].state == IN && p->entries[parent].locks > 0));
  if (pkv_pool_retain(p->pool, &page, 1, NULL) != PKV_OK) return false; /* 2^31 owners */
  *e = (entry){digest, key, parent, p->buckets[digest & p->mask] - 1, -1, -1, 1, IN};
  p->buckets[digest & p->mask] = page + 1;
  memcpy(tokens_of(p, page), tokens, (size_t)p->page_tokens * sizeof *tokens);
  p->stats.entries++;
  return true;
}

bool pkv_prefix_insert(pkv_prefix *prefix, const int32_t *pages, int32_t at,
                       const pkv_prefix_path *path) {
  return pkv_prefix_put(prefix, pages[at], at == 0 ? -1 : pages[at - 1], path->digests[at],
                        path->tokens + (int64_t)at * prefix->page_tokens, path->key);
}

int64_t pkv_prefix_evict(pkv_prefix *prefix, int64_t count) {
  int64_t done = 0;
  while (done < count && prefix->oldest >= 0) {
    const int32_t page = prefix->oldest;
    unlink_idle(prefix, page);
    forget(prefix, page);
    prefix->stats.evictions++;
    done++;
  }
  return done;
}

void pkv_prefix_get_stats(pkv_prefix_stats *out, const pkv_prefix *prefix) {
  *out = prefix != NULL ? prefix->stats : (pkv_prefix_stats){0, 0, 0, 0, 0};
}

bool pkv_prefix_get(pkv_prefix_entry *out, const pkv_prefix *prefix, int32_t page) {
  if (page < 0 || page >= prefix->ready || prefix->entries[page].state != IN) return false;
  const entry *const e = &prefix->entries[page];
  *out = (pkv_prefix_entry){page, e->parent, e->locks, e->digest, tokens_of(prefix, page), e->key};
  return true;
}

int64_t pkv_prefix_idle(int32_t *pages, int64_t capacity, const pkv_prefix *prefix) {
  int64_t count = 0;
  for (int32_t page = prefix->newest; page >= 0; page = prefix->entries[page].older) {
    if (count < capacity) pages[count] = page;
    count++;
  }
  return count;
}

/* The list from new to old: every entry in it is idle, and stands behind its parent. */
static const char *check_list(const pkv_prefix *p) {
  int64_t listed = 0;
  int32_t newer = -1;
  for (int32_t page = p->newest; page >= 0; page = p->entries[page].older) {
    const entry *const e = &p->entries[page];
    if (e->state != IN || e->locks != 0) return "a listed entry is not idle";
    if (e->newer != newer) return "the list's links disagree";
    if (++listed > p->stats.idle) return "the list is longer than the idle entries";
    newer = page;
  }
  if (p->oldest != newer) return "the list does not end in the oldest";
  return listed == p->stats.idle ? NULL : "the list is shorter than the idle entries";
}

const char *pkv_prefix_check(const pkv_prefix *prefix) {
  const pkv_prefix *const p = prefix;
  int64_t entries = 0, idle = 0, shared = 0;
  for (int64_t i = 0; i < p->ready; i++) {
    const entry *const e = &p->entries[i];
    if (e->state != IN) continue;
    entries++;
    idle += e->locks == 0;
    shared += e->locks > 1;
    if (p->pool->refs[i] < 1) return "an entry's page is free";
    if (e->parent < 0) continue;
    const entry *const before = &p->entries[e->parent];
    if (before->state != IN) return "an entry stands behind none";
    if (before->locks == 0 && e->locks > 0) return "a locked entry stands behind an idle one";
  }
  if (entries != p->stats.entries || idle != p->stats.idle || shared != p->stats.shared)
    return "the counts are wrong";
  return check_list(p);
}
