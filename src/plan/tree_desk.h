/* SPDX-License-Identifier: Apache-2.0 */
/* What the device's planner of `shared` (tree_block.h) is given and where it works. */
#ifndef PKV_PLAN_TREE_DESK_H
#define PKV_PLAN_TREE_DESK_H

#include "plan/tree_cuts.h"

/* What all steps get. Pointers are the device's; plan and tree are as the host prepared them. */
typedef struct pkv_tree_input {
  struct pkv_plan header;
  pkv_plan_tree tree;
  struct pkv_plan *plan;      /* where the bytes go: zeros when the last step begins */
  const int32_t *seq_len;     /* [rows]; cut to 0 .. max_seq_len */
  const int32_t *block_table; /* [rows, block_table_stride] */
  int64_t block_table_stride;
  int32_t max_pages, max_seq_len, chained;
  uint64_t *keys;          /* [units of the longest row, rows]: key of the first unit + 1 units */
  int32_t *leader, *units; /* [rows]: p (-1: none) and d */
} pkv_tree_input;

/* Where the block works: shared memory as far as it reaches. */
typedef struct pkv_tree_desk {
  pkv_tree_work w;
  uint64_t *keys;                    /* [power of two >= rows] */
  pkv_tree_link *links, *more_links; /* [2 * rows] */
  int32_t *table;                    /* [levels, rows + 2], where keys and links were */
  int32_t *votes, *marks;            /* [rows + 1], [2 * parts + 1] */
  int32_t *segments, *base;      /* [rows + 1]: sums over nodes in preorder; base over ranks too */
  int64_t *cost;                 /* [rows + 1]: costs of all nodes before */
  int64_t *rank_cost;            /* [rows + 1]: costs of all ranks before */
  pkv_node_cursor *node_cursors; /* [parts + 1] */
  pkv_private_cursor *private_cursors; /* [2 * parts + 1] */
} pkv_tree_desk;

#define PKV_TREE_DESK_ARRAYS 14 /* of 32 bits and rows + 2 entries, marks apart */

static inline PKV_HD int32_t pkv_tree_power(int32_t rows) {
  int32_t power = 1;
  while (power < rows)
    power *= 2;
  return power;
}

/* Bytes of the part that keys and links share with the table. */
static inline PKV_HD int64_t pkv_tree_desk_shared(int32_t rows) {
  const int64_t line = (int64_t)rows + 2;
  const int64_t table = pkv_tree_min_levels(rows) * line * 4;
  const int64_t order = (int64_t)pkv_tree_power(rows) * 8 + 4 * line * 8;
  return ((table > order ? table : order) + 7) / 8 * 8;
}

static inline PKV_HD int64_t pkv_tree_desk_bytes(int32_t rows, int32_t parts) {
  const int64_t line = (int64_t)rows + 2;
  return pkv_tree_desk_shared(rows) + 4 * line * 8 + PKV_TREE_DESK_ARRAYS * line * 4 +
         (2 * (int64_t)parts + 2) * 4 + (parts + 1) * (int64_t)sizeof(pkv_node_cursor) +
         (2 * (int64_t)parts + 1) * (int64_t)sizeof(pkv_private_cursor);
}

/* memory: pkv_tree_desk_bytes of it, aligned to 8. */
static inline PKV_HD void pkv_tree_desk_init(pkv_tree_desk *d, void *memory,
                                             const pkv_tree_core *t) {
  const int32_t rows = t->core.rows;
  const int64_t line = (int64_t)rows + 2;
  unsigned char *at = (unsigned char *)memory;
  d->keys = (uint64_t *)(void *)at;
  d->links = (pkv_tree_link *)(void *)(at + (int64_t)pkv_tree_power(rows) * 8);
  d->more_links = d->links + 2 * line;
  d->table = (int32_t *)(void *)at;
  int64_t *wide = (int64_t *)(void *)(at + pkv_tree_desk_shared(rows));
  d->cost = wide;
  d->rank_cost = wide + line;
  d->w.first_sum = t->core.window > 0 ? wide + 2 * line : 0;
  d->w.end_sum = t->core.batch_invariant ? wide + 3 * line : 0;
  int32_t *word = (int32_t *)(void *)(wide + 4 * line);
  d->w.lcp = word;
  d->w.rep = word + line;
  d->w.first = word + 2 * line;
  d->w.end = word + 3 * line;
  d->w.up = word + 4 * line;
  d->w.kept = word + 5 * line;
  d->w.kid_ranks = word + 6 * line;
  d->w.kid_tiles = word + 7 * line;
  d->w.cover = word + 8 * line;
  d->w.deep = word + 9 * line;
  d->w.index = word + 10 * line;
  d->votes = word + 11 * line;
  d->segments = word + 12 * line;
  d->base = word + 13 * line;
  d->marks = word + PKV_TREE_DESK_ARRAYS * line;
  d->node_cursors = (pkv_node_cursor *)(void *)(d->marks + 2 * (int64_t)t->core.parts + 2);
  d->private_cursors = (pkv_private_cursor *)(void *)(d->node_cursors + t->core.parts + 1);
}

/* Bytes of keys, leaders and a desk for up to `rows` rows that share at most `units` units. */
static inline PKV_HD int64_t pkv_tree_memory_bytes(int64_t rows, int64_t units, int32_t parts) {
  return units * rows * 8 + 2 * (rows + 16) * 4 + pkv_tree_desk_bytes((int32_t)rows, parts);
}
/* Sets keys, leader and units; returns the desk. memory: aligned to 64. */
static inline PKV_HD void *pkv_tree_memory_init(pkv_tree_input *in, void *memory, int64_t units) {
  const int64_t rows = in->header.rows;
  unsigned char *at = (unsigned char *)memory;
  in->keys = (uint64_t *)(void *)at;
  at += units * rows * 8;
  in->leader = (int32_t *)(void *)at;
  in->units = in->leader + (rows + 1) / 2 * 2;
  return in->units + (rows + 1) / 2 * 2;
}

#endif
