/* SPDX-License-Identifier: Apache-2.0 */
#include "base/replace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_BYTES (PATH_MAX + 8)
#define TRIES      16

static pkv_status refuse(const char *path, int reason, pkv_error *err) {
  return PKV_FAIL(err, PKV_E_IO, "cannot write %.120s: %s", path, strerror(reason));
}

pkv_status pkv_write_bytes(void *ctx, FILE *file, pkv_error *err) {
  const pkv_bytes *const bytes = ctx;
  (void)err;
  (void)fwrite(bytes->data, 1, bytes->size, file); /* the file remembers that it failed */
  return PKV_OK;
}

static pkv_status write_all(FILE *file, const char *path, bool to_disk, pkv_write_file_fn write,
                            void *ctx, pkv_error *err) {
  errno = 0;
  PKV_TRY(write(ctx, file, err));
  if (fflush(file) != 0 || ferror(file)) return refuse(path, errno ? errno : EIO, err);
  if (to_disk && fsync(fileno(file)) != 0) return refuse(path, errno, err);
  return PKV_OK;
}

/* An empty file of that name that nobody else writes, with a lock that says so; -1: errno says why,
   EWOULDBLOCK when another process has it. A file that a killed process left is taken over. */
static int claim(const char *name, mode_t mode) {
  struct stat held, there;
  const int fd = open(name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, mode);
  if (fd < 0) return -1;
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) goto busy;
  /* its writer may have put it in its place, or given up, before the lock was ours */
  if (fstat(fd, &held) != 0 || lstat(name, &there) != 0 || held.st_ino != there.st_ino ||
      held.st_dev != there.st_dev)
    goto busy;
  if (ftruncate(fd, 0) == 0) return fd;
  const int reason = errno;
  (void)close(fd);
  errno = reason;
  return -1;
busy:
  (void)close(fd);
  errno = EWOULDBLOCK;
  return -1;
}

/* The file beside `path`, and its name. */
static pkv_status open_beside(FILE **file, char *name, const char *path, mode_t mode,
                              pkv_error *err) {
  int fd = -1;
  *file = NULL;
  for (int i = 0; fd < 0 && i < TRIES; i++) {
    char number[8] = "";
    if (i > 0) (void)snprintf(number, sizeof number, "%d", i);
    const int size = snprintf(name, NAME_BYTES, "%s.new%s", path, number);
    PKV_CHECK(err, size > 0 && size < NAME_BYTES, PKV_E_RANGE, "%.60s...: too long", path);
    fd = claim(name, mode);
    if (fd < 0 && errno != EWOULDBLOCK && errno != ELOOP) return refuse(name, errno, err);
  }
  PKV_CHECK(err, fd >= 0, PKV_E_IO, "cannot write %.120s: others write it, %d at a time", path,
            TRIES);
  *file = fdopen(fd, "w");
  if (*file != NULL) return PKV_OK;
  const int reason = errno;
  (void)remove(name);
  (void)close(fd);
  return refuse(name, reason, err);
}

/* before: of the file that is there, or NULL. The lock is held until the file has its name: nobody
   takes it over before. */
static pkv_status replace(const char *path, const struct stat *before, pkv_write_file_fn write,
                          void *ctx, pkv_error *err) {
  char name[NAME_BYTES];
  FILE *file;
  const mode_t mode = before != NULL ? before->st_mode & 0777 : 0666;
  PKV_TRY(open_beside(&file, name, path, mode, err));
  pkv_status status = PKV_OK;
  if (before != NULL && fchmod(fileno(file), before->st_mode & 07777) != 0)
    status = refuse(path, errno, err);
  if (status == PKV_OK) status = write_all(file, path, true, write, ctx, err);
  if (status == PKV_OK && rename(name, path) != 0) status = refuse(path, errno, err);
  if (status != PKV_OK) (void)remove(name);
  (void)fclose(file); /* everything is on the disk, or the file is gone */
  return status;
}

/* What is no file cannot be replaced. */
static pkv_status write_into(const char *path, pkv_write_file_fn write, void *ctx, pkv_error *err) {
  FILE *const file = fopen(path, "we");
  if (file == NULL) return refuse(path, errno, err);
  const pkv_status status = write_all(file, path, false, write, ctx, err);
  if (fclose(file) != 0 && status == PKV_OK) return refuse(path, errno, err);
  return status;
}

/* A link to nothing: makes the empty file that it names, so that it has a name of its own. */
static bool make_target(const char *path) {
  struct stat link;
  if (lstat(path, &link) != 0 || !S_ISLNK(link.st_mode)) return false;
  const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  return fd >= 0 && close(fd) == 0;
}

pkv_status pkv_replace_file(const char *path, pkv_write_file_fn write, void *ctx, pkv_error *err) {
  char target[PATH_MAX];
  struct stat before;
  bool there = stat(path, &before) == 0;
  if (!there && errno != ENOENT) return refuse(path, errno, err);
  const bool made = !there && make_target(path);
  if (made) there = stat(path, &before) == 0;
  if (!there) return replace(path, NULL, write, ctx, err);
  if (S_ISDIR(before.st_mode)) return refuse(path, EISDIR, err);
  if (!S_ISREG(before.st_mode)) return write_into(path, write, ctx, err);
  if (realpath(path, target) == NULL) return refuse(path, errno, err);
  const pkv_status status = replace(target, &before, write, ctx, err);
  if (status != PKV_OK && made) (void)remove(target);
  return status;
}
