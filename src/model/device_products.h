/* SPDX-License-Identifier: Apache-2.0 */
/* Which forms of matrix products are the fastest on devices, kept in a file between processes. */
#ifndef PKV_MODEL_DEVICE_PRODUCTS_H
#define PKV_MODEL_DEVICE_PRODUCTS_H

#include "base/alloc.h"
#include "pkv/pkv.h"

/*
 * Executors of equal devices, whose products are prepared (they have weights). A file that is not
 * there, damaged, or of another device is as good as none: the log says so, and what it should say
 * is measured.
 */
void pkv_device_products_load(pkv_executor *const *executors, int32_t count, const char *path,
                              const pkv_allocator *allocator);
/* Writes the file anew where more than `saved` products have been measured; returns how many have
   been. A file that cannot be written is a line in the log. */
int32_t pkv_device_products_save(pkv_executor *const *executors, int32_t count, const char *path,
                                 int32_t saved, const pkv_allocator *allocator);

#endif
