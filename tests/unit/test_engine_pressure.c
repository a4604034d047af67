/* SPDX-License-Identifier: Apache-2.0 */
/* Few pages, many requests, failing memory: preemption, stress, allocations. */
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

#define KINDS 12
#define LIVE  24
#define LONG  400
#define VOCAB 320

static tiny_model tiny;
static int32_t prompts[KINDS][LONG];
static drive_answer alone[KINDS], answers[LIVE];

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f;
  options.eos = 7; /* some answers end by themselves */
  tiny_model_open(&tiny, &options);
  for (int i = 0; i < KINDS; i++)
    drive_prompt(prompts[i], LONG, VOCAB, 40 + (uint64_t)i);
  for (int i = 1; i < KINDS; i++) /* every third shares a prefix with the one before it */
    if (i % 3 != 0) memcpy(prompts[i], prompts[i - 1], (size_t)(25 * i) * sizeof(int32_t));
  return 0;
}

static int close_model(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  return 0;
}

static pkv_engine_options engine_options(int64_t cache_tokens) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 8;
  o.max_requests = LIVE;
  o.cache_tokens = cache_tokens;
  o.max_seq_len = 512;
  o.prefill_chunk = 128;
  return o;
}

static pkv_request kind_request(int kind) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[kind];
  r.prompt_tokens = 20 + 30 * kind;
  r.max_tokens = 130 - 8 * kind;
  r.logprobs = 1;
  r.temperature = kind % 2 ? 0.9f : 0.0f;
  r.seed = (uint64_t)kind;
  r.echo = kind == 5 || kind == 6;
  return r;
}

static void run_kinds_alone(void) {
  const pkv_engine_options o = engine_options(4096);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  for (int i = 0; i < KINDS; i++) {
    const pkv_request r = kind_request(i);
    drive_submit(engine, &r, &alone[i]);
    (void)drive_all(engine, 1000);
  }
  drive_finish(engine);
}

/* Eight long generations, pages for three: each gets the text it gets alone. */
static void test_eight_in_a_pool_for_three(void **state) {
  (void)state;
  pkv_engine_options o = engine_options(4096);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = 30;
  r.max_tokens = 290;
  r.ignore_end = 1;
  r.logprobs = 1;
  r.temperature = 0.7f;
  pkv_engine *engine = drive_engine(tiny.model, &o);
  for (int i = 0; i < 8; i++) {
    r.prompt = prompts[i] + 60;
    r.seed = (uint64_t)i;
    drive_submit(engine, &r, &alone[i]);
    (void)drive_all(engine, 1000);
  }
  drive_finish(engine);
  static const int64_t pools[] = {3 * 320, 2 * 320, 320};
  for (size_t p = 0; p < 3; p++) {
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    o = engine_options(pools[p]);
    engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < 8; i++) {
      r.prompt = prompts[i] + 60;
      r.seed = (uint64_t)i;
      drive_submit(engine, &r, &answers[i]);
    }
    (void)drive_all(engine, 20000);
    for (int i = 0; i < 8; i++) {
      assert_int_equal(answers[i].finish, PKV_FINISH_LENGTH);
      drive_equal(&answers[i], &alone[i], "under pressure");
    }
    pkv_engine_get_stats(&stats, engine);
    print_message("pool of %lld tokens: %lld preemptions in %lld steps\n", (long long)pools[p],
                  (long long)stats.preemptions, (long long)stats.steps);
    if (p == 0) assert_true(stats.preemptions > 0);
    assert_true(stats.pages_peak <= stats.pages_total);
    drive_finish(engine);
  }
}

/* First come, first served: whatever is preempted, requests of one kind end in their order. */
static void test_order_is_kept(void **state) {
  (void)state;
  pkv_engine_options o = engine_options(512);
  o.prefix_sharing = 0; /* who waits for a shared prefix is passed by those who share nothing */
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = 40;
  r.max_tokens = 120;
  r.ignore_end = 1;
  for (int i = 0; i < 12; i++) {
    r.prompt = prompts[i];
    drive_submit(engine, &r, &answers[i]);
  }
  int ended = 0;
  for (int step = 0; step < 20000 && pkv_engine_pending(engine) > 0; step++) {
    (void)drive_step(engine);
    while (ended < 12 && answers[ended].finish != PKV_FINISH_NONE)
      ended++;
    for (int i = ended; i < 12; i++)
      assert_int_equal(answers[i].finish, PKV_FINISH_NONE);
  }
  assert_int_equal(ended, 12);
  drive_finish(engine);
}

/* A paused request stands still while others run, loses its pages to them first, and goes on with
 * the text it would have had. */
static void test_pause(void **state) {
  (void)state;
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = 30;
  r.max_tokens = 290;
  r.ignore_end = 1;
  r.logprobs = 1;
  r.temperature = 0.7f;
  pkv_engine_options o = engine_options(4096);
  pkv_engine *engine = drive_engine(tiny.model, &o);
  for (int i = 0; i < 2; i++) {
    r.prompt = prompts[i] + 60;
    drive_submit(engine, &r, &alone[i]);
    (void)drive_all(engine, 1000);
  }
  drive_finish(engine);
  for (int64_t pool = 4096; pool >= 330; pool = pool > 500 ? 500 : pool - 170) {
    o = engine_options(pool);
    engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < 2; i++) {
      r.prompt = prompts[i] + 60;
      drive_submit(engine, &r, &answers[i]);
    }
    for (int i = 0; i < 20; i++)
      (void)drive_step(engine);
    const int32_t before = answers[0].count;
    pkv_engine_pause(engine, answers[0].id, 1);
    while (answers[1].finish == PKV_FINISH_NONE)
      (void)drive_step(engine);
    assert_int_equal(answers[0].count, before);
    assert_int_equal(answers[1].preemptions, 0);
    drive_equal(&answers[1], &alone[1], "beside a paused one");
    pkv_engine_get_stats(&stats, engine);
    const int64_t steps = stats.steps;
    if (pool < 340) assert_true(stats.preemptions > 0); /* the older one, because it is paused */
    for (int i = 0; i < 3; i++)
      assert_int_equal(drive_step(engine), 0);
    pkv_engine_get_stats(&stats, engine);
    assert_int_equal(stats.steps, steps);
    pkv_engine_pause(engine, answers[0].id, 0);
    pkv_engine_pause(engine, 4711, 1); /* unknown: no error */
    (void)drive_all(engine, 1000);
    drive_equal(&answers[0], &alone[0], "paused for a while");
    drive_finish(engine);
  }
}

/* Submits, pauses and cancels at random; whoever gets through has the answer of a run alone. */
static void stress(uint64_t seed, int64_t cache_tokens, int steps) {
  const pkv_engine_options o = engine_options(cache_tokens);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_rng rng;
  int kinds[LIVE], finished = 0, cancelled = 0;
  bool used[LIVE] = {false};
  pkv_rng_init(&rng, seed);
  for (int step = 0; step < steps || pkv_engine_pending(engine) > 0; step++) {
    const int slot = (int)pkv_rng_below(&rng, LIVE);
    const uint64_t act = pkv_rng_below(&rng, 12);
    if (step < steps && act < 4 && !used[slot]) {
      kinds[slot] = (int)pkv_rng_below(&rng, KINDS);
      const pkv_request r = kind_request(kinds[slot]);
      drive_submit(engine, &r, &answers[slot]);
      used[slot] = true;
    } else if (act == 4 && used[slot]) {
      pkv_engine_cancel(engine, answers[slot].id);
    } else if (act < 8 && used[slot]) {
      pkv_engine_pause(engine, answers[slot].id, act == 5 && step < steps);
    }
    for (int i = 0; i < LIVE && step >= steps; i++)
      if (used[i]) pkv_engine_pause(engine, answers[i].id, 0);
    (void)drive_step(engine);
    assert_true(step < steps + 20000);
    for (int i = 0; i < LIVE; i++) {
      if (!used[i] || answers[i].finish == PKV_FINISH_NONE) continue;
      used[i] = false;
      if (answers[i].finish == PKV_FINISH_CANCELLED) {
        cancelled++;
        continue;
      }
      finished++;
      drive_equal(&answers[i], &alone[kinds[i]], "in the stress");
    }
  }
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  print_message("seed %llu: %d finished, %d cancelled, %lld preemptions, %lld pages reused\n",
                (unsigned long long)seed, finished, cancelled, (long long)stats.preemptions,
                (long long)stats.prefix_pages_reused);
  assert_true(finished > 20 && cancelled > 5);
  drive_finish(engine);
}

static void test_stress(void **state) {
  (void)state;
  run_kinds_alone();
  stress(1, 4096, 700);
  stress(2, 1200, 700);
  stress(3, 640, 2500);
  stress(4, 512, 2500);
}

static void test_steps_allocate_nothing(void **state) {
  (void)state;
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator allocator = test_alloc_allocator(&ta);
  pkv_engine_options o = engine_options(700); /* preempts now and then */
  o.allocator = &allocator;
  o.route_stats = 1;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int64_t steps = 0, inside = 0;
  int kind = 0;
  while (steps < 1000) {
    for (int i = 0; i < LIVE; i++) {
      const pkv_request r = kind_request(kind++ % KINDS);
      drive_submit(engine, &r, &answers[i]);
    }
    const int64_t before = test_alloc_calls(&ta);
    steps += drive_all(engine, 20000);
    inside += test_alloc_calls(&ta) - before;
  }
  if (inside != 0)
    print_error("%lld calls of the allocator in %lld steps\n", (long long)inside, (long long)steps);
  assert_int_equal(inside, 0);
  drive_finish(engine);
  test_alloc_finish(&ta);
}

/* Each allocation of create and submit fails in turn. */
static pkv_status build_engine(void *ctx, const pkv_allocator *allocator) {
  pkv_engine_options o = engine_options(600);
  pkv_engine *engine = NULL;
  (void)ctx;
  o.threads = 1;
  o.route_stats = 1;
  o.allocator = allocator;
  pkv_status status = pkv_engine_create(&engine, tiny.model, &o, NULL);
  if (status == PKV_OK) {
    const pkv_request r = kind_request(3);
    int64_t id = 0;
    status = pkv_engine_submit(&id, engine, &r, NULL);
    if (status != PKV_OK) assert_int_equal(pkv_engine_pending(engine), 0);
  } else {
    assert_null(engine);
  }
  pkv_engine_destroy(engine);
  return status;
}

static void test_failing_allocations(void **state) {
  (void)state;
  assert_true(test_alloc_torture(build_engine, NULL) > 20);
}

/* Without the promise of batch invariance every route and policy works. */
static void test_routes_and_policies(void **state) {
  (void)state;
  run_kinds_alone();
  for (int policy = PKV_POLICY_FIXED; policy <= PKV_POLICY_ROOFLINE; policy++) {
    for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_SHARED; route++) {
      pkv_engine_options o = engine_options(4096);
      o.batch_invariant = 0;
      o.policy = (pkv_policy)policy;
      o.route = (pkv_route)route;
      o.route_stats = 1;
      pkv_engine *const engine = drive_engine(tiny.model, &o);
      for (int i = 0; i < KINDS; i++) {
        const pkv_request r = kind_request(i);
        drive_submit(engine, &r, &answers[i]);
      }
      (void)drive_all(engine, 1000);
      pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
      pkv_engine_get_stats(&stats, engine);
      for (int i = 0; i < KINDS; i++) {
        /* The first answer token's log-probability is within rounding of the invariant one. */
        const int32_t at = answers[i].prompt_events;
        const double difference = (double)answers[i].logprobs[at] - (double)alone[i].logprobs[at];
        if (difference > 1e-3 || difference < -1e-3)
          print_error("policy %d route %d request %d: %g against %g\n", policy, route, i,
                      (double)answers[i].logprobs[at], (double)alone[i].logprobs[at]);
        assert_true(difference <= 1e-3 && difference >= -1e-3);
      }
      for (int r = PKV_ROUTE_BUCKET_EXACT; r <= PKV_ROUTE_SHARED; r++)
        assert_true(stats.kv_bytes_route[r] > 0);
      assert_true(stats.kv_bytes_route[PKV_ROUTE_BUCKET_PADDED] >
                  stats.kv_bytes_route[PKV_ROUTE_BALANCED]);
      drive_finish(engine);
      if (policy != PKV_POLICY_FIXED) break;
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_eight_in_a_pool_for_three),
      cmocka_unit_test(test_order_is_kept),
      cmocka_unit_test(test_pause),
      cmocka_unit_test(test_stress),
      cmocka_unit_test(test_steps_allocate_nothing),
      cmocka_unit_test(test_failing_allocations),
      cmocka_unit_test(test_routes_and_policies),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
