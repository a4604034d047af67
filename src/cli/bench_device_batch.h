/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch in a device's memory: layers of K and V, block table, queries, output. Pages lie as the
 * batch says, with a page that no row owns after every 16; what no row owns holds NaN. There are so
 * many layers that a pass over all of them reads at least COLD_BYTES where memory allows it: each
 * layer is read from memory, not from a cache.
 */
#ifndef PKV_CLI_BENCH_DEVICE_BATCH_H
#define PKV_CLI_BENCH_DEVICE_BATCH_H

#include "cli/bench_attention.h"
#include "measure/meter.h"

/* The block of memory for K and V, kept from batch to batch. */
typedef struct bench_device_pool {
  void *memory;
  int64_t bytes, limit;
} bench_device_pool;

typedef struct bench_device_batch {
  pkv_meter *meter;
  const bench_batch *batch;
  pkv_meter_batch view;
  pkv_cache first;   /* layer 0 */
  pkv_dtype q_dtype; /* of q and out */
  int32_t layers, longest;
  int64_t layer_bytes;  /* K and V */
  int64_t useful_bytes; /* of a layer: what some query sees, row by row */
  int64_t unique_bytes; /* the same, pages that rows share once */
  double shared_flops;  /* products of queries with pages that several rows have */
  int32_t *shared;      /* [rows], host: leading pages that other rows have, too */
  uint64_t seed;
  void *table, *seq_len, *first_page, *borrowed, *owned, *q, *needle_q, *out;
  size_t q_bytes; /* of q, needle_q and out each */
} bench_device_batch;

/* E_LIMIT: two layers do not fit into pool->limit. Deinit also after a failure. */
pkv_status bench_device_batch_init(bench_device_batch *out, pkv_meter *meter,
                                   bench_device_pool *pool, const bench_frame *frame,
                                   const bench_batch *batch, pkv_error *err);
void bench_device_batch_deinit(bench_device_batch *d);

/* Views of one layer, and a run over it. */
pkv_cache bench_device_batch_cache(const bench_device_batch *d, int32_t layer);
pkv_attention_args bench_device_batch_args(const bench_device_batch *d, const pkv_cache *cache);

/*
 * Where the needle of round `round` of `rounds` lies in each row; -1: the row has no place that
 * all its queries see. Where rows share, those that have a page have its needle: rounds go through
 * the pages of the longest row, every other one through the rows' last pages. position [rows].
 */
void bench_needle_positions(int32_t *position, const bench_device_batch *d, const pkv_shape *shape,
                            int32_t round, int32_t rounds);

#endif
