/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tiny model of every family, as a folder of safetensors and as a GGUF file, against the logits
 * of a plain numpy model in float64: tests/data/tiny_folders, made and compared with a second
 * reference by tests/tools/make_tiny_folders.py.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/text.h"
#include "support/forward_runner.h"

#define FOLDERS PKV_SOURCE_DIR "/tests/data/tiny_folders/"
#define VOCAB   40
#define TOKENS  24

static const char *const cases[] = {"llama3", "llama_linear", "llama_yarn", "mistral",
                                    "qwen2",  "qwen3",        "gemma3"};
#define CASES (sizeof cases / sizeof cases[0])

static void sequence(int32_t ids[TOKENS], const char *name) {
  int32_t n = 0;
  for (const char *c = name; *c; c++)
    n += (unsigned char)*c;
  for (int32_t i = 0; i < TOKENS; i++)
    ids[i] = (7 * i * i + 3 * i + n) % VOCAB;
}

static void read_expected(float expected[TOKENS * VOCAB], const char *name) {
  char path[512];
  pkv_buffer file;
  (void)snprintf(path, sizeof path, FOLDERS "%s/expected.f32", name);
  pkv_buffer_init(&file, 1 << 20, NULL);
  assert_int_equal(pkv_buffer_read_file(&file, path, NULL), PKV_OK);
  assert_int_equal(file.size, TOKENS * VOCAB * sizeof(float));
  memcpy(expected, file.data, file.size);
  pkv_buffer_deinit(&file);
}

static double worst_part(const float *got, const float *want) {
  double worst = 0.0, largest = 0.0;
  for (int i = 0; i < TOKENS * VOCAB; i++) {
    const double off = fabs((double)got[i] - (double)want[i]);
    if (!(off <= worst)) worst = off;
    largest = fmax(largest, fabs((double)want[i]));
  }
  return worst / largest;
}

/* chunk: tokens a run; pages of 4 tokens, so that windows cut within pages and between them. */
static double run_model(const char *name, const char *suffix, pkv_isa isa, int32_t chunk) {
  char path[512];
  pkv_model *model = NULL;
  pkv_error err = {0};
  forward_runner r;
  int32_t ids[TOKENS];
  float got[TOKENS * VOCAB], want[TOKENS * VOCAB];
  (void)snprintf(path, sizeof path, FOLDERS "%s%s", name, suffix);
  if (pkv_model_open(&model, path, NULL, &err) != PKV_OK) fail_msg("%s: %s", path, err.text);
  const forward_runner_options options = {.isa = isa,
                                          .threads = 2,
                                          .compute = PKV_COMPUTE_F32,
                                          .kv_dtype = PKV_DTYPE_F32,
                                          .rows = 1,
                                          .max_seq_len = TOKENS,
                                          .max_tokens = chunk,
                                          .page_tokens = 4};
  assert_int_equal(forward_runner_init(&r, model, &options), 0);
  sequence(ids, name);
  read_expected(want, name);
  forward_runner_feed(&r, 0, ids, TOKENS, true, got);
  forward_runner_deinit(&r);
  pkv_model_close(model);
  return worst_part(got, want);
}

static void every_case(const char *suffix) {
  static const int32_t chunks[] = {TOKENS, 1, 5};
  double worst = 0.0;
  for (size_t i = 0; i < CASES; i++) {
    for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
      const pkv_isa isa = c == 0 ? PKV_ISA_SCALAR : PKV_ISA_AUTO;
      const double part = run_model(cases[i], suffix, isa, chunks[c]);
      if (!(part <= 2e-5))
        fail_msg("%s%s, chunks of %d: largest difference %.3g of the largest logit", cases[i],
                 suffix, (int)chunks[c], part);
      worst = fmax(worst, part);
    }
  }
  print_message("largest difference %.3g of a model's largest logit\n", worst);
}

static void test_folders(void **state) {
  (void)state;
  every_case("");
}

static void test_gguf(void **state) {
  (void)state;
  every_case(".gguf");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_folders), cmocka_unit_test(test_gguf)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
