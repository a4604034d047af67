/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GGUF reader on real files: what is no file, files beyond 4 GiB, keys larger than the first
 * read, files that shrink while they are open, and allocations that fail.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/gguf.h"
#include "support/gguf_build.h"
#include "support/test_alloc.h"

static char folder[] = "/tmp/pkv-gguf-XXXXXX";
static char path[sizeof folder + 32];

static int make_folder(void **state) {
  (void)state;
  if (mkdtemp(folder) == NULL) return -1;
  (void)snprintf(path, sizeof path, "%s/model.gguf", folder);
  return 0;
}

static int remove_folder(void **state) {
  (void)state;
  (void)unlink(path);
  return rmdir(folder);
}

static void write_at(int fd, const void *bytes, size_t count, off_t offset) {
  assert_int_equal(pwrite(fd, bytes, count, offset), count);
}

/* Writes the built file to `path`, and ends the builder. */
static size_t save(gguf_build *b) {
  gguf_build_finish(b);
  const size_t size = b->file.size;
  const int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  assert_true(fd >= 0);
  write_at(fd, b->file.data, size, 0);
  assert_int_equal(close(fd), 0);
  gguf_build_deinit(b);
  return size;
}

static void refused(const char *name, pkv_status wanted, const char *part) {
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  const pkv_status status = pkv_gguf_open(&g, name, NULL, &err);
  if (status != wanted || strstr(err.text, part) == NULL)
    fail_msg("%s \"%s\", expected %s \"%s\"", pkv_status_name(status), err.text,
             pkv_status_name(wanted), part);
  assert_null(g);
}

static void test_no_file(void **state) {
  (void)state;
  refused("/nonexistent/model.gguf", PKV_E_IO, "cannot open /nonexistent/model.gguf: No such file");
  refused(folder, PKV_E_IO, "is a folder, not a file");
  refused("/dev/null", PKV_E_IO, "is a device, pipe or socket, not a file");
  assert_int_equal(mkfifo(path, 0600), 0);
  refused(path, PKV_E_IO, "is a device, pipe or socket"); /* and does not wait for a writer */
  assert_int_equal(unlink(path), 0);
  const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  assert_int_equal(close(fd), 0);
  refused(path, PKV_E_FORMAT, "file is empty");
}

static void begin(gguf_build *b) {
  gguf_build_init(b);
  gguf_build_string(b, "general.architecture", "llama");
  gguf_build_tensor(b, "first", 0, 1, (const int64_t[]){64}, NULL, 256);
}

static void test_cut_file(void **state) {
  (void)state;
  gguf_build b;
  begin(&b);
  const size_t size = save(&b);
  assert_int_equal(truncate(path, (off_t)size - 1), 0);
  char part[96];
  (void)snprintf(part, sizeof part, "tensor \"first\" at offset %zu needs 256 bytes, file has %zu",
                 size - 256, size - 1);
  refused(path, PKV_E_FORMAT, part);
  assert_int_equal(truncate(path, (off_t)size / 2), 0);
  refused(path, PKV_E_FORMAT, "tensor \"first\"");
  assert_int_equal(truncate(path, 24), 0);
  refused(path, PKV_E_FORMAT,
          "header: tensor count is 1, which needs at least 25 bytes; 8 are left");
}

/* Offsets beyond 2^32, in a file that occupies next to nothing. */
static void test_five_gib(void **state) {
  (void)state;
  const uint64_t far = (uint64_t)5 << 30, middle = ((uint64_t)1 << 32) + 32;
  gguf_build b;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  gguf_build_init(&b);
  gguf_build_raw_tensor(&b, "large", 5, 2, (const uint64_t[]){65536, 16384}, 0, 0);
  gguf_build_raw_tensor(&b, "middle", 6, 1, (const uint64_t[]){4}, 24, middle);
  gguf_build_raw_tensor(&b, "far", 3, 1, (const uint64_t[]){4}, 24, far);
  const size_t start = save(&b);
  const int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (ftruncate(fd, (off_t)(start + far + 4)) != 0) {
    (void)close(fd);
    print_message("skipped: no files of 5 GiB in %s\n", folder);
    skip();
  }
  write_at(fd, "midd", 4, (off_t)(start + middle));
  write_at(fd, "afar", 4, (off_t)(start + far));
  assert_int_equal(close(fd), 0);
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(pkv_gguf_file_bytes(g), start + far + 4);
  assert_int_equal(pkv_gguf_find_tensor(g, "large")->bytes, (uint64_t)1 << 32);
  assert_memory_equal(pkv_gguf_find_tensor(g, "middle")->data, "midd", 4);
  assert_memory_equal(pkv_gguf_find_tensor(g, "far")->data, "afar", 4);
  assert_int_equal(pkv_gguf_find_tensor(g, "far")->offset, start + far);
  pkv_gguf_close(g);
  assert_int_equal(truncate(path, (off_t)(start + far + 3)), 0);
  refused(path, PKV_E_FORMAT,
          "tensor \"far\" at offset 5368709280 needs 4 bytes, file has 5368709283");
}

/* About 9 MB of strings: three reads, and everything still points into the last copy. */
static void large_keys(gguf_build *b) {
  static char items[150][65536];
  const char *list[150];
  for (size_t i = 0; i < 150; i++) {
    memset(items[i], 'a' + (int)(i % 26), sizeof items[i] - 1);
    list[i] = items[i];
  }
  begin(b);
  gguf_build_strings(b, "many", list, 150);
  gguf_build_u32(b, "last", 4711);
}

static void test_keys_beyond_first_read(void **state) {
  (void)state;
  gguf_build b;
  test_alloc memory;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  int64_t last = 0;
  large_keys(&b);
  const size_t size = save(&b);
  test_alloc_init(&memory);
  const pkv_allocator a = test_alloc_allocator(&memory);
  if (pkv_gguf_open(&g, path, &a, &err) != PKV_OK) fail_msg("%s", err.text);
  /* What was read behind the tables was given back. */
  assert_true(memory.live_bytes < size + 4096);
  assert_int_equal(pkv_gguf_get_int(&last, g, "last", true, 0, 9999, NULL), PKV_OK);
  assert_int_equal(last, 4711);
  const unsigned char *cursor = pkv_gguf_find(g, "many")->data;
  for (size_t i = 0; i < 150; i++) {
    const pkv_span text = pkv_gguf_next_string(&cursor);
    assert_int_equal(text.size, 65535);
    assert_int_equal(text.data[0], 'a' + (int)(i % 26));
    assert_int_equal(text.data[65534], 'a' + (int)(i % 26));
  }
  assert_int_equal(pkv_gguf_find_tensor(g, "first")->bytes, 256);
  pkv_gguf_close(g);
  test_alloc_finish(&memory);
}

/* Keys that end exactly with the file. */
static void test_keys_to_the_end(void **state) {
  (void)state;
  gguf_build b;
  pkv_gguf *g = NULL;
  pkv_error err = {0};
  gguf_build_init(&b);
  gguf_build_u8(&b, "1234567890123456789", 1); /* 24 + 8 + 19 + 4 + 1 = 56 */
  b.alignment = 8;
  assert_int_equal(save(&b), 56);
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(pkv_gguf_value_count(g), 1);
  pkv_gguf_close(g);
}

/* L1: keys and names stay readable, and the check tells it. */
static void test_file_shrinks(void **state) {
  (void)state;
  gguf_build b;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  pkv_span text = {NULL, 0};
  begin(&b);
  const size_t size = save(&b);
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(pkv_gguf_check_unchanged(g, &err), PKV_OK);
  assert_int_equal(truncate(path, 0), 0);
  assert_int_equal(pkv_gguf_get_string(&text, g, "general.architecture", true, &err), PKV_OK);
  assert_memory_equal(text.data, "llama", 5);
  assert_memory_equal(pkv_gguf_find_tensor(g, "first")->name.data, "first", 5);
  assert_int_equal(pkv_gguf_check_unchanged(g, &err), PKV_E_IO);
  char wanted[96];
  (void)snprintf(wanted, sizeof wanted, "model file shrank from %zu to 0 bytes while it is in use",
                 size);
  assert_string_equal(err.text, wanted);
  pkv_gguf_close(g);
}

/* Replacing by rename, the way to change a model file, leaves the open one whole. */
static void test_file_replaced(void **state) {
  (void)state;
  gguf_build b;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  begin(&b);
  (void)save(&b);
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(pkv_gguf_check_unchanged(g, &err), PKV_OK);
  assert_int_equal(pkv_gguf_find_tensor(g, "first")->data[255], 0);
  pkv_gguf_close(g);
}

#define COPIED_BYTES (((size_t)33 << 20) + 96) /* parts read side by side, the last one short */

static void save_pattern(void) {
  gguf_build b;
  unsigned char *const data = malloc(COPIED_BYTES);
  assert_non_null(data);
  for (size_t i = 0; i < COPIED_BYTES; i++)
    data[i] = (unsigned char)(i * 7 + (i >> 12));
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "llama");
  gguf_build_tensor(&b, "first", 0, 1, (const int64_t[]){COPIED_BYTES / 4}, data, COPIED_BYTES);
  (void)save(&b);
  free(data);
}

static void assert_pattern(const unsigned char *data) {
  for (size_t i = 0; i < COPIED_BYTES; i++)
    if (data[i] != (unsigned char)(i * 7 + (i >> 12))) fail_msg("byte %zu is %d", i, data[i]);
}

/* Copied weights stay where they were, on whole huge pages, and need the file no longer. */
static void test_copied(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  save_pattern();
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  const unsigned char *const data = pkv_gguf_find_tensor(g, "first")->data;
  assert_int_equal(((uintptr_t)data - pkv_gguf_data_offset(g)) % ((uintptr_t)2 << 20), 0);
  assert_pattern(data);
  for (int i = 0; i < 2; i++)
    if (pkv_gguf_copy(g, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(truncate(path, 0), 0);
  assert_ptr_equal(pkv_gguf_find_tensor(g, "first")->data, data);
  assert_pattern(data);
  assert_int_equal(pkv_gguf_check_unchanged(g, &err), PKV_OK);
  pkv_gguf_close(g);
}

static void test_shrinks_before_the_copy(void **state) {
  (void)state;
  pkv_error err = {0};
  pkv_gguf *g = NULL;
  save_pattern();
  if (pkv_gguf_open(&g, path, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(truncate(path, 4096), 0);
  assert_int_equal(pkv_gguf_copy(g, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "to 4096 bytes while it was read"));
  pkv_gguf_close(g);
}

static pkv_status open_close(void *ctx, const pkv_allocator *allocator) {
  (void)ctx;
  pkv_gguf *g = NULL;
  const pkv_status status = pkv_gguf_open(&g, path, allocator, NULL);
  pkv_gguf_close(g);
  return status;
}

static int open_files(void) {
  int count = 0;
  for (int fd = 0; fd < 256; fd++)
    count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

static void save_shard(const char *name, int number, int count, int declared) {
  char at[sizeof path];
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_string(&b, "general.architecture", "llama");
  if (count >= 0) gguf_build_u16(&b, "split.count", (uint16_t)count);
  if (count < 0) gguf_build_string(&b, "split.count", "2");
  gguf_build_u16(&b, "split.no", (uint16_t)number);
  if (declared >= 0) gguf_build_u32(&b, "split.tensors.count", (uint32_t)declared);
  if (declared == -2) gguf_build_string(&b, "split.tensors.count", "1");
  gguf_build_tensor(&b, number == 0 ? "a" : "b", 0, 1, (const int64_t[]){8}, NULL, 32);
  (void)save(&b);
  (void)snprintf(at, sizeof at, "%s/%s", folder, name);
  assert_int_equal(rename(path, at), 0);
}

static void save_many(const char *name, int number, int tensors) {
  char at[sizeof path];
  gguf_build b;
  gguf_build_init(&b);
  gguf_build_u16(&b, "split.count", 2);
  gguf_build_u16(&b, "split.no", (uint16_t)number);
  for (int i = 0; i < tensors; i++) {
    const int n = snprintf(at, sizeof at, "%d.%d", number, i);
    gguf_build_raw_tensor(&b, at, (size_t)n, 1, (const uint64_t[]){8}, 0, 32 * (uint64_t)i);
  }
  const size_t start = save(&b);
  assert_int_equal(truncate(path, (off_t)(start + 32 * (size_t)tensors)), 0);
  (void)snprintf(at, sizeof at, "%s/%s", folder, name);
  assert_int_equal(rename(path, at), 0);
}

/* Shards with as many tensors together as one file may have, and with one more. */
static void test_tensors_of_shards(void **state) {
  (void)state;
  static const char *const names[] = {"n-00001-of-00002.gguf", "n-00002-of-00002.gguf"};
  char at[2][sizeof path];
  for (int i = 0; i < 2; i++)
    (void)snprintf(at[i], sizeof at[i], "%s/%s", folder, names[i]);
  save_many(names[0], 0, 40000);
  for (int more = 0; more < 2; more++) {
    pkv_error err = {0};
    pkv_gguf *g = NULL;
    save_many(names[1], 1, 65536 - 40000 + more);
    const pkv_status status = pkv_gguf_open_whole(&g, at[0], NULL, &err);
    if (status != (more ? PKV_E_LIMIT : PKV_OK)) fail_msg("%s", err.text);
    if (more)
      assert_string_equal(err.text, "the shards have 65537 tensors");
    else
      assert_int_equal(pkv_gguf_tensor_count(g), 65536);
    pkv_gguf_close(g);
  }
  assert_int_equal(unlink(at[0]), 0);
  assert_int_equal(unlink(at[1]), 0);
}

/* What shards say of each other. */
static void test_shards(void **state) {
  (void)state;
  static const char first[] = "m-00001-of-00002.gguf", second[] = "m-00002-of-00002.gguf";
  static const struct {
    int count, declared, second_count;
    pkv_status status;
    const char *part;
  } cases[] = {
      {2, 2, 2, PKV_OK, ""},
      {2, -1, 2, PKV_OK, ""},
      {2, 9, 2, PKV_E_FORMAT, "split.tensors.count is 9, the shards have 2 tensors"},
      {2, -2, 2, PKV_E_FORMAT, "split.tensors.count"},
      {2, 2, -1, PKV_E_FORMAT, "shard 2 of 2: key split.count has type string"},
      {2, 2, 3, PKV_E_FORMAT, "says that it is 2 of 3"},
      {-1, 2, 2, PKV_E_FORMAT, "key split.count has type string"},
      {1000, 2, 2, PKV_E_LIMIT, "split.count is 1000, at most 999 are supported"},
      {999, 2, 2, PKV_E_FORMAT, "is not named"},
  };
  char at[2][sizeof path];
  (void)snprintf(at[0], sizeof at[0], "%s/%s", folder, first);
  (void)snprintf(at[1], sizeof at[1], "%s/%s", folder, second);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pkv_error err = {0};
    pkv_gguf *g = NULL;
    save_shard(first, 0, cases[i].count, cases[i].declared);
    save_shard(second, 1, cases[i].second_count, -1);
    const pkv_status status = pkv_gguf_open_whole(&g, at[0], NULL, &err);
    if (status != cases[i].status || strstr(err.text, cases[i].part) == NULL)
      fail_msg("%zu: %s \"%s\", expected \"%s\"", i, pkv_status_name(status), err.text,
               cases[i].part);
    if (status == PKV_OK) {
      if (pkv_gguf_copy(g, &err) != PKV_OK) fail_msg("%s", err.text);
      assert_int_equal(truncate(at[1], 0), 0); /* the copy is of all shards */
      for (int k = 0; k < 32; k++)
        assert_int_equal(pkv_gguf_find_tensor(g, "b")->data[k], 0);
      assert_int_equal(pkv_gguf_check_unchanged(g, &err), PKV_OK);
    }
    pkv_gguf_close(g);
  }
  assert_int_equal(unlink(at[0]), 0);
  assert_int_equal(unlink(at[1]), 0);
  assert_int_equal(pkv_gguf_open_whole(NULL, path, NULL, NULL), PKV_E_INVALID);
  assert_int_equal(pkv_gguf_open(NULL, path, NULL, NULL), PKV_E_INVALID);
}

static void test_no_memory(void **state) {
  (void)state;
  gguf_build b;
  const int before = open_files();
  large_keys(&b);
  (void)save(&b);
  /* Description, three reads with four tables each but the last read's copy, which is trimmed. */
  const int64_t allocations = test_alloc_torture(open_close, NULL);
  assert_true(allocations >= 8);
  assert_int_equal(open_files(), before);
}

/* The fuzzer's seeds come from another writer than gguf_build: their names say what they are. */
static void test_seeds(void **state) {
  (void)state;
  static const char seeds[] = PKV_SOURCE_DIR "/fuzz/corpus/gguf";
  int good = 0, bad = 0;
  DIR *dir = opendir(seeds);
  assert_non_null(dir);
  for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
    char name[4096];
    pkv_gguf *g = NULL;
    pkv_error err = {0};
    const bool is_good = strncmp(entry->d_name, "good_", 5) == 0;
    if (!is_good && strncmp(entry->d_name, "bad_", 4) != 0) continue;
    (void)snprintf(name, sizeof name, "%s/%s", seeds, entry->d_name);
    const pkv_status status = pkv_gguf_open(&g, name, NULL, &err);
    if ((status == PKV_OK) != is_good)
      fail_msg("%s: %s \"%s\"", entry->d_name, pkv_status_name(status), err.text);
    good += is_good;
    bad += !is_good;
    pkv_gguf_close(g);
  }
  assert_int_equal(closedir(dir), 0);
  assert_true(good >= 10);
  assert_true(bad >= 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_no_file),
      cmocka_unit_test(test_cut_file),
      cmocka_unit_test(test_five_gib),
      cmocka_unit_test(test_keys_beyond_first_read),
      cmocka_unit_test(test_keys_to_the_end),
      cmocka_unit_test(test_file_shrinks),
      cmocka_unit_test(test_file_replaced),
      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_seeds),
      cmocka_unit_test(test_copied),
      cmocka_unit_test(test_shrinks_before_the_copy),
      cmocka_unit_test(test_shards),
      cmocka_unit_test(test_tensors_of_shards),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
