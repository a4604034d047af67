/* SPDX-License-Identifier: Apache-2.0 */
/* Checks shape and options, fills in defaults, and computes where a plan's arrays lie. */
#include "plan/plan_setup.h"

#include "plan/plan_tree.h"
#include "policy/shape.h"

_Static_assert(sizeof(pkv_plan_cursor) == 24, "plan bytes are fixed");
_Static_assert(sizeof(pkv_plan_item) == 20, "plan bytes are fixed");
_Static_assert(sizeof(pkv_plan_merge) == 16, "plan bytes are fixed");
_Static_assert(sizeof(pkv_plan_launch) == 16, "plan bytes are fixed");
_Static_assert(sizeof(pkv_tree_rank) == 48, "plan bytes are fixed");
_Static_assert(sizeof(pkv_tree_node) == 48, "plan bytes are fixed");
_Static_assert(sizeof(pkv_node_cursor) == 24, "plan bytes are fixed");
_Static_assert(sizeof(pkv_private_cursor) == 32, "plan bytes are fixed");
_Static_assert(sizeof(pkv_plan_tree) == 144, "plan bytes are fixed");
_Static_assert(sizeof(struct pkv_plan) == 168, "plan bytes are fixed");

static pkv_status check_options(const pkv_plan_options *options, pkv_error *err) {
  PKV_CHECK_STRUCT(err, options, pkv_plan_options);
  const uint32_t known = PKV_PLAN_BATCH_INVARIANT | PKV_PLAN_FEWER_PARTS | PKV_PLAN_ENOUGH_SHARED;
  PKV_CHECK(err, (options->flags & ~known) == 0, PKV_E_INVALID,
            "options->flags is 0x%x, known: 0x%x", (unsigned)options->flags, (unsigned)known);
  PKV_CHECK(err, options->parts >= 0 && options->parts <= PKV_PLAN_MAX_PARTS, PKV_E_INVALID,
            "options->parts is %d, possible: 0 (default) to %d", options->parts,
            PKV_PLAN_MAX_PARTS);
  PKV_CHECK(err, options->splits >= 0, PKV_E_INVALID, "options->splits is %d, negative",
            options->splits);
  PKV_CHECK(err, options->bucket_tokens >= 0, PKV_E_INVALID,
            "options->bucket_tokens is %d, negative", options->bucket_tokens);
  PKV_CHECK(err, options->chunk_tokens >= 0 && options->chunk_tokens % PKV_TILE_TOKENS == 0,
            PKV_E_INVALID, "options->chunk_tokens is %d, not a multiple of %d",
            options->chunk_tokens, PKV_TILE_TOKENS);
  return PKV_OK;
}

static pkv_status setup_balanced(pkv_plan_setup *out, const pkv_plan_options *options,
                                 pkv_error *err) {
  const int invariant = (options->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  const int32_t chunk = options->chunk_tokens ? options->chunk_tokens : 512;
  const int64_t scale = options->route == PKV_ROUTE_SHARED ? 8 : 1;
  const int64_t tile_cost = options->tile_cost ? options->tile_cost : 8 * scale;
  pkv_plan_core *core = &out->core;
  core->parts = core->used = options->parts ? options->parts : 16;
  core->batch_invariant = invariant;
  core->unit_tokens = invariant ? chunk : PKV_TILE_TOKENS;
  core->unit_cost = tile_cost * (core->unit_tokens / PKV_TILE_TOKENS);
  core->segment_cost = options->segment_cost ? options->segment_cost : 4 * scale;
  core->empty_cost = core->segment_cost;
  PKV_CHECK(err, core->unit_cost <= UINT32_MAX, PKV_E_RANGE,
            "options->tile_cost %lld times %d tiles a chunk is beyond 32 bits",
            (long long)tile_cost, core->unit_tokens / PKV_TILE_TOKENS);
  return PKV_OK;
}

static pkv_status setup_shared(pkv_plan_setup *out, const pkv_plan_options *options,
                               pkv_error *err) {
  const int64_t rows = (int64_t)out->group * out->core.q_len; /* query rows of a batch row */
  const int64_t tile_cost = options->tile_cost ? options->tile_cost : 64;
  const int64_t tiles = out->core.unit_tokens / PKV_TILE_TOKENS;
  const int64_t node_tile = options->node_tile_cost ? options->node_tile_cost : tile_cost;
  const int64_t states = pkv_core_div_up(tile_cost * rows, 32); /* 8-byte states, 2-byte K and V */
  out->node_unit_cost = node_tile * tiles;
  out->rank_unit_cost = options->node_row_cost * tiles;
  out->node_segment_cost =
      options->node_segment_cost ? options->node_segment_cost : 2 * out->core.segment_cost;
  out->state_cost = options->state_cost ? options->state_cost : states;
  out->most_tile_ranks = (int32_t)(PKV_TREE_TILE_ROWS / rows);
  PKV_CHECK(err, out->node_unit_cost <= UINT32_MAX && out->rank_unit_cost <= UINT32_MAX,
            PKV_E_RANGE,
            "options->node_tile_cost %lld or node_row_cost %u times %lld tiles a chunk is beyond "
            "32 bits",
            (long long)node_tile, (unsigned)options->node_row_cost, (long long)tiles);
  return PKV_OK;
}

pkv_status pkv_plan_setup_init(pkv_plan_setup *out, const pkv_shape *shape,
                               const pkv_plan_options *options, pkv_error *err) {
  PKV_TRY(pkv_shape_check(shape, err));
  PKV_TRY(check_options(options, err));
  const bool balanced = options->route == PKV_ROUTE_BALANCED || options->route == PKV_ROUTE_AUTO;
  uint32_t flags = options->flags;
  if (!balanced || (flags & PKV_PLAN_BATCH_INVARIANT)) flags &= ~PKV_PLAN_FEWER_PARTS;
  if (options->route != PKV_ROUTE_SHARED) flags &= ~PKV_PLAN_ENOUGH_SHARED;
  *out = (pkv_plan_setup){.route = options->route,
                          .flags = flags,
                          .query_heads = shape->query_heads,
                          .group = shape->query_heads / shape->kv_heads,
                          .head_dim = shape->head_dim,
                          .page_tokens = shape->page_tokens,
                          .core = {.kv_heads = shape->kv_heads,
                                   .q_len = shape->q_len,
                                   .window = shape->window,
                                   .unit_tokens = PKV_SEED_TILE_TOKENS}};
  switch (options->route) {
  case PKV_ROUTE_SHARED:
    PKV_TRY(setup_balanced(out, options, err));
    return setup_shared(out, options, err);
  case PKV_ROUTE_AUTO:
  case PKV_ROUTE_BALANCED:
    out->route = PKV_ROUTE_BALANCED;
    return setup_balanced(out, options, err);
  case PKV_ROUTE_BUCKET_PADDED:
    out->bucket_tokens = options->bucket_tokens ? options->bucket_tokens : 4096;
    break;
  case PKV_ROUTE_BUCKET_EXACT:
  case PKV_ROUTE_SPLIT:
  case PKV_ROUTE_WORKQUEUE:
    break;
  case PKV_ROUTE_FLASHINFER:
    return PKV_FAIL(err, PKV_E_UNSUPPORTED, "options->route %s has no plan in this version",
                    pkv_route_name(options->route));
  default:
    return PKV_FAIL(err, PKV_E_INVALID, "options->route is %d, known: 0 to %d", (int)options->route,
                    (int)PKV_ROUTE_FLASHINFER);
  }
  PKV_CHECK(err, out->flags == 0, PKV_E_UNSUPPORTED,
            "options->flags: route %s splits a row by its batch, it cannot be batch-invariant",
            pkv_route_name(out->route));
  out->splits = options->splits;
  if (out->splits == 0 && out->route != PKV_ROUTE_WORKQUEUE) out->splits = 16;
  return PKV_OK;
}

/* Reserves count * size bytes at the next aligned place; false on overflow. */
static bool place(int64_t *at, int64_t *end, int64_t count, int64_t size) {
  int64_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) return false;
  if (__builtin_add_overflow(bytes, PKV_PLAN_ALIGN - 1, &bytes)) return false;
  *at = *end;
  return !__builtin_add_overflow(*end, bytes / PKV_PLAN_ALIGN * PKV_PLAN_ALIGN, end);
}

static bool place_shared(pkv_plan_layout *out, int64_t *end, const pkv_plan_setup *setup,
                         const pkv_plan_counts *counts) {
  const int64_t rows = counts->rows, parts = setup->core.parts;
  pkv_plan_tree *t = &out->tree;
  return rows <= PKV_TREE_MAX_ROWS && place(&out->tree_at, end, 1, sizeof(pkv_plan_tree)) &&
         place(&t->ranks_at, end, rows, sizeof(pkv_tree_rank)) &&
         place(&t->row_rank_at, end, rows, sizeof(int32_t)) &&
         place(&t->nodes_at, end, rows > 0 ? rows - 1 : 0, sizeof(pkv_tree_node)) &&
         place(&t->node_cost_at, end, rows > 0 ? rows : 1, sizeof(int64_t)) &&
         place(&t->rank_cost_at, end, rows + 1, sizeof(int64_t)) &&
         place(&t->node_cursors_at, end, parts + 1, sizeof(pkv_node_cursor)) &&
         place(&t->private_cursors_at, end, 2 * parts + 1, sizeof(pkv_private_cursor)) &&
         place(&t->node_slot_at, end, counts->node_segments + 1, sizeof(int32_t)) &&
         place(&t->private_slot_at, end, rows * setup->core.kv_heads + 1, sizeof(int32_t)) &&
         place(&out->launches_at, end, 2, sizeof(pkv_plan_launch)) &&
         place(&t->scratch_at, end, PKV_TREE_SCRATCH * (rows + 2), sizeof(int32_t));
}

pkv_status pkv_plan_layout_init(pkv_plan_layout *out, const pkv_plan_setup *setup,
                                const pkv_plan_counts *counts, pkv_error *err) {
  const int64_t rows = counts->rows;
  int64_t header, end = 0;
  bool ok = counts->items <= INT32_MAX && counts->slots <= INT32_MAX &&
            counts->merges <= INT32_MAX && counts->node_segments < INT32_MAX &&
            place(&header, &end, 1, sizeof(struct pkv_plan));
  *out = (pkv_plan_layout){0};
  ok = ok && place(&out->seq_len_at, &end, rows, sizeof(int32_t));
  if (setup->route == PKV_ROUTE_BALANCED) {
    const int64_t parts = setup->core.parts;
    ok = ok && place(&out->row_cost_at, &end, rows + 1, sizeof(int64_t)) &&
         place(&out->cursors_at, &end, parts + 1, sizeof(pkv_plan_cursor)) &&
         place(&out->merges_at, &end, parts - 1, sizeof(pkv_plan_merge)) &&
         place(&out->launches_at, &end, 1, sizeof(pkv_plan_launch));
  } else if (setup->route == PKV_ROUTE_SHARED) {
    ok = ok && place_shared(out, &end, setup, counts);
  } else {
    ok = ok && place(&out->split_first_at, &end, rows + 1, sizeof(int32_t)) &&
         place(&out->merges_at, &end, counts->merges, sizeof(pkv_plan_merge)) &&
         place(&out->launches_at, &end, counts->launches, sizeof(pkv_plan_launch)) &&
         place(&out->items_at, &end, counts->items, sizeof(pkv_plan_item));
  }
  PKV_CHECK(err, ok && (uint64_t)end <= SIZE_MAX, PKV_E_RANGE,
            "the plan is too large: rows %lld, items %lld, slots %lld, merges %lld",
            (long long)rows, (long long)counts->items, (long long)counts->slots,
            (long long)counts->merges);
  out->plan_bytes = end;
  return PKV_OK;
}

pkv_status pkv_plan_workspace(int64_t *bytes, const pkv_plan_setup *setup, int64_t merges,
                              int64_t slots, pkv_error *err) {
  const int64_t state = (int64_t)(setup->head_dim + 2) * 4;
  const int64_t counters = (merges * 4 + PKV_PLAN_ALIGN - 1) / PKV_PLAN_ALIGN * PKV_PLAN_ALIGN;
  int64_t size;
  const bool over =
      __builtin_mul_overflow(setup->group * state, (int64_t)setup->core.q_len, &size) ||
      __builtin_mul_overflow(size, slots, &size) || __builtin_add_overflow(size, counters, &size) ||
      (uint64_t)size > SIZE_MAX;
  PKV_CHECK(err, !over, PKV_E_RANGE,
            "the workspace is too large: %lld slots of %d heads, q_len %d, head_dim %d",
            (long long)slots, setup->group, setup->core.q_len, setup->head_dim);
  *bytes = size;
  return PKV_OK;
}

int64_t pkv_plan_max_units(const pkv_plan_setup *setup, int64_t max_seq_len) {
  const pkv_plan_core *core = &setup->core;
  const int64_t whole = pkv_core_div_up(max_seq_len, core->unit_tokens);
  if (core->window == 0) return whole;
  /* window + q_len - 1 tokens in a row touch at most this many units, however they lie */
  const int64_t span = (int64_t)core->window + core->q_len - 1;
  const int64_t touched = pkv_core_div_up(span - 1, core->unit_tokens) + 1;
  return whole < touched ? whole : touched;
}

void pkv_plan_fill_header(struct pkv_plan *plan, const pkv_plan_setup *setup,
                          const pkv_plan_counts *counts, const pkv_plan_layout *layout) {
  const bool seed = setup->route != PKV_ROUTE_BALANCED && setup->route != PKV_ROUTE_SHARED;
  *plan = (struct pkv_plan){.magic = PKV_PLAN_MAGIC,
                            .flags = setup->flags,
                            .route = (int32_t)setup->route,
                            .rows = setup->core.rows,
                            .q_len = setup->core.q_len,
                            .window = setup->core.window,
                            .query_heads = setup->query_heads,
                            .kv_heads = setup->core.kv_heads,
                            .head_dim = setup->head_dim,
                            .page_tokens = setup->page_tokens,
                            .unit_tokens = setup->core.unit_tokens,
                            .parts = setup->core.parts,
                            .slot_stride = seed ? setup->core.kv_heads : 1,
                            .slots = seed ? (int32_t)counts->slots : 0,
                            .items = (int32_t)counts->items,
                            .merges = seed ? (int32_t)counts->merges : 0,
                            .unit_cost = (uint32_t)setup->core.unit_cost,
                            .segment_cost = (uint32_t)setup->core.segment_cost,
                            .bucket_tokens = setup->bucket_tokens,
                            .seq_len_at = layout->seq_len_at,
                            .row_cost_at = layout->row_cost_at,
                            .cursors_at = layout->cursors_at,
                            .items_at = layout->items_at,
                            .split_first_at = layout->split_first_at,
                            .merges_at = layout->merges_at,
                            .launches_at = layout->launches_at,
                            .tree_at = layout->tree_at,
                            .plan_bytes = layout->plan_bytes};
}
