/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.json of each kind against the ids of the reference package: 500 strings a kind
 * (tests/golden/tokenizer_json.json, made by tests/tools/make_tokenizers.py); a mebibyte of one
 * character; what tokens mean, joined, is the text.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/clock.h"
#include "model/unicode_nfc.h"
#include "pkv/engine.h"

#define FOLDERS PKV_SOURCE_DIR "/tests/data/tokenizers/"
#define GOLDEN  PKV_SOURCE_DIR "/tests/golden/tokenizer_json.json"
#define BOTH    (PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL)
#define MAX_IDS 4096

static const char *const kinds[] = {"gpt2",   "smollm", "llama3",  "qwen2",
                                    "llama2", "gemma",  "mistral", "metaspace"};
#define KINDS (sizeof kinds / sizeof kinds[0])

static pkv_model *open_kind(const char *kind) {
  char path[512];
  pkv_model *model = NULL;
  pkv_error err = {0};
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.tokenizer_only = 1;
  (void)snprintf(path, sizeof path, FOLDERS "%s", kind);
  if (pkv_model_open(&model, path, &options, &err) != PKV_OK) fail_msg("%s: %s", kind, err.text);
  return model;
}

static void print_ids(const char *what, const int32_t *ids, size_t count) {
  char text[400];
  size_t at = 0;
  for (size_t i = 0; i < count && at + 12 < sizeof text; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, " %d", (int)ids[i]);
  print_message("  %s%s\n", what, text);
}

/* The reference adds its special tokens also where the text spells them already; ours is one of
   each (tokenizer.h). */
static size_t without_doubles(int32_t *ids, size_t count, const char *text) {
  const size_t bytes = strlen(text);
  if (strncmp(text, "<s>", 3) == 0 && count >= 2 && ids[0] == ids[1])
    memmove(ids, ids + 1, --count * sizeof *ids);
  if (bytes >= 4 && strcmp(text + bytes - 4, "</s>") == 0 && count >= 2 &&
      ids[count - 1] == ids[count - 2])
    count--;
  return count;
}

static void check_string(const pkv_model *model, const char *kind, size_t index, const json_t *text,
                         const json_t *want) {
  int32_t ids[MAX_IDS], expected[MAX_IDS];
  size_t count = 0;
  pkv_error err = {0};
  size_t wanted = json_array_size(want);
  assert_true(wanted <= MAX_IDS);
  for (size_t i = 0; i < wanted; i++)
    expected[i] = (int32_t)json_integer_value(json_array_get(want, i));
  wanted = without_doubles(expected, wanted, json_string_value(text));
  if (pkv_tokenize(ids, MAX_IDS, &count, model, json_string_value(text), json_string_length(text),
                   BOTH, &err) != PKV_OK)
    fail_msg("%s, string %zu: %s", kind, index, err.text);
  if (count == wanted && memcmp(ids, expected, count * sizeof *ids) == 0) return;
  print_ids("found   ", ids, count);
  print_ids("expected", expected, wanted);
  fail_msg("%s, string %zu: \"%s\"", kind, index, json_string_value(text));
}

static void test_ids_equal_the_reference(void **state) {
  json_error_t where;
  (void)state;
  json_t *golden = json_load_file(GOLDEN, JSON_ALLOW_NUL, &where);
  assert_non_null(golden);
  const json_t *strings = json_object_get(golden, "strings");
  assert_int_equal(json_array_size(strings), 500);
  for (size_t k = 0; k < KINDS; k++) {
    pkv_model *model = open_kind(kinds[k]);
    const json_t *ids = json_object_get(json_object_get(golden, "ids"), kinds[k]);
    assert_int_equal(json_array_size(ids), 500);
    for (size_t i = 0; i < 500; i++)
      check_string(model, kinds[k], i, json_array_get(strings, i), json_array_get(ids, i));
    pkv_model_close(model);
  }
  json_decref(golden);
}

/* ---- and back ---- */

static void check_back(const pkv_model *model, const char *kind, const char *text, size_t bytes) {
  int32_t ids[MAX_IDS];
  size_t count = 0;
  char joined[8192];
  size_t at = 0;
  assert_int_equal(pkv_tokenize(ids, MAX_IDS, &count, model, text, bytes, 0, NULL), PKV_OK);
  for (size_t i = 0; i < count; i++) {
    const char *piece = NULL;
    size_t n = 0;
    assert_int_equal(pkv_token_text(&piece, &n, model, ids[i], 0, NULL), PKV_OK);
    assert_true(at + n <= sizeof joined);
    memcpy(joined + at, piece, n);
    at += n;
  }
  if (at != bytes || memcmp(joined, text, bytes) != 0)
    fail_msg("%s: \"%.*s\" comes back as \"%.*s\"", kind, (int)bytes, text, (int)at, joined);
}

static void test_tokens_mean_the_text(void **state) {
  static const char *const texts[] = {"plain words, twice  spaced",
                                      "tab\tand\r\nnewline",
                                      "d\xc3\xa9j\xc3\xa0 \xf0\x9f\x99\x82 \xe4\xb8\x96",
                                      "<tool>x",
                                      "bad \xff\xc0\x80 bytes",
                                      "<s> is text here"};
  (void)state;
  for (size_t k = 0; k < KINDS; k++) {
    /* These put a space before the text, or have tokens for some characters only. */
    if (strcmp(kinds[k], "llama2") == 0 || strcmp(kinds[k], "mistral") == 0 ||
        strcmp(kinds[k], "metaspace") == 0)
      continue;
    pkv_model *model = open_kind(kinds[k]);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
      check_back(model, kinds[k], texts[i], strlen(texts[i]));
    pkv_model_close(model);
  }
}

/* ---- time ---- */

static void test_a_mebibyte_of_one_character(void **state) {
  static const char *const characters[] = {
      "a",    " ", "\n", "0", "'", "\xc3\xa9", "\xcc\x81", "\xe2\x96\x81", "\xf0\x9f\x99\x82",
      "\xff", "<"};
  const size_t bytes = (size_t)1 << 20;
  char *text = malloc(bytes);
  double worst = 0.0;
  (void)state;
  for (size_t k = 0; k < KINDS; k++) {
    pkv_model *model = open_kind(kinds[k]);
    for (size_t c = 0; c < sizeof characters / sizeof characters[0]; c++) {
      const size_t n = strlen(characters[c]);
      size_t count = 0;
      pkv_error err = {0};
      for (size_t i = 0; i < bytes; i++)
        text[i] = characters[c][i % n];
      const int64_t from = pkv_clock_ns();
      const pkv_status status =
          pkv_tokenize(NULL, 0, &count, model, text, bytes - bytes % n, BOTH, &err);
      const double seconds = (double)(pkv_clock_ns() - from) * 1e-9;
      if (status != PKV_E_TOO_SMALL) fail_msg("%s, %zu: %s", kinds[k], c, err.text);
      if (seconds > worst) worst = seconds;
    }
    pkv_model_close(model);
  }
  free(text);
  print_message("slowest mebibyte: %.2f s\n", worst);
  assert_true(worst < 10.0);
}

/* ---- normal form ---- */

static void normal(const char *text, const char *want) {
  pkv_buffer out;
  pkv_buffer_init(&out, 1 << 20, NULL);
  assert_int_equal(pkv_nfc(&out, text, strlen(text), NULL), PKV_OK);
  if (out.size != strlen(want) || memcmp(out.data, want, out.size) != 0)
    fail_msg("\"%s\" becomes \"%.*s\", expected \"%s\"", text, (int)out.size, out.data, want);
  pkv_buffer_deinit(&out);
}

static void test_normal_form(void **state) {
  (void)state;
  normal("plain", "plain");
  normal("e\xcc\x81", "\xc3\xa9");
  normal("xe\xcc\x81\xff"
         "e\xcc\x81",
         "x\xc3\xa9\xff\xc3\xa9");
  normal("e\xff\xcc\x81", "e\xff\xcc\x81");
  normal("q\xcc\x87\xcc\xa3", "q\xcc\xa3\xcc\x87"); /* marks in the order of their class */
  normal("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"); /* Hangul */
  normal("\xe2\x84\xab", "\xc3\x85"); /* a sign that is another character */
}

/* Marks of falling class, half a million of them: sorting by exchange would take hours. */
static void test_marks_in_the_wrong_order(void **state) {
  const size_t count = 400000;
  char *text = malloc(2 * count + 1);
  pkv_buffer out;
  (void)state;
  text[0] = 'a';
  for (size_t i = 0; i < count; i++)
    memcpy(text + 1 + 2 * i, i % 2 ? "\xcc\xa3" : "\xcc\x87", 2);
  pkv_buffer_init(&out, 1 << 22, NULL);
  const int64_t from = pkv_clock_ns();
  assert_int_equal(pkv_nfc(&out, text, 2 * count + 1, NULL), PKV_OK);
  const double seconds = (double)(pkv_clock_ns() - from) * 1e-9;
  assert_memory_equal(out.data, "\xe1\xba\xa1", 3); /* a with its first dot below */
  assert_memory_equal(out.data + out.size - 2, "\xcc\x87", 2);
  print_message("%.3f s\n", seconds);
  assert_true(seconds < 5.0);
  pkv_buffer_deinit(&out);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ids_equal_the_reference), cmocka_unit_test(test_tokens_mean_the_text),
      cmocka_unit_test(test_a_mebibyte_of_one_character), cmocka_unit_test(test_normal_form),
      cmocka_unit_test(test_marks_in_the_wrong_order)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
