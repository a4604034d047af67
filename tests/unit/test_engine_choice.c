/* SPDX-License-Identifier: Apache-2.0 */
/* How a token is chosen: penalties, biases, min_p, stops; and what none of them may change. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "engine/logit_edit.h"
#include "engine/sampling.h"
#include "support/engine_drive.h"
#include "support/tiny_model.h"

#define VOCAB 320

static tiny_model tiny;
static int32_t prompt[300];
static drive_answer a, b, c;

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f;
  options.eos = 7;
  tiny_model_open(&tiny, &options);
  drive_prompt(prompt, 300, VOCAB, 11);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  return 0;
}

static pkv_engine *open_engine(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 8;
  o.cache_tokens = 4096;
  o.max_seq_len = 512;
  return drive_engine(tiny.model, &o);
}

static pkv_request some_request(void) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 30;
  r.max_tokens = 40;
  r.logprobs = 1;
  r.ignore_end = 1;
  return r;
}

static void run(pkv_engine *engine, const pkv_request *r, drive_answer *answer) {
  drive_submit(engine, r, answer);
  (void)drive_all(engine, 1000);
}

/* Against the rules written out: once a distinct token, whatever its number; answers apart. */
static void test_edits(void **state) {
  (void)state;
  enum { N = 50 };
  pkv_rng rng;
  int32_t counts[N] = {0}, tokens[60];
  float logits[N], out[N];
  pkv_logit_bias bias[3] = {{4, 1.5f}, {9, -100.0f}, {49, -2.0f}};
  pkv_rng_init(&rng, 4);
  for (int round = 0; round < 500; round++) {
    pkv_logit_edit edit = {0};
    const int32_t banned[2] = {7, 8};
    const int32_t prompt_tokens = (int32_t)pkv_rng_range(&rng, 1, 40);
    const int32_t known = prompt_tokens + (int32_t)pkv_rng_range(&rng, 0, 20);
    edit.repetition = round % 3 ? 1.0f + (float)pkv_rng_uniform(&rng) : 1.0f;
    edit.presence = round % 2 ? (float)pkv_rng_uniform(&rng) : 0.0f;
    edit.frequency = round % 5 ? (float)pkv_rng_uniform(&rng) - 0.5f : 0.0f;
    edit.bias = bias;
    edit.bias_count = round % 4;
    for (int32_t i = 0; i < N; i++)
      logits[i] = (float)pkv_rng_normal(&rng);
    for (int32_t i = 0; i < known; i++)
      tokens[i] = (int32_t)pkv_rng_below(&rng, 25 + 30 * (uint64_t)(round % 2)); /* some >= N */
    const pkv_edit_context context = {tokens, prompt_tokens, known, banned, round % 3};
    pkv_logit_edit_apply(out, logits, N, &edit, &context, counts);
    for (int32_t t = 0; t < N; t++) {
      int32_t seen = 0, answered = 0;
      for (int32_t i = 0; i < known; i++) {
        seen += tokens[i] == t;
        answered += tokens[i] == t && i >= prompt_tokens;
      }
      float want = logits[t];
      if (seen > 0 && want > 0.0f)
        want /= edit.repetition;
      else if (seen > 0)
        want *= edit.repetition;
      if (answered > 0) want -= edit.presence + edit.frequency * (float)answered;
      for (int32_t i = 0; i < edit.bias_count; i++)
        if (bias[i].token == t) want = bias[i].bias <= -100.0f ? -INFINITY : want + bias[i].bias;
      for (int32_t i = 0; i < context.banned_count; i++)
        if (banned[i] == t) want = -INFINITY;
      if (out[t] != want)
        fail_msg("round %d token %d: %g, not %g", round, (int)t, (double)out[t], (double)want);
      assert_int_equal(counts[t], 0);
    }
  }
}

/* The share that min_p leaves: exactly the tokens of at least min_p times the best one's weight. */
static void test_min_p(void **state) {
  (void)state;
  enum { N = 64, DRAWS = 4000 };
  static pkv_candidate candidates[N];
  static double weights[N];
  const pkv_sampling_scratch scratch = {candidates, weights};
  float logits[N];
  pkv_rng rng;
  pkv_rng_init(&rng, 6);
  for (int round = 0; round < 12; round++) {
    bool seen[N] = {false};
    float max = -1e30f;
    pkv_sampling s = {0.7f, round % 3 == 1 ? 20 : 0, round % 3 == 2 ? 0.95f : 0.0f, 3, 0, 0.1f};
    for (int32_t i = 0; i < N; i++) {
      logits[i] = (float)pkv_rng_normal(&rng);
      if (logits[i] > max) max = logits[i];
    }
    for (int64_t i = 0; i < DRAWS; i++)
      seen[pkv_sample(logits, N, &s, i, &scratch)] = true;
    for (int32_t i = 0; i < N; i++) {
      const double p = exp(((double)logits[i] - (double)max) / (double)s.temperature);
      if (seen[i] && p < 0.0999) fail_msg("round %d: token %d of %g came", round, (int)i, p);
      if (!seen[i] && p > 0.1001 && round % 3 == 0)
        fail_msg("round %d: token %d of %g never came", round, (int)i, p);
    }
    s.min_p = 1.0f; /* the best alone */
    const pkv_sampling greedy = {0.0f, 0, 0.0f, 0, 0, 0.0f};
    assert_int_equal(pkv_sample(logits, N, &s, 5, &scratch),
                     pkv_sample(logits, N, &greedy, 5, &scratch));
  }
}

static void test_edited_choice(void **state) {
  (void)state;
  enum { N = 8 };
  static pkv_candidate candidates[N];
  static double weights[N];
  const pkv_sampling_scratch scratch = {candidates, weights};
  float logits[N];
  for (int32_t only = 0; only < N; only++) {
    for (int32_t i = 0; i < N; i++)
      logits[i] = i == only ? -3.0f : -INFINITY;
    for (int k = 0; k < 4; k++) {
      const pkv_sampling s = {k ? 1e30f : 0.0f, k == 2 ? 3 : 0, k == 3 ? 0.5f : 0.0f, 1, 0, 0.0f};
      assert_int_equal(pkv_sample_edited(logits, N, &s, 3, &scratch), only);
    }
  }
  const pkv_sampling s = {1.0f, 0, 0.0f, 1, 0, 0.0f};
  for (int32_t i = 0; i < N; i++)
    logits[i] = -INFINITY;
  assert_int_equal(pkv_sample_edited(logits, N, &s, 3, &scratch), -1);
}

/* A bias of 100 forces a token, -100 forbids it; the log-probabilities stay the model's own. */
static void test_bias_and_raw_logprobs(void **state) {
  (void)state;
  pkv_engine *const engine = open_engine();
  pkv_request r = some_request();
  run(engine, &r, &a);
  const pkv_logit_bias force[] = {{42, 100.0f}};
  r.logit_bias = force;
  r.logit_bias_count = 1;
  run(engine, &r, &b);
  for (int32_t i = 0; i < b.count; i++)
    assert_int_equal(b.tokens[i], 42);
  const pkv_logit_bias forbid[] = {{a.tokens[0], -100.0f}, {a.tokens[1], -100.0f}};
  r.logit_bias = forbid;
  r.logit_bias_count = 2;
  for (int sampled = 0; sampled < 2; sampled++) {
    r.temperature = sampled ? 5.0f : 0.0f;
    run(engine, &r, &b);
    for (int32_t i = 0; i < b.count; i++) {
      assert_int_not_equal(b.tokens[i], a.tokens[0]);
      assert_int_not_equal(b.tokens[i], a.tokens[1]);
    }
  }
  /* What is told is the model's own, whatever was added and however it was drawn: over all tokens,
     each in turn forced to come first, it is a distribution. */
  double sum = 0.0;
  r.max_tokens = 1;
  r.logit_bias_count = 1;
  for (int32_t i = 0; i < VOCAB; i++) {
    const pkv_logit_bias one[] = {{i, 100.0f}};
    r.logit_bias = one;
    r.temperature = i % 2 ? 0.5f : 0.0f;
    run(engine, &r, &b);
    assert_int_equal(b.tokens[0], i);
    sum += exp((double)b.logprobs[0]);
  }
  assert_true(fabs(sum - 1.0) < 1e-3);
  drive_finish(engine);
}

static void test_penalties_in_the_engine(void **state) {
  (void)state;
  pkv_engine *const engine = open_engine();
  pkv_request r = some_request();
  r.max_tokens = 200;
  for (int k = 0; k < 3; k++) {
    r.repetition_penalty = k == 0 ? 100.0f : 0.0f;
    r.presence_penalty = k == 1 ? 2.0f : 0.0f;
    r.frequency_penalty = k == 2 ? 2.0f : 0.0f;
    run(engine, &r, &b);
    r.repetition_penalty = r.presence_penalty = r.frequency_penalty = 0.0f;
    run(engine, &r, &a);
    int32_t distinct[2] = {0, 0};
    for (int32_t t = 0; t < VOCAB; t++) {
      bool in[2] = {false, false};
      for (int32_t i = 0; i < 200; i++) {
        in[0] |= a.tokens[i] == t;
        in[1] |= b.tokens[i] == t;
      }
      distinct[0] += in[0];
      distinct[1] += in[1];
    }
    if (distinct[1] <= distinct[0])
      fail_msg("penalty %d: %d distinct tokens, %d without", k, (int)distinct[1], (int)distinct[0]);
  }
  drive_finish(engine);
}

/* Texts of the tiny model's tokens are "w0" .. "w319". */
static void test_stop_strings(void **state) {
  (void)state;
  char text[64];
  pkv_engine *const engine = open_engine();
  pkv_request r = some_request();
  const char *stops[2] = {"never there", text};
  run(engine, &r, &a);
  (void)snprintf(text, sizeof text, "%dw%dw", (int)(a.tokens[4] % 10), (int)a.tokens[5]);
  r.stop = stops;
  r.stop_count = 2;
  run(engine, &r, &b);
  /* It ends with the first byte of token 6, or earlier where the same digits came before. */
  assert_int_equal(b.finish, PKV_FINISH_STOP);
  assert_int_equal(b.stop_index, 1);
  assert_in_range(b.count, 2, 7);
  assert_memory_equal(b.tokens, a.tokens, (size_t)b.count * sizeof(int32_t));
  char token[16];
  const int length = snprintf(token, sizeof token, "w%d", (int)b.tokens[b.count - 1]);
  assert_int_equal(b.stop_bytes, (int)strlen(text) - 1 + length);
  /* min_tokens: not looked for before. */
  r.min_tokens = 20;
  run(engine, &r, &c);
  assert_true(c.count > 20);
  /* None matches: the answer is the plain one. */
  r.min_tokens = 0;
  r.stop_count = 1;
  run(engine, &r, &c);
  drive_equal(&c, &a, "without a match");
  assert_int_equal(c.stop_index, -1);
  /* A control token has no text, but its own matches it. */
  const pkv_logit_bias force[] = {{7, 100.0f}};
  stops[0] = "w7";
  r.logit_bias = force;
  r.logit_bias_count = 1;
  run(engine, &r, &c);
  assert_int_equal(c.count, 1);
  assert_int_equal(c.finish, PKV_FINISH_STOP);
  assert_int_equal(c.stop_index, 0);
  assert_int_equal(c.stop_bytes, 0);
  drive_finish(engine);
}

static void test_min_tokens(void **state) {
  (void)state;
  pkv_engine *const engine = open_engine();
  pkv_request r = some_request();
  const pkv_logit_bias wish[] = {{7, 50.0f}}; /* the end token wants to come at once */
  r.ignore_end = 0;
  r.logit_bias = wish;
  r.logit_bias_count = 1;
  for (int32_t least = 0; least < 6; least++) {
    r.min_tokens = least;
    run(engine, &r, &a);
    assert_int_equal(a.finish, PKV_FINISH_STOP);
    assert_int_equal(a.count, least + 1);
    assert_int_equal(a.tokens[least], 7);
  }
  r.ignore_end = 1;
  r.min_tokens = 3;
  run(engine, &r, &a);
  assert_int_equal(a.count, 40);
  drive_finish(engine);
}

static void test_refusals(void **state) {
  (void)state;
  pkv_engine *const engine = open_engine();
  char long_stop[300];
  memset(long_stop, 'x', sizeof long_stop);
  long_stop[257] = 0;
  const char *const empty[] = {""}, *const lengthy[] = {long_stop}, *const null[] = {NULL};
  const pkv_logit_bias outside[] = {{VOCAB, 1.0f}}, negative[] = {{-1, 1.0f}},
                       much[] = {{1, 101.0f}}, nan_bias[] = {{1, NAN}};
  const struct {
    const char *text;
    pkv_status status;
    pkv_request r;
  } cases[] = {
#define CASE(text, status, ...)                                                                    \
  {                                                                                                \
    text, status, {                                                                                \
      .n = 0, __VA_ARGS__                                                                          \
    }                                                                                              \
  }
      CASE("min_p is 1.5", PKV_E_RANGE, .min_p = 1.5f),
      CASE("min_p", PKV_E_RANGE, .min_p = NAN),
      CASE("repetition_penalty", PKV_E_RANGE, .repetition_penalty = -1.0f),
      CASE("repetition_penalty", PKV_E_RANGE, .repetition_penalty = 101.0f),
      CASE("presence_penalty", PKV_E_RANGE, .presence_penalty = 2.5f),
      CASE("frequency_penalty", PKV_E_RANGE, .frequency_penalty = NAN),
      CASE("logit_bias_count", PKV_E_RANGE, .logit_bias = much, .logit_bias_count = 1025),
      CASE("logit_bias is NULL", PKV_E_INVALID, .logit_bias_count = 1),
      CASE("logit_bias[0].token is 320", PKV_E_RANGE, .logit_bias = outside, .logit_bias_count = 1),
      CASE("logit_bias[0].token is -1", PKV_E_RANGE, .logit_bias = negative, .logit_bias_count = 1),
      CASE("logit_bias[0].bias", PKV_E_RANGE, .logit_bias = much, .logit_bias_count = 1),
      CASE("logit_bias[0].bias", PKV_E_RANGE, .logit_bias = nan_bias, .logit_bias_count = 1),
      CASE("min_tokens is -1", PKV_E_RANGE, .min_tokens = -1),
      CASE("min_tokens is 41", PKV_E_RANGE, .min_tokens = 41),
      CASE("stop_count is 17", PKV_E_RANGE, .stop = empty, .stop_count = 17),
      CASE("stop is NULL", PKV_E_INVALID, .stop_count = 1),
      CASE("stop[0] has no bytes", PKV_E_RANGE, .stop = empty, .stop_count = 1),
      CASE("stop[0] has more bytes", PKV_E_RANGE, .stop = lengthy, .stop_count = 1),
      CASE("stop[0] is NULL", PKV_E_INVALID, .stop = null, .stop_count = 1),
      CASE("priority", PKV_E_RANGE, .priority = 1000001),
  };
#undef CASE
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    pkv_request r = cases[i].r;
    pkv_error err = {PKV_OK, "", ""};
    int64_t id = 1;
    r.struct_size = sizeof r;
    r.prompt = prompt;
    r.prompt_tokens = 30;
    r.max_tokens = 40;
    const pkv_status status = pkv_engine_submit(&id, engine, &r, &err);
    if (status != cases[i].status || strstr(err.text, cases[i].text) == NULL)
      fail_msg("wanted %s with '%s', got %s: %s", pkv_status_name(cases[i].status), cases[i].text,
               pkv_status_name(status), err.text);
    assert_int_equal(id, 0);
  }
  static const int32_t counts[] = {-1, 129, 1000000000, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    pkv_request r = some_request();
    int64_t id = 1;
    r.n = counts[i];
    assert_int_equal(pkv_engine_submit(&id, engine, &r, NULL), PKV_E_RANGE);
  }
  pkv_request r = some_request();
  pkv_error err = {PKV_OK, "", ""};
  int64_t id = 1;
  r.n = 2;
  r.echo = 1;
  assert_int_equal(pkv_engine_submit(&id, engine, &r, &err), PKV_E_INVALID);
  assert_int_equal(pkv_engine_pending(engine), 0);
  drive_finish(engine);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_edits),
      cmocka_unit_test(test_min_p),
      cmocka_unit_test(test_edited_choice),
      cmocka_unit_test(test_bias_and_raw_logprobs),
      cmocka_unit_test(test_penalties_in_the_engine),
      cmocka_unit_test(test_stop_strings),
      cmocka_unit_test(test_min_tokens),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
