/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A naive reader of shared plans for tests: pieces and folds are walked as plan_tree.h describes
 * them, with plain arrays; and the tree that the definition in tree_core.h gives, worked out the
 * slow way from all pairs of rows.
 */
#ifndef PKV_TEST_TREE_WALK_H
#define PKV_TEST_TREE_WALK_H

#include "plan/plan_tree.h"
#include "support/tree_batch.h"

/* Exact-size memory, built, checked, walked; freed with free(). told: sharing as given, else from
   the batch's table. Fails the test on any fault. */
pkv_plan *tree_plan_make(const pkv_shape *shape, const pkv_plan_options *options,
                         const tree_batch *b, const pkv_sharing *sharing);

/* Every (row, KV head, unit) once, with the pages of the row's own table; every slot that is folded
   written once; each fold complete and in order. NULL: tables are not looked at. */
void tree_plan_walk(const pkv_plan *plan, const tree_batch *b);

/* That ranks and nodes are those of the definition; up to a few hundred rows. */
void tree_plan_compare(const pkv_plan *plan, const tree_batch *b);

#endif
