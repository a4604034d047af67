/* SPDX-License-Identifier: Apache-2.0 */
/* The result rows of `pkv bench attention`: tables, JSON, and the CSV schema of all result files.
 */
#ifndef PKV_CLI_BENCH_RESULTS_H
#define PKV_CLI_BENCH_RESULTS_H

#include <stdio.h>

#include "cli/command.h"

/* Means over the steps of a cell, each step the median of its repetitions; times in microseconds
 * of one layer, but for step_us; < 0 = not measured. */
typedef struct bench_result {
  const char *cell, *route, *peers;
  int32_t threads; /* CPU only */
  double rows, launches, tasks;
  double plan_us, attend_us, null_us, wall_us;
  double plain_us; /* CPU only */
  /* a device only */
  double floor_us;
  double wait_us;  /* attend_us where no launch overlaps the one before */
  double event_us; /* no graph: the host enqueues each layer */
  double
      launch_us;   /* plan and one layer in a graph: launched and waited for, by the host's clock */
  double step_us;  /* plan and 32 layers */
  double ctas_sm;  /* blocks of the decode launches over multiprocessors */
  double limit_us; /* an H200, rows that share: each page once, or the products of shared pages */
  double kv_bytes, padded_bytes, state_bytes;
  /* of route shared: kv_bytes if every row read its own, nodes, query rows of 128 in their tiles */
  double total_bytes, nodes, tile_fill;
  double fma_us;      /* CPU: the arithmetic alone at the rate measured; 0 = not measured */
  double balanced_us; /* of route shared: route balanced in the same run; 0 = not measured */
  double error;       /* < 0 = not checked */
  pkv_buffer raw;     /* "NAME=US US ...;NAME=...": every repetition, step by step */
} bench_result;

/* What all rows of a run share. */
typedef struct bench_run {
  const char *commit;
  char device[96], driver[96];
  char setup[160]; /* dtype, heads, page, layout */
} bench_run;

/* This processor and its system; or a device and its driver, as a meter names them. */
void bench_run_describe(bench_run *run, const char *isa);
void bench_run_describe_device(bench_run *run, const char *device, const char *driver);

void bench_result_init(bench_result *r, const char *cell, const char *route);
void bench_result_deinit(bench_result *r);
/* Adds repetitions to `raw`, each divided by `divisor`. */
pkv_status bench_result_raw(bench_result *r, const char *name, const double *us, int32_t count,
                            double divisor, pkv_error *err);

void bench_table_head(const bench_run *run);
void bench_table_row(const bench_result *r);
/* A line about what rows share, below the row of route shared. */
void bench_table_sharing(const bench_result *r);
void bench_device_head(const bench_run *run);
void bench_device_row(const bench_result *r);
json_t *bench_json_row(const bench_result *r);

/*
 * Opens the file to append rows and writes the head into an empty one; then a line
 * "# command: pkv COMMAND", which holds for the rows after it. E_IO; E_FORMAT where a file has
 * other columns.
 */
pkv_status bench_csv_open(FILE **out, const char *path, const char *command, pkv_error *err);
/*
 * commit, device, driver, cell, route, gpu_us, plan_us, wall_us, bytes, floor_us, error, peers,
 * then null_us, wait_us, event_us, launch_us, step_us, rows, launches, ctas_sm, state_bytes,
 * padded_bytes, gb_s, setup, raw. A field that was not measured is empty. On the CPU gpu_us is the
 * time of pkv_attention_run, floor_us the null read, peers the plain read (and fma_us, the
 * arithmetic alone at the rate measured in the run), and the cell's name holds the setup. bytes is
 * what the route has to read: with route shared, what rows share once. peers: "NAME=US;NAME=US",
 * with "anchor:" before figures of another run.
 * bench/results/README.md says it for readers. False when the file cannot be written.
 */
bool bench_csv_row(FILE *file, const bench_run *run, const bench_result *r);

#endif
