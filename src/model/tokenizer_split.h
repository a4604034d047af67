/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pre-tokenizers: where a text is cut into words before byte pairs are merged. A word never spans a
 * cut, so these rules decide the tokens as much as the merges do.
 *
 * Ill-formed UTF-8 is cut out first: each byte that is no part of a well-formed character is a word
 * of its own, and what stands before and after it is split as if it were the end and the start of a
 * text.
 */
#ifndef PKV_MODEL_TOKENIZER_SPLIT_H
#define PKV_MODEL_TOKENIZER_SPLIT_H

#include <stdbool.h>

#include "base/alloc.h"
#include "model/gguf.h"

typedef struct pkv_splitter pkv_splitter;         /* immutable: share freely */
typedef struct pkv_split_cursor pkv_split_cursor; /* single-owner: one walk over one text */

/* What a tokenizer.ggml.pre name stands for. */
typedef struct pkv_split_rule {
  const char *name;    /* the rule, not the alias that was asked for */
  const char *pattern; /* PCRE2, matches at the start of any well-formed text */
  bool whole_words;    /* a word that is in the vocabulary is that token, whatever the merges say */
  bool bos_by_default; /* a file that is silent about add_bos_token means yes */
  bool nfc;            /* text is brought to normalization form C before */
} pkv_split_rule;

/* NULL when the name is not known. */
const pkv_split_rule *pkv_split_rule_find(pkv_span name);

/* rule is borrowed and must outlive the splitter. compiled: to machine code where the machine
   can; the interpreter gives the same words. E_NOMEM, or E_INTERNAL when the library refuses the
   pattern. */
pkv_status pkv_splitter_create(pkv_splitter **out, const pkv_split_rule *rule, bool compiled,
                               const pkv_allocator *allocator, pkv_error *err);
void pkv_splitter_destroy(pkv_splitter *splitter);

/* Memory of one thread's matching; text is set by pkv_split_cursor_reset. */
pkv_status pkv_split_cursor_create(pkv_split_cursor **out, const pkv_splitter *splitter,
                                   pkv_error *err);
void pkv_split_cursor_destroy(pkv_split_cursor *cursor);
/* Borrows text until the walk ends. */
void pkv_split_cursor_reset(pkv_split_cursor *cursor, const char *text, size_t bytes);
/*
 * The next word: text[*start .. *start + *bytes), words in order and without gaps; *bytes is 0 at
 * the end. E_LIMIT when the matcher runs into one of its limits: never a shorter word instead.
 */
pkv_status pkv_split_next(size_t *start, size_t *bytes, pkv_split_cursor *cursor, pkv_error *err);

#endif
