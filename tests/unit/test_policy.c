/* SPDX-License-Identifier: Apache-2.0 */
/* The policies against the seed's rules, at their boundaries, and estimates worked out by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "policy/policy.h"
#include "policy/seed_rule.h"

#define MOST_ROWS       64
#define WITH_FLASHINFER 0xbeu

static pkv_shape llama(int32_t query_heads) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = query_heads;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  return shape;
}

/* `rows` rows: the first of `longest` tokens, the others of `rest`. */
static pkv_choice choose(pkv_policy policy, pkv_route fixed, int32_t query_heads, int32_t rows,
                         int32_t longest, int32_t rest, uint32_t routes) {
  const pkv_shape shape = llama(query_heads);
  pkv_profile profile = PKV_PROFILE_INIT;
  pkv_choice choice = PKV_CHOICE_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  int32_t lengths[MOST_ROWS];
  assert_true(rows <= MOST_ROWS);
  for (int32_t row = 0; row < rows; row++)
    lengths[row] = row == 0 ? longest : rest;
  profile.routes = routes;
  if (pkv_policy_choose(&choice, policy, fixed, &shape, PKV_DTYPE_F16, rows, lengths, &profile,
                        &err))
    fail_msg("choose: %s", err.text);
  return choice;
}

static void expect_us(const pkv_choice *choice, double expected) {
  if (fabs(choice->predicted_us - expected) > 0.01)
    fail_msg("%s: predicted %.4f us, expected %.4f", choice->reason, choice->predicted_us,
             expected);
}

static void expect_text(const pkv_choice *choice, const char *text) {
  if (!strstr(choice->reason, text)) fail_msg("\"%s\" does not say \"%s\"", choice->reason, text);
}

static void test_split_rule(void **state) {
  (void)state;
  const struct {
    int32_t rows, kv_heads, tiles, splits;
  } cases[] = {
      {1, 8, 256, 32},  /* 256/8 = 32 against 4 */
      {1, 8, 2048, 32}, /* 32 against 32 */
      {1, 8, 2049, 36}, /* ceil(32.02) = 33 -> 36 */
      {1, 8, 4096, 48}, /* 64, cap 48 */
      {1, 1, 4096, 48}, /* 256, cap 48 */
      {2, 8, 64, 16},   /* 16 */
      {2, 8, 4096, 40}, /* cap 40 */
      {3, 8, 64, 12},   /* ceil(10.67) = 11 -> 12 */
      {3, 8, 4096, 48}, /* "otherwise" */
      {4, 8, 4096, 32}, {7, 8, 4096, 32}, {8, 8, 4096, 24}, {8, 8, 512, 8},
      {8, 8, 256, 4},   {8, 8, 257, 8},   {100, 8, 10, 4}, /* 1 -> 4 */
      {100, 8, 4, 4},   {100, 8, 3, 3},   {100, 8, 1, 1},   {100, 8, 0, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int32_t got = pkv_seed_row_splits(cases[i].rows, cases[i].kv_heads, cases[i].tiles);
    if (got != cases[i].splits)
      fail_msg("%d rows, %d heads, %d tiles: %d splits, expected %d", cases[i].rows,
               cases[i].kv_heads, cases[i].tiles, got, cases[i].splits);
  }
  assert_int_equal(pkv_seed_bucket_splits(1, 8, 2048, 2048), 32);
  assert_int_equal(pkv_seed_bucket_splits(1, 8, 3456, 3456), 36); /* 36 exactly */
  assert_int_equal(pkv_seed_bucket_splits(1, 8, 9000, 9000), 48);
  assert_int_equal(pkv_seed_bucket_splits(8, 8, 64, 2), 2);
}

static void test_static_thresholds(void **state) {
  (void)state;
  const struct {
    int32_t query_heads, rows, longest;
    pkv_route wanted;
    int32_t splits;
  } cases[] = {
      {32, 1, 8192, PKV_ROUTE_SPLIT, 32},      {32, 1, 8191, PKV_ROUTE_FLASHINFER, 0},
      {32, 1, 65536, PKV_ROUTE_SPLIT, 32},     {32, 8, 16384, PKV_ROUTE_WORKQUEUE, 24},
      {32, 8, 16383, PKV_ROUTE_FLASHINFER, 0}, {32, 64, 20000, PKV_ROUTE_WORKQUEUE, 24},
      {32, 4, 65536, PKV_ROUTE_FLASHINFER, 0}, {32, 2, 65536, PKV_ROUTE_FLASHINFER, 0},
      {32, 7, 65536, PKV_ROUTE_FLASHINFER, 0}, {64, 8, 65536, PKV_ROUTE_FLASHINFER, 0},
      {8, 1, 65536, PKV_ROUTE_FLASHINFER, 0},  {32, 0, 0, PKV_ROUTE_FLASHINFER, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const pkv_choice c = choose(PKV_POLICY_STATIC, PKV_ROUTE_AUTO, cases[i].query_heads,
                                cases[i].rows, cases[i].longest, 100, WITH_FLASHINFER);
    if (c.wanted != cases[i].wanted || c.route != c.wanted || c.splits != cases[i].splits)
      fail_msg("%d heads, %d rows, %d tokens: %s, %s with %d splits, expected %s with %d (%s)",
               cases[i].query_heads, cases[i].rows, cases[i].longest, pkv_route_name(c.wanted),
               pkv_route_name(c.route), c.splits, pkv_route_name(cases[i].wanted), cases[i].splits,
               c.reason);
  }
  const pkv_choice c =
      choose(PKV_POLICY_STATIC, PKV_ROUTE_AUTO, 32, 8, 16384, 100, WITH_FLASHINFER);
  expect_text(&c, "8 >= 8 rows, longest 16384 >= 16384: workqueue");
}

static void test_roofline_one_row(void **state) {
  (void)state;
  /* 65536 * 4096 B = 268435456 B: 888.8591 us at 302 GB/s; 32 splits: 532480 B of states 1.7632 */
  pkv_choice c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 1, 65536, 0, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_SPLIT);
  assert_int_equal(c.splits, 32);
  expect_us(&c, 888.8591 + 1.7632 + 16);
  expect_text(&c, "flashinfer 12452.0 us"); /* 8 CTAs on 28 SMs: 14 times, and one launch */
  expect_text(&c, "split with 32 splits 906.6 us");
  c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 1, 16384, 0, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_SPLIT);
  expect_us(&c, 222.2148 + 1.7632 + 16);
  c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 1, 16383, 0, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
  expect_text(&c, "16383 < 16384");
}

static void test_roofline_many_rows(void **state) {
  (void)state;
  /* 8 * 16384 tokens: 1777.7183 us; flashinfer 64 CTAs on 28 SMs: 1.75 times; ours 8 splits */
  pkv_choice c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 8, 16384, 16384, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_WORKQUEUE);
  assert_int_equal(c.splits, 0);
  expect_us(&c, 1777.7183 + 1064960 / 302e3 + 16);
  expect_text(&c, "flashinfer 3119.0 us");
  /* 64 rows fill the GPU without splits: one launch and no states win */
  c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 64, 16384, 16384, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
  expect_us(&c, 14221.7460 + 8);
  for (int32_t rows = 2; rows < 8; rows++) {
    c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, rows, 65536, 65536, WITH_FLASHINFER);
    assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
  }
  c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 64, 8, 65536, 65536, WITH_FLASHINFER);
  assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
  expect_text(&c, "group 8 is not 4");
}

static void test_missing_routes_are_replaced(void **state) {
  (void)state;
  /* 112 parts, 111 cuts in 512 segments: 222 slots of 4 states of 520 B */
  pkv_choice c = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 64, 16384, 16384, 0);
  assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
  assert_int_equal(c.route, PKV_ROUTE_BALANCED);
  assert_int_equal(c.splits, 0);
  expect_us(&c, 14221.7460 + 222 * 4 * 520 / 302e3 + 8);
  expect_text(&c, "flashinfer is not available: balanced, 14231.3 us");
  const pkv_route only[] = {PKV_ROUTE_BUCKET_EXACT, PKV_ROUTE_BUCKET_PADDED, PKV_ROUTE_SPLIT,
                            PKV_ROUTE_WORKQUEUE};
  for (size_t i = 0; i < 4; i++) {
    c = choose(PKV_POLICY_STATIC, PKV_ROUTE_AUTO, 32, 4, 4096, 4000, 1u << only[i]);
    assert_int_equal(c.wanted, PKV_ROUTE_FLASHINFER);
    if (c.route != only[i])
      fail_msg("%s instead of %s", pkv_route_name(c.route), pkv_route_name(only[i]));
    expect_text(&c, "not available");
  }
  c = choose(PKV_POLICY_FIXED, PKV_ROUTE_SHARED, 32, 4, 4096, 4000, 0);
  assert_int_equal(c.wanted, PKV_ROUTE_SHARED);
  assert_int_equal(c.route, PKV_ROUTE_BALANCED);
}

static void test_fixed_and_bucket_estimates(void **state) {
  (void)state;
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_FLASHINFER; route++) {
    const pkv_choice c = choose(PKV_POLICY_FIXED, (pkv_route)route, 9 * 8, 3, 70, 5, 0xfeu);
    assert_int_equal(c.wanted, route);
    assert_int_equal(c.route, route);
    expect_text(&c, pkv_route_name((pkv_route)route));
  }
  pkv_choice c = choose(PKV_POLICY_FIXED, PKV_ROUTE_AUTO, 32, 1, 100, 0, 0);
  assert_int_equal(c.route, PKV_ROUTE_BALANCED);
  /* two distinct lengths: 4 launches; bucket rule: 4 splits; 2 rows * 8 * 4 on 28 SMs: 2.2857 */
  c = choose(PKV_POLICY_FIXED, PKV_ROUTE_BUCKET_EXACT, 32, 2, 512, 128, 0);
  expect_us(&c, 640 * 4096 / 302e3 * 4 / (64.0 / 28) + 2 * 32 * 4 * 520 / 302e3 + 32);
  /* one bucket of 4096 a row */
  c = choose(PKV_POLICY_FIXED, PKV_ROUTE_BUCKET_PADDED, 32, 2, 512, 128, 0);
  expect_us(&c, 8192 * 4096 / 302e3 * 4 / (64.0 / 28) + 2 * 32 * 4 * 520 / 302e3 + 16);
}

static void test_window_and_profile_numbers(void **state) {
  (void)state;
  pkv_shape shape = llama(32);
  shape.window = 1000;
  shape.q_len = 3;
  pkv_profile profile = PKV_PROFILE_INIT;
  profile.read_gb_s = 1000;
  profile.launch_us = 2;
  profile.sms = 1;
  profile.min_ctas = 1;
  profile.routes = 0xfeu;
  const int32_t lengths[] = {20000, 500};
  pkv_choice c = PKV_CHOICE_INIT;
  assert_int_equal(pkv_policy_choose(&c, PKV_POLICY_FIXED, PKV_ROUTE_FLASHINFER, &shape,
                                     PKV_DTYPE_F32, 2, lengths, &profile, NULL),
                   PKV_OK);
  expect_us(&c, (1002 + 500) * 8192 / 1e6 + 2);
}

static void test_pure(void **state) {
  (void)state;
  const pkv_choice a = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 9, 33333, 4444, 0);
  const pkv_choice b = choose(PKV_POLICY_ROOFLINE, PKV_ROUTE_AUTO, 32, 9, 33333, 4444, 0);
  assert_memory_equal(&a, &b, sizeof a);
}

static void test_bad_input(void **state) {
  (void)state;
  const pkv_shape shape = llama(32);
  pkv_shape odd = llama(33);
  pkv_choice c = PKV_CHOICE_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_profile p = PKV_PROFILE_INIT;
  const int32_t lengths[] = {5, -1};
#define REFUSE(text_, ...)                                                                         \
  do {                                                                                             \
    assert_int_equal(pkv_policy_choose(__VA_ARGS__, &err), PKV_E_INVALID);                         \
    if (!strstr(err.text, text_)) fail_msg("\"%s\" does not say \"%s\"", err.text, text_);         \
  } while (0)
  REFUSE("out is NULL", NULL, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths,
         NULL);
  REFUSE("policy is 9", &c, (pkv_policy)9, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths, NULL);
  REFUSE("fixed is 8", &c, PKV_POLICY_FIXED, (pkv_route)8, &shape, PKV_DTYPE_F16, 1, lengths, NULL);
  REFUSE("shape is NULL", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, NULL, PKV_DTYPE_F16, 1, lengths,
         NULL);
  REFUSE("query_heads is 33", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &odd, PKV_DTYPE_F16, 1, lengths,
         NULL);
  REFUSE("kv_dtype is 9", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, (pkv_dtype)9, 1, lengths,
         NULL);
  REFUSE("rows is -1", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, -1, lengths,
         NULL);
  REFUSE("seq_len is NULL", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, NULL,
         NULL);
  REFUSE("seq_len[1] is -1", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 2,
         lengths, NULL);
  p.read_gb_s = NAN;
  REFUSE("read_gb_s", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths, &p);
  p.read_gb_s = 0;
  p.launch_us = -1;
  REFUSE("launch_us", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths, &p);
  p.launch_us = 0;
  p.sms = -1;
  REFUSE("sms is -1", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths, &p);
  p.sms = 0;
  p.routes = 1;
  REFUSE("routes is 0x1", &c, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, &shape, PKV_DTYPE_F16, 1, lengths,
         &p);
}

static void test_names(void **state) {
  (void)state;
  assert_string_equal(pkv_route_name(PKV_ROUTE_BUCKET_PADDED), "bucket_padded");
  assert_string_equal(pkv_route_name((pkv_route)99), "?");
  assert_string_equal(pkv_policy_name(PKV_POLICY_ROOFLINE), "roofline");
  assert_string_equal(pkv_policy_name((pkv_policy)-1), "?");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_split_rule),
      cmocka_unit_test(test_static_thresholds),
      cmocka_unit_test(test_roofline_one_row),
      cmocka_unit_test(test_roofline_many_rows),
      cmocka_unit_test(test_missing_routes_are_replaced),
      cmocka_unit_test(test_fixed_and_bucket_estimates),
      cmocka_unit_test(test_window_and_profile_numbers),
      cmocka_unit_test(test_pure),
      cmocka_unit_test(test_bad_input),
      cmocka_unit_test(test_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
