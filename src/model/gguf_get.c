/* SPDX-License-Identifier: Apache-2.0 */
/* Typed reads of a GGUF file's keys, and text of the file made fit for messages. */
#include "model/gguf_parts.h"

#include <inttypes.h>
#include <string.h>

uint64_t pkv_gguf_load_le(const unsigned char *p, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = bytes; i > 0; i--)
    value = value << 8 | p[i - 1];
  return value;
}

const char *pkv_gguf_quote(char out[PKV_GGUF_QUOTE_BYTES], pkv_span text) {
  const size_t room = PKV_GGUF_QUOTE_BYTES - 1;
  const bool cut = text.size > room;
  const size_t shown = cut ? room - 3 : text.size;
  for (size_t i = 0; i < shown; i++) {
    const unsigned char c = (unsigned char)text.data[i];
    out[i] = c >= 0x20 && c < 0x7f ? (char)c : '?';
  }
  memcpy(out + shown, cut ? "..." : "", cut ? 4 : 1);
  return out;
}

/* ---- elements ---- */

static bool is_integer(pkv_gguf_type type) {
  return type <= PKV_GGUF_I32 || type == PKV_GGUF_U64 || type == PKV_GGUF_I64;
}

int64_t pkv_gguf_element_int(const pkv_gguf_value *v, uint64_t i) {
  PKV_ASSERT(i < v->count && (is_integer(v->element_type) || v->element_type == PKV_GGUF_BOOL));
  const size_t bytes = pkv_gguf_scalar_bytes(v->element_type);
  const uint64_t bits = pkv_gguf_load_le(v->data + i * bytes, bytes);
  switch (v->element_type) {
  case PKV_GGUF_I8:
    return (int8_t)(uint8_t)bits;
  case PKV_GGUF_I16:
    return (int16_t)(uint16_t)bits;
  case PKV_GGUF_I32:
    return (int32_t)(uint32_t)bits;
  default:
    return (int64_t)bits;
  }
}

double pkv_gguf_element_float(const pkv_gguf_value *v, uint64_t i) {
  if (v->element_type == PKV_GGUF_F32) {
    const uint32_t bits = (uint32_t)pkv_gguf_load_le(v->data + i * 4, 4);
    float value = 0.0f;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
  }
  if (v->element_type == PKV_GGUF_F64) {
    const uint64_t bits = pkv_gguf_load_le(v->data + i * 8, 8);
    double value = 0.0;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  const int64_t value = pkv_gguf_element_int(v, i);
  return v->element_type == PKV_GGUF_U64 ? (double)(uint64_t)value : (double)value;
}

pkv_span pkv_gguf_next_string(const unsigned char **cursor) {
  const size_t length = (size_t)pkv_gguf_load_le(*cursor, 8);
  const pkv_span text = {(const char *)*cursor + 8, length};
  *cursor += 8 + length;
  return text;
}

/* ---- keys ---- */

/* The value of `key`, or NULL when it may be absent and is. */
static pkv_status lookup(const pkv_gguf_value **out, const pkv_gguf *g, const char *key,
                         bool required, pkv_error *err) {
  *out = pkv_gguf_find(g, key);
  PKV_CHECK(err, *out != NULL || !required, PKV_E_FORMAT, "key %s is missing", key);
  return PKV_OK;
}

pkv_status pkv_gguf_get_int(int64_t *out, const pkv_gguf *g, const char *key, bool required,
                            int64_t lo, int64_t hi, pkv_error *err) {
  const pkv_gguf_value *v = NULL;
  PKV_TRY(lookup(&v, g, key, required, err));
  if (v == NULL) return PKV_OK;
  PKV_CHECK(err, is_integer(v->type), PKV_E_FORMAT, "key %s has type %s, an integer is needed", key,
            pkv_gguf_type_name(v->type));
  const int64_t value = pkv_gguf_element_int(v, 0);
  PKV_CHECK(err, v->type != PKV_GGUF_U64 || value >= 0, PKV_E_FORMAT,
            "key %s is %" PRIu64 ", allowed are %" PRId64 " to %" PRId64, key, (uint64_t)value, lo,
            hi);
  PKV_CHECK(err, value >= lo && value <= hi, PKV_E_FORMAT,
            "key %s is %" PRId64 ", allowed are %" PRId64 " to %" PRId64, key, value, lo, hi);
  *out = value;
  return PKV_OK;
}

pkv_status pkv_gguf_get_float(double *out, const pkv_gguf *g, const char *key, bool required,
                              double lo, double hi, pkv_error *err) {
  const pkv_gguf_value *v = NULL;
  PKV_TRY(lookup(&v, g, key, required, err));
  if (v == NULL) return PKV_OK;
  PKV_CHECK(err, v->type == PKV_GGUF_F32 || v->type == PKV_GGUF_F64, PKV_E_FORMAT,
            "key %s has type %s, a float is needed", key, pkv_gguf_type_name(v->type));
  const double value = pkv_gguf_element_float(v, 0);
  /* Written so that NaN fails. */
  PKV_CHECK(err, value >= lo && value <= hi, PKV_E_FORMAT, "key %s is %g, allowed are %g to %g",
            key, value, lo, hi);
  *out = value;
  return PKV_OK;
}

pkv_status pkv_gguf_get_string(pkv_span *out, const pkv_gguf *g, const char *key, bool required,
                               pkv_error *err) {
  const pkv_gguf_value *v = NULL;
  PKV_TRY(lookup(&v, g, key, required, err));
  if (v == NULL) return PKV_OK;
  PKV_CHECK(err, v->type == PKV_GGUF_STRING, PKV_E_FORMAT, "key %s has type %s, a string is needed",
            key, pkv_gguf_type_name(v->type));
  const unsigned char *cursor = v->data;
  *out = pkv_gguf_next_string(&cursor);
  return PKV_OK;
}

pkv_status pkv_gguf_get_bool(bool *out, const pkv_gguf *g, const char *key, bool required,
                             pkv_error *err) {
  const pkv_gguf_value *v = NULL;
  PKV_TRY(lookup(&v, g, key, required, err));
  if (v == NULL) return PKV_OK;
  PKV_CHECK(err, v->type == PKV_GGUF_BOOL, PKV_E_FORMAT, "key %s has type %s, a bool is needed",
            key, pkv_gguf_type_name(v->type));
  *out = v->data[0] != 0;
  return PKV_OK;
}
