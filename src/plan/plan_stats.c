/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_plan_get_stats: what one step with a plan does, counted from the plan itself. */
#include "plan/plan_setup.h"
#include "plan/tree_cuts.h"

/* Tokens that some query sees, and tokens that whole tiles around them hold, of one KV head. */
typedef struct token_count {
  int64_t useful, read;
} token_count;

static token_count count_tokens(const struct pkv_plan *plan) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const bool line = plan->route == PKV_ROUTE_BALANCED || plan->route == PKV_ROUTE_SHARED;
  const int32_t tile = line ? PKV_TILE_TOKENS : PKV_SEED_TILE_TOKENS;
  token_count sum = {0, 0};
  for (int32_t row = 0; row < plan->rows; row++) {
    const int64_t first = pkv_core_first_token(plan->q_len, plan->window, seq_len[row]);
    int64_t end = seq_len[row];
    sum.useful += end - first;
    if (plan->bucket_tokens > 0)
      end = pkv_core_div_up(end, plan->bucket_tokens) * plan->bucket_tokens;
    sum.read += pkv_core_div_up(end, tile) * tile - first / tile * tile;
  }
  return sum;
}

static void count_parts(pkv_plan_stats *out, const struct pkv_plan *plan) {
  const pkv_plan_core core = pkv_plan_core_of(plan);
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const int64_t *row_cost = pkv_plan_at(plan, plan->row_cost_at);
  const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
  int64_t at = 0;
  for (int32_t p = 1; p <= plan->parts; p++) {
    const int64_t end = pkv_core_position(&core, row_cost, seq_len, &cursors[p]);
    if (end > at) out->tasks++;
    if (end - at > out->max_part_cost) out->max_part_cost = end - at;
    at = end;
  }
  out->total_cost = plan->total_cost;
}

/* Costs of one part: its node pieces and both halves of its private pieces. */
static int64_t part_cost(const pkv_tree_core *t, const pkv_tree_view *v, int32_t p) {
  int64_t cost = 0;
  pkv_node_cursor node_at = v->node_cursors[p];
  pkv_node_piece node;
  while (pkv_tree_next_node_piece(&node, v, &node_at, &v->node_cursors[p + 1])) {
    if (node.unit_begin == v->nodes[node.node].first_unit) cost += t->node_segment_cost;
    cost += (node.unit_end - node.unit_begin) * pkv_tree_tile_unit_cost(t, node.ranks);
  }
  for (int32_t half = 2 * p; half < 2 * p + 2; half++) {
    pkv_private_cursor at = v->private_cursors[half];
    pkv_private_piece piece;
    while (pkv_tree_next_private_piece(&piece, v, &at, &v->private_cursors[half + 1])) {
      if (piece.unit_begin == v->ranks[piece.rank].first_unit) cost += t->core.segment_cost;
      cost += (piece.unit_end - piece.unit_begin) * t->core.unit_cost;
    }
  }
  return cost;
}

/*
 * unique: tokens that a query sees, those of nodes once. A node's tokens before the window of all
 * its rows are padding, as are the rest of private tiles.
 */
static void count_shared(pkv_plan_stats *out, const struct pkv_plan *plan, token_count *tokens,
                         int64_t *unique) {
  const pkv_tree_core t = pkv_tree_core_of(plan);
  const pkv_tree_view v = pkv_tree_view_of(plan);
  const int64_t unit = plan->unit_tokens;
  const int64_t group_rows = (int64_t)(plan->query_heads / plan->kv_heads) * plan->q_len;
  int64_t filled = 0, room = 0;
  *unique = 0;
  tokens->read = tokens->useful;
  for (int32_t id = 0; id < v.tree->nodes; id++) {
    const pkv_tree_node *n = &v.nodes[id];
    int64_t first = INT64_MAX;
    for (int32_t rank = n->first_rank; rank < n->first_rank + n->ranks; rank++) {
      const int64_t seen = pkv_core_first_token(plan->q_len, plan->window, v.ranks[rank].length);
      if (seen < first) first = seen;
    }
    const int64_t pad = first > n->first_unit * unit ? first - n->first_unit * unit : 0;
    *unique += n->units * unit - pad;
    tokens->read += pad;
    filled += (int64_t)n->ranks * n->units * group_rows;
    room += (int64_t)n->tiles * n->units * PKV_TREE_TILE_ROWS;
  }
  for (int32_t id = 0; id < plan->rows; id++) {
    const pkv_tree_rank *r = &v.ranks[id];
    const int64_t seen = pkv_core_first_token(plan->q_len, plan->window, r->length);
    const int64_t begin = r->first_unit * unit, first = seen > begin ? seen : begin;
    const int64_t tiles = pkv_core_div_up(r->length, PKV_TILE_TOKENS);
    if (r->units == 0) continue;
    *unique += r->length - first;
    tokens->read += first - (first / PKV_TILE_TOKENS * PKV_TILE_TOKENS);
    tokens->read += tiles * PKV_TILE_TOKENS - r->length;
  }
  for (int32_t p = 0; p < plan->parts; p++) {
    const int64_t cost = part_cost(&t, &v, p);
    if (cost > 0) out->tasks++;
    if (cost > out->max_part_cost) out->max_part_cost = cost;
  }
  out->nodes = v.tree->nodes;
  out->total_cost = plan->total_cost;
  if (room > 0) out->tile_fill = (double)filled / (double)room;
}

pkv_status pkv_plan_get_stats(pkv_plan_stats *out, const pkv_plan *plan, pkv_dtype kv_dtype,
                              pkv_error *err) {
  PKV_CHECK_STRUCT(err, out, pkv_plan_stats);
  PKV_CHECK(err, plan && plan->magic == PKV_PLAN_MAGIC, PKV_E_INVALID, "plan is %s",
            plan ? "not a plan" : "NULL");
  const int64_t element = (int64_t)pkv_dtype_bytes(kv_dtype);
  PKV_CHECK(err, element > 0, PKV_E_INVALID, "kv_dtype is %d, not a known type", (int)kv_dtype);
  token_count tokens = count_tokens(plan);
  int64_t unique = tokens.useful;
  const int64_t token_bytes = 2 * (int64_t)plan->kv_heads * plan->head_dim * element;
  const int64_t group = plan->query_heads / plan->kv_heads;
  *out = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  out->route = (pkv_route)plan->route;
  out->rows = plan->rows;
  out->launches = plan->launches;
  out->tasks = plan->items;
  out->partial_states = plan->slots * group * plan->q_len;
  out->merge_state_bytes = plan->slots * pkv_plan_slot_bytes(plan);
  if (plan->route == PKV_ROUTE_SHARED) count_shared(out, plan, &tokens, &unique);
  out->useful_kv_bytes = tokens.useful * token_bytes;
  out->padded_kv_bytes = (tokens.read - tokens.useful) * token_bytes;
  out->plan_bytes = (size_t)plan->plan_bytes;
  out->workspace_bytes = (size_t)plan->workspace_bytes;
  out->unique_kv_bytes = unique * token_bytes;
  out->total_kv_bytes = out->useful_kv_bytes;
  out->dedup_ratio = unique > 0 ? (double)tokens.useful / (double)unique : 1.0;
  if (plan->route == PKV_ROUTE_BALANCED) count_parts(out, plan);
  return PKV_OK;
}
