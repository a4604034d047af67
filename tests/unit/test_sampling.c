/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling of one row of logits: greedy, temperature, top-k, top-p, seeds, log-probabilities. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/rng.h"
#include "engine/sampling.h"

#define VOCAB 1000

typedef struct fixture {
  float logits[VOCAB];
  pkv_candidate candidates[VOCAB];
  double weights[VOCAB];
  pkv_sampling_scratch scratch;
} fixture;

static void fill(fixture *f, uint64_t seed, double spread) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int i = 0; i < VOCAB; i++)
    f->logits[i] = (float)(spread * pkv_rng_normal(&rng));
  f->scratch = (pkv_sampling_scratch){f->candidates, f->weights};
}

static int32_t pick(fixture *f, float temperature, int32_t top_k, float top_p, uint64_t seed,
                    int64_t position) {
  const pkv_sampling s = {temperature, top_k, top_p, seed, 0, 0.0f};
  return pkv_sample(f->logits, VOCAB, &s, position, &f->scratch);
}

static int32_t plain_argmax(const float *x, int32_t n) {
  int32_t best = 0;
  for (int32_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

/* How many logits are larger, or equal with a smaller id. */
static int32_t rank_of(const float *x, int32_t n, int32_t token) {
  int32_t rank = 0;
  for (int32_t i = 0; i < n; i++)
    rank += x[i] > x[token] || (x[i] == x[token] && i < token);
  return rank;
}

static void test_greedy_is_the_first_maximum(void **state) {
  (void)state;
  static fixture f;
  for (uint64_t seed = 0; seed < 200; seed++) {
    fill(&f, seed, 3.0);
    const int32_t best = plain_argmax(f.logits, VOCAB);
    if (best + 1 < VOCAB) f.logits[VOCAB - 1] = f.logits[best]; /* an equal one later */
    assert_int_equal(pick(&f, 0.0f, 0, 0.0f, seed, 7), best);
  }
}

static void test_every_length_and_place(void **state) {
  (void)state;
  static fixture f;
  for (int32_t n = 1; n <= 40; n++) {
    for (int32_t at = 0; at < n; at++) {
      fill(&f, 1, 1.0);
      f.logits[at] = 50.0f;
      const pkv_sampling s = {0.0f, 0, 0.0f, 0, 0, 0.0f};
      assert_int_equal(pkv_sample(f.logits, n, &s, 0, &f.scratch), at);
    }
  }
}

static void test_tiny_temperatures_are_greedy(void **state) {
  (void)state;
  static fixture f;
  static const float tiny[] = {1e-3f, 1e-4f, 1e-5f, 1e-8f, 1e-30f, 1e-45f};
  for (uint64_t seed = 0; seed < 50; seed++) {
    fill(&f, seed, 10.0);
    const int32_t best = plain_argmax(f.logits, VOCAB);
    f.logits[best] += 0.1f;
    for (size_t i = 0; i < sizeof tiny / sizeof *tiny; i++) {
      assert_int_equal(pick(&f, tiny[i], 0, 0.0f, seed, 3), best);
      assert_int_equal(pick(&f, tiny[i], 40, 0.9f, seed, 3), best);
    }
  }
}

static void test_top_k_set(void **state) {
  (void)state;
  static fixture f;
  static const int32_t ks[] = {1, 2, 5, 40, 999, 1000, 5000};
  fill(&f, 11, 0.5);
  for (size_t k = 0; k < sizeof ks / sizeof *ks; k++) {
    int32_t seen_rank = -1;
    for (uint64_t seed = 0; seed < 400; seed++) {
      const int32_t token = pick(&f, 5.0f, ks[k], 0.0f, seed, 1);
      assert_in_range(token, 0, VOCAB - 1);
      const int32_t rank = rank_of(f.logits, VOCAB, token);
      if (rank > seen_rank) seen_rank = rank;
    }
    if (seen_rank >= ks[k]) print_error("top_k %d chose rank %d\n", (int)ks[k], (int)seen_rank);
    assert_true(seen_rank < ks[k]);
    if (ks[k] <= 5) assert_int_equal(seen_rank, ks[k] - 1); /* the whole set is reached */
  }
  /* k = 1 is greedy at any temperature. */
  assert_int_equal(pick(&f, 100.0f, 1, 0.0f, 9, 9), plain_argmax(f.logits, VOCAB));
}

/* The size of the smallest set of likeliest tokens with probability >= p, by sorting. */
static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

static int32_t nucleus_size(const fixture *f, double temperature, double p) {
  static double w[VOCAB];
  double total = 0.0, sum = 0.0;
  for (int i = 0; i < VOCAB; i++) {
    w[i] = exp((double)f->logits[i] / temperature);
    total += w[i];
  }
  qsort(w, VOCAB, sizeof *w, by_size);
  for (int32_t i = 0; i < VOCAB; i++) {
    sum += w[i];
    if (sum >= p * total) return i + 1;
  }
  return VOCAB;
}

static void test_top_p_set(void **state) {
  (void)state;
  static fixture f;
  static const float ps[] = {1e-6f, 0.1f, 0.3f, 0.5f};
  fill(&f, 12, 2.0);
  for (size_t k = 0; k < sizeof ps / sizeof *ps; k++) {
    const int32_t size = nucleus_size(&f, 1.0, (double)ps[k]);
    int32_t seen_rank = -1;
    for (uint64_t seed = 0; seed < 3000; seed++) {
      const int32_t rank = rank_of(f.logits, VOCAB, pick(&f, 1.0f, 0, ps[k], seed, 1));
      if (rank > seen_rank) seen_rank = rank;
    }
    if (seen_rank != size - 1)
      print_error("top_p %g: set of %d, largest rank seen %d\n", (double)ps[k], (int)size,
                  (int)seen_rank);
    assert_int_equal(seen_rank, size - 1);
  }
  /* 0 and 1 mean all: the very same choice as without. */
  for (uint64_t seed = 0; seed < 100; seed++) {
    const int32_t all = pick(&f, 1.0f, 0, 0.0f, seed, 5);
    assert_int_equal(pick(&f, 1.0f, 0, 1.0f, seed, 5), all);
    assert_int_equal(pick(&f, 1.0f, VOCAB, 0.0f, seed, 5), all);
  }
}

/* Frequencies of `draws` draws over the first tokens against softmax: chi-square. */
static double chi_square(const double *expected, const int64_t *seen, int n, int64_t draws) {
  double sum = 0.0;
  for (int i = 0; i < n; i++) {
    const double want = expected[i] * (double)draws;
    sum += ((double)seen[i] - want) * ((double)seen[i] - want) / want;
  }
  return sum;
}

static void check_distribution(float temperature, int32_t top_k, float top_p,
                               const double *expected, int n) {
  enum { DRAWS = 20000 };
  const float logits[8] = {0.3f, -1.0f, 2.0f, 0.0f, 1.2f, -0.4f, 0.9f, 0.1f};
  pkv_candidate candidates[8];
  double weights[8];
  int64_t seen[8] = {0};
  const pkv_sampling_scratch scratch = {candidates, weights};
  const pkv_sampling s = {temperature, top_k, top_p, 42, 0, 0.0f};
  for (int64_t i = 0; i < DRAWS; i++) {
    const int32_t token = pkv_sample(logits, 8, &s, i, &scratch);
    assert_in_range(token, 0, 7);
    seen[token]++;
  }
  double wanted[8];
  int64_t got[8];
  int used = 0;
  for (int i = 0; i < 8; i++) {
    if (expected[i] == 0.0) {
      assert_int_equal(seen[i], 0);
      continue;
    }
    wanted[used] = expected[i];
    got[used++] = seen[i];
  }
  assert_int_equal(used, n);
  const double x = chi_square(wanted, got, used, DRAWS);
  /* 99.99 % quantiles for 1 .. 7 degrees of freedom. */
  static const double limit[] = {0.0, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9};
  if (x > limit[used - 1]) print_error("chi-square %g with %d values\n", x, used);
  assert_true(x <= limit[used - 1]);
}

static void test_distribution(void **state) {
  (void)state;
  const float logits[8] = {0.3f, -1.0f, 2.0f, 0.0f, 1.2f, -0.4f, 0.9f, 0.1f};
  double p[8], total = 0.0;
  for (int i = 0; i < 8; i++)
    total += p[i] = exp((double)logits[i]);
  for (int i = 0; i < 8; i++)
    p[i] /= total;
  check_distribution(1.0f, 0, 0.0f, p, 8);
  double hot[8];
  total = 0.0;
  for (int i = 0; i < 8; i++)
    total += hot[i] = exp((double)logits[i] / 2.5);
  for (int i = 0; i < 8; i++)
    hot[i] /= total;
  check_distribution(2.5f, 0, 0.0f, hot, 8);
  /* The three best are 2, 4 and 6. */
  double best[8] = {0};
  total = p[2] + p[4] + p[6];
  best[2] = p[2] / total;
  best[4] = p[4] / total;
  best[6] = p[6] / total;
  check_distribution(1.0f, 3, 0.0f, best, 3);
  /* 0.9 of the three needs all three, 0.8 only two. */
  double two[8] = {0};
  two[2] = p[2] / (p[2] + p[4]);
  two[4] = p[4] / (p[2] + p[4]);
  assert_true(best[2] < 0.75 && best[2] + best[4] > 0.75);
  check_distribution(1.0f, 3, 0.75f, two, 2);
}

static void test_keyed_by_seed_and_position(void **state) {
  (void)state;
  static fixture f;
  fill(&f, 3, 0.5);
  int different_seed = 0, different_position = 0;
  for (int64_t position = 0; position < 200; position++) {
    const int32_t a = pick(&f, 1.0f, 0, 0.0f, 1, position);
    (void)pick(&f, 0.7f, 20, 0.5f, 99, 5); /* what is drawn between changes nothing */
    assert_int_equal(pick(&f, 1.0f, 0, 0.0f, 1, position), a);
    different_seed += pick(&f, 1.0f, 0, 0.0f, 2, position) != a;
    different_position += pick(&f, 1.0f, 0, 0.0f, 1, position + 1) != a;
  }
  assert_true(different_seed > 150);
  assert_true(different_position > 150);
}

static void test_logits_that_are_not_finite(void **state) {
  (void)state;
  static fixture f;
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  static const int places[] = {0, 7, 8, 500, VOCAB - 1};
  for (size_t b = 0; b < 3; b++) {
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
      fill(&f, 4, 1.0);
      f.logits[places[p]] = bad[b];
      assert_int_equal(pick(&f, 0.0f, 0, 0.0f, 1, 1), -1);
      assert_int_equal(pick(&f, 0.8f, 40, 0.9f, 1, 1), -1);
      /* Behind the end of the vocabulary nothing is looked at. */
      f.logits[0] = 0.0f;
      if (places[p] == VOCAB - 1) {
        const pkv_sampling s = {5.0f, 0, 0.0f, 1, 0, 0.0f};
        assert_in_range(pkv_sample(f.logits, VOCAB - 1, &s, 1, &f.scratch), 0, VOCAB - 2);
      }
    }
  }
  for (int i = 0; i < VOCAB; i++)
    f.logits[i] = -3e38f; /* finite, and as low as it gets */
  assert_in_range(pick(&f, 1.0f, 0, 0.0f, 1, 1), 0, VOCAB - 1);
  for (int i = 0; i < VOCAB; i++)
    f.logits[i] = i % 2 ? 3e38f : -3e38f;
  assert_int_equal(pick(&f, 1.0f, 0, 0.0f, 1, 1) % 2, 1);
}

static void test_padding_is_never_sampled(void **state) {
  (void)state;
  static fixture f;
  fill(&f, 5, 1.0);
  for (int i = 600; i < VOCAB; i++)
    f.logits[i] = 100.0f;
  for (uint64_t seed = 0; seed < 500; seed++) {
    const pkv_sampling s = {5.0f, 0, 0.0f, seed, 0, 0.0f};
    assert_in_range(pkv_sample(f.logits, 600, &s, 1, &f.scratch), 0, 599);
  }
}

static void test_log_probabilities(void **state) {
  (void)state;
  static fixture f;
  for (uint64_t seed = 0; seed < 20; seed++) {
    pkv_logprob top[PKV_MAX_TOP_LOGPROBS];
    double sum = 0.0;
    fill(&f, seed, 4.0);
    f.logits[500] = f.logits[20]; /* a tie */
    const double log_sum = pkv_logits_log_sum(f.logits, VOCAB);
    for (int i = 0; i < VOCAB; i++)
      sum += exp((double)f.logits[i] - log_sum);
    if (fabs(sum - 1.0) > 1e-12) print_error("probabilities add up to %.17g\n", sum);
    assert_true(fabs(sum - 1.0) <= 1e-12);
    assert_int_equal(pkv_logits_top(top, 20, f.logits, VOCAB, log_sum), 20);
    for (int i = 0; i < 20; i++) {
      assert_int_equal(rank_of(f.logits, VOCAB, top[i].token), i);
      const float want = (float)((double)f.logits[top[i].token] - log_sum);
      assert_memory_equal(&top[i].logprob, &want, sizeof want);
    }
    assert_int_equal(pkv_logits_top(top, 5, f.logits, 3, log_sum), 3);
    assert_int_equal(pkv_logits_top(top, 0, f.logits, VOCAB, log_sum), 0);
  }
}

static void test_exponential(void **state) {
  (void)state;
  pkv_rng rng;
  double worst = 0.0;
  pkv_rng_init(&rng, 77);
  for (int i = 0; i < 200000; i++) {
    const double x = -pkv_rng_uniform(&rng) * (i % 2 ? 708.0 : 2.0);
    const double want = exp(x), got = pkv_exp_negative(x);
    const double error = fabs(got - want) / want;
    if (error > worst) worst = error;
    if (error > 4.5e-16) print_error("exp(%.17g) is %.17g, not %.17g\n", x, got, want);
    assert_true(error <= 4.5e-16);
  }
  assert_true(pkv_exp_negative(0.0) == 1.0 && pkv_exp_negative(-0.0) == 1.0);
  assert_true(pkv_exp_negative(-708.5) == 0.0 && pkv_exp_negative(-1e300) == 0.0);
  assert_true(pkv_exp_negative(-INFINITY) == 0.0);
  assert_true(worst > 0.0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_greedy_is_the_first_maximum),
      cmocka_unit_test(test_every_length_and_place),
      cmocka_unit_test(test_tiny_temperatures_are_greedy),
      cmocka_unit_test(test_top_k_set),
      cmocka_unit_test(test_top_p_set),
      cmocka_unit_test(test_distribution),
      cmocka_unit_test(test_keyed_by_seed_and_position),
      cmocka_unit_test(test_logits_that_are_not_finite),
      cmocka_unit_test(test_padding_is_never_sampled),
      cmocka_unit_test(test_log_probabilities),
      cmocka_unit_test(test_exponential),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
