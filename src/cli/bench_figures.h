/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of `pkv bench model`: a table, JSON, and CSV with every repetition. */
#ifndef PKV_CLI_BENCH_FIGURES_H
#define PKV_CLI_BENCH_FIGURES_H

#include <stdio.h>

#include "cli/bench_decode.h"
#include "cli/bench_results.h"

/* What the rows of a run share besides the machine. */
typedef struct bench_model_run {
  bench_run run; /* commit, device, driver */
  char model[96], date[32], load[32];
  const char *kv_dtype, *activations;
  int32_t threads;
} bench_model_run;

/* Model name from the file, date, load of the machine; commit and the types are the caller's. */
void bench_model_describe(bench_model_run *run, const char *isa, const char *model_path);

void bench_figures_head(const bench_model_run *run);
void bench_figures_row(const bench_figure *figure);
json_t *bench_figures_json(const bench_figure *figure);
/*
 * commit, date, device, driver, load, engine, model, cell, threads, kv_dtype, activations, unit,
 * repetitions, min, median, max, samples (in their order, separated by blanks). Writes the head
 * into an empty file. False when the file cannot be written.
 */
bool bench_figures_csv(FILE *file, const bench_model_run *run, const bench_figure *figure);

#endif
