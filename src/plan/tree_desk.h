/* SPDX-License-Identifier: Apache-2.0 */
/* What the device's planner of `shared` (tree_block_impl.h) is given and where it works. */
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
  int32_t max_units; /* whose pages the table has: max_pages * page_tokens / unit_tokens */
  int32_t max_seq_len, chained;
  int32_t local;  /* keys are of a unit alone, worked out where they are used: no first step */
  uint64_t *keys; /* [units of the longest row, rows]: key of the first unit + 1 units */
  /* [rows + 1], zeros when the second step begins: pkv_tree_found of each row; then not 0 where
     equal keys belong to different pages */
  uint64_t *found;
} pkv_tree_input;

/* Where the block works: shared memory as far as it reaches. */
typedef struct pkv_tree_desk {
  pkv_tree_work w;
  int32_t *row, *length;             /* [rows]: by rank */
  uint64_t *keys;                    /* [power of two >= rows] */
  pkv_tree_link *links, *more_links; /* [2 * rows] */
  int32_t *table;                    /* windows: [levels, rows + 2] */
  /* [rows], [rows - 1]: where keys, links and table were; with a window in the plan itself */
  pkv_tree_rank *ranks;
  pkv_tree_node *nodes;
  int32_t *votes;                      /* [rows + 1] */
  int32_t *segments;                   /* [rows + 1]: sums over the nodes before, in preorder ... */
  int32_t *base;                       /* ... and of their slots */
  int32_t *rank_base;                  /* [rows + 1]: slots of the ranks before */
  int64_t *cost;                       /* [rows + 1]: costs of the nodes before */
  int64_t *rank_cost;                  /* [rows + 1]: costs of the ranks before */
  pkv_node_cursor *node_cursors;       /* [parts + 1] */
  pkv_private_cursor *private_cursors; /* [2 * parts + 1] */
  int32_t *marks;                      /* [3 * parts + 2]: of both, one behind the other */
  int32_t *starts;                     /* [2 * parts + 1]: segments of the private cursors */
} pkv_tree_desk;

static inline PKV_HD int32_t pkv_tree_power(int32_t rows) {
  int32_t power = 1;
  PKV_ROLLED while (power < rows) power *= 2;
  return power;
}

/* Bytes that keys and links need first, then the table, or ranks and nodes. */
static inline PKV_HD int32_t pkv_tree_desk_shared(int32_t rows, int32_t window) {
  const int32_t line = rows + 2, order = pkv_tree_power(rows) * 8 + 4 * line * 8;
  const int32_t later = window > 0
                            ? pkv_tree_min_levels(rows) * line * 4
                            : line * (int32_t)(sizeof(pkv_tree_rank) + sizeof(pkv_tree_node));
  return ((later > order ? later : order) + 15) / 16 * 16;
}

static inline PKV_HD int64_t pkv_tree_desk_bytes(const pkv_plan_core *core) {
  const int64_t line = (int64_t)core->rows + 2, parts = core->parts;
  const int64_t wide = 2 + (core->window > 0) + (core->batch_invariant != 0);
  return pkv_tree_desk_shared(core->rows, core->window) + wide * line * 8 + 18 * line * 4 +
         (parts + 1) * (int64_t)sizeof(pkv_node_cursor) +
         (2 * parts + 1) * (int64_t)sizeof(pkv_private_cursor) + (5 * parts + 3) * 4;
}

/* memory: pkv_tree_desk_bytes of it, aligned to 16. in: for a window's ranks and nodes. */
static inline PKV_HD void pkv_tree_desk_init(pkv_tree_desk *d, void *memory,
                                             const pkv_tree_input *in, const pkv_plan_core *core) {
  const int32_t rows = core->rows, line = rows + 2;
  unsigned char *at = (unsigned char *)memory;
  d->keys = (uint64_t *)(void *)at;
  d->links = (pkv_tree_link *)(void *)(at + pkv_tree_power(rows) * 8);
  d->more_links = d->links + 2 * line;
  d->table = (int32_t *)(void *)at;
  d->ranks = (pkv_tree_rank *)(void *)at;
  d->nodes = (pkv_tree_node *)(void *)(d->ranks + line);
  if (core->window > 0) {
    unsigned char *plan = (unsigned char *)in->plan;
    d->ranks = (pkv_tree_rank *)(void *)(plan + in->tree.ranks_at);
    d->nodes = (pkv_tree_node *)(void *)(plan + in->tree.nodes_at);
  }
  int64_t *wide = (int64_t *)(void *)(at + (int32_t)pkv_tree_desk_shared(rows, core->window));
  d->cost = wide;
  d->rank_cost = wide + line;
  wide += 2 * line;
  d->w.first_sum = core->window > 0 ? wide : 0;
  if (core->window > 0) wide += line;
  d->w.end_sum = core->batch_invariant ? wide : 0;
  if (core->batch_invariant) wide += line;
  int32_t *word = (int32_t *)(void *)wide;
  d->w.lcp = word;
  d->w.rep = word + line;
  d->w.first = word + 2 * line;
  d->w.end = word + 3 * line;
  d->w.up = word + 4 * line;
  d->w.kept = word + 5 * line;
  d->w.kid_ranks = word + 6 * line;
  d->w.kid_tiles = word + 7 * line;
  d->w.cover = word + 8 * line;
  d->w.ends = word + 9 * line;
  d->w.deep = word + 10 * line;
  d->row = word + 11 * line;
  d->length = word + 12 * line;
  d->votes = word + 13 * line;
  d->segments = word + 14 * line;
  d->base = word + 15 * line;
  d->rank_base = word + 16 * line;
  word += 18 * line;
  d->node_cursors = (pkv_node_cursor *)(void *)word;
  d->private_cursors = (pkv_private_cursor *)(void *)(d->node_cursors + core->parts + 1);
  d->marks = (int32_t *)(void *)(d->private_cursors + 2 * core->parts + 1);
  d->starts = d->marks + 3 * core->parts + 2;
}

/* Bytes of a unit's table (tree_block_impl.h). */
static inline PKV_HD int64_t pkv_tree_level_bytes(int32_t rows) {
  return (int64_t)pkv_tree_power(2 * rows) * 12 + (int64_t)rows * 16;
}

/* Bytes of keys, leaders and a desk for up to `rows` rows that share at most `units` units. */
static inline PKV_HD int64_t pkv_tree_memory_bytes(const pkv_plan_core *core, int64_t units) {
  const int64_t rows = core->rows;
  return units * rows * 8 + 2 * (rows + 16) * 4 + pkv_tree_desk_bytes(core) + 64;
}
/* Sets found, which lies first, and keys; returns the desk. memory: aligned to 64. */
static inline PKV_HD void *pkv_tree_memory_init(pkv_tree_input *in, void *memory, int64_t units) {
  const int64_t rows = in->header.rows;
  unsigned char *at = (unsigned char *)memory;
  in->found = (uint64_t *)(void *)at;
  at += (rows + 1) * 8;
  in->keys = (uint64_t *)(void *)at;
  at += units * rows * 8;
  return at + ((uintptr_t)at % 16 ? 16 - (uintptr_t)at % 16 : 0);
}

#endif
