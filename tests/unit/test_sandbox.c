/* SPDX-License-Identifier: Apache-2.0 */
/* What a process in the sandbox can do and cannot, each tried in a child of its own. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/sandbox.h"

static char folder[] = "/tmp/pkv_sandbox_XXXXXX";
static char model[64], beside[64], target[64], linked[64], shards[2][64], shard_of_other[64],
    like_shard[64];

static void make_file(char *path, size_t size, const char *name) {
  (void)snprintf(path, size, "%s/%s", folder, name);
  const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, "x", 1), 1);
  assert_int_equal(close(fd), 0);
}

static int make_files(void **state) {
  char path[64];
  (void)state;
  assert_non_null(mkdtemp(folder));
  (void)snprintf(path, sizeof path, "%s/model", folder);
  assert_int_equal(mkdir(path, 0700), 0);
  make_file(model, sizeof model, "a.gguf");
  make_file(beside, sizeof beside, "secret");
  make_file(target, sizeof target, "blob");
  make_file(shards[0], sizeof shards[0], "b-00001-of-00002.gguf");
  make_file(shards[1], sizeof shards[1], "b-00002-of-00002.gguf");
  make_file(shard_of_other, sizeof shard_of_other, "c-00002-of-00002.gguf");
  make_file(like_shard, sizeof like_shard, "b-keys");
  (void)snprintf(linked, sizeof linked, "%s/model/model.safetensors", folder);
  assert_int_equal(symlink("../blob", linked), 0);
  return 0;
}

static int drop_files(void **state) {
  char path[64];
  (void)state;
  const char *const files[] = {model,     beside,         target,     linked, shards[0],
                               shards[1], shard_of_other, like_shard, path};
  (void)snprintf(path, sizeof path, "%s/model/own", folder);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++)
    (void)unlink(files[i]);
  (void)snprintf(path, sizeof path, "%s/model", folder);
  (void)rmdir(path);
  return rmdir(folder);
}

static bool has_landlock(void) {
  return syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION) >= 1;
}

/* The errno of opening a file, 0 when it can be. */
static int try_open(const char *path, int flags) {
  const int fd = open(path, flags | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  (void)close(fd);
  return 0;
}

#define EXPECT(wanted, got)                                                                        \
  do {                                                                                             \
    const int got_ = (got);                                                                        \
    if (got_ == (wanted)) break;                                                                   \
    (void)fprintf(stderr, "line %d: %s is %d, not %d\n", __LINE__, #got, got_, (wanted));          \
    return 1;                                                                                      \
  } while (0)

static void in_child(int (*work)(void)) {
  int status = 0;
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(work());
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static int enter_files(const char *path, const char *more) {
  pkv_error err = {PKV_OK, "", ""};
  if (pkv_sandbox_files(path, &more, 1, &err) == PKV_OK) return 0;
  (void)fprintf(stderr, "%s\n", err.text);
  return 1;
}

static int files_of_a_file(void) {
  const int zone = try_open("/etc/localtime", O_RDONLY);
  EXPECT(0, enter_files(model, NULL));
  EXPECT(0, try_open(model, O_RDONLY));
  EXPECT(EACCES, try_open(model, O_WRONLY));
  EXPECT(EACCES, try_open(beside, O_RDONLY));
  EXPECT(EACCES, try_open(folder, O_RDONLY | O_DIRECTORY));
  EXPECT(EACCES, try_open("/etc/passwd", O_RDONLY));
  EXPECT(EACCES, try_open("/proc/1/environ", O_RDONLY));
  EXPECT(EACCES, try_open("/tmp/pkv_sandbox_new", O_WRONLY | O_CREAT));
  EXPECT(-1, unlink(model));
  EXPECT(-1, mkdir("/tmp/pkv_sandbox_dir", 0700));
  EXPECT(-1, execl("/bin/true", "true", (char *)NULL));
  EXPECT(0, try_open("/dev/urandom", O_RDONLY));
  EXPECT(zone, try_open("/etc/localtime", O_RDONLY));
  return 0;
}

static int files_of_shards(void) {
  EXPECT(0, enter_files(shards[0], beside));
  EXPECT(0, try_open(shards[0], O_RDONLY));
  EXPECT(0, try_open(shards[1], O_RDONLY));
  EXPECT(0, try_open(beside, O_RDONLY));
  EXPECT(EACCES, try_open(shard_of_other, O_RDONLY));
  EXPECT(EACCES, try_open(like_shard, O_RDONLY));
  EXPECT(EACCES, try_open(model, O_RDONLY));
  return 0;
}

static int files_of_a_folder(void) {
  char path[64], own[64];
  (void)snprintf(path, sizeof path, "%s/model", folder);
  (void)snprintf(own, sizeof own, "%s/model/own", folder);
  EXPECT(0, enter_files(path, NULL));
  EXPECT(0, try_open(linked, O_RDONLY));
  EXPECT(0, try_open(path, O_RDONLY | O_DIRECTORY));
  EXPECT(EACCES, try_open(own, O_WRONLY | O_CREAT));
  EXPECT(EACCES, try_open(model, O_RDONLY));
  return 0;
}

static void test_files(void **state) {
  (void)state;
  if (!has_landlock()) skip();
  in_child(files_of_a_file);
  in_child(files_of_shards);
  in_child(files_of_a_folder);
}

/* What is not there is said before anything is taken away. */
static void test_missing(void **state) {
  const char *const more[] = {NULL, "/no/such/keys"};
  pkv_error err = {PKV_OK, "", ""};
  (void)state;
  if (!has_landlock()) skip();
  assert_int_equal(pkv_sandbox_files("/no/such/model", NULL, 0, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "/no/such/model"));
  assert_int_equal(pkv_sandbox_files(model, more, 2, &err), PKV_E_IO);
  assert_non_null(strstr(err.text, "/no/such/keys"));
  assert_int_equal(try_open("/etc/passwd", O_RDONLY), 0);
}

/* --- calls --------------------------------------------------------------------------------- */

static int refused(long result) {
  return result == -1 ? errno : 0;
}

static void *do_nothing(void *user) {
  return user;
}

/* From a thread that was there before: the filter is every thread's. */
static pthread_barrier_t barrier;
static void *try_exec(void *out) {
  (void)pthread_barrier_wait(&barrier);
  (void)pthread_barrier_wait(&barrier);
  *(int *)out = refused(execl("/bin/true", "true", (char *)NULL));
  return NULL;
}

static int calls(void) {
  const struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
  const struct sockaddr *const where = (const struct sockaddr *)&to;
  pkv_error err = {PKV_OK, "", ""};
  pthread_t thread;
  int in_thread = 0;
  const int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  void *const page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(0, pthread_barrier_init(&barrier, NULL, 2));
  EXPECT(0, pthread_create(&thread, NULL, try_exec, &in_thread));
  (void)pthread_barrier_wait(&barrier);
  EXPECT(PKV_OK, (int)pkv_sandbox_calls(&err));
  (void)pthread_barrier_wait(&barrier);
  EXPECT(0, pthread_join(thread, NULL));
  EXPECT(EPERM, in_thread);
  EXPECT(EPERM, refused(execl("/bin/true", "true", (char *)NULL)));
  EXPECT(EPERM, refused(fork()));
  EXPECT(EPERM, refused(connect(tcp, where, sizeof to)));
  EXPECT(EPERM, refused(sendto(tcp, "x", 1, MSG_FASTOPEN, where, sizeof to)));
  EXPECT(EPERM, refused(bind(tcp, where, sizeof to)));
  EXPECT(EPERM, refused(socket(AF_INET, SOCK_STREAM, 0)));
  EXPECT(EPERM, refused(socket(AF_INET6, SOCK_DGRAM, 0)));
  EXPECT(EPERM, refused(mprotect(page, 4096, PROT_READ | PROT_EXEC)));
  EXPECT(EPERM, refused((long)mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS,
                                   -1, 0)));
  EXPECT(EPERM, refused(syscall(SYS_ptrace, 0, 0, 0, 0)));
  EXPECT(ENOSYS, refused(syscall(SYS_io_uring_setup, 1, NULL)));
  EXPECT(ENOSYS, refused(syscall(SYS_clone3, NULL, 0)));
  EXPECT(ENOSYS, refused(syscall(SYS_pidfd_open, getpid(), 0)));
  EXPECT(ENOSYS, refused(syscall(452, AT_FDCWD, beside, 0600, 0))); /* fchmodat2 */
  EXPECT(EPERM, refused(syscall(SYS_bpf, 0, NULL, 0)));
  /* and what a server needs */
  EXPECT(0, mprotect(page, 4096, PROT_READ));
  EXPECT(0, pthread_create(&thread, NULL, do_nothing, NULL));
  EXPECT(0, pthread_join(thread, NULL));
  const int local = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  EXPECT(1, local >= 0);
  EXPECT(0, close(local));
  return 0;
}

/* Neither Landlock nor the rules of mapping see these: other ways to memory that is run, to what is
   written about files, to other processes and to the terminal's input. */
static int side_doors(void) {
  pkv_error err = {PKV_OK, "", ""};
  const int shared = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
  const pid_t parent = getppid();
  EXPECT(PKV_OK, (int)pkv_sandbox_calls(&err));
  if (shared >= 0) {
    EXPECT(EPERM, refused((long)shmat(shared, NULL, SHM_EXEC)));
    EXPECT(0, refused(shmctl(shared, IPC_RMID, NULL)));
  }
  EXPECT(EPERM, refused(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600)));
  EXPECT(EPERM, refused(personality(READ_IMPLIES_EXEC)));
  EXPECT(EPERM, refused(chmod(beside, 0644)));
  EXPECT(EPERM, refused(chown(beside, getuid(), getgid())));
  EXPECT(EPERM, refused(truncate(beside, 0)));
  EXPECT(EPERM, refused(utimes(beside, NULL)));
  EXPECT(EPERM, refused(setxattr(beside, "user.a", "b", 1, 0)));
  EXPECT(EPERM, refused(kill(parent, 0)));
  EXPECT(EPERM, refused(kill(-1, 0)));
  EXPECT(EPERM, refused(syscall(SYS_tgkill, parent, parent, 0)));
  EXPECT(EPERM, refused(prlimit(parent, RLIMIT_CORE, NULL, NULL)));
  EXPECT(EPERM, refused(ioctl(STDIN_FILENO, TIOCSTI, "x")));
  /* of itself */
  EXPECT(0, refused(kill(getpid(), 0)));
  EXPECT(0, refused(prlimit(0, RLIMIT_CORE, NULL, NULL)));
  EXPECT(0, raise(SIGURG));
  return 0;
}

static void test_calls(void **state) {
  (void)state;
  in_child(calls);
  in_child(side_doors);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_files),
      cmocka_unit_test(test_missing),
      cmocka_unit_test(test_calls),
  };
  return cmocka_run_group_tests_name("test_sandbox", tests, make_files, drop_files);
}
