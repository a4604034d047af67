/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tokenizer_chars.h"

#include <string.h>

#include "base/text.h"

#define LOW_LINE "\xe2\x96\x81"

/* ---- loading ---- */

static pkv_status fill_shown(pkv_chars *c, pkv_error *err) {
  const pkv_vocab *v = c->vocab;
  size_t at = 0;
  c->shown_bytes = v->bytes_size;
  c->shown = pkv_alloc(&c->allocator, c->shown_bytes);
  c->offset = pkv_alloc(&c->allocator, ((size_t)v->size + 1) * sizeof *c->offset);
  PKV_CHECK(err, c->shown && c->offset, PKV_E_NOMEM, "no memory for %d tokens", (int)v->size);
  for (int32_t id = 0; id < v->size; id++) {
    const pkv_span piece = pkv_vocab_piece(v, id);
    c->offset[id] = (uint32_t)at;
    if (pkv_vocab_is_control(v, id)) {
      memcpy(c->shown + at, piece.data, piece.size);
      at += piece.size;
    } else {
      at += pkv_vocab_put_spaces(c->shown + at, piece.data, piece.size);
    }
  }
  c->offset[v->size] = (uint32_t)at;
  for (int byte = 0; byte < 256; byte++) {
    const int32_t id = v->byte_token[byte];
    if (id >= 0) c->shown[c->offset[id]] = (char)(unsigned char)byte;
  }
  return PKV_OK;
}

static pkv_status load(pkv_chars *c, const pkv_gguf *gguf, pkv_error *err) {
  int64_t prefix = PKV_PREFIX_NONE, unknown = -1;
  PKV_TRY(pkv_gguf_get_int(&prefix, gguf, "pkv.space_prefix", true, PKV_PREFIX_NONE,
                           PKV_PREFIX_EACH, err));
  PKV_TRY(pkv_gguf_get_int(&unknown, gguf, "tokenizer.ggml.unknown_token_id", false, 0,
                           c->vocab->size - 1, err));
  PKV_TRY(pkv_gguf_get_bool(&c->replace, gguf, "pkv.replace_spaces", true, err));
  PKV_TRY(pkv_gguf_get_bool(&c->split, gguf, "pkv.split_at_spaces", true, err));
  PKV_TRY(pkv_gguf_get_bool(&c->fuse, gguf, "pkv.fuse_unknown", true, err));
  PKV_TRY(pkv_gguf_get_bool(&c->whole_words, gguf, "pkv.ignore_merges", true, err));
  c->prefix = (pkv_space_prefix)prefix;
  c->unknown = (int32_t)unknown;
  return fill_shown(c, err);
}

pkv_status pkv_chars_load(pkv_chars *c, const pkv_vocab *vocab, const pkv_merges *merges,
                          const pkv_gguf *gguf, pkv_error *err) {
  memset(c, 0, sizeof *c);
  c->allocator = vocab->allocator;
  c->vocab = vocab;
  c->merges = merges;
  const pkv_status status = load(c, gguf, err);
  if (status != PKV_OK) pkv_chars_deinit(c);
  return status;
}

void pkv_chars_deinit(pkv_chars *c) {
  if (!c->vocab) return;
  pkv_free(&c->allocator, c->shown, c->shown_bytes);
  pkv_free(&c->allocator, c->offset, ((size_t)c->vocab->size + 1) * sizeof *c->offset);
  memset(c, 0, sizeof *c);
}

pkv_span pkv_chars_shown(const pkv_chars *c, int32_t id) {
  const bool byte = c->vocab->type[id] == PKV_TOKEN_BYTE;
  const uint32_t from = c->offset[id];
  return (pkv_span){c->shown + from, byte ? 1 : c->offset[id + 1] - from};
}

/* ---- scratch ---- */

void pkv_chars_scratch_init(pkv_chars_scratch *s, const pkv_allocator *allocator) {
  memset(s, 0, sizeof *s);
  pkv_merge_scratch_init(&s->merge, allocator);
}

void pkv_chars_scratch_deinit(pkv_chars_scratch *s) {
  pkv_free(&s->merge.allocator, s->text, s->capacity);
  s->text = NULL;
  s->capacity = 0;
  pkv_merge_scratch_deinit(&s->merge);
}

/* ---- text ---- */

/* The text with its prefix and, where wanted, U+2581 for spaces, into the scratch; NULL: no
   memory. */
static size_t spell(pkv_chars_scratch *s, const pkv_chars *c, const char *text, size_t bytes,
                    bool first, pkv_error *err) {
  const size_t need = 3 * bytes + 3;
  if (need > s->capacity) {
    pkv_free(&s->merge.allocator, s->text, s->capacity);
    s->capacity = 0;
    s->text = pkv_alloc(&s->merge.allocator, need);
    if (!s->text) return (void)PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu bytes", need), 0;
    s->capacity = need;
  }
  const bool has = text[0] == ' ' || (bytes >= 3 && memcmp(text, LOW_LINE, 3) == 0);
  const bool prefix = c->prefix == PKV_PREFIX_EACH || (c->prefix == PKV_PREFIX_MISSING && !has) ||
                      (c->prefix == PKV_PREFIX_FIRST && first && !has);
  size_t at = 0;
  if (prefix) {
    memcpy(s->text, LOW_LINE, 3);
    at = 3;
  }
  for (size_t i = 0; i < bytes; i++) {
    if (text[i] != ' ' || !c->replace) {
      s->text[at++] = text[i];
      continue;
    }
    memcpy(s->text + at, LOW_LINE, 3);
    at += 3;
  }
  return at;
}

static size_t character(const char *text, size_t left) {
  size_t n = 1;
  const unsigned char lead = (unsigned char)text[0];
  if (lead >= 0xc2) n = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  return n <= left && pkv_utf8_valid(text, n) ? n : 1;
}

/* Ids of one character without a token of its own, appended to the symbols. */
static pkv_status put_bytes(uint32_t *count, pkv_merge_scratch *s, const pkv_chars *c,
                            const char *text, size_t n, bool *fused, pkv_error *err) {
  bool known = true;
  for (size_t i = 0; i < n; i++)
    known = known && c->vocab->byte_token[(unsigned char)text[i]] >= 0;
  if (known) {
    for (size_t i = 0; i < n; i++)
      s->symbols[(*count)++].id = c->vocab->byte_token[(unsigned char)text[i]];
    *fused = false;
    return PKV_OK;
  }
  PKV_CHECK(err, c->unknown >= 0, PKV_E_UNSUPPORTED,
            "the vocabulary has no token for a character of %zu bytes that starts with 0x%02x, and "
            "none for what is unknown",
            n, (unsigned)(unsigned char)text[0]);
  if (!(*fused && c->fuse)) s->symbols[(*count)++].id = c->unknown;
  *fused = true;
  return PKV_OK;
}

static pkv_status encode_word(pkv_token_sink *sink, pkv_merge_scratch *s, const pkv_chars *c,
                              const char *word, size_t bytes, pkv_error *err) {
  uint32_t count = 0;
  bool fused = false;
  const int32_t whole = c->whole_words ? pkv_vocab_find(c->vocab, word, bytes) : -1;
  if (whole >= 0) {
    pkv_token_sink_put(sink, whole);
    return PKV_OK;
  }
  PKV_ASSERT(bytes <= PKV_MERGE_MAX_WORD); /* a quarter of it, spelled three times as long */
  PKV_TRY(pkv_merge_scratch_reserve(s, bytes, err));
  for (size_t i = 0; i < bytes;) {
    const size_t n = character(word + i, bytes - i);
    const int32_t id = pkv_vocab_find(c->vocab, word + i, n);
    if (id >= 0) {
      s->symbols[count++].id = id;
      fused = false;
    } else {
      PKV_TRY(put_bytes(&count, s, c, word + i, n, &fused, err));
    }
    i += n;
  }
  pkv_merge_symbols(s, c->merges, count);
  for (uint32_t i = 0; i != PKV_MERGE_NONE; i = s->symbols[i].next)
    pkv_token_sink_put(sink, s->symbols[i].id);
  return PKV_OK;
}

pkv_status pkv_chars_encode(pkv_token_sink *sink, pkv_chars_scratch *s, const pkv_chars *c,
                            const char *text, size_t bytes, bool first, pkv_error *err) {
  if (bytes == 0) return PKV_OK;
  PKV_CHECK(err, bytes <= PKV_MERGE_MAX_WORD / 4, PKV_E_LIMIT,
            "a text of %zu bytes, at most %u are allowed", bytes, PKV_MERGE_MAX_WORD / 4);
  const size_t total = spell(s, c, text, bytes, first, err);
  if (total == 0) return PKV_E_NOMEM;
  if (!c->split) return encode_word(sink, &s->merge, c, s->text, total, err);
  for (size_t at = 0; at < total;) {
    size_t end = at + 1;
    while (end < total && !(total - end >= 3 && memcmp(s->text + end, LOW_LINE, 3) == 0))
      end++;
    PKV_TRY(encode_word(sink, &s->merge, c, s->text + at, end - at, err));
    at = end;
  }
  return PKV_OK;
}
