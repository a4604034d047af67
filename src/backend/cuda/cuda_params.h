/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the decode kernels get, resolved on the host: a POD passed by value. Pointers are the
 * device's. Included by .c and .cu alike.
 */
#ifndef PKV_CUDA_PARAMS_H
#define PKV_CUDA_PARAMS_H

#include "plan/plan.h"
#include "plan/plan_tree.h"

/* The most query rows (query token x head of the group) that a CTA takes together. */
#define PKV_CUDA_TILE_ROWS 16

/* Floats of a slot's row, of one query row's state. */
static inline int32_t pkv_cuda_slot_row(int32_t head_dim) {
  return head_dim + 4;
}

/* Segments of a launch, up to which a cut one's query rows are folded by a CTA each. */
#define PKV_CUDA_FEW_SEGMENTS 16

/* Units of a piece that one warp takes alone in a batch of many segments. */
#define PKV_CUDA_ALONE_UNITS 2

/* A word of a slot that nobody has written yet: a NaN that no arithmetic gives. */
#define PKV_CUDA_EMPTY 0xffffffffu

typedef struct pkv_cuda_decode_params {
  /* the plan's arrays */
  const pkv_plan_cursor *cursors; /* balanced: [parts + 1] */
  const pkv_plan_item *items;     /* the seed's routes: those of this launch */
  const pkv_plan_merge *merges;
  const int32_t *split_first; /* the seed's routes: [rows + 1] */
  const int32_t *seq_len;     /* [rows] */

  pkv_cache cache;
  const int32_t *block_table; /* [rows, block_table_stride] */
  int64_t block_table_stride;
  int32_t max_pages; /* entries of a row that may be read */
  const void *q;     /* [rows * q_len, query_heads, head_dim] */
  void *out;
  float *lse; /* or NULL */
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride;
  const float *sinks; /* [query_heads] or NULL */

  uint32_t *counters; /* [tiles, counters_stride]: arrivals at each merge, 0 between launches */
  /* [tiles, slots_stride] slots of tile_rows rows: acc[HD], m, l, two words of padding. `balanced`
     without batch invariance: every word is PKV_CUDA_EMPTY between launches. */
  float *slots;
  int32_t *fault; /* set to 1 + row when a page id lies outside the pool */
  int64_t slots_stride;
  int32_t counters_stride;
  /* Of at most PKV_CUDA_FEW_SEGMENTS: query rows of the fullest tile, and CTAs more, less one. */
  int32_t few_rows;
  int32_t many; /* a plain call of many segments (pkv_core_many), whose pieces may be short */
  const int64_t *total_cost; /* the plan's */
  int64_t alone_cost;        /* parts times what the longest segment costs that one warp takes */

  float scale, soft_cap; /* scale holds k_scale */
  float v_scale;
  int32_t rows, q_len, group, window;
  int32_t unit_tokens;
  const float *k_head_scale, *v_head_scale; /* the cache's, [kv_heads] or NULL */
  int32_t invariant;                        /* batch-invariant: a slot a chunk */
  int32_t tile_rows;                        /* 8 or 16 */
  int32_t stages;                           /* of the copy ring */
  int32_t wait_first;  /* the plan is made by the kernel ahead: read nothing before it has ended */
  int32_t wait_tokens; /* read no K and V before the kernel ahead has ended */
  int32_t page_shift;  /* log2(page_tokens), or -1 */
  int32_t aligned;     /* every K and V address that is read is a multiple of 16 bytes */
  int32_t runs;        /* and 16 tokens from a multiple of 16 lie on one page, head_dim unpadded */
  int32_t out_vectors; /* every four outputs lie on a multiple of their bytes */
  int32_t
      q_is_operand; /* q has the products' type, pairs of elements lie on multiples of 4 bytes */
  int32_t q_dtype, out_dtype, lse_base2;
  int32_t fused_merge; /* the seed's routes: the last arriver merges, no second launch */
  int32_t slot_stride; /* between the pieces of one segment */
} pkv_cuda_decode_params;

/*
 * Route shared. base: slots, counters and cursors are not used, tile_rows is 8.
 * line, where has_line: what `balanced` would get for the same batch, as pkv_plain_params says, in
 * 2 * parts parts. Its kernel serves a batch whose tree has no nodes.
 */
typedef struct pkv_cuda_shared_params {
  pkv_cuda_decode_params base, line;
  int32_t has_line;
  pkv_tree_view view; /* pointers of the device */
  /* slots of group * q_len rows (pkv_cuda_slot_row floats each) */
  float *node_slots, *private_slots;
  int32_t parts;
} pkv_cuda_shared_params;

#endif
