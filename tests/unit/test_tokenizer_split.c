/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pre-tokenizer splits against words that the models' own pre-tokenizers gave
 * (tests/golden/tokenizer_splits.json), compiled and interpreted; ill-formed text; rule names.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "model/tokenizer_split.h"
#include "support/test_alloc.h"

#define SPLITS PKV_SOURCE_DIR "/tests/golden/tokenizer_splits.json"

static pkv_span span(const char *text) {
  return (pkv_span){text, strlen(text)};
}

static pkv_splitter *splitter(const char *rule, bool compiled) {
  pkv_splitter *s;
  pkv_error err = {0};
  if (pkv_splitter_create(&s, pkv_split_rule_find(span(rule)), compiled, NULL, &err) != PKV_OK)
    fail_msg("%s: %s", rule, err.text);
  return s;
}

static pkv_split_cursor *cursor(const pkv_splitter *s) {
  pkv_split_cursor *c;
  assert_int_equal(pkv_split_cursor_create(&c, s, NULL), PKV_OK);
  return c;
}

/* Checks one text: the words joined are the input. */
static void check_words(pkv_split_cursor *c, const char *rule, const json_t *words, size_t index) {
  char text[4096];
  size_t size = 0, i;
  json_t *word;
  json_array_foreach((json_t *)words, i, word) {
    const size_t n = json_string_length(word);
    assert_true(size + n <= sizeof text);
    memcpy(text + size, json_string_value(word), n);
    size += n;
  }
  pkv_split_cursor_reset(c, text, size);
  size_t at = 0;
  for (i = 0; i <= json_array_size(words); i++) {
    size_t start, bytes;
    pkv_error err = {0};
    if (pkv_split_next(&start, &bytes, c, &err) != PKV_OK)
      fail_msg("%s case %zu: %s", rule, index, err.text);
    const size_t want = json_string_length(json_array_get(words, i)); /* 0 behind the last */
    if (start != at || bytes != want)
      fail_msg("%s case %zu, word %zu: bytes %zu + %zu, want %zu + %zu of \"%.*s\"", rule, index, i,
               start, bytes, at, want, (int)size, text);
    at += bytes;
  }
}

static void test_reference_splits(void **state) {
  (void)state;
  json_error_t problem;
  json_t *root = json_load_file(SPLITS, JSON_ALLOW_NUL, &problem);
  if (root == NULL) fail_msg("%s: %s", SPLITS, problem.text);
  const char *rule;
  json_t *cases;
  size_t total = 0;
  json_object_foreach(json_object_get(root, "rules"), rule, cases) {
    for (int compiled = 0; compiled < 2; compiled++) {
      pkv_splitter *s = splitter(rule, compiled);
      pkv_split_cursor *c = cursor(s);
      size_t i;
      json_t *words;
      json_array_foreach(cases, i, words) {
        check_words(c, rule, words, i);
        total++;
      }
      pkv_split_cursor_destroy(c);
      pkv_splitter_destroy(s);
    }
  }
  json_decref(root);
  assert_int_equal(total, 3 * 2 * 234);
}

/* Words of a text as their lengths; ends with 0. */
static void check_lengths(const char *rule, const char *text, size_t bytes, const size_t *want) {
  pkv_splitter *s = splitter(rule, true);
  pkv_split_cursor *c = cursor(s);
  pkv_split_cursor_reset(c, text, bytes);
  for (size_t i = 0;; i++) {
    size_t start, n;
    assert_int_equal(pkv_split_next(&start, &n, c, NULL), PKV_OK);
    if (n != want[i]) fail_msg("%s: word %zu has %zu bytes, want %zu", rule, i, n, want[i]);
    if (n == 0) break;
  }
  pkv_split_cursor_destroy(c);
  pkv_splitter_destroy(s);
}

static void test_ill_formed(void **state) {
  (void)state;
  /* Each bad byte is a word; what is around it is split as texts of their own. */
  check_lengths("gpt-2", "ab\xff\xfe c", 6, (const size_t[]){2, 1, 1, 2, 0});
  check_lengths("gpt-2", "a  \x80x", 5, (const size_t[]){1, 2, 1, 1, 0});
  /* Overlong, surrogate, beyond U+10FFFF, cut at the end. */
  check_lengths("gpt-2", "\xc0\xaf", 2, (const size_t[]){1, 1, 0});
  check_lengths("smollm", "\xed\xa0\x80", 3, (const size_t[]){1, 1, 1, 0});
  check_lengths("llama-bpe", "\xf4\x90\x80\x80", 4, (const size_t[]){1, 1, 1, 1, 0});
  check_lengths("llama-bpe", "\xe4\xb8", 2, (const size_t[]){1, 1, 0});
  check_lengths("llama-bpe", "\xe4\xb8\xad\xe4", 4, (const size_t[]){3, 1, 0});
  /* The last good and the first bad of each length. */
  check_lengths("gpt-2", "\xf4\x8f\xbf\xbf", 4, (const size_t[]){4, 0});
  check_lengths("gpt-2", "\xed\x9f\xbf", 3, (const size_t[]){3, 0});
  check_lengths("gpt-2", "\xe0\x9f\xbf", 3, (const size_t[]){1, 1, 1, 0});
  check_lengths("gpt-2", "\xf0\x8f\xbf\xbf", 4, (const size_t[]){1, 1, 1, 1, 0});
}

/* Millions of blank lines are one word of text like any other, compiled or not. */
static void test_blank_lines(void **state) {
  (void)state;
  static const char *const names[] = {"gpt-2", "smollm", "llama-bpe"};
  const size_t bytes = 2400001;
  char *const text = malloc(bytes);
  assert_non_null(text);
  for (size_t i = 0; i < bytes; i++)
    text[i] = i % 2 ? ' ' : '\n';
  for (size_t i = 0; i < 6; i++) {
    pkv_splitter *s = splitter(names[i / 2], i % 2 == 0);
    pkv_split_cursor *c = cursor(s);
    size_t start, n;
    pkv_error err = {0};
    pkv_split_cursor_reset(c, text, bytes);
    if (pkv_split_next(&start, &n, c, &err) != PKV_OK)
      fail_msg("%s, %s: %s", names[i / 2], i % 2 == 0 ? "compiled" : "interpreted", err.text);
    assert_int_equal(n, bytes);
    pkv_split_cursor_destroy(c);
    pkv_splitter_destroy(s);
  }
  free(text);
}

static pkv_status split_all(void *ctx, const pkv_allocator *allocator) {
  const char *const text = ctx;
  const size_t bytes = strlen(text);
  pkv_splitter *s = NULL;
  pkv_split_cursor *c = NULL;
  size_t start = 0, n = 1;
  pkv_status status =
      pkv_splitter_create(&s, pkv_split_rule_find(span("llama-bpe")), false, allocator, NULL);
  if (status == PKV_OK) status = pkv_split_cursor_create(&c, s, NULL);
  if (status == PKV_OK) pkv_split_cursor_reset(c, text, bytes);
  while (status == PKV_OK && n > 0)
    status = pkv_split_next(&start, &n, c, NULL);
  if (status == PKV_OK) assert_int_equal(start, bytes);
  pkv_split_cursor_destroy(c);
  pkv_splitter_destroy(s);
  return status;
}

/* The interpreter takes more memory for a long word while it matches. */
static void test_no_memory(void **state) {
  (void)state;
  static char text[200002];
  for (size_t i = 0; i + 1 < sizeof text; i++)
    text[i] = i % 2 ? ' ' : '\n';
  assert_true(test_alloc_torture(split_all, text) >= 5);
}

/* Rules that are none: what the library refuses, what does not match, and what matches nothing. */
static void test_wrong_rules(void **state) {
  (void)state;
  static const struct {
    pkv_split_rule rule;
    pkv_status status;
    const char *part;
  } cases[] = {
      {{"open", "(a", false, false, false},
       PKV_E_INTERNAL,
       "pattern of pre-tokenizer 'open': error"},
      {{"none", "b", false, false, false}, PKV_E_LIMIT, "cannot be split at byte 0 (matcher error"},
      {{"empty", "b*", false, false, false}, PKV_E_INTERNAL, "an empty word at byte 0"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pkv_splitter *s = NULL;
    pkv_error err = {0};
    size_t start, n;
    pkv_status status = pkv_splitter_create(&s, &cases[i].rule, i % 2 == 0, NULL, &err);
    if (status == PKV_OK) {
      pkv_split_cursor *c = cursor(s);
      pkv_split_cursor_reset(c, "a", 1);
      status = pkv_split_next(&start, &n, c, &err);
      pkv_split_cursor_destroy(c);
    }
    pkv_splitter_destroy(s);
    if (status != cases[i].status || strstr(err.text, cases[i].part) == NULL)
      fail_msg("%zu: %s \"%s\"", i, pkv_status_name(status), err.text);
  }
}

static void test_rule_names(void **state) {
  (void)state;
  assert_string_equal(pkv_split_rule_find(span("llama3"))->name, "llama-bpe");
  assert_string_equal(pkv_split_rule_find(span("llama-v3"))->name, "llama-bpe");
  assert_true(pkv_split_rule_find(span("llama-bpe"))->whole_words);
  assert_true(pkv_split_rule_find(span("llama-bpe"))->bos_by_default);
  assert_false(pkv_split_rule_find(span("gpt-2"))->whole_words);
  assert_false(pkv_split_rule_find(span("smollm"))->bos_by_default);
  static const char *const unknown[] = {"", "default", "gpt2", "GPT-2", "smollm ", "qwen", "llama"};
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++)
    assert_null(pkv_split_rule_find(span(unknown[i])));
  assert_null(pkv_split_rule_find((pkv_span){"gpt-2\0", 6}));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_reference_splits), cmocka_unit_test(test_ill_formed),
      cmocka_unit_test(test_blank_lines),      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_wrong_rules),      cmocka_unit_test(test_rule_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
