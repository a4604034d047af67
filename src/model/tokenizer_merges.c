/* SPDX-License-Identifier: Apache-2.0 */
/* The table of ranked pairs, and the heap that joins them in order. */
#include "model/tokenizer_merges.h"

#include <string.h>

#define KEY_MERGES "tokenizer.ggml.merges"
#define MAX_MERGES 16777216u

/* ------------------------------------------------------------------------------------------
 * Pairs
 * ------------------------------------------------------------------------------------------ */

static uint32_t pair_hash(int32_t left, int32_t right) {
  /* Both ids in one word, multiplied twice: the high bits of a product are the well mixed ones. */
  uint64_t x = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  x *= 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  return (uint32_t)(x * 0xd6e8feb86659fd93u >> 32);
}

static pkv_merge_slot *find_slot(const pkv_merges *m, int32_t left, int32_t right) {
  for (uint32_t i = pair_hash(left, right) & m->slot_mask;; i = (i + 1) & m->slot_mask) {
    pkv_merge_slot *slot = &m->slots[i];
    if (slot->left < 0 || (slot->left == left && slot->right == right)) return slot;
  }
}

int32_t pkv_merges_rank(const pkv_merges *m, int32_t left, int32_t right) {
  return find_slot(m, left, right)->rank;
}

/* The id of a piece. Vocabularies number the results of merges in the order of the merges, so the
   id behind the last result is looked at before the table is. */
static int32_t find_result(const pkv_vocab *vocab, int32_t guess, const char *bytes, size_t count) {
  if (guess < vocab->size && vocab->type[guess] == PKV_TOKEN_NORMAL) {
    const pkv_span piece = pkv_vocab_piece(vocab, guess);
    if (piece.size == count && memcmp(piece.data, bytes, count) == 0) return guess;
  }
  return pkv_vocab_find(vocab, bytes, count);
}

/* A part of a line as the vocabulary keeps its pieces. */
static int64_t spelled(const pkv_vocab *vocab, char *out, const char *text, size_t bytes) {
  if (vocab->spelling == PKV_SPELLING_BYTES) return pkv_vocab_decode(out, text, bytes);
  memcpy(out, text, bytes);
  return (int64_t)bytes;
}

/* Reads one line into ids. joined has room for two pieces; last is the result before this one. */
static pkv_status read_merge(pkv_merge *out, const pkv_vocab *vocab, pkv_span line, size_t index,
                             int32_t last, char *joined, pkv_error *err) {
  const char *blank = line.size > 0 ? memchr(line.data, ' ', line.size) : NULL;
  const size_t left_size = blank != NULL ? (size_t)(blank - line.data) : 0;
  const size_t right_size = blank != NULL ? line.size - left_size - 1 : 0;
  PKV_CHECK(err,
            left_size > 0 && right_size > 0 && memchr(blank + 1, ' ', right_size) == NULL &&
                left_size <= PKV_VOCAB_MAX_PIECE && right_size <= PKV_VOCAB_MAX_PIECE,
            PKV_E_FORMAT, KEY_MERGES "[%zu] of %zu bytes is not two pieces with a blank between",
            index, line.size);
  const int64_t left = spelled(vocab, joined, line.data, left_size);
  const int64_t right =
      left < 0 ? -1 : spelled(vocab, joined + left, line.data + left_size + 1, right_size);
  PKV_CHECK(err, right >= 0, PKV_E_FORMAT,
            KEY_MERGES "[%zu] has a character outside the byte alphabet", index);
  out->left = pkv_vocab_find(vocab, joined, (size_t)left);
  out->right = pkv_vocab_find(vocab, joined + left, (size_t)right);
  out->result = find_result(vocab, last + 1, joined, (size_t)(left + right));
  PKV_CHECK(err, out->left >= 0 && out->right >= 0 && out->result >= 0, PKV_E_FORMAT,
            KEY_MERGES "[%zu]: its %s is not in the vocabulary", index,
            out->left < 0    ? "left part"
            : out->right < 0 ? "right part"
                             : "result");
  return PKV_OK;
}

/* Lines are read ahead of the table by a block, so that its cells are on their way from memory. */
#define AHEAD 16u

static pkv_status fill(pkv_merges *m, const pkv_vocab *vocab, pkv_string_walk walk, char *joined,
                       pkv_error *err) {
  int32_t last = -1;
  for (size_t start = 0; start < m->count; start += AHEAD) {
    const size_t end = m->count - start < AHEAD ? m->count : start + AHEAD;
    for (size_t i = start; i < end; i++) {
      pkv_merge *merge = &m->list[i];
      PKV_TRY(read_merge(merge, vocab, pkv_string_walk_next(&walk), i, last, joined, err));
      last = merge->result;
      __builtin_prefetch(&m->slots[pair_hash(merge->left, merge->right) & m->slot_mask], 1);
    }
    for (size_t i = start; i < end; i++) {
      const pkv_merge *merge = &m->list[i];
      pkv_merge_slot *slot = find_slot(m, merge->left, merge->right);
      if (slot->left < 0) *slot = (pkv_merge_slot){merge->left, merge->right, (int32_t)i};
    }
  }
  return PKV_OK;
}

static pkv_status load(pkv_merges *m, const pkv_vocab *vocab, pkv_string_walk walk,
                       pkv_error *err) {
  uint32_t cells = 8;
  while (cells < m->count + m->count / 2)
    cells *= 2;
  m->slot_mask = cells - 1; /* before anything fails: deinit goes by it */
  if (m->count > 0) m->list = pkv_alloc(&m->allocator, m->count * sizeof *m->list);
  m->slot_mask = cells - 1;
  m->slots = pkv_alloc(&m->allocator, cells * sizeof *m->slots);
  PKV_CHECK(err, m->slots != NULL && (m->count == 0 || m->list != NULL), PKV_E_NOMEM,
            "no memory for %zu merges", m->count);
  for (uint32_t i = 0; i < cells; i++)
    m->slots[i] = (pkv_merge_slot){-1, -1, -1};
  char *joined = pkv_alloc(&m->allocator, 2 * PKV_VOCAB_MAX_PIECE);
  PKV_CHECK(err, joined != NULL, PKV_E_NOMEM, "no memory for %zu merges", m->count);
  const pkv_status status = fill(m, vocab, walk, joined, err);
  pkv_free(&m->allocator, joined, 2 * PKV_VOCAB_MAX_PIECE);
  return status;
}

pkv_status pkv_merges_load(pkv_merges *m, const pkv_vocab *vocab, const pkv_gguf *gguf,
                           pkv_error *err) {
  memset(m, 0, sizeof *m);
  m->allocator = vocab->allocator;
  pkv_string_walk walk;
  PKV_CHECK(err, pkv_gguf_find(gguf, KEY_MERGES) != NULL, PKV_E_FORMAT, KEY_MERGES " is missing");
  PKV_TRY(pkv_string_walk_init(&walk, gguf, KEY_MERGES, err));
  PKV_CHECK(err, walk.left <= MAX_MERGES, PKV_E_LIMIT,
            KEY_MERGES " has %llu elements, at most %u are allowed", (unsigned long long)walk.left,
            MAX_MERGES);
  m->count = (size_t)walk.left;
  const pkv_status status = load(m, vocab, walk, err);
  if (status != PKV_OK) pkv_merges_deinit(m);
  return status;
}

void pkv_merges_deinit(pkv_merges *m) {
  pkv_free(&m->allocator, m->list, m->count * sizeof *m->list);
  pkv_free(&m->allocator, m->slots, ((size_t)m->slot_mask + 1) * sizeof *m->slots);
  memset(m, 0, sizeof *m);
}

/* ------------------------------------------------------------------------------------------
 * Scratch
 * ------------------------------------------------------------------------------------------ */

void pkv_merge_scratch_init(pkv_merge_scratch *s, const pkv_allocator *allocator) {
  memset(s, 0, sizeof *s);
  s->allocator = pkv_allocator_or_default(allocator);
}

void pkv_merge_scratch_deinit(pkv_merge_scratch *s) {
  pkv_free(&s->allocator, s->symbols, s->symbol_capacity * sizeof *s->symbols);
  pkv_free(&s->allocator, s->heap, s->heap_capacity * sizeof *s->heap);
  s->symbols = NULL;
  s->heap = NULL;
  s->symbol_capacity = s->heap_capacity = 0;
}

/*
 * Room for a word of n bytes. The heap starts with at most n - 1 pairs, and each of at most n - 1
 * merges takes one away and adds two: never more than 2n at once.
 */
pkv_status pkv_merge_scratch_reserve(pkv_merge_scratch *s, size_t n, pkv_error *err) {
  if (n <= s->symbol_capacity) return PKV_OK;
  size_t capacity = s->symbol_capacity * 2 > n ? s->symbol_capacity * 2 : n;
  if (capacity < 64) capacity = 64;
  pkv_merge_scratch_deinit(s); /* nothing of the last word is needed */
  s->symbols = pkv_alloc(&s->allocator, capacity * sizeof *s->symbols);
  if (s->symbols != NULL) s->symbol_capacity = capacity;
  s->heap = pkv_alloc(&s->allocator, 2 * capacity * sizeof *s->heap);
  if (s->heap != NULL) s->heap_capacity = 2 * capacity;
  if (s->symbols == NULL || s->heap == NULL) {
    pkv_merge_scratch_deinit(s);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory to merge a word of %zu bytes", n);
  }
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * Heap: smallest key first. Rank in the high half and position in the low half make one comparison
 * mean "lowest rank, then leftmost".
 * ------------------------------------------------------------------------------------------ */

void pkv_merge_heap_push(pkv_merge_scratch *s, uint64_t key) {
  PKV_ASSERT(s->heap_size < s->heap_capacity);
  size_t i = s->heap_size++;
  while (i > 0) {
    const size_t parent = (i - 1) / 2;
    if (s->heap[parent] <= key) break;
    s->heap[i] = s->heap[parent];
    i = parent;
  }
  s->heap[i] = key;
}

uint64_t pkv_merge_heap_pop(pkv_merge_scratch *s) {
  const uint64_t top = s->heap[0];
  const uint64_t key = s->heap[--s->heap_size];
  size_t i = 0;
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= s->heap_size) break;
    if (child + 1 < s->heap_size && s->heap[child + 1] < s->heap[child]) child++;
    if (s->heap[child] >= key) break;
    s->heap[i] = s->heap[child];
    i = child;
  }
  s->heap[i] = key;
  return top;
}

/* ------------------------------------------------------------------------------------------
 * One word
 * ------------------------------------------------------------------------------------------ */

static void push_pair(pkv_merge_scratch *s, const pkv_merges *m, uint32_t left, uint32_t right) {
  if (left == PKV_MERGE_NONE || right == PKV_MERGE_NONE) return;
  const int32_t a = s->symbols[left].id, b = s->symbols[right].id;
  if (a < 0 || b < 0) return;
  const int32_t rank = pkv_merges_rank(m, a, b);
  if (rank >= 0) pkv_merge_heap_push(s, (uint64_t)(uint32_t)rank << 32 | left);
}

static void merge_all(pkv_merge_scratch *s, const pkv_merges *m) {
  while (s->heap_size > 0) {
    const uint64_t key = pkv_merge_heap_pop(s);
    const pkv_merge *merge = &m->list[key >> 32];
    const uint32_t left = (uint32_t)key;
    pkv_merge_symbol *a = &s->symbols[left];
    /* An entry is stale when either side has been joined with something else since. */
    if (a->id != merge->left || a->next == PKV_MERGE_NONE) continue;
    pkv_merge_symbol *b = &s->symbols[a->next];
    if (b->id != merge->right) continue;
    a->id = merge->result;
    b->id = -1;
    a->next = b->next;
    if (a->next != PKV_MERGE_NONE) s->symbols[a->next].prev = left;
    push_pair(s, m, a->prev, left);
    push_pair(s, m, left, a->next);
  }
}

void pkv_merge_symbols(pkv_merge_scratch *s, const pkv_merges *m, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    s->symbols[i].prev = i > 0 ? i - 1 : PKV_MERGE_NONE;
    s->symbols[i].next = i + 1 < n ? i + 1 : PKV_MERGE_NONE;
  }
  s->heap_size = 0;
  for (uint32_t i = 0; i + 1 < n; i++)
    push_pair(s, m, i, i + 1);
  merge_all(s, m);
}

pkv_status pkv_merge_word(pkv_token_sink *sink, pkv_merge_scratch *s, const pkv_merges *m,
                          const pkv_vocab *vocab, const char *word, size_t bytes,
                          const int32_t *replacement, size_t replacement_count, pkv_error *err) {
  if (bytes == 0) return PKV_OK;
  PKV_CHECK(err, bytes <= PKV_MERGE_MAX_WORD, PKV_E_LIMIT,
            "a word of %zu bytes, at most %u are allowed", bytes, PKV_MERGE_MAX_WORD);
  PKV_TRY(pkv_merge_scratch_reserve(s, bytes, err));
  const uint32_t n = (uint32_t)bytes;
  for (uint32_t i = 0; i < n; i++) {
    const int32_t id = vocab->byte_token[(unsigned char)word[i]];
    PKV_CHECK(err, id >= 0 || replacement_count > 0, PKV_E_UNSUPPORTED,
              "the vocabulary has no token for byte 0x%02x", (unsigned)(unsigned char)word[i]);
    s->symbols[i].id = id;
  }
  pkv_merge_symbols(s, m, n);
  for (uint32_t i = 0; i != PKV_MERGE_NONE; i = s->symbols[i].next) {
    if (s->symbols[i].id >= 0) {
      pkv_token_sink_put(sink, s->symbols[i].id);
    } else {
      for (size_t k = 0; k < replacement_count; k++)
        pkv_token_sink_put(sink, replacement[k]);
    }
  }
  return PKV_OK;
}
