/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a mask costs a token, in processor time: the first time that a state is met ("new"), and
 * when it is met again. SmolLM2's vocabulary where the model is there, and one of 262,144 pieces of
 * English, as large as Gemma's. Bounded widely: sanitizers run this, too.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "pkv/engine.h"
#include "support/engine_drive.h"
#include "support/grammar_drive.h"

#define LARGE      262144
#define MOST_NEW_S 0.2
#define TEXT_BYTES 16384

static char english[TEXT_BYTES];

static void english_piece(const void *user, int32_t token, const char **bytes, size_t *count) {
  static char single;
  pkv_rng rng;
  (void)user;
  single = (char)token;
  *bytes = &single;
  *count = 1;
  if (token < 256) return;
  pkv_rng_init(&rng, (uint64_t)token);
  *bytes = english + pkv_rng_below(&rng, TEXT_BYTES - 16);
  *count = 2 + (size_t)pkv_rng_below(&rng, 10);
}

static void model_piece(const void *user, int32_t token, const char **bytes, size_t *count) {
  *count = 0;
  if (pkv_token_text(bytes, count, user, token, 0, NULL) != PKV_OK) *count = 0;
}

static double now(void) {
  return (double)clock() / CLOCKS_PER_SEC;
}

/* Byte by byte through a text: each state's mask twice. */
static void walk(const char *what, grammar_drive *d, const char *text) {
  double fresh = 0.0, again = 0.0, worst = 0.0;
  const size_t bytes = strlen(text);
  pkv_machine_state s;
  assert_int_equal(d->status, PKV_OK);
  assert_true(pkv_machine_begin(&s, d->machine));
  for (size_t i = 0; i < bytes; i++) {
    const double t0 = now();
    assert_non_null(pkv_machine_mask(d->machine, &s));
    const double t1 = now();
    assert_non_null(pkv_machine_mask(d->machine, &s));
    const double t2 = now();
    fresh += t1 - t0;
    again += t2 - t1;
    if (t1 - t0 > worst) worst = t1 - t0;
    assert_true(pkv_machine_feed(&s, d->machine, text + i, 1));
    assert_int_not_equal(s.id, 0);
  }
  print_message("%-28s %4zu bytes: new %8.1f us (worst %8.1f), again %6.2f us\n", what, bytes,
                1e6 * fresh / (double)bytes, 1e6 * worst, 1e6 * again / (double)bytes);
  assert_true(worst < MOST_NEW_S);
  grammar_close(d);
}

static void walk_all(const char *vocabulary, const pkv_token_trie *trie) {
  static const char schema[] =
      "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":40},"
      "\"kind\":{"
      "\"enum\":[\"cat\",\"dog\"]},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":120}},"
      "\"required\":[\"name\",\"kind\",\"age\"]}";
  static const char answer[] =
      "{\"name\": \"Ada of the long lane\", \"kind\": \"dog\", \"age\": 42}";
  static const char list[] = "root ::= (\"- \" [a-z ]+ \"\\n\")+";
  grammar_drive d;
  print_message("%s, %d tokens\n", vocabulary, (int)trie->vocab);
  schema_open(&d, schema, trie);
  walk("  a schema", &d, answer);
  schema_open(&d, "{\"type\":\"object\"}", trie);
  walk("  any object", &d, answer);
  grammar_open(&d, list, trie);
  walk("  a list", &d, "- red things\n- blue things\n- what is green\n");
}

static void test_large_vocabulary(void **state) {
  (void)state;
  pkv_token_trie *trie = NULL;
  FILE *const file = fopen(PKV_SOURCE_DIR "/tests/data/english.txt", "rb");
  assert_non_null(file);
  size_t have = fread(english, 1, sizeof english, file);
  assert_true(have > 64);
  (void)fclose(file);
  for (; have < sizeof english; have++)
    english[have] = english[have % 61 + 1];
  assert_int_equal(pkv_token_trie_create(&trie, LARGE, english_piece, NULL, NULL, NULL), PKV_OK);
  walk_all("pieces of English", trie);
  pkv_token_trie_destroy(trie);
}

static void test_real_vocabulary(void **state) {
  (void)state;
  static const char path[] = PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (access(path, R_OK) != 0) skip();
  pkv_model_options o = PKV_MODEL_OPTIONS_INIT;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_error err = {PKV_OK, "", ""};
  pkv_model *model = NULL;
  pkv_token_trie *trie = NULL;
  o.tokenizer_only = 1;
  drive_ok(pkv_model_open(&model, path, &o, &err), &err, "open");
  pkv_model_get_info(&info, model);
  assert_int_equal(pkv_token_trie_create(&trie, info.vocab, model_piece, model, NULL, NULL),
                   PKV_OK);
  walk_all("SmolLM2", trie);
  pkv_token_trie_destroy(trie);
  pkv_model_close(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_large_vocabulary),
      cmocka_unit_test(test_real_vocabulary),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
