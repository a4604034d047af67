/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: what the parts of pkv_plan_check have in common. */
#ifndef PKV_PLAN_PLAN_CHECK_H
#define PKV_PLAN_PLAN_CHECK_H

#include "plan/plan_setup.h"

#define PKV_FAULT(err, condition, ...) PKV_CHECK(err, condition, PKV_E_FORMAT, __VA_ARGS__)

/* An array of count * size bytes at an aligned offset between the header and the end. */
pkv_status pkv_check_array(const struct pkv_plan *plan, const char *name, int64_t at, int64_t count,
                           int64_t size, pkv_error *err);
/* Parts, units and costs of the routes with a line of costs. */
pkv_status pkv_check_line(const struct pkv_plan *plan, pkv_error *err);
/* All that is particular to `shared` (tree_check.c); shape and lengths have been checked. */
pkv_status pkv_check_shared(const struct pkv_plan *plan, pkv_error *err);

#endif
