/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GGUF reader on files that lie: one named case for each known way to attack a reader. Every
 * case checks the status, the words of the message, that nothing leaked, and that memory was never
 * asked for by a count that the file does not back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/limits.h"
#include "model/gguf.h"
#include "support/gguf_build.h"
#include "support/test_alloc.h"

/* A table entry in memory is at most this many times the least bytes of it in the file. */
#define MEMORY_FACTOR 8

static void open_bytes(const unsigned char *bytes, size_t size, pkv_status wanted,
                       const char *part) {
  test_alloc memory;
  pkv_gguf *g = (pkv_gguf *)&memory;
  pkv_error err = {0};
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  const pkv_status status = pkv_gguf_open_memory(&g, bytes, size, &a, &err);
  if (status != wanted || (wanted != PKV_OK && strstr(err.text, part) == NULL))
    fail_msg("%s \"%s\", expected %s \"%s\"", pkv_status_name(status), err.text,
             pkv_status_name(wanted), part);
  if (wanted != PKV_OK) {
    assert_null(g);
    assert_int_equal(err.status, wanted);
    for (const char *c = err.text; *c != '\0'; c++)
      if (*c < 0x20 || *c > 0x7e) fail_msg("byte %d in the message \"%s\"", *c, err.text);
  }
  if (memory.peak_bytes > MEMORY_FACTOR * size + 4096)
    fail_msg("%zu bytes of memory for a file of %zu", memory.peak_bytes, size);
  pkv_gguf_close(g);
  test_alloc_finish(&memory);
}

/* Finishes the file, opens it, and ends the builder. */
static void expect(gguf_build *b, pkv_status wanted, const char *part) {
  size_t size = 0;
  unsigned char *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  open_bytes(bytes, size, wanted, part);
  gguf_build_drop(bytes);
}

static void refused(gguf_build *b, const char *part) {
  expect(b, PKV_E_FORMAT, part);
}

/* A file with one key and one tensor of 64 floats, to add harm to. */
static void begin(gguf_build *b) {
  gguf_build_init(b);
  gguf_build_string(b, "general.architecture", "llama");
  gguf_build_tensor(b, "first", 0, 1, (const int64_t[]){64}, NULL, 256);
}

static void raw_tensor(gguf_build *b, const char *name, uint32_t type, uint32_t dims, uint64_t e0,
                       uint64_t e1, uint64_t offset) {
  gguf_build_raw_tensor(b, name, strlen(name), dims, (const uint64_t[8]){e0, e1, 1, 1, 1, 1, 1, 1},
                        type, offset);
}

/* ---- header ---- */

static void test_header(void **state) {
  (void)state;
  gguf_build b;
  open_bytes(NULL, 0, PKV_E_FORMAT, "file is empty");
  open_bytes((const unsigned char *)"GG", 2, PKV_E_FORMAT, "file has 2 bytes: too short");
  open_bytes((const unsigned char *)"GGUF", 4, PKV_E_FORMAT,
             "header: version at offset 4 needs 4 bytes, file has 4");
  open_bytes((const unsigned char *)"ggjt\1\0\0\0", 8, PKV_E_FORMAT,
             "not a GGUF file: it starts with bytes 67 67 6a 74");
  open_bytes((const unsigned char *)"GGUF\3\0\0\0", 8, PKV_E_FORMAT, "tensor count");
  gguf_build_init(&b);
  expect(&b, PKV_OK, "");
}

static void test_versions(void **state) {
  (void)state;
  static const struct {
    uint32_t version;
    const char *part;
  } cases[] = {{0, "GGUF version 0 is not supported"},
               {1, "GGUF version 1 is not supported"},
               {4, "GGUF version 4 is not supported"},
               {99, "GGUF version 99 is not supported"},
               {0x03000000u, "big-endian GGUF file (version reads 0x03000000)"},
               {0x02000000u, "big-endian"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    gguf_build b;
    begin(&b);
    b.version = cases[i].version;
    expect(&b, PKV_E_UNSUPPORTED, cases[i].part);
  }
}

/* CVE-2024-21836: the tensor count times the size of an entry wraps. */
static void test_tensor_count(void **state) {
  (void)state;
  static const uint64_t counts[] = {0x0400000000000001u, UINT64_MAX, 65537, 65536};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    gguf_build b;
    char part[64];
    gguf_build_init(&b);
    b.tensor_count_off = counts[i];
    (void)snprintf(part, sizeof part, "header: tensor count is %llu",
                   (unsigned long long)counts[i]);
    refused(&b, part);
  }
}

/* CVE-2024-23605: the same for the keys. */
static void test_key_count(void **state) {
  (void)state;
  static const uint64_t counts[] = {UINT64_MAX, 0x2AAAAAAAAAAAAAABu, 65537, 65536};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    gguf_build b;
    char part[64];
    gguf_build_init(&b);
    b.value_count_off = counts[i];
    (void)snprintf(part, sizeof part, "header: key count is %llu", (unsigned long long)counts[i]);
    refused(&b, part);
  }
}

/* One more than there are: the next thing is read as an entry and must not be believed. */
static void test_count_one_too_many(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  b.value_count_off = 1;
  refused(&b, "");
  begin(&b);
  b.tensor_count_off = 1;
  refused(&b, "tensor 1");
}

/* ---- strings ---- */

/* CVE-2024-23496: length + 1 wraps. The length is written over that of `name`. */
static void attack_length(const char *name, uint64_t length, const char *part) {
  gguf_build b;
  size_t size = 0;
  begin(&b);
  unsigned char *bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  const size_t behind = gguf_build_behind(bytes, size, name);
  memcpy(bytes + behind - strlen(name) - 8, &length, 8);
  open_bytes(bytes, size, PKV_E_FORMAT, part);
  gguf_build_drop(bytes);
}

static void test_string_lengths(void **state) {
  (void)state;
  attack_length("general.architecture", UINT64_MAX,
                "key 0: its name has length 18446744073709551615, the limit is 65535");
  attack_length("general.architecture", (uint64_t)1 << 63, "has length 9223372036854775808");
  attack_length("general.architecture", 65536, "has length 65536, the limit is 65535");
  attack_length("general.architecture", 65535, "key 0: its name at offset 32 needs 65535 bytes");
  attack_length("general.architecture", 0, "key 0 has an empty name");
  attack_length("llama", UINT64_MAX,
                "key \"general.architecture\": string has length 18446744073709551615");
  attack_length("llama", (uint64_t)1 << 63, "has length 9223372036854775808");
  attack_length("llama", ((uint64_t)16 << 20) + 1, "length 16777217, the limit is 16777216");
  attack_length("llama", (uint64_t)16 << 20, "needs 16777216 bytes, file has");
  attack_length("first", 65, "tensor 0: its name has length 65, the limit is 64");
  attack_length("first", UINT64_MAX, "tensor 0: its name has length 18446744073709551615");
  attack_length("first", 0, "tensor 0 has an empty name");
}

/* Exactly one byte more than the file has left. */
static void test_string_one_byte_too_long(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  b.alignment = 8;
  static const unsigned char value[] = {4, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c'};
  gguf_build_value(&b, "k", PKV_GGUF_STRING, value, sizeof value); /* ends on a multiple of 8 */
  refused(&b, "key \"k\": string at offset 45 needs 4 bytes, file has 48");
}

static void test_names_at_the_limit(void **state) {
  (void)state;
  gguf_build b;
  char name[65536];
  memset(name, 'k', sizeof name);
  gguf_build_init(&b);
  gguf_build_raw(&b, name, 65535, PKV_GGUF_U8, "\1", 1);
  gguf_build_raw_tensor(&b, name, 64, 1, (const uint64_t[]){8}, 24, 0);
  gguf_build_tensor(&b, "rest", 0, 1, (const int64_t[]){8}, NULL, 32);
  b.tensor_count_off = 0;
  refused(&b, "overlap"); /* both names were accepted */
}

/* ---- arrays ---- */

static void array_case(uint32_t element, uint64_t count, const char *part) {
  gguf_build b;
  unsigned char value[12 + 16] = {0};
  memcpy(value, &element, 4);
  memcpy(value + 4, &count, 8);
  gguf_build_init(&b);
  gguf_build_value(&b, "list", PKV_GGUF_ARRAY, value, sizeof value);
  refused(&b, part);
}

/* CVE-2024-21825, and arrays longer than the file. */
static void test_arrays(void **state) {
  (void)state;
  array_case(PKV_GGUF_STRING, (uint64_t)1 << 61,
             "key \"list\": array has 2305843009213693952 elements, the limit is 67108864");
  array_case(PKV_GGUF_STRING, (uint64_t)64 << 20, "67108864 strings need at least 536870912 bytes");
  array_case(PKV_GGUF_STRING, 7, "7 strings need at least 56 bytes; 44 are left");
  array_case(PKV_GGUF_ARRAY, 1, "key \"list\": arrays of arrays are not allowed");
  array_case(13, 1, "key \"list\": element type 13 is unknown");
  array_case(255, 1, "element type 255 is unknown");
  array_case(UINT32_MAX, 1, "element type 4294967295 is unknown");
  array_case(PKV_GGUF_F64, UINT64_MAX, "array has 18446744073709551615 elements");
  array_case(PKV_GGUF_F64, (uint64_t)1 << 61, "array has 2305843009213693952 elements");
  array_case(PKV_GGUF_F64, (uint64_t)64 << 20, "array at offset 52 needs 536870912 bytes");
  array_case(PKV_GGUF_U8, 65, "array at offset 52 needs 65 bytes, file has");
}

/* An array of u64, of which nothing but its head is written. */
static size_t put_array(unsigned char *file, size_t at, size_t key_bytes, uint64_t count) {
  const uint32_t types[2] = {9, 10};
  const uint64_t length = key_bytes;
  memcpy(file + at, &length, 8);
  memset(file + at + 8, 'k', key_bytes);
  file[at + 8] = (unsigned char)('a' + key_bytes % 26);
  memcpy(file + at + 8 + key_bytes, types, 8);
  memcpy(file + at + 16 + key_bytes, &count, 8);
  return at + 24 + key_bytes + 8 * count;
}

/* Keys that end with PKV_GGUF_MAX_META bytes, and one byte later; no page of their elements is ever
   touched. */
static void test_bytes_of_keys(void **state) {
  (void)state;
  const size_t room = PKV_GGUF_MAX_META + 4096;
  unsigned char *const file =
      mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_ptr_not_equal(file, MAP_FAILED);
  const uint32_t version = 3;
  const uint64_t counts[2] = {0, 2};
  memcpy(file, "GGUF", 4);
  memcpy(file + 4, &version, 4);
  memcpy(file + 8, counts, 16);
  const size_t second = put_array(file, 24, 5, (uint64_t)64 << 20);
  const size_t left = PKV_GGUF_MAX_META - second - 24;
  assert_int_equal(put_array(file, second, 8 + left % 8, left / 8 - 1), PKV_GGUF_MAX_META);
  open_bytes(file, room, PKV_OK, "");
  assert_int_equal(put_array(file, second, 8 + left % 8 + 1, left / 8 - 1), PKV_GGUF_MAX_META + 1);
  open_bytes(file, room, PKV_E_LIMIT, "ends behind the 1073741824 bytes that keys");
  assert_int_equal(munmap(file, room), 0);
}

static void test_string_in_array(void **state) {
  (void)state;
  gguf_build b;
  static const uint64_t lengths[] = {UINT64_MAX, (uint64_t)1 << 63, 17 << 20, 1000};
  for (size_t i = 0; i < 4; i++) {
    unsigned char value[12 + 8 + 8] = {PKV_GGUF_STRING, 0, 0, 0, 2};
    memcpy(value + 12 + 8, &lengths[i], 8);
    gguf_build_init(&b);
    gguf_build_value(&b, "list", PKV_GGUF_ARRAY, value, sizeof value);
    refused(&b, "key \"list\": string of the array");
  }
}

static void test_value_types(void **state) {
  (void)state;
  static const uint32_t types[] = {13, 255, 0x80000000u, UINT32_MAX};
  for (size_t i = 0; i < 4; i++) {
    gguf_build b;
    char part[64];
    gguf_build_init(&b);
    gguf_build_value(&b, "key", types[i], "12345678", 8);
    (void)snprintf(part, sizeof part, "key \"key\": value type %u is unknown", types[i]);
    refused(&b, part);
  }
}

static void test_bools(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_value(&b, "flag", PKV_GGUF_BOOL, "\2", 1);
  refused(&b, "key \"flag\": bool is 2, only 0 and 1 are allowed");
  gguf_build_init(&b);
  gguf_build_array(&b, "flags", PKV_GGUF_BOOL, "\0\1\xff", 3, 3);
  refused(&b, "key \"flags\": bool is 255");
}

/* ---- duplicates ---- */

static void test_duplicates(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  gguf_build_u32(&b, "other", 1);
  gguf_build_string(&b, "general.architecture", "qwen2");
  refused(&b, "key \"general.architecture\" appears twice");
  begin(&b);
  gguf_build_tensor(&b, "second", 0, 1, (const int64_t[]){64}, NULL, 256);
  gguf_build_tensor(&b, "first", 0, 1, (const int64_t[]){64}, NULL, 256);
  refused(&b, "tensor \"first\" appears twice");
  /* A second general.alignment must not decide anything. */
  begin(&b);
  gguf_build_u32(&b, "general.alignment", 32);
  gguf_build_u32(&b, "general.alignment", 64);
  refused(&b, "key \"general.alignment\" appears twice");
}

/* Many names, the last equal to the first: found, and not by comparing all with all. */
static void test_many_names(void **state) {
  (void)state;
  gguf_build b;
  char name[32];
  gguf_build_init(&b);
  for (unsigned i = 0; i < 65536; i++) {
    (void)snprintf(name, sizeof name, "key.%u", i < 65535 ? i : 0);
    gguf_build_u8(&b, name, 1);
  }
  refused(&b, "key \"key.0\" appears twice");
}

/* ---- shapes ---- */

/* CVE-2024-21802: more dimensions than there is room for. */
static void test_dimensions(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  raw_tensor(&b, "t", 0, 5, 1, 1, 256);
  refused(&b, "tensor \"t\" has 5 dimensions, at most 4 are allowed");
  begin(&b);
  raw_tensor(&b, "t", 0, UINT32_MAX, 1, 1, 256);
  refused(&b, "tensor \"t\" has 4294967295 dimensions");
  /* None: one element. */
  begin(&b);
  gguf_build_tensor(&b, "t", 0, 0, NULL, NULL, 4);
  expect(&b, PKV_OK, "");
  begin(&b);
  raw_tensor(&b, "t", 12, 0, 0, 0, 256);
  refused(&b, "rows of 1 elements are not a multiple of Q4_K's block of 256");
}

static void test_extents(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  raw_tensor(&b, "t", 0, 2, 4, 0, 256);
  refused(&b, "tensor \"t\": extent 1 is 0, allowed are 1 to 2^63 - 1");
  begin(&b);
  raw_tensor(&b, "t", 0, 2, (uint64_t)1 << 63, 1, 256);
  refused(&b, "tensor \"t\": extent 0 is 9223372036854775808");
  begin(&b);
  raw_tensor(&b, "t", 0, 2, 4, UINT64_MAX, 256);
  refused(&b, "tensor \"t\": extent 1 is 18446744073709551615");
  begin(&b);
  raw_tensor(&b, "t", 0, 2, (uint64_t)1 << 32, (uint64_t)1 << 32, 256);
  refused(&b, "4294967296 x 4294967296 x 1 x 1 elements overflow");
  begin(&b);
  gguf_build_raw_tensor(&b, "t", 1, 4, (const uint64_t[]){65536, 65536, 65536, 65536}, 0, 256);
  refused(&b, "65536 x 65536 x 65536 x 65536 elements overflow");
  begin(&b);
  raw_tensor(&b, "t", 2, 2, 33, 2, 256);
  refused(&b, "tensor \"t\": rows of 33 elements are not a multiple of Q4_0's block of 32");
  /* The element count is a multiple, the row is not. */
  begin(&b);
  raw_tensor(&b, "t", 2, 2, 16, 2, 256);
  refused(&b, "rows of 16 elements are not a multiple");
}

/* CVE-2026-33298: the byte size wraps although the element count does not. */
static void test_byte_sizes_wrap(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  raw_tensor(&b, "t", 12, 2, 256, (uint64_t)1 << 55, 256);
  refused(&b, "256 x 36028797018963968 x 1 x 1 elements overflow");
  begin(&b);
  raw_tensor(&b, "t", 12, 2, 256, ((uint64_t)1 << 55) - 1, 256);
  refused(&b, "tensor \"t\" at offset ");
  begin(&b);
  raw_tensor(&b, "t", 27, 1, (uint64_t)1 << 61, 1, 256);
  refused(&b, "tensor \"t\": the bytes of 2305843009213693952 elements of I64 overflow");
  begin(&b);
  raw_tensor(&b, "t", 27, 1, ((uint64_t)1 << 61) - 1, 1, 256);
  refused(&b, "the end overflows");
}

/* CVE-2025-53630 and CVE-2026-27940: each size fits, their padded sum wraps. */
static void test_sum_of_sizes_wraps(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  raw_tensor(&b, "one", 24, 1, 0x7FFFFFFFFFFFFFC0u, 1, 0);
  raw_tensor(&b, "two", 24, 1, 0x7FFFFFFFFFFFFFC0u, 1, 0x7FFFFFFFFFFFFFC0u);
  refused(&b, "tensor \"one\" at offset ");
  begin(&b);
  raw_tensor(&b, "two", 24, 1, 0x7FFFFFFFFFFFFFC0u, 1, 0xFFFFFFFFFFFFFFE0u);
  refused(&b, "the end overflows");
  begin(&b);
  raw_tensor(&b, "two", 24, 1, 64, 1, UINT64_MAX - 31);
  refused(&b, "tensor \"two\" at offset ");
}

static void test_tensor_types(void **state) {
  (void)state;
  static const struct {
    uint32_t type;
    pkv_status status;
    const char *part;
  } cases[] = {{43, PKV_E_FORMAT, "tensor \"t\": type 43 is unknown"},
               {UINT32_MAX, PKV_E_FORMAT, "tensor \"t\": type -1 is unknown"},
               {0x80000000u, PKV_E_FORMAT, "type -2147483648 is unknown"},
               {1000000, PKV_E_FORMAT, "type 1000000 is unknown"},
               {4, PKV_E_UNSUPPORTED, "tensor \"t\": type 4 (Q4_2) was removed from the format"},
               {31, PKV_E_UNSUPPORTED, "type 31 (Q4_0_4_4) was removed"},
               {38, PKV_E_UNSUPPORTED, "type 38 (IQ4_NL_8_8) was removed"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    gguf_build b;
    begin(&b);
    raw_tensor(&b, "t", cases[i].type, 1, 256, 1, 256);
    expect(&b, cases[i].status, cases[i].part);
  }
}

/* ---- places ---- */

/* CVE-2026-7482: offset and size that reach behind the file, or into a neighbour. */
static void test_places(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  raw_tensor(&b, "t", 0, 1, 8, 1, 256); /* starts where the file ends */
  refused(&b, "tensor \"t\" at offset 416 needs 32 bytes, file has 416");
  begin(&b);
  raw_tensor(&b, "t", 0, 1, 16, 1, 224); /* 32 bytes of 64 are there */
  refused(&b, "tensor \"t\" at offset 384 needs 64 bytes, file has 416");
  begin(&b);
  gguf_build_tensor(&b, "t", 0, 2, (const int64_t[]){8, 9}, NULL, 8 * 8 * 4); /* a row too long */
  refused(&b, "tensor \"t\" at offset 416 needs 288 bytes, file has 672");
  begin(&b);
  raw_tensor(&b, "t", 0, 1, 8, 1, 128);
  refused(&b, "tensors \"first\" (offset 160, 256 bytes) and \"t\" (offset 288) overlap");
  begin(&b);
  raw_tensor(&b, "t", 0, 1, 64, 1, 0);
  refused(&b, "overlap");
  begin(&b);
  raw_tensor(&b, "t", 24, 1, 1, 1, 255);
  refused(&b, "tensor \"t\" at offset 255 of the data section: not a multiple of 32");
  begin(&b);
  raw_tensor(&b, "t", 24, 1, 1, 1, (uint64_t)1 << 40);
  refused(&b, "tensor \"t\" at offset 1099511627936 needs 1 bytes, file has 416");
}

/* Order in the table is free, holes are allowed. */
static void test_order_and_holes(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  raw_tensor(&b, "late", 0, 1, 8, 1, 512);
  raw_tensor(&b, "early", 0, 1, 8, 1, 64);
  raw_tensor(&b, "middle", 0, 1, 8, 1, 128);
  gguf_build_tensor(&b, "big", 0, 1, (const int64_t[]){8}, NULL, 1024);
  expect(&b, PKV_OK, "");
}

static void alignment_case(uint32_t value, pkv_status status, const char *part) {
  gguf_build b;
  begin(&b);
  if (value >= 8) b.alignment = value;
  gguf_build_u32(&b, "general.alignment", value);
  expect(&b, status, part);
}

static void test_alignment(void **state) {
  (void)state;
  gguf_build b;
  alignment_case(0, PKV_E_FORMAT, "general.alignment is 0, must be a power of two from 8 on");
  alignment_case(13, PKV_E_FORMAT, "general.alignment is 13, must be a power of two");
  alignment_case(1, PKV_E_FORMAT, "general.alignment is 1,");
  alignment_case(4, PKV_E_FORMAT, "general.alignment is 4,");
  alignment_case(8, PKV_OK, "");
  alignment_case(64, PKV_OK, "");
  alignment_case(4096, PKV_OK, "");
  /* The data section would start behind the file. */
  begin(&b);
  gguf_build_u32(&b, "general.alignment", 0x80000000u);
  refused(&b, "tensor \"first\" at offset 2147483648 needs 256 bytes, file has");
  begin(&b);
  gguf_build_u64(&b, "general.alignment", 32);
  refused(&b, "general.alignment has type u64, must be u32");
  begin(&b);
  gguf_build_string(&b, "general.alignment", "32");
  refused(&b, "general.alignment has type string, must be u32");
}

/* ---- messages ---- */

/* open_bytes refuses any byte outside printable ASCII in a message. */
static void test_quoted_names(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_raw(&b, "\x1b[31m\0\n\x9b\xff", 9, 99, NULL, 0);
  refused(&b, "key \"?[31m????\": ");
  char long_name[300];
  memset(long_name, 'x', sizeof long_name);
  gguf_build_init(&b);
  gguf_build_raw(&b, long_name, sizeof long_name, 99, NULL, 0);
  refused(&b, "xxx...\": value type 99 is unknown");
}

static void test_arguments(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  assert_int_equal(pkv_gguf_open_memory(NULL, "GGUF", 4, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_gguf_open_memory(&g, NULL, 4, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_gguf_open(&g, NULL, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_gguf_open_memory(&g, "GGUF", 4, NULL, NULL), PKV_E_FORMAT);
  pkv_gguf_close(NULL);
}

/* ---- whole models ---- */

static void whole_case(gguf_build *b, bool need_tensors, pkv_status wanted, const char *part) {
  size_t size = 0;
  pkv_gguf *g = NULL;
  pkv_error err = {0};
  unsigned char *bytes = gguf_build_exact(b, &size);
  gguf_build_deinit(b);
  assert_int_equal(pkv_gguf_open_memory(&g, bytes, size, NULL, &err), PKV_OK);
  const pkv_status status = pkv_gguf_check_whole(g, need_tensors, &err);
  if (status != wanted || strstr(err.text, part) == NULL)
    fail_msg("%s \"%s\", expected %s \"%s\"", pkv_status_name(status), err.text,
             pkv_status_name(wanted), part);
  pkv_gguf_close(g);
  gguf_build_drop(bytes);
}

/* L2 and L5: a vocabulary, and a shard. */
static void test_not_a_whole_model(void **state) {
  (void)state;
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "llama");
  whole_case(&b, true, PKV_E_UNSUPPORTED, "no tensors: vocabulary file");
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "llama");
  whole_case(&b, false, PKV_OK, "");
  begin(&b);
  gguf_build_u16(&b, "split.no", 1);
  gguf_build_u16(&b, "split.count", 3);
  whole_case(&b, true, PKV_E_UNSUPPORTED, "file is shard 2 of 3");
  begin(&b);
  gguf_build_u16(&b, "split.no", 0);
  gguf_build_u16(&b, "split.count", 1);
  whole_case(&b, true, PKV_OK, "");
  begin(&b);
  gguf_build_string(&b, "split.count", "3");
  whole_case(&b, true, PKV_E_FORMAT, "key split.count has type string");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_header),
      cmocka_unit_test(test_versions),
      cmocka_unit_test(test_tensor_count),
      cmocka_unit_test(test_key_count),
      cmocka_unit_test(test_count_one_too_many),
      cmocka_unit_test(test_string_lengths),
      cmocka_unit_test(test_string_one_byte_too_long),
      cmocka_unit_test(test_names_at_the_limit),
      cmocka_unit_test(test_arrays),
      cmocka_unit_test(test_bytes_of_keys),
      cmocka_unit_test(test_string_in_array),
      cmocka_unit_test(test_value_types),
      cmocka_unit_test(test_bools),
      cmocka_unit_test(test_duplicates),
      cmocka_unit_test(test_many_names),
      cmocka_unit_test(test_dimensions),
      cmocka_unit_test(test_extents),
      cmocka_unit_test(test_byte_sizes_wrap),
      cmocka_unit_test(test_sum_of_sizes_wraps),
      cmocka_unit_test(test_tensor_types),
      cmocka_unit_test(test_places),
      cmocka_unit_test(test_order_and_holes),
      cmocka_unit_test(test_alignment),
      cmocka_unit_test(test_quoted_names),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_not_a_whole_model),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
