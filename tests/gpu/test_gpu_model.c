/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model on the device against the CPU: the same greedy text, or a first difference where the
 * CPU's own two candidates are nearer than NEAR nats. 16-bit activations move a logit of 20 by up
 * to some hundredths; text that differs where the gap is wider is a fault. With --ranks the same
 * of several devices together against one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_state.h"
#include "gpu/gpu_case.h"
#include "model/model.h"
#include "support/engine_drive.h"
#include "support/small_llama.h"

#define NEAR     0.15f
#define REQUESTS 8
#define PROMPT   300
#define ANSWER   64

static int32_t prompts[REQUESTS][PROMPT];
static pkv_event right_events[REQUESTS][ANSWER]; /* of the CPU, or of one device */
static int32_t got_tokens[REQUESTS][ANSWER];
static int32_t counts[REQUESTS], lengths[REQUESTS];

static void submit_all(pkv_engine *engine, int32_t answer, bool logprobs) {
  for (intptr_t i = 0; i < REQUESTS; i++) {
    pkv_request r = PKV_REQUEST_INIT;
    int64_t id;
    r.prompt = prompts[i];
    r.prompt_tokens = lengths[i];
    r.max_tokens = answer;
    r.ignore_end = 1;
    r.user = (void *)i;
    r.logprobs = logprobs;
    r.top_logprobs = logprobs ? 8 : 0;
    OK(pkv_engine_submit(&id, engine, &r, err));
  }
  memset(counts, 0, sizeof counts);
}

static void run_all(pkv_engine *engine, bool right) {
  static pkv_event events[256];
  while (pkv_engine_pending(engine) > 0) {
    size_t count = 0;
    OK(pkv_engine_step(events, 256, &count, engine, err));
    for (size_t i = 0; i < count; i++) {
      const intptr_t at = (intptr_t)events[i].user;
      assert_int_not_equal(events[i].finish, PKV_FINISH_ERROR);
      if (events[i].token < 0) continue;
      if (right)
        right_events[at][counts[at]++] = events[i];
      else
        got_tokens[at][counts[at]++] = events[i].token;
    }
  }
}

/* The right one's log-probability of a token, or far away. */
static float logprob_of(const pkv_event *e, int32_t token) {
  for (int32_t i = 0; i < e->top_count; i++)
    if (e->top[i].token == token) return e->top[i].logprob;
  return -1000.0f;
}

static int compare_texts(int32_t answer, const char *what) {
  int different = 0;
  for (int i = 0; i < REQUESTS; i++)
    for (int32_t k = 0; k < answer; k++) {
      const pkv_event *e = &right_events[i][k];
      if (got_tokens[i][k] == e->token) continue;
      const float gap = e->logprob - logprob_of(e, got_tokens[i][k]);
      printf("%s: request %d differs at token %d of %d: gap %.3f\n", what, i, (int)k, (int)answer,
             (double)gap);
      if (gap > NEAR)
        fail_msg("%s: request %d, token %d: %d for %d, %.3f nats apart", what, i, (int)k,
                 (int)got_tokens[i][k], (int)e->token, (double)gap);
      different++;
      break;
    }
  return different;
}

static pkv_engine_stats run_engine(const pkv_model *model, const pkv_engine_options *o,
                                   int32_t answer, bool right) {
  pkv_engine *engine = NULL;
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  OK(pkv_engine_create(&engine, model, o, err));
  submit_all(engine, answer, right);
  run_all(engine, right);
  pkv_engine_get_stats(&stats, engine);
  pkv_engine_destroy(engine);
  return stats;
}

/* In a cache for half of them: preempted ones get their pages back from the host, or are computed
   again where it has none. */
static void under_pressure(const pkv_model *model, pkv_engine_options o, const char *what,
                           int32_t answer) {
  for (int swaps = 0; swaps < 2; swaps++) {
    pkv_engine *engine = NULL;
    pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
    int64_t tokens = 0;
    for (int i = 0; i < REQUESTS; i++)
      tokens += lengths[i] + answer;
    o.page_tokens = 16;
    o.cache_tokens = tokens / 2 > o.max_seq_len ? tokens / 2 : o.max_seq_len;
    o.swap_bytes = swaps ? (int64_t)1 << 30 : 0;
    OK(pkv_engine_create(&engine, model, &o, err));
    engine->swap.out_seconds = engine->swap.in_seconds = 0.0; /* whatever the model's size */
    submit_all(engine, answer, false);
    run_all(engine, false);
    pkv_engine_get_stats(&s, engine);
    pkv_engine_destroy(engine);
    printf("%s: %lld preemptions, %lld out, %lld in, %lld given up: %d of %d texts differ\n", what,
           (long long)s.preemptions, (long long)s.swap_outs, (long long)s.swap_ins,
           (long long)s.swap_drops, compare_texts(answer, what), REQUESTS);
    assert_int_equal(s.swap_ins > 0, s.preemptions > 0 && swaps);
    assert_int_equal(s.swap_used_bytes, 0);
  }
}

static void several_devices(const pkv_model *model, pkv_engine_options o, const char *what,
                            int32_t answer) {
  (void)run_engine(model, &o, answer, true);
  o.tensor_parallel = gpu_opt.ranks;
  const pkv_engine_stats stats = run_engine(model, &o, answer, false);
  if (o.route == PKV_ROUTE_SHARED) assert_true(stats.shared_steps > 0);
  printf("%s: %d devices: %d of %d texts differ from one's somewhere\n", what, (int)gpu_opt.ranks,
         compare_texts(answer, what), REQUESTS);
  under_pressure(model, o, what, answer);
}

static void same_text(const pkv_model *model, const char *what, int32_t answer, pkv_route route) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.max_rows = REQUESTS;
  o.prefill_chunk = 200;
  o.max_seq_len = PROMPT + ANSWER;
  o.cache_tokens = (int64_t)REQUESTS * 400;
  o.activations = PKV_ACTIVATIONS_F32;
  (void)run_engine(model, &o, answer, true);
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.route = route;
  const pkv_engine_stats stats = run_engine(model, &o, answer, false);
  if (route == PKV_ROUTE_SHARED) assert_true(stats.shared_steps > 0);
  printf("%s: %d of %d texts differ somewhere\n", what, compare_texts(answer, what), REQUESTS);
  under_pressure(model, o, what, answer);
  if (gpu_opt.ranks > 1) several_devices(model, o, what, answer);
}

static void draw(int32_t vocab) {
  for (int i = 0; i < REQUESTS; i++) {
    drive_prompt(prompts[i], PROMPT, vocab, 900 + (uint64_t)i);
    lengths[i] = PROMPT - 31 * i;
    if (i % 2 != 0) memcpy(prompts[i], prompts[i - 1], 64 * sizeof(int32_t));
  }
}

static void test_small_models(void **state) {
  (void)state;
  static const struct {
    int32_t heads, kv_heads, head_dim;
    uint32_t type, v_type;
  } shapes[] = {{9, 3, 64, 1, 0}, {8, 2, 128, 30, 0}, {4, 4, 64, 8, 0},
                {6, 2, 96, 1, 0}, {8, 2, 64, 12, 8},  {9, 3, 64, 3, 0}};
  NEED_GPU();
  for (size_t i = 0; i < COUNT(shapes); i++) {
    small_llama t = SMALL_LLAMA_INIT;
    size_t size = 0;
    char what[64];
    pkv_model *model = NULL;
    t.layers = 3;
    t.width = 256;                       /* a super-block of Q4_K */
    t.feed_forward = i < 2 ? 2304 : 512; /* more tiles than clusters; few of them */
    t.query_heads = shapes[i].heads;
    t.kv_heads = shapes[i].kv_heads;
    t.head_dim = shapes[i].head_dim;
    t.weight_type = shapes[i].type;
    t.v_type = shapes[i].v_type;
    t.context = 512;
    t.vocab = 512;
    t.seed = 3 + i;
    unsigned char *const bytes = small_llama_bytes(&t, &size);
    OK(pkv_model_open_memory(&model, bytes, size, NULL, err));
    draw(t.vocab);
    (void)snprintf(what, sizeof what, "small model %zu", i);
    same_text(model, what, ANSWER, t.head_dim == 96 ? PKV_ROUTE_BALANCED : PKV_ROUTE_SHARED);
    pkv_model_close(model);
    gguf_build_drop(bytes);
  }
}

/* One KV head of 256, whose query heads two devices divide; windows; norms of what is added. */
static void test_random_gemma(void **state) {
  static const char config[] =
      "{\"model_type\": \"gemma3_text\", \"architectures\": [\"Gemma3ForCausalLM\"],"
      " \"hidden_size\": 320, \"intermediate_size\": 1024, \"num_hidden_layers\": 4,"
      " \"num_attention_heads\": 4, \"num_key_value_heads\": 1, \"head_dim\": 256,"
      " \"vocab_size\": 512, \"max_position_embeddings\": 512, \"rms_norm_eps\": 1e-6,"
      " \"rope_theta\": 1000000.0, \"rope_local_base_freq\": 10000.0, \"sliding_window\": 128,"
      " \"sliding_window_pattern\": 2, \"query_pre_attn_scalar\": 256,"
      " \"hidden_activation\": \"gelu_pytorch_tanh\"}";
  (void)state;
  NEED_GPU();
  pkv_model *const model = gpu_random_model(config, 0);
  draw(512);
  same_text(model, "random gemma", ANSWER, PKV_ROUTE_BALANCED);
  pkv_model_close(model);
}

/* --model FILE */
static void test_real_model(void **state) {
  (void)state;
  static const char *const texts[REQUESTS] = {
      "The history of the printing press begins",
      "Write a short story about a lighthouse keeper who",
      "In mathematics, a prime number is",
      "Here is a recipe for bread:\n1.",
      "def fibonacci(n):\n",
      "The capital of France is Paris. The capital of Germany is",
      "Once upon a time, in a village by the sea,",
      "Water boils at a temperature of"};
  pkv_model *model = NULL;
  NEED_GPU();
  if (gpu_opt.model == NULL) {
    printf("no --model: nothing compared\n");
    return;
  }
  OK(pkv_model_open(&model, gpu_opt.model, NULL, err));
  for (int i = 0; i < REQUESTS; i++) {
    size_t count = 0;
    OK(pkv_tokenize(prompts[i], PROMPT, &count, model, texts[i], strlen(texts[i]),
                    PKV_TEXT_ADD_SPECIAL, err));
    lengths[i] = (int32_t)count;
  }
  same_text(model, gpu_opt.model, ANSWER, PKV_ROUTE_BALANCED);
  pkv_model_close(model);
}

int gpu_suite_model(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_small_models),
                                     cmocka_unit_test(test_random_gemma),
                                     cmocka_unit_test(test_real_model)};
  return cmocka_run_group_tests_name("model", tests, gpu_setup, gpu_teardown);
}
