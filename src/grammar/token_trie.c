/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/token_trie.h"

#include <string.h>

#include "base/status.h"

typedef struct entry {
  const char *bytes;
  size_t count;
  int32_t token;
} entry;

static int compare(const entry *a, const entry *b) {
  const size_t least = a->count < b->count ? a->count : b->count;
  const int order = memcmp(a->bytes, b->bytes, least);
  if (order != 0) return order;
  if (a->count != b->count) return a->count < b->count ? -1 : 1;
  return a->token < b->token ? -1 : 1;
}

static void sift(entry *e, size_t count, size_t at) {
  const entry moving = e[at];
  for (;;) {
    size_t child = 2 * at + 1;
    if (child >= count) break;
    if (child + 1 < count && compare(&e[child + 1], &e[child]) > 0) child++;
    if (compare(&e[child], &moving) < 0) break;
    e[at] = e[child];
    at = child;
  }
  e[at] = moving;
}

static void sort(entry *e, size_t count) {
  for (size_t i = count / 2; i-- > 0;)
    sift(e, count, i);
  for (size_t i = count; i-- > 1;) {
    const entry last = e[i];
    e[i] = e[0];
    e[0] = last;
    sift(e, i, 0);
  }
}

static size_t common(const entry *a, const entry *b) {
  size_t i = 0;
  while (i < a->count && i < b->count && a->bytes[i] == b->bytes[i])
    i++;
  return i;
}

/* Sorted entries are the walk: each adds a node for every byte that the one before lacks. The node
   that ends a text is the last one that its first entry adds, so that the next node begins behind
   all tokens of that text. With NULL nodes they are only counted. */
static int32_t lay_out(pkv_trie_node *nodes, int32_t *tokens, const entry *e, size_t count) {
  int32_t open[PKV_TRIE_DEPTH + 1];
  int32_t made = 0;
  size_t depth = 0;
  for (size_t i = 0; i < count; i++) {
    const size_t same = i > 0 ? common(&e[i - 1], &e[i]) : 0;
    while (depth > same) {
      if (nodes != NULL) nodes[open[depth]].after = made;
      depth--;
    }
    while (depth < e[i].count) {
      open[++depth] = made;
      if (nodes != NULL)
        nodes[made] =
            (pkv_trie_node){0, (int32_t)i, (uint16_t)depth, (uint8_t)e[i].bytes[depth - 1]};
      made++;
    }
    if (tokens != NULL) tokens[i] = e[i].token;
  }
  for (; depth > 0 && nodes != NULL; depth--)
    nodes[open[depth]].after = made;
  return made;
}

pkv_status pkv_token_trie_create(pkv_token_trie **out, int32_t vocab, pkv_token_text_fn *text,
                                 const void *user, const pkv_allocator *allocator, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  const size_t bytes = (size_t)vocab * sizeof(entry);
  *out = NULL;
  pkv_token_trie *const trie = pkv_alloc_zeroed(&a, 1, sizeof *trie);
  entry *const entries = pkv_alloc(&a, bytes);
  pkv_status status = PKV_OK;
  size_t count = 0;
  if (trie == NULL || entries == NULL) goto no_memory;
  trie->allocator = a;
  trie->vocab = vocab;
  for (int32_t i = 0; i < vocab; i++) {
    entry *const e = &entries[count];
    e->token = i;
    text(user, i, &e->bytes, &e->count);
    count += e->count > 0 && e->count <= PKV_TRIE_DEPTH;
  }
  sort(entries, count);
  trie->token_count = (int32_t)count;
  trie->node_count = lay_out(NULL, NULL, entries, count);
  trie->nodes = pkv_alloc(&a, ((size_t)trie->node_count + 1) * sizeof *trie->nodes);
  trie->tokens = pkv_alloc(&a, (count + 1) * sizeof *trie->tokens);
  if (trie->nodes == NULL || trie->tokens == NULL) goto no_memory;
  (void)lay_out(trie->nodes, trie->tokens, entries, count);
  trie->nodes[trie->node_count] = (pkv_trie_node){trie->node_count, trie->token_count, 0, 0};
  *out = trie;
  goto done;
no_memory:
  status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d tokens' texts", (int)vocab);
  pkv_token_trie_destroy(trie);
done:
  pkv_free(&a, entries, bytes);
  return status;
}

void pkv_token_trie_destroy(pkv_token_trie *trie) {
  if (trie == NULL) return;
  const pkv_allocator a = trie->allocator;
  if (trie->nodes != NULL)
    pkv_free(&a, trie->nodes, ((size_t)trie->node_count + 1) * sizeof *trie->nodes);
  if (trie->tokens != NULL)
    pkv_free(&a, trie->tokens, ((size_t)trie->token_count + 1) * sizeof *trie->tokens);
  pkv_free(&a, trie, sizeof *trie);
}
