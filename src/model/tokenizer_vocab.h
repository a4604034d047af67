/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary of a tokenizer: what each id spells in raw bytes, what kind it is, and the way
 * back from bytes to the id. GPT-2's files spell every byte as a printable character,
 * SentencePiece's spell a space as U+2581; those spellings are undone here, once, and nothing after
 * this file knows of them.
 */
#ifndef PKV_MODEL_TOKENIZER_VOCAB_H
#define PKV_MODEL_TOKENIZER_VOCAB_H

#include <stdbool.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "model/gguf.h"

/* tokenizer.ggml.token_type. */
typedef enum pkv_token_type {
  PKV_TOKEN_UNDEFINED = 0,
  PKV_TOKEN_NORMAL = 1,
  PKV_TOKEN_UNKNOWN = 2,
  PKV_TOKEN_CONTROL = 3,
  PKV_TOKEN_USER = 4,   /* text that is cut out before anything else, control or not */
  PKV_TOKEN_UNUSED = 5, /* a hole in the numbering, or spelled outside the alphabet */
  PKV_TOKEN_BYTE = 6
} pkv_token_type;

/* How a file spells ordinary tokens. */
typedef enum pkv_spelling {
  PKV_SPELLING_BYTES = 0,  /* each byte a character of GPT-2's alphabet */
  PKV_SPELLING_SPACES = 1, /* UTF-8 with U+2581 for a space; byte tokens as <0x0A> */
  PKV_SPELLING_RAW = 2     /* the same, and pieces are kept as they are spelled */
} pkv_spelling;

typedef struct pkv_vocab_slot {
  uint32_t hash;
  int32_t id; /* -1 = empty */
} pkv_vocab_slot;

/* Immutable after pkv_vocab_load. */
typedef struct pkv_vocab {
  pkv_allocator allocator;
  pkv_spelling spelling;
  int32_t size;
  char *bytes; /* [bytes_size] all pieces, one after another */
  size_t bytes_size;
  uint32_t *offset; /* [size + 1]: piece i is bytes[offset[i] .. offset[i + 1]) */
  uint8_t *type;    /* [size] */
  pkv_vocab_slot *slots;
  uint32_t slot_mask;
  int32_t byte_token[256]; /* the token of one byte, -1 where the vocabulary has none */
} pkv_vocab;

/*
 * Reads tokenizer.ggml.tokens and token_type. Pieces that text can become (all kinds but control,
 * unknown and unused) must differ; empty ones and ones with characters outside the byte alphabet
 * stay in the numbering and are never made from text. PKV_SPELLING_SPACES: byte tokens are found by
 * byte_token alone and user-defined ones not at all; a byte token that is not spelled <0x00> ..
 * <0xFF>, or a second one of a byte, is E_FORMAT. On failure the vocabulary is empty.
 */
pkv_status pkv_vocab_load(pkv_vocab *v, pkv_spelling spelling, const pkv_gguf *gguf,
                          const pkv_allocator *allocator, pkv_error *err);
void pkv_vocab_deinit(pkv_vocab *v);

/* Id of a piece that text can become, by its raw bytes; -1 = none. */
int32_t pkv_vocab_find(const pkv_vocab *v, const char *bytes, size_t count);

static inline pkv_span pkv_vocab_piece(const pkv_vocab *v, int32_t id) {
  const pkv_span span = {v->bytes + v->offset[id], v->offset[id + 1] - v->offset[id]};
  return span;
}

/* True for the kinds that only a control marker in a template or a trusted text may become. */
static inline bool pkv_vocab_is_control(const pkv_vocab *v, int32_t id) {
  return v->type[id] == PKV_TOKEN_CONTROL || v->type[id] == PKV_TOKEN_UNKNOWN;
}

/*
 * Undoes the byte alphabet: at most `count` raw bytes to out. -1 when a character is not of the
 * alphabet, else how many bytes. in and out may be the same memory.
 */
int64_t pkv_vocab_decode(char *out, const char *spelled, size_t count);

/* PKV_SPELLING_SPACES: copies text with a space for each U+2581; returns how many bytes, at most
   `count`. in and out may be the same memory. */
size_t pkv_vocab_put_spaces(char *out, const char *text, size_t count);

/* Walk over a string array of the file, whose bytes the reader has checked. */
typedef struct pkv_string_walk {
  const unsigned char *at;
  uint64_t left;
} pkv_string_walk;

/* Wants an array of strings; E_FORMAT naming key and type otherwise. Absent: count 0. */
pkv_status pkv_string_walk_init(pkv_string_walk *walk, const pkv_gguf *gguf, const char *key,
                                pkv_error *err);
pkv_span pkv_string_walk_next(pkv_string_walk *walk);

#endif
