/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A paged attention problem with everything around it poisoned, and an independent answer to it.
 *
 * The cache: pages in random order, every byte that no row owns (other pages, page tails, gaps
 * between strides) a NaN of the dtype; table entries past a row's pages -1 or huge. The answer:
 * gathered keys, all logits, one softmax, in double; it shares no code with the library but the
 * element conversions.
 *
 * The bound of each output element. u = 2^-24, n visible keys, A = scale * max_j sum_i |q_i k_ij|.
 *   logits   a dot product of d terms in eight or more partial sums, the query scaled before, and
 *            the subtraction of the maximum: |ds| <= u (d/8 + 8) A, for a soft cap c + 8 u c more.
 *            An error of ds in each logit moves a weight by at most the factor 1 +- 2 ds.
 *   sums     n products in order: their roundings are independent, so that 8 sqrt(n + 64) u covers
 *            the numerator and the denominator, with the exponential's 2 u and the rescales.
 *   together (2 |ds| + 8 u sqrt(n + 64)) sum_j p_j |v_j|, plus the rounding to the output's dtype.
 * lse: |ds| + 8 u sqrt(n + 64) + 2 u |lse|.
 * Operands rounded to u' (tensor cores): |ds| grows by u' A, a weight by the factor 1 +- u'.
 */
#ifndef PKV_TEST_ATTN_CASE_H
#define PKV_TEST_ATTN_CASE_H

#include <stdbool.h>

#include "base/rng.h"
#include "pkv/pkv.h"

typedef enum attn_layout {
  ATTN_HND = 0,
  ATTN_NHD = 1,
  ATTN_INTERLEAVED = 2, /* [page, K or V, token, head, d] in one buffer */
  ATTN_PADDED = 3,      /* HND with gaps after tokens, heads and pages */
  ATTN_LAYOUTS = 4
} attn_layout;

typedef struct attn_spec {
  uint64_t seed;
  pkv_dtype kv_dtype, q_dtype, out_dtype;
  attn_layout layout;
  int32_t rows, q_len, kv_heads, group, head_dim, page_tokens, window;
  float scale, soft_cap;  /* 0 = default, none */
  bool sinks, lse_base2;  /* sinks: random ones */
  bool strided;           /* q and out with gaps */
  float k_scale, v_scale; /* fp8 */
  bool head_scales;       /* fp8 */
  /* unit roundoff of q and of weights as a tensor core takes them; 0 = float */
  double operand_u;
  int32_t needle;         /* token position of a huge score in every row; -1 = none */
  const int32_t *seq_len; /* [rows] */
  /* Which pages the rows have, [rows, pages_stride] of ids below page_count, the same id in several
     rows being one page; NULL: each row its own. Ids are mapped to random ones. */
  const int32_t *pages;
  int32_t pages_stride, page_count;
} attn_spec;

typedef struct attn_case {
  attn_spec spec;
  pkv_cache cache;
  unsigned char *storage;
  size_t storage_bytes;
  float *k_head_scale, *v_head_scale, *sinks;
  int32_t *table;
  int32_t max_pages;
  int64_t table_stride;
  void *q, *out;
  float *lse;
  size_t q_bytes, out_bytes, lse_floats;
  int64_t q_token, q_head, out_token, out_head, lse_token; /* strides */
  /* answers, contiguous [rows * q_len, query heads(, head_dim)]; bounds beside them */
  double *want, *bound, *want_lse, *bound_lse;
} attn_case;

/* head_dim 64, 2 KV heads of 2, page 16, f16 KV, f32 q and out, HND; the caller sets the rest. */
attn_spec attn_spec_default(void);
void attn_case_init(attn_case *c, const attn_spec *spec);
void attn_case_answer(attn_case *c); /* fills want.. and bound.. */
void attn_case_deinit(attn_case *c);
/* Frees the answer: make it again after a change of the case. */
void attn_case_forget(attn_case *c);
/* Other lengths, none longer than at first, over the same pages; forgets the answer. */
void attn_case_set_lengths(attn_case *c, const int32_t *seq_len);
const char *attn_case_name(const attn_case *c, char *text, size_t size);

/* The K or V row of a token (position `token` of row `row`). */
void *attn_case_element(const attn_case *c, bool is_v, int32_t row, int32_t token, int32_t head);
pkv_shape attn_case_shape(const attn_case *c);
pkv_attention_args attn_case_args(attn_case *c, const pkv_plan *plan);

/* A plan and its workspace in exactly the memory that the plan says it needs; NULL plan:
 * refused. Route shared: from the case's table. */
typedef struct attn_plan {
  void *memory, *workspace;
  size_t memory_bytes, workspace_bytes;
  const pkv_plan *plan;
  pkv_status status;
} attn_plan;
void attn_plan_init(attn_plan *p, const attn_case *c, const pkv_plan_options *options);
void attn_plan_deinit(attn_plan *p);

/* out and lse filled with a mark, workspace with NaN, the run, then every element compared. */
void attn_run(attn_case *c, const attn_plan *p, pkv_executor *executor);
void attn_check(attn_case *c, const char *what);

/* NULL where this machine does not have it. */
pkv_executor *attn_executor(pkv_isa isa, int32_t threads);

#endif
