/* SPDX-License-Identifier: Apache-2.0 */
/* The route `shared`: bounds in closed form, and pkv_plan_build_shared, which checks, then calls
   the host's builder in steps (tree_find.c or tree_take.c, tree_build.c). */
#include "plan/tree_build.h"

#include <string.h>

#include "plan/plan_prepare.h"
#include "plan/tree_desk.h"

pkv_tree_core pkv_plan_tree_core(const pkv_plan_setup *setup) {
  return (pkv_tree_core){.core = setup->core,
                         .page_tokens = setup->page_tokens,
                         .most_tile_ranks = setup->most_tile_ranks,
                         .enough = (setup->flags & PKV_PLAN_ENOUGH_SHARED) != 0,
                         .node_unit_cost = setup->node_unit_cost,
                         .rank_unit_cost = setup->rank_unit_cost,
                         .node_segment_cost = setup->node_segment_cost,
                         .state_cost = setup->state_cost};
}

pkv_tree_core pkv_tree_core_of(const struct pkv_plan *plan) {
  const pkv_plan_tree *tree = pkv_plan_at(plan, plan->tree_at);
  return (pkv_tree_core){.core = pkv_plan_core_of(plan),
                         .page_tokens = plan->page_tokens,
                         .most_tile_ranks = tree->most_tile_ranks,
                         .enough = (plan->flags & PKV_PLAN_ENOUGH_SHARED) != 0,
                         .node_unit_cost = tree->node_unit_cost,
                         .rank_unit_cost = tree->rank_unit_cost,
                         .node_segment_cost = tree->node_segment_cost,
                         .state_cost = tree->state_cost};
}

/* Saturates at INT64_MAX, which no array can have. */
static int64_t product(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}
static int64_t sum(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_add_overflow(a, b, &c) ? INT64_MAX : c;
}

void pkv_shared_counts(pkv_plan_counts *out, const pkv_plan_setup *setup, int64_t rows,
                       int64_t units) {
  const int64_t parts = setup->core.parts, heads = setup->core.kv_heads;
  const int64_t tile_ranks = setup->most_tile_ranks;
  const bool share = rows > 1 && tile_ranks > 0;
  *out = (pkv_plan_counts){.rows = rows, .launches = 2, .merges = product(rows, heads)};
  if (share) out->node_segments = product(heads, rows - 1 + PKV_TREE_MAX_PATH * rows / tile_ranks);
  if (setup->core.batch_invariant) { /* a unit of a row is in one node or private */
    out->slots = product(product(rows, heads), units);
    out->node_slots = share ? out->slots : 0;
    out->private_slots = out->slots;
    return;
  }
  if (share)
    out->node_slots = sum(product(heads, PKV_TREE_MAX_PATH * rows), (parts - 1) * tile_ranks);
  out->private_slots = rows > 0 ? sum(out->merges, 2 * parts - 1) : 0;
  out->slots = sum(out->node_slots, out->private_slots);
}

/* Costs and nets of a batch within the limits must fit 64 bits. */
static pkv_status check_costs(const pkv_plan_setup *setup, int64_t rows, int64_t units,
                              pkv_error *err) {
  const int64_t unit =
      setup->node_unit_cost + setup->rank_unit_cost + setup->core.unit_cost + 2 * setup->state_cost;
  const int64_t segment = setup->node_segment_cost + setup->core.segment_cost + setup->state_cost;
  const int64_t row = sum(product(units + 2, unit), product(PKV_TREE_MAX_PATH + 1, segment));
  const int64_t total = product(product(row, rows), setup->core.kv_heads);
  const int64_t bytes = product(product(units + 1, setup->core.unit_tokens),
                                product(rows, (int64_t)setup->core.kv_heads * setup->head_dim * 8));
  PKV_CHECK(err, total <= INT64_MAX / 8 && bytes < INT64_MAX, PKV_E_RANGE,
            "%lld rows of up to %lld units with kv_heads %d, head_dim %d are beyond 64 bits",
            (long long)rows, (long long)units, setup->core.kv_heads, setup->head_dim);
  return PKV_OK;
}

static pkv_status check_sharing(const pkv_sharing *sharing, int64_t *stride, bool *told,
                                pkv_error *err) {
  PKV_CHECK_STRUCT(err, sharing, pkv_sharing);
  PKV_CHECK(err, (sharing->flags & ~PKV_TABLE_CHAINED) == 0, PKV_E_INVALID,
            "sharing->flags is 0x%x, known: 0x%x", (unsigned)sharing->flags, PKV_TABLE_CHAINED);
  PKV_CHECK(err, sharing->node_count >= 0, PKV_E_INVALID, "sharing->node_count is %d",
            sharing->node_count);
  PKV_CHECK(err, sharing->nodes || sharing->node_count == 0, PKV_E_INVALID,
            "sharing->nodes is NULL with node_count %d", sharing->node_count);
  PKV_CHECK(err, sharing->max_pages >= 0, PKV_E_INVALID, "sharing->max_pages is %d",
            sharing->max_pages);
  *stride = sharing->block_table_stride ? sharing->block_table_stride : sharing->max_pages;
  PKV_CHECK(err, *stride >= sharing->max_pages, PKV_E_INVALID,
            "sharing->block_table_stride is %lld, less than max_pages %d", (long long)*stride,
            sharing->max_pages);
  *told = sharing->nodes || sharing->order || !sharing->block_table;
  return PKV_OK;
}

/* Lengths, and that the block table holds what will be compared. */
static pkv_status check_rows(int64_t *most_units, const pkv_plan_setup *setup, int32_t rows,
                             const int32_t *seq_len, const pkv_sharing *sharing, int64_t stride,
                             pkv_error *err) {
  int64_t entries;
  *most_units = 0;
  PKV_CHECK(err, rows >= 0, PKV_E_INVALID, "rows is %d, negative", rows);
  PKV_CHECK(err, rows <= PKV_TREE_MAX_ROWS, PKV_E_RANGE, "rows is %d, at most %d", rows,
            PKV_TREE_MAX_ROWS);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  PKV_CHECK(err,
            !__builtin_mul_overflow((int64_t)rows, stride, &entries) && entries <= INT64_MAX / 8,
            PKV_E_INVALID, "sharing->block_table_stride %lld times %d rows overflows",
            (long long)stride, rows);
  for (int32_t row = 0; row < rows; row++) {
    const int32_t length = seq_len[row];
    PKV_CHECK(err, length >= 0, PKV_E_INVALID, "seq_len[%d] is %d, negative", row, length);
    const int64_t units = pkv_core_div_up(length, setup->core.unit_tokens);
    const int64_t pages = pkv_core_div_up(length, setup->page_tokens);
    PKV_CHECK(err, !sharing->block_table || pages <= sharing->max_pages, PKV_E_INVALID,
              "row %d of %d tokens needs %lld pages of %d, sharing->max_pages is %d", row, length,
              (long long)pages, setup->page_tokens, sharing->max_pages);
    if (units > *most_units) *most_units = units;
  }
  return PKV_OK;
}

static void fill_tree_header(pkv_plan_tree *tree, const pkv_plan_setup *setup,
                             const pkv_plan_layout *layout) {
  *tree = layout->tree;
  tree->most_tile_ranks = setup->most_tile_ranks;
  tree->node_unit_cost = setup->node_unit_cost;
  tree->rank_unit_cost = setup->rank_unit_cost;
  tree->node_segment_cost = setup->node_segment_cost;
  tree->state_cost = setup->state_cost;
}

static pkv_status setup_of(pkv_plan_setup *setup, const pkv_shape *shape,
                           const pkv_plan_options *options, pkv_error *err) {
  PKV_TRY(pkv_plan_setup_init(setup, shape, options, err));
  PKV_CHECK(err, setup->route == PKV_ROUTE_SHARED, PKV_E_INVALID,
            "options->route is %s, must be shared", pkv_route_name(setup->route));
  return PKV_OK;
}

pkv_status pkv_plan_shared_bounds(pkv_shared_bounds *out, const pkv_shape *shape,
                                  const pkv_plan_options *options, int32_t max_rows,
                                  int32_t max_seq_len, pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  PKV_TRY(setup_of(&setup, shape, options, err));
  PKV_CHECK(err, max_rows >= 0 && max_rows <= PKV_TREE_MAX_ROWS, PKV_E_RANGE,
            "max_rows is %d, possible: 0 to %d", max_rows, PKV_TREE_MAX_ROWS);
  PKV_CHECK(err, max_seq_len >= 0, PKV_E_INVALID, "max_seq_len is %d, negative", max_seq_len);
  const int64_t units = pkv_core_div_up(max_seq_len, setup.core.unit_tokens);
  pkv_shared_counts(&counts, &setup, max_rows, units);
  PKV_TRY(pkv_plan_layout_init(&layout, &setup, &counts, err));
  PKV_TRY(check_costs(&setup, max_rows, units, err));
  pkv_plan_core core = setup.core;
  core.rows = max_rows;
  const int64_t rows = max_rows, rest = 1024 * (rows + 32) + 128 * (int64_t)core.parts;
  const int64_t work = sum(product(product(units, rows), 8), rest);
  PKV_CHECK(err, work < INT64_MAX / 2, PKV_E_RANGE, "%d rows of %lld units: too large", max_rows,
            (long long)units);
  *out = (pkv_shared_bounds){.plan_bytes = (size_t)layout.plan_bytes,
                             .merges = counts.merges,
                             .node_segments = counts.node_segments,
                             .node_slots = counts.node_slots,
                             .private_slots = counts.private_slots,
                             .units = units,
                             .memory_bytes = (size_t)pkv_tree_memory_bytes(&core, units)};
  return PKV_OK;
}

pkv_status pkv_plan_prepare_shared(struct pkv_plan *header, pkv_plan_tree *tree,
                                   const pkv_shape *shape, const pkv_plan_options *options,
                                   int32_t rows, pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  PKV_TRY(setup_of(&setup, shape, options, err));
  setup.core.rows = rows;
  pkv_shared_counts(&counts, &setup, rows, 0);
  PKV_TRY(pkv_plan_layout_init(&layout, &setup, &counts, err));
  pkv_plan_fill_header(header, &setup, &counts, &layout);
  fill_tree_header(tree, &setup, &layout);
  return PKV_OK;
}

static pkv_status fill(struct pkv_plan *plan, const pkv_plan_setup *setup, const int32_t *seq_len,
                       const pkv_sharing *sharing, int64_t stride, bool told, pkv_error *err) {
  const pkv_tree_core core = pkv_plan_tree_core(setup);
  pkv_plan_tree *tree = pkv_plan_array(plan, plan->tree_at);
  pkv_plan_launch *launches = pkv_plan_array(plan, plan->launches_at);
  pkv_tree_rank *ranks = pkv_plan_array(plan, tree->ranks_at);
  const pkv_tree_scratch scratch = {pkv_plan_array(plan, tree->scratch_at),
                                    (int64_t)plan->rows + 2};
  if (plan->rows > 0)
    memcpy(pkv_plan_array(plan, plan->seq_len_at), seq_len, (size_t)plan->rows * sizeof(int32_t));
  if (told)
    PKV_TRY(pkv_tree_take(ranks, &scratch, &core, seq_len, sharing, stride, err));
  else
    pkv_tree_find(ranks, &scratch, &core, seq_len, sharing->block_table, stride,
                  (sharing->flags & PKV_TABLE_CHAINED) != 0);
  pkv_tree_fill(plan, &core, &scratch);
  memset(scratch.words, 0, (size_t)(PKV_TREE_SCRATCH * scratch.stride) * sizeof(int32_t));
  plan->merges = plan->rows * plan->kv_heads;
  plan->slots = tree->node_slots + tree->private_slots;
  plan->launches = 2;
  launches[0] = (pkv_plan_launch){PKV_LAUNCH_FUSED, 0, plan->parts, 0};
  launches[1] = (pkv_plan_launch){PKV_LAUNCH_MERGE, 0, plan->merges, 0};
  return pkv_plan_workspace(&plan->workspace_bytes, setup, plan->merges, plan->slots, err);
}

pkv_status pkv_plan_build_shared(const pkv_plan **out, void *memory, size_t memory_bytes,
                                 const pkv_shape *shape, const pkv_plan_options *options,
                                 int32_t rows, const int32_t *seq_len, const pkv_sharing *sharing,
                                 pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  int64_t stride = 0, units = 0, workspace;
  bool told = false;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(setup_of(&setup, shape, options, err));
  PKV_TRY(check_sharing(sharing, &stride, &told, err));
  PKV_TRY(check_rows(&units, &setup, rows, seq_len, sharing, stride, err));
  PKV_CHECK(err, memory && (uintptr_t)memory % PKV_PLAN_ALIGN == 0, PKV_E_INVALID,
            "memory %p is not aligned to %d bytes", memory, PKV_PLAN_ALIGN);
  setup.core.rows = rows;
  pkv_shared_counts(&counts, &setup, rows, units);
  PKV_TRY(pkv_plan_layout_init(&layout, &setup, &counts, err));
  PKV_TRY(pkv_plan_workspace(&workspace, &setup, counts.merges, counts.slots, err));
  PKV_TRY(check_costs(&setup, rows, units, err));
  PKV_CHECK(err, (size_t)layout.plan_bytes <= memory_bytes, PKV_E_TOO_SMALL,
            "memory: the plan needs %lld bytes, has %zu", (long long)layout.plan_bytes,
            memory_bytes);

  struct pkv_plan *plan = memory;
  memset(memory, 0, (size_t)layout.plan_bytes);
  pkv_plan_fill_header(plan, &setup, &counts, &layout);
  fill_tree_header(pkv_plan_array(plan, plan->tree_at), &setup, &layout);
  PKV_TRY(fill(plan, &setup, seq_len, sharing, stride, told, err));
  *out = plan;
  return PKV_OK;
}
