/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_policy_choose: which route. `fixed`, the seed's first thresholds (`static`) and its second
 * rule (`roofline`), each followed by a look at what is available. Pure: no state, no clock.
 *
 * The seed's rules as implemented
 *   static    group != 4: flashinfer. One row of >= 8192 tokens: split with 32. 8 rows or more, the
 *             longest >= 16384: workqueue with 24. Else flashinfer.
 *   roofline  group != 4, longest row < 16384, or 2 to 7 rows: flashinfer. Else the smaller
 *             estimate of flashinfer and, for one row, split, for 8 or more, workqueue with its
 *             own rule.
 *   calibrated  the smallest prediction of the profile's cost model (profile.h), of what is there.
 * What is missing is replaced by the available route with the smallest estimate among balanced,
 * workqueue and split, or else by a bucket route.
 */
#include "policy/policy.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "policy/cost.h"
#include "policy/seed_rule.h"
#include "policy/shape.h"

#define ROUTE_BIT(route) (1u << (unsigned)(route))
#define ALL_ROUTES       0xfeu /* bucket_exact .. flashinfer */
#define AVAILABLE_HERE   0x3eu /* bucket_exact .. balanced */
#define SEED_READ_GB_S   302.0
#define SEED_LAUNCH_US   8.0
#define SEED_SMS         28
#define SEED_MIN_CTAS    4

/* Appends to the reason, cut where it is full. */
static void __attribute__((format(printf, 2, 3)))
explain(pkv_choice *out, const char *format, ...) {
  const size_t used = strlen(out->reason);
  va_list args;
  va_start(args, format);
  (void)vsnprintf(out->reason + used, sizeof out->reason - used, format, args);
  va_end(args);
}

pkv_status pkv_policy_device_init(pkv_policy_device *out, const pkv_profile *profile,
                                  pkv_error *err) {
  *out = (pkv_policy_device){
      SEED_READ_GB_S * 1e3, SEED_LAUNCH_US, SEED_SMS, SEED_MIN_CTAS, AVAILABLE_HERE, 0, 0, NULL};
  if (profile == NULL) return PKV_OK;
  PKV_CHECK_STRUCT(err, profile, pkv_profile);
  PKV_CHECK(err, isfinite(profile->read_gb_s) && profile->read_gb_s >= 0, PKV_E_INVALID,
            "profile->read_gb_s is %g", profile->read_gb_s);
  PKV_CHECK(err, isfinite(profile->launch_us) && profile->launch_us >= 0, PKV_E_INVALID,
            "profile->launch_us is %g", profile->launch_us);
  PKV_CHECK(err, profile->sms >= 0 && profile->min_ctas >= 0, PKV_E_INVALID,
            "profile->sms is %d, min_ctas is %d: negative", profile->sms, profile->min_ctas);
  PKV_CHECK(err, (profile->routes & ~ALL_ROUTES) == 0, PKV_E_INVALID,
            "profile->routes is 0x%x, known bits: 0x%x", (unsigned)profile->routes, ALL_ROUTES);
  if (profile->read_gb_s > 0) out->read_bytes_us = profile->read_gb_s * 1e3;
  if (profile->launch_us > 0) out->launch_us = profile->launch_us;
  if (profile->sms > 0) out->sms = profile->sms;
  if (profile->min_ctas > 0) out->min_ctas = profile->min_ctas;
  if (profile->routes != 0) out->routes = profile->routes;
  PKV_CHECK(err, profile->layers >= 0, PKV_E_INVALID, "profile->layers is %d, negative",
            profile->layers);
  out->layers = profile->layers;
  if (profile->model == NULL) return PKV_OK;
  PKV_CHECK_STRUCT(err, profile->model, pkv_cost_model);
  out->model = profile->model;
  out->parts = profile->model->parts;
  return PKV_OK;
}

pkv_status pkv_policy_batch_init(pkv_policy_batch *out, const pkv_shape *shape, pkv_dtype kv_dtype,
                                 int32_t rows, const int32_t *seq_len, pkv_error *err) {
  int64_t tokens = 0;
  PKV_TRY(pkv_shape_check(shape, err));
  PKV_CHECK(err, pkv_dtype_bytes(kv_dtype) > 0, PKV_E_INVALID, "kv_dtype is %d, not a known type",
            (int)kv_dtype);
  PKV_CHECK(err, rows >= 0, PKV_E_INVALID, "rows is %d, negative", rows);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  *out = (pkv_policy_batch){.shape = shape, .seq_len = seq_len, .rows = rows};
  for (int32_t row = 0; row < rows; row++) {
    const int32_t length = seq_len[row];
    PKV_CHECK(err, length >= 0, PKV_E_INVALID, "seq_len[%d] is %d, negative", row, length);
    if (length > out->longest) out->longest = length;
    if (row == 0 || length < out->shortest) out->shortest = length;
    const int64_t seen = (int64_t)shape->window + shape->q_len - 1;
    tokens += shape->window > 0 && seen < length ? seen : length;
  }
  const int64_t token_bytes =
      2 * (int64_t)shape->kv_heads * shape->head_dim * (int64_t)pkv_dtype_bytes(kv_dtype);
  PKV_CHECK(err, !__builtin_mul_overflow(tokens, token_bytes, &out->kv_bytes), PKV_E_RANGE,
            "%lld tokens of %lld bytes are beyond 64 bits", (long long)tokens,
            (long long)token_bytes);
  return PKV_OK;
}

static int32_t group_of(const pkv_policy_batch *batch) {
  return batch->shape->query_heads / batch->shape->kv_heads;
}

static void choose_static(pkv_choice *out, const pkv_policy_batch *batch) {
  out->wanted = PKV_ROUTE_FLASHINFER;
  if (group_of(batch) != PKV_SEED_GROUP) {
    explain(out, "static: group %d is not %d", group_of(batch), PKV_SEED_GROUP);
  } else if (batch->rows == 1 && batch->longest >= PKV_SEED_LONG_SINGLE) {
    out->wanted = PKV_ROUTE_SPLIT;
    out->splits = PKV_SEED_BUCKET_SPLITS;
    explain(out, "static: 1 row of %d >= %d tokens", batch->longest, PKV_SEED_LONG_SINGLE);
  } else if (batch->rows >= 8 && batch->longest >= PKV_SEED_LONG_TOKENS) {
    out->wanted = PKV_ROUTE_WORKQUEUE;
    out->splits = PKV_SEED_WORKQUEUE_SPLITS;
    explain(out, "static: %d >= 8 rows, longest %d >= %d", batch->rows, batch->longest,
            PKV_SEED_LONG_TOKENS);
  } else if (batch->rows > 1 && batch->rows < 8) {
    explain(out, "static: %d rows, between 1 and 8", batch->rows);
  } else {
    explain(out, "static: %d rows, longest %d < %d", batch->rows, batch->longest,
            batch->rows == 1 ? PKV_SEED_LONG_SINGLE : PKV_SEED_LONG_TOKENS);
  }
}

static void choose_roofline(pkv_choice *out, const pkv_policy_batch *batch,
                            const pkv_policy_device *device) {
  out->wanted = PKV_ROUTE_FLASHINFER;
  if (group_of(batch) != PKV_SEED_GROUP) {
    explain(out, "roofline: group %d is not %d", group_of(batch), PKV_SEED_GROUP);
    return;
  }
  if (batch->longest < PKV_SEED_LONG_TOKENS) {
    explain(out, "roofline: longest row %d < %d", batch->longest, PKV_SEED_LONG_TOKENS);
    return;
  }
  if (batch->rows > 1 && batch->rows < 8) {
    explain(out, "roofline: %d rows, between 1 and 8", batch->rows);
    return;
  }
  const pkv_route ours = batch->rows == 1 ? PKV_ROUTE_SPLIT : PKV_ROUTE_WORKQUEUE;
  const int32_t splits = pkv_policy_splits(batch, ours);
  const double flash = pkv_policy_estimate(batch, device, PKV_ROUTE_FLASHINFER, 1);
  const double estimate = pkv_policy_estimate(batch, device, ours, splits);
  explain(out, "roofline: flashinfer %.1f us, %s with %d splits %.1f us", flash,
          pkv_route_name(ours), splits, estimate);
  if (estimate >= flash) return;
  out->wanted = ours;
  out->splits = ours == PKV_ROUTE_SPLIT ? splits : 0;
}

/* The available route with the smallest estimate; AUTO when nothing is. */
static pkv_route best_available(const pkv_policy_batch *batch, const pkv_policy_device *device) {
  static const pkv_route order[] = {PKV_ROUTE_BALANCED, PKV_ROUTE_WORKQUEUE, PKV_ROUTE_SPLIT};
  static const pkv_route rest[] = {PKV_ROUTE_BUCKET_EXACT, PKV_ROUTE_BUCKET_PADDED,
                                   PKV_ROUTE_SHARED, PKV_ROUTE_FLASHINFER};
  pkv_route best = PKV_ROUTE_AUTO;
  double least = HUGE_VAL;
  for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
    if ((device->routes & ROUTE_BIT(order[i])) == 0) continue;
    const double estimate =
        pkv_policy_estimate(batch, device, order[i], pkv_policy_splits(batch, order[i]));
    if (estimate < least) {
      least = estimate;
      best = order[i];
    }
  }
  for (size_t i = 0; i < sizeof rest / sizeof *rest && best == PKV_ROUTE_AUTO; i++)
    if (device->routes & ROUTE_BIT(rest[i])) best = rest[i];
  return best;
}

/* Splits that the choice leaves to the plan become what the plan takes; 0 = the work queue's rule.
 */
static void settle(pkv_choice *out, const pkv_policy_batch *batch,
                   const pkv_policy_device *device) {
  out->route = out->wanted;
  if ((device->routes & ROUTE_BIT(out->wanted)) == 0) {
    out->route = best_available(batch, device);
    out->splits = out->route == PKV_ROUTE_SPLIT || out->route == PKV_ROUTE_BUCKET_EXACT ||
                          out->route == PKV_ROUTE_BUCKET_PADDED
                      ? pkv_policy_splits(batch, out->route)
                      : 0;
  }
  const int32_t splits = out->splits > 0 ? out->splits : pkv_policy_splits(batch, out->route);
  out->predicted_us = pkv_policy_estimate(batch, device, out->route, splits);
  if (out->route != out->wanted)
    explain(out, "; %s is not available: %s, %.1f us", pkv_route_name(out->wanted),
            pkv_route_name(out->route), out->predicted_us);
  else
    explain(out, ": %s, %.1f us", pkv_route_name(out->route), out->predicted_us);
}

/* The smallest prediction; a tie goes to the kind that comes first. */
static pkv_status choose_calibrated(pkv_choice *out, const pkv_policy_batch *batch,
                                    const pkv_policy_device *device, pkv_error *err) {
  pkv_prediction p[PKV_COST_KINDS];
  int32_t best = 0, next = 0;
  PKV_CHECK(err, device->model, PKV_E_INVALID,
            "policy calibrated needs a profile with a cost model: see pkv calibrate");
  pkv_cost_predict(p, batch, device, NULL);
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    if (p[kind].available && (best == 0 || p[kind].step_us < p[best].step_us)) best = kind;
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    if (p[kind].available && kind != best && (next == 0 || p[kind].step_us < p[next].step_us))
      next = kind;
  PKV_CHECK(err, best > 0, PKV_E_INVALID,
            "no route of profile->routes 0x%x is in the profile's cost model",
            (unsigned)device->routes);
  out->wanted = out->route = pkv_cost_route(best);
  out->splits = p[best].splits;
  out->kind = best;
  out->predicted_us = p[best].step_us;
  explain(out, "calibrated: %s %.1f us", pkv_cost_kind_name(best), p[best].step_us);
  if (next > 0)
    explain(out, ", next %s %.1f us", pkv_cost_kind_name(next), p[next].step_us);
  else
    explain(out, ", no other route");
  return PKV_OK;
}

pkv_status pkv_policy_choose(pkv_choice *out, pkv_policy policy, pkv_route fixed,
                             const pkv_shape *shape, pkv_dtype kv_dtype, int32_t rows,
                             const int32_t *seq_len, const pkv_profile *profile, pkv_error *err) {
  pkv_policy_batch batch;
  pkv_policy_device device;
  PKV_CHECK_STRUCT(err, out, pkv_choice);
  *out = (pkv_choice)PKV_CHOICE_INIT;
  PKV_TRY(pkv_policy_batch_init(&batch, shape, kv_dtype, rows, seq_len, err));
  PKV_TRY(pkv_policy_device_init(&device, profile, err));
  switch (policy) {
  case PKV_POLICY_FIXED:
    PKV_CHECK(err, (int)fixed >= PKV_ROUTE_AUTO && (int)fixed <= PKV_ROUTE_FLASHINFER,
              PKV_E_INVALID, "fixed is %d, not a known route", (int)fixed);
    out->wanted = fixed == PKV_ROUTE_AUTO ? PKV_ROUTE_BALANCED : fixed;
    explain(out, "fixed");
    break;
  case PKV_POLICY_STATIC:
    choose_static(out, &batch);
    break;
  case PKV_POLICY_ROOFLINE:
    choose_roofline(out, &batch, &device);
    break;
  case PKV_POLICY_CALIBRATED:
    return choose_calibrated(out, &batch, &device, err);
  default:
    return PKV_FAIL(err, PKV_E_INVALID, "policy is %d, known: 0 to %d", (int)policy,
                    (int)PKV_POLICY_CALIBRATED);
  }
  settle(out, &batch, &device);
  return PKV_OK;
}
