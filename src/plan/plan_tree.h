/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a `shared` plan: a tree of shared prefixes over the rows, and equal-cost parts over
 * node work and private work. A pkv_plan header whose tree_at leads to the pkv_plan_tree below;
 * included by .c and .cu alike. How the values come about: tree_core.h.
 *
 * Words beyond those of plan.h
 *   rank     a row's place in the plan: sharers have neighbouring ranks. ranks[rank].row = the
 *            caller's row
 *   node     units [first_unit, first_unit + units) counted from the start of its rows, read once
 *            for all of them: ranks [first_rank, first_rank + ranks). Every query of every one of
 *            its rows sees the node's last token: (first_unit + units) * unit_tokens <=
 *            seq_len - q_len + 1. So a node needs no causal mask, only, with a window, each query's
 *            lower bound. Nodes lie in preorder (a parent before its children, by first_rank)
 *   path     the nodes of a row from the root down: units 0 .. first private unit, no gaps (with a
 *            window: from its first visible unit). At most PKV_TREE_MAX_PATH
 *   tile     of a node: up to PKV_TREE_TILE_ROWS query rows of neighbouring ranks. Tile m has the
 *            node's ranks m * tile_ranks .. + tile_ranks - 1 (the last one fewer); a rank is never
 *            cut. Query row i of a tile = (rank - tile's first) * q_len * G + t * G + g
 *   segment  node line: (node, KV head, tile), numbered in that order. Private line: (rank, KV
 *            head), numbered in that order; units [first_unit, first_unit + units) of the rank
 *   slot     as in plan.h: room for the group * q_len states of *one rank*, ordered [t, g]. Node
 *            work and private work have an area of slots each, both counted from 0. A piece of a
 *            node's tile of k ranks fills k slots, rank by rank: its states are those of the tile's
 *            query rows in their order, without gaps. (Slots by rank, not by tile of 128: nodes of
 *            few rows are frequent in the bound, the workspace would be five times as large.)
 *
 * Work. Part p does the pieces between node_cursors[p] and [p + 1], and the pieces between
 * private_cursors[2p] and [2p + 1] and between [2p + 1] and [2p + 2] (two halves that run side by
 * side). A piece that starts at a cursor has the cursor's slot; the piece after it has the slots
 * that follow. Batch-invariant: each unit (chunk) of a piece has slots of its own, unit by unit.
 * Every piece has slots and writes them, but for two: a row without a path whose private segment is
 * uncut (`whole`) stores its result and has no slot; a private segment without units whose row has
 * a path writes nothing.
 *
 * Folding (rank, KV head): the nodes of the path in order, each node's pieces in order, then the
 * private pieces: pkv_tree_node_states, pkv_tree_private_states. Neutral states occur (a window
 * that excludes a node wholly leaves the row in the node, all masked: ranks stay contiguous).
 */
#ifndef PKV_PLAN_PLAN_TREE_H
#define PKV_PLAN_PLAN_TREE_H

#include "plan/plan.h"

#define PKV_TREE_TILE_ROWS 128 /* most query rows of a tile */
#define PKV_TREE_MAX_PATH  5   /* most nodes of a row; with its private part: 6 */

/* By rank. */
typedef struct pkv_tree_rank {
  int32_t row, length;             /* the caller's row, its seq_len */
  int32_t first_unit, units;       /* private part; units may be 0 */
  int32_t depth;                   /* nodes of the path; 0: nothing of the row is shared */
  int32_t path[PKV_TREE_MAX_PATH]; /* root first; -1 from depth on */
  int32_t base_slot; /* what private_slot of (rank, KV head 0) would be if nothing were cut */
  int32_t pad;
} pkv_tree_rank;

typedef struct pkv_tree_node {
  int32_t first_rank, ranks;
  int32_t table_row; /* the row whose block table is read: it sees every unit of the node */
  int32_t first_unit, units;
  int32_t parent;            /* -1: none */
  int32_t tiles, tile_ranks; /* tiles a KV head; ranks of a tile, the last one apart */
  int32_t first_segment;     /* segments first_segment + kv_head * tiles + tile */
  int32_t depth;             /* 0: a root */
  int32_t base_slot;         /* what node_slot[first_segment] would be if nothing were cut */
  int32_t pad;
} pkv_tree_node;

/* Where a part's node work starts; the end is {nodes, 0, 0, 0, node_slots, node_segments}. */
typedef struct pkv_node_cursor {
  int32_t node, kv_head, tile;
  int32_t unit;    /* from the node's first; > 0: the segment is cut here */
  int32_t slot;    /* of the piece that starts here */
  int32_t segment; /* number of (node, kv_head, tile) */
} pkv_node_cursor;

/* Where private work starts; the end is {rows, 0, 0, private_slots, 0, 0, 0, 0}. */
typedef struct pkv_private_cursor {
  int32_t rank, kv_head;
  int32_t unit; /* from the rank's first private one; > 0: the segment is cut here */
  int32_t slot; /* of the piece that starts here */
  int32_t row, length, first_unit, depth; /* of the rank: a part starts without a look-up */
} pkv_private_cursor;

/* At plan->tree_at. Arrays lie where rows, KV heads and parts put them, however many nodes there
   are; entries past a count are 0. Offsets are from the plan's start. */
typedef struct pkv_plan_tree {
  int32_t nodes, node_segments;
  int32_t node_slots, private_slots;
  int32_t most_tile_ranks; /* floor(128 / (q_len * group)); 0: nothing is shared */
  int32_t pad;
  /* costs: one unit of a tile = node_unit_cost + its ranks * rank_unit_cost */
  int64_t node_unit_cost, rank_unit_cost, node_segment_cost, state_cost;
  int64_t node_cost;          /* of the whole node line; the private line has total_cost minus it */
  int64_t ranks_at;           /* pkv_tree_rank [rows] */
  int64_t row_rank_at;        /* int32 [rows]: the rank of each of the caller's rows */
  int64_t nodes_at;           /* pkv_tree_node [nodes], room for rows - 1 */
  int64_t node_cost_at;       /* int64 [nodes + 1], room for rows: costs of all nodes before */
  int64_t rank_cost_at;       /* int64 [rows + 1]: costs of all ranks before */
  int64_t node_cursors_at;    /* pkv_node_cursor [parts + 1] */
  int64_t private_cursors_at; /* pkv_private_cursor [2 * parts + 1] */
  int64_t node_slot_at;       /* int32 [node_segments + 1]: first slot of each segment */
  int64_t private_slot_at;    /* int32 [rows * kv_heads + 1]: first slot of each segment */
  int64_t scratch_at;         /* builders' own; 0 in a finished plan */
} pkv_plan_tree;

/* A built plan's arrays. */
typedef struct pkv_tree_view {
  const pkv_plan_tree *tree;
  const pkv_tree_rank *ranks;
  const int32_t *row_rank;
  const pkv_tree_node *nodes;
  const pkv_node_cursor *node_cursors;
  const pkv_private_cursor *private_cursors;
  const int32_t *node_slot, *private_slot;
  int32_t rows, kv_heads, unit_tokens, batch_invariant;
} pkv_tree_view;

static inline PKV_HD pkv_tree_view pkv_tree_view_of(const struct pkv_plan *plan) {
  const pkv_plan_tree *tree = (const pkv_plan_tree *)pkv_plan_at(plan, plan->tree_at);
  pkv_tree_view v;
  v.tree = tree;
  v.ranks = (const pkv_tree_rank *)pkv_plan_at(plan, tree->ranks_at);
  v.row_rank = (const int32_t *)pkv_plan_at(plan, tree->row_rank_at);
  v.nodes = (const pkv_tree_node *)pkv_plan_at(plan, tree->nodes_at);
  v.node_cursors = (const pkv_node_cursor *)pkv_plan_at(plan, tree->node_cursors_at);
  v.private_cursors = (const pkv_private_cursor *)pkv_plan_at(plan, tree->private_cursors_at);
  v.node_slot = (const int32_t *)pkv_plan_at(plan, tree->node_slot_at);
  v.private_slot = (const int32_t *)pkv_plan_at(plan, tree->private_slot_at);
  v.rows = plan->rows;
  v.kv_heads = plan->kv_heads;
  v.unit_tokens = plan->unit_tokens;
  v.batch_invariant = (plan->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  return v;
}

/* What a part does with one segment of the node line. */
typedef struct pkv_node_piece {
  int32_t node, kv_head, table_row;
  int32_t first_rank, ranks;    /* of the tile */
  int32_t unit_begin, unit_end; /* counted from the rows' start: tokens unit * unit_tokens .. */
  int32_t slot; /* of first_rank; batch-invariant: of unit_begin, the next unit's ranks follow */
} pkv_node_piece;

/* Ranks of a node's tile. */
static inline PKV_HD int32_t pkv_tree_tile_ranks(const pkv_tree_node *node, int32_t tile) {
  const int32_t left = node->ranks - tile * node->tile_ranks;
  return left < node->tile_ranks ? left : node->tile_ranks;
}

/*
 * The piece of `at`..`end` that starts at `at`, which moves past it; 0 when there is none left.
 * Begin with at = node_cursors[p], end = &node_cursors[p + 1].
 */
static inline PKV_HD int pkv_tree_next_node_piece(pkv_node_piece *piece, const pkv_tree_view *v,
                                                  pkv_node_cursor *at, const pkv_node_cursor *end) {
  const int last = at->segment == end->segment;
  if (at->segment > end->segment || (last && at->unit >= end->unit)) return 0;
  const pkv_tree_node *node = &v->nodes[at->node];
  const int32_t stop = last ? end->unit : node->units;
  const int32_t ranks = pkv_tree_tile_ranks(node, at->tile);
  piece->node = at->node;
  piece->kv_head = at->kv_head;
  piece->table_row = node->table_row;
  piece->first_rank = node->first_rank + at->tile * node->tile_ranks;
  piece->ranks = ranks;
  piece->unit_begin = node->first_unit + at->unit;
  piece->unit_end = node->first_unit + stop;
  piece->slot = at->slot;
  at->slot += v->batch_invariant ? (stop - at->unit) * ranks : ranks;
  at->unit = stop;
  if (last) return 1;
  at->unit = 0;
  at->segment++;
  if (++at->tile < node->tiles) return 1;
  at->tile = 0;
  if (++at->kv_head < v->kv_heads) return 1;
  at->kv_head = 0;
  at->node++;
  return 1;
}

/* What half a part does with one segment of the private line. */
typedef struct pkv_private_piece {
  int32_t rank, kv_head, row, length;
  int32_t unit_begin, unit_end; /* counted from the row's start */
  int32_t
      whole;    /* 1: no path and uncut, also without units: store the result, no slot is written */
  int32_t slot; /* batch-invariant: of unit_begin, the next unit's follows */
} pkv_private_piece;

/*
 * As above; begin with at = private_cursors[i], end = &private_cursors[i + 1]. A piece without
 * units that is not whole writes nothing.
 */
static inline PKV_HD int pkv_tree_next_private_piece(pkv_private_piece *piece,
                                                     const pkv_tree_view *v, pkv_private_cursor *at,
                                                     const pkv_private_cursor *end) {
  const int last = at->rank == end->rank && at->kv_head == end->kv_head;
  if (last && at->unit >= end->unit) return 0;
  if (at->rank > end->rank || (at->rank == end->rank && at->kv_head > end->kv_head)) return 0;
  const int32_t units = last ? end->unit : v->ranks[at->rank].units;
  piece->rank = at->rank;
  piece->kv_head = at->kv_head;
  piece->row = at->row;
  piece->length = at->length;
  piece->unit_begin = at->first_unit + at->unit;
  piece->unit_end = at->first_unit + units;
  piece->whole = at->depth == 0 && at->unit == 0 && !last;
  piece->slot = at->slot;
  if (!piece->whole) at->slot += v->batch_invariant ? units - at->unit : 1;
  at->unit = units;
  if (last) return 1;
  at->unit = 0;
  if (++at->kv_head < v->kv_heads) return 1;
  at->kv_head = 0;
  at->rank++;
  if (at->rank >= v->rows) return 1;
  const pkv_tree_rank *rank = &v->ranks[at->rank];
  at->row = rank->row;
  at->length = rank->length;
  at->first_unit = rank->first_unit;
  at->depth = rank->depth;
  return 1;
}

/* Slots first + i * stride, i = 0 .. count-1, to fold in that order. */
typedef struct pkv_tree_states {
  int32_t first, stride, count;
} pkv_tree_states;

/* The states of a rank in a node of its path, in the node area. */
static inline PKV_HD pkv_tree_states pkv_tree_node_states(const pkv_tree_view *v, int32_t node_id,
                                                          int32_t rank, int32_t kv_head) {
  const pkv_tree_node *node = &v->nodes[node_id];
  const int32_t tile = (rank - node->first_rank) / node->tile_ranks;
  const int32_t segment = node->first_segment + kv_head * node->tiles + tile;
  const int32_t first = v->node_slot[segment], end = v->node_slot[segment + 1];
  pkv_tree_states s;
  s.stride = pkv_tree_tile_ranks(node, tile);
  s.first = first + rank - node->first_rank - tile * node->tile_ranks;
  s.count = (end - first) / s.stride;
  return s;
}

/* A rank's private states, in the private area; count 0: it has no private units. */
static inline PKV_HD pkv_tree_states pkv_tree_private_states(const pkv_tree_view *v, int32_t rank,
                                                             int32_t kv_head) {
  const int32_t segment = rank * v->kv_heads + kv_head;
  pkv_tree_states s;
  s.first = v->private_slot[segment];
  s.stride = 1;
  s.count = v->ranks[rank].units > 0 ? v->private_slot[segment + 1] - s.first : 0;
  return s;
}

/* Whether the segment's result was stored by its only private piece: nothing to fold. */
static inline PKV_HD int pkv_tree_stored(const pkv_tree_view *v, int32_t rank, int32_t kv_head) {
  const int32_t segment = rank * v->kv_heads + kv_head;
  return v->ranks[rank].depth == 0 && v->private_slot[segment + 1] == v->private_slot[segment];
}

#endif
