/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-level BPE from a GGUF file: vocabulary, merges, control tokens, pre-tokenizer split.
   Immutable once built. */
#ifndef PKV_MODEL_TOKENIZER_H
#define PKV_MODEL_TOKENIZER_H

#include "model/gguf.h"

typedef struct pkv_tokenizer pkv_tokenizer;

/* Copies what it needs. E_UNSUPPORTED names an unknown tokenizer model or pre-tokenizer. */
pkv_status pkv_tokenizer_create(pkv_tokenizer **out, const pkv_gguf *gguf,
                                const pkv_allocator *allocator, pkv_error *err);
void pkv_tokenizer_destroy(pkv_tokenizer *tokenizer);
int32_t pkv_tokenizer_vocab(const pkv_tokenizer *t);
int32_t pkv_tokenizer_bos(const pkv_tokenizer *t); /* -1 = none */
int32_t pkv_tokenizer_eos(const pkv_tokenizer *t);
bool pkv_tokenizer_is_end(const pkv_tokenizer *t, int32_t token);
/* The id whose text is exactly this control token, or -1. */
int32_t pkv_tokenizer_find_special(const pkv_tokenizer *t, const char *text, size_t bytes);
/* As pkv_tokenize and pkv_token_text in engine.h. Thread-safe on one object. Linear in the text
   but for one word's merges. */
pkv_status pkv_tokenizer_encode(int32_t *ids, size_t capacity, size_t *count,
                                const pkv_tokenizer *t, const char *text, size_t bytes,
                                uint32_t flags, pkv_error *err);
pkv_status pkv_tokenizer_text(const char **text, size_t *bytes, const pkv_tokenizer *t,
                              int32_t token, int32_t special, pkv_error *err);

#endif
