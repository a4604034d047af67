/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binds the tensors of a model: every one by name, with exactly the shape that the hyper-parameters
 * give. Weights are not copied; they stay in the mapped file. Copied are norms and biases that are
 * not F32 or need 1 added, and what does not lie at a multiple of its element's size.
 */
#include "model/model_parts.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"

#define NAME_BYTES 64

static const char *const layer_names[] = {
    "attn_norm.weight",    "attn_q.weight",      "attn_k.weight",      "attn_v.weight",
    "attn_output.weight",  "ffn_norm.weight",    "ffn_gate.weight",    "ffn_up.weight",
    "ffn_down.weight",     "attn_q.bias",        "attn_k.bias",        "attn_v.bias",
    "attn_output.bias",    "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight",
    "post_ffw_norm.weight"};
#define HEAD_NORMS 2 /* of the layer's names and vectors: behind those that all families have */
#define POST_NORMS 2 /* the last ones */
static const char *const global_names[] = {"token_embd.weight", "output_norm.weight",
                                           "output.weight", "rope_freqs.weight"};

typedef struct binder {
  pkv_model *m;
  size_t bound; /* tensors of the file that have a place */
  pkv_error *err;
} binder;

bool pkv_weights_computable(uint32_t type) {
  return type == PKV_WTYPE_F32 || type == PKV_WTYPE_F16 || type == PKV_WTYPE_BF16 ||
         type == PKV_WTYPE_Q8_0 || type == PKV_WTYPE_Q4_0 || type == PKV_WTYPE_Q4_1 ||
         type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1 || type == PKV_WTYPE_Q4_K ||
         type == PKV_WTYPE_Q5_K || type == PKV_WTYPE_Q6_K;
}

/* How many of a layer's names, or vectors, this model has. */
static size_t have(const pkv_model *m, size_t all) {
  return m->gemma ? all : all - POST_NORMS - (m->head_norms ? 0 : HEAD_NORMS);
}

/* Memory for `bytes` bytes that lives as long as the model. */
static void *keep(binder *b, size_t bytes) {
  size_t total = 0;
  if (!pkv_add_size(&total, bytes, PKV_CACHE_LINE)) return NULL;
  pkv_model_block *block = pkv_alloc(&b->m->allocator, total);
  if (!block) return NULL;
  *block = (pkv_model_block){b->m->blocks, total};
  b->m->blocks = block;
  return (char *)block + PKV_CACHE_LINE;
}

static size_t float_bytes(uint32_t type) {
  if (type == PKV_WTYPE_F32) return 4;
  return type == PKV_WTYPE_F16 || type == PKV_WTYPE_BF16 ? 2 : 0;
}

static const char *type_name(uint32_t type) {
  const char *name = NULL;
  int64_t block, bytes;
  return pkv_gguf_type_info(type, &name, &block, &bytes) ? name : "unknown";
}

/* *out is NULL when the tensor is absent and not required. */
static pkv_status find(const pkv_gguf_tensor **out, binder *b, const char *name, bool required,
                       int64_t inputs, int64_t outputs) {
  const pkv_gguf_tensor *t = pkv_gguf_find_tensor(b->m->gguf, name);
  *out = t;
  if (!t) {
    PKV_CHECK(b->err, !required, PKV_E_FORMAT, "tensor %s is missing", name);
    return PKV_OK;
  }
  b->bound++;
  PKV_CHECK(b->err,
            t->extent[0] == inputs && t->extent[1] == outputs && t->extent[2] == 1 &&
                t->extent[3] == 1,
            PKV_E_FORMAT, "tensor %s: expected [%lld, %lld], found [%lld, %lld, %lld, %lld]", name,
            (long long)inputs, (long long)outputs, (long long)t->extent[0], (long long)t->extent[1],
            (long long)t->extent[2], (long long)t->extent[3]);
  return PKV_OK;
}

static pkv_status bind_matrix(pkv_weight *out, binder *b, const char *name, int64_t inputs,
                              int64_t outputs) {
  const pkv_gguf_tensor *t;
  PKV_TRY(find(&t, b, name, true, inputs, outputs));
  PKV_CHECK(
      b->err, pkv_weights_computable(t->type), PKV_E_UNSUPPORTED,
      "tensor %s has type %s (%u); supported: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K",
      name, type_name(t->type), t->type);
  int64_t block = 1, block_bytes = 1;
  const char *type = NULL;
  (void)pkv_gguf_type_info(t->type, &type, &block, &block_bytes);
  PKV_ASSERT(inputs % block == 0); /* the reader of the table refuses others */
  out->type = (pkv_wtype)t->type;
  out->seed = 0;
  out->n = outputs;
  out->k = inputs;
  out->data = t->data;
  const size_t element = float_bytes(t->type);
  if (element > 0 && (uintptr_t)t->data % element != 0) {
    void *copy = keep(b, t->bytes);
    PKV_CHECK(b->err, copy, PKV_E_NOMEM, "no memory for a copy of tensor %s", name);
    memcpy(copy, t->data, t->bytes);
    out->data = copy;
  }
  out->row_bytes = inputs / block * block_bytes;
  b->m->parameters += inputs * outputs;
  b->m->weight_bytes += (int64_t)t->bytes;
  return PKV_OK;
}

static float float_at(const pkv_gguf_tensor *t, int64_t i) {
  float whole;
  uint16_t half;
  if (t->type == PKV_WTYPE_F32) {
    memcpy(&whole, t->data + i * 4, sizeof whole);
    return whole;
  }
  memcpy(&half, t->data + i * 2, sizeof half);
  return t->type == PKV_WTYPE_F16 ? pkv_f16_to_f32(half) : pkv_bf16_to_f32(half);
}

static pkv_status bind_vector(const float **out, binder *b, const char *name, bool required,
                              int64_t count) {
  const pkv_gguf_tensor *t;
  *out = NULL;
  PKV_TRY(find(&t, b, name, required, count, 1));
  if (!t) return PKV_OK;
  const size_t element = float_bytes(t->type);
  PKV_CHECK(b->err, element > 0, PKV_E_UNSUPPORTED,
            "tensor %s has type %s (%u); norms, biases and rope_freqs must be F32, F16 or BF16",
            name, type_name(t->type), t->type);
  const bool plus_one = b->m->norm_plus_one && strstr(name, "norm") != NULL;
  if (element == sizeof(float) && (uintptr_t)t->data % sizeof(float) == 0 && !plus_one) {
    *out = (const float *)(const void *)t->data;
  } else {
    float *copy = keep(b, (size_t)count * sizeof *copy);
    PKV_CHECK(b->err, copy, PKV_E_NOMEM, "no memory for a copy of tensor %s", name);
    for (int64_t i = 0; i < count; i++)
      copy[i] = float_at(t, i) + (plus_one ? 1.0f : 0.0f);
    *out = copy;
  }
  b->m->parameters += count;
  b->m->weight_bytes += (int64_t)t->bytes;
  return PKV_OK;
}

static pkv_status bind_layer(binder *b, int32_t index) {
  const pkv_hparams *hp = &b->m->hp;
  pkv_layer *l = &b->m->layers[index];
  const int64_t width = hp->width, ffn = hp->feed_forward;
  const int64_t q = (int64_t)hp->query_heads * hp->head_dim;
  const int64_t kv = (int64_t)hp->kv_heads * hp->head_dim;
  const struct {
    const char *name;
    pkv_weight *to;
    int64_t inputs, outputs;
  } matrices[] = {
      {"attn_q.weight", &l->q, width, q},        {"attn_k.weight", &l->k, width, kv},
      {"attn_v.weight", &l->v, width, kv},       {"attn_output.weight", &l->o, q, width},
      {"ffn_gate.weight", &l->gate, width, ffn}, {"ffn_up.weight", &l->up, width, ffn},
      {"ffn_down.weight", &l->down, ffn, width}};
  const struct {
    const char *name;
    const float **to;
    bool required;
    int64_t count;
  } vectors[] = {{"attn_norm.weight", &l->attn_norm, true, width},
                 {"ffn_norm.weight", &l->ffn_norm, true, width},
                 {"attn_q.bias", &l->q_bias, false, q},
                 {"attn_k.bias", &l->k_bias, false, kv},
                 {"attn_v.bias", &l->v_bias, false, kv},
                 {"attn_output.bias", &l->o_bias, false, width},
                 {"attn_q_norm.weight", &l->q_norm, true, hp->head_dim},
                 {"attn_k_norm.weight", &l->k_norm, true, hp->head_dim},
                 {"post_attention_norm.weight", &l->attn_post_norm, true, width},
                 {"post_ffw_norm.weight", &l->ffn_post_norm, true, width}};
  const size_t vector_count = have(b->m, sizeof vectors / sizeof vectors[0]);
  char name[NAME_BYTES];
  l->local = pkv_hparams_is_local(b->m, index);
  for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
    (void)snprintf(name, sizeof name, "blk.%d.%s", (int)index, matrices[i].name);
    PKV_TRY(bind_matrix(matrices[i].to, b, name, matrices[i].inputs, matrices[i].outputs));
  }
  for (size_t i = 0; i < vector_count; i++) {
    (void)snprintf(name, sizeof name, "blk.%d.%s", (int)index, vectors[i].name);
    PKV_TRY(bind_vector(vectors[i].to, b, name, vectors[i].required, vectors[i].count));
  }
  return PKV_OK;
}

static bool is_known(const pkv_model *m, pkv_span name) {
  for (size_t i = 0; i < sizeof global_names / sizeof global_names[0]; i++) {
    if (name.size == strlen(global_names[i]) && memcmp(name.data, global_names[i], name.size) == 0)
      return true;
  }
  size_t at = 4;
  int64_t layer = 0;
  if (name.size < at || memcmp(name.data, "blk.", at) != 0) return false;
  for (; at < name.size && name.data[at] >= '0' && name.data[at] <= '9' && layer < INT32_MAX; at++)
    layer = layer * 10 + (name.data[at] - '0');
  if (layer >= m->hp.layers || at == name.size) return false;
  at++;
  const size_t names = have(m, sizeof layer_names / sizeof layer_names[0]);
  for (size_t i = 0; i < names; i++) {
    if (name.size - at == strlen(layer_names[i]) &&
        memcmp(name.data + at, layer_names[i], name.size - at) == 0)
      return true;
  }
  return false;
}

/* A tensor that we would leave out of the arithmetic makes the results wrong: refuse it. */
static pkv_status refuse_leftovers(binder *b) {
  const size_t count = pkv_gguf_tensor_count(b->m->gguf);
  char quoted[PKV_GGUF_QUOTE_BYTES];
  if (b->bound == count) return PKV_OK;
  for (size_t i = 0; i < count; i++) {
    const pkv_span name = pkv_gguf_tensor_at(b->m->gguf, i)->name;
    PKV_CHECK(b->err, is_known(b->m, name), PKV_E_UNSUPPORTED,
              "tensor %s is not part of a %s model of %d layers", pkv_gguf_quote(quoted, name),
              b->m->architecture, (int)b->m->hp.layers);
  }
  return PKV_FAIL(b->err, PKV_E_FORMAT, "%zu tensors in the file, %zu of them have a place", count,
                  b->bound);
}

/* The vocabulary's size is the embedding's; the key, where there is one, must agree. */
static pkv_status bind_embedding(binder *b) {
  pkv_hparams *hp = &b->m->hp;
  const pkv_gguf_tensor *t = pkv_gguf_find_tensor(b->m->gguf, "token_embd.weight");
  PKV_CHECK(b->err, t, PKV_E_FORMAT, "tensor token_embd.weight is missing");
  PKV_CHECK(b->err, t->extent[1] >= 1 && t->extent[1] <= INT32_MAX, PKV_E_FORMAT,
            "tensor token_embd.weight has %lld rows: a vocabulary has 1..%d",
            (long long)t->extent[1], INT32_MAX);
  if (hp->vocab == 0) hp->vocab = (int32_t)t->extent[1];
  return bind_matrix(&b->m->embed, b, "token_embd.weight", hp->width, hp->vocab);
}

pkv_status pkv_weights_bind(pkv_model *m, pkv_error *err) {
  binder b = {m, 0, err};
  const pkv_hparams *hp = &m->hp;
  PKV_TRY(bind_embedding(&b));
  PKV_TRY(bind_vector(&m->output_norm, &b, "output_norm.weight", true, hp->width));
  m->output = m->embed;
  if (pkv_gguf_find_tensor(m->gguf, "output.weight"))
    PKV_TRY(bind_matrix(&m->output, &b, "output.weight", hp->width, hp->vocab));
  PKV_TRY(bind_vector(&m->rope_freqs, &b, "rope_freqs.weight", false, hp->rope_dim / 2));
  for (int32_t i = 0; m->rope_freqs && i < hp->rope_dim / 2; i++) {
    PKV_CHECK(err, isfinite(m->rope_freqs[i]) && m->rope_freqs[i] > 0.0f, PKV_E_FORMAT,
              "rope_freqs.weight[%d] is %g: must be positive and finite", (int)i,
              (double)m->rope_freqs[i]);
  }
  /* Before a table is taken for them: the last layer of the count must be there. */
  char last[NAME_BYTES];
  (void)snprintf(last, sizeof last, "blk.%d.attn_norm.weight", (int)hp->layers - 1);
  PKV_CHECK(err, pkv_gguf_find_tensor(m->gguf, last), PKV_E_FORMAT,
            "tensor %s is missing (%s.block_count is %d)", last, m->architecture, (int)hp->layers);
  m->layers = pkv_alloc_zeroed(&m->allocator, (size_t)hp->layers, sizeof *m->layers);
  PKV_CHECK(err, m->layers, PKV_E_NOMEM, "no memory for %d layers", (int)hp->layers);
  for (int32_t i = 0; i < hp->layers; i++)
    PKV_TRY(bind_layer(&b, i));
  return refuse_leftovers(&b);
}

/* Whether float number `i` of a tensor is finite: an element, or a block's scale or minimum. */
static bool half_is_finite(const unsigned char *p) {
  return isfinite(pkv_f16_to_f32((uint16_t)(p[0] | p[1] << 8)));
}

static int64_t first_bad(const pkv_gguf_tensor *t, int64_t block_bytes) {
  const int64_t count = (int64_t)t->bytes / block_bytes;
  for (int64_t i = 0; i < count; i++) {
    const unsigned char *p = t->data + i * block_bytes;
    bool good = true;
    float f;
    switch (t->type) {
    case PKV_WTYPE_F32:
      memcpy(&f, p, sizeof f);
      good = isfinite(f);
      break;
    case PKV_WTYPE_BF16:
      good = isfinite(pkv_bf16_to_f32((uint16_t)(p[0] | p[1] << 8)));
      break;
    case PKV_WTYPE_Q6_K:
      good = half_is_finite(p + 208);
      break;
    case PKV_WTYPE_Q4_1:
    case PKV_WTYPE_Q5_1:
    case PKV_WTYPE_Q4_K:
    case PKV_WTYPE_Q5_K:
      good = half_is_finite(p) && half_is_finite(p + 2);
      break;
    default: /* F16, Q4_0, Q5_0, Q8_0: a half at the start */
      good = half_is_finite(p);
      break;
    }
    if (!good) return i;
  }
  return -1;
}

pkv_status pkv_weights_check(const pkv_model *m, pkv_error *err) {
  for (size_t i = 0; i < pkv_gguf_tensor_count(m->gguf); i++) {
    const pkv_gguf_tensor *t = pkv_gguf_tensor_at(m->gguf, i);
    const char *type = NULL;
    int64_t block = 1, block_bytes = 1;
    if (!pkv_gguf_type_info(t->type, &type, &block, &block_bytes)) continue;
    const int64_t bad = first_bad(t, block_bytes);
    PKV_CHECK(err, bad < 0, PKV_E_FORMAT, "tensor %.*s: %s %lld of type %s is not finite",
              (int)t->name.size, t->name.data, block == 1 ? "element" : "block", (long long)bad,
              type);
  }
  return PKV_OK;
}
