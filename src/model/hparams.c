/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hyper-parameters of the architectures llama, qwen2, qwen3 and gemma3; keys are written as llama's
 * below. One pass over all of them, before any use: a value out of its range is refused by key and
 * value, a value we would have to ignore is refused by name.
 */
#include "model/model_parts.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"

#define MAX_LAYERS 4096
#define MAX_WIDTH  (1 << 20)
#define MAX_FFN    (1 << 22)
#define MAX_HEADS  4096
/* Tables of a pass grow with the context: what a file may ask for by a number alone has an end. */
#define MAX_CONTEXT (1 << 22)
#define MAX_GROUP   32 /* query heads a KV head: what attention takes */

#define KEY_BYTES        96
#define WINDOW           "llama.attention.sliding_window"
#define LOCAL_LAYERS     "pkv.local_layers" /* of a folder: for each layer, whether it is local */
#define GEMMA_27B_LAYERS 62

/* A key of llama's as this model's architecture spells it. */
static const char *key_of(char text[KEY_BYTES], const pkv_model *m, const char *key) {
  (void)snprintf(text, KEY_BYTES, "%s%s", m->architecture, key + strlen("llama"));
  return text;
}

static pkv_status get_float(double *value, const pkv_model *m, const char *key, bool required,
                            double lo, double hi, pkv_error *err) {
  char text[KEY_BYTES];
  return pkv_gguf_get_float(value, m->gguf, key_of(text, m, key), required, lo, hi, err);
}

static pkv_status get_i32(int32_t *out, const pkv_model *m, const char *key, bool required,
                          int64_t lo, int64_t hi, pkv_error *err) {
  char text[KEY_BYTES];
  int64_t value = *out;
  PKV_TRY(pkv_gguf_get_int(&value, m->gguf, key_of(text, m, key), required, lo, hi, err));
  *out = (int32_t)value;
  return PKV_OK;
}

static pkv_status read_heads(pkv_model *m, pkv_error *err) {
  pkv_hparams *hp = &m->hp;
  PKV_TRY(get_i32(&hp->query_heads, m, "llama.attention.head_count", true, 1, MAX_HEADS, err));
  hp->kv_heads = hp->query_heads;
  PKV_TRY(get_i32(&hp->kv_heads, m, "llama.attention.head_count_kv", false, 1, MAX_HEADS, err));
  PKV_CHECK(err, hp->query_heads % hp->kv_heads == 0, PKV_E_FORMAT,
            "%s.attention.head_count is %d, not a multiple of "
            "%s.attention.head_count_kv, which is %d",
            m->architecture, (int)hp->query_heads, m->architecture, (int)hp->kv_heads);
  PKV_CHECK(err, hp->query_heads / hp->kv_heads <= MAX_GROUP, PKV_E_UNSUPPORTED,
            "%s.attention.head_count is %d for head_count_kv %d: at most %d query heads a KV "
            "head are supported",
            m->architecture, (int)hp->query_heads, (int)hp->kv_heads, MAX_GROUP);
  hp->head_dim = 0;
  PKV_TRY(get_i32(&hp->head_dim, m, "llama.attention.key_length", false, 1, MAX_WIDTH, err));
  if (hp->head_dim == 0) {
    PKV_CHECK(err, hp->width % hp->query_heads == 0, PKV_E_FORMAT,
              "%s.embedding_length is %d, not a multiple of %s.attention.head_count, which "
              "is %d",
              m->architecture, (int)hp->width, m->architecture, (int)hp->query_heads);
    hp->head_dim = hp->width / hp->query_heads;
  }
  PKV_CHECK(err, hp->head_dim % 8 == 0 && hp->head_dim <= 256, PKV_E_UNSUPPORTED,
            "head dimension is %d (%s.attention.key_length, or embedding_length / head_count): "
            "multiples of 8 up to 256 are supported",
            (int)hp->head_dim, m->architecture);
  int32_t value_dim = hp->head_dim;
  PKV_TRY(get_i32(&value_dim, m, "llama.attention.value_length", false, 1, MAX_WIDTH, err));
  PKV_CHECK(err, value_dim == hp->head_dim, PKV_E_UNSUPPORTED,
            "%s.attention.value_length is %d, other than the key length %d: not supported",
            m->architecture, (int)value_dim, (int)hp->head_dim);
  return PKV_OK;
}

static bool span_is(pkv_span s, const char *text) {
  return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0;
}

static pkv_status read_yarn(pkv_model *m, double factor, pkv_error *err) {
  int32_t original = m->hp.context;
  double extrapolate = 1.0;
  m->yarn = (pkv_yarn){factor, 0.0, 32.0, 1.0};
  PKV_TRY(get_i32(&original, m, "llama.rope.scaling.original_context_length", false, 1, MAX_CONTEXT,
                  err));
  PKV_TRY(get_float(&m->yarn.fast, m, "llama.rope.scaling.yarn_beta_fast", false, 1e-3, 1e6, err));
  PKV_TRY(get_float(&m->yarn.slow, m, "llama.rope.scaling.yarn_beta_slow", false, 1e-3, 1e6, err));
  PKV_TRY(get_float(&extrapolate, m, "llama.rope.scaling.yarn_ext_factor", false, -1e6, 1e6, err));
  PKV_CHECK(err, extrapolate == 1.0, PKV_E_UNSUPPORTED,
            "%s.rope.scaling.yarn_ext_factor is %g: only 1 is supported", m->architecture,
            extrapolate);
  m->yarn.original = (double)original;
  return PKV_OK;
}

static pkv_status read_rope_scaling(pkv_model *m, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES], key[KEY_BYTES];
  pkv_span type = {"", 0};
  double factor = 0.0;
  PKV_TRY(
      pkv_gguf_get_string(&type, m->gguf, key_of(key, m, "llama.rope.scaling.type"), false, err));
  PKV_TRY(get_float(&factor, m, "llama.rope.scale_linear", false, 1e-3, 1e6, err));
  const bool linear = span_is(type, "linear"), yarn = span_is(type, "yarn");
  PKV_TRY(get_float(&factor, m, "llama.rope.scaling.factor", (linear || yarn) && factor == 0.0,
                    1e-3, 1e6, err));
  m->rope_factor = 1.0f;
  if (yarn) return read_yarn(m, factor, err);
  if (type.size == 0 || linear) {
    if (factor > 0.0) m->rope_factor = (float)factor;
    return PKV_OK;
  }
  if (span_is(type, "none")) return PKV_OK;
  return PKV_FAIL(err, PKV_E_UNSUPPORTED,
                  "%s.rope.scaling.type is \"%s\": none, linear and yarn are supported (and "
                  "rope_freqs.weight)",
                  m->architecture, pkv_gguf_quote(quoted, type));
}

static pkv_status read_rope(pkv_model *m, pkv_error *err) {
  pkv_hparams *hp = &m->hp;
  /* Converters to GGUF reorder the rows of llama's q and k, and of no other family's. */
  hp->rope_pairs_adjacent = strcmp(m->architecture, "llama") == 0 && !pkv_gguf_is_folder(m->gguf);
  hp->rope_dim = hp->head_dim;
  PKV_TRY(get_i32(&hp->rope_dim, m, "llama.rope.dimension_count", false, 1, MAX_WIDTH, err));
  PKV_CHECK(err, hp->rope_dim % 2 == 0 && hp->rope_dim <= hp->head_dim, PKV_E_FORMAT,
            "%s.rope.dimension_count is %d: must be even and at most the head dimension %d",
            m->architecture, (int)hp->rope_dim, (int)hp->head_dim);
  double base = 10000.0;
  PKV_TRY(get_float(&base, m, "llama.rope.freq_base", false, 1.0, 1e12, err));
  hp->rope_base = (float)base;
  return read_rope_scaling(m, err);
}

/* Keys that would change the arithmetic; the llama family has them at these values only. */
static pkv_status refuse_unknown_arithmetic(const pkv_model *m, pkv_error *err) {
  static const struct {
    const char *key;
    double neutral;
  } keys[] = {{"llama.expert_count", 0},
              {"llama.expert_used_count", 0},
              {"llama.logit_scale", 1},
              {"llama.residual_scale", 1},
              {"llama.embedding_scale", 1},
              {"llama.attention.clamp_kqv", 0},
              {"llama.attention.max_alibi_bias", 0},
              {WINDOW, 0},
              {"llama.attn_logit_softcapping", 0},
              {"llama.final_logit_softcapping", 0},
              {"llama.rope.scaling.attn_factor", 1},
              {"llama.rope.scaling.yarn_attn_factor", 1}};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    char key[KEY_BYTES];
    const pkv_gguf_value *v = pkv_gguf_find(m->gguf, key_of(key, m, keys[i].key));
    double value = keys[i].neutral;
    if (!v || (m->hp.window > 0 && strcmp(keys[i].key, WINDOW) == 0)) continue;
    if (v->type == PKV_GGUF_F32 || v->type == PKV_GGUF_F64) {
      PKV_TRY(pkv_gguf_get_float(&value, m->gguf, key, false, -1e30, 1e30, err));
    } else {
      int64_t whole = 0;
      PKV_TRY(pkv_gguf_get_int(&whole, m->gguf, key, false, INT32_MIN, UINT32_MAX, err));
      value = (double)whole;
    }
    PKV_CHECK(err, value == keys[i].neutral, PKV_E_UNSUPPORTED,
              "%s is %g: only %g (or no such key) is supported", key, value, keys[i].neutral);
  }
  return PKV_OK;
}

bool pkv_hparams_is_local(const pkv_model *m, int32_t layer) {
  if (m->hp.window == 0) return false;
  const pkv_gguf_value *list =
      pkv_gguf_is_folder(m->gguf) ? pkv_gguf_find(m->gguf, LOCAL_LAYERS) : NULL;
  if (list)
    return (uint64_t)layer < list->count && pkv_gguf_element_int(list, (uint64_t)layer) != 0;
  return m->global_every == 0 || (layer + 1) % m->global_every != 0;
}

/*
 * Which layers look back over a window only: of gemma3 five of six, with a base of their own; of a
 * llama file that has a window (Mistral's) all.
 */
static pkv_status read_windows(pkv_model *m, pkv_error *err) {
  const bool llama = strcmp(m->architecture, "llama") == 0;
  double base = 10000.0;
  if (!m->gemma && !llama && !pkv_gguf_is_folder(m->gguf)) return PKV_OK; /* refused if there */
  PKV_TRY(get_i32(&m->hp.window, m, WINDOW, m->gemma, m->gemma ? 1 : 0, INT32_MAX, err));
  if (!m->gemma) return PKV_OK;
  m->global_every = 6;
  PKV_TRY(get_i32(&m->global_every, m, "llama.attention.sliding_window_pattern", false, 1,
                  MAX_LAYERS, err));
  PKV_TRY(get_float(&base, m, "llama.rope.freq_base_swa", false, 1.0, 1e12, err));
  m->local_base = (float)base;
  return PKV_OK;
}

/* gemma3: the embedding is scaled, and so is attention in the largest model. */
static void set_gemma(pkv_model *m) {
  const pkv_hparams *hp = &m->hp;
  if (!m->gemma) return;
  m->embed_scale = sqrtf((float)hp->width);
  m->norm_plus_one = pkv_gguf_is_folder(m->gguf);
  if (m->attn_scale == 0.0f && hp->layers == GEMMA_27B_LAYERS)
    m->attn_scale = 1.0f / sqrtf((float)hp->width / (float)hp->query_heads);
}

static void copy_span(char *to, size_t size, pkv_span from) {
  const size_t n = from.size < size - 1 ? from.size : size - 1;
  memcpy(to, from.data, n);
  to[n] = '\0';
}

pkv_status pkv_hparams_read(pkv_model *m, pkv_error *err) {
  pkv_hparams *hp = &m->hp;
  char quoted[PKV_GGUF_QUOTE_BYTES];
  pkv_span architecture = {"", 0}, name = {"", 0};
  PKV_TRY(pkv_gguf_get_string(&architecture, m->gguf, "general.architecture", true, err));
  m->gemma = span_is(architecture, "gemma3");
  m->head_norms = m->gemma || span_is(architecture, "qwen3");
  PKV_CHECK(err, m->head_norms || span_is(architecture, "llama") || span_is(architecture, "qwen2"),
            PKV_E_UNSUPPORTED,
            "general.architecture is \"%s\": llama, qwen2, qwen3 and gemma3 are supported",
            pkv_gguf_quote(quoted, architecture));
  PKV_TRY(pkv_gguf_get_string(&name, m->gguf, "general.name", false, err));
  copy_span(m->architecture, sizeof m->architecture, architecture);
  copy_span(m->name, sizeof m->name, name);

  PKV_TRY(get_i32(&hp->layers, m, "llama.block_count", true, 1, MAX_LAYERS, err));
  PKV_TRY(get_i32(&hp->width, m, "llama.embedding_length", true, 1, MAX_WIDTH, err));
  PKV_TRY(get_i32(&hp->feed_forward, m, "llama.feed_forward_length", true, 1, MAX_FFN, err));
  PKV_TRY(get_i32(&hp->context, m, "llama.context_length", true, 1, MAX_CONTEXT, err));
  PKV_TRY(get_i32(&hp->vocab, m, "llama.vocab_size", false, 1, INT32_MAX, err));
  PKV_TRY(read_heads(m, err));
  PKV_TRY(read_rope(m, err));
  double eps = 0.0;
  PKV_TRY(get_float(&eps, m, "llama.attention.layer_norm_rms_epsilon", true, 1e-12, 1.0, err));
  hp->norm_eps = (float)eps;
  double scale = 0.0;
  PKV_TRY(get_float(&scale, m, "llama.attention.scale", false, 0.0, 1e6, err));
  m->attn_scale = (float)scale;
  m->embed_scale = 1.0f;
  PKV_TRY(read_windows(m, err));
  set_gemma(m);
  for (int32_t i = 0; i < hp->layers; i++)
    hp->local_layers += pkv_hparams_is_local(m, i) ? 1 : 0;
  return refuse_unknown_arithmetic(m, err);
}
