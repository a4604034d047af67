/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of a SentencePiece vocabulary, and the joining of a run of text by them. */
#include "model/tokenizer_pieces.h"

#include <math.h>
#include <string.h>

#include "base/text.h"

#define KEY_SCORES  "tokenizer.ggml.scores"
#define KEY_UNKNOWN "tokenizer.ggml.unknown_token_id"

/* ------------------------------------------------------------------------------------------
 * Loading
 * ------------------------------------------------------------------------------------------ */

/* An integer that falls as the score rises; the two zeros are one score. */
static uint32_t order_of(float score) {
  uint32_t bits;
  score += 0.0f;
  memcpy(&bits, &score, sizeof bits);
  return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
}

static pkv_status load(pkv_pieces *p, const pkv_vocab *vocab, const pkv_gguf_value *scores,
                       pkv_error *err) {
  for (int32_t id = 0; id < p->size; id++) {
    const double score = pkv_gguf_element_float(scores, (uint64_t)id);
    PKV_CHECK(err, !isnan(score), PKV_E_FORMAT, KEY_SCORES "[%d] is not a number", id);
    p->order[id] = order_of((float)score);
    const size_t bytes = pkv_vocab_piece(vocab, id).size;
    const uint8_t type = vocab->type[id];
    if (type != PKV_TOKEN_NORMAL && type != PKV_TOKEN_UNDEFINED) continue;
    PKV_CHECK(err, bytes <= PKV_PIECE_MAX_BYTES, PKV_E_LIMIT,
              "tokenizer.ggml.tokens[%d] has %zu bytes, at most %d are allowed with scores", id,
              bytes, PKV_PIECE_MAX_BYTES);
    if (bytes > p->longest) p->longest = bytes;
  }
  return PKV_OK;
}

pkv_status pkv_pieces_load(pkv_pieces *p, const pkv_vocab *vocab, const pkv_gguf *gguf,
                           pkv_error *err) {
  memset(p, 0, sizeof *p);
  const pkv_gguf_value *scores = pkv_gguf_find(gguf, KEY_SCORES);
  int64_t unknown = -1;
  PKV_CHECK(err, scores != NULL, PKV_E_FORMAT, KEY_SCORES " is missing");
  PKV_CHECK(err, scores->type == PKV_GGUF_ARRAY && scores->element_type == PKV_GGUF_F32,
            PKV_E_FORMAT, KEY_SCORES " is %s (elements %s), not an array of f32",
            pkv_gguf_type_name(scores->type), pkv_gguf_type_name(scores->element_type));
  PKV_CHECK(err, scores->count == (uint64_t)vocab->size, PKV_E_FORMAT,
            KEY_SCORES " has %llu elements, tokenizer.ggml.tokens has %d",
            (unsigned long long)scores->count, vocab->size);
  PKV_TRY(pkv_gguf_get_int(&unknown, gguf, KEY_UNKNOWN, false, 0, vocab->size - 1, err));
  p->allocator = vocab->allocator;
  p->unknown = (int32_t)unknown;
  p->size = vocab->size;
  p->order = pkv_alloc(&p->allocator, (size_t)p->size * sizeof *p->order);
  PKV_CHECK(err, p->order != NULL, PKV_E_NOMEM, "no memory for the scores of %d tokens", p->size);
  const pkv_status status = load(p, vocab, scores, err);
  if (status != PKV_OK) pkv_pieces_deinit(p);
  return status;
}

void pkv_pieces_deinit(pkv_pieces *p) {
  if (p->order != NULL) pkv_free(&p->allocator, p->order, (size_t)p->size * sizeof *p->order);
  memset(p, 0, sizeof *p);
}

/* ------------------------------------------------------------------------------------------
 * Encoding. Symbol i starts at byte i and ends where the next one starts; its id is the token that
 * it and the next one are together, -1 = none (or joined into its left neighbour).
 * ------------------------------------------------------------------------------------------ */

void pkv_pieces_scratch_init(pkv_pieces_scratch *s, const pkv_allocator *allocator) {
  memset(s, 0, sizeof *s);
  pkv_merge_scratch_init(&s->merge, allocator);
}

void pkv_pieces_scratch_deinit(pkv_pieces_scratch *s) {
  if (s->text != NULL) pkv_free(&s->merge.allocator, s->text, s->capacity);
  s->text = NULL;
  s->capacity = 0;
  pkv_merge_scratch_deinit(&s->merge);
}

static pkv_status reserve(pkv_pieces_scratch *s, size_t bytes, pkv_error *err) {
  PKV_TRY(pkv_merge_scratch_reserve(&s->merge, bytes, err));
  if (bytes <= s->capacity) return PKV_OK;
  if (s->text != NULL) pkv_free(&s->merge.allocator, s->text, s->capacity);
  s->capacity = 0;
  const size_t capacity = bytes < 256 ? 256 : bytes + bytes / 2;
  s->text = pkv_alloc(&s->merge.allocator, capacity);
  PKV_CHECK(err, s->text != NULL, PKV_E_NOMEM, "no memory for a text of %zu bytes", bytes);
  s->capacity = capacity;
  return PKV_OK;
}

typedef struct run {
  const pkv_pieces *p;
  const pkv_vocab *vocab;
  pkv_merge_scratch *s;
  const char *text;
  uint32_t bytes;
} run;

static uint32_t end_of(const run *r, uint32_t i) {
  return r->s->symbols[i].next == PKV_MERGE_NONE ? r->bytes : r->s->symbols[i].next;
}

/* Looks up what symbol i and the next one are together. */
static void pair_up(const run *r, uint32_t i) {
  if (i == PKV_MERGE_NONE) return;
  pkv_merge_symbol *symbol = &r->s->symbols[i];
  symbol->id = -1;
  if (symbol->next == PKV_MERGE_NONE) return;
  const size_t size = end_of(r, symbol->next) - i;
  if (size > r->p->longest) return;
  symbol->id = pkv_vocab_find(r->vocab, r->text + i, size);
  if (symbol->id >= 0) pkv_merge_heap_push(r->s, (uint64_t)r->p->order[symbol->id] << 32 | i);
}

/* An entry is stale when its symbol has since become part of another one, or has another next
   one: unless both pairs have the same score, which makes the entry that of the new pair. */
static void join_all(const run *r) {
  pkv_merge_scratch *s = r->s;
  while (s->heap_size > 0) {
    const uint64_t key = pkv_merge_heap_pop(s);
    const uint32_t left = (uint32_t)key;
    pkv_merge_symbol *a = &s->symbols[left];
    if (a->id < 0 || r->p->order[a->id] != key >> 32) continue;
    pkv_merge_symbol *b = &s->symbols[a->next];
    b->id = -1;
    a->next = b->next;
    if (a->next != PKV_MERGE_NONE) s->symbols[a->next].prev = left;
    pair_up(r, a->prev);
    pair_up(r, left);
  }
}

static pkv_status put_symbol(pkv_token_sink *sink, const run *r, uint32_t i, pkv_error *err) {
  const uint32_t end = end_of(r, i);
  const int32_t id = pkv_vocab_find(r->vocab, r->text + i, end - i);
  if (id >= 0) {
    pkv_token_sink_put(sink, id);
    return PKV_OK;
  }
  for (uint32_t at = i; at < end; at++) {
    const unsigned char byte = (unsigned char)r->text[at];
    if (r->vocab->byte_token[byte] >= 0) continue;
    PKV_CHECK(err, r->p->unknown >= 0, PKV_E_UNSUPPORTED,
              "the vocabulary has no token for byte 0x%02x, and no unknown token", (unsigned)byte);
    pkv_token_sink_put(sink, r->p->unknown);
    return PKV_OK;
  }
  for (uint32_t at = i; at < end; at++)
    pkv_token_sink_put(sink, r->vocab->byte_token[(unsigned char)r->text[at]]);
  return PKV_OK;
}

/* Bytes of the character at text[0]; 1 for a byte that starts none. */
static uint32_t character(const char *text, uint32_t left) {
  const unsigned char lead = (unsigned char)text[0];
  const uint32_t size = lead < 0xc0 ? 1 : (lead < 0xe0 ? 2 : (lead < 0xf0 ? 3 : 4));
  return size <= left && pkv_utf8_valid(text, size) ? size : 1;
}

/* Each character a symbol, linked to its neighbours. */
static void cut(const run *r) {
  uint32_t prev = PKV_MERGE_NONE;
  for (uint32_t i = 0; i < r->bytes;) {
    const uint32_t next = i + character(r->text + i, r->bytes - i);
    r->s->symbols[i] = (pkv_merge_symbol){-1, prev, next < r->bytes ? next : PKV_MERGE_NONE};
    prev = i;
    i = next;
  }
}

pkv_status pkv_pieces_encode(pkv_token_sink *sink, pkv_pieces_scratch *scratch, const pkv_pieces *p,
                             const pkv_vocab *vocab, const char *text, size_t bytes, bool space,
                             pkv_error *err) {
  if (bytes == 0) return PKV_OK;
  PKV_CHECK(err, bytes < PKV_MERGE_MAX_WORD, PKV_E_LIMIT,
            "a text of %zu bytes without a special token, at most %u are allowed", bytes,
            PKV_MERGE_MAX_WORD - 1);
  PKV_TRY(reserve(scratch, bytes + 1, err));
  char *to = scratch->text;
  if (space) *to++ = ' ';
  to += pkv_vocab_put_spaces(to, text, bytes);
  const run r = {p, vocab, &scratch->merge, scratch->text, (uint32_t)(to - scratch->text)};
  cut(&r);
  scratch->merge.heap_size = 0;
  for (uint32_t i = 0; i != PKV_MERGE_NONE; i = r.s->symbols[i].next)
    pair_up(&r, i);
  join_all(&r);
  for (uint32_t i = 0; i != PKV_MERGE_NONE; i = r.s->symbols[i].next)
    PKV_TRY(put_symbol(sink, &r, i, err));
  return PKV_OK;
}
