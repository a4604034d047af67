/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes GGUF files: the map, the private copy of keys and tensor table, look-ups. */
#include "model/gguf.h"

#include <string.h>

#include "model/gguf_parts.h"

/* Keys and tensor table of nearly all files fit the first read; each further one is larger. */
#define FIRST_READ ((size_t)4 << 20)
#define READ_GROWS 4

pkv_gguf *pkv_gguf_new(const pkv_allocator *allocator) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_gguf *g = pkv_alloc_zeroed(&a, 1, sizeof *g);
  if (g == NULL) return NULL;
  g->allocator = a;
  g->file = (pkv_mapped)PKV_MAPPED_NONE;
  return g;
}

void pkv_gguf_close(pkv_gguf *g) {
  if (g == NULL) return;
  const pkv_allocator a = g->allocator;
  pkv_gguf_free_tables(g);
  pkv_free(&a, g->owned, g->owned_bytes);
  pkv_mapped_close(&g->file);
  for (size_t i = 0; i < g->part_count; i++)
    pkv_gguf_close(g->parts[i]);
  pkv_free(&a, g->parts, g->part_count * sizeof *g->parts);
  for (size_t i = 0; i < g->tensor_file_count; i++)
    pkv_safetensors_close(g->tensor_files[i]);
  pkv_free(&a, g->tensor_files, g->tensor_file_count * sizeof *g->tensor_files);
  pkv_free(&a, g->extra, g->extra_bytes);
  pkv_free(&a, g, sizeof *g);
}

pkv_status pkv_gguf_open_memory(pkv_gguf **out, const void *bytes, size_t size,
                                const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, bytes != NULL || size == 0, PKV_E_INVALID, "bytes is NULL, size is %zu", size);
  pkv_gguf *g = pkv_gguf_new(allocator);
  PKV_CHECK(err, g != NULL, PKV_E_NOMEM, "no memory for the file's description");
  g->size = size;
  g->meta = g->bytes = bytes;
  bool starved = false;
  const pkv_status status = pkv_gguf_parse(g, size, &starved, err);
  if (status != PKV_OK) {
    pkv_gguf_close(g);
    return status;
  }
  *out = g;
  return PKV_OK;
}

/* ---- files ---- */

/* The first `want` bytes of the file into a fresh private copy: read(), so that a file that shrinks
   is an error and not a signal. */
static pkv_status read_meta(pkv_gguf *g, size_t want, pkv_error *err) {
  const pkv_allocator *a = &g->allocator;
  pkv_free(a, g->owned, g->owned_bytes);
  g->owned_bytes = 0;
  g->meta = NULL;
  g->owned = pkv_alloc(a, want);
  PKV_CHECK(err, g->owned != NULL, PKV_E_NOMEM, "no memory for %zu bytes of keys", want);
  g->owned_bytes = want;
  PKV_TRY(pkv_mapped_read(g->owned, &g->file, want, err));
  g->meta = g->owned;
  return PKV_OK;
}

static const unsigned char *moved(const void *p, const unsigned char *from,
                                  const unsigned char *to) {
  return to + ((const unsigned char *)p - from);
}

/* Gives back what was read behind the tensor table. */
static pkv_status trim_meta(pkv_gguf *g, pkv_error *err) {
  unsigned char *copy = pkv_alloc(&g->allocator, g->meta_bytes);
  PKV_CHECK(err, copy != NULL, PKV_E_NOMEM, "no memory for %zu bytes of keys", g->meta_bytes);
  memcpy(copy, g->owned, g->meta_bytes);
  for (size_t i = 0; i < g->value_count; i++) {
    pkv_gguf_value *v = &g->values[i];
    v->key.data = (const char *)moved(v->key.data, g->owned, copy);
    v->data = moved(v->data, g->owned, copy);
  }
  for (size_t i = 0; i < g->tensor_count; i++)
    g->tensors[i].name.data = (const char *)moved(g->tensors[i].name.data, g->owned, copy);
  pkv_free(&g->allocator, g->owned, g->owned_bytes);
  g->meta = g->owned = copy;
  g->owned_bytes = g->meta_bytes;
  return PKV_OK;
}

static pkv_status load_file(pkv_gguf *g, const char *path, pkv_error *err) {
  PKV_TRY(pkv_mapped_open(&g->file, path, err));
  g->size = g->file.size;
  g->bytes = g->file.bytes;
  const size_t most = g->size < PKV_GGUF_MAX_META ? g->size : PKV_GGUF_MAX_META;
  size_t want = most < FIRST_READ ? most : FIRST_READ;
  for (;;) {
    bool starved = false;
    PKV_TRY(read_meta(g, want, err));
    const pkv_status status = pkv_gguf_parse(g, want, &starved, err);
    if (status == PKV_OK) break;
    if (!starved) return status;
    PKV_ASSERT(want < most); /* else the bytes that it lacks are refused, and not asked for */
    pkv_gguf_free_tables(g);
    want = want > most / READ_GROWS ? most : want * READ_GROWS;
  }
  return g->owned_bytes > g->meta_bytes ? trim_meta(g, err) : PKV_OK;
}

pkv_status pkv_gguf_open(pkv_gguf **out, const char *path, const pkv_allocator *allocator,
                         pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, path != NULL, PKV_E_INVALID, "path is NULL");
  pkv_gguf *g = pkv_gguf_new(allocator);
  PKV_CHECK(err, g != NULL, PKV_E_NOMEM, "no memory for the file's description");
  const pkv_status status = load_file(g, path, err);
  if (status != PKV_OK) {
    pkv_gguf_close(g);
    return status;
  }
  *out = g;
  return PKV_OK;
}

pkv_status pkv_gguf_check_unchanged(const pkv_gguf *g, pkv_error *err) {
  PKV_TRY(pkv_mapped_check_unchanged(&g->file, err));
  for (size_t i = 0; i < g->part_count; i++)
    PKV_TRY(pkv_gguf_check_unchanged(g->parts[i], err));
  for (size_t i = 0; i < g->tensor_file_count; i++)
    PKV_TRY(pkv_safetensors_check_unchanged(g->tensor_files[i], err));
  return PKV_OK;
}

pkv_status pkv_gguf_copy(pkv_gguf *g, pkv_error *err) {
  PKV_TRY(pkv_mapped_copy(&g->file, err));
  for (size_t i = 0; i < g->part_count; i++)
    PKV_TRY(pkv_gguf_copy(g->parts[i], err));
  for (size_t i = 0; i < g->tensor_file_count; i++)
    PKV_TRY(pkv_safetensors_copy(g->tensor_files[i], err));
  return PKV_OK;
}

pkv_status pkv_gguf_check_whole(const pkv_gguf *g, bool need_tensors, pkv_error *err) {
  int64_t shards = 1, shard = 0;
  PKV_TRY(pkv_gguf_get_int(&shards, g, "split.count", false, 0, UINT16_MAX, err));
  PKV_TRY(pkv_gguf_get_int(&shard, g, "split.no", false, 0, UINT16_MAX, err));
  PKV_CHECK(err, shards <= 1 || g->joined, PKV_E_UNSUPPORTED,
            "file is shard %lld of %lld (split.no, split.count): join the shards into one file",
            (long long)shard + 1, (long long)shards);
  PKV_CHECK(err, !need_tensors || g->tensor_count > 0, PKV_E_UNSUPPORTED,
            "no tensors: vocabulary file");
  return PKV_OK;
}

/* ---- look-ups ---- */

uint32_t pkv_gguf_version(const pkv_gguf *g) {
  return g->version;
}

size_t pkv_gguf_file_bytes(const pkv_gguf *g) {
  return g->size;
}

size_t pkv_gguf_data_offset(const pkv_gguf *g) {
  return g->data_offset;
}

uint32_t pkv_gguf_alignment(const pkv_gguf *g) {
  return g->alignment;
}

size_t pkv_gguf_value_count(const pkv_gguf *g) {
  return g->value_count;
}

const pkv_gguf_value *pkv_gguf_value_at(const pkv_gguf *g, size_t i) {
  PKV_ASSERT(i < g->value_count);
  return &g->values[i];
}

size_t pkv_gguf_tensor_count(const pkv_gguf *g) {
  return g->tensor_count;
}

const pkv_gguf_tensor *pkv_gguf_tensor_at(const pkv_gguf *g, size_t i) {
  PKV_ASSERT(i < g->tensor_count);
  return &g->tensors[i];
}

int pkv_gguf_compare(pkv_span a, pkv_span b) {
  const size_t common = a.size < b.size ? a.size : b.size;
  const int order = common > 0 ? memcmp(a.data, b.data, common) : 0;
  if (order != 0) return order;
  return a.size < b.size ? -1 : a.size > b.size;
}

const pkv_gguf_value *pkv_gguf_find(const pkv_gguf *g, const char *key) {
  const pkv_span want = {key, strlen(key)};
  size_t lo = 0, hi = g->value_count;
  while (lo < hi) {
    const size_t mid = lo + (hi - lo) / 2;
    const pkv_gguf_value *v = &g->values[g->value_order[mid]];
    const int order = pkv_gguf_compare(want, v->key);
    if (order == 0) return v;
    if (order < 0)
      hi = mid;
    else
      lo = mid + 1;
  }
  return NULL;
}

const pkv_gguf_tensor *pkv_gguf_find_tensor(const pkv_gguf *g, const char *name) {
  const pkv_span want = {name, strlen(name)};
  size_t lo = 0, hi = g->tensor_count;
  while (lo < hi) {
    const size_t mid = lo + (hi - lo) / 2;
    const pkv_gguf_tensor *t = &g->tensors[g->tensor_order[mid]];
    const int order = pkv_gguf_compare(want, t->name);
    if (order == 0) return t;
    if (order < 0)
      hi = mid;
    else
      lo = mid + 1;
  }
  return NULL;
}

bool pkv_gguf_is_folder(const pkv_gguf *g) {
  return g->folder;
}
