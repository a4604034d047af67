/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_rows.h"

#include <string.h>

#include "base/text.h"

/* The number up to the first character of `ends`, which *at moves behind; *end is that character,
   '\0' at the end. */
static bool number(int64_t *out, const char **at, const char *ends, char *end, int64_t low,
                   int64_t high) {
  char text[16];
  const size_t size = strcspn(*at, ends);
  if (size == 0 || size >= sizeof text) return false;
  memcpy(text, *at, size);
  text[size] = '\0';
  *end = (*at)[size];
  *at += size + (*end != '\0');
  return pkv_parse_i64(out, text, low, high);
}

static pkv_status add(bench_row *rows, int32_t *count, bench_row row, pkv_error *err) {
  PKV_CHECK(err, *count < BENCH_MAX_ROWS, PKV_E_LIMIT, "more than %d rows", BENCH_MAX_ROWS);
  rows[(*count)++] = row;
  return PKV_OK;
}

static pkv_status add_groups(bench_row *rows, int32_t *count, int64_t groups, int64_t each,
                             int64_t root, int64_t prefix, int64_t suffix, pkv_error *err) {
  const int32_t first = *count;
  for (int64_t g = 0; g < groups; g++) {
    const int32_t group_row = *count;
    for (int64_t i = 0; i < each; i++) {
      const bench_row row = {(int32_t)(root + prefix + suffix), first, (int32_t)root, group_row,
                             (int32_t)(root + prefix)};
      PKV_TRY(add(rows, count, row, err));
    }
  }
  return PKV_OK;
}

pkv_status bench_rows_word(bench_row *rows, int32_t *count, const char *word, pkv_error *err) {
  int64_t n[5] = {0}; /* root, groups, rows, prefix, suffix */
  const char *at = word;
  char end = '\0';
  bool good = true;
  if (strchr(word, '/') != NULL) good = number(&n[0], &at, "/", &end, 0, BENCH_MAX_LENGTH);
  if (good && strchr(at, '+') != NULL) {
    good = number(&n[1], &at, "x+", &end, 1, BENCH_MAX_ROWS) && end == 'x' &&
           number(&n[2], &at, "x+", &end, 1, BENCH_MAX_ROWS) && end == 'x' &&
           number(&n[3], &at, "x+", &end, 0, BENCH_MAX_LENGTH) && end == '+' &&
           number(&n[4], &at, "", &end, 0, BENCH_MAX_LENGTH) &&
           n[0] + n[3] + n[4] <= BENCH_MAX_LENGTH;
    if (good) return add_groups(rows, count, n[1], n[2], n[0], n[3], n[4], err);
  } else if (good && at == word) {
    int64_t length, times = 1;
    good = number(&length, &at, "x", &end, 0, BENCH_MAX_LENGTH) &&
           (end != 'x' || number(&times, &at, "", &end, 1, BENCH_MAX_ROWS));
    for (int64_t i = 0; good && i < times; i++) {
      const bench_row row = {(int32_t)length, *count, 0, *count, 0};
      PKV_TRY(add(rows, count, row, err));
    }
    if (good) return PKV_OK;
  }
  return PKV_FAIL(err, PKV_E_INVALID,
                  "'%.60s' is no length from 0 to %d, no such with x1..x%d behind it, and no "
                  "[ROOT/]GROUPSxROWSxPREFIX+SUFFIX",
                  word, BENCH_MAX_LENGTH, BENCH_MAX_ROWS);
}
