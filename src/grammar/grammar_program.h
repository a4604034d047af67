/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A grammar as it is carried out: nodes over bytes. A rule is a part of the program that ends in
 * RET; a CALL puts its `next` on the stack. What cannot be completed is told by `need`.
 */
#ifndef PKV_GRAMMAR_PROGRAM_H
#define PKV_GRAMMAR_PROGRAM_H

#include "grammar/syntax.h"

#define PKV_PROGRAM_NODES (1 << 18)
#define PKV_PROGRAM_SETS  4096
/* Calls that are open at once, at most. What would need more is no way to go on. */
#define PKV_PROGRAM_STACK 1024
#define PKV_NEED_NEVER    UINT16_MAX

typedef enum pkv_program_kind {
  PKV_NODE_BYTE,  /* arg, then next */
  PKV_NODE_SET,   /* a byte of sets[arg], then next */
  PKV_NODE_SPLIT, /* next or arg */
  PKV_NODE_CALL,  /* the rule that starts at arg, then next */
  PKV_NODE_RET,
  PKV_NODE_DEAD
} pkv_program_kind;

typedef struct pkv_program_node {
  uint8_t kind;
  uint8_t spare;
  uint16_t need; /* calls that must be open at once to come to this rule's RET; NEVER: none do */
  int32_t arg, next;
} pkv_program_node;

typedef struct pkv_byte_set {
  uint64_t bits[4];
} pkv_byte_set;

typedef struct pkv_program {
  pkv_allocator allocator;
  pkv_program_node *nodes;
  pkv_byte_set *sets;
  size_t node_count, node_capacity, set_count, set_capacity;
  int32_t start;         /* of the root */
  int32_t class_count;   /* bytes that no node tells apart are one class */
  uint8_t class_of[256]; /* of each byte */
  uint8_t example[256];  /* a byte of each class */
  int64_t longest;       /* bytes of the longest text; -1 = there is none */
} pkv_program;

/*
 * The tree's program, or what is wrong with it: left recursion, a root that no text satisfies, too
 * large. The tree is not changed; a failed one gives its failure.
 */
pkv_status pkv_program_create(pkv_program *out, const pkv_syntax *tree,
                              const pkv_allocator *allocator, pkv_error *err);
void pkv_program_deinit(pkv_program *program);

static inline bool pkv_set_has(const pkv_byte_set *set, int byte) {
  return (set->bits[byte >> 6] >> (byte & 63) & 1) != 0;
}

#endif
