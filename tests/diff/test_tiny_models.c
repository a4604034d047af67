/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fifty tiny models of other shapes (layers, widths, groups, head sizes, rope widths and scalings,
 * weight types, tied or not, with biases or not) against the logits of a plain numpy llama in
 * float64: tests/data/tiny_models.f32, made by tests/tools/make_tiny_models.py.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/text.h"
#include "support/forward_runner.h"
#include "support/test_alloc.h"
#include "support/tiny_llama.h"

#define EXPECTED  PKV_SOURCE_DIR "/tests/data/tiny_models.f32"
#define MAX_VOCAB 64

typedef struct fixture {
  pkv_buffer expected;
  size_t offset[TINY_MODELS + 1]; /* in floats */
} fixture;

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  pkv_error err = {0};
  pkv_buffer_init(&f->expected, 1 << 20, NULL);
  if (pkv_buffer_read_file(&f->expected, EXPECTED, &err) != PKV_OK) {
    print_message("%s\n", err.text);
    return -1;
  }
  for (uint32_t seed = 0; seed < TINY_MODELS; seed++) {
    const tiny_llama m = tiny_llama_make(seed);
    f->offset[seed + 1] = f->offset[seed] + (size_t)m.tokens * (size_t)m.vocab;
  }
  *state = f;
  return f->offset[TINY_MODELS] * sizeof(float) == f->expected.size ? 0 : -1;
}

static int teardown(void **state) {
  fixture *f = *state;
  pkv_buffer_deinit(&f->expected);
  free(f);
  return 0;
}

static const float *expected_of(const fixture *f, uint32_t seed) {
  return (const float *)(const void *)f->expected.data + f->offset[seed];
}

typedef struct opened {
  gguf_build file;
  pkv_model *model;
} opened;

static void open_tiny(opened *o, const tiny_llama *m) {
  pkv_error err = {0};
  gguf_build_init(&o->file);
  tiny_llama_write(&o->file, m, NULL, 0);
  gguf_build_finish(&o->file);
  if (pkv_model_open_memory(&o->model, o->file.file.data, o->file.file.size, NULL, &err) != PKV_OK)
    fail_msg("seed %u: %s", (unsigned)m->seed, err.text);
}

static void close_tiny(opened *o) {
  pkv_model_close(o->model);
  gguf_build_deinit(&o->file);
}

/* Logits of every token, in chunks. False when the instruction set is not here. */
static bool run_tiny(float *logits, const tiny_llama *m, pkv_isa isa, pkv_compute compute,
                     int32_t chunk, int32_t page_tokens) {
  opened o;
  forward_runner r;
  open_tiny(&o, m);
  const forward_runner_options options = {.isa = isa,
                                          .threads = 1,
                                          .compute = compute,
                                          .kv_dtype = PKV_DTYPE_F32,
                                          .rows = 1,
                                          .max_seq_len = TINY_MAX_TOKENS,
                                          .max_tokens = chunk,
                                          .page_tokens = page_tokens};
  const bool here = forward_runner_init(&r, o.model, &options) == 0;
  if (here) {
    forward_runner_feed(&r, 0, m->ids, m->tokens, true, logits);
    forward_runner_deinit(&r);
  }
  close_tiny(&o);
  return here;
}

/* Largest difference as a part of the largest expected logit. */
static double worst_part(const float *got, const float *want, int64_t count) {
  double worst = 0.0, largest = 0.0;
  for (int64_t i = 0; i < count; i++) {
    const double off = fabs((double)got[i] - (double)want[i]);
    if (!(off <= worst)) worst = off;
    largest = fmax(largest, fabs((double)want[i]));
  }
  return worst / largest;
}

static void exact_mode(const fixture *f, pkv_isa isa) {
  double worst = 0.0;
  for (uint32_t seed = 0; seed < TINY_MODELS; seed++) {
    const tiny_llama m = tiny_llama_make(seed);
    float logits[TINY_MAX_TOKENS * MAX_VOCAB];
    const int32_t chunk = seed % 3 == 0 ? 1 + (int32_t)(seed / 3 % 7) : m.tokens;
    static const int32_t pages[3] = {16, 1, 5};
    if (!run_tiny(logits, &m, isa, PKV_COMPUTE_F32, chunk, pages[seed % 3])) {
      print_message("skipped: no %s here\n", pkv_isa_name(isa));
      skip();
    }
    const double part = worst_part(logits, expected_of(f, seed), (int64_t)m.tokens * m.vocab);
    if (!(part <= 2e-5))
      fail_msg("seed %u (%d layers, width %d, heads %d/%d of %d, rope %d, ffn %d, vocab %d): "
               "largest difference %.3g of the largest logit",
               (unsigned)seed, (int)m.layers, (int)m.width, (int)m.query_heads, (int)m.kv_heads,
               (int)m.head_dim, (int)m.rope_dim, (int)m.feed_forward, (int)m.vocab, part);
    worst = fmax(worst, part);
  }
  print_message("%s: largest difference %.3g of a model's largest logit\n", pkv_isa_name(isa),
                worst);
}

static void test_exact_mode_scalar(void **state) {
  exact_mode(*state, PKV_ISA_SCALAR);
}

static void test_exact_mode_avx2(void **state) {
  exact_mode(*state, PKV_ISA_AVX2);
}

static void test_exact_mode_reference(void **state) {
  exact_mode(*state, PKV_ISA_REFERENCE);
}

/* 8-bit activations: root mean square error against the logits'. A product with a step of max / 127
   errs by about 1 %; layers add that up, most in models one block wide. */
static void test_fast_mode(void **state) {
  const fixture *f = *state;
  double worst = 0.0, sum = 0.0;
  for (uint32_t seed = 0; seed < TINY_MODELS; seed++) {
    const tiny_llama m = tiny_llama_make(seed);
    float logits[TINY_MAX_TOKENS * MAX_VOCAB];
    const float *want = expected_of(f, seed);
    double error = 0.0, size = 0.0;
    (void)run_tiny(logits, &m, PKV_ISA_AUTO, PKV_COMPUTE_I8, m.tokens, 16);
    for (int64_t i = 0; i < (int64_t)m.tokens * m.vocab; i++) {
      error += ((double)logits[i] - (double)want[i]) * ((double)logits[i] - (double)want[i]);
      size += (double)want[i] * (double)want[i];
    }
    const double part = sqrt(error / size);
    if (!(part <= 0.1)) fail_msg("seed %u: relative error %.4f", (unsigned)seed, part);
    worst = fmax(worst, part);
    sum += part;
  }
  print_message("relative error of 8-bit activations: mean %.4f, largest %.4f\n", sum / TINY_MODELS,
                worst);
  assert_true(sum / TINY_MODELS <= 0.03);
}

/* ---- memory ------------------------------------------------------------------------------ */

static pkv_status build_all(void *ctx, const pkv_allocator *allocator) {
  const gguf_build *b = ctx;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  pkv_executor_options eo = PKV_EXECUTOR_OPTIONS_INIT;
  const pkv_forward_options fo = {
      .max_tokens = 8, .max_logits = 2, .max_positions = 8, .allocator = allocator};
  pkv_model *model = NULL;
  pkv_executor *executor = NULL;
  pkv_forward *forward = NULL;
  options.allocator = allocator;
  eo.allocator = allocator;
  eo.threads = 1;
  pkv_status status = pkv_model_open_memory(&model, b->file.data, b->file.size, &options, NULL);
  if (status == PKV_OK) status = pkv_executor_create(&executor, &eo, NULL);
  if (status == PKV_OK) status = pkv_forward_create(&forward, model, executor, &fo, NULL);
  pkv_forward_destroy(forward);
  pkv_executor_destroy(executor);
  pkv_model_close(model);
  return status;
}

static void test_no_memory_is_a_status(void **state) {
  const tiny_llama m = tiny_llama_make(3);
  gguf_build b;
  (void)state;
  gguf_build_init(&b);
  tiny_llama_write(&b, &m, NULL, 0);
  gguf_build_finish(&b);
  print_message("%d allocations survived failing\n", (int)test_alloc_torture(build_all, &b));
  gguf_build_deinit(&b);
}

static void test_a_run_allocates_nothing(void **state) {
  const tiny_llama m = tiny_llama_make(3);
  test_alloc ta;
  opened o;
  forward_runner r;
  float logits[TINY_MAX_TOKENS * MAX_VOCAB];
  (void)state;
  test_alloc_init(&ta);
  const pkv_allocator allocator = test_alloc_allocator(&ta);
  open_tiny(&o, &m);
  const forward_runner_options options = {.threads = 2,
                                          .compute = PKV_COMPUTE_I8,
                                          .kv_dtype = PKV_DTYPE_F16,
                                          .rows = 1,
                                          .max_seq_len = TINY_MAX_TOKENS,
                                          .max_tokens = 8,
                                          .allocator = &allocator};
  assert_int_equal(forward_runner_init(&r, o.model, &options), 0);
  const int64_t before = test_alloc_calls(&ta);
  for (int i = 0; i < 1000; i++) {
    if (i % 30 == 0) forward_runner_reset(&r);
    forward_runner_feed(&r, 0, m.ids, 1, true, logits);
  }
  assert_int_equal(test_alloc_calls(&ta) - before, 0);
  forward_runner_deinit(&r);
  close_tiny(&o);
  test_alloc_finish(&ta);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_exact_mode_scalar),     cmocka_unit_test(test_exact_mode_avx2),
      cmocka_unit_test(test_exact_mode_reference),  cmocka_unit_test(test_fast_mode),
      cmocka_unit_test(test_no_memory_is_a_status), cmocka_unit_test(test_a_run_allocates_nothing),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
