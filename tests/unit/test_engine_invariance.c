/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a request is answered does not depend on what runs beside it, on how its prompt is cut, on
 * the number of threads, on the page size, nor on shared prefixes: equal tokens, and
 * log-probabilities equal bit by bit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/engine_drive.h"
#include "support/tiny_model.h"

#define REQUESTS 32
#define PROMPT   1300

static tiny_model tiny;
static int32_t prompts[REQUESTS][PROMPT];
static drive_answer alone[REQUESTS], together[REQUESTS];

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f; /* flat: small differences would change samples */
  tiny_model_open(&tiny, &options);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  return 0;
}

static pkv_engine_options wide_engine(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.cache_tokens = 40000;
  o.max_seq_len = 1400;
  return o;
}

/* Requests of all kinds: lengths around pages, tiles and chunks; greedy and sampled. */
static pkv_request any_request(int i) {
  static const int32_t lengths[] = {1, 7, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 700, 1100};
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[i];
  r.prompt_tokens = lengths[i % 14];
  r.max_tokens = 6 + i % 5;
  r.logprobs = 1;
  r.top_logprobs = i % 3;
  if (i % 2) r.temperature = 1.0f;
  if (i % 4 == 3) r.top_k = 40;
  if (i % 8 == 5) r.top_p = 0.9f;
  r.seed = (uint64_t)i;
  return r;
}

static void fill_prompts(uint64_t seed) {
  for (int i = 0; i < REQUESTS; i++)
    drive_prompt(prompts[i], PROMPT, 320, seed + (uint64_t)i);
}

static void run_alone(const pkv_engine_options *o, int count) {
  pkv_engine *const engine = drive_engine(tiny.model, o);
  for (int i = 0; i < count; i++) {
    const pkv_request r = any_request(i);
    drive_submit(engine, &r, &alone[i]);
    (void)drive_all(engine, 3000);
  }
  drive_finish(engine);
}

static void compare(const pkv_engine_options *o, int count, const char *what) {
  char text[64];
  pkv_engine *const engine = drive_engine(tiny.model, o);
  for (int i = 0; i < count; i++) {
    const pkv_request r = any_request(i);
    drive_submit(engine, &r, &together[i]);
  }
  (void)drive_all(engine, 40000);
  for (int i = 0; i < count; i++) {
    (void)snprintf(text, sizeof text, "%s, request %d", what, i);
    drive_equal(&together[i], &alone[i], text);
  }
  drive_finish(engine);
}

static void test_among_others(void **state) {
  (void)state;
  const pkv_engine_options o = wide_engine();
  fill_prompts(1000);
  run_alone(&o, REQUESTS);
  compare(&o, REQUESTS, "among 31 others");
}

static void test_chunks(void **state) {
  (void)state;
  static const int32_t chunks[] = {1, 7, 16, 17, 64, 200, 512, 1024};
  char text[32];
  pkv_engine_options o = wide_engine();
  fill_prompts(2000);
  run_alone(&o, 14);
  for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
    o.prefill_chunk = chunks[i];
    (void)snprintf(text, sizeof text, "chunks of %d", (int)chunks[i]);
    compare(&o, 14, text);
  }
}

static void test_threads_rows_and_pages(void **state) {
  (void)state;
  pkv_engine_options o = wide_engine();
  fill_prompts(3000);
  run_alone(&o, 14);
  o.threads = 1;
  compare(&o, 14, "1 thread");
  o.threads = 5;
  compare(&o, 14, "5 threads");
  o.threads = 2;
  o.max_rows = 3;
  compare(&o, 14, "3 rows");
  o.max_rows = 0;
  static const int32_t pages[] = {1, 3, 32, 64, 1024};
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
    char text[32];
    o.page_tokens = pages[i];
    (void)snprintf(text, sizeof text, "pages of %d", (int)pages[i]);
    compare(&o, 14, text);
  }
}

/* Prompts that share prefixes of many lengths, as a random tree. */
static void share_prefixes(uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  fill_prompts(seed);
  for (int i = 1; i < REQUESTS; i++) {
    const uint64_t parent = pkv_rng_below(&rng, (uint64_t)i);
    const uint64_t length = pkv_rng_below(&rng, PROMPT);
    memcpy(prompts[i], prompts[parent], (size_t)length * sizeof(int32_t));
  }
}

static void test_prefix_trees(void **state) {
  (void)state;
  pkv_engine_options o = wide_engine();
  int64_t reused = 0, shared_steps = 0;
  for (uint64_t seed = 0; seed < 6; seed++) {
    share_prefixes(5000 + 100 * seed);
    o.prefill_chunk = seed % 2 ? 512 : 96;
    o.prefix_sharing = 0;
    pkv_engine *engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < REQUESTS; i++) {
      const pkv_request r = any_request(i);
      drive_submit(engine, &r, &alone[i]);
    }
    (void)drive_all(engine, 4000);
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    pkv_engine_get_stats(&stats, engine);
    assert_int_equal(stats.prompt_tokens_reused, 0);
    assert_int_equal(stats.shared_steps, 0);
    drive_finish(engine);
    o.prefix_sharing = 1;
    engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < REQUESTS; i++) {
      const pkv_request r = any_request(i);
      drive_submit(engine, &r, &together[i]);
    }
    (void)drive_all(engine, 4000);
    for (int i = 0; i < REQUESTS; i++)
      drive_equal(&together[i], &alone[i], "with shared prefixes");
    pkv_engine_get_stats(&stats, engine);
    assert_int_equal(stats.prompt_tokens_reused, 16 * stats.prefix_pages_reused);
    reused += stats.prompt_tokens_reused;
    shared_steps += stats.shared_steps;
    drive_finish(engine);
  }
  assert_true(reused > 0);
  assert_true(shared_steps > 0);
}

/* Questions about two documents: route shared reads each once, and no bit of an answer changes. */
static void test_route_shared(void **state) {
  (void)state;
  static const pkv_route routes[] = {PKV_ROUTE_BALANCED, PKV_ROUTE_AUTO, PKV_ROUTE_SHARED};
  pkv_engine_options o = wide_engine();
  fill_prompts(9500);
  for (int i = 2; i < 16; i++)
    memcpy(prompts[i], prompts[i % 2], (size_t)(1040 + i) * sizeof(int32_t));
  o.route_stats = 1;
  for (int k = 0; k < 6; k++) {
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    o.route = routes[k % 3];
    o.threads = 1 + k;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    for (int i = 0; i < 16; i++) {
      pkv_request r = any_request(i);
      r.prompt_tokens = 1060 + i;
      drive_submit(engine, &r, k == 0 ? &alone[i] : &together[i]);
    }
    (void)drive_all(engine, 400);
    for (int i = 0; i < 16 && k > 0; i++)
      drive_equal(&together[i], &alone[i], pkv_route_name(o.route));
    pkv_engine_get_stats(&stats, engine);
    assert_int_equal(stats.prefix_pages_reused, 14 * (1040 / 16));
    if (k % 3 == 0)
      assert_int_equal(stats.shared_steps, 0);
    else
      assert_in_range(stats.shared_steps, 5, stats.steps);
    /* 1024 of some 1070 tokens are read by 2 instead of 16 rows. */
    assert_in_range(stats.kv_bytes_route[PKV_ROUTE_SHARED], 1,
                    stats.kv_bytes_route[PKV_ROUTE_BALANCED] / 4);
    drive_finish(engine);
  }
}

/* Equal prompts around the page size: all but the page of the last token is taken over. */
static void test_reuse_is_counted(void **state) {
  (void)state;
  static const int32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 160, 1000};
  const pkv_engine_options o = wide_engine();
  fill_prompts(7000);
  for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    pkv_request r = PKV_REQUEST_INIT;
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    r.prompt = prompts[0];
    r.prompt_tokens = lengths[k];
    r.logprobs = 1;
    for (int i = 0; i < 8; i++)
      drive_submit(engine, &r, &together[i]);
    (void)drive_all(engine, 100);
    pkv_engine_get_stats(&stats, engine);
    const int64_t pages = (lengths[k] - 1) / 16;
    assert_int_equal(stats.prefix_pages_reused, 7 * pages);
    assert_int_equal(stats.prompt_tokens, 8 * lengths[k]);
    assert_int_equal(stats.prompt_tokens_reused, 7 * 16 * pages);
    assert_int_equal(stats.prefill_tokens, stats.prompt_tokens - stats.prompt_tokens_reused);
    /* The pages of the prompt once, and each request's own behind it. */
    assert_int_equal(stats.pages_peak, pages + 8 * ((lengths[k] + 15 + 15) / 16 - pages));
    for (int i = 1; i < 8; i++)
      drive_equal(&together[i], &together[0], "equal prompts");
    drive_finish(engine);
  }
}

/* A request that comes later shares with one that is still decoding; the source may end first. */
static void test_source_ends_first(void **state) {
  (void)state;
  pkv_engine_options o = wide_engine();
  o.prefix_cache = 0; /* only live ones share: what is reused is reused from the source */
  fill_prompts(8000);
  memcpy(prompts[1], prompts[0], 640 * sizeof(int32_t));
  pkv_request r = PKV_REQUEST_INIT;
  r.logprobs = 1;
  r.prompt_tokens = 700;
  r.max_tokens = 30;
  pkv_engine *engine = drive_engine(tiny.model, &o);
  r.prompt = prompts[1];
  drive_submit(engine, &r, &alone[1]);
  (void)drive_all(engine, 100);
  for (int cancel = 0; cancel < 2; cancel++) {
    r.prompt = prompts[0];
    r.max_tokens = 5;
    drive_submit(engine, &r, &together[0]);
    for (int i = 0; i < 4; i++)
      (void)drive_step(engine);
    r.prompt = prompts[1];
    r.max_tokens = 30;
    drive_submit(engine, &r, &together[1]);
    (void)drive_step(engine);
    if (cancel) pkv_engine_cancel(engine, together[0].id);
    /* Others take the pages that the source gave back. */
    r.prompt = prompts[2];
    drive_submit(engine, &r, &together[2]);
    (void)drive_all(engine, 200);
    drive_equal(&together[1], &alone[1], "behind a source that ended");
  }
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(stats.prefix_pages_reused, 2 * 40);
  drive_finish(engine);
}

/* The real model: one answer alone and among others, in chunks, with other threads. */
static void test_real_model(void **state) {
  (void)state;
  static const char path[] = PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf";
  pkv_model *model = NULL;
  pkv_error err = {PKV_OK, "", ""};
  if (access(path, R_OK) != 0) {
    print_message("skip: no model at %s\n", path);
    skip();
  }
  drive_ok(pkv_model_open(&model, path, NULL, &err), &err, "open");
  pkv_engine_options o = wide_engine();
  o.max_seq_len = 400;
  o.cache_tokens = 4000;
  for (int i = 0; i < 6; i++)
    drive_prompt(prompts[i], PROMPT, 49152, 9000 + (uint64_t)i);
  pkv_request r = PKV_REQUEST_INIT;
  r.logprobs = 1;
  r.prompt_tokens = 90;
  r.max_tokens = 8;
  r.temperature = 0.8f;
  for (int round = 0; round < 3; round++) {
    o.threads = round == 2 ? 1 : 2;
    o.prefill_chunk = round == 1 ? 33 : 512;
    pkv_engine *const engine = drive_engine(model, &o);
    const int count = round == 1 ? 6 : 1;
    for (int i = 0; i < count; i++) {
      r.prompt = prompts[i];
      r.seed = (uint64_t)i;
      drive_submit(engine, &r, i == 0 && round == 0 ? &alone[0] : &together[i]);
    }
    (void)drive_all(engine, 200);
    if (round > 0) drive_equal(&together[0], &alone[0], round == 1 ? "among 5" : "1 thread");
    drive_finish(engine);
  }
  pkv_model_close(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_among_others),           cmocka_unit_test(test_chunks),
      cmocka_unit_test(test_threads_rows_and_pages), cmocka_unit_test(test_prefix_trees),
      cmocka_unit_test(test_route_shared),           cmocka_unit_test(test_reuse_is_counted),
      cmocka_unit_test(test_source_ends_first),      cmocka_unit_test(test_real_model),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
