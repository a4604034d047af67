/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one instruction set offers to the CPU executor's attention, and the state that an executor
 * keeps for it. One file an instruction set exports one table; cpu_executor.c picks it at run time.
 *
 * Words: see plan.h. A *block* is up to PKV_CPU_BLOCK_ROWS states that attend to the same tokens,
 * numbered from `first` on in slot order (row, query token, query head of the group): states of one
 * segment, or of several rows that share a node. K and V of a piece are read once a block.
 */
#ifndef PKV_BACKEND_CPU_CPU_ISA_H
#define PKV_BACKEND_CPU_CPU_ISA_H

#include "backend/backend.h"
#include "plan/plan_tree.h"

#define PKV_CPU_BLOCK_ROWS   128
#define PKV_CPU_MAX_HEAD_DIM 256

/*
 * States of a block: m and l [rows], acc [rows, head_dim]. Neutral is (-inf, 0, 0). The unit of m
 * is private to an instruction set (base 2 or natural); a plan is run by one table from start to
 * end, so that states never cross tables. REFERENCE keeps doubles in its scratch and floats in
 * slots.
 */
typedef struct pkv_cpu_states {
  float *m, *l, *acc;
} pkv_cpu_states;

typedef struct pkv_cpu_block {
  const pkv_attention_params *p;
  const int32_t *pages; /* ids of the pages that hold the tokens; those of the row, or of a node */
  /* NULL: the block belongs to `row`. Else it has whole rows, ranks[0], [1], ..: rows of a node. */
  const pkv_tree_rank *ranks;
  int32_t row, kv_head;
  int32_t seq_len;     /* of `row` */
  int32_t group;       /* query heads a KV head */
  int32_t first, rows; /* states, counted from the first of `row` or ranks[0] */
  int64_t until; /* the caller goes on to this token: what lies before it may be fetched ahead */
} pkv_cpu_block;

/* Which of its row's query tokens state r of the block is. */
static inline int32_t pkv_cpu_query_index(const pkv_cpu_block *b, int32_t r) {
  return (b->first + r) / b->group % b->p->plan->q_len;
}
static inline const pkv_tree_rank *pkv_cpu_rank(const pkv_cpu_block *b, int32_t r) {
  return b->ranks + (b->first + r) / (b->group * b->p->plan->q_len);
}

/* Keys [lo, hi) that state r of the block sees; empty where its query's position is negative. */
static inline void pkv_cpu_visible(const pkv_cpu_block *b, int32_t r, int64_t *lo, int64_t *hi) {
  const int64_t length = b->ranks == NULL ? b->seq_len : pkv_cpu_rank(b, r)->length;
  const int64_t position = length - b->p->plan->q_len + pkv_cpu_query_index(b, r);
  const int64_t window = b->p->plan->window;
  *lo = 0;
  *hi = 0;
  if (position < 0) return;
  *hi = position + 1;
  if (window > 0 && *hi > window) *lo = *hi - window;
}

/* Query token of the batch and query head of state r of the block. */
static inline int64_t pkv_cpu_query_token(const pkv_cpu_block *b, int32_t r) {
  const int64_t row = b->ranks == NULL ? b->row : pkv_cpu_rank(b, r)->row;
  return row * b->p->plan->q_len + pkv_cpu_query_index(b, r);
}
static inline int32_t pkv_cpu_query_head(const pkv_cpu_block *b, int32_t r) {
  return b->kv_head * b->group + (b->first + r) % b->group;
}

/* What a stored K or V value is multiplied by, for the block's KV head. */
static inline float pkv_cpu_k_scale(const pkv_cpu_block *b) {
  const pkv_cache *c = &b->p->cache;
  return c->k_head_scale == NULL ? c->k_scale : c->k_scale * c->k_head_scale[b->kv_head];
}
static inline float pkv_cpu_v_scale(const pkv_cpu_block *b) {
  const pkv_cache *c = &b->p->cache;
  return c->v_head_scale == NULL ? c->v_scale : c->v_scale * c->v_head_scale[b->kv_head];
}

typedef struct pkv_cpu_isa_ops {
  pkv_isa isa;
  /* Bytes of one worker's scratch; aligned to PKV_CACHE_LINE, not initialised. */
  size_t scratch_bytes;
  /* Loads the block's queries into the scratch. Called once before attend. */
  void (*begin)(void *scratch, const pkv_cpu_block *b);
  /*
   * Starts from neutral, adds tokens [begin, end) of the row (begin a multiple of the tile), each
   * query seeing what causality and window let it see. The state stays in the scratch.
   * Batch-invariant: a state's bits depend on its query and these tokens only, not on the block;
   * else a block of many states may add in another order than one of few.
   */
  void (*attend)(void *scratch, const pkv_cpu_block *b, int64_t begin, int64_t end);
  /* Total of the fold in the scratch := neutral. */
  void (*fold_begin)(void *scratch, const pkv_cpu_block *b);
  /* total := total (+) scratch's state. */
  void (*fold_own)(void *scratch, const pkv_cpu_block *b);
  /* total := total (+) slot's states. The same operations as fold_own on equal values. */
  void (*fold_slot)(void *scratch, const pkv_cpu_block *b, pkv_cpu_states slot);
  /* States [from, from + count) of the block go to a slot; fold_own after it equals fold_slot of
     it, bit for bit. */
  void (*save)(void *scratch, const pkv_cpu_block *b, int32_t from, int32_t count,
               pkv_cpu_states slot);
  /* Normalises and stores to out and lse: the state, or the total of the fold. */
  void (*store_own)(void *scratch, const pkv_cpu_block *b);
  void (*store_total)(void *scratch, const pkv_cpu_block *b);
  /* count floats to `dtype`; divided by `divisor` first unless it is 1. */
  void (*convert)(void *dst, pkv_dtype dtype, const float *src, int64_t count, float divisor);
  /* Reads `bytes` bytes at `data` and returns something that depends on them all. */
  uint32_t (*touch)(const void *data, size_t bytes);
} pkv_cpu_isa_ops;

extern const pkv_cpu_isa_ops pkv_cpu_reference_ops, pkv_cpu_scalar_ops;
#if defined(__x86_64__)
extern const pkv_cpu_isa_ops pkv_cpu_avx2_ops, pkv_cpu_avx512_ops;
#endif
#if defined(__aarch64__)
extern const pkv_cpu_isa_ops pkv_cpu_neon_ops;
#endif

struct pkv_dense_kernels;
struct pkv_cpu_features;

/* What runs on a machine of these features: the attention of an instruction set (NULL: not in this
   build, or not on that machine), and its products, of which some need one feature more. */
const pkv_cpu_isa_ops *pkv_cpu_isa_table(pkv_isa isa, const struct pkv_cpu_features *have);
const struct pkv_dense_kernels *pkv_cpu_dense_table(pkv_isa isa,
                                                    const struct pkv_cpu_features *have);

/* CPU part of an executor, behind device_state: scratch of every worker, in one block. */
typedef struct pkv_cpu_state {
  size_t stride, bytes; /* of one worker; of the whole block, this struct included */
  uint32_t sink;        /* keeps padded reads alive; its value means nothing */
  uint32_t pad;
  const struct pkv_dense_kernels *dense; /* of matrix products and row operations */
} pkv_cpu_state;

static inline void *pkv_cpu_scratch(const pkv_executor *executor, int32_t worker) {
  const pkv_cpu_state *state = executor->device_state;
  return (unsigned char *)executor->device_state + PKV_CACHE_LINE + (size_t)worker * state->stride;
}

pkv_status pkv_cpu_attention(pkv_executor *executor, const pkv_attention_params *p, pkv_error *err);
pkv_status pkv_cpu_append(pkv_executor *executor, const pkv_append_params *p, pkv_error *err);

#endif
