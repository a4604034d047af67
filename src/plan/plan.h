/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan's bytes. One block of plain memory, no pointers: the header below, then arrays at byte
 * offsets from its start, each aligned to 64; unused bytes are zero, so that two builders can be
 * compared with memcmp. Where the arrays lie depends on rows, heads, parts and splits only, for
 * `balanced` never on the lengths. Included by .c and .cu alike. How the values come about:
 * plan_core.h.
 *
 * Words
 *   row      one sequence of the batch
 *   segment  one (row, KV head): all its query heads and query tokens
 *   unit     `unit_tokens` tokens of a segment, counted from the row's start: the tile of 64
 *            (balanced), the absolute chunk (batch-invariant), or the seed's tile of 32
 *   first    the first unit of a row that is read: 0, or more with a sliding window
 *   state    (m, l, acc[head_dim]) in float of one query head and query token
 *   slot     room in the workspace for the states of one piece of a segment: group * q_len of
 *            them, ordered [query token, query head of the group]
 */
#ifndef PKV_PLAN_PLAN_H
#define PKV_PLAN_PLAN_H

#include <stdint.h>

#include "pkv/pkv.h"

/* Marks what the device compiles too. */
#ifndef PKV_HD
#ifdef __CUDACC__
#define PKV_HD __host__ __device__
#else
#define PKV_HD
#endif
#endif

#define PKV_PLAN_MAGIC 0x4e4c5056u /* "VPLN" */

/* balanced: where part p starts. cursors[parts] is the end: {rows, 0, 0, ...}. Part p ends where
   p + 1 starts. */
typedef struct pkv_plan_cursor {
  int32_t row, kv_head;
  int32_t unit; /* counted from the row's first unit that is read; > 0: the segment is cut here */
  /*
   * unit > 0: the slot of the piece that starts here; the piece that ends here has slot - 1.
   * Batch-invariant: slot of the cut segment's first unit; unit u has slot + u. Otherwise -1.
   */
  int32_t slot;
  int32_t merge;  /* unit > 0: index in merges of the segment that is cut here; else -1 */
  int32_t length; /* seq_len of the row, so that a part starts without a look-up; 0 at the end */
} pkv_plan_cursor;

/*
 * The seed's routes: one task, as published (five int32). Covers units [unit_begin, unit_end) of
 * the row, counted from the row's *start* (a window's shift is in them). Its states go to slot
 * (split_first[row] + split) * kv_heads + kv_head; an empty range (begin == end) writes neutral
 * ones. bucket_padded: units past the row's last token re-read its last valid page, masked.
 */
typedef struct pkv_plan_item {
  int32_t row, kv_head, split, unit_begin, unit_end;
} pkv_plan_item;

/*
 * Slots first_slot + i * slot_stride, i = 0 .. count-1, folded left in that order, give segment
 * (row, kv_head). count 0 (workqueue, a row of length 0): output zeros, lse -inf.
 * balanced lists only the segments that are cut; `count` is also how many slots its pieces fill in
 * all, so that whoever counts filled slots knows when the last one has arrived.
 */
typedef struct pkv_plan_merge {
  int32_t row, kv_head, first_slot, count;
} pkv_plan_merge;

/* One launch: decode items, or merges, [first, first + count). balanced has a single one of kind
   FUSED over parts. */
typedef enum pkv_launch_kind {
  PKV_LAUNCH_DECODE = 0,
  PKV_LAUNCH_MERGE = 1,
  PKV_LAUNCH_FUSED = 2
} pkv_launch_kind;

typedef struct pkv_plan_launch {
  int32_t kind, first, count, pad;
} pkv_plan_launch;

struct pkv_plan {
  uint32_t magic;
  uint32_t flags; /* PKV_PLAN_BATCH_INVARIANT */
  int32_t route;
  int32_t rows, q_len, window;
  int32_t query_heads, kv_heads, head_dim, page_tokens;
  int32_t unit_tokens;
  int32_t parts; /* balanced; else 0 */
  /* Between the pieces of one segment: 1 (balanced), kv_heads (the seed's routes). */
  int32_t slot_stride;
  int32_t slots;                   /* used */
  int32_t launches, items, merges; /* lengths of the arrays */
  uint32_t unit_cost, segment_cost;
  int32_t bucket_tokens; /* bucket_padded; else 0 */
  int64_t total_cost;
  /* byte offsets of the arrays from the plan's start; 0 = absent */
  int64_t seq_len_at;     /* int32 [rows]: lengths as planned, which is what the executors use */
  int64_t row_cost_at;    /* balanced: int64 [rows + 1], exclusive prefix sums of the rows' costs */
  int64_t cursors_at;     /* balanced: pkv_plan_cursor [parts + 1] */
  int64_t items_at;       /* seed's routes: pkv_plan_item [items] */
  int64_t split_first_at; /* seed's routes: int32 [rows + 1], split_offsets as published */
  int64_t merges_at;      /* pkv_plan_merge [merges]; balanced: in slot order; else row by row */
  int64_t launches_at;    /* pkv_plan_launch [launches] */
  int64_t tree_at;        /* shared: pkv_plan_tree (plan_tree.h) */
  int64_t plan_bytes;
  /* Counters (one uint32 a merge, padded to 64) first, then slots * state bytes. */
  int64_t workspace_bytes;
};

PKV_HD static inline const void *pkv_plan_at(const struct pkv_plan *plan, int64_t offset) {
  return (const unsigned char *)plan + offset;
}

/*
 * Whether the `bytes` bytes at `plan` hold a plan that an executor can run safely: every offset and
 * count inside, every (row, KV head, unit) covered exactly once, slots disjoint, merges complete.
 * For tests, fuzzing, and plans from elsewhere. E_FORMAT names the first fault. Allocates nothing.
 */
pkv_status pkv_plan_check(const struct pkv_plan *plan, size_t bytes, pkv_error *err);

#endif
