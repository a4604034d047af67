/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tool_parse.h"

#include <string.h>

#include "base/hash.h"
#include "base/status.h"
#include "server/json_out.h"

#define CALL_BYTES ((size_t)1 << 20)

enum {
  START, /* nothing but blanks yet: a call may begin without a marker */
  TEXT,  /* a marker may come */
  OPEN,  /* behind a marker: { or [ */
  CALL,
  BETWEEN, /* behind a call */
  PLAIN    /* no more calls */
};

static bool is_blank(char c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static const char *marker_of(const pkv_tool_parser *p) {
  return p->tools->style == PKV_TOOLS_TAGGED    ? "<tool_call>"
         : p->tools->style == PKV_TOOLS_MISTRAL ? "[TOOL_CALLS]"
                                                : NULL;
}

void pkv_tool_parser_init(pkv_tool_parser *parser, const pkv_tools *tools, uint64_t number) {
  memset(parser, 0, sizeof *parser);
  parser->tools = tools;
  parser->number = number;
  parser->mode = marker_of(parser) == NULL ? START : tools->demanded ? OPEN : TEXT;
  pkv_buffer_init(&parser->held, CALL_BYTES, NULL);
  pkv_buffer_init(&parser->arguments, CALL_BYTES, NULL);
}

void pkv_tool_parser_deinit(pkv_tool_parser *parser) {
  pkv_buffer_deinit(&parser->held);
  pkv_buffer_deinit(&parser->arguments);
}

/* --- what comes out ------------------------------------------------------------------------ */

/* Blanks around calls are no content. */
static pkv_status tell_text(pkv_tool_news *news, pkv_tool_parser *p, const char *text,
                            size_t bytes) {
  size_t skip = 0;
  while (p->calls > 0 && !p->wrote && skip < bytes && is_blank(text[skip]))
    skip++;
  for (size_t i = skip; i < bytes; i++)
    p->wrote = p->wrote || !is_blank(text[i]);
  return pkv_buffer_append(&news->content, text + skip, bytes - skip, NULL);
}

static pkv_status give_up(pkv_tool_news *news, pkv_tool_parser *p, int mode) {
  const pkv_status status = tell_text(news, p, p->held.size > 0 ? p->held.data : "", p->held.size);
  pkv_buffer_clear(&p->held);
  pkv_buffer_clear(&p->arguments);
  p->mode = mode;
  return status;
}

static bool muted(const pkv_tool_parser *p) {
  return p->calls > 1 && !p->tools->parallel;
}

/* Nine letters and digits: what the strictest template takes. */
static void make_id(char *out, const pkv_tool_parser *p) {
  static const char digits[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  uint64_t hash = pkv_hash_bytes(&p->number, sizeof p->number, (uint64_t)p->calls);
  for (int i = 0; i < 9; i++, hash /= 62)
    out[i] = digits[hash % 62];
  out[9] = '\0';
}

static pkv_status tell(pkv_tool_news *news, json_t *delta) {
  PKV_CHECK(NULL, json_array_append_new(news->deltas, delta) == 0, PKV_E_NOMEM, "no memory");
  return PKV_OK;
}

static pkv_status tell_name(pkv_tool_news *news, pkv_tool_parser *p) {
  char id[10];
  make_id(id, p);
  p->calls++;
  p->wrote = false;
  if (muted(p)) return PKV_OK;
  return tell(news, json_pack("{s:i, s:s, s:s, s:{s:s, s:s}}", "index", (int)p->calls - 1, "id", id,
                              "type", "function", "function", "name", p->name, "arguments", ""));
}

/* Of `size` bytes of the arguments. */
static pkv_status tell_some(pkv_tool_news *news, pkv_tool_parser *p, size_t size) {
  if (size == 0) return PKV_OK;
  if (!muted(p))
    PKV_TRY(tell(news, json_pack("{s:i, s:{s:s%}}", "index", (int)p->calls - 1, "function",
                                 "arguments", p->arguments.data, size)));
  memmove(p->arguments.data, p->arguments.data + size, p->arguments.size - size + 1);
  p->arguments.size -= size;
  return PKV_OK;
}

static pkv_status tell_arguments(pkv_tool_news *news, pkv_tool_parser *p) {
  return tell_some(news, p, p->arguments.size);
}

/* Of arguments that go on: blanks behind them may be the last of them, which are not told. */
static pkv_status tell_begun(pkv_tool_news *news, pkv_tool_parser *p) {
  size_t size = p->arguments.size;
  while (p->depth == 1 && size > 0 && is_blank(p->arguments.data[size - 1]))
    size--;
  return tell_some(news, p, size);
}

/* --- one call ------------------------------------------------------------------------------ */

static void begin_call(pkv_tool_parser *p) {
  p->mode = CALL;
  p->depth = 0;
  p->quoted = p->escaped = p->in_value = p->named = p->text_value = p->argued = p->begun = false;
  p->key[0] = p->name[0] = '\0'; /* what is held before it is text if it is no call */
  pkv_buffer_clear(&p->arguments);
}

/* Of several arguments of a call the first ones count: a part of them may be told already. */
static bool is_arguments(const pkv_tool_parser *p) {
  return p->in_value && !p->argued &&
         (strcmp(p->key, "arguments") == 0 || strcmp(p->key, "parameters") == 0);
}

/* A string at the object's own level is over: a key, or the name. */
static void end_word(pkv_tool_parser *p) {
  const char *const word = p->held.data + p->word_at;
  const size_t bytes = p->held.size - 1 - p->word_at;
  if (!p->in_value && bytes < sizeof p->key) {
    memcpy(p->key, word, bytes);
    p->key[bytes] = '\0';
  } else if (p->in_value && strcmp(p->key, "name") == 0 && bytes <= PKV_TOOL_NAME && !p->named) {
    memcpy(p->name, word, bytes);
    p->name[bytes] = '\0';
  }
}

/* Arguments that are a string which spells them. */
static pkv_status spell_out(pkv_tool_parser *p) {
  json_error_t error;
  bool lost;
  json_t *const value =
      pkv_json_load(&lost, p->arguments.data, p->arguments.size, JSON_DECODE_ANY, &error);
  if (!json_is_string(value)) {
    json_decref(value);
    PKV_CHECK(NULL, !lost, PKV_E_NOMEM, "no memory");
    return PKV_OK;
  }
  pkv_buffer_clear(&p->arguments);
  const pkv_status status =
      pkv_buffer_append(&p->arguments, json_string_value(value), json_string_length(value), NULL);
  json_decref(value);
  return status;
}

static pkv_status end_value(pkv_tool_news *news, pkv_tool_parser *p) {
  if (is_arguments(p)) {
    p->argued = true;
    while (p->arguments.size > 0 && is_blank(p->arguments.data[p->arguments.size - 1]))
      p->arguments.size--;
    if (p->text_value) PKV_TRY(spell_out(p));
    if (p->named) PKV_TRY(tell_arguments(news, p));
  }
  p->in_value = p->begun = false;
  p->key[0] = '\0';
  return PKV_OK;
}

/* The byte is in `held` already. */
static pkv_status see_byte(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  const bool arguments = is_arguments(p);
  const bool ends = !p->quoted && p->depth == 1 && (c == ',' || c == '}' || c == ']');
  if (ends) PKV_TRY(end_value(news, p));
  if (arguments && !ends && (p->begun || !is_blank(c))) {
    if (!p->begun) p->text_value = c == '"';
    p->begun = true;
    PKV_TRY(pkv_buffer_append(&p->arguments, &c, 1, NULL));
  }
  if (p->quoted) {
    if (p->escaped)
      p->escaped = false;
    else if (c == '\\')
      p->escaped = true;
    else if (c == '"') {
      p->quoted = false;
      if (p->depth == 1) end_word(p);
    }
    return PKV_OK;
  }
  if (c == '"') {
    p->quoted = true;
    p->word_at = p->held.size;
  } else if (c == '{' || c == '[') {
    p->depth++;
  } else if (c == '}' || c == ']') {
    p->depth--;
  } else if (c == ':' && p->depth == 1) {
    p->in_value = true;
  }
  return PKV_OK;
}

static pkv_status feed_call(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  PKV_TRY(pkv_buffer_append(&p->held, &c, 1, NULL));
  PKV_TRY(see_byte(news, p, c));
  if (p->name[0] != '\0' && !p->named) {
    if (!pkv_tools_have(p->tools, p->name)) return give_up(news, p, PLAIN);
    p->named = true;
    PKV_TRY(tell_name(news, p));
    if (!is_arguments(p)) PKV_TRY(tell_arguments(news, p)); /* those that came before it */
  }
  if (p->depth > 0) return PKV_OK;
  if (!p->named) return give_up(news, p, PLAIN);
  if (!p->argued) { /* clients read the arguments as JSON */
    PKV_TRY(pkv_buffer_append(&p->arguments, "{}", 2, NULL));
    PKV_TRY(tell_arguments(news, p));
  }
  pkv_buffer_clear(&p->held);
  p->mode = BETWEEN;
  return PKV_OK;
}

/* --- between calls ------------------------------------------------------------------------- */

/* Looks for the marker; what cannot be its beginning is text. */
static pkv_status feed_text(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  const char *const marker = marker_of(p);
  if (marker == NULL) return tell_text(news, p, &c, 1);
  PKV_TRY(pkv_buffer_append(&p->held, &c, 1, NULL));
  while (p->held.size > 0 && strncmp(marker, p->held.data, p->held.size) != 0) {
    PKV_TRY(tell_text(news, p, p->held.data, 1));
    memmove(p->held.data, p->held.data + 1, p->held.size--);
  }
  if (p->held.size < strlen(marker)) return PKV_OK;
  p->mode = OPEN;
  return PKV_OK; /* the marker stays held: it is text if no call follows */
}

static pkv_status feed_open(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  if (c == '{') {
    begin_call(p);
    return feed_call(news, p, c);
  }
  PKV_TRY(pkv_buffer_append(&p->held, &c, 1, NULL));
  return is_blank(c) || c == '[' ? PKV_OK : give_up(news, p, TEXT);
}

/* Closing tags, commas and blanks belong to the calls; another object is another call. */
static pkv_status feed_between(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  static const char end_tag[] = "</tool_call>";
  if (p->held.size == 0 && (is_blank(c) || strchr(",;]", c) != NULL)) return PKV_OK;
  if (p->held.size == 0 && c == '{' && p->tools->style != PKV_TOOLS_TAGGED) {
    begin_call(p);
    return feed_call(news, p, c);
  }
  PKV_TRY(pkv_buffer_append(&p->held, &c, 1, NULL));
  if (strncmp(end_tag, p->held.data, p->held.size) == 0) {
    if (p->held.size == sizeof end_tag - 1) pkv_buffer_clear(&p->held);
    return PKV_OK;
  }
  char copy[sizeof end_tag];
  const size_t bytes = p->held.size;
  memcpy(copy, p->held.data, bytes);
  pkv_buffer_clear(&p->held);
  p->mode = TEXT;
  for (size_t i = 0; i < bytes; i++)
    PKV_TRY(p->mode == TEXT ? feed_text(news, p, copy[i]) : feed_open(news, p, copy[i]));
  return PKV_OK;
}

static pkv_status feed_start(pkv_tool_news *news, pkv_tool_parser *p, char c) {
  if (c == '{') {
    begin_call(p);
    return feed_call(news, p, c);
  }
  PKV_TRY(pkv_buffer_append(&p->held, &c, 1, NULL));
  return is_blank(c) || c == '[' ? PKV_OK : give_up(news, p, PLAIN);
}

pkv_status pkv_tool_parser_feed(pkv_tool_news *news, pkv_tool_parser *parser, const char *text,
                                size_t bytes) {
  pkv_tool_parser *const p = parser;
  for (size_t i = 0; i < bytes; i++) {
    const char c = text[i];
    if (p->mode == PLAIN) return tell_text(news, p, text + i, bytes - i);
    PKV_TRY(p->mode == START     ? feed_start(news, p, c)
            : p->mode == TEXT    ? feed_text(news, p, c)
            : p->mode == OPEN    ? feed_open(news, p, c)
            : p->mode == BETWEEN ? feed_between(news, p, c)
                                 : feed_call(news, p, c));
  }
  const bool begun = p->mode == CALL && p->named && is_arguments(p) && !p->text_value;
  return begun ? tell_begun(news, p) : PKV_OK;
}

pkv_status pkv_tool_parser_end(pkv_tool_news *news, pkv_tool_parser *parser) {
  if (parser->mode == CALL && parser->named) return tell_arguments(news, parser);
  return parser->mode == BETWEEN ? PKV_OK : give_up(news, parser, PLAIN);
}

json_t *pkv_tool_calls(const json_t *deltas) {
  json_t *calls = json_array();
  size_t i;
  json_t *delta;
  json_array_foreach(deltas, i, delta) {
    if (calls == NULL) break;
    const size_t at = (size_t)json_integer_value(json_object_get(delta, "index"));
    json_t *const function = json_object_get(delta, "function");
    if (at == json_array_size(calls)) {
      json_t *const call = pkv_json_deep_copy(delta);
      (void)json_object_del(call, "index");
      pkv_json_add(&calls, call);
      continue;
    }
    json_t *known = json_incref(json_object_get(json_array_get(calls, at), "function"));
    const json_t *const front = json_object_get(known, "arguments");
    const json_t *const back = json_object_get(function, "arguments");
    pkv_json_set(&known, "arguments",
                 json_pack("s%+%", json_string_value(front), json_string_length(front),
                           json_string_value(back), json_string_length(back)));
    if (known == NULL) pkv_json_add(&calls, NULL);
    json_decref(known);
  }
  return calls;
}
