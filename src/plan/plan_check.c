/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_plan_check: whether bytes that claim to be a plan are one. It recomputes each value from the
 * definitions rather than from the builder's code, walks every array once and allocates nothing.
 */
#include "plan/plan_check.h"

#include "policy/shape.h"

/* An array of count * size bytes at an aligned offset between the header and the end. */
pkv_status pkv_check_array(const struct pkv_plan *plan, const char *name, int64_t at, int64_t count,
                           int64_t size, pkv_error *err) {
  int64_t bytes;
  PKV_FAULT(err, count >= 0 && !__builtin_mul_overflow(count, size, &bytes), "%s has %lld entries",
            name, (long long)count);
  PKV_FAULT(err,
            at >= (int64_t)sizeof *plan && at % PKV_PLAN_ALIGN == 0 && at <= plan->plan_bytes &&
                bytes <= plan->plan_bytes - at,
            "%s: %lld bytes at %lld leave the plan's %lld bytes", name, (long long)bytes,
            (long long)at, (long long)plan->plan_bytes);
  return PKV_OK;
}

static pkv_status check_shape(const struct pkv_plan *plan, pkv_error *err) {
  PKV_FAULT(err,
            plan->kv_heads >= 1 && plan->query_heads >= 1 &&
                plan->query_heads % plan->kv_heads == 0 && plan->query_heads / plan->kv_heads <= 32,
            "query_heads %d, kv_heads %d", plan->query_heads, plan->kv_heads);
  PKV_FAULT(err, plan->head_dim >= 8 && plan->head_dim <= 256 && plan->head_dim % 8 == 0,
            "head_dim %d", plan->head_dim);
  PKV_FAULT(err, plan->page_tokens >= 1 && plan->page_tokens <= 1024, "page_tokens %d",
            plan->page_tokens);
  PKV_FAULT(err,
            plan->rows >= 0 && plan->q_len >= 1 && plan->q_len <= PKV_SHAPE_MAX_Q_LEN &&
                plan->window >= 0,
            "rows %d, q_len %d, window %d", plan->rows, plan->q_len, plan->window);
  PKV_FAULT(err, plan->slots >= 0 && plan->merges >= 0 && plan->items >= 0 && plan->launches >= 0,
            "slots %d, merges %d, items %d, launches %d", plan->slots, plan->merges, plan->items,
            plan->launches);
  const bool fewer = plan->route == PKV_ROUTE_BALANCED && plan->flags == PKV_PLAN_FEWER_PARTS;
  const uint32_t of_tree = plan->route == PKV_ROUTE_SHARED ? PKV_PLAN_ENOUGH_SHARED : 0u;
  PKV_FAULT(err, fewer || (plan->flags & ~(PKV_PLAN_BATCH_INVARIANT | of_tree)) == 0, "flags 0x%x",
            (unsigned)plan->flags);
  return PKV_OK;
}

static pkv_status check_workspace(const struct pkv_plan *plan, pkv_error *err) {
  const pkv_plan_setup setup = {.head_dim = plan->head_dim,
                                .group = plan->query_heads / plan->kv_heads,
                                .core = {.q_len = plan->q_len}};
  int64_t bytes;
  PKV_TRY(pkv_plan_workspace(&bytes, &setup, plan->merges, plan->slots, err));
  PKV_FAULT(err, plan->workspace_bytes == bytes,
            "workspace_bytes %lld, %d merges and %d slots need %lld",
            (long long)plan->workspace_bytes, plan->merges, plan->slots, (long long)bytes);
  return PKV_OK;
}

static pkv_status check_lengths(const struct pkv_plan *plan, pkv_error *err) {
  PKV_TRY(pkv_check_array(plan, "seq_len", plan->seq_len_at, plan->rows, sizeof(int32_t), err));
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  for (int32_t row = 0; row < plan->rows; row++)
    PKV_FAULT(err, seq_len[row] >= 0, "seq_len[%d] is %d", row, seq_len[row]);
  return PKV_OK;
}

static pkv_status check_costs(const struct pkv_plan *plan, const pkv_plan_core *core,
                              pkv_error *err) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const int64_t *row_cost = pkv_plan_at(plan, plan->row_cost_at);
  int64_t sum = 0;
  for (int32_t row = 0; row < plan->rows; row++) {
    int64_t cost = pkv_core_segment(core, pkv_core_units(core, seq_len[row]));
    PKV_FAULT(err, row_cost[row] == sum, "row_cost[%d] is %lld, the sum is %lld", row,
              (long long)row_cost[row], (long long)sum);
    PKV_FAULT(err,
              !__builtin_mul_overflow(cost, (int64_t)core->kv_heads, &cost) &&
                  !__builtin_add_overflow(sum, cost, &sum),
              "row %d: the costs leave 64 bits", row);
  }
  PKV_FAULT(err, row_cost[plan->rows] == sum && plan->total_cost == sum,
            "total_cost is %lld, row_cost ends at %lld, the sum is %lld",
            (long long)plan->total_cost, (long long)row_cost[plan->rows], (long long)sum);
  return PKV_OK;
}

/* A cursor on its own, and not before the one in front of it. */
static pkv_status check_cursor(const struct pkv_plan *plan, const pkv_plan_core *core, int32_t p,
                               pkv_error *err) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const pkv_plan_cursor *c = (const pkv_plan_cursor *)pkv_plan_at(plan, plan->cursors_at) + p;
  const bool end = p == plan->parts || c->row == plan->rows;
  PKV_FAULT(err,
            end ? c->row == plan->rows && c->kv_head == 0 && c->unit == 0
                : c->row >= 0 && c->row < plan->rows && c->kv_head >= 0 &&
                      c->kv_head < plan->kv_heads && c->unit >= 0 &&
                      (c->unit == 0 || c->unit < pkv_core_units(core, seq_len[c->row])),
            "cursor %d is (%d, %d, %d) of %d rows, %d heads", p, c->row, c->kv_head, c->unit,
            plan->rows, plan->kv_heads);
  if (p == 0) {
    PKV_FAULT(err, c->row == 0 && c->kv_head == 0 && c->unit == 0, "cursor 0 is (%d, %d, %d)",
              c->row, c->kv_head, c->unit);
    return PKV_OK;
  }
  const pkv_plan_cursor *b = c - 1;
  PKV_FAULT(err,
            b->row != c->row           ? b->row < c->row
            : b->kv_head != c->kv_head ? b->kv_head < c->kv_head
                                       : b->unit <= c->unit,
            "cursor %d (%d, %d, %d) lies before cursor %d (%d, %d, %d)", p, c->row, c->kv_head,
            c->unit, p - 1, b->row, b->kv_head, b->unit);
  return PKV_OK;
}

/* One merge: its segment's cuts start at cursor `first`; *next is the first free slot. */
static pkv_status check_merge(const struct pkv_plan *plan, const pkv_plan_core *core, int32_t first,
                              int32_t index, int32_t *next, pkv_error *err) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
  PKV_FAULT(err, index < plan->merges, "cursor %d starts merge %d of %d", first, index,
            plan->merges);
  const pkv_plan_merge *merge = (const pkv_plan_merge *)pkv_plan_at(plan, plan->merges_at) + index;
  int32_t cuts = 0;
  for (int32_t p = first; pkv_core_same_segment(&cursors[p], &cursors[first]); p++) {
    if (p == first || cursors[p].unit != cursors[p - 1].unit) cuts++;
    const int32_t slot = core->batch_invariant ? *next : *next + cuts;
    PKV_FAULT(err, cursors[p].merge == index && cursors[p].slot == slot,
              "cursor %d has merge %d and slot %d, not %d and %d", p, cursors[p].merge,
              cursors[p].slot, index, slot);
  }
  const int32_t count =
      core->batch_invariant ? pkv_core_units(core, seq_len[cursors[first].row]) : cuts + 1;
  PKV_FAULT(err,
            merge->row == cursors[first].row && merge->kv_head == cursors[first].kv_head &&
                merge->first_slot == *next && merge->count == count,
            "merge %d is row %d, head %d, slot %d, count %d; it should start at %d with %d", index,
            merge->row, merge->kv_head, merge->first_slot, merge->count, *next, count);
  PKV_FAULT(err, count <= plan->slots - *next, "merge %d: %d slots from %d on, there are %d", index,
            count, *next, plan->slots);
  *next += count;
  return PKV_OK;
}

pkv_status pkv_check_line(const struct pkv_plan *plan, pkv_error *err) {
  const bool invariant = (plan->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  PKV_FAULT(err, plan->parts >= 1 && plan->parts <= PKV_PLAN_MAX_PARTS, "parts %d", plan->parts);
  PKV_FAULT(err,
            plan->unit_tokens >= PKV_TILE_TOKENS && plan->unit_tokens % PKV_TILE_TOKENS == 0 &&
                (invariant || plan->unit_tokens == PKV_TILE_TOKENS),
            "unit_tokens %d", plan->unit_tokens);
  PKV_FAULT(err, plan->unit_cost > 0 && plan->segment_cost > 0, "unit_cost %u, segment_cost %u",
            plan->unit_cost, plan->segment_cost);
  return PKV_OK;
}

static pkv_status check_balanced(const struct pkv_plan *plan, pkv_error *err) {
  const pkv_plan_core core = pkv_plan_core_of(plan);
  const int64_t rows = plan->rows, parts = plan->parts;
  int32_t merges = 0, slots = 0;
  PKV_TRY(pkv_check_line(plan, err));
  PKV_FAULT(err,
            plan->slot_stride == 1 && plan->items == 0 && plan->launches == 1 &&
                plan->bucket_tokens == 0,
            "slot_stride %d, items %d, launches %d, bucket_tokens %d", plan->slot_stride,
            plan->items, plan->launches, plan->bucket_tokens);
  PKV_TRY(pkv_check_array(plan, "row_cost", plan->row_cost_at, rows + 1, sizeof(int64_t), err));
  PKV_TRY(
      pkv_check_array(plan, "cursors", plan->cursors_at, parts + 1, sizeof(pkv_plan_cursor), err));
  PKV_TRY(
      pkv_check_array(plan, "merges", plan->merges_at, plan->merges, sizeof(pkv_plan_merge), err));
  PKV_TRY(pkv_check_array(plan, "launches", plan->launches_at, 1, sizeof(pkv_plan_launch), err));
  const pkv_plan_launch *launch = pkv_plan_at(plan, plan->launches_at);
  PKV_FAULT(err, launch->kind == PKV_LAUNCH_FUSED && launch->first == 0 && launch->count == parts,
            "launch: kind %d, first %d, count %d", launch->kind, launch->first, launch->count);
  PKV_TRY(check_costs(plan, &core, err));
  for (int32_t p = 0; p <= parts; p++)
    PKV_TRY(check_cursor(plan, &core, p, err));
  const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
  for (int32_t p = 0; p <= parts; p++) {
    if (cursors[p].unit == 0) {
      PKV_FAULT(err, cursors[p].slot == -1 && cursors[p].merge == -1,
                "cursor %d cuts nothing but has slot %d, merge %d", p, cursors[p].slot,
                cursors[p].merge);
    } else if (!pkv_core_same_segment(&cursors[p - 1], &cursors[p]) || cursors[p - 1].unit == 0) {
      PKV_TRY(check_merge(plan, &core, p, merges, &slots, err));
      merges++;
    }
  }
  PKV_FAULT(err, merges == plan->merges && slots == plan->slots,
            "merges %d and slots %d, counted %d and %d", plan->merges, plan->slots, merges, slots);
  return PKV_OK;
}

/* The tasks of one row from items[at] on: one a split and KV head, together all its units once. */
static pkv_status check_row(const struct pkv_plan *plan, const pkv_plan_core *core, int32_t at,
                            int32_t row, pkv_error *err) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  const pkv_plan_item *items = (const pkv_plan_item *)pkv_plan_at(plan, plan->items_at) + at;
  const int32_t splits = split_first[row + 1] - split_first[row];
  const int32_t first = pkv_core_first_unit(core, seq_len[row]);
  const int64_t units = pkv_core_units(core, seq_len[row]);
  int64_t tiles = units;
  if (plan->bucket_tokens > 0)
    tiles =
        pkv_core_div_up(pkv_core_div_up(seq_len[row], plan->bucket_tokens) * plan->bucket_tokens,
                        PKV_SEED_TILE_TOKENS) -
        first;
  PKV_FAULT(err, splits > 0 || units == 0, "row %d has %lld units and no splits", row,
            (long long)units);
  PKV_FAULT(err, plan->route != PKV_ROUTE_WORKQUEUE || splits <= tiles,
            "row %d has %d splits for %lld units", row, splits, (long long)tiles);
  for (int32_t i = 0; i < splits * plan->kv_heads; i++) {
    const int32_t split = i / plan->kv_heads;
    PKV_FAULT(err,
              items[i].row == row && items[i].split == split &&
                  items[i].kv_head == i % plan->kv_heads &&
                  items[i].unit_begin == first + tiles * split / splits &&
                  items[i].unit_end == first + tiles * (split + 1) / splits,
              "item %d is row %d, head %d, split %d, units %d to %d; row %d has %lld units", at + i,
              items[i].row, items[i].kv_head, items[i].split, items[i].unit_begin,
              items[i].unit_end, row, (long long)tiles);
  }
  return PKV_OK;
}

static pkv_status check_row_merges(const struct pkv_plan *plan, int32_t at, int32_t row,
                                   pkv_error *err) {
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  const pkv_plan_merge *merges = (const pkv_plan_merge *)pkv_plan_at(plan, plan->merges_at) + at;
  for (int32_t head = 0; head < plan->kv_heads; head++)
    PKV_FAULT(err,
              merges[head].row == row && merges[head].kv_head == head &&
                  merges[head].first_slot == split_first[row] * plan->kv_heads + head &&
                  merges[head].count == split_first[row + 1] - split_first[row],
              "merge %d is row %d, head %d, slot %d, count %d; it should be row %d, head %d",
              at + head, merges[head].row, merges[head].kv_head, merges[head].first_slot,
              merges[head].count, row, head);
  return PKV_OK;
}

/*
 * A pair of launches: rows ascending, and all of one bucket, whose length is above *bucket, that of
 * the pair before. So no row can come twice, and the totals show that none is missing.
 */
static pkv_status check_pair(const struct pkv_plan *plan, const pkv_plan_core *core, int32_t pair,
                             int32_t *item, int32_t *merge, int64_t *bucket, pkv_error *err) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  const pkv_plan_launch *launch =
      (const pkv_plan_launch *)pkv_plan_at(plan, plan->launches_at) + 2 * pair;
  const pkv_plan_merge *merges = pkv_plan_at(plan, plan->merges_at);
  const pkv_plan_setup setup = {.route = (pkv_route)plan->route,
                                .bucket_tokens = plan->bucket_tokens};
  const int64_t end = (int64_t)launch[0].first + launch[0].count;
  const int64_t merge_end = (int64_t)launch[1].first + launch[1].count;
  PKV_FAULT(err,
            launch[0].kind == PKV_LAUNCH_DECODE && launch[0].first == *item &&
                launch[0].count >= 0 && end <= plan->items && launch[1].kind == PKV_LAUNCH_MERGE &&
                launch[1].first == *merge && launch[1].count >= 0 && merge_end <= plan->merges &&
                launch[1].count % plan->kv_heads == 0,
            "launches %d and %d: kind %d and %d, items %d + %d, merges %d + %d", 2 * pair,
            2 * pair + 1, launch[0].kind, launch[1].kind, launch[0].first, launch[0].count,
            launch[1].first, launch[1].count);
  const int64_t before = *bucket;
  for (int32_t last = -1; *merge < merge_end; *merge += plan->kv_heads) {
    const int32_t row = merges[*merge].row;
    PKV_FAULT(err, row > last && row < plan->rows, "merge %d: row %d after row %d of %d", *merge,
              row, last, plan->rows);
    *bucket = last < 0 ? pkv_seed_bucket(&setup, seq_len[row]) : *bucket;
    PKV_FAULT(err, *bucket > before && pkv_seed_bucket(&setup, seq_len[row]) == *bucket,
              "row %d of length %d does not belong to launch %d", row, seq_len[row], 2 * pair);
    const int32_t count = (split_first[row + 1] - split_first[row]) * plan->kv_heads;
    PKV_FAULT(err, count <= end - *item, "row %d: %d tasks from %d on, its launch ends at %lld",
              row, count, *item, (long long)end);
    PKV_TRY(check_row(plan, core, *item, row, err));
    PKV_TRY(check_row_merges(plan, *merge, row, err));
    *item += count;
    last = row;
  }
  PKV_FAULT(err, *item == end, "launch %d ends at task %lld, its rows at %d", 2 * pair,
            (long long)end, *item);
  return PKV_OK;
}

static pkv_status check_seed(const struct pkv_plan *plan, pkv_error *err) {
  const pkv_plan_core core = pkv_plan_core_of(plan);
  const int64_t rows = plan->rows, heads = plan->kv_heads;
  PKV_FAULT(err, plan->route >= PKV_ROUTE_BUCKET_EXACT && plan->route <= PKV_ROUTE_WORKQUEUE,
            "route %d", plan->route);
  PKV_FAULT(err,
            plan->flags == 0 && plan->parts == 0 && plan->unit_tokens == PKV_SEED_TILE_TOKENS &&
                plan->slot_stride == plan->kv_heads && plan->slots == plan->items &&
                plan->merges == rows * heads && plan->launches % 2 == 0 &&
                (plan->route == PKV_ROUTE_BUCKET_PADDED) == (plan->bucket_tokens > 0),
            "flags %u, parts %d, unit_tokens %d, slot_stride %d, slots %d, items %d, merges %d, "
            "launches %d, bucket_tokens %d",
            plan->flags, plan->parts, plan->unit_tokens, plan->slot_stride, plan->slots,
            plan->items, plan->merges, plan->launches, plan->bucket_tokens);
  PKV_TRY(
      pkv_check_array(plan, "split_first", plan->split_first_at, rows + 1, sizeof(int32_t), err));
  PKV_TRY(
      pkv_check_array(plan, "merges", plan->merges_at, plan->merges, sizeof(pkv_plan_merge), err));
  PKV_TRY(pkv_check_array(plan, "launches", plan->launches_at, plan->launches,
                          sizeof(pkv_plan_launch), err));
  PKV_TRY(pkv_check_array(plan, "items", plan->items_at, plan->items, sizeof(pkv_plan_item), err));
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  PKV_FAULT(err, split_first[0] == 0 && split_first[rows] * heads == plan->items,
            "split_first runs from %d to %d, items are %d of %lld heads", split_first[0],
            split_first[rows], plan->items, (long long)heads);
  for (int32_t row = 0; row < plan->rows; row++)
    PKV_FAULT(err,
              split_first[row + 1] >= split_first[row] && split_first[row + 1] <= split_first[rows],
              "split_first[%d] is %d after %d", row + 1, split_first[row + 1], split_first[row]);
  int32_t item = 0, merge = 0;
  int64_t bucket = -1;
  for (int32_t pair = 0; pair < plan->launches / 2; pair++)
    PKV_TRY(check_pair(plan, &core, pair, &item, &merge, &bucket, err));
  PKV_FAULT(err, item == plan->items && merge == plan->merges,
            "launches cover %d of %d tasks, %d of %d merges", item, plan->items, merge,
            plan->merges);
  return PKV_OK;
}

pkv_status pkv_plan_check(const struct pkv_plan *plan, size_t bytes, pkv_error *err) {
  PKV_FAULT(err, plan && (uintptr_t)plan % PKV_PLAN_ALIGN == 0 && bytes >= sizeof *plan,
            "no plan: %zu bytes at %p", bytes, (const void *)plan);
  PKV_FAULT(err, plan->magic == PKV_PLAN_MAGIC, "magic 0x%x", (unsigned)plan->magic);
  PKV_FAULT(err, plan->plan_bytes >= (int64_t)sizeof *plan && (uint64_t)plan->plan_bytes <= bytes,
            "plan_bytes %lld, there are %zu", (long long)plan->plan_bytes, bytes);
  PKV_TRY(check_shape(plan, err));
  PKV_TRY(check_lengths(plan, err));
  if (plan->route == PKV_ROUTE_SHARED)
    PKV_TRY(pkv_check_shared(plan, err));
  else
    PKV_TRY(plan->route == PKV_ROUTE_BALANCED ? check_balanced(plan, err) : check_seed(plan, err));
  return check_workspace(plan, err);
}
