/* SPDX-License-Identifier: Apache-2.0 */
/* What route_times has opened on a GPU, for others that measure there. */
#ifndef PKV_CLI_ROUTE_TIMES_DEVICE_H
#define PKV_CLI_ROUTE_TIMES_DEVICE_H

#include "cli/bench_device_batch.h"
#include "cli/route_times.h"
#include "pkv/flashinfer.h"

/* Borrowed. */
typedef struct route_times_device {
  pkv_meter *meter;
  const pkv_flashinfer_api *flashinfer; /* or NULL */
  bench_device_pool *pool;
  const bench_frame *frame;
} route_times_device;

/* t is open on a GPU. */
route_times_device route_times_device_of(route_times *t);

#endif
