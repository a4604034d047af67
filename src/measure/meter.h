/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `pkv bench attention --device cuda` needs of a GPU besides libpkv: its name and size, data
 * in a cache, the double answer, the null read, and time. Linked into the command only. Callers see
 * no header of CUDA; without CUDA in the build, pkv_meter_create says so and nothing else exists.
 *
 * All work goes to one stream. Single-owner.
 */
#ifndef PKV_MEASURE_METER_H
#define PKV_MEASURE_METER_H

#include "pkv/device.h"

typedef struct pkv_meter pkv_meter;

/* A batch of rows, as the kernels below see it. Pointers are the device's. */
typedef struct pkv_meter_batch {
  int32_t rows, q_len, window;
  int32_t query_heads;
  int64_t stride;            /* between rows of the table */
  const int32_t *table;      /* [rows, stride] */
  const int32_t *seq_len;    /* [rows] */
  const int32_t *first_page; /* [rows + 1]: pages that are read, as exclusive prefix sums */
  const int32_t *borrowed;   /* [rows]: leading pages that another row reads; NULL = none */
  const int32_t *owned;      /* [pages of the cache]: tokens of the page that some row owns */
  int64_t pages_read;        /* first_page[rows] */
} pkv_meter_batch;

/* Enqueues call number `call` of what is timed. */
typedef pkv_status (*pkv_meter_work)(void *ctx, int32_t call, pkv_error *err);

/* A stretch of a graph that is timed as a whole. */
typedef struct pkv_meter_section {
  pkv_meter_work work;
  void *ctx;
  int32_t calls;
} pkv_meter_section;

typedef struct pkv_meter_info {
  char device[96], driver[96];
  int32_t multiprocessors;
  int64_t free_bytes;
} pkv_meter_info;

typedef struct pkv_meter_ops {
  void (*destroy)(pkv_meter *meter);
  /* Fills a block of device memory with one byte, in order with the stream. */
  pkv_status (*set)(pkv_meter *meter, void *ptr, int byte, size_t bytes, pkv_error *err);
  /* NaN in the plan's workspace: no launch may depend on what it holds. */
  pkv_status (*poison)(pkv_meter *meter, pkv_device_plan *plan, pkv_error *err);

  /* K and V from a counter, the same in every layout; NaN in what no row owns. */
  pkv_status (*fill)(pkv_meter *meter, const pkv_cache *cache, const pkv_meter_batch *batch,
                     uint64_t seed, pkv_error *err);
  /* Key of `value` times a pattern of signs at position[row] of each row (-1: none), host array
     [rows]; value 0 puts back what `fill` wrote with `seed`. */
  pkv_status (*needle)(pkv_meter *meter, const pkv_cache *cache, const pkv_meter_batch *batch,
                       const int32_t *position, float value, uint64_t seed, pkv_error *err);
  /* Largest difference of out [rows * q_len, query_heads, head_dim] from V at position[row]; inf
     where out holds NaN. Waits. */
  pkv_status (*needle_error)(pkv_meter *meter, float *error, const pkv_cache *cache,
                             const pkv_meter_batch *batch, const int32_t *position, const void *out,
                             pkv_dtype out_dtype, pkv_error *err);
  /* Attention in double: host array [rows * q_len, query_heads, head_dim]. seq_len is the host's
     copy. Waits. */
  pkv_status (*answer)(pkv_meter *meter, double *answer, const pkv_cache *cache,
                       const pkv_meter_batch *batch, const int32_t *seq_len, const void *q,
                       pkv_dtype q_dtype, pkv_error *err);

  /* Enqueues a read of every K and V vector that some query of the batch sees, through the table,
     kept as a checksum. waves: blocks a multiprocessor. */
  pkv_status (*null_read)(pkv_meter *meter, const pkv_cache *cache, const pkv_meter_batch *batch,
                          int32_t waves, pkv_error *err);

  /*
   * All sections captured in one graph, one after another, each between two events of the graph's
   * own; or (apart != 0) each in a graph of its own with events around its launch. Replayed
   * warmups + repeats times; us [count, repeats] are microseconds of a whole section.
   */
  pkv_status (*graph)(pkv_meter *meter, double *us, const pkv_meter_section *sections,
                      int32_t count, int32_t apart, int32_t warmups, int32_t repeats,
                      pkv_error *err);
  /* One section without a graph, the host enqueueing all its calls between two events. */
  pkv_status (*events)(pkv_meter *meter, double *us, const pkv_meter_section *section,
                       int32_t warmups, int32_t repeats, pkv_error *err);
  /* Each call in a graph of its own; launch and wait, by the host's clock, calls in turn. */
  pkv_status (*launches)(pkv_meter *meter, double *us, const pkv_meter_section *section,
                         int32_t warmups, int32_t repeats, pkv_error *err);
} pkv_meter_ops;

struct pkv_meter {
  const pkv_meter_ops *ops;
  pkv_executor *executor; /* of the device; owned */
  void *stream;           /* for pkv_device_* */
  pkv_meter_info info;
};

/* E_UNSUPPORTED: no CUDA in this build, or no device here. */
pkv_status pkv_meter_create(pkv_meter **out, pkv_error *err);
static inline void pkv_meter_destroy(pkv_meter *meter) {
  if (meter) meter->ops->destroy(meter);
}

#ifdef __CUDACC__
#define PKV_METER_HD __host__ __device__
#else
#define PKV_METER_HD
#endif

/* Value `i` of the pattern of signs that `needle` writes: +1 or -1. */
PKV_METER_HD static inline float pkv_meter_sign(int32_t i) {
  return ((uint32_t)i * 2654435761u >> 16 & 1u) ? 1.0f : -1.0f;
}

#endif
