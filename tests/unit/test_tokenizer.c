/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tokenizer on small vocabularies made for the purpose: merge order against a naive twin,
 * special tokens, bos and eos, capacities, bytes without tokens, text of tokens.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/tokenizer_merges.h"
#include "model/tokenizer_split.h"
#include "pkv/engine.h"
#include "support/vocab_build.h"

#define ADD   PKV_TEXT_ADD_SPECIAL
#define PARSE PKV_TEXT_PARSE_SPECIAL

/* Fails unless the text has exactly these tokens (want ends with -1). */
static void check(const pkv_tokenizer *t, const char *text, size_t bytes, uint32_t flags,
                  const int32_t *want) {
  int32_t ids[512];
  size_t count = 0, n = 0;
  pkv_error err = {0};
  while (want[n] >= 0)
    n++;
  if (pkv_tokenizer_encode(ids, 512, &count, t, text, bytes, flags, &err) != PKV_OK)
    fail_msg("\"%.*s\": %s", (int)bytes, text, err.text);
  for (size_t i = 0; i < n && i < count; i++) {
    if (ids[i] != want[i])
      fail_msg("\"%.*s\": token %zu is %d, want %d", (int)bytes, text, i, ids[i], want[i]);
  }
  if (count != n) fail_msg("\"%.*s\": %zu tokens, want %zu", (int)bytes, text, count, n);
}

#define CHECK(t, text, flags, ...)                                                                 \
  check((t), (text), strlen(text), (flags), (const int32_t[]){__VA_ARGS__, -1})

/* ------------------------------------------------------------------------------------------
 * Merges
 * ------------------------------------------------------------------------------------------ */

static void test_merge_order(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t aa = vocab_build_merge(&v, "a", "a");
  const int32_t bc = vocab_build_merge(&v, "b", "c");
  const int32_t ab = vocab_build_merge(&v, "a", "b");
  const int32_t abc = vocab_build_merge(&v, "a", "bc");
  pkv_tokenizer *t = vocab_build_open(&v);
  CHECK(t, "aaa", 0, aa, 'a'); /* leftmost first */
  CHECK(t, "aaaa", 0, aa, aa); /* not a, aa, a */
  CHECK(t, "abc", 0, abc);     /* b c before a b */
  CHECK(t, "ab", 0, ab);       /* the later merge still applies */
  CHECK(t, "aabc", 0, aa, bc); /* a a took the a */
  CHECK(t, "xabcx", 0, 'x', abc, 'x');
  CHECK(t, "", 0, -1);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

#define TWIN_TOKENS 200
#define TWIN_BYTES  10

typedef struct twin {
  char text[TWIN_TOKENS][TWIN_BYTES + 1];
  int32_t id[TWIN_TOKENS];
  int tokens;
  int left[TWIN_TOKENS], right[TWIN_TOKENS], result[TWIN_TOKENS];
  int merges;
} twin;

static int twin_find(const twin *w, const char *text) {
  for (int i = 0; i < w->tokens; i++) {
    if (strcmp(w->text[i], text) == 0) return i;
  }
  return -1;
}

static int twin_rank(const twin *w, int left, int right) {
  for (int i = 0; i < w->merges; i++) {
    if (w->left[i] == left && w->right[i] == right) return i;
  }
  return -1;
}

/* Random merges over four letters; several may join to one token. */
static void twin_fill(twin *w, vocab_build *v, pkv_rng *rng) {
  memset(w, 0, sizeof *w);
  for (int i = 0; i < 4; i++) {
    w->text[i][0] = (char)('a' + i);
    w->id[i] = 'a' + i;
  }
  w->tokens = 4;
  while (w->merges < 120 && w->tokens < TWIN_TOKENS) {
    const int a = (int)pkv_rng_below(rng, (uint64_t)w->tokens);
    const int b = (int)pkv_rng_below(rng, (uint64_t)w->tokens);
    if (strlen(w->text[a]) + strlen(w->text[b]) > TWIN_BYTES || twin_rank(w, a, b) >= 0) continue;
    char joined[2 * TWIN_BYTES + 2], line[2 * TWIN_BYTES + 3];
    (void)snprintf(joined, sizeof joined, "%s%s", w->text[a], w->text[b]);
    int result = twin_find(w, joined);
    if (result >= 0) {
      const int n = snprintf(line, sizeof line, "%s %s", w->text[a], w->text[b]);
      vocab_build_merge_raw(v, line, (size_t)n);
    } else {
      result = w->tokens++;
      w->id[result] = vocab_build_merge(v, w->text[a], w->text[b]);
      memcpy(w->text[result], joined, strlen(joined) + 1);
    }
    w->left[w->merges] = a;
    w->right[w->merges] = b;
    w->result[w->merges++] = result;
  }
}

/* Joins the pair of lowest rank, leftmost first, until there is none: by looking at all of them. */
static size_t twin_encode(int32_t *ids, const twin *w, const char *text, size_t bytes) {
  int parts[256];
  size_t n = bytes;
  for (size_t i = 0; i < n; i++)
    parts[i] = text[i] - 'a';
  for (;;) {
    int best = -1;
    size_t at = 0;
    for (size_t i = 0; i + 1 < n; i++) {
      const int rank = twin_rank(w, parts[i], parts[i + 1]);
      if (rank >= 0 && (best < 0 || rank < best)) {
        best = rank;
        at = i;
      }
    }
    if (best < 0) break;
    parts[at] = w->result[best];
    memmove(&parts[at + 1], &parts[at + 2], (n - at - 2) * sizeof parts[0]);
    n--;
  }
  for (size_t i = 0; i < n; i++)
    ids[i] = w->id[parts[i]];
  ids[n] = -1;
  return n;
}

static void test_merges_against_twin(void **state) {
  (void)state;
  static twin w;
  for (uint64_t seed = 1; seed <= 8; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    vocab_build v;
    vocab_build_init(&v, "gpt-2");
    twin_fill(&w, &v, &rng);
    pkv_tokenizer *t = vocab_build_open(&v);
    for (int round = 0; round < 200; round++) {
      char text[256];
      int32_t want[257];
      const size_t n = 1 + (size_t)pkv_rng_below(&rng, 120);
      for (size_t i = 0; i < n; i++)
        text[i] = (char)('a' + pkv_rng_below(&rng, 4));
      (void)twin_encode(want, &w, text, n);
      check(t, text, n, 0, want);
    }
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
}

static void test_repeated_merge_keeps_first_rank(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t ab = vocab_build_merge(&v, "a", "b");
  const int32_t bc = vocab_build_merge(&v, "b", "c");
  vocab_build_merge_raw(&v, "a b", 3); /* again, with a worse rank */
  pkv_tokenizer *t = vocab_build_open(&v);
  CHECK(t, "abc", 0, ab, 'c');
  CHECK(t, "bc", 0, bc);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

static void test_whole_words(void **state) {
  (void)state;
  static const char *const rules[] = {"llama-bpe", "llama3", "llama-v3", "gpt-2", "smollm"};
  for (size_t i = 0; i < 5; i++) {
    vocab_build v;
    vocab_build_init(&v, rules[i]);
    const int32_t word = vocab_build_token(&v, "hello", 1); /* no merge leads there */
    const int32_t control = vocab_build_token(&v, "world", 3);
    pkv_tokenizer *t = vocab_build_open(&v);
    if (i < 3)
      CHECK(t, "hello", 0, word);
    else
      CHECK(t, "hello", 0, 'h', 'e', 'l', 'l', 'o');
    CHECK(t, "world", 0, 'w', 'o', 'r', 'l', 'd'); /* a control token is no word */
    CHECK(t, "world", PARSE, control);
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
}

/* ------------------------------------------------------------------------------------------
 * Special tokens
 * ------------------------------------------------------------------------------------------ */

static void test_special_tokens(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t user = vocab_build_merge(&v, "u", "s");
  const int32_t start = vocab_build_token(&v, "<|s|>", 3);
  const int32_t longer = vocab_build_token(&v, "<|s|>x", 3);
  const int32_t prefix = vocab_build_token(&v, "<|", 4); /* user-defined */
  const int32_t unknown = vocab_build_token(&v, "<unk>", 2);
  const int32_t unused = vocab_build_token(&v, "[PAD]", 5);
  pkv_tokenizer *t = vocab_build_open(&v);
  CHECK(t, "<|s|>", PARSE, start);
  CHECK(t, "<|s|>us", PARSE, start, user); /* the word behind is what it is alone */
  CHECK(t, "us", PARSE, user);
  CHECK(t, "<|s|>x<|s|>y", PARSE, longer, start, 'y'); /* the longest at a place */
  CHECK(t, "<|s|><|s|>", PARSE, start, start);
  CHECK(t, "a<|s", PARSE, 'a', prefix, 's'); /* cut off: what is left of it */
  CHECK(t, "<unk>", PARSE, unknown);
  /* Text does not become control tokens; user-defined ones are text. */
  CHECK(t, "<|s|>", 0, prefix, 's', '|', '>');
  CHECK(t, "<unk>", 0, '<', 'u', 'n', 'k', '>');
  CHECK(t, "[PAD]", PARSE, '[', 'P', 'A', 'D', ']');
  assert_int_equal(pkv_tokenizer_find_special(t, "<|s|>", 5), start);
  assert_int_equal(pkv_tokenizer_find_special(t, "<|s|", 4), -1);
  assert_int_equal(pkv_tokenizer_find_special(t, "<|", 2), prefix);
  assert_int_equal(pkv_tokenizer_find_special(t, "us", 2), -1);
  assert_int_equal(pkv_tokenizer_find_special(t, "", 0), -1);
  assert_true(pkv_tokenizer_is_control(t, start));
  assert_true(pkv_tokenizer_is_control(t, unknown));
  assert_false(pkv_tokenizer_is_control(t, prefix));
  assert_false(pkv_tokenizer_is_control(t, unused));
  assert_false(pkv_tokenizer_is_control(t, -1));
  assert_false(pkv_tokenizer_is_control(t, pkv_tokenizer_vocab(t)));
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

static void test_pieces(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t start = vocab_build_token(&v, "<|s|>", 3);
  const int32_t nl2 = vocab_build_merge(&v, "\n", "\n");
  pkv_tokenizer *t = vocab_build_open(&v);
  struct {
    pkv_text_piece pieces[4];
    size_t count;
    int32_t want[16];
  } cases[] = {
      /* trusted, not trusted, and trusted by two neighbours together */
      {{{"<|s|>", 5, true}}, 1, {start, -1}},
      {{{"<|s|>", 5, false}}, 1, {'<', '|', 's', '|', '>', -1}},
      {{{"<|", 2, true}, {"s|>", 3, true}}, 2, {start, -1}},
      {{{"<|", 2, true}, {"", 0, false}, {"s|>", 3, true}}, 3, {'<', '|', 's', '|', '>', -1}},
      {{{"<|", 2, true}, {"s|>", 3, false}}, 2, {'<', '|', 's', '|', '>', -1}},
      {{{"<|s", 3, false}, {"|>", 2, true}}, 2, {'<', '|', 's', '|', '>', -1}},
      {{{"<|s|>", 5, true}, {"<|s|>", 5, false}, {"<|s|>", 5, true}},
       3,
       {start, '<', '|', 's', '|', '>', start, -1}},
      /* words cross borders, as in the text as a whole */
      {{{"a\n", 2, true}, {"\n", 1, false}}, 2, {'a', nl2, -1}},
      {{{NULL, 0, true}, {"a", 1, false}}, 2, {'a', -1}},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int32_t ids[16];
    size_t count, n = 0;
    assert_int_equal(pkv_tokenizer_encode_pieces(ids, 16, &count, t, cases[i].pieces,
                                                 cases[i].count, false, false, NULL),
                     PKV_OK);
    for (; cases[i].want[n] >= 0; n++) {
      if (n >= count || ids[n] != cases[i].want[n])
        fail_msg("case %zu: token %zu is %d, want %d", i, n, n < count ? ids[n] : -1,
                 cases[i].want[n]);
    }
    if (count != n) fail_msg("case %zu: %zu tokens, want %zu", i, count, n);
  }
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

static void test_bos_and_eos(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t bos = vocab_build_token(&v, "<s>", 3);
  const int32_t eos = vocab_build_token(&v, "</s>", 3);
  const int32_t turn = vocab_build_token(&v, "<|im_end|>", 3);
  const int32_t plain = vocab_build_token(&v, "<|end|>", 1); /* not a control token here */
  gguf_build_u32(&v.file, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
  gguf_build_u32(&v.file, "tokenizer.ggml.eos_token_id", (uint32_t)eos);
  gguf_build_bool(&v.file, "tokenizer.ggml.add_bos_token", true);
  gguf_build_bool(&v.file, "tokenizer.ggml.add_eos_token", true);
  pkv_tokenizer *t = vocab_build_open(&v);
  CHECK(t, "a", 0, 'a');
  CHECK(t, "a", ADD, bos, 'a', eos);
  CHECK(t, "", ADD, bos, eos);
  CHECK(t, "<s>a", ADD | PARSE, bos, 'a', eos); /* one bos, not two */
  CHECK(t, "<s><s>a", ADD | PARSE, bos, bos, 'a', eos);
  CHECK(t, "a</s>", ADD | PARSE, bos, 'a', eos);
  CHECK(t, "</s>a", ADD | PARSE, bos, eos, 'a', eos);
  CHECK(t, "<s>", PARSE, bos);
  CHECK(t, "<s>", ADD, bos, '<', 's', '>', eos); /* text, not the token */
  assert_int_equal(pkv_tokenizer_bos(t), bos);
  assert_int_equal(pkv_tokenizer_eos(t), eos);
  assert_true(pkv_tokenizer_is_end(t, eos));
  assert_true(pkv_tokenizer_is_end(t, turn));
  assert_false(pkv_tokenizer_is_end(t, bos));
  assert_false(pkv_tokenizer_is_end(t, plain));
  assert_false(pkv_tokenizer_is_end(t, -1));
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

/* What a silent file means depends on the pre-tokenizer. */
static void test_bos_default(void **state) {
  (void)state;
  for (int i = 0; i < 4; i++) {
    vocab_build v;
    vocab_build_init(&v, i < 3 ? "llama-bpe" : "gpt-2");
    const int32_t bos = vocab_build_token(&v, "<s>", 3);
    if (i != 1) gguf_build_u32(&v.file, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
    if (i == 2) gguf_build_bool(&v.file, "tokenizer.ggml.add_bos_token", false);
    pkv_tokenizer *t = vocab_build_open(&v);
    if (i == 0)
      CHECK(t, "a", ADD, bos, 'a');
    else
      CHECK(t, "a", ADD, 'a');
    assert_int_equal(pkv_tokenizer_bos(t), i == 1 ? -1 : bos);
    assert_int_equal(pkv_tokenizer_eos(t), -1);
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
}

/* ------------------------------------------------------------------------------------------
 * Capacities and bytes
 * ------------------------------------------------------------------------------------------ */

static void test_capacity(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  pkv_tokenizer *t = vocab_build_open(&v);
  int32_t ids[8] = {-7, -7, -7, -7, -7, -7, -7, -7};
  size_t count = 99;
  pkv_error err = {0};
  assert_int_equal(pkv_tokenizer_encode(NULL, 0, &count, t, "abcde", 5, 0, &err), PKV_E_TOO_SMALL);
  assert_int_equal(count, 5);
  assert_string_equal(err.text, "the text has 5 tokens, capacity is 0");
  assert_int_equal(pkv_tokenizer_encode(ids, 4, &count, t, "abcde", 5, 0, &err), PKV_E_TOO_SMALL);
  assert_int_equal(count, 5);
  for (int i = 4; i < 8; i++)
    assert_int_equal(ids[i], -7); /* nothing behind the capacity */
  assert_int_equal(pkv_tokenizer_encode(ids, 5, &count, t, "abcde", 5, 0, &err), PKV_OK);
  assert_int_equal(count, 5);
  assert_int_equal(ids[5], -7);
  assert_int_equal(pkv_tokenizer_encode(NULL, 0, &count, t, "", 0, 0, &err), PKV_OK);
  assert_int_equal(count, 0);
  assert_int_equal(pkv_tokenizer_encode(NULL, 0, &count, t, NULL, 0, 0, &err), PKV_OK);
  assert_int_equal(pkv_tokenizer_encode(NULL, 3, &count, t, "a", 1, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, NULL, t, "a", 1, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, NULL, "a", 1, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, NULL, 1, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "a", 1, 4, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "flags are 0x4, known are 0x3");
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

/* Counting goes on past 2^31 and 2^32 without a narrower type in between, and writes nothing. */
static void test_sink_counts_beyond_32_bits(void **state) {
  (void)state;
  static const size_t starts[] = {(size_t)INT32_MAX - 1, (size_t)UINT32_MAX - 1};
  for (size_t i = 0; i < 2; i++) {
    int32_t guard[2] = {-7, -7};
    pkv_token_sink sink = {guard, 1, starts[i]};
    for (int k = 0; k < 4; k++)
      pkv_token_sink_put(&sink, k);
    assert_true(sink.count == starts[i] + 4);
    assert_true(sink.count > sink.capacity);
    assert_int_equal(guard[0], -7);
    assert_int_equal(guard[1], -7);
  }
  /* The same through a whole word. */
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  vocab_build_finish(&v);
  pkv_gguf *gguf;
  assert_int_equal(pkv_gguf_open_memory(&gguf, v.file.file.data, v.file.file.size, NULL, NULL),
                   PKV_OK);
  pkv_vocab vocab;
  pkv_merges merges;
  assert_int_equal(pkv_vocab_load(&vocab, PKV_SPELLING_BYTES, gguf, NULL, NULL), PKV_OK);
  assert_int_equal(pkv_merges_load(&merges, &vocab, gguf, NULL), PKV_OK);
  pkv_merge_scratch scratch;
  pkv_merge_scratch_init(&scratch, NULL);
  pkv_token_sink sink = {NULL, 0, (size_t)INT32_MAX};
  assert_int_equal(pkv_merge_word(&sink, &scratch, &merges, &vocab, "abcd", 4, NULL, 0, NULL),
                   PKV_OK);
  assert_true(sink.count == (size_t)INT32_MAX + 4);
  pkv_merge_scratch_deinit(&scratch);
  pkv_merges_deinit(&merges);
  pkv_vocab_deinit(&vocab);
  pkv_gguf_close(gguf);
  vocab_build_deinit(&v);
}

static void test_any_bytes_round_trip(void **state) {
  (void)state;
  static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe"};
  for (size_t r = 0; r < 3; r++) {
    vocab_build v;
    vocab_build_init(&v, rules[r]);
    (void)vocab_build_merge(&v, "\xc3", "\xa9");
    (void)vocab_build_merge(&v, " ", " ");
    pkv_tokenizer *t = vocab_build_open(&v);
    pkv_rng rng;
    pkv_rng_init(&rng, 5 + r);
    for (int round = 0; round < 300; round++) {
      char text[200], back[200];
      int32_t ids[200];
      size_t count, size = 0;
      const size_t n = (size_t)pkv_rng_below(&rng, sizeof text + 1);
      for (size_t i = 0; i < n; i++) /* now all bytes, now mostly pieces of characters */
        text[i] = round % 2 ? (char)(unsigned char)pkv_rng_below(&rng, 256)
                            : "\xc3\xa9 \xe4\xb8\xad\xf0\x9f"[pkv_rng_below(&rng, 8)];
      assert_int_equal(pkv_tokenizer_encode(ids, 200, &count, t, text, n, 0, NULL), PKV_OK);
      for (size_t i = 0; i < count; i++) {
        const char *piece;
        size_t bytes;
        assert_int_equal(pkv_tokenizer_text(&piece, &bytes, t, ids[i], 0, NULL), PKV_OK);
        assert_true(size + bytes <= n);
        memcpy(back + size, piece, bytes);
        size += bytes;
      }
      assert_int_equal(size, n);
      if (n > 0) assert_memory_equal(back, text, n);
    }
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
}

/* Vocabularies lack bytes that their training text lacked. */
static void test_missing_bytes(void **state) {
  (void)state;
  for (int with_replacement = 0; with_replacement < 2; with_replacement++) {
    vocab_build v;
    vocab_build_init_empty(&v, "gpt-2");
    const int32_t a = vocab_build_token(&v, "a", 1), b = vocab_build_token(&v, "b", 1);
    const int32_t ef = vocab_build_token(&v, "\xef", 1), bf = vocab_build_token(&v, "\xbf", 1);
    int32_t bd = -1, efbf = -1;
    if (with_replacement) {
      bd = vocab_build_token(&v, "\xbd", 1);
      efbf = vocab_build_merge(&v, "\xef", "\xbf");
    }
    pkv_tokenizer *t = vocab_build_open(&v);
    int32_t ids[8];
    size_t count;
    pkv_error err = {0};
    CHECK(t, "ab", 0, a, b);
    if (with_replacement) {
      CHECK(t,
            "a\x04"
            "b",
            0, a, efbf, bd, b);
      CHECK(t, "\xff", 0, efbf, bd);
    } else {
      assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "a\x04", 2, 0, &err),
                       PKV_E_UNSUPPORTED);
      assert_string_equal(err.text, "the vocabulary has no token for byte 0x04");
      assert_int_equal(count, 0);
      CHECK(t, "\xef\xbf", 0, ef, bf);
    }
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
}

static void test_token_text(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t control = vocab_build_token(&v, "<|x|>", 3);
  const int32_t user = vocab_build_token(&v, "  ", 4);
  const int32_t empty = vocab_build_token(&v, "", 1);
  const int32_t foreign = vocab_build_token_raw(&v, "\xe4\xb8\xad", 3, 1); /* not in the alphabet */
  pkv_tokenizer *t = vocab_build_open(&v);
  struct {
    int32_t token, special;
    const char *want;
  } cases[] = {{' ', 0, " "},   {0xff, 0, "\xff"}, {control, 0, ""}, {control, 1, "<|x|>"},
               {user, 0, "  "}, {user, 1, "  "},   {empty, 1, ""},   {foreign, 0, "\xe4\xb8\xad"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const char *text = NULL;
    size_t bytes = 99;
    assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, cases[i].token, cases[i].special, NULL),
                     PKV_OK);
    assert_non_null(text);
    assert_int_equal(bytes, strlen(cases[i].want));
    assert_memory_equal(text, cases[i].want, bytes);
  }
  const char *text = "x";
  size_t bytes = 1;
  pkv_error err = {0};
  assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, -1, 0, &err), PKV_E_RANGE);
  assert_int_equal(bytes, 0);
  assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, pkv_tokenizer_vocab(t), 0, &err),
                   PKV_E_RANGE);
  assert_string_equal(err.text, "token is 260, not 0 .. 259");
  assert_int_equal(pkv_tokenizer_text(NULL, &bytes, t, 0, 0, &err), PKV_E_INVALID);
  /* The byte 0 is text like any other. */
  check(t, "a\0b", 3, 0, (const int32_t[]){'a', 0, 'b', -1});
  /* Backslash and n are two characters, a line feed is one. */
  CHECK(t, "a\\nb", 0, 'a', '\\', 'n', 'b');
  CHECK(t, "a\nb", 0, 'a', '\n', 'b');
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_merge_order),
      cmocka_unit_test(test_merges_against_twin),
      cmocka_unit_test(test_repeated_merge_keeps_first_rank),
      cmocka_unit_test(test_whole_words),
      cmocka_unit_test(test_special_tokens),
      cmocka_unit_test(test_pieces),
      cmocka_unit_test(test_bos_and_eos),
      cmocka_unit_test(test_bos_default),
      cmocka_unit_test(test_capacity),
      cmocka_unit_test(test_sink_counts_beyond_32_bits),
      cmocka_unit_test(test_any_bytes_round_trip),
      cmocka_unit_test(test_missing_bytes),
      cmocka_unit_test(test_token_text),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
