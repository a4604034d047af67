/* SPDX-License-Identifier: Apache-2.0 */
/* Values: lists and maps, truth, equality, order. */
#include <math.h>

#include "template/template_parts.h"

const char *pkv_tpl_type_name(const tpl_value *v) {
  static const char *const names[] = {
      "undefined", "none",  "a boolean",   "an integer", "a number",   "a text",   "a list",
      "a tuple",   "a map", "a namespace", "a macro",    "a function", "a method", "a loop"};
  return names[v->type];
}

tpl_value pkv_tpl_undefined(tpl_run *r, tpl_span name) {
  tpl_text *const s = pkv_tpl_take(r, 1, sizeof *s);
  if (s != NULL) *s = (tpl_text){name.p, name.n, NULL, true};
  return (tpl_value){.type = TPL_V_UNDEFINED, .trusted = true, .text = s};
}

bool pkv_tpl_truth(const tpl_value *v) {
  switch (v->type) {
  case TPL_V_UNDEFINED:
  case TPL_V_NONE:
    return false;
  case TPL_V_BOOL:
  case TPL_V_INT:
    return v->whole != 0;
  case TPL_V_FLOAT:
    return v->real != 0;
  case TPL_V_TEXT:
    return v->text->n > 0;
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    return v->list->n > 0;
  case TPL_V_DICT:
    return v->dict->n > 0;
  default:
    return true;
  }
}

/* ------------------------------------------------------------------------------------------
 * Lists and maps
 * ------------------------------------------------------------------------------------------ */

bool pkv_tpl_new_list(tpl_run *r, tpl_value *out, tpl_type type, size_t capacity) {
  tpl_list *const list = pkv_tpl_take(r, 1, sizeof *list);
  if (list == NULL) return false;
  *list = (tpl_list){NULL, 0, capacity};
  if (capacity > 0) {
    list->v = pkv_tpl_take(r, capacity, sizeof *list->v);
    if (list->v == NULL) return false;
  }
  *out = (tpl_value){.type = type, .list = list};
  return true;
}

bool pkv_tpl_push(tpl_run *r, tpl_list *list, tpl_value v) {
  if (list->n == list->capacity) {
    const size_t capacity = list->capacity < 4 ? 8 : 2 * list->capacity;
    tpl_value *const more = pkv_tpl_take(r, capacity, sizeof *more);
    if (more == NULL || !pkv_tpl_work(r, list->n * sizeof *more)) return false;
    if (list->n > 0) memcpy(more, list->v, list->n * sizeof *more);
    list->v = more;
    list->capacity = capacity;
  }
  list->v[list->n++] = v;
  return true;
}

bool pkv_tpl_new_dict(tpl_run *r, tpl_value *out, size_t capacity) {
  tpl_dict *const dict = pkv_tpl_take(r, 1, sizeof *dict);
  if (dict == NULL) return false;
  *dict = (tpl_dict){NULL, 0, capacity};
  if (capacity > 0) {
    dict->v = pkv_tpl_take(r, capacity, sizeof *dict->v);
    if (dict->v == NULL) return false;
  }
  *out = (tpl_value){.type = TPL_V_DICT, .dict = dict};
  return true;
}

bool pkv_tpl_set_entry(tpl_run *r, tpl_dict *dict, tpl_value key, tpl_value v) {
  if (!pkv_tpl_work(r, 16 * dict->n)) return false;
  for (size_t i = 0; i < dict->n; i++) {
    bool same;
    if (!pkv_tpl_equal(r, &dict->v[i].key, &key, &same)) return false;
    if (!same) continue;
    dict->v[i].value = v;
    return true;
  }
  if (dict->n == dict->capacity) {
    const size_t capacity = dict->capacity < 4 ? 8 : 2 * dict->capacity;
    tpl_entry *const more = pkv_tpl_take(r, capacity, sizeof *more);
    if (more == NULL) return false;
    if (dict->n > 0) memcpy(more, dict->v, dict->n * sizeof *more);
    dict->v = more;
    dict->capacity = capacity;
  }
  dict->v[dict->n++] = (tpl_entry){key, v};
  return true;
}

const tpl_value *pkv_tpl_entry(const tpl_dict *dict, tpl_span key) {
  for (size_t i = 0; i < dict->n; i++) {
    const tpl_value *const k = &dict->v[i].key;
    if (k->type == TPL_V_TEXT && tpl_same((tpl_span){k->text->p, k->text->n}, key))
      return &dict->v[i].value;
  }
  return NULL;
}

static bool text_items(tpl_run *r, const tpl_text *s, tpl_list *out) {
  for (size_t i = 0; i < s->n;) {
    uint32_t code;
    tpl_value c;
    const size_t n = pkv_tpl_char(s->p + i, s->n - i, &code);
    if (!pkv_tpl_part(r, &c, s, i, i + n) || !pkv_tpl_push(r, out, c)) return false;
    i += n;
  }
  return true;
}

bool pkv_tpl_items(tpl_run *r, const tpl_value *v, tpl_list *out) {
  *out = (tpl_list){NULL, 0, 0};
  switch (v->type) {
  case TPL_V_UNDEFINED:
    return true;
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    *out = *v->list;
    out->capacity = out->n; /* what is pushed to the copy must not show in the original */
    return true;
  case TPL_V_TEXT:
    return text_items(r, v->text, out);
  case TPL_V_DICT:
    for (size_t i = 0; i < v->dict->n; i++)
      if (!pkv_tpl_push(r, out, v->dict->v[i].key)) return false;
    return true;
  default:
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s is nothing that a loop could go over",
                        pkv_tpl_type_name(v));
  }
}

/* ------------------------------------------------------------------------------------------
 * Equality and order
 * ------------------------------------------------------------------------------------------ */

static double as_real(const tpl_value *v) {
  return v->type == TPL_V_FLOAT ? v->real : (double)v->whole;
}

static bool equal_lists(tpl_run *r, const tpl_list *a, const tpl_list *b, bool *equal) {
  *equal = a->n == b->n;
  for (size_t i = 0; *equal && i < a->n; i++)
    if (!pkv_tpl_equal(r, &a->v[i], &b->v[i], equal)) return false;
  return true;
}

static bool find_key(tpl_run *r, const tpl_dict *dict, const tpl_value *key, size_t *at,
                     bool *found) {
  *found = false;
  if (!pkv_tpl_work(r, 16 * dict->n)) return false;
  for (*at = 0; *at < dict->n; ++*at) {
    if (!pkv_tpl_equal(r, &dict->v[*at].key, key, found)) return false;
    if (*found) return true;
  }
  return true;
}

static bool equal_dicts(tpl_run *r, const tpl_dict *a, const tpl_dict *b, bool *equal) {
  *equal = a->n == b->n;
  for (size_t i = 0; *equal && i < a->n; i++) {
    size_t at;
    if (!find_key(r, b, &a->v[i].key, &at, equal)) return false;
    if (*equal && !pkv_tpl_equal(r, &a->v[i].value, &b->v[at].value, equal)) return false;
  }
  return true;
}

static bool equal_same_type(tpl_run *r, const tpl_value *a, const tpl_value *b, bool *equal) {
  switch (a->type) {
  case TPL_V_UNDEFINED:
  case TPL_V_NONE:
    *equal = true;
    return true;
  case TPL_V_TEXT:
    *equal = a->text->n == b->text->n;
    if (*equal && a->text->n > 0) {
      if (!pkv_tpl_work(r, a->text->n)) return false;
      *equal = memcmp(a->text->p, b->text->p, a->text->n) == 0;
    }
    return true;
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    return equal_lists(r, a->list, b->list, equal);
  case TPL_V_DICT:
    return equal_dicts(r, a->dict, b->dict, equal);
  default:
    *equal = a->macro == b->macro;
    return true;
  }
}

bool pkv_tpl_equal(tpl_run *r, const tpl_value *a, const tpl_value *b, bool *equal) {
  *equal = false;
  if (tpl_is_number(a) && tpl_is_number(b)) {
    *equal = tpl_is_whole(a) && tpl_is_whole(b) ? a->whole == b->whole : as_real(a) == as_real(b);
    return true;
  }
  if (a->type != b->type) return true;
  if (!pkv_tpl_enter(r)) return false;
  const bool ok = equal_same_type(r, a, b, equal);
  r->depth--;
  return ok;
}

static bool order_texts(tpl_run *r, const tpl_value *a, const tpl_value *b, bool fold, int *order) {
  tpl_value x = *a, y = *b;
  if (fold && (!pkv_tpl_fold(r, &x, a->text, false) || !pkv_tpl_fold(r, &y, b->text, false)))
    return false;
  const size_t n = x.text->n < y.text->n ? x.text->n : y.text->n;
  if (!pkv_tpl_work(r, n)) return false;
  const int c = n > 0 ? memcmp(x.text->p, y.text->p, n) : 0; /* UTF-8 keeps the order of codes */
  *order = c != 0 ? c : (x.text->n > y.text->n) - (x.text->n < y.text->n);
  return true;
}

bool pkv_tpl_order(tpl_run *r, const tpl_value *a, const tpl_value *b, bool fold, int *order) {
  *order = 0;
  if (tpl_is_whole(a) && tpl_is_whole(b)) {
    *order = (a->whole > b->whole) - (a->whole < b->whole);
    return true;
  }
  if (tpl_is_number(a) && tpl_is_number(b)) {
    const double x = as_real(a), y = as_real(b);
    *order = (x > y) - (x < y);
    return true;
  }
  if (a->type == TPL_V_TEXT && b->type == TPL_V_TEXT) return order_texts(r, a, b, fold, order);
  if (tpl_is_sequence(a) && a->type == b->type) {
    if (!pkv_tpl_enter(r)) return false;
    bool ok = true;
    for (size_t i = 0; ok && *order == 0 && i < a->list->n && i < b->list->n; i++)
      ok = pkv_tpl_order(r, &a->list->v[i], &b->list->v[i], fold, order);
    if (*order == 0) *order = (a->list->n > b->list->n) - (a->list->n < b->list->n);
    r->depth--;
    return ok;
  }
  return pkv_tpl_fail(r, PKV_E_FORMAT, "%s and %s have no order", pkv_tpl_type_name(a),
                      pkv_tpl_type_name(b));
}

bool pkv_tpl_contains(tpl_run *r, const tpl_value *where, const tpl_value *what, bool *found) {
  size_t at;
  *found = false;
  if (where->type == TPL_V_TEXT) {
    if (what->type != TPL_V_TEXT)
      return pkv_tpl_fail(r, PKV_E_FORMAT, "only a text can be in a text, not %s",
                          pkv_tpl_type_name(what));
    if (!pkv_tpl_work(r, where->text->n)) return false;
    *found = pkv_tpl_find(where->text, 0, what->text, &at);
    return true;
  }
  if (where->type == TPL_V_DICT) return find_key(r, where->dict, what, &at, found);
  tpl_list items;
  if (!pkv_tpl_items(r, where, &items)) return false;
  for (size_t i = 0; !*found && i < items.n; i++)
    if (!pkv_tpl_equal(r, &items.v[i], what, found)) return false;
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Where a value comes from
 * ------------------------------------------------------------------------------------------ */

static bool all_trusted(tpl_run *r, const tpl_value *v) {
  switch (v->type) {
  case TPL_V_INT:
  case TPL_V_FLOAT:
    return v->trusted;
  case TPL_V_TEXT:
    return pkv_tpl_all_trusted(v->text);
  case TPL_V_LIST:
  case TPL_V_TUPLE:
    for (size_t i = 0; i < v->list->n; i++)
      if (!pkv_tpl_value_trusted(r, &v->list->v[i])) return false;
    return true;
  case TPL_V_DICT:
    for (size_t i = 0; i < v->dict->n; i++)
      if (!pkv_tpl_value_trusted(r, &v->dict->v[i].key) ||
          !pkv_tpl_value_trusted(r, &v->dict->v[i].value))
        return false;
    return true;
  default:
    return true;
  }
}

bool pkv_tpl_value_trusted(tpl_run *r, const tpl_value *v) {
  if (!pkv_tpl_enter(r)) return false;
  const bool trusted = all_trusted(r, v);
  r->depth--;
  return trusted;
}
