/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schema_sampler SAMPLES SEED: reads schemas, one a line, and writes what a model with random
 * logits makes of each. For each schema a line "ok N" and N lines, each a text as JSON; or a line
 * "refused STATUS MESSAGE". Tokens are the bytes and some pieces; bytes that end things are
 * likelier, so that texts end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/grammar_drive.h"

#define MOST_BYTES 6000

static const char *const pieces[] = {
    "\",\"",        "\":",          "{\"",    "\"}",   "},",         "]}",     "\\u00", "\xc3\xa9",
    "\xe4\xb8\x96", "\xf0\x9f\x98", "\x80\"", "name",  "  ",         "\n\t",   "12",    "-1",
    ".5",           "true",         "null",   "false", "[[",         "\", \"", "\\\"",  "2024-0",
    "T1",           ":3",           "Z\"",    "e+",    "\\ud83d\\u",
};
#define PIECES (sizeof pieces / sizeof *pieces)
#define TOKENS (256 + PIECES)

static void token_text(const void *user, int32_t token, const char **bytes, size_t *count) {
  const char *const all = user;
  *bytes = token < 256 ? all + token : pieces[token - 256];
  *count = token < 256 ? 1 : strlen(pieces[token - 256]);
}

static double weight(int32_t token) {
  if (token >= 256) return 2.0;
  return strchr("\"}],", token) != NULL && token != 0 ? 20.0 : token < 0x80 ? 1.0 : 0.5;
}

/* -1: nothing may follow. */
static int32_t choose(const uint64_t *mask, pkv_rng *rng) {
  double total = 0.0;
  int32_t last = -1;
  for (int32_t i = 0; i < (int32_t)TOKENS; i++)
    if ((mask[i / 64] >> (i % 64) & 1) != 0) total += weight(i);
  double target = pkv_rng_uniform(rng) * total;
  for (int32_t i = 0; i < (int32_t)TOKENS; i++) {
    if ((mask[i / 64] >> (i % 64) & 1) == 0) continue;
    last = i;
    target -= weight(i);
    if (target < 0.0) return i;
  }
  return last;
}

/* False: the text was too long to be ended. */
static bool sample(char *text, size_t *bytes, const grammar_drive *d, const char *all,
                   pkv_rng *rng) {
  pkv_machine_state s;
  *bytes = 0;
  if (!pkv_machine_begin(&s, d->machine)) return false;
  while (*bytes < MOST_BYTES) {
    const bool may_end = pkv_machine_may_end(d->machine, s);
    if (may_end && (!pkv_machine_may_go_on(d->machine, s) || pkv_rng_below(rng, 4) == 0))
      return true;
    const uint64_t *const mask = pkv_machine_mask(d->machine, &s);
    if (mask == NULL) return false;
    const int32_t token = choose(mask, rng);
    if (token < 0) return false;
    const char *piece = NULL;
    size_t count = 0;
    token_text(all, token, &piece, &count);
    memcpy(text + *bytes, piece, count);
    *bytes += count;
    if (!pkv_machine_feed(&s, d->machine, piece, count) || s.id == 0) return false;
  }
  return false;
}

static void answer(const char *schema, const pkv_token_trie *trie, const char *all, int samples,
                   pkv_rng *rng) {
  static char text[MOST_BYTES + 64];
  grammar_drive d;
  schema_open(&d, schema, trie);
  if (d.status != PKV_OK) {
    (void)printf("refused %d %s\n", (int)d.status, d.err.text);
    grammar_close(&d);
    return;
  }
  json_t *const texts = json_array();
  for (int i = 0; i < samples; i++) {
    size_t bytes = 0;
    if (sample(text, &bytes, &d, all, rng))
      (void)json_array_append_new(texts, json_stringn(text, bytes));
  }
  (void)printf("ok %zu\n", json_array_size(texts));
  size_t i;
  json_t *one;
  json_array_foreach(texts, i, one) {
    (void)json_dumpf(one, stdout, JSON_ENCODE_ANY);
    (void)putchar('\n');
  }
  json_decref(texts);
  grammar_close(&d);
}

int main(int count, char **arguments) {
  static char line[1 << 20];
  char all[256];
  pkv_token_trie *trie = NULL;
  pkv_rng rng;
  if (count != 3) return 2;
  const int samples = (int)strtol(arguments[1], NULL, 10);
  pkv_rng_init(&rng, strtoull(arguments[2], NULL, 10));
  for (int i = 0; i < 256; i++)
    all[i] = (char)i;
  if (pkv_token_trie_create(&trie, TOKENS, token_text, all, NULL, NULL) != PKV_OK) return 1;
  while (fgets(line, sizeof line, stdin) != NULL) {
    line[strcspn(line, "\n")] = '\0';
    answer(line, trie, all, samples, &rng);
  }
  pkv_token_trie_destroy(trie);
  return 0;
}
