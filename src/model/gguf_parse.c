/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From bytes to tables: header, keys, tensor table, and where the tensors lie. Every number of the
 * file is compared with the bytes that are left before it is used for anything.
 */
#include "model/gguf_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct reader {
  const unsigned char *base;
  size_t have; /* bytes at base */
  size_t size; /* bytes of the file */
  size_t at;
  bool starved;
  char item[PKV_GGUF_QUOTE_BYTES + 24]; /* what is being read, for messages */
} reader;

/* `bytes` bytes at the cursor, which moves behind them. */
static pkv_status take(reader *r, const unsigned char **out, uint64_t bytes, const char *what,
                       pkv_error *err) {
  PKV_CHECK(err, bytes <= r->size - r->at, PKV_E_FORMAT,
            "%s: %s at offset %zu needs %" PRIu64 " bytes, file has %zu", r->item, what, r->at,
            bytes, r->size);
  PKV_CHECK(err, r->at + bytes <= PKV_GGUF_MAX_META, PKV_E_LIMIT,
            "%s: %s ends behind the %zu bytes that keys and tensor table may have", r->item, what,
            PKV_GGUF_MAX_META);
  if (bytes > r->have - r->at) {
    r->starved = true;
    return PKV_FAIL(err, PKV_E_FORMAT, "%s: %s lies behind the bytes read so far", r->item, what);
  }
  *out = r->base + r->at;
  r->at += (size_t)bytes;
  return PKV_OK;
}

static pkv_status take_u32(reader *r, uint32_t *out, const char *what, pkv_error *err) {
  const unsigned char *p = NULL;
  PKV_TRY(take(r, &p, 4, what, err));
  *out = (uint32_t)pkv_gguf_load_le(p, 4);
  return PKV_OK;
}

static pkv_status take_u64(reader *r, uint64_t *out, const char *what, pkv_error *err) {
  const unsigned char *p = NULL;
  PKV_TRY(take(r, &p, 8, what, err));
  *out = pkv_gguf_load_le(p, 8);
  return PKV_OK;
}

static pkv_status take_string(reader *r, pkv_span *out, uint64_t limit, const char *what,
                              pkv_error *err) {
  uint64_t length = 0;
  PKV_TRY(take_u64(r, &length, what, err));
  PKV_CHECK(err, length <= limit, PKV_E_FORMAT,
            "%s: %s has length %" PRIu64 ", the limit is %" PRIu64, r->item, what, length, limit);
  const unsigned char *p = NULL;
  PKV_TRY(take(r, &p, length, what, err));
  *out = (pkv_span){(const char *)p, (size_t)length};
  return PKV_OK;
}

/* ---- header ---- */

static pkv_status read_version(pkv_gguf *g, reader *r, pkv_error *err) {
  const unsigned char *magic = NULL;
  PKV_CHECK(err, g->size > 0, PKV_E_FORMAT, "file is empty");
  PKV_CHECK(err, g->size >= 4, PKV_E_FORMAT, "file has %zu bytes: too short for a GGUF header",
            g->size);
  PKV_TRY(take(r, &magic, 4, "magic", err));
  PKV_CHECK(err, memcmp(magic, "GGUF", 4) == 0, PKV_E_FORMAT,
            "not a GGUF file: it starts with bytes %02x %02x %02x %02x", magic[0], magic[1],
            magic[2], magic[3]);
  PKV_TRY(take_u32(r, &g->version, "version", err));
  /* A small number written the other way round has its low half empty. */
  PKV_CHECK(err, g->version == 0 || (g->version & 0xffffu) != 0, PKV_E_UNSUPPORTED,
            "big-endian GGUF file (version reads 0x%08" PRIx32 "): only little-endian files are "
            "supported",
            g->version);
  PKV_CHECK(err, g->version != 1, PKV_E_UNSUPPORTED,
            "GGUF version 1 is not supported (2 and 3 are): convert the file again");
  PKV_CHECK(err, g->version == 2 || g->version == 3, PKV_E_UNSUPPORTED,
            "GGUF version %" PRIu32 " is not supported (2 and 3 are)", g->version);
  return PKV_OK;
}

/* A count of entries of at least `least` bytes each, against the limit and the bytes left. */
static pkv_status read_count(reader *r, size_t *out, uint64_t least, const char *what,
                             pkv_error *err) {
  uint64_t count = 0;
  PKV_TRY(take_u64(r, &count, what, err));
  PKV_CHECK(err, count <= PKV_GGUF_MAX_ENTRIES, PKV_E_FORMAT,
            "%s: %s is %" PRIu64 ", the limit is %" PRIu64, r->item, what, count,
            PKV_GGUF_MAX_ENTRIES);
  PKV_CHECK(err, count * least <= r->size - r->at, PKV_E_FORMAT,
            "%s: %s is %" PRIu64 ", which needs at least %" PRIu64 " bytes; %zu are left", r->item,
            what, count, count * least, r->size - r->at);
  *out = (size_t)count;
  return PKV_OK;
}

/* ---- keys ---- */

static pkv_status check_bools(const reader *r, const unsigned char *p, uint64_t count,
                              pkv_error *err) {
  for (uint64_t i = 0; i < count; i++)
    PKV_CHECK(err, p[i] <= 1, PKV_E_FORMAT, "%s: bool is %u, only 0 and 1 are allowed", r->item,
              p[i]);
  return PKV_OK;
}

static pkv_status read_array(reader *r, pkv_gguf_value *v, pkv_error *err) {
  uint32_t type = 0;
  uint64_t count = 0;
  PKV_TRY(take_u32(r, &type, "element type", err));
  PKV_CHECK(err, type != PKV_GGUF_ARRAY, PKV_E_FORMAT, "%s: arrays of arrays are not allowed",
            r->item);
  PKV_CHECK(err, type <= PKV_GGUF_F64, PKV_E_FORMAT, "%s: element type %" PRIu32 " is unknown",
            r->item, type);
  PKV_TRY(take_u64(r, &count, "element count", err));
  PKV_CHECK(err, count <= PKV_GGUF_MAX_ELEMENTS, PKV_E_FORMAT,
            "%s: array has %" PRIu64 " elements, the limit is %" PRIu64, r->item, count,
            PKV_GGUF_MAX_ELEMENTS);
  v->element_type = (pkv_gguf_type)type;
  v->count = count;
  v->data = r->base + r->at;
  if (type != PKV_GGUF_STRING) {
    const unsigned char *p = NULL;
    PKV_TRY(take(r, &p, count * pkv_gguf_scalar_bytes((pkv_gguf_type)type), "array", err));
    return type == PKV_GGUF_BOOL ? check_bools(r, p, count, err) : PKV_OK;
  }
  PKV_CHECK(err, count <= (r->size - r->at) / 8, PKV_E_FORMAT,
            "%s: %" PRIu64 " strings need at least %" PRIu64 " bytes; %zu are left", r->item, count,
            count * 8, r->size - r->at);
  for (uint64_t i = 0; i < count; i++) {
    pkv_span text;
    PKV_TRY(take_string(r, &text, PKV_GGUF_MAX_STRING, "string of the array", err));
  }
  return PKV_OK;
}

static pkv_status read_value(reader *r, pkv_gguf_value *v, size_t index, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  uint32_t type = 0;
  (void)snprintf(r->item, sizeof r->item, "key %zu", index);
  PKV_TRY(take_string(r, &v->key, PKV_GGUF_MAX_KEY, "its name", err));
  PKV_CHECK(err, v->key.size > 0, PKV_E_FORMAT, "%s has an empty name", r->item);
  (void)snprintf(r->item, sizeof r->item, "key \"%s\"", pkv_gguf_quote(quoted, v->key));
  PKV_TRY(take_u32(r, &type, "type", err));
  PKV_CHECK(err, type <= PKV_GGUF_F64, PKV_E_FORMAT, "%s: value type %" PRIu32 " is unknown",
            r->item, type);
  v->type = (pkv_gguf_type)type;
  if (v->type == PKV_GGUF_ARRAY) return read_array(r, v, err);
  v->element_type = v->type;
  v->count = 1;
  v->data = r->base + r->at;
  if (v->type == PKV_GGUF_STRING) {
    pkv_span text;
    return take_string(r, &text, PKV_GGUF_MAX_STRING, "string", err);
  }
  const unsigned char *p = NULL;
  PKV_TRY(take(r, &p, pkv_gguf_scalar_bytes((pkv_gguf_type)type), "value", err));
  return v->type == PKV_GGUF_BOOL ? check_bools(r, p, 1, err) : PKV_OK;
}

/* ---- tensor table ---- */

/* Bytes of a tensor from its extents; names the extent or product that does not fit. */
static pkv_status tensor_bytes(const reader *r, pkv_gguf_tensor *t, pkv_error *err) {
  const char *type = NULL;
  int64_t block = 0, block_bytes = 0, elements = 1;
  const bool known = pkv_gguf_type_info(t->type, &type, &block, &block_bytes);
  PKV_CHECK(err, known || type == NULL, PKV_E_UNSUPPORTED,
            "%s: type %" PRIu32 " (%s) was removed from the format: convert the file again",
            r->item, t->type, type);
  PKV_CHECK(err, known, PKV_E_FORMAT, "%s: type %" PRId32 " is unknown", r->item, (int32_t)t->type);
  for (int d = 0; d < 4; d++)
    PKV_CHECK(err, !__builtin_mul_overflow(elements, t->extent[d], &elements), PKV_E_FORMAT,
              "%s: %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64 " elements overflow",
              r->item, t->extent[0], t->extent[1], t->extent[2], t->extent[3]);
  PKV_CHECK(err, t->extent[0] % block == 0, PKV_E_FORMAT,
            "%s: rows of %" PRId64 " elements are not a multiple of %s's block of %" PRId64,
            r->item, t->extent[0], type, block);
  PKV_CHECK(err, pkv_mul_size(&t->bytes, (size_t)(elements / block), (size_t)block_bytes),
            PKV_E_FORMAT, "%s: the bytes of %" PRId64 " elements of %s overflow", r->item, elements,
            type);
  return PKV_OK;
}

/* t->offset stays relative to the data section until place_tensors. */
static pkv_status read_tensor(reader *r, pkv_gguf_tensor *t, size_t index, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  uint32_t dims = 0;
  uint64_t offset = 0;
  (void)snprintf(r->item, sizeof r->item, "tensor %zu", index);
  PKV_TRY(take_string(r, &t->name, PKV_GGUF_MAX_NAME, "its name", err));
  PKV_CHECK(err, t->name.size > 0, PKV_E_FORMAT, "%s has an empty name", r->item);
  (void)snprintf(r->item, sizeof r->item, "tensor \"%s\"", pkv_gguf_quote(quoted, t->name));
  PKV_TRY(take_u32(r, &dims, "number of dimensions", err));
  PKV_CHECK(err, dims <= PKV_GGUF_MAX_DIMS, PKV_E_FORMAT,
            "%s has %" PRIu32 " dimensions, at most %u are allowed", r->item, dims,
            PKV_GGUF_MAX_DIMS);
  t->dims = (int32_t)dims;
  for (uint32_t d = 0; d < PKV_GGUF_MAX_DIMS; d++) {
    uint64_t extent = 1;
    if (d < dims) PKV_TRY(take_u64(r, &extent, "extent", err));
    PKV_CHECK(err, extent > 0 && extent <= INT64_MAX, PKV_E_FORMAT,
              "%s: extent %" PRIu32 " is %" PRIu64 ", allowed are 1 to 2^63 - 1", r->item, d,
              extent);
    t->extent[d] = (int64_t)extent;
  }
  PKV_TRY(take_u32(r, &t->type, "type", err));
  PKV_TRY(take_u64(r, &offset, "offset", err));
  PKV_TRY(tensor_bytes(r, t, err));
  PKV_CHECK(err, offset <= SIZE_MAX, PKV_E_FORMAT, "%s: offset %" PRIu64 " is out of range",
            r->item, offset);
  t->offset = (size_t)offset;
  return PKV_OK;
}

/* ---- order: by name for look-ups and duplicates, by offset for overlaps ---- */

typedef bool (*before_fn)(const pkv_gguf *g, uint32_t a, uint32_t b);

static bool key_before(const pkv_gguf *g, uint32_t a, uint32_t b) {
  return pkv_gguf_compare(g->values[a].key, g->values[b].key) < 0;
}

static bool name_before(const pkv_gguf *g, uint32_t a, uint32_t b) {
  return pkv_gguf_compare(g->tensors[a].name, g->tensors[b].name) < 0;
}

static bool offset_before(const pkv_gguf *g, uint32_t a, uint32_t b) {
  return g->tensors[a].offset < g->tensors[b].offset;
}

static void sift_down(uint32_t *order, size_t at, size_t count, const pkv_gguf *g,
                      before_fn before) {
  for (;;) {
    size_t child = 2 * at + 1;
    if (child >= count) return;
    if (child + 1 < count && before(g, order[child], order[child + 1])) child++;
    if (!before(g, order[at], order[child])) return;
    const uint32_t swap = order[at];
    order[at] = order[child];
    order[child] = swap;
    at = child;
  }
}

/* Heap sort: n log n whatever the file holds (a hash table has a worst case that a file can aim
   at), and no memory. */
static void sort_order(uint32_t *order, size_t count, const pkv_gguf *g, before_fn before) {
  for (size_t i = 0; i < count; i++)
    order[i] = (uint32_t)i;
  for (size_t i = count / 2; i > 0; i--)
    sift_down(order, i - 1, count, g, before);
  for (size_t i = count; i > 1; i--) {
    const uint32_t swap = order[0];
    order[0] = order[i - 1];
    order[i - 1] = swap;
    sift_down(order, 0, i - 1, g, before);
  }
}

static pkv_status sort_values(pkv_gguf *g, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  sort_order(g->value_order, g->value_count, g, key_before);
  for (size_t i = 1; i < g->value_count; i++) {
    const pkv_span key = g->values[g->value_order[i]].key;
    PKV_CHECK(err, pkv_gguf_compare(g->values[g->value_order[i - 1]].key, key) != 0, PKV_E_FORMAT,
              "key \"%s\" appears twice", pkv_gguf_quote(quoted, key));
  }
  return PKV_OK;
}

pkv_status pkv_gguf_sort_tensors(pkv_gguf *g, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  sort_order(g->tensor_order, g->tensor_count, g, name_before);
  for (size_t i = 1; i < g->tensor_count; i++) {
    const pkv_span name = g->tensors[g->tensor_order[i]].name;
    PKV_CHECK(err, pkv_gguf_compare(g->tensors[g->tensor_order[i - 1]].name, name) != 0,
              PKV_E_FORMAT, "tensor \"%s\" appears twice", pkv_gguf_quote(quoted, name));
  }
  return PKV_OK;
}

/* ---- placing ---- */

static pkv_status read_alignment(pkv_gguf *g, pkv_error *err) {
  g->alignment = 32;
  const pkv_gguf_value *v = pkv_gguf_find(g, "general.alignment");
  if (v == NULL) return PKV_OK;
  PKV_CHECK(err, v->type == PKV_GGUF_U32, PKV_E_FORMAT,
            "general.alignment has type %s, must be u32", pkv_gguf_type_name(v->type));
  g->alignment = (uint32_t)pkv_gguf_load_le(v->data, 4);
  PKV_CHECK(err, g->alignment >= PKV_GGUF_MIN_ALIGNMENT && (g->alignment & (g->alignment - 1)) == 0,
            PKV_E_FORMAT, "general.alignment is %" PRIu32 ", must be a power of two from %u on",
            g->alignment, PKV_GGUF_MIN_ALIGNMENT);
  return PKV_OK;
}

static pkv_status check_overlaps(pkv_gguf *g, pkv_error *err) {
  char first[PKV_GGUF_QUOTE_BYTES], second[PKV_GGUF_QUOTE_BYTES];
  const uint32_t *order = g->tensor_order;
  sort_order(g->tensor_order, g->tensor_count, g, offset_before);
  for (size_t i = 1; i < g->tensor_count; i++) {
    const pkv_gguf_tensor *a = &g->tensors[order[i - 1]], *b = &g->tensors[order[i]];
    PKV_CHECK(err, a->bytes <= b->offset - a->offset, PKV_E_FORMAT,
              "tensors \"%s\" (offset %zu, %zu bytes) and \"%s\" (offset %zu) overlap",
              pkv_gguf_quote(first, a->name), a->offset, a->bytes, pkv_gguf_quote(second, b->name),
              b->offset);
  }
  return PKV_OK;
}

static pkv_status place_tensors(pkv_gguf *g, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  /* At most PKV_GGUF_MAX_META and 2^31. */
  const size_t start = (g->meta_bytes + g->alignment - 1) & ~(size_t)(g->alignment - 1);
  g->data_offset = start;
  for (size_t i = 0; i < g->tensor_count; i++) {
    pkv_gguf_tensor *t = &g->tensors[i];
    PKV_CHECK(err, t->offset % g->alignment == 0, PKV_E_FORMAT,
              "tensor \"%s\" at offset %zu of the data section: not a multiple of %" PRIu32,
              pkv_gguf_quote(quoted, t->name), t->offset, g->alignment);
    size_t offset = 0, end = 0;
    PKV_CHECK(err, pkv_add_size(&offset, start, t->offset) && pkv_add_size(&end, offset, t->bytes),
              PKV_E_FORMAT, "tensor \"%s\" at offset %zu + %zu needs %zu bytes: the end overflows",
              pkv_gguf_quote(quoted, t->name), start, t->offset, t->bytes);
    PKV_CHECK(err, end <= g->size, PKV_E_FORMAT,
              "tensor \"%s\" at offset %zu needs %zu bytes, file has %zu",
              pkv_gguf_quote(quoted, t->name), offset, t->bytes, g->size);
    t->offset = offset;
    t->data = g->bytes + offset;
  }
  return PKV_OK;
}

/* ---- all of it ---- */

static pkv_status read_tables(pkv_gguf *g, reader *r, pkv_error *err) {
  size_t tensors = 0, values = 0;
  (void)snprintf(r->item, sizeof r->item, "header");
  PKV_TRY(read_version(g, r, err));
  /* The least entries: length and a byte of name, then type and a byte, or dims, type, offset. */
  PKV_TRY(read_count(r, &tensors, 8 + 1 + 4 + 4 + 8, "tensor count", err));
  PKV_TRY(read_count(r, &values, 8 + 1 + 4 + 1, "key count", err));
  const pkv_allocator *a = &g->allocator;
  if (values > 0) {
    g->values = pkv_alloc_zeroed(a, values, sizeof *g->values);
    g->value_order = pkv_alloc_zeroed(a, values, sizeof *g->value_order);
  }
  if (tensors > 0) {
    g->tensors = pkv_alloc_zeroed(a, tensors, sizeof *g->tensors);
    g->tensor_order = pkv_alloc_zeroed(a, tensors, sizeof *g->tensor_order);
  }
  g->value_count = values;
  g->tensor_count = g->tensor_room = tensors;
  PKV_CHECK(err, values == 0 || (g->values != NULL && g->value_order != NULL), PKV_E_NOMEM,
            "no memory for %zu keys", values);
  PKV_CHECK(err, tensors == 0 || (g->tensors != NULL && g->tensor_order != NULL), PKV_E_NOMEM,
            "no memory for %zu tensors", tensors);
  for (size_t i = 0; i < values; i++)
    PKV_TRY(read_value(r, &g->values[i], i, err));
  for (size_t i = 0; i < tensors; i++)
    PKV_TRY(read_tensor(r, &g->tensors[i], i, err));
  g->meta_bytes = r->at;
  return PKV_OK;
}

pkv_status pkv_gguf_parse(pkv_gguf *g, size_t have, bool *starved, pkv_error *err) {
  reader r = {.base = g->meta, .have = have, .size = g->size};
  const pkv_status status = read_tables(g, &r, err);
  *starved = r.starved;
  PKV_TRY(status);
  PKV_TRY(sort_values(g, err));
  PKV_TRY(read_alignment(g, err));
  PKV_TRY(pkv_gguf_sort_tensors(g, err));
  PKV_TRY(place_tensors(g, err));
  PKV_TRY(check_overlaps(g, err));
  return pkv_gguf_sort_tensors(g, err); /* check_overlaps used the order for its own */
}

void pkv_gguf_free_tables(pkv_gguf *g) {
  const pkv_allocator *a = &g->allocator;
  pkv_free(a, g->values, g->value_count * sizeof *g->values);
  pkv_free(a, g->value_order, g->value_count * sizeof *g->value_order);
  pkv_free(a, g->tensors, g->tensor_room * sizeof *g->tensors);
  pkv_free(a, g->tensor_order, g->tensor_room * sizeof *g->tensor_order);
  g->values = NULL;
  g->tensors = NULL;
  g->value_order = g->tensor_order = NULL;
  g->value_count = g->tensor_count = g->tensor_room = 0;
}
