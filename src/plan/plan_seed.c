/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seed's routes: bucket_exact, bucket_padded, split, workqueue. One task per (row, split, KV
 * head) over tiles of 32 tokens, split s of S owning tiles [T s / S, T (s + 1) / S) of its row, and
 * one merge per (row, KV head). They differ in S, in which rows share a launch, and in whether T
 * is the row's own or its bucket's.
 *
 * Where we do not follow the seed: a work queue with fixed splits gives a row never more splits
 * than it has tiles. Its artifact counts such a row's empty splits as slots that no task writes and
 * that the merge reads. The other routes write neutral states there, as published.
 */
#include "plan/plan_setup.h"

#include "policy/seed_rule.h"

int64_t pkv_seed_bucket(const pkv_plan_setup *setup, int32_t length) {
  if (setup->route == PKV_ROUTE_BUCKET_EXACT) return length;
  if (setup->route == PKV_ROUTE_BUCKET_PADDED)
    return pkv_core_div_up(length, setup->bucket_tokens) * setup->bucket_tokens;
  return 0;
}

int64_t pkv_seed_tiles(const pkv_plan_setup *setup, int32_t length) {
  const int64_t end =
      setup->route == PKV_ROUTE_BUCKET_PADDED ? pkv_seed_bucket(setup, length) : length;
  return pkv_core_div_up(end, PKV_SEED_TILE_TOKENS) - pkv_core_first_unit(&setup->core, length);
}

int32_t pkv_seed_splits_of(const pkv_plan_setup *setup, int32_t rows, int64_t tiles) {
  if (setup->route != PKV_ROUTE_WORKQUEUE) return setup->splits;
  if (setup->splits == 0) return pkv_seed_row_splits(rows, setup->core.kv_heads, tiles);
  return setup->splits < tiles ? setup->splits : (int32_t)tiles;
}

int64_t pkv_seed_max_splits(const pkv_plan_setup *setup, int32_t max_rows, int64_t max_tiles) {
  if (setup->route != PKV_ROUTE_WORKQUEUE || setup->splits > 0)
    return (int64_t)max_rows * pkv_seed_splits_of(setup, max_rows, max_tiles);
  /* The rule's cap falls with rows, so fewer rows may have more splits; splits grow with tiles. */
  int64_t most = 0;
  for (int32_t rows = 1; rows <= max_rows && rows <= 8; rows++) {
    const int64_t all = (int64_t)rows * pkv_seed_row_splits(rows, setup->core.kv_heads, max_tiles);
    if (all > most) most = all;
  }
  const int64_t cap = pkv_seed_split_cap(8);
  const int64_t many = (int64_t)max_rows * (max_tiles < cap ? max_tiles : cap);
  return max_rows > 8 && many > most ? many : most;
}

/* Order of launches: by bucket, then by row. */
static bool after(const pkv_plan_setup *setup, const int32_t *seq_len, int32_t a, int32_t b) {
  const int64_t x = pkv_seed_bucket(setup, seq_len[a]), y = pkv_seed_bucket(setup, seq_len[b]);
  return x != y ? x > y : a > b;
}

static void sift(const pkv_plan_setup *setup, const int32_t *seq_len, int32_t *order, int64_t at,
                 int64_t count) {
  const int32_t value = order[at];
  for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
    if (child + 1 < count && after(setup, seq_len, order[child + 1], order[child])) child++;
    if (!after(setup, seq_len, order[child], value)) break;
    order[at] = order[child];
    at = child;
  }
  order[at] = value;
}

/* Heap sort: in place, and never worse than n log n. */
static void sort_rows(const pkv_plan_setup *setup, const int32_t *seq_len, int32_t *order,
                      int32_t rows) {
  for (int32_t i = 0; i < rows; i++)
    order[i] = i;
  for (int64_t i = rows / 2; i-- > 0;)
    sift(setup, seq_len, order, i, rows);
  for (int64_t last = (int64_t)rows - 1; last > 0; last--) {
    const int32_t top = order[0];
    order[0] = order[last];
    order[last] = top;
    sift(setup, seq_len, order, 0, last);
  }
}

/* The row's tasks, ordered split, KV head; returns how many. */
static int64_t fill_items(pkv_plan_item *items, const pkv_plan_setup *setup, int32_t row,
                          int32_t length, int32_t splits) {
  const int64_t tiles = pkv_seed_tiles(setup, length);
  const int32_t first = pkv_core_first_unit(&setup->core, length);
  int64_t count = 0;
  for (int32_t split = 0; split < splits; split++) {
    const int32_t begin = first + (int32_t)(tiles * split / splits);
    const int32_t end = first + (int32_t)(tiles * (split + 1) / splits);
    for (int32_t head = 0; head < setup->core.kv_heads; head++)
      items[count++] = (pkv_plan_item){row, head, split, begin, end};
  }
  return count;
}

static int64_t fill_merges(pkv_plan_merge *merges, const pkv_plan_setup *setup, int32_t row,
                           int64_t split_first, int32_t splits) {
  const int32_t heads = setup->core.kv_heads;
  for (int32_t head = 0; head < heads; head++)
    merges[head] = (pkv_plan_merge){row, head, (int32_t)(split_first * heads + head), splits};
  return heads;
}

static int32_t add_launches(pkv_plan_launch *launches, int32_t count, int64_t item, int64_t items,
                            int64_t merge, int64_t merges) {
  launches[count] = (pkv_plan_launch){PKV_LAUNCH_DECODE, (int32_t)item, (int32_t)(items - item), 0};
  launches[count + 1] =
      (pkv_plan_launch){PKV_LAUNCH_MERGE, (int32_t)merge, (int32_t)(merges - merge), 0};
  return count + 2;
}

/* One launch pair for all rows, in row order; a row's splits may differ from its neighbour's. */
static void fill_single(struct pkv_plan *plan, const pkv_plan_setup *setup) {
  const int32_t *seq_len = pkv_plan_array(plan, plan->seq_len_at);
  int32_t *split_first = pkv_plan_array(plan, plan->split_first_at);
  pkv_plan_item *items = pkv_plan_array(plan, plan->items_at);
  pkv_plan_merge *merges = pkv_plan_array(plan, plan->merges_at);
  int64_t item = 0, merge = 0;
  split_first[0] = 0;
  for (int32_t row = 0; row < plan->rows; row++) {
    const int64_t tiles = pkv_seed_tiles(setup, seq_len[row]);
    const int32_t splits = pkv_seed_splits_of(setup, plan->rows, tiles);
    item += fill_items(items + item, setup, row, seq_len[row], splits);
    merge += fill_merges(merges + merge, setup, row, split_first[row], splits);
    split_first[row + 1] = split_first[row] + splits;
  }
  plan->launches = add_launches(pkv_plan_array(plan, plan->launches_at), 0, 0, item, 0, merge);
}

/* A launch pair a bucket, shortest first. Every row has S splits: its slots need no table yet. */
static void fill_buckets(struct pkv_plan *plan, const pkv_plan_setup *setup) {
  const int32_t *seq_len = pkv_plan_array(plan, plan->seq_len_at);
  int32_t *order = pkv_plan_array(plan, plan->split_first_at); /* until the end */
  pkv_plan_item *items = pkv_plan_array(plan, plan->items_at);
  pkv_plan_merge *merges = pkv_plan_array(plan, plan->merges_at);
  pkv_plan_launch *launches = pkv_plan_array(plan, plan->launches_at);
  const int32_t rows = plan->rows, splits = setup->splits;
  int64_t item = 0, merge = 0;
  sort_rows(setup, seq_len, order, rows);
  plan->launches = 0;
  for (int32_t i = 0; i < rows;) {
    const int64_t first_item = item, first_merge = merge;
    const int64_t bucket = pkv_seed_bucket(setup, seq_len[order[i]]);
    for (; i < rows && pkv_seed_bucket(setup, seq_len[order[i]]) == bucket; i++) {
      const int32_t row = order[i];
      item += fill_items(items + item, setup, row, seq_len[row], splits);
      merge += fill_merges(merges + merge, setup, row, (int64_t)row * splits, splits);
    }
    plan->launches = add_launches(launches, plan->launches, first_item, item, first_merge, merge);
  }
  for (int32_t row = 0; row <= rows; row++)
    order[row] = row * splits;
}

void pkv_seed_fill(struct pkv_plan *plan, const pkv_plan_setup *setup) {
  if (setup->route == PKV_ROUTE_BUCKET_EXACT || setup->route == PKV_ROUTE_BUCKET_PADDED)
    fill_buckets(plan, setup);
  else
    fill_single(plan, setup);
}
