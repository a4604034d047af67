/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folders that are wrong on purpose: each is a copy of a good one with one text replaced in one
 * file, and is refused with a text that names what is wrong. Files with random damage, and no
 * memory at every allocation.
 */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "base/text.h"
#include "pkv/engine.h"
#include "support/test_alloc.h"

#define FOLDERS    PKV_SOURCE_DIR "/tests/data/tiny_folders/"
#define TOKENIZERS PKV_SOURCE_DIR "/tests/data/tokenizers/"
#define MAX_FILES  11

static const char *const names[] = {"config.json",
                                    "generation_config.json",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "model.safetensors",
                                    "model.safetensors.index.json",
                                    "model-00001-of-00002.safetensors",
                                    "model-00002-of-00002.safetensors",
                                    "model-00001-of-00003.safetensors",
                                    "model-00002-of-00003.safetensors",
                                    "model-00003-of-00003.safetensors"};

/* ---- copies ---- */

typedef struct copy {
  char path[256];
} copy;

static void path_of(char out[512], const char *folder, const char *name) {
  (void)snprintf(out, 512, "%s/%s", folder, name);
}

static void write_file(const copy *c, const char *name, const void *bytes, size_t size) {
  char path[512];
  path_of(path, c->path, name);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, size, file), size);
  (void)fclose(file);
}

static void read_file(pkv_buffer *out, const char *folder, const char *name) {
  char path[512];
  path_of(path, folder, name);
  pkv_buffer_init(out, 1 << 20, NULL);
  assert_int_equal(pkv_buffer_read_file(out, path, NULL), PKV_OK);
}

static void copy_make(copy *c, const char *from) {
  (void)snprintf(c->path, sizeof c->path, PKV_BINARY_DIR "/folder-XXXXXX");
  assert_non_null(mkdtemp(c->path));
  for (size_t i = 0; i < MAX_FILES; i++) {
    char path[512];
    pkv_buffer bytes;
    path_of(path, from, names[i]);
    if (access(path, R_OK) != 0) continue;
    read_file(&bytes, from, names[i]);
    write_file(c, names[i], bytes.data, bytes.size);
    pkv_buffer_deinit(&bytes);
  }
}

static void copy_drop(const copy *c) {
  for (size_t i = 0; i < MAX_FILES; i++) {
    char path[512];
    path_of(path, c->path, names[i]);
    (void)unlink(path);
    (void)rmdir(path);
  }
  assert_int_equal(rmdir(c->path), 0);
}

/* In place of the first `find`; it must be there. put NULL: the file goes. */
static void replace(const copy *c, const char *name, const char *find, const char *put) {
  char path[512];
  pkv_buffer bytes;
  path_of(path, c->path, name);
  if (!put) {
    assert_int_equal(unlink(path), 0);
    return;
  }
  read_file(&bytes, c->path, name);
  const char *at = memmem(bytes.data, bytes.size, find, strlen(find));
  if (!at) fail_msg("%s has no %s", name, find);
  const size_t before = (size_t)(at - bytes.data), tail = before + strlen(find);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  (void)fwrite(bytes.data, 1, before, file);
  (void)fwrite(put, 1, strlen(put), file);
  (void)fwrite(bytes.data + tail, 1, bytes.size - tail, file);
  (void)fclose(file);
  pkv_buffer_deinit(&bytes);
}

typedef struct hostile {
  const char *from, *name, *find, *put, *part;
} hostile;

/* 0 or 1: how many were not as expected. */
static int check(const char *root, const hostile *h, int32_t tokenizer_only) {
  char from[512];
  copy c;
  pkv_error err = {0};
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.tokenizer_only = tokenizer_only;
  (void)snprintf(from, sizeof from, "%s%s", root, h->from);
  copy_make(&c, from);
  replace(&c, h->name, h->find, h->put);
  const pkv_status status = pkv_model_open(&model, c.path, &options, &err);
  copy_drop(&c);
  pkv_model_close(model);
  const bool good =
      h->part == NULL ? status == PKV_OK : status != PKV_OK && strstr(err.text, h->part) != NULL;
  if (!good)
    print_message("%s/%s with %s: %s \"%s\", expected \"%s\"\n", h->from, h->name,
                  h->put ? h->put : "-", pkv_status_name(status), err.text,
                  h->part ? h->part : "OK");
  return good ? 0 : 1;
}

/* ---- config.json ---- */

#define CONFIG "config.json"

static void test_config(void **state) {
  static const hostile cases[] = {
      {"qwen3", CONFIG, "", NULL, "cannot open"},
      {"qwen3", CONFIG, "{", "[", "is no JSON"},
      {"qwen3", CONFIG, "\"model_type\": \"qwen3\"", "\"model_type\": \"mamba\"", "\"mamba\""},
      {"qwen3", CONFIG, "\"model_type\": \"qwen3\"", "\"model_type\": 3", "not a string"},
      {"qwen3", CONFIG, "\"model_type\": \"qwen3\"", "\"model_typ\": 3",
       "\"model_type\" is missing"},
      {"qwen3", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0",
       "num_hidden_layers"},
      {"qwen3", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2147483648",
       "num_hidden_layers"},
      {"qwen3", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "blk.2."},
      {"qwen3", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "blk.1."},
      {"qwen3", CONFIG, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2.5", "not an integer"},
      {"qwen3", CONFIG, "\"num_attention_heads\": 4", "\"num_attention_heads\": 0",
       "num_attention_heads"},
      {"qwen3", CONFIG, "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
       "not a multiple"},
      {"qwen3", CONFIG, "\"head_dim\": 8", "\"head_dim\": 0", "head_dim"},
      {"qwen3", CONFIG, "\"head_dim\": 8", "\"head_dim\": 12", "multiples of 8"},
      {"qwen3", CONFIG, "\"hidden_size\": 16", "\"hidden_size\": 32", "token_embd.weight"},
      {"qwen3", CONFIG, "\"vocab_size\": 40", "\"vocab_size\": 41", "token_embd.weight"},
      {"qwen3", CONFIG, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": \"x\"", "rms_norm_eps"},
      {"qwen3", CONFIG, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"relu\"", "hidden_act"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"num_experts\": 8, \"hidden_act\"", "num_experts"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"quantization_config\": {}, \"hidden_act\"",
       "quantization_config"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"head_dim\": 8, \"hidden_act\"", "duplicate"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"auto_map\": {\"a\": \"b\"}, \"hidden_act\"", NULL},
      {"qwen3", CONFIG, "\"eos_token_id\": 2", "\"eos_token_id\": [2, -1]", "eos_token_id"},
      {"qwen3", CONFIG, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0",
       "tie_word_embeddings"},
      {"llama3", CONFIG, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
       "lm_head.weight is missing"},
      {"llama3", CONFIG, "\"rope_type\": \"llama3\"", "\"rope_type\": \"longrope\"", "longrope"},
      {"llama3", CONFIG, "\"low_freq_factor\": 1.0", "\"low_freq_factor\": 4.0", "low_freq_factor"},
      {"llama3", CONFIG, "\"factor\": 8.0", "\"factr\": 8.0", "\"factor\" is missing"},
      {"llama_yarn", CONFIG, "\"factor\": 4.0", "\"mscale\": 1, \"factor\": 4.0", "mscale"},
      {"gemma3", CONFIG, "\"sliding_window\": 6", "\"sliding_window\": 0", "sliding_window"},
      {"gemma3", CONFIG, "\"full_attention\"", "\"half_attention\"", "layer_types[1]"},
      {"gemma3", CONFIG, "\"full_attention\",", "", "layer_types"},
      {"gemma3", CONFIG, "\"query_pre_attn_scalar\": 12", "\"query_pre_attn_scalar\": 0",
       "query_pre_attn_scalar"},
      {"gemma3", CONFIG, "\"model_type\"", "\"final_logit_softcapping\": 30.0, \"model_type\"",
       "final_logit_softcapping"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"use_bidirectional_attention\": true, \"hidden_act\"",
       "use_bidirectional_attention"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"use_bidirectional_attention\": 3, \"hidden_act\"",
       "use_bidirectional_attention"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"num_experts\": \"x\", \"hidden_act\"", "num_experts"},
      {"qwen3", CONFIG, "\"head_dim\": 8", "\"head_dim\": -1", "head_dim"},
      {"llama3", CONFIG, "\"head_dim\": 16", "\"head_dim\": 1", "heads of 1 are not supported"},
      {"llama3", CONFIG, "\"low_freq_factor\": 1.0", "\"low_freq_factor\": \"x\"",
       "low_freq_factor"},
      {"llama3", CONFIG, "\"high_freq_factor\": 4.0", "\"high_freq_factor\": \"x\"",
       "high_freq_factor"},
      {"llama3", CONFIG, "\"original_max_position_embeddings\": 64",
       "\"original_max_position_embeddings\": \"x\"", "original_max_position_embeddings"},
      {"llama_yarn", CONFIG, "\"factor\": 4.0", "\"truncate\": 3, \"factor\": 4.0", "truncate"},
      {"llama_yarn", CONFIG, "\"factor\": 4.0", "\"truncate\": false, \"factor\": 4.0",
       "truncate is false"},
      {"llama_yarn", CONFIG, "\"factor\": 4.0", "\"beta_fast\": \"x\", \"factor\": 4.0",
       "beta_fast"},
      {"llama_yarn", CONFIG, "\"factor\": 4.0", "\"beta_slow\": \"x\", \"factor\": 4.0",
       "beta_slow"},
      {"llama3", CONFIG, "\"rope_type\": \"llama3\"", "\"rope_type\": 3", "rope_type"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"rope_parameters\": [], \"hidden_act\"",
       "\"rope_parameters\" is not an object"},
      {"qwen3", CONFIG, "\"hidden_act\"", "\"rope_scaling\": 3, \"hidden_act\"",
       "\"rope_scaling\" is not an object"},
      {"qwen3", CONFIG, "\"hidden_act\"",
       "\"rope_parameters\": {\"rope_theta\": \"x\"}, \"hidden_act\"", "rope_theta"},
      {"gemma3", CONFIG, "\"model_type\"",
       "\"rope_parameters\": {\"full_attention\": {}, \"sliding_attention\": {\"rope_type\": "
       "\"linear\"}}, \"model_type\"",
       "sliding_attention is scaled"},
      {"gemma3", CONFIG, "\"model_type\"",
       "\"rope_parameters\": {\"full_attention\": {}, \"sliding_attention\": {\"rope_theta\": "
       "\"x\"}}, \"model_type\"",
       "rope_theta"},
      {"llama3", CONFIG, "\"rope_theta\": 10000.0", "\"rope_theta\": \"x\"", "rope_theta"},
      {"gemma3", CONFIG, "\"rope_local_base_freq\": 10000.0", "\"rope_local_base_freq\": \"x\"",
       "rope_local_base_freq"},
      {"gemma3", CONFIG, "\"model_type\"", "\"use_sliding_window\": 3, \"model_type\"",
       "use_sliding_window"},
      {"gemma3", CONFIG, "\"model_type\"", "\"sliding_window_pattern\": 0, \"model_type\"",
       "sliding_window_pattern"},
      {"gemma3", CONFIG, "\"model_type\"", "\"max_window_layers\": -1, \"model_type\"",
       "max_window_layers"},
      {"mistral", CONFIG, "\"hidden_act\"",
       "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"x\"], \"hidden_act\"",
       "layer_types[2]"},
      {"qwen3", CONFIG, "\"bos_token_id\": 1", "\"bos_token_id\": -1", "bos_token_id"},
  };
  (void)state;
  int wrong = 0;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    wrong += check(FOLDERS, &cases[i], 0);
  assert_int_equal(wrong, 0);
}

/* Files beside config.json: none of the good folders has them. */
static void test_more_files(void **state) {
  static const struct {
    const char *from, *name, *text, *part;
    int32_t tokenizer_only;
  } cases[] = {
      {FOLDERS "qwen3", "generation_config.json", "[]", "generation_config.json", 0},
      {FOLDERS "qwen3", "generation_config.json", "{\"eos_token_id\": \"x\"}", "eos_token_id", 0},
      {FOLDERS "qwen3", "generation_config.json", "{\"bos_token_id\": -2}", "bos_token_id", 0},
      {FOLDERS "qwen3", "generation_config.json", "{\"bos_token_id\": 1}", NULL, 0},
      {TOKENIZERS "gpt2", "tokenizer_config.json", "{", "tokenizer_config.json", 1},
      {TOKENIZERS "gpt2", "tokenizer_config.json", "{\"chat_template\": 3}", NULL, 1},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    copy c;
    pkv_error err = {0};
    pkv_model *model = NULL;
    pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
    options.tokenizer_only = cases[i].tokenizer_only;
    copy_make(&c, cases[i].from);
    write_file(&c, cases[i].name, cases[i].text, strlen(cases[i].text));
    const pkv_status status = pkv_model_open(&model, c.path, &options, &err);
    copy_drop(&c);
    pkv_model_close(model);
    if ((status == PKV_OK) != (cases[i].part == NULL) ||
        (cases[i].part != NULL && strstr(err.text, cases[i].part) == NULL))
      fail_msg("%s: %s \"%s\"", cases[i].text, pkv_status_name(status), err.text);
  }
}

/* The last token of a vocabulary ends turns; one past it is none. */
static void test_end_beyond_the_vocabulary(void **state) {
  copy c;
  pkv_model *model = NULL;
  pkv_buffer config;
  pkv_error err = {0};
  char text[64];
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  (void)state;
  options.tokenizer_only = 1;
  copy_make(&c, TOKENIZERS "gpt2");
  assert_int_equal(pkv_model_open(&model, c.path, &options, &err), PKV_OK);
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, model);
  pkv_model_close(model);
  read_file(&config, FOLDERS "qwen3", CONFIG);
  write_file(&c, CONFIG, config.data, config.size);
  pkv_buffer_deinit(&config);
  (void)snprintf(text, sizeof text, "\"vocab_size\": %d", (int)info.vocab);
  replace(&c, CONFIG, "\"vocab_size\": 40", text);
  for (int more = 0; more < 2; more++) {
    (void)snprintf(text, sizeof text, "{\"eos_token_id\": %d}", (int)info.vocab - 1 + more);
    write_file(&c, "generation_config.json", text, strlen(text));
    const pkv_status status = pkv_model_open(&model, c.path, &options, &err);
    if (status != (more ? PKV_E_FORMAT : PKV_OK)) fail_msg("%s", err.text);
    if (!more) assert_true(pkv_model_is_end(model, info.vocab - 1));
    pkv_model_close(model);
  }
  assert_non_null(strstr(err.text, "eos_token_id of the folder's files is"));
  copy_drop(&c);
}

static pkv_status open_copy(const copy *c, const char *part) {
  pkv_error err = {0};
  pkv_model *model = NULL;
  const pkv_status status = pkv_model_open(&model, c->path, NULL, &err);
  pkv_model_close(model);
  if (status != PKV_OK && strstr(err.text, part) == NULL) fail_msg("\"%s\"", err.text);
  return status;
}

/* A config.json of 4 MiB, and of one byte more; an index that names 1,024 files, and one more. */
static void test_sizes(void **state) {
  copy c;
  pkv_buffer good;
  const size_t most = (size_t)4 << 20;
  (void)state;
  copy_make(&c, FOLDERS "qwen3");
  read_file(&good, c.path, CONFIG);
  char *const text = malloc(most + 1);
  memset(text, ' ', most + 1);
  memcpy(text, good.data, good.size);
  pkv_buffer_deinit(&good);
  write_file(&c, CONFIG, text, most);
  assert_int_equal(open_copy(&c, ""), PKV_OK);
  write_file(&c, CONFIG, text, most + 1);
  assert_int_equal(open_copy(&c, "config.json"), PKV_E_LIMIT);
  copy_drop(&c);
  for (int files = 1024; files <= 1025; files++) {
    copy_make(&c, FOLDERS "llama3");
    size_t at = (size_t)snprintf(text, most, "{\"weight_map\":{");
    for (int i = 0; i < files; i++)
      at +=
          (size_t)snprintf(text + at, most - at, "%s\"%d\":\"%d.safetensors\"", i ? "," : "", i, i);
    at += (size_t)snprintf(text + at, most - at, "}}");
    write_file(&c, "model.safetensors.index.json", text, at);
    if (files == 1024)
      assert_int_equal(open_copy(&c, "0.safetensors"), PKV_E_IO);
    else
      assert_int_equal(open_copy(&c, "names more than 1024 files"), PKV_E_LIMIT);
    copy_drop(&c);
  }
  free(text);
}

/* ---- weights ---- */

#define INDEX  "model.safetensors.index.json"
#define FIRST  "\"model-00001-of-00002.safetensors\""
#define SECOND "model-00002-of-00002.safetensors"

static void test_weights(void **state) {
  static const hostile cases[] = {
      {"llama3", INDEX, "", NULL, "model.safetensors"},
      {"llama3", INDEX, FIRST, "\"../../../../etc/passwd\"", "is not the name"},
      {"llama3", INDEX, FIRST, "\"/etc/passwd.safetensors\"", "is not the name"},
      {"llama3", INDEX, FIRST, "\"..safetensors\"", "is not the name"},
      {"llama3", INDEX, FIRST, "\"a\\u0000.safetensors\"", "is not the name"},
      {"llama3", INDEX, FIRST, "7", "no file name"},
      {"llama3", INDEX, FIRST, "\"missing.safetensors\"", "missing.safetensors"},
      {"llama3", INDEX, FIRST, "\"" SECOND "\"", "which model.safetensors.index.json does not say"},
      {"llama3", INDEX, "weight_map", "weight_mop", "weight_map"},
      {"llama3", INDEX, "\"weight_map\": {", "\"weight_map\": {\"x\": " FIRST ",",
       "names 21 tensors"},
      {"llama3", SECOND, "", NULL, SECOND},
      {"llama3", SECOND, "model.layers.0", "model.layers.9", "does not say"},
      {"qwen2", "model.safetensors", "model.layers.0.self_attn.q_proj.b",
       "model.layers.0.self_attn.x_proj.b", "is not part of a qwen2 model"},
      {"qwen2", "model.safetensors", "model.layers.0.mlp.up_proj", "model.layers.00mlp.up_proj",
       "missing"},
      {"qwen2", "model.safetensors", "BF16", "BF17", "BF17"},
  };
  (void)state;
  int wrong = 0;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    wrong += check(FOLDERS, &cases[i], 0);
  assert_int_equal(wrong, 0);
}

/* The folder under a name of so many bytes. */
static void long_name(char *out, const copy *c, size_t bytes) {
  size_t n = (size_t)snprintf(out, PATH_MAX, "%s", c->path);
  if ((bytes - n) % 2 != 0) out[n++] = '/';
  for (; n < bytes; n += 2)
    memcpy(out + n, "/.", 2);
  out[bytes] = '\0';
}

static void expect_path(const char *path, pkv_status wanted, const char *part) {
  pkv_error err = {0};
  pkv_model *model = NULL;
  const pkv_status status = pkv_model_open(&model, path, NULL, &err);
  pkv_model_close(model);
  if (status != wanted || (part && strstr(err.text, part) == NULL))
    fail_msg("%s \"%s\"", pkv_status_name(status), err.text);
}

/* Names of files that are the longest that the system takes, and one byte more. */
static void test_long_names(void **state) {
  char path[PATH_MAX];
  const size_t most = PATH_MAX - 1;
  copy c;
  (void)state;
  copy_make(&c, FOLDERS "llama3");
  long_name(path, &c, most - strlen("/" INDEX) - strlen("0000"));
  expect_path(path, PKV_OK, NULL); /* those of the weights are four bytes longer */
  long_name(path, &c, most - strlen("/" INDEX));
  expect_path(path, PKV_E_LIMIT, "the folder's name is too long");
  long_name(path, &c, most - strlen("/" INDEX) + 1);
  expect_path(path, PKV_E_LIMIT, "the folder's name is longer than 4096 bytes");
  long_name(path, &c, most);
  expect_path(path, PKV_E_LIMIT, "the folder's name is longer than 4096 bytes");
  copy_drop(&c);
}

static size_t put_tensors(char *text, int file, int count) {
  size_t at = 8;
  for (int i = 0; i < count; i++)
    at += (size_t)snprintf(text + at, 128,
                           "%c\"%d.%d\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                           i ? ',' : '{', file, i, 2 * i, 2 * i + 2);
  text[at++] = '}';
  const uint64_t header = at - 8;
  memcpy(text, &header, 8);
  memset(text + at, 0, 2 * (size_t)count);
  return at + 2 * (size_t)count;
}

/* Two files with as many tensors as are allowed together, and with one more. */
static void test_tensors_of_two_files(void **state) {
  const size_t room = (size_t)8 << 20;
  char *const text = malloc(room);
  copy c;
  (void)state;
  assert_non_null(text);
  copy_make(&c, FOLDERS "llama3");
  write_file(&c, "model-00001-of-00002.safetensors", text, put_tensors(text, 0, 40000));
  write_file(&c, "model-00002-of-00002.safetensors", text, put_tensors(text, 1, 25536));
  assert_int_equal(open_copy(&c, "which model.safetensors.index.json does not say"), PKV_E_FORMAT);
  write_file(&c, "model-00002-of-00002.safetensors", text, put_tensors(text, 1, 25537));
  assert_int_equal(open_copy(&c, "65537 tensors, at most 65536 are supported"), PKV_E_LIMIT);
  copy_drop(&c);
  free(text);
}

/* ---- tokenizer.json ---- */

#define TOKENIZER "tokenizer.json"

static void test_tokenizer(void **state) {
  static const hostile cases[] = {
      {"gpt2", TOKENIZER, "", NULL, "cannot open"},
      {"gpt2", TOKENIZER, "\"type\":\"BPE\"", "\"type\":\"Unigram\"", "Unigram"},
      {"gpt2", TOKENIZER, "\"dropout\":null", "\"dropout\":0.1", "dropout"},
      {"gpt2", TOKENIZER, "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"",
       "end_of_word_suffix"},
      {"gpt2", TOKENIZER, "\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}",
       "Lowercase"},
      {"gpt2", TOKENIZER, "\"add_prefix_space\":false", "\"add_prefix_space\":true", "ByteLevel"},
      {"gpt2", TOKENIZER, "\"!\":0", "\"!\":-1", "id -1"},
      {"gpt2", TOKENIZER, "\"!\":0", "\"!\":1", "are both token 1"},
      {"gpt2", TOKENIZER, "\"!\":0", "\"!\":9223372036854775807", "9223372036854775807"},
      {"gpt2", TOKENIZER, "\"!\":0", "\"!\":\"0\"", "id -1"},
      {"gpt2", TOKENIZER, "\"id\":620", "\"id\":5", "are both token 5"},
      {"gpt2", TOKENIZER, "\"id\":620", "\"id\":false", "id -1"},
      {"gpt2", TOKENIZER, "\"lstrip\":false", "\"lstrip\":true", "lstrip"},
      {"gpt2", TOKENIZER, "\"single_word\":false", "\"single_word\":true", "single_word"},
      {"gpt2", TOKENIZER, "\"merges\":", "\"merge\":", "merges"},
      {"gpt2", TOKENIZER, "\"merges\":[", "\"merges\":[1,", "merges[0]"},
      {"gpt2", TOKENIZER, "\"merges\":[", "\"merges\":[[\"a\"],", "merges[0]"},
      {"gpt2", TOKENIZER, "\"merges\":[", "\"merges\":[\"zz qq\",", "not in the vocabulary"},
      {"gpt2", TOKENIZER, "\"merges\":[", "\"merges\":[\"a b c\",", "merges"},
      {"gpt2", TOKENIZER, "\"vocab\":{", "\"vocab\":[{", ""},
      {"llama3", TOKENIZER, "{1,3}", "{1,4}", "Split"},
      {"llama3", TOKENIZER, "Isolated", "Contiguous", "Split"},
      {"llama3", TOKENIZER, "\"ids\":[620]", "\"ids\":[9999]", "9999"},
      {"llama3", TOKENIZER, "\"ids\":[620]", "\"ids\":[620,621]", "not one token"},
      {"llama3", TOKENIZER, "\"TemplateProcessing\"", "\"BertProcessing\"", "BertProcessing"},
      {"gemma", TOKENIZER, "\"normalized\":false", "\"normalized\":true", "normalized"},
      {"gemma", TOKENIZER, "\"pattern\":{\"String\":\" \"}", "\"pattern\":{\"String\":\"x\"}",
       "Replace"},
      {"gemma", TOKENIZER, "\"unk_token\":\"<unk>\"", "\"unk_token\":\"<unc>\"", "unk_token"},
      {"gemma", TOKENIZER, "\"type\":\"Split\"", "\"type\":\"Whitespace\"", "Whitespace"},
      {"mistral", TOKENIZER, "\"prepend_scheme\":\"first\"", "\"prepend_scheme\":\"last\"",
       "Metaspace"},
      {"gpt2", TOKENIZER, "\"normalizer\":null", "\"normalizer\":3",
       "\"normalizer\" is not an object"},
      {"gpt2", TOKENIZER, "\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\"}",
       "normalizer.normalizers is not a list"},
      {"gpt2", TOKENIZER, "\"normalizer\":null",
       "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{},{},{},{},{},{},{},{},{}]}",
       "at most 8 are supported"},
      {"gpt2", TOKENIZER, "\"normalizer\":null",
       "\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"\xe2\x96\x81\"}", "but keeps spaces"},
      {"gpt2", TOKENIZER, "\"pre_tokenizer\":", "\"pre_tokenizer\":3,\"other\":",
       "\"pre_tokenizer\" is not an object"},
      {"gemma", TOKENIZER, "\"pre_tokenizer\":",
       "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{},{}]},\"other\":",
       "2 steps without ByteLevel"},
      {"gpt2", TOKENIZER, "\"post_processor\":", "\"post_processor\":3,\"other\":",
       "\"post_processor\" is not an object"},
      {"gpt2", TOKENIZER, "\"post_processor\":",
       "\"post_processor\":{\"type\":\"TemplateProcessing\",\"other\":1},\"more\":",
       "\"single\" is not a list"},
      {"gpt2", TOKENIZER, "\"post_processor\":",
       "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{}},{"
       "\"Sequence\":{}}],\"other\":1},\"more\":",
       "repeats the text"},
      {"gpt2", TOKENIZER, "\"post_processor\":",
       "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],\"other\":1},\"more\":",
       "leaves the text out"},
      {"gpt2", TOKENIZER, "\"post_processor\":",
       "\"post_processor\":{\"type\":\"TemplateProcessing\",\"special_tokens\":{\"a\":{\"ids\":[0]}"
       "},\"single\":[{\"SpecialToken\":{\"id\":\"a\"}},{\"SpecialToken\":{\"id\":\"a\"}},{"
       "\"Sequence\":{}}],\"other\":1},\"more\":",
       "more than one token on a side"},
      {"gpt2", TOKENIZER, "\"vocab\":{", "\"vocab\":{},\"other\":{", "model.vocab is missing"},
      {"gpt2", TOKENIZER, "\"added_tokens\":[", "\"added_tokens\":3,\"other\":[",
       "added_tokens is not a list"},
      {"gpt2", TOKENIZER, "\"added_tokens\":[", "\"added_tokens\":[3,",
       "added_tokens[0] is not an object"},
      {"gpt2", TOKENIZER, "\"content\":", "\"contents\":", "content"},
      {"gemma", TOKENIZER, "\"unk_token\":\"<unk>\"", "\"unk_token\":3", "unk_token"},
      {"gpt2", TOKENIZER, "\"fuse_unk\":false", "\"fuse_unk\":3", "fuse_unk"},
      {"gpt2", TOKENIZER, "\"model\":", "\"modle\":", "\"model\" is missing"},
      {"gpt2", TOKENIZER, "\"type\":\"BPE\"", "\"type\":3", "type"},
      {"gpt2", TOKENIZER, "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":3",
       "end_of_word_suffix"},
      {"gpt2", TOKENIZER, "\"dropout\":null", "\"dropout\":\"x\"", "dropout"},
      {"gpt2", TOKENIZER, "\"ignore_merges\":false", "\"ignore_merges\":3", "ignore_merges"},
      {"gpt2", TOKENIZER, "\"truncation\":null", "\"truncation\":[]", NULL},
  };
  (void)state;
  int wrong = 0;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    wrong += check(TOKENIZERS, &cases[i], 1);
  assert_int_equal(wrong, 0);
}

/* ---- damage ---- */

/* Opens, and where it does, turns a text into tokens. */
static void open_any(const copy *c, int32_t tokenizer_only) {
  pkv_error err = {0};
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.tokenizer_only = tokenizer_only;
  const pkv_status status = pkv_model_open(&model, c->path, &options, &err);
  if (status != PKV_OK) {
    assert_null(model);
    assert_true(err.text[0] != '\0');
    return;
  }
  int32_t ids[64];
  size_t count = 0;
  static const char text[] = "some text\n\xc3\xa9 <tool> \xff";
  if (tokenizer_only) {
    const pkv_status tokens =
        pkv_tokenize(ids, 64, &count, model, text, sizeof text - 1, PKV_TEXT_ADD_SPECIAL, &err);
    assert_true(tokens == PKV_OK || err.text[0] != '\0');
  }
  pkv_model_close(model);
}

static void damage(const char *from, const char *name, int32_t tokenizer_only, int rounds) {
  copy c;
  pkv_buffer good;
  pkv_rng rng;
  pkv_rng_init(&rng, 20251130u);
  copy_make(&c, from);
  read_file(&good, c.path, name);
  char *bytes = malloc(good.size);
  for (int round = 0; round < rounds; round++) {
    memcpy(bytes, good.data, good.size);
    size_t size = good.size;
    if (round % 4 == 0) size = (size_t)pkv_rng_below(&rng, good.size - 1) + 1;
    for (int k = 0; k < round % 4; k++)
      bytes[pkv_rng_below(&rng, size)] = (char)(pkv_rng_next(&rng) & 0x7f);
    write_file(&c, name, bytes, size);
    open_any(&c, tokenizer_only);
  }
  free(bytes);
  pkv_buffer_deinit(&good);
  copy_drop(&c);
}

static void test_damaged_files(void **state) {
  (void)state;
  damage(FOLDERS "gemma3", CONFIG, 0, 600);
  damage(FOLDERS "llama3", INDEX, 0, 300);
  damage(FOLDERS "qwen2", "model.safetensors", 0, 300);
  damage(TOKENIZERS "gemma", TOKENIZER, 1, 150);
  damage(TOKENIZERS "llama3", TOKENIZER, 1, 150);
}

/* ---- not files ---- */

static void test_not_files(void **state) {
  copy c;
  pkv_error err = {0};
  pkv_model *model = NULL;
  char path[512];
  (void)state;
  copy_make(&c, FOLDERS "qwen2");
  path_of(path, c.path, CONFIG);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(mkfifo(path, 0600), 0); /* must not hang */
  assert_int_equal(pkv_model_open(&model, c.path, NULL, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "device, pipe or socket"));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(mkdir(path, 0700), 0);
  assert_int_equal(pkv_model_open(&model, c.path, NULL, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "a folder"));
  copy_drop(&c);
}

/* A link is followed, as download caches are made of them; it must lead to a file all the same. */
static void test_links(void **state) {
  static const struct {
    const char *from, *name;
    int32_t tokenizer_only;
  } files[] = {{FOLDERS "qwen2", CONFIG, 0},
               {FOLDERS "qwen2", "model.safetensors", 0},
               {TOKENIZERS "qwen2", "tokenizer.json", 1}};
  static const struct {
    const char *to, *part;
  } ends[] = {{"/dev/zero", "device, pipe or socket"},
              {"/dev/null", "device, pipe or socket"},
              {"..", "a folder"},
              {"nowhere", "cannot open"},
              {"itself", "cannot open"},
              {"pipe", "device, pipe or socket"}};
  (void)state;
  for (size_t f = 0; f < sizeof files / sizeof files[0]; f++) {
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
      copy c;
      pkv_error err = {0};
      pkv_model *model = NULL;
      char path[512], pipe[512];
      const char *const name = files[f].name;
      const char *const to = strcmp(ends[i].to, "itself") == 0 ? name : ends[i].to;
      pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
      options.tokenizer_only = files[f].tokenizer_only;
      copy_make(&c, files[f].from);
      path_of(path, c.path, name);
      path_of(pipe, c.path, "pipe");
      assert_int_equal(mkfifo(pipe, 0600), 0);
      assert_int_equal(unlink(path), 0);
      assert_int_equal(symlink(to, path), 0);
      const pkv_status status = pkv_model_open(&model, c.path, &options, &err);
      assert_int_equal(unlink(pipe), 0);
      copy_drop(&c);
      if (status != PKV_E_IO || strstr(err.text, ends[i].part) == NULL)
        fail_msg("%s as a link to %s: %s \"%s\", expected \"%s\"", name, to,
                 pkv_status_name(status), err.text, ends[i].part);
    }
  }
}

/* ---- memory ---- */

static pkv_status open_once(void *ctx, const pkv_allocator *allocator) {
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  const char *path = ctx;
  options.allocator = allocator;
  options.tokenizer_only = strstr(path, "tokenizers/") != NULL;
  pkv_status status = pkv_model_open(&model, path, &options, NULL);
  if (status == PKV_OK && options.tokenizer_only) { /* marks that compose, bytes that are no text */
    static const char text[] = "e\xcc\x81 to\xe4\xb8\xad\xff a";
    int32_t ids[64];
    size_t count = 0;
    status = pkv_tokenize(ids, 64, &count, model, text, sizeof text - 1, 0, NULL);
  }
  pkv_model_close(model);
  return status;
}

static pkv_status open_random(void *ctx, const pkv_allocator *allocator) {
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.allocator = allocator;
  const pkv_status status = pkv_model_open_random(&model, ctx, 0, &options, NULL);
  pkv_model_close(model);
  return status;
}

/* Random weights for a configuration. */
static void test_random_weights(void **state) {
  static char config[] = FOLDERS "llama3/" CONFIG;
  char path[512];
  copy c;
  pkv_error err = {0};
  pkv_model *model = NULL;
  (void)state;
  assert_true(test_alloc_torture(open_random, config) > 20);
  copy_make(&c, FOLDERS "qwen3");
  path_of(path, c.path, CONFIG);
  assert_int_equal(pkv_model_open_random(&model, path, 0, NULL, &err), PKV_OK);
  pkv_model_close(model);
  replace(&c, CONFIG, "\"vocab_size\"", "\"vocab_sizes\"");
  assert_int_equal(pkv_model_open_random(&model, path, 0, NULL, &err), PKV_E_FORMAT);
  assert_non_null(strstr(err.text, "vocab_size"));
  copy_drop(&c);
}

static void test_no_memory(void **state) {
  static const char *const paths[] = {FOLDERS "llama3", FOLDERS "gemma3", TOKENIZERS "gemma",
                                      TOKENIZERS "qwen2"};
  (void)state;
  for (size_t i = 0; i < 4; i++) {
    char path[512];
    (void)snprintf(path, sizeof path, "%s", paths[i]);
    print_message("%d allocations\n", (int)test_alloc_torture(open_once, path));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_config),
      cmocka_unit_test(test_more_files),
      cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_weights),
      cmocka_unit_test(test_tokenizer),
      cmocka_unit_test(test_damaged_files),
      cmocka_unit_test(test_not_files),
      cmocka_unit_test(test_links),
      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_random_weights),
      cmocka_unit_test(test_long_names),
      cmocka_unit_test(test_end_beyond_the_vocabulary),
      cmocka_unit_test(test_tensors_of_two_files),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
