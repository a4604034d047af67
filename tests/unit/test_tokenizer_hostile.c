/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vocabularies that are wrong, each refused with a status and a text that names the place; memory
 * that runs out at every allocation; a vocabulary cut or flipped at every byte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/tokenizer_chars.h"
#include "pkv/engine.h"
#include "support/test_alloc.h"
#include "support/vocab_build.h"

/* Fails unless the vocabulary is refused with this status and a text that has this part in it. */
static void refused(vocab_build *v, pkv_status status, const char *part) {
  test_alloc memory;
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  pkv_tokenizer *t = (pkv_tokenizer *)v;
  pkv_error err = {0};
  const pkv_status got = vocab_build_try(&t, v, &a, &err);
  if (got != status || strstr(err.text, part) == NULL)
    fail_msg("%s \"%s\", want %s with \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(status), part);
  assert_null(t);
  test_alloc_finish(&memory);
  vocab_build_deinit(v);
}

/* A good vocabulary that a test then spoils. */
static void start(vocab_build *v) {
  vocab_build_init(v, "gpt-2");
  (void)vocab_build_merge(v, "a", "b");
}

static void test_models_and_rules(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "default");
  refused(&v, PKV_E_UNSUPPORTED, "tokenizer.ggml.pre is 'default'");
  vocab_build_init(&v, "qw\x01\xff"
                       "en");
  refused(&v, PKV_E_UNSUPPORTED, "tokenizer.ggml.pre is 'qw??en'");
  vocab_build_init(&v, NULL);
  refused(&v, PKV_E_UNSUPPORTED, "tokenizer.ggml.pre is missing");

  static const char *const models[] = {"llama2", "gpt", "gpt22", ""};
  for (size_t i = 0; i < 4; i++) {
    memset(&v, 0, sizeof v);
    vocab_build_init(&v, NULL);
    gguf_build_deinit(&v.file); /* start the file again with another model */
    gguf_build_init(&v.file);
    gguf_build_string(&v.file, "tokenizer.ggml.model", models[i]);
    gguf_build_string(&v.file, "tokenizer.ggml.pre", "gpt-2");
    refused(&v, PKV_E_UNSUPPORTED, "tokenizer.ggml.model is '");
  }
  vocab_build_init(&v, NULL);
  gguf_build_deinit(&v.file);
  gguf_build_init(&v.file);
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.model");
  vocab_build_init(&v, NULL);
  gguf_build_u32(&v.file, "tokenizer.ggml.pre", 3);
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.pre");
}

static void test_tokens(void **state) {
  (void)state;
  vocab_build v;
  /* none at all; of another type */
  vocab_build_init_empty(&v, "gpt-2");
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.tokens is missing or empty");
  vocab_build_init_empty(&v, "gpt-2");
  gguf_build_string(&v.file, "tokenizer.ggml.tokens", "a");
  gguf_build_finish(&v.file);
  v.finished = true;
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.tokens is string");
  vocab_build_init_empty(&v, "gpt-2");
  gguf_build_array_i32(&v.file, "tokenizer.ggml.tokens", (const int32_t[]){1, 2}, 2);
  gguf_build_finish(&v.file);
  v.finished = true;
  refused(&v, PKV_E_FORMAT, "not an array of strings");

  /* one of 5 MiB, and the longest that is allowed next to one byte more */
  char *big = malloc(5u << 20);
  assert_non_null(big);
  memset(big, 'q', 5u << 20);
  start(&v);
  (void)vocab_build_token_raw(&v, big, 5u << 20, 1);
  refused(&v, PKV_E_LIMIT, "tokenizer.ggml.tokens[257] has 5242880 bytes");
  start(&v);
  (void)vocab_build_token_raw(&v, big, 16385, 1);
  refused(&v, PKV_E_LIMIT, "[257] has 16385 bytes, at most 16384");
  start(&v);
  (void)vocab_build_token_raw(&v, big, 16384, 1);
  pkv_tokenizer *t = vocab_build_open(&v);
  const char *text;
  size_t bytes;
  assert_int_equal(pkv_tokenizer_text(&text, &bytes, t, 257, 0, NULL), PKV_OK);
  assert_int_equal(bytes, 16384);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
  /* a special token that long would make the search slow */
  start(&v);
  (void)vocab_build_token_raw(&v, big, 257, 3);
  refused(&v, PKV_E_LIMIT, "special token 257 has 257 bytes");
  free(big);

  /* twice the same */
  start(&v);
  (void)vocab_build_token(&v, "ab", 1);
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.tokens[256] and [257] are the same 2 bytes");
  start(&v);
  (void)vocab_build_token(&v, "<x>", 3);
  (void)vocab_build_token(&v, "<x>", 4);
  refused(&v, PKV_E_FORMAT, "special tokens 257 and 258 are spelled the same");
}

/* What is odd but means something stays usable. */
static void test_odd_tokens_are_kept(void **state) {
  (void)state;
  vocab_build v;
  start(&v);
  (void)vocab_build_token(&v, "", 1);
  (void)vocab_build_token(&v, "", 1);
  (void)vocab_build_token(&v, "", 3);
  (void)vocab_build_token(&v, "[PAD]", 5);
  (void)vocab_build_token(&v, "[PAD]", 5);
  (void)vocab_build_token(&v, "ab", 4); /* user-defined, also made by a merge */
  (void)vocab_build_token_raw(&v, "\xff\xfe", 2, 1);
  (void)vocab_build_token_raw(&v, "a b", 3, 1); /* a blank is not of the alphabet */
  pkv_tokenizer *t = vocab_build_open(&v);
  int32_t ids[8];
  size_t count;
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "a b", 3, 0, NULL), PKV_OK);
  assert_int_equal(count, 3);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "\xff\xfe", 2, 0, NULL), PKV_OK);
  assert_int_equal(count, 2);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "ab", 2, 0, NULL), PKV_OK);
  assert_int_equal(count, 1);
  assert_int_equal(ids[0], 262);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
  /* without types all tokens are text */
  vocab_build_init(&v, "gpt-2");
  (void)vocab_build_token(&v, "<s>", 1);
  v.no_types = true;
  t = vocab_build_open(&v);
  assert_int_equal(pkv_tokenizer_encode(ids, 8, &count, t, "<s>", 3, PKV_TEXT_PARSE_SPECIAL, NULL),
                   PKV_OK);
  assert_int_equal(count, 3);
  pkv_tokenizer_destroy(t);
  vocab_build_deinit(&v);
}

static void test_types(void **state) {
  (void)state;
  vocab_build v;
  start(&v);
  v.no_types = true;
  gguf_build_array_i32(&v.file, "tokenizer.ggml.token_type", (const int32_t[]){1, 1, 1}, 3);
  refused(&v, PKV_E_FORMAT, "token_type has 3 elements, tokenizer.ggml.tokens has 257");
  start(&v);
  v.no_types = true;
  gguf_build_u32(&v.file, "tokenizer.ggml.token_type", 1);
  refused(&v, PKV_E_FORMAT, "token_type is u32");
  start(&v);
  v.no_types = true;
  gguf_build_array_f32(&v.file, "tokenizer.ggml.token_type", (const float[]){1, 1}, 2);
  refused(&v, PKV_E_FORMAT, "token_type is array");
  static const int32_t bad[] = {-1, 7, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < 4; i++) {
    start(&v);
    (void)vocab_build_token(&v, "zz", bad[i]);
    refused(&v, PKV_E_FORMAT, "token_type[257] is ");
  }
}

static void test_merges(void **state) {
  (void)state;
  static const struct {
    const char *line;
    const char *part;
  } cases[] = {
      {"", "merges[1] of 0 bytes is not two pieces"},
      {" ", "is not two pieces"},
      {"a", "is not two pieces"},
      {"a ", "is not two pieces"},
      {" a", "is not two pieces"},
      {"a b c", "is not two pieces"},
      {"a  b", "is not two pieces"},
      {"a \xe4\xb8\xad", "merges[1] has a character outside the byte alphabet"},
      {"\xff\xff b", "outside the byte alphabet"},
      {"\xc4 b", "outside the byte alphabet"},
      {"a c", "merges[1]: its result is not in the vocabulary"},
      {"xy c", "merges[1]: its left part is not in the vocabulary"},
      {"c xy", "merges[1]: its right part is not in the vocabulary"},
  };
  vocab_build v;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    start(&v);
    vocab_build_merge_raw(&v, cases[i].line, strlen(cases[i].line));
    refused(&v, PKV_E_FORMAT, cases[i].part);
  }
  /* merges into and out of a control token belong to no text */
  start(&v);
  (void)vocab_build_token(&v, "ac", 3);
  vocab_build_merge_raw(&v, "a c", 3);
  refused(&v, PKV_E_FORMAT, "its result is not in the vocabulary");
  /* one of 5 MiB */
  char *big = malloc(5u << 20);
  assert_non_null(big);
  memset(big, 'q', 5u << 20);
  big[9] = ' ';
  start(&v);
  vocab_build_merge_raw(&v, big, 5u << 20);
  refused(&v, PKV_E_FORMAT, "merges[1] of 5242880 bytes is not two pieces");
  free(big);
  /* absent */
  vocab_build_init_empty(&v, "gpt-2");
  gguf_build_strings(&v.file, "tokenizer.ggml.tokens", (const char *const[]){"a"}, 1);
  gguf_build_finish(&v.file);
  v.finished = true;
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.merges is missing");
}

static void test_ids(void **state) {
  (void)state;
  static const char *const keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                                     "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
  vocab_build v;
  for (size_t i = 0; i < 4; i++) {
    start(&v);
    gguf_build_u32(&v.file, keys[i], 257); /* one past the end */
    refused(&v, PKV_E_FORMAT, keys[i]);
    start(&v);
    gguf_build_u32(&v.file, keys[i], UINT32_MAX);
    refused(&v, PKV_E_FORMAT, keys[i]);
    start(&v);
    gguf_build_i32(&v.file, keys[i], -1);
    refused(&v, PKV_E_FORMAT, keys[i]);
    start(&v);
    gguf_build_string(&v.file, keys[i], "1");
    refused(&v, PKV_E_FORMAT, keys[i]);
    start(&v);
    gguf_build_u32(&v.file, keys[i], 256);
    pkv_tokenizer *t = vocab_build_open(&v);
    assert_int_equal(pkv_tokenizer_is_end(t, 256), i > 0);
    pkv_tokenizer_destroy(t);
    vocab_build_deinit(&v);
  }
  start(&v);
  gguf_build_bool(&v.file, "tokenizer.ggml.add_bos_token", true);
  refused(&v, PKV_E_FORMAT, "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing");
  start(&v);
  gguf_build_bool(&v.file, "tokenizer.ggml.add_eos_token", true);
  refused(&v, PKV_E_FORMAT, "add_eos_token is true, but tokenizer.ggml.eos_token_id is missing");
  start(&v);
  gguf_build_string(&v.file, "tokenizer.ggml.add_bos_token", "yes");
  refused(&v, PKV_E_FORMAT, "tokenizer.ggml.add_bos_token");
}

/* As many strings as are allowed under `key`, or one more, of no bytes each. */
static void many(vocab_build *v, const char *key, size_t count) {
  unsigned char *const strings = calloc(count, 8);
  assert_non_null(strings);
  gguf_build_array(&v->file, key, PKV_GGUF_STRING, strings, count, 8 * count);
  free(strings);
}

/* 2^22 tokens and 2^24 merges, and one more. Within the bound they are refused for what they are:
   no text becomes them. */
static void test_how_many(void **state) {
  (void)state;
  vocab_build v;
  for (size_t more = 0; more < 2; more++) {
    vocab_build_init_empty(&v, "gpt-2");
    many(&v, "tokenizer.ggml.tokens", 4194304 + more);
    gguf_build_finish(&v.file);
    v.finished = true;
    refused(&v, more ? PKV_E_LIMIT : PKV_E_FORMAT,
            more ? "tokenizer.ggml.tokens has 4194305 elements, at most 4194304 are allowed"
                 : "tokenizer.ggml.merges is missing");
    vocab_build_init_empty(&v, "gpt-2");
    gguf_build_strings(&v.file, "tokenizer.ggml.tokens", (const char *const[]){"a"}, 1);
    many(&v, "tokenizer.ggml.merges", 16777216 + more);
    gguf_build_finish(&v.file);
    v.finished = true;
    refused(&v, more ? PKV_E_LIMIT : PKV_E_FORMAT,
            more ? "tokenizer.ggml.merges has 16777217 elements, at most 16777216 are allowed"
                 : "merges[0] of 0 bytes is not two pieces");
  }
}

/* A folder's vocabulary by characters: tokens of single bytes that are none, or twice the same. */
static void test_byte_tokens(void **state) {
  (void)state;
  static const char *const pieces[] = {"<0x41>", "<0xZZ>", "<0x41>"};
  for (size_t i = 0; i < 3; i++) {
    vocab_build v;
    pkv_vocab vocab;
    pkv_gguf *gguf = NULL;
    pkv_error err = {0};
    vocab_build_init_empty(&v, NULL);
    (void)vocab_build_token_raw(&v, "<0x41>", 6, 6);
    if (i > 0) (void)vocab_build_token_raw(&v, pieces[i], 6, 6);
    vocab_build_finish(&v);
    assert_int_equal(pkv_gguf_open_memory(&gguf, v.file.file.data, v.file.file.size, NULL, &err),
                     PKV_OK);
    const pkv_status status = pkv_vocab_load(&vocab, PKV_SPELLING_RAW, gguf, NULL, &err);
    assert_int_equal(status, i == 0 ? PKV_OK : PKV_E_FORMAT);
    if (i > 0) assert_non_null(strstr(err.text, "no byte token, or the second one of its byte"));
    if (i == 0) assert_int_equal(vocab.byte_token[0x41], 0);
    pkv_vocab_deinit(&vocab);
    pkv_gguf_close(gguf);
    vocab_build_deinit(&v);
  }
}

/* Texts that no table here can number, and characters that nothing stands for. */
static void test_words(void **state) {
  (void)state;
  vocab_build v;
  pkv_vocab vocab;
  pkv_merges merges;
  pkv_gguf *gguf = NULL;
  pkv_error err = {0};
  pkv_token_sink sink = {NULL, 0, 0};
  pkv_chars_scratch scratch;
  vocab_build_init_empty(&v, NULL);
  (void)vocab_build_token_raw(&v, "a", 1, 1);
  vocab_build_merge_raw(&v, "a a", 3);
  (void)vocab_build_token_raw(&v, "aa", 2, 1);
  vocab_build_finish(&v);
  assert_int_equal(pkv_gguf_open_memory(&gguf, v.file.file.data, v.file.file.size, NULL, &err),
                   PKV_OK);
  assert_int_equal(pkv_vocab_load(&vocab, PKV_SPELLING_RAW, gguf, NULL, &err), PKV_OK);
  assert_int_equal(pkv_merges_load(&merges, &vocab, gguf, &err), PKV_OK);
  const pkv_chars chars = {.vocab = &vocab, .merges = &merges, .unknown = -1};
  pkv_chars_scratch_init(&scratch, NULL);
  assert_int_equal(pkv_chars_encode(&sink, &scratch, &chars, "aaa", 3, true, &err), PKV_OK);
  assert_int_equal(sink.count, 2);
  assert_int_equal(pkv_chars_encode(&sink, &scratch, &chars, "ab", 2, true, &err),
                   PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "no token for a character of 1 bytes that starts with 0x62"));
  /* Neither of these is read. */
  assert_int_equal(
      pkv_chars_encode(&sink, &scratch, &chars, "a", PKV_MERGE_MAX_WORD / 4 + 1, true, &err),
      PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "a text of 268435457 bytes, at most 268435456"));
  assert_int_equal(pkv_merge_word(&sink, &scratch.merge, &merges, &vocab, "a",
                                  PKV_MERGE_MAX_WORD + 1, NULL, 0, &err),
                   PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "a word of 1073741825 bytes, at most 1073741824"));
  assert_int_equal(sink.count, 2);
  pkv_chars_scratch_deinit(&scratch);
  pkv_merges_deinit(&merges);
  pkv_vocab_deinit(&vocab);
  pkv_gguf_close(gguf);
  vocab_build_deinit(&v);
}

/* ------------------------------------------------------------------------------------------
 * Damage and memory
 * ------------------------------------------------------------------------------------------ */

static void small(vocab_build *v) {
  vocab_build_init_empty(v, "llama-bpe");
  for (int b = 'a'; b <= 'e'; b++) {
    const char byte = (char)b;
    (void)vocab_build_token_bytes(v, &byte, 1, 1);
  }
  (void)vocab_build_merge(v, "a", "b");
  (void)vocab_build_merge(v, "ab", "c");
  (void)vocab_build_token(v, "<|im_end|>", 3);
  gguf_build_u32(&v->file, "tokenizer.ggml.eos_token_id", 7);
  vocab_build_finish(v);
}

/* Opens damaged bytes; what opens must work. */
static void use(const unsigned char *bytes, size_t size) {
  pkv_gguf *gguf;
  pkv_tokenizer *t;
  pkv_error err = {0};
  if (pkv_gguf_open_memory(&gguf, bytes, size, NULL, &err) != PKV_OK) return;
  const pkv_status status = pkv_tokenizer_create(&t, gguf, NULL, &err);
  pkv_gguf_close(gguf);
  if (status != PKV_OK) {
    assert_true(err.text[0] != 0);
    return;
  }
  int32_t ids[64];
  size_t count = 0;
  const pkv_status encoded = pkv_tokenizer_encode(ids, 64, &count, t, "abcab<|im_end|>abba", 19,
                                                  PKV_TEXT_PARSE_SPECIAL, &err);
  assert_true(encoded == PKV_OK || encoded == PKV_E_UNSUPPORTED);
  for (size_t i = 0; encoded == PKV_OK && i < count; i++)
    assert_true(ids[i] >= 0 && ids[i] < pkv_tokenizer_vocab(t));
  pkv_tokenizer_destroy(t);
}

static void test_damaged_files(void **state) {
  (void)state;
  vocab_build v;
  small(&v);
  const size_t size = v.file.file.size;
  pkv_rng rng;
  pkv_rng_init(&rng, 3);
  for (size_t at = 0; at < size; at++) {
    unsigned char *cut = gguf_build_exact_copy((const unsigned char *)v.file.file.data, at);
    use(cut, at);
    gguf_build_drop(cut);
    unsigned char *flipped = gguf_build_exact_copy((const unsigned char *)v.file.file.data, size);
    for (int bit = 0; bit < 8; bit++) {
      flipped[at] ^= (unsigned char)(1u << bit);
      use(flipped, size);
      flipped[at] ^= (unsigned char)(1u << bit);
    }
    for (int i = 0; i < 4; i++)
      flipped[pkv_rng_below(&rng, size)] = (unsigned char)pkv_rng_below(&rng, 256);
    use(flipped, size);
    gguf_build_drop(flipped);
  }
  vocab_build_deinit(&v);
}

static pkv_status create_and_encode(void *ctx, const pkv_allocator *allocator) {
  const vocab_build *v = ctx;
  pkv_gguf *gguf;
  pkv_tokenizer *t;
  pkv_error err = {0};
  assert_int_equal(pkv_gguf_open_memory(&gguf, v->file.file.data, v->file.file.size, NULL, &err),
                   PKV_OK);
  pkv_status status = pkv_tokenizer_create(&t, gguf, allocator, &err);
  pkv_gguf_close(gguf);
  assert_true((status == PKV_OK) == (t != NULL));
  if (status != PKV_OK) return status;
  int32_t ids[64];
  size_t count;
  const pkv_text_piece pieces[] = {{"<|im_end|>", 10, true}, {"abcabcabdee", 11, false}};
  status = pkv_tokenizer_encode_pieces(ids, 64, &count, t, pieces, 2, true, true, &err);
  if (status == PKV_OK) assert_int_equal(count, 7); /* end, abc, abc, ab, d, e, e */
  pkv_tokenizer_destroy(t);
  return status;
}

static void test_memory_runs_out(void **state) {
  (void)state;
  vocab_build v;
  small(&v);
  const int64_t allocations = test_alloc_torture(create_and_encode, &v);
  print_message("%lld allocations, each failed once\n", (long long)allocations);
  assert_true(allocations > 10);
  vocab_build_deinit(&v);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_models_and_rules),
      cmocka_unit_test(test_tokens),
      cmocka_unit_test(test_odd_tokens_are_kept),
      cmocka_unit_test(test_types),
      cmocka_unit_test(test_merges),
      cmocka_unit_test(test_ids),
      cmocka_unit_test(test_how_many),
      cmocka_unit_test(test_byte_tokens),
      cmocka_unit_test(test_words),
      cmocka_unit_test(test_damaged_files),
      cmocka_unit_test(test_memory_runs_out),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
