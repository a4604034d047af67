/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replays requests through a scheduler and a cost model: continuous batching, one clock, nothing
 * random but the requests. A step first finishes what has ended, then inserts what has come, admits
 * while the scheduler says so (new prompts are prefilled in that step), then decodes a token of
 * every row. Time of the scheduler's own calls is measured, but not added to the clock.
 */
#ifndef PKV_CLI_BENCH_SCHED_SIM_H
#define PKV_CLI_BENCH_SCHED_SIM_H

#include "cli/bench_sched_cost.h"
#include "cli/bench_sched_reuse.h"
#include "cli/bench_sched_work.h"
#include "pkv/sched.h"

typedef struct sched_setup {
  const sched_work *work;
  const sched_device *device;
  const sched_shape *shape;
  sched_reuse *reuse; /* of the device's parts, or NULL: what L2 holds is estimated */
  sched_route route;
  pkv_sched_order order;
  pkv_sched_policy policy;
  pkv_sched_ageing ageing;
  int32_t bypass_limit; /* as in pkv_sched_options */
  double max_wait_s;
  int32_t max_batch;
  bool warm; /* a prefix that any request brought stays cached; else only while a row holds it */
  uint64_t seed;
  double ucb_bonus, q_rate, q_discount, q_explore, prior_weight; /* as in pkv_sched_options */
  const char *learner; /* NULL, or a file of ucb or q-learning: read if it is there, and written */
} sched_setup;

typedef struct sched_outcome {
  int32_t requests, refused; /* too long for the cache alone */
  int64_t steps, output_tokens;
  double seconds, tokens_s;                                /* simulated; output tokens a second */
  double ttft_p50, ttft_p90, ttft_p99, tpot_p50, tpot_p99; /* seconds */
  double longest_wait;                                     /* from arrival to admission */
  double jain;     /* of tokens a second of each request, arrival to end; 1 = all the same */
  double hit_rate; /* cached prompt tokens over prompt tokens */
  double rows;     /* mean of a step */
  double total_gb, unique_gb; /* KV bytes of all steps, per row and each once */
  double sched_us_step;       /* measured, of all calls; not repeatable */
} sched_outcome;

pkv_status sched_simulate(sched_outcome *out, const sched_setup *setup, pkv_error *err);

#endif
