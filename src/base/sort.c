/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sort.h"

#include <stdlib.h>

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

void pkv_sort_doubles(double *values, size_t count) {
  qsort(values, count, sizeof *values, compare);
}
