/* SPDX-License-Identifier: Apache-2.0 */
#include "support/engine_drive.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/model.h"

#define MAX_EVENTS 4096

void drive_ok(pkv_status status, const pkv_error *err, const char *what) {
  if (status != PKV_OK)
    print_error("%s: %s in %s: %s\n", what, pkv_status_name(status), err->where, err->text);
  assert_int_equal(status, PKV_OK);
}

pkv_model *drive_model(unsigned char **bytes, const small_llama *t) {
  pkv_model *model = NULL;
  size_t size = 0;
  pkv_error err = {PKV_OK, "", ""};
  *bytes = small_llama_bytes(t, &size);
  drive_ok(pkv_model_open_memory(&model, *bytes, size, NULL, &err), &err, "open");
  return model;
}

small_llama drive_device_llama(int32_t layers, int32_t vocab) {
  small_llama t = SMALL_LLAMA_INIT;
  t.context = 256;
  t.vocab = vocab;
  t.head_dim = 64;
  t.weight_type = 1;
  t.layers = layers;
  return t;
}

pkv_engine *drive_engine(const pkv_model *model, const pkv_engine_options *options) {
  pkv_engine *engine = NULL;
  pkv_error err = {PKV_OK, "", ""};
  drive_ok(pkv_engine_create(&engine, model, options, &err), &err, "create");
  return engine;
}

void drive_prompt(int32_t *tokens, int32_t count, int32_t vocab, uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int32_t i = 0; i < count; i++)
    tokens[i] = (int32_t)pkv_rng_below(&rng, (uint64_t)vocab);
}

void drive_submit_choices(pkv_engine *engine, const pkv_request *request, drive_answer *answers,
                          int32_t n) {
  pkv_error err = {PKV_OK, "", ""};
  pkv_request copy = *request;
  int64_t id = 0;
  copy.user = answers;
  for (int32_t i = 0; i < n; i++) {
    answers[i].count = answers[i].prompt_events = 0;
    answers[i].finish = PKV_FINISH_NONE;
    answers[i].tops = 0;
    answers[i].choice = i;
  }
  drive_ok(pkv_engine_submit(&id, engine, &copy, &err), &err, "submit");
  assert_true(id >= 1);
  for (int32_t i = 0; i < n; i++)
    answers[i].id = id;
}

void drive_submit(pkv_engine *engine, const pkv_request *request, drive_answer *answer) {
  drive_submit_choices(engine, request, answer, 1);
}

static uint64_t mix(uint64_t hash, const void *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    hash = (hash ^ ((const unsigned char *)bytes)[i]) * UINT64_C(0x100000001b3);
  return hash;
}

static void take_event(const pkv_event *event) {
  drive_answer *const a = (drive_answer *)event->user + event->choice;
  assert_int_equal(event->request, a->id);
  assert_int_equal(event->choice, a->choice);
  assert_int_equal(a->finish, PKV_FINISH_NONE); /* nothing follows the last event */
  a->finish = event->finish;
  a->cached_tokens = event->cached_tokens;
  a->preemptions = event->preemptions;
  a->stop_index = event->stop_index;
  a->stop_bytes = event->stop_bytes;
  if (event->token < 0) {
    assert_int_not_equal(event->finish, PKV_FINISH_NONE);
    return;
  }
  assert_true(a->count < DRIVE_TOKENS);
  if (a->count > 0) assert_int_equal(event->position, a->positions[a->count - 1] + 1);
  a->tokens[a->count] = event->token;
  a->logprobs[a->count] = event->logprob;
  a->positions[a->count++] = event->position;
  a->prompt_events += event->from_prompt;
  for (int32_t i = 0; i < event->top_count; i++) {
    a->tops = mix(a->tops, &event->top[i].token, sizeof(int32_t));
    a->tops = mix(a->tops, &event->top[i].logprob, sizeof(float));
  }
}

pkv_status drive_try_step(size_t *count, pkv_engine *engine, pkv_error *err) {
  static pkv_event events[MAX_EVENTS];
  const pkv_status status = pkv_engine_step(events, MAX_EVENTS, count, engine, err);
  for (size_t i = 0; i < *count; i++)
    take_event(&events[i]);
  return status;
}

size_t drive_step(pkv_engine *engine) {
  pkv_error err = {PKV_OK, "", ""};
  size_t count = 0;
  drive_ok(drive_try_step(&count, engine, &err), &err, "step");
  return count;
}

int64_t drive_all(pkv_engine *engine, int64_t limit) {
  int64_t steps = 0;
  while (pkv_engine_pending(engine) > 0) {
    (void)drive_step(engine);
    if (++steps > limit)
      print_error("still %d requests after %lld steps\n", (int)pkv_engine_pending(engine),
                  (long long)steps);
    assert_true(steps <= limit);
  }
  return steps;
}

void drive_equal(const drive_answer *a, const drive_answer *b, const char *what) {
  if (a->count != b->count || a->finish != b->finish)
    print_error("%s: %d tokens, end %d against %d tokens, end %d\n", what, (int)a->count,
                (int)a->finish, (int)b->count, (int)b->finish);
  assert_int_equal(a->count, b->count);
  for (int32_t i = 0; i < a->count; i++) {
    if (a->tokens[i] != b->tokens[i] || memcmp(&a->logprobs[i], &b->logprobs[i], sizeof(float)))
      print_error("%s: token %d is %d (%.9g) against %d (%.9g)\n", what, (int)i, (int)a->tokens[i],
                  (double)a->logprobs[i], (int)b->tokens[i], (double)b->logprobs[i]);
    assert_int_equal(a->tokens[i], b->tokens[i]);
    assert_memory_equal(&a->logprobs[i], &b->logprobs[i], sizeof(float));
  }
  if (a->tops != b->tops) print_error("%s: other alternatives\n", what);
  assert_true(a->tops == b->tops);
  assert_int_equal(a->finish, b->finish);
}

size_t drive_text(char *out, size_t size, const pkv_model *model, const drive_answer *answer) {
  size_t at = 0;
  for (int32_t i = 0; i < answer->count; i++) {
    const char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(pkv_token_text(&text, &bytes, model, answer->tokens[i], 0, NULL), PKV_OK);
    assert_true(at + bytes < size);
    memcpy(out + at, text, bytes);
    at += bytes;
  }
  out[at] = '\0';
  return at;
}

void drive_finish(pkv_engine *engine) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, engine);
  assert_int_equal(pkv_engine_pending(engine), 0);
  assert_int_equal(stats.pages_in_use, 0);
  assert_int_equal(stats.pages_shared, 0);
  assert_int_equal(stats.pages_free + stats.pages_cached, stats.pages_total);
  pkv_engine_destroy(engine);
}
