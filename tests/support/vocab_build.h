/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small byte-level vocabularies for tests: ids 0 .. 255 are the bytes, then what the test adds.
 *
 *   vocab_build v;
 *   vocab_build_init(&v, "gpt-2");
 *   vocab_build_merge(&v, "he", "ll");                     the result becomes a token
 *   const int32_t end = vocab_build_token(&v, "<|im_end|>", 3);
 *   vocab_build_finish(&v);                                v.file is a GGUF file
 *   gguf_build_u32(&v.file, "tokenizer.ggml.eos_token_id", ...) goes before finish
 *   pkv_tokenizer *t = vocab_build_open(&v);               fails the test when it cannot
 *   vocab_build_deinit(&v);
 *
 * Anything may be wrong on purpose: token texts and merges are written as they are given to the
 * _raw functions.
 */
#ifndef PKV_TEST_VOCAB_BUILD_H
#define PKV_TEST_VOCAB_BUILD_H

#include "model/tokenizer.h"
#include "support/gguf_build.h"

typedef struct vocab_build_list {
  pkv_buffer strings; /* u64 length + bytes, one after another, as GGUF wants them */
  size_t count;
} vocab_build_list;

typedef struct vocab_build {
  gguf_build file;
  vocab_build_list tokens, merges;
  pkv_buffer types; /* int32 */
  bool no_types;    /* leave token_type out */
  bool finished;
} vocab_build;

void vocab_build_init(vocab_build *v, const char *pre); /* pre NULL: the key is left out */
void vocab_build_deinit(vocab_build *v);
/* Without the 256 byte tokens. */
void vocab_build_init_empty(vocab_build *v, const char *pre);

/* A token of raw bytes; ordinary types (0, 1, 6) are spelled in the byte alphabet. Returns its
   id. */
int32_t vocab_build_token(vocab_build *v, const char *text, int32_t type);
int32_t vocab_build_token_bytes(vocab_build *v, const void *bytes, size_t count, int32_t type);
/* Spelled as given. */
int32_t vocab_build_token_raw(vocab_build *v, const void *bytes, size_t count, int32_t type);
/* A merge of two raw texts; the result becomes an ordinary token. Returns the result's id. */
int32_t vocab_build_merge(vocab_build *v, const char *left, const char *right);
void vocab_build_merge_raw(vocab_build *v, const void *line, size_t bytes);

/* Writes model, pre, tokens, types and merges; further keys may be added before. */
void vocab_build_finish(vocab_build *v);
/* Finishes if need be, and builds the tokenizer from the file. */
pkv_status vocab_build_try(pkv_tokenizer **out, vocab_build *v, const pkv_allocator *allocator,
                           pkv_error *err);
pkv_tokenizer *vocab_build_open(vocab_build *v);

#endif
