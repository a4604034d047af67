/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Carries a program out over bytes. A state is every way in which the bytes so far can be read:
 * pairs of a node and the stacks it can be reached with; equal stacks are one, and stacks that
 * differ only further down share what they have in common. States are made when they are first
 * needed and kept, with their ways on and the tokens they allow, in memory of a fixed size: when
 * it is full, all but the state at hand are forgotten, and `epoch` tells other holders of states
 * to feed theirs again. Single-owner.
 */
#ifndef PKV_GRAMMAR_MACHINE_H
#define PKV_GRAMMAR_MACHINE_H

#include "grammar/grammar_program.h"
#include "grammar/token_trie.h"

typedef struct pkv_machine pkv_machine;

typedef struct pkv_machine_state {
  uint64_t epoch;
  int32_t id; /* 0: no text begins like this */
} pkv_machine_state;

/* Program and trie (NULL: no masks) are borrowed. */
pkv_status pkv_machine_create(pkv_machine **out, const pkv_program *program,
                              const pkv_token_trie *trie, const pkv_allocator *allocator,
                              pkv_error *err);
void pkv_machine_destroy(pkv_machine *machine);

/* False in these: what is to be held at once exceeds the memory, the grammar is too ambiguous. */
bool pkv_machine_begin(pkv_machine_state *state, pkv_machine *machine);
/* The state must be of this epoch; it is again afterwards. */
bool pkv_machine_feed(pkv_machine_state *state, pkv_machine *machine, const char *bytes,
                      size_t count);
bool pkv_machine_knows(const pkv_machine *machine, pkv_machine_state state);

/* The text may end here. */
bool pkv_machine_may_end(const pkv_machine *machine, pkv_machine_state state);
/* Some byte may follow. */
bool pkv_machine_may_go_on(const pkv_machine *machine, pkv_machine_state state);
/* [vocab / 64, rounded up] bits of the tokens that may follow, until the next call; NULL: too
   ambiguous. May begin a new epoch, in which *state is known. */
const uint64_t *pkv_machine_mask(pkv_machine *machine, pkv_machine_state *state);

typedef struct pkv_machine_stats {
  int64_t states, masks, forgotten; /* made so far; epochs that ended */
  size_t bytes;
} pkv_machine_stats;
void pkv_machine_get_stats(pkv_machine_stats *out, const pkv_machine *machine);

#endif
