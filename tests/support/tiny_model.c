/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tiny_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/gguf_build.h"

typedef struct writer {
  gguf_build file;
  pkv_rng rng;
} writer;

/* A [rows, columns] matrix of normal values; row `nan_row` is NaN. */
static void add_matrix(writer *w, const char *name, int64_t columns, int64_t rows, double scale,
                       int64_t nan_row) {
  const size_t count = (size_t)(columns * rows);
  float *const data = malloc(count * sizeof *data);
  assert_non_null(data);
  for (size_t i = 0; i < count; i++)
    data[i] = (float)(scale * pkv_rng_normal(&w->rng));
  for (int64_t i = 0; nan_row >= 0 && i < columns; i++)
    data[nan_row * columns + i] = NAN;
  const int64_t extent[2] = {columns, rows};
  gguf_build_tensor(&w->file, name, 0, 2, extent, data, count * sizeof *data);
  free(data);
}

static void add_norm(writer *w, const char *name, int64_t count) {
  float *const data = malloc((size_t)count * sizeof *data);
  assert_non_null(data);
  for (int64_t i = 0; i < count; i++)
    data[i] = (float)(1.0 + 0.1 * pkv_rng_normal(&w->rng));
  gguf_build_tensor(&w->file, name, 0, 1, &count, data, (size_t)count * sizeof *data);
  free(data);
}

static void add_keys(writer *w, const tiny_model_options *o) {
  gguf_build *const b = &w->file;
  gguf_build_string(b, "general.architecture", "llama");
  gguf_build_string(b, "general.name", "tiny");
  gguf_build_u32(b, "llama.block_count", (uint32_t)o->layers);
  gguf_build_u32(b, "llama.context_length", (uint32_t)o->context);
  gguf_build_u32(b, "llama.embedding_length", (uint32_t)(o->query_heads * o->head_dim));
  gguf_build_u32(b, "llama.feed_forward_length", (uint32_t)o->feed_forward);
  gguf_build_u32(b, "llama.attention.head_count", (uint32_t)o->query_heads);
  gguf_build_u32(b, "llama.attention.head_count_kv", (uint32_t)o->kv_heads);
  gguf_build_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf_build_f32(b, "llama.rope.freq_base", 10000.0f);
  gguf_build_u32(b, "llama.rope.dimension_count", (uint32_t)o->head_dim);
  gguf_build_u32(b, "llama.vocab_size", (uint32_t)o->vocab);
}

static void add_tokenizer(writer *w, const tiny_model_options *o) {
  gguf_build *const b = &w->file;
  const size_t count = (size_t)o->vocab;
  char(*texts)[24] = calloc(count, sizeof *texts);
  const char **names = calloc(count, sizeof *names);
  int32_t *types = calloc(count, sizeof *types);
  assert_true(texts != NULL && names != NULL && types != NULL);
  for (size_t i = 0; i < count; i++) {
    (void)snprintf(texts[i], sizeof texts[i], "w%zu", i);
    if (o->spelled && i < TINY_SPELLED) /* in the byte alphabet these stand for themselves */
      (void)snprintf(texts[i], sizeof texts[i], "%c", (char)('!' + (int)i));
    else if (o->spelled && i < TINY_SPELLED + 2)
      (void)snprintf(texts[i], sizeof texts[i], "%s", i == TINY_SPELLED ? "\xc3\x83" : "\xc2\xa9");
    names[i] = texts[i];
    types[i] = (int32_t)i == o->eos ? 3 : 1;
    if ((int32_t)i >= o->vocab - o->padding) types[i] = 5;
  }
  gguf_build_string(b, "tokenizer.ggml.model", "gpt2");
  gguf_build_string(b, "tokenizer.ggml.pre", "smollm");
  gguf_build_strings(b, "tokenizer.ggml.tokens", names, count);
  gguf_build_array_i32(b, "tokenizer.ggml.token_type", types, count);
  gguf_build_strings(b, "tokenizer.ggml.merges", names, 0);
  gguf_build_u32(b, "tokenizer.ggml.eos_token_id", (uint32_t)o->eos);
  free(types);
  free(names);
  free(texts);
}

static void add_layer(writer *w, const tiny_model_options *o, int32_t layer) {
  const int64_t width = (int64_t)o->query_heads * o->head_dim;
  const int64_t kv = (int64_t)o->kv_heads * o->head_dim, ffn = o->feed_forward;
  const double in = 1.0 / sqrt((double)width);
  const struct {
    const char *name;
    int64_t columns, rows;
    double scale;
  } matrices[] = {
      /* Large queries and keys: attention that looks at few places, so that a wrong page shows. */
      {"attn_q", width, width, 3.0 * in},
      {"attn_k", width, kv, 3.0 * in},
      {"attn_v", width, kv, in},
      {"attn_output", width, width, in},
      {"ffn_gate", width, ffn, in},
      {"ffn_up", width, ffn, in},
      {"ffn_down", ffn, width, 1.0 / sqrt((double)ffn)},
  };
  char name[64];
  for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
    (void)snprintf(name, sizeof name, "blk.%d.%s.weight", (int)layer, matrices[i].name);
    add_matrix(w, name, matrices[i].columns, matrices[i].rows, matrices[i].scale, -1);
  }
  (void)snprintf(name, sizeof name, "blk.%d.attn_norm.weight", (int)layer);
  add_norm(w, name, width);
  (void)snprintf(name, sizeof name, "blk.%d.ffn_norm.weight", (int)layer);
  add_norm(w, name, width);
}

void tiny_model_open(tiny_model *out, const tiny_model_options *options) {
  const tiny_model_options *const o = options;
  const int64_t width = (int64_t)o->query_heads * o->head_dim;
  writer w;
  pkv_error err = {PKV_OK, "", ""};
  size_t size = 0;
  pkv_rng_init(&w.rng, o->seed);
  gguf_build_init(&w.file);
  add_keys(&w, o);
  if (o->eos >= 0) add_tokenizer(&w, o);
  add_matrix(&w, "token_embd.weight", width, o->vocab, 1.0, o->nan_token);
  for (int32_t i = 0; i < o->layers; i++)
    add_layer(&w, o, i);
  add_norm(&w, "output_norm.weight", width);
  add_matrix(&w, "output.weight", width, o->vocab, (double)o->spread / sqrt((double)width), -1);
  out->bytes = gguf_build_exact(&w.file, &size);
  const pkv_status status = pkv_model_open_memory(&out->model, out->bytes, size, NULL, &err);
  if (status != PKV_OK) print_error("tiny model: %s: %s\n", pkv_status_name(status), err.text);
  assert_int_equal(status, PKV_OK);
  gguf_build_deinit(&w.file);
}

void tiny_model_close(tiny_model *model) {
  pkv_model_close(model->model);
  gguf_build_drop(model->bytes);
}
