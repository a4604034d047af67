/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an operation on the prefix tree costs at most, counted in segments computed and not in
 * microseconds: chains of tens of thousands of nodes built in any order, queues that grow lopsided
 * and are then cancelled where they were heavy, random tries.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "sched/sched_tree.h"
#include "support/sched_drive.h"

static pkv_error err;

typedef struct meter {
  pkv_sched *s;
  uint64_t before, most, sum;
  int64_t operations;
} meter;

static void start(meter *m) {
  m->before = m->s->tree->pulls;
}

static void stop(meter *m) {
  const uint64_t n = m->s->tree->pulls - m->before;
  if (n > m->most) m->most = n;
  m->sum += n;
  m->operations++;
}

/* The worst is within c * log2(held)^2, the mean within c * log2(held). */
static void judge(const meter *m, const char *what, int32_t held) {
  const double lg = log2((double)held + 2), mean = (double)m->sum / (double)m->operations;
  print_message("  %-28s %6d held: mean %.1f, worst %llu segments (log2 %.1f)\n", what, held, mean,
                (unsigned long long)m->most, lg);
  assert_true((double)m->most <= 4 * lg * lg);
  assert_true(mean <= 5 * lg);
}

static void insert(meter *m, const pkv_sched_request *r) {
  start(m);
  const pkv_status status = pkv_sched_insert(m->s, r, &err);
  stop(m);
  if (status != PKV_OK) fail_msg("insert: %s", err.text);
}

static void call(meter *m, pkv_status (*operation)(pkv_sched *, uint64_t, pkv_error *),
                 uint64_t id) {
  start(m);
  const pkv_status status = operation(m->s, id, &err);
  stop(m);
  if (status != PKV_OK) fail_msg("%s", err.text);
}

/* Prompts that are prefixes of each other, of every length: a node for each. */
static void chains(void **state) {
  (void)state;
  enum { N = 40000 };
  int32_t *trunk = malloc(sizeof *trunk * (N + 1)), *order = malloc(sizeof *order * N);
  assert_non_null(trunk);
  assert_non_null(order);
  for (int32_t i = 0; i <= N; i++)
    trunk[i] = i;
  static const char *const names[] = {"chain, ascending", "chain, descending", "chain, shuffled"};
  for (int k = 0; k < 3; k++) {
    pkv_rng rng;
    pkv_rng_init(&rng, 7);
    for (int32_t i = 0; i < N; i++)
      order[i] = k == 1 ? N - 1 - i : i;
    for (int32_t i = N - 1; k == 2 && i > 0; i--) {
      const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)i + 1), t = order[i];
      order[i] = order[j];
      order[j] = t;
    }
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.max_requests = N;
    o.chunk_tokens = 1;
    o.bypass_limit = -1;
    meter m = {sd_create(&o), 0, 0, 0, 0};
    pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
    r.tokens = trunk;
    for (int32_t i = 0; i < N; i++) {
      r.id = (uint64_t)order[i];
      r.prompt_tokens = order[i] + 1;
      insert(&m, &r);
    }
    assert_int_equal(sd_stats(m.s).tree_nodes, N - 1);
    judge(&m, names[k], N);
    m = (meter){m.s, 0, 0, 0, 0};
    for (int i = 0; i < 2000; i++) { /* covered down to anywhere, and away again */
      const uint64_t id = pkv_rng_below(&rng, N);
      call(&m, pkv_sched_admit, id);
      start(&m);
      const pkv_sched_pick pick = sd_best(m.s);
      stop(&m);
      /* Next to it: one new token and one more shared, or none new and one less. */
      if (pick.id + 1 != id && pick.id != id + 1) fail_msg("%d after %d", (int)pick.id, (int)id);
      call(&m, pkv_sched_finish, id);
      r.id = id;
      r.prompt_tokens = (int32_t)id + 1;
      insert(&m, &r);
    }
    judge(&m, "  admit, best, finish, insert", N);
    assert_int_equal(pkv_sched_check(m.s, &err), PKV_OK);
    m = (meter){m.s, 0, 0, 0, 0};
    for (int32_t i = 0; i < N; i++)
      call(&m, pkv_sched_cancel, (uint64_t)order[N - 1 - i]);
    judge(&m, "  cancel", N);
    pkv_sched_destroy(m.s);
  }
  free(trunk);
  free(order);
}

/*
 * Grows a trie upwards. At each level a side branch becomes larger than all that is below and
 * then shrinks to two requests: without care each level leaves a light edge over nearly all.
 */
static void lopsided_cancellation(void **state) {
  (void)state;
  enum { LEVELS = 220 };
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.chunk_tokens = 1;
  meter m = {sd_create(&o), 0, 0, 0, 0};
  static uint64_t hashes[LEVELS * 8][LEVELS + 4];
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  for (int level = LEVELS - 1; level >= 0; level--) {
    const int below = 2 * (LEVELS - level);
    /* The trunk up to `level`, then the side branch of this level, then each its own. */
    for (int i = 0; i < 2 * below + 3; i++) {
      uint64_t *h = hashes[i < 2 ? 2 * level + i : 2 * LEVELS + i];
      for (int k = 0; k < level; k++)
        h[k] = 1;
      h[level] = level == LEVELS - 1 ? 1 : 2;
      h[level + 1] = 100 + (uint64_t)i;
      r.id = i < 2 ? (uint64_t)(2 * level + i) : 100000 + (uint64_t)i;
      r.hashes = h;
      r.hash_count = r.prompt_tokens = level + 2;
      insert(&m, &r);
    }
    for (int i = 2 * below + 2; i >= 2; i--)
      call(&m, pkv_sched_cancel, 100000 + (uint64_t)i);
  }
  assert_int_equal(sd_stats(m.s).waiting, 2 * LEVELS);
  assert_int_equal(pkv_sched_check(m.s, &err), PKV_OK);
  judge(&m, "lopsided cancellation", 2 * LEVELS);
  m = (meter){m.s, 0, 0, 0, 0};
  call(&m, pkv_sched_admit, 2 * (LEVELS - 1)); /* at the far end */
  (void)sd_best(m.s);
  call(&m, pkv_sched_finish, 2 * (LEVELS - 1));
  judge(&m, "  then at the far end", 2 * LEVELS);
  pkv_sched_destroy(m.s);
}

/* At each level a side branch of two requests comes first, and all the rest hangs beside it. */
static void lopsided_growth(void **state) {
  (void)state;
  enum { LEVELS = 600 };
  static uint64_t hashes[LEVELS * 2][LEVELS + 4];
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.chunk_tokens = 1;
  meter m = {sd_create(&o), 0, 0, 0, 0};
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  for (int i = 0; i < 2 * LEVELS; i++) {
    uint64_t *h = hashes[i];
    for (int k = 0; k < i / 2; k++)
      h[k] = 1;
    h[i / 2] = 2;
    h[i / 2 + 1] = 100 + (uint64_t)i;
    r.id = (uint64_t)i;
    r.hashes = h;
    r.hash_count = r.prompt_tokens = i / 2 + 2;
    insert(&m, &r);
  }
  judge(&m, "lopsided growth", 2 * LEVELS);
  m = (meter){m.s, 0, 0, 0, 0};
  for (int i = 2 * LEVELS - 1; i >= 0; i -= 7) {
    call(&m, pkv_sched_admit, (uint64_t)i);
    call(&m, pkv_sched_finish, (uint64_t)i);
  }
  judge(&m, "  then from the far end", 2 * LEVELS);
  assert_int_equal(pkv_sched_check(m.s, &err), PKV_OK);
  pkv_sched_destroy(m.s);
}

/* Each prompt continues a random prefix of a random earlier one; then whole branches go. */
static void random_tries(void **state) {
  (void)state;
  enum { N = 20000, LEVELS = 40 };
  uint64_t(*hashes)[LEVELS] = malloc(sizeof(uint64_t[LEVELS]) * N);
  assert_non_null(hashes);
  pkv_rng rng;
  pkv_rng_init(&rng, 9);
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.max_requests = N;
  o.chunk_tokens = 1;
  meter m = {sd_create(&o), 0, 0, 0, 0};
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.prompt_tokens = r.hash_count = LEVELS;
  for (int i = 0; i < N; i++) {
    const int keep = i == 0 ? 0 : (int)pkv_rng_below(&rng, LEVELS);
    if (keep > 0) memcpy(hashes[i], hashes[pkv_rng_below(&rng, (uint64_t)i)], sizeof hashes[i]);
    for (int k = keep; k < LEVELS; k++)
      hashes[i][k] = pkv_rng_next(&rng);
    r.id = (uint64_t)i;
    r.hashes = hashes[i];
    insert(&m, &r);
  }
  judge(&m, "random trie", N);
  m = (meter){m.s, 0, 0, 0, 0};
  for (int i = 0; i < N / 2; i++)
    call(&m, pkv_sched_cancel, (uint64_t)i); /* the older ones: what others branched from */
  judge(&m, "  cancel the older half", N);
  assert_int_equal(pkv_sched_check(m.s, &err), PKV_OK);
  pkv_sched_destroy(m.s);
  free(hashes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(chains),
      cmocka_unit_test(lopsided_growth),
      cmocka_unit_test(lopsided_cancellation),
      cmocka_unit_test(random_tries),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
