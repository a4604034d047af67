/* SPDX-License-Identifier: Apache-2.0 */
/* Tags, the text between them with its whitespace rules, and the tokens within a tag. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"
#include "template/template_parts.h"

void pkv_tpl_place(char *out, size_t size, tpl_span source, size_t at) {
  size_t line = 1, start = 0;
  for (size_t i = 0; i < at && i < source.n; i++) {
    if (source.p[i] != '\n') continue;
    line++;
    start = i + 1;
  }
  (void)snprintf(out, size, "line %zu, column %zu", line, at - start + 1);
}

bool pkv_tpl_refuse(tpl_reader *r, size_t at, pkv_status status, const char *format, ...) {
  if (r->status != PKV_OK) return false;
  char place[64], text[128];
  va_list list;
  va_start(list, format);
  (void)vsnprintf(text, sizeof text, format, list);
  va_end(list);
  pkv_tpl_place(place, sizeof place, r->source, at);
  r->status = PKV_FAIL(r->err, status, "chat template, %s: %s", place, text);
  return false;
}

tpl_node *pkv_tpl_node(tpl_reader *r, tpl_kind kind, size_t at) {
  tpl_node *const node = pkv_tpl_arena_take(&r->t->arena, 1, sizeof *node);
  if (node == NULL) {
    (void)pkv_tpl_refuse(r, at, PKV_E_NOMEM, "no memory to read it");
    return NULL;
  }
  *node = (tpl_node){.kind = kind, .at = (uint32_t)at};
  return node;
}

/* ------------------------------------------------------------------------------------------
 * Between tags
 * ------------------------------------------------------------------------------------------ */

static bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

static char at_or_zero(const tpl_reader *r, size_t at) {
  return at < r->source.n ? r->source.p[at] : 0;
}

static void skip_blanks(tpl_reader *r) {
  while (r->at < r->source.n && is_blank(r->source.p[r->at]))
    r->at++;
}

/* Behind the tag's end, which stood behind `sign` and ends at r->at. */
static void after_tag(tpl_reader *r, char sign, bool takes_newline) {
  const size_t from = r->at;
  if (sign == '-')
    skip_blanks(r);
  else if (takes_newline && sign != '+' && at_or_zero(r, r->at) == '\n')
    r->at++;
  r->line_starts = r->at > from && r->source.p[r->at - 1] == '\n';
}

/* The text in front of a tag with its sign, as it is written. */
static tpl_span trimmed(const tpl_reader *r, size_t from, size_t to, char sign, bool variable) {
  const char *const p = r->source.p;
  if (sign == '-') {
    while (to > from && is_blank(p[to - 1]))
      to--;
  } else if (sign != '+' && !variable) {
    size_t line = to;
    while (line > from && is_blank(p[line - 1]) && p[line - 1] != '\n')
      line--;
    if (line > from ? p[line - 1] == '\n' : r->line_starts) to = line;
  }
  return (tpl_span){p + from, to - from};
}

static bool skip_comment(tpl_reader *r, size_t open) {
  for (; r->at + 1 < r->source.n; r->at++) {
    if (r->source.p[r->at] != '#' || r->source.p[r->at + 1] != '}') continue;
    const char before = r->source.p[r->at - 1];
    const bool own = r->at - 1 < open + 2; /* {#-#}: its sign is the opening's */
    r->at += 2;
    after_tag(r, own ? 0 : before, true);
    return true;
  }
  return pkv_tpl_refuse(r, open, PKV_E_FORMAT, "a comment that does not end");
}

bool pkv_tpl_read_data(tpl_reader *r, tpl_span *data) {
  const size_t from = r->at;
  size_t open = from;
  char kind = 0;
  for (; open + 1 < r->source.n; open++) {
    if (r->source.p[open] != '{') continue;
    kind = r->source.p[open + 1];
    if (kind == '{' || kind == '%' || kind == '#') break;
  }
  if (open + 1 >= r->source.n) {
    *data = (tpl_span){r->source.p + from, r->source.n - from};
    r->at = r->source.n;
    return false;
  }
  char sign = at_or_zero(r, open + 2);
  if (sign != '-' && sign != '+') sign = 0;
  *data = trimmed(r, from, open, sign, kind == '{');
  r->at = open + 2 + (sign != 0);
  r->line_starts = false;
  r->brackets = 0;
  r->variable = kind == '{';
  if (kind != '#') return pkv_tpl_next(r);
  r->token.kind = TPL_T_CLOSE; /* a comment is a tag without tokens */
  r->token.at = r->token.end = r->at;
  return skip_comment(r, open);
}

bool pkv_tpl_close(tpl_reader *r) {
  if (r->token.kind != TPL_T_CLOSE)
    return pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "the tag should end here");
  r->at = r->token.end;
  after_tag(r, r->source.p[r->token.at], !r->variable);
  return true;
}

bool pkv_tpl_skip_raw(tpl_reader *r, tpl_span *data) {
  if (r->token.kind != TPL_T_CLOSE)
    return pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "raw takes nothing");
  r->at = r->token.end;
  if (r->source.p[r->token.at] == '-') skip_blanks(r);
  const size_t from = r->at, tag = r->token.at;
  r->line_starts = false;
  for (size_t open = from; open + 1 < r->source.n; open++) {
    if (r->source.p[open] != '{' || r->source.p[open + 1] != '%') continue;
    char sign = at_or_zero(r, open + 2);
    if (sign != '-' && sign != '+') sign = 0;
    r->at = open + 2 + (sign != 0);
    skip_blanks(r);
    if (r->source.n - r->at < 6 || memcmp(r->source.p + r->at, "endraw", 6) != 0) continue;
    *data = trimmed(r, from, open, sign, false);
    r->at += 6;
    return pkv_tpl_next(r) && pkv_tpl_close(r);
  }
  return pkv_tpl_refuse(r, tag, PKV_E_FORMAT, "raw without an endraw");
}

/* ------------------------------------------------------------------------------------------
 * Within a tag
 * ------------------------------------------------------------------------------------------ */

static bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

static bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c) ||
         (unsigned char)c >= 0x80;
}

static int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* Digits with underscores between them, to the buffer. */
static size_t take_digits(const tpl_reader *r, size_t at, char *out, size_t size, size_t *n) {
  while (is_digit(at_or_zero(r, at)) ||
         (at_or_zero(r, at) == '_' && is_digit(at_or_zero(r, at + 1)))) {
    if (r->source.p[at] != '_' && *n + 1 < size) out[(*n)++] = r->source.p[at];
    at++;
  }
  return at;
}

static bool read_hex(tpl_reader *r, tpl_token *t) {
  size_t at = t->at + 2;
  uint64_t value = 0;
  for (; hex_digit(at_or_zero(r, at)) >= 0; at++) {
    if (value >> 59) return pkv_tpl_refuse(r, t->at, PKV_E_LIMIT, "a number beyond 64 bits");
    value = value << 4 | (uint64_t)hex_digit(r->source.p[at]);
  }
  t->kind = TPL_T_INT;
  t->whole = (int64_t)value;
  t->end = at;
  return true;
}

static bool read_number(tpl_reader *r, tpl_token *t, bool after_dot) {
  char digits[64];
  size_t n = 0;
  if (at_or_zero(r, t->at) == '0' && (at_or_zero(r, t->at + 1) | 32) == 'x' &&
      hex_digit(at_or_zero(r, t->at + 2)) >= 0)
    return read_hex(r, t);
  size_t at = take_digits(r, t->at, digits, sizeof digits - 8, &n);
  bool real = false;
  if (!after_dot && at_or_zero(r, at) == '.' && is_digit(at_or_zero(r, at + 1))) {
    real = true;
    digits[n++] = '.';
    at = take_digits(r, at + 1, digits, sizeof digits - 8, &n);
  }
  const size_t sign = at + 1 + (at_or_zero(r, at + 1) == '-' || at_or_zero(r, at + 1) == '+');
  if (!after_dot && (at_or_zero(r, at) | 32) == 'e' && is_digit(at_or_zero(r, sign))) {
    real = true;
    digits[n++] = 'e';
    if (sign > at + 1) digits[n++] = r->source.p[at + 1];
    at = take_digits(r, sign, digits, sizeof digits - 1, &n);
  }
  digits[n] = 0;
  t->end = at;
  t->kind = real ? TPL_T_FLOAT : TPL_T_INT;
  if (real) {
    t->real = strtod(digits, NULL);
    return true;
  }
  int64_t value = 0;
  for (size_t i = 0; i < n; i++)
    if (__builtin_mul_overflow(value, 10, &value) ||
        __builtin_add_overflow(value, digits[i] - '0', &value))
      return pkv_tpl_refuse(r, t->at, PKV_E_LIMIT, "a number beyond 64 bits");
  t->whole = value;
  return true;
}

/* \xNN, \uNNNN, \UNNNNNNNN: -1 if it is none, else its characters; *code. */
static int read_code(const tpl_reader *r, size_t at, uint32_t *code) {
  const char c = r->source.p[at];
  const int want = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  *code = 0;
  for (int i = 1; i <= want; i++) {
    const int digit = hex_digit(at_or_zero(r, at + (size_t)i));
    if (digit < 0 || *code > 0x0fffffff) return -1;
    *code = *code << 4 | (uint32_t)digit;
  }
  return want == 0 || *code > 0x10ffff ? -1 : want + 1;
}

/* One escape, r->source.p[at] behind the backslash. How many bytes of the source; 0: wrong. */
static size_t read_escape(const tpl_reader *r, size_t at, char *out, size_t *n) {
  static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
  const char c = at_or_zero(r, at);
  const char *const known = c != 0 ? strchr(from, c) : NULL;
  uint32_t code = 0;
  if (known != NULL) {
    out[(*n)++] = to[known - from];
    return 1;
  }
  if (c == '\n') return 1;
  if (c >= '0' && c <= '7') {
    size_t used = 0;
    for (; used < 3 && at_or_zero(r, at + used) >= '0' && at_or_zero(r, at + used) <= '7'; used++)
      code = code << 3 | (uint32_t)(r->source.p[at + used] - '0');
    *n += pkv_tpl_encode(out + *n, code);
    return used;
  }
  if (c == 'x' || c == 'u' || c == 'U') {
    const int used = read_code(r, at, &code);
    if (used < 0) return 0;
    *n += pkv_tpl_encode(out + *n, code);
    return (size_t)used;
  }
  if (c == 'N') return 0;
  out[(*n)++] = '\\'; /* an unknown escape stands for itself */
  if (c == 0) return 0;
  out[(*n)++] = c;
  return 1;
}

static bool read_literal(tpl_reader *r, tpl_token *t) {
  const char quote = r->source.p[t->at];
  size_t end = t->at + 1;
  while (end < r->source.n && r->source.p[end] != quote)
    end += r->source.p[end] == '\\' ? 2 : 1;
  if (end >= r->source.n)
    return pkv_tpl_refuse(r, t->at, PKV_E_FORMAT, "a text without its closing quote");
  /* An escape never gets longer: \1 is the shortest that becomes a character of 2 bytes. */
  char *const out = pkv_tpl_arena_take(&r->t->arena, end - t->at + 4, 1);
  if (out == NULL) return pkv_tpl_refuse(r, t->at, PKV_E_NOMEM, "no memory to read it");
  size_t n = 0;
  for (size_t at = t->at + 1; at < end;) {
    if (r->source.p[at] != '\\') {
      out[n++] = r->source.p[at++];
      continue;
    }
    const size_t used = read_escape(r, at + 1, out, &n);
    if (used == 0) return pkv_tpl_refuse(r, at, PKV_E_FORMAT, "an escape that is not known");
    at += 1 + used;
  }
  t->kind = TPL_T_TEXT;
  t->text = (tpl_span){out, n};
  t->end = end + 1;
  return true;
}

static int operator_at(const tpl_reader *r, size_t at, size_t *bytes) {
  static const struct {
    char text[3];
    int op;
  } pairs[] = {{"==", TPL_EQ}, {"!=", TPL_NE},    {"<=", TPL_LE},
               {">=", TPL_GE}, {"//", TPL_FLOOR}, {"**", TPL_POW}};
  const char c = at_or_zero(r, at), next = at_or_zero(r, at + 1);
  *bytes = 2;
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
    if (c == pairs[i].text[0] && next == pairs[i].text[1]) return pairs[i].op;
  *bytes = 1;
  return c != 0 && strchr("+-*/%~|.,:()[]{}=<>", c) != NULL ? c : 0;
}

static bool ends_tag(const tpl_reader *r, size_t at, size_t *bytes) {
  const char sign = at_or_zero(r, at);
  const bool signed_end = sign == '-' || (sign == '+' && !r->variable);
  const size_t end = at + signed_end;
  *bytes = 2 + (size_t)signed_end;
  return r->brackets == 0 && at_or_zero(r, end) == (r->variable ? '}' : '%') &&
         at_or_zero(r, end + 1) == '}';
}

static bool read_operator(tpl_reader *r, tpl_token *t, uint32_t *brackets) {
  size_t bytes;
  t->kind = TPL_T_OP;
  t->op = operator_at(r, t->at, &bytes);
  t->end = t->at + bytes;
  if (t->op == 0) return pkv_tpl_refuse(r, t->at, PKV_E_FORMAT, "a character that is not expected");
  if (t->op == '(' || t->op == '[' || t->op == '{') ++*brackets;
  if (t->op == ')' || t->op == ']' || t->op == '}') {
    if (*brackets == 0)
      return pkv_tpl_refuse(r, t->at, PKV_E_FORMAT, "a '%c' that closes nothing", t->op);
    --*brackets;
  }
  return true;
}

/* The token from byte `at` on. */
static bool read_token(tpl_reader *r, size_t at, tpl_token *t, uint32_t *brackets) {
  while (at < r->source.n && is_blank(r->source.p[at]))
    at++;
  const bool after_dot = tpl_at_op(r, '.') && r->token.end == at;
  *t = (tpl_token){.at = at};
  if (at >= r->source.n) return pkv_tpl_refuse(r, at, PKV_E_FORMAT, "a tag that does not end");
  const char c = r->source.p[at];
  size_t bytes;
  if (ends_tag(r, at, &bytes)) {
    t->kind = TPL_T_CLOSE;
    t->end = at + bytes;
    return true;
  }
  if (is_digit(c)) return read_number(r, t, after_dot);
  if (is_word(c)) {
    for (t->end = at; is_word(at_or_zero(r, t->end));)
      t->end++;
    t->kind = TPL_T_NAME;
    t->text = (tpl_span){r->source.p + at, t->end - at};
    return true;
  }
  if (c == '\'' || c == '"') return read_literal(r, t);
  return read_operator(r, t, brackets);
}

bool pkv_tpl_next(tpl_reader *r) {
  tpl_token token;
  if (!read_token(r, r->at, &token, &r->brackets)) return false;
  r->token = token;
  r->at = token.end;
  return true;
}

bool pkv_tpl_peek(tpl_reader *r, tpl_token *out) {
  uint32_t brackets = r->brackets;
  return read_token(r, r->at, out, &brackets);
}

bool pkv_tpl_expect(tpl_reader *r, int op) {
  if (!tpl_at_op(r, op))
    return pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a '%c' should stand here", op);
  return pkv_tpl_next(r);
}
