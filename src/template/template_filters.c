/* SPDX-License-Identifier: Apache-2.0 */
/* Filters by name; here those of lists, maps and numbers. */
#include <math.h>
#include <stdlib.h>

#include "template/template_parts.h"

static const char *const no_params = "";

/* a.b.0 of a value, as the filters' attribute says it; an integer is an index. */
static bool path_of(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_value *path) {
  *out = *v;
  if (path == NULL || path->type == TPL_V_NONE) return true;
  if (path->type != TPL_V_TEXT) return pkv_tpl_item(r, out, v, path);
  const tpl_text *const s = path->text;
  for (size_t i = 0; i <= s->n;) {
    const char *const dot = i < s->n ? memchr(s->p + i, '.', s->n - i) : NULL;
    const size_t end = dot != NULL ? (size_t)(dot - s->p) : s->n;
    bool number = end > i && end - i < 10;
    int64_t index = 0;
    for (size_t k = i; k < end && number; k++) {
      number = s->p[k] >= '0' && s->p[k] <= '9';
      index = 10 * index + (s->p[k] - '0');
    }
    tpl_value key = tpl_int(index, true);
    const tpl_value from = *out;
    if (!number && !pkv_tpl_part(r, &key, s, i, end)) return false;
    if (!pkv_tpl_item(r, out, &from, &key)) return false;
    i = end + 1;
  }
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Sorting
 * ------------------------------------------------------------------------------------------ */

typedef struct sort_item {
  tpl_value key, value;
} sort_item;

static bool take_left(tpl_run *r, const sort_item *a, const sort_item *b, bool fold, bool reverse,
                      bool *left) {
  int order;
  if (!pkv_tpl_work(r, 64) || !pkv_tpl_order(r, &a->key, &b->key, fold, &order)) return false;
  *left = reverse ? order >= 0 : order <= 0;
  return true;
}

/* Stable, also in reverse. items and spare: [n]. */
static bool merge_sort(tpl_run *r, sort_item *items, sort_item *spare, size_t n, bool fold,
                       bool reverse) {
  for (size_t width = 1; width < n; width *= 2) {
    for (size_t from = 0; from < n; from += 2 * width) {
      const size_t mid = from + width < n ? from + width : n;
      const size_t end = from + 2 * width < n ? from + 2 * width : n;
      size_t a = from, b = mid;
      for (size_t to = from; to < end; to++) {
        bool left = b == end;
        if (a < mid && b < end && !take_left(r, &items[a], &items[b], fold, reverse, &left))
          return false;
        spare[to] = left && a < mid ? items[a++] : items[b++];
      }
    }
    memcpy(items, spare, n * sizeof *items);
  }
  return true;
}

static bool sorted_by(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_value *path,
                      bool fold, bool reverse) {
  sort_item *const items = pkv_tpl_take(r, list->n, sizeof *items);
  sort_item *const spare = pkv_tpl_take(r, list->n, sizeof *spare);
  if (items == NULL || spare == NULL || !pkv_tpl_new_list(r, out, TPL_V_LIST, list->n))
    return false;
  for (size_t i = 0; i < list->n; i++) {
    items[i].value = list->v[i];
    if (!path_of(r, &items[i].key, &list->v[i], path)) return false;
  }
  if (!merge_sort(r, items, spare, list->n, fold, reverse)) return false;
  for (size_t i = 0; i < list->n; i++)
    out->list->v[out->list->n++] = items[i].value;
  return true;
}

static bool pair_of(tpl_run *r, tpl_value *out, const tpl_entry *entry) {
  return pkv_tpl_new_list(r, out, TPL_V_TUPLE, 2) && pkv_tpl_push(r, out->list, entry->key) &&
         pkv_tpl_push(r, out->list, entry->value);
}

static bool filter_items(tpl_run *r, tpl_value *out, const tpl_value *v) {
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, 0)) return false;
  if (v->type == TPL_V_UNDEFINED) return true;
  if (v->type != TPL_V_DICT)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s has no items", pkv_tpl_type_name(v));
  for (size_t i = 0; i < v->dict->n; i++) {
    tpl_value pair;
    if (!pair_of(r, &pair, &v->dict->v[i]) || !pkv_tpl_push(r, out->list, pair)) return false;
  }
  return true;
}

static bool filter_dictsort(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_value pairs;
  if (!pkv_tpl_bind(r, slots, "case_sensitive by reverse", args) || !filter_items(r, &pairs, v))
    return false;
  const tpl_value by =
      tpl_int(slots[1] != NULL && slots[1]->type == TPL_V_TEXT &&
                  tpl_is((tpl_span){slots[1]->text->p, slots[1]->text->n}, "value"),
              true);
  return sorted_by(r, out, pairs.list, &by, slots[0] == NULL || !pkv_tpl_truth(slots[0]),
                   slots[2] != NULL && pkv_tpl_truth(slots[2]));
}

static bool filter_sort(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, "reverse case_sensitive attribute", args)) return false;
  return sorted_by(r, out, list, slots[2], slots[1] == NULL || !pkv_tpl_truth(slots[1]),
                   slots[0] != NULL && pkv_tpl_truth(slots[0]));
}

static bool filter_extreme(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args,
                           bool max) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_value sorted;
  if (!pkv_tpl_bind(r, slots, "case_sensitive attribute", args)) return false;
  if (list->n == 0) {
    *out = pkv_tpl_undefined(r, (tpl_span){"the extreme of nothing", 22});
    return r->status == PKV_OK;
  }
  if (!sorted_by(r, &sorted, list, slots[1], slots[0] == NULL || !pkv_tpl_truth(slots[0]), max))
    return false;
  *out = sorted.list->v[0];
  return true;
}

static bool filter_unique(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_list keys = {NULL, 0, 0};
  if (!pkv_tpl_bind(r, slots, "case_sensitive attribute", args) ||
      !pkv_tpl_new_list(r, out, TPL_V_LIST, 0))
    return false;
  const bool fold = slots[0] == NULL || !pkv_tpl_truth(slots[0]);
  for (size_t i = 0; i < list->n; i++) {
    tpl_value key, plain;
    bool seen = false;
    if (!path_of(r, &key, &list->v[i], slots[1])) return false;
    if (fold && key.type == TPL_V_TEXT) {
      plain = key;
      if (!pkv_tpl_fold(r, &key, plain.text, false)) return false;
    }
    for (size_t k = 0; k < keys.n && !seen; k++)
      if (!pkv_tpl_work(r, 64) || !pkv_tpl_equal(r, &keys.v[k], &key, &seen)) return false;
    if (!seen && (!pkv_tpl_push(r, &keys, key) || !pkv_tpl_push(r, out->list, list->v[i])))
      return false;
  }
  return true;
}

/* ------------------------------------------------------------------------------------------
 * Choosing and mapping
 * ------------------------------------------------------------------------------------------ */

/* select, reject, selectattr, rejectattr: the rest of the arguments says which test. */
static bool filter_select(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args,
                          bool keep, bool attribute) {
  const size_t skip = attribute;
  const tpl_value *const path = attribute && args->positional.n > 0 ? args->positional.v : NULL;
  if (attribute && path == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "an attribute is missing");
  const bool tested = args->positional.n > skip;
  const tpl_text *name = NULL;
  tpl_args rest = *args;
  if (tested) {
    if (!pkv_tpl_want_text(r, &args->positional.v[skip], "a test's name", &name)) return false;
    rest.positional.v += skip + 1;
    rest.positional.n -= skip + 1;
    if (!pkv_tpl_all_trusted(name)) return pkv_tpl_fail(r, PKV_E_FORMAT, "no test by that name");
  }
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, 0)) return false;
  for (size_t i = 0; i < list->n; i++) {
    tpl_value v;
    if (!pkv_tpl_work(r, 64) || !path_of(r, &v, &list->v[i], path)) return false;
    bool yes = pkv_tpl_truth(&v);
    if (tested && !pkv_tpl_test(r, &yes, (tpl_span){name->p, name->n}, &v, &rest)) return false;
    if (yes == keep && !pkv_tpl_push(r, out->list, list->v[i])) return false;
  }
  return true;
}

static bool map_attribute(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_value *path,
                          const tpl_value *absent) {
  for (size_t i = 0; i < list->n; i++) {
    tpl_value v;
    if (!path_of(r, &v, &list->v[i], path)) return false;
    if (absent != NULL && v.type == TPL_V_UNDEFINED) v = *absent;
    if (!pkv_tpl_push(r, out->list, v)) return false;
  }
  return true;
}

static bool filter_map(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args) {
  const tpl_value *const path = pkv_tpl_entry(&args->named, (tpl_span){"attribute", 9});
  const tpl_text *name;
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, 0)) return false;
  if (args->positional.n == 0 && path != NULL)
    return map_attribute(r, out, list, path, pkv_tpl_entry(&args->named, (tpl_span){"default", 7}));
  tpl_args rest = *args;
  if (!pkv_tpl_want_text(r, args->positional.n > 0 ? args->positional.v : NULL, "a filter's name",
                         &name))
    return false;
  if (!pkv_tpl_all_trusted(name)) return pkv_tpl_fail(r, PKV_E_FORMAT, "no filter by that name");
  rest.positional.v++;
  rest.positional.n--;
  for (size_t i = 0; i < list->n; i++) {
    tpl_value v;
    if (!pkv_tpl_work(r, 64) ||
        !pkv_tpl_filter(r, &v, (tpl_span){name->p, name->n}, &list->v[i], &rest) ||
        !pkv_tpl_push(r, out->list, v))
      return false;
  }
  return true;
}

static bool filter_join(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_value between, parts;
  if (!pkv_tpl_bind(r, slots, "d attribute", args)) return false;
  const tpl_value none = pkv_tpl_undefined(r, (tpl_span){"", 0});
  if (!pkv_tpl_to_text(r, &between, slots[0] != NULL ? slots[0] : &none)) return false;
  if (slots[1] == NULL) return pkv_tpl_join(r, out, list, between.text, false);
  return pkv_tpl_new_list(r, &parts, TPL_V_LIST, 0) &&
         map_attribute(r, &parts, list, slots[1], NULL) &&
         pkv_tpl_join(r, out, parts.list, between.text, false);
}

static bool filter_sum(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, "attribute start", args)) return false;
  *out = slots[1] != NULL ? *slots[1] : tpl_int(0, true);
  for (size_t i = 0; i < list->n; i++) {
    tpl_value v;
    const tpl_value before = *out;
    if (!path_of(r, &v, &list->v[i], slots[0]) || !pkv_tpl_binary(r, out, '+', &before, &v))
      return false;
  }
  return true;
}

static bool filter_reverse(tpl_run *r, tpl_value *out, const tpl_value *v) {
  const tpl_value bounds[3] = {tpl_none(), tpl_none(), tpl_int(-1, true)};
  tpl_value all = *v;
  tpl_list items;
  if (v->type == TPL_V_TEXT) return pkv_tpl_slice(r, out, v, bounds);
  if (!pkv_tpl_items(r, v, &items)) return false;
  all = (tpl_value){.type = TPL_V_LIST, .list = &items};
  return pkv_tpl_slice(r, out, &all, bounds);
}

static bool copy_list(tpl_run *r, tpl_value *out, const tpl_list *items) {
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, items->n)) return false;
  for (size_t i = 0; i < items->n; i++)
    out->list->v[out->list->n++] = items->v[i];
  return true;
}

static bool list_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_list *items,
                        const tpl_args *args) {
  if (tpl_is(name, "join")) return filter_join(r, out, items, args);
  if (tpl_is(name, "map")) return filter_map(r, out, items, args);
  if (tpl_is(name, "select")) return filter_select(r, out, items, args, true, false);
  if (tpl_is(name, "reject")) return filter_select(r, out, items, args, false, false);
  if (tpl_is(name, "selectattr")) return filter_select(r, out, items, args, true, true);
  if (tpl_is(name, "rejectattr")) return filter_select(r, out, items, args, false, true);
  if (tpl_is(name, "sort")) return filter_sort(r, out, items, args);
  if (tpl_is(name, "unique")) return filter_unique(r, out, items, args);
  if (tpl_is(name, "min")) return filter_extreme(r, out, items, args, false);
  if (tpl_is(name, "max")) return filter_extreme(r, out, items, args, true);
  if (tpl_is(name, "sum")) return filter_sum(r, out, items, args);
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, no_params, args)) return false;
  if (tpl_is(name, "list")) return copy_list(r, out, items);
  if (items->n > 0) {
    *out = items->v[tpl_is(name, "first") ? 0 : items->n - 1];
    return true;
  }
  *out = pkv_tpl_undefined(r, (tpl_span){"an element of nothing", 21});
  return r->status == PKV_OK;
}

bool pkv_tpl_list_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                         const tpl_args *args, bool *found) {
  static const char *const names[] = {"join",       "map",  "select", "reject", "selectattr",
                                      "rejectattr", "sort", "unique", "min",    "max",
                                      "sum",        "list", "first",  "last"};
  tpl_list items;
  *found = false;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    *found = *found || tpl_is(name, names[i]);
  if (!*found) return true;
  /* Those that choose take whatever is empty or none for an empty list. */
  static const tpl_value nothing = {.type = TPL_V_UNDEFINED};
  const bool chooses = tpl_is(name, "map") || tpl_is(name, "select") || tpl_is(name, "reject") ||
                       tpl_is(name, "selectattr") || tpl_is(name, "rejectattr");
  return pkv_tpl_items(r, chooses && !pkv_tpl_truth(v) ? &nothing : v, &items) &&
         list_filter(r, out, name, &items, args);
}

/* ------------------------------------------------------------------------------------------
 * Numbers, and what is left
 * ------------------------------------------------------------------------------------------ */

static bool filter_default(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, "default_value boolean", args)) return false;
  const bool falsy = slots[1] != NULL && pkv_tpl_truth(slots[1]);
  if (v->type != TPL_V_UNDEFINED && (!falsy || pkv_tpl_truth(v))) return *out = *v, true;
  return slots[0] != NULL ? (*out = *slots[0], true) : pkv_tpl_text(r, out, "", 0, true);
}

/* The whole text, blanks around it allowed, as a number; false: it is none. */
static bool number_of(const tpl_text *s, double *real, int64_t *whole, bool *is_whole) {
  char text[64];
  size_t from, to;
  pkv_tpl_strip(&from, &to, s, NULL, true, true);
  if (to == from || to - from >= sizeof text) return false;
  memcpy(text, s->p + from, to - from);
  text[to - from] = 0;
  if (strspn(text, "+-.0123456789eE") != to - from) return false;
  char *end;
  *real = strtod(text, &end);
  if (*end != 0) return false;
  *is_whole = strspn(text, "+-0123456789") == to - from && fabs(*real) < 9e18;
  if (*is_whole) *whole = strtoll(text, NULL, 10);
  return true;
}

static bool filter_number(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args,
                          bool whole) {
  const tpl_value *slots[TPL_SLOTS];
  double real = 0;
  int64_t number = 0;
  bool is_whole = false;
  if (!pkv_tpl_bind(r, slots, whole ? "default base" : "default", args)) return false;
  if (whole && slots[1] != NULL) {
    int64_t base;
    if (!pkv_tpl_want_int(r, slots[1], "base", 10, &base)) return false;
    if (base != 10) return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "only the base 10 is supported");
  }
  const tpl_value absent = slots[0] != NULL ? *slots[0]
                           : whole          ? tpl_int(0, true)
                                            : tpl_float(0, true);
  const bool trusted = v->type == TPL_V_TEXT ? pkv_tpl_all_trusted(v->text) : v->trusted;
  *out = absent;
  if (v->type == TPL_V_UNDEFINED)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "an undefined value is no number");
  if (tpl_is_whole(v)) {
    *out = whole ? tpl_int(v->whole, trusted) : tpl_float((double)v->whole, trusted);
    return true;
  }
  if (v->type == TPL_V_FLOAT)
    real = v->real;
  else if (v->type != TPL_V_TEXT || !number_of(v->text, &real, &number, &is_whole))
    return true;
  if (!whole) return *out = tpl_float(real, trusted), true;
  if (is_whole) return *out = tpl_int(number, trusted), true;
  if (fabs(real) < 9e18) *out = tpl_int((int64_t)real, trusted);
  return true;
}

static bool filter_round(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  int64_t digits;
  if (!pkv_tpl_bind(r, slots, "precision method", args) ||
      !pkv_tpl_want_int(r, slots[0], "precision", 0, &digits))
    return false;
  if (!tpl_is_number(v)) return pkv_tpl_fail(r, PKV_E_FORMAT, "round takes a number");
  if (digits < 0 || digits > 15)
    return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "round to 0 .. 15 digits");
  const double x = v->type == TPL_V_FLOAT ? v->real : (double)v->whole;
  const double scale = pow(10, (double)digits);
  double y = nearbyint(x * scale) / scale;
  if (slots[1] != NULL && slots[1]->type == TPL_V_TEXT) {
    const tpl_span method = {slots[1]->text->p, slots[1]->text->n};
    if (tpl_is(method, "ceil")) y = ceil(x * scale) / scale;
    if (tpl_is(method, "floor")) y = floor(x * scale) / scale;
  }
  *out = tpl_is_whole(v) ? *v : tpl_float(y, v->trusted);
  return true;
}

static bool filter_abs(tpl_run *r, tpl_value *out, const tpl_value *v) {
  if (v->type == TPL_V_FLOAT) return *out = tpl_float(fabs(v->real), v->trusted), true;
  if (!tpl_is_whole(v)) return pkv_tpl_fail(r, PKV_E_FORMAT, "abs takes a number");
  const tpl_value zero = tpl_int(0, true);
  return v->whole < 0 ? pkv_tpl_binary(r, out, '-', &zero, v)
                      : (*out = tpl_int(v->whole, v->trusted), true);
}

static bool filter_length(tpl_run *r, tpl_value *out, const tpl_value *v) {
  size_t n = 0;
  if (v->type == TPL_V_TEXT) {
    if (!pkv_tpl_work(r, v->text->n)) return false;
    n = pkv_tpl_chars(v->text->p, v->text->n);
  } else if (tpl_is_sequence(v)) {
    n = v->list->n;
  } else if (v->type == TPL_V_DICT) {
    n = v->dict->n;
  } else if (v->type != TPL_V_UNDEFINED) {
    return pkv_tpl_fail(r, PKV_E_FORMAT, "%s has no length", pkv_tpl_type_name(v));
  }
  *out = tpl_int((int64_t)n, true);
  return true;
}

static bool filter_attr(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *name;
  if (!pkv_tpl_bind(r, slots, "name", args) || !pkv_tpl_want_text(r, slots[0], "name", &name))
    return false;
  const tpl_span span = {name->p, name->n};
  if (v->type == TPL_V_NAMESPACE) return pkv_tpl_attribute(r, out, v, span);
  *out = pkv_tpl_undefined(r, (tpl_span){"an attribute", 12}); /* maps have none, only items */
  return r->status == PKV_OK;
}

static bool other_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                         const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  if (tpl_is(name, "tojson")) return pkv_tpl_tojson(r, out, v, args);
  if (tpl_is(name, "default") || tpl_is(name, "d")) return filter_default(r, out, v, args);
  if (tpl_is(name, "int") || tpl_is(name, "float"))
    return filter_number(r, out, v, args, tpl_is(name, "int"));
  if (tpl_is(name, "dictsort")) return filter_dictsort(r, out, v, args);
  if (tpl_is(name, "round")) return filter_round(r, out, v, args);
  if (tpl_is(name, "attr")) return filter_attr(r, out, v, args);
  const bool plain = tpl_is(name, "length") || tpl_is(name, "count") || tpl_is(name, "items") ||
                     tpl_is(name, "reverse") || tpl_is(name, "safe") || tpl_is(name, "abs");
  if (!plain)
    return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "the filter '%.*s' is not known",
                        name.n > 40 ? 40 : (int)name.n, name.p);
  if (!pkv_tpl_bind(r, slots, no_params, args)) return false;
  if (tpl_is(name, "items")) return filter_items(r, out, v);
  if (tpl_is(name, "reverse")) return filter_reverse(r, out, v);
  if (tpl_is(name, "safe")) return pkv_tpl_to_text(r, out, v);
  if (tpl_is(name, "abs")) return filter_abs(r, out, v);
  return filter_length(r, out, v);
}

static bool any_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                       const tpl_args *args) {
  bool found;
  if (!pkv_tpl_text_filter(r, out, name, v, args, &found)) return false;
  if (found) return true;
  if (!pkv_tpl_list_filter(r, out, name, v, args, &found)) return false;
  return found || other_filter(r, out, name, v, args);
}

bool pkv_tpl_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                    const tpl_args *args) {
  if (!pkv_tpl_enter(r)) return false;
  const bool ok = any_filter(r, out, name, v, args);
  r->depth--;
  return ok;
}
