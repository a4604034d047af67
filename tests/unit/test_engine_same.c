/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A seeded request gives the same tokens, log-probabilities and end alone and cold, among others,
 * in chunks, preempted, from a warm cache, in any order and with any number of threads; greedy or
 * sampled, with every knob, with a cache of f16 and of fp8.
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

#define REQUESTS 24
#define PROMPT   360
#define VOCAB    320
#define MOST     3

static tiny_model tiny;
static int32_t prompts[REQUESTS][PROMPT];
static pkv_request requests[REQUESTS];
static pkv_logit_bias biases[REQUESTS][4];
static char stop_text[REQUESTS][2][16];
static const char *stop_list[REQUESTS][2];
static drive_answer base[REQUESTS][MOST], got[REQUESTS][MOST];

static void any_request(int i, pkv_rng *rng) {
  pkv_request *const r = &requests[i];
  *r = (pkv_request)PKV_REQUEST_INIT;
  drive_prompt(prompts[i], PROMPT, VOCAB, 500 + (uint64_t)i);
  if (i % 3 != 0) /* shares a prefix with an earlier one */
    memcpy(prompts[i], prompts[i / 3 * 3], (size_t)pkv_rng_below(rng, 300) * sizeof(int32_t));
  r->prompt = prompts[i];
  r->prompt_tokens = (int32_t)pkv_rng_range(rng, 1, PROMPT);
  r->max_tokens = (int32_t)pkv_rng_range(rng, 10, 120);
  r->logprobs = 1;
  r->seed = pkv_rng_next(rng);
  r->temperature = i % 2 ? 0.5f + (float)pkv_rng_uniform(rng) : 0.0f;
  r->top_k = i % 4 == 1 ? 50 : 0;
  r->top_p = i % 5 == 1 ? 0.9f : 0.0f;
  r->min_p = i % 7 == 1 ? 0.02f : 0.0f;
  r->repetition_penalty = i % 3 == 2 ? 1.2f : 0.0f;
  r->presence_penalty = i % 5 == 2 ? 0.7f : 0.0f;
  r->frequency_penalty = i % 5 == 3 ? 0.4f : 0.0f;
  for (int k = 0; k < 4; k++)
    biases[i][k] = (pkv_logit_bias){(int32_t)pkv_rng_below(rng, VOCAB), k % 2 ? 3.0f : -100.0f};
  r->logit_bias = biases[i];
  r->logit_bias_count = i % 4;
  r->min_tokens = i % 6;
  for (int k = 0; k < 2; k++) {
    (void)snprintf(stop_text[i][k], sizeof stop_text[i][k], "%dw%d", (int)pkv_rng_below(rng, 10),
                   (int)pkv_rng_below(rng, 10));
    stop_list[i][k] = stop_text[i][k];
  }
  r->stop = stop_list[i];
  r->stop_count = i % 3;
  r->n = i % 8 == 5 ? MOST : 1;
  r->ignore_end = i % 4 == 3;
}

static int open_model(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  pkv_rng rng;
  options.spread = 1.0f;
  options.eos = 7;
  tiny_model_open(&tiny, &options);
  pkv_rng_init(&rng, 1234);
  for (int i = 0; i < REQUESTS; i++)
    any_request(i, &rng);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  return 0;
}

static pkv_engine_options engine_options(pkv_dtype dtype) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 8;
  o.max_requests = 64;
  o.cache_tokens = 16384;
  o.max_seq_len = 512;
  o.prefill_chunk = 256;
  o.kv_dtype = dtype;
  o.k_scale = 0.25f;
  o.v_scale = 0.5f;
  return o;
}

/* Alone, cold, the prompt in one piece where it fits. */
static void run_alone(pkv_dtype dtype) {
  pkv_engine_options o = engine_options(dtype);
  o.prefix_sharing = 0;
  o.prefill_chunk = 512;
  int ends[5] = {0};
  for (int i = 0; i < REQUESTS; i++) {
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    drive_submit_choices(engine, &requests[i], base[i], requests[i].n);
    (void)drive_all(engine, 1000);
    ends[base[i][0].finish]++;
    drive_finish(engine);
  }
  assert_true(ends[PKV_FINISH_STOP] >= 3 && ends[PKV_FINISH_LENGTH] >= 3);
}

static pkv_engine_stats compare(pkv_engine *engine, uint64_t shuffle, const char *what) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  char text[64];
  int order[REQUESTS];
  pkv_rng rng;
  pkv_rng_init(&rng, shuffle);
  for (int i = 0; i < REQUESTS; i++)
    order[i] = i;
  for (int i = REQUESTS; i-- > 1;) {
    const int j = (int)pkv_rng_below(&rng, (uint64_t)i + 1), k = order[i];
    order[i] = order[j];
    order[j] = k;
  }
  for (int k = 0; k < REQUESTS; k++) {
    const int i = order[k];
    drive_submit_choices(engine, &requests[i], got[i], requests[i].n);
    for (uint64_t steps = pkv_rng_below(&rng, 3); steps > 0; steps--)
      (void)drive_step(engine);
  }
  (void)drive_all(engine, 60000);
  for (int i = 0; i < REQUESTS; i++)
    for (int32_t c = 0; c < requests[i].n; c++) {
      (void)snprintf(text, sizeof text, "%s, request %d, answer %d", what, i, (int)c);
      drive_equal(&got[i][c], &base[i][c], text);
      assert_int_equal(got[i][c].stop_index, base[i][c].stop_index);
      assert_int_equal(got[i][c].stop_bytes, base[i][c].stop_bytes);
    }
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(stats.pages_in_use, 0);
  return stats;
}

static pkv_engine_stats compare_with(const pkv_engine_options *o, uint64_t seed, const char *what) {
  pkv_engine *const engine = drive_engine(tiny.model, o);
  const pkv_engine_stats stats = compare(engine, seed, what);
  drive_finish(engine);
  return stats;
}

static void all_ways(pkv_dtype dtype) {
  run_alone(dtype);
  pkv_engine_options o = engine_options(dtype);
  (void)compare_with(&o, 1, "among others");
  static const int32_t chunks[] = {1, 7, 16, 33};
  for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
    o.prefill_chunk = chunks[i];
    (void)compare_with(&o, 2 + i, "in chunks");
  }
  o = engine_options(dtype);
  o.prefill_beside = 20;
  (void)compare_with(&o, 7, "few prompt tokens beside");
  o = engine_options(dtype);
  o.threads = 1;
  o.isa = PKV_ISA_AUTO;
  o.route = PKV_ROUTE_BALANCED;
  (void)compare_with(&o, 8, "one thread, balanced");
  for (int keep = 0; keep < 2; keep++) {
    o = engine_options(dtype);
    o.cache_tokens = 640;
    o.prefix_cache = keep;
    const pkv_engine_stats s = compare_with(&o, 9, "preempted");
    print_message("%s, pool of 640: %lld preemptions, %lld evictions\n", pkv_dtype_name(dtype),
                  (long long)s.preemptions, (long long)s.evictions);
    assert_true(s.preemptions > 0);
    if (keep) assert_true(s.evictions > 0);
  }
  o = engine_options(dtype);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  for (uint64_t round = 0; round < 3; round++)
    (void)compare(engine, 10 + round, round == 0 ? "cold" : "warm");
  drive_finish(engine);
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    o = engine_options(dtype);
    o.order = (pkv_sched_order)order;
    o.admission = order % 2 ? PKV_SCHED_ALWAYS : PKV_SCHED_MARGINAL;
    o.cache_tokens = order % 3 ? 16384 : 700;
    (void)compare_with(&o, 20 + (uint64_t)order, pkv_sched_order_name(o.order));
  }
}

static void test_f16(void **state) {
  (void)state;
  all_ways(PKV_DTYPE_F16);
}

static void test_fp8(void **state) {
  (void)state;
  static drive_answer half[REQUESTS];
  run_alone(PKV_DTYPE_F16);
  for (int i = 0; i < REQUESTS; i++)
    half[i] = base[i][0];
  all_ways(PKV_DTYPE_FP8_E4M3);
  int equal = 0; /* fp8 is another cache: the first log-probabilities are near, not the same */
  for (int i = 0; i < REQUESTS; i++) {
    const float d = base[i][0].logprobs[0] - half[i].logprobs[0];
    equal += d == 0.0f;
    if (base[i][0].tokens[0] == half[i].tokens[0] && (d > 0.6f || d < -0.6f))
      fail_msg("request %d: %g with fp8, %g with f16", i, (double)base[i][0].logprobs[0],
               (double)half[i].logprobs[0]);
  }
  assert_true(equal < REQUESTS / 2);
}

/* Another seed, or another answer of the same request, is another text. */
static void test_seeds_matter(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options(PKV_DTYPE_F16);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[0];
  r.prompt_tokens = 50;
  r.max_tokens = 20;
  r.temperature = 1.0f;
  r.ignore_end = 1;
  for (int i = 0; i < 8; i++) {
    r.seed = (uint64_t)(i / 2);
    drive_submit(engine, &r, &got[i][0]);
  }
  (void)drive_all(engine, 100);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < i; j++) {
      const bool same = memcmp(got[i][0].tokens, got[j][0].tokens, 20 * sizeof(int32_t)) == 0;
      assert_int_equal(same, i / 2 == j / 2);
    }
  drive_finish(engine);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_f16),
      cmocka_unit_test(test_fp8),
      cmocka_unit_test(test_seeds_matter),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
