/* SPDX-License-Identifier: Apache-2.0 */
/* The dense table of support/fake_device.h: plain loops over host memory, sums in double. */
#ifndef PKV_TEST_FAKE_DENSE_H
#define PKV_TEST_FAKE_DENSE_H

#include "backend/device_dense.h"

#define FAKE_CALL_BYTES 1024
#define FAKE_RANKS      4

extern const pkv_dense_ops fake_dense_ops;

typedef pkv_status (*fake_call)(pkv_executor *executor, const void *params, pkv_error *err);

/* fake_device.c: runs the call, or keeps it with a copy of its parameters where the stream
   captures. */
pkv_status fake_put(void *stream, fake_call run, pkv_executor *executor, const void *params,
                    size_t bytes, pkv_error *err);
/* Ranks that compute together: their captured graphs wait for each other in their common calls. */
typedef struct fake_meeting {
  int count;
  const struct fake_graph *graph[FAKE_RANKS]; /* launched, not run yet */
} fake_meeting;
/* The same of a call of all ranks. */
pkv_status fake_put_all(fake_meeting *meeting, void *const *streams, fake_call run,
                        pkv_executor *executor, const void *params, size_t bytes, pkv_error *err);
/* A product of this shape runs: measured, where it is the executor's first. */
void fake_note_product(const pkv_executor *executor, const pkv_dense_matmul_params *p);
/* Counts a call that can fail; a failure when it is the one that should. */
pkv_status fake_counted(const char *name, pkv_error *err);

#endif
