/* SPDX-License-Identifier: Apache-2.0 */
/* device.h for route shared: plans made on the device from its block tables. */
#include "attention/device_shared.h"

#include <stdbool.h>

#include "base/status.h"
#include "pkv/device.h"
#include "plan/plan_core.h"
#include "plan/plan_prepare.h"

/*
 * Costs on a GPU, in 64ths of a tile of a private row: docs/notes/cuda-shared.md. Half of a node's
 * tile, 64 tokens, takes an SM half as long again as a row's tile; starting a row costs a look-up,
 * its query and a fold, as much as two tiles.
 */
static void set_costs(pkv_plan_options *o) {
  if (o->tile_cost || o->segment_cost || o->node_tile_cost || o->node_segment_cost) return;
  o->tile_cost = 64;
  o->segment_cost = 120;
  o->node_tile_cost = 96;
  o->node_segment_cost = 384;
  o->flags |= PKV_PLAN_ENOUGH_SHARED;
}

/*
 * A batch that shares nothing is served by `balanced`: a third launch for states that no node
 * left, and slots for every piece, cost a layer more than a second plan costs the step. Which of
 * the two it is, only the device knows: docs/notes/cuda-shared.md.
 */
static pkv_status create_line(pkv_device_plan *plan, pkv_error *err) {
  const pkv_shape *s = &plan->shape;
  const bool plain = s->q_len == 1 && s->query_heads / s->kv_heads <= 8 && s->window == 0 &&
                     plan->options.parts <= PKV_PLAN_MAX_PARTS / 2 &&
                     !(plan->options.flags & PKV_PLAN_BATCH_INVARIANT);
  if (!plain) return PKV_OK;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_BALANCED;
  options.parts = 2 * plan->options.parts;
  PKV_TRY(pkv_device_plan_create(&plan->line, plan->executor, s, &options, plan->kv_dtype,
                                 plan->limits.max_rows, plan->limits.max_seq_len, err));
  /* What the tree's planner starts from is set by the launch ahead of it, which is this plan's. */
  plan->line->zeros = plan->tree.memory;
  plan->line->zero_bytes = ((int64_t)plan->limits.max_rows + 1) * (int64_t)sizeof(uint64_t);
  return PKV_OK;
}

pkv_status pkv_device_create_shared(pkv_device_plan *plan, pkv_error *err) {
  pkv_executor *executor = plan->executor;
  const pkv_device_ops *ops = executor->device_ops;
  pkv_shared_bounds bounds;
  int64_t slot_bytes, bytes;
  void *memory;
  set_costs(&plan->options);
  if (plan->options.parts == 0) PKV_TRY(ops->tree_parts(&plan->options.parts, executor, err));
  PKV_TRY(pkv_plan_shared_bounds(&bounds, &plan->shape, &plan->options, plan->limits.max_rows,
                                 plan->limits.max_seq_len, err));
  PKV_TRY(ops->sizes(&slot_bytes, plan, err));
  plan->limits.plan_bytes = bounds.plan_bytes;
  plan->limits.max_merges = bounds.merges;
  plan->limits.max_slots = bounds.node_slots + bounds.private_slots;
  plan->tree.max_node_slots = bounds.node_slots;
  plan->tree.max_private_slots = bounds.private_slots;
  plan->tree.most_units = bounds.units;
  plan->tree.memory_bytes = bounds.memory_bytes;
  plan->launch_room = 2;
  plan->launch =
      pkv_alloc_zeroed(&executor->allocator, (size_t)plan->launch_room, sizeof *plan->launch);
  PKV_CHECK(err, plan->launch, PKV_E_NOMEM, "%d launches of the plan", plan->launch_room);
  plan->counter_count = bounds.merges > 0 ? bounds.merges * plan->tiles : 1;
  PKV_CHECK(err, plan->counter_count <= INT32_MAX, PKV_E_RANGE, "%lld merges of %d tiles",
            (long long)bounds.merges, plan->tiles);
  plan->counter_bytes = (size_t)plan->counter_count * sizeof(uint32_t);
  PKV_TRY(ops->alloc(&plan->plan, executor, bounds.plan_bytes, err));
  PKV_TRY(ops->alloc(&memory, executor, plan->counter_bytes, err));
  plan->counters = memory;
  PKV_TRY(ops->alloc(&memory, executor, sizeof(int32_t), err));
  plan->fault = memory;
  PKV_CHECK(err, !__builtin_mul_overflow(plan->limits.max_slots + 1, slot_bytes, &bytes),
            PKV_E_RANGE, "the workspace is too large: %lld slots",
            (long long)plan->limits.max_slots);
  plan->slot_bytes = (size_t)bytes;
  PKV_TRY(ops->alloc(&memory, executor, plan->slot_bytes, err));
  plan->slots = memory;
  PKV_TRY(ops->alloc(&plan->tree.memory, executor, plan->tree.memory_bytes, err));
  return create_line(plan, err);
}

static pkv_status check_sharing(pkv_sharing *out, const pkv_sharing *sharing, int32_t rows,
                                pkv_error *err) {
  PKV_CHECK_STRUCT(err, sharing, pkv_sharing);
  PKV_CHECK(err, (sharing->flags & ~PKV_TABLE_CHAINED) == 0, PKV_E_INVALID,
            "sharing->flags is 0x%x, known: 0x%x", (unsigned)sharing->flags, PKV_TABLE_CHAINED);
  PKV_CHECK(err, !sharing->nodes && !sharing->order && sharing->node_count == 0, PKV_E_UNSUPPORTED,
            "sharing has nodes or an order: plan on the host and use pkv_device_plan_upload");
  PKV_CHECK(err, sharing->max_pages >= 0, PKV_E_INVALID, "sharing->max_pages is %d",
            sharing->max_pages);
  PKV_CHECK(err, sharing->block_table || rows == 0, PKV_E_INVALID,
            "sharing->block_table is NULL with %d rows", rows);
  PKV_CHECK(err, (uintptr_t)sharing->block_table % sizeof(int32_t) == 0, PKV_E_INVALID,
            "sharing->block_table is %p, not aligned to 4 bytes",
            (const void *)sharing->block_table);
  *out = *sharing;
  if (out->block_table_stride == 0) out->block_table_stride = out->max_pages;
  int64_t entries;
  PKV_CHECK(err,
            out->block_table_stride >= out->max_pages &&
                !__builtin_mul_overflow((int64_t)rows, out->block_table_stride, &entries) &&
                entries <= INT64_MAX / 8,
            PKV_E_INVALID, "sharing->block_table_stride is %lld for %d pages and %d rows",
            (long long)out->block_table_stride, out->max_pages, rows);
  return PKV_OK;
}

pkv_status pkv_device_plan_build_shared(pkv_device_plan *plan, int32_t rows, const int32_t *seq_len,
                                        const pkv_sharing *sharing, void *stream, pkv_error *err) {
  pkv_sharing given;
  PKV_CHECK(err, plan, PKV_E_INVALID, "plan is NULL");
  PKV_CHECK(err, plan->options.route == PKV_ROUTE_SHARED, PKV_E_INVALID,
            "plan was created for route %s", pkv_route_name(plan->options.route));
  PKV_CHECK(err, rows >= 0 && rows <= plan->limits.max_rows, PKV_E_RANGE,
            "rows is %d, the plan was created for 0 to %d", rows, plan->limits.max_rows);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  PKV_CHECK(err, (uintptr_t)seq_len % sizeof(int32_t) == 0, PKV_E_INVALID,
            "seq_len is %p, not aligned to 4 bytes", (const void *)seq_len);
  PKV_TRY(check_sharing(&given, sharing, rows, err));
  PKV_TRY(pkv_plan_prepare_shared(&plan->header, &plan->tree.header, &plan->shape, &plan->options,
                                  rows, err));
  plan->built = 0;
  /* First, so that the tree's kernels run beside it. */
  if (plan->line) PKV_TRY(pkv_device_plan_build(plan->line, rows, seq_len, stream, err));
  PKV_TRY(plan->executor->device_ops->build_tree(plan, seq_len, &given, stream, err));
  plan->built = 1;
  plan->fresh = 1;
  return PKV_OK;
}
