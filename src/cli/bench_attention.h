/* SPDX-License-Identifier: Apache-2.0 */
/* What the two halves of `pkv bench attention` share: cmd_bench_attention.c measures the CPU,
 * bench_device.c a GPU. */
#ifndef PKV_CLI_BENCH_ATTENTION_H
#define PKV_CLI_BENCH_ATTENTION_H

#include "cli/bench_cells.h"
#include "cli/bench_results.h"

#define BENCH_MAX_REPEATS 101

/* --layout: the pool's layouts, and K and V halves of one page. */
enum { BENCH_HND, BENCH_NHD, BENCH_INTERLEAVED };
/* --route beyond pkv_route: work items merged by the last arriver; FlashInfer's two kernels. */
enum {
  BENCH_ROUTE_ALL,
  BENCH_WORKQUEUE_FUSED = PKV_ROUTE_SHARED + 1,
  BENCH_FLASHINFER,
  BENCH_FLASHINFER_CORES
};

typedef struct bench_options {
  const char *cells, *anchors, *lengths, *trace_file, *mooncake, *only, *threads, *csv, *commit;
  const char *policy, *profile, *flashinfer, *shared_costs;
  int32_t device, route, dtype, layout, isa;
  int32_t query_heads, kv_heads, head_dim, page_tokens, q_len, window;
  int32_t parts, splits, bucket, segment_cost, invariant, chained, rows_permuted;
  int32_t steps, repeats, active, memory_mib, check_tokens, needles, graphs;
  int32_t huge, best, cpu_time, json;
  int64_t seed;
} bench_options;

/* Everything that lives as long as the command. */
typedef struct bench_frame {
  const pkv_cli *cli;
  const bench_options *o;
  pkv_shape shape;
  bench_cell_options cell_options;
  int32_t cells;
  bench_run run;
  FILE *csv;    /* --csv */
  json_t *rows; /* --json */
  int32_t skipped;
} bench_frame;

pkv_plan_options bench_plan_options(const bench_options *o, pkv_route route);
/* Prints or keeps a row, and writes it to the CSV. */
pkv_status bench_report(bench_frame *frame, const bench_result *result, pkv_error *err);
/* The middle one of `count` numbers, which are put in order. */
double bench_median(double *values, int32_t count);

/* The whole run on a CUDA device: E_UNSUPPORTED where there is none. */
pkv_status bench_device_run(bench_frame *frame, pkv_error *err);

#endif
