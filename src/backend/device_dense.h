/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense half of a backend with memory of its own: what a layer graph needs besides attention.
 * PODs and a table of functions, included by .c and .cu alike.
 *
 * What holds for all of them
 *   - Pointers to tensors, weights, ids, positions and slots are the device's; parameters are read
 *     before the call returns, so they may lie on the caller's stack. Arguments arrive checked.
 *   - A call puts work on `stream` and returns at once. Nothing allocates or synchronises but what
 *     says so: a step can be captured in a graph.
 *   - `act` is f16 or bf16, one for the whole model: the type of activations, of q and of weights
 *     that are not quantised. The residual stream x is float, so that layers add up exactly; sums
 *     are float everywhere.
 *   - Row i of a result depends on row i of the inputs only. How a sum is ordered may depend on m.
 *   - What the host cannot see is cut, not trusted: ids outside the vocabulary embed as zeros,
 *     slots outside the cache are skipped (-1: a padded row).
 */
#ifndef PKV_BACKEND_DEVICE_DENSE_H
#define PKV_BACKEND_DEVICE_DENSE_H

#include "backend/backend.h"

/*
 * Element i of random weights: near enough normal, of this deviation. Integers up to one product:
 * the same float on host and device.
 */
PKV_HD static inline float pkv_random_weight(uint64_t seed, uint64_t i, float deviation) {
  uint64_t z = seed + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  z ^= z >> 31;
  /* The sum of four 16-bit numbers has the deviation 65536 / sqrt(3). */
  const int32_t sum = (int32_t)(z & 0xffff) + (int32_t)(z >> 16 & 0xffff) +
                      (int32_t)(z >> 32 & 0xffff) + (int32_t)(z >> 48) - 131070;
  return (float)sum * (deviation / 37837.2271f);
}

/* Sums of k products with numbers around 1 stay around 1. */
PKV_HD static inline float pkv_random_deviation(int64_t k) {
  return 1.0f / sqrtf((float)k);
}

/* Rows of random weights: element (i, j) is pkv_random_weight of number first + i stride + j. */
typedef struct pkv_dense_random_params {
  void *data; /* [n, k] of type act */
  pkv_dtype act;
  int64_t n, k;
  uint64_t seed;
  int64_t first, stride;
  float deviation;
} pkv_dense_random_params;

/* `count` elements in a row, numbers 0 and up. */
static inline pkv_dense_random_params pkv_dense_random_run(void *data, pkv_dtype act, int64_t count,
                                                           uint64_t seed, float deviation) {
  const pkv_dense_random_params p = {data, act, 1, count, seed, 0, count, deviation};
  return p;
}

/* y[i] = row ids[i] of w, times scale. w: act type, or f32. */
typedef struct pkv_dense_embed_params {
  pkv_weight w; /* data: the device's, [n, k] */
  pkv_dtype act;
  int32_t m;
  const int32_t *ids; /* [m] */
  float *y;           /* [m, k] */
  float scale;
} pkv_dense_embed_params;

/* What the two halves of w's outputs become: y[i] = f(gate[i]) * up[i]. */
typedef enum pkv_dense_gate {
  PKV_DENSE_NO_GATE = 0,
  PKV_DENSE_SILU = 1,
  PKV_DENSE_GELU = 2 /* its tanh form */
} pkv_dense_gate;

/*
 * y = x w^T, or y += x w^T. With a gate w holds n / 2 rows of gate, then n / 2 rows of up, and y
 * has n / 2 columns.
 */
typedef struct pkv_dense_matmul_params {
  pkv_weight w; /* data as `weight_pack` laid it out; type: act's, or a quantised one */
  pkv_dtype act;
  int32_t m;
  const void *x;    /* act [m, k] */
  int64_t x_stride; /* elements between rows; a multiple of 8 */
  void *y;          /* y_f32 ? float : act */
  int64_t y_stride; /* a multiple of 8 (4 of float) */
  int32_t y_f32;
  int32_t accumulate; /* with y_f32 only */
  pkv_dense_gate gate;
  void *gate_scratch; /* act [m, n], where a gate is wanted; may stay unused */
} pkv_dense_matmul_params;

/*
 * Row i, in this order: x += bias; x += delta, or norm(delta) * delta_weight; y = norm(x) * weight.
 * norm(v) = v / sqrt(mean(v^2) + eps). x is written back where bias or delta is there.
 */
typedef struct pkv_dense_norm_params {
  pkv_dtype act;
  int32_t m, n;
  float eps;
  float *x;                  /* [m, n]; with rows: [any, n], not written back */
  const int32_t *rows;       /* [m] or NULL: row i reads row rows[i] of x */
  const float *bias;         /* [n] or NULL */
  const float *delta;        /* [m, n] or NULL */
  const float *delta_weight; /* [n] or NULL */
  const float *weight;       /* [n] or NULL: y is not written */
  void *y;                   /* act [m, n] */
} pkv_dense_norm_params;

/*
 * Rows of a fused product q | k | v: biases, norms of single heads, rotation; q in its place, k and
 * v to their slots of the cache.
 */
typedef struct pkv_dense_rope_params {
  pkv_dtype act;
  int32_t m, query_heads, kv_heads, head_dim;
  void *qkv;                    /* act [m, (query_heads + 2 kv_heads) * head_dim] */
  int64_t stride;               /* elements between rows; a multiple of 8 */
  const float *bias;            /* [(query_heads + 2 kv_heads) * head_dim] or NULL */
  const float *q_norm, *k_norm; /* [head_dim] or NULL, both or none */
  float eps;
  int32_t dims, adjacent;   /* as pkv_rope_params */
  const double *frequency;  /* [dims / 2] radians a position */
  float length;             /* of the rotated pairs: 1, more with yarn */
  const int32_t *positions; /* [m] */
  const int64_t *slots;     /* [m] */
  pkv_cache cache;
} pkv_dense_rope_params;

/*
 * Attention of the chunks of prompts: row r's new tokens are rows first[r] .. first[r + 1] - 1 of
 * q and the last ones of its seq_len[r] tokens, which lie in the cache already. Causal.
 */
typedef struct pkv_dense_prefill_params {
  pkv_dtype act;
  int32_t rows;
  int32_t tokens;         /* first[rows]: the host knows it, and the grid comes from it */
  int32_t longest;        /* most new tokens of a row */
  const int32_t *first;   /* [rows + 1] */
  const int32_t *seq_len; /* [rows] new tokens included */
  pkv_cache cache;
  const int32_t *block_table; /* [rows, block_table_stride] */
  int64_t block_table_stride;
  int32_t max_pages;
  int32_t query_heads;
  const void *q;    /* act [tokens, query_heads, head_dim] at q_stride */
  int64_t q_stride; /* elements between tokens; heads lie together */
  void *out;        /* act */
  int64_t out_stride;
  float scale;
  int32_t window; /* 0 = none */
  float soft_cap; /* of the logits, 0 = none */
} pkv_dense_prefill_params;

/* How one row's token is chosen: pkv_sampling of the engine's sampling.h, word for word. */
typedef struct pkv_dense_sample_row {
  float temperature; /* 0 = greedy */
  int32_t top_k;
  float top_p, min_p;
  uint64_t seed, stream;
  int64_t position;
} pkv_dense_sample_row;

/* A candidate is a logit and a token of 24 bits. */
#define PKV_DENSE_SAMPLED_VOCAB (1 << 24)

/* ids[i]: the token of row i, -1 where a logit is not finite. */
typedef struct pkv_dense_sample_params {
  int32_t m, vocab;    /* vocab: tokens that may be sampled */
  const float *logits; /* [m, stride] */
  int64_t stride;
  const pkv_dense_sample_row *rows; /* [m], or NULL: all greedy, of equal logits the first id */
  int32_t *ids;                     /* [m] */
  void *scratch;                    /* sample_bytes(m, vocab) */
} pkv_dense_sample_params;

typedef struct pkv_dense_ops {
  /* E_UNSUPPORTED, naming it, where a library that products need is missing. Once an executor. */
  pkv_status (*prepare)(pkv_executor *executor, pkv_error *err);
  /* Bytes free on the device. */
  pkv_status (*free_bytes)(size_t *bytes, pkv_executor *executor, pkv_error *err);
  /* Host memory that copies reach without waiting. */
  pkv_status (*host_alloc)(void **out, pkv_executor *executor, size_t bytes, pkv_error *err);
  void (*host_free)(pkv_executor *executor, void *ptr);
  pkv_status (*stream_create)(void **stream, pkv_executor *executor, pkv_error *err);
  void (*stream_destroy)(pkv_executor *executor, void *stream);
  /* What is put on the stream from begin to end is kept, not run; launch runs it. */
  pkv_status (*graph_begin)(pkv_executor *executor, void *stream, pkv_error *err);
  pkv_status (*graph_end)(void **graph, pkv_executor *executor, void *stream, pkv_error *err);
  pkv_status (*graph_launch)(pkv_executor *executor, void *graph, void *stream, pkv_error *err);
  void (*graph_destroy)(pkv_executor *executor, void *graph);

  /* The type that a matrix of this type has on the device: its own where kernels take it and are
     the fastest for products of up to `rows` rows, else act's (dequantised on the way). rows 0: its
     own where kernels take it at all. */
  pkv_wtype (*weight_type)(pkv_executor *executor, pkv_wtype type, pkv_dtype act, int32_t rows);
  /* Bytes of such a matrix on the device. */
  size_t (*weight_bytes)(const pkv_weight *w);
  /* Fills rows first .. of the device's matrix w, which has no gaps, with `host`, of w's type and
     k, which may have. Synchronises. May take memory while it runs. */
  pkv_status (*weight_pack)(pkv_executor *executor, const pkv_weight *w, int64_t first,
                            const pkv_weight *host, pkv_error *err);
  pkv_status (*weight_random)(pkv_executor *executor, const pkv_dense_random_params *p,
                              void *stream, pkv_error *err);

  pkv_status (*embed)(pkv_executor *executor, const pkv_dense_embed_params *p, void *stream,
                      pkv_error *err);
  pkv_status (*matmul)(pkv_executor *executor, const pkv_dense_matmul_params *p, void *stream,
                       pkv_error *err);
  pkv_status (*norm)(pkv_executor *executor, const pkv_dense_norm_params *p, void *stream,
                     pkv_error *err);
  pkv_status (*rope)(pkv_executor *executor, const pkv_dense_rope_params *p, void *stream,
                     pkv_error *err);
  /* Whether `prefill` covers them; where not, or NULL, pkv_device_attention does it. */
  int32_t (*prefill_takes)(pkv_executor *executor, const pkv_dense_prefill_params *p);
  pkv_status (*prefill)(pkv_executor *executor, const pkv_dense_prefill_params *p, void *stream,
                        pkv_error *err);
  /* 1: `sample` takes rows, of PKV_DENSE_SAMPLED_VOCAB tokens at most; 0: greedy only. */
  int32_t (*samples)(pkv_executor *executor);
  size_t (*sample_bytes)(int32_t m, int32_t vocab);
  pkv_status (*sample)(pkv_executor *executor, const pkv_dense_sample_params *p, void *stream,
                       pkv_error *err);

  /*
   * Several executors, each of a device of its own, that compute parts of the same sums: ranks of a
   * group. One thread drives them all.
   */
  /* The executor's device becomes the calling thread's: before work for another one's. */
  pkv_status (*select)(pkv_executor *executor, pkv_error *err);
  /* 1: kernels of each executor read and write the memory of the others. Once before
     group_create: it may have to be switched on. */
  pkv_status (*group_reaches)(int32_t *reaches, pkv_executor *const *executors, int32_t count,
                              pkv_error *err);
  /* For norms of up to `rows` rows. E_UNSUPPORTED, naming it, where a library is missing that it
     needs. The executors stay the caller's and outlive the group. */
  pkv_status (*group_create)(void **group, pkv_executor *const *executors, int32_t count,
                             int32_t rows, pkv_error *err);
  /* After the graphs that have its work. */
  void (*group_destroy)(void *group);
  /*
   * `norm` of each rank, p[rank] on streams[rank], whose delta is the sum of all ranks' deltas: in
   * all ranks the same bits. Each has the same m and n. What lies in a rank's delta afterwards is
   * undefined, and two calls in a row have different ones: others may still read this one.
   */
  pkv_status (*group_norm)(void *group, const pkv_dense_norm_params *p, void *const *streams,
                           pkv_error *err);
  /* What comes behind it on streams[0] sees what the other ranks' streams wrote before it. Only
     where group_reaches said so. */
  pkv_status (*group_gather)(void *group, void *const *streams, pkv_error *err);
  /* Until all ranks' streams have nothing left to do, or one has failed: then the others may wait
     for it in vain, and the group is of no use any more. */
  pkv_status (*group_wait)(void *group, void *const *streams, pkv_error *err);
} pkv_dense_ops;

#endif
