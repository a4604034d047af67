/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine on a device (support/fake_device.h): the same greedy text as on the CPU, alone, in
 * batches, in chunks, with shared prefixes and copied pages, preempted; what is refused; failures
 * at every call.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/engine_state.h"
#include "model/device_forward_parts.h"
#include "support/engine_drive.h"
#include "support/fake_device.h"
#include "support/small_llama.h"

#define REQUESTS 12
#define PROMPT   90
#define MOST     24
#define VOCAB    200 /* divided by the 64 */

static pkv_model *model;
static unsigned char *bytes;
static int32_t prompts[REQUESTS][PROMPT];
static drive_answer on_cpu[REQUESTS], on_device[REQUESTS];

static void draw_prompts(int32_t vocab) {
  for (int i = 0; i < REQUESTS; i++) {
    drive_prompt(prompts[i], PROMPT, vocab, 77 + (uint64_t)i);
    if (i % 3 != 0) memcpy(prompts[i], prompts[i / 3 * 3], 40 * sizeof(int32_t));
  }
}

static int open_model(void **state) {
  (void)state;
  const small_llama t = drive_device_llama(3, VOCAB);
  model = drive_model(&bytes, &t);
  draw_prompts(VOCAB);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  pkv_model_close(model);
  gguf_build_drop(bytes);
  return 0;
}

/* The model of the tests, until the first one comes back. */
static pkv_model *first_model;
static unsigned char *other_bytes;

static void use_other_model(const small_llama *t) {
  first_model = model;
  model = drive_model(&other_bytes, t);
}

static void use_first_model(void) {
  pkv_model_close(model);
  gguf_build_drop(other_bytes);
  model = first_model;
}

static pkv_engine_options device_options(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.max_rows = 6;
  o.prefill_chunk = 48;
  return o;
}

static pkv_engine *device_engine(const pkv_engine_options *options) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *const executor = fake_device_create();
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, options, &err), &err, "create");
  return engine;
}

/* Long answers to short prompts, or the reverse. */
static bool long_answers;

static void submit_all(pkv_engine *engine, drive_answer *answers, float temperature) {
  for (int i = 0; i < REQUESTS; i++) {
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt = prompts[i];
    r.prompt_tokens = long_answers ? 20 : PROMPT - 7 * i;
    r.max_tokens = long_answers ? 100 : MOST - i;
    r.ignore_end = 1;
    r.temperature = temperature;
    r.seed = 5 + (uint64_t)i;
    drive_submit(engine, &r, &answers[i]);
  }
}

static void run_cpu(float temperature) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.activations = PKV_ACTIVATIONS_F32;
  pkv_engine *const engine = drive_engine(model, &o);
  submit_all(engine, on_cpu, temperature);
  (void)drive_all(engine, 10000);
  drive_finish(engine);
}

/* 16-bit activations against floats: of these random models the text stays the same. */
static void same_texts(void) {
  for (int i = 0; i < REQUESTS; i++) {
    assert_int_equal(on_device[i].finish, on_cpu[i].finish);
    assert_int_equal(on_device[i].count, on_cpu[i].count);
    for (int k = 0; k < on_cpu[i].count; k++)
      if (on_device[i].tokens[k] != on_cpu[i].tokens[k])
        fail_msg("request %d, token %d: %d on the device, %d on the CPU", i, k,
                 (int)on_device[i].tokens[k], (int)on_cpu[i].tokens[k]);
  }
}

static void test_same_text(void **state) {
  (void)state;
  run_cpu(0.0f);
  const pkv_engine_options o = device_options();
  pkv_engine *const engine = device_engine(&o);
  submit_all(engine, on_device, 0.0f);
  (void)drive_all(engine, 10000);
  same_texts();
  assert_true(fake_device_state.graph_launches > 0);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_true(stats.cache_bytes > 0);
  assert_true(stats.shared_steps > 0);
  drive_finish(engine);
  assert_int_equal(fake_device_state.live, 0);
}

/* Chunks of prompts through a kernel of their own: several requests' in a step. */
static void test_prefill(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  run_cpu(0.0f);
  pkv_engine_options o = device_options();
  o.prefill_chunk = 300;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.prefills = 1;
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  submit_all(engine, on_device, 0.0f);
  (void)drive_all(engine, 10000);
  same_texts();
  assert_true(fake_device_state.chunks > 3);
  drive_finish(engine);
}

/* Sampled on the host from the device's logits, or on the device. */
static void same_samples(int32_t samples) {
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  run_cpu(0.7f);
  pkv_engine_options o = device_options();
  o.prefix_sharing = 0;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.samples = samples;
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  submit_all(engine, on_device, 0.7f);
  bool reads = false; /* ids alone come down where it samples */
  while (pkv_engine_pending(engine) > 0) {
    (void)drive_step(engine);
    reads = reads || engine->reads_logits;
  }
  same_texts();
  assert_int_equal(reads, !samples);
  drive_finish(engine);
}

static void test_same_samples(void **state) {
  (void)state;
  same_samples(0);
  same_samples(1);
}

/* Ranks with all or some of the KV heads, or a part of one's query heads: the same texts, by graphs
   that wait for each other and by passes of chunks. */
static void same_by_ranks(int32_t ranks, int32_t samples, int32_t most_packed) {
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  pkv_engine_options o = device_options();
  pkv_executor *executors[4] = {fake_device_create()};
  for (int32_t r = 1; r < ranks; r++)
    executors[r] = fake_device_another();
  fake_device_state.samples = samples;
  fake_device_state.prefills = samples;
  fake_device_state.packs = most_packed;
  fake_device_state.reaches = samples; /* the head is divided */
  o.tensor_parallel = ranks;
  drive_ok(pkv_engine_create_on(&engine, model, executors, ranks, &o, &err), &err, "create");
  assert_int_equal(engine->rank_count, ranks);
  submit_all(engine, on_device, 0.0f);
  (void)drive_all(engine, 10000);
  same_texts();
  assert_true(fake_device_state.graph_launches > 0);
  assert_true(fake_device_state.sums > fake_device_state.graph_launches);
  assert_int_equal(fake_device_state.gathered > 0, samples);
  drive_finish(engine);
  assert_int_equal(fake_device_state.live, 0);
}

static void test_ranks(void **state) {
  (void)state;
  run_cpu(0.0f);
  for (int32_t ranks = 2; ranks <= 4; ranks++)
    if (ranks != 3) /* 2 KV heads of 2 query heads */
      for (int32_t samples = 0; samples < 2; samples++)
        same_by_ranks(ranks, samples, 0);
}

/* Columns of quantised weights are whole blocks; as they lie in the file, and written out. */
static void test_ranks_packed(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  t.context = 256;
  t.vocab = VOCAB;
  t.head_dim = 64;
  t.feed_forward = 96; /* three blocks: one rank has two of them */
  t.weight_type = 8;   /* Q8_0 */
  t.v_type = 2;        /* Q4_0 */
  use_other_model(&t);
  run_cpu(0.0f);
  same_by_ranks(2, 1, 0);
  same_by_ranks(2, 1, 7);
  use_first_model();
}

static void random_texts(const pkv_model *of, int32_t ranks, drive_answer *answers) {
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  pkv_engine_options o = device_options();
  pkv_executor *executors[2] = {fake_device_create(), ranks > 1 ? fake_device_another() : NULL};
  o.tensor_parallel = ranks;
  drive_ok(pkv_engine_create_on(&engine, of, executors, ranks, &o, &err), &err, "create");
  submit_all(engine, answers, 0.0f);
  (void)drive_all(engine, 10000);
  drive_finish(engine);
}

/* Random weights that are made on the devices: each rank makes its part of the same matrices. */
static void test_ranks_random(void **state) {
  static const char config[] =
      "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64,"
      " \"intermediate_size\": 72, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
      " \"num_key_value_heads\": 2, \"head_dim\": 64, \"vocab_size\": 200,"
      " \"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0,"
      " \"hidden_act\": \"silu\", \"tie_word_embeddings\": false}";
  (void)state;
  char path[] = "/tmp/pkv-ranks-XXXXXX";
  pkv_model *random = NULL;
  pkv_error err = {0};
  FILE *const file = fdopen(mkstemp(path), "w");
  assert_non_null(file);
  assert_true(fputs(config, file) >= 0);
  assert_int_equal(fclose(file), 0);
  drive_ok(pkv_model_open_random(&random, path, 1, NULL, &err), &err, "open");
  assert_int_equal(remove(path), 0);
  random_texts(random, 1, on_cpu);
  random_texts(random, 2, on_device);
  same_texts();
  pkv_model_close(random);
}

/* A vocabulary so small that the second rank has the whole head: the first still waits for it. */
static void test_ranks_small_vocabulary(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  t.context = 256;
  t.vocab = 64;
  t.head_dim = 64;
  use_other_model(&t);
  draw_prompts(t.vocab);
  run_cpu(0.0f);
  same_by_ranks(2, 1, 0);
  draw_prompts(VOCAB);
  use_first_model();
}

static void test_ranks_refused(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  pkv_engine_options o = device_options();
  o.tensor_parallel = 3;
  pkv_executor *const executors[] = {fake_device_create(), fake_device_another(),
                                     fake_device_another()};
  assert_int_equal(pkv_engine_create_on(&engine, model, executors, 3, &o, &err), PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "2 KV heads with 2 query heads each do not divide among 3"));
  assert_int_equal(fake_device_state.live, 0);
  o.device = PKV_DEVICE_CPU;
  assert_int_equal(pkv_engine_create(&engine, model, &o, &err), PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "tensor_parallel is 3"));
  o.tensor_parallel = PKV_MAX_RANKS + 1;
  assert_int_equal(pkv_engine_create(&engine, model, &o, &err), PKV_E_RANGE);
}

/* Each call that can fail while two ranks are made. */
static void test_ranks_failures(void **state) {
  (void)state;
  pkv_engine_options o = device_options();
  o.max_rows = 2;
  o.tensor_parallel = 2;
  int created = 0;
  for (int at = 1; !created; at++) {
    pkv_engine *engine = NULL;
    pkv_error err = {0};
    pkv_executor *const executors[] = {fake_device_create(), fake_device_another()};
    fake_device_state.fail_at = at;
    const pkv_status status = pkv_engine_create_on(&engine, model, executors, 2, &o, &err);
    created = fake_device_state.calls < at;
    if (!created && status == PKV_OK) fail_msg("call %d failed unseen", at);
    pkv_engine_destroy(engine);
    assert_int_equal(fake_device_state.live, 0);
  }
}

static void test_preempted(void **state) {
  (void)state;
  long_answers = true;
  run_cpu(0.0f);
  pkv_engine_options o = device_options();
  o.cache_tokens = 16 * 24;
  o.max_seq_len = 128;
  pkv_engine *const engine = device_engine(&o);
  submit_all(engine, on_device, 0.0f);
  (void)drive_all(engine, 10000);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_true(stats.preemptions > 0);
  long_answers = false;
  same_texts();
  drive_finish(engine);
}

/* Answers of one prompt fork its pages: the last one is copied on the device. */
static void test_forks(void **state) {
  (void)state;
  static drive_answer answers[3];
  pkv_request r = PKV_REQUEST_INIT;
  const pkv_engine_options o = device_options();
  pkv_engine *const engine = device_engine(&o);
  r.prompt = prompts[0];
  r.prompt_tokens = 21;
  r.max_tokens = 20;
  r.ignore_end = 1;
  r.n = 3;
  drive_submit_choices(engine, &r, answers, 3);
  (void)drive_all(engine, 1000);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_true(stats.page_copies > 0);
  for (int i = 1; i < 3; i++)
    for (int k = 0; k < 20; k++)
      assert_int_equal(answers[i].tokens[k], answers[0].tokens[k]);
  drive_finish(engine);
}

/* How large the weights are where so much of the device is free; the rest of an engine that was
   made, if anybody asks. */
static size_t weights_of(size_t free_bytes, int64_t cache_tokens, size_t *buffers, size_t *cache) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_engine_options o = device_options();
  o.cache_tokens = cache_tokens;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.packs = 1;
  fake_device_state.free_bytes = free_bytes;
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  const size_t size = engine->weights->bytes;
  if (buffers != NULL) *buffers = engine->device->memory_bytes;
  if (cache != NULL) *cache = (size_t)engine->device_cache_bytes;
  drive_finish(engine);
  return size;
}

/* Written out, weights leave room for the reserve, the buffers and the cache that was asked for, or
   else for one that holds the longest request; the last byte decides. */
static void keeps_room(const size_t written[2]) {
  const size_t reserve = (size_t)768 << 20, plenty = (size_t)16 << 30;
  size_t buffers = 0, cache = 0;
  assert_int_equal(weights_of(plenty, 100 * 16, &buffers, &cache), written[0]);
  const size_t all = written[0] + reserve + buffers + cache;
  assert_true(cache > written[0] - written[1]);
  for (size_t missing = 0; missing < 2; missing++)
    assert_int_equal(weights_of(all - missing, 100 * 16, NULL, NULL), written[missing]);
  assert_int_equal(weights_of(plenty, 256, &buffers, &cache), written[0]);
  const size_t tenth = buffers > cache / 9 + 1 ? buffers : cache / 9 + 1;
  const size_t longest = written[0] + reserve + 10 * tenth;
  for (size_t missing = 0; missing < 2; missing++)
    assert_int_equal(weights_of(longest - missing, 0, NULL, NULL), written[missing]);
}

/* Quantised weights that stay so on the device, with another type for v; or written out there. */
static void test_packed(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  size_t written[2] = {0, 0};
  pkv_error err = {0};
  t.context = 256;
  t.vocab = VOCAB;
  t.head_dim = 64;
  t.weight_type = 8; /* Q8_0 */
  t.v_type = 2;      /* Q4_0 */
  use_other_model(&t);
  run_cpu(0.0f);
  for (int32_t packs = 0; packs < 2; packs++) {
    pkv_engine *engine = NULL;
    const pkv_engine_options o = device_options();
    pkv_executor *const executor = fake_device_create();
    fake_device_state.packs = packs ? o.max_rows + 1 : 0;
    drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
    assert_int_equal(engine->weights->layers[0].qkv_rest.n, packs ? t.kv_heads * t.head_dim : 0);
    written[packs] = engine->weights->bytes;
    submit_all(engine, on_device, 0.0f);
    (void)drive_all(engine, 10000);
    same_texts();
    drive_finish(engine);
  }
  assert_true(written[1] < written[0]);
  /* Faster written out, but too large for the device then. */
  pkv_device_weights *weights = NULL;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.packs = 1;
  for (size_t missing = 0; missing < 2; missing++) {
    fake_device_state.free_bytes = written[0] - missing;
    drive_ok(pkv_device_weights_create(&weights, model, executor, 6, 0, NULL, &err), &err, "all");
    assert_int_equal(weights->bytes, written[missing]);
    pkv_device_weights_destroy(weights);
  }
  for (int i = 0; i < 2; i++) { /* what is to be kept never prevents the smaller form */
    fake_device_state.free_bytes = written[1];
    drive_ok(
        pkv_device_weights_create(&weights, model, executor, 6, i == 0 ? 1 : SIZE_MAX, NULL, &err),
        &err, "keep");
    assert_int_equal(weights->bytes, written[1]);
    pkv_device_weights_destroy(weights);
  }
  pkv_executor_destroy(executor);
  keeps_room(written);
  use_first_model();
}

/* More tokens than a device's candidates can name: it chooses the likeliest alone, hosts sample. */
static void test_large_vocabulary(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_device_weights *weights = NULL;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.samples = 1;
  drive_ok(pkv_device_weights_create(&weights, model, executor, 1, 0, NULL, &err), &err, "all");
  for (int32_t more = 0; more < 2; more++) {
    pkv_device_forward *forward = NULL;
    pkv_device_forward_options o = {0};
    o.max_tokens = o.max_logits = o.max_pages = o.max_rows[0] = 1;
    o.max_seq_len = o.page_tokens = 16;
    o.sampled_vocab = PKV_DENSE_SAMPLED_VOCAB + more;
    o.kv_dtype = weights->act;
    const pkv_device_rank rank = {model, weights};
    drive_ok(pkv_device_forward_create(&forward, &rank, 1, &o, &err), &err, "forward");
    assert_int_equal(pkv_device_forward_samples(forward), !more);
    assert_int_equal(forward->memory_bytes, pkv_device_forward_bytes(model, executor, 0, 1, &o));
    pkv_device_forward_destroy(forward);
  }
  pkv_device_weights_destroy(weights);
  pkv_executor_destroy(executor);
}

/* A token whose embedding is not finite: the request that has it ends, the others do not notice,
   whether the host chooses or the device. */
static void not_finite(int32_t samples, float temperature) {
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  static int32_t saved[REQUESTS][PROMPT];
  const int32_t spoilt = prompts[4][19];
  memcpy(saved, prompts, sizeof saved);
  for (int i = 0; i < REQUESTS; i++) /* nobody else may have it, or meet it in its answer */
    for (int k = 0; k < PROMPT; k++)
      if (i != 4 && prompts[i][k] == spoilt) prompts[i][k] = (spoilt + 1) % VOCAB;
  run_cpu(temperature);
  pkv_engine_options o = device_options();
  o.prefix_sharing = 0;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.samples = samples;
  fake_device_state.spoilt = spoilt;
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  submit_all(engine, on_device, temperature);
  (void)drive_all(engine, 10000);
  assert_int_equal(on_device[4].finish, PKV_FINISH_ERROR);
  assert_int_equal(on_device[4].count, 0);
  for (int i = 0; i < REQUESTS; i++)
    for (int k = 0; i != 4 && k < on_cpu[i].count; k++) {
      if (k < on_device[i].count)
        assert_int_equal(on_device[i].tokens[k], on_cpu[i].tokens[k]);
      else /* it has chosen that token itself */
        assert_int_equal(on_cpu[i].tokens[on_device[i].count - 1], spoilt);
    }
  memcpy(prompts, saved, sizeof saved);
  drive_finish(engine);
}

static void test_not_finite(void **state) {
  (void)state;
  not_finite(0, 0.7f);
  not_finite(1, 0.7f);
  not_finite(1, 0.0f);
}

/* What a page should hold is lost with its copy: no step may follow. */
static void test_lost_copy(void **state) {
  (void)state;
  static drive_answer answers[2];
  pkv_event events[64];
  pkv_request r = PKV_REQUEST_INIT;
  const pkv_engine_options o = device_options();
  pkv_engine *const engine = device_engine(&o);
  int failed = 0;
  r.prompt = prompts[0];
  r.prompt_tokens = 21;
  r.max_tokens = 20;
  r.ignore_end = 1;
  r.n = 2;
  drive_submit_choices(engine, &r, answers, 2);
  fake_device_state.fail_copies_of = 16 * engine->shape.kv_heads * engine->shape.head_dim * 2;
  for (int i = 0; i < 12; i++) {
    size_t count = 0;
    pkv_error err = {0};
    const pkv_status status = pkv_engine_step(events, 64, &count, engine, &err);
    if (failed == 0 && status == PKV_OK) continue;
    fake_device_state.fail_copies_of = 0;
    assert_int_equal(status, PKV_E_DEVICE);
    assert_non_null(strstr(err.text, "told to fail"));
    failed++;
  }
  assert_true(failed > 1);
  pkv_engine_destroy(engine);
  assert_int_equal(fake_device_state.live, 0);
}

static void refused(const pkv_engine_options *o, pkv_status status, const char *word) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *const executor = fake_device_create();
  assert_int_equal(pkv_engine_create_on(&engine, model, &executor, 1, o, &err), status);
  if (strstr(err.text, word) == NULL) fail_msg("'%s' does not say '%s'", err.text, word);
  assert_null(engine);
  assert_int_equal(fake_device_state.live, 0);
}

static void test_refused(void **state) {
  (void)state;
  pkv_engine_options o = device_options();
  o.batch_invariant = 1;
  refused(&o, PKV_E_UNSUPPORTED, "batch_invariant");
  o = device_options();
  o.policy = PKV_POLICY_STATIC;
  refused(&o, PKV_E_UNSUPPORTED, "policy");
  o = device_options();
  o.route = PKV_ROUTE_SPLIT;
  refused(&o, PKV_E_UNSUPPORTED, "route");
  o = device_options();
  o.kv_dtype = PKV_DTYPE_F32;
  refused(&o, PKV_E_UNSUPPORTED, "kv_dtype");
  o = device_options();
  o.cache_tokens = (int64_t)1 << 34;
  refused(&o, PKV_E_NOMEM, "are missing");
}

static void too_small(size_t free_bytes, int64_t cache_tokens, const char *word) {
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_engine_options o = device_options();
  o.cache_tokens = cache_tokens;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.free_bytes = free_bytes;
  assert_int_equal(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), PKV_E_NOMEM);
  if (strstr(err.text, word) == NULL || strstr(err.text, "are missing") == NULL)
    fail_msg("'%s' does not say '%s' and what is missing", err.text, word);
  assert_null(engine);
  assert_int_equal(fake_device_state.live, 0);
}

/* Too little memory: for the weights, behind them, for the cache that was asked for. Where nothing
   is asked for, the cache is what fits. */
static void test_small_device(void **state) {
  (void)state;
  const size_t reserve = (size_t)768 << 20;
  pkv_error err = {0};
  pkv_engine *engine = NULL;
  too_small(1000, 0, "the weights need");
  too_small(reserve, 0, "behind the weights");
  too_small(reserve + 1000, 0, "behind the weights");
  too_small(reserve + ((size_t)64 << 20), (int64_t)1 << 20, "a cache of");
  pkv_engine_options o = device_options();
  o.cache_tokens = 0;
  pkv_executor *const executor = fake_device_create();
  fake_device_state.free_bytes = reserve + ((size_t)64 << 20);
  drive_ok(pkv_engine_create_on(&engine, model, &executor, 1, &o, &err), &err, "create");
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_true(stats.cache_bytes > 0 && stats.cache_bytes <= (size_t)64 << 20);
  drive_finish(engine);
}

/* Every call of the device that can fail, one after the other: an error, and nothing is left. */
static void test_failures(void **state) {
  (void)state;
  pkv_engine_options o = device_options();
  o.max_rows = 2;
  int created = 0;
  for (int at = 1; !created; at++) {
    pkv_engine *engine = NULL;
    pkv_error err = {0};
    pkv_executor *const executor = fake_device_create();
    fake_device_state.fail_at = at;
    const pkv_status status = pkv_engine_create_on(&engine, model, &executor, 1, &o, &err);
    created = fake_device_state.calls < at;
    if (!created && status == PKV_OK) fail_msg("call %d failed unseen", at);
    pkv_engine_destroy(engine);
    assert_int_equal(fake_device_state.live, 0);
  }
}

/* A step that fails can be tried again, and the text is the same. */
static void test_failing_steps(void **state) {
  (void)state;
  pkv_event events[64];
  const pkv_engine_options o = device_options();
  run_cpu(0.0f);
  pkv_engine *const engine = device_engine(&o);
  submit_all(engine, on_device, 0.0f);
  for (int i = 0; i < 40; i++) {
    size_t count = 0;
    pkv_error err = {0};
    fake_device_state.fail_at = fake_device_state.calls + 1 + i % 9;
    if (pkv_engine_step(events, 64, &count, engine, &err) == PKV_OK) break;
    assert_int_equal(err.status, PKV_E_DEVICE);
    assert_int_equal(count, 0);
  }
  fake_device_state.fail_at = 0;
  (void)drive_all(engine, 10000);
  same_texts();
  drive_finish(engine);
}

static void submit_first(pkv_engine *engine, drive_answer *answer) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[0];
  r.prompt_tokens = 20;
  r.max_tokens = 3;
  r.ignore_end = 1;
  drive_submit(engine, &r, answer);
}

/* Steps while the device fails, a few times at most; then it does not any more. A call that fails
   to begin a step may have events of the one before. */
static void step_through_failures(pkv_engine *engine) {
  size_t count = 0;
  pkv_error err = {0};
  for (int i = 0; i < 6 && pkv_engine_pending(engine) > 0; i++) {
    const int before = fake_device_state.calls;
    if (drive_try_step(&count, engine, &err) == PKV_OK) {
      const int at = fake_device_state.fail_at;
      assert_true(at <= before ? !fake_device_state.fail_on : at > fake_device_state.calls);
      continue;
    }
    assert_int_equal(err.status, PKV_E_DEVICE);
  }
}

static pkv_engine *two_ranks(void) {
  pkv_engine_options o = device_options();
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *const executors[] = {fake_device_create(), fake_device_another()};
  o.tensor_parallel = 2;
  drive_ok(pkv_engine_create_on(&engine, model, executors, 2, &o, &err), &err, "create");
  return engine;
}

/* The call that fails is number `at` of the steps; 1: the group was lost. */
static int one_step_fails(int at, const drive_answer *right) {
  static drive_answer answer;
  pkv_engine *const engine = two_ranks();
  pkv_error err = {0};
  size_t count = 0;
  int lost = 0;
  submit_first(engine, &answer);
  const int before = fake_device_state.calls;
  fake_device_state.fail_at = before + at;
  pkv_status status = PKV_OK;
  while (status == PKV_OK && pkv_engine_pending(engine) > 0)
    status = drive_try_step(&count, engine, &err);
  assert_int_equal(status, fake_device_state.calls >= before + at ? PKV_E_DEVICE : PKV_OK);
  if (status != PKV_OK) status = drive_try_step(&count, engine, &err);
  if (status == PKV_OK) {
    (void)drive_all(engine, 1000);
    drive_equal(right, &answer, "after a failure");
  } else {
    /* The graph of one rank runs alone: every step says so. */
    for (int i = 0; i < 3; i++) {
      assert_int_equal(drive_try_step(&count, engine, &err), PKV_E_DEVICE);
      assert_non_null(strstr(err.text, "in vain"));
    }
    lost = 1;
  }
  pkv_engine_destroy(engine);
  assert_int_equal(fake_device_state.live, 0);
  return lost;
}

/* Each call of the steps of two ranks that can fail: the step can be tried again, sums in their
   places included, unless one rank has a graph that the other never got. */
static void test_ranks_failing_steps(void **state) {
  static drive_answer right;
  (void)state;
  pkv_engine *const engine = two_ranks();
  const int before = fake_device_state.calls;
  submit_first(engine, &right);
  (void)drive_all(engine, 1000);
  const int calls = fake_device_state.calls - before;
  drive_finish(engine);
  int lost = 0;
  for (int at = 1; at <= calls; at++)
    lost += one_step_fails(at, &right);
  assert_true(calls > 100 && lost > 0 && lost < calls / 10);
}

static int stride = 16;

/* An engine's whole life with each call of the device failing, once or from then on: an engine is
   not made, or its steps say so; afterwards the same request, and the next one, are right. */
static void life_with_failure(int at, bool on, const drive_answer *right) {
  static drive_answer first, next;
  const pkv_engine_options o = device_options();
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *const executor = fake_device_create();
  fake_device_state.fail_at = at;
  fake_device_state.fail_on = on;
  if (pkv_engine_create_on(&engine, model, &executor, 1, &o, &err) == PKV_OK) {
    submit_first(engine, &first);
    step_through_failures(engine);
    fake_device_state.fail_at = 0;
    fake_device_state.fail_on = false;
    (void)drive_all(engine, 1000);
    submit_first(engine, &next);
    (void)drive_all(engine, 1000);
    drive_equal(right, &first, "the same request");
    drive_equal(right, &next, "the next request");
    drive_finish(engine);
  } else {
    assert_int_equal(err.status, PKV_E_DEVICE);
  }
  assert_int_equal(fake_device_state.live, 0);
}

static void test_calls_of_a_life(void **state) {
  static drive_answer right;
  (void)state;
  const pkv_engine_options o = device_options();
  pkv_engine *const engine = device_engine(&o);
  submit_first(engine, &right);
  (void)drive_all(engine, 1000);
  const int calls = fake_device_state.calls;
  drive_finish(engine);
  assert_true(calls > 50);
  const int first = 1 + (int)(time(NULL) % stride);
  for (int at = first; at <= calls; at += stride) {
    life_with_failure(at, false, &right);
    life_with_failure(at, true, &right);
  }
  (void)printf("of %d calls of the device every %d from %d on failed, once and from then on\n",
               calls, stride, first);
}

/* With an argument, every call of the device fails in turn; without, some, others each time. */
int main(int argc, char **argv) {
  (void)argv;
  if (argc > 1) stride = 1;
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_text),
                                     cmocka_unit_test(test_same_samples),
                                     cmocka_unit_test(test_prefill),
                                     cmocka_unit_test(test_preempted),
                                     cmocka_unit_test(test_forks),
                                     cmocka_unit_test(test_refused),
                                     cmocka_unit_test(test_packed),
                                     cmocka_unit_test(test_not_finite),
                                     cmocka_unit_test(test_lost_copy),
                                     cmocka_unit_test(test_small_device),
                                     cmocka_unit_test(test_failures),
                                     cmocka_unit_test(test_failing_steps),
                                     cmocka_unit_test(test_calls_of_a_life),
                                     cmocka_unit_test(test_large_vocabulary),
                                     cmocka_unit_test(test_ranks),
                                     cmocka_unit_test(test_ranks_packed),
                                     cmocka_unit_test(test_ranks_random),
                                     cmocka_unit_test(test_ranks_refused),
                                     cmocka_unit_test(test_ranks_failures),
                                     cmocka_unit_test(test_ranks_failing_steps),
                                     cmocka_unit_test(test_ranks_small_vocabulary)};
  return cmocka_run_group_tests(tests, open_model, close_model);
}
