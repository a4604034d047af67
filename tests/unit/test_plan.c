/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's rules, one by one, against values worked out by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_core.h"
#include "support/plan_walk.h"

static pkv_shape shape_of(int32_t query_heads, int32_t kv_heads, int32_t head_dim) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

static pkv_plan_options options_of(pkv_route route) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = route;
  return options;
}

static pkv_plan_stats stats_of(const pkv_plan *plan, pkv_dtype dtype) {
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, plan, dtype, NULL), PKV_OK);
  return stats;
}

static void expect_cursor(const pkv_plan *plan, int32_t p, int32_t row, int32_t head, int32_t unit,
                          int32_t slot, int32_t merge) {
  const pkv_plan_cursor *c = (const pkv_plan_cursor *)pkv_plan_at(plan, plan->cursors_at) + p;
  if (c->row != row || c->kv_head != head || c->unit != unit || c->slot != slot ||
      c->merge != merge)
    fail_msg("cursor %d is (%d, %d, %d) slot %d merge %d, expected (%d, %d, %d) slot %d merge %d",
             p, c->row, c->kv_head, c->unit, c->slot, c->merge, row, head, unit, slot, merge);
}

static void expect_merge(const pkv_plan *plan, int32_t m, int32_t row, int32_t head, int32_t first,
                         int32_t count) {
  const pkv_plan_merge *x = (const pkv_plan_merge *)pkv_plan_at(plan, plan->merges_at) + m;
  if (x->row != row || x->kv_head != head || x->first_slot != first || x->count != count)
    fail_msg("merge %d is (%d, %d) slots %d + %d, expected (%d, %d) slots %d + %d", m, x->row,
             x->kv_head, x->first_slot, x->count, row, head, first, count);
}

/* ---- balanced ---- */

static void test_cut_in_the_middle(void **state) {
  (void)state;
  /* costs 4 + 4*8 = 36 and 4 + 2*8 = 20; the cut at 28 lies 24 past the first overhead: unit 3 */
  const pkv_shape shape = shape_of(2, 1, 16);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 2;
  const int32_t lengths[] = {256, 128};
  pkv_plan *plan = plan_make(&shape, &options, 2, lengths);
  expect_cursor(plan, 0, 0, 0, 0, -1, -1);
  expect_cursor(plan, 1, 0, 0, 3, 1, 0);
  expect_cursor(plan, 2, 2, 0, 0, -1, -1);
  expect_merge(plan, 0, 0, 0, 0, 2);
  const pkv_plan_stats stats = stats_of(plan, PKV_DTYPE_F16);
  assert_int_equal(stats.total_cost, 56);
  assert_int_equal(stats.max_part_cost, 28);
  assert_int_equal(stats.launches, 1);
  assert_int_equal(stats.tasks, 2);
  assert_int_equal(stats.partial_states, 2 * 2);
  assert_int_equal(stats.merge_state_bytes, 2 * 2 * 18 * 4);
  assert_int_equal(stats.useful_kv_bytes, 384 * 2 * 16 * 2);
  assert_int_equal(stats.padded_kv_bytes, 0);
  assert_int_equal(stats.workspace_bytes, 64 + 2 * 2 * 18 * 4);
  free(plan);
}

static void test_cut_rounds_to_the_nearest_unit(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(1, 1, 8);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 2;
  options.tile_cost = 10;
  /* one row of 3 units: 30 + c; the cut lies at floor((30 + c) / 2) */
  const struct {
    uint32_t segment_cost;
    int32_t unit;
  } cases[] = {{2, 1},  /* 16, 14 past: 1.4 -> 1 */
               {20, 1}, /* 25, 5 past: a tie, up */
               {21, 0}, /* 25, 4 past: 0.4 -> 0 */
               {30, 0}, /* 30: at the end of the overhead */
               {90, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    options.segment_cost = cases[i].segment_cost;
    const int32_t length = 3 * 64;
    pkv_plan *plan = plan_make(&shape, &options, 1, &length);
    const pkv_plan_cursor *c = (const pkv_plan_cursor *)pkv_plan_at(plan, plan->cursors_at) + 1;
    if (c->unit != cases[i].unit)
      fail_msg("segment cost %u: unit %d, expected %d", cases[i].segment_cost, c->unit,
               cases[i].unit);
    free(plan);
  }
}

static void test_cut_near_the_end_moves_to_the_next_segment(void **state) {
  (void)state;
  /* two heads of 4 + 8 = 12 a row; parts 3 of 48: cuts at 16 (unit 0 of head 1), 32 (row 1, head 0)
   */
  const pkv_shape shape = shape_of(2, 2, 8);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 3;
  const int32_t lengths[] = {5, 64};
  pkv_plan *plan = plan_make(&shape, &options, 2, lengths);
  expect_cursor(plan, 1, 0, 1, 0, -1, -1);
  expect_cursor(plan, 2, 1, 1, 0, -1, -1); /* 8 past the start: 4 of 8, a tie, up: all units */
  assert_int_equal(stats_of(plan, PKV_DTYPE_F32).partial_states, 0);
  assert_int_equal(plan->workspace_bytes, 0);
  free(plan);
}

static void test_one_segment_cut_often(void **state) {
  (void)state;
  /* 4 + 8*8 = 68 in 4 parts: cuts 17, 34, 51 -> units 13/8 = 2, 30/8 = 4, 47/8 = 6; next row whole
   */
  const pkv_shape shape = shape_of(4, 1, 64);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 4;
  const int32_t length = 8 * 64;
  pkv_plan *plan = plan_make(&shape, &options, 1, &length);
  expect_cursor(plan, 1, 0, 0, 2, 1, 0);
  expect_cursor(plan, 2, 0, 0, 4, 2, 0);
  expect_cursor(plan, 3, 0, 0, 6, 3, 0);
  expect_merge(plan, 0, 0, 0, 0, 4);
  assert_int_equal(plan->slots, 4);
  free(plan);
}

static void test_equal_cursors_make_empty_parts(void **state) {
  (void)state;
  /* two units, seven parts of 20: cuts 2 5 8 11 14 17 -> 0 0 1 1 1 and 13/8 = 1.6 -> 2 = the end */
  const pkv_shape shape = shape_of(1, 1, 8);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 7;
  const int32_t length = 100;
  pkv_plan *plan = plan_make(&shape, &options, 1, &length);
  expect_cursor(plan, 1, 0, 0, 0, -1, -1);
  expect_cursor(plan, 2, 0, 0, 0, -1, -1);
  expect_cursor(plan, 3, 0, 0, 1, 1, 0);
  expect_cursor(plan, 4, 0, 0, 1, 1, 0);
  expect_cursor(plan, 5, 0, 0, 1, 1, 0);
  expect_cursor(plan, 6, 1, 0, 0, -1, -1);
  expect_merge(plan, 0, 0, 0, 0, 2);
  assert_int_equal(plan->slots, 2);
  assert_int_equal(stats_of(plan, PKV_DTYPE_F16).tasks, 2);
  free(plan);
}

static void test_batch_invariant_slots(void **state) {
  (void)state;
  /* chunks of 128: rows of 5, 1, 5 chunks at 16 each + 4: 84, 20, 84 = 188 in 4: cuts 47 94 141 */
  const pkv_shape shape = shape_of(3, 1, 8);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 4;
  options.flags = PKV_PLAN_BATCH_INVARIANT;
  options.chunk_tokens = 128;
  const int32_t lengths[] = {5 * 128 - 1, 3, 5 * 128};
  pkv_plan *plan = plan_make(&shape, &options, 3, lengths);
  assert_int_equal(plan->unit_tokens, 128);
  assert_int_equal(plan->unit_cost, 16);
  expect_cursor(plan, 1, 0, 0, 3, 0, 0);   /* 43 / 16 = 2.7 */
  expect_cursor(plan, 2, 1, 0, 0, -1, -1); /* 94 - 84 - 4 = 6 of 16: 0 */
  expect_cursor(plan, 3, 2, 0, 2, 5, 1);   /* 141 - 104 - 4 = 33: 2.06 */
  expect_merge(plan, 0, 0, 0, 0, 5);
  expect_merge(plan, 1, 2, 0, 5, 5);
  assert_int_equal(plan->slots, 10);
  free(plan);
}

static void test_window_and_query_length(void **state) {
  (void)state;
  pkv_plan_core core = {.kv_heads = 1, .q_len = 1, .window = 100, .unit_tokens = 64};
  const struct {
    int32_t q_len, window, length, first, units;
  } cases[] = {
      {1, 0, 0, 0, 0},     {1, 0, 1, 0, 1},     {1, 0, 64, 0, 1},   {1, 0, 65, 0, 2},
      {1, 100, 100, 0, 2}, {1, 100, 163, 0, 3}, /* first token 63 */
      {1, 100, 164, 1, 2},                      /* 64 */
      {4, 100, 164, 0, 3}, {4, 100, 167, 1, 2}, {1, 1, 65, 1, 1},   {1, 1, 64, 0, 1},
      {16, 1, 3, 0, 1},    {1, 100, 0, 0, 0},   {1, 64, 128, 1, 1}, {2, 64, 128, 0, 2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    core.q_len = cases[i].q_len;
    core.window = cases[i].window;
    const int32_t first = pkv_core_first_unit(&core, cases[i].length);
    const int32_t units = pkv_core_units(&core, cases[i].length);
    if (first != cases[i].first || units != cases[i].units)
      fail_msg("q_len %d window %d length %d: first %d units %d, expected %d and %d",
               cases[i].q_len, cases[i].window, cases[i].length, first, units, cases[i].first,
               cases[i].units);
  }
}

static void test_zero_rows_and_zero_lengths(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(4, 2, 32);
  const int32_t lengths[] = {0, 0, 0};
  for (int route = PKV_ROUTE_AUTO; route <= PKV_ROUTE_BALANCED; route++) {
    const pkv_plan_options options = options_of((pkv_route)route);
    for (int32_t rows = 0; rows <= 3; rows += 3) {
      pkv_plan *plan = plan_make(&shape, &options, rows, lengths);
      const pkv_plan_stats stats = stats_of(plan, PKV_DTYPE_F16);
      assert_int_equal(stats.useful_kv_bytes, 0);
      assert_int_equal(stats.padded_kv_bytes, 0);
      assert_int_equal(stats.rows, rows);
      free(plan);
    }
  }
  /* a row of length 0 costs one segment, so that somebody stores its zeros */
  const pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  pkv_plan *plan = plan_make(&shape, &options, 3, lengths);
  assert_int_equal(plan->total_cost, 3 * 2 * 4);
  assert_int_equal(plan->slots, 0);
  free(plan);
  /* and a quarter of one, rounded up, from four segments a part on */
  pkv_plan_options few = options;
  few.parts = 1;
  few.segment_cost = 9;
  plan = plan_make(&shape, &few, 1, lengths);
  assert_int_equal(plan->total_cost, 1 * 2 * 9);
  free(plan);
  plan = plan_make(&shape, &few, 2, lengths);
  assert_int_equal(plan->total_cost, 2 * 2 * 3);
  free(plan);
}

/* Room for 512 rows of which two live: the others must not take the parts away from them. */
static void test_empty_rows_cost_little(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(32, 8, 128);
  const int32_t lengths[512] = {8192, 2048};
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  options.parts = 264;
  options.segment_cost = 16;
  pkv_plan *plan = plan_make(&shape, &options, 512, lengths);
  const pkv_plan_cursor *c = (const pkv_plan_cursor *)pkv_plan_at(plan, plan->cursors_at);
  int32_t parts = 0;
  while (parts < 264 && c[parts].row < 2)
    parts++;
  /* 16 segments of 16 + 1024 or 256 against 4,080 of 4 */
  assert_in_range(parts, 104, 106);
  free(plan);
}

/* Of 64 rows and 8 KV heads in 264 parts: how many are used, by rows' lengths in turn. */
static int32_t used_of(uint32_t flags, int32_t even, int32_t odd, int32_t *slots) {
  const pkv_shape shape = shape_of(32, 8, 128);
  pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  int32_t lengths[64], used = 264;
  options.parts = 264;
  options.flags = flags;
  for (int32_t row = 0; row < 64; row++)
    lengths[row] = row % 2 == 0 ? even : odd;
  pkv_plan *plan = plan_make(&shape, &options, 64, lengths);
  const pkv_plan_cursor *c = (const pkv_plan_cursor *)pkv_plan_at(plan, plan->cursors_at);
  while (c[used - 1].row == 64)
    used--;
  *slots = plan->slots;
  free(plan);
  return used;
}

/* Rows of one length, two segments a part, are not cut; others take all parts. */
static void test_even_rows_stay_whole(void **state) {
  (void)state;
  int32_t slots;
  assert_int_equal(used_of(PKV_PLAN_FEWER_PARTS, 2048, 2048, &slots), 256);
  assert_int_equal(slots, 0);
  assert_int_equal(used_of(PKV_PLAN_FEWER_PARTS, 4000, 4100, &slots), 256);
  assert_int_equal(used_of(PKV_PLAN_FEWER_PARTS, 2048, 3000, &slots), 264);
  assert_int_equal(used_of(PKV_PLAN_FEWER_PARTS, 0, 2048, &slots), 264);
  assert_int_equal(used_of(0, 2048, 2048, &slots), 264);
  assert_true(slots > 0);
}

static void test_cut_position_is_exact(void **state) {
  (void)state;
  const int64_t totals[] = {1, 7, 1000003, INT64_MAX / 4, INT64_MAX};
  const int32_t parts[] = {1, 2, 3, 1000, PKV_PLAN_MAX_PARTS};
  for (size_t t = 0; t < 5; t++)
    for (size_t i = 0; i < 5; i++)
      for (int32_t p = 0; p <= parts[i]; p += 1 + parts[i] / 50) {
        const int64_t got = pkv_core_cut(totals[t], parts[i], p);
        __extension__ typedef __int128 wide;
        const int64_t expected = (int64_t)((wide)totals[t] * p / parts[i]);
        if (got != expected)
          fail_msg("floor(%d * %lld / %d) is %lld, not %lld", p, (long long)totals[t], parts[i],
                   (long long)expected, (long long)got);
      }
}

/* ---- the seed's routes ---- */

static void test_fixed_splits_over_odd_lengths(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(8, 2, 128);
  const int32_t lengths[] = {1, 31, 33, 640, 65536};
  const int32_t tiles[] = {1, 1, 2, 20, 2048};
  pkv_plan_options options = options_of(PKV_ROUTE_SPLIT);
  options.splits = 20;
  pkv_plan *plan = plan_make(&shape, &options, 5, lengths);
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  assert_int_equal(plan->items, 5 * 20 * 2);
  for (int32_t i = 0; i < plan->items; i++) {
    const int32_t row = i / 40, split = i % 40 / 2;
    assert_int_equal(items[i].row, row);
    assert_int_equal(items[i].split, split);
    assert_int_equal(items[i].kv_head, i % 2);
    assert_int_equal(items[i].unit_begin, tiles[row] * split / 20);
    assert_int_equal(items[i].unit_end, tiles[row] * (split + 1) / 20);
  }
  expect_merge(plan, 3, 1, 1, 20 * 2 + 1, 20);
  assert_int_equal(plan->launches, 2);
  assert_int_equal(stats_of(plan, PKV_DTYPE_F16).merge_state_bytes, 5 * 8 * 20 * 130 * 4);
  free(plan);
  options.route = PKV_ROUTE_WORKQUEUE;
  plan = plan_make(&shape, &options, 5, lengths);
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  const int32_t expected[] = {0, 1, 2, 4, 24, 44};
  for (int i = 0; i <= 5; i++)
    assert_int_equal(split_first[i], expected[i]);
  assert_int_equal(plan->items, 44 * 2);
  assert_int_equal(plan->launches, 2);
  free(plan);
}

static void test_boundary_lengths_on_every_route(void **state) {
  (void)state;
  const int32_t pages[] = {1, 16, 64, 1024};
  for (size_t i = 0; i < 4; i++) {
    pkv_shape shape = shape_of(9, 3, 64);
    shape.page_tokens = pages[i];
    const int32_t page = pages[i];
    const int32_t lengths[] = {0, 1, page - 1, page, page + 1, 32 * 1024 + 5};
    for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++) {
      const pkv_plan_options options = options_of((pkv_route)route);
      pkv_plan *plan = plan_make(&shape, &options, 6, lengths);
      const pkv_plan_stats stats = stats_of(plan, PKV_DTYPE_F32);
      assert_int_equal(stats.useful_kv_bytes, (1 + 3 * (int64_t)page + 32773) * 2 * 3 * 64 * 4);
      free(plan);
    }
  }
}

static void test_bucket_exact_launches(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(4, 2, 128);
  pkv_plan_options options = options_of(PKV_ROUTE_BUCKET_EXACT);
  options.splits = 3;
  const int32_t lengths[] = {500, 100, 500, 700, 100, 100};
  pkv_plan *plan = plan_make(&shape, &options, 6, lengths);
  const pkv_plan_launch *l = pkv_plan_at(plan, plan->launches_at);
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  assert_int_equal(plan->launches, 6);
  const int32_t rows_of[] = {1, 4, 5, 0, 2, 3}, counts[] = {3, 2, 1};
  for (int b = 0, row = 0; b < 3; row += counts[b++]) {
    assert_int_equal(l[2 * b].kind, PKV_LAUNCH_DECODE);
    assert_int_equal(l[2 * b].first, row * 3 * 2);
    assert_int_equal(l[2 * b].count, counts[b] * 3 * 2);
    assert_int_equal(l[2 * b + 1].kind, PKV_LAUNCH_MERGE);
    assert_int_equal(l[2 * b + 1].first, row * 2);
    assert_int_equal(l[2 * b + 1].count, counts[b] * 2);
    for (int i = 0; i < counts[b]; i++)
      assert_int_equal(items[(row + i) * 6].row, rows_of[row + i]);
  }
  expect_merge(plan, 0, 1, 0, 1 * 3 * 2, 3);
  assert_int_equal(plan->slot_stride, 2);
  free(plan);
}

static void test_bucket_padded_moves_padding(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(2, 1, 8);
  pkv_plan_options options = options_of(PKV_ROUTE_BUCKET_PADDED);
  options.splits = 2;
  options.bucket_tokens = 1000;
  const int32_t lengths[] = {1, 999, 1000, 1001, 0};
  pkv_plan *plan = plan_make(&shape, &options, 5, lengths);
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  assert_int_equal(plan->launches, 6); /* buckets 0, 1000, 2000 */
  const int32_t ends[] = {0, 0, 16, 32, 16, 32, 16, 32, 31, 63};
  for (int i = 0; i < 10; i++)
    assert_int_equal(items[i].unit_end, ends[i]);
  const pkv_plan_stats stats = stats_of(plan, PKV_DTYPE_F32);
  assert_int_equal(stats.useful_kv_bytes, 3001 * 2 * 8 * 4);
  assert_int_equal(stats.padded_kv_bytes, (3 * 1024 + 2016 - 3001) * 2 * 8 * 4);
  free(plan);
}

static void test_seed_window_shifts_the_first_tile(void **state) {
  (void)state;
  pkv_shape shape = shape_of(1, 1, 8);
  shape.window = 100;
  pkv_plan_options options = options_of(PKV_ROUTE_WORKQUEUE);
  options.splits = 2;
  const int32_t length = 1000; /* tokens 900 .. 999: tiles 28 .. 31 */
  pkv_plan *plan = plan_make(&shape, &options, 1, &length);
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  assert_int_equal(items[0].unit_begin, 28);
  assert_int_equal(items[0].unit_end, 30);
  assert_int_equal(items[1].unit_end, 32);
  const pkv_plan_stats stats = stats_of(plan, PKV_DTYPE_FP8_E4M3);
  assert_int_equal(stats.useful_kv_bytes, 100 * 2 * 8);
  assert_int_equal(stats.padded_kv_bytes, 28 * 2 * 8);
  free(plan);
}

static void test_workqueue_order_and_rule(void **state) {
  (void)state;
  /* 8 rows, 8 heads: 256/64 = 4 -> 4; tiles 2048/64 = 32 -> cap 24; 3 tiles -> 3 */
  const pkv_shape shape = shape_of(32, 8, 128);
  const pkv_plan_options options = options_of(PKV_ROUTE_WORKQUEUE);
  const int32_t lengths[] = {65536, 65, 0, 32768, 8192, 8193, 24576, 128};
  const int32_t splits[] = {24, 3, 0, 16, 4, 8, 12, 4};
  pkv_plan *plan = plan_make(&shape, &options, 8, lengths);
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  for (int i = 0; i < 8; i++)
    if (split_first[i + 1] - split_first[i] != splits[i])
      fail_msg("length %d: %d splits, expected %d", lengths[i], split_first[i + 1] - split_first[i],
               splits[i]);
  expect_merge(plan, 2 * 8, 2, 0, 27 * 8, 0);
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  for (int32_t i = 1; i < plan->items; i++) {
    const pkv_plan_item *a = &items[i - 1], *b = &items[i];
    const int64_t x = ((int64_t)a->row * 100 + a->split) * 100 + a->kv_head;
    const int64_t y = ((int64_t)b->row * 100 + b->split) * 100 + b->kv_head;
    if (x >= y) fail_msg("items %d and %d are out of order", i - 1, i);
  }
  free(plan);
}

/* ---- bad input and memory ---- */

typedef struct bad {
  pkv_status status;
  const char *text;
  pkv_shape shape;
  pkv_plan_options options;
} bad;

static void expect_refused(const bad *b) {
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t plan_bytes = 1, workspace_bytes = 1;
  const pkv_status size =
      pkv_plan_size(&plan_bytes, &workspace_bytes, &b->shape, &b->options, 4, 100, &err);
  if (size != b->status || !strstr(err.text, b->text))
    fail_msg("size: %s \"%s\", expected %s with \"%s\"", pkv_status_name(size), err.text,
             pkv_status_name(b->status), b->text);
  void *memory = plan_memory(8192, 0x5a);
  const int32_t lengths[] = {1, 2, 3, 4};
  const pkv_plan *plan = memory;
  const pkv_status build =
      pkv_plan_build(&plan, memory, 8192, &b->shape, &b->options, 4, lengths, &err);
  assert_int_equal(build, b->status);
  assert_null(plan);
  for (size_t i = 0; i < 8192; i++)
    assert_int_equal(((unsigned char *)memory)[i], 0x5a);
  free(memory);
}

static void test_bad_shapes(void **state) {
  (void)state;
  const struct {
    pkv_status status;
    const char *text;
    int32_t query_heads, kv_heads, head_dim, page_tokens, q_len, window;
  } cases[] = {
      {PKV_E_INVALID, "kv_heads is 0", 4, 0, 64, 16, 1, 0},
      {PKV_E_INVALID, "query_heads is 5, not a multiple of kv_heads 2", 5, 2, 64, 16, 1, 0},
      {PKV_E_INVALID, "query_heads is 0", 0, 2, 64, 16, 1, 0},
      {PKV_E_INVALID, "query_heads is -4", -4, 2, 64, 16, 1, 0},
      {PKV_E_UNSUPPORTED, "is 33 a KV head", 33, 1, 64, 16, 1, 0},
      {PKV_E_UNSUPPORTED, "head_dim is 0", 4, 2, 0, 16, 1, 0},
      {PKV_E_UNSUPPORTED, "head_dim is 60", 4, 2, 60, 16, 1, 0},
      {PKV_E_UNSUPPORTED, "head_dim is 264", 4, 2, 264, 16, 1, 0},
      {PKV_E_UNSUPPORTED, "page_tokens is 0", 4, 2, 64, 0, 1, 0},
      {PKV_E_UNSUPPORTED, "page_tokens is 1025", 4, 2, 64, 1025, 1, 0},
      {PKV_E_INVALID, "q_len is 0", 4, 2, 64, 16, 0, 0},
      {PKV_E_UNSUPPORTED, "q_len is 1048577", 4, 2, 64, 16, 1048577, 0},
      {PKV_E_UNSUPPORTED, "q_len is 2147483647", 4, 2, 64, 16, INT32_MAX, 0},
      {PKV_E_INVALID, "window is -1", 4, 2, 64, 16, 1, -1},
      {PKV_E_RANGE, "workspace is too large", 32, 1, 256, 16, 1 << 20, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    bad b = {cases[i].status, cases[i].text, PKV_SHAPE_INIT, PKV_PLAN_OPTIONS_INIT};
    b.shape.query_heads = cases[i].query_heads;
    b.shape.kv_heads = cases[i].kv_heads;
    b.shape.head_dim = cases[i].head_dim;
    b.shape.page_tokens = cases[i].page_tokens;
    b.shape.q_len = cases[i].q_len;
    b.shape.window = cases[i].window;
    if (b.status == PKV_E_RANGE) { /* 2 * 10^9 slots of 2^25 states do not fit 64 bits */
      b.options.route = PKV_ROUTE_SPLIT;
      b.options.splits = 500000000;
    }
    expect_refused(&b);
  }
  bad b = {PKV_E_INVALID, "struct_size", PKV_SHAPE_INIT, PKV_PLAN_OPTIONS_INIT};
  b.shape.struct_size = 4;
  expect_refused(&b);
}

static void test_bad_options(void **state) {
  (void)state;
  const struct {
    pkv_status status;
    const char *text;
    pkv_plan_options options;
  } cases[] = {
#define O(...) {sizeof(pkv_plan_options), __VA_ARGS__, 0, 0, 0, 0}
      {PKV_E_INVALID, "flags is 0x8", O(PKV_ROUTE_BALANCED, 8u, 0, 0, 0, 0, 0, 0)},
      {PKV_E_INVALID, "parts is -1", O(PKV_ROUTE_BALANCED, 0, -1, 0, 0, 0, 0, 0)},
      {PKV_E_INVALID, "parts is 65537", O(PKV_ROUTE_BALANCED, 0, 65537, 0, 0, 0, 0, 0)},
      {PKV_E_INVALID, "splits is -1", O(PKV_ROUTE_SPLIT, 0, 0, -1, 0, 0, 0, 0)},
      {PKV_E_INVALID, "bucket_tokens is -8", O(PKV_ROUTE_BUCKET_PADDED, 0, 0, 0, -8, 0, 0, 0)},
      {PKV_E_INVALID, "chunk_tokens is 100", O(PKV_ROUTE_BALANCED, 1u, 0, 0, 0, 100, 0, 0)},
      {PKV_E_INVALID, "chunk_tokens is -64", O(PKV_ROUTE_BALANCED, 1u, 0, 0, 0, -64, 0, 0)},
      {PKV_E_RANGE, "tile_cost", O(PKV_ROUTE_BALANCED, 1u, 0, 0, 0, 128, UINT32_MAX, 0)},
      {PKV_E_UNSUPPORTED, "workqueue", O(PKV_ROUTE_WORKQUEUE, 1u, 0, 0, 0, 0, 0, 0)},
      {PKV_E_UNSUPPORTED, "split", O(PKV_ROUTE_SPLIT, 1u, 0, 0, 0, 0, 0, 0)},
      {PKV_E_UNSUPPORTED, "bucket_exact", O(PKV_ROUTE_BUCKET_EXACT, 1u, 0, 0, 0, 0, 0, 0)},
      {PKV_E_UNSUPPORTED, "bucket_padded", O(PKV_ROUTE_BUCKET_PADDED, 1u, 0, 0, 0, 0, 0, 0)},
      {PKV_E_UNSUPPORTED, "flashinfer", O(PKV_ROUTE_FLASHINFER, 0, 0, 0, 0, 0, 0, 0)},
      {PKV_E_INVALID, "route is 8", O((pkv_route)8, 0, 0, 0, 0, 0, 0, 0)},
      {PKV_E_RANGE, "too large", O(PKV_ROUTE_SPLIT, 0, 0, INT32_MAX, 0, 0, 0, 0)},
#undef O
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const bad b = {cases[i].status, cases[i].text, shape_of(4, 2, 64), cases[i].options};
    expect_refused(&b);
  }
  bad b = {PKV_E_INVALID, "struct_size", shape_of(4, 2, 64), PKV_PLAN_OPTIONS_INIT};
  b.options.struct_size++;
  expect_refused(&b);
}

static void test_bad_arguments(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(4, 2, 64);
  const pkv_plan_options options = options_of(PKV_ROUTE_BALANCED);
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t a, b;
  const int32_t negative[] = {5, -3};
  unsigned char *memory = plan_memory(8192, 0);
  const pkv_plan *plan;
  assert_int_equal(pkv_plan_size(NULL, &b, &shape, &options, 1, 1, &err), PKV_E_INVALID);
  assert_int_equal(pkv_plan_size(&a, NULL, &shape, &options, 1, 1, &err), PKV_E_INVALID);
  assert_int_equal(pkv_plan_size(&a, &b, NULL, &options, 1, 1, &err), PKV_E_INVALID);
  assert_int_equal(pkv_plan_size(&a, &b, &shape, NULL, 1, 1, &err), PKV_E_INVALID);
  assert_int_equal(pkv_plan_size(&a, &b, &shape, &options, -1, 1, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "max_rows is -1"));
  assert_int_equal(pkv_plan_size(&a, &b, &shape, &options, 1, -1, NULL), PKV_E_INVALID);
  assert_int_equal(pkv_plan_build(NULL, memory, 8192, &shape, &options, 0, NULL, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_plan_build(&plan, NULL, 8192, &shape, &options, 0, NULL, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_plan_build(&plan, memory + 8, 8184, &shape, &options, 0, NULL, &err),
                   PKV_E_INVALID);
  assert_non_null(strstr(err.text, "aligned"));
  assert_int_equal(pkv_plan_build(&plan, memory, 8192, &shape, &options, -2, negative, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_plan_build(&plan, memory, 8192, &shape, &options, 2, NULL, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_plan_build(&plan, memory, 8192, &shape, &options, 2, negative, &err),
                   PKV_E_INVALID);
  assert_non_null(strstr(err.text, "seq_len[1] is -3"));
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, NULL, PKV_DTYPE_F16, &err), PKV_E_INVALID);
  assert_int_equal(
      pkv_plan_get_stats(&stats, (const pkv_plan *)(void *)memory, PKV_DTYPE_F16, &err),
      PKV_E_INVALID);
  free(memory);
}

static void test_memory_is_exact(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(9, 3, 64);
  const int32_t lengths[] = {1000, 0, 77, 4096, 77, 30000};
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++)
    for (uint32_t flags = 0; flags <= (route == PKV_ROUTE_BALANCED ? 3u : 0u); flags++) {
      pkv_plan_options options = options_of((pkv_route)route);
      options.flags = flags;
      pkv_plan *first = plan_make(&shape, &options, 6, lengths);
      const size_t need = (size_t)first->plan_bytes;
      unsigned char *memory = plan_memory(need, 0x5a);
      pkv_error err = {PKV_OK, NULL, {0}};
      const pkv_plan *plan;
      assert_int_equal(pkv_plan_build(&plan, memory, need - 1, &shape, &options, 6, lengths, &err),
                       PKV_E_TOO_SMALL);
      char text[64];
      snprintf(text, sizeof text, "needs %zu bytes, has %zu", need, need - 1);
      assert_non_null(strstr(err.text, text));
      assert_int_equal(memory[0], 0x5a);
      assert_int_equal(pkv_plan_build(&plan, memory, need, &shape, &options, 6, lengths, &err),
                       PKV_OK);
      for (size_t i = need; i < need + 64; i++)
        assert_int_equal(memory[i], 0x5a);
      assert_memory_equal(memory, first, need); /* the other one was built over 0xa5 */
      assert_int_equal(stats_of(plan, PKV_DTYPE_F16).plan_bytes, need);
      free(memory);
      free(first);
    }
}

/* pkv_plan_check must see any change that matters: each 4-byte word but the profile's costs. */
static void test_check_finds_changed_words(void **state) {
  (void)state;
  const pkv_shape shape = shape_of(6, 2, 64);
  const int32_t lengths[] = {1000, 0, 77, 4096, 77, 3000};
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++) {
    pkv_plan_options options = options_of((pkv_route)route);
    options.splits = 4;
    pkv_plan *plan = plan_make(&shape, &options, 6, lengths);
    const size_t words = (size_t)plan->plan_bytes / 4;
    int missed = 0;
    for (size_t i = 0; i < words; i++) {
      uint32_t word;
      memcpy(&word, (unsigned char *)plan + 4 * i, 4);
      const uint32_t changed[] = {word + 1, word - 1, 0x80000000u, 0x7fffffffu, 0};
      for (size_t c = 0; c < 5; c++) {
        if (changed[c] == word) continue;
        memcpy((unsigned char *)plan + 4 * i, &changed[c], 4);
        if (pkv_plan_check(plan, words * 4, NULL) == PKV_OK) missed++;
      }
      memcpy((unsigned char *)plan + 4 * i, &word, 4);
    }
    assert_int_equal(pkv_plan_check(plan, words * 4, NULL), PKV_OK);
    /* padding, page_tokens, head shape within limits, lengths inside the same tile stay valid plans
     */
    if (missed > (int)words * 2) fail_msg("%d of %zu changes were not seen", missed, words * 5);
    assert_int_equal(pkv_plan_check(plan, words * 4 - 1, NULL), PKV_E_FORMAT);
    free(plan);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_cut_in_the_middle),
      cmocka_unit_test(test_cut_rounds_to_the_nearest_unit),
      cmocka_unit_test(test_cut_near_the_end_moves_to_the_next_segment),
      cmocka_unit_test(test_one_segment_cut_often),
      cmocka_unit_test(test_empty_rows_cost_little),
      cmocka_unit_test(test_equal_cursors_make_empty_parts),
      cmocka_unit_test(test_batch_invariant_slots),
      cmocka_unit_test(test_window_and_query_length),
      cmocka_unit_test(test_zero_rows_and_zero_lengths),
      cmocka_unit_test(test_even_rows_stay_whole),
      cmocka_unit_test(test_cut_position_is_exact),
      cmocka_unit_test(test_fixed_splits_over_odd_lengths),
      cmocka_unit_test(test_boundary_lengths_on_every_route),
      cmocka_unit_test(test_bucket_exact_launches),
      cmocka_unit_test(test_bucket_padded_moves_padding),
      cmocka_unit_test(test_seed_window_shifts_the_first_tile),
      cmocka_unit_test(test_workqueue_order_and_rule),
      cmocka_unit_test(test_bad_shapes),
      cmocka_unit_test(test_bad_options),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_memory_is_exact),
      cmocka_unit_test(test_check_finds_changed_words),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
