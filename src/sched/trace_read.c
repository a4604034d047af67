/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traces from files that anybody may have written: CSV and JSON in one pass over the text, without
 * recursion and without copies. Only what a trace needs is understood; other JSON values are
 * stepped over by their brackets, strings and words.
 */
#include "sched/trace_parts.h"

#include <stdbool.h>
#include <string.h>

#include "base/text.h"

#define MAX_DEPTH   64
#define MAX_COLUMNS 64
#define MAX_WORD    32 /* longest field name that is compared, longest number */

typedef enum field { FIELD_PROMPT, FIELD_DECODE, FIELD_ARRIVAL, FIELD_OTHER } field;

typedef struct reader {
  const char *at, *end;
  int64_t line; /* from 1 */
  pkv_trace *trace;
  int64_t value[3];
  bool given[3];
  pkv_error *err;
} reader;

#define BAD(r, ...) PKV_FAIL((r)->err, PKV_E_FORMAT, __VA_ARGS__)

static field field_of(const char *name, size_t length) {
  static const struct {
    const char *name;
    field which;
  } names[] = {{"prompt_len", FIELD_PROMPT}, {"prompt", FIELD_PROMPT},
               {"decode_len", FIELD_DECODE}, {"decode", FIELD_DECODE},
               {"arrival", FIELD_ARRIVAL},   {"arrival_step", FIELD_ARRIVAL}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strlen(names[i].name) == length && memcmp(names[i].name, name, length) == 0)
      return names[i].which;
  return FIELD_OTHER;
}

static const char *field_name(int which) {
  return which == FIELD_PROMPT ? "prompt_len" : which == FIELD_DECODE ? "decode_len" : "arrival";
}

/* A whole number of a request; the ranges proper are pkv_trace_add's. */
static pkv_status set_field(reader *r, field which, const char *text, size_t length) {
  char word[MAX_WORD + 1];
  if (which == FIELD_OTHER) return PKV_OK;
  if (r->given[which])
    return BAD(r, "line %lld: %s is given twice", (long long)r->line, field_name((int)which));
  const size_t shown = length < MAX_WORD ? length : MAX_WORD;
  memcpy(word, text, shown);
  word[shown] = '\0';
  if (length > MAX_WORD || !pkv_parse_i64(&r->value[which], word, INT32_MIN, INT32_MAX))
    return BAD(r, "line %lld: %s is '%s', not a whole number", (long long)r->line,
               field_name((int)which), word);
  r->given[which] = true;
  return PKV_OK;
}

static pkv_status end_request(reader *r) {
  for (int i = FIELD_PROMPT; i <= FIELD_DECODE; i++)
    if (!r->given[i]) return BAD(r, "line %lld: %s is missing", (long long)r->line, field_name(i));
  const int64_t arrival = r->given[FIELD_ARRIVAL] ? r->value[FIELD_ARRIVAL] : r->trace->count;
  memset(r->given, 0, sizeof r->given);
  return pkv_trace_add(r->trace, r->value[FIELD_PROMPT], r->value[FIELD_DECODE], arrival, r->err);
}

static bool is_full(const reader *r) {
  return r->trace->options.requests > 0 && r->trace->count >= r->trace->options.requests;
}

/* ---- CSV ---- */

/* The cell at r->at, without quotes and blanks around it; stops at the comma or the line's end. */
static pkv_status read_cell(reader *r, const char **text, size_t *length) {
  while (r->at < r->end && (*r->at == ' ' || *r->at == '\t'))
    r->at++;
  const char *start = r->at, *stop;
  if (r->at < r->end && *r->at == '"') {
    start = ++r->at;
    for (; r->at < r->end && *r->at != '\n'; r->at++) {
      if (*r->at != '"') continue;
      if (r->at + 1 < r->end && r->at[1] == '"')
        r->at++; /* a doubled quote; such a cell is neither a name nor a number of ours */
      else
        break;
    }
    if (r->at == r->end || *r->at != '"')
      return BAD(r, "line %lld: a quote is not closed", (long long)r->line);
    stop = r->at++;
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\r'))
      r->at++;
    if (r->at < r->end && *r->at != ',' && *r->at != '\n')
      return BAD(r, "line %lld: text after a closing quote", (long long)r->line);
  } else {
    while (r->at < r->end && *r->at != ',' && *r->at != '\n')
      r->at++;
    stop = r->at;
    while (stop > start && (stop[-1] == ' ' || stop[-1] == '\t' || stop[-1] == '\r'))
      stop--;
  }
  *text = start;
  *length = (size_t)(stop - start);
  return PKV_OK;
}

/* One line; with `names`, fills columns, else a request. Blank lines are skipped. */
static pkv_status read_line(reader *r, field *columns, int *count, bool names) {
  int column = 0;
  bool blank = true;
  for (;;) {
    const char *text = NULL;
    size_t length = 0;
    PKV_TRY(read_cell(r, &text, &length));
    if (length > 0) blank = false;
    const bool more = r->at < r->end && *r->at == ',';
    if (more || !blank) {
      if (column == MAX_COLUMNS || (!names && column == *count))
        return BAD(r, "line %lld: more than %d columns", (long long)r->line,
                   names ? MAX_COLUMNS : *count);
      if (names)
        columns[column] = field_of(text, length);
      else if (columns[column] != FIELD_OTHER && length > 0)
        PKV_TRY(set_field(r, columns[column], text, length));
      column++;
    }
    if (r->at == r->end) break;
    if (*r->at++ == '\n') break;
  }
  if (names) *count = column;
  if (!names && column > 0) PKV_TRY(end_request(r));
  r->line++;
  return PKV_OK;
}

static pkv_status read_csv(reader *r) {
  field columns[MAX_COLUMNS];
  int count = 0, seen[4] = {0, 0, 0, 0};
  while (r->at < r->end && count == 0)
    PKV_TRY(read_line(r, columns, &count, true));
  for (int i = 0; i < count; i++)
    seen[columns[i]]++;
  for (int i = 0; i < 3; i++)
    if (seen[i] > 1) return BAD(r, "two columns are %s", field_name(i));
  for (int i = FIELD_PROMPT; i <= FIELD_DECODE; i++)
    if (seen[i] == 0) return BAD(r, "the first line names no column %s", field_name(i));
  while (r->at < r->end && !is_full(r))
    PKV_TRY(read_line(r, columns, &count, false));
  return PKV_OK;
}

/* ---- JSON ---- */

static void skip_blanks(reader *r) {
  for (; r->at < r->end; r->at++) {
    if (*r->at == '\n')
      r->line++;
    else if (*r->at != ' ' && *r->at != '\t' && *r->at != '\r')
      return;
  }
}

/* The next character that is not blank, or 0 at the end; it is not taken. */
static char peek(reader *r) {
  skip_blanks(r);
  return r->at < r->end ? *r->at : '\0';
}

static pkv_status expect(reader *r, char wanted) {
  if (peek(r) != wanted) return BAD(r, "line %lld: '%c' expected", (long long)r->line, wanted);
  r->at++;
  return PKV_OK;
}

/* A string; its text with escapes as they stand: no name of ours has any. */
static pkv_status read_string(reader *r, const char **text, size_t *length) {
  PKV_TRY(expect(r, '"'));
  const char *start = r->at;
  for (; r->at < r->end && *r->at != '"'; r->at++) {
    if ((unsigned char)*r->at < 0x20)
      return BAD(r, "line %lld: a control character in a string", (long long)r->line);
    if (*r->at != '\\') continue;
    r->at++;
    if (r->at == r->end || strchr("\"\\/bfnrtu", *r->at) == NULL || *r->at == '\0')
      return BAD(r, "line %lld: an unknown escape in a string", (long long)r->line);
  }
  if (r->at == r->end) return BAD(r, "line %lld: a string is not closed", (long long)r->line);
  *text = start;
  *length = (size_t)(r->at++ - start);
  return PKV_OK;
}

/* Numbers, true, false, null: the run of characters they are made of, at least one. */
static pkv_status read_word(reader *r, const char **text, size_t *length) {
  (void)peek(r);
  const char *start = r->at;
  while (r->at < r->end && *r->at != '\0' &&
         strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *r->at) != NULL)
    r->at++;
  if (r->at == start) return BAD(r, "line %lld: a value expected", (long long)r->line);
  *text = start;
  *length = (size_t)(r->at - start);
  return PKV_OK;
}

/* Steps over any value, nested ones by a stack of bits: 1 = object. */
static pkv_status skip_value(reader *r) {
  uint64_t kinds = 0;
  int depth = 0;
  const char *text;
  size_t length;
  for (;;) {
    const char next = peek(r);
    bool opened = false;
    if (next == '{' || next == '[') {
      if (depth == MAX_DEPTH)
        return BAD(r, "line %lld: values nested deeper than %d", (long long)r->line, MAX_DEPTH);
      kinds = kinds << 1 | (next == '{');
      depth++;
      r->at++;
      opened = true;
    } else if (next == '"') {
      PKV_TRY(read_string(r, &text, &length));
    } else {
      PKV_TRY(read_word(r, &text, &length));
    }
    /* close what ends here, then go on to the next member */
    while (depth > 0) {
      const char close = kinds & 1 ? '}' : ']';
      const char after = peek(r);
      if (after == close) {
        r->at++;
        kinds >>= 1;
        depth--;
        opened = false;
        continue;
      }
      if (!opened) PKV_TRY(expect(r, ','));
      if (kinds & 1) {
        PKV_TRY(read_string(r, &text, &length));
        PKV_TRY(expect(r, ':'));
      }
      break;
    }
    if (depth == 0) return PKV_OK;
  }
}

static pkv_status read_object(reader *r) {
  const char *text;
  size_t length;
  PKV_TRY(expect(r, '{'));
  if (peek(r) != '}') {
    for (;;) {
      PKV_TRY(read_string(r, &text, &length));
      const field which = field_of(text, length);
      PKV_TRY(expect(r, ':'));
      if (which == FIELD_OTHER) {
        PKV_TRY(skip_value(r));
      } else {
        PKV_TRY(read_word(r, &text, &length));
        PKV_TRY(set_field(r, which, text, length));
      }
      if (peek(r) != ',') break;
      r->at++;
    }
  }
  PKV_TRY(expect(r, '}'));
  return end_request(r);
}

static pkv_status read_json(reader *r) {
  PKV_TRY(expect(r, '['));
  if (peek(r) != ']') {
    for (;;) {
      PKV_TRY(read_object(r));
      if (is_full(r)) return PKV_OK;
      if (peek(r) != ',') break;
      r->at++;
    }
  }
  PKV_TRY(expect(r, ']'));
  if (peek(r) != '\0' || r->at < r->end)
    return BAD(r, "line %lld: text after the list", (long long)r->line);
  return PKV_OK;
}

pkv_status pkv_trace_parse(pkv_trace **out, const char *text, size_t bytes,
                           const pkv_trace_options *options, pkv_error *err) {
  pkv_trace *trace = NULL;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, text || bytes == 0, PKV_E_INVALID, "text is NULL with %zu bytes", bytes);
  PKV_CHECK(err, bytes <= PKV_TRACE_MAX_FILE, PKV_E_LIMIT, "the text has %zu bytes, at most %u",
            bytes, PKV_TRACE_MAX_FILE);
  PKV_TRY(pkv_trace_begin(&trace, options, err));
  reader r = {.line = 1, .trace = trace, .err = err};
  if (bytes > 0) {
    r.at = text;
    r.end = text + bytes;
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) r.at += 3;
  }
  pkv_status status = peek(&r) == '[' ? read_json(&r) : read_csv(&r);
  if (status == PKV_OK && trace->count == 0)
    status = PKV_FAIL(err, PKV_E_FORMAT, "the text holds no request");
  if (status == PKV_OK) status = pkv_trace_finish(trace, err);
  if (status != PKV_OK) {
    pkv_trace_destroy(trace);
    return status;
  }
  *out = trace;
  return PKV_OK;
}

pkv_status pkv_trace_load(pkv_trace **out, const char *path, const pkv_trace_options *options,
                          pkv_error *err) {
  pkv_buffer text;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, path, PKV_E_INVALID, "path is NULL");
  PKV_CHECK_STRUCT(err, options, pkv_trace_options);
  pkv_buffer_init(&text, PKV_TRACE_MAX_FILE, options->allocator);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK) status = pkv_trace_parse(out, text.data, text.size, options, err);
  pkv_buffer_deinit(&text);
  return status;
}
