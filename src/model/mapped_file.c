/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pkv_status open_and_map(pkv_mapped *f, const char *path, pkv_error *err) {
  struct stat st;
  /* O_NONBLOCK: a path that names a pipe must not hang here. */
  f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  PKV_CHECK(err, f->fd >= 0, PKV_E_IO, "cannot open %s: %s", path, strerror(errno));
  PKV_CHECK(err, fstat(f->fd, &st) == 0, PKV_E_IO, "cannot read the size of %s: %s", path,
            strerror(errno));
  PKV_CHECK(err, S_ISREG(st.st_mode), PKV_E_IO, "%s is %s, not a file", path,
            S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
  PKV_CHECK(err, st.st_size > 0, PKV_E_FORMAT, "file is empty");
  PKV_CHECK(err, (uint64_t)st.st_size <= PTRDIFF_MAX, PKV_E_LIMIT,
            "file has %lld bytes, more than this machine can address", (long long)st.st_size);
  f->size = (size_t)st.st_size;
  void *map = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, f->fd, 0);
  PKV_CHECK(err, map != MAP_FAILED, PKV_E_IO, "cannot map %zu bytes of %s: %s", f->size, path,
            strerror(errno));
  f->bytes = map;
  return PKV_OK;
}

pkv_status pkv_mapped_open(pkv_mapped *f, const char *path, pkv_error *err) {
  *f = (pkv_mapped)PKV_MAPPED_NONE;
  const pkv_status status = open_and_map(f, path, err);
  if (status != PKV_OK) pkv_mapped_close(f);
  return status;
}

void pkv_mapped_close(pkv_mapped *f) {
  if (f->bytes) (void)munmap((void *)(uintptr_t)f->bytes, f->size);
  if (f->fd >= 0) (void)close(f->fd);
  *f = (pkv_mapped)PKV_MAPPED_NONE;
}

pkv_status pkv_mapped_read(unsigned char *to, const pkv_mapped *f, size_t count, pkv_error *err) {
  size_t done = 0;
  while (done < count) {
    const ssize_t n = pread(f->fd, to + done, count - done, (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    PKV_CHECK(err, n >= 0, PKV_E_IO, "cannot read the file at offset %zu: %s", done,
              strerror(errno));
    PKV_CHECK(err, n > 0, PKV_E_IO, "file shrank from %zu to %zu bytes while it was read", f->size,
              done);
    done += (size_t)n;
  }
  return PKV_OK;
}

pkv_status pkv_mapped_check_unchanged(const pkv_mapped *f, pkv_error *err) {
  struct stat st;
  if (f->fd < 0) return PKV_OK;
  PKV_CHECK(err, fstat(f->fd, &st) == 0, PKV_E_IO, "cannot read the model file's size: %s",
            strerror(errno));
  PKV_CHECK(err, st.st_size >= 0 && (uint64_t)st.st_size >= f->size, PKV_E_IO,
            "model file shrank from %zu to %lld bytes while it is in use", f->size,
            (long long)st.st_size);
  return PKV_OK;
}
