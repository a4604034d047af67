/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_words.h"

#include <string.h>

#include "base/text.h"
#include "cli/bench_sched_cells.h"

/* Moves past one word that ends at `end` or with the text; false where there is none. */
static bool next_word(char word[24], const char **at, char end) {
  const char *const stop = strchr(*at, end);
  const size_t size = stop != NULL ? (size_t)(stop - *at) : strlen(*at);
  if (size == 0 || size >= 24) return false;
  memcpy(word, *at, size);
  word[size] = '\0';
  *at += size;
  return true;
}

static bool number(int32_t *out, char *word, int32_t lo, int32_t hi) {
  const size_t size = strlen(word);
  int64_t value, scale = 1;
  if (size > 1 && word[size - 1] == 'K') {
    word[size - 1] = '\0';
    scale = 1000;
  }
  if (!pkv_parse_i64(&value, word, 0, hi) || value * scale < lo || value * scale > hi) return false;
  *out = (int32_t)(value * scale);
  return true;
}

bool sched_list_numbers(sched_list *out, const char *text, int32_t lo, int32_t hi, bool groups) {
  char word[24];
  out->count = 0;
  for (const char *at = text;;) {
    if (out->count == SCHED_WORDS || !next_word(word, &at, ',')) return false;
    int32_t *const value = &out->value[out->count++];
    if (groups && strcmp(word, "none") == 0)
      *value = SCHED_GROUPS_NONE;
    else if (groups && strcmp(word, "chain") == 0)
      *value = SCHED_GROUPS_CHAIN;
    else if (!number(value, word, lo, hi))
      return false;
    if (*at == '\0') return true;
    at++;
  }
}

bool sched_list_names(sched_list *out, const char *text, const char *(*name)(int32_t),
                      int32_t count) {
  char word[24];
  out->count = 0;
  if (strcmp(text, "all") == 0) {
    for (int32_t i = 0; i < count; i++)
      out->value[out->count++] = i;
    return true;
  }
  for (const char *at = text;;) {
    int32_t i = 0;
    if (out->count == SCHED_WORDS || !next_word(word, &at, ',')) return false;
    while (i < count && strcmp(word, name(i)) != 0)
      i++;
    if (i == count) return false;
    out->value[out->count++] = i;
    if (*at == '\0') return true;
    at++;
  }
}

bool sched_range(int32_t range[2], const char *text, int32_t lo, int32_t hi) {
  char word[24];
  const char *at = text;
  if (!next_word(word, &at, '-') || !number(&range[0], word, lo, hi)) return false;
  range[1] = range[0];
  if (*at == '\0') return true;
  at++;
  return next_word(word, &at, '\0') && number(&range[1], word, range[0], hi);
}
