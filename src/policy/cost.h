/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: the cost model over a summed-up batch. Pure functions. */
#ifndef PKV_POLICY_COST_H
#define PKV_POLICY_COST_H

#include <stdbool.h>

#include "pkv/profile.h"
#include "policy/policy.h"

/* f [PKV_COST_FEATURES]; tree: not NULL for kind PKV_ROUTE_SHARED. */
void pkv_cost_features(double *f, int32_t *splits, int32_t kind, const pkv_policy_batch *batch,
                       const pkv_policy_device *device, const pkv_plan_stats *tree);

/* Every kind of the device's model; tree may be NULL. */
void pkv_cost_predict(pkv_prediction *out, const pkv_policy_batch *batch,
                      const pkv_policy_device *device, const pkv_plan_stats *tree);

/* Kind to route: variants are one route. */
static inline pkv_route pkv_cost_route(int32_t kind) {
  if (kind == PKV_COST_WORKQUEUE_FUSED) return PKV_ROUTE_WORKQUEUE;
  return kind == PKV_COST_FLASHINFER_CORES ? PKV_ROUTE_FLASHINFER : (pkv_route)kind;
}

#endif
