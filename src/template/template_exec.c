/* SPDX-License-Identifier: Apache-2.0 */
/* Statements carried out, macros, and a rendering as a whole. */
#include <stdarg.h>
#include <stdio.h>

#include "base/status.h"
#include "template/template_parts.h"

/* ------------------------------------------------------------------------------------------
 * Limits and failures
 * ------------------------------------------------------------------------------------------ */

bool pkv_tpl_fail(tpl_run *r, pkv_status status, const char *format, ...) {
  if (r->status != PKV_OK) return false;
  char place[64], text[PKV_ERROR_TEXT_BYTES];
  va_list list;
  va_start(list, format);
  (void)vsnprintf(text, sizeof text, format, list);
  va_end(list);
  pkv_tpl_place(place, sizeof place, r->t->source, r->at != NULL ? r->at->at : 0);
  r->status = PKV_FAIL(r->err, status, "chat template, %s: %s", place, text);
  return false;
}

static bool charge(tpl_run *r, uint64_t steps) {
  if (steps <= r->steps) {
    r->steps -= steps;
    return true;
  }
  return pkv_tpl_fail(r, PKV_E_LIMIT, "more than %llu steps (limit steps)",
                      (unsigned long long)r->steps_limit);
}

bool pkv_tpl_work(tpl_run *r, size_t bytes) {
  return charge(r, bytes / 64);
}

bool pkv_tpl_enter(tpl_run *r) {
  if (!charge(r, 1)) return false;
  if (r->depth >= r->depth_limit)
    return pkv_tpl_fail(r, PKV_E_LIMIT, "nested more than %u deep (limit depth)",
                        (unsigned)r->depth_limit);
  r->depth++;
  return true;
}

void *pkv_tpl_take(tpl_run *r, size_t count, size_t size) {
  void *const p = pkv_tpl_arena_take(&r->arena, count, size);
  if (p == NULL && r->arena.over)
    (void)pkv_tpl_fail(r, PKV_E_LIMIT, "more than %zu bytes of values (limit memory)",
                       r->arena.limit);
  else if (p == NULL)
    (void)pkv_tpl_fail(r, PKV_E_NOMEM, "no memory for its values");
  return p;
}

/* ------------------------------------------------------------------------------------------
 * Variables
 * ------------------------------------------------------------------------------------------ */

tpl_scope *pkv_tpl_scope(tpl_run *r, tpl_scope *parent) {
  tpl_scope *const scope = pkv_tpl_take(r, 1, sizeof *scope);
  if (scope != NULL) *scope = (tpl_scope){parent, NULL};
  return scope;
}

bool pkv_tpl_set(tpl_run *r, tpl_scope *scope, tpl_span name, tpl_value v) {
  for (tpl_variable *old = scope->first; old != NULL; old = old->next) {
    if (!tpl_same(old->name, name)) continue;
    old->value = v;
    return true;
  }
  tpl_variable *const variable = pkv_tpl_take(r, 1, sizeof *variable);
  if (variable == NULL) return false;
  *variable = (tpl_variable){name, v, scope->first};
  scope->first = variable;
  return true;
}

/* space.name = v, and only that: maps cannot be changed. */
static bool assign_member(tpl_run *r, tpl_scope *scope, const tpl_node *target, tpl_value v) {
  tpl_value space, key;
  if (!pkv_tpl_eval(r, scope, target->a, &space)) return false;
  r->at = target;
  if (space.type != TPL_V_NAMESPACE)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "only a namespace's members can be set, this is %s",
                        pkv_tpl_type_name(&space));
  return pkv_tpl_text(r, &key, target->text.p, target->text.n, true) &&
         pkv_tpl_set_entry(r, space.dict, key, v);
}

static bool assign(tpl_run *r, tpl_scope *scope, const tpl_node *target, tpl_value v) {
  if (target->kind == TPL_NAME) return pkv_tpl_set(r, scope, target->text, v);
  if (target->kind == TPL_ATTR) return assign_member(r, scope, target, v);
  tpl_list items;
  size_t n = 0;
  if (!pkv_tpl_items(r, &v, &items)) return false;
  for (const tpl_node *e = target->list; e != NULL; e = e->next, n++)
    if (n < items.n && !assign(r, scope, e, items.v[n])) return false;
  if (n == items.n) return true;
  r->at = target;
  return pkv_tpl_fail(r, PKV_E_FORMAT, "%zu values for %zu variables", items.n, n);
}

/* ------------------------------------------------------------------------------------------
 * Blocks and macros
 * ------------------------------------------------------------------------------------------ */

/* What the list writes, as a text. */
static bool captured(tpl_run *r, tpl_scope *scope, const tpl_node *list, tpl_value *out) {
  tpl_builder text = {0};
  tpl_builder *const before = r->out;
  r->out = &text;
  const bool ok = pkv_tpl_exec(r, scope, list);
  r->out = before;
  return ok && pkv_tpl_built(r, &text, out);
}

/* Parameters from positional and named arguments, defaults where there are none. */
static bool bind_params(tpl_run *r, tpl_scope *scope, const tpl_macro *m, const tpl_args *args) {
  size_t given = 0, used = 0;
  for (const tpl_node *p = m->params; p != NULL; p = p->next) {
    const tpl_value *const named = pkv_tpl_entry(&args->named, p->text);
    tpl_value v;
    if (given < args->positional.n) {
      v = args->positional.v[given++];
    } else if (named != NULL) {
      v = *named;
    } else if (p->a == NULL) {
      v = pkv_tpl_undefined(r, p->text);
    } else if (!pkv_tpl_eval(r, scope, p->a, &v)) {
      return false;
    }
    used += named != NULL;
    if (!pkv_tpl_set(r, scope, p->text, v)) return false;
  }
  const tpl_value *const caller = pkv_tpl_entry(&args->named, (tpl_span){"caller", 6});
  if (caller != NULL) {
    used++;
    if (!pkv_tpl_set(r, scope, (tpl_span){"caller", 6}, *caller)) return false;
  }
  if (given < args->positional.n || used < args->named.n)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "the macro has no parameter for every argument");
  return true;
}

bool pkv_tpl_call_macro(tpl_run *r, tpl_value *out, const tpl_macro *m, const tpl_args *args) {
  if (!pkv_tpl_enter(r)) return false;
  tpl_scope *const scope = pkv_tpl_scope(r, m->scope);
  const uint32_t loops = r->loop_depth;
  r->loop_depth = 0;
  const bool ok =
      scope != NULL && bind_params(r, scope, m, args) && captured(r, scope, m->body, out);
  r->loop_depth = loops;
  r->flow = TPL_GO;
  r->depth--;
  return ok;
}

static bool new_macro(tpl_run *r, tpl_value *out, tpl_scope *scope, const tpl_node *node,
                      tpl_span name) {
  tpl_macro *const m = pkv_tpl_take(r, 1, sizeof *m);
  if (m == NULL) return false;
  *m = (tpl_macro){name, node->b, node->list, scope};
  *out = (tpl_value){.type = TPL_V_MACRO, .macro = m};
  return true;
}

static bool exec_macro(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  tpl_value macro;
  return new_macro(r, &macro, scope, node, node->text) && pkv_tpl_set(r, scope, node->text, macro);
}

static bool exec_call_block(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  static const tpl_span caller = {"caller", 6};
  tpl_value f, body, key, text;
  tpl_args args;
  if (!new_macro(r, &body, scope, node, caller) || !pkv_tpl_text(r, &key, "caller", 6, true) ||
      !pkv_tpl_eval(r, scope, node->a->a, &f) ||
      !pkv_tpl_eval_args(r, scope, node->a->list, &args) ||
      !pkv_tpl_set_entry(r, &args.named, key, body))
    return false;
  r->at = node;
  return pkv_tpl_call(r, &text, &f, &args) && pkv_tpl_put_value(r, r->out, &text);
}

/* The block's text through its filters, the innermost first. */
static bool filter_block(tpl_run *r, tpl_scope *scope, const tpl_node *filter, tpl_value *text) {
  if (filter == NULL) return true;
  tpl_args args;
  if (!pkv_tpl_enter(r)) return false;
  bool ok =
      filter_block(r, scope, filter->a, text) && pkv_tpl_eval_args(r, scope, filter->list, &args);
  if (ok) {
    const tpl_value before = *text;
    r->at = filter;
    ok = pkv_tpl_filter(r, text, filter->text, &before, &args);
  }
  r->depth--;
  return ok;
}

static bool exec_block(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  tpl_value text;
  tpl_scope *const inner = pkv_tpl_scope(r, scope);
  if (inner == NULL || !captured(r, inner, node->list, &text) ||
      !filter_block(r, scope, node->b, &text))
    return false;
  return node->a != NULL ? assign(r, scope, node->a, text) : pkv_tpl_put_value(r, r->out, &text);
}

static bool exec_scope(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  tpl_scope *const inner = node->whole ? pkv_tpl_scope(r, scope) : scope;
  if (inner == NULL) return false;
  for (const tpl_node *set = node->a; set != NULL; set = set->next) {
    tpl_value v;
    if (!pkv_tpl_eval(r, scope, set->b, &v) || !assign(r, inner, set->a, v)) return false;
  }
  return pkv_tpl_exec(r, inner, node->list);
}

/* ------------------------------------------------------------------------------------------
 * Loops and conditions
 * ------------------------------------------------------------------------------------------ */

static bool exec_if(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  for (; node != NULL; node = node->b) {
    tpl_value v;
    if (node->kind == TPL_SCOPE) return pkv_tpl_exec(r, scope, node->list);
    if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
    if (pkv_tpl_truth(&v)) return pkv_tpl_exec(r, scope, node->list);
  }
  return true;
}

/* The elements for which the loop's condition holds. */
static bool keep_some(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_list *items) {
  tpl_list kept = {NULL, 0, 0};
  for (size_t i = 0; i < items->n; i++) {
    tpl_scope *const inner = pkv_tpl_scope(r, scope);
    tpl_value yes;
    if (inner == NULL || !assign(r, inner, node->a, items->v[i]) ||
        !pkv_tpl_eval(r, inner, node->c, &yes))
      return false;
    if (pkv_tpl_truth(&yes) && !pkv_tpl_push(r, &kept, items->v[i])) return false;
  }
  *items = kept;
  return true;
}

static bool loop_over(tpl_run *r, tpl_scope *scope, const tpl_node *node, const tpl_list *items) {
  tpl_loop *const loop = pkv_tpl_take(r, 1, sizeof *loop);
  if (loop == NULL) return false;
  *loop = (tpl_loop){.items = items->v, .n = items->n};
  for (size_t i = 0; i < items->n && r->flow != TPL_BROKE; i++) {
    tpl_scope *const inner = pkv_tpl_scope(r, scope);
    loop->index = i;
    r->flow = TPL_GO;
    if (inner == NULL || !assign(r, inner, node->a, items->v[i]) ||
        !pkv_tpl_set(r, inner, (tpl_span){"loop", 4},
                     (tpl_value){.type = TPL_V_LOOP, .loop = loop}) ||
        !pkv_tpl_exec(r, inner, node->list))
      return false;
  }
  r->flow = TPL_GO;
  return true;
}

static bool exec_for(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  tpl_value over;
  tpl_list items;
  if (!pkv_tpl_eval(r, scope, node->b, &over)) return false;
  r->at = node;
  if (!pkv_tpl_items(r, &over, &items)) return false;
  if (node->c != NULL && !keep_some(r, scope, node, &items)) return false;
  if (items.n == 0) {
    tpl_scope *const inner = pkv_tpl_scope(r, scope);
    return inner != NULL && (node->d == NULL || pkv_tpl_exec(r, inner, node->d->list));
  }
  r->loop_depth++;
  const bool ok = loop_over(r, scope, node, &items);
  r->loop_depth--;
  return ok;
}

static bool exec_jump(tpl_run *r, const tpl_node *node) {
  if (r->loop_depth == 0)
    return pkv_tpl_fail(r, PKV_E_FORMAT, "a break or continue outside of a loop");
  r->flow = node->kind == TPL_BREAK ? TPL_BROKE : TPL_CONTINUED;
  return true;
}

static bool exec_one(tpl_run *r, tpl_scope *scope, const tpl_node *node) {
  tpl_value v;
  switch (node->kind) {
  case TPL_DATA:
    return pkv_tpl_put_bytes(r, r->out, node->text.p, node->text.n, true);
  case TPL_OUTPUT:
    if (!pkv_tpl_eval(r, scope, node->a, &v)) return false;
    r->at = node;
    return pkv_tpl_put_value(r, r->out, &v);
  case TPL_IF:
    return exec_if(r, scope, node);
  case TPL_FOR:
    return exec_for(r, scope, node);
  case TPL_SET:
    return pkv_tpl_eval(r, scope, node->b, &v) && assign(r, scope, node->a, v);
  case TPL_BLOCK:
    return exec_block(r, scope, node);
  case TPL_MACRO:
    return exec_macro(r, scope, node);
  case TPL_BODY:
    return exec_call_block(r, scope, node);
  case TPL_SCOPE:
    return exec_scope(r, scope, node);
  default:
    return exec_jump(r, node);
  }
}

bool pkv_tpl_exec(tpl_run *r, tpl_scope *scope, const tpl_node *list) {
  for (const tpl_node *node = list; node != NULL && r->flow == TPL_GO; node = node->next) {
    r->at = node;
    if (!pkv_tpl_enter(r)) return false;
    const bool ok = exec_one(r, scope, node);
    r->depth--;
    if (!ok) return false;
  }
  return true;
}

/* ------------------------------------------------------------------------------------------
 * A rendering
 * ------------------------------------------------------------------------------------------ */

pkv_template_value pkv_template_text(const char *text, size_t bytes, bool trusted) {
  return (pkv_template_value){
      .kind = PKV_TEMPLATE_TEXT, .trusted = trusted, .text = text, .count = bytes};
}

static bool import(tpl_run *r, tpl_value *out, const pkv_template_value *v);

static bool import_many(tpl_run *r, tpl_value *out, const pkv_template_value *v) {
  const bool list = v->kind == PKV_TEMPLATE_LIST;
  if (!(list ? pkv_tpl_new_list(r, out, TPL_V_LIST, v->count) : pkv_tpl_new_dict(r, out, v->count)))
    return false;
  for (size_t i = 0; i < v->count; i++) {
    tpl_value key, element;
    if (!import(r, &element, list ? &v->items[i] : &v->members[i].value)) return false;
    if (list) {
      out->list->v[out->list->n++] = element;
      continue;
    }
    if (!pkv_tpl_text(r, &key, v->members[i].key, v->members[i].key_bytes, false)) return false;
    out->dict->v[out->dict->n++] = (tpl_entry){key, element};
  }
  return true;
}

static bool import(tpl_run *r, tpl_value *out, const pkv_template_value *v) {
  bool ok = true;
  if (!pkv_tpl_enter(r)) return false;
  switch (v->kind) {
  case PKV_TEMPLATE_NONE:
    *out = tpl_none();
    break;
  case PKV_TEMPLATE_BOOL:
    *out = tpl_bool(v->as_int != 0);
    break;
  case PKV_TEMPLATE_INT:
    *out = tpl_int(v->as_int, v->trusted);
    break;
  case PKV_TEMPLATE_REAL:
    *out = tpl_float(v->as_real, v->trusted);
    break;
  case PKV_TEMPLATE_TEXT:
    ok = pkv_tpl_text(r, out, v->count > 0 ? v->text : "", v->count, v->trusted);
    break;
  case PKV_TEMPLATE_LIST:
  case PKV_TEMPLATE_MAP:
    ok = import_many(r, out, v);
    break;
  default:
    ok = pkv_tpl_fail(r, PKV_E_INVALID, "a variable of kind %d", (int)v->kind);
  }
  r->depth--;
  return ok;
}

static bool import_globals(tpl_run *r, const pkv_template_value *variables) {
  r->globals = pkv_tpl_scope(r, NULL);
  if (r->globals == NULL) return false;
  for (size_t i = 0; i < variables->count; i++) {
    const pkv_template_member *const m = &variables->members[i];
    tpl_value v;
    if (!import(r, &v, &m->value) ||
        !pkv_tpl_set(r, r->globals, (tpl_span){m->key, m->key_bytes}, v))
      return false;
  }
  return true;
}

static pkv_status copy_runs(pkv_template_output *out, const tpl_builder *b, pkv_error *err) {
  size_t runs = b->n > 0;
  for (size_t i = 1; b->marks != NULL && i < b->n; i++)
    runs += b->marks[i] != b->marks[i - 1];
  out->run_size = (runs + 1) * sizeof *out->runs;
  out->runs = pkv_alloc(&out->allocator, out->run_size);
  PKV_CHECK(err, out->runs != NULL, PKV_E_NOMEM, "no memory for %zu pieces of a chat", runs);
  for (size_t i = 0; i < b->n; i++) {
    const bool trusted = b->marks != NULL ? b->marks[i] != 0 : b->trusted;
    if (i == 0 || trusted != out->runs[out->run_count - 1].trusted)
      out->runs[out->run_count++] = (pkv_template_run){0, trusted};
    if (b->marks == NULL) {
      out->runs[0].bytes = b->n;
      break;
    }
    out->runs[out->run_count - 1].bytes++;
  }
  return PKV_OK;
}

static pkv_status copy_output(pkv_template_output *out, const tpl_builder *b, const tpl_run *r) {
  out->allocator = r->arena.allocator;
  out->bytes = b->n;
  out->text_size = b->n + 1;
  out->text = pkv_alloc(&out->allocator, out->text_size);
  PKV_CHECK(r->err, out->text != NULL, PKV_E_NOMEM, "no memory for a chat of %zu bytes", b->n);
  if (b->n > 0) memcpy(out->text, b->p, b->n);
  out->text[b->n] = 0;
  const pkv_status status = copy_runs(out, b, r->err);
  if (status != PKV_OK) pkv_template_output_free(out);
  return status;
}

pkv_status pkv_template_render(pkv_template_output *out, const pkv_template *t,
                               const pkv_template_value *variables, int64_t now,
                               const pkv_template_limits *limits, pkv_error *err) {
  static const pkv_template_limits none = {0, 0, 0, 0};
  PKV_CHECK(err, out != NULL && t != NULL && variables != NULL, PKV_E_INVALID,
            "out, the template or the variables are NULL");
  *out = (pkv_template_output){0};
  PKV_CHECK(err, variables->kind == PKV_TEMPLATE_MAP, PKV_E_INVALID, "the variables are no map");
  if (limits == NULL) limits = &none;
  tpl_builder text = {.limit =
                          limits->output_bytes ? limits->output_bytes : PKV_TEMPLATE_OUTPUT_BYTES};
  tpl_run r = {.t = t, .now = now, .out = &text, .err = err};
  r.steps = r.steps_limit = limits->steps ? limits->steps : PKV_TEMPLATE_STEPS;
  r.depth_limit = limits->depth ? limits->depth : PKV_TEMPLATE_DEPTH;
  pkv_tpl_arena_init(&r.arena,
                     limits->memory_bytes ? limits->memory_bytes : PKV_TEMPLATE_MEMORY_BYTES,
                     &t->allocator);
  if (import_globals(&r, variables)) {
    tpl_scope *const top = pkv_tpl_scope(&r, r.globals);
    if (top != NULL && pkv_tpl_exec(&r, top, t->body)) r.status = copy_output(out, &text, &r);
  }
  pkv_tpl_arena_deinit(&r.arena);
  return r.status;
}

void pkv_template_output_free(pkv_template_output *out) {
  const pkv_allocator a = out->allocator;
  if (out->text != NULL) pkv_free(&a, out->text, out->text_size);
  if (out->runs != NULL) pkv_free(&a, out->runs, out->run_size);
  *out = (pkv_template_output){0};
}
