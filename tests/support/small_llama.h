/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small llama models as GGUF files in memory: random weights, a byte-level tokenizer of a few
 * tokens. For tests that need a model but no meaning, and for those that break one.
 *
 *   small_llama t = SMALL_LLAMA_INIT;
 *   t.weight_type = 8;                           change what the test is about
 *   t.skip_key = "llama.block_count";            leave one key out, to write it another way
 *   gguf_build b;
 *   gguf_build_init(&b);
 *   small_llama_build(&b, &t);
 *   gguf_build_u32(&b, "llama.block_count", 0);
 *   unsigned char *bytes = gguf_build_exact(&b, &size);
 */
#ifndef PKV_TEST_SMALL_LLAMA_H
#define PKV_TEST_SMALL_LLAMA_H

#include "pkv/engine.h"
#include "support/gguf_build.h"

typedef struct small_llama {
  int32_t layers, width, feed_forward, query_heads, kv_heads, head_dim, context;
  int32_t vocab; /* rows of token_embd.weight; at least SMALL_LLAMA_TOKENS with a tokenizer */
  /* GGUF's number: 0 F32, 1 F16, 2 Q4_0, 3 Q4_1, 6, 7, 8 Q8_0, 12 Q4_K, 30 BF16 */
  uint32_t weight_type;
  bool tokenizer, output;             /* output: output.weight beside token_embd.weight */
  const char *skip_key, *skip_tensor; /* not written */
  uint64_t seed;
  uint32_t v_type; /* of attn_v.weight; 0 = weight_type */
} small_llama;
#define SMALL_LLAMA_INIT                                                                           \
  { 2, 32, 64, 4, 2, 8, 64, 16, 0, true, false, NULL, NULL, 1, 0 }

/* 3 control tokens (<|endoftext|>, <|im_start|>, <|im_end|>), letters, one merge "a b"; further ids
   up to vocab are unused tokens. */
#define SMALL_LLAMA_TOKENS 10

void small_llama_build(gguf_build *b, const small_llama *t);
/* A finished file in an exactly sized block; gguf_build_drop frees it. */
unsigned char *small_llama_bytes(const small_llama *t, size_t *size);

#endif
