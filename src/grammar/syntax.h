/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A grammar as its readers build it: rules over nodes, bounded. Nodes and rules are numbers. The
 * first failure stays with the tree and every later call gives a number that is good for nothing,
 * so that readers check `status` once, at their end.
 */
#ifndef PKV_GRAMMAR_SYNTAX_H
#define PKV_GRAMMAR_SYNTAX_H

#include <stdbool.h>

#include "base/alloc.h"

#define PKV_GRAMMAR_NODES  (1 << 18)
#define PKV_GRAMMAR_RULES  (1 << 16)
#define PKV_GRAMMAR_BYTES  (1 << 20) /* of all texts and ranges together */
#define PKV_GRAMMAR_REPEAT (1 << 16)
#define PKV_LAST_CODE      0x10ffff

typedef enum pkv_syntax_kind {
  PKV_SYNTAX_EMPTY, /* the empty text */
  PKV_SYNTAX_NONE,  /* no text at all */
  PKV_SYNTAX_TEXT,  /* a: offset in `bytes`, b: count */
  PKV_SYNTAX_CLASS, /* one character: a: first range, b: count; sorted, apart, without surrogates */
  PKV_SYNTAX_JOIN,  /* a, then b */
  PKV_SYNTAX_EITHER, /* a or b */
  PKV_SYNTAX_REPEAT, /* a, from b to c times; c = -1: without end */
  PKV_SYNTAX_RULE    /* rule a */
} pkv_syntax_kind;

typedef struct pkv_syntax_node {
  pkv_syntax_kind kind;
  int32_t a, b, c;
} pkv_syntax_node;

/* Code points, both included. */
typedef struct pkv_code_range {
  uint32_t low, high;
} pkv_code_range;

typedef struct pkv_syntax_rule {
  int32_t node; /* -1: not defined */
  int32_t line; /* of the text where it was first seen; 0 = none */
} pkv_syntax_rule;

typedef struct pkv_syntax {
  pkv_allocator allocator;
  pkv_syntax_node *nodes;
  pkv_code_range *ranges;
  char *bytes;
  pkv_syntax_rule *rules;
  size_t node_count, node_capacity, range_count, range_capacity, byte_count, byte_capacity;
  size_t rule_count, rule_capacity;
  int32_t root; /* a rule */
  pkv_status status;
  pkv_error error;
} pkv_syntax;

void pkv_syntax_init(pkv_syntax *tree, const pkv_allocator *allocator);
void pkv_syntax_deinit(pkv_syntax *tree);

int32_t pkv_syntax_empty(pkv_syntax *tree);
int32_t pkv_syntax_none(pkv_syntax *tree);
int32_t pkv_syntax_text(pkv_syntax *tree, const char *bytes, size_t count);
int32_t pkv_syntax_string(pkv_syntax *tree, const char *text); /* terminated by a zero byte */
/* Ranges in any order, also overlapping; surrogates are taken out. `negate`: all others. */
int32_t pkv_syntax_class(pkv_syntax *tree, const pkv_code_range *ranges, size_t count, bool negate);
int32_t pkv_syntax_range(pkv_syntax *tree, uint32_t low, uint32_t high);
/* Chains lean to the left: join(join(a, b), c). */
int32_t pkv_syntax_join(pkv_syntax *tree, int32_t a, int32_t b);
int32_t pkv_syntax_either(pkv_syntax *tree, int32_t a, int32_t b);
int32_t pkv_syntax_repeat(pkv_syntax *tree, int32_t a, int32_t least, int32_t most);
int32_t pkv_syntax_optional(pkv_syntax *tree, int32_t a);

/* What readers say of a count beyond PKV_GRAMMAR_REPEAT. */
#define PKV_SYNTAX_MANY_TIMES "a repetition of more than 65536 times"
/* The number that stands at text[*at], which moves behind it: -1 = none does;
   PKV_GRAMMAR_REPEAT + 1 for any that is larger. */
int32_t pkv_syntax_read_count(const char *text, size_t size, size_t *at);

/* A rule to be defined later, and its node. */
int32_t pkv_syntax_new_rule(pkv_syntax *tree, int32_t line);
void pkv_syntax_define(pkv_syntax *tree, int32_t rule, int32_t node);
int32_t pkv_syntax_call(pkv_syntax *tree, int32_t rule);
/* A rule of that node, called: for what is used in several places. */
int32_t pkv_syntax_shared(pkv_syntax *tree, int32_t node);

/* The failure that stays, unless there is one. Returns a number that is good for nothing. */
int32_t pkv_syntax_fail(pkv_syntax *tree, pkv_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
