/* SPDX-License-Identifier: Apache-2.0 */
/* Answers under grammars and schemas, by the real model: alone, beside others, forked, preempted,
   from the cache. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/engine_drive.h"
#include "support/grammar_drive.h"
#include "support/test_alloc.h"

#define CHOICES 3

static const char path[] = PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf";
static const char schema[] =
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":12},"
    "\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":30},"
    "\"kind\":{\"enum\":[\"cat\",\"dog\",\"\xc3\xa9l\xc3\xa9phant\"]}},"
    "\"required\":[\"name\",\"age\",\"kind\"]}";
static const char list_grammar[] =
    "root ::= item{2,3} \"done\"?\nitem ::= \"- \" [a-z ]{3,9} \"\\n\"";

typedef struct world {
  pkv_model *model;
  pkv_constraint *schema, *list;
  int32_t prompt[64];
  size_t prompt_tokens;
} world;

static int open_world(void **state) {
  static const char question[] = "Describe a cat as JSON with name, age and kind.\n";
  static world w;
  pkv_error err = {PKV_OK, "", ""};
  *state = NULL;
  if (access(path, R_OK) != 0) return 0;
  drive_ok(pkv_model_open(&w.model, path, NULL, &err), &err, "open");
  drive_ok(pkv_constraint_create_schema(&w.schema, w.model, schema, strlen(schema), NULL, &err),
           &err, "schema");
  drive_ok(pkv_constraint_create_grammar(&w.list, w.model, list_grammar, strlen(list_grammar), NULL,
                                         &err),
           &err, "grammar");
  drive_ok(
      pkv_tokenize(w.prompt, 64, &w.prompt_tokens, w.model, question, strlen(question), 0, &err),
      &err, "tokenize");
  *state = &w;
  return 0;
}

static int close_world(void **state) {
  world *const w = *state;
  if (w == NULL) return 0;
  pkv_constraint_destroy(w->schema);
  pkv_constraint_destroy(w->list);
  pkv_model_close(w->model);
  return 0;
}

static const world *need_world(void **state) {
  if (*state == NULL) {
    print_message("skip: no model at %s\n", path);
    skip();
  }
  return *state;
}

static pkv_engine_options options_of(int64_t cache_tokens) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 8;
  o.cache_tokens = cache_tokens;
  o.max_seq_len = 128;
  return o;
}

static pkv_request request_of(const world *w, const pkv_constraint *constraint, uint64_t seed) {
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = w->prompt;
  r.prompt_tokens = (int32_t)w->prompt_tokens;
  r.max_tokens = 60;
  r.temperature = 0.9f;
  r.logprobs = 1;
  r.seed = seed;
  r.constraint = constraint;
  return r;
}

static void check_answer(const grammar_drive *d, const world *w, const drive_answer *a) {
  char text[2048];
  const size_t bytes = drive_text(text, sizeof text, w->model, a);
  const grammar_verdict verdict = grammar_check(d, text, bytes);
  if (a->finish == PKV_FINISH_STOP)
    assert_true(verdict == GRAMMAR_DONE || verdict == GRAMMAR_WHOLE);
  else
    assert_int_equal(a->finish, PKV_FINISH_LENGTH);
  if (verdict == GRAMMAR_DEAD) fail_msg("not allowed: %s", text);
}

/* The same texts whatever happens around them. */
static void test_same(void **state) {
  static drive_answer alone[2][CHOICES], again[2][CHOICES], others[4];
  const world *const w = need_world(state);
  const pkv_constraint *const both[2] = {w->schema, w->list};
  pkv_engine_options o = options_of(2048);
  grammar_drive twin[2];
  schema_open(&twin[0], schema, NULL);
  grammar_open(&twin[1], list_grammar, NULL);
  for (int k = 0; k < 2; k++) { /* a fresh engine each: nothing is cached */
    pkv_engine *const engine = drive_engine(w->model, &o);
    pkv_request r = request_of(w, both[k], 11);
    r.n = CHOICES;
    drive_submit_choices(engine, &r, alone[k], CHOICES);
    (void)drive_all(engine, 200);
    for (int i = 0; i < CHOICES; i++)
      check_answer(&twin[k], w, &alone[k][i]);
    drive_finish(engine);
  }
  for (int round = 0; round < 2; round++) { /* roomy, then so small that some are preempted */
    o.cache_tokens = round == 0 ? 2048 : 144;
    o.prefill_chunk = round == 0 ? 7 : 512;
    pkv_engine *const engine = drive_engine(w->model, &o);
    for (int repeat = 0; repeat < 2; repeat++) { /* cold, then from the cache */
      for (int i = 0; i < 4; i++) {
        pkv_request r = request_of(w, NULL, (uint64_t)i);
        drive_submit(engine, &r, &others[i]);
      }
      for (int k = 0; k < 2; k++) {
        pkv_request r = request_of(w, both[k], 11);
        r.n = CHOICES;
        drive_submit_choices(engine, &r, again[k], CHOICES);
      }
      (void)drive_all(engine, 3000);
      for (int k = 0; k < 2; k++)
        for (int i = 0; i < CHOICES; i++)
          drive_equal(&again[k][i], &alone[k][i], "constrained answers");
    }
    pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
    pkv_engine_get_stats(&stats, engine);
    if (round == 1) assert_true(stats.preemptions > 0);
    drive_finish(engine);
  }
  grammar_close(&twin[0]);
  grammar_close(&twin[1]);
}

/* Ends: only where the text may end; stop strings as ever; min_tokens that cannot be reached. */
static void test_ends(void **state) {
  static drive_answer a;
  const world *const w = need_world(state);
  static const char ab[] = "root ::= \"a\" (\" b\")*";
  static const char word[] = "root ::= \"yes\" | \"no\"";
  pkv_engine_options o = options_of(1024);
  pkv_engine *const engine = drive_engine(w->model, &o);
  pkv_constraint *open = NULL, *closed = NULL;
  pkv_error err = {PKV_OK, "", ""};
  char text[2048];
  int64_t id = 0;
  drive_ok(pkv_constraint_create_grammar(&open, w->model, ab, strlen(ab), NULL, &err), &err, "ab");
  drive_ok(pkv_constraint_create_grammar(&closed, w->model, word, strlen(word), NULL, &err), &err,
           "word");
  pkv_request r = request_of(w, open, 3);
  r.min_tokens = 9; /* the end may not come before */
  r.max_tokens = 40;
  pkv_logit_bias end = {2, 100.0f}; /* <|im_end|>, wanted all the time */
  r.logit_bias = &end;
  r.logit_bias_count = 1;
  drive_submit(engine, &r, &a);
  (void)drive_all(engine, 100);
  assert_int_equal(a.finish, PKV_FINISH_STOP);
  assert_int_equal(a.count, 10);
  assert_int_equal(a.tokens[9], 2);
  r.min_tokens = 0;
  drive_submit(engine, &r, &a);
  (void)drive_all(engine, 100);
  assert_int_equal(a.tokens[0] == 2, 0); /* "" is no text of it */
  assert_int_equal(a.tokens[1], 2);
  r.ignore_end = 1; /* it never comes, and no other token takes its place */
  drive_submit(engine, &r, &a);
  (void)drive_all(engine, 100);
  assert_int_equal(a.finish, PKV_FINISH_LENGTH);
  (void)drive_text(text, sizeof text, w->model, &a);
  assert_int_equal(strncmp(text, "a b b b", 7), 0);
  const char *const stop = "b b b";
  r.stop = &stop;
  r.stop_count = 1;
  drive_submit(engine, &r, &a);
  (void)drive_all(engine, 100);
  assert_int_equal(a.finish, PKV_FINISH_STOP);
  assert_int_equal(a.stop_index, 0);
  r = request_of(w, closed, 3); /* nothing can follow: it ends without an end token */
  drive_submit(engine, &r, &a);
  (void)drive_all(engine, 100);
  assert_int_equal(a.finish, PKV_FINISH_STOP);
  (void)drive_text(text, sizeof text, w->model, &a);
  assert_true(strcmp(text, "yes") == 0 || strcmp(text, "no") == 0);
  r.min_tokens = 4;
  assert_int_equal(pkv_engine_submit(&id, engine, &r, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "longest text of its constraint has 3 bytes"));
  r.min_tokens = 0;
  drive_submit(engine, &r, &a); /* cancelled while it runs; the constraint goes first */
  (void)drive_step(engine);
  pkv_constraint_destroy(closed);
  pkv_engine_cancel(engine, a.id);
  (void)drive_all(engine, 10);
  pkv_constraint_destroy(open);
  drive_finish(engine);
}

/* Many different ones: old places are used again, too many at once are refused. */
static void test_many(void **state) {
  static drive_answer answers[PKV_MAX_CONSTRAINTS];
  const world *const w = need_world(state);
  pkv_engine_options o = options_of(1024);
  pkv_engine *const engine = drive_engine(w->model, &o);
  pkv_error err = {PKV_OK, "", ""};
  int64_t id = 0;
  for (int i = 0; i <= 2 * PKV_MAX_CONSTRAINTS; i++) {
    char text[64];
    pkv_constraint *c = NULL;
    (void)snprintf(text, sizeof text, "root ::= \"%d\" | \"x%d\"", i, i);
    drive_ok(pkv_constraint_create_grammar(&c, w->model, text, strlen(text), NULL, &err), &err,
             "grammar");
    const pkv_request r = request_of(w, c, 1);
    if (i == PKV_MAX_CONSTRAINTS) {
      assert_int_equal(pkv_engine_submit(&id, engine, &r, &err), PKV_E_LIMIT);
      (void)drive_all(engine, 2000);
    }
    drive_submit(engine, &r, &answers[i % PKV_MAX_CONSTRAINTS]);
    pkv_constraint_destroy(c); /* the request keeps it */
    if (i > PKV_MAX_CONSTRAINTS) (void)drive_all(engine, 100);
  }
  for (int i = 0; i < PKV_MAX_CONSTRAINTS; i++)
    assert_int_equal(answers[i].finish, PKV_FINISH_STOP);
  drive_finish(engine);
}

/* The step path allocates nothing, also when masks are made. */
static void test_no_allocation(void **state) {
  static drive_answer a;
  const world *const w = need_world(state);
  test_alloc counting;
  test_alloc_init(&counting);
  const pkv_allocator allocator = test_alloc_allocator(&counting);
  pkv_engine_options o = options_of(1024);
  o.allocator = &allocator;
  pkv_engine *const engine = drive_engine(w->model, &o);
  const pkv_request r = request_of(w, w->schema, 4);
  drive_submit(engine, &r, &a);
  const int64_t before = test_alloc_calls(&counting);
  (void)drive_all(engine, 100);
  assert_int_equal(test_alloc_calls(&counting), before);
  drive_finish(engine);
  test_alloc_finish(&counting);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_same),
      cmocka_unit_test(test_ends),
      cmocka_unit_test(test_many),
      cmocka_unit_test(test_no_allocation),
  };
  return cmocka_run_group_tests(tests, open_world, close_world);
}
