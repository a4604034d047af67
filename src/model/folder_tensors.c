/* SPDX-License-Identifier: Apache-2.0 */
/* The weight files of a folder, and what their tensors are called in a GGUF file. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "model/folder_parts.h"
#include "model/gguf_parts.h"

#define SINGLE     "model.safetensors"
#define INDEX      "model.safetensors.index.json"
#define MAX_INDEX  ((size_t)64 << 20)
#define MAX_FILES  1024
#define MAX_NAME   255
#define NAME_BYTES 64

typedef struct folder_files {
  pkv_gguf *g;
  const char *path;
  const pkv_folder_config *config;
  const json_t *map;            /* weight_map, NULL: one file */
  const char *names[MAX_FILES]; /* borrowed from the map, or SINGLE */
  size_t count;
  pkv_error *err;
} folder_files;

/* ---- files ---- */

static pkv_status open_file(folder_files *f, size_t i) {
  char path[PATH_MAX];
  pkv_error inner = {0};
  const int n = snprintf(path, sizeof path, "%s/%s", f->path, f->names[i]);
  PKV_CHECK(f->err, n > 0 && (size_t)n < sizeof path, PKV_E_LIMIT, "the folder's name is too long");
  const pkv_status status =
      pkv_safetensors_open(&f->g->tensor_files[i], path, &f->g->allocator, &inner);
  PKV_CHECK(f->err, status == PKV_OK, status, "%.48s: %.140s", f->names[i], inner.text);
  return PKV_OK;
}

/* Only a name inside the folder: no way out of it, nothing hidden. */
static bool is_plain_name(const char *name) {
  const size_t n = strlen(name), end = strlen(".safetensors");
  return n > end && n <= MAX_NAME && strcmp(name + n - end, ".safetensors") == 0 &&
         name[0] != '.' && strchr(name, '/') == NULL && strchr(name, '\\') == NULL;
}

static pkv_status add_name(folder_files *f, const json_t *value) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  PKV_CHECK(f->err, json_is_string(value), PKV_E_FORMAT, INDEX ": weight_map holds no file name");
  const char *name = json_string_value(value);
  const pkv_span span = {name, json_string_length(value)};
  PKV_CHECK(f->err, strlen(name) == span.size && is_plain_name(name), PKV_E_FORMAT,
            INDEX ": \"%s\" is not the name of a .safetensors file in this folder",
            pkv_gguf_quote(quoted, span));
  for (size_t i = f->count; i > 0; i--) {
    if (strcmp(f->names[i - 1], name) == 0) return PKV_OK;
  }
  PKV_CHECK(f->err, f->count < MAX_FILES, PKV_E_LIMIT, INDEX " names more than %d files",
            MAX_FILES);
  f->names[f->count++] = name;
  return PKV_OK;
}

static pkv_status read_index(folder_files *f, const json_t *index) {
  f->map = index ? pkv_json_get(index, "weight_map") : NULL;
  if (!index) {
    f->names[f->count++] = SINGLE;
    return PKV_OK;
  }
  PKV_CHECK(f->err, json_is_object(f->map) && json_object_size(f->map) > 0, PKV_E_FORMAT,
            INDEX ": \"weight_map\" is missing, empty or no object");
  json_t *map = (json_t *)(uintptr_t)f->map;
  for (void *at = json_object_iter(map); at != NULL; at = json_object_iter_next(map, at))
    PKV_TRY(add_name(f, json_object_iter_value(at)));
  return PKV_OK;
}

/* Each file holds what the index says of it, and the index knows all that the files hold. */
static pkv_status check_index(const folder_files *f, size_t total) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  if (!f->map) return PKV_OK;
  for (size_t i = 0; i < f->count; i++) {
    const pkv_safetensors *file = f->g->tensor_files[i];
    for (size_t k = 0; k < pkv_safetensors_count(file); k++) {
      const pkv_span name = pkv_safetensors_at(file, k)->name;
      PKV_CHECK(f->err, pkv_json_says(f->map, name.data, f->names[i]), PKV_E_FORMAT,
                "tensor \"%s\" is in %.48s, which " INDEX " does not say",
                pkv_gguf_quote(quoted, name), f->names[i]);
    }
  }
  PKV_CHECK(f->err, total == json_object_size(f->map), PKV_E_FORMAT,
            INDEX " names %zu tensors, the files have %zu", json_object_size(f->map), total);
  return PKV_OK;
}

static pkv_status open_files(size_t *total, folder_files *f) {
  pkv_gguf *g = f->g;
  g->tensor_files = pkv_alloc_zeroed(&g->allocator, f->count, sizeof *g->tensor_files);
  PKV_CHECK(f->err, g->tensor_files, PKV_E_NOMEM, "no memory for %zu files", f->count);
  g->tensor_file_count = f->count;
  g->size = 0;
  *total = 0;
  for (size_t i = 0; i < f->count; i++) {
    PKV_TRY(open_file(f, i));
    *total += pkv_safetensors_count(g->tensor_files[i]);
    g->size += pkv_safetensors_file_bytes(g->tensor_files[i]);
  }
  PKV_CHECK(f->err, *total <= PKV_SAFETENSORS_MAX_TENSORS, PKV_E_LIMIT,
            "%zu tensors, at most %u are supported", *total, PKV_SAFETENSORS_MAX_TENSORS);
  return check_index(f, *total);
}

/* ---- names ---- */

/* What stands behind "model.layers.7." and what a GGUF file says for it. */
static const char *layer_name(const char *name, bool gemma) {
  static const struct {
    const char *from, *to, *gemma; /* gemma NULL: as others */
  } names[] = {{"input_layernorm.weight", "attn_norm.weight", NULL},
               {"self_attn.q_proj.weight", "attn_q.weight", NULL},
               {"self_attn.k_proj.weight", "attn_k.weight", NULL},
               {"self_attn.v_proj.weight", "attn_v.weight", NULL},
               {"self_attn.o_proj.weight", "attn_output.weight", NULL},
               {"self_attn.q_proj.bias", "attn_q.bias", NULL},
               {"self_attn.k_proj.bias", "attn_k.bias", NULL},
               {"self_attn.v_proj.bias", "attn_v.bias", NULL},
               {"self_attn.o_proj.bias", "attn_output.bias", NULL},
               {"self_attn.q_norm.weight", "attn_q_norm.weight", NULL},
               {"self_attn.k_norm.weight", "attn_k_norm.weight", NULL},
               {"mlp.gate_proj.weight", "ffn_gate.weight", NULL},
               {"mlp.up_proj.weight", "ffn_up.weight", NULL},
               {"mlp.down_proj.weight", "ffn_down.weight", NULL},
               {"post_attention_layernorm.weight", "ffn_norm.weight", "post_attention_norm.weight"},
               {"pre_feedforward_layernorm.weight", NULL, "ffn_norm.weight"},
               {"post_feedforward_layernorm.weight", NULL, "post_ffw_norm.weight"}};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(name, names[i].from) != 0) continue;
    return gemma && names[i].gemma ? names[i].gemma : names[i].to;
  }
  return NULL;
}

/* GGUF's name into text. A name that has none is kept, and refused when the model is bound. */
static pkv_span map_name(char text[NAME_BYTES], pkv_span name, const pkv_folder_config *config) {
  static const char *const whole[][2] = {{"model.embed_tokens.weight", "token_embd.weight"},
                                         {"model.norm.weight", "output_norm.weight"},
                                         {"lm_head.weight", "output.weight"}};
  static const char prefix[] = "model.layers.";
  const char *at = name.data + sizeof prefix - 1;
  int32_t layer = 0;
  for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
    if (strcmp(name.data, whole[i][0]) == 0) return (pkv_span){whole[i][1], strlen(whole[i][1])};
  }
  if (strncmp(name.data, prefix, sizeof prefix - 1) != 0 || *at < '0' || *at > '9') return name;
  const bool canonical = at[0] != '0' || at[1] == '.';
  for (; *at >= '0' && *at <= '9' && layer < INT32_MAX / 16; at++)
    layer = layer * 10 + (*at - '0');
  const char *to = *at == '.' && canonical ? layer_name(at + 1, config->gemma) : NULL;
  if (!to) return name;
  const int n = snprintf(text, NAME_BYTES, "blk.%d.%s", (int)layer, to);
  return (pkv_span){text, (size_t)n};
}

/* Left out: the second copy of tied weights, and a table that older files carry. */
static bool is_left_out(pkv_span name, const pkv_folder_config *config) {
  static const char inverse[] = ".rotary_emb.inv_freq";
  if (config->tied && strcmp(name.data, "lm_head.weight") == 0) return true;
  return name.size > sizeof inverse &&
         strcmp(name.data + name.size - (sizeof inverse - 1), inverse) == 0;
}

/* ---- the table ---- */

static pkv_status take_table(folder_files *f, size_t total, char **names, float **factors) {
  pkv_gguf *g = f->g;
  const size_t bytes = sizeof f->config->factor + total * NAME_BYTES; /* 65,536 tensors at most */
  g->tensors = pkv_alloc_zeroed(&g->allocator, total, sizeof *g->tensors);
  g->tensor_order = pkv_alloc_zeroed(&g->allocator, total, sizeof *g->tensor_order);
  g->tensor_room = total;
  g->extra = pkv_alloc(&g->allocator, bytes);
  g->extra_bytes = bytes;
  PKV_CHECK(f->err, g->tensors && g->tensor_order && g->extra, PKV_E_NOMEM,
            "no memory for %zu tensors", total);
  *factors = g->extra;
  *names = (char *)g->extra + sizeof f->config->factor;
  return PKV_OK;
}

static void add_factors(pkv_gguf_tensor *t, const pkv_folder_config *config, float *factors) {
  static const char name[] = "rope_freqs.weight";
  memcpy(factors, config->factor, sizeof config->factor);
  *t = (pkv_gguf_tensor){.name = {name, sizeof name - 1},
                         .type = PKV_WTYPE_F32,
                         .dims = 1,
                         .extent = {config->factors, 1, 1, 1},
                         .data = (const unsigned char *)factors,
                         .bytes = (size_t)config->factors * sizeof *factors};
}

static pkv_status fill_table(folder_files *f, size_t total) {
  pkv_gguf *g = f->g;
  char *names = NULL;
  float *factors = NULL;
  size_t count = 0;
  bool head = false;
  PKV_TRY(take_table(f, total + 1, &names, &factors));
  for (size_t i = 0; i < f->count; i++) {
    for (size_t k = 0; k < pkv_safetensors_count(g->tensor_files[i]); k++) {
      const pkv_gguf_tensor *from = pkv_safetensors_at(g->tensor_files[i], k);
      head = head || strcmp(from->name.data, "lm_head.weight") == 0;
      if (is_left_out(from->name, f->config)) continue;
      pkv_gguf_tensor *t = &g->tensors[count];
      *t = *from;
      t->name = map_name(names + count * NAME_BYTES, from->name, f->config);
      count++;
    }
  }
  PKV_CHECK(f->err, head || f->config->tied, PKV_E_FORMAT,
            "tensor lm_head.weight is missing (tie_word_embeddings is false)");
  if (f->config->factors > 0) add_factors(&g->tensors[count++], f->config, factors);
  g->tensor_count = count;
  return pkv_gguf_sort_tensors(g, f->err);
}

pkv_status pkv_folder_bind(pkv_gguf *g, const char *path, const pkv_folder_config *config,
                           pkv_error *err) {
  folder_files f = {.g = g, .path = path, .config = config, .err = err};
  json_t *index = NULL;
  size_t total = 0;
  PKV_TRY(pkv_json_read(&index, path, INDEX, false, MAX_INDEX, &g->allocator, err));
  pkv_status status = read_index(&f, index);
  if (status == PKV_OK) status = open_files(&total, &f);
  if (status == PKV_OK) status = fill_table(&f, total);
  json_decref(index);
  return status;
}
