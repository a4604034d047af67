/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PKV_BASE_SORT_H
#define PKV_BASE_SORT_H

#include <stddef.h>

/* Ascending; no value is NaN. */
void pkv_sort_doubles(double *values, size_t count);

#endif
