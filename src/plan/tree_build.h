/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: the host's builder of `shared` in steps. All work in the plan's scratch. */
#ifndef PKV_PLAN_TREE_BUILD_H
#define PKV_PLAN_TREE_BUILD_H

#include "plan/plan_setup.h"
#include "plan/tree_cuts.h"

/* The scratch of a plan: PKV_TREE_SCRATCH words a row, and two rows more. */
typedef struct pkv_tree_scratch {
  int32_t *words;
  int64_t stride; /* rows + 2: words of one array */
} pkv_tree_scratch;

static inline int32_t *pkv_tree_array(const pkv_tree_scratch *s, int32_t i) {
  return s->words + i * s->stride;
}

/* Arrays 0 .. 3 of the scratch, from one step to the next. */
#define PKV_TREE_LCP    0 /* by gap, to tree_nodes.c */
#define PKV_TREE_LEADER 1 /* by row, inside tree_find.c */
#define PKV_TREE_UNITS  2
#define PKV_TREE_FREE   3 /* the first that a step may use as it likes */

/* row and length of every rank, and lcp, from block tables. */
void pkv_tree_find(pkv_tree_rank *ranks, const pkv_tree_scratch *scratch, const pkv_tree_core *t,
                   const int32_t *seq_len, const int32_t *table, int64_t stride, bool chained);

/* The same from a caller's nodes and order, which are checked before anything is written; scratch
   may be used to check. */
pkv_status pkv_tree_take(pkv_tree_rank *ranks, const pkv_tree_scratch *scratch,
                         const pkv_tree_core *t, const int32_t *seq_len, const pkv_sharing *sharing,
                         int64_t stride, pkv_error *err);

/* From ranks and lcp to all of the plan but its header. */
void pkv_tree_fill(struct pkv_plan *plan, const pkv_tree_core *t, const pkv_tree_scratch *scratch);

#endif
