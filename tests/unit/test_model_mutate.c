/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small good models with one or two bytes changed, as Valkey mutates its dumps: opening refuses the
 * file, or a prompt runs to its end. A crash under ASan is the failure looked for.
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/run_model.h"
#include "support/small_llama.h"

#define SEED   20261130u
#define ROUNDS 12000

typedef struct tally {
  int refused, ran, not_finite;
} tally;

static void open_and_run(tally *t, const unsigned char *bytes, size_t size,
                         pkv_activations activations) {
  static const int32_t prompt[] = {3, 4, 8, 0, 5, 3};
  pkv_model *model = NULL;
  pkv_error err = {0};
  pkv_finish finish = PKV_FINISH_NONE;
  const pkv_status status = pkv_model_open_memory(&model, bytes, size, NULL, &err);
  if (status != PKV_OK) {
    assert_null(model);
    assert_true(err.text[0] != '\0');
    assert_true(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED || status == PKV_E_LIMIT);
    t->refused++;
    return;
  }
  assert_true(run_model_text(model));
  const pkv_status ran = run_model_tokens(&finish, model, prompt, 6, activations, &err);
  if (ran != PKV_OK && ran != PKV_E_UNSUPPORTED && ran != PKV_E_RANGE && ran != PKV_E_LIMIT)
    fail_msg("an opened model gives %s \"%s\"", pkv_status_name(ran), err.text);
  t->ran += ran == PKV_OK;
  t->not_finite += finish == PKV_FINISH_ERROR;
  pkv_model_close(model);
}

/* One model of each weight type, in both kinds of activations. */
static const uint32_t types[] = {0, 1, 2, 3, 6, 7, 8, 30};
#define TYPES (sizeof types / sizeof types[0])

static unsigned char *model_of(size_t i, size_t *size, size_t *table) {
  small_llama t = SMALL_LLAMA_INIT;
  t.layers = 1;
  t.feed_forward = 32;
  t.weight_type = types[i];
  t.output = i % 2 == 1;
  t.seed = i + 1;
  unsigned char *bytes = small_llama_bytes(&t, size);
  pkv_gguf *g = NULL;
  assert_int_equal(pkv_gguf_open_memory(&g, bytes, *size, NULL, NULL), PKV_OK);
  *table = pkv_gguf_data_offset(g);
  pkv_gguf_close(g);
  return bytes;
}

static void test_good_models_run(void **state) {
  (void)state;
  for (size_t i = 0; i < TYPES; i++)
    for (int k = 0; k < 2; k++) {
      size_t size = 0, table = 0;
      tally t = {0};
      unsigned char *bytes = model_of(i, &size, &table);
      open_and_run(&t, bytes, size, (pkv_activations)k);
      if (t.ran != 1 || t.not_finite != 0)
        fail_msg("weight type %u: ran %d, not finite %d", types[i], t.ran, t.not_finite);
      gguf_build_drop(bytes);
    }
}

/* Keys, tokenizer and tensor table: every second change goes there, small as it is. */
static void test_random_changes(void **state) {
  (void)state;
  pkv_rng rng;
  tally t = {0};
  pkv_rng_init(&rng, SEED);
  for (size_t i = 0; i < TYPES; i++) {
    size_t size = 0, table = 0;
    unsigned char *bytes = model_of(i, &size, &table);
    unsigned char *good = gguf_build_exact_copy(bytes, size);
    for (int round = 0; round < ROUNDS / (int)TYPES; round++) {
      const uint64_t changes = 1 + pkv_rng_below(&rng, 2);
      for (uint64_t k = 0; k < changes; k++) {
        const size_t at = pkv_rng_below(&rng, round % 2 ? table : size);
        bytes[at] = (unsigned char)(pkv_rng_next(&rng) & 0xff);
      }
      open_and_run(&t, bytes, size, (pkv_activations)(round / 2 % 2));
      memcpy(bytes, good, size);
    }
    gguf_build_drop(good);
    gguf_build_drop(bytes);
  }
  print_message("seed %u: %d refused, %d ran, %d of them not finite\n", SEED, t.refused, t.ran,
                t.not_finite);
  assert_true(t.refused > ROUNDS / 20);
  assert_true(t.ran > ROUNDS / 5);
}

/* L11, S10: weights that are no numbers end the request, not the process. */
static void test_not_finite(void **state) {
  (void)state;
  for (size_t i = 0; i < TYPES; i++)
    for (int k = 0; k < 2; k++) {
      size_t size = 0, table = 0;
      tally t = {0};
      unsigned char *bytes = model_of(i, &size, &table);
      memset(bytes + table, 0xff, size - table);
      open_and_run(&t, bytes, size, (pkv_activations)k);
      if (t.ran != 1 || t.not_finite != 1)
        fail_msg("weight type %u, activations %d: ran %d, not finite %d", types[i], k, t.ran,
                 t.not_finite);
      gguf_build_drop(bytes);
    }
}

/* L10: a residual stream of about 1e5 and beyond does not overflow on the way. */
static void test_large_residual(void **state) {
  (void)state;
  small_llama s = SMALL_LLAMA_INIT;
  gguf_build b;
  float large[32 * 16];
  size_t size = 0;
  for (size_t i = 0; i < 32 * 16; i++)
    large[i] = i % 3 == 0 ? 1e5f : -3e5f;
  s.skip_tensor = "token_embd.weight";
  s.output = true;
  gguf_build_init(&b);
  small_llama_build(&b, &s);
  gguf_build_tensor(&b, "token_embd.weight", 0, 2, (const int64_t[]){32, 16}, large, sizeof large);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  for (int k = 0; k < 2; k++) {
    tally t = {0};
    open_and_run(&t, bytes, size, (pkv_activations)k);
    assert_int_equal(t.ran, 1);
    assert_int_equal(t.not_finite, 0);
  }
  gguf_build_drop(bytes);
}

/* L3: where a file has output.weight it is used, and token_embd.weight where it has none. */
static void test_output_weight_is_used(void **state) {
  (void)state;
  float bad[32 * 16];
  for (size_t i = 0; i < 32 * 16; i++)
    bad[i] = NAN;
  for (int with_output = 0; with_output <= 1; with_output++) {
    small_llama s = SMALL_LLAMA_INIT;
    gguf_build b;
    tally t = {0};
    size_t size = 0;
    gguf_build_init(&b);
    small_llama_build(&b, &s);
    if (with_output)
      gguf_build_tensor(&b, "output.weight", 0, 2, (const int64_t[]){32, 16}, bad, sizeof bad);
    unsigned char *bytes = gguf_build_exact(&b, &size);
    gguf_build_deinit(&b);
    open_and_run(&t, bytes, size, PKV_ACTIVATIONS_F32);
    assert_int_equal(t.ran, 1);
    assert_int_equal(t.not_finite, with_output);
    gguf_build_drop(bytes);
  }
}

/* L1: the file loses its end while the model is in use. */
/* Mapped weights of a file that shrank are an error; copied ones do not need the file. */
static void shrinks(pkv_weights weights, pkv_status second) {
  char path[] = "/tmp/pkv-model-XXXXXX";
  static const int32_t prompt[] = {3, 4};
  size_t size = 0, table = 0;
  pkv_model *model = NULL;
  pkv_error err = {0};
  pkv_finish finish = PKV_FINISH_NONE;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.weights = weights;
  unsigned char *bytes = model_of(0, &size, &table);
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, bytes, size), size);
  assert_int_equal(pkv_model_open(&model, path, &options, &err), PKV_OK);
  assert_int_equal(run_model_tokens(&finish, model, prompt, 2, PKV_ACTIVATIONS_F32, &err), PKV_OK);
  assert_int_equal(ftruncate(fd, (off_t)table), 0);
  assert_int_equal(run_model_tokens(&finish, model, prompt, 2, PKV_ACTIVATIONS_F32, &err), second);
  if (second != PKV_OK) assert_non_null(strstr(err.text, "model file shrank from"));
  pkv_model_close(model);
  assert_int_equal(close(fd), 0);
  assert_int_equal(unlink(path), 0);
  gguf_build_drop(bytes);
}

static void test_file_shrinks(void **state) {
  (void)state;
  shrinks(PKV_WEIGHTS_MAPPED, PKV_E_IO);
  shrinks(PKV_WEIGHTS_COPIED, PKV_OK);
  shrinks(PKV_WEIGHTS_AUTO, PKV_OK);
}

/* The fuzzer's seeds are models of another writer; all of them run. */
static void test_seeds(void **state) {
  (void)state;
  static const char seeds[] = PKV_SOURCE_DIR "/fuzz/corpus/model";
  tally t = {0};
  int count = 0;
  DIR *dir = opendir(seeds);
  assert_non_null(dir);
  for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
    char path[4096];
    pkv_buffer file;
    if (strncmp(entry->d_name, "good_", 5) != 0) continue;
    (void)snprintf(path, sizeof path, "%s/%s", seeds, entry->d_name);
    pkv_buffer_init(&file, 1 << 20, NULL);
    assert_int_equal(pkv_buffer_read_file(&file, path, NULL), PKV_OK);
    unsigned char *bytes = gguf_build_exact_copy((const unsigned char *)file.data, file.size);
    open_and_run(&t, bytes, file.size, PKV_ACTIVATIONS_I8);
    if (t.ran != ++count || t.not_finite != 0) fail_msg("%s does not run", entry->d_name);
    gguf_build_drop(bytes);
    pkv_buffer_deinit(&file);
  }
  assert_int_equal(closedir(dir), 0);
  assert_true(count >= 8);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_good_models_run),
      cmocka_unit_test(test_random_changes),
      cmocka_unit_test(test_not_finite),
      cmocka_unit_test(test_large_residual),
      cmocka_unit_test(test_output_weight_is_used),
      cmocka_unit_test(test_file_shrinks),
      cmocka_unit_test(test_seeds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
