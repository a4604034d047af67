/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer of the demo model against reference ids: every case of
 * tests/golden/smollm2-135m-q4_1.tok.json, plain and with special tokens, and back to bytes; its
 * chat template against ids that llama.cpp gives for the text which a Jinja interpreter renders.
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
#include "model/chat.h"
#include "pkv/engine.h"

#define MODEL_FILE PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf"
#define CASES_FILE PKV_SOURCE_DIR "/tests/golden/smollm2-135m-q4_1.tok.json"
#define MAX_IDS    8192

typedef struct fixture {
  pkv_tokenizer *tokenizer; /* NULL: no model file */
  pkv_chat_template *chat;
  json_t *cases;
} fixture;

static fixture fx;

static int setup(void **state) {
  (void)state;
  json_error_t problem;
  json_t *root = json_load_file(CASES_FILE, JSON_ALLOW_NUL, &problem);
  if (root == NULL) {
    print_error("%s: %s\n", CASES_FILE, problem.text);
    return -1;
  }
  fx.cases = json_incref(json_object_get(root, "cases"));
  json_decref(root);
  pkv_gguf *gguf;
  pkv_error err = {0};
  if (pkv_gguf_open(&gguf, MODEL_FILE, NULL, &err) != PKV_OK) {
    print_message("SKIP: no model file: %s\n", err.text);
    return 0;
  }
  const int64_t start = pkv_clock_ns();
  const pkv_status status = pkv_tokenizer_create(&fx.tokenizer, gguf, NULL, &err);
  print_message("tokenizer built in %.1f ms\n", (double)(pkv_clock_ns() - start) / 1e6);
  pkv_span source = {NULL, 0};
  pkv_status chat = pkv_gguf_get_string(&source, gguf, "tokenizer.chat_template", true, &err);
  if (status == PKV_OK && chat == PKV_OK)
    chat = pkv_chat_template_create(&fx.chat, source, fx.tokenizer, NULL, &err);
  pkv_gguf_close(gguf);
  if (status != PKV_OK || chat != PKV_OK) {
    print_error("%s\n", err.text);
    return -1;
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  pkv_chat_template_destroy(fx.chat);
  pkv_tokenizer_destroy(fx.tokenizer);
  json_decref(fx.cases);
  return 0;
}

static void check_ids(const char *id, const char *text, size_t bytes, uint32_t flags,
                      const json_t *want) {
  static int32_t ids[MAX_IDS];
  size_t count = 0;
  pkv_error err = {0};
  if (pkv_tokenizer_encode(ids, MAX_IDS, &count, fx.tokenizer, text, bytes, flags, &err) != PKV_OK)
    fail_msg("%s: %s", id, err.text);
  if (count != json_array_size(want))
    fail_msg("%s (flags %u): %zu tokens, want %zu", id, flags, count, json_array_size(want));
  for (size_t i = 0; i < count; i++) {
    const json_int_t expected = json_integer_value(json_array_get(want, i));
    if (ids[i] != expected)
      fail_msg("%s (flags %u): token %zu is %d, want %lld", id, flags, i, ids[i],
               (long long)expected);
  }
}

static void check_round_trip(const char *id, const char *text, size_t bytes, const json_t *ids) {
  pkv_buffer out;
  pkv_buffer_init(&out, 1u << 20, NULL);
  for (size_t i = 0; i < json_array_size(ids); i++) {
    const char *piece;
    size_t n;
    const int32_t token = (int32_t)json_integer_value(json_array_get(ids, i));
    assert_int_equal(pkv_tokenizer_text(&piece, &n, fx.tokenizer, token, 1, NULL), PKV_OK);
    if (n > 0) assert_int_equal(pkv_buffer_append(&out, piece, n, NULL), PKV_OK);
  }
  if (out.size != bytes || (bytes > 0 && memcmp(out.data, text, bytes) != 0))
    fail_msg("%s: %zu bytes went in, %zu other ones came back", id, bytes, out.size);
  pkv_buffer_deinit(&out);
}

static void every_case(uint32_t flags, const char *key) {
  if (fx.tokenizer == NULL) {
    print_message("SKIP: no model file\n");
    skip();
  }
  size_t i, n = 0;
  json_t *c;
  json_array_foreach(fx.cases, i, c) {
    const char *id = json_string_value(json_object_get(c, "id"));
    const json_t *text = json_object_get(c, "text");
    check_ids(id, json_string_value(text), json_string_length(text), flags,
              json_object_get(c, key));
    check_round_trip(id, json_string_value(text), json_string_length(text),
                     json_object_get(c, key));
    n++;
  }
  assert_int_equal(n, 198);
}

static void test_plain(void **state) {
  (void)state;
  every_case(0, "ids");
}

static void test_special(void **state) {
  (void)state;
  every_case(PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL, "ids_special");
}

static void test_chat(void **state) {
  (void)state;
  if (fx.tokenizer == NULL) {
    print_message("SKIP: no model file\n");
    skip();
  }
  /* The template inserts its own system message: none was given. */
  static const int32_t want[] = {1,    9690, 198, 2683,  359,  253,  5356, 5646, 11173,
                                 3365, 3511, 308, 34519, 28,   7018, 411,  407,  19712,
                                 8182, 2,    198, 1,     4093, 198,  1780, 314,  9354,
                                 47,   2,    198, 1,     520,  9531, 198};
  const size_t n = sizeof want / sizeof want[0];
  const pkv_message messages[] = {{"user", "What is gravity?"}};
  int32_t ids[64];
  size_t count;
  assert_int_equal(pkv_chat_encode(ids, 64, &count, fx.chat, fx.tokenizer, messages, 1, 1, NULL),
                   PKV_OK);
  assert_int_equal(count, n);
  for (size_t i = 0; i < n; i++) {
    if (ids[i] != want[i]) fail_msg("token %zu is %d, want %d", i, ids[i], want[i]);
  }
  assert_true(pkv_tokenizer_is_end(fx.tokenizer, 2));
}

/* The vocabulary lacks 21 bytes: they show as U+FFFD instead of vanishing. */
static void test_bytes_without_token(void **state) {
  (void)state;
  if (fx.tokenizer == NULL) {
    print_message("SKIP: no model file\n");
    skip();
  }
  int32_t ids[8];
  size_t count;
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, fx.tokenizer, "a\x04\xff", 3, 0, NULL),
                   PKV_OK);
  assert_int_equal(count, 3);
  assert_int_equal(ids[0], 81);
  assert_int_equal(ids[1], 24211);
  assert_int_equal(ids[2], 24211);
}

/* What a user types stays text, whichever of the model's control tokens it spells. */
static void test_typed_control_tokens(void **state) {
  (void)state;
  if (fx.tokenizer == NULL) {
    print_message("SKIP: no model file\n");
    skip();
  }
  int controls = 0;
  for (int32_t id = 0; id < pkv_tokenizer_vocab(fx.tokenizer); id++) {
    const char *text;
    size_t bytes, count;
    int32_t ids[256];
    if (!pkv_tokenizer_is_control(fx.tokenizer, id)) continue;
    controls++;
    assert_int_equal(pkv_tokenizer_text(&text, &bytes, fx.tokenizer, id, 1, NULL), PKV_OK);
    assert_int_equal(pkv_tokenizer_encode(ids, 256, &count, fx.tokenizer, text, bytes, 0, NULL),
                     PKV_OK);
    assert_true(count > 1);
    for (size_t i = 0; i < count; i++) {
      if (pkv_tokenizer_is_control(fx.tokenizer, ids[i]))
        fail_msg("\"%.*s\" as text has control token %d", (int)bytes, text, ids[i]);
    }
    assert_int_equal(pkv_tokenizer_encode(ids, 256, &count, fx.tokenizer, text, bytes,
                                          PKV_TEXT_PARSE_SPECIAL, NULL),
                     PKV_OK);
    assert_int_equal(count, 1);
    assert_int_equal(ids[0], id);
  }
  assert_int_equal(controls, 17);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plain),
      cmocka_unit_test(test_special),
      cmocka_unit_test(test_chat),
      cmocka_unit_test(test_typed_control_tokens),
      cmocka_unit_test(test_bytes_without_token),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
