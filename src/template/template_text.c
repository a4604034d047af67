/* SPDX-License-Identifier: Apache-2.0 */
/* Texts whose bytes know where they come from: built, cut, searched. */
#include "template/template_parts.h"

/* ------------------------------------------------------------------------------------------
 * Characters
 * ------------------------------------------------------------------------------------------ */

size_t pkv_tpl_char(const char *p, size_t n, uint32_t *code) {
  const unsigned char c = (unsigned char)p[0];
  const size_t want = c < 0x80                ? 1
                      : c >= 0xc2 && c < 0xe0 ? 2
                      : (c & 0xf0) == 0xe0    ? 3
                      : c >= 0xf0 && c < 0xf5 ? 4
                                              : 0;
  *code = want == 1 ? c : 0xdc00u + c; /* bytes that are no UTF-8 stand for themselves */
  if (want < 2 || want > n) return 1;
  uint32_t value = c & (0xffu >> (want + 1));
  for (size_t i = 1; i < want; i++) {
    if (((unsigned char)p[i] & 0xc0) != 0x80) return 1;
    value = value << 6 | ((unsigned char)p[i] & 0x3fu);
  }
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < least[want] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) return 1;
  *code = value;
  return want;
}

size_t pkv_tpl_chars(const char *p, size_t n) {
  size_t count = 0;
  uint32_t code;
  for (size_t i = 0; i < n; count++)
    i += pkv_tpl_char(p + i, n - i, &code);
  return count;
}

size_t pkv_tpl_encode(char *out, uint32_t code) {
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  const size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  static const unsigned char head[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (size_t i = n; i-- > 1; code >>= 6)
    out[i] = (char)(0x80 | (code & 0x3f));
  out[0] = (char)(head[n] | code);
  return n;
}

bool pkv_tpl_is_space(uint32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

/* The last character of p[0 .. n), n > 0. */
static size_t last_char(const char *p, size_t n, uint32_t *code) {
  for (size_t back = n < 4 ? n : 4; back > 1; back--)
    if (pkv_tpl_char(p + n - back, back, code) == back) return back;
  return pkv_tpl_char(p + n - 1, 1, code);
}

static bool strippable(uint32_t code, const tpl_text *set) {
  if (set == NULL) return pkv_tpl_is_space(code);
  for (size_t i = 0; i < set->n;) {
    uint32_t c;
    i += pkv_tpl_char(set->p + i, set->n - i, &c);
    if (c == code) return true;
  }
  return false;
}

void pkv_tpl_strip(size_t *from, size_t *to, const tpl_text *s, const tpl_text *set, bool left,
                   bool right) {
  uint32_t code;
  *from = 0;
  *to = s->n;
  while (left && *from < *to) {
    const size_t n = pkv_tpl_char(s->p + *from, *to - *from, &code);
    if (!strippable(code, set)) break;
    *from += n;
  }
  while (right && *from < *to) {
    const size_t n = last_char(s->p + *from, *to - *from, &code);
    if (!strippable(code, set)) break;
    *to -= n;
  }
}

bool pkv_tpl_find(const tpl_text *s, size_t from, const tpl_text *what, size_t *at) {
  if (from > s->n || what->n > s->n - from) return false;
  *at = from;
  if (what->n == 0) return true;
  const char *const hit = memmem(s->p + from, s->n - from, what->p, what->n);
  if (hit == NULL) return false;
  *at = (size_t)(hit - s->p);
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Texts
 * ------------------------------------------------------------------------------------------ */

static bool new_text(tpl_run *r, tpl_value *out, tpl_text text) {
  tpl_text *const s = pkv_tpl_take(r, 1, sizeof *s);
  if (s == NULL) return false;
  *s = text;
  *out = (tpl_value){.type = TPL_V_TEXT, .text = s};
  return true;
}

bool pkv_tpl_text(tpl_run *r, tpl_value *out, const char *p, size_t n, bool trusted) {
  return new_text(r, out, (tpl_text){p, n, NULL, trusted});
}

bool pkv_tpl_part(tpl_run *r, tpl_value *out, const tpl_text *s, size_t from, size_t to) {
  return new_text(
      r, out,
      (tpl_text){s->p + from, to - from, s->marks != NULL ? s->marks + from : NULL, s->trusted});
}

bool pkv_tpl_all_trusted(const tpl_text *s) {
  if (s->marks == NULL) return s->trusted || s->n == 0;
  return memchr(s->marks, 0, s->n) == NULL;
}

/* ------------------------------------------------------------------------------------------
 * Building
 * ------------------------------------------------------------------------------------------ */

static bool grow(tpl_run *r, tpl_builder *b, size_t more) {
  size_t want;
  if (!pkv_add_size(&want, b->n, more)) return pkv_tpl_fail(r, PKV_E_LIMIT, "a text too long");
  if (b->limit != 0 && want > b->limit)
    return pkv_tpl_fail(r, PKV_E_LIMIT, "more than %zu bytes of output (limit output)", b->limit);
  if (want <= b->capacity) return true;
  size_t capacity = b->capacity < 32 ? 64 : 2 * b->capacity;
  if (b->limit != 0 && capacity > b->limit) capacity = b->limit;
  if (capacity < want) capacity = want;
  char *const p = pkv_tpl_take(r, capacity, 1);
  if (p == NULL) return false;
  if (b->n > 0) memcpy(p, b->p, b->n);
  b->p = p;
  if (b->marks != NULL) {
    uint8_t *const marks = pkv_tpl_take(r, capacity, 1);
    if (marks == NULL) return false;
    memcpy(marks, b->marks, b->n);
    b->marks = marks;
  }
  b->capacity = capacity;
  return true;
}

bool pkv_tpl_put(tpl_run *r, tpl_builder *b, const tpl_text *s) {
  if (s->n == 0) return true;
  if (!pkv_tpl_work(r, s->n) || !grow(r, b, s->n)) return false;
  if (b->n == 0 && b->marks == NULL) b->trusted = s->trusted;
  if (b->marks == NULL && (s->marks != NULL || s->trusted != b->trusted)) {
    b->marks = pkv_tpl_take(r, b->capacity, 1);
    if (b->marks == NULL) return false;
    memset(b->marks, b->trusted, b->n);
  }
  memcpy(b->p + b->n, s->p, s->n);
  if (b->marks != NULL && s->marks != NULL)
    memcpy(b->marks + b->n, s->marks, s->n);
  else if (b->marks != NULL)
    memset(b->marks + b->n, s->trusted, s->n);
  b->n += s->n;
  return true;
}

bool pkv_tpl_put_bytes(tpl_run *r, tpl_builder *b, const char *p, size_t n, bool trusted) {
  const tpl_text s = {p, n, NULL, trusted};
  return pkv_tpl_put(r, b, &s);
}

bool pkv_tpl_built(tpl_run *r, const tpl_builder *b, tpl_value *out) {
  return new_text(r, out,
                  (tpl_text){b->n > 0 ? b->p : "", b->n, b->marks, b->n > 0 ? b->trusted : true});
}
