/* SPDX-License-Identifier: Apache-2.0 */
#include "torture/fault_shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* glibc's own, for those who replace malloc. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t align, size_t size);
void __libc_free(void *block);

static _Atomic int64_t calls, live, fail_at;
static _Atomic bool armed, onwards;
static const char *_Atomic failed_name = "none";

void pkv_fault_arm(int64_t at, bool from_then_on) {
  calls = 0;
  fail_at = at;
  onwards = from_then_on;
  armed = true;
}

int64_t pkv_fault_disarm(void) {
  armed = false;
  return calls;
}

const char *pkv_fault_name(void) {
  return failed_name;
}

int64_t pkv_fault_live(void) {
  return live;
}

/* Whether this call is to fail. */
static bool fails(const char *name) {
  if (!armed) return false;
  const int64_t n = ++calls, at = fail_at;
  if (at == 0 || n < at || (n > at && !onwards)) return false;
  failed_name = name;
  return true;
}

/* The dynamic linker has to see these: hidden, they would take this program's own calls alone. */
#pragma GCC visibility push(default)

/* --- memory ---------------------------------------------------------------------------------- */

static void *counted(void *block) {
  if (block != NULL) live++;
  return block;
}

static void *refused(void) {
  errno = ENOMEM;
  return NULL;
}

void *malloc(size_t size) {
  return fails("malloc") ? refused() : counted(__libc_malloc(size));
}

void *calloc(size_t count, size_t size) {
  return fails("calloc") ? refused() : counted(__libc_calloc(count, size));
}

void *realloc(void *old, size_t size) {
  if (old == NULL) return malloc(size);
  if (size > 0 && fails("realloc")) return refused();
  void *const block = __libc_realloc(old, size);
  if (size == 0) live--;
  return block;
}

void *aligned_alloc(size_t align, size_t size) {
  return fails("aligned_alloc") ? refused() : counted(__libc_memalign(align, size));
}

void *memalign(size_t align, size_t size);
void *memalign(size_t align, size_t size) {
  return fails("memalign") ? refused() : counted(__libc_memalign(align, size));
}

int posix_memalign(void **out, size_t align, size_t size) {
  if (fails("posix_memalign")) return ENOMEM;
  void *const block = counted(__libc_memalign(align, size));
  if (block == NULL) return ENOMEM;
  *out = block;
  return 0;
}

void free(void *block) {
  if (block != NULL) live--;
  __libc_free(block);
}

/* --- everything else ------------------------------------------------------------------------- */

#define REAL_CALLS(X)                                                                              \
  X(void *, mmap, (void *, size_t, int, int, int, off_t))                                          \
  X(int, munmap, (void *, size_t))                                                                 \
  X(int, mprotect, (void *, size_t, int))                                                          \
  X(void *, mremap, (void *, size_t, size_t, int, ...))                                            \
  X(int, open, (const char *, int, ...))                                                           \
  X(int, close, (int))                                                                             \
  X(ssize_t, read, (int, void *, size_t))                                                          \
  X(ssize_t, pread, (int, void *, size_t, off_t))                                                  \
  X(ssize_t, write, (int, const void *, size_t))                                                   \
  X(int, fstat, (int, struct stat *))                                                              \
  X(int, fsync, (int))                                                                             \
  X(int, rename, (const char *, const char *))                                                     \
  X(FILE *, fopen, (const char *, const char *))                                                   \
  X(FILE *, fdopen, (int, const char *))                                                           \
  X(int, fclose, (FILE *))                                                                         \
  X(int, ftruncate, (int, off_t))                                                                  \
  X(int, fchmod, (int, mode_t))                                                                    \
  X(size_t, fread, (void *, size_t, size_t, FILE *))                                               \
  X(size_t, fwrite, (const void *, size_t, size_t, FILE *))                                        \
  X(int, fflush, (FILE *))                                                                         \
  X(int, pthread_create, (pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))         \
  X(int, socket, (int, int, int))                                                                  \
  X(int, bind, (int, const struct sockaddr *, socklen_t))                                          \
  X(int, listen, (int, int))                                                                       \
  X(int, accept4, (int, struct sockaddr *, socklen_t *, int))                                      \
  X(ssize_t, recv, (int, void *, size_t, int))                                                     \
  X(ssize_t, send, (int, const void *, size_t, int))                                               \
  X(int, epoll_create1, (int))                                                                     \
  X(int, epoll_ctl, (int, int, int, struct epoll_event *))                                         \
  X(int, eventfd, (unsigned, int))                                                                 \
  X(int, signalfd, (int, const sigset_t *, int))                                                   \
  X(const union MHD_DaemonInfo *, MHD_get_daemon_info,                                             \
    (struct MHD_Daemon *, enum MHD_DaemonInfoType, ...))

#define DECLARE(type, name, parameters) static type(*real_##name) parameters;
REAL_CALLS(DECLARE)

/* A void pointer becomes a function's by way of its bytes. */
#define FIND(type, name, parameters) *(void **)(&real_##name) = dlsym(RTLD_NEXT, #name);
__attribute__((constructor)) static void find_calls(void) {
  REAL_CALLS(FIND)
}

/* Early callers come before the constructor. */
#define READY(name) ((void)(real_##name == NULL ? (find_calls(), 0) : 0))

int pkv_fault_thread(pthread_t *out, void *(*run)(void *), void *arg) {
  READY(pthread_create);
  return real_pthread_create(out, NULL, run, arg);
}

static int64_t pages_of(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (int64_t)((size + page - 1) / page);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
  READY(mmap);
  if (fails("mmap")) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void *const block = real_mmap(at, size, protection, flags, fd, offset);
  /* else in place of what counted */
  if (block != MAP_FAILED && (flags & MAP_FIXED) == 0) live += pages_of(size);
  return block;
}

int mprotect(void *at, size_t size, int protection) {
  READY(mprotect);
  if (fails("mprotect")) {
    errno = ENOMEM;
    return -1;
  }
  return real_mprotect(at, size, protection);
}

/* Only to an address that is given: in place of what counted there; where it was is nothing. */
void *mremap(void *at, size_t size, size_t new_size, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void *const place = va_arg(rest, void *);
  va_end(rest);
  READY(mremap);
  if (fails("mremap")) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void *const block = real_mremap(at, size, new_size, flags, place);
  if (block != MAP_FAILED) live -= pages_of(size);
  return block;
}

int munmap(void *at, size_t size) {
  READY(munmap);
  live -= pages_of(size);
  return real_munmap(at, size);
}

static int opened(int fd) {
  if (fd >= 0) live++;
  return fd;
}

static int failed(int error) {
  errno = error;
  return -1;
}

int open(const char *path, int flags, ...) {
  va_list args;
  READY(open);
  va_start(args, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(args, mode_t) : 0;
  va_end(args);
  return fails("open") ? failed(EMFILE) : opened(real_open(path, flags, mode));
}

int close(int fd) {
  READY(close);
  const int result = real_close(fd);
  if (result == 0) live--;
  return result;
}

FILE *fopen(const char *path, const char *mode) {
  READY(fopen);
  if (fails("fopen")) {
    errno = EMFILE;
    return NULL;
  }
  return real_fopen(path, mode); /* its block is counted */
}

FILE *fdopen(int fd, const char *mode) {
  READY(fdopen);
  if (fails("fdopen")) {
    errno = ENOMEM;
    return NULL;
  }
  FILE *const file = real_fdopen(fd, mode);
  if (file != NULL) live--; /* closed with its block, which is counted */
  return file;
}

int fclose(FILE *file) {
  READY(fclose);
  const int result = real_fclose(file);
  return fails("fclose") ? failed(EIO) : result;
}

size_t fread(void *out, size_t size, size_t count, FILE *file) {
  READY(fread);
  return fails("fread") ? 0 : real_fread(out, size, count, file);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
  READY(fwrite);
  return fails("fwrite") ? 0 : real_fwrite(data, size, count, file);
}

#define FAILING(type, name, parameters, arguments, error)                                          \
  type name parameters {                                                                           \
    READY(name);                                                                                   \
    return fails(#name) ? failed(error) : real_##name arguments;                                   \
  }

FAILING(ssize_t, read, (int fd, void *out, size_t size), (fd, out, size), EIO)
FAILING(int, fstat, (int fd, struct stat *out), (fd, out), EIO)
FAILING(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), EIO)
FAILING(int, fsync, (int fd), (fd), EIO)
FAILING(int, ftruncate, (int fd, off_t size), (fd, size), EIO)
FAILING(int, fchmod, (int fd, mode_t mode), (fd, mode), EPERM)
FAILING(int, rename, (const char *from, const char *to), (from, to), EIO)
FAILING(int, fflush, (FILE * file), (file), EIO)
/* glibc declares addresses as a union of all kinds. */
FAILING(int, bind, (int fd, __CONST_SOCKADDR_ARG to, socklen_t size), (fd, to.__sockaddr__, size),
        EADDRINUSE)
FAILING(int, listen, (int fd, int backlog), (fd, backlog), EADDRINUSE)
FAILING(ssize_t, recv, (int fd, void *out, size_t size, int flags), (fd, out, size, flags),
        ECONNRESET)
FAILING(ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags),
        ECONNRESET)
/* Alone it is an error; from then on the file has ended. */
ssize_t pread(int fd, void *out, size_t size, off_t at) {
  READY(pread);
  if (!fails("pread")) return real_pread(fd, out, size, at);
  return onwards ? 0 : failed(EIO);
}

/* To leave needs nothing that could be missing. */
int epoll_ctl(int fd, int what, int other, struct epoll_event *event) {
  READY(epoll_ctl);
  if (what != EPOLL_CTL_DEL && fails("epoll_ctl")) return failed(ENOMEM);
  return real_epoll_ctl(fd, what, other, event);
}

#define OPENING(name, parameters, arguments)                                                       \
  int name parameters {                                                                            \
    READY(name);                                                                                   \
    return fails(#name) ? failed(EMFILE) : opened(real_##name arguments);                          \
  }

OPENING(socket, (int domain, int type, int protocol), (domain, type, protocol))
OPENING(accept4, (int fd, __SOCKADDR_ARG from, socklen_t *size, int flags),
        (fd, from.__sockaddr__, size, flags))
OPENING(epoll_create1, (int flags), (flags))
OPENING(eventfd, (unsigned first, int flags), (first, flags))
OPENING(signalfd, (int fd, const sigset_t *set, int flags), (fd, set, flags))

int pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *arg) {
  READY(pthread_create);
  return fails("pthread_create") ? EAGAIN : real_pthread_create(out, attributes, run, arg);
}

/* No call of the system, but one of the server's that may say it has nothing. */
const union MHD_DaemonInfo *MHD_get_daemon_info(struct MHD_Daemon *daemon,
                                                enum MHD_DaemonInfoType what, ...) {
  READY(MHD_get_daemon_info);
  return fails("MHD_get_daemon_info") ? NULL : real_MHD_get_daemon_info(daemon, what);
}
