/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What users of such schedulers complain about, and the faults of the published code: a named test
 * each. Where a fault can be switched on, the test shows it there and its absence by default.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "sched/sched_tree.h"
#include "support/sched_drive.h"

static pkv_error err;

static const pkv_sched_order all_orders[] = {PKV_SCHED_TREE, PKV_SCHED_FCFS, PKV_SCHED_PRIORITY,
                                             PKV_SCHED_CHT,  PKV_SCHED_LPM,  PKV_SCHED_DFS_WEIGHT};

/* ---- one cold request among endless hot arrivals ---- */

typedef struct hot_world {
  pkv_sched *s;
  int32_t *prompts[400];
  uint64_t next, active[8];
  int64_t now_ns;
} hot_world;

enum { HOT_TOKENS = 320, HOT_ROWS = 8, COLD = 1000000 };

static void hot_insert(hot_world *w) {
  int32_t **p = &w->prompts[w->next % 400];
  free(*p);
  *p = sd_prompt(1, 256, (int32_t)w->next, HOT_TOKENS);
  sd_insert(w->s, w->next++, *p, HOT_TOKENS);
}

/* Admissions until the cold request is in; `most` = it never was. */
static int64_t until_cold(const pkv_sched_options *o, int64_t most) {
  static hot_world w;
  memset(&w, 0, sizeof w);
  w.s = sd_create(o);
  if (o->clock != NULL) *(int64_t *)o->clock_ctx = 1;
  for (int i = 0; i < 12; i++)
    hot_insert(&w);
  for (int i = 0; i < HOT_ROWS; i++)
    w.active[i] = sd_admit_best(w.s);
  int32_t *cold = sd_prompt(2, HOT_TOKENS, 0, HOT_TOKENS);
  sd_insert(w.s, COLD, cold, HOT_TOKENS);
  int64_t n = 0;
  for (int turn = 0; n < most; turn++) {
    /* Hot ones keep coming, faster than they are served. */
    hot_insert(&w);
    sd_finish(w.s, w.active[turn % HOT_ROWS]);
    if (o->clock != NULL) *(int64_t *)o->clock_ctx += 10000000;
    const pkv_sched_pick pick = sd_best(w.s);
    if (pick.verdict == PKV_SCHED_ADD || sd_stats(w.s).active == 0) {
      sd_admit(w.s, pick.id);
      w.active[turn % HOT_ROWS] = pick.id;
    } else { /* stopped: the batch drains, then it starts again */
      for (int i = 0; i < HOT_ROWS; i++)
        if (i != turn % HOT_ROWS) sd_finish(w.s, w.active[i]);
      for (int i = 0; i < HOT_ROWS; i++) {
        w.active[i] = sd_admit_best(w.s);
        n++;
        if (w.active[i] == COLD) break;
        hot_insert(&w);
        if (i == HOT_ROWS - 1) break;
      }
      if (pkv_sched_get_state(w.s, COLD) == PKV_SCHED_ACTIVE) break;
      continue;
    }
    n++;
    if (pick.id == COLD) break;
  }
  pkv_sched_destroy(w.s);
  for (int i = 0; i < 400; i++)
    free(w.prompts[i]);
  free(cold);
  return n;
}

static void test_31_cold_request_is_admitted_within_the_bound(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof all_orders / sizeof all_orders[0]; i++)
    for (int ageing = 0; ageing < 2; ageing++)
      for (int policy = 0; policy < PKV_SCHED_POLICIES; policy++) {
        pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
        o.order = all_orders[i];
        o.policy = (pkv_sched_policy)policy;
        o.ageing = (pkv_sched_ageing)ageing;
        const int64_t n = until_cold(&o, 4000);
        /* 12 hot ones came first, 8 of them were in the batch: the rest, 32 bypasses, and it. In a
           row of the oldest's, each of the older ones may take its 33. */
        const int64_t bound = ageing == PKV_SCHED_AGEING_EACH ? 4 + 32 + 1 : 5 * 33;
        if (n > bound)
          fail_msg("order %s, policy %s, ageing %d: admitted after %lld, at most %lld",
                   pkv_sched_order_name(o.order), pkv_sched_policy_name(o.policy), ageing,
                   (long long)n, (long long)bound);
      }
}

static void test_31_cold_request_is_admitted_in_time(void **state) {
  (void)state;
  int64_t now_ns = 1;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.bypass_limit = -1;
  o.max_wait_s = 0.5; /* 50 turns of 10 ms */
  o.clock = sd_clock;
  o.clock_ctx = &now_ns;
  assert_in_range(until_cold(&o, 4000), 1, 52);
}

static void test_31_published_order_starves_it(void **state) {
  (void)state;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = PKV_SCHED_CHT;
  o.faults = PKV_SCHED_FAULT_NO_AGEING | PKV_SCHED_FAULT_ABSOLUTE;
  assert_int_equal(until_cold(&o, 4000), 4000);
}

/* ---- prefix groups ---- */

static void test_32_groups_whatever_the_arrival_times(void **state) {
  (void)state;
  int64_t now_ns = 1;
  const pkv_sched_order orders[] = {PKV_SCHED_TREE, PKV_SCHED_CHT};
  int32_t *prompts[20];
  for (int i = 0; i < 20; i++)
    prompts[i] = sd_prompt(i % 2, 640, i, 700);
  for (size_t k = 0; k < 2; k++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = orders[k];
    o.clock = sd_clock;
    o.clock_ctx = &now_ns;
    pkv_sched *s = sd_create(&o);
    for (int i = 0; i < 20; i++, now_ns++) /* two groups in turn, a tick apart */
      sd_insert(s, (uint64_t)i, prompts[i], 700);
    for (int i = 0; i < 20; i++) {
      const uint64_t id = sd_admit_best(s);
      if (id != (uint64_t)(i < 10 ? 2 * i : 2 * (i - 10) + 1))
        fail_msg("%s: admission %d is request %d", pkv_sched_order_name(o.order), i, (int)id);
    }
    pkv_sched_destroy(s);
  }
  for (int i = 0; i < 20; i++)
    free(prompts[i]);
}

/* ---- preemption ---- */

static void preempted(pkv_sched_order order, uint32_t faults, int comes_back) {
  int32_t *a = sd_prompt(1, 640, 0, 700), *b = sd_prompt(1, 640, 1, 700);
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = order;
  o.faults = faults;
  pkv_sched *s = sd_create(&o);
  sd_insert(s, 1, a, 700);
  sd_insert(s, 2, b, 700);
  assert_int_equal(sd_admit_best(s), 1);
  assert_int_equal(sd_admit_best(s), 2);
  assert_int_equal(pkv_sched_preempt(s, 1, &err), PKV_OK);
  assert_int_equal(sd_best(s).verdict, PKV_SCHED_EMPTY); /* until it returns */
  assert_int_equal(pkv_sched_return(s, 1, &err), PKV_OK);
  const pkv_sched_pick pick = sd_best(s);
  assert_int_equal(pick.verdict, comes_back ? PKV_SCHED_ADD : PKV_SCHED_EMPTY);
  if (comes_back) {
    assert_int_equal(pick.id, 1);
    assert_int_equal(pick.shared_tokens, 640);
  }
  /* Free after cancel, and the id may come again. */
  assert_int_equal(pkv_sched_cancel(s, 1, &err), PKV_OK);
  assert_int_equal(pkv_sched_get_state(s, 1), PKV_SCHED_UNKNOWN);
  sd_insert(s, 1, a, 700);
  assert_int_equal(sd_best(s).id, 1);
  pkv_sched_destroy(s);
  free(a);
  free(b);
}

static void test_33_preempted_request_is_picked_again(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof all_orders / sizeof all_orders[0]; i++)
    preempted(all_orders[i], 0, 1);
  preempted(PKV_SCHED_CHT, PKV_SCHED_FAULT_LOST_PREEMPTED, 0);
}

/* ---- a short stranger against a long sharer ---- */

static void test_34_long_sharer_before_short_stranger(void **state) {
  (void)state;
  enum { PREFIX = 200 * 64 };
  int32_t *first = sd_prompt(1, PREFIX, 0, PREFIX + 10);
  int32_t *sharer = sd_prompt(1, PREFIX, 1, PREFIX + 100); /* two new chunks */
  int32_t *stranger = sd_prompt(2, 40, 2, 40);             /* one */
  for (int k = 0; k < 2; k++)
    for (int absolute = 0; absolute < 2; absolute++) {
      pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
      o.order = k == 0 ? PKV_SCHED_TREE : PKV_SCHED_CHT;
      o.faults = absolute ? PKV_SCHED_FAULT_ABSOLUTE : 0;
      pkv_sched *s = sd_create(&o);
      sd_insert(s, 1, first, PREFIX + 10);
      assert_int_equal(sd_admit_best(s), 1);
      sd_insert(s, 2, stranger, 40);
      sd_insert(s, 3, sharer, PREFIX + 100);
      assert_int_equal(sd_best(s).id, absolute ? 2 : 3);
      pkv_sched_destroy(s);
    }
  free(first);
  free(sharer);
  free(stranger);
}

/* ---- the cost of the first admission of a prefix that all share ---- */

static void test_35_first_admission_costs_no_more(void **state) {
  (void)state;
  enum { WAITING = 5000, PREFIX = 20480, LENGTH = PREFIX + 64, CHURN = 200000 };
  int32_t *prefix = sd_prompt(1, PREFIX, 0, PREFIX);
  uint64_t *hashes = malloc((WAITING + 1) * sizeof *hashes * (LENGTH / 64));
  assert_non_null(hashes);
  for (int i = 0; i <= WAITING; i++) {
    uint64_t *h = hashes + (size_t)i * (LENGTH / 64);
    (void)pkv_sched_digests(h, prefix, PREFIX, 64, PKV_SCHED_HASH_BULK);
    h[PREFIX / 64] = (uint64_t)i + 1;
  }
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.prompt_tokens = LENGTH;
  r.hash_count = LENGTH / 64;
  double insert_us = 0, pick_us, admit_us;
  for (int i = 0; i < WAITING; i++) {
    r.id = (uint64_t)i;
    r.hashes = hashes + (size_t)i * (LENGTH / 64);
    const double t = sd_now_us();
    assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
    insert_us += sd_now_us() - t;
  }
  const uint64_t pulls = s->tree->pulls;
  double t = sd_now_us();
  const pkv_sched_pick pick = sd_best(s);
  pick_us = sd_now_us() - t;
  t = sd_now_us();
  sd_admit(s, pick.id);
  admit_us = sd_now_us() - t;
  print_message("  insert %.2f us, pick %.2f us, admit %.2f us, %llu nodes mended\n",
                insert_us / WAITING, pick_us, admit_us,
                (unsigned long long)(s->tree->pulls - pulls));
  assert_true(s->tree->pulls - pulls <= 4);
  assert_true(insert_us / WAITING <= 50 * sd_slack());
  const pkv_sched_stats before = sd_stats(s);
  for (int i = 0; i < CHURN; i++) { /* five calls each: a million */
    const uint64_t id = (uint64_t)i % WAITING;
    if (pkv_sched_get_state(s, id) == PKV_SCHED_UNKNOWN) {
      r.id = id;
      r.hashes = hashes + (size_t)id * (LENGTH / 64);
      assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
    }
    const uint64_t best = sd_admit_best(s);
    sd_finish(s, best);
    r.id = best;
    r.hashes = hashes + (size_t)best * (LENGTH / 64);
    assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
  }
  const pkv_sched_stats after = sd_stats(s);
  assert_int_equal(after.memory_bytes, before.memory_bytes);
  assert_true(after.used_bytes <= before.used_bytes + 1024);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  pkv_sched_destroy(s);
  free(hashes);
  free(prefix);
}

/* The published structure's heap grows with every admission; ours sweeps it. */
static void test_35_stale_entries_are_swept(void **state) {
  (void)state;
  enum { WAITING = 200, LENGTH = 50 * 64, CHURN = 2000 };
  int32_t *prompts[WAITING + 1];
  for (int i = 0; i <= WAITING; i++)
    prompts[i] = sd_prompt(1, 49 * 64, i, LENGTH);
  for (int fault = 0; fault < 2; fault++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = PKV_SCHED_CHT;
    o.faults = fault ? PKV_SCHED_FAULT_STALE_HEAP | PKV_SCHED_FAULT_ABSOLUTE : 0;
    pkv_sched *s = sd_create(&o);
    for (int i = 0; i <= WAITING; i++)
      sd_insert(s, (uint64_t)i, prompts[i], LENGTH);
    int64_t most = 0;
    for (int i = 0; i < CHURN / (fault ? 100 : 1); i++) {
      const uint64_t id = sd_admit_best(s);
      sd_finish(s, id); /* the whole prefix leaves the batch, and comes again */
      sd_insert(s, id, prompts[id], LENGTH);
      const int64_t stale = sd_stats(s).heap_stale;
      if (stale > most) most = stale;
    }
    print_message("  stale entries %s: at most %lld of %d waiting\n", fault ? "piling up" : "swept",
                  (long long)most, WAITING);
    if (fault)
      assert_true(most > 100 * WAITING);
    else
      assert_true(most <= 3 * WAITING);
    pkv_sched_destroy(s);
  }
  for (int i = 0; i <= WAITING; i++)
    free(prompts[i]);
}

/* ---- many leaves ---- */

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void test_36_leaving_among_50000(void **state) {
  (void)state;
  enum { LEAVES = 50000, STEPS = 4000, LEVELS = 8 };
  pkv_rng rng;
  pkv_rng_init(&rng, 36);
  uint64_t(*hashes)[LEVELS] = malloc(sizeof(uint64_t[LEVELS]) * LEAVES);
  double *us = malloc(sizeof *us * STEPS);
  assert_non_null(hashes);
  assert_non_null(us);
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.max_requests = LEAVES;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.prompt_tokens = LEVELS * 64;
  r.hash_count = LEVELS;
  for (int i = 0; i < LEAVES; i++) {
    const int keep = i == 0 ? 0 : (int)pkv_rng_below(&rng, LEVELS);
    if (keep > 0) memcpy(hashes[i], hashes[pkv_rng_below(&rng, (uint64_t)i)], sizeof hashes[i]);
    for (int k = keep; k < LEVELS; k++)
      hashes[i][k] = pkv_rng_next(&rng);
    r.id = (uint64_t)i;
    r.hashes = hashes[i];
    assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
  }
  for (int i = 0; i < STEPS; i++) {
    const uint64_t id = (uint64_t)i * 12 + 5;
    if (i % 2) sd_admit(s, id);
    const double t = sd_now_us();
    assert_int_equal(i % 2 ? pkv_sched_finish(s, id, &err) : pkv_sched_cancel(s, id, &err), PKV_OK);
    us[i] = sd_now_us() - t;
  }
  qsort(us, STEPS, sizeof *us, by_value);
  print_message("  leaving: p50 %.2f us, p99 %.2f us\n", us[STEPS / 2], us[STEPS * 99 / 100]);
  assert_true(us[STEPS * 99 / 100] <= 100 * sd_slack());
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  pkv_sched_destroy(s);
  free(us);
  free(hashes);
}

static double idle_us(pkv_sched *s) {
  double least = 1e9;
  for (int i = 0; i < 300; i++) {
    const double t = sd_now_us();
    (void)sd_best(s);
    (void)sd_stats(s);
    (void)pkv_sched_get_state(s, 1);
    const double us = sd_now_us() - t;
    if (us < least) least = us;
  }
  return least;
}

static void test_37_idle_tick_costs_the_same(void **state) {
  (void)state;
  int32_t *prompt = sd_prompt(1, 128, 0, 128);
  double us[2];
  for (int k = 0; k < 2; k++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.max_requests = 100000;
    pkv_sched *s = sd_create(&o);
    for (uint64_t id = 0; id < (k == 0 ? 100u : 100000u); id++)
      sd_insert(s, id, prompt, 128);
    for (uint64_t id = 0; id < 50; id++)
      sd_admit(s, id);
    us[k] = idle_us(s);
    pkv_sched_destroy(s);
  }
  print_message("  an idle tick: %.2f us with 100 waiting, %.2f us with 100000\n", us[0], us[1]);
  assert_true(us[1] <= 3 * us[0] + 1 * sd_slack());
  free(prompt);
}

/* ---- digests ---- */

static uint64_t one_value(void *ctx, const void *data, size_t bytes, uint64_t seed) {
  (void)data;
  (void)bytes;
  (void)seed;
  ++*(int64_t *)ctx;
  return 42;
}

/* Different prompts of equal digests are not taken for equal. */
static void test_equal_digests_are_compared(void **state) {
  (void)state;
  int32_t *a = sd_prompt(1, 640, 0, 640), *b = sd_prompt(2, 640, 0, 640);
  for (int k = 0; k < 3; k++) {
    int64_t hashed = 0;
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = k == 0 ? PKV_SCHED_TREE : PKV_SCHED_CHT;
    o.faults = k == 2 ? PKV_SCHED_FAULT_TRUST_DIGESTS : 0;
    o.hash_fn = one_value;
    o.hash_ctx = &hashed;
    pkv_sched *s = sd_create(&o);
    sd_insert(s, 1, a, 640);
    assert_int_equal(sd_admit_best(s), 1);
    sd_insert(s, 2, b, 640);
    assert_int_equal(sd_best(s).shared_tokens, k == 2 ? 640 : 0);
    sd_insert(s, 3, a, 640);
    sd_admit(s, 2);
    assert_int_equal(sd_best(s).shared_tokens, 640);
    assert_int_equal(sd_stats(s).chain_chunks, k == 2 ? 10 : 0);
    if (k == 2)
      assert_int_equal(sd_stats(s).collisions, 0);
    else
      assert_true(sd_stats(s).collisions > 0);
    pkv_sched_destroy(s);
    /* A call a chunk, not a call a token: fault 4. */
    assert_true(hashed <= 30);
  }
  free(a);
  free(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_31_cold_request_is_admitted_within_the_bound),
      cmocka_unit_test(test_31_cold_request_is_admitted_in_time),
      cmocka_unit_test(test_31_published_order_starves_it),
      cmocka_unit_test(test_32_groups_whatever_the_arrival_times),
      cmocka_unit_test(test_33_preempted_request_is_picked_again),
      cmocka_unit_test(test_34_long_sharer_before_short_stranger),
      cmocka_unit_test(test_35_first_admission_costs_no_more),
      cmocka_unit_test(test_35_stale_entries_are_swept),
      cmocka_unit_test(test_36_leaving_among_50000),
      cmocka_unit_test(test_37_idle_tick_costs_the_same),
      cmocka_unit_test(test_equal_digests_are_compared),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
