/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/product_choices.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/status.h"

#define HEAD    "persistentkv products 1\n"
#define NUMBERS 9

pkv_status pkv_product_choices_print(pkv_buffer *out, const char *maker,
                                     const pkv_product_choice *choices, int32_t count,
                                     pkv_error *err) {
  const size_t first = out->size;
  PKV_TRY(pkv_buffer_printf(out, err, HEAD "by %s\n", maker));
  for (int32_t i = 0; i < count; i++) {
    const pkv_product_choice *c = &choices[i];
    PKV_TRY(pkv_buffer_printf(out, err,
                              "%" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %d %d %d %d %d\n",
                              c->n, c->k, c->x_stride, c->y_stride, (int)c->m, (int)c->act,
                              (int)c->y_f32, (int)c->accumulate, (int)c->proposal));
  }
  return pkv_buffer_printf(out, err, "end %d %016" PRIx64 "\n", (int)count,
                           pkv_hash_bytes(out->data + first, out->size - first, 0));
}

/* A line of at most LINE - 1 bytes, copied; false: none, or too long. */
#define LINE 256
static bool next_line(char line[LINE], const char **at, const char *end) {
  const char *const stop = memchr(*at, '\n', (size_t)(end - *at));
  if (stop == NULL || stop - *at >= LINE) return false;
  memcpy(line, *at, (size_t)(stop - *at));
  line[stop - *at] = '\0';
  *at = stop + 1;
  return true;
}

/* Exactly so many numbers, a blank between two. */
static bool read_numbers(int64_t *numbers, int count, char *line) {
  for (int i = 0; i < count; i++) {
    char *const blank = strchr(line, ' ');
    if ((blank == NULL) != (i == count - 1)) return false;
    if (blank != NULL) *blank = '\0';
    if (!pkv_parse_i64(&numbers[i], line, 0, INT64_C(1) << 40)) return false;
    if (blank != NULL) line = blank + 1;
  }
  return true;
}

static bool read_choice(pkv_product_choice *c, char *line) {
  int64_t v[NUMBERS];
  if (!read_numbers(v, NUMBERS, line)) return false;
  const bool sizes = v[0] >= 1 && v[1] >= 1 && v[2] >= v[1] && v[3] >= v[0];
  const bool types = v[5] == PKV_DTYPE_F16 || v[5] == PKV_DTYPE_BF16;
  if (!sizes || !types || v[4] < 1 || v[4] > 1 << 20 || v[6] > 1 || v[7] > 1 ||
      v[8] >= PKV_PRODUCT_PROPOSALS)
    return false;
  *c =
      (pkv_product_choice){v[0],          v[1],          v[2],          v[3],         (int32_t)v[4],
                           (int32_t)v[5], (int32_t)v[6], (int32_t)v[7], (int32_t)v[8]};
  return true;
}

/* The last line, of a text whose bytes before it are those that it was written for. */
static bool ends_right(const char *line, int32_t count, const char *text, const char *before) {
  char right[LINE];
  (void)snprintf(right, sizeof right, "end %d %016" PRIx64, (int)count,
                 pkv_hash_bytes(text, (size_t)(before - text), 0));
  return strcmp(line, right) == 0;
}

static pkv_status read_lines(pkv_product_choice *out, int32_t *count, const char *text,
                             const char *at, const char *end, pkv_error *err) {
  for (int32_t i = 0;; i++) {
    const char *const before = at;
    char line[LINE];
    PKV_CHECK(err, next_line(line, &at, end), PKV_E_FORMAT, "line %d is missing or too long",
              (int)i + 3);
    if (strncmp(line, "end ", 4) == 0) {
      PKV_CHECK(err, ends_right(line, i, text, before) && at == end, PKV_E_FORMAT,
                "count or checksum of %d products is wrong", (int)i);
      *count = i;
      return PKV_OK;
    }
    PKV_CHECK(err, i < PKV_PRODUCT_CHOICES, PKV_E_FORMAT, "more than %d products",
              PKV_PRODUCT_CHOICES);
    PKV_CHECK(err, read_choice(&out[i], line), PKV_E_FORMAT, "line %d is no product", (int)i + 3);
  }
}

pkv_status pkv_product_choices_parse(pkv_product_choice *out, int32_t *count, const char *maker,
                                     const char *text, size_t bytes, pkv_error *err) {
  const char *at = text, *const end = text + bytes;
  char line[LINE];
  *count = 0;
  PKV_CHECK(err, bytes > strlen(HEAD) && memcmp(text, HEAD, strlen(HEAD)) == 0, PKV_E_FORMAT,
            "line 1 is not '%.*s'", (int)strlen(HEAD) - 1, HEAD);
  at += strlen(HEAD);
  PKV_CHECK(err, next_line(line, &at, end) && strncmp(line, "by ", 3) == 0, PKV_E_FORMAT,
            "line 2 does not say by whom");
  PKV_CHECK(err, strcmp(line + 3, maker) == 0, PKV_E_UNSUPPORTED,
            "measured by another library or "
            "device, here is %s",
            maker);
  return read_lines(out, count, text, at, end, err);
}
