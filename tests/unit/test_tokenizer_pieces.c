/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer by scores on small made vocabularies: joining against a plain quadratic version,
 * spaces, bytes, special tokens, files that are wrong, long texts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/tokenizer_pieces.h"
#include "pkv/engine.h"
#include "support/sanitized.h"
#include "support/test_alloc.h"
#include "support/vocab_build.h"

#define SPACE   "\xe2\x96\x81"
#define MAX_IDS 4096

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER = 4, UNUSED = 5, BYTE = 6 };

/* A vocabulary with its scores; what a test changes before `finish`. */
typedef struct made {
  vocab_build v;
  float scores[8192];
  size_t score_count; /* 0: as many as tokens */
  bool no_scores;
} made;

static int32_t add(made *m, const char *text, int32_t type, float score) {
  const int32_t id = vocab_build_token_raw(&m->v, text, strlen(text), type);
  m->scores[id] = score;
  return id;
}

static void add_bytes(made *m) {
  for (int b = 0; b < 256; b++) {
    char text[8];
    (void)snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
    (void)add(m, text, BYTE, 0.0f);
  }
}

static void begin(made *m) {
  memset(m, 0, sizeof *m);
  vocab_build_init_empty(&m->v, NULL);
  gguf_build_deinit(&m->v.file); /* again, with another model */
  gguf_build_init(&m->v.file);
  gguf_build_string(&m->v.file, "tokenizer.ggml.model", "llama");
}

static void finish(made *m) {
  const size_t count = m->score_count > 0 ? m->score_count : m->v.tokens.count;
  if (!m->no_scores)
    gguf_build_array(&m->v.file, "tokenizer.ggml.scores", PKV_GGUF_F32, m->scores, count,
                     count * sizeof(float));
  vocab_build_finish(&m->v);
}

static pkv_tokenizer *open_made(made *m) {
  finish(m);
  return vocab_build_open(&m->v);
}

static void refused(made *m, pkv_status status, const char *part) {
  test_alloc memory;
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  pkv_tokenizer *t = NULL;
  pkv_error err = {0};
  finish(m);
  const pkv_status got = vocab_build_try(&t, &m->v, &a, &err);
  if (got != status || strstr(err.text, part) == NULL)
    fail_msg("%s \"%s\", want %s with \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(status), part);
  assert_null(t);
  test_alloc_finish(&memory);
  vocab_build_deinit(&m->v);
}

static void expect_bytes(const pkv_tokenizer *t, const char *text, size_t bytes, uint32_t flags,
                         const int32_t *want, size_t count) {
  int32_t ids[MAX_IDS];
  size_t got = 0;
  pkv_error err = {0};
  if (pkv_tokenizer_encode(ids, MAX_IDS, &got, t, text, bytes, flags, &err) != PKV_OK)
    fail_msg("\"%s\": %s", text, err.text);
  for (size_t i = 0; i < got || i < count; i++)
    if (got != count || ids[i] != want[i])
      fail_msg("\"%s\": %zu tokens, want %zu; at %zu %d, want %d", text, got, count, i,
               i < got ? ids[i] : -1, i < count ? want[i] : -1);
}

#define EXPECT(t, text, flags, ...)                                                                \
  expect_bytes(t, text, strlen(text), flags, (const int32_t[]){__VA_ARGS__},                       \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void test_scores_decide(void **state) {
  (void)state;
  made m;
  begin(&m);
  gguf_build_bool(&m.v.file, "tokenizer.ggml.add_space_prefix", false);
  const int32_t a = add(&m, "a", NORMAL, -9.0f), b = add(&m, "b", NORMAL, -9.0f);
  const int32_t c = add(&m, "c", NORMAL, -9.0f), ab = add(&m, "ab", NORMAL, -3.0f);
  const int32_t bc = add(&m, "bc", NORMAL, -2.0f), abc = add(&m, "abcc", NORMAL, 5.0f);
  const int32_t aa = add(&m, "aa", NORMAL, -1.0f), space = add(&m, SPACE, NORMAL, -9.0f);
  const int32_t word = add(&m, SPACE "ab", NORMAL, -4.0f);
  pkv_tokenizer *t = open_made(&m);
  EXPECT(t, "abc", 0, a, bc); /* bc has the better score */
  EXPECT(t, "ab", 0, ab);
  EXPECT(t, "aaa", 0, aa, a); /* equal scores: the leftmost */
  EXPECT(t, "aaab", 0, aa, ab);
  EXPECT(t, "abcc", 0, a, bc, c); /* no two neighbours are ever "abcc" */
  EXPECT(t, "ab ab", 0, ab, word);
  EXPECT(t, "ab" SPACE "ab", 0, ab, word); /* the mark itself means a space */
  EXPECT(t, " b", 0, space, b);
  assert_true(abc >= 0);
  expect_bytes(t, "", 0, 0, NULL, 0);
  const char *text;
  size_t bytes;
  assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, word, 0, NULL), PKV_OK);
  assert_int_equal(bytes, 3);
  assert_memory_equal(text, " ab", 3);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&m.v);
}

static void test_bytes_and_unknown(void **state) {
  (void)state;
  for (int with_unknown = 0; with_unknown < 2; with_unknown++) {
    made m;
    begin(&m);
    gguf_build_bool(&m.v.file, "tokenizer.ggml.add_space_prefix", false);
    add_bytes(&m);
    const int32_t x = add(&m, "x", NORMAL, -1.0f);
    pkv_tokenizer *t = open_made(&m);
    EXPECT(t, "x\xc3\xa4x", 0, x, 0xc3, 0xa4, x);
    EXPECT(t, "<0x41>", 0, '<', '0', x, '4', '1', '>'); /* never the byte token's spelling */
    EXPECT(t, "\xff\xc3", 0, 0xff, 0xc3);               /* not UTF-8 */
    const char *text;
    size_t bytes;
    assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, 0xe4, 0, NULL), PKV_OK);
    assert_int_equal(bytes, 1);
    assert_memory_equal(text, "\xe4", 1);
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&m.v);

    begin(&m);
    gguf_build_bool(&m.v.file, "tokenizer.ggml.add_space_prefix", false);
    const int32_t y = add(&m, "y", NORMAL, -1.0f), unknown = add(&m, "<unk>", UNKNOWN, 0.0f);
    (void)add(&m, "<0xC3>", BYTE, 0.0f); /* half of a character is not enough */
    if (with_unknown)
      gguf_build_u32(&m.v.file, "tokenizer.ggml.unknown_token_id", (uint32_t)unknown);
    t = open_made(&m);
    if (with_unknown) {
      EXPECT(t, "y\xc3\xa4y", 0, y, unknown, y);
    } else {
      size_t count = 7;
      pkv_error err = {0};
      assert_int_equal(pkv_tokenizer_encode(NULL, 0, &count, t, "y\xc3\xa4", 3, 0, &err),
                       PKV_E_UNSUPPORTED);
      assert_non_null(strstr(err.text, "byte 0xa4"));
    }
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&m.v);
  }
}

static void test_special_tokens_and_the_prefix(void **state) {
  (void)state;
  for (int prefix = 0; prefix < 3; prefix++) { /* false, true, not said: true */
    made m;
    begin(&m);
    if (prefix < 2) gguf_build_bool(&m.v.file, "tokenizer.ggml.add_space_prefix", prefix == 1);
    const int32_t bos = add(&m, "<s>", CONTROL, 0.0f), end = add(&m, "<end_of_turn>", CONTROL, 0);
    const int32_t lines = add(&m, "\n\n", USER, -100.0f), line = add(&m, "\n", USER, -100.0f);
    const int32_t a = add(&m, "a", NORMAL, -9.0f), sa = add(&m, SPACE "a", NORMAL, -1.0f);
    const int32_t space = add(&m, SPACE, NORMAL, -9.0f), less = add(&m, "<", NORMAL, -9.0f);
    const int32_t s = add(&m, "s", NORMAL, -9.0f), more = add(&m, ">", NORMAL, -9.0f);
    (void)add(&m, "<s", NORMAL, -1.0f); /* one join away from the control token's spelling */
    gguf_build_u32(&m.v.file, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
    gguf_build_u32(&m.v.file, "tokenizer.ggml.eos_token_id", (uint32_t)end);
    pkv_tokenizer *t = open_made(&m);
    const uint32_t both = PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL;
    const int32_t first = prefix ? sa : a;
    EXPECT(t, "a", 0, first);
    EXPECT(t, "a", PKV_TEXT_ADD_SPECIAL, bos, first); /* a bos unless the file says no */
    EXPECT(t, "<s>a", both, bos, first);
    EXPECT(t, "a\n\n\na", 0, first, lines, line, first);
    EXPECT(t, "a<end_of_turn>a", both, bos, first, end, first);
    /* ordinary text never becomes a control token */
    if (prefix == 0)
      EXPECT(t, "<s>", 0, less + 3, more);
    else
      EXPECT(t, "<s>", 0, space, less + 3, more);
    assert_int_equal(s, less + 1);
    assert_true(pkv_tokenizer_is_end(t, end));
    assert_int_equal(pkv_tokenizer_find_special(t, "\n\n", 2), lines);
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&m.v);
  }
}

/* Straight from the rule: search all neighbours again after every join. */
static size_t plain_encode(int32_t *ids, const made *m, const char *text) {
  char part[512][64];
  size_t n = 0, pieces = m->v.tokens.count;
  const char *names[64];
  size_t sizes[64];
  const char *at = m->v.tokens.strings.data;
  for (size_t i = 0; i < pieces; i++) {
    uint64_t size;
    memcpy(&size, at, sizeof size);
    names[i] = at + sizeof size;
    sizes[i] = (size_t)size;
    at += sizeof size + size;
  }
  for (const char *c = text; *c != '\0'; c++) {
    part[n][0] = *c;
    part[n++][1] = '\0';
  }
  for (;;) {
    size_t best = SIZE_MAX, piece = 0;
    for (size_t i = 0; i + 1 < n; i++) {
      char pair[128];
      const size_t size = (size_t)snprintf(pair, sizeof pair, "%s%s", part[i], part[i + 1]);
      for (size_t p = 0; p < pieces; p++) {
        if (sizes[p] != size || memcmp(names[p], pair, size) != 0) continue;
        if (best == SIZE_MAX || m->scores[p] > m->scores[piece]) {
          best = i;
          piece = p;
        }
      }
    }
    if (best == SIZE_MAX) break;
    memcpy(part[best], names[piece], sizes[piece]);
    part[best][sizes[piece]] = '\0';
    memmove(part[best + 1], part[best + 2], (n - best - 2) * sizeof part[0]);
    n--;
  }
  for (size_t i = 0; i < n; i++)
    for (size_t p = 0; p < pieces; p++)
      if (sizes[p] == strlen(part[i]) && memcmp(names[p], part[i], sizes[p]) == 0)
        ids[i] = (int32_t)p;
  return n;
}

static void test_random_vocabularies(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 77);
  size_t tokens = 0;
  for (int round = 0; round < 300; round++) {
    made m;
    begin(&m);
    gguf_build_bool(&m.v.file, "tokenizer.ggml.add_space_prefix", false);
    char words[64][16];
    int count = 0;
    for (; count < 3; count++)
      (void)snprintf(words[count], sizeof words[0], "%c", 'a' + count);
    while (count < 40) { /* joins of two earlier words, now and then with equal scores */
      char word[32];
      const int i = (int)(pkv_rng_next(&rng) % (unsigned)count);
      const int j = (int)(pkv_rng_next(&rng) % (unsigned)count);
      (void)snprintf(word, sizeof word, "%s%s", words[i], words[j]);
      bool known = strlen(word) > 12;
      for (int w = 0; w < count; w++)
        if (strcmp(word, words[w]) == 0) known = true;
      if (known && pkv_rng_next(&rng) % 50 != 0) continue;
      if (known) break;
      memcpy(words[count++], word, strlen(word) + 1);
    }
    for (int w = 0; w < count; w++)
      (void)add(&m, words[w], NORMAL, -(float)(pkv_rng_next(&rng) % 12));
    pkv_tokenizer *t = open_made(&m);
    for (int k = 0; k < 6; k++) {
      char text[256];
      const size_t bytes = 1 + pkv_rng_next(&rng) % 200;
      for (size_t i = 0; i < bytes; i++)
        text[i] = (char)('a' + pkv_rng_next(&rng) % (k < 3 ? 3 : 2));
      text[bytes] = '\0';
      int32_t want[256];
      const size_t n = plain_encode(want, &m, text);
      expect_bytes(t, text, bytes, 0, want, n);
      tokens += n;
    }
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&m.v);
  }
  print_message("%zu tokens equal to those of the plain version\n", tokens);
  assert_true(tokens > 20000);
}

static void test_wrong_files(void **state) {
  (void)state;
  made m;
  begin(&m);
  (void)add(&m, "a", NORMAL, 0.0f);
  m.no_scores = true;
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.scores is missing");
  begin(&m);
  (void)add(&m, "a", NORMAL, 0.0f);
  m.no_scores = true;
  gguf_build_u32(&m.v.file, "tokenizer.ggml.scores", 1);
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.scores is u32");
  for (size_t count = 1; count <= 3; count += 2) {
    begin(&m);
    (void)add(&m, "a", NORMAL, 0.0f);
    (void)add(&m, "b", NORMAL, 0.0f);
    m.score_count = count;
    refused(&m, PKV_E_FORMAT,
            count == 1 ? "scores has 1 elements, tokenizer.ggml.tokens has 2"
                       : "scores has 3 elements, tokenizer.ggml.tokens has 2");
  }
  begin(&m);
  (void)add(&m, "a", NORMAL, -INFINITY); /* infinite is an order too */
  (void)add(&m, "b", NORMAL, NAN);
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.scores[1] is not a number");
  static const char *const wrong[] = {"<0x4>", "<0x411>", "<0xG1>", "0x41", "", "<0x41)", "A"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    begin(&m);
    (void)add(&m, wrong[i], BYTE, 0.0f);
    refused(&m, PKV_E_FORMAT, "a byte token by its type");
  }
  begin(&m);
  (void)add(&m, "<0x4a>", BYTE, 0.0f);
  (void)add(&m, "<0x4A>", BYTE, 0.0f);
  refused(&m, PKV_E_FORMAT, "[0] and [1] are both byte 0x4a");
  begin(&m);
  (void)add(&m, "a", 7, 0.0f);
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.token_type[0] is 7");
  begin(&m);
  (void)add(&m, SPACE "a", NORMAL, 0.0f);
  (void)add(&m, " a", NORMAL, 0.0f);
  refused(&m, PKV_E_FORMAT, "[0] and [1] are the same 2 bytes");
  begin(&m);
  (void)add(&m, "a", NORMAL, 0.0f);
  gguf_build_u32(&m.v.file, "tokenizer.ggml.unknown_token_id", 1);
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.unknown_token_id");
  begin(&m);
  (void)add(&m, "a", NORMAL, 0.0f);
  gguf_build_u32(&m.v.file, "tokenizer.ggml.add_space_prefix", 1);
  refused(&m, PKV_E_FORMAT, "tokenizer.ggml.add_space_prefix");
  char big[1026];
  memset(big, 'q', 1025);
  big[1025] = '\0';
  begin(&m);
  (void)add(&m, big, NORMAL, 0.0f);
  refused(&m, PKV_E_LIMIT, "tokens[0] has 1025 bytes, at most 1024");
}

static pkv_status create_and_encode(void *ctx, const pkv_allocator *allocator) {
  made *m = ctx;
  pkv_tokenizer *t = NULL;
  size_t count = 0;
  int32_t ids[64];
  pkv_status status = vocab_build_try(&t, &m->v, allocator, NULL);
  if (status == PKV_OK)
    status = pkv_tokenizer_encode(ids, 64, &count, t, "ab \xc3\xa4<s>b", 9, PKV_TEXT_PARSE_SPECIAL,
                                  NULL);
  pkv_tokenizer_destroy(t);
  return status;
}

static void test_no_memory(void **state) {
  (void)state;
  made m;
  begin(&m);
  add_bytes(&m);
  (void)add(&m, "<s>", CONTROL, 0.0f);
  (void)add(&m, "ab", NORMAL, 0.0f);
  finish(&m);
  assert_true(test_alloc_torture(create_and_encode, &m) >= 8);
  vocab_build_deinit(&m.v);
}

/* 1 MiB of one character, alone or in runs that join. Time of this thread alone. */
static void test_long_runs(void **state) {
  (void)state;
  const size_t bytes = TEST_SANITIZED ? 1u << 17 : 1u << 20;
  made m;
  begin(&m);
  add_bytes(&m);
  static const char *const runs[] = {"z", "zz", "zzzz", "zzzzzzzz", SPACE SPACE, "\n\n"};
  for (size_t i = 0; i < 6; i++)
    (void)add(&m, runs[i], i == 5 ? USER : NORMAL, (float)i);
  pkv_tokenizer *t = open_made(&m);
  char *text = malloc(bytes);
  for (int c = 0; c < 256; c += c == 'z' || c == ' ' || c == '\n' ? 1 : 29) {
    struct timespec a, b;
    size_t count = 0;
    memset(text, c, bytes);
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    assert_int_equal(pkv_tokenizer_encode(NULL, 0, &count, t, text, bytes, 0, NULL),
                     PKV_E_TOO_SMALL);
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    const double seconds = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
    if (seconds > 2.0) fail_msg("byte %d: %.2f s", c, seconds);
    assert_true(count >= bytes / 8);
  }
  size_t count = 0;
  memset(text, 'z', bytes);
  (void)pkv_tokenizer_encode(NULL, 0, &count, t, text, bytes, 0, NULL);
  assert_true(count <= bytes / 8 + 8);
  free(text);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&m.v);
}

/* A text too long to be numbered is refused before a byte of it is read. */
static void test_longest_text(void **state) {
  (void)state;
  pkv_pieces_scratch scratch = {0};
  pkv_token_sink sink = {NULL, 0, 0};
  pkv_error err = {0};
  assert_int_equal(
      pkv_pieces_encode(&sink, &scratch, NULL, NULL, "z", PKV_MERGE_MAX_WORD, true, &err),
      PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "a text of 1073741824 bytes without a special token"));
  assert_int_equal(sink.count, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_scores_decide),
      cmocka_unit_test(test_bytes_and_unknown),
      cmocka_unit_test(test_special_tokens_and_the_prefix),
      cmocka_unit_test(test_random_vocabularies),
      cmocka_unit_test(test_wrong_files),
      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_long_runs),
      cmocka_unit_test(test_longest_text),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
