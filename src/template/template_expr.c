/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions, from the weakest operator to the strongest. */
#include "template/template_parts.h"

static bool deeper(tpl_reader *r) {
  if (++r->depth <= PKV_TEMPLATE_NESTING) return true;
  return pkv_tpl_refuse(r, r->token.at, PKV_E_LIMIT,
                        "more than %u statements and brackets within "
                        "each other (limit nesting)",
                        PKV_TEMPLATE_NESTING);
}

static tpl_node *unexpected(tpl_reader *r) {
  (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "an expression should stand here");
  return NULL;
}

static tpl_node *operation(tpl_reader *r, tpl_kind kind, size_t at, int op, tpl_node *a,
                           tpl_node *b) {
  if (a == NULL || b == NULL) return NULL;
  tpl_node *const node = pkv_tpl_node(r, kind, at);
  if (node == NULL) return NULL;
  node->op = op;
  node->a = a;
  node->b = b;
  return node;
}

/* Appends to a chain whose last link is *tail. */
static void append(tpl_node ***tail, tpl_node *node) {
  **tail = node;
  *tail = &node->next;
}

/* ------------------------------------------------------------------------------------------
 * Primaries
 * ------------------------------------------------------------------------------------------ */

static tpl_node *read_texts(tpl_reader *r) {
  tpl_node *const node = pkv_tpl_node(r, TPL_CONST_TEXT, r->token.at);
  if (node == NULL) return NULL;
  node->text = r->token.text;
  if (!pkv_tpl_next(r)) return NULL;
  while (r->token.kind == TPL_T_TEXT) { /* neighbours are one */
    const tpl_span more = r->token.text;
    char *const joined = pkv_tpl_arena_take(&r->t->arena, node->text.n + more.n, 1);
    if (joined == NULL) {
      (void)pkv_tpl_refuse(r, r->token.at, PKV_E_NOMEM, "no memory to read it");
      return NULL;
    }
    memcpy(joined, node->text.p, node->text.n);
    memcpy(joined + node->text.n, more.p, more.n);
    node->text = (tpl_span){joined, node->text.n + more.n};
    if (!pkv_tpl_next(r)) return NULL;
  }
  return node;
}

static tpl_node *read_name(tpl_reader *r) {
  const tpl_span name = r->token.text;
  tpl_kind kind = TPL_NAME;
  if (tpl_is(name, "none") || tpl_is(name, "None")) kind = TPL_CONST_NONE;
  const bool yes = tpl_is(name, "true") || tpl_is(name, "True");
  if (yes || tpl_is(name, "false") || tpl_is(name, "False")) kind = TPL_CONST_BOOL;
  tpl_node *const node = pkv_tpl_node(r, kind, r->token.at);
  if (node == NULL) return NULL;
  node->text = name;
  node->whole = yes;
  return pkv_tpl_next(r) ? node : NULL;
}

static tpl_node *read_number_node(tpl_reader *r) {
  const bool whole = r->token.kind == TPL_T_INT;
  tpl_node *const node = pkv_tpl_node(r, whole ? TPL_CONST_INT : TPL_CONST_FLOAT, r->token.at);
  if (node == NULL) return NULL;
  node->whole = r->token.whole;
  node->real = r->token.real;
  return pkv_tpl_next(r) ? node : NULL;
}

/* Expressions up to the closing bracket, which is taken; a comma may stand at the end. */
static bool read_elements(tpl_reader *r, tpl_node *into, int close, bool *comma) {
  tpl_node **tail = &into->list;
  *comma = false;
  while (!tpl_at_op(r, close)) {
    tpl_node *const element = pkv_tpl_read_expression(r);
    if (element == NULL) return false;
    append(&tail, element);
    if (tpl_at_op(r, close)) break;
    if (!pkv_tpl_expect(r, ',')) return false;
    *comma = true;
  }
  return pkv_tpl_next(r);
}

static tpl_node *read_brackets(tpl_reader *r) {
  const bool round = tpl_at_op(r, '(');
  tpl_node *const node = pkv_tpl_node(r, round ? TPL_TUPLE : TPL_LIST, r->token.at);
  bool comma;
  if (node == NULL || !pkv_tpl_next(r) || !read_elements(r, node, round ? ')' : ']', &comma))
    return NULL;
  return round && node->list != NULL && !comma ? node->list : node;
}

static tpl_node *read_dict(tpl_reader *r) {
  tpl_node *const node = pkv_tpl_node(r, TPL_DICT, r->token.at);
  if (node == NULL || !pkv_tpl_next(r)) return NULL;
  tpl_node **tail = &node->list;
  while (!tpl_at_op(r, '}')) {
    const size_t at = r->token.at;
    tpl_node *const key = pkv_tpl_read_expression(r);
    if (key == NULL || !pkv_tpl_expect(r, ':')) return NULL;
    tpl_node *const pair = operation(r, TPL_PAIR, at, 0, key, pkv_tpl_read_expression(r));
    if (pair == NULL) return NULL;
    append(&tail, pair);
    if (!tpl_at_op(r, '}') && !pkv_tpl_expect(r, ',')) return NULL;
  }
  return pkv_tpl_next(r) ? node : NULL;
}

tpl_node *pkv_tpl_read_primary(tpl_reader *r) {
  tpl_node *node;
  if (!deeper(r)) return NULL;
  switch (r->token.kind) {
  case TPL_T_NAME:
    node = read_name(r);
    break;
  case TPL_T_TEXT:
    node = read_texts(r);
    break;
  case TPL_T_INT:
  case TPL_T_FLOAT:
    node = read_number_node(r);
    break;
  default:
    if (tpl_at_op(r, '(') || tpl_at_op(r, '['))
      node = read_brackets(r);
    else if (tpl_at_op(r, '{'))
      node = read_dict(r);
    else
      node = unexpected(r);
  }
  r->depth--;
  return node;
}

/* ------------------------------------------------------------------------------------------
 * Behind a primary
 * ------------------------------------------------------------------------------------------ */

static tpl_node *read_argument(tpl_reader *r) {
  const size_t at = r->token.at;
  tpl_token behind;
  if (!pkv_tpl_peek(r, &behind)) return NULL;
  if (tpl_at_op(r, '*') || tpl_at_op(r, TPL_POW)) {
    tpl_node *const spread = pkv_tpl_node(r, TPL_SPREAD, at);
    if (spread == NULL) return NULL;
    spread->whole = tpl_at_op(r, '*') ? 1 : 2;
    if (!pkv_tpl_next(r)) return NULL;
    spread->a = pkv_tpl_read_expression(r);
    return spread->a != NULL ? spread : NULL;
  }
  if (r->token.kind != TPL_T_NAME || behind.kind != TPL_T_OP || behind.op != '=')
    return pkv_tpl_read_expression(r);
  tpl_node *const keyword = pkv_tpl_node(r, TPL_KEYWORD, at);
  if (keyword == NULL) return NULL;
  keyword->text = r->token.text;
  if (!pkv_tpl_next(r) || !pkv_tpl_next(r)) return NULL;
  keyword->a = pkv_tpl_read_expression(r);
  return keyword->a != NULL ? keyword : NULL;
}

/* (arguments) to into->list; the token is the '('. */
static bool read_arguments(tpl_reader *r, tpl_node *into) {
  tpl_node **tail = &into->list;
  bool named = false;
  if (!pkv_tpl_next(r)) return false;
  while (!tpl_at_op(r, ')')) {
    tpl_node *const argument = read_argument(r);
    if (argument == NULL) return false;
    const bool plain = argument->kind != TPL_KEYWORD && argument->kind != TPL_SPREAD;
    if (plain && named)
      return pkv_tpl_refuse(r, argument->at, PKV_E_FORMAT, "an argument behind a named one");
    named = named || !plain;
    append(&tail, argument);
    if (!tpl_at_op(r, ')') && !pkv_tpl_expect(r, ',')) return false;
  }
  return pkv_tpl_next(r);
}

static tpl_node *read_slice(tpl_reader *r, tpl_node *object, size_t at) {
  tpl_node *bounds[3] = {NULL, NULL, NULL};
  bool slice = false;
  for (int i = 0; i < 3; i++) {
    if (!tpl_at_op(r, ':') && !tpl_at_op(r, ']')) {
      bounds[i] = pkv_tpl_read_tuple(r, false);
      if (bounds[i] == NULL) return NULL;
    }
    if (i == 2 || !tpl_at_op(r, ':')) break;
    slice = true;
    if (!pkv_tpl_next(r)) return NULL;
  }
  if (!slice && bounds[0] == NULL) return unexpected(r);
  if (!pkv_tpl_expect(r, ']')) return NULL;
  if (!slice) return operation(r, TPL_ITEM, at, 0, object, bounds[0]);
  tpl_node *const node = pkv_tpl_node(r, TPL_SLICE, at);
  if (node == NULL) return NULL;
  node->a = object;
  node->b = bounds[0];
  node->c = bounds[1];
  node->d = bounds[2];
  return node;
}

static tpl_node *read_member(tpl_reader *r, tpl_node *object) {
  const size_t at = r->token.at;
  if (!pkv_tpl_next(r)) return NULL;
  if (r->token.kind == TPL_T_INT) return operation(r, TPL_ITEM, at, 0, object, read_number_node(r));
  if (r->token.kind != TPL_T_NAME) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a name should stand behind the dot");
    return NULL;
  }
  tpl_node *const node = pkv_tpl_node(r, TPL_ATTR, at);
  if (node == NULL) return NULL;
  node->a = object;
  node->text = r->token.text;
  return pkv_tpl_next(r) ? node : NULL;
}

static tpl_node *read_call(tpl_reader *r, tpl_node *callee) {
  tpl_node *const node = pkv_tpl_node(r, TPL_CALL, r->token.at);
  if (node == NULL) return NULL;
  node->a = callee;
  return read_arguments(r, node) ? node : NULL;
}

tpl_node *pkv_tpl_read_postfix(tpl_reader *r, tpl_node *node) {
  while (node != NULL) {
    if (tpl_at_op(r, '.')) {
      node = read_member(r, node);
    } else if (tpl_at_op(r, '[')) {
      const size_t at = r->token.at;
      node = pkv_tpl_next(r) ? read_slice(r, node, at) : NULL;
    } else if (tpl_at_op(r, '(')) {
      node = read_call(r, node);
    } else {
      break;
    }
  }
  return node;
}

tpl_node *pkv_tpl_read_filters(tpl_reader *r, tpl_node *operand, bool first_named) {
  while (first_named || tpl_at_op(r, '|')) {
    if (!first_named && !pkv_tpl_next(r)) return NULL;
    first_named = false;
    if (r->token.kind != TPL_T_NAME) {
      (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a filter's name should stand here");
      return NULL;
    }
    tpl_node *const node = pkv_tpl_node(r, TPL_FILTER, r->token.at);
    if (node == NULL) return NULL;
    node->text = r->token.text;
    node->a = operand;
    if (!pkv_tpl_next(r)) return NULL;
    if (tpl_at_op(r, '(') && !read_arguments(r, node)) return NULL;
    operand = node;
  }
  return operand;
}

/* A test takes its one argument without brackets, too. */
static bool starts_argument(const tpl_reader *r) {
  if (r->token.kind == TPL_T_NAME)
    return !tpl_at_name(r, "else") && !tpl_at_name(r, "or") && !tpl_at_name(r, "and") &&
           !tpl_at_name(r, "is");
  return r->token.kind == TPL_T_TEXT || r->token.kind == TPL_T_INT ||
         r->token.kind == TPL_T_FLOAT || tpl_at_op(r, '[') || tpl_at_op(r, '{');
}

static tpl_node *read_test(tpl_reader *r, tpl_node *operand) {
  bool negated = false;
  if (!pkv_tpl_next(r)) return NULL;
  if (tpl_at_name(r, "not")) {
    negated = true;
    if (!pkv_tpl_next(r)) return NULL;
  }
  if (r->token.kind != TPL_T_NAME) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a test's name should stand here");
    return NULL;
  }
  tpl_node *const node = pkv_tpl_node(r, TPL_TEST, r->token.at);
  if (node == NULL) return NULL;
  node->text = r->token.text;
  node->a = operand;
  if (!pkv_tpl_next(r)) return NULL;
  if (tpl_at_op(r, '(')) {
    if (!read_arguments(r, node)) return NULL;
  } else if (starts_argument(r)) {
    node->list = pkv_tpl_read_postfix(r, pkv_tpl_read_primary(r));
    if (node->list == NULL) return NULL;
  }
  if (!negated) return node;
  tpl_node *const not = pkv_tpl_node(r, TPL_NOT, node->at);
  if (not != NULL) not ->a = node;
  return not ;
}

static tpl_node *read_unary(tpl_reader *r, bool filters) {
  tpl_node *node;
  if (tpl_at_op(r, '-') || tpl_at_op(r, '+')) {
    if (!deeper(r)) return NULL;
    node = pkv_tpl_node(r, tpl_at_op(r, '-') ? TPL_NEGATE : TPL_PLUS, r->token.at);
    if (node == NULL || !pkv_tpl_next(r)) return NULL;
    node->a = read_unary(r, false);
    if (node->a == NULL) return NULL;
    r->depth--;
  } else {
    node = pkv_tpl_read_primary(r);
  }
  node = pkv_tpl_read_postfix(r, node);
  while (filters && node != NULL) {
    if (tpl_at_op(r, '|'))
      node = pkv_tpl_read_filters(r, node, false);
    else if (tpl_at_name(r, "is"))
      node = read_test(r, node);
    else if (tpl_at_op(r, '('))
      node = read_call(r, node);
    else
      break;
  }
  return node;
}

/* ------------------------------------------------------------------------------------------
 * Operators
 * ------------------------------------------------------------------------------------------ */

/* Level 0: + -; 1: ~; 2: * / // %; 3: **. */
static bool is_operator(const tpl_reader *r, int level) {
  if (r->token.kind != TPL_T_OP) return false;
  switch (r->token.op) {
  case '+':
  case '-':
    return level == 0;
  case '~':
    return level == 1;
  case '*':
  case '/':
  case '%':
  case TPL_FLOOR:
    return level == 2;
  case TPL_POW:
    return level == 3;
  default:
    return false;
  }
}

static tpl_node *read_binary(tpl_reader *r, int level) {
  if (level == 4) return read_unary(r, true);
  tpl_node *left = read_binary(r, level + 1);
  while (left != NULL && is_operator(r, level)) {
    const int op = r->token.op;
    const size_t at = r->token.at;
    if (!pkv_tpl_next(r)) return NULL;
    left = operation(r, TPL_BINARY, at, op, left, read_binary(r, level + 1));
  }
  return left;
}

/* The comparison that the token is, or 0; `not in` takes a second token. */
static int comparison(tpl_reader *r) {
  tpl_token behind;
  if (r->token.kind == TPL_T_OP) {
    const int op = r->token.op;
    return op == TPL_EQ || op == TPL_NE || op == TPL_LE || op == TPL_GE || op == '<' || op == '>'
               ? op
               : 0;
  }
  if (tpl_at_name(r, "in")) return TPL_IN;
  if (!tpl_at_name(r, "not") || !pkv_tpl_peek(r, &behind) || behind.kind != TPL_T_NAME ||
      !tpl_is(behind.text, "in"))
    return 0;
  return pkv_tpl_next(r) ? TPL_NOT_IN : 0;
}

static tpl_node *read_compare(tpl_reader *r) {
  tpl_node *const left = read_binary(r, 0);
  tpl_node *node = left;
  tpl_node **tail = NULL;
  for (;;) {
    if (node == NULL) return NULL;
    const size_t at = r->token.at;
    const int op = comparison(r);
    if (op == 0) return r->status == PKV_OK ? node : NULL;
    if (node == left) {
      node = pkv_tpl_node(r, TPL_COMPARE, at);
      if (node == NULL) return NULL;
      node->a = left;
      tail = &node->list;
    }
    tpl_node *const operand = pkv_tpl_node(r, TPL_OPERAND, at);
    if (operand == NULL || !pkv_tpl_next(r)) return NULL;
    operand->op = op;
    operand->a = read_binary(r, 0);
    if (operand->a == NULL) return NULL;
    append(&tail, operand);
  }
}

static tpl_node *read_not(tpl_reader *r) {
  if (!tpl_at_name(r, "not")) return read_compare(r);
  tpl_node *const node = pkv_tpl_node(r, TPL_NOT, r->token.at);
  if (node == NULL || !deeper(r) || !pkv_tpl_next(r)) return NULL;
  node->a = read_not(r);
  r->depth--;
  return node->a != NULL ? node : NULL;
}

static tpl_node *read_and(tpl_reader *r) {
  tpl_node *left = read_not(r);
  while (left != NULL && tpl_at_name(r, "and")) {
    const size_t at = r->token.at;
    if (!pkv_tpl_next(r)) return NULL;
    left = operation(r, TPL_AND, at, 0, left, read_not(r));
  }
  return left;
}

static tpl_node *read_or(tpl_reader *r) {
  tpl_node *left = read_and(r);
  while (left != NULL && tpl_at_name(r, "or")) {
    const size_t at = r->token.at;
    if (!pkv_tpl_next(r)) return NULL;
    left = operation(r, TPL_OR, at, 0, left, read_and(r));
  }
  return left;
}

static tpl_node *read_condition(tpl_reader *r, bool no_if) {
  tpl_node *node = read_or(r);
  while (node != NULL && !no_if && tpl_at_name(r, "if")) {
    const size_t at = r->token.at;
    if (!pkv_tpl_next(r)) return NULL;
    tpl_node *const cond = operation(r, TPL_COND, at, 0, read_or(r), node);
    if (cond == NULL) return NULL;
    if (tpl_at_name(r, "else")) {
      if (!pkv_tpl_next(r)) return NULL;
      cond->c = pkv_tpl_read_expression(r);
      if (cond->c == NULL) return NULL;
    }
    node = cond;
  }
  return node;
}

tpl_node *pkv_tpl_read_expression(tpl_reader *r) {
  if (!deeper(r)) return NULL;
  tpl_node *const node = read_condition(r, false);
  r->depth--;
  return node;
}

tpl_node *pkv_tpl_read_tuple(tpl_reader *r, bool no_if) {
  const size_t at = r->token.at;
  if (!deeper(r)) return NULL;
  tpl_node *const first = read_condition(r, no_if);
  r->depth--;
  if (first == NULL || !tpl_at_op(r, ',')) return first;
  tpl_node *const tuple = pkv_tpl_node(r, TPL_TUPLE, at);
  if (tuple == NULL) return NULL;
  tpl_node **tail = &tuple->list;
  append(&tail, first);
  while (tpl_at_op(r, ',')) {
    if (!pkv_tpl_next(r)) return NULL;
    if (r->token.kind == TPL_T_CLOSE || tpl_at_op(r, ']') || tpl_at_op(r, ')') || tpl_at_op(r, '='))
      break;
    tpl_node *const element = read_condition(r, no_if);
    if (element == NULL) return NULL;
    append(&tail, element);
  }
  return tuple;
}

static tpl_node *read_target_name(tpl_reader *r, bool with_namespace) {
  if (r->token.kind != TPL_T_NAME) {
    (void)pkv_tpl_refuse(r, r->token.at, PKV_E_FORMAT, "a variable's name should stand here");
    return NULL;
  }
  tpl_node *const name = read_name(r);
  if (name == NULL) return NULL;
  if (name->kind != TPL_NAME) {
    (void)pkv_tpl_refuse(r, name->at, PKV_E_FORMAT, "a constant cannot be set");
    return NULL;
  }
  return with_namespace && tpl_at_op(r, '.') ? read_member(r, name) : name;
}

/* a or a, b or (a, b) or space.a */
tpl_node *pkv_tpl_read_target(tpl_reader *r, bool with_namespace) {
  const size_t at = r->token.at;
  const bool round = tpl_at_op(r, '(');
  if (round && !pkv_tpl_next(r)) return NULL;
  tpl_node *const first = read_target_name(r, with_namespace);
  if (first == NULL) return NULL;
  tpl_node *target = first;
  if (tpl_at_op(r, ',')) {
    target = pkv_tpl_node(r, TPL_TUPLE, at);
    if (target == NULL) return NULL;
    tpl_node **tail = &target->list;
    append(&tail, first);
    while (tpl_at_op(r, ',')) {
      if (!pkv_tpl_next(r)) return NULL;
      if (r->token.kind != TPL_T_NAME || tpl_at_name(r, "in")) break;
      tpl_node *const more = read_target_name(r, with_namespace);
      if (more == NULL) return NULL;
      append(&tail, more);
    }
  }
  return round && !pkv_tpl_expect(r, ')') ? NULL : target;
}
