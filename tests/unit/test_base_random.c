/* SPDX-License-Identifier: Apache-2.0 */
/* Generators against published first values, and the properties of chained chunk hashes. */
#include "base/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"

static void published_values(void **state) {
  (void)state;
  pkv_rng rng;
  /* splitmix64 from 0 */
  pkv_rng_init(&rng, 0);
  assert_true(rng.s[0] == UINT64_C(0xe220a8397b1dcdaf));
  assert_true(rng.s[1] == UINT64_C(0x6e789e6aa1b965f4));
  assert_true(rng.s[2] == UINT64_C(0x06c45d188009454f));
  assert_true(rng.s[3] == UINT64_C(0xf88bb8a8724c81ec));
  /* xoshiro256** from 1, 2, 3, 4 */
  const uint64_t first[] = {11520, 0, 1509978240, UINT64_C(1215971899390074240)};
  for (uint64_t i = 0; i < 4; i++)
    rng.s[i] = i + 1;
  for (int i = 0; i < 4; i++)
    assert_true(pkv_rng_next(&rng) == first[i]);
  assert_true(pkv_hash_bytes("", 0, 0) == UINT64_C(0x2d06800538d394c2)); /* XXH3, 64 bit */
}

static void bounds(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 11);
  assert_true(pkv_rng_below(&rng, 0) == 0);
  const uint64_t limits[] = {1,         2, 3, 10, 1000, UINT64_C(1) << 63, (UINT64_C(1) << 63) + 1,
                             UINT64_MAX};
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
    for (int j = 0; j < 10000; j++)
      assert_true(pkv_rng_below(&rng, limits[i]) < limits[i]);
  for (int j = 0; j < 10000; j++) {
    const int64_t r = pkv_rng_range(&rng, -3, 4);
    assert_true(r >= -3 && r <= 4);
    const double u = pkv_rng_uniform(&rng);
    assert_true(u >= 0.0 && u < 1.0);
  }
  assert_true(pkv_rng_range(&rng, 7, 7) == 7);
  int negative = 0;
  for (int j = 0; j < 1000; j++)
    negative += pkv_rng_range(&rng, INT64_MIN, INT64_MAX) < 0;
  assert_in_range(negative, 400, 600);
  assert_true(pkv_rng_range(&rng, INT64_MAX, INT64_MAX) == INT64_MAX);
}

/* Counts of 7 equally likely values: chi-square of 6 degrees below its 1 - 1e-6 point. */
static void even_spread(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  double drawn[7] = {0}, ranged[7] = {0}, hashed[7] = {0};
  const int n = 700000;
  for (int i = 0; i < n; i++) {
    drawn[pkv_rng_below(&rng, 7)]++;
    ranged[pkv_rng_range(&rng, -3, 3) + 3]++;
    hashed[(int)(7.0 * pkv_hash_uniform(9, (uint64_t)i / 1000, (uint64_t)i % 1000))]++;
  }
  const double *const all[3] = {drawn, ranged, hashed};
  for (int k = 0; k < 3; k++) {
    double chi = 0.0;
    for (int i = 0; i < 7; i++)
      chi += (all[k][i] - n / 7.0) * (all[k][i] - n / 7.0) / (n / 7.0);
    if (!(chi < 38.3)) fail_msg("generator %d: chi-square %g, at most 38.3 expected", k, chi);
  }
}

static void normal_moments(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 21);
  double sum = 0.0, square = 0.0, fourth = 0.0;
  const int n = 400000;
  for (int i = 0; i < n; i++) {
    const double x = pkv_rng_normal(&rng);
    sum += x, square += x * x, fourth += x * x * x * x;
  }
  /* Six standard errors: 1, sqrt(2) and sqrt(96) over sqrt(n). */
  if (fabs(sum / n) > 6.0 / sqrt(n)) fail_msg("mean %g", sum / n);
  if (fabs(square / n - 1.0) > 6.0 * sqrt(2.0 / n)) fail_msg("variance %g", square / n);
  if (fabs(fourth / n - 3.0) > 6.0 * sqrt(96.0 / n)) fail_msg("fourth moment %g", fourth / n);
}

static void determinism(void **state) {
  (void)state;
  pkv_rng a, b, c;
  pkv_rng_init(&a, 77);
  pkv_rng_init(&b, 77);
  pkv_rng_init(&c, 78);
  int equal = 0;
  for (int i = 0; i < 1000; i++) {
    const uint64_t x = pkv_rng_next(&a);
    assert_true(x == pkv_rng_next(&b));
    equal += x == pkv_rng_next(&c);
  }
  assert_int_equal(equal, 0);
  /* By key alone: forwards and backwards the same; every part of the key counts. */
  double forward[100];
  for (uint64_t i = 0; i < 100; i++)
    forward[i] = pkv_hash_uniform(1, 2, i);
  for (uint64_t i = 100; i-- > 0;)
    assert_true(pkv_hash_uniform(1, 2, i) == forward[i]);
  for (uint64_t i = 3; i < 100; i++) {
    assert_true(pkv_hash_uniform(1, i, 2) != forward[i]);
    assert_true(pkv_hash_uniform(2, 1, i) != forward[i]);
    assert_true(pkv_hash_uniform(i, 2, 1) != forward[i]);
    assert_true(forward[i] >= 0.0 && forward[i] < 1.0);
  }
}

/* One digest by its definition: fold over the chunks before it. */
static uint64_t digest_of(const int32_t *tokens, size_t count, size_t chunk, uint64_t seed,
                          size_t index) {
  for (size_t i = 0; i <= index; i++) {
    const size_t first = i * chunk, end = first + chunk < count ? first + chunk : count;
    seed = pkv_hash_bytes(tokens + first, (end - first) * 4, seed);
  }
  return seed;
}

static void hash_chains(void **state) {
  (void)state;
  enum { N = 300 };
  static int32_t tokens[N];
  static uint64_t digests[N + 1], shorter[N + 1];
  pkv_rng rng;
  pkv_rng_init(&rng, 3);
  for (int i = 0; i < N; i++)
    tokens[i] = (int32_t)pkv_rng_below(&rng, 50000);
  assert_int_equal(pkv_hash_chunks(digests, NULL, 0, 16, 1), 0);
  assert_int_equal(pkv_hash_chunks(NULL, NULL, 0, 1, 1), 0);
  assert_int_equal(pkv_hash_chunks(NULL, tokens, SIZE_MAX, SIZE_MAX - 1, 1), 2); /* counts only */
  const size_t chunks[] = {1, 2, 7, 16, 64, 299, 300, 301, SIZE_MAX};
  for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++)
    for (size_t count = 0; count <= N; count += 13) {
      const size_t chunk = chunks[c];
      const size_t expected = count == 0 ? 0 : (count - 1) / chunk + 1;
      memset(digests, 0xee, sizeof digests);
      assert_int_equal(pkv_hash_chunks(digests, tokens, count, chunk, 42), expected);
      assert_int_equal(pkv_hash_chunks(NULL, tokens, count, chunk, 42), expected);
      assert_true(digests[expected] == UINT64_C(0xeeeeeeeeeeeeeeee));
      if (chunk <= N)
        for (size_t i = 0; i < expected; i++)
          assert_true(digests[i] == digest_of(tokens, count, chunk, 42, i));
      /* Whole chunks of a prefix have the same digests; its partial chunk has its own. */
      const size_t less = count / 2;
      const size_t n = pkv_hash_chunks(shorter, tokens, less, chunk, 42);
      for (size_t i = 0; i < n; i++)
        assert_true((shorter[i] == digests[i]) ==
                    ((i + 1) * chunk <= less || less == count || expected == 0));
      if (chunk == SIZE_MAX) break;
    }
}

/* A change of any token, of the seed or of the order changes every digest from there on. */
static void hash_depends_on_all(void **state) {
  (void)state;
  enum { N = 64, CHUNK = 8 };
  int32_t tokens[N];
  uint64_t base[N / CHUNK], changed[N / CHUNK];
  for (int32_t i = 0; i < N; i++)
    tokens[i] = i;
  pkv_hash_chunks(base, tokens, N, CHUNK, 0);
  for (size_t at = 0; at < N; at++) {
    tokens[at] ^= 1 << 20;
    pkv_hash_chunks(changed, tokens, N, CHUNK, 0);
    tokens[at] ^= 1 << 20;
    for (size_t i = 0; i < N / CHUNK; i++)
      assert_true((base[i] == changed[i]) == (i < at / CHUNK));
  }
  pkv_hash_chunks(changed, tokens, N, CHUNK, 1);
  for (size_t i = 0; i < N / CHUNK; i++)
    assert_true(base[i] != changed[i]);
  /* The same chunk at another place has another digest. */
  const int32_t same[4] = {5, 5, 5, 5};
  pkv_hash_chunks(changed, same, 4, 1, 0);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < i; j++)
      assert_true(changed[i] != changed[j]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(published_values),    cmocka_unit_test(bounds),
      cmocka_unit_test(even_spread),         cmocka_unit_test(normal_moments),
      cmocka_unit_test(determinism),         cmocka_unit_test(hash_chains),
      cmocka_unit_test(hash_depends_on_all),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
