/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer object: what the file says about it, and the walk from text to tokens and back. */
#include "model/tokenizer.h"

#include <string.h>

#include "base/log.h"
#include "model/tokenizer_chars.h"
#include "model/tokenizer_merges.h"
#include "model/tokenizer_pieces.h"
#include "model/tokenizer_special.h"
#include "model/tokenizer_split.h"
#include "model/unicode_nfc.h"
#include "pkv/engine.h"

#define MAX_ENDS 16

typedef enum tokenizer_kind { BY_BYTES, BY_SCORE, BY_CHARACTERS } tokenizer_kind;

struct pkv_tokenizer {
  pkv_allocator allocator;
  pkv_vocab vocab;
  pkv_merges merges;
  pkv_specials specials;  /* borrows vocab */
  pkv_splitter *splitter; /* NULL unless by bytes */
  pkv_pieces pieces;      /* of a tokenizer by score, which has no merges */
  pkv_chars chars;        /* of a tokenizer by characters; borrows vocab and merges */
  tokenizer_kind kind;
  bool space_prefix, nfc;
  bool whole_words, add_bos, add_eos;
  int32_t bos, eos;
  int32_t ends[MAX_ENDS];
  int32_t end_count;
  int32_t replacement[3]; /* U+FFFD, for bytes without a token */
  size_t replacement_count;
};

/* ------------------------------------------------------------------------------------------
 * Creation
 * ------------------------------------------------------------------------------------------ */

static bool is_text(pkv_span s, const char *text) {
  return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0;
}

static pkv_status choose_model(tokenizer_kind *kind, const pkv_gguf *gguf, pkv_error *err) {
  char text[PKV_GGUF_QUOTE_BYTES];
  pkv_span model = {NULL, 0};
  PKV_TRY(pkv_gguf_get_string(&model, gguf, "tokenizer.ggml.model", true, err));
  *kind = is_text(model, "llama")                                                   ? BY_SCORE
          : pkv_gguf_is_folder(gguf) && is_text(model, PKV_TOKENIZER_BY_CHARACTERS) ? BY_CHARACTERS
                                                                                    : BY_BYTES;
  PKV_CHECK(err, *kind != BY_BYTES || is_text(model, "gpt2"), PKV_E_UNSUPPORTED,
            "tokenizer.ggml.model is '%s', supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece's, by scores)",
            pkv_gguf_quote(text, model));
  return PKV_OK;
}

static pkv_status choose_rule(const pkv_split_rule **rule, const pkv_gguf *gguf, pkv_error *err) {
  char text[PKV_GGUF_QUOTE_BYTES];
  pkv_span pre = {NULL, 0};
  PKV_TRY(pkv_gguf_get_string(&pre, gguf, "tokenizer.ggml.pre", false, err));
  PKV_CHECK(err, pre.data != NULL, PKV_E_UNSUPPORTED,
            "tokenizer.ggml.pre is missing: how to split text into words is not known");
  *rule = pkv_split_rule_find(pre);
  PKV_CHECK(err, *rule != NULL, PKV_E_UNSUPPORTED,
            "tokenizer.ggml.pre is '%s', supported are gpt-2, smollm, qwen2, llama-bpe "
            "(llama3, llama-v3)",
            pkv_gguf_quote(text, pre));
  return PKV_OK;
}

static void add_end(pkv_tokenizer *t, int32_t id) {
  if (id >= 0 && !pkv_tokenizer_is_end(t, id) && t->end_count < MAX_ENDS)
    t->ends[t->end_count++] = id;
}

static pkv_status get_id(int32_t *id, const pkv_tokenizer *t, const pkv_gguf *gguf, const char *key,
                         pkv_error *err) {
  int64_t value = -1;
  PKV_TRY(pkv_gguf_get_int(&value, gguf, key, false, 0, t->vocab.size - 1, err));
  *id = (int32_t)value;
  return PKV_OK;
}

/* Of a folder: what generation_config.json and config.json list. */
static pkv_status load_folder_ends(pkv_tokenizer *t, const pkv_gguf *gguf, pkv_error *err) {
  const pkv_gguf_value *list =
      pkv_gguf_is_folder(gguf) ? pkv_gguf_find(gguf, "pkv.end_token_ids") : NULL;
  for (uint64_t i = 0; list && i < list->count; i++) {
    const int64_t id = pkv_gguf_element_int(list, i);
    PKV_CHECK(err, id < t->vocab.size, PKV_E_FORMAT,
              "eos_token_id of the folder's files is %lld, the vocabulary has %d tokens",
              (long long)id, (int)t->vocab.size);
    if (t->eos < 0) t->eos = (int32_t)id;
    add_end(t, (int32_t)id);
  }
  return PKV_OK;
}

/*
 * What ends a turn: what the file names, and control tokens with a spelling that has no other use.
 * Files often name only one of several.
 */
static pkv_status load_ends(pkv_tokenizer *t, const pkv_gguf *gguf, pkv_error *err) {
  static const char *const keys[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  static const char *const spelled[] = {"<|im_end|>",      "<|eot_id|>", "<|eom_id|>",
                                        "<|end_of_text|>", "<|end|>",    "<|endoftext|>",
                                        "<end_of_turn>"};
  add_end(t, t->eos);
  PKV_TRY(load_folder_ends(t, gguf, err));
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    int32_t id;
    PKV_TRY(get_id(&id, t, gguf, keys[i], err));
    add_end(t, id);
  }
  for (size_t i = 0; i < sizeof spelled / sizeof spelled[0]; i++) {
    const int32_t id = pkv_specials_exact(&t->specials, spelled[i], strlen(spelled[i]));
    if (id >= 0 && pkv_vocab_is_control(&t->vocab, id)) add_end(t, id);
  }
  return PKV_OK;
}

static pkv_status load_ids(pkv_tokenizer *t, const pkv_gguf *gguf, bool bos_by_default,
                           pkv_error *err) {
  PKV_TRY(get_id(&t->bos, t, gguf, "tokenizer.ggml.bos_token_id", err));
  PKV_TRY(get_id(&t->eos, t, gguf, "tokenizer.ggml.eos_token_id", err));
  if (t->bos < 0 && pkv_gguf_is_folder(gguf))
    PKV_TRY(get_id(&t->bos, t, gguf, "pkv.bos_token_id", err));
  t->add_bos = bos_by_default && t->bos >= 0;
  PKV_TRY(pkv_gguf_get_bool(&t->add_bos, gguf, "tokenizer.ggml.add_bos_token", false, err));
  PKV_TRY(pkv_gguf_get_bool(&t->add_eos, gguf, "tokenizer.ggml.add_eos_token", false, err));
  PKV_CHECK(err, !t->add_bos || t->bos >= 0, PKV_E_FORMAT,
            "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing");
  PKV_CHECK(err, !t->add_eos || t->eos >= 0, PKV_E_FORMAT,
            "tokenizer.ggml.add_eos_token is true, but tokenizer.ggml.eos_token_id is missing");
  return load_ends(t, gguf, err);
}

/* The tokens of U+FFFD, none when one of its bytes has no token either. */
static pkv_status load_replacement(pkv_tokenizer *t, pkv_error *err) {
  static const char text[] = "\xef\xbf\xbd";
  for (int i = 0; i < 3; i++) {
    if (t->vocab.byte_token[(unsigned char)text[i]] < 0) return PKV_OK;
  }
  pkv_token_sink sink = {t->replacement, 3, 0};
  pkv_merge_scratch scratch;
  pkv_merge_scratch_init(&scratch, &t->allocator);
  const pkv_status status =
      pkv_merge_word(&sink, &scratch, &t->merges, &t->vocab, text, 3, NULL, 0, err);
  pkv_merge_scratch_deinit(&scratch);
  t->replacement_count = sink.count;
  return status;
}

static pkv_status load_by_score(pkv_tokenizer *t, const pkv_gguf *gguf, pkv_error *err) {
  PKV_TRY(pkv_vocab_load(&t->vocab, PKV_SPELLING_SPACES, gguf, &t->allocator, err));
  PKV_TRY(pkv_pieces_load(&t->pieces, &t->vocab, gguf, err));
  PKV_TRY(pkv_specials_build(&t->specials, &t->vocab, err));
  t->space_prefix = true;
  PKV_TRY(pkv_gguf_get_bool(&t->space_prefix, gguf, "tokenizer.ggml.add_space_prefix", false, err));
  return load_ids(t, gguf, true, err);
}

static pkv_status load_by_characters(pkv_tokenizer *t, const pkv_gguf *gguf, pkv_error *err) {
  PKV_TRY(pkv_vocab_load(&t->vocab, PKV_SPELLING_RAW, gguf, &t->allocator, err));
  PKV_TRY(pkv_merges_load(&t->merges, &t->vocab, gguf, err));
  PKV_TRY(pkv_specials_build(&t->specials, &t->vocab, err));
  PKV_TRY(pkv_chars_load(&t->chars, &t->vocab, &t->merges, gguf, err));
  PKV_TRY(pkv_gguf_get_bool(&t->nfc, gguf, "pkv.nfc", false, err));
  return load_ids(t, gguf, false, err);
}

static pkv_status load(pkv_tokenizer *t, const pkv_gguf *gguf, pkv_error *err) {
  const pkv_split_rule *rule = NULL;
  PKV_TRY(choose_model(&t->kind, gguf, err));
  if (t->kind == BY_SCORE) return load_by_score(t, gguf, err);
  if (t->kind == BY_CHARACTERS) return load_by_characters(t, gguf, err);
  PKV_TRY(choose_rule(&rule, gguf, err));
  t->whole_words = rule->whole_words;
  t->nfc = rule->nfc;
  if (pkv_gguf_is_folder(gguf)) { /* says so itself */
    PKV_TRY(pkv_gguf_get_bool(&t->whole_words, gguf, "pkv.ignore_merges", true, err));
    PKV_TRY(pkv_gguf_get_bool(&t->nfc, gguf, "pkv.nfc", true, err));
  }
  PKV_TRY(pkv_vocab_load(&t->vocab, PKV_SPELLING_BYTES, gguf, &t->allocator, err));
  PKV_TRY(pkv_merges_load(&t->merges, &t->vocab, gguf, err));
  PKV_TRY(pkv_specials_build(&t->specials, &t->vocab, err));
  PKV_TRY(load_ids(t, gguf, rule->bos_by_default, err));
  PKV_TRY(load_replacement(t, err));
  return pkv_splitter_create(&t->splitter, rule, true, &t->allocator, err);
}

pkv_status pkv_tokenizer_create(pkv_tokenizer **out, const pkv_gguf *gguf,
                                const pkv_allocator *allocator, pkv_error *err) {
  *out = NULL;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_tokenizer *t = pkv_alloc_zeroed(&a, 1, sizeof *t);
  PKV_CHECK(err, t != NULL, PKV_E_NOMEM, "no memory for the tokenizer");
  t->allocator = a;
  const pkv_status status = load(t, gguf, err);
  if (status != PKV_OK) {
    pkv_tokenizer_destroy(t);
    return status;
  }
  *out = t;
  return PKV_OK;
}

void pkv_tokenizer_destroy(pkv_tokenizer *t) {
  if (t == NULL) return;
  pkv_splitter_destroy(t->splitter);
  if (t->specials.ids != NULL) pkv_specials_deinit(&t->specials);
  pkv_pieces_deinit(&t->pieces);
  pkv_chars_deinit(&t->chars);
  if (t->merges.slots != NULL) pkv_merges_deinit(&t->merges);
  if (t->vocab.bytes != NULL) pkv_vocab_deinit(&t->vocab);
  const pkv_allocator a = t->allocator;
  pkv_free(&a, t, sizeof *t);
}

/* ------------------------------------------------------------------------------------------
 * Questions
 * ------------------------------------------------------------------------------------------ */

int32_t pkv_tokenizer_vocab(const pkv_tokenizer *t) {
  return t->vocab.size;
}

int32_t pkv_tokenizer_vocab_used(const pkv_tokenizer *t) {
  int32_t used = t->vocab.size;
  while (used > 1 && t->vocab.type[used - 1] == PKV_TOKEN_UNUSED)
    used--;
  return used;
}

int32_t pkv_tokenizer_bos(const pkv_tokenizer *t) {
  return t->bos;
}

int32_t pkv_tokenizer_eos(const pkv_tokenizer *t) {
  return t->eos;
}

bool pkv_tokenizer_is_end(const pkv_tokenizer *t, int32_t token) {
  for (int32_t i = 0; i < t->end_count; i++) {
    if (t->ends[i] == token) return true;
  }
  return false;
}

int32_t pkv_tokenizer_find_special(const pkv_tokenizer *t, const char *text, size_t bytes) {
  return pkv_specials_exact(&t->specials, text, bytes);
}

int32_t pkv_tokenizer_match_special(const pkv_tokenizer *t, const char *text, size_t bytes,
                                    size_t at) {
  return pkv_specials_match(&t->specials, text, at, bytes, bytes);
}

bool pkv_tokenizer_is_control(const pkv_tokenizer *t, int32_t token) {
  return token >= 0 && token < t->vocab.size && pkv_vocab_is_control(&t->vocab, token);
}

pkv_status pkv_tokenizer_text(const char **text, size_t *bytes, const pkv_tokenizer *t,
                              int32_t token, int32_t special, pkv_error *err) {
  PKV_CHECK(err, text != NULL && bytes != NULL && t != NULL, PKV_E_INVALID,
            "text, bytes or tokenizer is NULL");
  *text = "";
  *bytes = 0;
  PKV_CHECK(err, token >= 0 && token < t->vocab.size, PKV_E_RANGE, "token is %d, not 0 .. %d",
            token, t->vocab.size - 1);
  if (!special && pkv_vocab_is_control(&t->vocab, token)) return PKV_OK;
  const pkv_span piece = t->kind == BY_CHARACTERS ? pkv_chars_shown(&t->chars, token)
                                                  : pkv_vocab_piece(&t->vocab, token);
  *text = piece.data;
  *bytes = piece.size;
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * Text to tokens
 * ------------------------------------------------------------------------------------------ */

/* One call's work. */
typedef struct encoder {
  const pkv_tokenizer *t;
  pkv_token_sink sink;
  pkv_split_cursor *cursor;
  pkv_merge_scratch scratch;
  pkv_pieces_scratch by_score;
  pkv_chars_scratch by_characters;
  pkv_buffer normal; /* of one stretch, where text is normalized */
  const char *text;  /* the pieces, joined */
  size_t bytes;
  const pkv_text_piece *pieces;
  size_t piece_count, piece; /* piece: the one that `trusted_end` was computed in */
  size_t piece_end;          /* where it ends in the text */
  size_t trusted_end;        /* where the run of trusted pieces ends; its start or before if none */
} encoder;

/* The end of the trusted run that holds text[at]; `at` when nobody vouches for it. `at` never goes
   back. */
static size_t trusted_until(encoder *e, size_t at) {
  if (at < e->piece_end) return e->trusted_end > at ? e->trusted_end : at;
  while (at >= e->piece_end)
    e->piece_end += e->pieces[e->piece++].bytes;
  if (e->trusted_end > at) return e->trusted_end; /* further on in the same run */
  e->trusted_end = at;
  if (e->pieces[e->piece - 1].trusted) {
    e->trusted_end = e->piece_end;
    for (size_t i = e->piece; i < e->piece_count && e->pieces[i].trusted; i++)
      e->trusted_end += e->pieces[i].bytes;
  }
  return e->trusted_end;
}

static pkv_status encode_word(encoder *e, const char *word, size_t bytes, pkv_error *err) {
  const pkv_tokenizer *t = e->t;
  if (t->whole_words) {
    const int32_t id = pkv_vocab_find(&t->vocab, word, bytes);
    if (id >= 0) {
      pkv_token_sink_put(&e->sink, id);
      return PKV_OK;
    }
  }
  return pkv_merge_word(&e->sink, &e->scratch, &t->merges, &t->vocab, word, bytes, t->replacement,
                        t->replacement_count, err);
}

/* Text without special tokens in it. */
static pkv_status encode_plain(encoder *e, size_t from, size_t to, pkv_error *err) {
  if (from == to) return PKV_OK; /* there may be no text at all */
  const char *text = e->text + from;
  size_t size = to - from;
  if (e->t->nfc) {
    pkv_buffer_clear(&e->normal);
    PKV_TRY(pkv_nfc(&e->normal, text, size, err));
    text = e->normal.data;
    size = e->normal.size;
  }
  /* A run starts the text or follows a special token: either way it gets its space. */
  if (e->t->kind == BY_SCORE)
    return pkv_pieces_encode(&e->sink, &e->by_score, &e->t->pieces, &e->t->vocab, text, size,
                             e->t->space_prefix, err);
  if (e->t->kind == BY_CHARACTERS)
    return pkv_chars_encode(&e->sink, &e->by_characters, &e->t->chars, text, size, from == 0, err);
  pkv_split_cursor_reset(e->cursor, text, size);
  for (;;) {
    size_t start, bytes;
    PKV_TRY(pkv_split_next(&start, &bytes, e->cursor, err));
    if (bytes == 0) return PKV_OK;
    PKV_TRY(encode_word(e, text + start, bytes, err));
  }
}

static pkv_status encode_text(encoder *e, bool add_bos, bool add_eos, pkv_error *err) {
  const pkv_tokenizer *t = e->t;
  size_t plain = 0; /* text from here on is still to be encoded */
  int32_t last = -1;
  const bool bos = add_bos && t->add_bos;
  if (bos) pkv_token_sink_put(&e->sink, t->bos);
  for (size_t at = 0; at < e->bytes;) {
    const int32_t id =
        pkv_specials_match(&t->specials, e->text, at, e->bytes, trusted_until(e, at));
    last = id;
    if (id < 0) {
      at++;
      continue;
    }
    PKV_TRY(encode_plain(e, plain, at, err));
    if (bos && at == 0 && id == t->bos) {
      if (e->sink.capacity > 0)
        pkv_log(PKV_LOG_WARN, "model", "the text starts with the bos token: no second one added");
    } else {
      pkv_token_sink_put(&e->sink, id);
    }
    at += pkv_vocab_piece(&t->vocab, id).size;
    plain = at;
  }
  PKV_TRY(encode_plain(e, plain, e->bytes, err));
  if (add_eos && t->add_eos && last != t->eos) pkv_token_sink_put(&e->sink, t->eos);
  return PKV_OK;
}

static pkv_status encode(encoder *e, bool add_bos, bool add_eos, pkv_error *err) {
  const pkv_allocator *a = &e->t->allocator;
  if (e->t->kind == BY_BYTES) PKV_TRY(pkv_split_cursor_create(&e->cursor, e->t->splitter, err));
  pkv_merge_scratch_init(&e->scratch, a);
  pkv_pieces_scratch_init(&e->by_score, a);
  pkv_chars_scratch_init(&e->by_characters, a);
  pkv_buffer_init(&e->normal, SIZE_MAX / 2, a);
  const pkv_status status = encode_text(e, add_bos, add_eos, err);
  pkv_buffer_deinit(&e->normal);
  pkv_chars_scratch_deinit(&e->by_characters);
  pkv_pieces_scratch_deinit(&e->by_score);
  pkv_merge_scratch_deinit(&e->scratch);
  pkv_split_cursor_destroy(e->cursor);
  return status;
}

/* Joins the pieces where there are several; *joined is NULL when text is a piece's own. */
static pkv_status join(encoder *e, char **joined, pkv_error *err) {
  *joined = NULL;
  for (size_t i = 0; i < e->piece_count; i++) {
    PKV_CHECK(err, e->pieces[i].text != NULL || e->pieces[i].bytes == 0, PKV_E_INVALID,
              "piece %zu is NULL with %zu bytes", i, e->pieces[i].bytes);
    PKV_CHECK(err, pkv_add_size(&e->bytes, e->bytes, e->pieces[i].bytes), PKV_E_LIMIT,
              "the pieces have more bytes than can be counted");
  }
  if (e->bytes == 0) return PKV_OK;
  if (e->piece_count == 1) {
    e->text = e->pieces[0].text;
    return PKV_OK;
  }
  *joined = pkv_alloc(&e->t->allocator, e->bytes);
  PKV_CHECK(err, *joined != NULL, PKV_E_NOMEM, "no memory for a text of %zu bytes", e->bytes);
  size_t at = 0;
  for (size_t i = 0; i < e->piece_count; i++) {
    if (e->pieces[i].bytes > 0) memcpy(*joined + at, e->pieces[i].text, e->pieces[i].bytes);
    at += e->pieces[i].bytes;
  }
  e->text = *joined;
  return PKV_OK;
}

pkv_status pkv_tokenizer_encode_pieces(int32_t *ids, size_t capacity, size_t *count,
                                       const pkv_tokenizer *t, const pkv_text_piece *pieces,
                                       size_t piece_count, bool add_bos, bool add_eos,
                                       pkv_error *err) {
  PKV_CHECK(err, count != NULL && t != NULL, PKV_E_INVALID, "count or tokenizer is NULL");
  *count = 0;
  PKV_CHECK(err, ids != NULL || capacity == 0, PKV_E_INVALID, "ids is NULL, capacity is %zu",
            capacity);
  PKV_CHECK(err, pieces != NULL || piece_count == 0, PKV_E_INVALID,
            "pieces is NULL, piece_count is %zu", piece_count);
  encoder e = {0};
  e.t = t;
  e.sink = (pkv_token_sink){ids, capacity, 0};
  e.pieces = pieces;
  e.piece_count = piece_count;
  char *joined;
  PKV_TRY(join(&e, &joined, err));
  const pkv_status status = encode(&e, add_bos, add_eos, err);
  pkv_free(&t->allocator, joined, e.bytes);
  PKV_TRY(status);
  *count = e.sink.count;
  PKV_CHECK(err, e.sink.count <= capacity, PKV_E_TOO_SMALL,
            "the text has %zu tokens, capacity is %zu", e.sink.count, capacity);
  return PKV_OK;
}

pkv_status pkv_tokenizer_encode(int32_t *ids, size_t capacity, size_t *count,
                                const pkv_tokenizer *t, const char *text, size_t bytes,
                                uint32_t flags, pkv_error *err) {
  const uint32_t known = PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL;
  PKV_CHECK(err, (flags & ~known) == 0, PKV_E_INVALID, "flags are 0x%x, known are 0x%x", flags,
            known);
  PKV_CHECK(err, text != NULL || bytes == 0, PKV_E_INVALID, "text is NULL, bytes is %zu", bytes);
  const pkv_text_piece piece = {text, bytes, (flags & PKV_TEXT_PARSE_SPECIAL) != 0};
  const bool add = (flags & PKV_TEXT_ADD_SPECIAL) != 0;
  return pkv_tokenizer_encode_pieces(ids, capacity, count, t, &piece, 1, add, add, err);
}
