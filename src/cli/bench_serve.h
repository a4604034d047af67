/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `pkv bench serve` runs: a workload on the server's own engine thread and queue, as clients
 * of it see the tokens come. HTTP is left out.
 */
#ifndef PKV_CLI_BENCH_SERVE_H
#define PKV_CLI_BENCH_SERVE_H

#include <stdbool.h>
#include <stdio.h>

#include "pkv/engine.h"

#define PKV_BENCH_SCHEDULES 8
#define PKV_BENCH_REQUESTS  4096

/* How requests are admitted. */
typedef struct bench_schedule {
  char name[40]; /* "tree/marginal" */
  pkv_sched_order order;
  pkv_sched_policy policy;
} bench_schedule;

/* Prompts of `prefix` tokens that each group has in common and `own` tokens besides; request i
 * belongs to group i % groups, which is the worst order of arrival there is. */
typedef struct bench_workload {
  int32_t requests, groups, prefix, own, tokens;
  double rate;               /* requests a second, at random times; 0 = all at once */
  double slo_ttft, slo_tpot; /* seconds; what counts as good */
  uint64_t seed;
} bench_workload;

typedef struct bench_spread {
  double p50, p90, p99; /* milliseconds */
} bench_spread;

typedef struct bench_outcome {
  double seconds, tokens_per_s, requests_per_s, goodput; /* good requests a second */
  bench_spread ttft, tpot, itl, queue;
  double mean_rows;     /* decoding rows of a step that has any */
  double kv_mb_a_token; /* read by decoding rows, what they share once */
  double kv_mb_each;    /* would be read without that */
  double reused;        /* share of prompt tokens found in the cache */
  int64_t steps, preemptions, prefill_tokens;
  int32_t count;
  double first_s[PKV_BENCH_REQUESTS]; /* [count], in order: times to first token */
} bench_outcome;

/* "fcfs", "tree/marginal": an order, and a policy unless that is "always". */
bool bench_schedule_parse(bench_schedule *out, const char *text, size_t bytes);
/* Several, separated by commas: how many, or 0 where the list is not such a one. */
int32_t bench_schedules_parse(bench_schedule out[PKV_BENCH_SCHEDULES], const char *text);
/* Of seconds, which are sorted. */
bench_spread bench_spread_of(double *seconds, size_t count);
/* engine: sizes and types; order, policy, requests and statistics are set here. */
pkv_status bench_serve_run(bench_outcome *out, pkv_model *model, const pkv_engine_options *engine,
                           const bench_schedule *schedule, const bench_workload *workload,
                           pkv_error *err);

/* A page with tables and plots of all outcomes, readable without anything else. */
typedef struct bench_report {
  const char *model, *command, *machine;
  const bench_workload *workload;
  const bench_schedule *schedules;
  const bench_outcome *outcomes;
  int32_t count;
} bench_report;
void bench_serve_report(FILE *file, const bench_report *report);
/* Opened before anything is measured, so that a file that cannot be written fails at once; what it
 * holds stays until it is closed with a report. */
pkv_status bench_report_open(FILE **out, const char *path, pkv_error *err);
pkv_status bench_report_close(FILE *file, const bench_report *report, const char *path,
                              pkv_error *err);

#endif
