/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Templates against Python's jinja2: tests/golden/chat_templates.json, which
 * tools/gen_template_golden.py writes. Shipped templates are not in the tree; those found in
 * .cache/templates are tried, the others are skipped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/text.h"
#include "model/chat.h"
#include "support/json_vars.h"
#include "support/vocab_build.h"

static json_t *golden;
static pkv_tokenizer *tokenizer; /* for its bos and eos, <s> and </s> */
static int64_t now;

static int load(void **state) {
  (void)state;
  json_error_t error;
  golden = json_load_file(PKV_SOURCE_DIR "/tests/golden/chat_templates.json", 0, &error);
  if (golden == NULL) fail_msg("line %d: %s", error.line, error.text);
  now = json_integer_value(json_object_get(golden, "now"));
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  const int32_t bos = vocab_build_token(&v, "<s>", 3), eos = vocab_build_token(&v, "</s>", 3);
  gguf_build_u32(&v.file, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
  gguf_build_u32(&v.file, "tokenizer.ggml.eos_token_id", (uint32_t)eos);
  tokenizer = vocab_build_open(&v);
  vocab_build_deinit(&v);
  return 0;
}

static int unload(void **state) {
  (void)state;
  json_decref(golden);
  pkv_tokenizer_destroy(tokenizer);
  return 0;
}

/* FNV-1a, as the generator has it. */
static void hash_text(char out[17], const char *p, size_t n) {
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < n; i++)
    h = (h ^ (unsigned char)p[i]) * 0x100000001b3u;
  (void)snprintf(out, 17, "%016llx", (unsigned long long)h);
}

/* False: refused, with err filled. */
static bool render(pkv_template_output *out, const char *source, size_t bytes, const json_t *vars,
                   pkv_error *err) {
  pkv_template *t = NULL;
  *out = (pkv_template_output){0};
  if (pkv_template_compile(&t, source, bytes, NULL, err) != PKV_OK) return false;
  pkv_template_value v = json_vars(vars);
  const pkv_status status = pkv_template_render(out, t, &v, now, NULL, err);
  json_vars_free(&v);
  pkv_template_destroy(t);
  return status == PKV_OK;
}

/* want: the text, its hash, or null where jinja2 refuses; ok: whether we did not. Frees out. */
static bool compare(pkv_template_output *out, bool ok, const char *name, size_t index,
                    const json_t *want, bool hashed, const pkv_error *err) {
  char hash[17];
  const char *const expected = json_string_value(want);
  hash_text(hash, ok ? out->text : "", out->bytes);
  bool same = ok == (expected != NULL);
  if (same && ok)
    same = hashed ? strcmp(hash, expected) == 0
                  : out->bytes == json_string_length(want) &&
                        memcmp(out->text, expected, out->bytes) == 0;
  if (!same)
    print_message("%s %zu: want %s\n got %s\n", name, index, expected ? expected : "(refused)",
                  ok ? out->text : err->text);
  pkv_template_output_free(out);
  return same;
}

static bool check(const char *name, size_t index, const char *source, size_t bytes,
                  const json_t *vars, const json_t *want, bool hashed) {
  pkv_template_output out;
  pkv_error err = {PKV_OK, "", ""};
  const bool ok = render(&out, source, bytes, vars, &err);
  return compare(&out, ok, name, index, want, hashed, &err);
}

static void test_constructs(void **state) {
  (void)state;
  const json_t *const vars = json_object_get(golden, "variables");
  size_t i, wrong = 0;
  const json_t *item;
  const json_t *const list = json_object_get(golden, "constructs");
  assert_true(json_array_size(list) > 400);
  json_array_foreach(list, i, item) {
    const json_t *const source = json_object_get(item, "template");
    wrong += !check(json_string_value(source), i, json_string_value(source),
                    json_string_length(source), vars, json_object_get(item, "text"), false);
  }
  assert_int_equal(wrong, 0);
}

/* Every request as the chat API gets it, tools and calls included. */
static void check_requests(const char *name, const pkv_buffer *source, const json_t *texts,
                           bool hashed) {
  const json_t *const requests = json_object_get(golden, "requests");
  const pkv_span text = {source->data, source->size};
  pkv_chat_template *chat = NULL;
  pkv_error err = {PKV_OK, "", ""};
  size_t i, wrong = 0;
  const json_t *request;
  assert_int_equal(json_array_size(texts), json_array_size(requests));
  if (pkv_chat_template_create(&chat, text, tokenizer, NULL, &err) != PKV_OK)
    fail_msg("%s: %s", name, err.text);
  json_array_foreach(requests, i, request) {
    pkv_template_output out;
    const pkv_status status = pkv_chat_render_json(&out, chat, json_string_value(request),
                                                   json_string_length(request), 1, now, &err);
    wrong += !compare(&out, status == PKV_OK, name, i, json_array_get(texts, i), hashed, &err);
  }
  pkv_chat_template_destroy(chat);
  if (wrong > 0) fail_msg("%s: %zu of %zu requests differ", name, wrong, i);
}

/* Every conversation and every request through one template. */
static void check_all(const char *name, const pkv_buffer *source, const json_t *item, bool hashed) {
  const json_t *const texts = json_object_get(item, "texts");
  const json_t *const talks = json_object_get(golden, "conversations");
  const json_t *talk;
  size_t i, wrong = 0;
  assert_int_equal(json_array_size(texts), json_array_size(talks));
  json_array_foreach(talks, i, talk) wrong +=
      !check(name, i, source->data, source->size, talk, json_array_get(texts, i), hashed);
  if (wrong > 0) fail_msg("%s: %zu of %zu conversations differ", name, wrong, i);
  check_requests(name, source, json_object_get(item, "requests"), hashed);
}

static void test_own_templates(void **state) {
  (void)state;
  size_t i;
  const json_t *item;
  const json_t *const list = json_object_get(golden, "templates");
  assert_true(json_array_size(list) >= 5);
  json_array_foreach(list, i, item) {
    const char *const name = json_string_value(json_object_get(item, "name"));
    char path[512];
    pkv_buffer source;
    pkv_buffer_init(&source, PKV_TEMPLATE_SOURCE_BYTES, NULL);
    (void)snprintf(path, sizeof path, "%s/tests/data/chat_templates/%s", PKV_SOURCE_DIR, name);
    assert_int_equal(pkv_buffer_read_file(&source, path, NULL), PKV_OK);
    check_all(name, &source, item, false);
    pkv_buffer_deinit(&source);
  }
}

static void test_shipped_templates(void **state) {
  (void)state;
  size_t i, tried = 0;
  const json_t *item;
  const json_t *const list = json_object_get(golden, "shipped");
  json_array_foreach(list, i, item) {
    const char *const name = json_string_value(json_object_get(item, "name"));
    char path[512], hash[17];
    pkv_buffer source;
    pkv_buffer_init(&source, PKV_TEMPLATE_SOURCE_BYTES, NULL);
    (void)snprintf(path, sizeof path, "%s/../templates/%s.jinja", PKV_MODEL_DIR, name);
    if (pkv_buffer_read_file(&source, path, NULL) == PKV_OK) {
      hash_text(hash, source.data, source.size);
      assert_string_equal(hash, json_string_value(json_object_get(item, "hash")));
      check_all(name, &source, item, true);
      tried++;
    } else {
      print_message("skipped: %s.jinja is not in .cache/templates\n", name);
    }
    pkv_buffer_deinit(&source);
  }
  print_message("%zu of %zu shipped templates tried\n", tried, json_array_size(list));
  if (tried < json_array_size(list)) skip();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_constructs),
      cmocka_unit_test(test_own_templates),
      cmocka_unit_test(test_shipped_templates),
  };
  return cmocka_run_group_tests(tests, load, unload);
}
