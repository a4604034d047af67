/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/workers.h"

#define HUGE_PAGE ((size_t)2 << 20)

static size_t space_of(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (size + page - 1) / page * page + HUGE_PAGE;
}

/* Address space with room for `size` bytes from where a huge page can begin, which is returned:
   nothing is there yet. NULL: none. */
static unsigned char *reserve(void **space, size_t size) {
  if (size > PTRDIFF_MAX - 2 * HUGE_PAGE) return NULL;
  void *const all = mmap(NULL, space_of(size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return NULL;
  *space = all;
  return (unsigned char *)all + (HUGE_PAGE - (uintptr_t)all % HUGE_PAGE) % HUGE_PAGE;
}

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
  void *const place = reserve(&f->space, f->size);
  void *map = MAP_FAILED;
  if (place) map = mmap(place, f->size, PROT_READ, MAP_PRIVATE | MAP_FIXED, f->fd, 0);
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
  if (f->space) (void)munmap(f->space, space_of(f->size));
  if (f->fd >= 0) (void)close(f->fd);
  *f = (pkv_mapped)PKV_MAPPED_NONE;
}

/* Bytes [from, from + count) of the file. */
static pkv_status read_part(unsigned char *to, const pkv_mapped *f, size_t from, size_t count,
                            pkv_error *err) {
  size_t done = 0;
  while (done < count) {
    const ssize_t n = pread(f->fd, to + done, count - done, (off_t)(from + done));
    if (n < 0 && errno == EINTR) continue;
    PKV_CHECK(err, n >= 0, PKV_E_IO, "cannot read the file at offset %zu: %s", from + done,
              strerror(errno));
    PKV_CHECK(err, n > 0, PKV_E_IO, "file shrank from %zu to %zu bytes while it was read", f->size,
              from + done);
    done += (size_t)n;
  }
  return PKV_OK;
}

pkv_status pkv_mapped_read(unsigned char *to, const pkv_mapped *f, size_t count, pkv_error *err) {
  return read_part(to, f, 0, count, err);
}

/* The copy is read in parts, each by whoever comes: most of the time goes into memory that the
   system hands out for the first time. */
#define PART_BYTES ((size_t)16 << 20)

typedef struct filling {
  const pkv_mapped *file;
  unsigned char *copy;
  pkv_error *failed; /* [parts] */
} filling;

static void fill_part(void *ctx, int64_t part, int32_t worker) {
  const filling *const f = ctx;
  const size_t from = (size_t)part * PART_BYTES, left = f->file->size - from;
  (void)worker;
  (void)read_part(f->copy + from, f->file, from, left < PART_BYTES ? left : PART_BYTES,
                  &f->failed[part]);
}

/* By as many threads as the process has cores; alone where there are none to be had. */
static pkv_status fill(unsigned char *copy, const pkv_mapped *file, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t parts = (file->size + PART_BYTES - 1) / PART_BYTES;
  pkv_workers *workers = NULL;
  pkv_error *const failed = pkv_alloc_zeroed(&a, parts, sizeof *failed);
  if (parts < 2 || failed == NULL || pkv_workers_create(&workers, 0, &a, NULL) != PKV_OK) {
    pkv_free(&a, failed, parts * sizeof *failed);
    return pkv_mapped_read(copy, file, file->size, err);
  }
  filling f = {file, copy, failed};
  pkv_workers_run(workers, fill_part, &f, (int64_t)parts);
  pkv_workers_destroy(workers);
  pkv_status status = PKV_OK;
  for (size_t i = 0; i < parts && status == PKV_OK; i++) {
    status = failed[i].status;
    if (status != PKV_OK && err) *err = failed[i];
  }
  pkv_free(&a, failed, parts * sizeof *failed);
  return status;
}

/* Reads the file to `copy`, and moves that to the map's place. */
static pkv_status fill_and_move(pkv_mapped *f, unsigned char *copy, pkv_error *err) {
  void *const place = (void *)(uintptr_t)f->bytes;
  PKV_CHECK(err, mprotect(copy, f->size, PROT_READ | PROT_WRITE) == 0, PKV_E_NOMEM,
            "no memory for a copy of %zu bytes of weights", f->size);
#ifdef MADV_HUGEPAGE
  (void)madvise(copy, f->size, MADV_HUGEPAGE); /* a wish */
#endif
  PKV_TRY(fill(copy, f, err));
  (void)mprotect(copy, f->size, PROT_READ); /* against mistakes of ours, no matter if it fails */
  /* Both begin where a huge page can begin, so those that were made move as they are. */
  PKV_CHECK(err, mremap(copy, f->size, f->size, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place,
            PKV_E_IO, "cannot move a copy of %zu bytes of weights: %s", f->size, strerror(errno));
  f->copied = true;
  return PKV_OK;
}

pkv_status pkv_mapped_copy(pkv_mapped *f, pkv_error *err) {
  void *space = NULL;
  if (f->bytes == NULL || f->copied) return PKV_OK;
  unsigned char *const copy = reserve(&space, f->size);
  PKV_CHECK(err, copy != NULL, PKV_E_NOMEM, "no address space for a copy of %zu bytes of weights",
            f->size);
  unsigned char *const begin = space, *const end = begin + space_of(f->size);
  const pkv_status status = fill_and_move(f, copy, err);
  if (status != PKV_OK) {
    (void)munmap(space, space_of(f->size));
    return status;
  }
  /* What is left on both sides. Where the copy was another thread may have mapped something. */
  unsigned char *const behind = copy + (space_of(f->size) - HUGE_PAGE);
  if (copy > begin) (void)munmap(begin, (size_t)(copy - begin));
  if (end > behind) (void)munmap(behind, (size_t)(end - behind));
  return PKV_OK;
}

pkv_status pkv_mapped_check_unchanged(const pkv_mapped *f, pkv_error *err) {
  struct stat st;
  if (f->fd < 0 || f->copied) return PKV_OK;
  PKV_CHECK(err, fstat(f->fd, &st) == 0, PKV_E_IO, "cannot read the model file's size: %s",
            strerror(errno));
  PKV_CHECK(err, st.st_size >= 0 && (uint64_t)st.st_size >= f->size, PKV_E_IO,
            "model file shrank from %zu to %lld bytes while it is in use", f->size,
            (long long)st.st_size);
  return PKV_OK;
}
