/* SPDX-License-Identifier: Apache-2.0 */
/* Files written anew as a whole: links, modes, full disks, folders that cannot be written. */
#include "base/replace_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[32];
static pkv_error err;

static int make_folder(void **state) {
  (void)state;
  (void)snprintf(folder, sizeof folder, "/tmp/pkv_replace_XXXXXX");
  return mkdtemp(folder) == NULL;
}

static int remove_folder(void **state) {
  char command[64];
  (void)state;
  (void)snprintf(command, sizeof command, "rm -rf %s", folder);
  return system(command); /* NOLINT(cert-env33-c): a name that mkdtemp made */
}

static const char *in_folder(const char *name) {
  static char paths[4][96];
  static int at;
  char *const path = paths[at++ % 4];
  (void)snprintf(path, sizeof paths[0], "%s/%s", folder, name);
  return path;
}

static pkv_status replace_with(const char *path, const char *text) {
  memset(&err, 0, sizeof err);
  return pkv_replace_file(path, pkv_write_bytes, &(pkv_bytes){text, strlen(text)}, &err);
}

static void expect_content(const char *path, const char *text) {
  char bytes[64] = "";
  FILE *const file = fopen(path, "r");
  assert_non_null(file);
  const size_t n = fread(bytes, 1, sizeof bytes - 1, file);
  (void)fclose(file);
  bytes[n] = '\0';
  assert_string_equal(bytes, text);
}

static void expect_refused(const char *path, const char *words) {
  assert_int_equal(replace_with(path, "new"), PKV_E_IO);
  if (strstr(err.text, words) == NULL) fail_msg("\"%s\" without \"%s\"", err.text, words);
}

static mode_t mode_of(const char *path) {
  struct stat s;
  assert_int_equal(stat(path, &s), 0);
  return s.st_mode & 07777;
}

static void expect_nothing_beside(const char *path) {
  char name[128];
  (void)snprintf(name, sizeof name, "%s.new", path);
  assert_int_equal(access(name, F_OK), -1);
}

static void test_new_and_again(void **state) {
  (void)state;
  const char *const path = in_folder("plain");
  const mode_t before = umask(027);
  assert_int_equal(replace_with(path, "one"), PKV_OK);
  (void)umask(before);
  assert_int_equal(mode_of(path), 0640);
  expect_content(path, "one");
  assert_int_equal(chmod(path, 0604), 0);
  assert_int_equal(replace_with(path, ""), PKV_OK);
  expect_content(path, "");
  assert_int_equal(mode_of(path), 0604);
  expect_nothing_beside(path);
}

/* Names as long as there can be, two of them alike but for their end; and one that is longer. */
static void test_long_names(void **state) {
  (void)state;
  char name[257], beside[300];
  static const char *const texts[] = {"first", "second"};
  for (size_t length = 248; length <= 255; length++) {
    for (int i = 0; i < 4; i++) { /* each anew, and again */
      memset(name, 'n', length);
      name[length - 1] = (char)('a' + i % 2);
      name[length] = '\0';
      (void)snprintf(beside, sizeof beside, "%s/%s", folder, name);
      assert_int_equal(replace_with(beside, texts[i % 2]), PKV_OK);
    }
    for (int i = 0; i < 2; i++) {
      beside[strlen(beside) - 1] = (char)('a' + i);
      expect_content(beside, texts[i]);
      assert_int_equal(remove(beside), 0);
    }
  }
  memset(name, 'n', 256);
  name[256] = '\0';
  (void)snprintf(beside, sizeof beside, "%s/%s", folder, name);
  expect_refused(beside, "File name too long");
  char nothing[64];
  (void)snprintf(nothing, sizeof nothing, "ls %s | grep -q new", folder);
  assert_int_not_equal(system(nothing), 0); /* NOLINT(cert-env33-c): a name that mkdtemp made */
}

static pkv_status give_up(void *ctx, FILE *file, pkv_error *e) {
  (void)fputs((const char *)ctx, file);
  return PKV_FAIL(e, PKV_E_STATE, "no more");
}

static void test_links(void **state) {
  (void)state;
  struct stat s;
  char target[16] = "";
  assert_int_equal(replace_with(in_folder("real"), "old"), PKV_OK);
  assert_int_equal(symlink("real", in_folder("link")), 0);
  assert_int_equal(symlink("link", in_folder("link2")), 0);
  assert_int_equal(replace_with(in_folder("link2"), "through two links"), PKV_OK);
  expect_content(in_folder("real"), "through two links");
  assert_int_equal(readlink(in_folder("link2"), target, sizeof target - 1), 4);
  /* one that names a file which is not there yet: made, or not left behind */
  assert_int_equal(symlink("later", in_folder("early")), 0);
  static char part[] = "part";
  assert_int_equal(pkv_replace_file(in_folder("early"), give_up, part, &err), PKV_E_STATE);
  assert_int_equal(access(in_folder("later"), F_OK), -1);
  assert_int_equal(replace_with(in_folder("early"), "made"), PKV_OK);
  expect_content(in_folder("later"), "made");
  assert_int_equal(lstat(in_folder("early"), &s), 0);
  assert_true(S_ISLNK(s.st_mode));
  assert_int_equal(symlink("ring", in_folder("ring")), 0);
  expect_refused(in_folder("ring"), "ring");
  /* a link beside the file, planted for us to follow, is not followed */
  assert_int_equal(symlink("real", in_folder("later.new")), 0);
  assert_int_equal(replace_with(in_folder("later"), "not through it"), PKV_OK);
  expect_content(in_folder("real"), "through two links");
  expect_content(in_folder("later"), "not through it");
}

static void test_what_is_no_file(void **state) {
  (void)state;
  char bytes[8] = "";
  assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
  const int end = open(in_folder("pipe"), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  assert_true(end >= 0);
  assert_int_equal(replace_with(in_folder("pipe"), "piped"), PKV_OK);
  assert_int_equal(read(end, bytes, sizeof bytes), 5);
  (void)close(end);
  assert_string_equal(bytes, "piped");
  assert_int_equal(replace_with("/dev/null", "nothing"), PKV_OK);
  if (access("/dev/full", W_OK) == 0) expect_refused("/dev/full", "No space left on device");
  expect_refused(folder, "Is a directory");
}

static void test_where_nothing_can_be_made(void **state) {
  (void)state;
  static char longest[5000];
  assert_int_equal(mkdir(in_folder("locked"), 0755), 0);
  assert_int_equal(replace_with(in_folder("locked/file"), "old"), PKV_OK);
  assert_int_equal(chmod(in_folder("locked"), 0555), 0);
  assert_int_equal(chmod(folder, 0755), 0);
  const uid_t self = geteuid();
  if (self == 0) assert_int_equal(seteuid(65534), 0); /* root may write everywhere */
  expect_refused(in_folder("locked/file"), "file.new: Permission denied");
  expect_refused(in_folder("locked/other"), "other.new: Permission denied");
  if (self == 0) assert_int_equal(seteuid(self), 0);
  expect_content(in_folder("locked/file"), "old");
  expect_refused(in_folder("nowhere/file"), "No such file or directory");
  expect_refused(in_folder("locked/file/x"), "Not a directory");
  memset(longest, 'x', sizeof longest - 1);
  expect_refused(longest, "File name too long");
}

static pkv_status write_much(void *ctx, FILE *file, pkv_error *e) {
  static const char block[4096];
  (void)ctx;
  (void)e;
  for (int i = 0; i < 64; i++)
    (void)fwrite(block, 1, sizeof block, file);
  return PKV_OK;
}

static void test_full_disk(void **state) {
  (void)state;
  const char *const path = in_folder("small");
  struct rlimit before, tight;
  assert_int_equal(replace_with(path, "whole"), PKV_OK);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  tight = before;
  tight.rlim_cur = 8192;
  (void)signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const pkv_status got = pkv_replace_file(path, write_much, NULL, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  assert_int_equal(got, PKV_E_IO);
  assert_non_null(strstr(err.text, "small: File too large"));
  expect_content(path, "whole");
  expect_nothing_beside(path);
  static char part[] = "part";
  assert_int_equal(pkv_replace_file(path, give_up, part, &err), PKV_E_STATE);
  expect_content(path, "whole");
  expect_nothing_beside(path);
}

/* What a killed process left is taken over; what a living one writes is let be. */
static void test_another_writer(void **state) {
  (void)state;
  const char *const path = in_folder("shared");
  const int theirs = open(in_folder("shared.new"), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  assert_true(theirs >= 0);
  assert_int_equal(write(theirs, "longer than ours", 16), 16);
  assert_int_equal(flock(theirs, LOCK_EX), 0);
  assert_int_equal(replace_with(path, "beside"), PKV_OK);
  expect_content(path, "beside");
  expect_content(in_folder("shared.new"), "longer than ours");
  assert_int_equal(close(theirs), 0);
  assert_int_equal(replace_with(path, "ours"), PKV_OK);
  expect_content(path, "ours");
  expect_nothing_beside(path);
}

/* What stands where the new file would is neither waited for nor written to. */
static void test_what_was_planted(void **state) {
  (void)state;
  char path[96], name[128];
  (void)snprintf(path, sizeof path, "%s/planted", folder);
  const int left = open(in_folder("planted.new"), O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  assert_true(left >= 0);
  assert_int_equal(fchmod(left, 0666), 0);
  assert_int_equal(write(left, "theirs", 6), 6);
  assert_int_equal(link(in_folder("planted.new"), in_folder("second")), 0);
  const mode_t before = umask(022);
  assert_int_equal(replace_with(path, "ours"), PKV_OK);
  (void)umask(before);
  expect_content(path, "ours");
  expect_content(in_folder("second"), "theirs");
  assert_int_equal(mode_of(path), 0644);
  assert_int_equal(pwrite(left, "THEIRS", 6, 0), 6);
  assert_int_equal(close(left), 0);
  expect_content(path, "ours");
  assert_int_equal(mkfifo(in_folder("planted.new"), 0600), 0);
  assert_int_equal(mkdir(in_folder("planted.new1"), 0700), 0);
  (void)alarm(60);
  assert_int_equal(replace_with(path, "beside both"), PKV_OK);
  (void)alarm(0);
  expect_content(path, "beside both");
  for (int i = 2; i < 16; i++) {
    (void)snprintf(name, sizeof name, "%s.new%d", path, i);
    assert_int_equal(mkdir(name, 0700), 0);
    if (i == 14) assert_int_equal(replace_with(path, "the last name"), PKV_OK);
  }
  expect_refused(path, ".new to .new15 beside it are others'");
  expect_content(path, "the last name");
}

static void test_owner(void **state) {
  (void)state;
  struct stat s;
  const char *const path = in_folder("owned");
  if (geteuid() != 0) skip();
  assert_int_equal(replace_with(path, "old"), PKV_OK);
  assert_int_equal(chmod(folder, 0777), 0);
  assert_int_equal(chown(path, 65534, 65533), 0);
  assert_int_equal(chmod(path, 0640), 0);
  assert_int_equal(replace_with(path, "root's"), PKV_OK);
  assert_int_equal(stat(path, &s), 0);
  assert_int_equal(s.st_uid, 65534);
  assert_int_equal(s.st_gid, 65533);
  assert_int_equal(s.st_mode & 07777, 0640);
  /* who is not of that group does not show the file to his own */
  assert_int_equal(seteuid(65532), 0);
  assert_int_equal(replace_with(path, "a stranger's"), PKV_OK);
  assert_int_equal(seteuid(0), 0);
  assert_int_equal(mode_of(path), 0600);
}

static char race[96];
static atomic_int failed;

/* A hundred times, the letter at ctx and no other. */
static void *write_often(void *ctx) {
  char text[4096];
  pkv_error e;
  memset(text, *(const char *)ctx, sizeof text);
  for (int i = 0; i < 100; i++)
    if (pkv_replace_file(race, pkv_write_bytes, &(pkv_bytes){text, sizeof text}, &e) != PKV_OK)
      atomic_fetch_add(&failed, 1);
  return NULL;
}

static bool torn(const char *bytes, size_t n) {
  for (size_t i = 1; i < n; i++)
    if (bytes[i] != bytes[0]) return true;
  return n != 0 && n != 4096;
}

static void test_writers_at_once(void **state) {
  (void)state;
  pthread_t threads[3];
  static char letters[] = "abc";
  char bytes[5000];
  (void)snprintf(race, sizeof race, "%s/race", folder);
  assert_int_equal(replace_with(race, ""), PKV_OK);
  for (int i = 0; i < 3; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, write_often, &letters[i]), 0);
  for (int i = 0; i < 300; i++) {
    FILE *const file = fopen(race, "r");
    assert_non_null(file);
    const size_t n = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    if (torn(bytes, n)) fail_msg("%zu bytes, not one writer's", n);
  }
  for (int i = 0; i < 3; i++)
    (void)pthread_join(threads[i], NULL);
  assert_int_equal(atomic_load(&failed), 0);
  expect_nothing_beside(race);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_new_and_again),
      cmocka_unit_test(test_long_names),
      cmocka_unit_test(test_links),
      cmocka_unit_test(test_what_is_no_file),
      cmocka_unit_test(test_where_nothing_can_be_made),
      cmocka_unit_test(test_full_disk),
      cmocka_unit_test(test_another_writer),
      cmocka_unit_test(test_what_was_planted),
      cmocka_unit_test(test_owner),
      cmocka_unit_test(test_writers_at_once),
  };
  return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
