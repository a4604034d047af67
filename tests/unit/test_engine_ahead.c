/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps begun before the tokens of the step before are known (engine/ahead.c), on
 * support/fake_device.h: the texts of an engine that waits for each step, whoever ends, comes,
 * pauses or leaves meanwhile, whatever call of the device fails.
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

#define REQUESTS 16
#define PROMPT   48
#define ANSWER   70
#define VOCAB    200
#define PAGE     16

static pkv_model *model;
static unsigned char *bytes;
static int32_t prompts[REQUESTS][PROMPT];
static drive_answer waited[REQUESTS], ahead[REQUESTS];

static int open_model(void **state) {
  (void)state;
  const small_llama t = drive_device_llama(2, VOCAB);
  model = drive_model(&bytes, &t);
  for (int i = 0; i < REQUESTS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, 7 + (uint64_t)i);
    if (i % 4 != 0) memcpy(prompts[i], prompts[i / 4 * 4], 2 * PAGE * sizeof(int32_t));
  }
  return 0;
}

static int close_model(void **state) {
  (void)state;
  pkv_model_close(model);
  gguf_build_drop(bytes);
  return 0;
}

/* Every third ends where a text of its own comes, or with the model's end tokens. */
static void submit(pkv_engine *engine, int i, drive_answer *answers, float temperature) {
  static const char *const stops[] = {"a", "\x07"};
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[i];
  r.prompt_tokens = PROMPT - i;
  r.max_tokens = ANSWER - 3 * i;
  r.ignore_end = i % 3 != 0;
  r.temperature = i % 2 == 0 ? temperature : 0.0f;
  r.top_p = 0.9f;
  r.seed = 40 + (uint64_t)i;
  if (i % 3 == 1 && pkv_model_tokenizer(model) != NULL) {
    r.stop = stops;
    r.stop_count = 2;
  }
  if (i % 5 == 4) r.logprobs = 1; /* the host looks at its logits */
  drive_submit(engine, &r, &answers[i]);
}

static pkv_engine *engine_of(int32_t overlap, int32_t rows, int64_t cache_tokens) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *const executor = fake_device_create();
  fake_device_state.samples = 1;
  o.threads = 2;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.max_rows = rows;
  o.prefill_chunk = 48;
  o.max_seq_len = 128;
  o.cache_tokens = cache_tokens;
  o.overlap = overlap;
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  return engine;
}

static pkv_engine_stats stats_of(const pkv_engine *engine) {
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&s, engine);
  return s;
}

static pkv_engine_stats finish(pkv_engine *engine) {
  const pkv_engine_stats s = stats_of(engine);
  drive_finish(engine);
  assert_int_equal(fake_device_state.live, 0);
  return s;
}

static void wait_for_all(float temperature) {
  pkv_engine *const engine = engine_of(0, 6, PAGE * 100);
  for (int i = 0; i < REQUESTS; i++)
    submit(engine, i, waited, temperature);
  (void)drive_all(engine, 10000);
  assert_int_equal(finish(engine).ahead_steps, 0);
}

/* Tokens, not bits of log-probabilities: attention's order of summation is the batch's. */
static void same(int i) {
  assert_int_equal(ahead[i].finish, waited[i].finish);
  assert_int_equal(ahead[i].count, waited[i].count);
  for (int k = 0; k < waited[i].count; k++)
    if (ahead[i].tokens[k] != waited[i].tokens[k])
      fail_msg("request %d, token %d: %d ahead, %d waited for", i, k, (int)ahead[i].tokens[k],
               (int)waited[i].tokens[k]);
}

/* All at once, rows to spare and too few of them, a cache for all and for some. */
static void test_same_texts(void **state) {
  (void)state;
  for (int kind = 0; kind < 6; kind++) {
    const float temperature = kind % 2 ? 0.8f : 0.0f;
    wait_for_all(temperature);
    pkv_engine *const engine =
        engine_of(1, kind < 2 ? REQUESTS : 5, kind < 4 ? PAGE * 130 : PAGE * 20);
    for (int i = 0; i < REQUESTS; i++)
      submit(engine, i, ahead, temperature);
    (void)drive_all(engine, 10000);
    for (int i = 0; i < REQUESTS; i++)
      same(i);
    const int32_t advances = fake_device_state.advances;
    const pkv_engine_stats s = finish(engine);
    print_message("kind %d: %lld of %lld steps ahead, %lld preemptions\n", kind,
                  (long long)s.ahead_steps, (long long)s.steps, (long long)s.preemptions);
    assert_true(s.ahead_steps > 0);
    assert_int_equal(advances, s.ahead_steps);
    assert_int_equal(s.preemptions > 0, kind >= 4);
  }
}

/* One alone: every step but its first, its second and its last is begun ahead. */
static void test_all_ahead(void **state) {
  (void)state;
  pkv_engine *const engine = engine_of(1, 4, PAGE * 20);
  submit(engine, 2, ahead, 0.0f);
  (void)drive_all(engine, 1000);
  const int32_t tokens = ahead[2].count;
  const pkv_engine_stats s = finish(engine);
  assert_int_equal(tokens, ANSWER - 6);
  assert_int_equal(s.steps, tokens); /* none in vain: it ends by its length */
  assert_int_equal(s.ahead_steps, tokens - 2);
}

/* A row that ends with a token: what was computed behind it is dropped, and its place is taken. */
static void test_overshoot(void **state) {
  (void)state;
  wait_for_all(0.0f);
  pkv_engine *const engine = engine_of(1, 1, PAGE * 20);
  for (int i = 0; i < REQUESTS; i++)
    submit(engine, i, ahead, 0.0f);
  (void)drive_all(engine, 10000);
  int64_t tokens = 0, stopped = 0;
  for (int i = 0; i < REQUESTS; i++) {
    same(i);
    tokens += ahead[i].count;
    stopped += ahead[i].finish == PKV_FINISH_STOP;
  }
  const pkv_engine_stats s = finish(engine);
  assert_true(stopped > 0);
  assert_int_equal(s.generated_tokens, tokens);
}

/* Requests that come, pause and leave at random. */
static void test_random(void **state) {
  (void)state;
  wait_for_all(0.8f);
  int64_t steps = 0;
  for (uint64_t seed = 1; seed <= 5; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    pkv_engine *const engine = engine_of(1, 1 + (int32_t)pkv_rng_below(&rng, 6),
                                         PAGE * (int64_t)(10 + pkv_rng_below(&rng, 30)));
    bool left[REQUESTS] = {false};
    for (int at = 0; at < REQUESTS || pkv_engine_pending(engine) > 0;) {
      const int i = (int)pkv_rng_below(&rng, REQUESTS);
      if (at < REQUESTS && pkv_rng_below(&rng, 6) == 0) submit(engine, at++, ahead, 0.8f);
      if (i < at && pkv_rng_below(&rng, 150) == 0 && ahead[i].finish == PKV_FINISH_NONE) {
        left[i] = true;
        pkv_engine_cancel(engine, ahead[i].id);
      }
      if (i < at && pkv_rng_below(&rng, 4) == 0)
        pkv_engine_pause(engine, ahead[i].id, pkv_rng_below(&rng, 4) == 0);
      (void)drive_step(engine);
    }
    for (int i = 0; i < REQUESTS; i++) {
      if (!left[i]) same(i);
      if (left[i]) assert_int_equal(ahead[i].finish, PKV_FINISH_CANCELLED);
    }
    steps += finish(engine).ahead_steps;
  }
  assert_true(steps > 100);
}

/* A batch without free rows in which one is paused: who comes gets that one's row at once, though
   the other goes on. */
static void test_paused_makes_way(void **state) {
  (void)state;
  pkv_engine *const engine = engine_of(1, 2, PAGE * 60);
  for (int i = 0; i < 2; i++) {
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt = prompts[i];
    r.prompt_tokens = PROMPT;
    r.max_tokens = ANSWER;
    r.ignore_end = 1;
    drive_submit(engine, &r, &ahead[i]);
  }
  for (int i = 0; i < 12; i++)
    (void)drive_step(engine);
  pkv_engine_pause(engine, ahead[0].id, 1);
  for (int i = 0; i < 8; i++)
    (void)drive_step(engine);
  submit(engine, 2, ahead, 0.0f);
  for (int i = 0; i < 8; i++)
    (void)drive_step(engine);
  assert_int_equal(ahead[1].finish, PKV_FINISH_NONE);
  assert_true(ahead[2].count > 0);
  pkv_engine_pause(engine, ahead[0].id, 0);
  (void)drive_all(engine, 1000);
  assert_true(finish(engine).ahead_steps > 0);
}

/* Each call of the device that can fail in a run: the call that began or awaited a step says so,
   and the texts are the same. */
static void test_failures(void **state) {
  (void)state;
  int failed = 0;
  wait_for_all(0.0f);
  for (int after = 1; after <= 300; after += 11) {
    pkv_engine *const engine = engine_of(1, 4, PAGE * 60);
    for (int i = 0; i < 4; i++)
      submit(engine, i, ahead, 0.0f);
    fake_device_state.fail_at = fake_device_state.calls + after;
    while (pkv_engine_pending(engine) > 0) {
      size_t count = 0;
      pkv_error err = {0};
      const int before = fake_device_state.calls;
      const pkv_status status = drive_try_step(&count, engine, &err);
      const bool hit = before < fake_device_state.fail_at &&
                       fake_device_state.calls >= fake_device_state.fail_at;
      assert_int_equal(status, hit ? PKV_E_DEVICE : PKV_OK);
      failed += hit;
    }
    for (int i = 0; i < 4; i++)
      same(i);
    (void)finish(engine);
  }
  assert_true(failed > 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_same_texts), cmocka_unit_test(test_all_ahead),
      cmocka_unit_test(test_overshoot),  cmocka_unit_test(test_random),
      cmocka_unit_test(test_failures),   cmocka_unit_test(test_paused_makes_way),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
