/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and tensors of small llama models; weights are noise of about 1 / sqrt(inputs). */
#include "support/small_llama.h"

#include <setjmp.h>
#include <stdarg.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "model/gguf.h"

static bool skipped(const char *skip, const char *name) {
  return skip != NULL && strcmp(skip, name) == 0;
}

static void key_u32(gguf_build *b, const small_llama *t, const char *key, int32_t value) {
  if (!skipped(t->skip_key, key)) gguf_build_u32(b, key, (uint32_t)value);
}

static void key_f32(gguf_build *b, const small_llama *t, const char *key, float value) {
  if (!skipped(t->skip_key, key)) gguf_build_f32(b, key, value);
}

static void key_text(gguf_build *b, const small_llama *t, const char *key, const char *value) {
  if (!skipped(t->skip_key, key)) gguf_build_string(b, key, value);
}

static void build_keys(gguf_build *b, const small_llama *t) {
  key_text(b, t, "general.architecture", "llama");
  key_text(b, t, "general.name", "tiny");
  key_u32(b, t, "llama.block_count", t->layers);
  key_u32(b, t, "llama.embedding_length", t->width);
  key_u32(b, t, "llama.feed_forward_length", t->feed_forward);
  key_u32(b, t, "llama.context_length", t->context);
  key_u32(b, t, "llama.vocab_size", t->vocab);
  key_u32(b, t, "llama.attention.head_count", t->query_heads);
  key_u32(b, t, "llama.attention.head_count_kv", t->kv_heads);
  if (t->head_dim * t->query_heads != t->width) {
    key_u32(b, t, "llama.attention.key_length", t->head_dim);
    key_u32(b, t, "llama.attention.value_length", t->head_dim);
  }
  key_u32(b, t, "llama.rope.dimension_count", t->head_dim);
  key_f32(b, t, "llama.rope.freq_base", 10000.0f);
  key_f32(b, t, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
}

static void build_tokenizer(gguf_build *b, const small_llama *t) {
  static const char *const named[SMALL_LLAMA_TOKENS] = {
      "<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c",
      "\xc4\xa0",      "\xc4\x8a",     "ab",         "d"};
  const char **tokens = calloc((size_t)t->vocab, sizeof *tokens);
  int32_t *types = calloc((size_t)t->vocab, sizeof *types);
  char(*unused)[24] = calloc((size_t)t->vocab, sizeof *unused);
  assert_true(tokens != NULL && types != NULL && unused != NULL);
  for (int32_t i = 0; i < t->vocab; i++) {
    (void)snprintf(unused[i], sizeof unused[i], "[unused%d]", (int)i);
    tokens[i] = i < SMALL_LLAMA_TOKENS ? named[i] : unused[i];
    types[i] = i < 3 ? 3 : i < SMALL_LLAMA_TOKENS ? 1 : 5; /* control, normal, unused */
  }
  key_text(b, t, "tokenizer.ggml.model", "gpt2");
  key_text(b, t, "tokenizer.ggml.pre", "smollm");
  if (!skipped(t->skip_key, "tokenizer.ggml.tokens"))
    gguf_build_strings(b, "tokenizer.ggml.tokens", tokens, (size_t)t->vocab);
  if (!skipped(t->skip_key, "tokenizer.ggml.token_type"))
    gguf_build_array_i32(b, "tokenizer.ggml.token_type", types, (size_t)t->vocab);
  if (!skipped(t->skip_key, "tokenizer.ggml.merges"))
    gguf_build_strings(b, "tokenizer.ggml.merges", (const char *const[]){"a b"}, 1);
  key_u32(b, t, "tokenizer.ggml.bos_token_id", 1);
  key_u32(b, t, "tokenizer.ggml.eos_token_id", 2);
  free(unused);
  free(types);
  free(tokens);
}

/* One block of noise whose values stay below about `scale`. */
static void fill_block(unsigned char *p, uint32_t type, int64_t bytes, float scale, pkv_rng *rng) {
  const float value = (float)(pkv_rng_uniform(rng) * 2.0 - 1.0) * scale;
  const bool has_minimum = type == 3 || type == 7 || type == 12;
  const float steps = type == 8                ? 127.0f
                      : type == 12             ? 63.0f * 8.0f
                      : type == 6 || type == 7 ? 16.0f
                                               : 8.0f;
  const uint16_t d = pkv_f32_to_f16(scale / steps);
  const uint16_t m = pkv_f32_to_f16(type == 12 ? scale / 63.0f : -scale);
  const uint16_t half = type == 30 ? pkv_f32_to_bf16(value) : pkv_f32_to_f16(value);
  switch (type) {
  case 0:
    memcpy(p, &value, 4);
    return;
  case 1:
  case 30:
    memcpy(p, &half, 2);
    return;
  default:
    break;
  }
  for (int64_t i = 0; i < bytes; i++)
    p[i] = (unsigned char)(pkv_rng_next(rng) & 0xff);
  memcpy(p, &d, 2);
  if (has_minimum) memcpy(p + 2, &m, 2);
}

static void tensor(gguf_build *b, const small_llama *t, const char *name, uint32_t type,
                   int64_t inputs, int64_t outputs, pkv_rng *rng) {
  int64_t block = 1, block_bytes = 1;
  if (skipped(t->skip_tensor, name)) return;
  assert_true(pkv_gguf_type_info(type, NULL, &block, &block_bytes));
  assert_int_equal(inputs % block, 0);
  const int64_t blocks = inputs / block * outputs;
  unsigned char *data = malloc((size_t)(blocks * block_bytes));
  assert_non_null(data);
  for (int64_t i = 0; i < blocks; i++)
    fill_block(data + i * block_bytes, type, block_bytes, 1.0f / sqrtf((float)inputs), rng);
  gguf_build_tensor(b, name, type, outputs == 1 ? 1 : 2, (const int64_t[]){inputs, outputs}, data,
                    (size_t)(blocks * block_bytes));
  free(data);
}

static void ones(gguf_build *b, const small_llama *t, const char *name, int64_t count) {
  if (skipped(t->skip_tensor, name)) return;
  float *data = malloc((size_t)count * sizeof *data);
  assert_non_null(data);
  for (int64_t i = 0; i < count; i++)
    data[i] = 1.0f;
  gguf_build_tensor(b, name, 0, 1, &count, data, (size_t)count * sizeof *data);
  free(data);
}

void small_llama_build(gguf_build *b, const small_llama *t) {
  const int64_t q = (int64_t)t->query_heads * t->head_dim, kv = (int64_t)t->kv_heads * t->head_dim;
  const int64_t width = t->width, ffn = t->feed_forward;
  const struct {
    const char *name;
    int64_t inputs, outputs; /* outputs 0: a norm */
  } parts[] = {{"attn_norm.weight", width, 0},   {"attn_q.weight", width, q},
               {"attn_k.weight", width, kv},     {"attn_v.weight", width, kv},
               {"attn_output.weight", q, width}, {"ffn_norm.weight", width, 0},
               {"ffn_gate.weight", width, ffn},  {"ffn_up.weight", width, ffn},
               {"ffn_down.weight", ffn, width}};
  pkv_rng rng;
  pkv_rng_init(&rng, t->seed);
  build_keys(b, t);
  if (t->tokenizer) build_tokenizer(b, t);
  tensor(b, t, "token_embd.weight", t->weight_type, width, t->vocab, &rng);
  ones(b, t, "output_norm.weight", width);
  if (t->output) tensor(b, t, "output.weight", t->weight_type, width, t->vocab, &rng);
  for (int32_t layer = 0; layer < t->layers; layer++)
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
      char name[64];
      (void)snprintf(name, sizeof name, "blk.%d.%s", (int)layer, parts[i].name);
      const bool own = t->v_type != 0 && strcmp(parts[i].name, "attn_v.weight") == 0;
      if (parts[i].outputs == 0)
        ones(b, t, name, parts[i].inputs);
      else
        tensor(b, t, name, own ? t->v_type : t->weight_type, parts[i].inputs, parts[i].outputs,
               &rng);
    }
}

unsigned char *small_llama_bytes(const small_llama *t, size_t *size) {
  gguf_build b;
  gguf_build_init(&b);
  small_llama_build(&b, t);
  unsigned char *bytes = gguf_build_exact(&b, size);
  gguf_build_deinit(&b);
  return bytes;
}
