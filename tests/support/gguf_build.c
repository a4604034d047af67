/* SPDX-License-Identifier: Apache-2.0 */
/* The GGUF writer of the tests: three growing buffers, joined at the end. */
#include "support/gguf_build.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LIMIT ((size_t)1 << 30)

static void put(pkv_buffer *to, const void *bytes, size_t count) {
  pkv_error err = {0};
  if (pkv_buffer_append(to, bytes, count, &err) != PKV_OK) fail_msg("gguf_build: %s", err.text);
}

static void put_u32(pkv_buffer *to, uint32_t v) {
  put(to, &v, sizeof v);
}

static void put_u64(pkv_buffer *to, uint64_t v) {
  put(to, &v, sizeof v);
}

static void put_string(pkv_buffer *to, const char *text, size_t bytes) {
  put_u64(to, bytes);
  put(to, text, bytes);
}

static void put_text(pkv_buffer *to, const char *text) {
  put_string(to, text, strlen(text));
}

static void put_zeros(pkv_buffer *to, size_t count) {
  static const char zero[64] = {0};
  for (size_t done = 0; done < count; done += sizeof zero)
    put(to, zero, count - done < sizeof zero ? count - done : sizeof zero);
}

static void pad(pkv_buffer *to, size_t alignment) {
  if (to->size % alignment != 0) put_zeros(to, alignment - to->size % alignment);
}

void gguf_build_init(gguf_build *b) {
  memset(b, 0, sizeof *b);
  pkv_buffer_init(&b->values, LIMIT, NULL);
  pkv_buffer_init(&b->tensors, LIMIT, NULL);
  pkv_buffer_init(&b->data, LIMIT, NULL);
  pkv_buffer_init(&b->file, LIMIT, NULL);
  b->version = 3;
  b->alignment = 32;
}

void gguf_build_deinit(gguf_build *b) {
  pkv_buffer_deinit(&b->values);
  pkv_buffer_deinit(&b->tensors);
  pkv_buffer_deinit(&b->data);
  pkv_buffer_deinit(&b->file);
}

void gguf_build_raw(gguf_build *b, const char *key, size_t key_bytes, uint32_t type,
                    const void *payload, size_t bytes) {
  put_string(&b->values, key, key_bytes);
  put_u32(&b->values, type);
  put(&b->values, payload, bytes);
  b->value_count++;
}

void gguf_build_value(gguf_build *b, const char *key, uint32_t type, const void *payload,
                      size_t bytes) {
  gguf_build_raw(b, key, strlen(key), type, payload, bytes);
}

void gguf_build_u8(gguf_build *b, const char *key, uint8_t value) {
  gguf_build_value(b, key, 0, &value, sizeof value);
}

void gguf_build_i8(gguf_build *b, const char *key, int8_t value) {
  gguf_build_value(b, key, 1, &value, sizeof value);
}

void gguf_build_u16(gguf_build *b, const char *key, uint16_t value) {
  gguf_build_value(b, key, 2, &value, sizeof value);
}

void gguf_build_i16(gguf_build *b, const char *key, int16_t value) {
  gguf_build_value(b, key, 3, &value, sizeof value);
}

void gguf_build_i64(gguf_build *b, const char *key, int64_t value) {
  gguf_build_value(b, key, 11, &value, sizeof value);
}

void gguf_build_f64(gguf_build *b, const char *key, double value) {
  gguf_build_value(b, key, 12, &value, sizeof value);
}

void gguf_build_u32(gguf_build *b, const char *key, uint32_t value) {
  gguf_build_value(b, key, 4, &value, sizeof value);
}

void gguf_build_i32(gguf_build *b, const char *key, int32_t value) {
  gguf_build_value(b, key, 5, &value, sizeof value);
}

void gguf_build_f32(gguf_build *b, const char *key, float value) {
  gguf_build_value(b, key, 6, &value, sizeof value);
}

void gguf_build_bool(gguf_build *b, const char *key, bool value) {
  const uint8_t byte = value ? 1 : 0;
  gguf_build_value(b, key, 7, &byte, sizeof byte);
}

void gguf_build_u64(gguf_build *b, const char *key, uint64_t value) {
  gguf_build_value(b, key, 10, &value, sizeof value);
}

void gguf_build_string(gguf_build *b, const char *key, const char *text) {
  gguf_build_value(b, key, 8, NULL, 0);
  put_text(&b->values, text);
}

/* The head of an array value: its elements follow. */
static void put_array(gguf_build *b, const char *key, uint32_t element, size_t count) {
  gguf_build_value(b, key, 9, NULL, 0);
  put_u32(&b->values, element);
  put_u64(&b->values, count);
}

void gguf_build_strings(gguf_build *b, const char *key, const char *const *texts, size_t count) {
  put_array(b, key, 8, count);
  for (size_t i = 0; i < count; i++)
    put_text(&b->values, texts[i]);
}

void gguf_build_array_i32(gguf_build *b, const char *key, const int32_t *values, size_t count) {
  put_array(b, key, 5, count);
  put(&b->values, values, count * sizeof *values);
}

void gguf_build_array_f32(gguf_build *b, const char *key, const float *values, size_t count) {
  put_array(b, key, 6, count);
  put(&b->values, values, count * sizeof *values);
}

void gguf_build_array(gguf_build *b, const char *key, uint32_t element, const void *elements,
                      size_t count, size_t bytes) {
  put_array(b, key, element, count);
  put(&b->values, elements, bytes);
}

void gguf_build_raw_tensor(gguf_build *b, const char *name, size_t name_bytes, uint32_t dims,
                           const uint64_t *extent, uint32_t type, uint64_t offset) {
  put_string(&b->tensors, name, name_bytes);
  put_u32(&b->tensors, dims);
  put(&b->tensors, extent, (dims < 8 ? dims : 8) * sizeof *extent);
  put_u32(&b->tensors, type);
  put_u64(&b->tensors, offset);
  b->tensor_count++;
}

void gguf_build_tensor_at(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                          const int64_t *extent, uint64_t offset) {
  gguf_build_raw_tensor(b, name, strlen(name), dims, (const uint64_t *)extent, type, offset);
}

void gguf_build_tensor(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                       const int64_t *extent, const void *data, size_t bytes) {
  pad(&b->data, b->alignment);
  gguf_build_tensor_at(b, name, type, dims, extent, b->data.size);
  if (data != NULL)
    put(&b->data, data, bytes);
  else
    put_zeros(&b->data, bytes);
}

void gguf_build_finish(gguf_build *b) {
  pkv_buffer *f = &b->file;
  pkv_buffer_clear(f);
  put(f, "GGUF", 4);
  put_u32(f, b->version);
  put_u64(f, b->tensor_count + b->tensor_count_off);
  put_u64(f, b->value_count + b->value_count_off);
  put(f, b->values.data, b->values.size);
  put(f, b->tensors.data, b->tensors.size);
  pad(f, b->alignment);
  put(f, b->data.data, b->data.size);
}

unsigned char *gguf_build_exact_copy(const unsigned char *bytes, size_t size) {
  void *exact = NULL;
  if (posix_memalign(&exact, 64, size > 0 ? size : 1) != 0) fail_msg("gguf_build: out of memory");
  if (size > 0) memcpy(exact, bytes, size);
  return exact;
}

unsigned char *gguf_build_exact(gguf_build *b, size_t *size) {
  gguf_build_finish(b);
  *size = b->file.size;
  return gguf_build_exact_copy((const unsigned char *)b->file.data, b->file.size);
}

void gguf_build_drop(unsigned char *exact) {
  free(exact);
}

size_t gguf_build_behind(const unsigned char *bytes, size_t size, const char *name) {
  const uint64_t length = strlen(name);
  for (size_t at = 0; at + 8 + length <= size; at++)
    if (memcmp(bytes + at, &length, 8) == 0 && memcmp(bytes + at + 8, name, length) == 0)
      return at + 8 + length;
  fail_msg("gguf_build: \"%s\" is not in the file", name);
  return 0;
}
