/* SPDX-License-Identifier: Apache-2.0 */
/* Loading of tokens and token types, the byte alphabet, and the table from bytes to ids. */
#include "model/tokenizer_vocab.h"

#include <string.h>

#include "base/hash.h"

#define KEY_TOKENS "tokenizer.ggml.tokens"
#define KEY_TYPES  "tokenizer.ggml.token_type"

/* ------------------------------------------------------------------------------------------
 * String arrays of the file
 * ------------------------------------------------------------------------------------------ */

pkv_status pkv_string_walk_init(pkv_string_walk *walk, const pkv_gguf *gguf, const char *key,
                                pkv_error *err) {
  walk->at = NULL;
  walk->left = 0;
  const pkv_gguf_value *value = pkv_gguf_find(gguf, key);
  if (value == NULL) return PKV_OK;
  PKV_CHECK(err, value->type == PKV_GGUF_ARRAY && value->element_type == PKV_GGUF_STRING,
            PKV_E_FORMAT, "%s is %s (elements %s), not an array of strings", key,
            pkv_gguf_type_name(value->type), pkv_gguf_type_name(value->element_type));
  walk->at = value->data;
  walk->left = value->count;
  return PKV_OK;
}

pkv_span pkv_string_walk_next(pkv_string_walk *walk) {
  walk->left--;
  return pkv_gguf_next_string(&walk->at);
}

/* ------------------------------------------------------------------------------------------
 * The byte alphabet: printable bytes of Latin-1 spell themselves, the 68 others are U+0100 on.
 * ------------------------------------------------------------------------------------------ */

#define ALPHABET_END 324u

static bool spells_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* The raw byte of a character of the alphabet, -1 for all others. */
static int32_t alphabet_byte(uint32_t character) {
  if (character < 256) return spells_itself(character) ? (int32_t)character : -1;
  if (character >= ALPHABET_END) return -1;
  const uint32_t n = character - 256; /* the n-th byte that does not spell itself */
  if (n <= 0x20) return (int32_t)n;
  if (n <= 0x42) return (int32_t)(n - 0x21 + 0x7f);
  return 0xad;
}

int64_t pkv_vocab_decode(char *out, const char *spelled, size_t count) {
  const unsigned char *p = (const unsigned char *)spelled;
  size_t written = 0;
  for (size_t i = 0; i < count;) {
    uint32_t character = p[i];
    size_t length = 1;
    if (character >= 0x80) {
      /* Two bytes reach to U+07FF, which is beyond the alphabet. */
      if (character < 0xc2 || character > 0xdf || i + 1 >= count || (p[i + 1] & 0xc0) != 0x80)
        return -1;
      character = ((character & 0x1f) << 6) | (p[i + 1] & 0x3fu);
      length = 2;
    }
    const int32_t byte = alphabet_byte(character);
    if (byte < 0) return -1;
    out[written++] = (char)(unsigned char)byte;
    i += length;
  }
  return (int64_t)written;
}

/* ------------------------------------------------------------------------------------------
 * From bytes to ids
 * ------------------------------------------------------------------------------------------ */

static uint32_t piece_hash(const char *bytes, size_t count) {
  return (uint32_t)pkv_hash_bytes(bytes, count, 0);
}

static pkv_vocab_slot *find_slot(const pkv_vocab *v, const char *bytes, size_t count,
                                 uint32_t hash) {
  for (uint32_t i = hash & v->slot_mask;; i = (i + 1) & v->slot_mask) {
    pkv_vocab_slot *slot = &v->slots[i];
    if (slot->id < 0) return slot;
    if (slot->hash != hash) continue;
    const pkv_span piece = pkv_vocab_piece(v, slot->id);
    if (piece.size == count && memcmp(piece.data, bytes, count) == 0) return slot;
  }
}

int32_t pkv_vocab_find(const pkv_vocab *v, const char *bytes, size_t count) {
  return find_slot(v, bytes, count, piece_hash(bytes, count))->id;
}

/* Cells of an open table for n entries: at most two thirds full. */
static uint32_t table_cells(uint32_t n) {
  uint32_t cells = 8;
  while (cells < n + n / 2)
    cells *= 2;
  return cells;
}

static pkv_status table_create(pkv_vocab *v, pkv_error *err) {
  const uint32_t cells = table_cells((uint32_t)v->size);
  v->slots = pkv_alloc(&v->allocator, cells * sizeof *v->slots);
  PKV_CHECK(err, v->slots != NULL, PKV_E_NOMEM, "no memory for the table of %d tokens", v->size);
  for (uint32_t i = 0; i < cells; i++)
    v->slots[i] = (pkv_vocab_slot){0, -1};
  v->slot_mask = cells - 1;
  return PKV_OK;
}

static bool is_text(const pkv_vocab *v, int32_t id) {
  const uint8_t type = v->type[id];
  return type == PKV_TOKEN_NORMAL || type == PKV_TOKEN_UNDEFINED ||
         (type == PKV_TOKEN_BYTE && v->spelling == PKV_SPELLING_BYTES);
}

/*
 * Enters the pieces text can become. User-defined ones come second: such a token may spell a piece
 * that the merges make too, and the merges then mean the ordinary one.
 */
static pkv_status table_fill(pkv_vocab *v, bool user, pkv_error *err) {
  for (int32_t id = 0; id < v->size; id++) {
    const bool wanted = user ? v->type[id] == PKV_TOKEN_USER : is_text(v, id);
    const pkv_span piece = pkv_vocab_piece(v, id);
    if (!wanted || piece.size == 0) continue;
    const uint32_t hash = piece_hash(piece.data, piece.size);
    pkv_vocab_slot *slot = find_slot(v, piece.data, piece.size, hash);
    if (slot->id >= 0) {
      if (user && v->type[slot->id] != PKV_TOKEN_USER) continue;
      return PKV_FAIL(err, PKV_E_FORMAT, KEY_TOKENS "[%d] and [%d] are the same %zu bytes",
                      slot->id, id, piece.size);
    }
    *slot = (pkv_vocab_slot){hash, id};
    if (piece.size == 1 && v->spelling == PKV_SPELLING_BYTES)
      v->byte_token[(unsigned char)piece.data[0]] = id;
  }
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * Loading
 * ------------------------------------------------------------------------------------------ */

/* All types from the file; a file without them has ordinary tokens only. */
static pkv_status load_types(pkv_vocab *v, const pkv_gguf *gguf, pkv_error *err) {
  memset(v->type, PKV_TOKEN_NORMAL, (size_t)v->size);
  const pkv_gguf_value *value = pkv_gguf_find(gguf, KEY_TYPES);
  if (value == NULL) return PKV_OK;
  PKV_CHECK(err,
            value->type == PKV_GGUF_ARRAY &&
                (value->element_type == PKV_GGUF_I32 || value->element_type == PKV_GGUF_U32),
            PKV_E_FORMAT, KEY_TYPES " is %s (elements %s), not an array of i32",
            pkv_gguf_type_name(value->type), pkv_gguf_type_name(value->element_type));
  PKV_CHECK(err, value->count == (uint64_t)v->size, PKV_E_FORMAT,
            KEY_TYPES " has %llu elements, " KEY_TOKENS " has %d", (unsigned long long)value->count,
            v->size);
  for (int32_t id = 0; id < v->size; id++) {
    const int64_t type = pkv_gguf_element_int(value, (uint64_t)id);
    PKV_CHECK(err, type >= 0 && type <= PKV_TOKEN_BYTE, PKV_E_FORMAT,
              KEY_TYPES "[%d] is %lld, not 0 .. 6", id, (long long)type);
    v->type[id] = (uint8_t)type;
  }
  return PKV_OK;
}

/* How many bytes all pieces take as spelled; refuses a piece that is too long. */
static pkv_status spelled_bytes(size_t *total, pkv_string_walk walk, pkv_error *err) {
  *total = 0;
  for (int32_t id = 0; walk.left > 0; id++) {
    const pkv_span piece = pkv_string_walk_next(&walk);
    PKV_CHECK(err, piece.size <= PKV_VOCAB_MAX_PIECE, PKV_E_LIMIT,
              KEY_TOKENS "[%d] has %zu bytes, at most %d are allowed", id, piece.size,
              PKV_VOCAB_MAX_PIECE);
    *total += piece.size;
  }
  PKV_ASSERT(*total <= UINT32_MAX); /* they lie in a file's PKV_GGUF_MAX_META bytes of keys */
  return PKV_OK;
}

static pkv_status allocate(pkv_vocab *v, size_t text_bytes, pkv_error *err) {
  const size_t n = (size_t)v->size;
  v->bytes_size = text_bytes + 1; /* never 0 */
  v->bytes = pkv_alloc(&v->allocator, v->bytes_size);
  v->offset = pkv_alloc(&v->allocator, (n + 1) * sizeof *v->offset);
  v->type = pkv_alloc(&v->allocator, n);
  PKV_CHECK(err, v->bytes != NULL && v->offset != NULL && v->type != NULL, PKV_E_NOMEM,
            "no memory for %d tokens of %zu bytes", v->size, text_bytes);
  return PKV_OK;
}

static int32_t hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte that <0x0A> means, -1 for all other texts. */
static int32_t byte_of(pkv_span piece) {
  if (piece.size != 6 || memcmp(piece.data, "<0x", 3) != 0 || piece.data[5] != '>') return -1;
  const int32_t high = hex_digit(piece.data[3]), low = hex_digit(piece.data[4]);
  return high < 0 || low < 0 ? -1 : 16 * high + low;
}

size_t pkv_vocab_put_spaces(char *out, const char *text, size_t count) {
  size_t written = 0;
  for (size_t i = 0; i < count;) {
    const bool space = count - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0;
    out[written++] = space ? ' ' : text[i];
    i += space ? 3 : 1;
  }
  return written;
}

/* As load_pieces, for PKV_SPELLING_SPACES. */
static pkv_status load_spaced_pieces(pkv_vocab *v, pkv_string_walk walk, pkv_error *err) {
  char text[PKV_GGUF_QUOTE_BYTES];
  uint32_t at = 0;
  for (int32_t id = 0; id < v->size; id++) {
    const pkv_span piece = pkv_string_walk_next(&walk);
    v->offset[id] = at;
    if (v->type[id] == PKV_TOKEN_BYTE) {
      const int32_t byte = byte_of(piece);
      PKV_CHECK(err, byte >= 0, PKV_E_FORMAT,
                KEY_TOKENS "[%d] is '%s', but a byte token by its type: those are <0x00> .. <0xFF>",
                id, pkv_gguf_quote(text, piece));
      PKV_CHECK(err, v->byte_token[byte] < 0, PKV_E_FORMAT,
                KEY_TOKENS "[%d] and [%d] are both byte 0x%02x", v->byte_token[byte], id,
                (unsigned)byte);
      v->byte_token[byte] = id;
      v->bytes[at++] = (char)(unsigned char)byte;
    } else if (is_text(v, id)) {
      at += (uint32_t)pkv_vocab_put_spaces(v->bytes + at, piece.data, piece.size);
    } else {
      memcpy(v->bytes + at, piece.data, piece.size);
      at += (uint32_t)piece.size;
    }
  }
  v->offset[v->size] = at;
  return PKV_OK;
}

/* The same for PKV_SPELLING_RAW. */
static pkv_status load_raw_pieces(pkv_vocab *v, pkv_string_walk walk, pkv_error *err) {
  char text[PKV_GGUF_QUOTE_BYTES];
  uint32_t at = 0;
  for (int32_t id = 0; id < v->size; id++) {
    const pkv_span piece = pkv_string_walk_next(&walk);
    v->offset[id] = at;
    memcpy(v->bytes + at, piece.data, piece.size);
    at += (uint32_t)piece.size;
    if (v->type[id] != PKV_TOKEN_BYTE) continue;
    const int32_t byte = byte_of(piece);
    PKV_CHECK(err, byte >= 0 && v->byte_token[byte] < 0, PKV_E_FORMAT,
              KEY_TOKENS "[%d] is '%s': no byte token, or the second one of its byte", id,
              pkv_gguf_quote(text, piece));
    v->byte_token[byte] = id;
  }
  v->offset[v->size] = at;
  return PKV_OK;
}

/* Fills bytes and offset. An ordinary piece outside the byte alphabet stands for its own
   characters; no text can become it, so it counts as unused. */
static void load_pieces(pkv_vocab *v, pkv_string_walk walk) {
  uint32_t at = 0;
  for (int32_t id = 0; id < v->size; id++) {
    const pkv_span piece = pkv_string_walk_next(&walk);
    v->offset[id] = at;
    int64_t count = -1;
    if (is_text(v, id)) {
      count = pkv_vocab_decode(v->bytes + at, piece.data, piece.size);
      if (count < 0) v->type[id] = PKV_TOKEN_UNUSED;
    }
    if (count < 0) {
      memcpy(v->bytes + at, piece.data, piece.size);
      count = (int64_t)piece.size;
    }
    at += (uint32_t)count;
  }
  v->offset[v->size] = at;
}

static pkv_status load(pkv_vocab *v, size_t text_bytes, const pkv_gguf *gguf, pkv_string_walk walk,
                       pkv_error *err) {
  PKV_TRY(allocate(v, text_bytes, err));
  PKV_TRY(load_types(v, gguf, err));
  PKV_TRY(table_create(v, err));
  if (v->spelling == PKV_SPELLING_SPACES) {
    PKV_TRY(load_spaced_pieces(v, walk, err));
    return table_fill(v, false, err);
  }
  if (v->spelling == PKV_SPELLING_RAW)
    PKV_TRY(load_raw_pieces(v, walk, err));
  else
    load_pieces(v, walk);
  PKV_TRY(table_fill(v, false, err));
  return table_fill(v, true, err);
}

pkv_status pkv_vocab_load(pkv_vocab *v, pkv_spelling spelling, const pkv_gguf *gguf,
                          const pkv_allocator *allocator, pkv_error *err) {
  memset(v, 0, sizeof *v);
  v->spelling = spelling;
  v->allocator = pkv_allocator_or_default(allocator);
  for (int i = 0; i < 256; i++)
    v->byte_token[i] = -1;
  pkv_string_walk walk;
  PKV_TRY(pkv_string_walk_init(&walk, gguf, KEY_TOKENS, err));
  PKV_CHECK(err, walk.left > 0, PKV_E_FORMAT, KEY_TOKENS " is missing or empty");
  PKV_CHECK(err, walk.left <= PKV_VOCAB_MAX_TOKENS, PKV_E_LIMIT,
            KEY_TOKENS " has %llu elements, at most %d are allowed", (unsigned long long)walk.left,
            PKV_VOCAB_MAX_TOKENS);
  size_t text_bytes;
  PKV_TRY(spelled_bytes(&text_bytes, walk, err));
  v->size = (int32_t)walk.left;
  const pkv_status status = load(v, text_bytes, gguf, walk, err);
  if (status != PKV_OK) pkv_vocab_deinit(v);
  return status;
}

void pkv_vocab_deinit(pkv_vocab *v) {
  const size_t n = (size_t)v->size;
  pkv_free(&v->allocator, v->bytes, v->bytes_size);
  pkv_free(&v->allocator, v->offset, (n + 1) * sizeof *v->offset);
  pkv_free(&v->allocator, v->type, n);
  pkv_free(&v->allocator, v->slots, ((size_t)v->slot_mask + 1) * sizeof *v->slots);
  memset(v, 0, sizeof *v);
}
