/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The safetensors reader on good and hostile files: one case a rule, a valid file cut at every
 * byte and with every byte changed, and no memory at every allocation. Meant for ASan: each file is
 * a block of exactly its size.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/safetensors.h"
#include "support/test_alloc.h"

/* Header and `data` zero bytes in a block of exactly that size; the caller frees it. */
static unsigned char *file_of(size_t *size, const char *header, size_t data) {
  const size_t n = strlen(header);
  unsigned char *bytes = calloc(1, 8 + n + data);
  for (int i = 0; i < 8; i++)
    bytes[i] = (unsigned char)((uint64_t)n >> 8 * i);
  memcpy(bytes + 8, header, n);
  *size = 8 + n + data;
  return bytes;
}

static void expect(const char *header, size_t data, pkv_status status, const char *part) {
  size_t size = 0;
  pkv_error err = {0};
  pkv_safetensors *file = NULL;
  unsigned char *bytes = file_of(&size, header, data);
  const pkv_status found = pkv_safetensors_open_memory(&file, bytes, size, NULL, &err);
  if (found != status || (status != PKV_OK && strstr(err.text, part) == NULL))
    fail_msg("%s: %s \"%s\", expected %s \"%s\"", header, pkv_status_name(found), err.text,
             pkv_status_name(status), part);
  pkv_safetensors_close(file);
  free(bytes);
}

#define GOOD                                                                                       \
  "{\"__metadata__\":{\"format\":\"pt\"},"                                                         \
  "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"                            \
  "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"                                 \
  "\"c\":{\"dtype\":\"F16\",\"shape\":[1,4,1,2],\"data_offsets\":[16,32]}}   "

static void test_a_good_file(void **state) {
  size_t size = 0;
  pkv_safetensors *file = NULL;
  pkv_error err = {0};
  (void)state;
  unsigned char *bytes = file_of(&size, GOOD, 32);
  if (pkv_safetensors_open_memory(&file, bytes, size, NULL, &err) != PKV_OK)
    fail_msg("%s", err.text);
  assert_int_equal(pkv_safetensors_count(file), 3);
  assert_int_equal(pkv_safetensors_file_bytes(file), size);
  const pkv_gguf_tensor *a = pkv_safetensors_at(file, 0), *b = pkv_safetensors_at(file, 1);
  const pkv_gguf_tensor *c = pkv_safetensors_at(file, 2);
  assert_string_equal(a->name.data, "a");
  assert_int_equal(a->type, PKV_WTYPE_F32);
  assert_int_equal(a->dims, 0);
  assert_int_equal(a->bytes, 4);
  assert_ptr_equal(a->data, bytes + size - 32);
  assert_string_equal(b->name.data, "b");
  assert_int_equal(b->type, PKV_WTYPE_BF16);
  assert_int_equal(b->extent[0], 3); /* the last of the shape is contiguous */
  assert_int_equal(b->extent[1], 2);
  assert_ptr_equal(b->data, a->data + 4);
  assert_int_equal(c->type, PKV_WTYPE_F16);
  assert_int_equal(c->extent[0], 2);
  assert_int_equal(c->extent[2], 4);
  assert_int_equal(c->dims, 4);
  pkv_safetensors_close(file);
  free(bytes);
  expect("{}", 0, PKV_OK, "");
}

#define ONE(dtype, shape, offsets)                                                                 \
  "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define F32_4(name, offsets)                                                                       \
  "\"" name "\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":" offsets "}"

static void test_headers(void **state) {
  (void)state;
  expect("[]", 0, PKV_E_FORMAT, "does not start with '{'");
  expect(" {}", 0, PKV_E_FORMAT, "does not start with '{'");
  expect("{}\n", 0, PKV_E_FORMAT, "does not end with '}'");
  expect("{}x", 0, PKV_E_FORMAT, "does not end with '}'");
  expect("{", 0, PKV_E_FORMAT, "");
  expect("{\"a\":1}", 0, PKV_E_FORMAT, "\"a\" is not dtype, shape and data_offsets");
  expect("{\"a\":{}}", 0, PKV_E_FORMAT, "\"a\" is not dtype, shape and data_offsets");
  expect("{" F32_4("a", "[0,16]") "," F32_4("a", "[16,32]") "}", 32, PKV_E_FORMAT, "duplicate");
  expect("{\"__metadata__\":[]}", 0, PKV_E_FORMAT, "__metadata__ is no object");
  expect("{\"__metadata__\":{\"x\":1}}", 0, PKV_E_FORMAT, "more than strings");
  expect("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16],\"x\":0}}", 16,
         PKV_E_FORMAT, "is not dtype, shape and data_offsets");
  expect("{\"\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", 16, PKV_E_FORMAT,
         "no name");
  char deep[256] = "{\"a\":";
  memset(deep + 5, '[', 100);
  memcpy(deep + 105, "}", 2);
  expect(deep, 0, PKV_E_LIMIT, "deeper than 64");
  expect("{\"a\xff\":{}}", 0, PKV_E_FORMAT, "no JSON");
}

static void test_entries(void **state) {
  (void)state;
  expect(ONE("\"F33\"", "[4]", "[0,16]"), 16, PKV_E_FORMAT, "\"F33\", which the format");
  expect(ONE("1", "[4]", "[0,16]"), 16, PKV_E_FORMAT, "dtype is missing or no string");
  expect(ONE("\"I64\"", "[2]", "[0,16]"), 16, PKV_E_UNSUPPORTED, "dtype I64");
  expect(ONE("\"F4\"", "[3]", "[0,2]"), 2, PKV_E_UNSUPPORTED, "dtype F4");
  expect(ONE("\"F32\"", "4", "[0,16]"), 16, PKV_E_FORMAT, "shape is missing or no list");
  expect(ONE("\"F32\"", "[-1]", "[0,16]"), 16, PKV_E_FORMAT, "shape[0] is no size");
  expect(ONE("\"F32\"", "[4.0]", "[0,16]"), 16, PKV_E_FORMAT, "shape[0] is no size");
  expect(ONE("\"F32\"", "[0]", "[0,0]"), 0, PKV_E_UNSUPPORTED, "empty tensors");
  expect(ONE("\"F32\"", "[1,1,1,1,4]", "[0,16]"), 16, PKV_E_UNSUPPORTED, "5 dimensions");
  expect(ONE("\"F32\"", "[4294967296,4294967296]", "[0,16]"), 16, PKV_E_FORMAT,
         "more bytes than can be counted");
  expect(ONE("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, PKV_E_FORMAT,
         "more bytes than can be counted");
  expect(ONE("\"F32\"", "[99999999999999999999]", "[0,0]"), 0, PKV_E_FORMAT, "");
  expect(ONE("\"F32\"", "[4]", "[0,12]"), 16, PKV_E_FORMAT, "needs 16 bytes");
  expect(ONE("\"F32\"", "[4]", "[16,0]"), 16, PKV_E_FORMAT, "data_offsets are 16 .. 0");
  expect(ONE("\"F32\"", "[4]", "[-16,0]"), 16, PKV_E_FORMAT, "data_offsets are -16 .. 0");
  expect(ONE("\"F32\"", "[4]", "[0]"), 16, PKV_E_FORMAT, "no pair");
  expect(ONE("\"F32\"", "[4]", "[0,16,32]"), 16, PKV_E_FORMAT, "no pair");
  expect(ONE("\"F32\"", "[4]", "[0.0,16]"), 16, PKV_E_FORMAT, "no integers");
}

static void test_data(void **state) {
  (void)state;
  expect("{" F32_4("a", "[0,16]") "}", 15, PKV_E_FORMAT, "the file has 15 behind its header");
  expect("{" F32_4("a", "[0,16]") "}", 17, PKV_E_FORMAT, "1 bytes behind the last tensor");
  expect("{}", 1, PKV_E_FORMAT, "1 bytes behind the last tensor");
  expect("{" F32_4("a", "[4,20]") "}", 20, PKV_E_FORMAT, "a hole");
  expect("{" F32_4("a", "[0,16]") "," F32_4("b", "[8,24]") "}", 24, PKV_E_FORMAT, "an overlap");
  expect("{" F32_4("a", "[0,16]") "," F32_4("b", "[0,16]") "}", 16, PKV_E_FORMAT, "an overlap");
  expect("{" F32_4("a", "[0,16]") "," F32_4("b", "[20,36]") "}", 36, PKV_E_FORMAT, "a hole");
  expect("{" F32_4("a", "[9223372036854775791,9223372036854775807]") "}", 16, PKV_E_FORMAT,
         "the file has 16");
}

static void test_lengths(void **state) {
  static const struct {
    uint64_t length;
    const char *part;
  } cases[] = {{UINT64_C(1) << 63, "at most 100000000"},
               {UINT64_MAX, "at most 100000000"},
               {100000001, "at most 100000000"},
               {100000000, "file has 10"},
               {3, "file has 10"},
               {1, "no JSON"},
               {0, "no JSON"}};
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    size_t size = 0;
    pkv_error err = {0};
    pkv_safetensors *file = NULL;
    unsigned char *bytes = file_of(&size, "{}", 0);
    for (int b = 0; b < 8; b++)
      bytes[b] = (unsigned char)(cases[i].length >> 8 * b);
    assert_int_equal(pkv_safetensors_open_memory(&file, bytes, size, NULL, &err), PKV_E_FORMAT);
    if (strstr(err.text, cases[i].part) == NULL)
      fail_msg("%" PRIu64 ": \"%s\", expected \"%s\"", cases[i].length, err.text, cases[i].part);
    free(bytes);
  }
}

/* Whatever the bytes: a text, or tensors inside them. */
static void open_any(const unsigned char *bytes, size_t size) {
  pkv_error err = {0};
  pkv_safetensors *file = NULL;
  const pkv_status status = pkv_safetensors_open_memory(&file, bytes, size, NULL, &err);
  if (status != PKV_OK) {
    assert_null(file);
    assert_true(err.text[0] != '\0');
    return;
  }
  for (size_t i = 0; i < pkv_safetensors_count(file); i++) {
    const pkv_gguf_tensor *t = pkv_safetensors_at(file, i);
    assert_true(t->data >= bytes && t->bytes > 0 && t->bytes <= (size_t)(bytes + size - t->data));
  }
  pkv_safetensors_close(file);
}

/* So many tensors, and not one more, whether the file describes itself or not. */
static void test_number_of_tensors(void **state) {
  (void)state;
  enum { ENTRY = 80, MOST = 65536 };
  char *const header = malloc((size_t)ENTRY * (MOST + 2));
  assert_non_null(header);
  for (int described = 0; described < 2; described++)
    for (int more = 0; more < 2; more++) {
      size_t at = (size_t)snprintf(header, ENTRY, "{%s", described ? "\"__metadata__\":{}," : "");
      for (int i = 0; i < MOST + more; i++)
        at +=
            (size_t)snprintf(header + at, ENTRY,
                             "%s\"%d\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                             i > 0 ? "," : "", i, 2 * i, 2 * i + 2);
      (void)snprintf(header + at, ENTRY, "}");
      size_t size = 0;
      pkv_error err = {0};
      pkv_safetensors *file = NULL;
      unsigned char *const bytes = file_of(&size, header, 2 * (size_t)(MOST + more));
      const pkv_status status = pkv_safetensors_open_memory(&file, bytes, size, NULL, &err);
      if (status != (more ? PKV_E_LIMIT : PKV_OK)) fail_msg("%d more: %s", more, err.text);
      if (more) assert_string_equal(err.text, "65537 tensors, at most 65536 are supported");
      pkv_safetensors_close(file);
      free(bytes);
    }
  free(header);
}

/* A copy needs the file no longer. */
static void test_copied(void **state) {
  (void)state;
  static char path[] = "/tmp/pkv-safetensors-XXXXXX";
  size_t size = 0;
  pkv_safetensors *file = NULL;
  pkv_error err = {0};
  unsigned char *const bytes = file_of(&size, GOOD, 32);
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, bytes, size), size);
  if (pkv_safetensors_open(&file, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  const unsigned char *const data = pkv_safetensors_at(file, 0)->data;
  assert_int_equal(pkv_safetensors_copy(file, &err), PKV_OK);
  assert_int_equal(ftruncate(fd, 0), 0);
  assert_ptr_equal(pkv_safetensors_at(file, 0)->data, data);
  assert_memory_equal(data, bytes + size - 32, 32);
  assert_int_equal(pkv_safetensors_check_unchanged(file, &err), PKV_OK);
  pkv_safetensors_close(file);
  assert_int_equal(close(fd), 0);
  assert_int_equal(unlink(path), 0);
  free(bytes);
}

static void test_arguments(void **state) {
  (void)state;
  static char path[] = "/tmp/pkv-safetensors-XXXXXX";
  pkv_safetensors *file = NULL;
  pkv_error err = {0};
  assert_int_equal(pkv_safetensors_open(NULL, "a", NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_safetensors_open(&file, NULL, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_safetensors_open_memory(&file, NULL, 5, NULL, &err), PKV_E_INVALID);
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, "1234567", 7), 7);
  assert_int_equal(close(fd), 0);
  assert_int_equal(pkv_safetensors_open(&file, path, NULL, &err), PKV_E_FORMAT);
  assert_string_equal(err.text, "file of 7 bytes has no header");
  assert_int_equal(unlink(path), 0);
  assert_null(file);
}

static void test_damaged_files(void **state) {
  size_t size = 0;
  unsigned char *good = file_of(&size, GOOD, 32);
  pkv_rng rng;
  (void)state;
  pkv_rng_init(&rng, 20251130u);
  for (size_t cut = 0; cut < size; cut++) {
    unsigned char *bytes = malloc(cut > 0 ? cut : 1);
    memcpy(bytes, good, cut);
    pkv_safetensors *file = NULL;
    assert_int_equal(pkv_safetensors_open_memory(&file, bytes, cut, NULL, NULL), PKV_E_FORMAT);
    free(bytes);
  }
  for (size_t round = 0; round < 20000; round++) {
    unsigned char *bytes = malloc(size);
    memcpy(bytes, good, size);
    for (int k = 0; k < 1 + (int)(round % 2); k++)
      bytes[pkv_rng_below(&rng, size - 32)] = (unsigned char)pkv_rng_next(&rng);
    open_any(bytes, size);
    free(bytes);
  }
  free(good);
}

typedef struct good_file {
  unsigned char *bytes;
  size_t size;
} good_file;

static pkv_status open_once(void *ctx, const pkv_allocator *allocator) {
  const good_file *f = ctx;
  pkv_safetensors *file = NULL;
  const pkv_status status = pkv_safetensors_open_memory(&file, f->bytes, f->size, allocator, NULL);
  pkv_safetensors_close(file);
  return status;
}

static void test_no_memory(void **state) {
  good_file f = {NULL, 0};
  (void)state;
  f.bytes = file_of(&f.size, GOOD, 32);
  print_message("%d allocations\n", (int)test_alloc_torture(open_once, &f));
  free(f.bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_good_file), cmocka_unit_test(test_headers),
      cmocka_unit_test(test_entries),     cmocka_unit_test(test_data),
      cmocka_unit_test(test_lengths),     cmocka_unit_test(test_damaged_files),
      cmocka_unit_test(test_no_memory),   cmocka_unit_test(test_number_of_tensors),
      cmocka_unit_test(test_copied),      cmocka_unit_test(test_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
