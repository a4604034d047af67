/* SPDX-License-Identifier: Apache-2.0 */
/* The result rows of `pkv bench attention`: a table, JSON, and the CSV schema of all result files.
 */
#ifndef PKV_CLI_BENCH_RESULTS_H
#define PKV_CLI_BENCH_RESULTS_H

#include <stdio.h>

#include "cli/command.h"

/* Means over the steps of a cell, each step the median of its repetitions; times in microseconds.
 */
typedef struct bench_result {
  const char *cell, *route;
  int32_t threads;
  double rows, launches, tasks;
  double plan_us, attend_us, null_us, plain_us;
  double kv_bytes, padded_bytes, state_bytes;
  double error; /* largest, relative to the largest value of the reference; < 0 = not checked */
} bench_result;

/* What all rows of a run share. */
typedef struct bench_run {
  const char *commit;
  char device[96], driver[96];
  char setup[96]; /* dtype, heads, page, layout: part of the cell's name in CSV */
} bench_run;

void bench_run_describe(bench_run *run, const char *isa);

void bench_table_head(const bench_run *run);
void bench_table_row(const bench_result *r);
json_t *bench_json_row(const bench_result *r);
/*
 * commit, device, driver, cell, route, gpu_us, plan_us, wall_us, bytes, floor_us, error, peers.
 * Here gpu_us is the time of pkv_attention_run on the CPU, wall_us that and the plan, bytes the
 * useful KV bytes, floor_us the null read, and peers the plain read. Writes the head into an empty
 * file. False when the file cannot be written.
 */
bool bench_csv_row(FILE *file, const bench_run *run, const bench_result *r);

#endif
