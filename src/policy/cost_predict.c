/* SPDX-License-Identifier: Apache-2.0 */
/* Predictions of the cost model, and the public calls over a batch that is not summed up yet. */
#include "policy/cost.h"

#include <string.h>

#include "base/status.h"

#define DEFAULT_LAYERS 32

static double dot(const double *coefficients, const double *f) {
  double sum = 0;
  for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
    sum += coefficients[i] * f[i];
  return sum;
}

void pkv_cost_predict(pkv_prediction *out, const pkv_policy_batch *batch,
                      const pkv_policy_device *device, const pkv_plan_stats *tree) {
  const int32_t layers = device->layers > 0 ? device->layers : DEFAULT_LAYERS;
  memset(out, 0, PKV_COST_KINDS * sizeof *out);
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    const pkv_route_cost *cost = &device->model->cost[kind];
    double f[PKV_COST_FEATURES];
    if (cost->points == 0 || (device->routes >> pkv_cost_route(kind) & 1u) == 0) continue;
    if (kind == PKV_ROUTE_SHARED && tree == NULL) continue;
    pkv_cost_features(f, &out[kind].splits, kind, batch, device, tree);
    out[kind].available = 1;
    out[kind].attend_us = dot(cost->attend, f);
    out[kind].plan_us = dot(cost->plan, f);
    out[kind].step_us = out[kind].attend_us + out[kind].plan_us / layers;
  }
}

static pkv_status check_tree(const pkv_plan_stats *tree, pkv_error *err) {
  PKV_CHECK_STRUCT(err, tree, pkv_plan_stats);
  PKV_CHECK(err, tree->route == PKV_ROUTE_SHARED, PKV_E_INVALID,
            "tree->route is %s, counters of a plan of route shared are needed",
            pkv_route_name(tree->route));
  return PKV_OK;
}

pkv_status pkv_policy_features(double *features, int32_t *splits, int32_t kind,
                               const pkv_shape *shape, pkv_dtype kv_dtype, int32_t rows,
                               const int32_t *seq_len, const pkv_plan_stats *tree,
                               const pkv_profile *profile, pkv_error *err) {
  pkv_policy_batch batch;
  pkv_policy_device device;
  PKV_CHECK(err, features && splits, PKV_E_INVALID, "%s is NULL", features ? "splits" : "features");
  PKV_CHECK(err, kind > 0 && kind < PKV_COST_KINDS, PKV_E_INVALID, "kind is %d, known: 1 to %d",
            kind, PKV_COST_KINDS - 1);
  PKV_TRY(pkv_policy_batch_init(&batch, shape, kv_dtype, rows, seq_len, err));
  PKV_TRY(pkv_policy_device_init(&device, profile, err));
  if (kind == PKV_ROUTE_SHARED) PKV_TRY(check_tree(tree, err));
  pkv_cost_features(features, splits, kind, &batch, &device, tree);
  return PKV_OK;
}

pkv_status pkv_policy_predict(pkv_prediction *out, const pkv_shape *shape, pkv_dtype kv_dtype,
                              int32_t rows, const int32_t *seq_len, const pkv_plan_stats *tree,
                              const pkv_profile *profile, pkv_error *err) {
  pkv_policy_batch batch;
  pkv_policy_device device;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  PKV_TRY(pkv_policy_batch_init(&batch, shape, kv_dtype, rows, seq_len, err));
  PKV_TRY(pkv_policy_device_init(&device, profile, err));
  PKV_CHECK(err, device.model, PKV_E_INVALID, "profile has no cost model: see pkv calibrate");
  if (tree) PKV_TRY(check_tree(tree, err));
  pkv_cost_predict(out, &batch, &device, tree);
  return PKV_OK;
}
