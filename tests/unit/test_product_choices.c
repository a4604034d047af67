/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file in which it is kept which products are the fastest: text there and back, damaged in
 * every byte, hostile lines; and engines that write, read and refuse it, on
 * support/fake_device.h.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/product_choices.h"
#include "base/hash.h"
#include "engine/engine_state.h"
#include "support/engine_drive.h"
#include "support/fake_device.h"
#include "support/small_llama.h"

#define MAKER "a library 1 on a device"
#define COUNT 5

static const pkv_product_choice some[COUNT] = {
    {4096, 4096, 4096, 4096, 1, PKV_DTYPE_BF16, 1, 1, 7},
    {128256, 4096, 4096, 128256, 64, PKV_DTYPE_F16, 1, 0, 0},
    {1, 1, 1, 1, 1, PKV_DTYPE_F16, 0, 0, 3},
    {28672, 4096, 4096, 28672, 700, PKV_DTYPE_BF16, 0, 0, 2},
    {INT64_C(1) << 40, 8, 8, INT64_C(1) << 40, 1 << 20, PKV_DTYPE_BF16, 0, 0, 1}};

static pkv_product_choice got[PKV_PRODUCT_CHOICES];

static void print_some(pkv_buffer *text) {
  pkv_error err = {0};
  pkv_buffer_init(text, 4096, NULL);
  drive_ok(pkv_product_choices_print(text, MAKER, some, COUNT, &err), &err, "print");
}

static pkv_status parse(const char *maker, const char *text, size_t bytes, pkv_error *err) {
  int32_t count = -1;
  const pkv_status status = pkv_product_choices_parse(got, &count, maker, text, bytes, err);
  if (status != PKV_OK) assert_int_equal(count, 0);
  return status != PKV_OK ? status : count == COUNT ? PKV_OK : PKV_E_INTERNAL;
}

static void test_there_and_back(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_buffer text;
  print_some(&text);
  drive_ok(parse(MAKER, text.data, text.size, &err), &err, "parse");
  assert_memory_equal(got, some, sizeof some);
  assert_int_equal(parse("another library", text.data, text.size, &err), PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "another library"));
  pkv_buffer_deinit(&text);
}

/* A byte that is another one, missing, or one too many is always seen. */
static void test_damaged(void **state) {
  (void)state;
  pkv_buffer text;
  print_some(&text);
  char *const copy = malloc(text.size + 1);
  assert_non_null(copy);
  for (size_t i = 0; i < text.size; i++) {
    for (int flip = 1; flip < 256; flip <<= 1) {
      memcpy(copy, text.data, text.size);
      copy[i] = (char)(copy[i] ^ flip);
      assert_int_not_equal(parse(MAKER, copy, text.size, NULL), PKV_OK);
    }
    assert_int_not_equal(parse(MAKER, text.data, i, NULL), PKV_OK);
    memcpy(copy, text.data, i);
    copy[i] = '1';
    memcpy(copy + i + 1, text.data + i, text.size - i);
    assert_int_not_equal(parse(MAKER, copy, text.size + 1, NULL), PKV_OK);
  }
  free(copy);
  pkv_buffer_deinit(&text);
}

/* A line with a right checksum that is no product. */
static void refused(const char *line) {
  pkv_error err = {0};
  char text[600];
  const int n = snprintf(text, sizeof text, "persistentkv products 1\nby " MAKER "\n%s\n", line);
  (void)snprintf(text + n, sizeof text - (size_t)n, "end 1 %016llx\n",
                 (unsigned long long)pkv_hash_bytes(text, (size_t)n, 0));
  if (parse(MAKER, text, strlen(text), &err) != PKV_E_FORMAT) fail_msg("'%s' is taken", line);
  assert_non_null(strstr(err.text, "line 3"));
}

static void test_hostile(void **state) {
  (void)state;
  static const char *const lines[] = {"",
                                      "1",
                                      "4096 4096 4096 4096 1 1 1 1",
                                      "4096 4096 4096 4096 1 1 1 1 1 1",
                                      "4096 4096 4096 4096 1 1 1 1 8",
                                      "4096 4096 4096 4096 1 1 1 1 -1",
                                      "4096 4096 4096 4096 1 1 2 1 1",
                                      "4096 4096 4096 4096 1 1 1 2 1",
                                      "4096 4096 4096 4096 1 0 1 1 1",
                                      "4096 4096 4096 4096 0 1 1 1 1",
                                      "4096 4096 4096 4096 1048577 1 1 1 1",
                                      "4096 4096 4095 4096 1 1 1 1 1",
                                      "4096 4096 4096 4095 1 1 1 1 1",
                                      "0 4096 4096 4096 1 1 1 1 1",
                                      "4096 0 4096 4096 1 1 1 1 1",
                                      "99999999999999999999 4096 4096 4096 1 1 1 1 1",
                                      "4096  4096 4096 4096 1 1 1 1 1",
                                      "4096 4096 4096 4096 1 1 1 1 1 ",
                                      "4096 4096 4096 4096 1 1 1 1 0x1"};
  char large[400];
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
    refused(lines[i]);
  memset(large, '1', sizeof large - 1);
  large[sizeof large - 1] = '\0';
  refused(large);
}

/* --- engines ------------------------------------------------------------------------------- */

static char path[64];
static pkv_model *model;
static unsigned char *bytes;

static int open_model(void **state) {
  (void)state;
  const small_llama t = drive_device_llama(2, 16);
  model = drive_model(&bytes, &t);
  (void)snprintf(path, sizeof path, "/tmp/pkv-products-%ld", (long)getpid());
  return 0;
}

static int close_model(void **state) {
  (void)state;
  (void)remove(path);
  pkv_model_close(model);
  gguf_build_drop(bytes);
  return 0;
}

/* An engine's life; how many products it measured. */
static int32_t measured(int32_t ranks, const char *maker) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  pkv_engine *engine = NULL;
  pkv_error err = {0};
  pkv_executor *executors[2] = {fake_device_create(), ranks > 1 ? fake_device_another() : NULL};
  fake_device_state.maker = maker;
  o.threads = 2;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.max_rows = 4;
  o.cache_tokens = 256;
  o.tensor_parallel = ranks;
  o.products_file = path;
  drive_ok(pkv_engine_create_on(&engine, model, executors, ranks, &o, &err), &err, "create");
  pkv_engine_destroy(engine);
  assert_int_equal(fake_device_state.live, 0);
  return fake_device_state.measured;
}

static void spoil(void) {
  FILE *const file = fopen(path, "r+");
  assert_non_null(file);
  assert_int_equal(fseek(file, 60, SEEK_SET), 0);
  assert_true(fputc('x', file) == 'x');
  assert_int_equal(fclose(file), 0);
}

/* What the first measures the second knows; a damaged file and another device's count as none, and
   are written anew; a file that cannot be written is no matter. */
static void test_engines(void **state) {
  (void)state;
  (void)remove(path);
  const int32_t all = measured(1, MAKER);
  assert_true(all > 4);
  assert_int_equal(measured(1, MAKER), 0);
  spoil();
  assert_int_equal(measured(1, MAKER), all);
  assert_int_equal(measured(1, MAKER), 0);
  assert_int_equal(measured(1, "another device"), all);
  assert_int_equal(measured(1, MAKER), all);
  const int32_t more = measured(2, MAKER); /* other shapes, kept beside those */
  assert_true(more > 0);
  assert_int_equal(measured(2, MAKER), 0);
  assert_int_equal(measured(1, MAKER), 0);
  assert_int_equal(remove(path), 0);
  assert_int_equal(mkdir(path, 0700), 0);
  assert_int_equal(measured(1, MAKER), all);
  assert_int_equal(rmdir(path), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_there_and_back),
                                     cmocka_unit_test(test_damaged), cmocka_unit_test(test_hostile),
                                     cmocka_unit_test(test_engines)};
  return cmocka_run_group_tests(tests, open_model, close_model);
}
