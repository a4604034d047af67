/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranked merges over characters, as tokenizer.json has them for vocabularies that came from
 * SentencePiece: a space is written U+2581, words may start at their spaces, a character without a
 * token becomes the tokens of its bytes (<0x0A>), or else the unknown token.
 */
#ifndef PKV_MODEL_TOKENIZER_CHARS_H
#define PKV_MODEL_TOKENIZER_CHARS_H

#include "model/tokenizer_merges.h"

/* What tokenizer.ggml.model says for it: no GGUF writer's word, only model/folder.c writes it. */
#define PKV_TOKENIZER_BY_CHARACTERS "pkv-characters"

/* When a space is put before a stretch of text without special tokens in it. */
typedef enum pkv_space_prefix {
  PKV_PREFIX_NONE = 0,
  PKV_PREFIX_FIRST = 1,   /* at the start of the whole text, unless there is one */
  PKV_PREFIX_MISSING = 2, /* unless there is one */
  PKV_PREFIX_EACH = 3     /* always */
} pkv_space_prefix;

/* Immutable after pkv_chars_load; borrows vocabulary and merges. */
typedef struct pkv_chars {
  pkv_allocator allocator;
  const pkv_vocab *vocab;
  const pkv_merges *merges;
  pkv_space_prefix prefix;
  bool replace, split, fuse, whole_words;
  int32_t unknown; /* id, -1 = none */
  char *shown;     /* what tokens mean: spaces for U+2581, the byte of <0x0A> */
  size_t shown_bytes;
  uint32_t *offset; /* [vocab->size + 1] of shown */
} pkv_chars;

/* Memory of one thread's encoding. Single-owner. */
typedef struct pkv_chars_scratch {
  pkv_merge_scratch merge;
  char *text;
  size_t capacity;
} pkv_chars_scratch;

pkv_status pkv_chars_load(pkv_chars *c, const pkv_vocab *vocab, const pkv_merges *merges,
                          const pkv_gguf *gguf, pkv_error *err);
void pkv_chars_deinit(pkv_chars *c);
pkv_span pkv_chars_shown(const pkv_chars *c, int32_t id);

void pkv_chars_scratch_init(pkv_chars_scratch *s, const pkv_allocator *allocator);
void pkv_chars_scratch_deinit(pkv_chars_scratch *s);

/*
 * Tokens of a stretch of text without special tokens; first: it starts the whole text. E_LIMIT
 * beyond PKV_MERGE_MAX_WORD bytes; E_UNSUPPORTED names a character that has no token, no byte
 * tokens and no unknown token. Bytes that are not UTF-8 count as characters of their own.
 */
pkv_status pkv_chars_encode(pkv_token_sink *sink, pkv_chars_scratch *scratch, const pkv_chars *c,
                            const char *text, size_t bytes, bool first, pkv_error *err);

#endif
