/* SPDX-License-Identifier: Apache-2.0 */
/* Values as texts: what Python's str, repr and json.dumps write. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <utf8proc.h>

#include "template/template_parts.h"

/* The shortest digits that read back as d, in Python's form. */
size_t pkv_tpl_float_text(char out[40], double d) {
  char e[40];
  if (isnan(d)) return (size_t)snprintf(out, 40, "nan");
  if (isinf(d)) return (size_t)snprintf(out, 40, d < 0 ? "-inf" : "inf");
  int digits = 1;
  for (; digits < 17; digits++) {
    (void)snprintf(e, sizeof e, "%.*e", digits - 1, d);
    if (strtod(e, NULL) == d) break;
  }
  (void)snprintf(e, sizeof e, "%.*e", digits - 1, d);
  const char *const mark = strchr(e, 'e');
  const long exponent = mark != NULL ? strtol(mark + 1, NULL, 10) : 0;
  if (exponent < -4 || exponent >= 16) {
    const int n = (int)(mark - e);
    return (size_t)snprintf(out, 40, "%.*se%c%02ld", n, e, exponent < 0 ? '-' : '+',
                            labs(exponent));
  }
  const int after = digits - 1 - (int)exponent;
  return (size_t)snprintf(out, 40, "%.*f", after < 1 ? 1 : after, d);
}

static bool put_word(tpl_run *r, tpl_builder *b, const char *word, bool trusted) {
  return pkv_tpl_put_bytes(r, b, word, strlen(word), trusted);
}

static bool put_number(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted) {
  char text[40];
  const size_t n = v->type == TPL_V_INT
                       ? (size_t)snprintf(text, sizeof text, "%lld", (long long)v->whole)
                       : pkv_tpl_float_text(text, v->real);
  return pkv_tpl_put_bytes(r, b, text, n, trusted);
}

/* ------------------------------------------------------------------------------------------
 * str and repr
 * ------------------------------------------------------------------------------------------ */

static bool printable(uint32_t c) {
  if (c < 0x7f) return c >= 0x20;
  switch (utf8proc_category((utf8proc_int32_t)c)) {
  case UTF8PROC_CATEGORY_CC:
  case UTF8PROC_CATEGORY_CF:
  case UTF8PROC_CATEGORY_CS:
  case UTF8PROC_CATEGORY_CO:
  case UTF8PROC_CATEGORY_CN:
  case UTF8PROC_CATEGORY_ZL:
  case UTF8PROC_CATEGORY_ZP:
  case UTF8PROC_CATEGORY_ZS:
    return false;
  default:
    return true;
  }
}

static bool put_repr_text(tpl_run *r, tpl_builder *b, const tpl_text *s, bool trusted) {
  const bool single = s->n > 0 && memchr(s->p, '\'', s->n) != NULL;
  const char quote = single && memchr(s->p, '"', s->n) == NULL ? '"' : '\'';
  if (!pkv_tpl_put_bytes(r, b, &quote, 1, trusted)) return false;
  for (size_t i = 0; i < s->n;) {
    char text[16];
    uint32_t c;
    const size_t n = pkv_tpl_char(s->p + i, s->n - i, &c);
    int size = 0;
    if (c == '\\' || c == (unsigned char)quote)
      size = snprintf(text, sizeof text, "\\%c", (int)c);
    else if (c == '\n' || c == '\r' || c == '\t')
      size = snprintf(text, sizeof text, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    else if (!printable(c))
      size = snprintf(text, sizeof text,
                      c < 0x100     ? "\\x%02x"
                      : c < 0x10000 ? "\\u%04x"
                                    : "\\U%08x",
                      (unsigned)c);
    if (!(size > 0 ? pkv_tpl_put_bytes(r, b, text, (size_t)size, trusted)
                   : pkv_tpl_put_bytes(r, b, s->p + i, n, trusted)))
      return false;
    i += n;
  }
  return pkv_tpl_put_bytes(r, b, &quote, 1, trusted);
}

static bool put_repr_list(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted) {
  const bool tuple = v->type == TPL_V_TUPLE;
  bool ok = put_word(r, b, tuple ? "(" : "[", trusted);
  for (size_t i = 0; ok && i < v->list->n; i++)
    ok = (i == 0 || put_word(r, b, ", ", trusted)) &&
         pkv_tpl_put_repr(r, b, &v->list->v[i], trusted);
  return ok && put_word(r, b, tuple ? (v->list->n == 1 ? ",)" : ")") : "]", trusted);
}

static bool put_repr_dict(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted) {
  bool ok = put_word(r, b, "{", trusted);
  for (size_t i = 0; ok && i < v->dict->n; i++)
    ok = (i == 0 || put_word(r, b, ", ", trusted)) &&
         pkv_tpl_put_repr(r, b, &v->dict->v[i].key, trusted) && put_word(r, b, ": ", trusted) &&
         pkv_tpl_put_repr(r, b, &v->dict->v[i].value, trusted);
  return ok && put_word(r, b, "}", trusted);
}

static bool put_repr(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted) {
  switch (v->type) {
  case TPL_V_UNDEFINED:
    return put_word(r, b, "Undefined", trusted);
  case TPL_V_NONE:
    return put_word(r, b, "None", trusted);
  case TPL_V_BOOL:
    return put_word(r, b, v->whole ? "True" : "False", trusted);
  case TPL_V_INT:
  case TPL_V_FLOAT:
    return put_number(r, b, v, trusted);
  case TPL_V_TEXT:
    return put_repr_text(r, b, v->text, trusted);
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    return put_repr_list(r, b, v, trusted);
  case TPL_V_DICT:
    return put_repr_dict(r, b, v, trusted);
  default:
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s cannot be written", pkv_tpl_type_name(v));
  }
}

bool pkv_tpl_put_repr(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted) {
  if (!pkv_tpl_enter(r)) return false;
  const bool ok = put_repr(r, b, v, trusted);
  r->depth--;
  return ok;
}

bool pkv_tpl_put_value(tpl_run *r, tpl_builder *b, const tpl_value *v) {
  if (v->type == TPL_V_TEXT) return pkv_tpl_put(r, b, v->text);
  if (v->type == TPL_V_UNDEFINED) return true;
  const bool trusted = pkv_tpl_value_trusted(r, v);
  return r->status == PKV_OK && pkv_tpl_put_repr(r, b, v, trusted);
}

bool pkv_tpl_to_text(tpl_run *r, tpl_value *out, const tpl_value *v) {
  if (v->type == TPL_V_TEXT) {
    *out = *v;
    return true;
  }
  tpl_builder b = {0};
  return pkv_tpl_put_value(r, &b, v) && pkv_tpl_built(r, &b, out);
}

/* ------------------------------------------------------------------------------------------
 * json.dumps
 * ------------------------------------------------------------------------------------------ */

typedef struct json_form {
  bool ascii, sorted, trusted, indented;
  const tpl_text *indent; /* of one level */
  const tpl_text *item, *colon;
} json_form;

static bool put_json(tpl_run *r, tpl_builder *b, const tpl_value *v, const json_form *f,
                     size_t level);

static int escape_json(char text[16], uint32_t c, bool ascii) {
  static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
  const char *const known = c != 0 && c < 0x80 ? strchr(from, (int)c) : NULL;
  if (known != NULL) return snprintf(text, 16, "\\%c", to[known - from]);
  if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000))
    return snprintf(text, 16, "\\u%04x", (unsigned)c);
  if (ascii && c >= 0x10000)
    return snprintf(text, 16, "\\u%04x\\u%04x", (unsigned)(0xd800 + ((c - 0x10000) >> 10)),
                    (unsigned)(0xdc00 + (c & 0x3ff)));
  return 0;
}

static bool put_json_text(tpl_run *r, tpl_builder *b, const tpl_text *s, const json_form *f) {
  if (!put_word(r, b, "\"", f->trusted)) return false;
  size_t plain = 0;
  for (size_t i = 0; i < s->n;) {
    char text[16];
    uint32_t c;
    const size_t n = pkv_tpl_char(s->p + i, s->n - i, &c);
    const int size = escape_json(text, c, f->ascii);
    if (size > 0) {
      if (!pkv_tpl_put_bytes(r, b, s->p + plain, i - plain, f->trusted) ||
          !pkv_tpl_put_bytes(r, b, text, (size_t)size, f->trusted))
        return false;
      plain = i + n;
    }
    i += n;
  }
  return pkv_tpl_put_bytes(r, b, s->p + plain, s->n - plain, f->trusted) &&
         put_word(r, b, "\"", f->trusted);
}

static bool put_text_as(tpl_run *r, tpl_builder *b, const tpl_text *s, const json_form *f) {
  return pkv_tpl_put_bytes(r, b, s->p, s->n, f->trusted);
}

static bool put_line(tpl_run *r, tpl_builder *b, const json_form *f, size_t level) {
  if (!f->indented) return true;
  bool ok = put_word(r, b, "\n", f->trusted);
  for (size_t i = 0; ok && i < level; i++)
    ok = put_text_as(r, b, f->indent, f);
  return ok;
}

static bool put_json_list(tpl_run *r, tpl_builder *b, const tpl_list *list, const json_form *f,
                          size_t level) {
  if (list->n == 0) return put_word(r, b, "[]", f->trusted);
  bool ok = put_word(r, b, "[", f->trusted);
  for (size_t i = 0; ok && i < list->n; i++)
    ok = (i == 0 || put_text_as(r, b, f->item, f)) && put_line(r, b, f, level + 1) &&
         put_json(r, b, &list->v[i], f, level + 1);
  return ok && put_line(r, b, f, level) && put_word(r, b, "]", f->trusted);
}

/* A key that is no text becomes one. */
static bool put_json_key(tpl_run *r, tpl_builder *b, const tpl_value *key, const json_form *f) {
  if (key->type == TPL_V_TEXT) return put_json_text(r, b, key->text, f);
  if (!tpl_is_number(key) && key->type != TPL_V_NONE)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s is no key for JSON", pkv_tpl_type_name(key));
  return put_word(r, b, "\"", f->trusted) && put_json(r, b, key, f, 0) &&
         put_word(r, b, "\"", f->trusted);
}

/* The entries by key: an insertion sort, charged. */
static bool sorted_entries(tpl_run *r, const tpl_dict *dict, tpl_dict *out) {
  *out = *dict;
  out->v = pkv_tpl_take(r, dict->n, sizeof *out->v);
  if (out->v == NULL) return false;
  for (size_t i = 0; i < dict->n; i++) {
    size_t at = i;
    for (; at > 0; at--) {
      int order;
      if (!pkv_tpl_work(r, 64) ||
          !pkv_tpl_order(r, &out->v[at - 1].key, &dict->v[i].key, false, &order))
        return false;
      if (order <= 0) break;
      out->v[at] = out->v[at - 1];
    }
    out->v[at] = dict->v[i];
  }
  return true;
}

static bool put_json_dict(tpl_run *r, tpl_builder *b, const tpl_dict *dict, const json_form *f,
                          size_t level) {
  if (dict->n == 0) return put_word(r, b, "{}", f->trusted);
  tpl_dict entries = *dict;
  if (f->sorted && !sorted_entries(r, dict, &entries)) return false;
  bool ok = put_word(r, b, "{", f->trusted);
  for (size_t i = 0; ok && i < entries.n; i++)
    ok = (i == 0 || put_text_as(r, b, f->item, f)) && put_line(r, b, f, level + 1) &&
         put_json_key(r, b, &entries.v[i].key, f) && put_text_as(r, b, f->colon, f) &&
         put_json(r, b, &entries.v[i].value, f, level + 1);
  return ok && put_line(r, b, f, level) && put_word(r, b, "}", f->trusted);
}

static bool put_json_value(tpl_run *r, tpl_builder *b, const tpl_value *v, const json_form *f,
                           size_t level) {
  switch (v->type) {
  case TPL_V_NONE:
    return put_word(r, b, "null", f->trusted);
  case TPL_V_BOOL:
    return put_word(r, b, v->whole ? "true" : "false", f->trusted);
  case TPL_V_FLOAT:
    if (isnan(v->real)) return put_word(r, b, "NaN", f->trusted);
    if (isinf(v->real)) return put_word(r, b, v->real < 0 ? "-Infinity" : "Infinity", f->trusted);
    return put_number(r, b, v, f->trusted);
  case TPL_V_INT:
    return put_number(r, b, v, f->trusted);
  case TPL_V_TEXT:
    return put_json_text(r, b, v->text, f);
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    return put_json_list(r, b, v->list, f, level);
  case TPL_V_DICT:
    return put_json_dict(r, b, v->dict, f, level);
  default:
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s cannot be written as JSON", pkv_tpl_type_name(v));
  }
}

static bool put_json(tpl_run *r, tpl_builder *b, const tpl_value *v, const json_form *f,
                     size_t level) {
  if (!pkv_tpl_enter(r)) return false;
  const bool ok = put_json_value(r, b, v, f, level);
  r->depth--;
  return ok;
}

/* indent: a text, or a number of blanks. */
static bool read_indent(tpl_run *r, json_form *f, const tpl_value *v) {
  if (v == NULL || v->type == TPL_V_NONE) return true;
  f->indented = true;
  if (v->type == TPL_V_TEXT) {
    f->indent = v->text;
    return true;
  }
  int64_t n;
  if (!pkv_tpl_want_int(r, v, "indent", 0, &n)) return false;
  if (n < 0) n = 0;
  if (n > 64) return pkv_tpl_fail(r, PKV_E_LIMIT, "an indent of %lld, at most 64", (long long)n);
  tpl_value blanks;
  static const char blank[65] = "                                                                ";
  if (!pkv_tpl_text(r, &blanks, blank, (size_t)n, true)) return false;
  f->indent = blanks.text;
  return true;
}

bool pkv_tpl_tojson(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args) {
  static const tpl_text comma = {",", 1, NULL, true}, comma_blank = {", ", 2, NULL, true},
                        colon = {": ", 2, NULL, true};
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, "ensure_ascii indent separators sort_keys", args)) return false;
  json_form f = {.ascii = slots[0] != NULL && pkv_tpl_truth(slots[0]),
                 .sorted = slots[3] != NULL && pkv_tpl_truth(slots[3]),
                 .colon = &colon};
  if (!read_indent(r, &f, slots[1])) return false;
  f.item = f.indented ? &comma : &comma_blank;
  if (slots[2] != NULL && slots[2]->type != TPL_V_NONE) {
    tpl_list two;
    if (!pkv_tpl_items(r, slots[2], &two)) return false;
    if (two.n != 2 || two.v[0].type != TPL_V_TEXT || two.v[1].type != TPL_V_TEXT)
      return pkv_tpl_fail(r, PKV_E_FORMAT, "separators must be two texts");
    f.item = two.v[0].text;
    f.colon = two.v[1].text;
  }
  f.trusted = pkv_tpl_value_trusted(r, v);
  if (r->status != PKV_OK) return false;
  tpl_builder b = {0};
  return put_json(r, &b, v, &f, 0) && pkv_tpl_built(r, &b, out);
}
