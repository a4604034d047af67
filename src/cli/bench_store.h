/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cache that `pkv bench attention` reads, and the two reads that attention is measured against:
 *   null read   the same pages through the same block table, those that rows share once, each page
 *               as a whole (all its heads) and the next one prefetched, by as many threads, with a
 *               checksum as the only work: the fastest way through these pages that we know,
 *               whatever order attention takes
 *   plain read  as many bytes of the same storage from front to back
 * Batches move through the storage: what is read now was last read a gigabyte ago, so caches are
 * cold.
 */
#ifndef PKV_CLI_BENCH_STORE_H
#define PKV_CLI_BENCH_STORE_H

#include "base/workers.h"
#include "cli/bench_cells.h"

typedef struct bench_store {
  pkv_pool *pool;
  pkv_cache cache;
  int32_t q_len, window; /* tokens before a row's window are not read */
  int64_t shift;         /* where the next batch starts, in pages */
  int64_t placed;        /* where the last one started: what the reads go over */
} bench_store;

/* Fills `pages` pages with numbers of a normal distribution. huge: asks the kernel for transparent
   huge pages; else the storage is the library's own. Deinit also after a failure. */
pkv_status bench_store_init(bench_store *out, const pkv_shape *shape, pkv_dtype dtype,
                            pkv_layout layout, int64_t pages, bool huge, uint64_t seed,
                            pkv_error *err);
void bench_store_deinit(bench_store *store);

/* The block table [rows, max_pages] of the batch where it lies now; then moves on. */
void bench_store_place(int32_t *ids, bench_store *store, const bench_batch *batch);

/* Bytes of K and V that some query of the batch sees, each once. */
int64_t bench_store_bytes(const bench_store *store, const bench_batch *batch);

/* Both return a checksum, which depends on what was read only. */
uint64_t bench_null_read(pkv_workers *workers, const bench_store *store, const bench_batch *batch,
                         const int32_t *ids);
uint64_t bench_plain_read(pkv_workers *workers, const bench_store *store, int64_t bytes);

#endif
