/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second half of `shared`'s core: ranks and nodes become two lines of segments, cut into parts
 * of equal cost. As tree_core.h: one text for host and device.
 *
 * The definition
 *   node line     Segments (node, KV head, tile) in that order. One costs node_segment_cost + units
 *                 * (node_unit_cost + its ranks * rank_unit_cost).
 *   private line  Segments (rank, KV head). One costs segment_cost + units * unit_cost, also
 *                 without units.
 *   cuts          The lines follow each other; cut p = 0 .. parts lies at c = floor(p * total /
 *                 parts). Node cursor p: min(c, node line's cost) on the node line. Private cursor
 *                 2p: max(0, c - node line's cost) on the private line; cursor 2p + 1: the middle,
 *                 rounded down, between those two costs. In a segment a cut moves to the nearest
 *                 unit as in plan_core.h.
 *   slots         A cut is a cursor with unit > 0 that differs from the one before it. A piece of a
 *                 node's tile of k ranks takes k slots (batch-invariant: k a unit). A private piece
 *                 takes one (a unit), but an uncut segment of a rank without a path takes none.
 *                 Pieces have their slots in the order of their line, so that slot = base, the sum
 *                 over all segments before if nothing were cut, + the sum of the marks up to it.
 */
#ifndef PKV_PLAN_TREE_CUTS_H
#define PKV_PLAN_TREE_CUTS_H

#include "plan/tree_core.h"

/* ------------------------------------------------------------------------------------------
 * Costs and bases
 * ---------------------------------------------------------------------------------------- */

/* What is summed over nodes in preorder, of all their KV heads. */
typedef struct pkv_tree_sums {
  int64_t cost;
  int32_t segments, slots;
} pkv_tree_sums;

static inline PKV_HD int64_t pkv_tree_tile_unit_cost(const pkv_tree_core *t, int32_t ranks) {
  return t->node_unit_cost + ranks * t->rank_unit_cost;
}
static inline PKV_HD int64_t pkv_tree_tile_cost(const pkv_tree_core *t, const pkv_tree_node *node,
                                                int32_t ranks) {
  return t->node_segment_cost + node->units * pkv_tree_tile_unit_cost(t, ranks);
}
/* All tiles of one KV head. */
static inline PKV_HD int64_t pkv_tree_head_cost(const pkv_tree_core *t, const pkv_tree_node *node) {
  return (node->tiles - 1) * pkv_tree_tile_cost(t, node, node->tile_ranks) +
         pkv_tree_tile_cost(t, node, pkv_tree_tile_ranks(node, node->tiles - 1));
}
/* Slots of `ranks` ranks of an uncut segment. */
static inline PKV_HD int32_t pkv_tree_uncut_slots(const pkv_tree_core *t, const pkv_tree_node *node,
                                                  int32_t ranks) {
  return t->core.batch_invariant ? ranks * node->units : ranks;
}
static inline PKV_HD pkv_tree_sums pkv_tree_node_sums(const pkv_tree_core *t,
                                                      const pkv_tree_node *node) {
  pkv_tree_sums s;
  s.cost = t->core.kv_heads * pkv_tree_head_cost(t, node);
  s.segments = t->core.kv_heads * node->tiles;
  s.slots = t->core.kv_heads * pkv_tree_uncut_slots(t, node, node->ranks);
  return s;
}

static inline PKV_HD int64_t pkv_tree_rank_cost(const pkv_tree_core *t, const pkv_tree_rank *rank) {
  return t->core.kv_heads * pkv_core_segment(&t->core, rank->units);
}
/* Slots of a rank's uncut segment, and of those of all KV heads. */
static inline PKV_HD int32_t pkv_tree_head_slots(const pkv_tree_core *t,
                                                 const pkv_tree_rank *rank) {
  if (rank->depth == 0) return 0;
  return t->core.batch_invariant ? rank->units : 1;
}
static inline PKV_HD int32_t pkv_tree_rank_slots(const pkv_tree_core *t,
                                                 const pkv_tree_rank *rank) {
  return t->core.kv_heads * pkv_tree_head_slots(t, rank);
}

/* ------------------------------------------------------------------------------------------
 * Cursors
 * ---------------------------------------------------------------------------------------- */

/* a / b for a >= 0, b > 0: most costs take 32 bits, where a device divides several times faster. */
static inline PKV_HD int64_t pkv_tree_quotient(int64_t a, int64_t b) {
  if ((uint64_t)(a | b) >> 32 == 0) return (int64_t)((uint32_t)a / (uint32_t)b);
  return a / b;
}

/* The unit nearest to x, a cost counted from where the segment's units start. */
static inline PKV_HD int32_t pkv_tree_nearest(int64_t x, int64_t unit_cost) {
  return x <= 0 ? 0 : (int32_t)pkv_tree_quotient(2 * x + unit_cost, 2 * unit_cost);
}

/* The costs that parts are cut from. */
typedef struct pkv_tree_line {
  int64_t total, node_cost;
  int64_t share, rest; /* total / parts and its remainder */
  int32_t parts;
} pkv_tree_line;

static inline PKV_HD pkv_tree_line pkv_tree_line_of(int64_t total, int64_t node_cost,
                                                    int32_t parts) {
  pkv_tree_line line;
  line.total = total;
  line.node_cost = node_cost;
  line.share = pkv_tree_quotient(total, parts);
  line.rest = total - line.share * parts;
  line.parts = parts;
  return line;
}
/* floor(p * total / parts); p and rest are at most PKV_PLAN_MAX_PARTS, their product in 32 bits. */
static inline PKV_HD int64_t pkv_tree_cut(const pkv_tree_line *line, int32_t p) {
  if (p == line->parts) return line->total;
  const uint32_t rest = (uint32_t)p * (uint32_t)line->rest / (uint32_t)line->parts;
  return p * line->share + rest;
}
/* What cut p costs on the node line and on the private line. */
static inline PKV_HD int64_t pkv_tree_node_cut(const pkv_tree_line *line, int32_t p) {
  const int64_t c = pkv_tree_cut(line, p);
  return c < line->node_cost ? c : line->node_cost;
}
static inline PKV_HD int64_t pkv_tree_private_cut(const pkv_tree_line *line, int32_t i) {
  const int64_t c = pkv_tree_cut(line, i / 2) - line->node_cost;
  const int64_t at = c > 0 ? c : 0;
  if (i % 2 == 0) return at;
  const int64_t d = pkv_tree_cut(line, i / 2 + 1) - line->node_cost;
  return at + ((d > 0 ? d : 0) - at) / 2;
}

/* Place of a node cursor at cost c; its slot is that of the place if nothing were cut. */
static inline PKV_HD void pkv_tree_node_cursor(pkv_node_cursor *out, const pkv_tree_core *t,
                                               const pkv_tree_node *nodes, const int64_t *node_cost,
                                               int32_t count, const pkv_tree_sums *all, int64_t c) {
  out->node = count;
  out->kv_head = 0;
  out->tile = 0;
  out->unit = 0;
  out->slot = all->slots;
  out->segment = all->segments;
  if (c >= all->cost) return;
  const int32_t id = pkv_core_find_row(node_cost, count, c);
  const pkv_tree_node *node = &nodes[id];
  const int64_t head_cost = pkv_tree_head_cost(t, node), x = c - node_cost[id];
  const int64_t tile_cost = pkv_tree_tile_cost(t, node, node->tile_ranks);
  int32_t head = (int32_t)pkv_tree_quotient(x, head_cost);
  const int64_t y = x - head * head_cost;
  int32_t tile = (int32_t)pkv_tree_quotient(y, tile_cost);
  if (tile > node->tiles - 1) tile = node->tiles - 1;
  int32_t ranks = pkv_tree_tile_ranks(node, tile);
  int32_t unit = pkv_tree_nearest(y - tile * tile_cost - t->node_segment_cost,
                                  pkv_tree_tile_unit_cost(t, ranks));
  if (unit >= node->units) {
    unit = 0;
    tile++;
  }
  const int32_t segment =
      head * node->tiles + tile; /* of the node; its last + 1 is the next one's */
  if (tile == node->tiles) {
    tile = 0;
    head++;
  }
  out->segment = node->first_segment + segment;
  out->slot =
      node->base_slot + pkv_tree_uncut_slots(t, node, head * node->ranks + tile * node->tile_ranks);
  out->node = head == t->core.kv_heads ? id + 1 : id;
  out->kv_head = head == t->core.kv_heads ? 0 : head;
  out->tile = tile;
  out->unit = unit;
}

static inline PKV_HD int32_t pkv_tree_private_base(const pkv_tree_core *t,
                                                   const pkv_tree_rank *rank, int32_t kv_head) {
  return rank->base_slot + pkv_tree_head_slots(t, rank) * kv_head;
}

/* Place of a private cursor at cost c; slot as above. slots: of all ranks if nothing were cut. */
static inline PKV_HD void pkv_tree_private_cursor(pkv_private_cursor *out, const pkv_tree_core *t,
                                                  const pkv_tree_rank *ranks,
                                                  const int64_t *rank_cost, int32_t slots,
                                                  int64_t c) {
  const int32_t rows = t->core.rows;
  out->rank = rows;
  out->kv_head = 0;
  out->unit = 0;
  out->slot = slots;
  out->row = 0;
  out->length = 0;
  out->first_unit = 0;
  out->depth = 0;
  if (rows == 0 || c >= rank_cost[rows]) return;
  int32_t id = pkv_core_find_row(rank_cost, rows, c);
  const int64_t segment = pkv_core_segment(&t->core, ranks[id].units);
  int32_t head = (int32_t)pkv_tree_quotient(c - rank_cost[id], segment);
  const int64_t x = c - rank_cost[id] - head * segment - t->core.segment_cost;
  int32_t unit = pkv_tree_nearest(x, t->core.unit_cost);
  if (unit > 0 && unit >= ranks[id].units) {
    unit = 0;
    head++;
  }
  if (head == t->core.kv_heads) {
    head = 0;
    id++;
  }
  out->rank = id;
  if (id == rows) return;
  const pkv_tree_rank *rank = &ranks[id];
  out->kv_head = head;
  out->unit = unit;
  out->slot = pkv_tree_private_base(t, rank, head);
  out->row = rank->row;
  out->length = rank->length;
  out->first_unit = rank->first_unit;
  out->depth = rank->depth;
}

/* ------------------------------------------------------------------------------------------
 * Slots. Marks are of cursors 1 .. last - 1; those of the first and the last are 0.
 * ---------------------------------------------------------------------------------------- */

static inline PKV_HD int32_t pkv_tree_node_mark(const pkv_tree_core *t, const pkv_tree_node *nodes,
                                                const pkv_node_cursor *before,
                                                const pkv_node_cursor *cursor) {
  const int same = before->segment == cursor->segment;
  if (t->core.batch_invariant || cursor->unit == 0) return 0;
  if (same && before->unit == cursor->unit) return 0;
  return pkv_tree_tile_ranks(&nodes[cursor->node], cursor->tile);
}
/* sum: of the marks up to the cursor's, inclusively. */
static inline PKV_HD void pkv_tree_node_place(pkv_node_cursor *cursor, const pkv_tree_core *t,
                                              const pkv_tree_node *nodes, int32_t sum) {
  cursor->slot += sum;
  if (t->core.batch_invariant && cursor->unit > 0)
    cursor->slot += cursor->unit * pkv_tree_tile_ranks(&nodes[cursor->node], cursor->tile);
}

static inline PKV_HD int32_t pkv_tree_private_mark(const pkv_tree_core *t,
                                                   const pkv_tree_rank *ranks,
                                                   const pkv_private_cursor *before,
                                                   const pkv_private_cursor *cursor) {
  const int same = before->rank == cursor->rank && before->kv_head == cursor->kv_head;
  if (cursor->unit == 0 || (same && before->unit == cursor->unit)) return 0;
  const int first = cursor->depth == 0 && !(same && before->unit > 0);
  if (t->core.batch_invariant) return first ? ranks[cursor->rank].units : 0;
  return first ? 2 : 1;
}
static inline PKV_HD void pkv_tree_private_place(pkv_private_cursor *cursor, const pkv_tree_core *t,
                                                 const pkv_tree_rank *ranks, int32_t sum) {
  cursor->slot += sum;
  if (cursor->unit == 0) return;
  if (t->core.batch_invariant)
    cursor->slot += cursor->unit - (cursor->depth == 0 ? ranks[cursor->rank].units : 0);
  else if (cursor->depth == 0)
    cursor->slot--;
}

/*
 * First slots of segments: the base and what the cuts before add to it, which is the inclusive sum
 * of marks at the last cursor before the segment. That sum from a placed cursor:
 */
static inline PKV_HD int32_t pkv_tree_node_beyond(const pkv_tree_core *t,
                                                  const pkv_tree_node *nodes,
                                                  const pkv_node_cursor *c) {
  const pkv_tree_node *node = &nodes[c->node];
  if (t->core.batch_invariant) return 0;
  return c->slot - node->base_slot - c->kv_head * node->ranks - c->tile * node->tile_ranks;
}
static inline PKV_HD int32_t pkv_tree_private_beyond(const pkv_tree_core *t,
                                                     const pkv_tree_rank *ranks,
                                                     const pkv_private_cursor *c) {
  const pkv_tree_rank *rank = &ranks[c->rank];
  const int32_t sum = c->slot - pkv_tree_private_base(t, rank, c->kv_head);
  if (c->unit == 0) return sum;
  if (t->core.batch_invariant) return sum - c->unit + (c->depth == 0 ? rank->units : 0);
  return c->depth == 0 ? sum + 1 : sum;
}

static inline PKV_HD int32_t pkv_tree_node_base(const pkv_tree_core *t, const pkv_tree_node *node,
                                                int32_t segment) {
  const int32_t of = segment - node->first_segment;
  const int32_t head = of / node->tiles, tile = of % node->tiles;
  return node->base_slot +
         pkv_tree_uncut_slots(t, node, head * node->ranks + tile * node->tile_ranks);
}

/* Whether a cursor lies before a segment. */
static inline PKV_HD int pkv_tree_private_before(const pkv_private_cursor *c, int32_t rank,
                                                 int32_t kv_head) {
  return c->rank < rank || (c->rank == rank && c->kv_head < kv_head);
}

/* The node of a segment of the node line; segments: [count], each node's first. */
static inline PKV_HD int32_t pkv_tree_find_node(const int32_t *segments, int32_t count,
                                                int32_t segment) {
  int32_t low = 0, high = count; /* low begins at the segment or before, high does not */
  PKV_ROLLED while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (segments[middle] <= segment)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* The last cursor before a segment other than the first. */
static inline PKV_HD int32_t pkv_tree_find_node_cursor(const pkv_node_cursor *cursors,
                                                       int32_t parts, int32_t segment) {
  int32_t low = 0, high = parts; /* low lies before the segment, high does not */
  PKV_ROLLED while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (cursors[middle].segment < segment)
      low = middle;
    else
      high = middle;
  }
  return low;
}
static inline PKV_HD int32_t pkv_tree_find_private_cursor(const pkv_private_cursor *cursors,
                                                          int32_t parts, int32_t rank,
                                                          int32_t kv_head) {
  int32_t low = 0, high = 2 * parts;
  PKV_ROLLED while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (pkv_tree_private_before(&cursors[middle], rank, kv_head))
      low = middle;
    else
      high = middle;
  }
  return low;
}

#endif
