/* SPDX-License-Identifier: Apache-2.0 */
/* What filters and methods make of texts. Each byte keeps where it came from. */
#include <stdio.h>

#include <utf8proc.h>

#include "template/template_parts.h"

static bool mark_at(const tpl_text *s, size_t i) {
  return s->marks != NULL ? s->marks[i] != 0 : s->trusted;
}

/* One character through the simple case mapping; the sharp s is Python's one case of two that
   people write. */
static bool put_case(tpl_run *r, tpl_builder *b, uint32_t code, const char *raw, size_t n,
                     bool upper, bool trusted) {
  char text[8];
  if (code >= 0xd800 && code < 0xe000) return pkv_tpl_put_bytes(r, b, raw, n, trusted);
  if (upper && code == 0xdf) return pkv_tpl_put_bytes(r, b, "SS", 2, trusted);
  const utf8proc_int32_t c = (utf8proc_int32_t)code;
  const uint32_t mapped = (uint32_t)(upper ? utf8proc_toupper(c) : utf8proc_tolower(c));
  return pkv_tpl_put_bytes(r, b, text, pkv_tpl_encode(text, mapped), trusted);
}

bool pkv_tpl_fold(tpl_run *r, tpl_value *out, const tpl_text *s, bool upper) {
  tpl_builder b = {0};
  for (size_t i = 0; i < s->n;) {
    uint32_t code;
    const size_t n = pkv_tpl_char(s->p + i, s->n - i, &code);
    if (!put_case(r, &b, code, s->p + i, n, upper, mark_at(s, i))) return false;
    i += n;
  }
  return pkv_tpl_work(r, 4 * s->n) && pkv_tpl_built(r, &b, out);
}

static bool is_letter(uint32_t code) {
  if (code < 0x80) return (code | 32) >= 'a' && (code | 32) <= 'z';
  const utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)code);
  return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

/* every_word: as the filter title does, which takes blanks and -([{< for borders. */
bool pkv_tpl_capital(tpl_run *r, tpl_value *out, const tpl_text *s, bool every_word) {
  tpl_builder b = {0};
  bool first = true;
  for (size_t i = 0; i < s->n;) {
    uint32_t code;
    const size_t n = pkv_tpl_char(s->p + i, s->n - i, &code);
    if (!put_case(r, &b, code, s->p + i, n, first, mark_at(s, i))) return false;
    first = every_word && (pkv_tpl_is_space(code) ||
                           (code > 0 && code < 0x80 && strchr("-([{<", (int)code) != NULL));
    i += n;
  }
  return pkv_tpl_work(r, 4 * s->n) && pkv_tpl_built(r, &b, out);
}

/* most < 0: all of them. */
bool pkv_tpl_replace(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_text *from,
                     const tpl_text *to, int64_t most) {
  tpl_builder b = {0};
  size_t at = 0, hit = 0;
  uint32_t code;
  while (most != 0 && pkv_tpl_find(s, hit, from, &hit)) {
    const tpl_text before = {s->p + at, hit - at, s->marks != NULL ? s->marks + at : NULL,
                             s->trusted};
    if (!pkv_tpl_work(r, 64) || !pkv_tpl_put(r, &b, &before) || !pkv_tpl_put(r, &b, to))
      return false;
    at = hit + from->n;
    hit = at;
    if (from->n == 0 && hit == s->n) break;
    if (from->n == 0) hit += pkv_tpl_char(s->p + hit, s->n - hit, &code);
    if (most > 0) most--;
  }
  const tpl_text rest = {s->p + at, s->n - at, s->marks != NULL ? s->marks + at : NULL, s->trusted};
  return pkv_tpl_put(r, &b, &rest) && pkv_tpl_work(r, s->n) && pkv_tpl_built(r, &b, out);
}

bool pkv_tpl_join(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_text *between,
                  bool only_texts) {
  tpl_builder b = {0};
  for (size_t i = 0; i < list->n; i++) {
    if (only_texts && list->v[i].type != TPL_V_TEXT)
      return pkv_tpl_fail(r, PKV_E_FORMAT, "join takes texts, not %s",
                          pkv_tpl_type_name(&list->v[i]));
    if ((i > 0 && !pkv_tpl_put(r, &b, between)) || !pkv_tpl_put_value(r, &b, &list->v[i]) ||
        !pkv_tpl_work(r, 64))
      return false;
  }
  return pkv_tpl_built(r, &b, out);
}

/* ------------------------------------------------------------------------------------------
 * Formats
 * ------------------------------------------------------------------------------------------ */

/* The value of a {field}: empty, a number, or a name. */
static const tpl_value *format_value(const tpl_args *args, tpl_span field, size_t *next) {
  size_t index = 0;
  if (field.n == 0) {
    index = (*next)++;
  } else if (field.p[0] >= '0' && field.p[0] <= '9') {
    for (size_t i = 0; i < field.n && field.p[i] >= '0' && field.p[i] <= '9' && index < 1000; i++)
      index = 10 * index + (size_t)(field.p[i] - '0');
  } else {
    return pkv_tpl_entry(&args->named, field);
  }
  return index < args->positional.n ? &args->positional.v[index] : NULL;
}

static bool put_part(tpl_run *r, tpl_builder *b, const tpl_text *s, size_t from, size_t to) {
  const tpl_text part = {s->p + from, to - from, s->marks != NULL ? s->marks + from : NULL,
                         s->trusted};
  return pkv_tpl_put(r, b, &part);
}

/* str.format with fields {}, {0} and {name}; no conversions, no attributes. */
bool pkv_tpl_format(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  tpl_builder b = {0};
  size_t next = 0;
  for (size_t i = 0; i < s->n;) {
    const char c = s->p[i];
    if (c != '{' && c != '}') {
      size_t end = i;
      while (end < s->n && s->p[end] != '{' && s->p[end] != '}')
        end++;
      if (!put_part(r, &b, s, i, end)) return false;
      i = end;
      continue;
    }
    if (i + 1 < s->n && s->p[i + 1] == c) { /* doubled: itself */
      if (!put_part(r, &b, s, i, i + 1)) return false;
      i += 2;
      continue;
    }
    const char *const close = c == '{' ? memchr(s->p + i, '}', s->n - i) : NULL;
    if (close == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "a format with a single brace");
    const tpl_span field = {s->p + i + 1, (size_t)(close - s->p) - i - 1};
    if (memchr(field.p, ':', field.n) != NULL || memchr(field.p, '!', field.n) != NULL ||
        memchr(field.p, '.', field.n) != NULL || memchr(field.p, '[', field.n) != NULL)
      return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "a format that says more than a field's name");
    const tpl_value *const v = format_value(args, field, &next);
    if (v == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "a format's field without its argument");
    if (!pkv_tpl_put_value(r, &b, v)) return false;
    i = (size_t)(close - s->p) + 1;
  }
  return pkv_tpl_built(r, &b, out);
}

static bool put_percent(tpl_run *r, tpl_builder *b, char kind, int precision, const tpl_value *v) {
  char text[400];
  if (kind == 's') return pkv_tpl_put_value(r, b, v);
  if (kind == 'r') return pkv_tpl_put_repr(r, b, v, pkv_tpl_value_trusted(r, v));
  if (!tpl_is_number(v))
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%%%c takes a number, not %s", kind, pkv_tpl_type_name(v));
  int n = -1;
  if (kind == 'f')
    n = snprintf(text, sizeof text, "%.*f", precision < 0 ? 6 : precision,
                 v->type == TPL_V_FLOAT ? v->real : (double)v->whole);
  else if (tpl_is_whole(v) && (kind == 'd' || kind == 'i'))
    n = snprintf(text, sizeof text, "%lld", (long long)v->whole);
  if (n < 0 || (size_t)n >= sizeof text)
    return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "the format %%%c is not known", kind);
  return pkv_tpl_put_bytes(r, b, text, (size_t)n, v->trusted);
}

/* text % values: %s, %r, %d, %f and %.2f. */
bool pkv_tpl_percent(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_list *args) {
  tpl_builder b = {0};
  size_t used = 0;
  for (size_t i = 0; i < s->n;) {
    const char *const hit = memchr(s->p + i, '%', s->n - i);
    const size_t end = hit != NULL ? (size_t)(hit - s->p) : s->n;
    if (!put_part(r, &b, s, i, end)) return false;
    if (hit == NULL) break;
    int precision = -1;
    i = end + 1;
    if (i < s->n && s->p[i] == '%') {
      if (!put_part(r, &b, s, end, i)) return false;
      i++;
      continue;
    }
    if (i + 1 < s->n && s->p[i] == '.' && s->p[i + 1] >= '0' && s->p[i + 1] <= '9') {
      precision = s->p[i + 1] - '0';
      i += 2;
    }
    if (i >= s->n || strchr("srdif", s->p[i]) == NULL || s->p[i] == 0)
      return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "a format that is not known");
    if (used == args->n) return pkv_tpl_fail(r, PKV_E_FORMAT, "a format with too few values");
    if (!put_percent(r, &b, s->p[i++], precision, &args->v[used++])) return false;
  }
  if (used < args->n) return pkv_tpl_fail(r, PKV_E_FORMAT, "a format with too many values");
  return pkv_tpl_built(r, &b, out);
}

/* ------------------------------------------------------------------------------------------
 * Filters
 * ------------------------------------------------------------------------------------------ */

static bool filter_trim(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *set = NULL;
  size_t from, to;
  if (!pkv_tpl_bind(r, slots, "chars", args)) return false;
  if (slots[0] != NULL && slots[0]->type != TPL_V_NONE &&
      !pkv_tpl_want_text(r, slots[0], "chars", &set))
    return false;
  if (!pkv_tpl_work(r, s->n)) return false;
  pkv_tpl_strip(&from, &to, s, set, true, true);
  return pkv_tpl_part(r, out, s, from, to);
}

static bool filter_replace(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_value from, to;
  int64_t most = -1;
  if (!pkv_tpl_bind(r, slots, "old new count", args)) return false;
  if (slots[0] == NULL || slots[1] == NULL)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "replace takes two texts");
  if (slots[2] != NULL && slots[2]->type != TPL_V_NONE &&
      !pkv_tpl_want_int(r, slots[2], "count", -1, &most))
    return false;
  return pkv_tpl_to_text(r, &from, slots[0]) && pkv_tpl_to_text(r, &to, slots[1]) &&
         pkv_tpl_replace(r, out, s, from.text, to.text, most);
}

static bool indent_of(tpl_run *r, const tpl_value *width, tpl_value *out) {
  if (width != NULL && width->type == TPL_V_TEXT) return *out = *width, true;
  int64_t n;
  const tpl_value blank = {.type = TPL_V_TEXT, .text = &(const tpl_text){" ", 1, NULL, true}};
  if (!pkv_tpl_want_int(r, width, "width", 4, &n)) return false;
  const tpl_value times = tpl_int(n, true);
  return pkv_tpl_binary(r, out, '*', &blank, &times);
}

/* Every line but the first, and but empty ones. */
static bool filter_indent(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_value by;
  tpl_builder b = {0};
  if (!pkv_tpl_bind(r, slots, "width first blank", args) || !indent_of(r, slots[0], &by))
    return false;
  const bool first = slots[1] != NULL && pkv_tpl_truth(slots[1]);
  const bool blank = slots[2] != NULL && pkv_tpl_truth(slots[2]);
  for (size_t i = 0; i <= s->n;) {
    const char *const hit = i < s->n ? memchr(s->p + i, '\n', s->n - i) : NULL;
    const size_t end = hit != NULL ? (size_t)(hit - s->p) : s->n;
    const bool indented = i == 0 ? first : blank || end > i;
    if ((indented && !pkv_tpl_put(r, &b, by.text)) || !put_part(r, &b, s, i, end + (hit != NULL)) ||
        !pkv_tpl_work(r, 64))
      return false;
    i = end + 1;
  }
  return pkv_tpl_built(r, &b, out);
}

static bool filter_escape(tpl_run *r, tpl_value *out, const tpl_text *s) {
  tpl_builder b = {0};
  for (size_t i = 0; i < s->n; i++) {
    static const char from[] = "&<>'\"";
    static const char *const to[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    const char *const known = s->p[i] != 0 ? strchr(from, s->p[i]) : NULL;
    const char *const text = known != NULL ? to[known - from] : s->p + i;
    if (!pkv_tpl_put_bytes(r, &b, text, known != NULL ? strlen(text) : 1, mark_at(s, i)))
      return false;
  }
  return pkv_tpl_work(r, 8 * s->n) && pkv_tpl_built(r, &b, out);
}

static bool no_args(tpl_run *r, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  return pkv_tpl_bind(r, slots, "", args);
}

bool pkv_tpl_text_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                         const tpl_args *args, bool *found) {
  static const char *const names[] = {"trim",   "replace", "indent", "upper",  "lower",     "title",
                                      "escape", "e",       "string", "format", "capitalize"};
  tpl_value text;
  *found = false;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    *found = *found || tpl_is(name, names[i]);
  if (!*found) return true;
  if (!pkv_tpl_to_text(r, &text, v)) return false;
  const tpl_text *const s = text.text;
  if (tpl_is(name, "trim")) return filter_trim(r, out, s, args);
  if (tpl_is(name, "replace")) return filter_replace(r, out, s, args);
  if (tpl_is(name, "indent")) return filter_indent(r, out, s, args);
  if (tpl_is(name, "format")) return pkv_tpl_percent(r, out, s, &args->positional);
  if (!no_args(r, args)) return false;
  if (tpl_is(name, "upper")) return pkv_tpl_fold(r, out, s, true);
  if (tpl_is(name, "lower")) return pkv_tpl_fold(r, out, s, false);
  if (tpl_is(name, "title")) return pkv_tpl_capital(r, out, s, true);
  if (tpl_is(name, "capitalize")) return pkv_tpl_capital(r, out, s, false);
  if (tpl_is(name, "string")) return *out = text, true;
  return filter_escape(r, out, s);
}

/* Used by the methods that ask about characters. */
bool pkv_tpl_only(const tpl_text *s, int kind) {
  for (size_t i = 0; i < s->n;) {
    uint32_t code;
    i += pkv_tpl_char(s->p + i, s->n - i, &code);
    const bool digit = code < 0x80
                           ? code >= '0' && code <= '9'
                           : utf8proc_category((utf8proc_int32_t)code) == UTF8PROC_CATEGORY_ND;
    const bool ok = kind == 's'   ? pkv_tpl_is_space(code)
                    : kind == 'd' ? digit
                    : kind == 'a' ? is_letter(code)
                                  : digit || is_letter(code);
    if (!ok) return false;
  }
  return s->n > 0;
}
