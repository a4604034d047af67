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
#include <jansson.h>

#include "support/forward_runner.h"

#define MODEL_PATH PKV_MODEL_DIR "/gemma-3-270m-q4_k_m.gguf"
#define GOLDEN     PKV_SOURCE_DIR "/tests/golden/gemma3-270m-q4_k_m.raw.f32.json"
#define MAX_TOKENS 160 /* 1 MiB of logits each */

/* Under a sanitizer, or at -O0, the arithmetic is up to twenty times slower: there the memory and
   the threads are what is tested, and one prompt shows them. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
#define FEW 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FEW 1
#endif
#endif
#ifndef FEW
#define FEW 0
#endif

typedef struct fixture {
  pkv_model *model; /* NULL: not here */
  json_t *golden;
  int32_t vocab;
  float *logits; /* [MAX_TOKENS, vocab] */
} fixture;

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  *state = f;
  if (access(MODEL_PATH, R_OK) != 0) return 0;
  pkv_error err = {0};
  if (pkv_model_open(&f->model, MODEL_PATH, NULL, &err) != PKV_OK) {
    print_message("%s\n", err.text);
    return -1;
  }
  f->golden = json_load_file(GOLDEN, 0, NULL);
  f->vocab = pkv_model_hparams(f->model)->vocab;
  f->logits = calloc((size_t)MAX_TOKENS * (size_t)f->vocab, sizeof(float));
  return f->golden && f->logits ? 0 : -1;
}

static int teardown(void **state) {
  fixture *f = *state;
  pkv_model_close(f->model);
  json_decref(f->golden);
  free(f->logits);
  free(f);
  return 0;
}

/* Prompts that are run. */
static size_t prompt_count(const json_t *prompts) {
  if (FEW) print_message("sanitizer: one prompt of %d\n", (int)json_array_size(prompts));
  return FEW ? 1 : json_array_size(prompts);
}

static fixture *need_model(void **state) {
  fixture *f = *state;
  if (!f->model) {
    print_message("skipped: %s is not here\n", MODEL_PATH);
    skip();
  }
  return f;
}

static void start(forward_runner *r, const fixture *f, pkv_compute compute, pkv_dtype kv,
                  int32_t chunk) {
  const forward_runner_options options = {.isa = PKV_ISA_AUTO,
                                          .threads = 0,
                                          .compute = compute,
                                          .kv_dtype = kv,
                                          .rows = 2,
                                          .max_seq_len = MAX_TOKENS,
                                          .max_tokens = chunk};
  assert_int_equal(forward_runner_init(r, f->model, &options), 0);
}

static int32_t copy_ids(int32_t *to, const json_t *array) {
  for (size_t i = 0; i < json_array_size(array); i++)
    to[i] = (int32_t)json_integer_value(json_array_get(array, i));
  return (int32_t)json_array_size(array);
}

/* A prompt with the reference's continuation behind it, in one pass. *prompt_tokens is how many of
   the tokens are the prompt's; logits row prompt_tokens - 1 + s belongs to step s. */
static int32_t forced(const fixture *f, forward_runner *r, const json_t *item, int32_t *ids,
                      int32_t *prompt_tokens, float *logits) {
  assert_true(json_array_size(json_object_get(item, "prompt_ids")) +
                  json_array_size(json_object_get(item, "gen_ids")) <=
              MAX_TOKENS);
  *prompt_tokens = copy_ids(ids, json_object_get(item, "prompt_ids"));
  const int32_t steps = copy_ids(ids + *prompt_tokens, json_object_get(item, "gen_ids"));
  forward_runner_reset(r);
  forward_runner_feed(r, 0, ids, *prompt_tokens + steps - 1, true, logits);
  (void)f;
  return steps;
}

/* Of |difference| over the listed log-probabilities above `floor`. */
typedef struct differences {
  double sum, largest;
  int64_t count;
} differences;

static void listed(differences *d, const fixture *f, const json_t *item, int32_t first,
                   double floor) {
  const json_t *all = json_object_get(item, "top10_first8");
  for (size_t s = 0; s < json_array_size(all); s++) {
    const json_t *step = json_array_get(all, s);
    const float *row = f->logits + ((int64_t)first + (int64_t)s) * f->vocab;
    const double zero = log_probability(row, f->vocab, 0) - (double)row[0];
    for (size_t i = 0; i < json_array_size(step); i++) {
      const json_t *entry = json_array_get(step, i);
      const int32_t id = (int32_t)json_integer_value(json_object_get(entry, "id"));
      const double want = json_number_value(json_object_get(entry, "logprob"));
      if (want <= floor) continue;
      const double off = fabs((double)row[id] + zero - want);
      d->sum += off;
      d->count++;
      if (!(off <= d->largest)) d->largest = off;
    }
  }
}

static void test_exact_mode_equals_the_reference(void **state) {
  fixture *f = need_model(state);
  const json_t *prompts = json_object_get(f->golden, "prompts");
  forward_runner r;
  start(&r, f, PKV_COMPUTE_F32, PKV_DTYPE_F32, 128);
  for (size_t p = 0, count = prompt_count(prompts); p < count; p++) {
    const json_t *item = json_array_get(prompts, p);
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *margins = json_object_get(item, "top1_top2_margin");
    int32_t ids[MAX_TOKENS], prompt_tokens;
    const int32_t steps = forced(f, &r, item, ids, &prompt_tokens, f->logits);
    differences d = {0};
    listed(&d, f, item, prompt_tokens - 1, -1e9);
    int32_t equal = 0;
    for (; equal < steps; equal++) {
      if (json_number_value(json_array_get(margins, (size_t)equal)) < 0.02) break;
      const float *row = f->logits + (int64_t)(prompt_tokens - 1 + equal) * f->vocab;
      const int32_t got = best_token(row, f->vocab), want = ids[prompt_tokens + equal];
      if (got != want) fail_msg("%s step %d: token %d, expected %d", name, equal, got, want);
    }
    print_message("%s: %d log-probabilities, largest difference %.6f, mean %.6f; %d greedy steps\n",
                  name, (int)d.count, d.largest, d.sum / (double)d.count, (int)equal);
    if (!(d.largest <= 0.01)) fail_msg("%s: difference %.6f, at most 0.01", name, d.largest);
  }
  forward_runner_deinit(&r);
}

static void test_fast_mode_stays_near_the_reference(void **state) {
  fixture *f = need_model(state);
  const json_t *prompts = json_object_get(f->golden, "prompts");
  forward_runner r;
  start(&r, f, PKV_COMPUTE_I8, PKV_DTYPE_F16, 128);
  differences d = {0};
  int32_t steps_all = 0, equal_all = 0;
  for (size_t p = 0, count = prompt_count(prompts); p < count; p++) {
    const json_t *item = json_array_get(prompts, p);
    int32_t ids[MAX_TOKENS], prompt_tokens, equal = 0;
    const int32_t steps = forced(f, &r, item, ids, &prompt_tokens, f->logits);
    for (int32_t s = 0; s < steps; s++) {
      const float *row = f->logits + (int64_t)(prompt_tokens - 1 + s) * f->vocab;
      if (best_token(row, f->vocab) == ids[prompt_tokens + s]) equal++;
    }
    differences own = {0};
    listed(&own, f, item, prompt_tokens - 1, -8.0);
    print_message("%s: best token equal in %d of %d steps, mean difference %.4f, largest %.4f\n",
                  json_string_value(json_object_get(item, "id")), (int)equal, (int)steps,
                  own.sum / (double)own.count, own.largest);
    d.sum += own.sum;
    d.count += own.count;
    steps_all += steps;
    equal_all += equal;
  }
  forward_runner_deinit(&r);
  const double share = (double)equal_all / steps_all, mean = d.sum / (double)d.count;
  print_message("all: best token equal in %.1f %%, mean difference %.4f\n", 100.0 * share, mean);
  assert_true(share >= 0.9);
  assert_true(mean <= 0.25);
}

/* Five of six layers would forget what lies beyond the window: the context ends there. */
static void test_context_ends_at_the_window(void **state) {
  const fixture *f = need_model(state);
  assert_int_equal(pkv_model_hparams(f->model)->context, 512);
  assert_int_equal(pkv_model_hparams(f->model)->head_dim, 256);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_exact_mode_equals_the_reference),
      cmocka_unit_test(test_fast_mode_stays_near_the_reference),
      cmocka_unit_test(test_context_ends_at_the_window),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
