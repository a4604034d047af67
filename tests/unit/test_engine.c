/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's rules: options, limits, ends, echo, cancellation, bad weights. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "support/engine_drive.h"
#include "support/tiny_model.h"

static drive_answer answers[64];

static tiny_model open_tiny(void) {
  const tiny_model_options options = TINY_MODEL_INIT;
  tiny_model tiny;
  tiny_model_open(&tiny, &options);
  return tiny;
}

static pkv_engine_options small_engine(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 4;
  o.max_requests = 32;
  o.cache_tokens = 4096;
  o.max_seq_len = 256;
  o.prefill_chunk = 64;
  return o;
}

static void expect(pkv_status got, const pkv_error *err, pkv_status want, const char *text) {
  if (got != want || strstr(err->text, text) == NULL)
    print_error("wanted %s with '%s', got %s: %s\n", pkv_status_name(want), text,
                pkv_status_name(got), err->text);
  assert_int_equal(got, want);
  assert_non_null(strstr(err->text, text));
}

static void test_bad_options(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  pkv_engine *engine = (pkv_engine *)(uintptr_t)1;
  pkv_error err;
  pkv_engine_options o = small_engine();
  o.struct_size = 8;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_INVALID, "struct_size");
  assert_null(engine);
  o = small_engine();
  o.page_tokens = 1025;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_RANGE, "page_tokens");
  o = small_engine();
  o.max_rows = -1;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_RANGE, "max_rows");
  o = small_engine();
  o.prefill_chunk = -5;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_RANGE, "prefill_chunk");
  o = small_engine();
  o.policy = PKV_POLICY_ROOFLINE;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_INVALID, "batch_invariant");
  o = small_engine();
  o.policy = (pkv_policy)7;
  o.batch_invariant = 0;
  expect(pkv_engine_create(&engine, tiny.model, &o, &err), &err, PKV_E_INVALID, "policy is 7");
  o = small_engine();
  o.route = PKV_ROUTE_SPLIT; /* cannot promise batch invariance */
  assert_int_not_equal(pkv_engine_create(&engine, tiny.model, &o, &err), PKV_OK);
  assert_null(engine);
  expect(pkv_engine_create(&engine, NULL, &o, &err), &err, PKV_E_INVALID, "model");
  expect(pkv_engine_create(NULL, tiny.model, &o, &err), &err, PKV_E_INVALID, "out");
  tiny_model_close(&tiny);
}

static void test_bad_requests(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[300] = {0};
  int64_t id = 5;
  pkv_error err;
  const pkv_request good = {
      .struct_size = sizeof good, .prompt = prompt, .prompt_tokens = 3, .max_tokens = 4};
#define REFUSE(field, value, status, text)                                                         \
  do {                                                                                             \
    pkv_request r = good;                                                                          \
    r.field = (value);                                                                             \
    expect(pkv_engine_submit(&id, engine, &r, &err), &err, (status), (text));                      \
    assert_int_equal(id, 0);                                                                       \
    assert_int_equal(pkv_engine_pending(engine), 0);                                               \
  } while (0)
  REFUSE(struct_size, 4, PKV_E_INVALID, "struct_size");
  REFUSE(prompt, NULL, PKV_E_INVALID, "prompt");
  REFUSE(prompt_tokens, 0, PKV_E_INVALID, "prompt_tokens");
  REFUSE(prompt_tokens, -3, PKV_E_INVALID, "prompt_tokens");
  REFUSE(max_tokens, -1, PKV_E_INVALID, "max_tokens");
  REFUSE(max_tokens, 0, PKV_E_INVALID, "echo");
  REFUSE(temperature, NAN, PKV_E_RANGE, "temperature");
  REFUSE(temperature, -0.5f, PKV_E_RANGE, "temperature");
  REFUSE(temperature, INFINITY, PKV_E_RANGE, "temperature");
  REFUSE(top_k, -1, PKV_E_RANGE, "top_k");
  REFUSE(top_p, 1.5f, PKV_E_RANGE, "top_p");
  REFUSE(top_p, NAN, PKV_E_RANGE, "top_p");
  REFUSE(top_logprobs, 21, PKV_E_RANGE, "top_logprobs");
  REFUSE(top_logprobs, -1, PKV_E_RANGE, "top_logprobs");
#undef REFUSE
  prompt[2] = 320;
  expect(pkv_engine_submit(&id, engine, &good, &err), &err, PKV_E_RANGE, "prompt[2] is 320");
  prompt[2] = -1;
  expect(pkv_engine_submit(&id, engine, &good, &err), &err, PKV_E_RANGE, "prompt[2] is -1");
  pkv_engine_cancel(engine, 77); /* unknown ids are no error */
  pkv_engine_cancel(engine, 0);
  assert_int_equal(drive_step(engine), 0); /* idle */
  drive_finish(engine);
  tiny_model_close(&tiny);
}

static void test_queue_limit(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  pkv_engine_options o = small_engine();
  o.max_requests = 6;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[5];
  int64_t id;
  pkv_error err;
  drive_prompt(prompt, 5, 320, 1);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 5;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 6; i++)
      drive_submit(engine, &r, &answers[i]);
    expect(pkv_engine_submit(&id, engine, &r, &err), &err, PKV_E_LIMIT, "6 requests");
    (void)drive_all(engine, 200);
    for (int i = 0; i < 6; i++)
      assert_int_equal(answers[i].count, 16);
  }
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/* Prompts of ctx - 1, ctx and ctx + 1 tokens: one token and "length"; refused; refused. */
static void test_context_limit(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  pkv_engine_options o = small_engine();
  o.max_seq_len = 100;
  pkv_engine *engine = drive_engine(tiny.model, &o);
  int32_t prompt[128];
  int64_t id;
  pkv_error err;
  drive_prompt(prompt, 128, 320, 2);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.max_tokens = 50;
  r.prompt_tokens = 99;
  drive_submit(engine, &r, &answers[0]);
  r.prompt_tokens = 90;
  drive_submit(engine, &r, &answers[1]);
  r.prompt_tokens = 100;
  expect(pkv_engine_submit(&id, engine, &r, &err), &err, PKV_E_LIMIT, "100 tokens");
  r.prompt_tokens = 101;
  expect(pkv_engine_submit(&id, engine, &r, &err), &err, PKV_E_LIMIT, "101 tokens");
  r.max_tokens = 0; /* only scored: may fill the context */
  r.echo = 1;
  r.prompt_tokens = 100;
  drive_submit(engine, &r, &answers[2]);
  (void)drive_all(engine, 100);
  assert_int_equal(answers[0].count, 1);
  assert_int_equal(answers[0].finish, PKV_FINISH_LENGTH);
  assert_int_equal(answers[1].count, 10);
  assert_int_equal(answers[1].finish, PKV_FINISH_LENGTH);
  assert_int_equal(answers[2].count, 100);
  drive_finish(engine);
  /* A cache smaller than the context is the limit, and says so. */
  o.cache_tokens = 50;
  engine = drive_engine(tiny.model, &o);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(stats.max_seq_len, 50);
  r = (pkv_request){
      .struct_size = sizeof r, .prompt = prompt, .prompt_tokens = 50, .max_tokens = 1};
  expect(pkv_engine_submit(&id, engine, &r, &err), &err, PKV_E_LIMIT, "50 tokens");
  r.prompt_tokens = 49;
  r.max_tokens = 100;
  drive_submit(engine, &r, &answers[0]);
  (void)drive_all(engine, 100);
  assert_int_equal(answers[0].count, 1);
  drive_finish(engine);
  tiny_model_close(&tiny);
}

static int64_t peak_bytes(void) {
  struct rusage usage;
  assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
  return (int64_t)usage.ru_maxrss * 1024;
}

/* The default cache is the context, but not more than the rows can fill. */
static void test_default_cache(void **state) {
  (void)state;
  static const struct {
    int32_t rows, longest, page;
    int64_t pages;
  } cases[] = {
      {1, 100, 16, 7}, {2, 100, 16, 14}, {32, 100, 16, 128}, {1, 0, 16, 128}, {1, 1, 1, 1}};
  tiny_model tiny = open_tiny();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
    o.threads = 1;
    o.max_rows = cases[i].rows;
    o.max_seq_len = cases[i].longest;
    o.page_tokens = cases[i].page;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    pkv_engine_get_stats(&stats, engine);
    assert_int_equal(stats.pages_total, cases[i].pages);
    assert_int_equal(stats.max_seq_len, cases[i].longest == 0 ? 2048 : cases[i].longest);
    drive_finish(engine);
  }
  tiny_model_close(&tiny);
}

/* A file may name a context of millions: that costs address space, not memory or time. */
static void test_huge_context(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  tiny_model tiny;
  options.layers = 1;
  options.head_dim = 256;
  options.context = 1 << 22;
  tiny_model_open(&tiny, &options);
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 1;
  o.max_rows = 1;
  const int64_t before = peak_bytes();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(stats.max_seq_len, 1 << 22);
  int32_t prompt[100];
  drive_prompt(prompt, 100, 320, 5);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 100;
  drive_submit(engine, &r, &answers[0]);
  (void)drive_all(engine, 100);
  assert_int_equal(answers[0].count, 16);
#if defined(__SANITIZE_ADDRESS__) /* its shadow of what is reserved is memory of its own */
  (void)before;
#else
  const int64_t grown = peak_bytes() - before;
  if (grown >= INT64_C(256) << 20)
    print_error("%lld bytes of memory for a request of 116 tokens\n", (long long)grown);
  assert_true(grown < INT64_C(256) << 20);
#endif
  drive_finish(engine);
  tiny_model_close(&tiny);
}

static void test_short_requests(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[64];
  drive_prompt(prompt, 64, 320, 3);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  static const int32_t lengths[] = {1, 2, 15, 16, 17, 63, 64};
  for (size_t i = 0; i < 7; i++) {
    r.prompt_tokens = lengths[i];
    r.max_tokens = 1;
    drive_submit(engine, &r, &answers[i]);
    r.max_tokens = 5;
    drive_submit(engine, &r, &answers[10 + i]);
  }
  (void)drive_all(engine, 200);
  for (size_t i = 0; i < 7; i++) {
    assert_int_equal(answers[i].count, 1);
    assert_int_equal(answers[i].finish, PKV_FINISH_LENGTH);
    assert_int_equal(answers[i].positions[0], lengths[i]);
    assert_int_equal(answers[10 + i].count, 5);
    assert_int_equal(answers[10 + i].tokens[0], answers[i].tokens[0]);
  }
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/* The first token is the end token: honoured at once, unless told not to. */
static void test_first_token_ends(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  tiny_model tiny;
  tiny_model_open(&tiny, &options);
  const pkv_engine_options o = small_engine();
  pkv_engine *engine = drive_engine(tiny.model, &o);
  int32_t prompt[7];
  drive_prompt(prompt, 7, 320, 4);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 7;
  r.max_tokens = 12;
  drive_submit(engine, &r, &answers[0]);
  (void)drive_all(engine, 100);
  assert_int_equal(answers[0].count, 12);
  drive_finish(engine);
  tiny_model_close(&tiny);

  options.eos = answers[0].tokens[0]; /* the same weights, but now this one ends */
  tiny_model_open(&tiny, &options);
  engine = drive_engine(tiny.model, &o);
  drive_submit(engine, &r, &answers[1]);
  r.ignore_end = 1;
  drive_submit(engine, &r, &answers[2]);
  (void)drive_all(engine, 100);
  assert_int_equal(answers[1].count, 1);
  assert_int_equal(answers[1].finish, PKV_FINISH_STOP);
  assert_int_equal(answers[1].tokens[0], options.eos);
  drive_equal(&answers[2], &answers[0], "ignore_end");
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/* Echo: every prompt token once, in order; with log-probabilities, the first without one. */
static void test_echo_and_scoring(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[150];
  drive_prompt(prompt, 150, 320, 5);
  static const int32_t lengths[] = {1, 2, 64, 65, 150};
  for (size_t k = 0; k < 5; k++) {
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt = prompt;
    r.prompt_tokens = lengths[k];
    r.echo = 1;
    r.max_tokens = 3;
    drive_submit(engine, &r, &answers[0]); /* echo alone */
    r.logprobs = 1;
    drive_submit(engine, &r, &answers[1]);
    r.max_tokens = 0;
    r.top_logprobs = 2;
    drive_submit(engine, &r, &answers[2]);
    (void)drive_all(engine, 200);
    for (int a = 0; a < 3; a++) {
      assert_int_equal(answers[a].prompt_events, lengths[k]);
      assert_int_equal(answers[a].count, lengths[k] + (a < 2 ? 3 : 0));
      assert_int_equal(answers[a].finish, PKV_FINISH_LENGTH);
      assert_memory_equal(answers[a].tokens, prompt, (size_t)lengths[k] * sizeof *prompt);
      assert_true(isnan(answers[a].logprobs[0]));
      for (int32_t i = 1; i < lengths[k]; i++)
        assert_true(a == 0 ? isnan(answers[a].logprobs[i]) : answers[a].logprobs[i] <= 0.0f);
    }
    /* A scored token has the bits it has when it is generated: score prompt + answer. */
    int32_t longer[160];
    memcpy(longer, prompt, (size_t)lengths[k] * sizeof *longer);
    memcpy(longer + lengths[k], answers[1].tokens + lengths[k], 3 * sizeof *longer);
    r.prompt = longer;
    r.prompt_tokens = lengths[k] + 3;
    drive_submit(engine, &r, &answers[3]);
    (void)drive_all(engine, 200);
    assert_int_equal(answers[3].count, lengths[k] + 3);
    assert_memory_equal(answers[3].logprobs + 1, answers[1].logprobs + 1,
                        (size_t)(lengths[k] + 2) * sizeof(float));
  }
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/* A cancelled request ends with one event, wherever it stands; others do not notice. */
static void test_cancel_at_any_step(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  pkv_engine_options o = small_engine();
  o.max_rows = 2;
  o.prefill_chunk = 16;
  int32_t prompt[80];
  drive_prompt(prompt, 80, 320, 6);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 80;
  r.logprobs = 1;
  pkv_engine *engine = drive_engine(tiny.model, &o);
  drive_submit(engine, &r, &answers[0]);
  (void)drive_all(engine, 100);
  for (int step = 0; step < 24; step++) {
    for (int i = 1; i <= 3; i++)
      drive_submit(engine, &r, &answers[i]);
    for (int i = 0; i < step; i++)
      (void)drive_step(engine);
    const bool done = answers[2].finish != PKV_FINISH_NONE; /* then cancelling is no error */
    pkv_engine_cancel(engine, answers[2].id);
    pkv_engine_cancel(engine, answers[2].id);
    (void)drive_step(engine);
    assert_int_equal(answers[2].finish, done ? PKV_FINISH_LENGTH : PKV_FINISH_CANCELLED);
    (void)drive_all(engine, 100);
    drive_equal(&answers[1], &answers[0], "beside a cancelled one");
    drive_equal(&answers[3], &answers[0], "behind a cancelled one");
  }
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/*
 * A cancelled request and the one that takes its row over both have an event; a step writes no more
 * events than it was given room for.
 */
static void test_cancel_fits_the_events(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  for (int echo = 0; echo < 2; echo++) {
    pkv_engine_options o = small_engine();
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    const size_t capacity = (size_t)o.max_rows + (echo ? (size_t)o.prefill_chunk : 0);
    pkv_event events[4 + 64 + 1];
    int32_t prompt[16];
    int64_t ids[12];
    int32_t ends = 0;
    pkv_error err = {PKV_OK, "", ""};
    drive_prompt(prompt, 16, 320, 12);
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt = prompt;
    r.prompt_tokens = 16;
    r.echo = echo;
    for (int i = 0; i < 12; i++)
      drive_ok(pkv_engine_submit(&ids[i], engine, &r, &err), &err, "submit");
    for (int i = 0; i < 200 && pkv_engine_pending(engine) > 0; i++) {
      size_t count = 0;
      memset(events, 0, sizeof events);
      drive_ok(pkv_engine_step(events, capacity, &count, engine, &err), &err, "step");
      if (count > capacity || events[capacity].request != 0)
        print_error("%zu events in room for %zu\n", count, capacity);
      assert_true(count <= capacity && events[capacity].request == 0);
      for (size_t j = 0; j < count; j++)
        ends += events[j].finish != PKV_FINISH_NONE;
      for (int j = 0; i == 0 && j < 4; j++)
        pkv_engine_cancel(engine, ids[j]);
    }
    assert_int_equal(ends, 12);
    drive_finish(engine);
  }
  tiny_model_close(&tiny);
}

/* More cancelled waiting requests than events fit in a step. */
static void test_cancel_many(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[4];
  drive_prompt(prompt, 4, 320, 8);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 4;
  for (int i = 0; i < 32; i++)
    drive_submit(engine, &r, &answers[i]);
  for (int i = 0; i < 32; i++)
    pkv_engine_cancel(engine, answers[i].id);
  int ended = 0;
  for (int step = 0; step < 20 && pkv_engine_pending(engine) > 0; step++) {
    pkv_event events[4];
    size_t count = 0;
    assert_int_equal(pkv_engine_step(events, 4, &count, engine, NULL), PKV_OK);
    for (size_t i = 0; i < count; i++)
      ended += events[i].finish == PKV_FINISH_CANCELLED;
  }
  assert_int_equal(ended, 32);
  drive_finish(engine);
  tiny_model_close(&tiny);
}

/* A token whose embedding is NaN ends its request with an error; seven others are untouched. */
static void test_logits_that_are_not_finite(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.nan_token = 9;
  tiny_model tiny;
  tiny_model_open(&tiny, &options);
  pkv_engine_options o = small_engine();
  o.max_rows = 8;
  int32_t prompts[8][40];
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = 40;
  r.logprobs = 1;
  for (int round = 0; round < 2; round++) { /* 0: without the bad one */
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < 8; i++) {
      drive_prompt(prompts[i], 40, 320, 100 + (uint64_t)i);
      for (int j = 0; j < 40; j++)
        if (prompts[i][j] == 9) prompts[i][j] = 10;
      if (i == 3 && round == 1) prompts[i][20] = 9;
      r.prompt = prompts[i];
      drive_submit(engine, &r, &answers[8 * round + i]);
    }
    (void)drive_all(engine, 100);
    if (round == 1) { /* the pages that held NaN are used again: no trace */
      for (int i = 0; i < 8; i++) {
        r.prompt = prompts[i == 3 ? 4 : i];
        drive_submit(engine, &r, &answers[16 + i]);
      }
      (void)drive_all(engine, 100);
    }
    drive_finish(engine);
  }
  for (int i = 0; i < 8; i++) {
    if (i == 3) {
      assert_int_equal(answers[8 + i].finish, PKV_FINISH_ERROR);
      assert_int_equal(answers[8 + i].count, 0);
      continue;
    }
    drive_equal(&answers[8 + i], &answers[i], "beside a request that fails");
    drive_equal(&answers[16 + i], &answers[i], "after a request that failed");
  }
  tiny_model_close(&tiny);
}

/* Output rows that only pad the head are never sampled, nor in a log-probability. */
static void test_padding_of_the_vocabulary(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.eos = 3;
  options.padding = 200;
  tiny_model tiny;
  tiny_model_open(&tiny, &options);
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  int32_t prompt[5];
  int distinct[320] = {0}, seen = 0;
  drive_prompt(prompt, 5, 120, 12);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 5;
  r.max_tokens = 200;
  r.temperature = 5.0f;
  r.ignore_end = 1;
  r.logprobs = 1;
  drive_submit(engine, &r, &answers[0]);
  (void)drive_all(engine, 300);
  assert_int_equal(answers[0].count, 200);
  for (int i = 0; i < 200; i++) {
    assert_in_range(answers[0].tokens[i], 0, 119);
    seen += distinct[answers[0].tokens[i]]++ == 0;
  }
  assert_true(seen > 60); /* nearly uniform: the padding would have been hit */
  drive_finish(engine);
  tiny_model_close(&tiny);
}

static void test_step_arguments(void **state) {
  (void)state;
  tiny_model tiny = open_tiny();
  const pkv_engine_options o = small_engine();
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_event events[200];
  size_t count = 9;
  pkv_error err;
  int32_t prompt[2] = {1, 2};
  expect(pkv_engine_step(events, 3, &count, engine, &err), &err, PKV_E_TOO_SMALL, "3 events");
  assert_int_equal(count, 0);
  expect(pkv_engine_step(NULL, 4, &count, engine, &err), &err, PKV_E_INVALID, "events");
  expect(pkv_engine_step(events, 4, NULL, engine, &err), &err, PKV_E_INVALID, "count");
  expect(pkv_engine_step(events, 4, &count, NULL, &err), &err, PKV_E_INVALID, "engine");
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 2;
  r.echo = 1;
  drive_submit(engine, &r, &answers[0]);
  expect(pkv_engine_step(events, 4, &count, engine, &err), &err, PKV_E_TOO_SMALL, "68");
  (void)drive_all(engine, 100);
  drive_finish(engine);
  tiny_model_close(&tiny);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bad_options),
      cmocka_unit_test(test_bad_requests),
      cmocka_unit_test(test_queue_limit),
      cmocka_unit_test(test_context_limit),
      cmocka_unit_test(test_default_cache),
      cmocka_unit_test(test_huge_context),
      cmocka_unit_test(test_short_requests),
      cmocka_unit_test(test_first_token_ends),
      cmocka_unit_test(test_echo_and_scoring),
      cmocka_unit_test(test_cancel_at_any_step),
      cmocka_unit_test(test_cancel_fits_the_events),
      cmocka_unit_test(test_cancel_many),
      cmocka_unit_test(test_logits_that_are_not_finite),
      cmocka_unit_test(test_padding_of_the_vocabulary),
      cmocka_unit_test(test_step_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
