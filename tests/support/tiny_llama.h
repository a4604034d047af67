/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiny llama models out of a number: shapes, types and every weight follow from `seed` by integer
 * arithmetic, the same here and in tests/tools/make_tiny_models.py, which computes the expected
 * logits with numpy. How a value comes about is written down there; change both or none.
 */
#ifndef PKV_TEST_TINY_LLAMA_H
#define PKV_TEST_TINY_LLAMA_H

#include "support/gguf_build.h"

#define TINY_MODELS     50 /* seeds 0 .. 49 */
#define TINY_MAX_TOKENS 40

typedef struct tiny_llama {
  uint32_t seed;
  int32_t layers, width, feed_forward, query_heads, kv_heads, head_dim, rope_dim, vocab, tokens;
  int32_t tied, biases, rope_freqs;
  float rope_base, rope_factor, eps; /* factor 1: no scaling keys */
  int32_t ids[TINY_MAX_TOKENS];
} tiny_llama;

/* What a test wants otherwise: a key with another value or none, a tensor left out. */
typedef enum tiny_change_kind {
  TINY_WITHOUT, /* key or tensor `name` is not written */
  TINY_U32,
  TINY_U64,
  TINY_F32,
  TINY_STRING,
  TINY_TYPE, /* tensor `name` says type `number`; its bytes stay */
  TINY_ROWS  /* tensor `name` says `number` rows (extent[1]) */
} tiny_change_kind;

typedef struct tiny_change {
  const char *name;
  tiny_change_kind kind;
  uint64_t number;
  float real;
  const char *text;
} tiny_change;

tiny_llama tiny_llama_make(uint32_t seed);
/* Keys and tensors into an initialised builder. A changed key that the file does not have otherwise
   is added. The caller finishes the builder. */
void tiny_llama_write(gguf_build *b, const tiny_llama *m, const tiny_change *changes, size_t count);

#endif
