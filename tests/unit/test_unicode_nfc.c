/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Normalization when utf8proc says what it never should: its functions are ours here, as the linker
 * takes a program's before a library's. Its answers on real texts: test_tokenizer_json.
 */
#include "model/unicode_nfc.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <utf8proc.h>

static utf8proc_ssize_t parts_are, composed_is; /* 0: as the library says */

#pragma GCC visibility push(default)

utf8proc_ssize_t utf8proc_decompose_char(utf8proc_int32_t point, utf8proc_int32_t *out,
                                         utf8proc_ssize_t room, utf8proc_option_t options,
                                         int *boundary) {
  utf8proc_ssize_t (*real)(utf8proc_int32_t, utf8proc_int32_t *, utf8proc_ssize_t,
                           utf8proc_option_t, int *);
  *(void **)(&real) = dlsym(RTLD_NEXT, "utf8proc_decompose_char");
  return parts_are != 0 ? parts_are : real(point, out, room, options, boundary);
}

utf8proc_ssize_t utf8proc_normalize_utf32(utf8proc_int32_t *points, utf8proc_ssize_t count,
                                          utf8proc_option_t options) {
  utf8proc_ssize_t (*real)(utf8proc_int32_t *, utf8proc_ssize_t, utf8proc_option_t);
  *(void **)(&real) = dlsym(RTLD_NEXT, "utf8proc_normalize_utf32");
  return composed_is != 0 ? composed_is : real(points, count, options);
}

#pragma GCC visibility pop

static pkv_status normal(const char *text, const char *want, pkv_error *err) {
  pkv_buffer out;
  pkv_buffer_init(&out, 64, NULL);
  const pkv_status status = pkv_nfc(&out, text, strlen(text), err);
  if (status == PKV_OK) assert_string_equal(out.data, want);
  pkv_buffer_deinit(&out);
  return status;
}

static void test_wrong_answers(void **state) {
  (void)state;
  pkv_error err = {0};
  assert_int_equal(normal("xe\xcc\x81", "x\xc3\xa9", &err), PKV_OK);
  parts_are = 33; /* more than there was room for */
  assert_int_equal(normal("xe\xcc\x81", "", &err), PKV_E_INTERNAL);
  assert_string_equal(err.text, "U+0065 decomposes into 33 code points");
  parts_are = UTF8PROC_ERROR_OVERFLOW;
  assert_int_equal(normal("xe\xcc\x81", "", &err), PKV_E_INTERNAL);
  parts_are = 0;
  composed_is = UTF8PROC_ERROR_INVALIDOPTS;
  assert_int_equal(normal("xe\xcc\x81", "", &err), PKV_E_INTERNAL);
  assert_string_equal(err.text, "the text cannot be composed");
  composed_is = 0;
  assert_int_equal(normal("xe\xcc\x81", "x\xc3\xa9", &err), PKV_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_wrong_answers)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
