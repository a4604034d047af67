/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models that lie in files that are well-formed: every hyper-parameter, key and tensor of a small
 * good model attacked in turn. Each case is refused with a text that names what is wrong.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "model/model.h"
#include "support/test_alloc.h"
#include "support/small_llama.h"

static pkv_status open_bytes(const unsigned char *bytes, size_t size, int32_t check_tensors,
                             pkv_error *err) {
  test_alloc memory;
  pkv_model *model = (pkv_model *)&memory;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  options.allocator = &a;
  options.check_tensors = check_tensors;
  const pkv_status status = pkv_model_open_memory(&model, bytes, size, &options, err);
  if (status != PKV_OK) assert_null(model);
  /* No count of the file was believed: the tables are no larger than the file is. */
  assert_true(memory.peak_bytes < 16 * size + 65536);
  pkv_model_close(model);
  test_alloc_finish(&memory);
  return status;
}

static void expect_checked(gguf_build *b, int32_t check_tensors, pkv_status wanted,
                           const char *part) {
  size_t size = 0;
  pkv_error err = {0};
  unsigned char *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  const pkv_status status = open_bytes(bytes, size, check_tensors, &err);
  if (status != wanted || (wanted != PKV_OK && strstr(err.text, part) == NULL))
    fail_msg("%s \"%s\", expected %s \"%s\"", pkv_status_name(status), err.text,
             pkv_status_name(wanted), part);
  for (const char *c = err.text; *c != '\0'; c++)
    if (*c < 0x20 || *c > 0x7e) fail_msg("byte %d in the message \"%s\"", *c, err.text);
  gguf_build_drop(bytes);
}

static void expect(gguf_build *b, pkv_status wanted, const char *part) {
  expect_checked(b, 0, wanted, part);
}

/* A good model but for one key, which the test writes. */
static void without_key(gguf_build *b, const char *key) {
  small_llama t = SMALL_LLAMA_INIT;
  t.skip_key = key;
  gguf_build_init(b);
  small_llama_build(b, &t);
}

static void without_tensor(gguf_build *b, const char *name) {
  small_llama t = SMALL_LLAMA_INIT;
  t.skip_tensor = name;
  gguf_build_init(b);
  small_llama_build(b, &t);
}

static void test_good(void **state) {
  (void)state;
  static const uint32_t types[] = {0, 1, 2, 3, 6, 7, 8, 30};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    small_llama t = SMALL_LLAMA_INIT;
    gguf_build b;
    t.weight_type = types[i];
    t.output = i % 2 == 0;
    t.tokenizer = i % 3 != 0;
    gguf_build_init(&b);
    small_llama_build(&b, &t);
    expect_checked(&b, 1, PKV_OK, "");
  }
}

static void test_numbers(void **state) {
  (void)state;
  static const struct {
    const char *key;
    uint32_t value;
    const char *part;
  } cases[] = {
      {"llama.block_count", 0, "key llama.block_count is 0, allowed are 1 to"},
      {"llama.block_count", 0x80000000u, "key llama.block_count is 2147483648, allowed are 1 to"},
      {"llama.block_count", UINT32_MAX, "key llama.block_count is 4294967295"},
      {"llama.block_count", 3, "blk.2.attn_norm.weight is missing"},
      {"llama.block_count", 4000, "blk.3999.attn_norm.weight is missing"},
      {"llama.block_count", 1, "blk.1."},
      {"llama.embedding_length", 0, "key llama.embedding_length is 0"},
      {"llama.embedding_length", 0x80000000u, "key llama.embedding_length is 2147483648"},
      {"llama.embedding_length", 31, "embedding_length"},
      {"llama.embedding_length", 64, "token_embd.weight"},
      {"llama.feed_forward_length", 0, "key llama.feed_forward_length is 0"},
      {"llama.feed_forward_length", UINT32_MAX, "key llama.feed_forward_length is 4294967295"},
      {"llama.feed_forward_length", 32, "tensor blk.0.ffn_gate.weight: expected [32, 32]"},
      {"llama.attention.head_count", 0, "key llama.attention.head_count is 0"},
      {"llama.attention.head_count", UINT32_MAX, "key llama.attention.head_count is 4294967295"},
      {"llama.attention.head_count", 1024, "at most 32 query heads a KV head are supported"},
      {"llama.attention.head_count", 5, "llama.attention.head_count is 5, not a multiple"},
      {"llama.attention.head_count", 6, "embedding_length is 32, not a multiple"},
      {"llama.attention.head_count_kv", 0, "key llama.attention.head_count_kv is 0"},
      {"llama.attention.head_count_kv", 3, "not a multiple of llama.attention.head_count_kv"},
      {"llama.attention.head_count_kv", 8, "not a multiple of llama.attention.head_count_kv"},
      {"llama.attention.head_count_kv", 1, "tensor blk.0.attn_k.weight: expected [32, 8]"},
      {"llama.rope.dimension_count", 0, "key llama.rope.dimension_count is 0"},
      {"llama.rope.dimension_count", 7, "llama.rope.dimension_count is 7"},
      {"llama.rope.dimension_count", 10, "llama.rope.dimension_count is 10"},
      {"llama.rope.dimension_count", UINT32_MAX, "llama.rope.dimension_count is 4294967295"},
      {"llama.vocab_size", 0, "key llama.vocab_size is 0"},
      {"llama.vocab_size", 17, "token_embd.weight"},
      {"llama.vocab_size", UINT32_MAX, "key llama.vocab_size is 4294967295"},
      {"llama.context_length", 0, "key llama.context_length is 0"},
      {"llama.context_length", UINT32_MAX, "key llama.context_length is 4294967295"},
      {"llama.context_length", INT32_MAX, "key llama.context_length is 2147483647"},
      {"llama.attention.key_length", 0, "key llama.attention.key_length is 0"},
      {"llama.attention.key_length", 12, "head dimension is 12"},
      {"llama.attention.key_length", 264, "head dimension is 264"},
      {"llama.attention.value_length", 16, "llama.attention.value_length is 16"},
      {"llama.expert_count", 8, "llama.expert_count is 8"},
      {"llama.attention.sliding_window", 0x80000000u,
       "llama.attention.sliding_window is 2147483648"},
      {"tokenizer.ggml.eos_token_id", 16, "key tokenizer.ggml.eos_token_id is 16"},
      {"tokenizer.ggml.bos_token_id", UINT32_MAX, "key tokenizer.ggml.bos_token_id is 4294967295"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    gguf_build b;

    without_key(&b, cases[i].key);
    gguf_build_u32(&b, cases[i].key, cases[i].value);
    size_t size = 0;
    pkv_error err = {0};
    unsigned char *bytes = gguf_build_exact(&b, &size);
    gguf_build_deinit(&b);
    const pkv_status status = open_bytes(bytes, size, 0, &err);
    gguf_build_drop(bytes);
    if ((status != PKV_E_FORMAT && status != PKV_E_UNSUPPORTED) ||
        strstr(err.text, cases[i].part) == NULL)
      fail_msg("%s = %u: %s \"%s\", expected \"%s\"", cases[i].key, cases[i].value,
               pkv_status_name(status), err.text, cases[i].part);
  }
}

static const char *const needed_keys[] = {"general.architecture",
                                          "llama.block_count",
                                          "llama.embedding_length",
                                          "llama.feed_forward_length",
                                          "llama.context_length",
                                          "llama.attention.head_count",
                                          "llama.attention.layer_norm_rms_epsilon",
                                          "tokenizer.ggml.tokens"};
static const char *const optional_keys[] = {"llama.vocab_size",
                                            "llama.rope.dimension_count",
                                            "llama.rope.freq_base",
                                            "llama.attention.head_count_kv",
                                            "tokenizer.ggml.eos_token_id",
                                            "tokenizer.ggml.token_type",
                                            "tokenizer.ggml.merges",
                                            "general.name",
                                            "llama.rope.scaling.type",
                                            "llama.rope.scale_linear",
                                            "llama.rope.scaling.factor",
                                            "llama.attention.scale",
                                            "llama.attention.value_length",
                                            "llama.attention.sliding_window",
                                            "llama.attention.max_alibi_bias",
                                            "llama.embedding_scale",
                                            "tokenizer.chat_template",
                                            "tokenizer.ggml.add_eos_token"};
static const char *const yarn_keys[] = {
    "llama.rope.scaling.original_context_length", "llama.rope.scaling.yarn_beta_fast",
    "llama.rope.scaling.yarn_beta_slow", "llama.rope.scaling.yarn_ext_factor"};

static void test_keys_missing(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof needed_keys / sizeof needed_keys[0]; i++) {
    gguf_build b;
    without_key(&b, needed_keys[i]);
    expect(&b, PKV_E_FORMAT, needed_keys[i]);
  }
}

/* An array where one value belongs is wrong for every key. */
static void test_keys_of_wrong_type(void **state) {
  (void)state;
  const size_t needed = sizeof needed_keys / sizeof needed_keys[0];
  const size_t all = needed + sizeof optional_keys / sizeof optional_keys[0];
  for (size_t i = 0; i < all; i++) {
    const char *key = i < needed ? needed_keys[i] : optional_keys[i - needed];
    gguf_build b;
    without_key(&b, key);
    gguf_build_array_f32(&b, key, (const float[]){1.0f, 2.0f}, 2);
    expect(&b, PKV_E_FORMAT, key);
  }
  for (size_t i = 0; i <= sizeof yarn_keys / sizeof yarn_keys[0]; i++) {
    gguf_build b;
    without_key(&b, NULL);
    gguf_build_string(&b, "llama.rope.scaling.type", "yarn");
    gguf_build_f32(&b, "llama.rope.scaling.factor", 2.0f);
    if (i == sizeof yarn_keys / sizeof yarn_keys[0]) {
      gguf_build_f32(&b, "llama.rope.scaling.yarn_ext_factor", 0.5f);
      expect(&b, PKV_E_UNSUPPORTED, "yarn_ext_factor is 0.5: only 1 is supported");
    } else {
      gguf_build_array_f32(&b, yarn_keys[i], (const float[]){1.0f, 2.0f}, 2);
      expect(&b, PKV_E_FORMAT, yarn_keys[i]);
    }
  }
}

/* What a program gets wrong, not a file. */
static void test_arguments(void **state) {
  (void)state;
  pkv_model *model = NULL;
  pkv_error err = {0};
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  int32_t ids[4];
  const pkv_message turn = {"user", "a"};
  const char *text = NULL;
  size_t n = 0;
  assert_int_equal(pkv_model_open(NULL, "a", NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_model_open(&model, NULL, NULL, &err), PKV_E_INVALID);
  options.struct_size = 1;
  assert_int_equal(pkv_model_open(&model, "a", &options, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "struct_size"));
  options = (pkv_model_options)PKV_MODEL_OPTIONS_INIT;
  options.weights = (pkv_weights)3;
  assert_int_equal(pkv_model_open(&model, "a", &options, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "weights is 3, which is none of pkv_weights");
  assert_int_equal(pkv_tokenize(ids, 4, &n, NULL, "a", 1, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_model_open_memory(NULL, "a", 1, NULL, &err), PKV_E_INVALID);
  gguf_build b;
  size_t size = 0;
  without_key(&b, "tokenizer.ggml.model");
  unsigned char *bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  assert_int_equal(pkv_model_open_memory(&model, bytes, size, NULL, &err), PKV_OK);
  assert_int_equal(pkv_tokenize(ids, 4, &n, model, "a", 1, 0, &err), PKV_E_UNSUPPORTED);
  assert_int_equal(pkv_token_text(&text, &n, model, 0, 0, &err), PKV_E_UNSUPPORTED);
  assert_int_equal(pkv_token_text(&text, &n, NULL, 0, 0, &err), PKV_E_INVALID);
  assert_int_equal(pkv_chat_tokenize(ids, 4, &n, model, &turn, 1, 1, &err), PKV_E_UNSUPPORTED);
  assert_int_equal(pkv_chat_tokenize(ids, 4, &n, NULL, &turn, 1, 1, &err), PKV_E_INVALID);
  const pkv_token_trie *trie = NULL;
  assert_int_equal(pkv_model_trie(&trie, model, &err), PKV_E_UNSUPPORTED);
  assert_int_equal(pkv_model_open_random(NULL, "{}", 0, NULL, &err), PKV_E_INVALID);
  pkv_model *none = NULL;
  assert_int_equal(pkv_model_open_random(&none, NULL, 0, NULL, &err), PKV_E_INVALID);
  pkv_model_close(model);
  options = (pkv_model_options)PKV_MODEL_OPTIONS_INIT;
  options.tokenizer_only = 1;
  assert_int_equal(pkv_model_open_memory(&model, bytes, size, &options, &err), PKV_E_FORMAT);
  assert_non_null(strstr(err.text, "the file has no tokenizer"));
  assert_null(model);
  gguf_build_drop(bytes);
}

static void test_pieces(void **state) {
  (void)state;
  pkv_model *model = NULL;
  gguf_build b;
  size_t size = 0, n = 0;
  int32_t ids[4];
  pkv_error err = {0};
  without_key(&b, NULL);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  assert_int_equal(pkv_model_open_memory(&model, bytes, size, NULL, &err), PKV_OK);
  const pkv_tokenizer *const t = pkv_model_tokenizer(model);
  pkv_text_piece pieces[2] = {{.text = "a", .bytes = 1}, {.text = NULL, .bytes = 3}};
  assert_int_equal(pkv_tokenizer_encode_pieces(ids, 4, &n, t, pieces, 2, false, false, &err),
                   PKV_E_INVALID);
  assert_string_equal(err.text, "piece 1 is NULL with 3 bytes");
  pieces[1] = (pkv_text_piece){.text = "b", .bytes = SIZE_MAX};
  assert_int_equal(pkv_tokenizer_encode_pieces(ids, 4, &n, t, pieces, 2, false, false, &err),
                   PKV_E_LIMIT);
  assert_int_equal(pkv_tokenizer_encode_pieces(ids, 4, &n, t, NULL, 1, false, false, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode_pieces(ids, 4, NULL, t, pieces, 1, false, false, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_tokenizer_encode_pieces(NULL, 4, &n, t, pieces, 1, false, false, &err),
                   PKV_E_INVALID);
  pkv_model_close(model);
  gguf_build_drop(bytes);
}

static void test_rope_factors(void **state) {
  (void)state;
  static const float wrong[] = {NAN, 0.0f, -1.0f, INFINITY};
  for (size_t i = 0; i < 4; i++) {
    const float factors[4] = {1.0f, 1.0f, wrong[i], 1.0f};
    gguf_build b;
    without_key(&b, NULL);
    gguf_build_tensor(&b, "rope_freqs.weight", 0, 1, (const int64_t[]){4}, factors, sizeof factors);
    expect(&b, PKV_E_FORMAT, "rope_freqs.weight[2] is ");
  }
}

static void test_floats(void **state) {
  (void)state;
  static const char *const keys[] = {"llama.rope.freq_base",
                                     "llama.attention.layer_norm_rms_epsilon"};
  const float values[] = {NAN, INFINITY, -INFINITY, 0.0f, -1.0f, 1e30f};
  for (size_t k = 0; k < 2; k++)
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
      gguf_build b;
      without_key(&b, keys[k]);
      gguf_build_f32(&b, keys[k], values[i]);
      expect(&b, PKV_E_FORMAT, keys[k]);
    }
  gguf_build b;
  without_key(&b, NULL);
  gguf_build_string(&b, "llama.rope.scaling.type", "linear");
  gguf_build_f32(&b, "llama.rope.scaling.factor", NAN);
  expect(&b, PKV_E_FORMAT, "llama.rope.scaling.factor is nan");
}

static void test_names_of_things(void **state) {
  (void)state;
  gguf_build b;
  without_key(&b, "general.architecture");
  gguf_build_string(&b, "general.architecture", "mamba\x1b[31m\n");
  expect(&b, PKV_E_UNSUPPORTED, "general.architecture is \"mamba?[31m?\"");
  without_key(&b, NULL);
  gguf_build_string(&b, "llama.rope.scaling.type", "ya\x07rn");
  expect(&b, PKV_E_UNSUPPORTED, "llama.rope.scaling.type is \"ya?rn\"");
  without_key(&b, NULL);
  gguf_build_tensor(&b, "bl\x1bk.0.extra", 0, 1, (const int64_t[]){8}, NULL, 32);
  expect(&b, PKV_E_UNSUPPORTED, "tensor bl?k.0.extra is not part of");
  without_key(&b, "tokenizer.ggml.model");
  gguf_build_string(&b, "tokenizer.ggml.model", "bert");
  expect(&b, PKV_E_UNSUPPORTED, "tokenizer.ggml.model is 'bert'");
  without_key(&b, "tokenizer.ggml.pre");
  gguf_build_string(&b, "tokenizer.ggml.pre", "viking");
  expect(&b, PKV_E_UNSUPPORTED, "tokenizer.ggml.pre is 'viking'");
}

static const struct {
  const char *name;
  int64_t inputs, outputs; /* outputs 1: a vector */
} tensors[] = {{"token_embd.weight", 32, 16},        {"output_norm.weight", 32, 1},
               {"blk.0.attn_norm.weight", 32, 1},    {"blk.0.attn_q.weight", 32, 32},
               {"blk.0.attn_k.weight", 32, 16},      {"blk.1.attn_v.weight", 32, 16},
               {"blk.1.attn_output.weight", 32, 32}, {"blk.1.ffn_norm.weight", 32, 1},
               {"blk.0.ffn_gate.weight", 32, 64},    {"blk.0.ffn_up.weight", 32, 64},
               {"blk.1.ffn_down.weight", 64, 32}};
#define TENSORS (sizeof tensors / sizeof tensors[0])

static void add_tensor(gguf_build *b, size_t i, uint32_t type, int64_t element_bytes,
                       int64_t inputs, int64_t outputs, uint32_t dims) {
  const int64_t extent[4] = {inputs, outputs, 1, dims == 4 ? 2 : 1};
  int64_t bytes = element_bytes;
  for (uint32_t d = 0; d < dims; d++)
    bytes *= extent[d];
  gguf_build_tensor(b, tensors[i].name, type, dims, extent, NULL, (size_t)bytes);
}

static void test_tensors_missing(void **state) {
  (void)state;
  for (size_t i = 0; i < TENSORS; i++) {
    gguf_build b;
    without_tensor(&b, tensors[i].name);
    expect(&b, PKV_E_FORMAT, tensors[i].name);
  }
}

static void test_tensors_of_wrong_shape(void **state) {
  (void)state;
  for (size_t i = 0; i < TENSORS; i++) {
    const int64_t in = tensors[i].inputs, out = tensors[i].outputs;
    gguf_build b;
    without_tensor(&b, tensors[i].name);
    add_tensor(&b, i, 0, 4, in - 1, out, 2);
    expect(&b, PKV_E_FORMAT, tensors[i].name);
    without_tensor(&b, tensors[i].name);
    add_tensor(&b, i, 0, 4, in, out + 1, 2);
    expect(&b, PKV_E_FORMAT, tensors[i].name);
    without_tensor(&b, tensors[i].name);
    add_tensor(&b, i, 0, 4, in, out, 4);
    expect(&b, PKV_E_FORMAT, tensors[i].name);
    if (in == out || out == 1) continue;
    without_tensor(&b, tensors[i].name);
    add_tensor(&b, i, 0, 4, out, in, 2);
    expect(&b, PKV_E_FORMAT, tensors[i].name);
  }
}

static void test_tensors_of_wrong_type(void **state) {
  (void)state;
  static const struct {
    uint32_t type;
    int64_t bytes;
    const char *name;
  } types[] = {{24, 1, "I8"}, {26, 4, "I32"}, {28, 8, "F64"}};
  for (size_t i = 0; i < TENSORS; i++)
    for (size_t k = 0; k < 3; k++) {
      gguf_build b;
      char part[96];
      (void)snprintf(part, sizeof part, "tensor %s has type %s", tensors[i].name, types[k].name);
      without_tensor(&b, tensors[i].name);
      add_tensor(&b, i, types[k].type, types[k].bytes, tensors[i].inputs, tensors[i].outputs, 2);
      expect(&b, PKV_E_UNSUPPORTED, part);
    }
}

static void test_vocabulary(void **state) {
  (void)state;
  gguf_build b;
  without_key(&b, "tokenizer.ggml.tokens");
  gguf_build_strings(&b, "tokenizer.ggml.tokens", (const char *const[]){"a", "b"}, 2);
  expect(&b, PKV_E_FORMAT, "tokenizer.ggml.t");
  without_key(&b, "tokenizer.ggml.tokens");
  gguf_build_strings(&b, "tokenizer.ggml.tokens", NULL, 0);
  expect(&b, PKV_E_FORMAT, "tokenizer.ggml.tokens is missing or empty");
  without_key(&b, "tokenizer.ggml.token_type");
  gguf_build_array_i32(&b, "tokenizer.ggml.token_type", (const int32_t[]){1}, 1);
  expect(&b, PKV_E_FORMAT, "tokenizer.ggml.token_type has 1 elements");
  without_key(&b, "tokenizer.ggml.merges");
  gguf_build_strings(&b, "tokenizer.ggml.merges", (const char *const[]){"nospace"}, 1);
  expect(&b, PKV_E_FORMAT, "tokenizer.ggml.merges");
}

/* A name that reads as one of the layer's, but is none that anything is bound to. */
static void test_tensor_without_a_place(void **state) {
  (void)state;
  gguf_build b;
  without_key(&b, NULL);
  gguf_build_tensor(&b, "blk.00.attn_norm.weight", 0, 1, (const int64_t[]){32}, NULL, 128);
  expect(&b, PKV_E_FORMAT, "tensors in the file, ");
}

/* As many rows as tokens can have numbers, and one more. Nothing of them is ever touched. */
static void test_rows_of_the_embedding(void **state) {
  (void)state;
  for (int64_t rows = INT32_MAX; rows <= (int64_t)INT32_MAX + 1; rows++) {
    small_llama t = SMALL_LLAMA_INIT;
    gguf_build b;
    pkv_error err = {0};
    t.tokenizer = false;
    t.skip_key = "llama.vocab_size";
    t.skip_tensor = "token_embd.weight";
    gguf_build_init(&b);
    small_llama_build(&b, &t);
    gguf_build_tensor_at(&b, "token_embd.weight", 2, 2, (const int64_t[]){32, rows},
                         (b.data.size + 31) / 32 * 32);
    gguf_build_finish(&b);
    const size_t room = b.file.size + 64 + 18 * (size_t)rows;
    unsigned char *const file = mmap(NULL, room, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(file, MAP_FAILED);
    memcpy(file, b.file.data, b.file.size);
    gguf_build_deinit(&b);
    const pkv_status status = open_bytes(file, room, 0, &err);
    if (rows <= INT32_MAX) {
      if (status != PKV_OK) fail_msg("%s", err.text);
    } else {
      assert_int_equal(status, PKV_E_FORMAT);
      assert_non_null(strstr(err.text, "token_embd.weight has 2147483648 rows"));
    }
    assert_int_equal(munmap(file, room), 0);
  }
}

/* A tokenizer of 16 tokens and an embedding of 17. */
static void test_tokens_and_rows(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  gguf_build b;
  t.skip_key = "llama.vocab_size";
  t.skip_tensor = "token_embd.weight";
  gguf_build_init(&b);
  small_llama_build(&b, &t);
  add_tensor(&b, 0, 0, 4, 32, 17, 2);
  expect(&b, PKV_E_FORMAT, "the tokenizer has 16 tokens, token_embd.weight has 17 rows");
}

/* L2, L5: files that are no whole model say so, whatever else they lack. */
static void test_not_a_whole_model(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "llama");
  expect(&b, PKV_E_UNSUPPORTED, "no tensors: vocabulary file");
  without_key(&b, NULL);
  gguf_build_u16(&b, "split.no", 0);
  gguf_build_u16(&b, "split.count", 2);
  expect(&b, PKV_E_UNSUPPORTED, "file is shard 1 of 2");
  gguf_build_init(&b);
  gguf_build_u16(&b, "split.no", 1);
  gguf_build_u16(&b, "split.count", 2);
  gguf_build_tensor(&b, "blk.1.attn_norm.weight", 0, 1, (const int64_t[]){32}, NULL, 128);
  expect(&b, PKV_E_UNSUPPORTED, "file is shard 2 of 2");
}

/* L11: a weight that is no number is found by the tensor's name, and only when asked for. */
static void test_nan_in_weights(void **state) {
  (void)state;
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  for (size_t k = 0; k < 3; k++)
    for (int32_t check = 0; check <= 1; check++) {
      gguf_build b;
      float data[32 * 64];
      for (size_t i = 0; i < 32 * 64; i++)
        data[i] = 0.1f;
      data[77] = bad[k];
      without_tensor(&b, "blk.0.ffn_up.weight");
      gguf_build_tensor(&b, "blk.0.ffn_up.weight", 0, 2, (const int64_t[]){32, 64}, data,
                        sizeof data);
      expect_checked(&b, check, check ? PKV_E_FORMAT : PKV_OK,
                     "tensor blk.0.ffn_up.weight: element 77 of type F32 is not finite");
    }
}

/* The same in super-blocks: each of their one or two halves, by the block's number. */
static void test_nan_in_super_blocks(void **state) {
  (void)state;
  static const struct {
    const char *file, *type;
    size_t block, halves[2];
  } cases[] = {{"good_q4_k", "Q4_K", 144, {0, 2}},
               {"good_q5_k", "Q5_K", 176, {0, 2}},
               {"good_q6_k", "Q6_K", 210, {208, 208}}};
  for (size_t i = 0; i < 6; i++) {
    char path[512], part[128];
    static unsigned char bytes[1 << 16];
    pkv_error err = {0};
    pkv_gguf *gguf = NULL;
    (void)snprintf(path, sizeof path, PKV_SOURCE_DIR "/fuzz/corpus/model/%s", cases[i / 2].file);
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail_msg("%s cannot be opened", path);
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    assert_int_equal(open_bytes(bytes, size, 1, &err), PKV_OK);
    assert_int_equal(pkv_gguf_open_memory(&gguf, bytes, size, NULL, &err), PKV_OK);
    const unsigned char *data = pkv_gguf_find_tensor(gguf, "blk.0.ffn_up.weight")->data;
    const size_t at = (size_t)(data - bytes) + 5 * cases[i / 2].block + cases[i / 2].halves[i % 2];
    pkv_gguf_close(gguf);
    bytes[at] = 0;
    bytes[at + 1] = 0x7c;
    assert_int_equal(open_bytes(bytes, size, 0, &err), PKV_OK);
    (void)snprintf(part, sizeof part,
                   "tensor blk.0.ffn_up.weight: block 5 of type %s is not finite",
                   cases[i / 2].type);
    const pkv_status status = open_bytes(bytes, size, 1, &err);
    if (status != PKV_E_FORMAT || strstr(err.text, part) == NULL)
      fail_msg("%s \"%s\", expected \"%s\"", pkv_status_name(status), err.text, part);
  }
}

/* gemma3: what it needs beyond llama, missing or out of range. */
static void test_gemma(void **state) {
  (void)state;
  static const struct {
    const char *find, *put, *part; /* the same length */
    pkv_status status;
  } cases[] = {{"gemma3.attention.sliding_window", "gemma3.attention.sliding_windox",
                "gemma3.attention.sliding_window", PKV_E_FORMAT},
               {"blk.3.attn_q_norm.weight", "blk.3.attn_q_nurm.weight", "blk.3.attn_q_norm.weight",
                PKV_E_FORMAT},
               {"blk.6.post_ffw_norm.weight", "blk.6.post_ffw_nurm.weight",
                "blk.6.post_ffw_norm.weight", PKV_E_FORMAT},
               {"gemma3.attention.sliding_window\x04\0\0\0\x20",
                "gemma3.attention.sliding_window\x04\0\0\0\0", "gemma3.attention.sliding_window",
                PKV_E_FORMAT},
               {"gemma3.block_count\x04\0\0\0\x07", "gemma3.block_count\x04\0\0\0\x3e",
                "gemma3.block_count is 62", PKV_E_FORMAT}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    static unsigned char bytes[1 << 17];
    pkv_error err = {0};
    FILE *file = fopen(PKV_SOURCE_DIR "/fuzz/corpus/model/good_gemma3", "rb");
    assert_non_null(file);
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    assert_int_equal(open_bytes(bytes, size, 0, &err), PKV_OK);
    size_t n = strlen(cases[i].find), at = 0;
    if (cases[i].find[n - 1] == 4) n += 4; /* key, type u32, first byte of the value */
    while (at + n <= size && memcmp(bytes + at, cases[i].find, n) != 0)
      at++;
    assert_true(at + n <= size);
    memcpy(bytes + at, cases[i].put, n);
    const pkv_status status = open_bytes(bytes, size, 0, &err);
    if (status != cases[i].status || strstr(err.text, cases[i].part) == NULL)
      fail_msg("%s \"%s\", expected \"%s\"", pkv_status_name(status), err.text, cases[i].part);
  }
}

typedef struct memory_file {
  const unsigned char *bytes;
  size_t size;
} memory_file;

static pkv_status open_close(void *ctx, const pkv_allocator *allocator) {
  const memory_file *file = ctx;
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.allocator = allocator;
  const pkv_status status = pkv_model_open_memory(&model, file->bytes, file->size, &options, NULL);
  pkv_model_close(model);
  return status;
}

static void test_no_memory(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  memory_file file = {NULL, 0};
  t.tokenizer = false;
  unsigned char *bytes = small_llama_bytes(&t, &file.size);
  file.bytes = bytes;
  const int64_t aligned = test_alloc_torture(open_close, &file);
  assert_true(aligned >= 7);
  /* At an odd address each matrix of floats is copied. */
  unsigned char *const moved = malloc(file.size + 1);
  assert_non_null(moved);
  memcpy(moved + 1, bytes, file.size);
  file.bytes = moved + 1;
  assert_true(test_alloc_torture(open_close, &file) > aligned + 10);
  free(moved);
  gguf_build_drop(bytes);
}

/* With a tokenizer some allocations may fail unseen: the pattern library interprets a pattern that
   it has no memory to compile. */
static void test_no_memory_for_text(void **state) {
  (void)state;
  small_llama t = SMALL_LLAMA_INIT;
  memory_file file = {NULL, 0};
  unsigned char *bytes = small_llama_bytes(&t, &file.size);
  int64_t n = 0, refused = 0;
  file.bytes = bytes;
  for (bool more = true; more; n++) {
    test_alloc memory;
    test_alloc_init(&memory);
    const pkv_allocator a = test_alloc_allocator(&memory);
    test_alloc_fail_at(&memory, n + 1, false);
    const pkv_status status = open_close(&file, &a);
    assert_true(status == PKV_OK || status == PKV_E_NOMEM);
    refused += status == PKV_E_NOMEM;
    more = memory.failed > 0;
    test_alloc_finish(&memory);
  }
  assert_true(n > 15);
  print_message("%d allocations, %d of them needed\n", (int)n - 1, (int)refused);
  assert_true(refused * 2 > n);
  gguf_build_drop(bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_good),
      cmocka_unit_test(test_numbers),
      cmocka_unit_test(test_keys_missing),
      cmocka_unit_test(test_keys_of_wrong_type),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_pieces),
      cmocka_unit_test(test_rope_factors),
      cmocka_unit_test(test_floats),
      cmocka_unit_test(test_names_of_things),
      cmocka_unit_test(test_tensors_missing),
      cmocka_unit_test(test_tensors_of_wrong_shape),
      cmocka_unit_test(test_tensors_of_wrong_type),
      cmocka_unit_test(test_vocabulary),
      cmocka_unit_test(test_tensor_without_a_place),
      cmocka_unit_test(test_rows_of_the_embedding),
      cmocka_unit_test(test_tokens_and_rows),
      cmocka_unit_test(test_not_a_whole_model),
      cmocka_unit_test(test_nan_in_weights),
      cmocka_unit_test(test_nan_in_super_blocks),
      cmocka_unit_test(test_gemma),
      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_no_memory_for_text),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
