/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The demo model against the golden data of tests/golden (its README states the rules): the exact
 * mode against an independent float32 reference, the fast mode within what quantised activations
 * may cost. Skipped where the model file is not in the cache.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/text.h"
#include "support/golden_model.h"

#define MODEL_PATH PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf"
#define GOLDEN     PKV_SOURCE_DIR "/tests/golden/smollm2-135m-q4_1.raw.f32.json"
#define TEXT       PKV_SOURCE_DIR "/tests/data/english.txt"
#define MAX_TOKENS GOLDEN_MOST_TOKENS

typedef struct fixture {
  golden_model base;
  float *others; /* [MAX_TOKENS, vocab] */
} fixture;

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  *state = f;
  if (golden_model_open(&f->base, MODEL_PATH, GOLDEN, MAX_TOKENS) != 0) return -1;
  if (!f->base.model) return 0;
  f->others = calloc((size_t)MAX_TOKENS * (size_t)f->base.vocab, sizeof(float));
  return f->others ? 0 : -1;
}

static int teardown(void **state) {
  fixture *f = *state;
  golden_model_close(&f->base);
  free(f->others);
  free(f);
  return 0;
}

static fixture *need_model(void **state) {
  fixture *f = *state;
  golden_model_need(&f->base);
  return f;
}

static void test_exact_mode_equals_the_reference(void **state) {
  golden_model_exact(&((fixture *)*state)->base);
}

static void test_fast_mode_stays_near_the_reference(void **state) {
  golden_model_fast(&((fixture *)*state)->base);
}

static double perplexity(const golden_model *f, const int32_t *ids, int32_t count,
                         pkv_compute compute, pkv_dtype kv) {
  forward_runner r;
  double sum = 0.0;
  golden_model_start(&r, f, compute, kv, MAX_TOKENS);
  forward_runner_feed(&r, 0, ids, count, true, f->logits);
  forward_runner_deinit(&r);
  for (int32_t i = 0; i + 1 < count; i++)
    sum += log_probability(f->logits + (int64_t)i * f->vocab, f->vocab, ids[i + 1]);
  return exp(-sum / (count - 1));
}

static void test_perplexity_of_the_modes(void **state) {
  const golden_model *f = &need_model(state)->base;
  pkv_buffer text;
  pkv_error err = {0};
  int32_t ids[MAX_TOKENS];
  size_t count = 0;
  pkv_buffer_init(&text, 1 << 20, NULL);
  assert_int_equal(pkv_buffer_read_file(&text, TEXT, &err), PKV_OK);
  const pkv_status status =
      pkv_tokenize(ids, MAX_TOKENS, &count, f->model, text.data, text.size, 0, &err);
  pkv_buffer_deinit(&text);
  if (status != PKV_OK) fail_msg("%s", err.text);
  if (golden_few) count = 64;
  const double exact = perplexity(f, ids, (int32_t)count, PKV_COMPUTE_F32, PKV_DTYPE_F32);
  const double fast = perplexity(f, ids, (int32_t)count, PKV_COMPUTE_I8, PKV_DTYPE_F16);
  print_message("perplexity of %d tokens: %.4f exact, %.4f fast (%+.2f %%)\n", (int)count, exact,
                fast, 100.0 * (fast / exact - 1.0));
  assert_true(exact > 1.0 && exact < 200.0);
  assert_true(fabs(fast / exact - 1.0) <= (golden_few ? 0.1 : 0.01)); /* 64 tokens say little */
}

/* Chunks of 1, 7, 16, 17 and all at once; and two rows decoding together: the same bits. */
static void test_chunks_and_neighbours_do_not_show(void **state) {
  fixture *both = need_model(state);
  golden_model *f = &both->base;
  const json_t *item = json_array_get(json_object_get(f->golden, "prompts"), 4);
  static const int32_t chunks[] = {1, 7, 16, 17};
  int32_t ids[MAX_TOKENS], prompt_tokens;
  forward_runner r;
  golden_model_start(&r, f, PKV_COMPUTE_I8, PKV_DTYPE_F16, MAX_TOKENS);
  int32_t count = golden_model_forced(f, &r, item, ids, &prompt_tokens) + prompt_tokens - 1;
  if (golden_few) count = 24;
  const size_t bytes = (size_t)count * (size_t)f->vocab * sizeof(float);
  forward_runner_deinit(&r);
  for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
    golden_model_start(&r, f, PKV_COMPUTE_I8, PKV_DTYPE_F16, chunks[c]);
    forward_runner_feed(&r, 0, ids, count, true, both->others);
    forward_runner_deinit(&r);
    if (memcmp(f->logits, both->others, bytes) != 0)
      fail_msg("chunks of %d differ", (int)chunks[c]);
  }
  golden_model_start(&r, f, PKV_COMPUTE_I8, PKV_DTYPE_F16, 64);
  forward_runner_feed(&r, 0, ids, 20, false, both->others);
  forward_runner_feed(&r, 1, ids + 3, 41, false, both->others);
  for (int32_t i = 20; i < count; i++) {
    const int32_t pair[2] = {ids[i], ids[i - 7]};
    forward_runner_step(&r, pair, 2, both->others);
    if (memcmp(both->others, f->logits + (int64_t)i * f->vocab, (size_t)f->vocab * sizeof(float)) !=
        0)
      fail_msg("token %d beside another row differs", (int)i);
  }
  forward_runner_deinit(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_exact_mode_equals_the_reference),
      cmocka_unit_test(test_fast_mode_stays_near_the_reference),
      cmocka_unit_test(test_perplexity_of_the_modes),
      cmocka_unit_test(test_chunks_and_neighbours_do_not_show),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
