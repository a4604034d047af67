/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From ranks and gaps to nodes, parts and slots of `shared` on the host: the phases of tree_core.h
 * and tree_cuts.h one after the other.
 */
#include "plan/tree_build.h"

/* Arrays of the scratch behind lcp. Sums are 64-bit: they take two arrays, from an even one on. */
static pkv_tree_work work_of(const pkv_tree_scratch *s, const pkv_tree_core *t) {
  pkv_tree_work w = {.lcp = pkv_tree_array(s, PKV_TREE_LCP),
                     .rep = pkv_tree_array(s, 1),
                     .first = pkv_tree_array(s, 2),
                     .end = pkv_tree_array(s, 3),
                     .up = pkv_tree_array(s, 4),
                     .kept = pkv_tree_array(s, 5),
                     .kid_ranks = pkv_tree_array(s, 6),
                     .kid_tiles = pkv_tree_array(s, 7),
                     .cover = pkv_tree_array(s, 8),
                     .ends = pkv_tree_array(s, 9),
                     .deep = pkv_tree_array(s, 10)};
  if (t->core.window > 0) w.first_sum = (int64_t *)(void *)pkv_tree_array(s, 12);
  if (t->core.batch_invariant) w.end_sum = (int64_t *)(void *)pkv_tree_array(s, 14);
  return w;
}

/* Neighbours of smaller lcp by a stack of gaps with growing lcp; equal ones stay on it together. */
static void find_gaps(const pkv_tree_core *t, const pkv_tree_work *w) {
  const int32_t rows = t->core.rows;
  int32_t *stack = w->ends, *left = w->cover, *right = w->deep;
  int32_t top = 0;
  stack[0] = 0;
  w->rep[0] = 0;
  for (int32_t gap = 1; gap <= rows; gap++) {
    while (top > 0 && w->lcp[stack[top]] > w->lcp[gap])
      right[stack[top--]] = gap;
    const int32_t before = stack[top];
    const bool same = before > 0 && w->lcp[before] == w->lcp[gap];
    left[gap] = same ? left[before] : before;
    w->rep[gap] = same ? w->rep[before] : gap;
    stack[++top] = gap;
  }
  while (top > 0)
    right[stack[top--]] = rows;
  for (int32_t gap = 1; gap < rows; gap++)
    pkv_tree_gap(t, w, gap, left[gap], right[gap], w->rep[gap]);
  w->rep[0] = w->rep[rows] = 0;
  for (int32_t gap = 1; gap < rows; gap++)
    pkv_tree_parent(w, gap);
}

static void sum_units(const pkv_tree_core *t, const pkv_tree_work *w, const pkv_tree_rank *ranks) {
  int64_t first = 0, end = 0;
  for (int32_t rank = 0; rank <= t->core.rows; rank++) {
    if (w->first_sum) w->first_sum[rank] = first;
    if (w->end_sum) w->end_sum[rank] = end;
    if (rank == t->core.rows) break;
    first += pkv_tree_first_unit(&t->core, ranks[rank].length);
    end += pkv_tree_end_unit(&t->core, ranks[rank].length);
  }
}

static pkv_tree_vote vote(const pkv_tree_core *t, const pkv_tree_work *w, int64_t bar) {
  const int32_t rows = t->core.rows;
  pkv_tree_vote all = {0, 0, INT64_MAX};
  for (int32_t gap = 0; gap <= rows; gap++)
    pkv_tree_round_clear(w, gap);
  for (int32_t gap = 1; gap < rows; gap++)
    pkv_tree_round_count(t, w, gap);
  for (int32_t gap = 1; gap <= rows; gap++) {
    w->cover[gap] += w->cover[gap - 1];
    w->ends[gap] += w->ends[gap - 1];
  }
  for (int32_t gap = 1; gap < rows; gap++)
    pkv_tree_round_deep(w, gap);
  for (int32_t rank = 1; rank <= rows; rank++)
    w->deep[rank] += w->deep[rank - 1];
  for (int32_t gap = 1; gap < rows; gap++) {
    int64_t net;
    if (!w->kept[gap]) continue;
    const int32_t said = pkv_tree_round_vote(t, w, gap, bar, &net);
    all.odd |= said == 1;
    all.even |= said == 2;
    if (net < all.least_deep) all.least_deep = net;
  }
  return all;
}

static void drop(const pkv_tree_core *t, const pkv_tree_work *w, int64_t bar, int32_t side) {
  for (int32_t gap = 1; gap < t->core.rows; gap++) {
    int64_t net;
    if (w->kept[gap] && pkv_tree_round_vote(t, w, gap, bar, &net) == side) w->kept[gap] = 2;
  }
  for (int32_t gap = 1; gap < t->core.rows; gap++)
    pkv_tree_round_relink(w, gap);
  for (int32_t gap = 1; gap < t->core.rows; gap++)
    if (w->kept[gap] == 2) w->kept[gap] = 0;
}

static void keep_what_pays(const pkv_tree_core *t, const pkv_tree_work *w) {
  for (int64_t bar = 0;;) {
    const pkv_tree_vote v = vote(t, w, bar);
    if (v.odd || v.even)
      drop(t, w, bar, v.odd ? 1 : 2);
    else if (v.least_deep < INT64_MAX)
      bar = 2 * v.least_deep;
    else
      return;
  }
}

static void drop_too_little(const pkv_tree_core *t, const pkv_tree_work *w,
                            const pkv_tree_rank *ranks) {
  int64_t saved = 0, units = 0;
  if (!t->enough) return;
  for (int32_t rank = 0; rank < t->core.rows; rank++)
    units += pkv_tree_row_units(&t->core, ranks[rank].length);
  for (int32_t gap = 1; gap < t->core.rows; gap++)
    if (w->kept[gap]) saved += pkv_tree_saved(w, gap);
  if (pkv_tree_is_enough(saved, units)) return;
  for (int32_t gap = 0; gap <= t->core.rows; gap++)
    pkv_tree_forget(w, gap);
}

/* A rank of the node that sees the least first visible unit. */
static int32_t farthest_seeing(const pkv_tree_core *t, const pkv_tree_work *w,
                               const pkv_tree_rank *ranks, int32_t gap) {
  int32_t best = w->first[gap];
  if (t->core.window == 0) return best;
  for (int32_t rank = best + 1; rank < w->end[gap]; rank++)
    if (pkv_tree_first_unit(&t->core, ranks[rank].length) <
        pkv_tree_first_unit(&t->core, ranks[best].length))
      best = rank;
  return best;
}

static void fill_nodes(struct pkv_plan *plan, pkv_plan_tree *tree, const pkv_tree_core *t,
                       const pkv_tree_work *w) {
  pkv_tree_rank *ranks = pkv_plan_array(plan, tree->ranks_at);
  pkv_tree_node *nodes = pkv_plan_array(plan, tree->nodes_at);
  int64_t *node_cost = pkv_plan_array(plan, tree->node_cost_at);
  pkv_tree_sums sum = {0, 0, 0};
  tree->nodes = 0;
  for (int32_t gap = 1; gap < t->core.rows; gap++) {
    if (!w->kept[gap]) continue;
    const int32_t farthest = farthest_seeing(t, w, ranks, gap);
    const int32_t seen = pkv_tree_first_unit(&t->core, ranks[farthest].length);
    pkv_tree_fill_node(&nodes[pkv_tree_number(w, gap)], t, w, gap, seen, ranks[farthest].row);
    tree->nodes++;
  }
  for (int32_t id = 0; id < tree->nodes; id++) {
    const pkv_tree_sums one = pkv_tree_node_sums(t, &nodes[id]);
    nodes[id].first_segment = sum.segments;
    nodes[id].base_slot = sum.slots;
    node_cost[id] = sum.cost;
    sum.cost += one.cost;
    sum.segments += one.segments;
    sum.slots += one.slots;
  }
  node_cost[tree->nodes] = sum.cost;
  tree->node_cost = sum.cost;
  tree->node_segments = sum.segments;
  tree->node_slots = sum.slots;
}

static void fill_ranks(struct pkv_plan *plan, pkv_plan_tree *tree, const pkv_tree_core *t,
                       const pkv_tree_work *w) {
  pkv_tree_rank *ranks = pkv_plan_array(plan, tree->ranks_at);
  int64_t *rank_cost = pkv_plan_array(plan, tree->rank_cost_at);
  int32_t *row_rank = pkv_plan_array(plan, tree->row_rank_at);
  int64_t cost = 0;
  int32_t slots = 0;
  for (int32_t rank = 0; rank < t->core.rows; rank++) {
    row_rank[ranks[rank].row] = rank;
    pkv_tree_fill_rank(&ranks[rank], t, w, rank);
    ranks[rank].base_slot = slots;
    rank_cost[rank] = cost;
    slots += pkv_tree_rank_slots(t, &ranks[rank]);
    cost += pkv_tree_rank_cost(t, &ranks[rank]);
  }
  rank_cost[t->core.rows] = cost;
  tree->private_slots = slots;
  plan->total_cost = tree->node_cost + cost;
}

static void cut_nodes(struct pkv_plan *plan, pkv_plan_tree *tree, const pkv_tree_core *t) {
  const pkv_tree_node *nodes = pkv_plan_at(plan, tree->nodes_at);
  const int64_t *node_cost = pkv_plan_at(plan, tree->node_cost_at);
  pkv_node_cursor *cursors = pkv_plan_array(plan, tree->node_cursors_at);
  int32_t *slots = pkv_plan_array(plan, tree->node_slot_at);
  const pkv_tree_sums all = {tree->node_cost, tree->node_segments, tree->node_slots};
  const int32_t parts = plan->parts;
  const pkv_tree_line line = pkv_tree_line_of(plan->total_cost, tree->node_cost, parts);
  for (int32_t p = 0; p <= parts; p++)
    pkv_tree_node_cursor(&cursors[p], t, nodes, node_cost, tree->nodes, &all,
                         pkv_tree_node_cut(&line, p));
  int32_t sum = 0;
  for (int32_t p = 1; p <= parts; p++) {
    if (p < parts) sum += pkv_tree_node_mark(t, nodes, &cursors[p - 1], &cursors[p]);
    pkv_tree_node_place(&cursors[p], t, nodes, sum);
  }
  for (int32_t id = 0, p = 0; id < tree->nodes; id++) {
    const int32_t end = nodes[id].first_segment + nodes[id].tiles * t->core.kv_heads;
    for (int32_t segment = nodes[id].first_segment; segment < end; segment++) {
      while (cursors[p + 1].segment < segment)
        p++;
      const int32_t beyond = segment > 0 ? pkv_tree_node_beyond(t, nodes, &cursors[p]) : 0;
      slots[segment] = pkv_tree_node_base(t, &nodes[id], segment) + beyond;
    }
  }
  tree->node_slots += sum;
  slots[tree->node_segments] = tree->node_slots;
}

static void cut_private(struct pkv_plan *plan, pkv_plan_tree *tree, const pkv_tree_core *t) {
  const pkv_tree_rank *ranks = pkv_plan_at(plan, tree->ranks_at);
  const int64_t *rank_cost = pkv_plan_at(plan, tree->rank_cost_at);
  pkv_private_cursor *cursors = pkv_plan_array(plan, tree->private_cursors_at);
  int32_t *slots = pkv_plan_array(plan, tree->private_slot_at);
  const int32_t parts = plan->parts, heads = t->core.kv_heads;
  const pkv_tree_line line = pkv_tree_line_of(plan->total_cost, tree->node_cost, parts);
  for (int32_t i = 0; i <= 2 * parts; i++)
    pkv_tree_private_cursor(&cursors[i], t, ranks, rank_cost, tree->private_slots,
                            pkv_tree_private_cut(&line, i));
  int32_t sum = 0;
  for (int32_t i = 1; i <= 2 * parts; i++) {
    if (i < 2 * parts) sum += pkv_tree_private_mark(t, ranks, &cursors[i - 1], &cursors[i]);
    pkv_tree_private_place(&cursors[i], t, ranks, sum);
  }
  for (int32_t segment = 0, i = 0; segment < t->core.rows * heads; segment++) {
    const int32_t rank = segment / heads, head = segment % heads;
    while (pkv_tree_private_before(&cursors[i + 1], rank, head))
      i++;
    const int32_t beyond = segment > 0 ? pkv_tree_private_beyond(t, ranks, &cursors[i]) : 0;
    slots[segment] = pkv_tree_private_base(t, &ranks[rank], head) + beyond;
  }
  tree->private_slots += sum;
  slots[t->core.rows * heads] = tree->private_slots;
}

void pkv_tree_fill(struct pkv_plan *plan, const pkv_tree_core *t, const pkv_tree_scratch *scratch) {
  pkv_plan_tree *tree = pkv_plan_array(plan, plan->tree_at);
  const pkv_tree_work w = work_of(scratch, t);
  if (t->core.rows > 0) {
    sum_units(t, &w, pkv_plan_at(plan, tree->ranks_at));
    find_gaps(t, &w);
    keep_what_pays(t, &w);
    drop_too_little(t, &w, pkv_plan_at(plan, tree->ranks_at));
  }
  fill_nodes(plan, tree, t, &w);
  fill_ranks(plan, tree, t, &w);
  cut_nodes(plan, tree, t);
  cut_private(plan, tree, t);
}
