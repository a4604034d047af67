/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of worker threads that runs one parallel loop at a time. The calling thread works too.
 * Items are handed out by an atomic ticket: which worker runs an item is not defined, so results
 * must not depend on it.
 */
#ifndef PKV_BASE_WORKERS_H
#define PKV_BASE_WORKERS_H

#include "base/alloc.h"

typedef struct pkv_workers pkv_workers;

/* item: 0 .. count-1; worker: 0 .. threads-1, stable during one call, for per-worker scratch. */
typedef void (*pkv_work_fn)(void *ctx, int64_t item, int32_t worker);

/* threads includes the caller; 0 = one a core this process may run on. */
pkv_status pkv_workers_create(pkv_workers **out, int32_t threads, const pkv_allocator *allocator,
                              pkv_error *err);
void pkv_workers_destroy(pkv_workers *workers);
int32_t pkv_workers_threads(const pkv_workers *workers);
/*
 * Runs fn for every item and returns when all are done; what they wrote is visible to the caller.
 * Allocates nothing. Workers spin briefly before they sleep, so that many short loops in a row cost
 * microseconds. count 0 returns at once.
 */
void pkv_workers_run(pkv_workers *workers, pkv_work_fn fn, void *ctx, int64_t count);

#endif
