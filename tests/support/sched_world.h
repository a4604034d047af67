/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations on a scheduler beside its naive twin. After each operation the integrity of the
 * scheduler is checked, and now and then every figure it gives is compared with the twin's.
 */
#ifndef PKV_TEST_SCHED_WORLD_H
#define PKV_TEST_SCHED_WORLD_H

#include "pkv/sched.h"

/*
 * `steps` operations of one order, split over seeds, each with options of its own: chunk sizes,
 * ageing, priorities, deadlines, budgets, policies, colliding hashes, prompts by hashes. The
 * environment variable PKV_TEST_FACTOR multiplies the steps. Fails the test on the first
 * difference, naming seed and step.
 */
void sched_world_run(pkv_sched_order order, uint64_t first_seed, int64_t steps);

#endif
