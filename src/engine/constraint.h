/* SPDX-License-Identifier: Apache-2.0 */
/* What an answer's text has to be: a program, counted by those who use it. */
#ifndef PKV_ENGINE_CONSTRAINT_H
#define PKV_ENGINE_CONSTRAINT_H

#include "grammar/machine.h"
#include "pkv/engine.h"

const pkv_program *pkv_constraint_program(const pkv_constraint *constraint);
const pkv_token_trie *pkv_constraint_trie(const pkv_constraint *constraint);
/* Whether it was made for this model. */
bool pkv_constraint_fits(const pkv_constraint *constraint, const pkv_model *model);
/* One more user, and one less: the last one frees it. */
const pkv_constraint *pkv_constraint_hold(const pkv_constraint *constraint);
void pkv_constraint_release(const pkv_constraint *constraint);

/* From a tree that its caller filled; a failed tree gives its failure. */
pkv_status pkv_constraint_create_tree(pkv_constraint **out, const pkv_model *model,
                                      const pkv_syntax *tree, const pkv_allocator *allocator,
                                      pkv_error *err);

#endif
