/* SPDX-License-Identifier: Apache-2.0 */
#include "model/meta_write.h"

#include <string.h>

#include "model/gguf_parts.h"

static void put(pkv_meta *m, const void *bytes, size_t count) {
  if (m->status == PKV_OK) m->status = pkv_buffer_append(&m->out, bytes, count, &m->error);
}

static void put_le(pkv_meta *m, uint64_t value, size_t bytes) {
  unsigned char b[8];
  for (size_t i = 0; i < bytes; i++)
    b[i] = (unsigned char)(value >> 8 * i);
  put(m, b, bytes);
}

static void put_key(pkv_meta *m, const char *key, pkv_gguf_type type) {
  pkv_meta_add_string(m, (pkv_span){key, strlen(key)});
  put_le(m, (uint64_t)type, 4);
  m->values++;
}

void pkv_meta_init(pkv_meta *m, const pkv_allocator *allocator) {
  memset(m, 0, sizeof *m);
  pkv_buffer_init(&m->out, PKV_GGUF_MAX_META, allocator);
  put(m, "GGUF", 4);
  put_le(m, 3, 4);
  put_le(m, 0, 8); /* tensors */
  put_le(m, 0, 8); /* keys: known at the end */
}

void pkv_meta_deinit(pkv_meta *m) {
  pkv_buffer_deinit(&m->out);
}

void pkv_meta_int(pkv_meta *m, const char *key, int64_t value) {
  put_key(m, key, PKV_GGUF_I64);
  put_le(m, (uint64_t)value, 8);
}

void pkv_meta_float(pkv_meta *m, const char *key, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  put_key(m, key, PKV_GGUF_F64);
  put_le(m, bits, 8);
}

void pkv_meta_bool(pkv_meta *m, const char *key, bool value) {
  put_key(m, key, PKV_GGUF_BOOL);
  pkv_meta_add_bool(m, value);
}

void pkv_meta_string(pkv_meta *m, const char *key, pkv_span text) {
  put_key(m, key, PKV_GGUF_STRING);
  pkv_meta_add_string(m, text);
}

void pkv_meta_text(pkv_meta *m, const char *key, const char *text) {
  pkv_meta_string(m, key, (pkv_span){text, strlen(text)});
}

void pkv_meta_array(pkv_meta *m, const char *key, pkv_gguf_type element, size_t count) {
  put_key(m, key, PKV_GGUF_ARRAY);
  put_le(m, (uint64_t)element, 4);
  put_le(m, count, 8);
}

void pkv_meta_add_string(pkv_meta *m, pkv_span text) {
  put_le(m, text.size, 8);
  put(m, text.data, text.size);
}

void pkv_meta_add_joined(pkv_meta *m, pkv_span left, char between, pkv_span right) {
  put_le(m, left.size + 1 + right.size, 8);
  put(m, left.data, left.size);
  put(m, &between, 1);
  put(m, right.data, right.size);
}

void pkv_meta_add_i32(pkv_meta *m, int32_t value) {
  put_le(m, (uint32_t)value, 4);
}

void pkv_meta_add_bool(pkv_meta *m, bool value) {
  put_le(m, value ? 1 : 0, 1);
}

pkv_status pkv_meta_finish(pkv_gguf **out, pkv_meta *m, const pkv_allocator *allocator,
                           pkv_error *err) {
  *out = NULL;
  if (m->status != PKV_OK) {
    if (err) *err = m->error;
    return m->status;
  }
  for (size_t i = 0; i < 8; i++)
    m->out.data[16 + i] = (char)(unsigned char)(m->values >> 8 * i);
  pkv_gguf *g = pkv_gguf_new(allocator);
  PKV_CHECK(err, g, PKV_E_NOMEM, "no memory for the file's description");
  g->size = m->out.size;
  g->owned_bytes = m->out.capacity;
  g->meta = g->bytes = g->owned = (unsigned char *)m->out.data;
  pkv_buffer_init(&m->out, PKV_GGUF_MAX_META, allocator); /* g owns the memory now */
  bool starved = false;
  const pkv_status status = pkv_gguf_parse(g, g->size, &starved, err);
  if (status != PKV_OK) {
    pkv_gguf_close(g);
    return status;
  }
  *out = g;
  return PKV_OK;
}
