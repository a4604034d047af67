/* SPDX-License-Identifier: Apache-2.0 */
/* One number for everything in a model file that decides over its K and V. */
#include "base/hash.h"
#include "model/model_parts.h"

static size_t type_bytes(pkv_gguf_type type) {
  switch (type) {
  case PKV_GGUF_U8:
  case PKV_GGUF_I8:
  case PKV_GGUF_BOOL:
    return 1;
  case PKV_GGUF_U16:
  case PKV_GGUF_I16:
    return 2;
  case PKV_GGUF_U32:
  case PKV_GGUF_I32:
  case PKV_GGUF_F32:
    return 4;
  case PKV_GGUF_U64:
  case PKV_GGUF_I64:
  case PKV_GGUF_F64:
    return 8;
  case PKV_GGUF_STRING:
  case PKV_GGUF_ARRAY:
    break;
  }
  return 0;
}

/* Lists of strings (vocabulary, merges) name tokens, which stand for themselves. */
static uint64_t hash_value(const pkv_gguf_value *v, uint64_t hash) {
  const unsigned char *cursor = v->data;
  const bool list = v->type == PKV_GGUF_ARRAY;
  const pkv_gguf_type type = list ? v->element_type : v->type;
  hash = pkv_hash_bytes(v->key.data, v->key.size, hash);
  if (type == PKV_GGUF_STRING && list) return hash;
  if (type == PKV_GGUF_STRING) {
    const pkv_span text = pkv_gguf_next_string(&cursor);
    return pkv_hash_bytes(text.data, text.size, hash);
  }
  return pkv_hash_bytes(v->data, type_bytes(type) * (size_t)v->count, hash);
}

uint64_t pkv_model_fingerprint(const pkv_model *model) {
  const pkv_gguf *const g = model->gguf;
  uint64_t hash = 0;
  for (size_t i = 0; i < pkv_gguf_value_count(g); i++)
    hash = hash_value(pkv_gguf_value_at(g, i), hash);
  for (size_t i = 0; i < pkv_gguf_tensor_count(g); i++) {
    const pkv_gguf_tensor *const t = pkv_gguf_tensor_at(g, i);
    hash = pkv_hash_bytes(t->name.data, t->name.size, hash);
    hash = pkv_hash_bytes(&t->type, sizeof t->type, hash);
    hash = pkv_hash_bytes(t->extent, sizeof t->extent, hash);
    hash = pkv_hash_bytes(t->data, t->bytes, hash);
  }
  return hash;
}
