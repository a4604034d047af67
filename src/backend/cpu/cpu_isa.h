/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one instruction set offers to the CPU executor's attention, and the state that an executor
 * keeps for it. One file an instruction set exports one table; cpu_executor.c picks it at run time.
 *
 * Words: see plan.h. A *block* is up to PKV_CPU_BLOCK_ROWS states of one segment, that is rows
 * [first, first + rows) of its q_len * group states in slot order (query token, query head of the
 * group). K and V of a piece are read once a block.
 */
#ifndef PKV_BACKEND_CPU_CPU_ISA_H
#define PKV_BACKEND_CPU_CPU_ISA_H

#include "backend/backend.h"

#define PKV_CPU_BLOCK_ROWS   64
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

/* One block of one segment and the tokens it attends to. */
typedef struct pkv_cpu_block {
  const pkv_attention_params *p;
  const int32_t *pages; /* the row's page ids; [0, ceil(seq_len / page_tokens)) are valid */
  int32_t row, kv_head;
  int32_t seq_len;
  int32_t group;       /* query heads a KV head */
  int32_t first, rows; /* states of the segment, in slot order */
} pkv_cpu_block;

/* Keys [lo, hi) that query token t of the row sees; empty where its position is negative. */
static inline void pkv_cpu_visible(const pkv_cpu_block *b, int32_t t, int64_t *lo, int64_t *hi) {
  const int64_t position = (int64_t)b->seq_len - b->p->plan->q_len + t;
  const int64_t window = b->p->plan->window;
  *lo = 0;
  *hi = 0;
  if (position < 0) return;
  *hi = position + 1;
  if (window > 0 && *hi > window) *lo = *hi - window;
}

/* Query token of the batch and query head of the block's row r, counted from its first. */
static inline int64_t pkv_cpu_query_token(const pkv_cpu_block *b, int32_t r) {
  return (int64_t)b->row * b->p->plan->q_len + (b->first + r) / b->group;
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
   */
  void (*attend)(void *scratch, const pkv_cpu_block *b, int64_t begin, int64_t end);
  /* Total of the fold in the scratch := neutral. */
  void (*fold_begin)(void *scratch, const pkv_cpu_block *b);
  /* total := total (+) scratch's state. */
  void (*fold_own)(void *scratch, const pkv_cpu_block *b);
  /* total := total (+) slot's states. The same operations as fold_own on equal values. */
  void (*fold_slot)(void *scratch, const pkv_cpu_block *b, pkv_cpu_states slot);
  /* The state goes to a slot; fold_own after it equals fold_slot of it, bit for bit. */
  void (*save)(void *scratch, const pkv_cpu_block *b, pkv_cpu_states slot);
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

struct pkv_dense_kernels;

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
