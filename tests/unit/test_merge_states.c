/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_merge_states: split attention merged again equals attention over all keys. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "pkv/pkv.h"

#define KEYS 90
#define DIM  16

/* Softmax over keys [lo, hi) in double. */
static void attend(double *out, double *lse, const double *logit, const double *v, int lo, int hi) {
  double top = -INFINITY, sum = 0.0;
  for (int j = lo; j < hi; j++)
    top = logit[j] > top ? logit[j] : top;
  for (int i = 0; i < DIM; i++)
    out[i] = 0.0;
  for (int j = lo; j < hi; j++) {
    const double p = exp(logit[j] - top);
    sum += p;
    for (int i = 0; i < DIM; i++)
      out[i] += p * v[j * DIM + i];
  }
  for (int i = 0; i < DIM; i++)
    out[i] = hi > lo ? out[i] / sum : 0.0;
  *lse = hi > lo ? top + log(sum) : -INFINITY;
}

/* Random cuts, some of them empty; empty states hold NaN. */
static void test_random_cuts(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 31);
  for (int round = 0; round < 300; round++) {
    const int states = 1 + round % 7;
    double logit[KEYS], v[KEYS * DIM], want[DIM], want_lse, part[DIM], part_lse;
    const double spread = round % 3 == 0 ? 40.0 : 2.0;
    for (int j = 0; j < KEYS; j++)
      logit[j] = spread * pkv_rng_normal(&rng);
    for (int j = 0; j < KEYS * DIM; j++)
      v[j] = pkv_rng_normal(&rng);
    float o[7 * DIM], lse[7], out[DIM], lse_out;
    int at = 0;
    for (int s = 0; s < states; s++) {
      const int end = s == states - 1 ? KEYS : (int)pkv_rng_range(&rng, at, KEYS);
      attend(part, &part_lse, logit, v, at, end);
      lse[s] = (float)part_lse;
      for (int i = 0; i < DIM; i++)
        o[s * DIM + i] = end > at ? (float)part[i] : NAN;
      at = end;
    }
    attend(want, &want_lse, logit, v, 0, KEYS);
    assert_int_equal(pkv_merge_states(out, &lse_out, o, lse, states, 1, 1, DIM, NULL), PKV_OK);
    /* Inputs rounded to float: an lse off by u |lse| moves weights by as much. */
    const double u = 0x1p-24, bound = (4.0 * u * fabs(want_lse) + 16.0 * u) * 5.0;
    for (int i = 0; i < DIM; i++)
      if (!(fabs((double)out[i] - want[i]) <= bound))
        fail_msg("round %d, %d states [%d]: got %.9g, want %.9g", round, states, i, (double)out[i],
                 want[i]);
    if (!(fabs((double)lse_out - want_lse) <= bound))
      fail_msg("round %d lse: got %.9g, want %.9g", round, (double)lse_out, want_lse);
  }
}

static void test_layout_and_empty(void **state) {
  (void)state;
  /* 2 states, 3 tokens, 2 heads, dim 1: value = 100 token + 10 head + state, equal weights. */
  float o[2 * 3 * 2], lse[2 * 3 * 2], out[3 * 2], lse_out[3 * 2];
  for (int s = 0; s < 2; s++)
    for (int t = 0; t < 3; t++)
      for (int h = 0; h < 2; h++) {
        o[(s * 3 + t) * 2 + h] = (float)(100 * t + 10 * h + s);
        lse[(s * 3 + t) * 2 + h] = t == 2 ? -INFINITY : 0.5f;
      }
  o[(0 * 3 + 2) * 2] = NAN;
  assert_int_equal(pkv_merge_states(out, lse_out, o, lse, 2, 3, 2, 1, NULL), PKV_OK);
  for (int t = 0; t < 3; t++)
    for (int h = 0; h < 2; h++) {
      const double want = t == 2 ? 0.0 : 100 * t + 10 * h + 0.5;
      const double want_lse = t == 2 ? -INFINITY : 0.5 + log(2.0);
      const double got = (double)out[t * 2 + h], got_lse = (double)lse_out[t * 2 + h];
      if (!(fabs(got - want) <= 1e-4)) fail_msg("token %d head %d: %g, want %g", t, h, got, want);
      if (!(got_lse == want_lse || fabs(got_lse - want_lse) <= 1e-6))
        fail_msg("token %d head %d lse: %g, want %g", t, h, got_lse, want_lse);
    }
  /* One live state among empty ones comes through untouched. */
  const float one[] = {NAN, 0.3f, NAN}, where[] = {-INFINITY, -3.25f, -INFINITY};
  assert_int_equal(pkv_merge_states(out, lse_out, one, where, 3, 1, 1, 1, NULL), PKV_OK);
  assert_true(out[0] == 0.3f && lse_out[0] == -3.25f);
  /* No states at all. */
  assert_int_equal(pkv_merge_states(out, NULL, NULL, NULL, 0, 3, 2, 1, NULL), PKV_OK);
  for (int i = 0; i < 6; i++)
    assert_true(out[i] == 0.0f);
}

static void refused(pkv_status got, const pkv_error *err, const char *word) {
  if (got != PKV_E_INVALID || strstr(err->text, word) == NULL)
    fail_msg("got %s \"%s\", wanted E_INVALID with \"%s\"", pkv_status_name(got), err->text, word);
}

static void test_bad_input(void **state) {
  (void)state;
  float x[8] = {0};
  pkv_error e;
  refused(pkv_merge_states(NULL, NULL, x, x, 1, 1, 1, 1, &e), &e, "out is NULL");
  refused(pkv_merge_states(x, NULL, NULL, x, 1, 1, 1, 1, &e), &e, "o is NULL");
  refused(pkv_merge_states(x, NULL, x, NULL, 1, 1, 1, 1, &e), &e, "lse is NULL");
  refused(pkv_merge_states(x, NULL, x, x, -1, 1, 1, 1, &e), &e, "states is -1");
  refused(pkv_merge_states(x, NULL, x, x, 1, -5, 1, 1, &e), &e, "tokens is -5");
  refused(pkv_merge_states(x, NULL, x, x, 1, 1, 0, 1, &e), &e, "heads is 0");
  refused(pkv_merge_states(x, NULL, x, x, 1, 1, 1, -8, &e), &e, "head_dim is -8");
  refused(pkv_merge_states(x, NULL, x, x, 9, INT64_MAX / 8, 64, 64, &e), &e, "overflow");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_cuts),
      cmocka_unit_test(test_layout_and_empty),
      cmocka_unit_test(test_bad_input),
  };
  return cmocka_run_group_tests_name("merge_states", tests, NULL, NULL);
}
