/* SPDX-License-Identifier: Apache-2.0 */
/* The meter of a build without CUDA. */
#include "measure/meter.h"

#include "base/status.h"

pkv_status pkv_meter_create(pkv_meter **out, pkv_error *err) {
  *out = NULL;
  return PKV_FAIL(err, PKV_E_UNSUPPORTED, "this build has no CUDA (PKV_CUDA is OFF)");
}
