/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions evaluated. */
#include <math.h>

#include "template/template_parts.h"

/* ------------------------------------------------------------------------------------------
 * Attributes, elements, slices
 * ------------------------------------------------------------------------------------------ */

static bool method_value(tpl_run *r, tpl_value *out, const tpl_value *v, tpl_span name) {
  tpl_method *const method = pkv_tpl_take(r, 1, sizeof *method);
  if (method == NULL) return false;
  *method = (tpl_method){*v, name};
  *out = (tpl_value){.type = TPL_V_METHOD, .method = method};
  return true;
}

static bool loop_attribute(tpl_run *r, tpl_value *out, const tpl_loop *loop, tpl_span name) {
  const int64_t i = (int64_t)loop->index, n = (int64_t)loop->n;
  if (tpl_is(name, "index0")) return *out = tpl_int(i, true), true;
  if (tpl_is(name, "index")) return *out = tpl_int(i + 1, true), true;
  if (tpl_is(name, "first")) return *out = tpl_bool(i == 0), true;
  if (tpl_is(name, "last")) return *out = tpl_bool(i + 1 == n), true;
  if (tpl_is(name, "length")) return *out = tpl_int(n, true), true;
  if (tpl_is(name, "revindex")) return *out = tpl_int(n - i, true), true;
  if (tpl_is(name, "revindex0")) return *out = tpl_int(n - i - 1, true), true;
  /* Of recursive loops, which there are none of. */
  if (tpl_is(name, "depth")) return *out = tpl_int(1, true), true;
  if (tpl_is(name, "depth0")) return *out = tpl_int(0, true), true;
  if (tpl_is(name, "previtem") && i > 0) return *out = loop->items[i - 1], true;
  if (tpl_is(name, "nextitem") && i + 1 < n) return *out = loop->items[i + 1], true;
  *out = pkv_tpl_undefined(r, name);
  return r->status == PKV_OK;
}

static bool no_attribute(tpl_run *r, const tpl_value *v, const char *p, size_t n) {
  const int shown = n > 40 ? 40 : (int)n;
  const int named = v->text == NULL ? 0 : v->text->n > 40 ? 40 : (int)v->text->n;
  return pkv_tpl_fail(r, PKV_E_FORMAT, "'%.*s' is undefined, it has no '%.*s'", named,
                      named > 0 ? v->text->p : "", shown, p);
}

bool pkv_tpl_attribute(tpl_run *r, tpl_value *out, const tpl_value *v, tpl_span name) {
  if (v->type == TPL_V_UNDEFINED) return no_attribute(r, v, name.p, name.n);
  if (v->type != TPL_V_NAMESPACE && pkv_tpl_has_method(v, name))
    return method_value(r, out, v, name);
  if (v->type == TPL_V_LOOP) return loop_attribute(r, out, v->loop, name);
  if (v->type == TPL_V_DICT || v->type == TPL_V_NAMESPACE) {
    if (!pkv_tpl_work(r, 16 * v->dict->n)) return false;
    const tpl_value *const entry = pkv_tpl_entry(v->dict, name);
    if (entry != NULL) return *out = *entry, true;
  }
  if (v->type == TPL_V_MACRO && tpl_is(name, "name"))
    return pkv_tpl_text(r, out, v->macro->name.p, v->macro->name.n, true);
  *out = pkv_tpl_undefined(r, name);
  return r->status == PKV_OK;
}

/* The byte offset of character i, from the front (i >= 0) or the back. False: there is none. */
static bool char_offset(const tpl_text *s, int64_t i, size_t *from, size_t *to) {
  uint32_t code;
  if (i < 0) i += (int64_t)pkv_tpl_chars(s->p, s->n);
  if (i < 0) return false;
  for (*from = 0; *from < s->n; *from = *to) {
    *to = *from + pkv_tpl_char(s->p + *from, s->n - *from, &code);
    if (i-- == 0) return true;
  }
  return false;
}

static bool element(tpl_run *r, tpl_value *out, const tpl_value *v, int64_t i, bool *found) {
  *found = false;
  if (v->type == TPL_V_TEXT) {
    size_t from = 0, to = 0;
    if (!pkv_tpl_work(r, v->text->n)) return false;
    *found = char_offset(v->text, i, &from, &to);
    return !*found || pkv_tpl_part(r, out, v->text, from, to);
  }
  if (!tpl_is_sequence(v)) return true;
  if (i < 0) i += (int64_t)v->list->n;
  *found = i >= 0 && i < (int64_t)v->list->n;
  if (*found) *out = v->list->v[i];
  return true;
}

bool pkv_tpl_item(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_value *key) {
  const bool text = key->type == TPL_V_TEXT;
  if (v->type == TPL_V_UNDEFINED) return no_attribute(r, v, "[...]", 5);
  if (v->type == TPL_V_DICT || v->type == TPL_V_NAMESPACE) {
    if (!pkv_tpl_work(r, 16 * v->dict->n)) return false;
    for (size_t i = 0; i < v->dict->n; i++) {
      bool same;
      if (!pkv_tpl_equal(r, &v->dict->v[i].key, key, &same)) return false;
      if (same) return *out = v->dict->v[i].value, true;
    }
  } else if (tpl_is_whole(key)) {
    bool found;
    if (!element(r, out, v, key->whole, &found) || found) return r->status == PKV_OK;
  }
  /* As in Python an attribute is looked for, too; errors quote its name, so it must be ours. */
  if (text && pkv_tpl_all_trusted(key->text))
    return pkv_tpl_attribute(r, out, v, (tpl_span){key->text->p, key->text->n});
  *out = pkv_tpl_undefined(r, (tpl_span){"[...]", 5});
  return r->status == PKV_OK;
}

/* Python's rule for the bounds of a slice over n elements. */
static bool slice_bounds(tpl_run *r, const tpl_value bounds[3], int64_t n, int64_t *start,
                         int64_t *stop, int64_t *step) {
  int64_t given[3];
  bool has[3];
  for (int i = 0; i < 3; i++) {
    has[i] = bounds[i].type != TPL_V_NONE;
    given[i] = 0;
    if (has[i] && !pkv_tpl_want_int(r, &bounds[i], "a slice's bound", 0, &given[i])) return false;
  }
  *step = has[2] ? given[2] : 1;
  if (*step == 0) return pkv_tpl_fail(r, PKV_E_FORMAT, "a slice with steps of 0");
  if (*step < -n - 1) *step = -n - 1; /* the same, without overflow */
  if (*step > n + 1) *step = n + 1;
  const int64_t low = *step > 0 ? 0 : -1, high = *step > 0 ? n : n - 1;
  int64_t *const to[2] = {start, stop};
  for (int i = 0; i < 2; i++) {
    int64_t at = given[i];
    if (!has[i])
      at = (i == 0) == (*step > 0) ? low : high;
    else if (at < 0)
      at = at < -n ? low : at + n < low ? low : at + n;
    else if (at > high)
      at = high;
    *to[i] = at;
  }
  return true;
}

bool pkv_tpl_slice(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_value bounds[3]) {
  if (v->type == TPL_V_UNDEFINED) return no_attribute(r, v, "[:]", 3);
  if (v->type != TPL_V_TEXT && !tpl_is_sequence(v)) {
    *out = pkv_tpl_undefined(r, (tpl_span){"[:]", 3});
    return r->status == PKV_OK;
  }
  tpl_list items = {NULL, 0, 0};
  const bool text = v->type == TPL_V_TEXT;
  const bool ascii = text && pkv_tpl_chars(v->text->p, v->text->n) == v->text->n;
  int64_t start = 0, stop = 0, step = 1;
  if (text && !pkv_tpl_work(r, v->text->n)) return false;
  if (!ascii && !pkv_tpl_items(r, v, &items)) return false;
  const size_t n = ascii ? v->text->n : items.n;
  if (!slice_bounds(r, bounds, (int64_t)n, &start, &stop, &step)) return false;
  if (ascii && step == 1)
    return pkv_tpl_part(r, out, v->text, (size_t)start, (size_t)(stop > start ? stop : start));
  if (ascii && !pkv_tpl_items(r, v, &items)) return false;
  tpl_builder b = {0};
  if (!text && !pkv_tpl_new_list(r, out, v->type, 0)) return false;
  for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
    if (!(text ? pkv_tpl_put(r, &b, items.v[i].text) : pkv_tpl_push(r, out->list, items.v[i])))
      return false;
    if (!pkv_tpl_work(r, 64)) return false;
  }
  return !text || pkv_tpl_built(r, &b, out);
}

/* ------------------------------------------------------------------------------------------
 * Operators
 * ------------------------------------------------------------------------------------------ */

static bool mismatch(tpl_run *r, int op, const tpl_value *a, const tpl_value *b) {
  const tpl_value *const gone = a->type == TPL_V_UNDEFINED ? a : b;
  if (gone->type == TPL_V_UNDEFINED && gone->text != NULL)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "'%.*s' is undefined",
                        gone->text->n > 40 ? 40 : (int)gone->text->n, gone->text->p);
  const char text[3] = {op == TPL_FLOOR ? '/'
                        : op == TPL_POW ? '*'
                                        : (char)op,
                        op == TPL_FLOOR ? '/'
                        : op == TPL_POW ? '*'
                                        : 0,
                        0};
  return pkv_tpl_fail(r, PKV_E_FORMAT, "'%s' does not go with %s and %s", text,
                      pkv_tpl_type_name(a), pkv_tpl_type_name(b));
}

static bool whole_power(int64_t base, int64_t exponent, int64_t *out) {
  *out = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(*out, base, out)) return false;
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) return false;
  }
  return true;
}

static bool whole_operation(tpl_run *r, tpl_value *out, int op, int64_t a, int64_t b,
                            bool trusted) {
  int64_t x = 0;
  bool ok = true;
  if ((op == TPL_FLOOR || op == '%') && b == 0)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "a division by zero");
  switch (op) {
  case '+':
    ok = !__builtin_add_overflow(a, b, &x);
    break;
  case '-':
    ok = !__builtin_sub_overflow(a, b, &x);
    break;
  case '*':
    ok = !__builtin_mul_overflow(a, b, &x);
    break;
  case TPL_POW:
    ok = whole_power(a, b, &x);
    break;
  default: /* rounds down, as Python does */
    if (b == -1) {
      ok = op == '%' || !__builtin_sub_overflow((int64_t)0, a, &x);
      break;
    }
    x = op == '%' ? a % b : a / b;
    if (a % b != 0 && (a < 0) != (b < 0)) x += op == '%' ? b : -1;
  }
  if (!ok) return pkv_tpl_fail(r, PKV_E_LIMIT, "a number beyond 64 bits");
  *out = tpl_int(x, trusted);
  return true;
}

static bool real_operation(tpl_run *r, tpl_value *out, int op, double a, double b, bool trusted) {
  double x;
  if ((op == '/' || op == TPL_FLOOR || op == '%') && b == 0)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "a division by zero");
  switch (op) {
  case '+':
    x = a + b;
    break;
  case '-':
    x = a - b;
    break;
  case '*':
    x = a * b;
    break;
  case '/':
    x = a / b;
    break;
  case TPL_FLOOR:
    x = floor(a / b);
    break;
  case '%':
    x = fmod(a, b);
    if (x != 0 && (x < 0) != (b < 0)) x += b;
    break;
  default:
    x = pow(a, b);
  }
  *out = tpl_float(x, trusted);
  return true;
}

static bool joined(tpl_run *r, tpl_value *out, const tpl_value *a, const tpl_value *b) {
  if (a->type == TPL_V_TEXT) {
    tpl_builder both = {0};
    return pkv_tpl_put(r, &both, a->text) && pkv_tpl_put(r, &both, b->text) &&
           pkv_tpl_built(r, &both, out);
  }
  if (!pkv_tpl_new_list(r, out, a->type, a->list->n + b->list->n)) return false;
  for (size_t i = 0; i < a->list->n; i++)
    if (!pkv_tpl_push(r, out->list, a->list->v[i])) return false;
  for (size_t i = 0; i < b->list->n; i++)
    if (!pkv_tpl_push(r, out->list, b->list->v[i])) return false;
  return pkv_tpl_work(r, (a->list->n + b->list->n) * sizeof(tpl_value));
}

static bool repeated(tpl_run *r, tpl_value *out, const tpl_value *v, int64_t times) {
  tpl_builder b = {0};
  if (v->type != TPL_V_TEXT && !pkv_tpl_new_list(r, out, v->type, 0)) return false;
  for (int64_t i = 0; i < times; i++) {
    if (!pkv_tpl_work(r, 64)) return false;
    if (v->type == TPL_V_TEXT) {
      if (!pkv_tpl_put(r, &b, v->text)) return false;
      continue;
    }
    for (size_t k = 0; k < v->list->n; k++)
      if (!pkv_tpl_push(r, out->list, v->list->v[k])) return false;
  }
  return v->type != TPL_V_TEXT || pkv_tpl_built(r, &b, out);
}

static bool tilde(tpl_run *r, tpl_value *out, const tpl_value *a, const tpl_value *b) {
  tpl_builder both = {0};
  return pkv_tpl_put_value(r, &both, a) && pkv_tpl_put_value(r, &both, b) &&
         pkv_tpl_built(r, &both, out);
}

bool pkv_tpl_binary(tpl_run *r, tpl_value *out, int op, const tpl_value *a, const tpl_value *b) {
  const bool repeatable_a = a->type == TPL_V_TEXT || tpl_is_sequence(a);
  const bool repeatable_b = b->type == TPL_V_TEXT || tpl_is_sequence(b);
  if (op == '~') return tilde(r, out, a, b);
  if (tpl_is_number(a) && tpl_is_number(b)) {
    const bool trusted = a->trusted && b->trusted;
    if (tpl_is_whole(a) && tpl_is_whole(b) && op != '/' && (op != TPL_POW || b->whole >= 0))
      return whole_operation(r, out, op, a->whole, b->whole, trusted);
    return real_operation(r, out, op, a->type == TPL_V_FLOAT ? a->real : (double)a->whole,
                          b->type == TPL_V_FLOAT ? b->real : (double)b->whole, trusted);
  }
  if (op == '+' && repeatable_a && a->type == b->type) return joined(r, out, a, b);
  if (op == '*' && repeatable_a && tpl_is_whole(b)) return repeated(r, out, a, b->whole);
  if (op == '*' && repeatable_b && tpl_is_whole(a)) return repeated(r, out, b, a->whole);
  if (op == '%' && a->type == TPL_V_TEXT) {
    tpl_value one = *b;
    const tpl_list alone = {&one, 1, 1};
    return pkv_tpl_percent(r, out, a->text, b->type == TPL_V_TUPLE ? b->list : &alone);
  }
  return mismatch(r, op, a, b);
}

static bool compare_two(tpl_run *r, int op, const tpl_value *a, const tpl_value *b, bool *yes) {
  int order;
  switch (op) {
  case TPL_EQ:
  case TPL_NE:
    if (!pkv_tpl_equal(r, a, b, yes)) return false;
    *yes = *yes == (op == TPL_EQ);
    return true;
  case TPL_IN:
  case TPL_NOT_IN:
    if (!pkv_tpl_contains(r, b, a, yes)) return false;
    *yes = *yes == (op == TPL_IN);
    return true;
  default:
    if (a->type == TPL_V_UNDEFINED || b->type == TPL_V_UNDEFINED) return mismatch(r, '<', a, b);
    if (!pkv_tpl_order(r, a, b, false, &order)) return false;
    *yes = op == '<' ? order < 0 : op == '>' ? order > 0 : op == TPL_LE ? order <= 0 : order >= 0;
    return true;
  }
}

static bool eval_compare(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value left, right;
  if (!pkv_tpl_eval(r, scope, node->a, &left)) return false;
  bool yes = true;
  for (const tpl_node *operand = node->list; yes && operand != NULL; operand = operand->next) {
    if (!pkv_tpl_eval(r, scope, operand->a, &right)) return false;
    r->at = operand;
    if (!compare_two(r, operand->op, &left, &right, &yes)) return false;
    left = right;
  }
  *out = tpl_bool(yes);
  return true;
}

static bool eval_sign(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value v;
  if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
  r->at = node;
  const tpl_value zero = tpl_int(0, true);
  if (!tpl_is_number(&v)) return mismatch(r, node->kind == TPL_NEGATE ? '-' : '+', &v, &v);
  if (v.type == TPL_V_FLOAT)
    return *out = tpl_float(node->kind == TPL_NEGATE ? -v.real : v.real, v.trusted), true;
  return pkv_tpl_binary(r, out, node->kind == TPL_NEGATE ? '-' : '+', &zero, &v);
}

/* ------------------------------------------------------------------------------------------
 * Calls
 * ------------------------------------------------------------------------------------------ */

static bool spread(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_args *out) {
  tpl_value v;
  tpl_list items;
  if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
  if (node->whole == 1) {
    if (!pkv_tpl_items(r, &v, &items)) return false;
    for (size_t i = 0; i < items.n; i++)
      if (!pkv_tpl_push(r, &out->positional, items.v[i])) return false;
    return true;
  }
  if (v.type != TPL_V_DICT) return pkv_tpl_fail(r, PKV_E_FORMAT, "** takes a map");
  for (size_t i = 0; i < v.dict->n; i++)
    if (!pkv_tpl_set_entry(r, &out->named, v.dict->v[i].key, v.dict->v[i].value)) return false;
  return true;
}

bool pkv_tpl_eval_args(tpl_run *r, tpl_scope *scope, const tpl_node *list, tpl_args *out) {
  *out = (tpl_args){0};
  for (const tpl_node *node = list; node != NULL; node = node->next) {
    tpl_value v, key;
    if (node->kind == TPL_SPREAD) {
      if (!spread(r, scope, node, out)) return false;
    } else if (node->kind == TPL_KEYWORD) {
      if (!pkv_tpl_eval(r, scope, node->a, &v) ||
          !pkv_tpl_text(r, &key, node->text.p, node->text.n, true) ||
          !pkv_tpl_set_entry(r, &out->named, key, v))
        return false;
    } else if (!pkv_tpl_eval(r, scope, node, &v) || !pkv_tpl_push(r, &out->positional, v)) {
      return false;
    }
  }
  return true;
}

bool pkv_tpl_call(tpl_run *r, tpl_value *out, const tpl_value *f, const tpl_args *args) {
  if (f->type == TPL_V_MACRO) return pkv_tpl_call_macro(r, out, f->macro, args);
  if (f->type == TPL_V_METHOD)
    return pkv_tpl_call_method(r, out, &f->method->self, f->method->name, args);
  if (f->type == TPL_V_FUNCTION)
    return pkv_tpl_call_function(r, out, (tpl_span){f->text->p, f->text->n}, args);
  if (f->type == TPL_V_UNDEFINED) return mismatch(r, '(', f, f);
  return pkv_tpl_fail(r, PKV_E_FORMAT, "%s cannot be called", pkv_tpl_type_name(f));
}

static bool eval_call(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value f;
  tpl_args args;
  if (!pkv_tpl_eval(r, scope, node->a, &f) || !pkv_tpl_eval_args(r, scope, node->list, &args))
    return false;
  r->at = node;
  return pkv_tpl_call(r, out, &f, &args);
}

static bool eval_filter(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value v;
  tpl_args args;
  if (!pkv_tpl_eval(r, scope, node->a, &v) || !pkv_tpl_eval_args(r, scope, node->list, &args))
    return false;
  r->at = node;
  return pkv_tpl_filter(r, out, node->text, &v, &args);
}

static bool eval_test(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value v;
  tpl_args args;
  bool yes;
  if (!pkv_tpl_eval(r, scope, node->a, &v) || !pkv_tpl_eval_args(r, scope, node->list, &args))
    return false;
  r->at = node;
  if (!pkv_tpl_test(r, &yes, node->text, &v, &args)) return false;
  *out = tpl_bool(yes);
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Everything else
 * ------------------------------------------------------------------------------------------ */

static bool eval_name(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  for (const tpl_scope *s = scope; s != NULL; s = s->parent) {
    for (const tpl_variable *v = s->first; v != NULL; v = v->next)
      if (tpl_same(v->name, node->text)) return *out = v->value, true;
  }
  *out = pkv_tpl_undefined(r, node->text);
  if (out->text == NULL) return false;
  if (pkv_tpl_is_function(node->text) && (r->now >= 0 || !tpl_is(node->text, "strftime_now")))
    out->type = TPL_V_FUNCTION;
  return true;
}

static bool eval_list(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  if (!pkv_tpl_new_list(r, out, node->kind == TPL_LIST ? TPL_V_LIST : TPL_V_TUPLE, 0)) return false;
  for (const tpl_node *e = node->list; e != NULL; e = e->next) {
    tpl_value v;
    if (!pkv_tpl_eval(r, scope, e, &v) || !pkv_tpl_push(r, out->list, v)) return false;
  }
  return true;
}

static bool eval_dict(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  if (!pkv_tpl_new_dict(r, out, 0)) return false;
  for (const tpl_node *pair = node->list; pair != NULL; pair = pair->next) {
    tpl_value key, v;
    if (!pkv_tpl_eval(r, scope, pair->a, &key) || !pkv_tpl_eval(r, scope, pair->b, &v) ||
        !pkv_tpl_set_entry(r, out->dict, key, v))
      return false;
  }
  return true;
}

static bool eval_slice(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  const tpl_node *const nodes[3] = {node->b, node->c, node->d};
  tpl_value v, bounds[3];
  if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
  for (int i = 0; i < 3; i++) {
    bounds[i] = tpl_none();
    if (nodes[i] != NULL && !pkv_tpl_eval(r, scope, nodes[i], &bounds[i])) return false;
  }
  r->at = node;
  return pkv_tpl_slice(r, out, &v, bounds);
}

static bool eval_two(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value a, b;
  if (!pkv_tpl_eval(r, scope, node->a, &a) || !pkv_tpl_eval(r, scope, node->b, &b)) return false;
  r->at = node;
  return node->kind == TPL_ITEM ? pkv_tpl_item(r, out, &a, &b)
                                : pkv_tpl_binary(r, out, node->op, &a, &b);
}

/* What evaluates its operands only as they are needed. */
static bool eval_logic(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  if (!pkv_tpl_eval(r, scope, node->a, out)) return false;
  const bool yes = pkv_tpl_truth(out);
  if (node->kind == TPL_NOT) return *out = tpl_bool(!yes), true;
  if (node->kind == TPL_AND) return !yes || pkv_tpl_eval(r, scope, node->b, out);
  if (node->kind == TPL_OR) return yes || pkv_tpl_eval(r, scope, node->b, out);
  const tpl_node *const chosen = yes ? node->b : node->c;
  if (chosen != NULL) return pkv_tpl_eval(r, scope, chosen, out);
  *out = pkv_tpl_undefined(r, (tpl_span){"if without else", 15});
  return r->status == PKV_OK;
}

static bool eval_any(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  tpl_value v;
  switch (node->kind) {
  case TPL_CONST_NONE:
    return *out = tpl_none(), true;
  case TPL_CONST_BOOL:
    return *out = tpl_bool(node->whole != 0), true;
  case TPL_CONST_INT:
    return *out = tpl_int(node->whole, true), true;
  case TPL_CONST_FLOAT:
    return *out = tpl_float(node->real, true), true;
  case TPL_CONST_TEXT:
    return pkv_tpl_text(r, out, node->text.p, node->text.n, true);
  case TPL_NAME:
    return eval_name(r, scope, node, out);
  case TPL_LIST:
  case TPL_TUPLE:
    return eval_list(r, scope, node, out);
  case TPL_DICT:
    return eval_dict(r, scope, node, out);
  case TPL_ATTR:
    if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
    r->at = node;
    return pkv_tpl_attribute(r, out, &v, node->text);
  case TPL_ITEM:
  case TPL_BINARY:
    return eval_two(r, scope, node, out);
  case TPL_SLICE:
    return eval_slice(r, scope, node, out);
  case TPL_CALL:
    return eval_call(r, scope, node, out);
  case TPL_FILTER:
    return eval_filter(r, scope, node, out);
  case TPL_TEST:
    return eval_test(r, scope, node, out);
  case TPL_NEGATE:
  case TPL_PLUS:
    return eval_sign(r, scope, node, out);
  case TPL_COMPARE:
    return eval_compare(r, scope, node, out);
  default:
    return eval_logic(r, scope, node, out);
  }
}

bool pkv_tpl_eval(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out) {
  r->at = node;
  if (!pkv_tpl_enter(r)) return false;
  const bool ok = eval_any(r, scope, node, out);
  r->depth--;
  return ok;
}
