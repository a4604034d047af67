/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Byte pair merging: the ranked merges of a vocabulary, and the merging of one word.
 *
 * In a word, the pair of lowest rank is joined first, of equal pairs the leftmost, until no pair
 * has a rank. That order is kept by a heap over a linked list: O(n log n) for a word of n bytes,
 * without recursion.
 */
#ifndef PKV_MODEL_TOKENIZER_MERGES_H
#define PKV_MODEL_TOKENIZER_MERGES_H

#include "model/tokenizer_vocab.h"

typedef struct pkv_merge_slot {
  int32_t left, right; /* ids; left -1 = empty */
  int32_t rank;
} pkv_merge_slot;

typedef struct pkv_merge {
  int32_t left, right, result; /* ids */
} pkv_merge;

/* Immutable after pkv_merges_load. */
typedef struct pkv_merges {
  pkv_allocator allocator;
  pkv_merge *list; /* [count], by rank */
  size_t count;
  pkv_merge_slot *slots;
  uint32_t slot_mask;
} pkv_merges;

/*
 * Reads tokenizer.ggml.merges, lines of "left right". E_FORMAT when the key is missing, a line is
 * not two parts, or a part or what they join to is not in the vocabulary: the merges then belong
 * to another file, and every later rank would be in doubt. A line that repeats an earlier pair is
 * ignored: the lower rank wins.
 */
pkv_status pkv_merges_load(pkv_merges *m, const pkv_vocab *vocab, const pkv_gguf *gguf,
                           pkv_error *err);
void pkv_merges_deinit(pkv_merges *m);

/* Rank of a pair, -1 = they do not merge. */
int32_t pkv_merges_rank(const pkv_merges *m, int32_t left, int32_t right);

/*
 * Where tokens go: the first `capacity` of them to ids, and all of them into the count. This is the
 * two-call pattern's one place. Counts are size_t: no cast to a narrower type anywhere.
 */
typedef struct pkv_token_sink {
  int32_t *ids;
  size_t capacity, count;
} pkv_token_sink;

static inline void pkv_token_sink_put(pkv_token_sink *sink, int32_t id) {
  if (sink->count < sink->capacity) sink->ids[sink->count] = id;
  sink->count++;
}

typedef struct pkv_merge_symbol {
  int32_t id;          /* -1: joined into its left neighbour, or a byte without a token */
  uint32_t prev, next; /* PKV_MERGE_NONE at the ends */
} pkv_merge_symbol;

#define PKV_MERGE_NONE     UINT32_MAX
#define PKV_MERGE_MAX_WORD 0x40000000u /* bytes: indices and heap sizes stay far from overflow */

/* Memory of one thread's merging; grows to the longest word. Single-owner. */
typedef struct pkv_merge_scratch {
  pkv_allocator allocator;
  pkv_merge_symbol *symbols;
  uint64_t *heap; /* rank << 32 | left symbol */
  size_t symbol_capacity, heap_capacity, heap_size;
} pkv_merge_scratch;

void pkv_merge_scratch_init(pkv_merge_scratch *s, const pkv_allocator *allocator);
void pkv_merge_scratch_deinit(pkv_merge_scratch *s);
/* Room for a word of n symbols: n symbols, and a heap of 2n, which holds n - 1 first pairs and of
   each merge one gone and two new ones. Contents are lost. */
pkv_status pkv_merge_scratch_reserve(pkv_merge_scratch *s, size_t n, pkv_error *err);
/* Smallest key first: priority << 32 | left symbol means "best, then leftmost". */
void pkv_merge_heap_push(pkv_merge_scratch *s, uint64_t key);
uint64_t pkv_merge_heap_pop(pkv_merge_scratch *s); /* heap_size > 0 */

/* Joins symbols[0 .. count), whose ids are set, until no pair has a rank; what is left is the list
   that starts at symbol 0. The scratch was reserved for at least `count`. */
void pkv_merge_symbols(pkv_merge_scratch *s, const pkv_merges *m, uint32_t count);
/*
 * Merges one word and puts its tokens. A byte for which the vocabulary has no token becomes the
 * `replacement_count` ids of replacement; when there are none it is E_UNSUPPORTED naming the byte.
 * E_LIMIT beyond PKV_MERGE_MAX_WORD.
 */
pkv_status pkv_merge_word(pkv_token_sink *sink, pkv_merge_scratch *scratch, const pkv_merges *m,
                          const pkv_vocab *vocab, const char *word, size_t bytes,
                          const int32_t *replacement, size_t replacement_count, pkv_error *err);

#endif
