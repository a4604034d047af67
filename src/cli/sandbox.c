/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/status.h"

/* --- files: Landlock ------------------------------------------------------------------------ */

/* Rights are bits; each version of Landlock added some, and a kernel refuses those it does not
 * know. By version: all that there are. */
static const uint64_t rights_by_version[] = {
    0, (1u << 13) - 1, (1u << 14) - 1, (1u << 15) - 1, (1u << 15) - 1, (1u << 16) - 1};
#define VERSIONS (sizeof rights_by_version / sizeof *rights_by_version)

/* Of the machine: who localhost is, how many processors are ours, where random numbers come from,
 * what time it is here. What is not there is left out. */
static const char *const system_files[] = {
    "/dev/urandom",       "/etc/hosts",         "/etc/host.conf",
    "/etc/nsswitch.conf", "/etc/gai.conf",      "/etc/resolv.conf",
    "/proc/self",         "/sys/fs/cgroup",     "/sys/devices/system/cpu",
    "/etc/localtime",     "/usr/share/zoneinfo"};

static pkv_status allow(int rules, const char *path, bool needed, pkv_error *err) {
  struct stat at;
  const int fd = open(path, O_PATH | O_CLOEXEC); /* follows links, as opening it will */
  if (fd < 0 && !needed) return PKV_OK;
  PKV_CHECK(err, fd >= 0, PKV_E_IO, "--sandbox: \"%.120s\": %s", path, strerror(errno));
  struct landlock_path_beneath_attr rule = {.parent_fd = fd};
  const bool folder = fstat(fd, &at) == 0 && S_ISDIR(at.st_mode);
  rule.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE | (folder ? LANDLOCK_ACCESS_FS_READ_DIR : 0u);
  const long added = syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
  const int why = errno;
  (void)close(fd);
  PKV_CHECK(err, added == 0, PKV_E_IO, "--sandbox: no rule for \"%.120s\": %s", path,
            strerror(why));
  return PKV_OK;
}

/* name-00002-of-00005.gguf: the others beside it are the same model. */
static bool is_shard(size_t *stem, const char *name) {
  static const char pattern[] = "-00000-of-00000.gguf";
  const size_t bytes = strlen(name), end = sizeof pattern - 1;
  if (bytes <= end) return false;
  *stem = bytes - end;
  for (size_t i = 0; i < end; i++) {
    const char c = name[*stem + i];
    if (pattern[i] == '0' ? c < '0' || c > '9' : c != pattern[i]) return false;
  }
  return true;
}

/* Files of a folder, or of them the shards named like `shard`, whose stem has so many bytes. The
 * folder itself is not opened. */
static pkv_status allow_entries(int rules, const char *folder, const char *shard, size_t stem,
                                pkv_error *err) {
  char path[4096];
  pkv_status status = PKV_OK;
  DIR *const entries = opendir(folder);
  PKV_CHECK(err, entries != NULL, PKV_E_IO, "--sandbox: folder \"%.120s\": %s", folder,
            strerror(errno));
  for (const struct dirent *e = readdir(entries); e != NULL && status == PKV_OK;
       e = readdir(entries)) {
    struct stat at;
    const int n = snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
    size_t own = 0;
    if (shard != NULL &&
        (!is_shard(&own, e->d_name) || own != stem || memcmp(e->d_name, shard, stem) != 0))
      continue;
    if (n < 0 || (size_t)n >= sizeof path) continue;
    if (stat(path, &at) == 0 && S_ISREG(at.st_mode)) status = allow(rules, path, false, err);
  }
  (void)closedir(entries);
  return status;
}

static pkv_status allow_model(int rules, const char *model, pkv_error *err) {
  char folder[4096];
  struct stat at;
  size_t stem = 0;
  PKV_CHECK(err, stat(model, &at) == 0, PKV_E_IO, "cannot open \"%.120s\": %s", model,
            strerror(errno));
  if (S_ISDIR(at.st_mode)) {
    PKV_TRY(allow(rules, model, true, err));
    return allow_entries(rules, model, NULL, 0, err);
  }
  PKV_TRY(allow(rules, model, true, err));
  const char *const slash = strrchr(model, '/');
  const char *const name = slash != NULL ? slash + 1 : model;
  if (!is_shard(&stem, name)) return PKV_OK;
  const int n = slash == NULL
                    ? snprintf(folder, sizeof folder, ".")
                    : snprintf(folder, sizeof folder, "%.*s/", (int)(slash - model), model);
  PKV_CHECK(err, n > 0 && (size_t)n < sizeof folder, PKV_E_LIMIT, "the file's name is too long");
  return allow_entries(rules, folder, name, stem, err);
}

static pkv_status add_rules(int rules, const char *model, const char *const *more, size_t count,
                            pkv_error *err) {
  PKV_TRY(allow_model(rules, model, err));
  for (size_t i = 0; i < count; i++)
    if (more[i] != NULL) PKV_TRY(allow(rules, more[i], true, err));
  for (size_t i = 0; i < sizeof system_files / sizeof *system_files; i++)
    PKV_TRY(allow(rules, system_files[i], false, err));
  return PKV_OK;
}

pkv_status pkv_sandbox_files(const char *model, const char *const *more, size_t count,
                             pkv_error *err) {
  const long version =
      syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
  PKV_CHECK(err, version >= 1, PKV_E_UNSUPPORTED,
            "--sandbox: this kernel has no Landlock, or it is switched off: %s", strerror(errno));
  const size_t known = (size_t)version < VERSIONS ? (size_t)version : VERSIONS - 1;
  const struct landlock_ruleset_attr handled = {.handled_access_fs = rights_by_version[known]};
  const int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
  PKV_CHECK(err, rules >= 0, PKV_E_UNSUPPORTED, "--sandbox: no Landlock rules: %s",
            strerror(errno));
  pkv_status status = add_rules(rules, model, more, count, err);
  if (status == PKV_OK && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
                           syscall(SYS_landlock_restrict_self, rules, 0) != 0))
    status = PKV_FAIL(err, PKV_E_UNSUPPORTED, "--sandbox: Landlock: %s", strerror(errno));
  (void)close(rules);
  return status;
}

/* --- calls: seccomp -------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

#ifdef ARCHITECTURE

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* The low half of an argument, on the little-endian processors above. */
#define LOAD_ARGUMENT(n)                                                                           \
  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * (n))
#define ANSWER(value)     BPF_STMT(BPF_RET | BPF_K, (value))
#define IF_EQUAL(k, t, f) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (k), (t), (f))
#define IF_ANY(k, t, f)   BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, (k), (t), (f))
#define NO(code)          ANSWER(SECCOMP_RET_ERRNO | (code))
#define YES               ANSWER(SECCOMP_RET_ALLOW)

#define FIRST_SHARED 424 /* from here on a call has one number on all processors */

/* The call is `call`: EPERM. */
#define REFUSE(call) IF_EQUAL(SYS_##call, 0, 1), NO(EPERM)
#define ALLOW(call)  IF_EQUAL(SYS_##call, 0, 1), YES
/* The call is `call`: EPERM where argument n has one of the bits, has none of them, or is another
 * value. */
#define REFUSE_BITS(call, n, bits)                                                                 \
  IF_EQUAL(SYS_##call, 0, 4), LOAD_ARGUMENT(n), IF_ANY((bits), 0, 1), NO(EPERM), YES
#define REFUSE_WITHOUT(call, n, bits)                                                              \
  IF_EQUAL(SYS_##call, 0, 4), LOAD_ARGUMENT(n), IF_ANY((bits), 1, 0), NO(EPERM), YES
#define REFUSE_OTHERS(call, n, value)                                                              \
  IF_EQUAL(SYS_##call, 0, 4), LOAD_ARGUMENT(n), IF_EQUAL((value), 1, 0), NO(EPERM), YES

#ifdef __x86_64__
#define OF_THIS_PROCESSOR                                                                          \
  REFUSE(fork), REFUSE(vfork), REFUSE(chmod), REFUSE(chown), REFUSE(lchown), REFUSE(utime),        \
      REFUSE(utimes), REFUSE(futimesat), REFUSE(iopl), REFUSE(ioperm), REFUSE(modify_ldt)
#endif

/* self: this process, the only one that may be sent signals. */
static pkv_status install(uint32_t self, pkv_error *err) {
  const struct sock_filter filter[] = {
      LOAD(arch),
      IF_EQUAL(ARCHITECTURE, 1, 0),
      ANSWER(SECCOMP_RET_KILL_PROCESS), /* numbers would mean other calls */
      LOAD(nr),
#ifdef __x86_64__
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1), /* the x32 twins of all calls */
      NO(EPERM),
      OF_THIS_PROCESSOR,
#endif
      /* no program, no process; threads are made by clone: clone3, whose flags lie in memory, is
         among those that are not there */
      REFUSE(execve),
      REFUSE(execveat),
      REFUSE_WITHOUT(clone, 0, CLONE_THREAD),
      /* no connection: the socket that listens is there; datagrams to sockets of this machine, of
         which the service manager's is one, and whose they are cannot be seen */
      REFUSE(connect),
      REFUSE(bind),
      REFUSE(listen),
      REFUSE_OTHERS(socket, 0, AF_UNIX),
      REFUSE_BITS(sendto, 3, MSG_FASTOPEN),
      REFUSE_BITS(sendmsg, 2, MSG_FASTOPEN),
      REFUSE_BITS(sendmmsg, 3, MSG_FASTOPEN),
      /* nothing typed for the shell that the terminal goes back to */
      IF_EQUAL(SYS_ioctl, 0, 5),
      LOAD_ARGUMENT(1),
      IF_EQUAL(TIOCSTI, 1, 0),
      IF_EQUAL(TIOCLINUX, 0, 1),
      NO(EPERM),
      YES,
      /* no code that was not there: memory that can be read must not be run unasked either */
      REFUSE_BITS(mmap, 2, PROT_EXEC),
      REFUSE_BITS(mprotect, 2, PROT_EXEC),
      REFUSE(pkey_mprotect),
      REFUSE(personality),
      REFUSE(memfd_create),
      REFUSE(shmat),
      REFUSE(shmget),
      /* nothing of files that Landlock leaves to be changed by their names, or (truncate) did once
       */
      REFUSE(truncate),
      REFUSE(fchmod),
      REFUSE(fchmodat),
      REFUSE(fchown),
      REFUSE(fchownat),
      REFUSE(utimensat),
      REFUSE(setxattr),
      REFUSE(lsetxattr),
      REFUSE(fsetxattr),
      REFUSE(removexattr),
      REFUSE(lremovexattr),
      REFUSE(fremovexattr),
      /* nothing of other processes */
      REFUSE_OTHERS(kill, 0, self),
      REFUSE_OTHERS(tgkill, 0, self),
      REFUSE(tkill),
      REFUSE(rt_sigqueueinfo),
      REFUSE(rt_tgsigqueueinfo),
      REFUSE_OTHERS(prlimit64, 0, 0),
      REFUSE(ptrace),
      REFUSE(kcmp),
      REFUSE(process_vm_readv),
      REFUSE(process_vm_writev),
      REFUSE(msgget),
      REFUSE(semget),
      REFUSE(mq_open),
      /* none of the kernel's larger doors, nor root's */
      REFUSE(open_by_handle_at),
      REFUSE(fanotify_init),
      REFUSE(unshare),
      REFUSE(setns),
      REFUSE(mount),
      REFUSE(umount2),
      REFUSE(pivot_root),
      REFUSE(chroot),
      REFUSE(bpf),
      REFUSE(perf_event_open),
      REFUSE(userfaultfd),
      REFUSE(add_key),
      REFUSE(request_key),
      REFUSE(keyctl),
      REFUSE(init_module),
      REFUSE(finit_module),
      REFUSE(delete_module),
      REFUSE(kexec_load),
      REFUSE(reboot),
      REFUSE(sethostname),
      REFUSE(setdomainname),
      REFUSE(settimeofday),
      REFUSE(clock_settime),
      REFUSE(clock_adjtime),
      REFUSE(adjtimex),
      REFUSE(swapon),
      REFUSE(swapoff),
      REFUSE(acct),
      REFUSE(quotactl),
      /* of the calls since Linux 5.1 (io_uring, clone3, those on processes' descriptors, on mounts,
         and what comes), these alone are there */
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST_SHARED, 1, 0),
      YES,
      ALLOW(close_range),
      ALLOW(openat2),
      ALLOW(faccessat2),
      ALLOW(epoll_pwait2),
      NO(ENOSYS),
  };
  const struct sock_fprog program = {(unsigned short)(sizeof filter / sizeof *filter),
                                     (struct sock_filter *)(uintptr_t)filter};
  PKV_CHECK(err, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, PKV_E_UNSUPPORTED, "--sandbox: %s",
            strerror(errno));
  const long made =
      syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
  PKV_CHECK(err, made == 0, PKV_E_UNSUPPORTED, "--sandbox: this kernel takes no seccomp filter: %s",
            made > 0 ? "a thread has one of its own" : strerror(errno));
  return PKV_OK;
}

pkv_status pkv_sandbox_calls(pkv_error *err) {
  return install((uint32_t)getpid(), err);
}

#else

pkv_status pkv_sandbox_calls(pkv_error *err) {
  return PKV_FAIL(err, PKV_E_UNSUPPORTED, "--sandbox: not for this processor");
}

#endif
