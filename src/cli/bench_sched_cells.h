/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one operation of the scheduler costs: `pkv bench sched` without --simulate.
 *
 * A cell holds `waiting` requests and a batch of 100. Each step finishes the batch's oldest
 * request, asks for the best one, admits it, and inserts a request with the ended one's prompt
 * under a new id. At last waiting requests are cancelled. The scheduler's clock is a counter, so
 * every repetition does the same, which is checked: each call then counts with the least of its
 * times.
 */
#ifndef PKV_CLI_BENCH_SCHED_CELLS_H
#define PKV_CLI_BENCH_SCHED_CELLS_H

#include <stdbool.h>

#include "base/alloc.h"
#include "pkv/sched.h"

#define SCHED_CELL_BATCH 100
#define SCHED_REPEATS    16

#define SCHED_GROUPS_NONE  0  /* nothing is shared */
#define SCHED_GROUPS_CHAIN -1 /* prompts leave a common one at every depth */

/* In the order in which they are printed. */
typedef enum sched_op {
  SCHED_OP_INSERT, /* of the cell's first requests */
  SCHED_OP_FILL,   /* best and admit, a whole batch */
  SCHED_OP_FINISH,
  SCHED_OP_BEST,
  SCHED_OP_ADMIT,
  SCHED_OP_STEP, /* finish, best and admit */
  SCHED_OP_CANCEL,
  SCHED_OPS
} sched_op;

const char *sched_op_name(sched_op op);

/* What a cell measures: an order of the scheduler, or one of two more. */
#define SCHED_PUBLISHED PKV_SCHED_ORDERS       /* cht with all its published faults, token-wise */
#define SCHED_RADIX     (PKV_SCHED_ORDERS + 1) /* passes over the queue: bench_sched_radix.h */
#define SCHED_SUBJECTS  (PKV_SCHED_ORDERS + 2)
const char *sched_subject_name(int32_t subject);

/* Prompts, 90 % of each shared where there are groups; released by sched_prompts_free. */
typedef struct sched_prompts {
  int32_t requests, tokens, groups, chunk;
  bool hashed;    /* digests, where tokens would take more than the limit */
  int32_t hashes; /* a request */
  void *data;     /* int32_t [requests][tokens] or uint64_t [requests][hashes] */
  size_t bytes;
} sched_prompts;

/* E_LIMIT: neither tokens nor digests fit `limit` bytes. */
pkv_status sched_prompts_init(sched_prompts *out, int32_t waiting, int32_t tokens, int32_t groups,
                              int32_t chunk, size_t limit, uint64_t seed, pkv_error *err);
void sched_prompts_free(sched_prompts *prompts);

/* Microseconds: least times, then those of every repetition together; the mean of the least. */
typedef struct sched_times {
  int32_t count;
  double p50, p99, max, raw_p50, raw_p99, raw_max, mean;
} sched_times;

typedef struct sched_cell {
  sched_times op[SCHED_OPS];
  int32_t repeats;
  double used_bytes;   /* a request held */
  double memory_bytes; /* taken from the allocator */
} sched_cell;

/* At most `steps` steps, and about `seconds` of them a repetition. */
pkv_status sched_cell_run(sched_cell *out, const sched_prompts *prompts, int32_t subject,
                          int32_t steps, double seconds, int32_t repeats, uint64_t seed,
                          pkv_error *err);

#endif
