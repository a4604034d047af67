/* SPDX-License-Identifier: Apache-2.0 */
/* The cost model: features worked out by hand, fits that must find what made the times, profiles
 * as text, and the policy that uses them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "pkv/profile.h"

#define POINTS 200
#define N      PKV_COST_FEATURES

static pkv_error err;

static pkv_shape llama(void) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  return shape;
}

/* A device of 10 slots. */
static pkv_profile small_device(void) {
  pkv_profile profile = PKV_PROFILE_INIT;
  profile.sms = 5;
  profile.min_ctas = 2;
  return profile;
}

static void near(const char *what, double got, double expected) {
  if (!(fabs(got - expected) <= 1e-9 + 1e-6 * fabs(expected)))
    fail_msg("%s is %.9g, expected %.9g", what, got, expected);
}

static void features_of(double *f, int32_t *splits, int32_t kind, int32_t rows,
                        const int32_t *lengths) {
  const pkv_shape shape = llama();
  const pkv_profile profile = small_device();
  if (pkv_policy_features(f, splits, kind, &shape, PKV_DTYPE_F16, rows, lengths, NULL, &profile,
                          &err))
    fail_msg("features: %s", err.text);
}

static void test_features_balanced(void **state) {
  const int32_t lengths[] = {640, 100};
  double f[N];
  int32_t splits;
  (void)state;
  features_of(f, &splits, PKV_ROUTE_BALANCED, 2, lengths);
  near("bytes", f[PKV_COST_BYTES], 740 * 4096e-6);
  near("ramp", f[PKV_COST_RAMP], 740 * 4096e-6);
  near("launches", f[PKV_COST_LAUNCHES], 0);
  near("tasks", f[PKV_COST_TASKS], 10e-3);
  near("waves", f[PKV_COST_WAVES], 0);
  /* 8 heads x (10 + 2) tiles in 10 parts: 10 tiles of 64 tokens, 512 bytes each */
  near("span", f[PKV_COST_SPAN], hypot(640, 640) * 512e-3);
  near("fill", f[PKV_COST_FILL], 28 * 4096e-6);
  /* 9 cuts, 9 segments at most cut: 18 states of 4 heads of 130 floats */
  near("states", f[PKV_COST_STATES], 18 * 4 * 520e-6);
  near("merges", f[PKV_COST_MERGES], 0); /* at most 2 states each */
  near("rows", f[PKV_COST_ROWS], 2);
}

static void test_features_buckets(void **state) {
  const int32_t lengths[] = {640, 100, 640};
  double f[N];
  int32_t splits;
  (void)state;
  features_of(f, &splits, PKV_ROUTE_BUCKET_EXACT, 3, lengths);
  assert_int_equal(splits, 4); /* 12 wanted, the shortest row has 4 tiles */
  near("launches", f[PKV_COST_LAUNCHES], 3);
  near("tasks", f[PKV_COST_TASKS], (4 + 4 + 4) * 8e-3);
  /* 32 tasks a row of 100: 4 waves; 64 of the others: 7 */
  near("waves", f[PKV_COST_WAVES], 3 + 6);
  near("fill", f[PKV_COST_FILL], 28 * 4096e-6);
  near("merges", f[PKV_COST_MERGES], 0); /* 4 states */
  /* 32 tasks of 32 tokens: 31 before the last, half a task less; then 64 of 160 */
  near("span", f[PKV_COST_SPAN],
       (hypot(102.4, 99.2 - 16 + 32) + hypot(1024, 1008 - 80 + 160)) * 512e-3);
}

/* A long row that comes last sets the end, one that comes first hides behind the others. */
static void test_features_order(void **state) {
  const int32_t first[] = {3200, 320, 320, 320}, last[] = {320, 320, 320, 3200}, one[] = {4096};
  double f[N], g[N];
  int32_t splits;
  (void)state;
  features_of(f, &splits, PKV_ROUTE_SPLIT, 4, first);
  features_of(g, &splits, PKV_ROUTE_SPLIT, 4, last);
  assert_int_equal(splits, 8);
  /* 8 heads x 8 tasks of a row, of 416 or 64 tokens; the last starts behind 192 small and 63 */
  near("first", f[PKV_COST_SPAN], hypot(3891.2, 3891.2) * 512e-3);
  near("last", g[PKV_COST_SPAN], hypot(3891.2, 3849.6 - 38496 / 255.0 / 2 + 416) * 512e-3);
  near("merges", f[PKV_COST_MERGES], 4);
  features_of(f, &splits, PKV_ROUTE_SPLIT, 1, one);
  near("merges of one row", f[PKV_COST_MERGES], 32 - 4);
}

static void test_features_flashinfer(void **state) {
  const int32_t one[] = {4096}, many[] = {4096, 16, 16, 16};
  double f[N];
  int32_t splits;
  (void)state;
  /* room for 10 / 8 = 1 chunk: no split */
  features_of(f, &splits, PKV_ROUTE_FLASHINFER, 1, one);
  near("span", f[PKV_COST_SPAN], hypot(3276.8, 4096) * 512e-3);
  near("launches", f[PKV_COST_LAUNCHES], 0);
  /* on CUDA cores 20 / 8 = 2 chunks of 2048 */
  features_of(f, &splits, PKV_COST_FLASHINFER_CORES, 1, one);
  near("span", f[PKV_COST_SPAN], hypot(1638.4, 2048) * 512e-3);
  near("launches", f[PKV_COST_LAUNCHES], 1);
  near("tasks", f[PKV_COST_TASKS], 16e-3);
  /* 4 rows fill the grid: the long one, and the even share of 20 slots */
  features_of(f, &splits, PKV_COST_FLASHINFER_CORES, 4, many);
  near("span", f[PKV_COST_SPAN], hypot(1657.6, 4096) * 512e-3);
  near("merges", f[PKV_COST_MERGES], 0);
}

/* One launch less than the work queue that merges in a second one; else the same work. */
static void test_features_fused(void **state) {
  const int32_t lengths[] = {4096, 100, 3000};
  double queue[N], fused[N];
  int32_t splits;
  (void)state;
  features_of(queue, &splits, PKV_ROUTE_WORKQUEUE, 3, lengths);
  features_of(fused, &splits, PKV_COST_WORKQUEUE_FUSED, 3, lengths);
  assert_int_equal(splits, 0);
  near("launches", queue[PKV_COST_LAUNCHES], 1);
  near("fused launches", fused[PKV_COST_LAUNCHES], 0);
  for (int32_t i = 0; i < N; i++)
    if (i != PKV_COST_LAUNCHES) near(pkv_cost_feature_name(i), fused[i], queue[i]);
}

static void test_features_empty(void **state) {
  const int32_t lengths[] = {0, 0};
  (void)state;
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    for (int32_t rows = 0; rows <= 2; rows++) {
      double f[N];
      int32_t splits;
      if (kind == PKV_ROUTE_SHARED) continue;
      features_of(f, &splits, kind, rows, lengths);
      for (int32_t i = 0; i < N; i++)
        if (!(isfinite(f[i]) && f[i] >= -1))
          fail_msg("%s, %d empty rows: %s is %g", pkv_cost_kind_name(kind), rows,
                   pkv_cost_feature_name(i), f[i]);
    }
}

/* Times made of the model's own features with noise: the fit predicts what it has not seen. */
static void test_fit_recovers(void **state) {
  static double features[POINTS * N], us[POINTS];
  const double truth[N] = {2, 1.5, 0.3, 0.1, 0.01, 0, 4, 2, 0, 0, 0.05, 0};
  double fitted[N];
  pkv_rng rng;
  (void)state;
  pkv_rng_init(&rng, 20260622);
  for (int32_t p = 0; p < POINTS; p++) {
    us[p] = 0;
    for (int32_t i = 0; i < N; i++) {
      features[p * N + i] = i == 0 ? 1 : pkv_rng_uniform(&rng) * (i == PKV_COST_BYTES ? 500 : 10);
      us[p] += truth[i] * features[p * N + i];
    }
    us[p] *= 1 + 0.01 * pkv_rng_normal(&rng);
  }
  assert_int_equal(pkv_cost_fit(fitted, features, us, POINTS / 2, (1u << N) - 1, &err), PKV_OK);
  for (int32_t i = 0; i < N; i++)
    if (!(fitted[i] >= 0)) fail_msg("coefficient %d is %g", i, fitted[i]);
  for (int32_t p = POINTS / 2; p < POINTS; p++) {
    double sum = 0;
    for (int32_t i = 0; i < N; i++)
      sum += fitted[i] * features[p * N + i];
    if (fabs(sum - us[p]) > 0.05 * us[p])
      fail_msg("point %d: predicted %.3f, measured %.3f", p, sum, us[p]);
  }
}

static void test_fit_stays_positive(void **state) {
  /* best line has slope -1: the fit must stop at 0 and take the relative mean */
  const double features[] = {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0,
                             1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0};
  const double us[] = {2, 1};
  double fitted[N];
  (void)state;
  assert_int_equal(pkv_cost_fit(fitted, features, us, 2, (1u << N) - 1, &err), PKV_OK);
  near("rows", fitted[PKV_COST_ROWS], 0);
  near("one", fitted[PKV_COST_ONE], (1 / 2.0 + 1) / (1 / 4.0 + 1)); /* weighted by 1/us^2 */
  const double nothing[] = {0, 1};
  assert_int_equal(pkv_cost_fit(fitted, features, nothing, 2, 1u, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "us[0] is 0"));
}

static pkv_profile model_profile(pkv_cost_model *m) {
  pkv_profile p = small_device();
  memset(m, 0, sizeof *m);
  m->struct_size = sizeof *m;
  m->shape = llama();
  m->kv_dtype = PKV_DTYPE_F16;
  m->parts = 16;
  (void)snprintf(m->device, sizeof m->device, "A device");
  (void)snprintf(m->driver, sizeof m->driver, "1.2 (3)");
  (void)snprintf(m->library, sizeof m->library, "0.1.0");
  (void)snprintf(m->date, sizeof m->date, "2026-11-30");
  m->cost[PKV_ROUTE_BALANCED] = (pkv_route_cost){.points = 7, .error_mean = 0.02};
  m->cost[PKV_ROUTE_BALANCED].attend[PKV_COST_BYTES] = 0.25;
  m->cost[PKV_ROUTE_BALANCED].attend[PKV_COST_ONE] = 9;
  m->cost[PKV_ROUTE_BALANCED].plan[PKV_COST_ONE] = 64;
  m->cost[PKV_ROUTE_WORKQUEUE] = m->cost[PKV_ROUTE_BALANCED];
  m->cost[PKV_ROUTE_WORKQUEUE].attend[PKV_COST_ONE] = 8;
  m->cost[PKV_ROUTE_WORKQUEUE].attend[PKV_COST_BYTES] = 0.5;
  p.model = m;
  return p;
}

static void test_choose(void **state) {
  const pkv_shape shape = llama();
  const int32_t small[] = {64}, large[] = {65536};
  pkv_cost_model m;
  pkv_profile p = model_profile(&m);
  pkv_choice c = PKV_CHOICE_INIT;
  (void)state;
  assert_int_equal(pkv_policy_choose(&c, PKV_POLICY_CALIBRATED, PKV_ROUTE_AUTO, &shape,
                                     PKV_DTYPE_F16, 1, small, &p, &err),
                   PKV_OK);
  assert_int_equal(c.route, PKV_ROUTE_WORKQUEUE);
  near("small", c.predicted_us, 8 + 0.5 * 64 * 4096e-6 + 64 / 32.0);
  assert_int_equal(pkv_policy_choose(&c, PKV_POLICY_CALIBRATED, PKV_ROUTE_AUTO, &shape,
                                     PKV_DTYPE_F16, 1, large, &p, &err),
                   PKV_OK);
  assert_int_equal(c.route, PKV_ROUTE_BALANCED);
  if (!strstr(c.reason, "next workqueue")) fail_msg("reason: %s", c.reason);
  p.layers = 1;
  p.routes = 1u << PKV_ROUTE_BALANCED;
  assert_int_equal(pkv_policy_choose(&c, PKV_POLICY_CALIBRATED, PKV_ROUTE_AUTO, &shape,
                                     PKV_DTYPE_F16, 1, small, &p, &err),
                   PKV_OK);
  assert_int_equal(c.route, PKV_ROUTE_BALANCED);
  near("one layer", c.predicted_us, 9 + 0.25 * 64 * 4096e-6 + 64);
  p.model = NULL;
  assert_int_equal(pkv_policy_choose(&c, PKV_POLICY_CALIBRATED, PKV_ROUTE_AUTO, &shape,
                                     PKV_DTYPE_F16, 1, small, &p, &err),
                   PKV_E_INVALID);
  assert_non_null(strstr(err.text, "pkv calibrate"));
}

static void test_profile_text(void **state) {
  static char text[PKV_PROFILE_MAX_BYTES], again[PKV_PROFILE_MAX_BYTES];
  pkv_cost_model m, read_model;
  pkv_profile p = model_profile(&m), read;
  size_t bytes, more;
  (void)state;
  if (pkv_profile_format(text, sizeof text, &bytes, &p, &err)) fail_msg("format: %s", err.text);
  assert_int_equal(strlen(text), bytes);
  if (pkv_profile_parse(&read, &read_model, text, bytes, &err))
    fail_msg("parse: %s\n%s", err.text, text);
  assert_ptr_equal(read.model, &read_model);
  assert_memory_equal(&read_model, &m, sizeof m);
  assert_int_equal(read.sms, 5);
  assert_int_equal(pkv_profile_format(again, sizeof again, &more, &read, &err), PKV_OK);
  assert_string_equal(again, text);
  assert_int_equal(pkv_profile_format(again, 10, &more, &p, &err), PKV_E_TOO_SMALL);
  assert_int_equal(more, bytes);
  for (size_t cut = 0; cut < bytes; cut++) { /* each proper prefix is refused */
    pkv_profile none = PKV_PROFILE_INIT;
    if (pkv_profile_parse(&none, &read_model, text, cut, &err) != PKV_E_FORMAT)
      fail_msg("the first %zu of %zu bytes pass for a profile", cut, bytes);
    assert_null(none.model);
  }
}

/* `from` replaced by `to` in a good profile must be refused with a text that says `why`. */
static void test_profile_hostile(void **state) {
  static const struct {
    const char *from, *to, *why;
  } cases[] = {
      {"pkv-profile 2", "pkv-profile 1", "version"},
      {"pkv-profile 2", "{\"a\":1}", "not a profile"},
      {"sms 5", "sms 0", "whole number"},
      {"sms 5", "sms 99999999999999999999", "whole number"},
      {"sms 5", "sms 5 5", "words"},
      {"sms 5\n", "", "missing"},
      {"sms 5", "sms 5\nsms 5", "second"},
      {"read_gb_s 302", "read_gb_s nan", "number"},
      {"read_gb_s 302", "read_gb_s inf", "number"},
      {"read_gb_s 302", "read_gb_s -1", "number"},
      {"device A device", "device \x1b[2J", "byte 0x1b"},
      {"kv_dtype f16", "kv_dtype f17", "type"},
      {"shape 32 8", "shape 33 8", "multiple"},
      {"launches", "lunches", "feature"},
      {"cost balanced 7", "cost balanced -7", "whole number"},
      {"cost balanced 7", "cost auto 7", "route"},
      {"attend balanced 9", "attend balanced -9", "number"},
      {"attend balanced 9", "attend workqueue 9", "second"},
      {"parts 16", "parts 16\nsurprise 1", "no key"},
      {"\nend\n", "\n\nend\n", "empty"},
      {"\nend\n", "\nend\nend\n", "after"},
      {"routes 62", "routes 63", "bit 0"},
  };
  static char text[PKV_PROFILE_MAX_BYTES], bad[PKV_PROFILE_MAX_BYTES];
  pkv_cost_model m, read_model;
  pkv_profile p = model_profile(&m), read;
  size_t bytes;
  (void)state;
  assert_int_equal(pkv_profile_format(text, sizeof text, &bytes, &p, &err), PKV_OK);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *at = strstr(text, cases[i].from);
    if (at == NULL) fail_msg("case %zu: no '%s' in\n%s", i, cases[i].from, text);
    (void)snprintf(bad, sizeof bad, "%.*s%s%s", (int)(at - text), text, cases[i].to,
                   at + strlen(cases[i].from));
    if (pkv_profile_parse(&read, &read_model, bad, strlen(bad), &err) != PKV_E_FORMAT)
      fail_msg("case %zu: '%s' passes", i, cases[i].to);
    if (!strstr(err.text, cases[i].why))
      fail_msg("case %zu: \"%s\" does not say \"%s\"", i, err.text, cases[i].why);
  }
}

/* Any byte changed to any other: refused or read, nothing else. */
static void test_profile_mutated(void **state) {
  static char text[PKV_PROFILE_MAX_BYTES], bad[PKV_PROFILE_MAX_BYTES];
  pkv_cost_model m, read_model;
  pkv_profile p = model_profile(&m), read;
  pkv_rng rng;
  size_t bytes;
  int32_t refused = 0;
  (void)state;
  pkv_rng_init(&rng, 1);
  assert_int_equal(pkv_profile_format(text, sizeof text, &bytes, &p, &err), PKV_OK);
  for (int32_t n = 0; n < 20000; n++) {
    memcpy(bad, text, bytes);
    for (uint64_t k = pkv_rng_below(&rng, 4) + 1; k > 0; k--)
      bad[pkv_rng_below(&rng, bytes)] = (char)pkv_rng_below(&rng, 256);
    const pkv_status status = pkv_profile_parse(&read, &read_model, bad, bytes, &err);
    if (status != PKV_OK && status != PKV_E_FORMAT) fail_msg("status %d: %s", status, err.text);
    refused += status != PKV_OK;
  }
  if (refused < 15000) fail_msg("only %d of 20000 were refused", refused);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_features_balanced),
      cmocka_unit_test(test_features_buckets),
      cmocka_unit_test(test_features_order),
      cmocka_unit_test(test_features_flashinfer),
      cmocka_unit_test(test_features_fused),
      cmocka_unit_test(test_features_empty),
      cmocka_unit_test(test_fit_recovers),
      cmocka_unit_test(test_fit_stays_positive),
      cmocka_unit_test(test_choose),
      cmocka_unit_test(test_profile_text),
      cmocka_unit_test(test_profile_hostile),
      cmocka_unit_test(test_profile_mutated),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
