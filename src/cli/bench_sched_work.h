/* SPDX-License-Identifier: Apache-2.0 */
/* The requests that `pkv bench sched --simulate` replays: drawn, or from a trace file. */
#ifndef PKV_CLI_BENCH_SCHED_WORK_H
#define PKV_CLI_BENCH_SCHED_WORK_H

#include <stdbool.h>

#include "base/status.h"

#define SCHED_MAX_WORK (1 << 20)

typedef struct sched_job {
  double arrival_s;
  int32_t prompt, output; /* tokens, output >= 1 */
  int32_t hashes;         /* of whole and, last, partial chunks */
  size_t first_hash;
} sched_job;

typedef struct sched_work {
  sched_job *jobs;  /* [count] of [capacity], by arrival */
  uint64_t *hashes; /* [hash_count] of [hash_capacity], cumulative */
  int32_t count, capacity;
  size_t hash_count, hash_capacity;
  int32_t chunk; /* tokens that a hash stands for */
  char name[64];
} sched_work;

typedef struct sched_draw {
  int32_t requests;
  int32_t groups;               /* > 0, or 0 for no sharing */
  int32_t prefix[2], decode[2]; /* a group's prefix, a request's output: uniform */
  int32_t own;                  /* tokens behind the prefix */
  double rate;                  /* Poisson arrivals a second; 0 = all at once */
  bool shift;                   /* from the middle on: four times the rate, and nothing is shared */
  int32_t chunk;
  uint64_t seed;
} sched_draw;

pkv_status sched_work_draw(sched_work *out, const sched_draw *draw, pkv_error *err);
/*
 * At most `most` requests (0 = all). By the file's first line: Mooncake's JSON lines (a hash for
 * 512 tokens), Azure's CSV (no sharing), else what pkv_trace_load takes (a step counts as a
 * millisecond, no sharing).
 */
pkv_status sched_work_load(sched_work *out, const char *path, int32_t most, pkv_error *err);
void sched_work_free(sched_work *work);

#endif
