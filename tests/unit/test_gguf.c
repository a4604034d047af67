/* SPDX-License-Identifier: Apache-2.0 */
/* The GGUF reader on good files: what was written is what is read, and the getters' rules. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/gguf.h"
#include "support/gguf_build.h"

#define MODEL PKV_MODEL_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf"

static pkv_gguf *open_built(gguf_build *b, unsigned char **bytes) {
  size_t size = 0;
  pkv_gguf *g = NULL;
  pkv_error err = {0};
  *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  if (pkv_gguf_open_memory(&g, *bytes, size, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  return g;
}

static void assert_span(pkv_span span, const char *text) {
  if (span.size != strlen(text) || memcmp(span.data, text, span.size) != 0)
    fail_msg("span \"%.*s\", expected \"%s\"", (int)span.size, span.data, text);
}

static void one_of_each(gguf_build *b) {
  gguf_build_init(b);
  gguf_build_u8(b, "k.u8", 200);
  gguf_build_i8(b, "k.i8", -100);
  gguf_build_u16(b, "k.u16", 60000);
  gguf_build_i16(b, "k.i16", -30000);
  gguf_build_u32(b, "k.u32", 4000000000u);
  gguf_build_i32(b, "k.i32", -2000000000);
  gguf_build_u64(b, "k.u64", 10000000000000000000u);
  gguf_build_i64(b, "k.i64", INT64_MIN);
  gguf_build_f32(b, "k.f32", 0.5f);
  gguf_build_f64(b, "k.f64", -1e300);
  gguf_build_bool(b, "k.yes", true);
  gguf_build_bool(b, "k.no", false);
  gguf_build_string(b, "k.text", "some text");
  gguf_build_string(b, "k.empty", "");
  gguf_build_strings(b, "k.words", (const char *const[]){"a", "", "ccc"}, 3);
  gguf_build_array(b, "k.shorts", PKV_GGUF_I16, (const int16_t[]){-1, 2, 300}, 3, 6);
  gguf_build_array(b, "k.floats", PKV_GGUF_F32, (const float[]){1.5f, -2.0f}, 2, 8);
  gguf_build_array(b, "k.none", PKV_GGUF_U32, NULL, 0, 0);
}

static void test_keys_of_all_types(void **state) {
  (void)state;
  unsigned char *bytes = NULL;
  gguf_build b;
  one_of_each(&b);
  pkv_gguf *g = open_built(&b, &bytes);
  static const struct {
    const char *key;
    int64_t value;
  } ints[] = {{"k.u8", 200},         {"k.i8", -100},         {"k.u16", 60000},    {"k.i16", -30000},
              {"k.u32", 4000000000}, {"k.i32", -2000000000}, {"k.i64", INT64_MIN}};
  for (size_t i = 0; i < sizeof ints / sizeof ints[0]; i++) {
    int64_t value = 0;
    assert_int_equal(pkv_gguf_get_int(&value, g, ints[i].key, true, INT64_MIN, INT64_MAX, NULL),
                     PKV_OK);
    if (value != ints[i].value)
      fail_msg("%s is %lld, expected %lld", ints[i].key, (long long)value,
               (long long)ints[i].value);
  }
  double number = 0.0;
  assert_int_equal(pkv_gguf_get_float(&number, g, "k.f32", true, -1, 1, NULL), PKV_OK);
  assert_true(number == 0.5);
  assert_int_equal(pkv_gguf_get_float(&number, g, "k.f64", true, -1e301, 0, NULL), PKV_OK);
  assert_true(number == -1e300);
  bool flag = false;
  assert_int_equal(pkv_gguf_get_bool(&flag, g, "k.yes", true, NULL), PKV_OK);
  assert_true(flag);
  assert_int_equal(pkv_gguf_get_bool(&flag, g, "k.no", true, NULL), PKV_OK);
  assert_false(flag);
  pkv_span text = {NULL, 0};
  assert_int_equal(pkv_gguf_get_string(&text, g, "k.text", true, NULL), PKV_OK);
  assert_span(text, "some text");
  assert_int_equal(pkv_gguf_get_string(&text, g, "k.empty", true, NULL), PKV_OK);
  assert_span(text, "");
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void test_arrays(void **state) {
  (void)state;
  unsigned char *bytes = NULL;
  gguf_build b;
  one_of_each(&b);
  pkv_gguf *g = open_built(&b, &bytes);
  const pkv_gguf_value *words = pkv_gguf_find(g, "k.words");
  assert_non_null(words);
  assert_int_equal(words->type, PKV_GGUF_ARRAY);
  assert_int_equal(words->element_type, PKV_GGUF_STRING);
  assert_int_equal(words->count, 3);
  const unsigned char *cursor = words->data;
  assert_span(pkv_gguf_next_string(&cursor), "a");
  assert_span(pkv_gguf_next_string(&cursor), "");
  assert_span(pkv_gguf_next_string(&cursor), "ccc");
  const pkv_gguf_value *shorts = pkv_gguf_find(g, "k.shorts");
  assert_non_null(shorts);
  assert_int_equal(shorts->count, 3);
  assert_int_equal(pkv_gguf_element_int(shorts, 0), -1);
  assert_int_equal(pkv_gguf_element_int(shorts, 2), 300);
  assert_true(pkv_gguf_element_float(shorts, 0) == -1.0);
  const pkv_gguf_value *floats = pkv_gguf_find(g, "k.floats");
  assert_non_null(floats);
  assert_true(pkv_gguf_element_float(floats, 1) == -2.0);
  assert_int_equal(pkv_gguf_find(g, "k.none")->count, 0);
  assert_true(pkv_gguf_element_float(pkv_gguf_find(g, "k.u64"), 0) == 1e19);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

/* The keys come back in file order, whatever order look-ups use. */
static void test_file_order(void **state) {
  (void)state;
  unsigned char *bytes = NULL;
  gguf_build b;
  one_of_each(&b);
  pkv_gguf *g = open_built(&b, &bytes);
  assert_int_equal(pkv_gguf_version(g), 3);
  assert_int_equal(pkv_gguf_value_count(g), 18);
  assert_span(pkv_gguf_value_at(g, 0)->key, "k.u8");
  assert_span(pkv_gguf_value_at(g, 17)->key, "k.none");
  for (size_t i = 0; i < 18; i++) {
    char key[16];
    const pkv_span name = pkv_gguf_value_at(g, i)->key;
    (void)snprintf(key, sizeof key, "%.*s", (int)name.size, name.data);
    assert_ptr_equal(pkv_gguf_find(g, key), pkv_gguf_value_at(g, i));
  }
  assert_null(pkv_gguf_find(g, "k.u"));
  assert_null(pkv_gguf_find(g, "k.u88"));
  assert_null(pkv_gguf_find(g, ""));
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void expect(pkv_status got, pkv_status wanted, const pkv_error *err, const char *part) {
  if (got != wanted || (part != NULL && strstr(err->text, part) == NULL))
    fail_msg("status %s, text \"%s\"; expected %s, \"%s\"", pkv_status_name(got), err->text,
             pkv_status_name(wanted), part != NULL ? part : "");
}

static void test_getters_refuse(void **state) {
  (void)state;
  unsigned char *bytes = NULL;
  gguf_build b;
  one_of_each(&b);
  pkv_gguf *g = open_built(&b, &bytes);
  pkv_error err = {0};
  int64_t n = 7;
  double x = 7.0;
  bool flag = true;
  pkv_span text = {"x", 1};
  expect(pkv_gguf_get_int(&n, g, "absent", false, 0, 9, &err), PKV_OK, &err, NULL);
  assert_int_equal(n, 7);
  expect(pkv_gguf_get_int(&n, g, "absent", true, 0, 9, &err), PKV_E_FORMAT, &err,
         "key absent is missing");
  expect(pkv_gguf_get_int(&n, g, "k.u8", true, 0, 199, &err), PKV_E_FORMAT, &err,
         "key k.u8 is 200, allowed are 0 to 199");
  expect(pkv_gguf_get_int(&n, g, "k.u64", true, INT64_MIN, INT64_MAX, &err), PKV_E_FORMAT, &err,
         "key k.u64 is 10000000000000000000");
  expect(pkv_gguf_get_int(&n, g, "k.f32", true, 0, 9, &err), PKV_E_FORMAT, &err,
         "key k.f32 has type f32, an integer is needed");
  expect(pkv_gguf_get_int(&n, g, "k.yes", true, 0, 9, &err), PKV_E_FORMAT, &err, "has type bool");
  expect(pkv_gguf_get_int(&n, g, "k.shorts", true, -9, 9, &err), PKV_E_FORMAT, &err,
         "has type array");
  assert_int_equal(n, 7);
  expect(pkv_gguf_get_float(&x, g, "k.u8", true, 0, 900, &err), PKV_E_FORMAT, &err,
         "key k.u8 has type u8, a float is needed");
  expect(pkv_gguf_get_float(&x, g, "k.f32", true, 1, 2, &err), PKV_E_FORMAT, &err,
         "key k.f32 is 0.5, allowed are 1 to 2");
  expect(pkv_gguf_get_float(&x, g, "absent", false, 1, 2, &err), PKV_OK, &err, NULL);
  assert_true(x == 7.0);
  expect(pkv_gguf_get_string(&text, g, "k.words", true, &err), PKV_E_FORMAT, &err,
         "key k.words has type array, a string is needed");
  assert_span(text, "x");
  expect(pkv_gguf_get_bool(&flag, g, "k.u8", true, &err), PKV_E_FORMAT, &err,
         "key k.u8 has type u8, a bool is needed");
  assert_true(flag);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void test_nan_is_out_of_range(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  unsigned char *bytes = NULL;
  pkv_error err = {0};
  double x = 7.0;
  gguf_build_raw(&b, "k.nan", 5, PKV_GGUF_F32, "\x00\x00\xc0\x7f", 4);
  pkv_gguf *g = open_built(&b, &bytes);
  expect(pkv_gguf_get_float(&x, g, "k.nan", true, -1e300, 1e300, &err), PKV_E_FORMAT, &err,
         "key k.nan is nan");
  assert_true(x == 7.0);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void test_tensors(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  unsigned char *bytes = NULL, q4[2 * 20];
  const float values[6] = {1, 2, 3, 4, 5, 6};
  for (size_t i = 0; i < sizeof q4; i++)
    q4[i] = (unsigned char)(i + 1);
  gguf_build_tensor(&b, "z.floats", 0, 2, (const int64_t[]){3, 2}, values, sizeof values);
  gguf_build_tensor(&b, "a.blocks", 3, 2, (const int64_t[]){32, 2}, q4, sizeof q4);
  gguf_build_tensor(&b, "scalar", 0, 0, NULL, values, 4);
  gguf_build_tensor(&b, "four", 24, 4, (const int64_t[]){2, 3, 4, 5}, NULL, 120);
  pkv_gguf *g = open_built(&b, &bytes);
  assert_int_equal(pkv_gguf_tensor_count(g), 4);
  assert_span(pkv_gguf_tensor_at(g, 0)->name, "z.floats");
  const pkv_gguf_tensor *t = pkv_gguf_find_tensor(g, "a.blocks");
  assert_ptr_equal(t, pkv_gguf_tensor_at(g, 1));
  assert_int_equal(t->type, PKV_WTYPE_Q4_1);
  assert_int_equal(t->dims, 2);
  assert_int_equal(t->extent[0], 32);
  assert_int_equal(t->extent[1], 2);
  assert_int_equal(t->extent[2], 1);
  assert_int_equal(t->bytes, sizeof q4);
  assert_memory_equal(t->data, q4, sizeof q4);
  assert_ptr_equal(t->data, bytes + t->offset);
  assert_int_equal(t->offset % 32, 0);
  t = pkv_gguf_find_tensor(g, "scalar");
  assert_int_equal(t->dims, 0);
  assert_int_equal(t->bytes, 4);
  assert_int_equal(pkv_gguf_find_tensor(g, "four")->bytes, 120);
  assert_null(pkv_gguf_find_tensor(g, "fou"));
  assert_int_equal(pkv_gguf_check_whole(g, true, NULL), PKV_OK);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void test_version_2(void **state) {
  (void)state;
  gguf_build b;
  one_of_each(&b);
  unsigned char *bytes = NULL;
  b.version = 2;
  pkv_gguf *g = open_built(&b, &bytes);
  assert_int_equal(pkv_gguf_version(g), 2);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

static void test_type_table(void **state) {
  (void)state;
  static const struct {
    uint32_t type;
    const char *name;
    int64_t block, bytes;
  } want[] = {{0, "F32", 1, 4},       {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
              {3, "Q4_1", 32, 20},    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
              {8, "Q8_0", 32, 34},    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},
              {12, "Q4_K", 256, 144}, {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 210},
              {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136}, {30, "BF16", 1, 2},
              {34, "TQ1_0", 256, 54}, {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
              {41, "Q1_0", 128, 18},  {42, "Q2_0", 64, 18}};
  for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
    const char *name = NULL;
    int64_t block = 0, bytes = 0;
    assert_true(pkv_gguf_type_info(want[i].type, &name, &block, &bytes));
    assert_string_equal(name, want[i].name);
    assert_int_equal(block, want[i].block);
    assert_int_equal(bytes, want[i].bytes);
  }
  const char *name = "";
  assert_false(pkv_gguf_type_info(31, &name, NULL, NULL));
  assert_string_equal(name, "Q4_0_4_4");
  assert_false(pkv_gguf_type_info(43, &name, NULL, NULL));
  assert_null(name);
  assert_false(pkv_gguf_type_info(UINT32_MAX, &name, NULL, NULL));
}

static void test_real_model(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  pkv_span text = {NULL, 0};
  int64_t layers = 0;
  if (access(MODEL, R_OK) != 0) {
    print_message("skipped: %s is not here\n", MODEL);
    skip();
  }
  expect(pkv_gguf_open(&g, MODEL, NULL, &err), PKV_OK, &err, NULL);
  assert_int_equal(pkv_gguf_tensor_count(g), 272);
  assert_int_equal(pkv_gguf_file_bytes(g), 98362432);
  assert_int_equal(pkv_gguf_get_string(&text, g, "general.architecture", true, NULL), PKV_OK);
  assert_span(text, "llama");
  assert_int_equal(pkv_gguf_get_int(&layers, g, "llama.block_count", true, 1, 99, NULL), PKV_OK);
  assert_int_equal(layers, 30);
  assert_int_equal(pkv_gguf_find(g, "tokenizer.ggml.tokens")->count, 49152);
  const pkv_gguf_tensor *t = pkv_gguf_find_tensor(g, "token_embd.weight");
  assert_non_null(t);
  assert_int_equal(t->extent[0], 576);
  assert_int_equal(t->extent[1], 49152);
  assert_int_equal(pkv_gguf_check_unchanged(g, NULL), PKV_OK);
  assert_int_equal(pkv_gguf_check_whole(g, true, NULL), PKV_OK);
  pkv_gguf_close(g);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_keys_of_all_types),   cmocka_unit_test(test_arrays),
      cmocka_unit_test(test_file_order),          cmocka_unit_test(test_getters_refuse),
      cmocka_unit_test(test_nan_is_out_of_range), cmocka_unit_test(test_tensors),
      cmocka_unit_test(test_version_2),           cmocka_unit_test(test_type_table),
      cmocka_unit_test(test_real_model),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
