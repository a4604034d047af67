/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_plan_size and pkv_plan_build. Sizes come in closed form from limits; a build counts first,
 * checks the memory, and only then writes. The seed's routes are filled in plan_seed.c.
 */
#include "plan/plan_setup.h"

#include <string.h>

#include "plan/plan_prepare.h"

/* Bounds of `balanced` for batches of up to `rows` rows that read at most `units` units each. */
static void balanced_counts(pkv_plan_counts *out, const pkv_plan_setup *setup, int64_t rows,
                            int64_t units) {
  const int64_t cuts = setup->core.parts - 1;
  const int64_t segments = rows * setup->core.kv_heads;
  *out = (pkv_plan_counts){.rows = rows, .launches = 1};
  out->merges = cuts < segments ? cuts : segments;
  out->slots = setup->core.batch_invariant ? out->merges * units : cuts + out->merges;
  if (out->merges == 0) out->slots = 0;
}

static void seed_counts(pkv_plan_counts *out, const pkv_plan_setup *setup, int64_t rows,
                        int64_t splits) {
  const bool buckets =
      setup->route == PKV_ROUTE_BUCKET_EXACT || setup->route == PKV_ROUTE_BUCKET_PADDED;
  *out = (pkv_plan_counts){.rows = rows, .launches = buckets ? 2 * rows : 2};
  if (__builtin_mul_overflow(splits, (int64_t)setup->core.kv_heads, &out->items))
    out->items = INT64_MAX;
  out->slots = out->items;
  out->merges = rows * setup->core.kv_heads;
}

/* Setup, and the most of everything that a batch within the limits can have. */
static pkv_status bounds(pkv_plan_setup *setup, pkv_plan_counts *counts, pkv_plan_layout *layout,
                         const pkv_shape *shape, const pkv_plan_options *options, int32_t max_rows,
                         int32_t max_seq_len, pkv_error *err) {
  PKV_TRY(pkv_plan_setup_init(setup, shape, options, err));
  PKV_CHECK(err, max_rows >= 0, PKV_E_INVALID, "max_rows is %d, negative", max_rows);
  PKV_CHECK(err, max_seq_len >= 0, PKV_E_INVALID, "max_seq_len is %d, negative", max_seq_len);
  const int64_t units = pkv_plan_max_units(setup, max_seq_len);
  if (setup->route == PKV_ROUTE_BALANCED)
    balanced_counts(counts, setup, max_rows, units);
  else if (setup->route == PKV_ROUTE_SHARED)
    pkv_shared_counts(counts, setup, max_rows,
                      pkv_core_div_up(max_seq_len, setup->core.unit_tokens));
  else
    seed_counts(counts, setup, max_rows, pkv_seed_max_splits(setup, max_rows, units));
  return pkv_plan_layout_init(layout, setup, counts, err);
}

pkv_status pkv_plan_bounds(size_t *plan_bytes, int64_t *max_merges, int64_t *max_slots,
                           const pkv_shape *shape, const pkv_plan_options *options,
                           int32_t max_rows, int32_t max_seq_len, pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  PKV_TRY(bounds(&setup, &counts, &layout, shape, options, max_rows, max_seq_len, err));
  *plan_bytes = (size_t)layout.plan_bytes;
  *max_merges = counts.merges;
  *max_slots = counts.slots;
  return PKV_OK;
}

pkv_status pkv_plan_size(size_t *plan_bytes, size_t *workspace_bytes, const pkv_shape *shape,
                         const pkv_plan_options *options, int32_t max_rows, int32_t max_seq_len,
                         pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  int64_t workspace;
  PKV_CHECK(err, plan_bytes && workspace_bytes, PKV_E_INVALID, "%s is NULL",
            plan_bytes ? "workspace_bytes" : "plan_bytes");
  *plan_bytes = 0;
  *workspace_bytes = 0;
  PKV_TRY(bounds(&setup, &counts, &layout, shape, options, max_rows, max_seq_len, err));
  PKV_TRY(pkv_plan_workspace(&workspace, &setup, counts.merges, counts.slots, err));
  *plan_bytes = (size_t)layout.plan_bytes;
  *workspace_bytes = (size_t)workspace;
  return PKV_OK;
}

/* Everything that the lengths decide before a byte is written. */
static pkv_status count(pkv_plan_counts *out, pkv_plan_setup *setup, int32_t rows,
                        const int32_t *seq_len, pkv_error *err) {
  int64_t tokens = 0, units_all = 0, splits = 0, most = 0, total, bytes;
  bool over = false;
  for (int32_t row = 0; row < rows; row++) {
    const int32_t length = seq_len[row];
    PKV_CHECK(err, length >= 0, PKV_E_INVALID, "seq_len[%d] is %d, negative", row, length);
    const int64_t units = setup->route == PKV_ROUTE_BALANCED ? pkv_core_units(&setup->core, length)
                                                             : pkv_seed_tiles(setup, length);
    if (setup->route != PKV_ROUTE_BALANCED) splits += pkv_seed_splits_of(setup, rows, units);
    units_all += units; /* below 2^31 rows of 2^28 units */
    if (units > most) most = units;
  }
  /* The costs' sum and the counters of pkv_plan_get_stats must fit 64 bits. */
  over |= __builtin_mul_overflow(units_all, (int64_t)setup->core.unit_tokens, &tokens);
  over |=
      __builtin_mul_overflow(tokens, (int64_t)setup->core.kv_heads * setup->head_dim * 8, &bytes);
  over |= __builtin_mul_overflow(units_all, setup->core.unit_cost, &total);
  over |= __builtin_add_overflow(total, rows * setup->core.segment_cost, &total);
  over |= __builtin_mul_overflow(total, (int64_t)setup->core.kv_heads, &total);
  PKV_CHECK(err, !over && total <= INT64_MAX / 4, PKV_E_RANGE,
            "%d rows of up to %lld units with kv_heads %d, head_dim %d are beyond 64 bits", rows,
            (long long)most, setup->core.kv_heads, setup->head_dim);
  if (setup->route == PKV_ROUTE_BALANCED)
    balanced_counts(out, setup, rows, most);
  else
    seed_counts(out, setup, rows, splits);
  return PKV_OK;
}

pkv_status pkv_plan_prepare(struct pkv_plan *header, const pkv_shape *shape,
                            const pkv_plan_options *options, int32_t rows, pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  PKV_TRY(pkv_plan_setup_init(&setup, shape, options, err));
  PKV_CHECK(err, setup.route != PKV_ROUTE_SHARED, PKV_E_UNSUPPORTED,
            "options->route shared is planned from block tables (pkv_device_plan_build_shared)");
  PKV_CHECK(err, setup.route == PKV_ROUTE_BALANCED, PKV_E_UNSUPPORTED,
            "options->route %s is planned on the host only", pkv_route_name(setup.route));
  setup.core.rows = rows;
  balanced_counts(&counts, &setup, rows, 1);
  PKV_TRY(pkv_plan_layout_init(&layout, &setup, &counts, err));
  pkv_plan_fill_header(header, &setup, &counts, &layout);
  return PKV_OK;
}

/* Row costs, cursors, slots, merges: plan_core.h says what they are. */
static void fill_balanced(struct pkv_plan *plan, pkv_plan_core *core) {
  const int32_t *seq_len = pkv_plan_array(plan, plan->seq_len_at);
  int64_t *row_cost = pkv_plan_array(plan, plan->row_cost_at);
  pkv_plan_cursor *cursors = pkv_plan_array(plan, plan->cursors_at);
  pkv_plan_merge *merges = pkv_plan_array(plan, plan->merges_at);
  pkv_plan_launch *launch = pkv_plan_array(plan, plan->launches_at);
  pkv_core_mark sum = {0, 0, 0};
  int32_t first = 0; /* where the cuts of the present segment start */
  row_cost[0] = 0;
  for (int32_t row = 0; row < core->rows; row++)
    row_cost[row + 1] =
        row_cost[row] + core->kv_heads * pkv_core_segment(core, pkv_core_units(core, seq_len[row]));
  core->used = pkv_core_used_parts(core, row_cost);
  for (int32_t p = 0; p <= core->parts; p++)
    pkv_core_cursor(&cursors[p], core, row_cost, seq_len, p);
  for (int32_t p = 1; p < core->parts; p++) {
    const pkv_core_mark mark = pkv_core_mark_of(core, seq_len, &cursors[p - 1], &cursors[p]);
    sum.cuts += mark.cuts;
    sum.segments += mark.segments;
    sum.units += mark.units;
    pkv_core_place(&cursors[p], core, seq_len, &sum);
    if (mark.segments) first = p;
    if (cursors[p].unit > 0 && !pkv_core_same_segment(&cursors[p], &cursors[p + 1]))
      pkv_core_merge(&merges[cursors[p].merge], core, seq_len, &cursors[first], &cursors[p]);
  }
  plan->total_cost = row_cost[core->rows];
  plan->merges = (int32_t)sum.segments;
  plan->slots = (int32_t)(core->batch_invariant ? sum.units : sum.cuts + sum.segments);
  plan->launches = 1;
  *launch = (pkv_plan_launch){PKV_LAUNCH_FUSED, 0, core->parts, 0};
}

pkv_status pkv_plan_build(const pkv_plan **out, void *memory, size_t memory_bytes,
                          const pkv_shape *shape, const pkv_plan_options *options, int32_t rows,
                          const int32_t *seq_len, pkv_error *err) {
  pkv_plan_setup setup;
  pkv_plan_counts counts;
  pkv_plan_layout layout;
  int64_t workspace;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(pkv_plan_setup_init(&setup, shape, options, err));
  PKV_CHECK(err, setup.route != PKV_ROUTE_SHARED, PKV_E_INVALID,
            "options->route shared: pkv_plan_build_shared takes what rows share");
  PKV_CHECK(err, rows >= 0, PKV_E_INVALID, "rows is %d, negative", rows);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  PKV_CHECK(err, memory && (uintptr_t)memory % PKV_PLAN_ALIGN == 0, PKV_E_INVALID,
            "memory %p is not aligned to %d bytes", memory, PKV_PLAN_ALIGN);
  setup.core.rows = rows;
  PKV_TRY(count(&counts, &setup, rows, seq_len, err));
  PKV_TRY(pkv_plan_layout_init(&layout, &setup, &counts, err));
  PKV_TRY(pkv_plan_workspace(&workspace, &setup, counts.merges, counts.slots, err));
  PKV_CHECK(err, (size_t)layout.plan_bytes <= memory_bytes, PKV_E_TOO_SMALL,
            "memory: the plan needs %lld bytes, has %zu", (long long)layout.plan_bytes,
            memory_bytes);

  struct pkv_plan *plan = memory;
  memset(memory, 0, (size_t)layout.plan_bytes);
  pkv_plan_fill_header(plan, &setup, &counts, &layout);
  if (rows > 0)
    memcpy(pkv_plan_array(plan, plan->seq_len_at), seq_len, (size_t)rows * sizeof(int32_t));
  pkv_plan_core core = pkv_plan_core_of(plan);
  if (setup.route == PKV_ROUTE_BALANCED)
    fill_balanced(plan, &core);
  else
    pkv_seed_fill(plan, &setup);
  PKV_TRY(pkv_plan_workspace(&plan->workspace_bytes, &setup, plan->merges, plan->slots, err));
  *out = plan;
  return PKV_OK;
}
