/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefix cache inside the engine: warm answers are cold ones bit by bit, what is reported is
 * what was reused, salts part clients, eviction and preemption under pressure, and after every
 * request free + cached + in use = total.
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
#include "support/tiny_model.h"

#define KINDS  16
#define PROMPT 400
#define VOCAB  320

static tiny_model tiny;
static int32_t prompts[KINDS][PROMPT];
static drive_answer cold[KINDS], warm[KINDS];

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f;
  tiny_model_open(&tiny, &options);
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
  o.max_requests = 64;
  o.cache_tokens = cache_tokens;
  o.max_seq_len = 512;
  o.prefill_chunk = 128;
  return o;
}

static pkv_engine_stats stats_of(const pkv_engine *engine) {
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&s, engine);
  if (s.pages_free + s.pages_cached + s.pages_in_use != s.pages_total)
    fail_msg("%lld free + %lld cached + %lld in use are not %lld", (long long)s.pages_free,
             (long long)s.pages_cached, (long long)s.pages_in_use, (long long)s.pages_total);
  return s;
}

static pkv_request kind_request(int i) {
  static const int32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 64, 100, 160, 200, 256, 300, 399};
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[i];
  r.prompt_tokens = lengths[i % 14];
  r.max_tokens = 5 + i % 30;
  r.logprobs = 1;
  r.temperature = i % 2 ? 1.0f : 0.0f;
  r.seed = (uint64_t)i;
  return r;
}

/* A random tree of shared prefixes. */
static void share_prefixes(uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int i = 0; i < KINDS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, seed + (uint64_t)i);
    if (i == 0) continue;
    const uint64_t parent = pkv_rng_below(&rng, (uint64_t)i);
    memcpy(prompts[i], prompts[parent], (size_t)pkv_rng_below(&rng, PROMPT) * sizeof(int32_t));
  }
}

static void run_cold(void) {
  pkv_engine_options o = engine_options(8192);
  o.prefix_sharing = 0;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  for (int i = 0; i < KINDS; i++) {
    const pkv_request r = kind_request(i);
    drive_submit(engine, &r, &cold[i]);
    (void)drive_all(engine, 1000);
    assert_int_equal(cold[i].cached_tokens, 0);
    assert_int_equal(stats_of(engine).pages_cached, 0);
  }
  drive_finish(engine);
}

/* Random prefix trees, one request after the other: cold and warm answers are the same. */
static void test_warm_is_cold(void **state) {
  (void)state;
  int64_t cached = 0;
  for (uint64_t seed = 0; seed < 12; seed++) {
    share_prefixes(100 * seed);
    run_cold();
    const pkv_engine_options o = engine_options(seed % 3 == 2 ? 640 : 8192);
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    for (int round = 0; round < 2; round++) {
      for (int i = 0; i < KINDS; i++) {
        const pkv_request r = kind_request(i);
        drive_submit(engine, &r, &warm[i]);
        if (seed % 2) (void)drive_all(engine, 1000);
      }
      (void)drive_all(engine, 10000);
      for (int i = 0; i < KINDS; i++) {
        const pkv_request r = kind_request(i);
        drive_equal(&warm[i], &cold[i], "warm");
        assert_in_range(warm[i].cached_tokens, 0, (r.prompt_tokens - 1) / 16 * 16);
        if (round == 1 && seed % 3 != 2) /* all is there: at least one token is computed */
          assert_int_equal(warm[i].cached_tokens, (r.prompt_tokens - 1) / 16 * 16);
        cached += warm[i].cached_tokens;
      }
      const pkv_engine_stats s = stats_of(engine);
      assert_int_equal(s.pages_in_use, 0);
      if (seed % 3 == 2) assert_true(s.evictions > 0);
    }
    pkv_engine_clear_cache(engine);
    assert_int_equal(stats_of(engine).pages_free, stats_of(engine).pages_total);
    drive_finish(engine);
  }
  assert_true(cached > 0);
}

/* The next turn of a conversation finds the last answer's tokens too. */
static void test_answers_are_kept(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options(4096);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  static int32_t turn[512];
  drive_prompt(turn, 40, VOCAB, 77);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = turn;
  r.prompt_tokens = 40;
  r.max_tokens = 60;
  r.ignore_end = 1;
  drive_submit(engine, &r, &warm[0]);
  (void)drive_all(engine, 100);
  assert_int_equal(warm[0].count, 60);
  memcpy(turn + 40, warm[0].tokens, 60 * sizeof(int32_t));
  turn[100] = 5;
  r.prompt_tokens = 101;
  drive_submit(engine, &r, &warm[1]);
  (void)drive_all(engine, 100);
  /* The last token of an answer is never computed: 99 tokens are, 6 whole pages of them. */
  assert_int_equal(warm[1].cached_tokens, 96);
  drive_finish(engine);
}

/* Equal prompts of two salts (or adapters) share nothing, running or cached. */
static void test_salts(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options(4096);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  share_prefixes(3);
  pkv_request r = kind_request(12);
  r.max_tokens = 4;
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 6; i++) {
      r.cache_salt = (uint64_t)(i % 3 == 1);
      r.adapter = (uint64_t)(i % 3 == 2);
      drive_submit(engine, &r, &warm[i]);
    }
    (void)drive_all(engine, 100);
    for (int i = 0; i < 6; i++) {
      assert_int_equal(warm[i].cached_tokens, round == 0 && i < 3 ? 0 : 288);
      drive_equal(&warm[i], &warm[0], "salted");
    }
  }
  drive_finish(engine);
}

/* Donors leave their text in a small pool, are cut off at random; victims never see any of it. */
static void test_no_leaks_between_requests(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 8);
  share_prefixes(900);
  run_cold();
  const pkv_engine_options o = engine_options(700);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  static drive_answer donors[4];
  for (int round = 0; round < 200; round++) {
    const int victim = (int)pkv_rng_below(&rng, KINDS);
    for (int i = 0; i < 4; i++) {
      pkv_request r = kind_request((int)pkv_rng_below(&rng, KINDS));
      r.max_tokens = 200;
      r.cache_salt = pkv_rng_below(&rng, 2);
      r.ignore_end = 1;
      if (r.prompt_tokens > 300) r.prompt_tokens = 300;
      drive_submit(engine, &r, &donors[i]);
    }
    for (uint64_t i = pkv_rng_below(&rng, 12); i > 0; i--)
      (void)drive_step(engine);
    const pkv_request r = kind_request(victim);
    drive_submit(engine, &r, &warm[0]);
    for (int i = 0; i < 4; i++) {
      (void)drive_step(engine);
      pkv_engine_cancel(engine, donors[i].id);
    }
    (void)drive_all(engine, 4000);
    drive_equal(&warm[0], &cold[victim], "a victim");
    assert_int_equal(stats_of(engine).pages_in_use, 0);
  }
  assert_true(stats_of(engine).evictions > 100);
  drive_finish(engine);
}

/* Three answers to one prompt: as three requests alone would be, over one copy of the prompt. */
static void test_choices(void **state) {
  (void)state;
  static drive_answer n[8];
  share_prefixes(50);
  for (int k = 0; k < 14; k++) {
    pkv_engine_options o = engine_options(k % 3 == 2 ? 512 : 4096);
    o.prefix_sharing = k % 4 != 1;
    o.max_rows = k % 5 == 4 ? 2 : 8;
    pkv_engine *engine = drive_engine(tiny.model, &o);
    pkv_request r = kind_request(k);
    r.temperature = 1.0f;
    r.n = 5;
    drive_submit_choices(engine, &r, n, 5);
    (void)drive_all(engine, 4000);
    pkv_engine_stats s = stats_of(engine);
    assert_int_equal(s.pages_in_use, 0);
    if (s.preemptions == 0) {
      assert_int_equal(s.prefill_tokens, r.prompt_tokens + 4);
      /* Whole pages come from the cache where there is one; only a part of a page needs a fork. */
      const bool part = (r.prompt_tokens - 1) % 16 != 0;
      if (r.prompt_tokens > 1 && o.max_rows == 8 && (part || !o.prefix_sharing))
        assert_int_equal(s.forks, 4);
    }
    int different = 0;
    for (int i = 1; i < 5; i++)
      different += memcmp(n[i].tokens, n[0].tokens, (size_t)n[0].count * sizeof(int32_t)) != 0;
    assert_true(different > 0);
    /* The first one is what n = 1 gives; cold and alone. */
    r.n = 0;
    pkv_engine_clear_cache(engine);
    drive_submit(engine, &r, &warm[0]);
    (void)drive_all(engine, 1000);
    drive_equal(&n[0], &warm[0], "choice 0");
    /* Again, beside others: the same texts. */
    static drive_answer again[8], other;
    r.n = 5;
    const pkv_request beside = kind_request((k + 1) % 14);
    drive_submit(engine, &beside, &other);
    drive_submit_choices(engine, &r, again, 5);
    (void)drive_all(engine, 4000);
    for (int i = 0; i < 5; i++)
      drive_equal(&again[i], &n[i], "choices again");
    /* Greedy answers are equal. */
    r.temperature = 0.0f;
    drive_submit_choices(engine, &r, again, 5);
    (void)drive_all(engine, 4000);
    for (int i = 1; i < 5; i++)
      drive_equal(&again[i], &again[0], "greedy choices");
    drive_finish(engine);
  }
}

/* Cancelling a request ends all of its answers, wherever they are. */
static void test_cancelled_choices(void **state) {
  (void)state;
  static drive_answer n[8];
  share_prefixes(60);
  for (int steps = 0; steps < 8; steps++) {
    pkv_engine_options o = engine_options(4096);
    o.max_rows = 3;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    pkv_request r = kind_request(12);
    r.n = 6;
    r.max_tokens = 100;
    r.ignore_end = 1;
    drive_submit_choices(engine, &r, n, 6);
    for (int i = 0; i < steps; i++)
      (void)drive_step(engine);
    pkv_engine_cancel(engine, n[0].id);
    for (int i = 0; i < 2; i++)
      (void)drive_step(engine);
    for (int i = 0; i < 6; i++)
      assert_int_equal(n[i].finish, PKV_FINISH_CANCELLED);
    assert_int_equal(stats_of(engine).pages_in_use, 0);
    assert_int_equal(stats_of(engine).cancelled, 6);
    drive_finish(engine);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_warm_is_cold), cmocka_unit_test(test_answers_are_kept),
      cmocka_unit_test(test_salts),        cmocka_unit_test(test_no_leaks_between_requests),
      cmocka_unit_test(test_choices),      cmocka_unit_test(test_cancelled_choices),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
