/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the GGUF reader: whatever the bytes, opening fails with a text or everything that
 * is reported lies inside them, is aligned, does not overlap, and is found by its name. The target
 * aborts on a broken promise.
 */
#include "model/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;

static void touch(const uint8_t *data, size_t size, const void *part, size_t count) {
  const uint8_t *p = part;
  REQUIRE(p >= data && p <= data + size && count <= (size_t)(data + size - p));
  if (count > 0) sink = sink + p[0] + p[count - 1];
}

/* `name` as a terminated copy; false where it holds a zero byte and cannot be asked for. */
static bool terminated(char *out, size_t capacity, pkv_span name) {
  if (name.size >= capacity || memchr(name.data, 0, name.size) != NULL) return false;
  memcpy(out, name.data, name.size);
  out[name.size] = '\0';
  return true;
}

static void touch_value(const uint8_t *data, size_t size, const pkv_gguf *g,
                        const pkv_gguf_value *v) {
  static char key[65536];
  char quoted[PKV_GGUF_QUOTE_BYTES];
  REQUIRE(v->key.size > 0 && v->key.size <= 65535);
  touch(data, size, v->key.data, v->key.size);
  REQUIRE(strlen(pkv_gguf_quote(quoted, v->key)) < sizeof quoted);
  const unsigned char *cursor = v->data;
  for (uint64_t i = 0; i < v->count; i++) {
    if (v->element_type == PKV_GGUF_STRING) {
      const pkv_span text = pkv_gguf_next_string(&cursor);
      touch(data, size, text.data, text.size);
    } else {
      sink = sink + (uint64_t)(pkv_gguf_element_float(v, i) > 0.0);
    }
  }
  if (!terminated(key, sizeof key, v->key)) return;
  REQUIRE(pkv_gguf_find(g, key) == v);
  int64_t integer = 0;
  double number = 0.0;
  bool flag = false;
  pkv_span text = {NULL, 0};
  int good = pkv_gguf_get_int(&integer, g, key, true, INT64_MIN, INT64_MAX, NULL) == PKV_OK;
  good += pkv_gguf_get_float(&number, g, key, true, -1e308, 1e308, NULL) == PKV_OK;
  good += pkv_gguf_get_bool(&flag, g, key, true, NULL) == PKV_OK;
  good += pkv_gguf_get_string(&text, g, key, true, NULL) == PKV_OK;
  REQUIRE(good <= 1);
}

static void touch_tensor(const uint8_t *data, size_t size, const pkv_gguf *g,
                         const pkv_gguf_tensor *t) {
  char name[65];
  int64_t block = 0, block_bytes = 0;
  REQUIRE(t->name.size > 0 && t->name.size <= 64);
  touch(data, size, t->name.data, t->name.size);
  REQUIRE(t->bytes > 0 && t->data == data + t->offset);
  touch(data, size, t->data, t->bytes);
  REQUIRE(t->offset >= pkv_gguf_data_offset(g));
  REQUIRE((t->offset - pkv_gguf_data_offset(g)) % pkv_gguf_alignment(g) == 0);
  REQUIRE(t->dims >= 0 && t->dims <= 4);
  REQUIRE(pkv_gguf_type_info(t->type, NULL, &block, &block_bytes));
  REQUIRE(t->extent[0] % block == 0);
  uint64_t blocks = (uint64_t)(t->extent[0] / block);
  for (int d = 1; d < 4; d++)
    blocks *= (uint64_t)t->extent[d];
  REQUIRE(blocks * (uint64_t)block_bytes == t->bytes);
  if (terminated(name, sizeof name, t->name)) REQUIRE(pkv_gguf_find_tensor(g, name) == t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_gguf *g = NULL;
  pkv_error err = {0};
  const pkv_status status = pkv_gguf_open_memory(&g, data, size, NULL, &err);
  if (status != PKV_OK) {
    REQUIRE(g == NULL && err.status == status && err.text[0] != '\0');
    REQUIRE(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED);
    for (const char *c = err.text; *c != '\0'; c++)
      REQUIRE(*c >= 0x20 && *c < 0x7f);
    return 0;
  }
  const size_t values = pkv_gguf_value_count(g), tensors = pkv_gguf_tensor_count(g);
  for (size_t i = 0; i < values; i++)
    touch_value(data, size, g, pkv_gguf_value_at(g, i));
  for (size_t i = 0; i < tensors; i++)
    touch_tensor(data, size, g, pkv_gguf_tensor_at(g, i));
  /* Slow on purpose, and only where it costs nothing: no two tensors share a byte. */
  for (size_t i = 0; i < tensors && tensors <= 64; i++)
    for (size_t k = 0; k < i; k++) {
      const pkv_gguf_tensor *a = pkv_gguf_tensor_at(g, i), *b = pkv_gguf_tensor_at(g, k);
      REQUIRE(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
    }
  (void)pkv_gguf_check_whole(g, true, NULL);
  pkv_gguf_close(g);
  return 0;
}
