/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/syntax.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define FIRST_SURROGATE 0xd800
#define LAST_SURROGATE  0xdfff
/* Ranges of one class, before they are sorted and joined. */
#define CLASS_RANGES 2048

void pkv_syntax_init(pkv_syntax *tree, const pkv_allocator *allocator) {
  memset(tree, 0, sizeof *tree);
  tree->allocator = pkv_allocator_or_default(allocator);
  tree->root = -1;
  tree->status = PKV_OK;
}

void pkv_syntax_deinit(pkv_syntax *tree) {
  const pkv_allocator *const a = &tree->allocator;
  pkv_free(a, tree->nodes, tree->node_capacity * sizeof *tree->nodes);
  pkv_free(a, tree->ranges, tree->range_capacity * sizeof *tree->ranges);
  pkv_free(a, tree->bytes, tree->byte_capacity);
  pkv_free(a, tree->rules, tree->rule_capacity * sizeof *tree->rules);
}

int32_t pkv_syntax_fail(pkv_syntax *tree, pkv_status status, const char *format, ...) {
  va_list args;
  if (tree->status != PKV_OK) return 0;
  tree->status = status;
  va_start(args, format);
  (void)vsnprintf(tree->error.text, sizeof tree->error.text, format, args);
  va_end(args);
  return 0;
}

/* Room for `more` items of `size` bytes behind *count; false: the tree has failed. */
static bool reserve(pkv_syntax *t, void **block, size_t *capacity, size_t count, size_t more,
                    size_t size, size_t most) {
  if (t->status != PKV_OK) return false;
  if (more > most || count > most - more) {
    (void)pkv_syntax_fail(t, PKV_E_LIMIT, "the grammar is too large");
    return false;
  }
  if (count + more <= *capacity) return true;
  size_t grown = *capacity < 64 ? 64 : *capacity * 2;
  if (grown < count + more) grown = count + more;
  void *const moved = pkv_realloc(&t->allocator, *block, *capacity * size, grown * size);
  if (moved == NULL) {
    (void)pkv_syntax_fail(t, PKV_E_NOMEM, "no memory for a grammar");
    return false;
  }
  *block = moved;
  *capacity = grown;
  return true;
}

static int32_t add_node(pkv_syntax *t, pkv_syntax_kind kind, int32_t a, int32_t b, int32_t c) {
  void *nodes = t->nodes;
  if (!reserve(t, &nodes, &t->node_capacity, t->node_count, 1, sizeof *t->nodes, PKV_GRAMMAR_NODES))
    return 0;
  t->nodes = nodes;
  t->nodes[t->node_count] = (pkv_syntax_node){kind, a, b, c};
  return (int32_t)t->node_count++;
}

int32_t pkv_syntax_empty(pkv_syntax *tree) {
  return add_node(tree, PKV_SYNTAX_EMPTY, 0, 0, 0);
}

int32_t pkv_syntax_none(pkv_syntax *tree) {
  return add_node(tree, PKV_SYNTAX_NONE, 0, 0, 0);
}

int32_t pkv_syntax_text(pkv_syntax *tree, const char *bytes, size_t count) {
  pkv_syntax *const t = tree;
  void *all = t->bytes;
  if (count == 0) return pkv_syntax_empty(t);
  if (!reserve(t, &all, &t->byte_capacity, t->byte_count, count, 1, PKV_GRAMMAR_BYTES)) return 0;
  t->bytes = all;
  memcpy(t->bytes + t->byte_count, bytes, count);
  t->byte_count += count;
  return add_node(t, PKV_SYNTAX_TEXT, (int32_t)(t->byte_count - count), (int32_t)count, 0);
}

int32_t pkv_syntax_string(pkv_syntax *tree, const char *text) {
  return pkv_syntax_text(tree, text, strlen(text));
}

static size_t sort_and_join(pkv_code_range *r, size_t count) {
  size_t kept = 0;
  for (size_t i = 1; i < count; i++) {
    const pkv_code_range moving = r[i];
    size_t at = i;
    for (; at > 0 && r[at - 1].low > moving.low; at--)
      r[at] = r[at - 1];
    r[at] = moving;
  }
  for (size_t i = 0; i < count; i++) {
    if (kept > 0 && r[i].low <= r[kept - 1].high + 1) {
      if (r[i].high > r[kept - 1].high) r[kept - 1].high = r[i].high;
    } else {
      r[kept++] = r[i];
    }
  }
  return kept;
}

static int32_t add_range(pkv_syntax *t, uint32_t low, uint32_t high) {
  void *ranges = t->ranges;
  if (low > high) return 0;
  if (!reserve(t, &ranges, &t->range_capacity, t->range_count, 1, sizeof *t->ranges,
               PKV_GRAMMAR_BYTES))
    return 0;
  t->ranges = ranges;
  t->ranges[t->range_count++] = (pkv_code_range){low, high};
  return 1;
}

/* A range without the surrogates in it. */
static void add_codes(pkv_syntax *t, uint32_t low, uint32_t high) {
  const uint32_t below = high < FIRST_SURROGATE ? high : FIRST_SURROGATE - 1;
  const uint32_t above = low > LAST_SURROGATE ? low : LAST_SURROGATE + 1;
  (void)add_range(t, low, below);
  (void)add_range(t, above, high);
}

int32_t pkv_syntax_class(pkv_syntax *tree, const pkv_code_range *ranges, size_t count,
                         bool negate) {
  pkv_syntax *const t = tree;
  pkv_code_range sorted[CLASS_RANGES];
  uint32_t next = 0;
  if (count > CLASS_RANGES)
    return pkv_syntax_fail(t, PKV_E_LIMIT, "a character class has more than %d ranges",
                           CLASS_RANGES);
  if (count > 0) memcpy(sorted, ranges, count * sizeof *sorted);
  count = sort_and_join(sorted, count);
  const size_t first = t->range_count;
  for (size_t i = 0; i < count; i++) {
    if (!negate)
      add_codes(t, sorted[i].low, sorted[i].high);
    else if (sorted[i].low > next)
      add_codes(t, next, sorted[i].low - 1);
    next = sorted[i].high + 1;
  }
  if (negate && next <= PKV_LAST_CODE) add_codes(t, next, PKV_LAST_CODE);
  if (t->range_count == first) return pkv_syntax_none(t);
  return add_node(t, PKV_SYNTAX_CLASS, (int32_t)first, (int32_t)(t->range_count - first), 0);
}

int32_t pkv_syntax_range(pkv_syntax *tree, uint32_t low, uint32_t high) {
  const pkv_code_range range = {low, high};
  return pkv_syntax_class(tree, &range, 1, false);
}

static pkv_syntax_kind kind_of(const pkv_syntax *t, int32_t node) {
  return t->status == PKV_OK ? t->nodes[node].kind : PKV_SYNTAX_EMPTY;
}

int32_t pkv_syntax_join(pkv_syntax *tree, int32_t a, int32_t b) {
  const pkv_syntax_kind left = kind_of(tree, a), right = kind_of(tree, b);
  if (left == PKV_SYNTAX_EMPTY || right == PKV_SYNTAX_NONE) return b;
  if (right == PKV_SYNTAX_EMPTY || left == PKV_SYNTAX_NONE) return a;
  return add_node(tree, PKV_SYNTAX_JOIN, a, b, 0);
}

int32_t pkv_syntax_either(pkv_syntax *tree, int32_t a, int32_t b) {
  if (kind_of(tree, a) == PKV_SYNTAX_NONE) return b;
  if (kind_of(tree, b) == PKV_SYNTAX_NONE) return a;
  return add_node(tree, PKV_SYNTAX_EITHER, a, b, 0);
}

int32_t pkv_syntax_repeat(pkv_syntax *tree, int32_t a, int32_t least, int32_t most) {
  if (least > PKV_GRAMMAR_REPEAT || most > PKV_GRAMMAR_REPEAT)
    return pkv_syntax_fail(tree, PKV_E_LIMIT, "a repetition of more than %d times",
                           PKV_GRAMMAR_REPEAT);
  if (most >= 0 && least > most) return pkv_syntax_none(tree);
  if (most == 0 || kind_of(tree, a) == PKV_SYNTAX_EMPTY) return pkv_syntax_empty(tree);
  if (least == 1 && most == 1) return a;
  return add_node(tree, PKV_SYNTAX_REPEAT, a, least, most);
}

int32_t pkv_syntax_optional(pkv_syntax *tree, int32_t a) {
  return pkv_syntax_repeat(tree, a, 0, 1);
}

int32_t pkv_syntax_read_count(const char *text, size_t size, size_t *at) {
  int32_t value = -1;
  for (; *at < size && text[*at] >= '0' && text[*at] <= '9'; (*at)++) {
    value = (value < 0 ? 0 : value) * 10 + (text[*at] - '0');
    if (value > PKV_GRAMMAR_REPEAT) return PKV_GRAMMAR_REPEAT + 1;
  }
  return value;
}

int32_t pkv_syntax_new_rule(pkv_syntax *tree, int32_t line) {
  pkv_syntax *const t = tree;
  void *rules = t->rules;
  if (!reserve(t, &rules, &t->rule_capacity, t->rule_count, 1, sizeof *t->rules, PKV_GRAMMAR_RULES))
    return 0;
  t->rules = rules;
  t->rules[t->rule_count] = (pkv_syntax_rule){-1, line};
  return (int32_t)t->rule_count++;
}

void pkv_syntax_define(pkv_syntax *tree, int32_t rule, int32_t node) {
  if (tree->status == PKV_OK) tree->rules[rule].node = node;
}

int32_t pkv_syntax_call(pkv_syntax *tree, int32_t rule) {
  return add_node(tree, PKV_SYNTAX_RULE, rule, 0, 0);
}

int32_t pkv_syntax_shared(pkv_syntax *tree, int32_t node) {
  const int32_t rule = pkv_syntax_new_rule(tree, 0);
  pkv_syntax_define(tree, rule, node);
  return pkv_syntax_call(tree, rule);
}
