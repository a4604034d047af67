/* SPDX-License-Identifier: Apache-2.0 */
/* ChatML, recognised by its shape, and its rendering. */
#include "model/chat.h"

#include <string.h>

#include "base/alloc.h"

#define OPEN      "<|im_start|>"
#define CLOSE     "<|im_end|>"
#define PER_TURN  5u
#define PER_CHAT  8u
#define MAX_TURNS 1048576u
#define MAX_BOS   64

struct pkv_chat_template {
  pkv_allocator allocator;
  char *system; /* [system_bytes] inserted when the first message is none; NULL = nothing is */
  size_t system_bytes, system_size;
  bool trims;
  char bos[MAX_BOS];
  size_t bos_bytes; /* 0 = the template does not write it */
};

/* ------------------------------------------------------------------------------------------
 * Reading a template
 * ------------------------------------------------------------------------------------------ */

static bool starts(pkv_span s, const char *word) {
  const size_t n = strlen(word);
  return s.size >= n && memcmp(s.data, word, n) == 0;
}

static pkv_span skip(pkv_span s, size_t n) {
  return (pkv_span){s.data + n, s.size - n};
}

/* What follows the first `word`; data is NULL when there is none. */
static pkv_span after(pkv_span s, const char *word) {
  const size_t n = strlen(word);
  const char *at = s.size >= n ? memmem(s.data, s.size, word, n) : NULL;
  if (at == NULL) return (pkv_span){NULL, 0};
  return skip(s, (size_t)(at - s.data) + n);
}

static pkv_span skip_blanks(pkv_span s) {
  while (s.size > 0 && (s.data[0] == ' ' || s.data[0] == '\t'))
    s = skip(s, 1);
  return s;
}

static bool is_quote(pkv_span s) {
  return s.size > 0 && (s.data[0] == '\'' || s.data[0] == '"');
}

/* A line feed, written as such or as an escape. */
static bool starts_newline(pkv_span s) {
  return starts(s, "\n") || starts(s, "\\n");
}

/*
 * Whether the next thing the template writes is a line feed. s stands inside a literal or behind
 * the last word of an expression such as message['role']; a concatenation and the end of an
 * output block are looked through.
 */
static bool newline_follows(pkv_span s) {
  if (starts_newline(s)) return true;
  if (is_quote(s)) s = skip(s, 1);
  if (starts(s, "]")) s = skip(s, 1);
  s = skip_blanks(s);
  if (starts(s, "+") || starts(s, "~")) {
    s = skip_blanks(skip(s, 1));
    return is_quote(s) && starts_newline(skip(s, 1));
  }
  return starts(s, "}}") && starts_newline(skip(s, 2));
}

/* Somewhere a turn is opened with the role of a message and a line feed. */
static bool opens_turn(pkv_span source) {
  for (pkv_span s = after(source, OPEN); s.data != NULL; s = after(s, OPEN)) {
    const pkv_span near = after((pkv_span){s.data, s.size < 48 ? s.size : 48}, "role");
    if (near.data != NULL && newline_follows(skip(s, (size_t)(near.data - s.data)))) return true;
  }
  return false;
}

/* Somewhere a turn is closed with a line feed. */
static bool closes_turn(pkv_span source) {
  for (pkv_span s = after(source, CLOSE); s.data != NULL; s = after(s, CLOSE)) {
    if (newline_follows(s)) return true;
  }
  return false;
}

/* Content is followed by a filter that trims it. */
static bool trims_content(pkv_span source) {
  for (pkv_span s = after(source, "content"); s.data != NULL; s = after(s, "content")) {
    pkv_span rest = s;
    if (is_quote(rest)) rest = skip(rest, 1);
    if (starts(rest, "]")) rest = skip(rest, 1);
    rest = skip_blanks(rest);
    if (starts(rest, "|") && starts(skip_blanks(skip(rest, 1)), "trim")) return true;
  }
  return false;
}

/* The template looks at whether a message is the system's. */
static bool compares_system(pkv_span source) {
  return after(source, "= 'system'").data != NULL || after(source, "= \"system\"").data != NULL ||
         after(source, "='system'").data != NULL || after(source, "=\"system\"").data != NULL;
}

/*
 * Text of a literal up to the closing marker, with escapes undone, to out (room for rest->size
 * bytes). -1 when it is not plain text: an expression begins, or the literal ends first. *rest
 * moves on to where that showed.
 */
static int64_t literal_turn(char *out, pkv_span *rest) {
  size_t n = 0;
  while (rest->size > 0 && !starts(*rest, CLOSE)) {
    char c = rest->data[0];
    if (c == '\'' || c == '"' || starts(*rest, "{{") || starts(*rest, "{%") || starts(*rest, "}}"))
      return -1;
    if (c == '\\') {
      *rest = skip(*rest, 1);
      if (rest->size == 0) return -1;
      c = rest->data[0];
      if (c == 'n')
        c = '\n';
      else if (c != '\\' && c != '\'' && c != '"')
        return -1;
    }
    out[n++] = c;
    *rest = skip(*rest, 1);
  }
  return rest->size > 0 ? (int64_t)n : -1;
}

/*
 * The first whole system turn that stands in the template as one literal. Where one turns out to be
 * none, those that begin inside of it are none either: the search goes on behind it.
 */
static pkv_status read_system(pkv_chat_template *chat, pkv_span source, pkv_error *err) {
  for (pkv_span s = after(source, OPEN "system"); s.data != NULL; s = after(s, OPEN "system")) {
    if (!starts_newline(s)) continue;
    s = skip(s, s.data[0] == '\n' ? 1 : 2);
    if (s.size == 0) break;
    if (chat->system == NULL) { /* later ones are shorter */
      chat->system = pkv_alloc(&chat->allocator, s.size);
      PKV_CHECK(err, chat->system != NULL, PKV_E_NOMEM, "no memory for the chat template");
      chat->system_size = s.size;
    }
    const int64_t bytes = literal_turn(chat->system, &s);
    if (bytes < 0) continue;
    chat->system_bytes = (size_t)bytes;
    PKV_CHECK(
        err, compares_system(source), PKV_E_UNSUPPORTED,
        "the chat template writes a system message, under a condition that is not understood");
    return PKV_OK;
  }
  pkv_free(&chat->allocator, chat->system, chat->system_size);
  chat->system = NULL;
  return PKV_OK;
}

/* No control tokens but the two markers: another one is part of a format that is not ChatML. */
static pkv_status check_tokens(pkv_span source, const pkv_tokenizer *tokenizer, pkv_error *err) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  static const char *const markers[] = {OPEN, CLOSE};
  int32_t ids[2];
  for (int i = 0; i < 2; i++) {
    PKV_CHECK(err, after(source, markers[i]).data != NULL, PKV_E_UNSUPPORTED,
              "the chat template is of no known format: it does not write %s", markers[i]);
    ids[i] = pkv_tokenizer_find_special(tokenizer, markers[i], strlen(markers[i]));
    PKV_CHECK(err, ids[i] >= 0 && pkv_tokenizer_is_control(tokenizer, ids[i]), PKV_E_UNSUPPORTED,
              "the chat template writes %s, which is no control token of the vocabulary",
              markers[i]);
  }
  for (size_t at = 0; at < source.size;) {
    const int32_t id = pkv_tokenizer_match_special(tokenizer, source.data, source.size, at);
    if (id < 0) {
      at++;
      continue;
    }
    const char *text;
    size_t bytes;
    PKV_TRY(pkv_tokenizer_text(&text, &bytes, tokenizer, id, 1, err));
    PKV_CHECK(err, id == ids[0] || id == ids[1] || !pkv_tokenizer_is_control(tokenizer, id),
              PKV_E_UNSUPPORTED, "the chat template is of no known format: it also writes '%s'",
              pkv_gguf_quote(quoted, (pkv_span){text, bytes}));
    at += bytes;
  }
  return PKV_OK;
}

/* Where the template writes the bos token by its name, its text. */
static pkv_status read_bos(pkv_chat_template *chat, pkv_span source, const pkv_tokenizer *tokenizer,
                           pkv_error *err) {
  const int32_t bos = pkv_tokenizer_bos(tokenizer);
  if (after(source, "bos_token").data == NULL || bos < 0) return PKV_OK;
  const char *text;
  size_t bytes;
  PKV_TRY(pkv_tokenizer_text(&text, &bytes, tokenizer, bos, 1, err));
  PKV_CHECK(err, bytes <= sizeof chat->bos, PKV_E_UNSUPPORTED,
            "the bos token has %zu bytes, a chat template may write %zu", bytes, sizeof chat->bos);
  memcpy(chat->bos, text, bytes);
  chat->bos_bytes = bytes;
  return PKV_OK;
}

static pkv_status read_template(pkv_chat_template *chat, pkv_span source,
                                const pkv_tokenizer *tokenizer, pkv_error *err) {
  PKV_CHECK(err, source.size > 0, PKV_E_UNSUPPORTED, "the file has no chat template");
  PKV_TRY(check_tokens(source, tokenizer, err));
  PKV_CHECK(err, opens_turn(source) && closes_turn(source), PKV_E_UNSUPPORTED,
            "the chat template is of no known format: no turn of %s, role, newline ... %s, newline",
            OPEN, CLOSE);
  chat->trims = trims_content(source);
  PKV_TRY(read_bos(chat, source, tokenizer, err));
  return read_system(chat, source, err);
}

pkv_status pkv_chat_template_create(pkv_chat_template **out, pkv_span source,
                                    const pkv_tokenizer *tokenizer, const pkv_allocator *allocator,
                                    pkv_error *err) {
  *out = NULL;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_chat_template *chat = pkv_alloc_zeroed(&a, 1, sizeof *chat);
  PKV_CHECK(err, chat != NULL, PKV_E_NOMEM, "no memory for the chat template");
  chat->allocator = a;
  const pkv_status status = read_template(chat, source, tokenizer, err);
  if (status != PKV_OK) {
    pkv_chat_template_destroy(chat);
    return status;
  }
  *out = chat;
  return PKV_OK;
}

void pkv_chat_template_destroy(pkv_chat_template *chat) {
  if (chat == NULL) return;
  const pkv_allocator a = chat->allocator;
  pkv_free(&a, chat->system, chat->system_size);
  pkv_free(&a, chat, sizeof *chat);
}

/* ------------------------------------------------------------------------------------------
 * Rendering
 * ------------------------------------------------------------------------------------------ */

typedef struct piece_list {
  pkv_text_piece *pieces;
  size_t capacity, count;
} piece_list;

static void put(piece_list *list, const char *text, size_t bytes, bool trusted) {
  if (bytes == 0) return;
  if (list->count < list->capacity)
    list->pieces[list->count] = (pkv_text_piece){text, bytes, trusted};
  list->count++;
}

static void put_template(piece_list *list, const char *text) {
  put(list, text, strlen(text), true);
}

/* Blanks as the template language's trim knows them, ASCII only. */
static bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

static void put_turn(piece_list *list, const char *role, const char *content, size_t bytes,
                     bool trims) {
  while (trims && bytes > 0 && is_blank(content[0])) {
    content++;
    bytes--;
  }
  while (trims && bytes > 0 && is_blank(content[bytes - 1]))
    bytes--;
  put_template(list, OPEN);
  put_template(list, role);
  put_template(list, "\n");
  put(list, content, bytes, false);
  put_template(list, CLOSE "\n");
}

static bool known_role(const char *role) {
  return strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0;
}

static pkv_status check_messages(const pkv_message *messages, size_t count, pkv_error *err) {
  PKV_CHECK(err, messages != NULL && count > 0, PKV_E_INVALID, "there is no message");
  PKV_CHECK(err, count <= MAX_TURNS, PKV_E_LIMIT, "there are %zu messages, at most %u are allowed",
            count, MAX_TURNS);
  for (size_t i = 0; i < count; i++) {
    PKV_CHECK(err, messages[i].role != NULL && messages[i].content != NULL, PKV_E_INVALID,
              "messages[%zu] has no %s", i, messages[i].role == NULL ? "role" : "content");
    PKV_CHECK(err, known_role(messages[i].role), PKV_E_INVALID,
              "messages[%zu] has a role that is not system, user or assistant", i);
  }
  return PKV_OK;
}

pkv_status pkv_chat_render(pkv_text_piece *pieces, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_message *messages,
                           size_t message_count, int32_t add_generation, pkv_error *err) {
  *count = 0;
  PKV_TRY(check_messages(messages, message_count, err));
  piece_list list = {pieces, capacity, 0};
  put(&list, chat->bos, chat->bos_bytes, true);
  if (chat->system != NULL && strcmp(messages[0].role, "system") != 0)
    put_turn(&list, "system", chat->system, chat->system_bytes, false);
  for (size_t i = 0; i < message_count; i++)
    put_turn(&list, messages[i].role, messages[i].content, strlen(messages[i].content),
             chat->trims);
  if (add_generation) {
    put_template(&list, OPEN);
    put_template(&list, "assistant\n");
  }
  *count = list.count;
  PKV_CHECK(err, list.count <= capacity, PKV_E_TOO_SMALL,
            "the conversation has %zu pieces, capacity is %zu", list.count, capacity);
  return PKV_OK;
}

pkv_status pkv_chat_encode(int32_t *ids, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err) {
  PKV_CHECK(err, count != NULL && chat != NULL && tokenizer != NULL, PKV_E_INVALID,
            "count, chat or tokenizer is NULL");
  *count = 0;
  PKV_TRY(check_messages(messages, message_count, err));
  const size_t room = PER_TURN * message_count + PER_CHAT;
  pkv_text_piece *pieces = pkv_alloc(&chat->allocator, room * sizeof *pieces);
  PKV_CHECK(err, pieces != NULL, PKV_E_NOMEM, "no memory for %zu messages", message_count);
  size_t n;
  pkv_status status =
      pkv_chat_render(pieces, room, &n, chat, messages, message_count, add_generation, err);
  if (status == PKV_OK)
    status =
        pkv_tokenizer_encode_pieces(ids, capacity, count, tokenizer, pieces, n, true, false, err);
  pkv_free(&chat->allocator, pieces, room * sizeof *pieces);
  return status;
}
