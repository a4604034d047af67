/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0) against its golden data, by the rules that tests/golden's
 * README states for the demo model. Skipped where the model file is not in the cache.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/golden_model.h"

#define MODEL_PATH PKV_MODEL_DIR "/gemma-3-270m-q4_k_m.gguf"
#define GOLDEN     PKV_SOURCE_DIR "/tests/golden/gemma3-270m-q4_k_m.raw.f32.json"
#define MAX_TOKENS 160 /* 1 MiB of logits each */

static int setup(void **state) {
  golden_model *f = calloc(1, sizeof *f);
  *state = f;
  return golden_model_open(f, MODEL_PATH, GOLDEN, MAX_TOKENS);
}

static int teardown(void **state) {
  golden_model_close(*state);
  free(*state);
  return 0;
}

static void test_exact_mode_equals_the_reference(void **state) {
  golden_model_exact(*state);
}

static void test_fast_mode_stays_near_the_reference(void **state) {
  golden_model_fast(*state);
}

/* Five of six layers look back over a window; the context is the model's own all the same. */
static void test_context_and_window(void **state) {
  const golden_model *f = *state;
  golden_model_need(f);
  assert_int_equal(pkv_model_hparams(f->model)->context, 32768);
  assert_int_equal(pkv_model_hparams(f->model)->window, 512);
  assert_int_equal(pkv_model_hparams(f->model)->local_layers, 15);
  assert_int_equal(pkv_model_hparams(f->model)->head_dim, 256);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_exact_mode_equals_the_reference),
      cmocka_unit_test(test_fast_mode_stays_near_the_reference),
      cmocka_unit_test(test_context_and_window),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
