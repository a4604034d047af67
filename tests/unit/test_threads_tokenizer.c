/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer under load: eight threads on one object, and long runs of one character on a
 * thread with a stack of 256 KiB, in time that grows with the text and not with its square (LONG
 * is 1 MiB).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/tokenizer_split.h"
#include "pkv/engine.h"
#include "support/sanitized.h"
#include "support/vocab_build.h"

#define SMALL_STACK ((size_t)256 << 10)
/* Under a sanitizer frames are many times larger and everything is slower. */
#if TEST_SANITIZED
#define STACK     (8 * SMALL_STACK)
#define LIMIT_SEC 20.0
#define LONG      (1u << 17)
#else
#define STACK     SMALL_STACK
#define LIMIT_SEC 1.0
#define LONG      (1u << 20)
#endif

/* Of this thread alone: other programs on the machine do not count. */
static double cpu_seconds(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Merges that make long runs collapse, so that the heap has work. */
static pkv_tokenizer *make(const char *rule) {
  vocab_build v;
  vocab_build_init(&v, rule);
  (void)vocab_build_merge(&v, "Z", "Z");
  (void)vocab_build_merge(&v, "ZZ", "ZZ");
  (void)vocab_build_merge(&v, "A", "A");
  (void)vocab_build_merge(&v, " ", " ");
  (void)vocab_build_merge(&v, "\xb8", "\xad");
  (void)vocab_build_merge(&v, "\xe4", "\xb8\xad");
  (void)vocab_build_merge(&v, "t", "h");
  (void)vocab_build_merge(&v, "th", "e");
  (void)vocab_build_merge(&v, " ", "the");
  (void)vocab_build_token(&v, "<|im_start|>", 3);
  (void)vocab_build_token(&v, "<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<|", 3);
  (void)vocab_build_token(&v, "<|im_end|>", 3);
  pkv_tokenizer *t = vocab_build_open(&v);
  vocab_build_deinit(&v);
  return t;
}

typedef struct job {
  const pkv_tokenizer *t;
  const char *text;
  size_t bytes;
  uint32_t flags;
  int32_t *ids;
  size_t count;
  pkv_status status;
  pkv_error err;
  double seconds;
} job;

static void *run(void *arg) {
  job *j = arg;
  const double begin = cpu_seconds();
  j->status = pkv_tokenizer_encode(j->ids, j->bytes + 2, &j->count, j->t, j->text, j->bytes,
                                   j->flags, &j->err);
  j->seconds = cpu_seconds() - begin;
  return NULL;
}

static void on_small_stack(void *(*fn)(void *), void *arg) {
  pthread_attr_t attr;
  pthread_t thread;
  assert_int_equal(pthread_attr_init(&attr), 0);
  assert_int_equal(pthread_attr_setstacksize(&attr, STACK), 0);
  assert_int_equal(pthread_create(&thread, &attr, fn, arg), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  (void)pthread_attr_destroy(&attr);
}

/* `bytes` bytes that repeat a pattern. */
static char *repeat(const char *pattern, size_t bytes) {
  char *text = malloc(bytes);
  assert_non_null(text);
  const size_t n = strlen(pattern);
  for (size_t i = 0; i < bytes; i++)
    text[i] = pattern[i % n];
  return text;
}

static void check_round_trip(const job *j) {
  size_t at = 0;
  for (size_t i = 0; i < j->count; i++) {
    const char *piece;
    size_t n;
    assert_int_equal(pkv_tokenizer_text(&piece, &n, j->t, j->ids[i], 1, NULL), PKV_OK);
    assert_true(at + n <= j->bytes);
    if (memcmp(j->text + at, piece, n) != 0) fail_msg("other bytes at %zu", at);
    at += n;
  }
  assert_int_equal(at, j->bytes);
}

/* Encodes on the small stack; returns the seconds. */
static double encode_run(const pkv_tokenizer *t, const char *name, char *text, size_t bytes) {
  job j = {t,
           text,
           bytes,
           PKV_TEXT_PARSE_SPECIAL,
           malloc((bytes + 2) * sizeof(int32_t)),
           0,
           PKV_E_INTERNAL,
           {0},
           0.0};
  assert_non_null(j.ids);
  on_small_stack(run, &j);
  if (j.status != PKV_OK) fail_msg("%s: %s", name, j.err.text);
  check_round_trip(&j);
  if (j.seconds > LIMIT_SEC)
    fail_msg("%s: %zu bytes took %.2f s, at most %.1f s", name, bytes, j.seconds, LIMIT_SEC);
  free(j.ids);
  free(text);
  return j.seconds;
}

static const struct {
  const char *name, *pattern;
  size_t bytes;
} runs[] = {
    {"131072 Z", "Z", 131072},
    {"26000 CJK", "\xe4\xb8\xad", 78000},
    {"43000 A", "A", 43000},
    {"a long run of Z", "Z", LONG},
    {"a long run of blanks", " ", LONG},
    {"a long run of newlines", "\n", LONG},
    {"a long run of blanks and newlines", " \n\n \r\t", LONG},
    {"a long run of digits", "0123456789", LONG},
    {"a long run of punctuation", "!?", LONG},
    {"a long run of quotes", "'", LONG},
    {"a long run of <", "<", LONG},
    {"a long run of bad bytes", "\xff\x80", LONG},
    {"a long run of U+180E", "\xe1\xa0\x8e", LONG / 3 * 3},
    {"a long run of long s", "'\xc5\xbf", LONG / 3 * 3},
    {"mixed",
     "the quick 123 \xe4\xb8\xad\xe6\x96\x87 don't  \n\n stop<|im_end|>! \xff\t\xf0\x9f\x98\x80",
     LONG},
};

static void test_long_runs(void **state) {
  (void)state;
  static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe"};
  for (size_t r = 0; r < 3; r++) {
    pkv_tokenizer *t = make(rules[r]);
    double worst = 0.0;
    const char *name = "";
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
      const double s =
          encode_run(t, runs[i].name, repeat(runs[i].pattern, runs[i].bytes), runs[i].bytes);
      if (s > worst) {
        worst = s;
        name = runs[i].name;
      }
    }
    print_message("%s: the slowest is %s, %.3f s\n", rules[r], name, worst);
    pkv_tokenizer_destroy(t);
  }
}

/* A random mixture with every kind of character in it. */
static void test_random_text(void **state) {
  (void)state;
  static const char *const parts[] = {"the ",
                                      "Z",
                                      " ",
                                      "\n",
                                      "\r\n",
                                      "'s",
                                      "12",
                                      "!",
                                      "\t",
                                      "A",
                                      "\xe4\xb8\xad",
                                      "\xf0\x9f\x98\x80",
                                      "\xff",
                                      "<|im_end|>",
                                      "\xc2\xa0",
                                      "\xe1\xa0\x8e",
                                      "don't"};
  const size_t size = LONG;
  char *text = malloc(size);
  assert_non_null(text);
  pkv_rng rng;
  pkv_rng_init(&rng, 9);
  for (size_t at = 0; at < size;) {
    const char *part = parts[pkv_rng_below(&rng, sizeof parts / sizeof parts[0])];
    const size_t n = strlen(part) < size - at ? strlen(part) : size - at;
    memcpy(text + at, part, n);
    at += n;
  }
  pkv_tokenizer *t = make("llama-bpe");
  print_message("random text: %.3f s\n", encode_run(t, "random text", text, size));
  pkv_tokenizer_destroy(t);
}

typedef struct walk {
  pkv_splitter *splitter;
  const char *text;
  size_t bytes, words;
  pkv_status status;
  double seconds;
} walk;

static void *walk_words(void *arg) {
  walk *w = arg;
  pkv_split_cursor *c;
  const double begin = cpu_seconds();
  w->status = pkv_split_cursor_create(&c, w->splitter, NULL);
  if (w->status != PKV_OK) return NULL;
  pkv_split_cursor_reset(c, w->text, w->bytes);
  size_t start, bytes = 1;
  while (bytes > 0 && w->status == PKV_OK) {
    w->status = pkv_split_next(&start, &bytes, c, NULL);
    w->words += bytes > 0;
  }
  pkv_split_cursor_destroy(c);
  w->seconds = cpu_seconds() - begin;
  return NULL;
}

/* Where there is no machine code the interpreter must hold the same promises. */
static void test_interpreted_runs(void **state) {
  (void)state;
  static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe"};
  for (size_t r = 0; r < 3; r++) {
    const pkv_split_rule *rule = pkv_split_rule_find((pkv_span){rules[r], strlen(rules[r])});
    walk w[2] = {0};
    for (int compiled = 0; compiled < 2; compiled++)
      assert_int_equal(pkv_splitter_create(&w[compiled].splitter, rule, compiled, NULL, NULL),
                       PKV_OK);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
      char *text = repeat(runs[i].pattern, runs[i].bytes);
      for (int k = 0; k < 2; k++) {
        w[k].text = text;
        w[k].bytes = runs[i].bytes;
        w[k].words = 0;
        on_small_stack(walk_words, &w[k]);
        if (w[k].status != PKV_OK) fail_msg("%s: %s", rules[r], runs[i].name);
        if (w[k].seconds > LIMIT_SEC)
          fail_msg("%s: %s took %.2f s", rules[r], runs[i].name, w[k].seconds);
      }
      if (w[0].words != w[1].words)
        fail_msg("%s: %s: %zu words interpreted, %zu compiled", rules[r], runs[i].name, w[0].words,
                 w[1].words);
      free(text);
    }
    pkv_splitter_destroy(w[0].splitter);
    pkv_splitter_destroy(w[1].splitter);
  }
}

/* ------------------------------------------------------------------------------------------
 * Threads
 * ------------------------------------------------------------------------------------------ */

#define THREADS 8
#define TEXTS   16
#define ROUNDS  40

static char texts[TEXTS][300];
static int32_t wanted[TEXTS][302];
static size_t wanted_count[TEXTS];

static void *share(void *arg) {
  const pkv_tokenizer *t = arg;
  size_t wrong = 0;
  for (size_t i = 0; i < ROUNDS * TEXTS; i++) {
    const size_t k = i % TEXTS;
    int32_t ids[302];
    size_t count = 0;
    const pkv_status status =
        pkv_tokenizer_encode(ids, 302, &count, t, texts[k], sizeof texts[k], 1u << (i & 1), NULL);
    if (status != PKV_OK || count != wanted_count[k] ||
        memcmp(ids, wanted[k], count * sizeof ids[0]) != 0)
      wrong++;
    const char *text;
    size_t bytes;
    if (pkv_tokenizer_text(&text, &bytes, t, ids[0], 1, NULL) != PKV_OK) wrong++;
  }
  return (void *)wrong;
}

static void test_threads_share_one(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 4);
  pkv_tokenizer *t = make("smollm");
  for (size_t k = 0; k < TEXTS; k++) {
    for (size_t i = 0; i < sizeof texts[k]; i++)
      texts[k][i] = "ZA the 12\n!\xe4\xb8\xad\xff"[pkv_rng_below(&rng, 15)];
    assert_int_equal(pkv_tokenizer_encode(wanted[k], 302, &wanted_count[k], t, texts[k],
                                          sizeof texts[k], 0, NULL),
                     PKV_OK);
  }
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, share, t), 0);
  for (int i = 0; i < THREADS; i++) {
    void *wrong = NULL;
    assert_int_equal(pthread_join(threads[i], &wrong), 0);
    assert_int_equal((size_t)wrong, 0);
  }
  pkv_tokenizer_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_long_runs),
      cmocka_unit_test(test_random_text),
      cmocka_unit_test(test_interpreted_runs),
      cmocka_unit_test(test_threads_share_one),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
