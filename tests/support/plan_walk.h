/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A naive reader of plans for tests: counts how often each unit of each segment is read and each
 * slot is written and merged, with plain arrays and none of the planner's code but its structs.
 */
#ifndef PKV_TEST_PLAN_WALK_H
#define PKV_TEST_PLAN_WALK_H

#include "plan/plan.h"

/* 64-byte aligned memory of `bytes`, every byte `fill`; released with free(). Fails the test if
   there is none. */
void *plan_memory(size_t bytes, int fill);

/*
 * Sizes, builds and checks in one go: memory as pkv_plan_size says for these rows and their longest
 * length, walked, and checked by pkv_plan_check. Fails the test on any fault. The plan is freed
 * with free().
 */
pkv_plan *plan_make(const pkv_shape *shape, const pkv_plan_options *options, int32_t rows,
                    const int32_t *seq_len);

/* Every (row, KV head, unit) once, every slot written and merged once; fails the test if not. */
void plan_walk(const pkv_plan *plan);

#endif
