/* SPDX-License-Identifier: Apache-2.0 */
/* Plans whose route a policy chooses: the bytes of the route it names, and always within the size
 * that was said for the limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "pkv/profile.h"

#define MOST_ROWS 40
#define MOST_LEN  70000

static pkv_error err;

static pkv_shape llama(void) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  return shape;
}

/* A model in which split wins for few tokens, and balanced beyond. */
static void fill_model(pkv_cost_model *m) {
  memset(m, 0, sizeof *m);
  m->struct_size = sizeof *m;
  m->parts = 96;
  m->cost[PKV_ROUTE_SPLIT].points = m->cost[PKV_ROUTE_BALANCED].points = 1;
  m->cost[PKV_ROUTE_SPLIT].attend[PKV_COST_BYTES] = 2;
  m->cost[PKV_ROUTE_BALANCED].attend[PKV_COST_BYTES] = 1;
  m->cost[PKV_ROUTE_BALANCED].attend[PKV_COST_ONE] = 100;
}

static void test_any_batch_fits(void **state) {
  const pkv_shape shape = llama();
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_cost_model model;
  pkv_profile profile = PKV_PROFILE_INIT;
  pkv_rng rng;
  size_t bytes, workspace;
  int32_t met[8] = {0};
  (void)state;
  fill_model(&model);
  profile.model = &model;
  pkv_rng_init(&rng, 5);
  assert_int_equal(pkv_plan_size_policy(&bytes, &workspace, &shape, &options, &profile, MOST_ROWS,
                                        MOST_LEN, &err),
                   PKV_OK);
  unsigned char *memory = aligned_alloc(64, bytes), *same = aligned_alloc(64, bytes);
  assert_non_null(memory);
  assert_non_null(same);
  for (int32_t n = 0; n < 600; n++) {
    const pkv_policy policy = (pkv_policy)(1 + n % 3);
    const int32_t rows = (int32_t)pkv_rng_range(&rng, 0, n % 2 ? 1 : MOST_ROWS);
    const int64_t longest = n % 5 ? MOST_LEN : 300;
    int32_t lengths[MOST_ROWS];
    pkv_choice choice = PKV_CHOICE_INIT;
    const pkv_plan *plan, *expected;
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    for (int32_t r = 0; r < rows; r++)
      lengths[r] = (int32_t)pkv_rng_range(&rng, 0, longest);
    if (pkv_plan_build_policy(&plan, &choice, memory, bytes, &shape, &options, policy, &profile,
                              PKV_DTYPE_F16, rows, lengths, &err))
      fail_msg("try %d, %s: %s", n, pkv_policy_name(policy), err.text);
    pkv_plan_options o = options;
    o.route = choice.route;
    o.splits = choice.splits;
    o.parts = model.parts;
    if (pkv_plan_build(&expected, same, bytes, &shape, &o, rows, lengths, &err))
      fail_msg("try %d: %s", n, err.text);
    assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, &err), PKV_OK);
    assert_int_equal(stats.route, choice.route);
    if (stats.workspace_bytes > workspace)
      fail_msg("try %d, %s: a workspace of %zu, said were %zu", n, pkv_route_name(choice.route),
               stats.workspace_bytes, workspace);
    assert_memory_equal(memory, same, stats.plan_bytes);
    met[choice.route]++;
  }
  /* the three policies together name these */
  if (!met[PKV_ROUTE_SPLIT] || !met[PKV_ROUTE_WORKQUEUE] || !met[PKV_ROUTE_BALANCED])
    fail_msg("split %d, workqueue %d, balanced %d times", met[PKV_ROUTE_SPLIT],
             met[PKV_ROUTE_WORKQUEUE], met[PKV_ROUTE_BALANCED]);
  free(memory);
  free(same);
}

static void test_invariant_is_balanced(void **state) {
  const pkv_shape shape = llama();
  const int32_t lengths[] = {30000};
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_choice choice = PKV_CHOICE_INIT;
  const pkv_plan *plan;
  size_t bytes, workspace;
  (void)state;
  options.flags = PKV_PLAN_BATCH_INVARIANT;
  assert_int_equal(pkv_plan_size_policy(&bytes, &workspace, &shape, &options, NULL, 1, 30000, &err),
                   PKV_OK);
  void *memory = aligned_alloc(64, bytes);
  assert_int_equal(pkv_plan_build_policy(&plan, &choice, memory, bytes, &shape, &options,
                                         PKV_POLICY_STATIC, NULL, PKV_DTYPE_F16, 1, lengths, &err),
                   PKV_OK);
  assert_int_equal(choice.wanted, PKV_ROUTE_SPLIT);
  assert_int_equal(choice.route, PKV_ROUTE_BALANCED);
  if (!strstr(choice.reason, "split is not available")) fail_msg("reason: %s", choice.reason);
  free(memory);
}

static void test_refusals(void **state) {
  const pkv_shape shape = llama();
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_profile profile = PKV_PROFILE_INIT;
  pkv_choice choice = PKV_CHOICE_INIT;
  const pkv_plan *plan;
  size_t bytes, workspace;
  (void)state;
  profile.routes = 1u << PKV_ROUTE_FLASHINFER;
  assert_int_equal(pkv_plan_size_policy(&bytes, &workspace, &shape, &options, &profile, 1, 1, &err),
                   PKV_E_UNSUPPORTED);
  profile.routes = 0;
  assert_int_equal(pkv_plan_build_policy(&plan, &choice, NULL, 0, &shape, &options,
                                         PKV_POLICY_CALIBRATED, &profile, PKV_DTYPE_F16, 0, NULL,
                                         &err),
                   PKV_E_INVALID);
  if (!strstr(err.text, "cost model")) fail_msg("text: %s", err.text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_any_batch_fits),
      cmocka_unit_test(test_invariant_is_balanced),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
