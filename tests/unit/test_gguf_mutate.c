/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GGUF reader on a valid file that was damaged: cut at every byte, every byte changed, random
 * bytes changed. It refuses, or all that it reports lies inside the file. Meant for ASan: each file
 * is a block of exactly its size.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "model/gguf.h"
#include "support/gguf_build.h"
#include "support/test_alloc.h"

#define SEED   20261129u
#define ROUNDS 20000

/* Every kind of value and several tensors, in less than a page. */
static void small_file(gguf_build *b) {
  static const unsigned char blocks[2 * 34] = {1, 2, 3};
  gguf_build_init(b);
  gguf_build_string(b, "general.architecture", "llama");
  gguf_build_u32(b, "general.alignment", 32);
  gguf_build_u8(b, "u8", 1);
  gguf_build_i16(b, "i16", -2);
  gguf_build_u64(b, "u64", 3);
  gguf_build_f32(b, "f32", 0.25f);
  gguf_build_f64(b, "f64", 4.0);
  gguf_build_bool(b, "bool", true);
  gguf_build_strings(b, "words", (const char *const[]){"a", "", "ccc"}, 3);
  gguf_build_array_i32(b, "numbers", (const int32_t[]){1, -2, 3}, 3);
  gguf_build_array(b, "flags", PKV_GGUF_BOOL, "\0\1", 2, 2);
  gguf_build_tensor(b, "floats", 0, 2, (const int64_t[]){4, 3}, NULL, 48);
  gguf_build_tensor(b, "blocks", 8, 2, (const int64_t[]){32, 2}, blocks, sizeof blocks);
  gguf_build_tensor(b, "scalar", 0, 0, NULL, NULL, 4);
}

static uint64_t touched; /* keeps the reads */

static void check_span(const unsigned char *bytes, size_t size, const void *data, size_t count) {
  const unsigned char *p = data;
  if (p < bytes || p > bytes + size || count > (size_t)(bytes + size - p))
    fail_msg("%zu bytes at %p are not in the file of %zu bytes at %p", count, data, size,
             (const void *)bytes);
  if (count > 0) touched += (uint64_t)p[0] + p[count - 1];
}

static void touch_value(const pkv_gguf_value *v, const unsigned char *bytes, size_t size) {
  check_span(bytes, size, v->key.data, v->key.size);
  const unsigned char *cursor = v->data;
  for (uint64_t i = 0; i < v->count; i++) {
    if (v->element_type == PKV_GGUF_STRING) {
      const pkv_span text = pkv_gguf_next_string(&cursor);
      check_span(bytes, size, text.data, text.size);
    } else {
      touched += pkv_gguf_element_float(v, i) > 0.0;
    }
  }
}

/* Opens and, when it opens, reads all there is. */
static bool open_and_touch(const unsigned char *bytes, size_t size, pkv_error *err) {
  pkv_gguf *g = NULL;
  const pkv_status status = pkv_gguf_open_memory(&g, bytes, size, NULL, err);
  if (status != PKV_OK) {
    assert_null(g);
    assert_true(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED);
    assert_true(err->text[0] != '\0');
    return false;
  }
  for (size_t i = 0; i < pkv_gguf_value_count(g); i++)
    touch_value(pkv_gguf_value_at(g, i), bytes, size);
  for (size_t i = 0; i < pkv_gguf_tensor_count(g); i++) {
    const pkv_gguf_tensor *t = pkv_gguf_tensor_at(g, i);
    check_span(bytes, size, t->name.data, t->name.size);
    check_span(bytes, size, t->data, t->bytes);
    assert_true(t->bytes > 0);
    assert_ptr_equal(t->data, bytes + t->offset);
  }
  pkv_gguf_close(g);
  return true;
}

/* L1 and CVE-2024-32878: a file that ends too early is refused wherever it ends. */
static void test_cut_at_every_byte(void **state) {
  (void)state;
  gguf_build b;
  size_t size = 0;
  pkv_error err = {0};
  small_file(&b);
  unsigned char *whole = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  assert_true(open_and_touch(whole, size, &err));
  for (size_t cut = 0; cut < size; cut++) {
    unsigned char *part = gguf_build_exact_copy(whole, cut);
    if (open_and_touch(part, cut, &err)) fail_msg("%zu of %zu bytes open", cut, size);
    gguf_build_drop(part);
  }
  unsigned char *part = gguf_build_exact_copy(whole, size - 1);
  assert_false(open_and_touch(part, size - 1, &err));
  char wanted[96];
  (void)snprintf(wanted, sizeof wanted,
                 "tensor \"scalar\" at offset %zu needs 4 bytes, file has %zu", size - 4, size - 1);
  assert_string_equal(err.text, wanted);
  gguf_build_drop(part);
  gguf_build_drop(whole);
}

/* Each byte of the header part set to values that hurt; each bit flipped alone. */
static void test_every_byte_changed(void **state) {
  (void)state;
  static const unsigned char values[] = {0x00, 0x01, 0x7f, 0x80, 0xff, 0x09, 0x0d};
  gguf_build b;
  size_t size = 0, opened = 0, tried = 0;
  pkv_error err = {0};
  small_file(&b);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  for (size_t at = 0; at < size; at++) {
    const unsigned char before = bytes[at];
    for (size_t i = 0; i < sizeof values + 8; i++) {
      const unsigned bit = i < sizeof values ? 0u : 1u << (i - sizeof values);
      bytes[at] = i < sizeof values ? values[i] : (unsigned char)((before ^ bit) & 0xffu);
      opened += open_and_touch(bytes, size, &err);
      tried++;
    }
    bytes[at] = before;
  }
  gguf_build_drop(bytes);
  /* Both must happen, or the test says nothing. */
  assert_true(opened > tried / 20);
  assert_true(tried - opened > tried / 20);
}

static void test_random_changes(void **state) {
  (void)state;
  gguf_build b;
  pkv_rng rng;
  size_t size = 0, opened = 0;
  pkv_error err = {0};
  small_file(&b);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  unsigned char *good = gguf_build_exact_copy(bytes, size);
  gguf_build_deinit(&b);
  pkv_rng_init(&rng, SEED);
  for (int round = 0; round < ROUNDS; round++) {
    const uint64_t changes = 1 + pkv_rng_below(&rng, 2);
    for (uint64_t i = 0; i < changes; i++)
      bytes[pkv_rng_below(&rng, size)] = (unsigned char)pkv_rng_next(&rng);
    opened += open_and_touch(bytes, size, &err);
    memcpy(bytes, good, size);
  }
  print_message("seed %u: %zu of %d damaged files open\n", SEED, opened, ROUNDS);
  assert_true(opened > 0 && opened < ROUNDS);
  gguf_build_drop(good);
  gguf_build_drop(bytes);
}

/* Two numbers of eight bytes at random places: what single bytes seldom reach. */
static void test_random_words(void **state) {
  (void)state;
  static const uint64_t words[] = {0,
                                   1,
                                   UINT64_MAX,
                                   (uint64_t)1 << 63,
                                   UINT32_MAX,
                                   1u << 31,
                                   INT64_MAX,
                                   (uint64_t)1 << 61,
                                   32,
                                   UINT64_MAX - 31,
                                   0x0400000000000001u};
  gguf_build b;
  pkv_rng rng;
  size_t size = 0;
  pkv_error err = {0};
  small_file(&b);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  unsigned char *good = gguf_build_exact_copy(bytes, size);
  gguf_build_deinit(&b);
  pkv_rng_init(&rng, SEED + 1);
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < 2; i++)
      memcpy(bytes + pkv_rng_below(&rng, size - 7),
             &words[pkv_rng_below(&rng, sizeof words / sizeof words[0])], 8);
    (void)open_and_touch(bytes, size, &err);
    memcpy(bytes, good, size);
  }
  gguf_build_drop(good);
  gguf_build_drop(bytes);
}

typedef struct memory_file {
  const unsigned char *bytes;
  size_t size;
} memory_file;

static pkv_status open_close(void *ctx, const pkv_allocator *allocator) {
  const memory_file *file = ctx;
  pkv_gguf *g = NULL;
  const pkv_status status = pkv_gguf_open_memory(&g, file->bytes, file->size, allocator, NULL);
  pkv_gguf_close(g);
  return status;
}

static void test_no_memory(void **state) {
  (void)state;
  gguf_build b;
  memory_file file = {NULL, 0};
  small_file(&b);
  unsigned char *bytes = gguf_build_exact(&b, &file.size);
  gguf_build_deinit(&b);
  file.bytes = bytes;
  assert_int_equal(test_alloc_torture(open_close, &file), 5);
  gguf_build_drop(bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_cut_at_every_byte), cmocka_unit_test(test_every_byte_changed),
      cmocka_unit_test(test_random_changes),    cmocka_unit_test(test_random_words),
      cmocka_unit_test(test_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
