/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_model_inspect and the command on top of it: good models, refused ones, and hostile text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "model/model.h"
#include "support/small_llama.h"
#include "support/test_alloc.h"

typedef struct seen {
  int files, keys, elements, tensors, unsupported;
  int64_t tensor_bytes, element_sum;
  int32_t stop_at_key, stop_at_element, stop_at_tensor; /* 1-based; 0 = never */
  pkv_inspect_file file;
  char problem[PKV_ERROR_TEXT_BYTES];
  pkv_model_info info;
  char last_text[32];
} seen;

static int32_t on_file(void *user, const pkv_inspect_file *f) {
  seen *s = user;
  assert_int_equal(s->keys + s->tensors, 0);
  s->files++;
  s->file = *f;
  (void)snprintf(s->problem, sizeof s->problem, "%s", f->problem);
  if (f->model != NULL) s->info = *f->model;
  return 0;
}

static int32_t on_key(void *user, const pkv_inspect_key *k) {
  seen *s = user;
  assert_int_equal(s->files, 1);
  assert_int_equal(s->tensors, 0);
  assert_int_equal(k->index, s->keys);
  return ++s->keys == s->stop_at_key;
}

static int32_t on_element(void *user, const pkv_inspect_key *k, int64_t index,
                          const pkv_inspect_element *e) {
  seen *s = user;
  assert_int_equal(k->index, s->keys - 1);
  assert_true(index >= 0 && index < k->count);
  if (e->kind == PKV_INSPECT_INT) s->element_sum += e->as_int;
  if (e->kind == PKV_INSPECT_TEXT)
    (void)snprintf(s->last_text, sizeof s->last_text, "%.*s", (int)e->text_bytes, e->text);
  return ++s->elements == s->stop_at_element;
}

static int32_t on_tensor(void *user, const pkv_inspect_tensor *t) {
  seen *s = user;
  assert_int_equal(t->index, s->tensors);
  assert_non_null(t->type);
  assert_int_equal(t->elements, t->extent[0] * t->extent[1] * t->extent[2] * t->extent[3]);
  s->tensor_bytes += t->bytes;
  s->unsupported += !t->supported;
  return ++s->tensors == s->stop_at_tensor;
}

static pkv_inspector visitor_of(seen *s) {
  pkv_inspector v = PKV_INSPECTOR_INIT;
  v.user = s;
  v.file = on_file;
  v.key = on_key;
  v.element = on_element;
  v.tensor = on_tensor;
  return v;
}

static void inspect(seen *s, const pkv_inspector *v, gguf_build *b) {
  size_t size = 0;
  pkv_error err = {0};
  test_alloc memory;
  unsigned char *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  if (pkv_model_inspect_memory(bytes, size, v, &a, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(s->files, v->file != NULL);
  test_alloc_finish(&memory);
  gguf_build_drop(bytes);
}

static void begin(gguf_build *b) {
  small_llama t = SMALL_LLAMA_INIT;
  gguf_build_init(b);
  small_llama_build(b, &t);
}

static void test_usable_model(void **state) {
  (void)state;
  gguf_build b;
  seen s = {0};
  const pkv_inspector v = visitor_of(&s);
  begin(&b);
  const int keys = (int)b.value_count, tensors = (int)b.tensor_count;
  inspect(&s, &v, &b);
  assert_int_equal(s.file.usable, PKV_OK);
  assert_string_equal(s.problem, "");
  assert_non_null(s.file.model);
  assert_int_equal(s.info.layers, 2);
  assert_int_equal(s.info.kv_heads, 2);
  assert_int_equal(s.keys, keys);
  assert_int_equal(s.file.keys, keys);
  assert_int_equal(s.tensors, tensors);
  assert_int_equal(s.tensor_bytes, s.file.tensor_bytes);
  assert_int_equal(s.tensor_bytes, s.info.weight_bytes);
  assert_int_equal(s.unsupported, 0);
  assert_true(s.elements > keys); /* arrays have more than one */
}

/* What pkv_model_open refuses is what people want to look at. */
static void test_refused_models(void **state) {
  (void)state;
  gguf_build b;
  seen s = {0};
  const pkv_inspector v = visitor_of(&s);
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "mamba");
  gguf_build_tensor(&b, "weird", 10, 2, (const int64_t[]){256, 3}, NULL, 3 * 84);
  gguf_build_tensor(&b, "plain", 0, 1, (const int64_t[]){8}, NULL, 32);
  inspect(&s, &v, &b);
  assert_int_equal(s.file.usable, PKV_E_UNSUPPORTED);
  assert_null(s.file.model);
  assert_string_equal(s.problem,
                      "general.architecture is \"mamba\": llama, qwen2, qwen3 and gemma3 are "
                      "supported");
  assert_int_equal(s.tensors, 2);
  assert_int_equal(s.unsupported, 1);
  assert_int_equal(s.tensor_bytes, 3 * 84 + 32);
  s = (seen){0};
  gguf_build_init(&b);
  gguf_build_u16(&b, "split.count", 2);
  inspect(&s, &v, &b);
  assert_int_equal(s.file.usable, PKV_E_UNSUPPORTED);
  assert_int_equal(s.keys, 1);
}

static void test_elements_are_limited(void **state) {
  (void)state;
  gguf_build b;
  seen s = {0};
  pkv_inspector v = visitor_of(&s);
  v.max_elements = 2;
  gguf_build_init(&b);
  gguf_build_array_i32(&b, "numbers", (const int32_t[]){1, 20, 300, 4000}, 4);
  gguf_build_strings(&b, "words", (const char *const[]){"a", "bc", "d"}, 3);
  inspect(&s, &v, &b);
  assert_int_equal(s.elements, 4);
  assert_int_equal(s.element_sum, 21);
  assert_string_equal(s.last_text, "bc");
}

static void test_visit_ends(void **state) {
  (void)state;
  gguf_build b;
  seen s = {.stop_at_key = 3};
  pkv_inspector v = visitor_of(&s);
  begin(&b);
  inspect(&s, &v, &b);
  assert_int_equal(s.keys, 3);
  assert_int_equal(s.tensors, 0);
  s = (seen){.stop_at_element = 2};
  begin(&b);
  inspect(&s, &v, &b);
  assert_int_equal(s.elements, 2);
  assert_int_equal(s.tensors, 0);
  s = (seen){.stop_at_tensor = 1};
  begin(&b);
  inspect(&s, &v, &b);
  assert_int_equal(s.tensors, 1);
  s = (seen){0};
  v.file = NULL;
  v.key = NULL;
  v.element = NULL;
  v.tensor = NULL;
  begin(&b);
  inspect(&s, &v, &b);
}

static void test_arguments(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_inspector v = PKV_INSPECTOR_INIT;
  assert_int_equal(pkv_model_inspect(NULL, &v, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_model_inspect("x", NULL, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_model_inspect("/nonexistent", &v, NULL, &err), PKV_E_IO);
  v.max_elements = -1;
  assert_int_equal(pkv_model_inspect("x", &v, NULL, &err), PKV_E_INVALID);
  v.max_elements = 0;
  v.struct_size--;
  assert_int_equal(pkv_model_inspect("x", &v, NULL, &err), PKV_E_INVALID);
}

/* ---- the command ---- */

typedef struct output {
  char *text;
  size_t size;
  int code;
} output;

/* Runs pkv with the arguments on a file of these bytes; stderr joins stdout. */
static output run_pkv(const char *arguments, const unsigned char *bytes, size_t size) {
  char path[] = "/tmp/pkv-inspect-XXXXXX", command[512];
  output out = {calloc(1, 1 << 20), 0, -1};
  const int fd = mkstemp(path);
  assert_true(fd >= 0 && out.text != NULL);
  assert_int_equal(write(fd, bytes, size), size);
  assert_int_equal(close(fd), 0);
  (void)snprintf(command, sizeof command, "%s/pkv inspect %s %s 2>&1", PKV_BINARY_DIR, arguments,
                 path);
  FILE *pipe = popen(command, "r");
  assert_non_null(pipe);
  out.size = fread(out.text, 1, (1 << 20) - 1, pipe);
  const int status = pclose(pipe);
  out.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  (void)unlink(path);
  return out;
}

static output run_built(const char *arguments, gguf_build *b) {
  size_t size = 0;
  unsigned char *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  const output out = run_pkv(arguments, bytes, size);
  gguf_build_drop(bytes);
  return out;
}

static int need_command(void **state) {
  (void)state;
  return access(PKV_BINARY_DIR "/pkv", X_OK);
}

static void has(const output *out, const char *part) {
  if (strstr(out->text, part) == NULL) fail_msg("no \"%s\" in:\n%s", part, out->text);
}

/* Text, keys and values that would write to the terminal, or lie about what they are. */
static void hostile_text(gguf_build *b) {
  gguf_build_init(b);
  gguf_build_string(b, "general.architecture", "\x1b]0;owned\x07\x1b[2J");
  gguf_build_string(b, "general.name", "two\nlines\tand \\ \xe2\x80\xae reversed");
  gguf_build_raw(b, "key\x1b[31m\r\0", 10, 4, "\1\0\0\0", 4);
  gguf_build_strings(b, "words", (const char *const[]){"\xff\xfe", "\xc2\x9b", "\xc4\xa0ok"}, 3);
  gguf_build_tensor(b, "ten\x08sor\xc0", 10, 1, (const int64_t[]){256}, NULL, 84);
  gguf_build_value(b, "nan", 6, "\0\0\xc0\x7f", 4);
  gguf_build_u64(b, "large", UINT64_MAX);
}

static void test_text_is_escaped(void **state) {
  (void)state;
  gguf_build b;
  hostile_text(&b);
  output out = run_built("", &b);
  assert_int_equal(out.code, 0);
  for (size_t i = 0; i < out.size; i++) {
    const unsigned char c = (unsigned char)out.text[i];
    if ((c < 0x20 && c != '\n') || c == 0x7f || c == 0xff || c == 0xc0)
      fail_msg("byte 0x%02x at %zu of:\n%s", c, i, out.text);
  }
  has(&out, "\"\\x1b]0;owned\\x07\\x1b[2J\"");
  has(&out, "\"two\\nlines\\tand \\\\ \\u{202e} reversed\"");
  has(&out, "key\\x1b[31m\\r\\x00");
  has(&out, "\"\\u{9b}\", \"\xc4\xa0ok\"");
  has(&out, "ten\\x08sor");
  has(&out, "(not supported)");
  has(&out, "usable  no: general.architecture is");
  has(&out, "18446744073709551615");
  free(out.text);
}

static void test_json(void **state) {
  (void)state;
  gguf_build b;
  json_error_t error;
  hostile_text(&b);
  output out = run_built("--json", &b);
  assert_int_equal(out.code, 0);
  json_t *root = json_loads(out.text, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
  if (root == NULL) fail_msg("%s in:\n%s", error.text, out.text);
  for (size_t i = 0; i < out.size; i++)
    assert_true(out.text[i] == '\n' || (out.text[i] >= 0x20 && out.text[i] < 0x7f));
  assert_true(json_is_false(json_object_get(root, "usable")));
  assert_true(json_is_null(json_object_get(root, "model")));
  assert_int_equal(json_array_size(json_object_get(root, "keys")), 6);
  const json_t *words = json_object_get(json_array_get(json_object_get(root, "keys"), 3), "value");
  assert_string_equal(json_string_value(json_array_get(words, 0)), "\xef\xbf\xbd\xef\xbf\xbd");
  const json_t *tensor = json_array_get(json_object_get(root, "tensors"), 0);
  assert_string_equal(json_string_value(json_object_get(tensor, "type")), "Q2_K");
  assert_true(json_is_false(json_object_get(tensor, "supported")));
  json_decref(root);
  free(out.text);
}

static void test_usable_model_by_command(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  output out = run_built("", &b);
  assert_int_equal(out.code, 0);
  has(&out, "usable  yes");
  has(&out, "2 layers of width 32, 4 query heads and 2 KV heads of 8, feed-forward 64");
  has(&out, "1e-05");
  has(&out, "blk.1.ffn_down.weight");
  free(out.text);
  begin(&b);
  out = run_built("--summary", &b);
  has(&out, "types (1)");
  assert_null(strstr(out.text, "blk.1.ffn_down.weight"));
  free(out.text);
  begin(&b);
  out = run_built("--full", &b);
  has(&out, "16 of [\"<|endoftext|>\"");
  has(&out, "\"[unused15]\"]");
  free(out.text);
}

static void test_exit_codes(void **state) {
  (void)state;
  output out = run_pkv("", (const unsigned char *)"GGUF", 4);
  assert_int_equal(out.code, 1);
  has(&out, "pkv inspect: /");
  has(&out, ": header: version at offset 4 needs 4 bytes, file has 4");
  free(out.text);
  out = run_pkv("--no-such-option", (const unsigned char *)"GGUF", 4);
  assert_int_equal(out.code, 2);
  free(out.text);
}

int main(void) {
  const struct CMUnitTest library[] = {
      cmocka_unit_test(test_usable_model),
      cmocka_unit_test(test_refused_models),
      cmocka_unit_test(test_elements_are_limited),
      cmocka_unit_test(test_visit_ends),
      cmocka_unit_test(test_arguments),
  };
  const struct CMUnitTest command[] = {
      cmocka_unit_test(test_text_is_escaped),
      cmocka_unit_test(test_json),
      cmocka_unit_test(test_usable_model_by_command),
      cmocka_unit_test(test_exit_codes),
  };
  const int failed = cmocka_run_group_tests_name("library", library, NULL, NULL);
  return failed + cmocka_run_group_tests_name("command", command, need_command, NULL);
}
