/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_plan_get_stats: what one step with a plan does, counted from the plan itself. */
#include "plan/plan_setup.h"

/* Tokens that some query sees, and tokens that whole tiles around them hold, of one KV head. */
typedef struct token_count {
  int64_t useful, read;
} token_count;

static token_count count_tokens(const struct pkv_plan *plan) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const int32_t tile = plan->route == PKV_ROUTE_BALANCED ? PKV_TILE_TOKENS : PKV_SEED_TILE_TOKENS;
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

pkv_status pkv_plan_get_stats(pkv_plan_stats *out, const pkv_plan *plan, pkv_dtype kv_dtype,
                              pkv_error *err) {
  PKV_CHECK_STRUCT(err, out, pkv_plan_stats);
  PKV_CHECK(err, plan && plan->magic == PKV_PLAN_MAGIC, PKV_E_INVALID, "plan is %s",
            plan ? "not a plan" : "NULL");
  const int64_t element = (int64_t)pkv_dtype_bytes(kv_dtype);
  PKV_CHECK(err, element > 0, PKV_E_INVALID, "kv_dtype is %d, not a known type", (int)kv_dtype);
  const token_count tokens = count_tokens(plan);
  const int64_t token_bytes = 2 * (int64_t)plan->kv_heads * plan->head_dim * element;
  const int64_t group = plan->query_heads / plan->kv_heads;
  *out = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  out->route = (pkv_route)plan->route;
  out->rows = plan->rows;
  out->launches = plan->launches;
  out->tasks = plan->items;
  out->partial_states = plan->slots * group * plan->q_len;
  out->merge_state_bytes = plan->slots * pkv_plan_slot_bytes(plan);
  out->useful_kv_bytes = tokens.useful * token_bytes;
  out->padded_kv_bytes = (tokens.read - tokens.useful) * token_bytes;
  out->plan_bytes = (size_t)plan->plan_bytes;
  out->workspace_bytes = (size_t)plan->workspace_bytes;
  if (plan->route == PKV_ROUTE_BALANCED) count_parts(out, plan);
  return PKV_OK;
}
