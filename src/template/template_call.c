/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments by name, the global functions, tests. */
#include "template/template_parts.h"

/* The index of a name among words separated by blanks, or -1. */
static int word_index(const char *words, tpl_span name) {
  int index = 0;
  for (const char *p = words; *p != 0; index++) {
    const char *const blank = strchr(p, ' ');
    const size_t n = blank != NULL ? (size_t)(blank - p) : strlen(p);
    if (tpl_same((tpl_span){p, n}, name)) return index;
    if (blank == NULL) break;
    p = blank + 1;
  }
  return -1;
}

static size_t word_count(const char *words) {
  size_t n = *words != 0;
  for (; *words != 0; words++)
    n += *words == ' ';
  return n;
}

bool pkv_tpl_bind(tpl_run *r, const tpl_value *slots[TPL_SLOTS], const char *params,
                  const tpl_args *args) {
  for (int i = 0; i < TPL_SLOTS; i++)
    slots[i] = NULL;
  if (args->positional.n > word_count(params))
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%zu arguments, at most %zu are taken", args->positional.n,
                        word_count(params));
  for (size_t i = 0; i < args->positional.n; i++)
    slots[i] = &args->positional.v[i];
  for (size_t i = 0; i < args->named.n; i++) {
    const tpl_value *const key = &args->named.v[i].key;
    const int at =
        key->type == TPL_V_TEXT ? word_index(params, (tpl_span){key->text->p, key->text->n}) : -1;
    if (at < 0 || slots[at] != NULL)
      return pkv_tpl_fail(r, PKV_E_FORMAT, "a named argument that is not taken here (%s)",
                          *params != 0 ? params : "none is");
    slots[at] = &args->named.v[i].value;
  }
  return true;
}

bool pkv_tpl_want_text(tpl_run *r, const tpl_value *v, const char *what, const tpl_text **out) {
  static const tpl_text empty = {"", 0, NULL, true};
  *out = &empty;
  if (v == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "%s is missing", what);
  if (v->type != TPL_V_TEXT)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s must be a text, not %s", what, pkv_tpl_type_name(v));
  *out = v->text;
  return true;
}

bool pkv_tpl_want_int(tpl_run *r, const tpl_value *v, const char *what, int64_t absent,
                      int64_t *out) {
  *out = absent;
  if (v == NULL) return true;
  if (!tpl_is_whole(v))
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s must be an integer, not %s", what,
                        pkv_tpl_type_name(v));
  *out = v->whole;
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Functions
 * ------------------------------------------------------------------------------------------ */

static bool call_range(tpl_run *r, tpl_value *out, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  int64_t v[3];
  if (!pkv_tpl_bind(r, slots, "start stop step", args)) return false;
  for (int i = 0; i < 3; i++)
    if (!pkv_tpl_want_int(r, slots[i], "an argument of range", i == 2, &v[i])) return false;
  if (slots[0] == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "range takes an integer");
  const int64_t start = slots[1] != NULL ? v[0] : 0, stop = slots[1] != NULL ? v[1] : v[0];
  if (v[2] == 0) return pkv_tpl_fail(r, PKV_E_FORMAT, "range with steps of 0");
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, 0)) return false;
  for (int64_t i = start; v[2] > 0 ? i < stop : i > stop;) {
    if (!pkv_tpl_work(r, 64) || !pkv_tpl_push(r, out->list, tpl_int(i, true))) return false;
    if (__builtin_add_overflow(i, v[2], &i)) break;
  }
  return true;
}

/* namespace and dict: a map or none, and named arguments. */
static bool call_dict(tpl_run *r, tpl_value *out, const tpl_args *args, bool space) {
  if (!pkv_tpl_new_dict(r, out, 0)) return false;
  if (space) out->type = TPL_V_NAMESPACE;
  if (args->positional.n > 1) return pkv_tpl_fail(r, PKV_E_FORMAT, "at most one map is taken");
  if (args->positional.n == 1) {
    const tpl_value *const from = &args->positional.v[0];
    if (from->type != TPL_V_DICT) return pkv_tpl_fail(r, PKV_E_FORMAT, "a map is taken");
    for (size_t i = 0; i < from->dict->n; i++)
      if (!pkv_tpl_set_entry(r, out->dict, from->dict->v[i].key, from->dict->v[i].value))
        return false;
  }
  for (size_t i = 0; i < args->named.n; i++)
    if (!pkv_tpl_set_entry(r, out->dict, args->named.v[i].key, args->named.v[i].value))
      return false;
  return true;
}

/* The template's own words only: what variables put into the message is left out. */
static bool call_raise(tpl_run *r, const tpl_args *args) {
  char text[160];
  size_t n = 0;
  tpl_value message;
  if (args->positional.n == 0) return pkv_tpl_fail(r, PKV_E_INVALID, "refused");
  if (!pkv_tpl_to_text(r, &message, &args->positional.v[0])) return false;
  const tpl_text *const s = message.text;
  for (size_t i = 0; i < s->n && n + 4 < sizeof text; i++) {
    const bool trusted = s->marks != NULL ? s->marks[i] != 0 : s->trusted;
    if (trusted) {
      text[n++] = s->p[i];
    } else if (n < 3 || memcmp(text + n - 3, "...", 3) != 0) {
      memcpy(text + n, "...", 3);
      n += 3;
    }
  }
  return pkv_tpl_fail(r, PKV_E_INVALID, "%.*s", (int)n, text);
}

static const char functions[] = "range namespace dict raise_exception strftime_now";

bool pkv_tpl_is_function(tpl_span name) {
  return word_index(functions, name) >= 0;
}

bool pkv_tpl_call_function(tpl_run *r, tpl_value *out, tpl_span name, const tpl_args *args) {
  switch (word_index(functions, name)) {
  case 0:
    return call_range(r, out, args);
  case 1:
    return call_dict(r, out, args, true);
  case 2:
    return call_dict(r, out, args, false);
  case 3:
    return call_raise(r, args);
  default: {
    const tpl_text *format;
    const tpl_value *slots[TPL_SLOTS];
    return pkv_tpl_bind(r, slots, "format", args) &&
           pkv_tpl_want_text(r, slots[0], "the format of strftime_now", &format) &&
           pkv_tpl_strftime(r, out, format);
  }
  }
}

/* ------------------------------------------------------------------------------------------
 * Tests
 * ------------------------------------------------------------------------------------------ */

/* Those of one operand that look at its type only. -1: not of these. */
static int type_test(tpl_span name, const tpl_value *v) {
  const tpl_type t = v->type;
  if (tpl_is(name, "defined")) return t != TPL_V_UNDEFINED;
  if (tpl_is(name, "undefined")) return t == TPL_V_UNDEFINED;
  if (tpl_is(name, "none")) return t == TPL_V_NONE;
  if (tpl_is(name, "string")) return t == TPL_V_TEXT;
  if (tpl_is(name, "mapping")) return t == TPL_V_DICT;
  if (tpl_is(name, "boolean")) return t == TPL_V_BOOL;
  if (tpl_is(name, "true")) return t == TPL_V_BOOL && v->whole != 0;
  if (tpl_is(name, "false")) return t == TPL_V_BOOL && v->whole == 0;
  if (tpl_is(name, "integer")) return t == TPL_V_INT;
  if (tpl_is(name, "float")) return t == TPL_V_FLOAT;
  if (tpl_is(name, "number")) return tpl_is_number(v);
  if (tpl_is(name, "iterable"))
    return t == TPL_V_TEXT || tpl_is_sequence(v) || t == TPL_V_DICT || t == TPL_V_UNDEFINED ||
           t == TPL_V_LOOP;
  if (tpl_is(name, "sequence"))
    return t == TPL_V_TEXT || tpl_is_sequence(v) || t == TPL_V_DICT || t == TPL_V_UNDEFINED;
  if (tpl_is(name, "callable"))
    return t == TPL_V_MACRO || t == TPL_V_FUNCTION || t == TPL_V_METHOD || t == TPL_V_LOOP ||
           t == TPL_V_UNDEFINED;
  if (tpl_is(name, "escaped")) return 0; /* nothing is */
  return -1;
}

/* Operators by their names. 0: none. */
static int operator_test(tpl_span name) {
  static const struct {
    const char *names;
    int op;
  } known[] = {
      {"eq equalto ==", TPL_EQ}, {"ne !=", TPL_NE}, {"lt lessthan <", '<'}, {"le <=", TPL_LE},
      {"gt greaterthan >", '>'}, {"ge >=", TPL_GE}, {"in", TPL_IN}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
    if (word_index(known[i].names, name) >= 0) return known[i].op;
  return 0;
}

static bool test_operator(tpl_run *r, bool *out, int op, const tpl_value *a, const tpl_value *b) {
  int order;
  if (op == TPL_IN) return pkv_tpl_contains(r, b, a, out);
  if (op == TPL_EQ || op == TPL_NE) {
    if (!pkv_tpl_equal(r, a, b, out)) return false;
    *out = *out == (op == TPL_EQ);
    return true;
  }
  if (!pkv_tpl_order(r, a, b, false, &order)) return false;
  *out = op == '<' ? order < 0 : op == '>' ? order > 0 : op == TPL_LE ? order <= 0 : order >= 0;
  return true;
}

/* odd, even, divisibleby: of integers. */
static bool test_division(tpl_run *r, bool *out, const tpl_value *v, int64_t by, int64_t rest) {
  const tpl_value divisor = tpl_int(by, true);
  tpl_value left;
  if (!pkv_tpl_binary(r, &left, '%', v, &divisor)) return false;
  *out = tpl_is_whole(&left) ? left.whole == rest : left.real == (double)rest;
  return true;
}

static bool test_case(tpl_run *r, bool *out, const tpl_value *v, bool upper) {
  tpl_value text, folded, other;
  if (!pkv_tpl_to_text(r, &text, v) || !pkv_tpl_fold(r, &folded, text.text, upper) ||
      !pkv_tpl_fold(r, &other, text.text, !upper))
    return false;
  bool same, cased;
  if (!pkv_tpl_equal(r, &text, &folded, &same) || !pkv_tpl_equal(r, &text, &other, &cased))
    return false;
  *out = same && !cased;
  return true;
}

bool pkv_tpl_test(tpl_run *r, bool *out, tpl_span name, const tpl_value *v, const tpl_args *args) {
  const int simple = type_test(name, v), op = operator_test(name);
  const tpl_value *slots[TPL_SLOTS];
  *out = simple > 0;
  if (!pkv_tpl_bind(r, slots, simple >= 0 ? "" : "value", args)) return false;
  if (simple >= 0) return true;
  if (tpl_is(name, "odd")) return test_division(r, out, v, 2, 1);
  if (tpl_is(name, "even")) return test_division(r, out, v, 2, 0);
  if (tpl_is(name, "lower")) return test_case(r, out, v, false);
  if (tpl_is(name, "upper")) return test_case(r, out, v, true);
  const bool division = tpl_is(name, "divisibleby"), same = tpl_is(name, "sameas");
  if ((op != 0 || division || same) && slots[0] == NULL)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "the test takes a value to compare with");
  if (op != 0) return test_operator(r, out, op, v, slots[0]);
  if (division) {
    int64_t by;
    return pkv_tpl_want_int(r, slots[0], "the divisor", 1, &by) && test_division(r, out, v, by, 0);
  }
  if (same) {
    const tpl_type t = v->type;
    *out = t == slots[0]->type &&
           (t == TPL_V_NONE || (t == TPL_V_BOOL || t == TPL_V_INT ? v->whole == slots[0]->whole
                                                                  : v->macro == slots[0]->macro));
    return true;
  }
  return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "the test '%.*s' is not known",
                      name.n > 40 ? 40 : (int)name.n, name.p);
}
