/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages of preempted requests on the host (engine/swap.c), on support/fake_device.h: the same texts
 * in all kinds of engines; what is kept once for several; what is refused, fails, or is given up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "engine/engine_state.h"
#include "support/engine_drive.h"
#include "support/fake_device.h"
#include "support/small_llama.h"

#define REQUESTS 12
#define PROMPT   40
#define ANSWER   80
#define VOCAB    200
#define PAGE     16

static pkv_model *model;
static unsigned char *bytes;
static int32_t prompts[REQUESTS][PROMPT];
static drive_answer right[REQUESTS], got[REQUESTS];

static pkv_request request_of(int i) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[i];
  r.prompt_tokens = PROMPT - i;
  r.max_tokens = ANSWER;
  r.ignore_end = 1;
  return r;
}

static void submit(pkv_engine *engine, int i, drive_answer *answers) {
  const pkv_request r = request_of(i);
  drive_submit(engine, &r, &answers[i]);
}

static void submit_all(pkv_engine *engine, drive_answer *answers) {
  for (int i = 0; i < REQUESTS; i++)
    submit(engine, i, answers);
}

/* Of three requests each the first 32 tokens are equal. */
static int open_model(void **state) {
  (void)state;
  const small_llama t = drive_device_llama(3, VOCAB);
  model = drive_model(&bytes, &t);
  for (int i = 0; i < REQUESTS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, 77 + (uint64_t)i);
    if (i % 3 != 0) memcpy(prompts[i], prompts[i / 3 * 3], 2 * PAGE * sizeof(int32_t));
  }
  /* The last two have one prompt. */
  memcpy(prompts[REQUESTS - 1], prompts[REQUESTS - 2], sizeof prompts[0]);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  pkv_model_close(model);
  gguf_build_drop(bytes);
  return 0;
}

static void same_text(int i) {
  assert_int_equal(got[i].finish, right[i].finish);
  assert_int_equal(got[i].count, right[i].count);
  for (int k = 0; k < right[i].count; k++)
    if (got[i].tokens[k] != right[i].tokens[k])
      fail_msg("request %d, token %d: %d, %d without pressure", i, k, (int)got[i].tokens[k],
               (int)right[i].tokens[k]);
}

static void same_texts(void) {
  for (int i = 0; i < REQUESTS; i++)
    same_text(i);
}

static pkv_engine_options small_cache(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.max_rows = 6;
  o.prefill_chunk = 48;
  o.cache_tokens = PAGE * 24;
  o.max_seq_len = 128;
  o.swap_bytes = (int64_t)1 << 30; /* all pages of the cache */
  return o;
}

/* Copies cost nothing: whoever is preempted keeps its pages. */
static pkv_engine *swapping_engine(const pkv_engine_options *options) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *executors[2] = {fake_device_create()};
  if (options->tensor_parallel > 1) executors[1] = fake_device_another();
  const int32_t ranks = options->tensor_parallel > 1 ? 2 : 1;
  drive_ok(pkv_engine_create_on(&engine, model, executors, ranks, options, &err), &err, "create");
  engine->swap.out_seconds = engine->swap.in_seconds = 0.0;
  return engine;
}

/* The texts that all engines have to give. */
static void test_without_pressure(void **state) {
  (void)state;
  pkv_engine_options o = small_cache();
  o.cache_tokens = PAGE * 200;
  pkv_engine *const engine = swapping_engine(&o);
  submit_all(engine, right);
  (void)drive_all(engine, 10000);
  drive_finish(engine);
}

static pkv_engine_stats stats_of(const pkv_engine *engine) {
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&s, engine);
  return s;
}

/* Runs them all; nothing stays on the host. */
static pkv_engine_stats run(pkv_engine *engine) {
  submit_all(engine, got);
  (void)drive_all(engine, 10000);
  same_texts();
  const pkv_engine_stats s = stats_of(engine);
  assert_true(s.preemptions > 0);
  assert_int_equal(s.swap_used_bytes, 0);
  drive_finish(engine);
  assert_int_equal(fake_device_state.live, 0);
  return s;
}

static pkv_engine_stats run_with(const pkv_engine_options *options) {
  return run(swapping_engine(options));
}

/* Whatever shares, or does not: the same texts, and prompts are not computed again. */
static void test_same_texts(void **state) {
  (void)state;
  for (int kind = 0; kind < 5; kind++) {
    pkv_engine_options o = small_cache();
    o.prefix_sharing = kind != 1;
    o.prefix_cache = kind != 2;
    o.tensor_parallel = kind == 3 ? 2 : 1;
    o.page_tokens = kind == 4 ? 5 : PAGE;
    const pkv_engine_stats with = run_with(&o);
    o.swap_bytes = 0;
    const pkv_engine_stats without = run_with(&o);
    print_message("kind %d: %lld preemptions, %lld out, %lld in, %lld given up; %lld tokens of "
                  "prompts, without %lld\n",
                  kind, (long long)with.preemptions, (long long)with.swap_outs,
                  (long long)with.swap_ins, (long long)with.swap_drops,
                  (long long)with.prefill_tokens, (long long)without.prefill_tokens);
    assert_true(with.swap_outs > 0 && with.swap_ins > 0 && with.swap_pages_out > 0);
    assert_int_equal(with.swap_outs, with.swap_ins + with.swap_drops);
    assert_true(with.swap_bytes > 0);
    assert_true(with.prefill_tokens < without.prefill_tokens);
    assert_int_equal(without.swap_outs + without.swap_ins + without.swap_pages_out, 0);
    assert_int_equal(without.swap_bytes, 0);
  }
}

/* Where the host is far away, requests are computed again. */
static void test_slow_host(void **state) {
  (void)state;
  const pkv_engine_options o = small_cache();
  pkv_engine *const engine = swapping_engine(&o);
  engine->swap.in_seconds = 1e9;
  const pkv_engine_stats s = run(engine);
  assert_int_equal(s.swap_outs + s.swap_full, 0);
}

/* The measured times decide: both are there, and of this device's. */
static void test_measured(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  const pkv_engine_options o = small_cache();
  pkv_executor *const executor = fake_device_create();
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  assert_true(engine->swap.out_seconds > 0.0 && engine->swap.in_seconds > 0.0);
  assert_true(engine->swap.token_seconds == 0.0);
  submit(engine, 0, got);
  (void)drive_all(engine, 1000);
  assert_true(engine->swap.token_seconds > 0.0);
  drive_finish(engine);
}

/* Room for three pages: some fit, others are computed again. */
static void test_full_host(void **state) {
  (void)state;
  pkv_engine_options o = small_cache();
  pkv_engine *engine = swapping_engine(&o);
  o.swap_bytes = 3 * (int64_t)(engine->swap.page_bytes[0]);
  drive_finish(engine);
  const pkv_engine_stats s = run_with(&o);
  assert_int_equal(s.swap_bytes, (size_t)o.swap_bytes);
  assert_true(s.swap_full > 0);
}

/* Rows for one: whoever is paused gives way to the next one. */
static pkv_engine *one_row(void) {
  pkv_engine_options o = small_cache();
  o.cache_tokens = PAGE * 100;
  o.max_rows = 1;
  return swapping_engine(&o);
}

static void steps(pkv_engine *engine, int count) {
  for (int i = 0; i < count; i++)
    (void)drive_step(engine);
}

/* Two requests of one prompt, preempted one after the other: its pages are on the host once, and
   serve both, in either order of coming back. */
static void test_once_for_both(void **state) {
  (void)state;
  const int a = REQUESTS - 2, b = REQUESTS - 1;
  for (int first_goes = 0; first_goes < 2; first_goes++) {
    pkv_engine *const engine = one_row();
    submit(engine, a, got);
    steps(engine, 10);
    pkv_engine_pause(engine, got[a].id, 1);
    submit(engine, 0, got);
    (void)drive_step(engine); /* a gives way to 0 */
    const pkv_engine_stats one = stats_of(engine);
    assert_int_equal(one.swap_outs, 1);
    while (got[0].finish == PKV_FINISH_NONE)
      (void)drive_step(engine);
    submit(engine, b, got);
    steps(engine, 10);
    pkv_engine_pause(engine, got[b].id, 1);
    submit(engine, 3, got);
    (void)drive_step(engine);
    const pkv_engine_stats both = stats_of(engine);
    assert_int_equal(both.swap_outs, 2);
    /* The prompt's whole pages were there; what follows differs in length only. */
    const int32_t whole = (PROMPT - b) / PAGE, each = pkv_pages_for(engine, PROMPT - b + 9);
    assert_int_equal(both.swap_pages_out - one.swap_pages_out, each - whole);
    pkv_engine_clear_cache(engine);
    if (first_goes) pkv_engine_cancel(engine, got[a].id);
    pkv_engine_pause(engine, got[a].id, 0);
    pkv_engine_pause(engine, got[b].id, 0);
    (void)drive_all(engine, 10000);
    const pkv_engine_stats end = stats_of(engine);
    assert_int_equal(end.swap_ins, 2 - first_goes);
    assert_int_equal(end.swap_drops, 0);
    assert_int_equal(end.swap_used_bytes, 0);
    if (!first_goes) same_text(a);
    same_text(b);
    drive_finish(engine);
  }
}

/* What another one runs on stays on the device, and is not copied; if it is gone when the request
   comes back, that one is computed again. */
static void test_left_out(void **state) {
  (void)state;
  const int a = REQUESTS - 2, b = REQUESTS - 1;
  pkv_engine_options o = small_cache();
  o.cache_tokens = PAGE * 100;
  o.max_rows = 2;
  for (int gone = 0; gone < 2; gone++) {
    pkv_engine *const engine = swapping_engine(&o);
    submit(engine, a, got);
    steps(engine, 4);
    submit(engine, b, got);
    steps(engine, 6);
    pkv_engine_pause(engine, got[b].id, 1);
    submit(engine, 0, got);
    (void)drive_step(engine);
    const pkv_engine_stats s = stats_of(engine);
    const pkv_seq *const swapped = &engine->seqs[engine->waiting[0]];
    assert_int_equal(s.swap_outs, 1);
    assert_int_equal(swapped->swap_first, (PROMPT - b) / PAGE);
    assert_int_equal(s.swap_pages_out,
                     pkv_pages_for(engine, swapped->swapped) - swapped->swap_first);
    if (gone) pkv_engine_cancel(engine, got[a].id);
    while (got[0].finish == PKV_FINISH_NONE)
      (void)drive_step(engine);
    if (gone) pkv_engine_clear_cache(engine);
    pkv_engine_pause(engine, got[b].id, 0);
    (void)drive_all(engine, 10000);
    assert_int_equal(stats_of(engine).swap_drops, gone);
    assert_int_equal(stats_of(engine).swap_ins, !gone);
    same_text(b);
    drive_finish(engine);
  }
}

/* Copies that fail are no failure of a step: the request is computed again. */
static void test_failed_copies(void **state) {
  (void)state;
  const pkv_engine_options o = small_cache();
  pkv_engine *engine = swapping_engine(&o);
  fake_device_state.fail_copied_rows = true;
  pkv_engine_stats s = run(engine);
  assert_int_equal(s.swap_outs, 0);
  engine = one_row();
  submit(engine, 1, got);
  steps(engine, 20);
  pkv_engine_pause(engine, got[1].id, 1);
  submit(engine, 0, got);
  while (got[0].finish == PKV_FINISH_NONE)
    (void)drive_step(engine);
  pkv_engine_clear_cache(engine);
  pkv_engine_pause(engine, got[1].id, 0);
  fake_device_state.fail_copied_rows = true;
  (void)drive_all(engine, 1000);
  s = stats_of(engine);
  assert_int_equal(s.swap_outs, 1);
  assert_int_equal(s.swap_ins, 0);
  assert_int_equal(s.swap_drops, 1);
  assert_int_equal(s.swap_used_bytes, 0);
  same_text(1);
  drive_finish(engine);
}

/* One that ends on the host, and an engine that does. */
static void test_ends_there(void **state) {
  (void)state;
  for (int kind = 0; kind < 2; kind++) {
    pkv_engine *const engine = one_row();
    submit(engine, 1, got);
    steps(engine, 20);
    pkv_engine_pause(engine, got[1].id, 1);
    submit(engine, 0, got);
    (void)drive_step(engine);
    assert_true(stats_of(engine).swap_used_bytes > 0);
    if (kind == 0) {
      pkv_engine_cancel(engine, got[1].id);
      (void)drive_all(engine, 1000);
      assert_int_equal(got[1].finish, PKV_FINISH_CANCELLED);
      assert_int_equal(stats_of(engine).swap_used_bytes, 0);
      same_text(0);
    }
    pkv_engine_destroy(engine);
    assert_int_equal(fake_device_state.live, 0);
  }
}

static void refused(int64_t swap_bytes, size_t pinned_bytes, pkv_status status, const char *word) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_engine_options o = small_cache();
  o.swap_bytes = swap_bytes;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.pinned_bytes = pinned_bytes;
  assert_int_equal(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), status);
  if (strstr(err.text, word) == NULL || strstr(err.text, "swap_bytes") == NULL)
    fail_msg("'%s' does not say 'swap_bytes' and '%s'", err.text, word);
  assert_null(engine);
  assert_int_equal(fake_device_state.live, 0);
}

/* What cannot be had is refused. */
static void test_refused(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_engine_options o = small_cache();
  pkv_engine *engine = swapping_engine(&o);
  const size_t all = stats_of(engine).swap_bytes;
  assert_int_equal(all, 24 * engine->swap.page_bytes[0]);
  drive_finish(engine);
  refused(1, 0, PKV_E_RANGE, "one page");
  refused((int64_t)1 << 40, all - 1, PKV_E_NOMEM, "no ");
  refused(-1, 0, PKV_E_RANGE, "at least 0");
  o.device = PKV_DEVICE_CPU;
  o.swap_bytes = 1;
  assert_int_equal(pkv_engine_create(&engine, model, &o, &err), PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "swap_bytes"));
}

/* Requests that come, pause and leave at random: those that stay have their texts. */
static void test_random(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 5; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    pkv_engine_options o = small_cache();
    o.cache_tokens = PAGE * (int64_t)(12 + pkv_rng_below(&rng, 12));
    o.max_rows = 2 + (int32_t)pkv_rng_below(&rng, 5);
    o.tensor_parallel = 1 + (int32_t)pkv_rng_below(&rng, 2);
    o.order = pkv_rng_below(&rng, 2) ? PKV_SCHED_FCFS : PKV_SCHED_LPM;
    pkv_engine *const engine = swapping_engine(&o);
    bool left[REQUESTS] = {false};
    for (int at = 0; at < REQUESTS || pkv_engine_pending(engine) > 0;) {
      const int i = (int)pkv_rng_below(&rng, REQUESTS);
      if (at < REQUESTS && pkv_rng_below(&rng, 4) == 0) submit(engine, at++, got);
      if (i < at && pkv_rng_below(&rng, 200) == 0) {
        left[i] = true;
        pkv_engine_cancel(engine, got[i].id);
      }
      if (i < at) pkv_engine_pause(engine, got[i].id, pkv_rng_below(&rng, 8) == 0);
      (void)drive_step(engine);
    }
    for (int i = 0; i < REQUESTS; i++)
      if (!left[i]) same_text(i);
    const pkv_engine_stats s = stats_of(engine);
    print_message("seed %d: %lld preemptions, %lld out, %lld in, %lld given up\n", (int)seed,
                  (long long)s.preemptions, (long long)s.swap_outs, (long long)s.swap_ins,
                  (long long)s.swap_drops);
    assert_true(s.swap_ins > 0);
    assert_int_equal(s.swap_used_bytes, 0);
    drive_finish(engine);
    assert_int_equal(fake_device_state.live, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_without_pressure), cmocka_unit_test(test_same_texts),
      cmocka_unit_test(test_slow_host),        cmocka_unit_test(test_measured),
      cmocka_unit_test(test_full_host),        cmocka_unit_test(test_once_for_both),
      cmocka_unit_test(test_left_out),         cmocka_unit_test(test_failed_copies),
      cmocka_unit_test(test_ends_there),       cmocka_unit_test(test_refused),
      cmocka_unit_test(test_random),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
