/* SPDX-License-Identifier: Apache-2.0 */
/* Short calls on a scheduler for tests; each fails the test when the scheduler refuses. */
#ifndef PKV_TEST_SCHED_DRIVE_H
#define PKV_TEST_SCHED_DRIVE_H

#include "pkv/sched.h"

/* A prompt of group `group` (its first `shared` tokens) and of its own (the rest); of the caller,
 * with free(). */
int32_t *sd_prompt(int32_t group, int32_t shared, int32_t own, int32_t length);

pkv_sched *sd_create(const pkv_sched_options *o);
void sd_insert(pkv_sched *s, uint64_t id, const int32_t *tokens, int32_t length);
pkv_sched_pick sd_best(pkv_sched *s);
/* The best one, whatever the policy says, becomes active. Its id. */
uint64_t sd_admit_best(pkv_sched *s);
void sd_admit(pkv_sched *s, uint64_t id);
void sd_finish(pkv_sched *s, uint64_t id);
pkv_sched_stats sd_stats(const pkv_sched *s);
/* A clock for options->clock: ctx points to the nanoseconds. */
int64_t sd_clock(void *ctx);
double sd_now_us(void);
/* How much slower than a plain build this one may be. */
double sd_slack(void);

#endif
