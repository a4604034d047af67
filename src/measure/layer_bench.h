/* SPDX-License-Identifier: Apache-2.0 */
/* One layer of a model on a GPU, attention and gated MLP, over random weights and pages: its time,
   and attention's share of it. */
#ifndef PKV_MEASURE_LAYER_BENCH_H
#define PKV_MEASURE_LAYER_BENCH_H

#include "measure/meter.h"

#define PKV_LAYER_REPEATS 15

typedef struct pkv_layer_shape {
  const char *name;
  int32_t width, feed_forward, query_heads, kv_heads, head_dim;
  int32_t head_norms; /* 1: q and k are normed head by head (qwen3) */
} pkv_layer_shape;

/* Microseconds a layer: medians of replays of a graph of several layers, each with weights and
   pages of its own, so that nothing is read from the last-level cache. */
typedef struct pkv_layer_times {
  double layer_us, attention_us;
  double weight_bytes, kv_bytes; /* that a layer reads */
  int32_t layers;                /* of the graph */
} pkv_layer_times;

/* bf16, pages of 16 tokens, every row `length` tokens long. E_NOMEM says what is missing. */
pkv_status pkv_layer_bench(pkv_layer_times *out, pkv_meter *meter, const pkv_layer_shape *shape,
                           int32_t rows, int32_t length, pkv_error *err);

#endif
