/* SPDX-License-Identifier: Apache-2.0 */
#include "server/json_out.h"

#include "base/status.h"

pkv_status pkv_json_append(pkv_buffer *out, json_t *value, pkv_error *err) {
  const pkv_status status = pkv_json_write(out, value, JSON_COMPACT | JSON_REAL_PRECISION(9));
  json_decref(value);
  PKV_CHECK(err, status == PKV_OK, status, "JSON could not be written");
  return PKV_OK;
}

pkv_status pkv_json_append_event(pkv_buffer *out, json_t *value, pkv_error *err) {
  const pkv_status begun = pkv_buffer_append(out, "data: ", 6, err);
  if (begun != PKV_OK) {
    json_decref(value);
    return begun;
  }
  PKV_TRY(pkv_json_append(out, value, err));
  return pkv_buffer_append(out, "\n\n", 2, err);
}
