/* SPDX-License-Identifier: Apache-2.0 */
/* Log-probabilities of tokens of any length: `bytes` has all of them, texts are UTF-8. */
#include "server/reply_logprobs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/vocab_build.h"

#define LONG 1000

static pkv_model *model;
static unsigned char *file;
static int32_t long_text, long_noise, control;
static char letters[LONG + 1], noise[LONG + 1];

static int open_model(void **state) {
  vocab_build v;
  size_t size = 0;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  pkv_error err = {PKV_OK, "", ""};
  (void)state;
  options.tokenizer_only = 1;
  for (int i = 0; i < LONG; i++) {
    letters[i] = (char)('a' + i % 26);
    noise[i] = i % 3 == 0 ? (char)0xff : 'x';
  }
  vocab_build_init(&v, "gpt-2");
  long_text = vocab_build_token_bytes(&v, letters, LONG, 1);
  long_noise = vocab_build_token_bytes(&v, noise, LONG, 1);
  control = vocab_build_token(&v, "<|end|>", 3);
  vocab_build_finish(&v);
  file = gguf_build_exact(&v.file, &size);
  if (pkv_model_open_memory(&model, file, size, &options, &err) != PKV_OK) fail_msg("%s", err.text);
  vocab_build_deinit(&v);
  return 0;
}

static int close_model(void **state) {
  (void)state;
  pkv_model_close(model);
  gguf_build_drop(file);
  return 0;
}

static void check_bytes(const json_t *entry, const char *bytes, size_t count) {
  const json_t *const list = json_object_get(entry, "bytes");
  assert_int_equal(json_array_size(list), count);
  for (size_t i = 0; i < count; i++)
    assert_int_equal(json_integer_value(json_array_get(list, i)), (unsigned char)bytes[i]);
}

static void add(pkv_piece *piece, int32_t token, int32_t other) {
  pkv_token_record record;
  memset(&record, 0, sizeof record);
  record.token = token;
  record.logprob = -0.5f;
  record.top_count = 2;
  record.top[0] = (pkv_logprob){token, -0.5f};
  record.top[1] = (pkv_logprob){other, -1.5f};
  assert_int_equal(pkv_buffer_append(&piece->records, &record, sizeof record, NULL), PKV_OK);
}

static void test_long_tokens(void **state) {
  const pkv_reply reply = {.logprobs = true, .model = model};
  pkv_piece piece;
  (void)state;
  pkv_piece_init(&piece);
  add(&piece, long_text, long_noise);
  add(&piece, long_noise, 0xe9);
  add(&piece, control, 0);
  json_t *const chat = pkv_logprobs_chat(&reply, &piece);
  const json_t *const content = json_object_get(chat, "content");
  assert_int_equal(json_array_size(content), 3);
  const json_t *entry = json_array_get(content, 0);
  assert_string_equal(json_string_value(json_object_get(entry, "token")), letters);
  check_bytes(entry, letters, LONG);
  const json_t *const top = json_array_get(json_object_get(entry, "top_logprobs"), 1);
  check_bytes(top, noise, LONG);
  entry = json_array_get(content, 1);
  check_bytes(entry, noise, LONG);
  /* One U+FFFD of three bytes for each byte that is no UTF-8. */
  assert_int_equal(json_string_length(json_object_get(entry, "token")), LONG + 2 * 334);
  assert_string_equal(json_string_value(json_object_get(json_array_get(content, 2), "token")),
                      "<|end|>");
  json_decref(chat);
  json_t *const legacy = pkv_logprobs_legacy(&reply, &piece);
  const json_t *const tokens = json_object_get(legacy, "tokens");
  assert_string_equal(json_string_value(json_array_get(tokens, 0)), letters);
  const char *const spelled = json_string_value(json_array_get(tokens, 1));
  assert_int_equal(strlen(spelled), strlen("bytes:") + 4 * LONG);
  assert_memory_equal(spelled, "bytes:\\xff\\x78\\x78\\xff", 22);
  const json_t *const tops = json_array_get(json_object_get(legacy, "top_logprobs"), 1);
  assert_int_equal(json_object_size(tops), 2);
  assert_non_null(json_object_get(tops, spelled));
  assert_non_null(json_object_get(tops, "bytes:\\xe9"));
  json_decref(legacy);
  pkv_piece_deinit(&piece);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_long_tokens),
  };
  return cmocka_run_group_tests(tests, open_model, close_model);
}
