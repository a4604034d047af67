/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The measured points of `pkv calibrate`, in memory and in a file beside the profile, to which each
 * batch is added as it is done: what an interrupted run left is read back. A file of another setup
 * is refused, a last line that is cut is dropped.
 *
 *   pkv-points 1 SETUP
 *   INDEX MIX ROWS ROUTE ATTEND_US PLAN_US F1 .. F12
 *   INDEX done
 */
#ifndef PKV_CLI_CALIBRATE_POINTS_H
#define PKV_CLI_CALIBRATE_POINTS_H

#include <stdio.h>

#include "cli/route_times.h"

typedef struct calibrate_point {
  int32_t batch, kind;
  bool shares; /* rows of the batch share prefixes */
  double attend_us, plan_us;
  double features[PKV_COST_FEATURES];
} calibrate_point;

typedef struct calibrate_points {
  calibrate_point *points;
  int32_t count, capacity;
  int32_t batches; /* done, in order */
  FILE *file;
} calibrate_points;

/* Opens `path`, reads what fits `setup` (a line of plain text) and is ready to append. E_FORMAT
 * names the line; E_STATE: another setup. */
pkv_status calibrate_points_open(calibrate_points *out, const char *path, const char *setup,
                                 pkv_error *err);
void calibrate_points_close(calibrate_points *p);
/* All routes of the next batch, written through. */
pkv_status calibrate_points_add(calibrate_points *p, const route_times *t, const char *mix,
                                const bench_batch *batch, const route_time *times, pkv_error *err);
/* Fits every kind that has points into model->cost. Batches whose rows share prefixes count for
 * route shared only: what the others read twice may come from a cache, which the model has not. */
pkv_status calibrate_fit(pkv_cost_model *model, const calibrate_points *p, pkv_error *err);
double calibrate_predict(const pkv_route_cost *cost, const double *features);

#endif
