/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of base/text.h: UTF-8 and number parsing against slower twins, and the bounded
 * buffer against its promises. A target aborts on a broken promise; the example for the others.
 */
#include "base/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Decodes by arithmetic and judges the code point, not the bytes. Bytes used, or 0. */
static size_t decode(const uint8_t *s, size_t count) {
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (s[0] < 0x80) return 1;
  const size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
  if (s[0] < 0xc0 || s[0] > 0xf7 || length > count) return 0;
  uint32_t code = s[0] & (0x7fu >> length);
  for (size_t i = 1; i < length; i++) {
    if ((s[i] & 0xc0) != 0x80) return 0;
    code = code << 6 | (s[i] & 0x3fu);
  }
  if (code < least[length] || code > 0x10ffff) return 0;
  return code >= 0xd800 && code <= 0xdfff ? 0 : length;
}

static void check_utf8(const uint8_t *data, size_t size) {
  size_t good = 0;
  while (good < size) {
    const size_t n = decode(data + good, size - good);
    if (n == 0) break;
    good += n;
  }
  REQUIRE(pkv_utf8_valid((const char *)data, size) == (good == size));
  /* A cut inside a good text: what is held back is exactly what makes the rest good. */
  for (size_t cut = 0; cut <= good && cut <= 64; cut++) {
    const size_t tail = pkv_utf8_incomplete_tail((const char *)data, cut);
    REQUIRE(tail <= 3 && tail <= cut);
    REQUIRE(pkv_utf8_valid((const char *)data, cut - tail));
  }
}

static void check_numbers(const char *text) {
  int64_t value = 77;
  const size_t digits = strspn(text + (text[0] == '-'), "0123456789");
  const bool plain = digits > 0 && text[(text[0] == '-') + digits] == '\0';
  errno = 0;
  const long long twin = strtoll(text, NULL, 10);
  const bool fits = plain && errno == 0;
  REQUIRE(pkv_parse_i64(&value, text, INT64_MIN, INT64_MAX) == fits);
  REQUIRE(value == (fits ? (int64_t)twin : 77));
  value = 77;
  REQUIRE(pkv_parse_i64(&value, text, -5, 5) == (fits && twin >= -5 && twin <= 5));

  double real = 77.0;
  if (pkv_parse_f64(&real, text, -1e300, 1e300)) {
    REQUIRE(real >= -1e300 && real <= 1e300);
    REQUIRE(strspn(text, "0123456789.eE+-") == strlen(text));
  } else {
    REQUIRE(real >= 77.0 && real <= 77.0);
  }
}

static void check_buffer(const uint8_t *data, size_t size) {
  pkv_buffer buffer;
  pkv_error err;
  pkv_buffer_init(&buffer, 100, NULL);
  for (size_t at = 0; at < size;) {
    const size_t n = data[at] < size - at ? data[at] : size - at;
    const size_t before = buffer.size;
    const pkv_status status = pkv_buffer_append(&buffer, data + at, n, &err);
    REQUIRE(status == (before + n <= 100 ? PKV_OK : PKV_E_LIMIT));
    REQUIRE(buffer.size == (status == PKV_OK ? before + n : before));
    REQUIRE(buffer.data[buffer.size] == '\0');
    REQUIRE(status != PKV_OK || memcmp(buffer.data + before, data + at, n) == 0);
    at += n + 1;
  }
  pkv_buffer_deinit(&buffer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  check_utf8(data, size);
  char *text = malloc(size + 1);
  if (text == NULL) return 0;
  if (size > 0) memcpy(text, data, size);
  text[size] = '\0';
  check_numbers(text);
  free(text);
  check_buffer(data, size);
  return 0;
}
