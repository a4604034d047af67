/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json_bounds.h"

pkv_json_bound pkv_json_check_bounds(const char *text, size_t bytes, size_t max_values) {
  size_t depth = 0, values = 1;
  bool quoted = false;
  for (size_t i = 0; i < bytes; i++) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\')
        i++;
      else if (c == '"')
        quoted = false;
      continue;
    }
    if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > PKV_JSON_DEPTH) return PKV_JSON_TOO_DEEP;
      values++;
    } else if (c == ']' || c == '}') {
      if (depth > 0) depth--;
    } else if (c == ',') {
      values++;
    }
    if (values > max_values) return PKV_JSON_TOO_MANY;
  }
  return PKV_JSON_FITS;
}
