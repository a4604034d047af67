/* SPDX-License-Identifier: Apache-2.0 */
/* For backends that plan on their own: sizes from limits, and the part of a plan lengths do not
   decide. */
#ifndef PKV_PLAN_PLAN_PREPARE_H
#define PKV_PLAN_PLAN_PREPARE_H

#include "base/status.h"
#include "plan/plan_tree.h"

/* As pkv_plan_size, with the bounds themselves. */
pkv_status pkv_plan_bounds(size_t *plan_bytes, int64_t *max_merges, int64_t *max_slots,
                           const pkv_shape *shape, const pkv_plan_options *options,
                           int32_t max_rows, int32_t max_seq_len, pkv_error *err);
/* The header of a `balanced` plan for `rows` rows; total_cost, slots, merges, launches and
   workspace_bytes are 0. */
pkv_status pkv_plan_prepare(struct pkv_plan *header, const pkv_shape *shape,
                            const pkv_plan_options *options, int32_t rows, pkv_error *err);

/* Bounds of `shared` from limits; slots of the two areas apart. */
typedef struct pkv_shared_bounds {
  size_t plan_bytes;
  int64_t merges, node_segments, node_slots, private_slots;
  int64_t units;       /* that a row can share: keys a row of the device's search */
  size_t memory_bytes; /* that the device's planner works in (tree_desk.h) */
} pkv_shared_bounds;

/* E_RANGE also where costs of a batch within the limits could leave 64 bits. */
pkv_status pkv_plan_shared_bounds(pkv_shared_bounds *out, const pkv_shape *shape,
                                  const pkv_plan_options *options, int32_t max_rows,
                                  int32_t max_seq_len, pkv_error *err);
/* Headers of a `shared` plan for `rows` rows without what rows decide. */
pkv_status pkv_plan_prepare_shared(struct pkv_plan *header, pkv_plan_tree *tree,
                                   const pkv_shape *shape, const pkv_plan_options *options,
                                   int32_t rows, pkv_error *err);

#endif
