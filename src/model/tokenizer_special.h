/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds tokens that are cut out of a text before it is split into words: user-defined ones
 * everywhere, control ones only where the caller says that the text may spell them. Of several that
 * start at a place the longest wins, and the leftmost place wins over all later ones.
 */
#ifndef PKV_MODEL_TOKENIZER_SPECIAL_H
#define PKV_MODEL_TOKENIZER_SPECIAL_H

#include "model/tokenizer_vocab.h"

/* Immutable after pkv_specials_build; borrows the vocabulary. */
typedef struct pkv_specials {
  pkv_allocator allocator;
  const pkv_vocab *vocab;
  int32_t *ids; /* [count], ordered by their bytes */
  int32_t count;
  int32_t first[257]; /* ids[first[b] .. first[b + 1]) start with byte b */
  bool user_first[256], any_first[256];
} pkv_specials;

/* E_LIMIT: one is longer than PKV_SPECIAL_MAX_BYTES. E_FORMAT: two are spelled the same. */
pkv_status pkv_specials_build(pkv_specials *s, const pkv_vocab *vocab, pkv_error *err);
void pkv_specials_deinit(pkv_specials *s);

/* The control or user-defined token spelled exactly so, -1 = none. */
int32_t pkv_specials_exact(const pkv_specials *s, const char *text, size_t bytes);

/*
 * The longest token at text[at]. Control tokens count only when they end at control_end or before
 * (pass `at` to exclude them). -1 = none.
 */
int32_t pkv_specials_match(const pkv_specials *s, const char *text, size_t at, size_t bytes,
                           size_t control_end);

#endif
