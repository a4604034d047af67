/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache's file. All numbers are little-endian.
 *
 *   header   HEADER bytes: magic, version, everything that K and V depend on, number of entries
 *   entry    parent's number (-1 = none; always a lower one), salt, adapter, tokens, K and V of
 *            each layer; the most recently used first
 *   end      8 bytes: chained hash of the header and of every entry
 */
#include "engine/cache_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/replace_file.h"
#include "base/status.h"
#include "engine/engine_state.h"

#define MAGIC   "PKVCACHE"
#define VERSION 1u
#define FIELDS  16 /* of 8 bytes, behind the magic */
#define HEADER  (8 + 8 * FIELDS)
/* Which field counts the entries; all others have to agree. */
#define COUNT_FIELD (FIELDS - 1)
#define ENTRY_HEAD  24

static void put_u64(unsigned char *p, uint64_t value) {
  for (int i = 0; i < 8; i++)
    p[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t get_u64(const unsigned char *p) {
  uint64_t value = 0;
  for (int i = 8; i-- > 0;)
    value = value << 8 | p[i];
  return value;
}

static void put_u32(unsigned char *p, uint32_t value) {
  for (int i = 0; i < 4; i++)
    p[i] = (unsigned char)(value >> (8 * i));
}

static uint32_t get_u32(const unsigned char *p) {
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static const char *const field_names[FIELDS] = {
    "version",    "library", "model",      "element type", "layers",      "KV heads",
    "head size",  "page",    "k_scale",    "v_scale",      "activations", "instruction set",
    "vocabulary", "route",   "byte order", "entries",
};

static void describe(uint64_t fields[FIELDS], const pkv_engine *e) {
  const pkv_cache *const c = &e->caches[0];
  const uint64_t values[FIELDS] = {
      VERSION,
      (uint64_t)pkv_version_number(),
      pkv_model_fingerprint(e->model),
      (uint64_t)c->dtype,
      (uint64_t)e->shape.layers,
      (uint64_t)c->kv_heads,
      (uint64_t)c->head_dim,
      (uint64_t)c->page_tokens,
      float_bits(c->k_scale),
      float_bits(c->v_scale),
      (uint64_t)e->options.activations,
      (uint64_t)pkv_executor_isa(e->executor),
      (uint64_t)e->shape.vocab,
      (uint64_t)(e->options.batch_invariant != 0),
      float_bits(1.0f) << 32 | 0x01020304u,
      0, /* entries */
  };
  memcpy(fields, values, sizeof values);
}

/* Bytes of a page's K, or V, of one layer and head: one run in the engine's pool. */
static size_t head_bytes(const pkv_cache *c) {
  return (size_t)c->page_tokens * (size_t)c->head_dim * pkv_dtype_bytes(c->dtype);
}

static size_t entry_bytes(const pkv_engine *e) {
  const pkv_cache *const c = &e->caches[0];
  const size_t layer = 2 * (size_t)c->kv_heads * head_bytes(c);
  return ENTRY_HEAD + (size_t)e->options.page_tokens * 4 + (size_t)e->shape.layers * layer;
}

/* A page's K and V between the pool and a record: of each layer K of all heads, then V. */
static void copy_page(const pkv_engine *e, int32_t page, unsigned char *record, bool load) {
  for (int32_t i = 0; i < e->shape.layers; i++) {
    const pkv_cache *const c = &e->caches[i];
    const size_t run = head_bytes(c);
    const int64_t size = (int64_t)pkv_dtype_bytes(c->dtype);
    PKV_ASSERT(c->k_token_stride == c->head_dim && c->v_token_stride == c->head_dim);
    for (int32_t h = 0; h < 2 * c->kv_heads; h++, record += run) {
      const bool is_v = h >= c->kv_heads;
      const int64_t head = is_v ? h - c->kv_heads : h;
      const int64_t at = is_v ? page * c->v_page_stride + head * c->v_head_stride
                              : page * c->k_page_stride + head * c->k_head_stride;
      unsigned char *const kv = (unsigned char *)(is_v ? c->v : c->k) + at * size;
      memcpy(load ? kv : record, load ? record : kv, run);
    }
  }
}

static pkv_status check_engine(const pkv_engine *e, pkv_error *err) {
  PKV_CHECK(err, e->prefix != NULL && e->options.prefix_cache, PKV_E_UNSUPPORTED,
            "the engine keeps no prefix cache");
  PKV_CHECK(err, e->weights == NULL, PKV_E_UNSUPPORTED,
            "the cache lies on a device: it is not written to files");
  PKV_CHECK(err, e->running_count == 0 && e->waiting_count == 0, PKV_E_STATE,
            "%d requests are running or waiting", (int)(e->running_count + e->waiting_count));
  return PKV_OK;
}

/* Memory of a save or a load. */
typedef struct workspace {
  unsigned char *entry; /* one record */
  size_t entry_size;
  int32_t *list;   /* [total]: pages in the file's order */
  int32_t *number; /* [total]: a page's place in it */
  int64_t total;
  int32_t *tokens; /* [page_tokens] */
  int32_t page_tokens;
  uint64_t fields[FIELDS];
} workspace;

static void workspace_free(workspace *w, const pkv_allocator *a) {
  pkv_free(a, w->entry, w->entry_size);
  pkv_free(a, w->list, (size_t)w->total * sizeof *w->list);
  pkv_free(a, w->number, (size_t)w->total * sizeof *w->number);
  pkv_free(a, w->tokens, (size_t)w->page_tokens * sizeof *w->tokens);
}

static pkv_status workspace_make(workspace *w, const pkv_engine *e, pkv_error *err) {
  pkv_pool_stats pool;
  pkv_pool_get_stats(&pool, e->pool);
  memset(w, 0, sizeof *w);
  w->entry_size = entry_bytes(e);
  w->total = pool.pages_total;
  w->page_tokens = e->options.page_tokens;
  w->tokens = pkv_alloc(&e->allocator, (size_t)w->page_tokens * sizeof *w->tokens);
  w->entry = pkv_alloc(&e->allocator, w->entry_size);
  w->list = pkv_alloc(&e->allocator, (size_t)w->total * sizeof *w->list);
  w->number = pkv_alloc(&e->allocator, (size_t)w->total * sizeof *w->number);
  describe(w->fields, e);
  if (w->entry != NULL && w->list != NULL && w->number != NULL && w->tokens != NULL) return PKV_OK;
  workspace_free(w, &e->allocator);
  return PKV_FAIL(err, PKV_E_NOMEM, "no memory for an entry of %zu bytes", entry_bytes(e));
}

static bool put(FILE *out, const unsigned char *bytes, size_t count, uint64_t *hash) {
  *hash = pkv_hash_bytes(bytes, count, *hash);
  return fwrite(bytes, 1, count, out) == count;
}

static bool write_all(const pkv_engine *e, workspace *w, int64_t count, FILE *out) {
  unsigned char header[HEADER] = MAGIC, end[8];
  uint64_t hash = 0;
  w->fields[COUNT_FIELD] = (uint64_t)count;
  for (size_t i = 0; i < FIELDS; i++)
    put_u64(header + 8 + 8 * i, w->fields[i]);
  bool ok = put(out, header, sizeof header, &hash);
  for (int64_t i = 0; ok && i < count; i++) {
    pkv_prefix_entry entry;
    const int32_t page = w->list[i];
    if (!pkv_prefix_get(&entry, e->prefix, page)) return false;
    unsigned char *p = w->entry;
    w->number[page] = (int32_t)i;
    put_u64(p, entry.parent < 0 ? UINT64_MAX : (uint64_t)w->number[entry.parent]);
    put_u64(p + 8, entry.key.salt);
    put_u64(p + 16, entry.key.adapter);
    p += ENTRY_HEAD;
    for (int32_t t = 0; t < e->options.page_tokens; t++, p += 4)
      put_u32(p, (uint32_t)entry.tokens[t]);
    copy_page(e, page, p, false);
    ok = put(out, w->entry, w->entry_size, &hash);
  }
  put_u64(end, hash);
  return ok && fwrite(end, 1, sizeof end, out) == sizeof end;
}

pkv_status pkv_cache_write(int64_t *pages, const pkv_engine *engine, FILE *out, pkv_error *err) {
  workspace w;
  *pages = 0;
  PKV_TRY(check_engine(engine, err));
  PKV_TRY(workspace_make(&w, engine, err));
  const int64_t count = pkv_prefix_idle(w.list, w.total, engine->prefix);
  const bool ok = write_all(engine, &w, count, out) && fflush(out) == 0;
  const int reason = errno;
  workspace_free(&w, &engine->allocator);
  PKV_CHECK(err, ok, PKV_E_IO, "cannot write %lld pages: %s", (long long)count, strerror(reason));
  *pages = count;
  return PKV_OK;
}

static pkv_status get(unsigned char *bytes, size_t count, FILE *in, uint64_t *hash,
                      pkv_error *err) {
  const size_t got = fread(bytes, 1, count, in);
  PKV_CHECK(err, got == count || !ferror(in), PKV_E_IO, "cannot read: %s", strerror(errno));
  PKV_CHECK(err, got == count, PKV_E_FORMAT, "the cache's file is cut off");
  *hash = pkv_hash_bytes(bytes, count, *hash);
  return PKV_OK;
}

static pkv_status read_header(int64_t *entries, const workspace *w, FILE *in, uint64_t *hash,
                              pkv_error *err) {
  unsigned char header[HEADER];
  PKV_TRY(get(header, sizeof header, in, hash, err));
  PKV_CHECK(err, memcmp(header, MAGIC, 8) == 0, PKV_E_FORMAT, "this is no cache's file");
  for (size_t i = 0; i < COUNT_FIELD; i++) {
    const uint64_t got = get_u64(header + 8 + 8 * i);
    PKV_CHECK(err, got == w->fields[i], PKV_E_FORMAT,
              "the file's %s is 0x%llx, this engine has 0x%llx", field_names[i],
              (unsigned long long)got, (unsigned long long)w->fields[i]);
  }
  const uint64_t count = get_u64(header + 8 + 8 * COUNT_FIELD);
  PKV_CHECK(err, count <= INT32_MAX, PKV_E_FORMAT, "the file has %llu entries, too many",
            (unsigned long long)count);
  *entries = (int64_t)count;
  return PKV_OK;
}

static pkv_status check_entry(const pkv_engine *e, const unsigned char *entry, int64_t number,
                              pkv_error *err) {
  const uint64_t parent = get_u64(entry);
  PKV_CHECK(err, parent == UINT64_MAX || parent < (uint64_t)number, PKV_E_FORMAT,
            "entry %lld stands behind entry %llu", (long long)number, (unsigned long long)parent);
  for (int32_t t = 0; t < e->options.page_tokens; t++) {
    const uint32_t token = get_u32(entry + ENTRY_HEAD + (size_t)t * 4);
    PKV_CHECK(err, token < (uint32_t)e->shape.vocab, PKV_E_FORMAT,
              "entry %lld holds token %u, the vocabulary has %d", (long long)number,
              (unsigned)token, (int)e->shape.vocab);
  }
  return PKV_OK;
}

/* Makes entry `number` of the file one of the cache; locked, as all of them until the end. */
static pkv_status take_entry(pkv_engine *e, workspace *w, int64_t number, pkv_error *err) {
  unsigned char *p = w->entry;
  const uint64_t at = get_u64(p);
  const pkv_prefix_key key = {get_u64(p + 8), get_u64(p + 16)};
  const int32_t parent = at == UINT64_MAX ? -1 : w->list[at];
  uint64_t digest = pkv_prefix_seed(key);
  int32_t page = -1;
  if (parent >= 0) {
    pkv_prefix_entry before;
    (void)pkv_prefix_get(&before, e->prefix, parent);
    PKV_CHECK(err, before.key.salt == key.salt && before.key.adapter == key.adapter, PKV_E_FORMAT,
              "entry %lld has another salt than the one before it", (long long)number);
    digest = before.digest;
  }
  p += ENTRY_HEAD;
  for (int32_t t = 0; t < e->options.page_tokens; t++, p += 4)
    w->tokens[t] = (int32_t)get_u32(p);
  PKV_TRY(pkv_pool_alloc(&page, e->pool, 1, err));
  copy_page(e, page, p, true);
  digest = pkv_prefix_digest(digest, w->tokens, e->options.page_tokens);
  const bool new = pkv_prefix_put(e->prefix, page, parent, digest, w->tokens, key);
  PKV_TRY(pkv_pool_release(e->pool, &page, 1, err)); /* the cache holds it, or nobody */
  PKV_CHECK(err, new, PKV_E_FORMAT, "entry %lld is there twice", (long long)number);
  w->list[number] = page;
  return PKV_OK;
}

/* One pass over a stream that starts at its header. take: the first `most` entries join the
   cache; *taken of them did, whatever comes back. */
static pkv_status pass(int64_t *taken, pkv_engine *e, workspace *w, FILE *in, bool take,
                       pkv_error *err) {
  int64_t entries = 0;
  uint64_t hash = 0, unused = 0;
  unsigned char end[8];
  *taken = 0;
  PKV_TRY(read_header(&entries, w, in, &hash, err));
  for (int64_t i = 0; i < entries; i++) {
    PKV_TRY(get(w->entry, w->entry_size, in, &hash, err));
    PKV_TRY(check_entry(e, w->entry, i, err));
    if (!take || i >= w->total) continue;
    PKV_TRY(take_entry(e, w, i, err));
    ++*taken;
  }
  PKV_TRY(get(end, sizeof end, in, &unused, err));
  PKV_CHECK(err, get_u64(end) == hash, PKV_E_FORMAT, "the file is damaged: its checksum is wrong");
  PKV_CHECK(err, fgetc(in) == EOF, PKV_E_FORMAT, "the file has more behind its end");
  return PKV_OK;
}

/* After the first pass found nothing wrong. */
static pkv_status load(int64_t *pages, pkv_engine *e, workspace *w, FILE *in, pkv_error *err) {
  pkv_engine_clear_cache(e);
  const pkv_status status = pass(pages, e, w, in, true, err);
  /* The first in the file becomes idle last: the most recently used. */
  pkv_prefix_unlock(e->prefix, w->list, (int32_t)*pages);
  if (status == PKV_OK) return PKV_OK;
  pkv_engine_clear_cache(e);
  *pages = 0;
  return status;
}

pkv_status pkv_cache_read(int64_t *pages, pkv_engine *engine, FILE *in, pkv_error *err) {
  workspace w;
  int64_t none = 0;
  *pages = 0;
  PKV_TRY(check_engine(engine, err));
  PKV_TRY(workspace_make(&w, engine, err));
  pkv_status status = pass(&none, engine, &w, in, false, err);
  if (status == PKV_OK && fseek(in, 0, SEEK_SET) != 0)
    status = PKV_FAIL(err, PKV_E_IO, "cannot read again: %s", strerror(errno));
  if (status == PKV_OK) status = load(pages, engine, &w, in, err);
  workspace_free(&w, &engine->allocator);
  return status;
}

typedef struct saved {
  const pkv_engine *engine;
  int64_t pages;
} saved;

static pkv_status write_saved(void *ctx, FILE *file, pkv_error *err) {
  saved *const s = ctx;
  return pkv_cache_write(&s->pages, s->engine, file, err);
}

pkv_status pkv_engine_save_cache(int64_t *pages, const pkv_engine *engine, const char *path,
                                 pkv_error *err) {
  PKV_CHECK(err, pages != NULL, PKV_E_INVALID, "pages is NULL");
  *pages = 0;
  PKV_CHECK(err, engine != NULL, PKV_E_INVALID, "engine is NULL");
  PKV_CHECK(err, path != NULL, PKV_E_INVALID, "path is NULL");
  PKV_TRY(check_engine(engine, err));
  saved s = {engine, 0};
  PKV_TRY(pkv_replace_file(path, write_saved, &s, err));
  *pages = s.pages;
  return PKV_OK;
}

pkv_status pkv_engine_load_cache(int64_t *pages, pkv_engine *engine, const char *path,
                                 pkv_error *err) {
  PKV_CHECK(err, pages != NULL, PKV_E_INVALID, "pages is NULL");
  *pages = 0;
  PKV_CHECK(err, engine != NULL, PKV_E_INVALID, "engine is NULL");
  PKV_CHECK(err, path != NULL, PKV_E_INVALID, "path is NULL");
  FILE *const file = fopen(path, "rb");
  PKV_CHECK(err, file != NULL, PKV_E_IO, "cannot open %.120s: %s", path, strerror(errno));
  const pkv_status status = pkv_cache_read(pages, engine, file, err);
  (void)fclose(file);
  return status;
}
