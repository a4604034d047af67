/* SPDX-License-Identifier: Apache-2.0 */
#include "server/constraint_cache.h"

#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/status.h"

#define ENTRIES 32

typedef struct entry {
  pkv_constraint *constraint; /* NULL: free */
  pkv_constraint_kind kind;
  char *text;
  size_t bytes;
  uint64_t hash, used;
} entry;

struct pkv_constraint_cache {
  pthread_mutex_t lock; /* guards everything below */
  entry entries[ENTRIES];
  uint64_t uses;
};

pkv_status pkv_constraint_cache_create(pkv_constraint_cache **out, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  *out = pkv_alloc_zeroed(&a, 1, sizeof **out);
  PKV_CHECK(err, *out != NULL, PKV_E_NOMEM, "no memory for constraints");
  (void)pthread_mutex_init(&(*out)->lock, NULL);
  return PKV_OK;
}

static void clear(entry *e) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_constraint_destroy(e->constraint);
  pkv_free(&a, e->text, e->bytes + 1);
  memset(e, 0, sizeof *e);
}

void pkv_constraint_cache_destroy(pkv_constraint_cache *cache) {
  const pkv_allocator a = pkv_allocator_default();
  if (cache == NULL) return;
  for (int i = 0; i < ENTRIES; i++)
    clear(&cache->entries[i]);
  (void)pthread_mutex_destroy(&cache->lock);
  pkv_free(&a, cache, sizeof *cache);
}

static pkv_constraint *find(pkv_constraint_cache *cache, pkv_constraint_kind kind, const char *text,
                            size_t bytes, uint64_t hash) {
  pkv_constraint *found = NULL;
  (void)pthread_mutex_lock(&cache->lock);
  for (int i = 0; i < ENTRIES && found == NULL; i++) {
    entry *const e = &cache->entries[i];
    if (e->constraint == NULL || e->kind != kind || e->hash != hash || e->bytes != bytes ||
        memcmp(e->text, text, bytes) != 0)
      continue;
    e->used = ++cache->uses;
    found = pkv_constraint_retain(e->constraint);
  }
  (void)pthread_mutex_unlock(&cache->lock);
  return found;
}

/* In place of the one that was not asked for the longest. Without memory it is not kept. */
static void keep(pkv_constraint_cache *cache, entry kept, const char *text) {
  const pkv_allocator a = pkv_allocator_default();
  entry *oldest = &cache->entries[0];
  kept.text = pkv_alloc(&a, kept.bytes + 1);
  if (kept.text == NULL) return;
  memcpy(kept.text, text, kept.bytes);
  (void)pthread_mutex_lock(&cache->lock);
  for (int i = 1; i < ENTRIES; i++)
    if (cache->entries[i].used < oldest->used) oldest = &cache->entries[i];
  clear(oldest);
  *oldest = kept;
  oldest->constraint = pkv_constraint_retain(kept.constraint);
  oldest->used = ++cache->uses;
  (void)pthread_mutex_unlock(&cache->lock);
}

pkv_status pkv_constraint_cache_get(pkv_constraint **out, pkv_constraint_cache *cache,
                                    const pkv_model *model, pkv_constraint_kind kind,
                                    const char *text, size_t bytes, pkv_error *err) {
  const uint64_t hash = pkv_hash_bytes(text, bytes, (uint64_t)kind);
  *out = find(cache, kind, text, bytes, hash);
  if (*out != NULL) return PKV_OK;
  if (kind == PKV_CONSTRAINT_JSON)
    PKV_TRY(pkv_constraint_create_json(out, model, NULL, err));
  else if (kind == PKV_CONSTRAINT_GRAMMAR)
    PKV_TRY(pkv_constraint_create_grammar(out, model, text, bytes, NULL, err));
  else
    PKV_TRY(pkv_constraint_create_schema(out, model, text, bytes, NULL, err));
  keep(cache, (entry){*out, kind, NULL, bytes, hash, 0}, text);
  return PKV_OK;
}
