/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seed's roofline estimate of a route, as pkv_policy_choose uses it. Pure functions.
 *
 *   T = KV / beta * max(1, Cmin / C) + launches * lambda + merge / beta
 *
 * KV = bytes that some query sees, beta = read bandwidth, lambda = cost of a launch, merge = bytes
 * of partial states, C = CTAs a multiprocessor: rows * kv_heads / sms for flashinfer, which does
 * not split here, times S for the routes that split every row in S. `balanced` is not the seed's:
 * one launch of sms * Cmin equal parts, so C = Cmin, and at most one state more than cuts a
 * segment.
 */
#ifndef PKV_POLICY_POLICY_H
#define PKV_POLICY_POLICY_H

#include "pkv/pkv.h"

/* The seed's thresholds. */
#define PKV_SEED_GROUP       4     /* query heads a KV head its kernels are calibrated for */
#define PKV_SEED_LONG_TOKENS 16384 /* longest row of a batch that counts as long */
/* One row counts as long from the shortest prompt on that the seed measured with one row. */
#define PKV_SEED_LONG_SINGLE 8192

/* A batch, summed up. */
typedef struct pkv_policy_batch {
  const pkv_shape *shape;
  const int32_t *seq_len; /* [rows] */
  int32_t rows;
  int32_t longest, shortest; /* tokens; 0 without rows */
  int64_t kv_bytes;
} pkv_policy_batch;

/* A profile with its zeros filled in. */
typedef struct pkv_policy_device {
  double read_bytes_us, launch_us;
  int32_t sms, min_ctas;
  uint32_t routes;
  int32_t parts, layers;       /* 0 = default */
  const pkv_cost_model *model; /* or NULL */
} pkv_policy_device;

pkv_status pkv_policy_batch_init(pkv_policy_batch *out, const pkv_shape *shape, pkv_dtype kv_dtype,
                                 int32_t rows, const int32_t *seq_len, pkv_error *err);
/* profile NULL: the seed's device. */
pkv_status pkv_policy_device_init(pkv_policy_device *out, const pkv_profile *profile,
                                  pkv_error *err);

/* Splits a row under the second policy: the seed's one-row bucket rule (split, bucket_*), the
   most that the work queue's rule gives a row (workqueue); 1 for the others. */
int32_t pkv_policy_splits(const pkv_policy_batch *batch, pkv_route route);

/* Microseconds of `route` with S = splits. bucket_* count distinct lengths: rows * distinct steps.
 */
double pkv_policy_estimate(const pkv_policy_batch *batch, const pkv_policy_device *device,
                           pkv_route route, int32_t splits);

#endif
