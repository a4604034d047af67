/* SPDX-License-Identifier: Apache-2.0 */
#include "support/golden_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/sanitized.h"

/* Under a sanitizer, or at -O0, the arithmetic is up to twenty times slower: there the memory and
   the threads are what is tested, and one prompt shows them. */
#if TEST_SANITIZED || !defined(__OPTIMIZE__)
#define FEW true
#else
#define FEW false
#endif

const bool golden_few = FEW;

int golden_model_open(golden_model *g, const char *path, const char *golden, int32_t most_tokens) {
  pkv_error err = {0};
  *g = (golden_model){.path = path, .most_tokens = most_tokens};
  if (access(path, R_OK) != 0) return 0;
  if (pkv_model_open(&g->model, path, NULL, &err) != PKV_OK) {
    print_message("%s\n", err.text);
    return -1;
  }
  g->golden = json_load_file(golden, 0, NULL);
  g->vocab = pkv_model_hparams(g->model)->vocab;
  g->logits = calloc((size_t)most_tokens * (size_t)g->vocab, sizeof(float));
  return g->golden && g->logits ? 0 : -1;
}

void golden_model_close(golden_model *g) {
  pkv_model_close(g->model);
  json_decref(g->golden);
  free(g->logits);
}

void golden_model_need(const golden_model *g) {
  if (g->model) return;
  print_message("skipped: %s is not here\n", g->path);
  skip();
}

/* Prompts that are run. */
static size_t prompt_count(const json_t *prompts) {
  if (FEW) print_message("sanitizer: one prompt of %d\n", (int)json_array_size(prompts));
  return FEW ? 1 : json_array_size(prompts);
}

void golden_model_start(forward_runner *r, const golden_model *g, pkv_compute compute, pkv_dtype kv,
                        int32_t chunk) {
  const forward_runner_options options = {.isa = PKV_ISA_AUTO,
                                          .threads = 0,
                                          .compute = compute,
                                          .kv_dtype = kv,
                                          .rows = 2,
                                          .max_seq_len = g->most_tokens,
                                          .max_tokens = chunk};
  assert_int_equal(forward_runner_init(r, g->model, &options), 0);
}

static int32_t copy_ids(int32_t *to, const json_t *array) {
  for (size_t i = 0; i < json_array_size(array); i++)
    to[i] = (int32_t)json_integer_value(json_array_get(array, i));
  return (int32_t)json_array_size(array);
}

int32_t golden_model_forced(const golden_model *g, forward_runner *r, const json_t *item,
                            int32_t *ids, int32_t *prompt_tokens) {
  assert_true((int32_t)(json_array_size(json_object_get(item, "prompt_ids")) +
                        json_array_size(json_object_get(item, "gen_ids"))) <= g->most_tokens);
  *prompt_tokens = copy_ids(ids, json_object_get(item, "prompt_ids"));
  const int32_t steps = copy_ids(ids + *prompt_tokens, json_object_get(item, "gen_ids"));
  forward_runner_reset(r);
  forward_runner_feed(r, 0, ids, *prompt_tokens + steps - 1, true, g->logits);
  return steps;
}

/* Of |difference| over the listed log-probabilities above `floor`. */
typedef struct differences {
  double sum, largest;
  int64_t count;
} differences;

static void listed(differences *d, const golden_model *g, const json_t *item, int32_t first,
                   double floor) {
  const json_t *all = json_object_get(item, "top10_first8");
  for (size_t s = 0; s < json_array_size(all); s++) {
    const json_t *step = json_array_get(all, s);
    const float *row = g->logits + ((int64_t)first + (int64_t)s) * g->vocab;
    const double zero = log_probability(row, g->vocab, 0) - (double)row[0];
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

void golden_model_exact(golden_model *g) {
  golden_model_need(g);
  const json_t *prompts = json_object_get(g->golden, "prompts");
  forward_runner r;
  golden_model_start(&r, g, PKV_COMPUTE_F32, PKV_DTYPE_F32, 128);
  for (size_t p = 0, count = prompt_count(prompts); p < count; p++) {
    const json_t *item = json_array_get(prompts, p);
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *margins = json_object_get(item, "top1_top2_margin");
    int32_t ids[GOLDEN_MOST_TOKENS], prompt_tokens;
    const int32_t steps = golden_model_forced(g, &r, item, ids, &prompt_tokens);
    differences d = {0};
    listed(&d, g, item, prompt_tokens - 1, -1e9);
    int32_t equal = 0;
    for (; equal < steps; equal++) {
      if (json_number_value(json_array_get(margins, (size_t)equal)) < 0.02) break;
      const float *row = g->logits + (int64_t)(prompt_tokens - 1 + equal) * g->vocab;
      const int32_t got = best_token(row, g->vocab), want = ids[prompt_tokens + equal];
      if (got != want) fail_msg("%s step %d: token %d, expected %d", name, equal, got, want);
    }
    print_message("%s: %d log-probabilities, largest difference %.6f, mean %.6f; %d greedy steps\n",
                  name, (int)d.count, d.largest, d.sum / (double)d.count, (int)equal);
    if (!(d.largest <= 0.01)) fail_msg("%s: difference %.6f, at most 0.01", name, d.largest);
  }
  forward_runner_deinit(&r);
}

void golden_model_fast(golden_model *g) {
  golden_model_need(g);
  const json_t *prompts = json_object_get(g->golden, "prompts");
  forward_runner r;
  golden_model_start(&r, g, PKV_COMPUTE_I8, PKV_DTYPE_F16, 128);
  differences d = {0};
  int32_t steps_all = 0, equal_all = 0;
  for (size_t p = 0, count = prompt_count(prompts); p < count; p++) {
    const json_t *item = json_array_get(prompts, p);
    int32_t ids[GOLDEN_MOST_TOKENS], prompt_tokens, equal = 0;
    const int32_t steps = golden_model_forced(g, &r, item, ids, &prompt_tokens);
    for (int32_t s = 0; s < steps; s++) {
      const float *row = g->logits + (int64_t)(prompt_tokens - 1 + s) * g->vocab;
      if (best_token(row, g->vocab) == ids[prompt_tokens + s]) equal++;
    }
    differences own = {0};
    listed(&own, g, item, prompt_tokens - 1, -8.0);
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
