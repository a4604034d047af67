/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random and adversarial batches through every route: each unit read once, the sizes promised for
 * the limits suffice, parts cost the same, and the same input gives the same bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "plan/plan_core.h"
#include "support/plan_walk.h"

#define MOST_ROWS 4096

typedef enum pattern { ALL_ZERO, ONE_HUGE, EQUAL, MIXED, TINY, PATTERNS } pattern;

static int32_t random_length(pkv_rng *rng, pattern kind, int32_t row, int32_t limit) {
  switch (kind) {
  case ALL_ZERO:
    return 0;
  case ONE_HUGE:
    return row == 1 ? limit : (int32_t)pkv_rng_range(rng, 0, limit < 40 ? limit : 40);
  case EQUAL:
    return limit;
  case TINY:
    return (int32_t)pkv_rng_range(rng, 0, limit < 3 ? limit : 3);
  default: {
    const int32_t top = limit >> pkv_rng_below(rng, 12);
    return (int32_t)pkv_rng_range(rng, 0, top);
  }
  }
}

static void random_case(pkv_rng *rng, pkv_shape *shape, pkv_plan_options *options) {
  static const int32_t windows[] = {0, 0, 0, 1, 63, 64, 65, 1000};
  static const int32_t groups[] = {1, 2, 3, 4, 8, 32};
  *shape = (pkv_shape)PKV_SHAPE_INIT;
  *options = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  shape->kv_heads = (int32_t)pkv_rng_range(rng, 1, 8);
  shape->query_heads = shape->kv_heads * groups[pkv_rng_below(rng, 6)];
  shape->head_dim = 8 * (int32_t)pkv_rng_range(rng, 1, 32);
  shape->page_tokens = 1 << pkv_rng_below(rng, 11);
  shape->q_len = pkv_rng_below(rng, 2) ? 1 : (int32_t)pkv_rng_range(rng, 1, 16);
  shape->window = windows[pkv_rng_below(rng, 8)];
  options->route = (pkv_route)pkv_rng_range(rng, PKV_ROUTE_AUTO, PKV_ROUTE_BALANCED);
  options->parts = (int32_t)pkv_rng_range(rng, 1, 1 << pkv_rng_below(rng, 11));
  options->splits = (int32_t)pkv_rng_below(rng, 33);
  options->bucket_tokens = (int32_t)pkv_rng_range(rng, 0, 5000);
  options->chunk_tokens = 64 * (int32_t)pkv_rng_below(rng, 9);
  options->tile_cost = (uint32_t)pkv_rng_below(rng, 100);
  options->segment_cost = (uint32_t)pkv_rng_below(rng, 1000);
  if (options->route == PKV_ROUTE_BALANCED || options->route == PKV_ROUTE_AUTO)
    options->flags = (uint32_t)pkv_rng_below(rng, 4);
}

/* Parts cost what an equal share costs, but for rounding to units and overheads. */
static void expect_equal_parts(const pkv_plan *plan) {
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, NULL), PKV_OK);
  if (plan->route != PKV_ROUTE_BALANCED) return;
  int64_t used = plan->parts;
  if (plan->flags & PKV_PLAN_FEWER_PARTS) used -= used / 32 * 5;
  const int64_t most = stats.total_cost / used + 1 + (int64_t)plan->unit_cost + plan->segment_cost;
  if (stats.max_part_cost > most)
    fail_msg("the largest part costs %lld of %lld in %d parts, at most %lld",
             (long long)stats.max_part_cost, (long long)stats.total_cost, plan->parts,
             (long long)most);
  if (stats.tasks > plan->parts) fail_msg("%lld tasks", (long long)stats.tasks);
}

static void expect_closed_form(const pkv_plan *plan, int32_t longest) {
  if (plan->route != PKV_ROUTE_BALANCED) return;
  const int64_t cuts = plan->parts - 1;
  const int64_t units = (longest + (int64_t)plan->unit_tokens - 1) / plan->unit_tokens;
  const int64_t slots = plan->flags & PKV_PLAN_BATCH_INVARIANT ? cuts * units : 2 * cuts;
  if (plan->slots > slots || plan->merges > cuts)
    fail_msg("%d parts: %d slots, at most %lld; %d merges", plan->parts, plan->slots,
             (long long)slots, plan->merges);
}

static void test_random_batches(void **state) {
  (void)state;
  static int32_t lengths[MOST_ROWS];
  pkv_error err = {PKV_OK, NULL, {0}};
  for (uint64_t seed = 0; seed < 1500; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    pkv_shape shape;
    pkv_plan_options options;
    random_case(&rng, &shape, &options);
    const int32_t limit = (int32_t)pkv_rng_range(&rng, 0, 1 << pkv_rng_below(&rng, 18));
    const int32_t most = 1 << pkv_rng_below(&rng, seed % 50 == 0 ? 13 : 8);
    const int32_t rows = (int32_t)pkv_rng_range(&rng, 0, most < MOST_ROWS ? most : MOST_ROWS);
    const pattern kind = (pattern)pkv_rng_below(&rng, PATTERNS);
    int32_t longest = 0;
    for (int32_t row = 0; row < rows; row++) {
      lengths[row] = random_length(&rng, kind, row, limit);
      if (lengths[row] > longest) longest = lengths[row];
    }
    pkv_plan *plan = plan_make(&shape, &options, rows, lengths);
    expect_equal_parts(plan);
    expect_closed_form(plan, longest);
    /* Wider limits must be enough too: the caller sizes once. */
    size_t bytes, workspace;
    const int32_t max_rows = rows + (int32_t)pkv_rng_below(&rng, 9);
    if (pkv_plan_size(&bytes, &workspace, &shape, &options, max_rows, limit, &err))
      fail_msg("seed %llu: %s", (unsigned long long)seed, err.text);
    if ((size_t)plan->plan_bytes > bytes || (size_t)plan->workspace_bytes > workspace)
      fail_msg("seed %llu: %lld and %lld bytes, promised %zu and %zu", (unsigned long long)seed,
               (long long)plan->plan_bytes, (long long)plan->workspace_bytes, bytes, workspace);
    void *memory = plan_memory(bytes, 0x17);
    const pkv_plan *again;
    assert_int_equal(pkv_plan_build(&again, memory, bytes, &shape, &options, rows, lengths, &err),
                     PKV_OK);
    assert_memory_equal(again, plan, (size_t)plan->plan_bytes);
    for (size_t i = (size_t)plan->plan_bytes; i < bytes + 64; i++)
      if (((unsigned char *)memory)[i] != 0x17)
        fail_msg("seed %llu: byte %zu after the plan changed", (unsigned long long)seed, i);
    free(memory);
    free(plan);
  }
}

/* The iterator that executors use sees what the cursors say. */
static void test_pieces_are_the_cursors(void **state) {
  (void)state;
  int32_t lengths[40];
  for (uint64_t seed = 0; seed < 200; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed + 7000);
    pkv_shape shape;
    pkv_plan_options options;
    random_case(&rng, &shape, &options);
    options.route = PKV_ROUTE_BALANCED;
    for (int32_t row = 0; row < 40; row++)
      lengths[row] = random_length(&rng, MIXED, row, 3000);
    pkv_plan *plan = plan_make(&shape, &options, 40, lengths);
    const pkv_plan_core core = pkv_plan_core_of(plan);
    const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
    const pkv_plan_merge *merges = pkv_plan_at(plan, plan->merges_at);
    unsigned char *slots = calloc((size_t)plan->slots + 1, 1);
    int64_t units = 0, expected = 0, whole = 0;
    for (int32_t p = 0; p < plan->parts; p++) {
      pkv_plan_cursor at = cursors[p];
      pkv_plan_piece piece;
      while (pkv_plan_next_piece(&piece, &core, lengths, &at, &cursors[p + 1])) {
        units += piece.unit_end - piece.unit_begin;
        whole += piece.whole;
        if (piece.whole) continue;
        const pkv_plan_merge *merge = &merges[piece.merge];
        assert_true(merge->row == piece.row && merge->kv_head == piece.kv_head);
        const int32_t count = core.batch_invariant ? piece.unit_end - piece.unit_begin : 1;
        for (int32_t i = 0; i < count; i++) {
          const int32_t slot = piece.slot + i;
          assert_in_range(slot, merge->first_slot, merge->first_slot + merge->count - 1);
          assert_int_equal(slots[slot]++, 0);
          if (core.batch_invariant)
            assert_int_equal(slot - merge->first_slot, piece.unit_begin + i);
        }
      }
      assert_memory_equal(&at.row, &cursors[p + 1].row, 3 * sizeof(int32_t));
    }
    for (int32_t i = 0; i < plan->slots; i++)
      assert_int_equal(slots[i], 1);
    for (int32_t row = 0; row < 40; row++)
      expected += (int64_t)pkv_core_units(&core, lengths[row]) * core.kv_heads;
    assert_int_equal(units, expected);
    assert_int_equal(whole + plan->merges, 40 * core.kv_heads);
    free(slots);
    free(plan);
  }
}

/* What balancing is for: one long row among many short ones, in as many parts as there are cores.
 */
static void test_one_long_row_is_shared_out(void **state) {
  (void)state;
  static int32_t lengths[33];
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.parts = 264;
  for (int i = 0; i < 33; i++)
    lengths[i] = i == 17 ? 65536 : 1024;
  pkv_plan *plan = plan_make(&shape, &options, 33, lengths);
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, NULL), PKV_OK);
  if (stats.max_part_cost * 264 > stats.total_cost * 6 / 5)
    fail_msg("largest part %lld of %lld in 264", (long long)stats.max_part_cost,
             (long long)stats.total_cost);
  free(plan);
}

static void test_huge_lengths(void **state) {
  (void)state;
  const int32_t lengths[] = {INT32_MAX, 0, INT32_MAX, 1};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 8;
  shape.kv_heads = 8;
  shape.head_dim = 256;
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = (pkv_route)route;
    options.tile_cost = 1000;
    pkv_plan *plan = plan_make(&shape, &options, 4, lengths);
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F32, NULL), PKV_OK);
    assert_int_equal(stats.useful_kv_bytes, (2 * (int64_t)INT32_MAX + 1) * 2 * 8 * 256 * 4);
    expect_equal_parts(plan);
    free(plan);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_batches),
      cmocka_unit_test(test_pieces_are_the_cursors),
      cmocka_unit_test(test_one_long_row_is_shared_out),
      cmocka_unit_test(test_huge_lengths),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
