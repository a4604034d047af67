/* SPDX-License-Identifier: Apache-2.0 */
/* A sorted list of tokens, narrowed byte by byte: no table grows with the length of the tokens. */
#include "model/tokenizer_special.h"

#include <string.h>

static bool is_special(const pkv_vocab *v, int32_t id) {
  return v->offset[id + 1] > v->offset[id] &&
         (pkv_vocab_is_control(v, id) || v->type[id] == PKV_TOKEN_USER);
}

static bool same(const pkv_vocab *v, int32_t a, int32_t b) {
  const pkv_span x = pkv_vocab_piece(v, a), y = pkv_vocab_piece(v, b);
  return x.size == y.size && memcmp(x.data, y.data, x.size) == 0;
}

/* Bytewise, a shorter one before the longer ones that it starts, then by id. */
static int compare(const pkv_vocab *v, int32_t a, int32_t b) {
  const pkv_span x = pkv_vocab_piece(v, a), y = pkv_vocab_piece(v, b);
  const size_t n = x.size < y.size ? x.size : y.size;
  const int order = memcmp(x.data, y.data, n);
  if (order != 0) return order;
  if (x.size != y.size) return x.size < y.size ? -1 : 1;
  return a < b ? -1 : a > b;
}

static void sift_down(const pkv_vocab *v, int32_t *ids, int32_t i, int32_t n) {
  for (;;) {
    int32_t child = 2 * i + 1;
    if (child >= n) return;
    if (child + 1 < n && compare(v, ids[child], ids[child + 1]) < 0) child++;
    if (compare(v, ids[i], ids[child]) >= 0) return;
    const int32_t swap = ids[i];
    ids[i] = ids[child];
    ids[child] = swap;
    i = child;
  }
}

/* Heap sort: in place, and never quadratic on a hostile order. */
static void sort(const pkv_vocab *v, int32_t *ids, int32_t n) {
  for (int32_t i = n / 2 - 1; i >= 0; i--)
    sift_down(v, ids, i, n);
  for (int32_t end = n - 1; end > 0; end--) {
    const int32_t swap = ids[0];
    ids[0] = ids[end];
    ids[end] = swap;
    sift_down(v, ids, 0, end);
  }
}

static void index_first_bytes(pkv_specials *s) {
  int32_t at = 0;
  for (int b = 0; b < 256; b++) {
    s->first[b] = at;
    while (at < s->count &&
           (unsigned char)pkv_vocab_piece(s->vocab, s->ids[at]).data[0] == (unsigned)b) {
      s->any_first[b] = true;
      if (s->vocab->type[s->ids[at]] == PKV_TOKEN_USER) s->user_first[b] = true;
      at++;
    }
  }
  s->first[256] = at;
}

static pkv_status check(const pkv_specials *s, pkv_error *err) {
  for (int32_t i = 0; i < s->count; i++) {
    const size_t bytes = pkv_vocab_piece(s->vocab, s->ids[i]).size;
    PKV_CHECK(err, bytes <= PKV_SPECIAL_MAX_BYTES, PKV_E_LIMIT,
              "special token %d has %zu bytes, at most %d are allowed", s->ids[i], bytes,
              PKV_SPECIAL_MAX_BYTES);
    PKV_CHECK(err, i == 0 || !same(s->vocab, s->ids[i - 1], s->ids[i]), PKV_E_FORMAT,
              "special tokens %d and %d are spelled the same", s->ids[i - 1], s->ids[i]);
  }
  return PKV_OK;
}

pkv_status pkv_specials_build(pkv_specials *s, const pkv_vocab *vocab, pkv_error *err) {
  memset(s, 0, sizeof *s);
  s->allocator = vocab->allocator;
  s->vocab = vocab;
  int32_t count = 0;
  for (int32_t id = 0; id < vocab->size; id++)
    count += is_special(vocab, id);
  if (count == 0) return PKV_OK;
  s->ids = pkv_alloc(&s->allocator, (size_t)count * sizeof *s->ids);
  PKV_CHECK(err, s->ids != NULL, PKV_E_NOMEM, "no memory for %d special tokens", count);
  s->count = count;
  int32_t n = 0;
  for (int32_t id = 0; id < vocab->size; id++) {
    if (is_special(vocab, id)) s->ids[n++] = id;
  }
  sort(vocab, s->ids, count);
  const pkv_status status = check(s, err);
  if (status != PKV_OK) {
    pkv_specials_deinit(s);
    return status;
  }
  index_first_bytes(s);
  return PKV_OK;
}

void pkv_specials_deinit(pkv_specials *s) {
  pkv_free(&s->allocator, s->ids, (size_t)s->count * sizeof *s->ids);
  memset(s, 0, sizeof *s);
}

/* Byte `depth` of the i-th; all in the range are known to be longer. */
static unsigned char byte_at(const pkv_specials *s, int32_t i, size_t depth) {
  return (unsigned char)pkv_vocab_piece(s->vocab, s->ids[i]).data[depth];
}

/* First of ids[low .. high) whose byte at depth is >= byte. */
static int32_t lower_bound(const pkv_specials *s, int32_t low, int32_t high, size_t depth,
                           unsigned byte) {
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (byte_at(s, middle, depth) < byte)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

int32_t pkv_specials_match(const pkv_specials *s, const char *text, size_t at, size_t bytes,
                           size_t control_end) {
  const unsigned char start = (unsigned char)text[at];
  if (!(control_end > at ? s->any_first[start] : s->user_first[start])) return -1;
  int32_t low = s->first[start], high = s->first[start + 1], best = -1;
  /* All of ids[low .. high) agree with the text in `depth` bytes. */
  for (size_t depth = 1;; depth++) {
    if (low < high && pkv_vocab_piece(s->vocab, s->ids[low]).size == depth) {
      const int32_t id = s->ids[low++];
      if (s->vocab->type[id] == PKV_TOKEN_USER || at + depth <= control_end) best = id;
    }
    if (low >= high || at + depth >= bytes) return best;
    const unsigned char next = (unsigned char)text[at + depth];
    if (byte_at(s, low, depth) != next || byte_at(s, high - 1, depth) != next) {
      low = lower_bound(s, low, high, depth, next);
      high = lower_bound(s, low, high, depth, next + 1u);
    }
  }
}

int32_t pkv_specials_exact(const pkv_specials *s, const char *text, size_t bytes) {
  if (bytes == 0) return -1;
  const int32_t id = pkv_specials_match(s, text, 0, bytes, bytes);
  return id >= 0 && pkv_vocab_piece(s->vocab, id).size == bytes ? id : -1;
}
