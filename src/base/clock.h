/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PKV_BASE_CLOCK_H
#define PKV_BASE_CLOCK_H

#include <stdint.h>

/* Monotonic nanoseconds. */
int64_t pkv_clock_ns(void);

#endif
