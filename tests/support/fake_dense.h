/* SPDX-License-Identifier: Apache-2.0 */
/* The dense table of support/fake_device.h: plain loops over host memory, sums in double. */
#ifndef PKV_TEST_FAKE_DENSE_H
#define PKV_TEST_FAKE_DENSE_H

#include "backend/device_dense.h"

#define FAKE_CALL_BYTES 1024

extern const pkv_dense_ops fake_dense_ops;

typedef pkv_status (*fake_call)(pkv_executor *executor, const void *params, pkv_error *err);

/* fake_device.c: runs the call, or keeps it with a copy of its parameters where the stream
   captures. */
pkv_status fake_put(void *stream, fake_call run, pkv_executor *executor, const void *params,
                    size_t bytes, pkv_error *err);
/* Counts a call that can fail; a failure when it is the one that should. */
pkv_status fake_counted(const char *name, pkv_error *err);

#endif
