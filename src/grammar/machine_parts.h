/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the machine share. */
#ifndef PKV_GRAMMAR_MACHINE_PARTS_H
#define PKV_GRAMMAR_MACHINE_PARTS_H

#include "grammar/machine.h"

/* Held at once; 16-bit numbers, of which the last means unknown. */
#define PKV_MACHINE_STATES 8192
#define PKV_MACHINE_WAYS   (1 << 17) /* of all states together */
#define PKV_MACHINE_STACKS (1 << 16)
#define PKV_MACHINE_FRAMES (1 << 17)
#define PKV_MACHINE_FOUND  4096 /* ways of one state */
#define PKV_MACHINE_WORK   (1 << 15)
#define PKV_MACHINE_STEPS  (1 << 22) /* without a byte, of one mask or one token */
#define PKV_MACHINE_MASKS  32
#define PKV_STATE_SLOTS    16384
#define PKV_STACK_SLOTS    (1 << 17)
#define PKV_UNION_SLOTS    4096

/* A node, and the stacks it is reached with. On a stack: where it goes on, and what lies below. */
typedef struct pkv_way {
  int32_t node, stack;
} pkv_way;

typedef struct pkv_state {
  int32_t first, count; /* in `ways`, by node */
  int32_t mask;         /* -1 = not made */
  bool may_end;
} pkv_state;

/* All stacks that one node can have: by their upper frames, each with all that can lie below it.
   Number 0 is the empty stack alone. What lies below has a smaller number. */
typedef struct pkv_stack {
  int32_t first, count; /* in `frames`, by node */
  uint16_t depth;       /* of the deepest */
  bool bottom;          /* one of them is empty */
} pkv_stack;

typedef struct pkv_union {
  int32_t a, b, both;
} pkv_union;

typedef struct pkv_reached {
  uint32_t step;
  int32_t stack;
} pkv_reached;

typedef struct pkv_mask_slot {
  int32_t state; /* -1 = free */
  uint64_t used;
} pkv_mask_slot;

struct pkv_machine {
  pkv_allocator allocator;
  const pkv_program *program;
  const pkv_token_trie *trie;
  uint64_t epoch, uses;
  uint32_t step;
  int32_t steps; /* without a byte, since the mask or token began */
  pkv_state *states;
  pkv_way *ways;
  uint16_t *next;        /* [states, classes] */
  uint16_t *state_table; /* 0 = free */
  int32_t state_count, way_count;
  pkv_stack *stacks;
  pkv_way *frames, *spare; /* spare: to move them to */
  int32_t *stack_table;    /* -1 = free */
  pkv_union *unions;       /* by hash, the latest: stacks that were joined */
  int32_t stack_count, frame_count;
  pkv_reached *reached; /* by node, in step `step` */
  int32_t *found;       /* nodes of the step that take a byte */
  pkv_way *work;
  int32_t found_count, work_count;
  uint64_t *mask_bits;
  pkv_mask_slot masks[PKV_MACHINE_MASKS];
  int32_t mask_slots;
  size_t mask_words;
  pkv_machine_stats stats;
};

/* machine_stacks.c; -1: no room */
void pkv_stacks_clear(pkv_machine *machine);
int32_t pkv_stacks_push(pkv_machine *machine, int32_t node, int32_t below);
int32_t pkv_stacks_union(pkv_machine *machine, int32_t a, int32_t b);
/* Only the stacks of these ways stay; the ways get their new numbers. */
void pkv_stacks_keep(pkv_machine *machine, pkv_way *ways, int32_t count);

#endif
