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

/* Whether `name` is still the file behind `fd`. */
static bool is_named(int fd, const char *name) {
  struct stat held, there;
  return fstat(fd, &held) == 0 && lstat(name, &there) == 0 && held.st_ino == there.st_ino &&
         held.st_dev == there.st_dev;
}

static bool lock(int fd) {
  return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; /* or there are no locks */
}

/* A file that a killed process left is removed: not taken over, as others may have it open or under
   another name. One that is written, and what is no file, is let be. */
static void remove_left(const char *name) {
  struct stat s;
  const int fd = open(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;
  if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && lock(fd) && is_named(fd, name))
    (void)unlink(name); /* where it cannot be, the next name is tried */
  (void)close(fd);
}

/* A file that is ours alone, with a lock that says so; -1: errno says why, EEXIST when there is
   another. */
static int claim(const char *name, mode_t mode) {
  int fd = -1;
  for (int i = 0; fd < 0 && i < 2; i++) {
    if (i > 0) remove_left(name);
    fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0 && errno != EEXIST) return -1;
  }
  /* before the lock was ours it looked like one that was left */
  if (fd < 0 || (lock(fd) && is_named(fd, name))) return fd;
  (void)close(fd);
  errno = EEXIST;
  return -1;
}

/* Of a name that has no room for what goes behind it, the end is left out. */
static size_t kept_bytes(const char *path) {
  const char *const slash = strrchr(path, '/');
  const size_t bytes = strlen(path), folder = slash == NULL ? 0 : (size_t)(slash - path) + 1;
  const size_t most = folder + NAME_MAX - (sizeof ".new15" - 1);
  return bytes < most ? bytes : most;
}

/* The file beside `path`, and its name. */
static pkv_status open_beside(FILE **file, char *name, const char *path, mode_t mode,
                              pkv_error *err) {
  int fd = -1;
  const int kept = (int)kept_bytes(path);
  *file = NULL;
  for (int i = 0; fd < 0 && i < TRIES; i++) {
    char number[8] = "";
    if (i > 0) (void)snprintf(number, sizeof number, "%d", i);
    const int size = snprintf(name, NAME_BYTES, "%.*s.new%s", kept, path, number);
    PKV_CHECK(err, size > 0 && size < NAME_BYTES, PKV_E_RANGE, "%.60s...: too long", path);
    fd = claim(name, mode);
    if (fd < 0 && errno != EEXIST) return refuse(name, errno, err);
  }
  PKV_CHECK(err, fd >= 0, PKV_E_IO, "cannot write %.120s: .new to .new%d beside it are others'",
            path, TRIES - 1);
  *file = fdopen(fd, "w");
  if (*file != NULL) return PKV_OK;
  const int reason = errno;
  (void)remove(name);
  (void)close(fd);
  return refuse(name, reason, err);
}

/* Whose the file was, or else without what its mode would give to another group, or do as another
   user. */
static bool keep_mode(int fd, const struct stat *before) {
  struct stat now;
  mode_t mode = before->st_mode & 07777;
  if (fstat(fd, &now) != 0) return false;
  if (now.st_gid != before->st_gid && fchown(fd, (uid_t)-1, before->st_gid) != 0)
    mode &= ~(mode_t)(S_IRWXG | S_ISGID);
  if (now.st_uid != before->st_uid && fchown(fd, before->st_uid, (gid_t)-1) != 0)
    mode &= ~(mode_t)S_ISUID;
  return fchmod(fd, mode) == 0;
}

/* That the name is the new file's, too. Some file systems cannot; one of the two it is anyway. */
static void sync_folder(const char *path) {
  char folder[NAME_BYTES];
  const char *const slash = strrchr(path, '/');
  const int size = slash == NULL ? 1 : (int)(slash - path) + 1;
  (void)snprintf(folder, sizeof folder, "%.*s", size, slash == NULL ? "." : path);
  const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  (void)fsync(fd);
  (void)close(fd);
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
  if (before != NULL && !keep_mode(fileno(file), before)) status = refuse(path, errno, err);
  if (status == PKV_OK) status = write_all(file, path, true, write, ctx, err);
  if (status == PKV_OK && rename(name, path) != 0) status = refuse(path, errno, err);
  if (status == PKV_OK)
    sync_folder(path);
  else
    (void)remove(name);
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
