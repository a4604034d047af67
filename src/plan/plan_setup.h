/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: a checked shape with its options resolved, and where a plan's arrays lie. */
#ifndef PKV_PLAN_PLAN_SETUP_H
#define PKV_PLAN_PLAN_SETUP_H

#include <stdbool.h>

#include "base/status.h"
#include "plan/tree_core.h"

#define PKV_PLAN_ALIGN   64
#define PKV_TREE_SCRATCH 16 /* shared: words a row that the host's builder works in */

/* pkv_shape and pkv_plan_options with every default filled in. core.rows is set by the caller. */
typedef struct pkv_plan_setup {
  pkv_plan_core core; /* unit_tokens 32 and parts 0 for the seed's routes */
  pkv_route route;
  uint32_t flags;
  int32_t query_heads, group, head_dim, page_tokens;
  int32_t splits; /* the seed's routes; 0 = the work queue's own rule */
  int32_t bucket_tokens;
  /* shared */
  int64_t node_unit_cost, rank_unit_cost, node_segment_cost, state_cost;
  int32_t most_tile_ranks;
} pkv_plan_setup;

/* Byte offsets, as in the header; plan_bytes is the end. */
typedef struct pkv_plan_layout {
  int64_t seq_len_at, row_cost_at, cursors_at, split_first_at, merges_at, launches_at, items_at;
  int64_t tree_at;
  pkv_plan_tree tree; /* shared: its offsets */
  int64_t plan_bytes;
} pkv_plan_layout;

/* Lengths of the parts of a plan that a layout and a workspace depend on. */
typedef struct pkv_plan_counts {
  int64_t rows, items, slots;
  int64_t merges;                                   /* counters in the workspace */
  int64_t launches;                                 /* room in the plan */
  int64_t node_segments, node_slots, private_slots; /* shared; slots are all of them */
} pkv_plan_counts;

pkv_status pkv_plan_setup_init(pkv_plan_setup *out, const pkv_shape *shape,
                               const pkv_plan_options *options, pkv_error *err);
/* E_RANGE when a count does not fit its type. */
pkv_status pkv_plan_layout_init(pkv_plan_layout *out, const pkv_plan_setup *setup,
                                const pkv_plan_counts *counts, pkv_error *err);
/* Counters and slots; E_RANGE on overflow. */
pkv_status pkv_plan_workspace(int64_t *bytes, const pkv_plan_setup *setup, int64_t merges,
                              int64_t slots, pkv_error *err);
/* The most units that one row of at most `max_seq_len` tokens reads. */
int64_t pkv_plan_max_units(const pkv_plan_setup *setup, int64_t max_seq_len);

/* The header as far as lengths do not decide it. */
void pkv_plan_fill_header(struct pkv_plan *plan, const pkv_plan_setup *setup,
                          const pkv_plan_counts *counts, const pkv_plan_layout *layout);

/* The route `shared` (plan_shared.c). */

pkv_tree_core pkv_plan_tree_core(const pkv_plan_setup *setup);
/* The core of a built plan's tree. */
pkv_tree_core pkv_tree_core_of(const struct pkv_plan *plan);
/* Bounds for batches of up to `rows` rows of at most `units` units each, window or not; INT64_MAX
   where they leave 64 bits. */
void pkv_shared_counts(pkv_plan_counts *out, const pkv_plan_setup *setup, int64_t rows,
                       int64_t units);

/* The seed's routes (plan_seed.c). */

/* Units of 32 tokens that a row's splits share, from its first that is read; padded to a bucket. */
int64_t pkv_seed_tiles(const pkv_plan_setup *setup, int32_t length);
/* How many splits a row of `tiles` units has among `rows`. */
int32_t pkv_seed_splits_of(const pkv_plan_setup *setup, int32_t rows, int64_t tiles);
/* Most splits all rows of a batch within the limits can have together. */
int64_t pkv_seed_max_splits(const pkv_plan_setup *setup, int32_t max_rows, int64_t max_tiles);
/* What two rows must agree on to share a launch: the (padded) length; 0: one launch has all. */
int64_t pkv_seed_bucket(const pkv_plan_setup *setup, int32_t length);
/* Fills the arrays of `plan`, whose header and seq_len are there, and sets launches. */
void pkv_seed_fill(struct pkv_plan *plan, const pkv_plan_setup *setup);

static inline void *pkv_plan_array(struct pkv_plan *plan, int64_t offset) {
  return (unsigned char *)plan + offset;
}

#endif
