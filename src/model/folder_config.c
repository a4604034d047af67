/* SPDX-License-Identifier: Apache-2.0 */
/* config.json and generation_config.json as GGUF's keys. Ranges are checked where the keys are
   read; here only what is needed to translate them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/folder_parts.h"

#define CONFIG     "config.json"
#define GENERATION "generation_config.json"
#define MAX_LAYERS 4096
#define MAX_ENDS   16

typedef enum family { LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3 } family;

typedef struct reader {
  pkv_folder_config *out;
  pkv_meta *meta;
  const json_t *config;
  family family;
  int64_t head_dim, context;
  pkv_error *err;
} reader;

static void key_of(char text[96], const reader *r, const char *key) {
  (void)snprintf(text, 96, "%s.%s", r->out->architecture, key);
}

static void write_int(reader *r, const char *key, int64_t value) {
  char text[96];
  key_of(text, r, key);
  pkv_meta_int(r->meta, text, value);
}

static void write_float(reader *r, const char *key, double value) {
  char text[96];
  key_of(text, r, key);
  pkv_meta_float(r->meta, text, value);
}

static pkv_status choose_family(reader *r) {
  static const struct {
    const char *type, *architecture;
    family family;
  } known[] = {{"llama", "llama", LLAMA},
               {"mistral", "llama", MISTRAL},
               {"qwen2", "qwen2", QWEN2},
               {"qwen3", "qwen3", QWEN3},
               {"gemma3_text", "gemma3", GEMMA3}};
  char quoted[PKV_GGUF_QUOTE_BYTES];
  pkv_span type = {"", 0};
  PKV_TRY(pkv_json_get_string(&type, r->config, CONFIG, "model_type", true, r->err));
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (!pkv_json_says(r->config, "model_type", known[i].type)) continue;
    r->family = known[i].family;
    r->out->architecture = known[i].architecture;
    r->out->gemma = r->family == GEMMA3;
    return PKV_OK;
  }
  return PKV_FAIL(r->err, PKV_E_UNSUPPORTED,
                  CONFIG ": model_type is \"%s\"; supported: llama, mistral, qwen2, qwen3, "
                         "gemma3_text",
                  pkv_gguf_quote(quoted, type));
}

/* What would change the arithmetic: absent, or at the one value that does not. */
static pkv_status refuse_unknown(const reader *r) {
  static const struct {
    const char *key;
    double neutral;
  } numbers[] = {{"num_experts", 0},
                 {"num_local_experts", 0},
                 {"attn_logit_softcapping", 0},
                 {"final_logit_softcapping", 0},
                 {"partial_rotary_factor", 1},
                 {"embedding_multiplier", 1},
                 {"residual_multiplier", 1},
                 {"logits_scaling", 1}};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
    double value = numbers[i].neutral;
    PKV_TRY(
        pkv_json_get_float(&value, r->config, CONFIG, numbers[i].key, false, -1e30, 1e30, r->err));
    PKV_CHECK(r->err, value == numbers[i].neutral, PKV_E_UNSUPPORTED,
              CONFIG ": \"%s\" is %g: only %g (or none) is supported", numbers[i].key, value,
              numbers[i].neutral);
  }
  bool bidirectional = false;
  PKV_TRY(
      pkv_json_get_bool(&bidirectional, r->config, CONFIG, "use_bidirectional_attention", r->err));
  PKV_CHECK(r->err, !bidirectional, PKV_E_UNSUPPORTED,
            CONFIG ": \"use_bidirectional_attention\" is not supported");
  PKV_CHECK(r->err, !pkv_json_get(r->config, "quantization_config"), PKV_E_UNSUPPORTED,
            CONFIG
            ": \"quantization_config\": quantised folders are not supported, GGUF files are");
  const char *name = r->family == GEMMA3 ? "hidden_activation" : "hidden_act";
  const char *want = r->family == GEMMA3 ? "gelu_pytorch_tanh" : "silu";
  PKV_CHECK(r->err, !pkv_json_get(r->config, name) || pkv_json_says(r->config, name, want),
            PKV_E_UNSUPPORTED, CONFIG ": \"%s\" is not \"%s\"", name, want);
  return PKV_OK;
}

static pkv_status copy_int(reader *r, int64_t *value, const char *name, bool required,
                           const char *key) {
  PKV_TRY(pkv_json_get_int(value, r->config, CONFIG, name, required, 0, INT32_MAX, r->err));
  write_int(r, key, *value);
  return PKV_OK;
}

static pkv_status read_sizes(reader *r) {
  int64_t layers = 0, width = 0, ffn = 0, heads = 0, vocab = 0;
  r->context = 2048;
  PKV_TRY(copy_int(r, &layers, "num_hidden_layers", true, "block_count"));
  PKV_TRY(copy_int(r, &width, "hidden_size", true, "embedding_length"));
  PKV_TRY(copy_int(r, &ffn, "intermediate_size", true, "feed_forward_length"));
  PKV_TRY(copy_int(r, &heads, "num_attention_heads", true, "attention.head_count"));
  PKV_TRY(copy_int(r, &vocab, "vocab_size", true, "vocab_size"));
  PKV_TRY(
      copy_int(r, &r->context, "max_position_embeddings", r->family != LLAMA, "context_length"));
  int64_t kv_heads = heads;
  PKV_TRY(
      copy_int(r, &kv_heads, "num_key_value_heads", r->family != LLAMA, "attention.head_count_kv"));
  PKV_CHECK(r->err, layers >= 1 && layers <= MAX_LAYERS, PKV_E_FORMAT,
            CONFIG ": \"num_hidden_layers\" is %lld, not 1 .. %d", (long long)layers, MAX_LAYERS);
  PKV_CHECK(r->err, heads >= 1 && width >= 1, PKV_E_FORMAT,
            CONFIG ": \"num_attention_heads\" is %lld, \"hidden_size\" %lld", (long long)heads,
            (long long)width);
  /* The families whose heads are not the width's share unless the file says so. */
  r->head_dim = r->family == GEMMA3 ? 256 : r->family == QWEN3 ? 128 : width / heads;
  PKV_TRY(copy_int(r, &r->head_dim, "head_dim", false, "attention.key_length"));
  PKV_CHECK(r->err, r->head_dim >= 1, PKV_E_FORMAT, CONFIG ": \"head_dim\" is 0");
  double eps = 1e-6;
  PKV_TRY(pkv_json_get_float(&eps, r->config, CONFIG, "rms_norm_eps", false, 0.0, 1.0, r->err));
  write_float(r, "attention.layer_norm_rms_epsilon", eps);
  r->out->layers = (int32_t)layers;
  r->out->vocab = (int32_t)vocab;
  return PKV_OK;
}

/* ---- rotations ---- */

/* Low frequencies turn `factor` times slower, high ones as ever, those between by degrees. */
static pkv_status read_llama3(reader *r, const json_t *scaling, double base) {
  double factor = 0, low = 0, high = 0, original = 0;
  PKV_TRY(pkv_json_get_float(&factor, scaling, "rope_scaling", "factor", true, 1.0, 1e6, r->err));
  PKV_TRY(pkv_json_get_float(&low, scaling, "rope_scaling", "low_freq_factor", true, 1e-3, 1e6,
                             r->err));
  PKV_TRY(pkv_json_get_float(&high, scaling, "rope_scaling", "high_freq_factor", true, 1e-3, 1e6,
                             r->err));
  PKV_TRY(pkv_json_get_float(&original, scaling, "rope_scaling", "original_max_position_embeddings",
                             true, 1.0, 1e9, r->err));
  PKV_CHECK(r->err, low < high, PKV_E_FORMAT,
            "rope_scaling: low_freq_factor %g is not less than high_freq_factor %g", low, high);
  const int64_t half = r->head_dim / 2;
  PKV_CHECK(r->err, half >= 1 && half <= PKV_FOLDER_FACTORS, PKV_E_UNSUPPORTED,
            "rope_scaling: heads of %lld are not supported", (long long)r->head_dim);
  r->out->factors = (int32_t)half;
  for (int64_t i = 0; i < half; i++) {
    const double wave =
        2.0 * 3.14159265358979323846 * pow(base, 2.0 * (double)i / (double)r->head_dim);
    double divide = 1.0;
    if (wave > original / low) {
      divide = factor;
    } else if (wave >= original / high) {
      const double smooth = (original / wave - low) / (high - low);
      divide = 1.0 / ((1.0 - smooth) / factor + smooth);
    }
    r->out->factor[i] = (float)divide;
  }
  return PKV_OK;
}

static pkv_status read_yarn(reader *r, const json_t *scaling) {
  double original = (double)r->context, fast = 32.0, slow = 1.0;
  bool truncate = true;
  char key[96];
  PKV_CHECK(r->err,
            !pkv_json_get(scaling, "attention_factor") && !pkv_json_get(scaling, "mscale") &&
                !pkv_json_get(scaling, "mscale_all_dim"),
            PKV_E_UNSUPPORTED, "rope_scaling: attention_factor and mscale are not supported");
  PKV_TRY(pkv_json_get_bool(&truncate, scaling, "rope_scaling", "truncate", r->err));
  PKV_CHECK(r->err, truncate, PKV_E_UNSUPPORTED, "rope_scaling: truncate is false");
  PKV_TRY(pkv_json_get_float(&original, scaling, "rope_scaling", "original_max_position_embeddings",
                             false, 1.0, 1e9, r->err));
  PKV_TRY(
      pkv_json_get_float(&fast, scaling, "rope_scaling", "beta_fast", false, 1e-3, 1e6, r->err));
  PKV_TRY(
      pkv_json_get_float(&slow, scaling, "rope_scaling", "beta_slow", false, 1e-3, 1e6, r->err));
  key_of(key, r, "rope.scaling.type");
  pkv_meta_text(r->meta, key, "yarn");
  write_int(r, "rope.scaling.original_context_length", (int64_t)original);
  write_float(r, "rope.scaling.yarn_beta_fast", fast);
  write_float(r, "rope.scaling.yarn_beta_slow", slow);
  return PKV_OK;
}

static pkv_status read_scaling(reader *r, const json_t *scaling, double base) {
  char quoted[PKV_GGUF_QUOTE_BYTES], key[96];
  /* Older files say "type". */
  const char *name = pkv_json_get(scaling, "rope_type") ? "rope_type" : "type";
  pkv_span type = {"default", 7};
  double factor = 1.0;
  PKV_TRY(pkv_json_get_string(&type, scaling, "rope_scaling", name, false, r->err));
  if (strcmp(type.data, "default") == 0) return PKV_OK;
  if (strcmp(type.data, "llama3") == 0) return read_llama3(r, scaling, base);
  const bool yarn = strcmp(type.data, "yarn") == 0;
  PKV_CHECK(r->err, yarn || strcmp(type.data, "linear") == 0, PKV_E_UNSUPPORTED,
            CONFIG ": rope_scaling.%s is \"%s\"; supported: default, linear, llama3, yarn", name,
            pkv_gguf_quote(quoted, type));
  PKV_TRY(pkv_json_get_float(&factor, scaling, "rope_scaling", "factor", true, 1e-3, 1e6, r->err));
  write_float(r, "rope.scaling.factor", factor);
  if (yarn) return read_yarn(r, scaling);
  key_of(key, r, "rope.scaling.type");
  pkv_meta_text(r->meta, key, "linear");
  return PKV_OK;
}

static pkv_status read_rope(reader *r) {
  double base = r->family == GEMMA3 ? 1e6 : 1e4, local = 1e4;
  /* Newer files gather all of it in rope_parameters, by kind of layer where there are two. */
  const json_t *parameters = pkv_json_get(r->config, "rope_parameters"), *global = parameters;
  PKV_CHECK(r->err, !parameters || json_is_object(parameters), PKV_E_FORMAT,
            CONFIG ": \"rope_parameters\" is not an object");
  if (parameters && pkv_json_get(parameters, "full_attention")) {
    global = pkv_json_get(parameters, "full_attention");
    const json_t *sliding = pkv_json_get(parameters, "sliding_attention");
    if (sliding) {
      PKV_CHECK(r->err,
                json_is_object(sliding) && (!pkv_json_get(sliding, "rope_type") ||
                                            pkv_json_says(sliding, "rope_type", "default")),
                PKV_E_UNSUPPORTED, CONFIG ": rope_parameters.sliding_attention is scaled");
      PKV_TRY(pkv_json_get_float(&local, sliding, "rope_parameters.sliding_attention", "rope_theta",
                                 false, 1.0, 1e12, r->err));
    }
  }
  PKV_TRY(pkv_json_get_float(&base, r->config, CONFIG, "rope_theta", false, 1.0, 1e12, r->err));
  if (global)
    PKV_TRY(pkv_json_get_float(&base, global, "rope_parameters", "rope_theta", false, 1.0, 1e12,
                               r->err));
  PKV_TRY(pkv_json_get_float(&local, r->config, CONFIG, "rope_local_base_freq", false, 1.0, 1e12,
                             r->err));
  write_float(r, "rope.freq_base", base);
  if (r->family == GEMMA3) write_float(r, "rope.freq_base_swa", local);
  const json_t *scaling = pkv_json_get(r->config, "rope_scaling");
  if (!scaling) scaling = global;
  PKV_CHECK(r->err, !scaling || json_is_object(scaling), PKV_E_FORMAT,
            CONFIG ": \"rope_scaling\" is not an object");
  return scaling ? read_scaling(r, scaling, base) : PKV_OK;
}

/* ---- windows ---- */

static pkv_status is_local(bool *local, const reader *r, const json_t *types, int64_t every,
                           int64_t from, size_t layer) {
  if (!types) {
    *local = r->family == GEMMA3 ? (int64_t)(layer + 1) % every != 0 : (int64_t)layer >= from;
    return PKV_OK;
  }
  const json_t *type = json_array_get(types, layer);
  const char *text = json_is_string(type) ? json_string_value(type) : "";
  *local = strcmp(text, "sliding_attention") == 0;
  PKV_CHECK(r->err, *local || strcmp(text, "full_attention") == 0, PKV_E_UNSUPPORTED,
            CONFIG ": layer_types[%zu] is neither full_attention nor sliding_attention", layer);
  return PKV_OK;
}

static pkv_status read_windows(reader *r) {
  const bool qwen = r->family == QWEN2 || r->family == QWEN3;
  int64_t window = 0, every = 6, from = qwen ? 28 : 0;
  bool used = false;
  PKV_TRY(pkv_json_get_bool(&used, r->config, CONFIG, "use_sliding_window", r->err));
  if (r->family == LLAMA || (qwen && !used)) return PKV_OK;
  PKV_TRY(pkv_json_get_int(&window, r->config, CONFIG, "sliding_window", r->family == GEMMA3, 1,
                           INT32_MAX, r->err));
  if (window == 0) return PKV_OK;
  PKV_TRY(pkv_json_get_int(&every, r->config, CONFIG, "sliding_window_pattern", false, 1,
                           MAX_LAYERS, r->err));
  PKV_TRY(
      pkv_json_get_int(&from, r->config, CONFIG, "max_window_layers", false, 0, INT32_MAX, r->err));
  const json_t *types = pkv_json_get(r->config, "layer_types");
  const size_t layers = (size_t)r->out->layers;
  PKV_CHECK(r->err, !types || (json_is_array(types) && json_array_size(types) == layers),
            PKV_E_FORMAT, CONFIG ": \"layer_types\" is not a list of %zu", layers);
  write_int(r, "attention.sliding_window", window);
  pkv_meta_array(r->meta, "pkv.local_layers", PKV_GGUF_BOOL, layers);
  for (size_t i = 0; i < layers; i++) {
    bool local = true;
    if (r->family != MISTRAL || types) PKV_TRY(is_local(&local, r, types, every, from, i));
    pkv_meta_add_bool(r->meta, local);
  }
  return PKV_OK;
}

/* ---- ids ---- */

static pkv_status read_ends(int32_t *ids, size_t *count, const json_t *object, const char *file,
                            pkv_error *err) {
  const json_t *value = pkv_json_get(object, "eos_token_id");
  if (!value) return PKV_OK;
  const size_t n = json_is_array(value) ? json_array_size(value) : 1;
  for (size_t i = 0; i < n && *count < MAX_ENDS; i++) {
    const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
    PKV_CHECK(err,
              json_is_integer(id) && json_integer_value(id) >= 0 &&
                  json_integer_value(id) <= INT32_MAX,
              PKV_E_FORMAT, "%s: \"eos_token_id\" is no token, or list of tokens", file);
    ids[(*count)++] = (int32_t)json_integer_value(id);
  }
  return PKV_OK;
}

static pkv_status read_ids(reader *r, const json_t *generation) {
  int32_t ends[2 * MAX_ENDS];
  size_t count = 0;
  int64_t bos = -1;
  PKV_TRY(pkv_json_get_int(&bos, r->config, CONFIG, "bos_token_id", false, 0, INT32_MAX, r->err));
  if (generation) {
    PKV_TRY(read_ends(ends, &count, generation, GENERATION, r->err));
    PKV_TRY(pkv_json_get_int(&bos, generation, GENERATION, "bos_token_id", false, 0, INT32_MAX,
                             r->err));
  }
  PKV_TRY(read_ends(ends, &count, r->config, CONFIG, r->err));
  if (bos >= 0) pkv_meta_int(r->meta, "pkv.bos_token_id", bos);
  pkv_meta_array(r->meta, "pkv.end_token_ids", PKV_GGUF_I32, count);
  for (size_t i = 0; i < count; i++)
    pkv_meta_add_i32(r->meta, ends[i]);
  return PKV_OK;
}

pkv_status pkv_folder_read_config(pkv_folder_config *out, pkv_meta *meta, const json_t *config,
                                  const json_t *generation, pkv_error *err) {
  reader r = {.out = out, .meta = meta, .config = config, .err = err};
  PKV_TRY(choose_family(&r));
  pkv_meta_text(meta, "general.architecture", out->architecture);
  PKV_TRY(refuse_unknown(&r));
  PKV_TRY(read_sizes(&r));
  PKV_TRY(read_rope(&r));
  PKV_TRY(read_windows(&r));
  out->tied = out->gemma;
  PKV_TRY(pkv_json_get_bool(&out->tied, config, CONFIG, "tie_word_embeddings", err));
  if (out->gemma) {
    double scalar = 256.0;
    PKV_TRY(pkv_json_get_float(&scalar, config, CONFIG, "query_pre_attn_scalar", false, 1e-3, 1e6,
                               err));
    write_float(&r, "attention.scale", 1.0 / sqrt(scalar));
  }
  return read_ids(&r, generation);
}
