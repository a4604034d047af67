/* SPDX-License-Identifier: Apache-2.0 */
#include "model/folder.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/folder_parts.h"
#include "model/gguf_parts.h"

#define MAX_CONFIG    ((size_t)4 << 20)
#define MAX_TOKENIZER ((size_t)256 << 20)
#define MAX_TEMPLATE  ((size_t)16 << 20)
#define TEMPLATE      "chat_template.jinja"

typedef struct folder {
  const char *path;
  pkv_allocator allocator;
  json_t *config, *generation, *tokenizer, *tokenizer_config;
  pkv_folder_config parsed;
  pkv_meta meta;
} folder;

bool pkv_is_folder(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static pkv_status read_files(folder *f, bool tokenizer_only, pkv_error *err) {
  const pkv_allocator *a = &f->allocator;
  PKV_TRY(pkv_json_read(&f->config, f->path, "config.json", !tokenizer_only, MAX_CONFIG, a, err));
  PKV_TRY(
      pkv_json_read(&f->generation, f->path, "generation_config.json", false, MAX_CONFIG, a, err));
  PKV_TRY(pkv_json_read(&f->tokenizer, f->path, "tokenizer.json", tokenizer_only, MAX_TOKENIZER, a,
                        err));
  return pkv_json_read(&f->tokenizer_config, f->path, "tokenizer_config.json", false, MAX_TEMPLATE,
                       a, err);
}

/* ---- chat template ---- */

/* tokenizer_config.json has one, or a list of named ones of which "default" counts. */
static pkv_span template_of(const json_t *config) {
  const json_t *value = config ? pkv_json_get(config, "chat_template") : NULL;
  if (json_is_array(value)) {
    const json_t *list = value;
    value = NULL;
    for (size_t i = 0; i < json_array_size(list) && !value; i++) {
      const json_t *entry = json_array_get(list, i);
      if (pkv_json_says(entry, "name", "default")) value = pkv_json_get(entry, "template");
    }
  }
  if (!json_is_string(value)) return (pkv_span){NULL, 0};
  return (pkv_span){json_string_value(value), json_string_length(value)};
}

static pkv_status write_template(folder *f, pkv_error *err) {
  char path[PATH_MAX];
  /* It fits: that of tokenizer_config.json, which is longer, did. */
  const int n = snprintf(path, sizeof path, "%s/" TEMPLATE, f->path);
  PKV_ASSERT(n > 0 && (size_t)n < sizeof path);
  (void)n;
  if (access(path, F_OK) == 0 && !pkv_is_folder(path)) {
    pkv_buffer text;
    pkv_buffer_init(&text, MAX_TEMPLATE, &f->allocator);
    const pkv_status status = pkv_buffer_read_file(&text, path, err);
    if (status == PKV_OK)
      pkv_meta_string(&f->meta, "tokenizer.chat_template", (pkv_span){text.data, text.size});
    pkv_buffer_deinit(&text);
    return status;
  }
  const pkv_span text = template_of(f->tokenizer_config);
  if (text.data) pkv_meta_string(&f->meta, "tokenizer.chat_template", text);
  return PKV_OK;
}

/* ---- all of it ---- */

static void write_name(folder *f) {
  const char *end = f->path + strlen(f->path);
  while (end > f->path && end[-1] == '/')
    end--;
  const char *start = end;
  while (start > f->path && start[-1] != '/')
    start--;
  pkv_meta_string(&f->meta, "general.name", (pkv_span){start, (size_t)(end - start)});
}

static pkv_status load(pkv_gguf **out, folder *f, bool tokenizer_only, pkv_error *err) {
  PKV_TRY(read_files(f, tokenizer_only, err));
  if (f->config)
    PKV_TRY(pkv_folder_read_config(&f->parsed, &f->meta, f->config, f->generation, err));
  write_name(f);
  if (f->tokenizer)
    PKV_TRY(pkv_folder_read_tokenizer(&f->meta, f->tokenizer, f->parsed.vocab, &f->allocator, err));
  else
    pkv_meta_text(&f->meta, "tokenizer.ggml.model", "none");
  PKV_TRY(write_template(f, err));
  PKV_TRY(pkv_meta_finish(out, &f->meta, &f->allocator, err));
  (*out)->folder = true;
  return tokenizer_only ? PKV_OK : pkv_folder_bind(*out, f->path, &f->parsed, err);
}

static void folder_deinit(folder *f) {
  pkv_meta_deinit(&f->meta);
  json_decref(f->config);
  json_decref(f->generation);
  json_decref(f->tokenizer);
  json_decref(f->tokenizer_config);
}

pkv_status pkv_folder_open(pkv_gguf **out, const char *path, bool tokenizer_only,
                           const pkv_allocator *allocator, pkv_error *err) {
  folder f = {.path = path};
  *out = NULL;
  f.allocator = pkv_allocator_or_default(allocator);
  pkv_meta_init(&f.meta, &f.allocator);
  const pkv_status status = load(out, &f, tokenizer_only, err);
  folder_deinit(&f);
  if (status != PKV_OK) {
    pkv_gguf_close(*out);
    *out = NULL;
  }
  return status;
}

static pkv_status load_config(pkv_gguf **out, folder *f, const char *text, size_t bytes,
                              pkv_error *err) {
  PKV_TRY(pkv_json_parse(&f->config, "config.json", text, bytes, err));
  PKV_TRY(pkv_folder_read_config(&f->parsed, &f->meta, f->config, NULL, err));
  write_name(f);
  pkv_meta_text(&f->meta, "tokenizer.ggml.model", "none");
  PKV_TRY(pkv_meta_finish(out, &f->meta, &f->allocator, err));
  (*out)->folder = true;
  return PKV_OK;
}

pkv_status pkv_folder_open_config(pkv_gguf **out, pkv_folder_config *parsed, const char *path,
                                  const pkv_allocator *allocator, pkv_error *err) {
  folder f = {.path = path};
  pkv_buffer text;
  *out = NULL;
  f.allocator = pkv_allocator_or_default(allocator);
  pkv_meta_init(&f.meta, &f.allocator);
  pkv_buffer_init(&text, MAX_CONFIG, &f.allocator);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK) status = load_config(out, &f, text.data, text.size, err);
  *parsed = f.parsed;
  parsed->architecture = NULL; /* lay in the JSON */
  pkv_buffer_deinit(&text);
  folder_deinit(&f);
  if (status != PKV_OK) {
    pkv_gguf_close(*out);
    *out = NULL;
  }
  return status;
}

static pkv_status load_memory(pkv_gguf **out, folder *f, const char *config, const char *tokenizer,
                              size_t bytes, pkv_error *err) {
  if (config) {
    PKV_TRY(pkv_json_parse(&f->config, "config.json", config, bytes, err));
    PKV_TRY(pkv_folder_read_config(&f->parsed, &f->meta, f->config, NULL, err));
  } else {
    PKV_TRY(pkv_json_parse(&f->tokenizer, "tokenizer.json", tokenizer, bytes, err));
    PKV_TRY(pkv_folder_read_tokenizer(&f->meta, f->tokenizer, 0, &f->allocator, err));
  }
  PKV_TRY(pkv_meta_finish(out, &f->meta, &f->allocator, err));
  (*out)->folder = true;
  return PKV_OK;
}

pkv_status pkv_folder_open_memory(pkv_gguf **out, const char *config, const char *tokenizer,
                                  size_t bytes, const pkv_allocator *allocator, pkv_error *err) {
  folder f = {.path = ""};
  *out = NULL;
  f.allocator = pkv_allocator_or_default(allocator);
  pkv_meta_init(&f.meta, &f.allocator);
  const pkv_status status = load_memory(out, &f, config, tokenizer, bytes, err);
  folder_deinit(&f);
  return status;
}
