/* SPDX-License-Identifier: Apache-2.0 */
/* One pass over JSON text before it is parsed: how deep it nests, how many values it may hold. */
#ifndef PKV_BASE_JSON_BOUNDS_H
#define PKV_BASE_JSON_BOUNDS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/limits.h"

typedef enum pkv_json_bound {
  PKV_JSON_FITS = 0,
  PKV_JSON_TOO_DEEP = 1,
  PKV_JSON_TOO_MANY = 2
} pkv_json_bound;

/* Linear, without a stack. Says nothing about whether the text is JSON: for text that is, the
 * answer is exact, or too high by the number of empty lists and objects. */
pkv_json_bound pkv_json_check_bounds(const char *text, size_t bytes, size_t max_values);

#endif
