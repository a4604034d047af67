/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A radix tree as servers keep one for their prefix cache, and the pass over the queue that they
 * make with it: every waiting prompt is matched from the root, token by token, then the tree is
 * walked depth first, heavier subtrees first. Nothing is kept from one pass to the next, which is
 * what sets it apart from order DFS_WEIGHT of the scheduler. What `pkv bench sched` measures the
 * scheduler against; its edges are compared with memcmp, its children are found by hash.
 */
#ifndef PKV_CLI_BENCH_SCHED_RADIX_H
#define PKV_CLI_BENCH_SCHED_RADIX_H

#include "cli/bench_sched_cells.h"

typedef struct sched_radix sched_radix;

pkv_status sched_radix_create(sched_radix **out, const sched_prompts *prompts, pkv_error *err);
void sched_radix_destroy(sched_radix *radix);

/* The prompt waits, by age; it must not be held. */
void sched_radix_insert(sched_radix *radix, int32_t prompt);
/* Ranks all that waits; the first of the ranking, -1 = nothing waits. */
int32_t sched_radix_pass(sched_radix *radix);
/* The next one of the last ranking, -1 = no more. */
int32_t sched_radix_next(sched_radix *radix);
/* A waiting prompt joins the batch; one of the batch leaves for good. */
void sched_radix_admit(sched_radix *radix, int32_t prompt);
void sched_radix_finish(sched_radix *radix, int32_t prompt);
/* Tokens (or digests) that the batch has of the prompt. */
int32_t sched_radix_match(const sched_radix *radix, int32_t prompt);

#endif
