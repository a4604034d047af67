/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/json_state.h"

#include <string.h>

typedef enum mode {
  START,     /* of the text: { */
  FIRST_KEY, /* or } */
  KEY,
  COLON,
  FIRST_VALUE, /* or ] */
  VALUE,
  AFTER, /* a value: , or what closes */
  STRING,
  ESCAPE,
  HEX,
  PAIR_ESCAPE, /* the backslash of a low surrogate */
  PAIR_U,
  CHARACTER, /* further bytes */
  LITERAL,
  MINUS,
  ZERO,
  DIGITS,
  POINT,
  FRACTION,
  EXPONENT,
  SIGN,
  POWER,
  DONE
} mode;

void pkv_json_begin(pkv_json_state *state) {
  memset(state, 0, sizeof *state);
}

bool pkv_json_done(const pkv_json_state *state) {
  return state->mode == DONE;
}

static bool is_digit(unsigned char c) {
  return c >= '0' && c <= '9';
}

static bool go(pkv_json_state *s, mode next) {
  s->mode = (uint8_t)next;
  s->blanks = 0;
  return true;
}

static bool open_level(pkv_json_state *s, bool array) {
  if (s->depth == JSON_DEPTH) return false;
  const uint64_t bit = UINT64_C(1) << s->depth;
  s->arrays = array ? s->arrays | bit : s->arrays & ~bit;
  s->depth++;
  return go(s, array ? FIRST_VALUE : FIRST_KEY);
}

static bool in_array(const pkv_json_state *s) {
  return (s->arrays >> (s->depth - 1) & 1) != 0;
}

static bool close_level(pkv_json_state *s, bool array) {
  if (in_array(s) != array) return false;
  s->depth--;
  return go(s, s->depth == 0 ? DONE : AFTER);
}

static bool begin_string(pkv_json_state *s, bool key) {
  s->key = key;
  return go(s, STRING);
}

static bool begin_literal(pkv_json_state *s, const char *text) {
  s->literal = text;
  s->count = 1;
  return go(s, LITERAL);
}

static bool begin_value(pkv_json_state *s, unsigned char c) {
  switch (c) {
  case '{':
    return open_level(s, false);
  case '[':
    return open_level(s, true);
  case '"':
    return begin_string(s, false);
  case 't':
    return begin_literal(s, "true");
  case 'f':
    return begin_literal(s, "false");
  case 'n':
    return begin_literal(s, "null");
  case '-':
    return go(s, MINUS);
  case '0':
    return go(s, ZERO);
  default:
    return is_digit(c) && go(s, DIGITS);
  }
}

static bool after_value(pkv_json_state *s, unsigned char c) {
  if (c == ',') return go(s, in_array(s) ? VALUE : KEY);
  if (c == ']' || c == '}') return close_level(s, c == ']');
  return false;
}

/* A character of several bytes: how many follow, and the bounds of the first of them. */
static bool begin_character(pkv_json_state *s, unsigned char c) {
  if (c < 0xc2 || c > 0xf4) return false;
  s->count = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
  s->low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
  s->high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
  return go(s, CHARACTER);
}

static bool in_character(pkv_json_state *s, unsigned char c) {
  if (c < s->low || c > s->high) return false;
  s->low = 0x80;
  s->high = 0xbf;
  return --s->count > 0 || go(s, STRING);
}

static bool in_string(pkv_json_state *s, unsigned char c) {
  if (c == '"') return go(s, s->key ? COLON : AFTER);
  if (c == '\\') return go(s, ESCAPE);
  if (c >= 0x80) return begin_character(s, c);
  return c >= 0x20;
}

static bool begin_hex(pkv_json_state *s, bool pair) {
  s->pair = pair;
  s->count = 0;
  s->unit = 0;
  return go(s, HEX);
}

static bool escape(pkv_json_state *s, unsigned char c) {
  if (c == 'u') return begin_hex(s, false);
  return c != 0 && strchr("\"\\/bfnrt", c) != NULL && go(s, STRING);
}

/* Surrogates come in pairs, high first; refused at the digit that says so. */
static bool hex(pkv_json_state *s, unsigned char c) {
  static const char digits[] = "0123456789abcdef";
  const char *const at = c == 0 ? NULL : strchr(digits, c >= 'A' && c <= 'F' ? c + 32 : c);
  if (at == NULL) return false;
  s->unit = (uint16_t)(s->unit << 4 | (uint16_t)(at - digits));
  s->count++;
  if (s->pair && s->count == 1 && s->unit != 0xd) return false;
  if (s->count == 2) {
    const bool low = s->unit >= 0xdc && s->unit <= 0xdf;
    if (low != s->pair) return false;
  }
  if (s->count < 4) return true;
  if (s->unit == 0) return false;
  const bool high = s->unit >= 0xd800 && s->unit <= 0xdbff;
  return go(s, high ? PAIR_ESCAPE : STRING);
}

static bool literal(pkv_json_state *s, unsigned char c) {
  if ((unsigned char)s->literal[s->count] != c) return false;
  s->count++;
  return s->literal[s->count] != '\0' || go(s, AFTER);
}

static bool blank(pkv_json_state *s, unsigned char c, bool *is_blank) {
  *is_blank = c == ' ' || c == '\t' || c == '\n' || c == '\r';
  return *is_blank && ++s->blanks <= JSON_BLANKS;
}

/* A number that may end here: what follows belongs behind it. */
static bool end_number(pkv_json_state *s, unsigned char c) {
  bool is_blank = false;
  (void)go(s, AFTER);
  return blank(s, c, &is_blank) || (!is_blank && after_value(s, c));
}

/* A part of a number begins with this digit. */
static bool part(pkv_json_state *s, mode next) {
  s->count = 1;
  return go(s, next);
}

/* One more digit, as far as readers of JSON hold them all. */
static bool more(pkv_json_state *s, int most) {
  return s->count++ < most;
}

static bool number(pkv_json_state *s, unsigned char c) {
  const bool digit = is_digit(c), e = c == 'e' || c == 'E';
  switch ((mode)s->mode) {
  case MINUS:
    return digit && part(s, c == '0' ? ZERO : DIGITS);
  case POINT:
    return digit && part(s, FRACTION);
  case EXPONENT:
    return (c == '+' || c == '-') ? go(s, SIGN) : digit && part(s, POWER);
  case SIGN:
    return digit && part(s, POWER);
  case DIGITS:
    if (digit) return true;
    /* fall through */
  case ZERO:
    if (c == '.') return go(s, POINT);
    return e ? go(s, EXPONENT) : end_number(s, c);
  case FRACTION:
    if (digit) return true;
    return e ? go(s, EXPONENT) : end_number(s, c);
  default:
    return digit ? more(s, JSON_POWER) : end_number(s, c); /* POWER */
  }
}

/* Between tokens, where blanks may stand. */
static bool between(pkv_json_state *s, unsigned char c) {
  bool is_blank = false;
  if (blank(s, c, &is_blank)) return true;
  if (is_blank) return false;
  switch ((mode)s->mode) {
  case START:
    return c == '{' && open_level(s, false);
  case FIRST_KEY:
    if (c == '}') return close_level(s, false);
    return c == '"' && begin_string(s, true);
  case KEY:
    return c == '"' && begin_string(s, true);
  case COLON:
    return c == ':' && go(s, VALUE);
  case FIRST_VALUE:
    if (c == ']') return close_level(s, true);
    return begin_value(s, c);
  case VALUE:
    return begin_value(s, c);
  default:
    return after_value(s, c);
  }
}

static bool feed(pkv_json_state *s, unsigned char c) {
  switch ((mode)s->mode) {
  case START:
  case FIRST_KEY:
  case KEY:
  case COLON:
  case FIRST_VALUE:
  case VALUE:
  case AFTER:
    return between(s, c);
  case STRING:
    return in_string(s, c);
  case ESCAPE:
    return escape(s, c);
  case HEX:
    return hex(s, c);
  case PAIR_ESCAPE:
    return c == '\\' && go(s, PAIR_U);
  case PAIR_U:
    return c == 'u' && begin_hex(s, true);
  case CHARACTER:
    return in_character(s, c);
  case LITERAL:
    return literal(s, c);
  case DONE:
    return false;
  default:
    return number(s, c);
  }
}

bool pkv_json_feed(pkv_json_state *state, const char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!feed(state, (unsigned char)bytes[i])) return false;
  return true;
}
