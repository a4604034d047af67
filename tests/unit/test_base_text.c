/* SPDX-License-Identifier: Apache-2.0 */
/* Number parsing, the bounded buffer, files, UTF-8. */
#include "base/text.h"

#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/test_alloc.h"

static void parse_integers(void **state) {
  (void)state;
  const struct {
    const char *text;
    int64_t lo, hi;
    int ok;
    int64_t value;
  } cases[] = {
      {"0", INT64_MIN, INT64_MAX, 1, 0},
      {"-0", INT64_MIN, INT64_MAX, 1, 0},
      {"007", 0, 10, 1, 7},
      {"9223372036854775807", INT64_MIN, INT64_MAX, 1, INT64_MAX},
      {"-9223372036854775808", INT64_MIN, INT64_MAX, 1, INT64_MIN},
      {"000000000000000000000000000000012", 0, 100, 1, 12},
      {"9223372036854775808", INT64_MIN, INT64_MAX, 0, 0},
      {"-9223372036854775809", INT64_MIN, INT64_MAX, 0, 0},
      {"99999999999999999999999", INT64_MIN, INT64_MAX, 0, 0},
      {"18446744073709551617", INT64_MIN, INT64_MAX, 0, 0},
      {"10", 0, 10, 1, 10},
      {"11", 0, 10, 0, 0},
      {"-1", 0, 10, 0, 0},
      {"-5", -5, -5, 1, -5},
      {"", INT64_MIN, INT64_MAX, 0, 0},
      {"-", INT64_MIN, INT64_MAX, 0, 0},
      {"+", INT64_MIN, INT64_MAX, 0, 0},
      {"+1", INT64_MIN, INT64_MAX, 0, 0},
      {"--1", INT64_MIN, INT64_MAX, 0, 0},
      {" 1", INT64_MIN, INT64_MAX, 0, 0},
      {"1 ", INT64_MIN, INT64_MAX, 0, 0},
      {"1\n", INT64_MIN, INT64_MAX, 0, 0},
      {"\t1", INT64_MIN, INT64_MAX, 0, 0},
      {"0x10", INT64_MIN, INT64_MAX, 0, 0},
      {"1e3", INT64_MIN, INT64_MAX, 0, 0},
      {"1.0", INT64_MIN, INT64_MAX, 0, 0},
      {"1_000", INT64_MIN, INT64_MAX, 0, 0},
      {"1,000", INT64_MIN, INT64_MAX, 0, 0},
      {"\xd9\xa1", INT64_MIN, INT64_MAX, 0, 0},
      {NULL, INT64_MIN, INT64_MAX, 0, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int64_t v = 77;
    const bool ok = pkv_parse_i64(&v, cases[i].text, cases[i].lo, cases[i].hi);
    if (ok != cases[i].ok || v != (cases[i].ok ? cases[i].value : 77))
      fail_msg("\"%s\": %d, %lld; expected %d, %lld", cases[i].text ? cases[i].text : "NULL", ok,
               (long long)v, cases[i].ok, (long long)cases[i].value);
  }
}

static void parse_reals(void **state) {
  (void)state;
  const struct {
    const char *text;
    double lo, hi;
    int ok;
    double value;
  } cases[] = {
      {"0", -1e308, 1e308, 1, 0.0},
      {"1.5", 0, 2, 1, 1.5},
      {"-1.5", -2, 2, 1, -1.5},
      {".5", 0, 1, 1, 0.5},
      {"5.", 0, 10, 1, 5.0},
      {"1e3", 0, 1e4, 1, 1000.0},
      {"1E-3", 0, 1, 1, 1e-3},
      {"1e+3", 0, 1e4, 1, 1000.0},
      {"1e-999", 0, 1, 1, 0.0},
      {"0.1", 0, 1, 1, 0.1},
      {"1.7976931348623157e308", 0, 1.7976931348623157e308, 1, 1.7976931348623157e308},
      {"1e999", -INFINITY, INFINITY, 0, 0},
      {"-1e999", -INFINITY, INFINITY, 0, 0},
      {"nan", -INFINITY, INFINITY, 0, 0},
      {"inf", -INFINITY, INFINITY, 0, 0},
      {"-inf", -INFINITY, INFINITY, 0, 0},
      {"infinity", -INFINITY, INFINITY, 0, 0},
      {"NaN(1)", -INFINITY, INFINITY, 0, 0},
      {"0x10", -1e9, 1e9, 0, 0},
      {"0x1p3", -1e9, 1e9, 0, 0},
      {" 1", -1e9, 1e9, 0, 0},
      {"1 ", -1e9, 1e9, 0, 0},
      {"+1", -1e9, 1e9, 0, 0},
      {"+", -1e9, 1e9, 0, 0},
      {"-", -1e9, 1e9, 0, 0},
      {"", -1e9, 1e9, 0, 0},
      {".", -1e9, 1e9, 0, 0},
      {"-.", -1e9, 1e9, 0, 0},
      {"e5", -1e9, 1e9, 0, 0},
      {"1e", -1e9, 1e9, 0, 0},
      {"1e+", -1e9, 1e9, 0, 0},
      {"1.2.3", -1e9, 1e9, 0, 0},
      {"1,5", -1e9, 1e9, 0, 0},
      {"2.1", 0, 2, 0, 0},
      {"-0.1", 0, 2, 0, 0},
      {"1f", -1e9, 1e9, 0, 0},
      {NULL, -1e9, 1e9, 0, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    double v = 77.0;
    const bool ok = pkv_parse_f64(&v, cases[i].text, cases[i].lo, cases[i].hi);
    if (ok != cases[i].ok || v != (cases[i].ok ? cases[i].value : 77.0))
      fail_msg("\"%s\": %d, %g; expected %d, %g", cases[i].text ? cases[i].text : "NULL", ok, v,
               cases[i].ok, cases[i].value);
  }
  double v;
  assert_false(pkv_parse_f64(&v, "1", NAN, NAN));
}

static void parse_in_other_locale(void **state) {
  (void)state;
  const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
  const char *set = NULL;
  for (size_t i = 0; i < 4 && set == NULL; i++)
    set = setlocale(LC_ALL, names[i]);
  if (set == NULL) {
    print_message("skipped: no locale with a decimal comma is installed\n");
    skip();
  }
  double v = 0.0;
  const bool point = pkv_parse_f64(&v, "1.5", 0, 2), comma = pkv_parse_f64(&v, "1,5", 0, 2);
  setlocale(LC_ALL, "C");
  assert_true(point && !comma && v == 1.5);
}

static void buffer_grows(void **state) {
  (void)state;
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  pkv_buffer b;
  pkv_error err;
  pkv_buffer_init(&b, 1000, &a);
  assert_string_equal(b.data, "");
  pkv_buffer_clear(&b);
  assert_int_equal(pkv_buffer_append(&b, NULL, 0, &err), PKV_OK);
  assert_string_equal(b.data, "");
  for (int i = 0; i < 250; i++)
    assert_int_equal(pkv_buffer_printf(&b, &err, "%04d", i), PKV_OK);
  assert_int_equal(b.size, 1000);
  assert_int_equal(strlen(b.data), 1000);
  assert_memory_equal(b.data + 996, "0249", 4);
  assert_int_equal(pkv_buffer_append(&b, "x", 1, &err), PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "limit of 1000"));
  assert_int_equal(pkv_buffer_printf(&b, &err, "%d", 1), PKV_E_LIMIT);
  assert_int_equal(pkv_buffer_append(&b, "x", SIZE_MAX, &err), PKV_E_LIMIT);
  assert_int_equal(b.size, 1000);
  pkv_buffer_clear(&b);
  assert_string_equal(b.data, "");
  assert_int_equal(pkv_buffer_append(&b, "a\0b", 3, &err), PKV_OK);
  assert_int_equal(b.size, 3);
  assert_memory_equal(b.data, "a\0b", 4);
  pkv_buffer_deinit(&b);
  assert_string_equal(b.data, "");
  pkv_buffer_deinit(&b);
  pkv_buffer_init(&b, SIZE_MAX, &a);
  assert_int_equal(pkv_buffer_append(&b, "x", SIZE_MAX - 1, &err), PKV_E_NOMEM);
  pkv_buffer_deinit(&b);
  pkv_buffer_init(&b, 0, &a);
  assert_int_equal(pkv_buffer_append(&b, "x", 1, &err), PKV_E_LIMIT);
  pkv_buffer_deinit(&b);
  test_alloc_finish(&ta);
}

static pkv_status fill_buffer(void *ctx, const pkv_allocator *a) {
  pkv_buffer b;
  pkv_buffer_init(&b, 1 << 20, a);
  pkv_status status = PKV_OK;
  for (int i = 0; i < 100 && status == PKV_OK; i++) {
    const size_t before = b.size;
    status = pkv_buffer_printf(&b, NULL, "%s", (const char *)ctx);
    if (status != PKV_OK && (b.size != before || b.data[before] != '\0')) status = PKV_E_INTERNAL;
  }
  pkv_buffer_deinit(&b);
  return status;
}

static void buffer_torture(void **state) {
  (void)state;
  assert_true(test_alloc_torture(fill_buffer, (void *)(uintptr_t) "some text") >= 4);
}

static void files(void **state) {
  (void)state;
  static const char path[] = PKV_BINARY_DIR "/test_base_text.tmp";
  static char content[50000];
  pkv_rng rng;
  pkv_rng_init(&rng, 8);
  for (size_t i = 0; i < sizeof content; i++)
    content[i] = (char)pkv_rng_below(&rng, 256);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(content, 1, sizeof content, f), sizeof content);
  fclose(f);
  pkv_buffer b;
  pkv_error err;
  pkv_buffer_init(&b, sizeof content, NULL);
  assert_int_equal(pkv_buffer_append(&b, "old", 3, &err), PKV_OK);
  assert_int_equal(pkv_buffer_read_file(&b, path, &err), PKV_OK);
  assert_int_equal(b.size, sizeof content);
  assert_memory_equal(b.data, content, sizeof content);
  pkv_buffer_deinit(&b);
  pkv_buffer_init(&b, sizeof content - 1, NULL);
  assert_int_equal(pkv_buffer_read_file(&b, path, &err), PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "more than 49999 bytes"));
  assert_int_equal(b.size, 0);
  remove(path);
  assert_int_equal(pkv_buffer_read_file(&b, path, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "test_base_text.tmp"));
  assert_int_equal(pkv_buffer_read_file(&b, PKV_BINARY_DIR, &err), PKV_E_IO); /* a folder */
  assert_int_equal(pkv_buffer_read_file(&b, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_buffer_read_file(&b, "/proc/self/status", &err), PKV_OK); /* claims size 0 */
  assert_true(b.size > 100);
  pkv_buffer_deinit(&b);
}

/* The standard's own definition: decode each scalar value's only well-formed spelling. */
static size_t spell(char out[4], uint32_t c) {
  if (c < 0x80) {
    out[0] = (char)c;
    return 1;
  }
  const size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (size_t i = n; i-- > 1; c >>= 6)
    out[i] = (char)(0x80 | (c & 63));
  out[0] = (char)((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | c);
  return n;
}

static void utf8_all_scalars(void **state) {
  (void)state;
  for (uint32_t c = 0; c < 0x110000; c++) {
    char s[4];
    const size_t n = spell(s, c);
    const bool valid = c < 0xd800 || c > 0xdfff;
    if (pkv_utf8_valid(s, n) != valid) fail_msg("U+%04X: %d expected", c, valid);
    for (size_t cut = 1; cut < n; cut++) {
      if (pkv_utf8_valid(s, cut)) fail_msg("U+%04X cut to %zu bytes is valid", c, cut);
      /* Held back only while it can still become a character. */
      const size_t held = valid || cut == 1 ? cut : 0;
      if (pkv_utf8_incomplete_tail(s, cut) != held)
        fail_msg("U+%04X cut to %zu: %zu held, expected %zu", c, cut,
                 pkv_utf8_incomplete_tail(s, cut), held);
    }
    if (pkv_utf8_incomplete_tail(s, n) != 0) fail_msg("U+%04X whole: held back", c);
  }
}

static void utf8_table(void **state) {
  (void)state;
  const struct {
    const char *bytes;
    size_t count;
    int valid;
    size_t tail;
  } cases[] = {
      {"", 0, 1, 0},
      {"abc", 3, 1, 0},
      {"a\0b", 3, 1, 0},
      {"\xc3\xa9", 2, 1, 0},
      {"\xc3", 1, 0, 1},
      {"ab\xe2\x82", 4, 0, 2},
      {"ab\xf0\x9f\x98", 5, 0, 3},
      {"\x80", 1, 0, 0},
      {"\x80\x80\x80\x80", 4, 0, 0},
      {"\xc0\x80", 2, 0, 0}, /* overlong */
      {"\xc1", 1, 0, 0},     /* never a lead */
      {"\xe0\x80", 2, 0, 0}, /* overlong beginning */
      {"\xe0\xa0", 2, 0, 2},
      {"\xe0\x80\x80", 3, 0, 0},
      {"\xf0\x80\x80\x80", 4, 0, 0},
      {"\xf0\x8f", 2, 0, 0},
      {"\xed\xa0\x80", 3, 0, 0}, /* surrogate */
      {"\xed\x9f", 2, 0, 2},
      {"\xf4\x90\x80\x80", 4, 0, 0}, /* beyond U+10FFFF */
      {"\xf4\x8f\xbf", 3, 0, 3},
      {"\xf5", 1, 0, 0},
      {"\xff", 1, 0, 0},
      {"\xc3\xa9\xa9", 3, 0, 0}, /* one continuation too many */
      {"\xc3\x41", 2, 0, 0},     /* the lead is broken, the tail is whole */
      {"\xe2\x82\x41\xe2", 4, 0, 1},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    /* An exact copy on the heap: a read beyond the end shows under the address sanitizer. */
    char *copy = malloc(cases[i].count + 1);
    assert_non_null(copy);
    char *bytes = copy + 1;
    memcpy(bytes, cases[i].bytes, cases[i].count);
    const int valid = pkv_utf8_valid(bytes, cases[i].count);
    const size_t tail = pkv_utf8_incomplete_tail(bytes, cases[i].count);
    free(copy);
    if (valid != cases[i].valid || tail != cases[i].tail)
      fail_msg("case %zu: valid %d, tail %zu; expected %d, %zu", i, valid, tail, cases[i].valid,
               cases[i].tail);
  }
}

/* Valid text cut anywhere, the held tail put before the next piece, is valid throughout. */
static void utf8_streaming(void **state) {
  (void)state;
  static const char text[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z\xed\x9f\xbf\xf4\x8f\xbf\xbf";
  const size_t n = sizeof text - 1;
  for (size_t cut = 0; cut <= n; cut++) {
    const size_t tail = pkv_utf8_incomplete_tail(text, cut);
    assert_true(tail <= 3 && tail <= cut);
    assert_true(pkv_utf8_valid(text, cut - tail));
    assert_true(pkv_utf8_valid(text + cut - tail, n - (cut - tail)));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(parse_integers),        cmocka_unit_test(parse_reals),
      cmocka_unit_test(parse_in_other_locale), cmocka_unit_test(buffer_grows),
      cmocka_unit_test(buffer_torture),        cmocka_unit_test(files),
      cmocka_unit_test(utf8_all_scalars),      cmocka_unit_test(utf8_table),
      cmocka_unit_test(utf8_streaming),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
