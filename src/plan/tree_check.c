/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_plan_check of `shared`: whether an executor can run the tree safely and gets every (row, KV
 * head, unit) exactly once. Values follow from the definitions, walked in order; which nodes were
 * worth keeping is not asked. Allocates nothing.
 */
#include "plan/plan_check.h"
#include "plan/tree_cuts.h"

static pkv_status check_header(const struct pkv_plan *plan, const pkv_plan_tree *tree,
                               pkv_error *err) {
  const int64_t query_rows = (int64_t)(plan->query_heads / plan->kv_heads) * plan->q_len;
  PKV_FAULT(err, plan->rows <= PKV_TREE_MAX_ROWS && plan->rows <= INT32_MAX / plan->kv_heads,
            "rows %d of %d heads", plan->rows, plan->kv_heads);
  PKV_FAULT(err,
            plan->slot_stride == 1 && plan->items == 0 && plan->launches == 2 &&
                plan->bucket_tokens == 0 && plan->merges == plan->rows * plan->kv_heads,
            "slot_stride %d, items %d, launches %d, bucket_tokens %d, merges %d", plan->slot_stride,
            plan->items, plan->launches, plan->bucket_tokens, plan->merges);
  PKV_FAULT(err,
            tree->node_unit_cost > 0 && tree->node_unit_cost <= UINT32_MAX &&
                tree->rank_unit_cost >= 0 && tree->rank_unit_cost <= UINT32_MAX &&
                tree->node_segment_cost > 0 && tree->node_segment_cost <= 2 * (int64_t)UINT32_MAX &&
                tree->state_cost >= 0,
            "costs %lld, %lld, %lld, %lld", (long long)tree->node_unit_cost,
            (long long)tree->rank_unit_cost, (long long)tree->node_segment_cost,
            (long long)tree->state_cost);
  PKV_FAULT(err,
            tree->most_tile_ranks == PKV_TREE_TILE_ROWS / query_rows && tree->nodes >= 0 &&
                (tree->nodes == 0 || tree->nodes < plan->rows) && tree->node_segments >= 0 &&
                tree->node_slots >= 0 && tree->private_slots >= 0 &&
                (tree->nodes == 0 || tree->most_tile_ranks > 0),
            "most_tile_ranks %d, nodes %d, node_segments %d, slots %d and %d",
            tree->most_tile_ranks, tree->nodes, tree->node_segments, tree->node_slots,
            tree->private_slots);
  PKV_FAULT(err, (int64_t)tree->node_slots + tree->private_slots == plan->slots,
            "slots %d, in the areas %d and %d", plan->slots, tree->node_slots, tree->private_slots);
  return PKV_OK;
}

static pkv_status check_arrays(const struct pkv_plan *plan, const pkv_plan_tree *tree,
                               pkv_error *err) {
  const int64_t rows = plan->rows, parts = plan->parts;
  PKV_TRY(pkv_check_array(plan, "ranks", tree->ranks_at, rows, sizeof(pkv_tree_rank), err));
  PKV_TRY(pkv_check_array(plan, "row_rank", tree->row_rank_at, rows, sizeof(int32_t), err));
  PKV_TRY(pkv_check_array(plan, "nodes", tree->nodes_at, tree->nodes, sizeof(pkv_tree_node), err));
  PKV_TRY(pkv_check_array(plan, "node_cost", tree->node_cost_at, tree->nodes + 1, sizeof(int64_t),
                          err));
  PKV_TRY(pkv_check_array(plan, "rank_cost", tree->rank_cost_at, rows + 1, sizeof(int64_t), err));
  PKV_TRY(pkv_check_array(plan, "node_cursors", tree->node_cursors_at, parts + 1,
                          sizeof(pkv_node_cursor), err));
  PKV_TRY(pkv_check_array(plan, "private_cursors", tree->private_cursors_at, 2 * parts + 1,
                          sizeof(pkv_private_cursor), err));
  PKV_TRY(pkv_check_array(plan, "node_slot", tree->node_slot_at, (int64_t)tree->node_segments + 1,
                          sizeof(int32_t), err));
  PKV_TRY(pkv_check_array(plan, "private_slot", tree->private_slot_at, rows * plan->kv_heads + 1,
                          sizeof(int32_t), err));
  PKV_TRY(pkv_check_array(plan, "launches", plan->launches_at, 2, sizeof(pkv_plan_launch), err));
  const pkv_plan_launch *l = pkv_plan_at(plan, plan->launches_at);
  PKV_FAULT(err,
            l[0].kind == PKV_LAUNCH_FUSED && l[0].first == 0 && l[0].count == parts &&
                l[1].kind == PKV_LAUNCH_MERGE && l[1].first == 0 && l[1].count == plan->merges,
            "launches: kind %d, %d + %d; kind %d, %d + %d", l[0].kind, l[0].first, l[0].count,
            l[1].kind, l[1].first, l[1].count);
  return PKV_OK;
}

/* A node in itself, and against its parent and the node before it in preorder. */
static pkv_status check_node(const struct pkv_plan *plan, const pkv_tree_core *t,
                             const pkv_tree_node *nodes, int32_t id, pkv_error *err) {
  const pkv_tree_node *n = &nodes[id];
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  PKV_FAULT(err,
            n->first_rank >= 0 && n->ranks >= 2 && n->ranks <= plan->rows &&
                n->first_rank <= plan->rows - n->ranks && n->table_row >= 0 &&
                n->table_row < plan->rows && n->first_unit >= 0 && n->units >= 1 &&
                n->units <= INT32_MAX - n->first_unit,
            "node %d: ranks %d + %d of %d, table of row %d, units %d + %d", id, n->first_rank,
            n->ranks, plan->rows, n->table_row, n->first_unit, n->units);
  PKV_FAULT(err,
            n->tiles == pkv_tree_tiles(t, n->ranks) &&
                n->tile_ranks == pkv_core_div_up(n->ranks, n->tiles),
            "node %d: %d tiles of %d ranks for %d", id, n->tiles, n->tile_ranks, n->ranks);
  PKV_FAULT(err,
            n->first_unit >= pkv_core_first_unit(&t->core, seq_len[n->table_row]) &&
                n->first_unit + n->units <= pkv_tree_shareable(&t->core, seq_len[n->table_row]),
            "node %d: row %d does not see units %d to %d", id, n->table_row, n->first_unit,
            n->first_unit + n->units);
  PKV_FAULT(err, n->parent >= -1 && n->parent < id, "node %d: parent %d", id, n->parent);
  const pkv_tree_node *up = n->parent >= 0 ? &nodes[n->parent] : NULL;
  PKV_FAULT(err,
            n->depth == (up ? up->depth + 1 : 0) && n->depth < PKV_TREE_MAX_PATH &&
                (!up || (n->first_rank >= up->first_rank && n->ranks < up->ranks &&
                         n->first_rank + n->ranks <= up->first_rank + up->ranks &&
                         n->first_unit >= up->first_unit + up->units)),
            "node %d at depth %d, ranks %d + %d, unit %d is not inside node %d", id, n->depth,
            n->first_rank, n->ranks, n->first_unit, n->parent);
  if (id == 0) return PKV_OK;
  /* The parent is the node before or one that holds it; what is left of it lies behind that node.
  */
  int32_t at = id - 1;
  while (at >= 0 && at != n->parent) {
    PKV_FAULT(err, nodes[at].first_rank + nodes[at].ranks <= n->first_rank,
              "node %d starts at rank %d, inside node %d", id, n->first_rank, at);
    at = nodes[at].parent;
  }
  PKV_FAULT(err, at == n->parent, "node %d: its parent %d does not hold node %d before it", id,
            n->parent, id - 1);
  return PKV_OK;
}

static pkv_status check_nodes(const struct pkv_plan *plan, const pkv_plan_tree *tree,
                              const pkv_tree_core *t, pkv_error *err) {
  const pkv_tree_node *nodes = pkv_plan_at(plan, tree->nodes_at);
  const int64_t *node_cost = pkv_plan_at(plan, tree->node_cost_at);
  int64_t cost = 0, segments = 0, slots = 0;
  for (int32_t id = 0; id < tree->nodes; id++) {
    const pkv_tree_node *n = &nodes[id];
    PKV_TRY(check_node(plan, t, nodes, id, err));
    PKV_FAULT(err, n->first_segment == segments && n->base_slot == slots && node_cost[id] == cost,
              "node %d: segment %d, slot %d, cost %lld; the sums are %lld, %lld, %lld", id,
              n->first_segment, n->base_slot, (long long)node_cost[id], (long long)segments,
              (long long)slots, (long long)cost);
    const int64_t rank_slots = (int64_t)n->ranks * (t->core.batch_invariant ? n->units : 1);
    int64_t one;
    const bool over = __builtin_mul_overflow(pkv_tree_tile_unit_cost(t, n->tile_ranks),
                                             (int64_t)n->units, &one) ||
                      __builtin_add_overflow(one, t->node_segment_cost, &one) ||
                      __builtin_mul_overflow(one, (int64_t)n->tiles * t->core.kv_heads, &one) ||
                      __builtin_add_overflow(one, cost, &one) || one > INT64_MAX / 4;
    PKV_FAULT(err, !over, "node %d: the costs leave 64 bits", id);
    cost += t->core.kv_heads * pkv_tree_head_cost(t, n);
    segments += (int64_t)t->core.kv_heads * n->tiles;
    slots += t->core.kv_heads * rank_slots;
    PKV_FAULT(err, segments <= tree->node_segments && slots <= tree->node_slots,
              "node %d ends at segment %lld of %d, slot %lld of %d", id, (long long)segments,
              tree->node_segments, (long long)slots, tree->node_slots);
  }
  PKV_FAULT(err,
            segments == tree->node_segments && node_cost[tree->nodes] == cost &&
                tree->node_cost == cost,
            "node_segments %d, counted %lld; node_cost %lld, the sum is %lld", tree->node_segments,
            (long long)segments, (long long)tree->node_cost, (long long)cost);
  return PKV_OK;
}

/* The nodes that hold a rank are its path; what they leave is its private part. */
static pkv_status check_rank(const struct pkv_plan *plan, const pkv_plan_tree *tree,
                             const pkv_tree_core *t, int32_t id, int32_t *leaf, int32_t *next,
                             pkv_error *err) {
  const pkv_tree_rank *rank = (const pkv_tree_rank *)pkv_plan_at(plan, tree->ranks_at) + id;
  const pkv_tree_node *nodes = pkv_plan_at(plan, tree->nodes_at);
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  PKV_FAULT(err, rank->row >= 0 && rank->row < plan->rows && rank->length == seq_len[rank->row],
            "rank %d: row %d of %d, length %d", id, rank->row, plan->rows, rank->length);
  while (*leaf >= 0 && nodes[*leaf].first_rank + nodes[*leaf].ranks <= id)
    *leaf = nodes[*leaf].parent;
  for (; *next < tree->nodes && nodes[*next].first_rank == id; ++*next)
    *leaf = *next;
  int32_t first = pkv_core_first_unit(&t->core, rank->length);
  int32_t depth = *leaf >= 0 ? nodes[*leaf].depth + 1 : 0;
  PKV_FAULT(err, rank->depth == depth, "rank %d: depth %d, nodes hold it %d times", id, rank->depth,
            depth);
  for (int32_t i = PKV_TREE_MAX_PATH - 1; i >= depth; i--)
    PKV_FAULT(err, rank->path[i] == -1, "rank %d: path[%d] is %d", id, i, rank->path[i]);
  int32_t end = 0;
  for (int32_t node = *leaf; node >= 0; node = nodes[node].parent) {
    PKV_FAULT(err, rank->path[--depth] == node, "rank %d: path[%d] is %d, not %d", id, depth,
              rank->path[depth], node);
    if (end == 0) end = nodes[node].first_unit + nodes[node].units;
    /* With a window, rows may begin to see later, and nodes where no row of theirs does. */
    const int32_t parent = nodes[node].parent;
    const int32_t from = parent >= 0 ? nodes[parent].first_unit + nodes[parent].units : 0;
    PKV_FAULT(err, nodes[node].first_unit <= (from > first ? from : first),
              "rank %d: units %d to %d are in no node", id, from > first ? from : first,
              nodes[node].first_unit);
  }
  PKV_FAULT(err, end <= pkv_tree_shareable(&t->core, rank->length),
            "rank %d of %d tokens: its nodes end at unit %d", id, rank->length, end);
  if (end > first) first = end;
  const int32_t units = (int32_t)pkv_core_div_up(rank->length, t->core.unit_tokens) - first;
  PKV_FAULT(err, rank->first_unit == first && rank->units == units,
            "rank %d: private units %d + %d, not %d + %d", id, rank->first_unit, rank->units, first,
            units);
  return PKV_OK;
}

static pkv_status check_ranks(const struct pkv_plan *plan, const pkv_plan_tree *tree,
                              const pkv_tree_core *t, pkv_error *err) {
  const pkv_tree_rank *ranks = pkv_plan_at(plan, tree->ranks_at);
  const int32_t *row_rank = pkv_plan_at(plan, tree->row_rank_at);
  const int64_t *rank_cost = pkv_plan_at(plan, tree->rank_cost_at);
  int64_t cost = 0, slots = 0;
  int32_t leaf = -1, next = 0;
  for (int32_t id = 0; id < plan->rows; id++) {
    PKV_TRY(check_rank(plan, tree, t, id, &leaf, &next, err));
    PKV_FAULT(err, row_rank[ranks[id].row] == id, "rank %d: row %d has rank %d", id, ranks[id].row,
              row_rank[ranks[id].row]); /* so no row comes twice */
    PKV_FAULT(err, ranks[id].base_slot == slots && rank_cost[id] == cost,
              "rank %d: slot %d, cost %lld; the sums are %lld, %lld", id, ranks[id].base_slot,
              (long long)rank_cost[id], (long long)slots, (long long)cost);
    if (ranks[id].depth > 0)
      slots += (int64_t)plan->kv_heads * (t->core.batch_invariant ? ranks[id].units : 1);
    int64_t one = pkv_core_segment(&t->core, ranks[id].units);
    PKV_FAULT(err,
              slots <= tree->private_slots &&
                  !__builtin_mul_overflow(one, (int64_t)plan->kv_heads, &one) &&
                  !__builtin_add_overflow(cost, one, &cost) && cost <= INT64_MAX / 4,
              "rank %d: slot %lld of %d, or the costs leave 64 bits", id, (long long)slots,
              tree->private_slots);
  }
  PKV_FAULT(err, next == tree->nodes, "nodes %d, the ranks are in %d", tree->nodes, next);
  PKV_FAULT(err, rank_cost[plan->rows] == cost && plan->total_cost == tree->node_cost + cost,
            "rank_cost ends at %lld, total_cost is %lld; the sums are %lld and %lld",
            (long long)rank_cost[plan->rows], (long long)plan->total_cost, (long long)cost,
            (long long)tree->node_cost + cost);
  return PKV_OK;
}

/* Cursors of one segment of the node line, from *p on; *cuts of them cut it. */
static pkv_status check_node_cuts(const pkv_tree_view *v, const pkv_node_cursor *want, int32_t *p,
                                  int32_t parts, int32_t *cuts, pkv_error *err) {
  const pkv_tree_node *node = &v->nodes[want->node];
  const int32_t ranks = pkv_tree_tile_ranks(node, want->tile);
  int32_t unit = 0;
  *cuts = 0;
  for (; *p < parts && v->node_cursors[*p].segment == want->segment; ++*p) {
    const pkv_node_cursor *c = &v->node_cursors[*p];
    PKV_FAULT(err,
              c->node == want->node && c->kv_head == want->kv_head && c->tile == want->tile &&
                  c->unit >= unit && c->unit < node->units && (*p > 0 || c->unit == 0),
              "node cursor %d is (%d, %d, %d), unit %d after %d; segment %d is (%d, %d, %d)", *p,
              c->node, c->kv_head, c->tile, c->unit, unit, want->segment, want->node, want->kv_head,
              want->tile);
    if (c->unit > unit) ++*cuts;
    unit = c->unit;
    const int64_t slot = want->slot + (int64_t)ranks * (v->batch_invariant ? unit : *cuts);
    PKV_FAULT(err, c->slot == slot, "node cursor %d has slot %d, not %lld", *p, c->slot,
              (long long)slot);
  }
  return PKV_OK;
}

static pkv_status check_node_line(const pkv_tree_view *v, int32_t parts, pkv_error *err) {
  const pkv_plan_tree *tree = v->tree;
  int32_t p = 0, cuts = 0;
  int64_t slot = 0;
  pkv_node_cursor at = {0};
  for (at.node = 0; at.node < tree->nodes; at.node++) {
    const pkv_tree_node *node = &v->nodes[at.node];
    for (at.kv_head = 0; at.kv_head < v->kv_heads; at.kv_head++) {
      for (at.tile = 0; at.tile < node->tiles; at.tile++, at.segment++) {
        PKV_FAULT(err, v->node_slot[at.segment] == slot && slot <= tree->node_slots,
                  "node segment %d has slot %d, not %lld of %d", at.segment,
                  v->node_slot[at.segment], (long long)slot, tree->node_slots);
        at.slot = (int32_t)slot;
        PKV_TRY(check_node_cuts(v, &at, &p, parts, &cuts, err));
        slot += (int64_t)pkv_tree_tile_ranks(node, at.tile) *
                (v->batch_invariant ? node->units : cuts + 1);
      }
    }
  }
  PKV_FAULT(err, slot == tree->node_slots && v->node_slot[at.segment] == slot,
            "node_slots %d, segments end at %d, counted %lld", tree->node_slots,
            v->node_slot[at.segment], (long long)slot);
  for (; p <= parts; p++) {
    const pkv_node_cursor *c = &v->node_cursors[p];
    PKV_FAULT(err,
              c->node == tree->nodes && c->kv_head == 0 && c->tile == 0 && c->unit == 0 &&
                  c->segment == tree->node_segments && c->slot == tree->node_slots,
              "node cursor %d is (%d, %d, %d), unit %d, segment %d, slot %d", p, c->node,
              c->kv_head, c->tile, c->unit, c->segment, c->slot);
  }
  return PKV_OK;
}

static pkv_status check_private_cuts(const pkv_tree_view *v, int32_t rank_id, int32_t kv_head,
                                     int32_t slot, int32_t *i, int32_t last, int32_t *cuts,
                                     pkv_error *err) {
  const pkv_tree_rank *rank = &v->ranks[rank_id];
  int32_t unit = 0;
  *cuts = 0;
  for (; *i < last && v->private_cursors[*i].rank == rank_id &&
         v->private_cursors[*i].kv_head == kv_head;
       ++*i) {
    const pkv_private_cursor *c = &v->private_cursors[*i];
    PKV_FAULT(err,
              c->unit >= unit && (c->unit == 0 || c->unit < rank->units) &&
                  (*i > 0 || c->unit == 0) && c->row == rank->row && c->length == rank->length &&
                  c->first_unit == rank->first_unit && c->depth == rank->depth,
              "private cursor %d: unit %d after %d, row %d, length %d, first_unit %d, depth %d", *i,
              c->unit, unit, c->row, c->length, c->first_unit, c->depth);
    if (c->unit > unit) ++*cuts;
    unit = c->unit;
    const int64_t want = (int64_t)slot + (v->batch_invariant ? unit : *cuts);
    PKV_FAULT(err, c->slot == want, "private cursor %d has slot %d, not %lld", *i, c->slot,
              (long long)want);
  }
  return PKV_OK;
}

static pkv_status check_private_line(const pkv_tree_view *v, int32_t last, pkv_error *err) {
  int32_t i = 0, cuts = 0, segment = 0;
  int64_t slot = 0;
  for (int32_t rank = 0; rank < v->rows; rank++) {
    for (int32_t head = 0; head < v->kv_heads; head++, segment++) {
      PKV_FAULT(err, v->private_slot[segment] == slot && slot <= v->tree->private_slots,
                "private segment %d has slot %d, not %lld of %d", segment, v->private_slot[segment],
                (long long)slot, v->tree->private_slots);
      PKV_TRY(check_private_cuts(v, rank, head, (int32_t)slot, &i, last, &cuts, err));
      if (v->ranks[rank].depth > 0 || cuts > 0)
        slot += v->batch_invariant ? v->ranks[rank].units : cuts + 1;
    }
  }
  PKV_FAULT(err, slot == v->tree->private_slots && v->private_slot[segment] == slot,
            "private_slots %d, segments end at %d, counted %lld", v->tree->private_slots,
            v->private_slot[segment], (long long)slot);
  for (; i <= last; i++) {
    const pkv_private_cursor *c = &v->private_cursors[i];
    PKV_FAULT(err,
              c->rank == v->rows && c->kv_head == 0 && c->unit == 0 && c->slot == slot &&
                  c->row == 0 && c->length == 0 && c->first_unit == 0 && c->depth == 0,
              "private cursor %d is (%d, %d), unit %d, slot %d", i, c->rank, c->kv_head, c->unit,
              c->slot);
  }
  return PKV_OK;
}

pkv_status pkv_check_shared(const struct pkv_plan *plan, pkv_error *err) {
  PKV_TRY(pkv_check_line(plan, err));
  PKV_TRY(pkv_check_array(plan, "tree", plan->tree_at, 1, sizeof(pkv_plan_tree), err));
  const pkv_plan_tree *tree = pkv_plan_at(plan, plan->tree_at);
  PKV_TRY(check_header(plan, tree, err));
  PKV_TRY(check_arrays(plan, tree, err));
  const pkv_tree_core core = pkv_tree_core_of(plan);
  PKV_TRY(check_nodes(plan, tree, &core, err));
  PKV_TRY(check_ranks(plan, tree, &core, err));
  const pkv_tree_view view = pkv_tree_view_of(plan);
  PKV_TRY(check_node_line(&view, plan->parts, err));
  return check_private_line(&view, 2 * plan->parts, err);
}
