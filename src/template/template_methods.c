/* SPDX-License-Identifier: Apache-2.0 */
/* The methods of Python's str, dict and list that templates call, those that change nothing. */
#include "template/template_parts.h"

static const char text_methods[] =
    "split rsplit strip lstrip rstrip startswith endswith replace upper lower capitalize find "
    "rfind "
    "index count join format splitlines isdigit isalpha isalnum isspace removeprefix removesuffix "
    "partition rpartition isupper islower";
static const char dict_methods[] = "get items keys values copy";
static const char list_methods[] = "index count copy";
static const char loop_methods[] = "cycle changed";
/* They exist, but change their object: out of bounds. */
static const char changing[] =
    "append extend insert pop remove clear sort reverse update setdefault "
    "popitem";

static bool is_word(const char *words, tpl_span name) {
  for (const char *p = words; p != NULL;) {
    const char *const blank = strchr(p, ' ');
    const size_t n = blank != NULL ? (size_t)(blank - p) : strlen(p);
    if (n == name.n && memcmp(p, name.p, n) == 0) return true;
    p = blank != NULL ? blank + 1 : NULL;
  }
  return false;
}

bool pkv_tpl_has_method(const tpl_value *v, tpl_span name) {
  switch (v->type) {
  case TPL_V_TEXT:
    return is_word(text_methods, name);
  case TPL_V_DICT:
    return is_word(dict_methods, name) || is_word("pop clear update setdefault popitem", name);
  case TPL_V_LIST:
    return is_word(list_methods, name) || is_word(changing, name);
  case TPL_V_TUPLE:
    return is_word("index count", name);
  case TPL_V_LOOP:
    return is_word(loop_methods, name);
  default:
    return false;
  }
}

/* ------------------------------------------------------------------------------------------
 * str
 * ------------------------------------------------------------------------------------------ */

static bool push_part(tpl_run *r, tpl_list *list, const tpl_text *s, size_t from, size_t to) {
  tpl_value part;
  return pkv_tpl_work(r, 64) && pkv_tpl_part(r, &part, s, from, to) && pkv_tpl_push(r, list, part);
}

static void skip_spaces(const tpl_text *s, size_t *at, bool spaces) {
  uint32_t code;
  while (*at < s->n) {
    const size_t n = pkv_tpl_char(s->p + *at, s->n - *at, &code);
    if (pkv_tpl_is_space(code) != spaces) break;
    *at += n;
  }
}

static bool split_blanks(tpl_run *r, tpl_list *list, const tpl_text *s, int64_t most) {
  size_t at = 0, from;
  for (skip_spaces(s, &at, true); at < s->n; skip_spaces(s, &at, true)) {
    from = at;
    if (most-- == 0) return push_part(r, list, s, from, s->n);
    skip_spaces(s, &at, false);
    if (!push_part(r, list, s, from, at)) return false;
  }
  return true;
}

static bool last_hit(const tpl_text *s, size_t end, const tpl_text *what, size_t *at) {
  if (what->n > end) return false;
  for (*at = end - what->n;; --*at) {
    if (what->n == 0 || memcmp(s->p + *at, what->p, what->n) == 0) return true;
    if (*at == 0) return false;
  }
}

/* Splits from the right: parts come up last first, and are turned round. */
static bool split_right(tpl_run *r, tpl_list *list, const tpl_text *s, const tpl_text *by,
                        int64_t most) {
  size_t end = s->n, at;
  while (most != 0 && last_hit(s, end, by, &at)) {
    if (!push_part(r, list, s, at + by->n, end)) return false;
    end = at;
    if (most > 0) most--;
  }
  if (!push_part(r, list, s, 0, end)) return false;
  for (size_t a = 0, b = list->n - 1; a < b; a++, b--) {
    const tpl_value v = list->v[a];
    list->v[a] = list->v[b];
    list->v[b] = v;
  }
  return true;
}

static bool split_left(tpl_run *r, tpl_list *list, const tpl_text *s, const tpl_text *by,
                       int64_t most) {
  size_t from = 0, at;
  while (most != 0 && pkv_tpl_find(s, from, by, &at)) {
    if (!push_part(r, list, s, from, at)) return false;
    from = at + by->n;
    if (most > 0) most--;
  }
  return push_part(r, list, s, from, s->n);
}

static bool method_split(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args,
                         bool right) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *by = NULL;
  int64_t most;
  if (!pkv_tpl_bind(r, slots, "sep maxsplit", args) ||
      !pkv_tpl_want_int(r, slots[1], "maxsplit", -1, &most) ||
      !pkv_tpl_new_list(r, out, TPL_V_LIST, 0) || !pkv_tpl_work(r, 4 * s->n))
    return false;
  if (slots[0] == NULL || slots[0]->type == TPL_V_NONE) {
    if (right && most >= 0)
      return pkv_tpl_fail(r, PKV_E_UNSUPPORTED, "rsplit at blanks takes no maxsplit");
    return split_blanks(r, out->list, s, most);
  }
  if (!pkv_tpl_want_text(r, slots[0], "sep", &by)) return false;
  if (by->n == 0) return pkv_tpl_fail(r, PKV_E_FORMAT, "an empty separator");
  return right ? split_right(r, out->list, s, by, most) : split_left(r, out->list, s, by, most);
}

static bool method_partition(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args,
                             bool right) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *by;
  size_t at = 0;
  if (!pkv_tpl_bind(r, slots, "sep", args) || !pkv_tpl_want_text(r, slots[0], "sep", &by) ||
      !pkv_tpl_new_list(r, out, TPL_V_TUPLE, 3) || !pkv_tpl_work(r, 4 * s->n))
    return false;
  if (by->n == 0) return pkv_tpl_fail(r, PKV_E_FORMAT, "an empty separator");
  if (!(right ? last_hit(s, s->n, by, &at) : pkv_tpl_find(s, 0, by, &at)))
    return right ? push_part(r, out->list, s, 0, 0) && push_part(r, out->list, s, 0, 0) &&
                       push_part(r, out->list, s, 0, s->n)
                 : push_part(r, out->list, s, 0, s->n) && push_part(r, out->list, s, 0, 0) &&
                       push_part(r, out->list, s, 0, 0);
  return push_part(r, out->list, s, 0, at) && push_part(r, out->list, by, 0, by->n) &&
         push_part(r, out->list, s, at + by->n, s->n);
}

static bool method_strip(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args,
                         bool left, bool right) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *set = NULL;
  size_t from, to;
  if (!pkv_tpl_bind(r, slots, "chars", args) || !pkv_tpl_work(r, s->n)) return false;
  if (slots[0] != NULL && slots[0]->type != TPL_V_NONE &&
      !pkv_tpl_want_text(r, slots[0], "chars", &set))
    return false;
  pkv_tpl_strip(&from, &to, s, set, left, right);
  return pkv_tpl_part(r, out, s, from, to);
}

static bool affix(const tpl_text *s, const tpl_text *what, bool front) {
  return what->n <= s->n &&
         (what->n == 0 || memcmp(front ? s->p : s->p + s->n - what->n, what->p, what->n) == 0);
}

/* startswith and endswith: of a text, or one of a tuple of them. */
static bool method_affix(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args,
                         bool front) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *what;
  if (!pkv_tpl_bind(r, slots, "prefix", args)) return false;
  if (slots[0] == NULL || slots[0]->type != TPL_V_TUPLE) {
    if (!pkv_tpl_want_text(r, slots[0], "the text to look for", &what)) return false;
    return *out = tpl_bool(affix(s, what, front)), true;
  }
  *out = tpl_bool(false);
  for (size_t i = 0; i < slots[0]->list->n; i++) {
    if (!pkv_tpl_want_text(r, &slots[0]->list->v[i], "the text to look for", &what)) return false;
    if (affix(s, what, front)) *out = tpl_bool(true);
  }
  return true;
}

static bool method_remove(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args,
                          bool front) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *what;
  if (!pkv_tpl_bind(r, slots, "prefix", args) ||
      !pkv_tpl_want_text(r, slots[0], "the text to remove", &what))
    return false;
  const size_t n = affix(s, what, front) ? what->n : 0;
  return pkv_tpl_part(r, out, s, front ? n : 0, front ? s->n : s->n - n);
}

/* find, rfind, index, count */
static bool method_find(tpl_run *r, tpl_value *out, const tpl_text *s, tpl_span name,
                        const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *what;
  size_t at = 0;
  if (!pkv_tpl_bind(r, slots, "sub", args) || !pkv_tpl_work(r, 4 * s->n) ||
      !pkv_tpl_want_text(r, slots[0], "the text to look for", &what))
    return false;
  if (tpl_is(name, "count")) {
    int64_t n = 0;
    if (what->n == 0) return *out = tpl_int((int64_t)pkv_tpl_chars(s->p, s->n) + 1, true), true;
    for (size_t from = 0; pkv_tpl_find(s, from, what, &at); from = at + what->n)
      n++;
    return *out = tpl_int(n, true), true;
  }
  const bool found =
      tpl_is(name, "rfind") ? last_hit(s, s->n, what, &at) : pkv_tpl_find(s, 0, what, &at);
  if (!found && tpl_is(name, "index")) return pkv_tpl_fail(r, PKV_E_FORMAT, "index finds nothing");
  *out = tpl_int(found ? (int64_t)pkv_tpl_chars(s->p, at) : -1, true);
  return true;
}

static bool method_replace(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const tpl_text *from, *to;
  int64_t most;
  return pkv_tpl_bind(r, slots, "old new count", args) &&
         pkv_tpl_want_text(r, slots[0], "old", &from) &&
         pkv_tpl_want_text(r, slots[1], "new", &to) &&
         pkv_tpl_want_int(r, slots[2], "count", -1, &most) &&
         pkv_tpl_replace(r, out, s, from, to, most);
}

static bool method_lines(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  if (!pkv_tpl_bind(r, slots, "keepends", args) || !pkv_tpl_new_list(r, out, TPL_V_LIST, 0))
    return false;
  const bool keep = slots[0] != NULL && pkv_tpl_truth(slots[0]);
  for (size_t from = 0; from < s->n;) {
    size_t end = from;
    while (end < s->n && s->p[end] != '\n' && s->p[end] != '\r')
      end++;
    size_t next = end + (end < s->n);
    if (end + 1 < s->n && s->p[end] == '\r' && s->p[end + 1] == '\n') next++;
    if (!push_part(r, out->list, s, from, keep ? next : end)) return false;
    from = next;
  }
  return pkv_tpl_work(r, s->n);
}

static bool method_join(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  tpl_list items;
  if (!pkv_tpl_bind(r, slots, "iterable", args)) return false;
  if (slots[0] == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "join takes a list");
  return pkv_tpl_items(r, slots[0], &items) && pkv_tpl_join(r, out, &items, s, true);
}

static bool text_method(tpl_run *r, tpl_value *out, const tpl_value *self, tpl_span name,
                        const tpl_args *args) {
  const tpl_text *const s = self->text;
  const tpl_value *slots[TPL_SLOTS];
  if (tpl_is(name, "split") || tpl_is(name, "rsplit"))
    return method_split(r, out, s, args, tpl_is(name, "rsplit"));
  if (tpl_is(name, "partition") || tpl_is(name, "rpartition"))
    return method_partition(r, out, s, args, tpl_is(name, "rpartition"));
  if (tpl_is(name, "strip") || tpl_is(name, "lstrip") || tpl_is(name, "rstrip"))
    return method_strip(r, out, s, args, !tpl_is(name, "rstrip"), !tpl_is(name, "lstrip"));
  if (tpl_is(name, "startswith") || tpl_is(name, "endswith"))
    return method_affix(r, out, s, args, tpl_is(name, "startswith"));
  if (tpl_is(name, "removeprefix") || tpl_is(name, "removesuffix"))
    return method_remove(r, out, s, args, tpl_is(name, "removeprefix"));
  if (tpl_is(name, "replace")) return method_replace(r, out, s, args);
  if (tpl_is(name, "join")) return method_join(r, out, s, args);
  if (tpl_is(name, "format")) return pkv_tpl_format(r, out, s, args);
  if (tpl_is(name, "splitlines")) return method_lines(r, out, s, args);
  if (is_word("find rfind index count", name)) return method_find(r, out, s, name, args);
  if (!pkv_tpl_bind(r, slots, "", args) || !pkv_tpl_work(r, s->n)) return false;
  if (tpl_is(name, "upper")) return pkv_tpl_fold(r, out, s, true);
  if (tpl_is(name, "lower")) return pkv_tpl_fold(r, out, s, false);
  if (tpl_is(name, "capitalize")) return pkv_tpl_capital(r, out, s, false);
  if (tpl_is(name, "isupper") || tpl_is(name, "islower")) {
    bool yes;
    const tpl_args none = {0};
    if (!pkv_tpl_test(r, &yes, (tpl_span){name.p + 2, name.n - 2}, self, &none)) return false;
    return *out = tpl_bool(yes), true;
  }
  const int kind = tpl_is(name, "isdigit")   ? 'd'
                   : tpl_is(name, "isalpha") ? 'a'
                   : tpl_is(name, "isspace") ? 's'
                                             : 'n';
  return *out = tpl_bool(pkv_tpl_only(s, kind)), true;
}

/* ------------------------------------------------------------------------------------------
 * dict, list, loop
 * ------------------------------------------------------------------------------------------ */

static bool dict_method(tpl_run *r, tpl_value *out, const tpl_dict *dict, tpl_span name,
                        const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const bool get = tpl_is(name, "get");
  if (!pkv_tpl_bind(r, slots, get ? "key default" : "", args)) return false;
  if (get) {
    if (slots[0] == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "get takes a key");
    *out = slots[1] != NULL ? *slots[1] : tpl_none();
    if (!pkv_tpl_work(r, 16 * dict->n)) return false;
    for (size_t i = 0; i < dict->n; i++) {
      bool same;
      if (!pkv_tpl_equal(r, &dict->v[i].key, slots[0], &same)) return false;
      if (same) return *out = dict->v[i].value, true;
    }
    return true;
  }
  if (tpl_is(name, "copy")) {
    if (!pkv_tpl_new_dict(r, out, dict->n)) return false;
    if (dict->n > 0) memcpy(out->dict->v, dict->v, dict->n * sizeof *dict->v);
    out->dict->n = dict->n;
    return true;
  }
  if (!pkv_tpl_new_list(r, out, TPL_V_LIST, dict->n)) return false;
  for (size_t i = 0; i < dict->n; i++) {
    tpl_value v = tpl_is(name, "keys") ? dict->v[i].key : dict->v[i].value;
    if (tpl_is(name, "items") &&
        (!pkv_tpl_new_list(r, &v, TPL_V_TUPLE, 2) || !pkv_tpl_push(r, v.list, dict->v[i].key) ||
         !pkv_tpl_push(r, v.list, dict->v[i].value)))
      return false;
    if (!pkv_tpl_push(r, out->list, v)) return false;
  }
  return true;
}

static bool list_method(tpl_run *r, tpl_value *out, const tpl_value *self, tpl_span name,
                        const tpl_args *args) {
  const tpl_value *slots[TPL_SLOTS];
  const bool copy = tpl_is(name, "copy");
  int64_t n = 0;
  if (!pkv_tpl_bind(r, slots, copy ? "" : "value", args)) return false;
  const tpl_value all[3] = {tpl_none(), tpl_none(), tpl_none()};
  if (copy) return pkv_tpl_slice(r, out, self, all);
  if (slots[0] == NULL) return pkv_tpl_fail(r, PKV_E_FORMAT, "a value to look for is missing");
  for (size_t i = 0; i < self->list->n; i++) {
    bool same;
    if (!pkv_tpl_work(r, 64) || !pkv_tpl_equal(r, &self->list->v[i], slots[0], &same)) return false;
    n += same;
    if (same && tpl_is(name, "index")) return *out = tpl_int((int64_t)i, true), true;
  }
  if (tpl_is(name, "index")) return pkv_tpl_fail(r, PKV_E_FORMAT, "index finds nothing");
  return *out = tpl_int(n, true), true;
}

static bool loop_method(tpl_run *r, tpl_value *out, tpl_loop *loop, tpl_span name,
                        const tpl_args *args) {
  if (tpl_is(name, "cycle")) {
    if (args->positional.n == 0) return pkv_tpl_fail(r, PKV_E_FORMAT, "cycle takes values");
    return *out = args->positional.v[loop->index % args->positional.n], true;
  }
  const tpl_value before = {.type = TPL_V_TUPLE, .list = &loop->last};
  tpl_list values = args->positional;
  const tpl_value now = {.type = TPL_V_TUPLE, .list = &values};
  bool same = false;
  if (loop->has_last && !pkv_tpl_equal(r, &before, &now, &same)) return false;
  loop->has_last = true;
  loop->last = args->positional;
  return *out = tpl_bool(!same), true;
}

bool pkv_tpl_call_method(tpl_run *r, tpl_value *out, const tpl_value *self, tpl_span name,
                         const tpl_args *args) {
  if (self->type == TPL_V_TEXT) return text_method(r, out, self, name, args);
  if (self->type == TPL_V_LOOP) return loop_method(r, out, self->loop, name, args);
  if (is_word(changing, name))
    return pkv_tpl_fail(r, PKV_E_FORMAT, "'%.*s' would change its object, which is out of bounds",
                        (int)name.n, name.p);
  return self->type == TPL_V_DICT ? dict_method(r, out, self->dict, name, args)
                                  : list_method(r, out, self, name, args);
}
