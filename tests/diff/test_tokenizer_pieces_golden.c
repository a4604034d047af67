/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer by scores on the vocabulary of Gemma 3 270M: the 198 cases of
 * tests/golden/gemma3-270m-q4_k_m.tok.json, plain and with special tokens, and the strings of
 * gemma3-270m-q4_k_m.pieces.json, whose ids come from SentencePiece; and back to bytes.
 *
 * Two known differences. The cases' text "<bos>" with a bos added has two of them in the reference,
 * one here, as tokenizer.h says. And no string has U+2581 beside a space: SentencePiece makes
 * them the user-defined token of two spaces, llama.cpp and this tokenizer do not.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/text.h"
#include "pkv/engine.h"
#include "model/tokenizer.h"

#define MODEL_FILE PKV_MODEL_DIR "/gemma-3-270m-q4_k_m.gguf"
#define GOLDEN     PKV_SOURCE_DIR "/tests/golden/gemma3-270m-q4_k_m"
#define MAX_IDS    8192

static pkv_tokenizer *tokenizer; /* NULL: no model file */

static int setup(void **state) {
  (void)state;
  pkv_gguf *gguf;
  pkv_error err = {0};
  if (pkv_gguf_open(&gguf, MODEL_FILE, NULL, &err) != PKV_OK) {
    print_message("SKIP: no model file: %s\n", err.text);
    return 0;
  }
  const int64_t start = pkv_clock_ns();
  const pkv_status status = pkv_tokenizer_create(&tokenizer, gguf, NULL, &err);
  print_message("tokenizer built in %.1f ms\n", (double)(pkv_clock_ns() - start) / 1e6);
  pkv_gguf_close(gguf);
  if (status != PKV_OK) print_error("%s\n", err.text);
  return status == PKV_OK ? 0 : -1;
}

static int teardown(void **state) {
  (void)state;
  pkv_tokenizer_destroy(tokenizer);
  return 0;
}

static void need_model(void) {
  if (tokenizer != NULL) return;
  print_message("SKIP: no model file\n");
  skip();
}

static json_t *load(const char *path) {
  json_error_t problem;
  json_t *root = json_load_file(path, JSON_ALLOW_NUL, &problem);
  if (root == NULL) fail_msg("%s: %s", path, problem.text);
  return root;
}

static void check_ids(const char *id, const json_t *text, uint32_t flags, const json_t *want) {
  static int32_t ids[MAX_IDS];
  size_t count = 0;
  pkv_error err = {0};
  if (pkv_tokenizer_encode(ids, MAX_IDS, &count, tokenizer, json_string_value(text),
                           json_string_length(text), flags, &err) != PKV_OK)
    fail_msg("%s: %s", id, err.text);
  for (size_t i = 0; i < count || i < json_array_size(want); i++) {
    const json_int_t expected = json_integer_value(json_array_get(want, i));
    if (i >= count || i >= json_array_size(want) || ids[i] != expected)
      fail_msg("%s (flags %u) '%s': %zu tokens, want %zu; token %zu is %d, want %lld", id, flags,
               json_string_value(text), count, json_array_size(want), i, i < count ? ids[i] : -1,
               (long long)expected);
  }
}

static void check_round_trip(const char *id, const json_t *text, const json_t *ids) {
  pkv_buffer out;
  pkv_buffer_init(&out, 1u << 20, NULL);
  for (size_t i = 0; i < json_array_size(ids); i++) {
    const char *piece;
    size_t n;
    const int32_t token = (int32_t)json_integer_value(json_array_get(ids, i));
    assert_int_equal(pkv_tokenizer_text(&piece, &n, tokenizer, token, 1, NULL), PKV_OK);
    if (n > 0) assert_int_equal(pkv_buffer_append(&out, piece, n, NULL), PKV_OK);
  }
  const size_t bytes = json_string_length(text);
  if (out.size != bytes || (bytes > 0 && memcmp(out.data, json_string_value(text), bytes) != 0))
    fail_msg("%s: %zu bytes went in, %zu other ones came back", id, bytes, out.size);
  pkv_buffer_deinit(&out);
}

static void test_golden_cases(void **state) {
  (void)state;
  need_model();
  json_t *root = load(GOLDEN ".tok.json"), *c;
  size_t i, double_bos = 0;
  json_array_foreach(json_object_get(root, "cases"), i, c) {
    const char *id = json_string_value(json_object_get(c, "id"));
    const json_t *text = json_object_get(c, "text");
    check_ids(id, text, 0, json_object_get(c, "ids"));
    json_t *special = json_object_get(c, "ids_special");
    if (json_integer_value(json_array_get(special, 1)) == pkv_tokenizer_bos(tokenizer)) {
      (void)json_array_remove(special, 0);
      double_bos++;
    }
    check_ids(id, text, PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL, special);
    if (json_is_true(json_object_get(c, "roundtrip")))
      check_round_trip(id, text, json_object_get(c, "ids"));
  }
  assert_int_equal(i, 198);
  print_message("%zu cases with a bos of their own\n", double_bos);
  assert_true(double_bos <= 3);
  json_decref(root);
}

static void test_sentencepiece_cases(void **state) {
  (void)state;
  need_model();
  json_t *root = load(GOLDEN ".pieces.json"), *c;
  size_t i, tokens = 0;
  json_array_foreach(json_object_get(root, "cases"), i, c) {
    const json_t *text = json_array_get(c, 0), *ids = json_array_get(c, 1);
    char id[32];
    (void)snprintf(id, sizeof id, "string %zu", i);
    check_ids(id, text, 0, ids);
    /* U+2581 means a space to this tokenizer and comes back as one. */
    if (strstr(json_string_value(text), "\xe2\x96\x81") == NULL) check_round_trip(id, text, ids);
    tokens += json_array_size(ids);
  }
  print_message("%zu strings, %zu tokens\n", i, tokens);
  assert_true(i >= 500);
  json_decref(root);
}

/* What a user types stays text, whichever control token it spells. */
static void test_typed_control_tokens(void **state) {
  (void)state;
  need_model();
  int controls = 0;
  for (int32_t id = 0; id < pkv_tokenizer_vocab(tokenizer); id++) {
    const char *text;
    size_t bytes, count;
    int32_t ids[256];
    if (!pkv_tokenizer_is_control(tokenizer, id)) continue;
    controls++;
    assert_int_equal(pkv_tokenizer_text(&text, &bytes, tokenizer, id, 1, NULL), PKV_OK);
    assert_int_equal(pkv_tokenizer_encode(ids, 256, &count, tokenizer, text, bytes, 0, NULL),
                     PKV_OK);
    for (size_t i = 0; i < count; i++) {
      if (pkv_tokenizer_is_control(tokenizer, ids[i]))
        fail_msg("\"%.*s\" as text has control token %d", (int)bytes, text, ids[i]);
    }
    assert_int_equal(pkv_tokenizer_encode(ids, 256, &count, tokenizer, text, bytes,
                                          PKV_TEXT_PARSE_SPECIAL, NULL),
                     PKV_OK);
    assert_int_equal(count, 1);
    assert_int_equal(ids[0], id);
  }
  assert_int_equal(controls, 6249);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden_cases),
      cmocka_unit_test(test_sentencepiece_cases),
      cmocka_unit_test(test_typed_control_tokens),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
