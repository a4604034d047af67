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
#include "support/engine_drive.h"
#include "support/forward_runner.h"
#include "support/test_alloc.h"

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

/* Whichever shard is named, all are read. */
static void test_gguf_shards(void **state) {
  (void)state;
  for (int i = 1; i <= 3; i++) {
    char suffix[32];
    (void)snprintf(suffix, sizeof suffix, "-%05d-of-00003.gguf", i);
    const double part = run_model("qwen3", suffix, PKV_ISA_AUTO, 5);
    if (!(part <= 2e-5)) fail_msg("shard %d: largest difference %.3g", i, part);
  }
}

static void copy_file(const char *from, const char *to) {
  pkv_buffer bytes;
  pkv_buffer_init(&bytes, 1 << 20, NULL);
  assert_int_equal(pkv_buffer_read_file(&bytes, from, NULL), PKV_OK);
  FILE *file = fopen(to, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes.data, 1, bytes.size, file), bytes.size);
  (void)fclose(file);
  pkv_buffer_deinit(&bytes);
}

/* Opens shard 1 of copies; each path is where shard i + 1 comes from, NULL = it is missing. */
static void refuse_shards(const char *const from[3], const char *part) {
  static const char to[] = PKV_BINARY_DIR "/shards-%05d-of-00003.gguf";
  char path[512];
  pkv_model *model = NULL;
  pkv_error err = {0};
  for (int i = 0; i < 3; i++) {
    (void)snprintf(path, sizeof path, to, i + 1);
    (void)remove(path);
    if (from[i]) copy_file(from[i], path);
  }
  (void)snprintf(path, sizeof path, to, 1);
  assert_int_not_equal(pkv_model_open(&model, path, NULL, &err), PKV_OK);
  if (strstr(err.text, part) == NULL) fail_msg("\"%s\", expected \"%s\"", err.text, part);
  for (int i = 0; i < 3; i++) {
    (void)snprintf(path, sizeof path, to, i + 1);
    (void)remove(path);
  }
}

static void test_wrong_shards(void **state) {
  static const char one[] = FOLDERS "qwen3-00001-of-00003.gguf";
  static const char two[] = FOLDERS "qwen3-00002-of-00003.gguf";
  static const char three[] = FOLDERS "qwen3-00003-of-00003.gguf";
  static const char whole[] = FOLDERS "qwen3.gguf";
  const char *const lists[][3] = {{one, two, NULL},  {one, three, two}, {one, whole, three},
                                  {two, one, three}, {one, one, three}, {one, NULL, three}};
  const char *const parts[] = {"shard 3 of 3: cannot open",
                               "shard 2 of 3 by its name says that it is 3 of 3",
                               "shard 2 of 3 by its name says that it is 1 of 1",
                               "shard 1 of 3 by its name says that it is 2 of 3",
                               "shard 2 of 3 by its name says that it is 1 of 3",
                               "shard 2 of 3: cannot open"};
  pkv_model *model = NULL;
  pkv_error err = {0};
  (void)state;
  for (size_t i = 0; i < 6; i++)
    refuse_shards(lists[i], parts[i]);
  copy_file(one, PKV_BINARY_DIR "/shard_without_number.gguf");
  const pkv_status status =
      pkv_model_open(&model, PKV_BINARY_DIR "/shard_without_number.gguf", NULL, &err);
  (void)remove(PKV_BINARY_DIR "/shard_without_number.gguf");
  assert_int_equal(status, PKV_E_FORMAT);
  assert_non_null(strstr(err.text, "file is shard 1 of 3"));
}

static pkv_status open_shards(void *ctx, const pkv_allocator *allocator) {
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.allocator = allocator;
  const pkv_status status = pkv_model_open(&model, ctx, &options, NULL);
  pkv_model_close(model);
  return status;
}

static void test_no_memory(void **state) {
  char path[] = FOLDERS "qwen3-00002-of-00003.gguf";
  (void)state;
  print_message("%d allocations\n", (int)test_alloc_torture(open_shards, path));
}

/* ---- through the engine ---- */

static pkv_engine *small_engine(const pkv_model *model, int32_t invariant) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.kv_dtype = PKV_DTYPE_F32;
  o.activations = PKV_ACTIVATIONS_F32;
  o.page_tokens = 4;
  o.max_rows = 12;
  o.max_seq_len = 800;
  o.batch_invariant = invariant;
  o.prefill_chunk = 64;
  return drive_engine(model, &o);
}

/* A scored prompt of three times the window and more: each token's log-probability. */
static void score(const char *name) {
  char path[512];
  pkv_model *model = NULL;
  pkv_error err = {0};
  static drive_answer answer;
  int32_t ids[TOKENS];
  float want[TOKENS * VOCAB];
  double worst = 0.0;
  (void)snprintf(path, sizeof path, FOLDERS "%s", name);
  if (pkv_model_open(&model, path, NULL, &err) != PKV_OK) fail_msg("%s: %s", path, err.text);
  pkv_engine *engine = small_engine(model, 1);
  pkv_request request = PKV_REQUEST_INIT;
  sequence(ids, name);
  read_expected(want, name);
  memset(&answer, 0, sizeof answer);
  request.prompt = ids;
  request.prompt_tokens = TOKENS;
  request.max_tokens = 0;
  request.echo = 1;
  request.logprobs = 1;
  drive_submit(engine, &request, &answer);
  (void)drive_all(engine, 100);
  assert_int_equal(answer.count, TOKENS);
  for (int32_t i = 1; i < TOKENS; i++) {
    const double expected = log_probability(want + (i - 1) * VOCAB, VOCAB, ids[i]);
    const double off = fabs((double)answer.logprobs[i] - expected);
    if (!(off <= 2e-4))
      fail_msg("%s, token %d: log-probability %g, expected %g", name, (int)i,
               (double)answer.logprobs[i], expected);
    worst = fmax(worst, off);
  }
  print_message("%s: largest difference %.3g\n", name, worst);
  drive_finish(engine);
  pkv_model_close(model);
}

static void test_engine_scores(void **state) {
  (void)state;
  for (size_t i = 0; i < CASES; i++)
    score(cases[i]);
}

/* Far beyond the window: an answer alone, and the same beside others of the same prompt, bit by bit
   where the engine promises that, and with plans that read the shared prompt once. */
static void beside_others(const char *path, int32_t invariant) {
  pkv_model *model = NULL;
  static drive_answer alone, together[12];
  int32_t ids[700];
  assert_int_equal(pkv_model_open(&model, path, NULL, NULL), PKV_OK);
  drive_prompt(ids, 700, VOCAB, 3);
  pkv_request request = PKV_REQUEST_INIT;
  request.prompt = ids;
  request.prompt_tokens = 700;
  request.max_tokens = 24;
  request.logprobs = 1;
  request.ignore_end = 1;
  pkv_engine *engine = small_engine(model, invariant);
  memset(&alone, 0, sizeof alone);
  memset(together, 0, sizeof together);
  drive_submit(engine, &request, &alone);
  (void)drive_all(engine, 400);
  drive_finish(engine);
  assert_int_equal(alone.count, 24);
  engine = small_engine(model, invariant);
  for (int i = 0; i < 12; i++)
    drive_submit(engine, &request, &together[i]);
  (void)drive_all(engine, 400);
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  if (!invariant) assert_true(stats.shared_steps > 0);
  for (int i = 0; i < 12; i++) {
    if (invariant) drive_equal(&alone, &together[i], "beside others");
    for (int k = 0; k < 24; k++) {
      assert_int_equal(alone.tokens[k], together[i].tokens[k]);
      if (fabsf(alone.logprobs[k] - together[i].logprobs[k]) > 1e-4f)
        fail_msg("token %d: log-probability %g alone, %g beside others", k,
                 (double)alone.logprobs[k], (double)together[i].logprobs[k]);
    }
  }
  drive_finish(engine);
  pkv_model_close(model);
}

static void test_engine_beside_others(void **state) {
  (void)state;
  for (int32_t invariant = 0; invariant < 2; invariant++) {
    beside_others(FOLDERS "gemma3", invariant);
    beside_others(FOLDERS "mistral.gguf", invariant);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_folders),
                                     cmocka_unit_test(test_gguf),
                                     cmocka_unit_test(test_gguf_shards),
                                     cmocka_unit_test(test_wrong_shards),
                                     cmocka_unit_test(test_no_memory),
                                     cmocka_unit_test(test_engine_scores),
                                     cmocka_unit_test(test_engine_beside_others)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
