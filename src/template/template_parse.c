/* SPDX-License-Identifier: Apache-2.0 */
/* Statements, and a template as a whole: compiled, asked, destroyed. */
#include "base/status.h"
#include "template/template_parts.h"

#define TREE_BYTES ((size_t)64 << 20) /* of the syntax tree of the longest source */

static bool read_body(tpl_reader *r, tpl_node **list, const char *const *ends, size_t opened);

static void append(tpl_node ***tail, tpl_node *node) {
  **tail = node;
  *tail = &node->next;
}

/* The token is the name of the end tag; leaves it. */
static bool leave(tpl_reader *r) {
  return pkv_tpl_next(r) && pkv_tpl_close(r);
}

static bool read_else(tpl_reader *r, tpl_node **out, const char *const *ends, size_t opened) {
  *out = pkv_tpl_node(r, TPL_SCOPE, r->token.at);
  return *out != NULL && leave(r) && read_body(r, &(*out)->list, ends, opened);
}

static tpl_node *read_if(tpl_reader *r, size_t opened) {
  static const char *const parts[] = {"elif", "else", "endif", NULL};
  static const char *const last[] = {"endif", NULL};
  tpl_node *first = NULL, **to = &first;
  for (;;) { /* at `if` or `elif` */
    tpl_node *const node = pkv_tpl_node(r, TPL_IF, r->token.at);
    if (node == NULL || !pkv_tpl_next(r)) return NULL;
    *to = node;
    to = &node->b;
    node->a = pkv_tpl_read_tuple(r, false);
    if (node->a == NULL || !pkv_tpl_close(r) || !read_body(r, &node->list, parts, opened))
      return NULL;
    if (!tpl_at_name(r, "elif")) break;
  }
  if (tpl_at_name(r, "else") && !read_else(r, to, last, opened)) return NULL;
  return leave(r) ? first : NULL;
}

static tpl_node *read_for(tpl_reader *r, size_t opened) {
  static const char *const parts[] = {"else", "endfor", NULL};
  static const char *const last[] = {"endfor", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_FOR, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  node->a = pkv_tpl_read_target(r, false);
  if (node->a == NULL) return NULL;
  if (!tpl_at_name(r, "in")) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "an 'in' should stand here");
    return NULL;
  }
  if (!pkv_tpl_next(r)) return NULL;
  node->b = pkv_tpl_read_tuple(r, true);
  if (node->b == NULL) return NULL;
  if (tpl_at_name(r, "if")) {
    if (!pkv_tpl_next(r)) return NULL;
    node->c = pkv_tpl_read_expression(r);
    if (node->c == NULL) return NULL;
  }
  if (tpl_at_name(r, "recursive")) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_UNSUPPORTED, "recursive loops are not supported");
    return NULL;
  }
  if (!pkv_tpl_close(r) || !read_body(r, &node->list, parts, opened)) return NULL;
  if (tpl_at_name(r, "else") && !read_else(r, &node->d, last, opened)) return NULL;
  return leave(r) ? node : NULL;
}

static tpl_node *read_set(tpl_reader *r, size_t opened) {
  static const char *const ends[] = {"endset", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_SET, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  node->a = pkv_tpl_read_target(r, true);
  if (node->a == NULL) return NULL;
  if (tpl_at_op(r, '=')) {
    if (!pkv_tpl_next(r)) return NULL;
    node->b = pkv_tpl_read_tuple(r, false);
    return node->b != NULL && pkv_tpl_close(r) ? node : NULL;
  }
  node->kind = TPL_BLOCK;
  if (tpl_at_op(r, '|')) {
    node->b = pkv_tpl_read_filters(r, NULL, false);
    if (node->b == NULL) return NULL;
  }
  if (!pkv_tpl_close(r) || !read_body(r, &node->list, ends, opened)) return NULL;
  return leave(r) ? node : NULL;
}

static tpl_node *read_filter_block(tpl_reader *r, size_t opened) {
  static const char *const ends[] = {"endfilter", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_BLOCK, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  node->b = pkv_tpl_read_filters(r, NULL, true);
  if (node->b == NULL || !pkv_tpl_close(r) || !read_body(r, &node->list, ends, opened)) return NULL;
  return leave(r) ? node : NULL;
}

/* (a, b=1), the token at the '('. */
static bool read_params(tpl_reader *r, tpl_node **list) {
  bool defaults = false;
  if (!pkv_tpl_expect(r, '(')) return false;
  while (!tpl_at_op(r, ')')) {
    tpl_node *const param = pkv_tpl_node(r, TPL_PARAM, r->token.at);
    if (param == NULL) return false;
    if (r->token.kind != TPL_T_NAME)
      return pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a parameter's name should stand here");
    param->text = r->token.text;
    if (!pkv_tpl_next(r)) return false;
    if (tpl_at_op(r, '=')) {
      defaults = true;
      if (!pkv_tpl_next(r)) return false;
      param->a = pkv_tpl_read_expression(r);
      if (param->a == NULL) return false;
    } else if (defaults) {
      return pkv_tpl_refuse(r, param->at, PKV_E_FORMAT,
                            "a parameter without a default behind one "
                            "that has it");
    }
    append(&list, param);
    if (!tpl_at_op(r, ')') && !pkv_tpl_expect(r, ',')) return false;
  }
  return pkv_tpl_next(r);
}

static tpl_node *read_macro(tpl_reader *r, size_t opened) {
  static const char *const ends[] = {"endmacro", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_MACRO, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  if (r->token.kind != TPL_T_NAME) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a macro's name should stand here");
    return NULL;
  }
  node->text = r->token.text;
  if (!pkv_tpl_next(r) || !read_params(r, &node->b) || !pkv_tpl_close(r) ||
      !read_body(r, &node->list, ends, opened))
    return NULL;
  return leave(r) ? node : NULL;
}

static tpl_node *read_call_block(tpl_reader *r, size_t opened) {
  static const char *const ends[] = {"endcall", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_BODY, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  if (tpl_at_op(r, '(') && !read_params(r, &node->b)) return NULL;
  node->a = pkv_tpl_read_expression(r);
  if (node->a == NULL) return NULL;
  if (node->a->kind != TPL_CALL) {
    (void)pkv_tpl_refuse(r, node->a->at, PKV_E_FORMAT, "a call should stand here");
    return NULL;
  }
  if (!pkv_tpl_close(r) || !read_body(r, &node->list, ends, opened)) return NULL;
  return leave(r) ? node : NULL;
}

/* generation marks what a model wrote, for training; with sets variables for its body. */
static tpl_node *read_scope(tpl_reader *r, size_t opened, bool with) {
  static const char *const ends_with[] = {"endwith", NULL};
  static const char *const ends_generation[] = {"endgeneration", NULL};
  tpl_node *const node = pkv_tpl_node(r, TPL_SCOPE, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  node->whole = 1;
  tpl_node **tail = &node->a;
  while (with && r->token.kind != TPL_T_CLOSE) {
    tpl_node *const set = pkv_tpl_node(r, TPL_SET, r->token.at);
    if (set == NULL) return NULL;
    set->a = pkv_tpl_read_target(r, false);
    if (set->a == NULL || !pkv_tpl_expect(r, '=')) return NULL;
    set->b = pkv_tpl_read_expression(r);
    if (set->b == NULL) return NULL;
    append(&tail, set);
    if (r->token.kind != TPL_T_CLOSE && !pkv_tpl_expect(r, ',')) return NULL;
  }
  if (!pkv_tpl_close(r) || !read_body(r, &node->list, with ? ends_with : ends_generation, opened))
    return NULL;
  return leave(r) ? node : NULL;
}

static tpl_node *read_raw(tpl_reader *r) {
  tpl_node *const node = pkv_tpl_node(r, TPL_DATA, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  return pkv_tpl_skip_raw(r, &node->text) ? node : NULL;
}

static tpl_node *read_simple(tpl_reader *r, tpl_kind kind) {
  tpl_node *const node = pkv_tpl_node(r, kind, r->token.at);
  return node != NULL && leave(r) ? node : NULL;
}

static tpl_node *read_statement(tpl_reader *r) {
  const size_t at = r->token.at;
  if (r->token.kind != TPL_T_NAME) {
    (void)pkv_tpl_refuse(r, at, PKV_E_FORMAT, "a statement's name should stand here");
    return NULL;
  }
  if (tpl_at_name(r, "if")) return read_if(r, at);
  if (tpl_at_name(r, "for")) return read_for(r, at);
  if (tpl_at_name(r, "set")) return read_set(r, at);
  if (tpl_at_name(r, "macro")) return read_macro(r, at);
  if (tpl_at_name(r, "call")) return read_call_block(r, at);
  if (tpl_at_name(r, "filter")) return read_filter_block(r, at);
  if (tpl_at_name(r, "generation")) return read_scope(r, at, false);
  if (tpl_at_name(r, "with")) return read_scope(r, at, true);
  if (tpl_at_name(r, "raw")) return read_raw(r);
  if (tpl_at_name(r, "break")) return read_simple(r, TPL_BREAK);
  if (tpl_at_name(r, "continue")) return read_simple(r, TPL_CONTINUE);
  const int shown = r->token.text.n > 32 ? 32 : (int)r->token.text.n;
  (void)pkv_tpl_refuse(r, at, PKV_E_UNSUPPORTED,
                       "the statement '%.*s' is not known or does not "
                       "belong here",
                       shown, r->token.text.p);
  return NULL;
}

static tpl_node *read_output(tpl_reader *r) {
  tpl_node *const node = pkv_tpl_node(r, TPL_OUTPUT, r->token.at);
  if (node == NULL) return NULL;
  node->a = pkv_tpl_read_tuple(r, false);
  return node->a != NULL && pkv_tpl_close(r) ? node : NULL;
}

static bool is_one_of(tpl_span name, const char *const *words) {
  for (; words != NULL && *words != NULL; words++)
    if (tpl_is(name, *words)) return true;
  return false;
}

/* What stands at the opening of a tag; NULL without a refusal: one of `ends`, or a comment. */
static tpl_node *read_tag(tpl_reader *r, const char *const *ends, bool *end) {
  *end = false;
  if (r->token.kind == TPL_T_CLOSE && r->token.at == r->token.end) return NULL; /* a comment */
  if (r->variable) return read_output(r);
  *end = r->token.kind == TPL_T_NAME && is_one_of(r->token.text, ends);
  return *end ? NULL : read_statement(r);
}

static bool read_tags(tpl_reader *r, tpl_node **list, const char *const *ends, size_t opened) {
  for (;;) {
    tpl_span data;
    const bool tag = pkv_tpl_read_data(r, &data);
    if (r->status != PKV_OK) return false;
    if (data.n > 0) {
      tpl_node *const node = pkv_tpl_node(r, TPL_DATA, (size_t)(data.p - r->source.p));
      if (node == NULL) return false;
      node->text = data;
      append(&list, node);
    }
    if (!tag && ends == NULL) return true;
    if (!tag)
      return pkv_tpl_refuse(r, opened, PKV_E_FORMAT, "a statement without its end ('%s')", ends[0]);
    bool end;
    tpl_node *const node = read_tag(r, ends, &end);
    if (r->status != PKV_OK) return false;
    if (end) return true;
    if (node != NULL) append(&list, node);
  }
}

/* To the tag with one of the names `ends` (its name is then the token), or to the source's end. */
static bool read_body(tpl_reader *r, tpl_node **list, const char *const *ends, size_t opened) {
  if (++r->depth > PKV_TEMPLATE_NESTING)
    return pkv_tpl_refuse(r, opened, PKV_E_LIMIT,
                          "more than %u statements and brackets within "
                          "each other (limit nesting)",
                          PKV_TEMPLATE_NESTING);
  const bool ok = read_tags(r, list, ends, opened);
  r->depth--;
  return ok;
}

/* ------------------------------------------------------------------------------------------
 * A template
 * ------------------------------------------------------------------------------------------ */

/* Line ends become \n, and one at the end is left out. */
static bool copy_source(pkv_template *t, const char *source, size_t bytes) {
  char *const copy = pkv_tpl_arena_take(&t->arena, bytes, 1);
  size_t n = 0;
  if (copy == NULL) return false;
  for (size_t i = 0; i < bytes; i++) {
    if (source[i] == '\r' && i + 1 < bytes && source[i + 1] == '\n') continue;
    copy[n++] = source[i] == '\r' ? '\n' : source[i];
  }
  if (n > 0 && copy[n - 1] == '\n') n--;
  t->source = (tpl_span){copy, n};
  return true;
}

pkv_status pkv_template_compile(pkv_template **out, const char *source, size_t bytes,
                                const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, source != NULL || bytes == 0, PKV_E_INVALID, "source is NULL");
  PKV_CHECK(err, bytes <= PKV_TEMPLATE_SOURCE_BYTES, PKV_E_LIMIT,
            "the chat template has %zu bytes, at most %u are allowed (limit source)", bytes,
            PKV_TEMPLATE_SOURCE_BYTES);
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_template *const t = pkv_alloc_zeroed(&a, 1, sizeof *t);
  PKV_CHECK(err, t != NULL, PKV_E_NOMEM, "no memory for a chat template");
  t->allocator = a;
  pkv_tpl_arena_init(&t->arena, TREE_BYTES, &a);
  pkv_status status = PKV_OK;
  if (!copy_source(t, source, bytes))
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for a chat template of %zu bytes", bytes);
  if (status == PKV_OK) {
    tpl_reader r = {.t = t, .source = t->source, .line_starts = true, .err = err};
    (void)read_body(&r, &t->body, NULL, 0);
    status = r.status;
  }
  if (status != PKV_OK) {
    pkv_template_destroy(t);
    return status;
  }
  *out = t;
  return PKV_OK;
}

void pkv_template_destroy(pkv_template *t) {
  if (t == NULL) return;
  const pkv_allocator a = t->allocator;
  pkv_tpl_arena_deinit(&t->arena);
  pkv_free(&a, t, sizeof *t);
}

/* A word of the source, wherever it stands: it may be a text, which does no harm to who asks. */
bool pkv_template_names(const pkv_template *t, const char *name) {
  const size_t n = strlen(name);
  const char *p = t->source.p;
  size_t left = t->source.n;
  while (n > 0 && left >= n) {
    const char *const hit = memmem(p, left, name, n);
    if (hit == NULL) return false;
    const char before = hit > t->source.p ? hit[-1] : ' ';
    const char after = hit + n < t->source.p + t->source.n ? hit[n] : ' ';
    const bool word_before = before == '_' || (before >= '0' && before <= '9') ||
                             ((before | 32) >= 'a' && (before | 32) <= 'z');
    const bool word_after = after == '_' || (after >= '0' && after <= '9') ||
                            ((after | 32) >= 'a' && (after | 32) <= 'z');
    if (!word_before && !word_after) return true;
    left -= (size_t)(hit - p) + 1;
    p = hit + 1;
  }
  return false;
}
