/* SPDX-License-Identifier: Apache-2.0 */
/* The names of routes and policies, as the command line and the result files spell them. */
#include "pkv/pkv.h"

const char *pkv_route_name(pkv_route route) {
  switch (route) {
  case PKV_ROUTE_AUTO:
    return "auto";
  case PKV_ROUTE_BUCKET_EXACT:
    return "bucket_exact";
  case PKV_ROUTE_BUCKET_PADDED:
    return "bucket_padded";
  case PKV_ROUTE_SPLIT:
    return "split";
  case PKV_ROUTE_WORKQUEUE:
    return "workqueue";
  case PKV_ROUTE_BALANCED:
    return "balanced";
  case PKV_ROUTE_SHARED:
    return "shared";
  case PKV_ROUTE_FLASHINFER:
    return "flashinfer";
  }
  return "?";
}

const char *pkv_policy_name(pkv_policy policy) {
  switch (policy) {
  case PKV_POLICY_FIXED:
    return "fixed";
  case PKV_POLICY_STATIC:
    return "static";
  case PKV_POLICY_ROOFLINE:
    return "roofline";
  case PKV_POLICY_CALIBRATED:
    return "calibrated";
  }
  return "?";
}
