/* SPDX-License-Identifier: Apache-2.0 */
/* What is answered when a prompt becomes no tokens: by kind, and never with a word of it. */
#include "server/api_fields.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void test_refused_tokens(void **state) {
  (void)state;
  static const struct {
    pkv_status status;
    const char *text;
    int http;
    const char *code, *message;
  } cases[] = {
      {PKV_E_NOMEM, "SECRET", 503, "no_memory", "there is no memory for this prompt"},
      {PKV_E_INVALID, "chat template, line 1, column 2: No.", 400, "invalid_value",
       "chat template, line 1, column 2: No."},
      {PKV_E_UNSUPPORTED, "the model's file has no tokenizer", 400, "unsupported",
       "the model's file has no tokenizer"},
      {PKV_E_UNSUPPORTED, "SECRET", 400, "unsupported",
       "the model's chat format does not take this conversation"},
      {PKV_E_LIMIT, "SECRET", 400, "invalid_value", "prompt cannot be made into tokens"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    pkv_api_error error;
    memset(&error, 0, sizeof error);
    assert_false(pkv_api_refuse_tokens(&error, cases[i].status, "prompt", cases[i].text));
    assert_int_equal(error.http, cases[i].http);
    assert_string_equal(error.code, cases[i].code);
    assert_string_equal(error.param, "prompt");
    assert_string_equal(error.message, cases[i].message);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_refused_tokens)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
