/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long every route takes for one batch: what `pkv calibrate` fits and `pkv bench policy` judges
 * by. route_times.c measures the CPU, route_times_device.c a GPU.
 *
 * All routes of a batch are timed interleaved, after their outputs were compared: all rows with
 * balanced, and with double arithmetic all rows of a batch of at most ROUTE_CHECKED tokens
 * (ROUTE_CHECKED_CPU there), of a larger one the longest row and the shortest that fit.
 *   CPU   attend: the call, the least of the repetitions (other processes only ever add), which go
 *         on until that time has come three times; plan: the build, likewise. Each call finds the
 *         batch at another place of a storage with a gigabyte to spare.
 *   GPU   attend: a layer of several with caches of their own, in one graph, median;
 *         plan: on the device where it is made there (median in the graph), else building and
 *         uploading by the host's clock, waited for.
 */
#ifndef PKV_CLI_ROUTE_TIMES_H
#define PKV_CLI_ROUTE_TIMES_H

#include <stdio.h>

#include "cli/bench_attention.h"
#include "pkv/profile.h"

#define ROUTE_CHECKED     131072
#define ROUTE_CHECKED_CPU 2048

typedef struct route_times_options {
  const pkv_cli *cli; /* for messages */
  int32_t device;     /* pkv_device */
  int32_t threads;    /* CPU; 0 = all cores */
  int32_t repeats;
  int32_t memory_mib;  /* for K and V; 0 = 4096 on the CPU, three quarters of a GPU */
  int64_t most_tokens; /* of a batch */
  int32_t splits;      /* of the seed's routes; 0 = as the policy's rules say */
  pkv_shape shape;
  pkv_dtype kv_dtype;
  bool cpu_time; /* CPU: what the process used over threads, not the clock: for a busy machine */
  const char *flashinfer; /* path of the shared object of its kernels; NULL = look for it */
  bool events;            /* GPU: event_us as well */
  uint32_t only;          /* bit (1 << kind): what is timed, and balanced; 0 = all that is here */
} route_times_options;

typedef struct route_time {
  bool done;
  double attend_us, plan_us;
  double wall_us;  /* plan and one layer, from nothing to the output, by the host's clock */
  double event_us; /* GPU: a layer of a plan and 32 layers enqueued by the host, between events */
  pkv_plan_stats stats;
} route_time;

/* Single-owner. */
typedef struct route_times {
  route_times_options o;
  char device[96], driver[96];
  char no_flashinfer[200]; /* why that route is not measured */
  char flashinfer[32];     /* its version where it is */
  pkv_profile profile;     /* slots, and the routes that are here; no model */
  pkv_cost_model bare;     /* parts only: for features */
  const struct route_times_ops *ops;
  void *state;
} route_times;

typedef struct route_times_ops {
  void (*close)(route_times *t);
  pkv_status (*run)(route_times *t, route_time *times, const bench_batch *batch, pkv_error *err);
} route_times_ops;

pkv_status route_times_open(route_times *out, const route_times_options *options, pkv_error *err);
void route_times_close(route_times *t);
/*
 * times [PKV_COST_KINDS] of every kind that is here and takes the batch. `shared` only where rows
 * of the batch share. E_LIMIT: the batch does not fit. E_INTERNAL: two routes disagree.
 */
pkv_status route_times_run(route_times *t, route_time *times, const bench_batch *batch,
                           pkv_error *err);

/* The options that a kind plans with: splits by the policy's rule. */
pkv_status route_plan_options(pkv_plan_options *out, const route_times *t, int32_t kind,
                              const bench_batch *batch, pkv_error *err);
/* Features of a timed kind. */
pkv_status route_features(double *features, const route_times *t, int32_t kind,
                          const bench_batch *batch, const route_time *time, pkv_error *err);
bool route_batch_shares(const bench_batch *batch);
/* Largest difference over largest value. */
double route_difference(const float *a, const float *b, int64_t count);
/* Lengths [rows] of the rows that are compared with double arithmetic, 0 for the others. */
void route_checked_rows(int32_t *lengths, const bench_batch *batch, int64_t budget);
/* Largest difference of the rows with lengths[row] > 0 from `exact` [rows, a_row], over its largest
   value. */
double route_error(const float *out, const float *exact, const int32_t *lengths, int32_t rows,
                   int64_t a_row);

/*
 * A CSV file of its own: what made it ("# command: ..."), which FlashInfer was measured, and
 * `head`, the line of names.
 */
pkv_status route_csv_open(FILE **out, const char *path, const route_times *t, const void *options,
                          const char *head, pkv_error *err);

pkv_status route_times_open_device(route_times *out, pkv_error *err);

#endif
