/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seed's published counters on its held-out B8 traces, from the planner alone (no executor):
 * launches a step and merge-state traffic of exact-length buckets against the work queue.
 * docs/notes/seed-counters.md has the table and says where the split counts come from.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pkv/trace.h"
#include "support/plan_walk.h"

#define STEPS 48 /* as published */

typedef struct counters {
  double rows, distinct, launches, tasks, merge_mib, useful_mib, padded_mib;
} counters;

static int32_t count_distinct(const int32_t *lengths, int32_t rows) {
  int32_t distinct = 0;
  for (int32_t i = 0; i < rows; i++) {
    int32_t j = 0;
    while (lengths[j] != lengths[i])
      j++;
    distinct += i == j;
  }
  return distinct;
}

/* Means over the first STEPS steps of a trace: 32 query heads, 8 KV heads, head_dim 128, f16. */
static counters run(pkv_trace_kind kind, uint64_t seed, pkv_route route, int32_t splits) {
  pkv_trace_options trace_options = PKV_TRACE_OPTIONS_INIT;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_trace *trace = NULL;
  counters sum = {0, 0, 0, 0, 0, 0, 0};
  trace_options.kind = kind;
  trace_options.seed = seed;
  assert_int_equal(pkv_trace_create(&trace, &trace_options, NULL), PKV_OK);
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  options.route = route;
  options.splits = splits;
  options.parts = 112;
  int32_t step = -1;
  for (int i = 0; i < STEPS; i++) {
    int32_t request[8], lengths[8];
    step = pkv_trace_next_step(trace, step + 1);
    assert_true(step >= 0);
    const int32_t rows = pkv_trace_step(request, lengths, trace, step);
    pkv_plan *plan = plan_make(&shape, &options, rows, lengths);
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, NULL), PKV_OK);
    sum.rows += rows;
    sum.distinct += count_distinct(lengths, rows);
    sum.launches += stats.launches;
    sum.tasks += (double)stats.tasks;
    sum.merge_mib += (double)stats.merge_state_bytes / 1048576;
    sum.useful_mib += (double)stats.useful_kv_bytes / 1048576;
    sum.padded_mib += (double)stats.padded_kv_bytes / 1048576;
    free(plan);
  }
  pkv_trace_destroy(trace);
  double *all = &sum.rows;
  for (size_t i = 0; i < sizeof sum / sizeof(double); i++)
    all[i] /= STEPS;
  return sum;
}

static void expect_near(const char *what, double got, double expected, double tolerance) {
  if (fabs(got - expected) > tolerance)
    fail_msg("%s is %.4f, expected %.4f within %.4f", what, got, expected, tolerance);
}

static void test_bimodal_b8(void **state) {
  (void)state;
  const uint64_t seed = PKV_TRACE_SEED_HELD_OUT;
  const counters exact = run(PKV_TRACE_BIMODAL, seed, PKV_ROUTE_BUCKET_EXACT, 32);
  const counters queue = run(PKV_TRACE_BIMODAL, seed, PKV_ROUTE_WORKQUEUE, 20);
  expect_near("active rows", exact.rows, 8.00, 0);
  expect_near("useful KV, MiB", exact.useful_mib, 550.5, 0.0501);
  expect_near("bucket_exact launches", exact.launches, 16.00, 0);
  expect_near("workqueue launches", queue.launches, 2.00, 0);
  expect_near("bucket_exact merge state, MiB", exact.merge_mib, 4.06, 0.005);
  expect_near("workqueue merge state, MiB", queue.merge_mib, 2.54, 0.005);
  expect_near("merge state saved, %", 100 * (1 - queue.merge_mib / exact.merge_mib), 37, 0.6);
  expect_near("bucket_exact CTAs a multiprocessor", exact.tasks / 28, 73.1, 0.05);
  expect_near("workqueue CTAs a multiprocessor", queue.tasks / 28, 45.7, 0.05);
}

static void test_every_held_out_seed(void **state) {
  (void)state;
  const pkv_trace_kind kinds[] = {PKV_TRACE_BIMODAL, PKV_TRACE_UNIFORM, PKV_TRACE_ZIPF};
  print_message("trace    seed      route          rows  launches  tasks  state MiB  useful MiB  "
                "padded MiB\n");
  for (int k = 0; k < 3; k++)
    for (uint64_t i = 0; i < PKV_TRACE_HELD_OUT_SEEDS; i++) {
      const uint64_t seed = PKV_TRACE_SEED_HELD_OUT + i;
      for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++) {
        const int32_t splits = route == PKV_ROUTE_WORKQUEUE ? 20 : 32;
        const counters c = run(kinds[k], seed, (pkv_route)route, splits);
        if (kinds[k] == PKV_TRACE_BIMODAL && i == 0)
          print_message("%-8s %llu  %-14s %.2f  %5.2f  %7.1f  %9.2f  %10.1f  %10.2f\n",
                        pkv_trace_kind_name(kinds[k]), (unsigned long long)seed,
                        pkv_route_name((pkv_route)route), c.rows, c.launches, c.tasks, c.merge_mib,
                        c.useful_mib, c.padded_mib);
        if (route == PKV_ROUTE_BUCKET_EXACT)
          expect_near("launches", c.launches, 2 * c.distinct, 0);
        else if (route == PKV_ROUTE_BUCKET_PADDED)
          assert_true(c.launches <= 2 * c.distinct);
        else
          expect_near("launches", c.launches, route == PKV_ROUTE_BALANCED ? 1 : 2, 0);
        if (route != PKV_ROUTE_BALANCED)
          expect_near("states", c.merge_mib, c.rows * 32 * splits * 520 / 1048576, 1e-9);
      }
    }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bimodal_b8),
      cmocka_unit_test(test_every_held_out_seed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
