/* SPDX-License-Identifier: Apache-2.0 */
/* Answers that have to be JSON, by the real model at any temperature, beside others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "support/engine_drive.h"
#include "support/grammar_drive.h"
#include "support/test_alloc.h"
#include "support/tiny_model.h"

#define CHOICES 6

static void test_real_model(void **state) {
  (void)state;
  static const char path[] = PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf";
  static const char question[] = "Describe a cat as JSON with name and age.\n";
  static drive_answer answers[CHOICES], plain, beside;
  static char text[8192];
  pkv_model *model = NULL;
  pkv_constraint *constraint = NULL;
  pkv_error err = {PKV_OK, "", ""};
  int32_t prompt[64];
  size_t count = 0;
  if (access(path, R_OK) != 0) {
    print_message("skip: no model at %s\n", path);
    skip();
  }
  drive_ok(pkv_model_open(&model, path, NULL, &err), &err, "open");
  drive_ok(pkv_constraint_create_json(&constraint, model, NULL, &err), &err, "constraint");
  drive_ok(pkv_tokenize(prompt, 64, &count, model, question, strlen(question), 0, &err), &err,
           "tokenize");
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 8;
  o.cache_tokens = 2048;
  o.max_seq_len = 256;
  pkv_engine *const engine = drive_engine(model, &o);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = (int32_t)count;
  r.max_tokens = 12;
  drive_submit(engine, &r, &plain); /* alone and free */
  (void)drive_all(engine, 100);
  int complete = 0;
  grammar_drive json_twin;
  json_open(&json_twin);
  for (int round = 0; round < 2; round++) {
    drive_submit(engine, &r, &beside);
    pkv_request json = r;
    json.constraint = constraint;
    json.max_tokens = 48;
    json.n = CHOICES;
    json.temperature = round ? 3.0f : 0.7f;
    json.seed = 5;
    drive_submit_choices(engine, &json, answers, CHOICES);
    (void)drive_all(engine, 200);
    for (int i = 0; i < CHOICES; i++) {
      (void)drive_text(text, sizeof text, model, &answers[i]);
      if (grammar_check(&json_twin, text, strlen(text)) == GRAMMAR_DEAD)
        fail_msg("no JSON: %s", text);
      if (answers[i].finish != PKV_FINISH_STOP) {
        assert_int_equal(answers[i].finish, PKV_FINISH_LENGTH);
        continue;
      }
      json_t *const value = json_loads(text, 0, NULL);
      if (!json_is_object(value)) fail_msg("not an object: %s", text);
      json_decref(value);
      complete++;
    }
    drive_equal(&beside, &plain, "beside constrained answers");
  }
  print_message("%d of %d answers were complete\n", complete, 2 * CHOICES);
  assert_true(complete > 0);
  grammar_close(&json_twin);
  drive_finish(engine);
  pkv_constraint_destroy(constraint);
  pkv_model_close(model);
}

static pkv_status build(void *ctx, const pkv_allocator *allocator) {
  pkv_constraint *constraint = NULL;
  const pkv_status status = pkv_constraint_create_json(&constraint, ctx, allocator, NULL);
  pkv_constraint_destroy(constraint);
  return status;
}

/* A model whose tokens make no JSON: the request ends as failed, the others go on. */
static void test_nothing_allowed(void **state) {
  (void)state;
  static drive_answer answer, other;
  tiny_model_options options = TINY_MODEL_INIT;
  tiny_model tiny, second;
  pkv_constraint *constraint = NULL;
  pkv_error err = {PKV_OK, "", ""};
  options.eos = 7;
  tiny_model_open(&tiny, &options);
  tiny_model_open(&second, &options);
  assert_true(test_alloc_torture(build, tiny.model) > 50);
  drive_ok(pkv_constraint_create_json(&constraint, tiny.model, NULL, &err), &err, "constraint");
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 1;
  pkv_engine *engine = drive_engine(tiny.model, &o);
  const int32_t prompt[] = {1, 2, 3};
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompt;
  r.prompt_tokens = 3;
  r.ignore_end = 1;
  drive_submit(engine, &r, &other);
  r.constraint = constraint;
  drive_submit(engine, &r, &answer);
  (void)drive_all(engine, 100);
  assert_int_equal(answer.finish, PKV_FINISH_ERROR);
  assert_int_equal(answer.count, 0);
  assert_int_equal(other.finish, PKV_FINISH_LENGTH);
  drive_finish(engine);
  engine = drive_engine(second.model, &o);
  int64_t id = 0;
  assert_int_equal(pkv_engine_submit(&id, engine, &r, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "another model"));
  drive_finish(engine);
  pkv_constraint_destroy(constraint);
  tiny_model_close(&second);
  tiny_model_close(&tiny);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_real_model),
      cmocka_unit_test(test_nothing_allowed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
