/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The texts of a vocabulary as one tree over bytes, its nodes in the order of a walk: who stands in
 * the way of many tokens is looked at once. Immutable.
 */
#ifndef PKV_GRAMMAR_TOKEN_TRIE_H
#define PKV_GRAMMAR_TOKEN_TRIE_H

#include <stdbool.h>

#include "base/alloc.h"

/* Longer tokens are no answer to a grammar. */
#define PKV_TRIE_DEPTH 256

typedef struct pkv_trie_node {
  int32_t after;  /* the first node that is not below this one */
  int32_t token;  /* the first of `tokens` that end here; those of the next node follow */
  uint16_t depth; /* from 1 */
  uint8_t byte;
} pkv_trie_node;

typedef struct pkv_token_trie {
  pkv_allocator allocator;
  int32_t vocab, node_count, token_count;
  pkv_trie_node *nodes; /* [node_count + 1] */
  int32_t *tokens;      /* [token_count], by text */
} pkv_token_trie;

/* text gives token i's bytes; no bytes: the token has no part in it. */
typedef void pkv_token_text_fn(const void *user, int32_t token, const char **bytes, size_t *count);

pkv_status pkv_token_trie_create(pkv_token_trie **out, int32_t vocab, pkv_token_text_fn *text,
                                 const void *user, const pkv_allocator *allocator, pkv_error *err);
void pkv_token_trie_destroy(pkv_token_trie *trie);

#endif
