/* SPDX-License-Identifier: Apache-2.0 */
#include "model/safetensors.h"

#include <string.h>

#include "model/json_text.h"
#include "model/mapped_file.h"

#define LENGTH_BYTES 8u
#define MAX_DIMS     4u
#define HEADER       "safetensors header"

struct pkv_safetensors {
  pkv_allocator allocator;
  pkv_mapped file;
  const unsigned char *bytes; /* of the whole file */
  size_t size, data_offset;
  json_t *header; /* owns the names */
  pkv_gguf_tensor *tensors;
  size_t count;
};

/* ---- one entry ---- */

static pkv_status read_dtype(pkv_gguf_tensor *t, const json_t *entry, const char *quoted,
                             size_t *element, pkv_error *err) {
  static const struct {
    const char *name;
    uint32_t type;
    size_t bytes; /* 0: known to the format, not to us */
  } dtypes[] = {{"F32", PKV_WTYPE_F32, 4},
                {"F16", PKV_WTYPE_F16, 2},
                {"BF16", PKV_WTYPE_BF16, 2},
                {"BOOL", 0, 0},
                {"U8", 0, 0},
                {"I8", 0, 0},
                {"F8_E5M2", 0, 0},
                {"F8_E4M3", 0, 0},
                {"F8_E8M0", 0, 0},
                {"F4", 0, 0},
                {"F6_E2M3", 0, 0},
                {"F6_E3M2", 0, 0},
                {"I16", 0, 0},
                {"U16", 0, 0},
                {"I32", 0, 0},
                {"U32", 0, 0},
                {"F64", 0, 0},
                {"C64", 0, 0},
                {"I64", 0, 0},
                {"U64", 0, 0}};
  char found[PKV_GGUF_QUOTE_BYTES];
  const json_t *value = json_object_get(entry, "dtype");
  PKV_CHECK(err, json_is_string(value), PKV_E_FORMAT,
            "tensor \"%s\": dtype is missing or no string", quoted);
  const pkv_span name = {json_string_value(value), json_string_length(value)};
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    if (name.size != strlen(dtypes[i].name) || memcmp(name.data, dtypes[i].name, name.size) != 0)
      continue;
    PKV_CHECK(err, dtypes[i].bytes > 0, PKV_E_UNSUPPORTED,
              "tensor \"%s\" has dtype %s; supported: F32 F16 BF16", quoted, dtypes[i].name);
    t->type = dtypes[i].type;
    *element = dtypes[i].bytes;
    return PKV_OK;
  }
  return PKV_FAIL(err, PKV_E_FORMAT,
                  "tensor \"%s\" has dtype \"%s\", which the format does not know", quoted,
                  pkv_gguf_quote(found, name));
}

static pkv_status read_shape(pkv_gguf_tensor *t, const json_t *entry, const char *quoted,
                             size_t element, pkv_error *err) {
  const json_t *shape = json_object_get(entry, "shape");
  PKV_CHECK(err, json_is_array(shape), PKV_E_FORMAT, "tensor \"%s\": shape is missing or no list",
            quoted);
  const size_t dims = json_array_size(shape);
  PKV_CHECK(err, dims <= MAX_DIMS, PKV_E_UNSUPPORTED,
            "tensor \"%s\" has %zu dimensions, at most %u are supported", quoted, dims, MAX_DIMS);
  t->dims = (int32_t)dims;
  t->bytes = element;
  for (size_t d = 0; d < MAX_DIMS; d++)
    t->extent[d] = 1;
  for (size_t d = 0; d < dims; d++) {
    const json_t *value = json_array_get(shape, d);
    const int64_t extent = json_is_integer(value) ? json_integer_value(value) : -1;
    PKV_CHECK(err, extent >= 0, PKV_E_FORMAT, "tensor \"%s\": shape[%zu] is no size", quoted, d);
    PKV_CHECK(err, extent > 0, PKV_E_UNSUPPORTED,
              "tensor \"%s\": shape[%zu] is 0: empty tensors are not supported", quoted, d);
    PKV_CHECK(err, pkv_mul_size(&t->bytes, t->bytes, (size_t)extent), PKV_E_FORMAT,
              "tensor \"%s\": its shape has more bytes than can be counted", quoted);
    t->extent[dims - 1 - d] = extent;
  }
  return PKV_OK;
}

static pkv_status read_offsets(pkv_gguf_tensor *t, const pkv_safetensors *f, const json_t *entry,
                               const char *quoted, pkv_error *err) {
  const json_t *offsets = json_object_get(entry, "data_offsets");
  PKV_CHECK(err, json_is_array(offsets) && json_array_size(offsets) == 2, PKV_E_FORMAT,
            "tensor \"%s\": data_offsets is missing or no pair", quoted);
  const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
  PKV_CHECK(err, json_is_integer(from) && json_is_integer(to), PKV_E_FORMAT,
            "tensor \"%s\": data_offsets are no integers", quoted);
  const int64_t begin = json_integer_value(from), end = json_integer_value(to);
  const size_t have = f->size - f->data_offset;
  PKV_CHECK(err, begin >= 0 && begin <= end, PKV_E_FORMAT,
            "tensor \"%s\": data_offsets are %lld .. %lld", quoted, (long long)begin,
            (long long)end);
  PKV_CHECK(err, (uint64_t)(end - begin) == t->bytes, PKV_E_FORMAT,
            "tensor \"%s\" needs %zu bytes, its data_offsets %lld .. %lld hold %lld", quoted,
            t->bytes, (long long)begin, (long long)end, (long long)(end - begin));
  PKV_CHECK(err, (uint64_t)end <= have, PKV_E_FORMAT,
            "tensor \"%s\" at offset %lld needs %zu bytes, the file has %zu behind its header",
            quoted, (long long)begin, t->bytes, have);
  t->offset = f->data_offset + (size_t)begin;
  t->data = f->bytes + t->offset;
  return PKV_OK;
}

static pkv_status read_entry(pkv_gguf_tensor *t, const pkv_safetensors *f, const json_t *entry,
                             pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  size_t element = 0;
  (void)pkv_gguf_quote(quoted, t->name);
  PKV_CHECK(err, t->name.size > 0, PKV_E_FORMAT, "a tensor has no name");
  PKV_CHECK(err, json_is_object(entry) && json_object_size(entry) == 3, PKV_E_FORMAT,
            "tensor \"%s\" is not dtype, shape and data_offsets", quoted);
  PKV_TRY(read_dtype(t, entry, quoted, &element, err));
  PKV_TRY(read_shape(t, entry, quoted, element, err));
  return read_offsets(t, f, entry, quoted, err);
}

/* ---- all of them ---- */

static void sift_down(pkv_gguf_tensor *t, size_t at, size_t count) {
  for (;;) {
    size_t child = 2 * at + 1;
    if (child >= count) return;
    if (child + 1 < count && t[child].offset < t[child + 1].offset) child++;
    if (t[at].offset >= t[child].offset) return;
    const pkv_gguf_tensor swap = t[at];
    t[at] = t[child];
    t[child] = swap;
    at = child;
  }
}

/* Heap sort: n log n whatever the file says. */
static void sort_by_offset(pkv_gguf_tensor *t, size_t count) {
  for (size_t i = count / 2; i > 0; i--)
    sift_down(t, i - 1, count);
  for (size_t i = count; i > 1; i--) {
    const pkv_gguf_tensor swap = t[0];
    t[0] = t[i - 1];
    t[i - 1] = swap;
    sift_down(t, 0, i - 1);
  }
}

static pkv_status check_coverage(const pkv_safetensors *f, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  size_t at = f->data_offset;
  for (size_t i = 0; i < f->count; i++) {
    const pkv_gguf_tensor *t = &f->tensors[i];
    PKV_CHECK(
        err, t->offset == at, PKV_E_FORMAT,
        "tensor \"%s\" starts at offset %zu of the data, what lies before it ends at %zu (%s)",
        pkv_gguf_quote(quoted, t->name), t->offset - f->data_offset, at - f->data_offset,
        t->offset < at ? "an overlap" : "a hole");
    at += t->bytes;
  }
  PKV_CHECK(err, at == f->size, PKV_E_FORMAT, "%zu bytes behind the last tensor", f->size - at);
  return PKV_OK;
}

static pkv_status check_metadata(const json_t *metadata, pkv_error *err) {
  PKV_CHECK(err, json_is_object(metadata), PKV_E_FORMAT, HEADER ": __metadata__ is no object");
  for (void *at = json_object_iter((json_t *)(uintptr_t)metadata); at != NULL;
       at = json_object_iter_next((json_t *)(uintptr_t)metadata, at))
    PKV_CHECK(err, json_is_string(json_object_iter_value(at)), PKV_E_FORMAT,
              HEADER ": __metadata__ holds more than strings");
  return PKV_OK;
}

static pkv_status read_table(pkv_safetensors *f, pkv_error *err) {
  const size_t entries = json_object_size(f->header);
  const size_t tensors = entries - (json_object_get(f->header, "__metadata__") != NULL);
  PKV_CHECK(err, tensors <= PKV_SAFETENSORS_MAX_TENSORS, PKV_E_LIMIT,
            "%zu tensors, at most %u are supported", tensors, PKV_SAFETENSORS_MAX_TENSORS);
  if (entries > 0) {
    f->tensors = pkv_alloc_zeroed(&f->allocator, entries, sizeof *f->tensors);
    PKV_CHECK(err, f->tensors, PKV_E_NOMEM, "no memory for %zu tensors", entries);
  }
  for (void *at = json_object_iter(f->header); at != NULL;
       at = json_object_iter_next(f->header, at)) {
    const char *name = json_object_iter_key(at);
    const json_t *entry = json_object_iter_value(at);
    if (strcmp(name, "__metadata__") == 0) {
      PKV_TRY(check_metadata(entry, err));
      continue;
    }
    pkv_gguf_tensor *t = &f->tensors[f->count];
    t->name = (pkv_span){name, strlen(name)};
    PKV_TRY(read_entry(t, f, entry, err));
    f->count++;
  }
  sort_by_offset(f->tensors, f->count);
  return check_coverage(f, err);
}

/* ---- the file ---- */

static pkv_status header_bytes(size_t *out, const unsigned char *length, size_t size,
                               pkv_error *err) {
  uint64_t n = 0;
  for (unsigned i = 0; i < LENGTH_BYTES; i++)
    n |= (uint64_t)length[i] << 8 * i;
  PKV_CHECK(err, n <= PKV_SAFETENSORS_MAX_HEADER, PKV_E_FORMAT,
            HEADER " of %llu bytes: at most %u are allowed", (unsigned long long)n,
            PKV_SAFETENSORS_MAX_HEADER);
  PKV_CHECK(err, n <= size - LENGTH_BYTES, PKV_E_FORMAT, HEADER " of %llu bytes, file has %zu",
            (unsigned long long)n, size);
  PKV_CHECK(err, n >= 2, PKV_E_FORMAT, HEADER " of %llu bytes is no JSON", (unsigned long long)n);
  *out = (size_t)n;
  return PKV_OK;
}

static pkv_status parse_header(pkv_safetensors *f, const unsigned char *text, size_t n,
                               pkv_error *err) {
  PKV_CHECK(err, text[0] == '{', PKV_E_FORMAT, HEADER " does not start with '{'");
  /* Padding is spaces, and only behind the object; the parser would take other blanks too. */
  size_t end = n;
  while (text[end - 1] == ' ')
    end--;
  PKV_CHECK(err, text[end - 1] == '}', PKV_E_FORMAT, HEADER " does not end with '}' and spaces");
  f->data_offset = LENGTH_BYTES + n;
  PKV_TRY(pkv_json_parse(&f->header, HEADER, (const char *)text, end, err));
  return read_table(f, err);
}

static pkv_status load_file(pkv_safetensors *f, const char *path, pkv_error *err) {
  unsigned char length[LENGTH_BYTES];
  size_t n = 0;
  PKV_TRY(pkv_mapped_open(&f->file, path, err));
  f->bytes = f->file.bytes;
  f->size = f->file.size;
  PKV_CHECK(err, f->size >= LENGTH_BYTES, PKV_E_FORMAT, "file of %zu bytes has no header", f->size);
  PKV_TRY(pkv_mapped_read(length, &f->file, LENGTH_BYTES, err));
  PKV_TRY(header_bytes(&n, length, f->size, err));
  unsigned char *copy = pkv_alloc(&f->allocator, LENGTH_BYTES + n);
  PKV_CHECK(err, copy, PKV_E_NOMEM, "no memory for " HEADER " of %zu bytes", n);
  pkv_status status = pkv_mapped_read(copy, &f->file, LENGTH_BYTES + n, err);
  if (status == PKV_OK) status = parse_header(f, copy + LENGTH_BYTES, n, err);
  pkv_free(&f->allocator, copy, LENGTH_BYTES + n);
  return status;
}

static pkv_status load_memory(pkv_safetensors *f, const void *bytes, size_t size, pkv_error *err) {
  size_t n = 0;
  f->bytes = bytes;
  f->size = size;
  PKV_CHECK(err, size >= LENGTH_BYTES, PKV_E_FORMAT, "file of %zu bytes has no header", size);
  PKV_TRY(header_bytes(&n, f->bytes, size, err));
  return parse_header(f, f->bytes + LENGTH_BYTES, n, err);
}

static pkv_status open_any(pkv_safetensors **out, const char *path, const void *bytes, size_t size,
                           const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_safetensors *f = pkv_alloc_zeroed(&a, 1, sizeof *f);
  PKV_CHECK(err, f, PKV_E_NOMEM, "no memory for the file's description");
  f->allocator = a;
  f->file = (pkv_mapped)PKV_MAPPED_NONE;
  const pkv_status status = path ? load_file(f, path, err) : load_memory(f, bytes, size, err);
  if (status != PKV_OK) {
    pkv_safetensors_close(f);
    return status;
  }
  *out = f;
  return PKV_OK;
}

pkv_status pkv_safetensors_open(pkv_safetensors **out, const char *path,
                                const pkv_allocator *allocator, pkv_error *err) {
  if (out) *out = NULL;
  PKV_CHECK(err, path, PKV_E_INVALID, "path is NULL");
  return open_any(out, path, NULL, 0, allocator, err);
}

pkv_status pkv_safetensors_open_memory(pkv_safetensors **out, const void *bytes, size_t size,
                                       const pkv_allocator *allocator, pkv_error *err) {
  if (out) *out = NULL;
  PKV_CHECK(err, bytes || size == 0, PKV_E_INVALID, "bytes is NULL, size is %zu", size);
  return open_any(out, NULL, bytes, size, allocator, err);
}

void pkv_safetensors_close(pkv_safetensors *f) {
  if (!f) return;
  const pkv_allocator a = f->allocator;
  if (f->tensors) pkv_free(&a, f->tensors, json_object_size(f->header) * sizeof *f->tensors);
  json_decref(f->header);
  pkv_mapped_close(&f->file);
  pkv_free(&a, f, sizeof *f);
}

size_t pkv_safetensors_count(const pkv_safetensors *f) {
  return f->count;
}

const pkv_gguf_tensor *pkv_safetensors_at(const pkv_safetensors *f, size_t i) {
  PKV_ASSERT(i < f->count);
  return &f->tensors[i];
}

size_t pkv_safetensors_file_bytes(const pkv_safetensors *f) {
  return f->size;
}

pkv_status pkv_safetensors_check_unchanged(const pkv_safetensors *f, pkv_error *err) {
  return pkv_mapped_check_unchanged(&f->file, err);
}

pkv_status pkv_safetensors_copy(pkv_safetensors *f, pkv_error *err) {
  return pkv_mapped_copy(&f->file, err);
}
