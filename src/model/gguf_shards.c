/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model in several GGUF files, NAME-00001-of-00003.gguf and so on: the first has the keys, all
 * have tensors. Whichever is named, all of them are opened.
 */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "model/gguf_parts.h"

#define MAX_SHARDS   999
#define SUFFIX_BYTES 20 /* -00001-of-00003.gguf */

typedef struct shard_name {
  char stem[PATH_MAX];
  int32_t count;
} shard_name;

static bool read_digits(int32_t *out, const char *text) {
  *out = 0;
  for (int i = 0; i < 5; i++) {
    if (text[i] < '0' || text[i] > '9') return false;
    *out = *out * 10 + (text[i] - '0');
  }
  return true;
}

/* False: the path is not named like a shard. */
static bool parse_name(shard_name *name, const char *path) {
  const size_t n = strlen(path);
  int32_t number = 0;
  if (n <= SUFFIX_BYTES || n >= sizeof name->stem) return false;
  const char *suffix = path + n - SUFFIX_BYTES;
  if (suffix[0] != '-' || memcmp(suffix + 6, "-of-", 4) != 0 || strcmp(suffix + 15, ".gguf") != 0)
    return false;
  if (!read_digits(&number, suffix + 1) || !read_digits(&name->count, suffix + 10)) return false;
  memcpy(name->stem, path, n - SUFFIX_BYTES);
  name->stem[n - SUFFIX_BYTES] = '\0';
  return number >= 1 && number <= name->count;
}

static pkv_status read_split(int64_t *number, int64_t *count, const pkv_gguf *g, pkv_error *err) {
  *number = 0;
  *count = 1;
  PKV_TRY(pkv_gguf_get_int(count, g, "split.count", false, 0, UINT16_MAX, err));
  return pkv_gguf_get_int(number, g, "split.no", false, 0, UINT16_MAX, err);
}

static pkv_status open_shard(pkv_gguf **out, const shard_name *name, int32_t index,
                             const pkv_allocator *allocator, pkv_error *err) {
  char path[PATH_MAX + 32]; /* as long as the name that was given, whatever the numbers */
  pkv_error inner = {0};
  int64_t number = 0, count = 0;
  (void)snprintf(path, sizeof path, "%s-%05d-of-%05d.gguf", name->stem, (int)index + 1,
                 (int)name->count);
  pkv_status status = pkv_gguf_open(out, path, allocator, &inner);
  if (status == PKV_OK) status = read_split(&number, &count, *out, &inner);
  PKV_CHECK(err, status == PKV_OK, status, "shard %d of %d: %.150s", (int)index + 1,
            (int)name->count, inner.text);
  PKV_CHECK(err, number == index && count == name->count, PKV_E_FORMAT,
            "shard %d of %d by its name says that it is %lld of %lld (split.no, split.count)",
            (int)index + 1, (int)name->count, (long long)number + 1, (long long)count);
  return PKV_OK;
}

/* One table of all tensors; names and data stay in the parts. */
static pkv_status join_tables(pkv_gguf *g, pkv_error *err) {
  size_t total = g->tensor_count;
  int64_t declared = -1;
  for (size_t i = 0; i < g->part_count; i++)
    total += g->parts[i]->tensor_count;
  PKV_TRY(pkv_gguf_get_int(&declared, g, "split.tensors.count", false, 0, INT32_MAX, err));
  PKV_CHECK(err, declared < 0 || (uint64_t)declared == total, PKV_E_FORMAT,
            "split.tensors.count is %lld, the shards have %zu tensors", (long long)declared, total);
  PKV_CHECK(err, total <= PKV_GGUF_MAX_ENTRIES, PKV_E_LIMIT, "the shards have %zu tensors", total);
  if (total == 0) return PKV_OK;
  pkv_gguf_tensor *tensors = pkv_alloc(&g->allocator, total * sizeof *tensors);
  uint32_t *order = pkv_alloc(&g->allocator, total * sizeof *order);
  if (!tensors || !order) {
    pkv_free(&g->allocator, tensors, total * sizeof *tensors);
    pkv_free(&g->allocator, order, total * sizeof *order);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu tensors", total);
  }
  size_t at = g->tensor_count;
  if (at > 0) memcpy(tensors, g->tensors, at * sizeof *tensors);
  for (size_t i = 0; i < g->part_count; i++) {
    const pkv_gguf *part = g->parts[i];
    if (part->tensor_count > 0)
      memcpy(tensors + at, part->tensors, part->tensor_count * sizeof *tensors);
    at += part->tensor_count;
    g->size += part->size;
  }
  pkv_free(&g->allocator, g->tensors, g->tensor_room * sizeof *g->tensors);
  pkv_free(&g->allocator, g->tensor_order, g->tensor_room * sizeof *g->tensor_order);
  g->tensors = tensors;
  g->tensor_order = order;
  g->tensor_count = g->tensor_room = total;
  return pkv_gguf_sort_tensors(g, err);
}

static pkv_status open_rest(pkv_gguf *g, const shard_name *name, pkv_error *err) {
  const size_t rest = (size_t)name->count - 1;
  g->parts = pkv_alloc_zeroed(&g->allocator, rest, sizeof *g->parts);
  PKV_CHECK(err, g->parts, PKV_E_NOMEM, "no memory for %zu shards", rest);
  g->part_count = rest;
  for (size_t i = 0; i < rest; i++)
    PKV_TRY(open_shard(&g->parts[i], name, (int32_t)i + 1, &g->allocator, err));
  PKV_TRY(join_tables(g, err));
  g->joined = true;
  return PKV_OK;
}

static pkv_status open_shards(pkv_gguf **out, const char *path, const pkv_allocator *allocator,
                              pkv_error *err) {
  int64_t number = 0, count = 0;
  shard_name name;
  PKV_TRY(pkv_gguf_open(out, path, allocator, err));
  PKV_TRY(read_split(&number, &count, *out, err));
  if (count <= 1) return PKV_OK;
  PKV_CHECK(err, count <= MAX_SHARDS, PKV_E_LIMIT, "split.count is %lld, at most %d are supported",
            (long long)count, MAX_SHARDS);
  PKV_CHECK(err, parse_name(&name, path) && name.count == count, PKV_E_FORMAT,
            "file is shard %lld of %lld (split.no, split.count), but is not named "
            "...-%05lld-of-%05lld.gguf: where the others are is not known",
            (long long)number + 1, (long long)count, (long long)number + 1, (long long)count);
  pkv_gguf_close(*out);
  *out = NULL;
  PKV_TRY(open_shard(out, &name, 0, allocator, err));
  return open_rest(*out, &name, err);
}

pkv_status pkv_gguf_open_whole(pkv_gguf **out, const char *path, const pkv_allocator *allocator,
                               pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  const pkv_status status = open_shards(out, path, allocator, err);
  if (status != PKV_OK) {
    pkv_gguf_close(*out);
    *out = NULL;
  }
  return status;
}
