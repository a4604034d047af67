/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The waist: what every backend can do, as POD parameters and a table of functions. Arguments
 * arrive checked.
 * Included by .c and .cu alike; no backend includes another.
 */
#ifndef PKV_BACKEND_BACKEND_H
#define PKV_BACKEND_BACKEND_H

#include <math.h>

#include "base/workers.h"
#include "plan/plan.h"

#define PKV_ROPE_PAIRS 128 /* of the largest head */

/* Everything of pkv_attention_args with its defaults resolved. */
typedef struct pkv_attention_params {
  const struct pkv_plan *plan;
  pkv_cache cache;            /* scales resolved: never 0; head scales may be NULL */
  const int32_t *block_table; /* [rows, block_table_stride] */
  int64_t block_table_stride;
  int32_t max_pages; /* entries of a row that may be read */
  const void *q;
  void *out;
  float *lse; /* or NULL */
  pkv_dtype q_dtype, out_dtype;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride;
  float scale, soft_cap;
  int32_t lse_base2;
  const float *sinks; /* [query_heads] or NULL */
  void *workspace;    /* laid out as plan->workspace_bytes says */
} pkv_attention_params;

/* pkv_rope with its defaults resolved. */
typedef struct pkv_rope_params {
  int32_t dims;     /* 0 = none */
  int32_t adjacent; /* 1: (2j, 2j + 1); 0: (j, j + dims / 2) */
  const int32_t *positions;
  const float *inverse_frequency;   /* on a device: [dims / 2] or NULL */
  double frequency[PKV_ROPE_PAIRS]; /* [dims / 2] where inverse_frequency is NULL */
} pkv_rope_params;

typedef struct pkv_append_params {
  pkv_cache cache;
  int64_t tokens;
  const int64_t *slots;
  const void *k, *v;
  pkv_dtype dtype;
  int64_t k_token_stride, v_token_stride, k_head_stride, v_head_stride;
  pkv_rope_params rope;
} pkv_append_params;

/* One pair turned by the angle of cosine c and sine s: one product rounded, one fused. */
PKV_HD static inline void pkv_rope_turn(float *a, float *b, float c, float s) {
  const float x = *a, y = *b;
  *a = fmaf(x, c, -(y * s));
  *b = fmaf(y, c, x * s);
}

/* Weight types, numbered as GGUF numbers them. */
typedef enum pkv_wtype {
  PKV_WTYPE_F32 = 0,
  PKV_WTYPE_F16 = 1,
  PKV_WTYPE_Q4_0 = 2,
  PKV_WTYPE_Q4_1 = 3,
  PKV_WTYPE_Q5_0 = 6,
  PKV_WTYPE_Q5_1 = 7,
  PKV_WTYPE_Q8_0 = 8,
  PKV_WTYPE_Q4_K = 12, /* super-blocks of 256, as the other two */
  PKV_WTYPE_Q5_K = 13,
  PKV_WTYPE_Q6_K = 14,
  PKV_WTYPE_BF16 = 30
} pkv_wtype;

/* A weight matrix [n, k], row-major, each row a run of blocks; borrowed. */
typedef struct pkv_weight {
  pkv_wtype type;
  int32_t seed; /* of random weights that are made where they are used: data is NULL then */
  int64_t n, k; /* k is a multiple of the type's block */
  const void *data;
  int64_t row_bytes;
} pkv_weight;

/* How activations enter a product. A row's result depends on k and this mode only, never on m,
   n, threads, chunks. */
typedef enum pkv_compute {
  PKV_COMPUTE_F32 = 0, /* weights dequantised, float activations: the exact mode */
  /* Activations rounded to 8 bits in blocks of 32, for BF16 weights to bf16; F32 and F16 weights
     still use float activations. */
  PKV_COMPUTE_I8 = 1
} pkv_compute;

/* y[m, n] = x[m, k] w^T + bias, or y += ... when accumulate is set. */
typedef struct pkv_matmul_params {
  pkv_weight w;
  pkv_compute compute;
  int32_t accumulate;
  int64_t m;
  const float *x;
  int64_t x_stride; /* elements between rows */
  float *y;
  int64_t y_stride;
  const float *bias; /* [n] or NULL */
  void *scratch;     /* matmul_scratch_bytes(m, k) */
} pkv_matmul_params;

/*
 * The table. `executor` is the caller's; functions allocate nothing and return when the results
 * are there (CPU).
 * Dense functions work on float rows: x, y [m, n] with row strides in elements.
 */
typedef struct pkv_backend_ops {
  const char *name;
  pkv_status (*attention)(pkv_executor *executor, const pkv_attention_params *p, pkv_error *err);
  pkv_status (*append)(pkv_executor *executor, const pkv_append_params *p, pkv_error *err);

  size_t (*matmul_scratch_bytes)(int64_t m, int64_t k);
  pkv_status (*matmul)(pkv_executor *executor, const pkv_matmul_params *p, pkv_error *err);
  /* Several products of the same x: activations are prepared once. All share m, x, x_stride,
     compute, scratch. */
  pkv_status (*matmul_many)(pkv_executor *executor, const pkv_matmul_params *p, int32_t count,
                            pkv_error *err);
  /* y[i] = row ids[i] of w as float, times `scale`. */
  pkv_status (*embed)(pkv_executor *executor, float *y, int64_t y_stride, const pkv_weight *w,
                      const int32_t *ids, int64_t m, float scale, pkv_error *err);
  pkv_status (*rms_norm)(pkv_executor *executor, float *y, int64_t y_stride, const float *x,
                         int64_t x_stride, const float *weight, int64_t m, int64_t n, float eps,
                         pkv_error *err);
  /*
   * Rotates heads in place: x [m, heads, head_dim] at x_stride; cos_sin [positions, rope_dim/2,
   * 2]; position[i] of row i.
   * pairs_adjacent: 1 = (2j, 2j + 1), GGUF's order for llama; 0 = (j, j + rope_dim/2).
   */
  pkv_status (*rope)(pkv_executor *executor, float *x, int64_t x_stride, int64_t m, int32_t heads,
                     int32_t head_dim, int32_t rope_dim, int32_t pairs_adjacent,
                     const float *cos_sin, const int32_t *position, pkv_error *err);
  /* y = silu(gate) * up, elementwise over [m, n]; y may be gate. */
  pkv_status (*swiglu)(pkv_executor *executor, float *y, const float *gate, const float *up,
                       int64_t count, pkv_error *err);
  /* The same with gelu (its tanh form). */
  pkv_status (*geglu)(pkv_executor *executor, float *y, const float *gate, const float *up,
                      int64_t count, pkv_error *err);
  /* y += x */
  pkv_status (*add)(pkv_executor *executor, float *y, const float *x, int64_t count,
                    pkv_error *err);
} pkv_backend_ops;

/* The executor is defined here so that every backend reaches its own part of it. */
struct pkv_executor {
  const pkv_backend_ops *ops;
  const struct pkv_device_ops *device_ops; /* device_ops.h; NULL on the CPU */
  const struct pkv_dense_ops *dense;       /* device_dense.h; NULL on the CPU */
  pkv_allocator allocator;
  pkv_device device;
  pkv_isa isa;
  pkv_workers *workers; /* CPU */
  const void *isa_ops;  /* CPU: the table of the chosen instruction set */
  void *device_state;   /* CPU: scratch of the workers (cpu_isa.h); CUDA: its own */
};

/* Each backend fills an executor whose allocator and device are set. E_UNSUPPORTED where it is
   not built in or not here. */
pkv_status pkv_cpu_executor_init(pkv_executor *executor, const pkv_executor_options *options,
                                 pkv_error *err);
void pkv_cpu_executor_deinit(pkv_executor *executor);

#endif
