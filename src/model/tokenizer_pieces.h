/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens by score, as SentencePiece's files have them: a run of text starts as its characters; of
 * all neighbours that are a token of the vocabulary together, those with the best score are joined
 * first, of equal scores the leftmost, until no two are. A character that is no token becomes the
 * tokens of its bytes, or the unknown token where the vocabulary lacks one of them. A heap over a
 * linked list: O(n log n) for n bytes, without recursion.
 */
#ifndef PKV_MODEL_TOKENIZER_PIECES_H
#define PKV_MODEL_TOKENIZER_PIECES_H

#include "model/tokenizer_merges.h"

/* Immutable after pkv_pieces_load. */
typedef struct pkv_pieces {
  pkv_allocator allocator;
  uint32_t *order; /* [size] smaller = better score */
  int32_t size;
  size_t longest;  /* bytes of the longest token that text can become */
  int32_t unknown; /* id, -1 = none */
} pkv_pieces;

/* Memory of one thread's encoding. Single-owner. */
typedef struct pkv_pieces_scratch {
  pkv_merge_scratch merge;
  char *text;
  size_t capacity;
} pkv_pieces_scratch;

/* Reads tokenizer.ggml.scores and unknown_token_id. E_FORMAT: missing, not an f32 for each token,
   or a NaN among them. E_LIMIT: an ordinary token of more than PKV_PIECE_MAX_BYTES. */
pkv_status pkv_pieces_load(pkv_pieces *p, const pkv_vocab *vocab, const pkv_gguf *gguf,
                           pkv_error *err);
void pkv_pieces_deinit(pkv_pieces *p);

void pkv_pieces_scratch_init(pkv_pieces_scratch *s, const pkv_allocator *allocator);
void pkv_pieces_scratch_deinit(pkv_pieces_scratch *s);

/*
 * Tokens of a run of text without special tokens in it, with a space before it if so wished.
 * E_LIMIT beyond PKV_MERGE_MAX_WORD bytes; E_UNSUPPORTED names a character that has no byte tokens
 * when there is no unknown token either. Bytes that are not UTF-8 count as characters of their own.
 */
pkv_status pkv_pieces_encode(pkv_token_sink *sink, pkv_pieces_scratch *scratch, const pkv_pieces *p,
                             const pkv_vocab *vocab, const char *text, size_t bytes, bool space,
                             pkv_error *err);

#endif
