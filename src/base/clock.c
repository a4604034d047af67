/* SPDX-License-Identifier: Apache-2.0 */
/* The monotonic clock. */
#include "base/clock.h"

#include <time.h>

int64_t pkv_clock_ns(void) {
  struct timespec t;
  if (clock_gettime(CLOCK_MONOTONIC, &t) != 0) return 0;
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
