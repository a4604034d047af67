/* SPDX-License-Identifier: Apache-2.0 */
#include "support/gguf_build.h"

#include <setjmp.h>
#include <stdarg.h>
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

static void put_text(pkv_buffer *to, const char *text) {
  put_u64(to, strlen(text));
  put(to, text, strlen(text));
}

static void pad(pkv_buffer *to, size_t alignment) {
  static const char zero[64] = {0};
  while (to->size % alignment != 0) {
    const size_t missing = alignment - to->size % alignment;
    put(to, zero, missing < sizeof zero ? missing : sizeof zero);
  }
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

void gguf_build_value(gguf_build *b, const char *key, uint32_t type, const void *payload,
                      size_t bytes) {
  put_text(&b->values, key);
  put_u32(&b->values, type);
  put(&b->values, payload, bytes);
  b->value_count++;
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

void gguf_build_tensor_at(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                          const int64_t *extent, uint64_t offset) {
  put_text(&b->tensors, name);
  put_u32(&b->tensors, dims);
  put(&b->tensors, extent, dims * sizeof *extent);
  put_u32(&b->tensors, type);
  put_u64(&b->tensors, offset);
  b->tensor_count++;
}

void gguf_build_tensor(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                       const int64_t *extent, const void *data, size_t bytes) {
  pad(&b->data, b->alignment);
  gguf_build_tensor_at(b, name, type, dims, extent, b->data.size);
  put(&b->data, data, bytes);
}

void gguf_build_finish(gguf_build *b) {
  pkv_buffer *f = &b->file;
  pkv_buffer_clear(f);
  put(f, "GGUF", 4);
  put_u32(f, b->version);
  put_u64(f, b->tensor_count);
  put_u64(f, b->value_count);
  put(f, b->values.data, b->values.size);
  put(f, b->tensors.data, b->tensors.size);
  pad(f, b->alignment);
  put(f, b->data.data, b->data.size);
}
