/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who runs when: every order and policy of the scheduler gives the same answers and ends
 * everything; decoding requests advance in every step whatever comes; small requests pass a large
 * one a bounded number of times.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/engine_drive.h"
#include "support/test_alloc.h"
#include "support/tiny_model.h"

#define KINDS  24
#define PROMPT 480
#define VOCAB  320

static tiny_model tiny;
static int32_t prompts[KINDS][PROMPT];
static drive_answer alone[KINDS], answers[64];

static pkv_engine_options engine_options(int64_t cache_tokens) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 6;
  o.max_requests = 64;
  o.cache_tokens = cache_tokens;
  o.max_seq_len = 640;
  o.prefill_chunk = 96;
  return o;
}

/* Four groups of prompts, each with a prefix of its own. */
static pkv_request kind_request(int i) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[i];
  r.prompt_tokens = 60 + 17 * (i % 20);
  r.max_tokens = 4 + i;
  r.logprobs = 1;
  r.temperature = i % 2 ? 0.8f : 0.0f;
  r.seed = (uint64_t)i;
  r.priority = i % 3;
  r.n = i % 8 == 7 ? 2 : 1;
  return r;
}

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f;
  tiny_model_open(&tiny, &options);
  for (int i = 0; i < KINDS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, 300 + (uint64_t)i);
    if (i >= 4) memcpy(prompts[i], prompts[i % 4], 200 * sizeof(int32_t));
  }
  const pkv_engine_options o = engine_options(8192);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  for (int i = 0; i < KINDS; i++) {
    pkv_request r = kind_request(i);
    r.n = 1;
    drive_submit(engine, &r, &alone[i]);
    (void)drive_all(engine, 1000);
    pkv_engine_clear_cache(engine);
  }
  drive_finish(engine);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  return 0;
}

static void run_order(pkv_sched_order order, pkv_sched_policy policy, int64_t tokens) {
  static drive_answer two[KINDS][2];
  char what[64];
  pkv_rng rng;
  pkv_engine_options o = engine_options(tokens);
  o.order = order;
  o.admission = policy;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_rng_init(&rng, (uint64_t)order * 10 + (uint64_t)policy);
  (void)snprintf(what, sizeof what, "%s, %s, %lld tokens", pkv_sched_order_name(order),
                 pkv_sched_policy_name(policy), (long long)tokens);
  for (int i = 0; i < KINDS; i++) {
    const pkv_request r = kind_request(i);
    drive_submit_choices(engine, &r, two[i], r.n);
    if (pkv_rng_below(&rng, 3) == 0) (void)drive_step(engine);
    /* Someone comes and goes, waiting or running. */
    drive_submit_choices(engine, &r, answers, r.n);
    if (pkv_rng_below(&rng, 2) == 0) (void)drive_step(engine);
    pkv_engine_cancel(engine, answers[0].id);
    (void)drive_step(engine);
    (void)drive_step(engine);
    assert_int_not_equal(answers[0].finish, PKV_FINISH_NONE);
  }
  (void)drive_all(engine, 20000);
  for (int i = 0; i < KINDS; i++)
    drive_equal(&two[i][0], &alone[i], what);
  drive_finish(engine);
}

static void test_orders(void **state) {
  (void)state;
  for (int order = 0; order < PKV_SCHED_ORDERS; order++)
    for (int policy = 0; policy < PKV_SCHED_POLICIES; policy++) {
      run_order((pkv_sched_order)order, (pkv_sched_policy)policy, 8192);
      run_order((pkv_sched_order)order, (pkv_sched_policy)policy, 704);
    }
}

static void test_bad_orders(void **state) {
  (void)state;
  pkv_engine *engine = NULL;
  pkv_error err;
  pkv_engine_options o = engine_options(1024);
  o.order = (pkv_sched_order)6;
  assert_int_equal(pkv_engine_create(&engine, tiny.model, &o, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "order is 6"));
  o = engine_options(1024);
  o.admission = (pkv_sched_policy)-1;
  assert_int_equal(pkv_engine_create(&engine, tiny.model, &o, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "admission is -1"));
}

/* Steps of the engine with a scheduler allocate nothing either. */
static void test_steps_allocate_nothing(void **state) {
  (void)state;
  static drive_answer two[KINDS][2];
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    test_alloc ta;
    test_alloc_init(&ta);
    const pkv_allocator allocator = test_alloc_allocator(&ta);
    pkv_engine_options o = engine_options(704);
    o.allocator = &allocator;
    o.order = (pkv_sched_order)order;
    o.admission = PKV_SCHED_MARGINAL;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    int64_t inside = 0;
    for (int round = 0; round < 4; round++) {
      for (int i = 0; i < KINDS; i++) {
        const pkv_request r = kind_request(i);
        drive_submit_choices(engine, &r, two[i], r.n);
      }
      const int64_t before = test_alloc_calls(&ta);
      (void)drive_all(engine, 20000);
      if (round > 1) inside += test_alloc_calls(&ta) - before; /* after warm-up */
    }
    if (inside != 0) print_error("order %d: %lld allocations\n", order, (long long)inside);
    assert_int_equal(inside, 0);
    drive_finish(engine);
    test_alloc_finish(&ta);
  }
}

/* Four streams decode while prompts keep coming: each has its token in every step. */
static void test_decoding_never_waits(void **state) {
  (void)state;
  for (int order = 0; order < 2; order++) {
    pkv_engine_options o = engine_options(8192);
    o.order = order ? PKV_SCHED_TREE : PKV_SCHED_FCFS;
    o.prefill_beside = 32;
    o.max_rows = 12;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt_tokens = 20;
    r.max_tokens = 300;
    r.ignore_end = 1;
    for (int i = 0; i < 4; i++) {
      r.prompt = prompts[i];
      drive_submit(engine, &r, &answers[i]);
    }
    (void)drive_step(engine);
    int next = 4;
    for (int step = 0; step < 200; step++) {
      int32_t had[4];
      pkv_engine_stats before = PKV_ENGINE_STATS_INIT, after = PKV_ENGINE_STATS_INIT;
      for (int i = 0; i < 4; i++)
        had[i] = answers[i].count;
      if (step % 4 == 0 && next < 60) {
        pkv_request big = PKV_REQUEST_INIT;
        big.prompt = prompts[step % KINDS];
        big.prompt_tokens = PROMPT;
        big.max_tokens = 1;
        big.cache_salt = (uint64_t)step;
        drive_submit(engine, &big, &answers[next++]);
      }
      pkv_engine_get_stats(&before, engine);
      (void)drive_step(engine);
      pkv_engine_get_stats(&after, engine);
      for (int i = 0; i < 4; i++)
        assert_int_equal(answers[i].count, had[i] + 1);
      assert_in_range(after.prefill_tokens - before.prefill_tokens, 0, 32);
    }
    (void)drive_all(engine, 4000);
    drive_finish(engine);
  }
}

/* A short prompt behind long ones: its share of each step's budget lets it start at once. */
static void test_newcomers_have_a_share(void **state) {
  (void)state;
  pkv_engine_options o = engine_options(8192);
  o.prefill_chunk = 64;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = PROMPT;
  r.max_tokens = 1;
  r.prompt = prompts[0];
  drive_submit(engine, &r, &answers[0]);
  r.prompt = prompts[1];
  r.prompt_tokens = 16;
  drive_submit(engine, &r, &answers[1]);
  (void)drive_step(engine);
  assert_int_equal(answers[1].finish, PKV_FINISH_LENGTH);
  assert_int_equal(answers[0].finish, PKV_FINISH_NONE);
  (void)drive_all(engine, 20);
  drive_finish(engine);
}

/* The pool is nearly full and a large request heads the queue: small ones run meanwhile, and so
   does the large one, although small ones keep coming. */
static void test_large_head(void **state) {
  (void)state;
  pkv_engine_options o = engine_options(640);
  o.prefix_cache = 0;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_request r = PKV_REQUEST_INIT;
  r.ignore_end = 1;
  r.prompt = prompts[0];
  r.prompt_tokens = 100;
  r.max_tokens = 120;
  drive_submit(engine, &r, &answers[0]); /* holds the pool for a while */
  (void)drive_step(engine);
  r.prompt = prompts[1];
  r.prompt_tokens = 480;
  r.max_tokens = 3;
  drive_submit(engine, &r, &answers[1]); /* does not fit beside it */
  int small = 0, steps = 0;
  static drive_answer last;
  last.finish = PKV_FINISH_LENGTH;
  while (answers[1].finish == PKV_FINISH_NONE) {
    if (last.finish != PKV_FINISH_NONE) {
      r.prompt = prompts[2 + small % 20];
      r.prompt_tokens = 40;
      r.max_tokens = 8;
      drive_submit(engine, &r, &last);
      small++;
    }
    (void)drive_step(engine);
    assert_true(++steps < 1000);
  }
  print_message("%d small requests beside the large one, %d steps\n", small, steps);
  assert_true(small > 3);
  pkv_engine_cancel(engine, last.id);
  (void)drive_all(engine, 300);
  drive_finish(engine);
}

/* Two paused ones hold all rows, and pages that the next one needs: it starts at once, whatever the
   order. They get the answers they would have had, once they may go on. */
static void paused_beside(pkv_sched_order order, pkv_sched_policy policy) {
  static drive_answer behind[2];
  static const int kinds[] = {18, 19, 2};
  pkv_engine_options o = engine_options(704);
  o.order = order;
  o.admission = policy;
  o.max_rows = 2;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_request r;
  for (int i = 0; i < 2; i++) { /* admitted one by one: policies may wait with the second */
    r = kind_request(kinds[i]);
    drive_submit(engine, &r, &behind[i]);
    for (int step = 0; step < 60 && behind[i].count < 2; step++)
      (void)drive_step(engine);
    pkv_engine_pause(engine, behind[i].id, 1);
  }
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  for (int round = 0; round < 3; round++) { /* the second one beside what waits and is paused */
    r = kind_request(kinds[2]);
    r.n = 1;
    drive_submit(engine, &r, &answers[round]);
    for (int step = 0; answers[round].finish == PKV_FINISH_NONE; step++) {
      (void)drive_step(engine);
      assert_true(step < 40);
    }
    drive_equal(&answers[round], &alone[kinds[2]], "beside paused ones");
  }
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(stats.rows_paused + stats.rows_deferred, 2);
  assert_true(stats.rows_deferred > 0);
  assert_int_equal(stats.rows_waiting, stats.rows_deferred);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(behind[i].finish, PKV_FINISH_NONE);
    pkv_engine_pause(engine, behind[i].id, 0);
  }
  (void)drive_all(engine, 2000);
  for (int i = 0; i < 2; i++)
    drive_equal(&behind[i], &alone[kinds[i]], "paused for a while");
  pkv_engine_get_stats(&stats, engine);
  assert_true(stats.preemptions > 0);
  drive_finish(engine);
}

static void test_paused_hold_nobody(void **state) {
  (void)state;
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    paused_beside((pkv_sched_order)order, PKV_SCHED_ALWAYS);
    paused_beside((pkv_sched_order)order, PKV_SCHED_MARGINAL);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_orders),
      cmocka_unit_test(test_bad_orders),
      cmocka_unit_test(test_steps_allocate_nothing),
      cmocka_unit_test(test_decoding_never_waits),
      cmocka_unit_test(test_newcomers_have_a_share),
      cmocka_unit_test(test_large_head),
      cmocka_unit_test(test_paused_hold_nobody),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
