/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte-level BPE and SentencePiece's tokenizer by scores, from a GGUF file: vocabulary, merges or
 * scores, control tokens, pre-tokenizer split.
 *
 * What a file must say: tokenizer.ggml.model "gpt2", a known tokenizer.ggml.pre (an unknown or
 * missing one is refused: a wrong split gives wrong tokens silently), tokens, merges. token_type
 * may be missing: all tokens are then ordinary. Or model "llama": tokens, scores; pre is not read,
 * since nothing is split before the scores decide. There add_space_prefix (true unless the file
 * says otherwise) puts a space before the text and before what follows a special token, and a
 * character without a token becomes its bytes' tokens (<0x0A>).
 *
 * Control tokens never come out of ordinary text: not by merges, not by the rule that a word of the
 * vocabulary is its token. User-defined tokens are text, and are cut out of every text.
 *
 * Malformed UTF-8 and all 256 byte values round-trip when the vocabulary has a token for every
 * byte. Some do not (SmolLM2 lacks 21, six of them ASCII controls): such a byte becomes the
 * tokens of U+FFFD, visible and in its place, instead of vanishing.
 */
#ifndef PKV_MODEL_TOKENIZER_H
#define PKV_MODEL_TOKENIZER_H

#include "model/gguf.h"

/* Immutable once built: share freely. Calls take scratch from its allocator, which must then be
   thread-safe too (the default one is). */
typedef struct pkv_tokenizer pkv_tokenizer;

/*
 * Copies what it needs; gguf may be closed afterwards. E_UNSUPPORTED names an unknown tokenizer
 * model or pre-tokenizer, E_FORMAT the key and element that contradict each other, E_LIMIT what
 * is too large.
 */
pkv_status pkv_tokenizer_create(pkv_tokenizer **out, const pkv_gguf *gguf,
                                const pkv_allocator *allocator, pkv_error *err);
void pkv_tokenizer_destroy(pkv_tokenizer *tokenizer);
int32_t pkv_tokenizer_vocab(const pkv_tokenizer *t);
/* The same without the unused ids at its end: rows that only pad the model's output. */
int32_t pkv_tokenizer_vocab_used(const pkv_tokenizer *t);
int32_t pkv_tokenizer_bos(const pkv_tokenizer *t); /* -1 = none */
int32_t pkv_tokenizer_eos(const pkv_tokenizer *t);
bool pkv_tokenizer_is_end(const pkv_tokenizer *t, int32_t token);
/* The id whose text is exactly this control or user-defined token, or -1. */
int32_t pkv_tokenizer_find_special(const pkv_tokenizer *t, const char *text, size_t bytes);
/* The longest control or user-defined token at text[at], at < bytes; -1 = none. */
int32_t pkv_tokenizer_match_special(const pkv_tokenizer *t, const char *text, size_t bytes,
                                    size_t at);
/* True for kinds that only trusted text becomes. */
bool pkv_tokenizer_is_control(const pkv_tokenizer *t, int32_t token);
/*
 * As pkv_tokenize and pkv_token_text in engine.h. Thread-safe on one object. Linear in the text but
 * for one word's merges. PKV_TEXT_ADD_SPECIAL never makes a second bos (eos) where the text already
 * starts (ends) with it as a parsed token.
 */
pkv_status pkv_tokenizer_encode(int32_t *ids, size_t capacity, size_t *count,
                                const pkv_tokenizer *t, const char *text, size_t bytes,
                                uint32_t flags, pkv_error *err);
pkv_status pkv_tokenizer_text(const char **text, size_t *bytes, const pkv_tokenizer *t,
                              int32_t token, int32_t special, pkv_error *err);

/* A stretch of a text: what a chat template says, or what somebody typed. */
typedef struct pkv_text_piece {
  const char *text;
  size_t bytes;
  bool trusted; /* may spell control tokens; neighbours that are both trusted may do so together */
} pkv_text_piece;

/*
 * Tokens of the pieces joined: words and merges go across their borders, as in a tokenizer that
 * is given the whole text, but a control token lies inside trusted text entirely. add_bos and
 * add_eos: as the file says, when set.
 */
pkv_status pkv_tokenizer_encode_pieces(int32_t *ids, size_t capacity, size_t *count,
                                       const pkv_tokenizer *t, const pkv_text_piece *pieces,
                                       size_t piece_count, bool add_bos, bool add_eos,
                                       pkv_error *err);

#endif
