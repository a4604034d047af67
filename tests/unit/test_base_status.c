/* SPDX-License-Identifier: Apache-2.0 */
/* Status names, error details, log, environment, clock, CPU features and cores. */
#include "base/status.h"

#include <ftw.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/env.h"
#include "base/log.h"

/* Written out a second time on purpose: codes are pinned. */
static const struct {
  int value;
  const char *name, *text;
} pinned[] = {
    {0, "OK", "ok"},
    {-1, "E_INVALID", "invalid argument"},
    {-2, "E_NOMEM", "out of memory"},
    {-3, "E_UNSUPPORTED", "not supported"},
    {-4, "E_RANGE", "value out of range"},
    {-5, "E_TOO_SMALL", "caller's memory too small"},
    {-6, "E_NO_PAGES", "no free pages"},
    {-7, "E_IO", "input/output error"},
    {-8, "E_FORMAT", "malformed data"},
    {-9, "E_STATE", "call not allowed in this state"},
    {-10, "E_LIMIT", "limit exceeded"},
    {-11, "E_DEVICE", "device error"},
    {-12, "E_INTERNAL", "internal error"},
};

static void names(void **state) {
  (void)state;
  int count = 0;
#define COUNT(name, value, text) count++;
  PKV_STATUS_MAP(COUNT)
#undef COUNT
  assert_int_equal(count, sizeof pinned / sizeof pinned[0]);
  for (int i = 0; i < count; i++) {
    assert_string_equal(pkv_status_name((pkv_status)pinned[i].value), pinned[i].name);
    assert_string_equal(pkv_status_text((pkv_status)pinned[i].value), pinned[i].text);
  }
  const int unknown[] = {1, -13, INT32_MAX, INT32_MIN};
  for (int i = 0; i < 4; i++) {
    assert_string_equal(pkv_status_name((pkv_status)unknown[i]), "E_UNKNOWN");
    assert_string_equal(pkv_status_text((pkv_status)unknown[i]), "unknown status");
  }
}

static pkv_status checks(int rows, pkv_error *err) {
  PKV_CHECK(err, rows >= 0, PKV_E_RANGE, "rows is %d", rows);
  return PKV_OK;
}

static pkv_status tries(int rows, pkv_error *err) {
  PKV_TRY(checks(rows, err));
  return PKV_E_STATE;
}

static void details(void **state) {
  (void)state;
  pkv_error err;
  memset(&err, 0x55, sizeof err);
  assert_int_equal(tries(-3, &err), PKV_E_RANGE);
  assert_int_equal(err.status, PKV_E_RANGE);
  assert_string_equal(err.where, "checks");
  assert_string_equal(err.text, "rows is -3");
  assert_int_equal(tries(3, &err), PKV_E_STATE);
  assert_int_equal(tries(-3, NULL), PKV_E_RANGE);
  char text[400];
  memset(text, 'x', sizeof text);
  text[399] = '\0';
  assert_int_equal(PKV_FAIL(&err, PKV_E_IO, "%s", text), PKV_E_IO);
  assert_int_equal(strlen(err.text), PKV_ERROR_TEXT_BYTES - 1);
}

static pkv_status options_check(const pkv_pool_options *options, pkv_error *err) {
  PKV_CHECK_STRUCT(err, options, pkv_pool_options);
  return PKV_OK;
}

static void struct_sizes(void **state) {
  (void)state;
  pkv_error err;
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  assert_int_equal(options_check(&o, &err), PKV_OK);
  o.struct_size--;
  assert_int_equal(options_check(&o, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "options->struct_size"));
  o.struct_size += 2;
  assert_int_equal(options_check(&o, &err), PKV_E_INVALID);
  assert_int_equal(options_check(NULL, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "options is NULL");
}

static void version(void **state) {
  (void)state;
  char text[32];
  const int n = pkv_version_number();
  snprintf(text, sizeof text, "%d.%d.%d", n / 1000000, n / 1000 % 1000, n % 1000);
  assert_string_equal(pkv_version(), text);
  assert_int_equal(n / 1000000, PKV_VERSION_MAJOR);
}

typedef struct line {
  int count;
  pkv_log_level level;
  char room[16], text[2048];
} line;

static void sink(void *user, pkv_log_level level, const char *room, const char *text) {
  line *l = user;
  l->count++;
  l->level = level;
  snprintf(l->room, sizeof l->room, "%s", room);
  snprintf(l->text, sizeof l->text, "%s", text);
}

static void logging(void **state) {
  (void)state;
  static line l;
  pkv_log(PKV_LOG_ERROR, "kv", "nobody listens: %d", 1);
  pkv_log_set(sink, &l);
  pkv_log(PKV_LOG_WARN, "kv", "page %d\nof %s", 7, "nine");
  assert_int_equal(l.count, 1);
  assert_int_equal(l.level, PKV_LOG_WARN);
  assert_string_equal(l.room, "kv");
  assert_string_equal(l.text, "page 7 of nine"); /* one line whatever the data */
  char big[3000];
  memset(big, 'y', sizeof big);
  big[2999] = '\0';
  pkv_log(PKV_LOG_DEBUG, "plan", "%s", big);
  assert_int_equal(l.count, 2);
  assert_int_equal(strlen(l.text), 1023);
  pkv_log_set(NULL, NULL);
  pkv_log(PKV_LOG_ERROR, "kv", "silent again");
  assert_int_equal(l.count, 2);
}

static void environment(void **state) {
  (void)state;
  const struct {
    pkv_env id;
    const char *name;
  } all[] = {{PKV_ENV_LOG, "PKV_LOG"},
             {PKV_ENV_CPU, "PKV_CPU"},
             {PKV_ENV_CUDA_CHECK, "PKV_CUDA_CHECK"},
             {PKV_ENV_CUDA_SUM, "PKV_CUDA_SUM"}};
  for (int i = 0; i < 4; i++) {
    unsetenv(all[i].name);
    assert_null(pkv_env_get(all[i].id));
    setenv(all[i].name, "", 1);
    assert_null(pkv_env_get(all[i].id));
    setenv(all[i].name, "debug", 1);
    assert_string_equal(pkv_env_get(all[i].id), "debug");
    unsetenv(all[i].name);
  }
  assert_null(pkv_env_get((pkv_env)99));
}

static void clock_runs(void **state) {
  (void)state;
  const int64_t start = pkv_clock_ns();
  int64_t last = start;
  for (int i = 0; i < 10000; i++) {
    const int64_t now = pkv_clock_ns();
    assert_true(now >= last);
    last = now;
  }
  const struct timespec t = {0, 3000000};
  nanosleep(&t, NULL);
  assert_true(pkv_clock_ns() - last >= 3000000);
}

static void cpu_features(void **state) {
  (void)state;
  pkv_cpu_features f;
  pkv_cpu_detect(&f);
  char text[512], cut[8];
  pkv_cpu_describe(text, sizeof text, &f);
  print_message("%s: %s; %d cores\n", f.name, text, pkv_cpu_cores());
  assert_true(strlen(f.name) > 0 && strlen(f.name) < sizeof f.name);
#if defined(__x86_64__)
  /* The compiler's own detection, where it knows the feature. */
  assert_int_equal(f.sse42, __builtin_cpu_supports("sse4.2") != 0);
  assert_int_equal(f.avx, __builtin_cpu_supports("avx") != 0);
  assert_int_equal(f.fma, __builtin_cpu_supports("fma") != 0);
  assert_int_equal(f.avx2, __builtin_cpu_supports("avx2") != 0);
  assert_int_equal(f.avx512f, __builtin_cpu_supports("avx512f") != 0);
  assert_int_equal(f.avx512bw, __builtin_cpu_supports("avx512bw") != 0);
  assert_int_equal(f.avx512vl, __builtin_cpu_supports("avx512vl") != 0);
  assert_int_equal(f.avx512dq, __builtin_cpu_supports("avx512dq") != 0);
  assert_int_equal(f.avx512_vnni, __builtin_cpu_supports("avx512vnni") != 0);
  assert_int_equal(f.avx512_bf16, __builtin_cpu_supports("avx512bf16") != 0);
#endif
  pkv_cpu_features two = {0};
  two.sse42 = two.avx2 = two.neon = true;
  pkv_cpu_describe(text, sizeof text, &two);
  assert_string_equal(text, "sse4.2 avx2 neon");
  memset(cut, 'x', sizeof cut);
  pkv_cpu_describe(cut, sizeof cut, &two);
  assert_non_null(memchr(cut, '\0', sizeof cut));
  pkv_cpu_describe(cut, 0, &two);
}

static void cores_follow_affinity(void **state) {
  (void)state;
  cpu_set_t old, one;
  assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
  const int32_t cores = pkv_cpu_cores();
  assert_true(cores >= 1 && cores <= CPU_COUNT(&old));
  size_t first = 0;
  while (!CPU_ISSET(first, &old))
    first++;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  const int32_t alone = pkv_cpu_cores();
  assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
  assert_int_equal(alone, 1);
}

/* A tree of control group files under the build folder. */
#define ROOT PKV_BINARY_DIR "/test_cgroup"

static void put(const char *name, const char *text) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", ROOT, name);
  for (char *c = path + strlen(PKV_BINARY_DIR) + 1; (c = strchr(c, '/')) != NULL; c++) {
    *c = '\0';
    mkdir(path, 0755);
    *c = '/';
  }
  FILE *f = fopen(path, "w");
  if (f == NULL) fail_msg("cannot write %s", path);
  fputs(text, f);
  fclose(f);
}

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *at) {
  (void)s;
  (void)type;
  (void)at;
  return remove(path);
}

static int32_t quota(const char *membership) {
  put("membership", membership);
  return pkv_cgroup_cores(ROOT "/membership", ROOT);
}

static void cgroup_quota(void **state) {
  (void)state;
  nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS); /* what an earlier run left */
  assert_int_equal(pkv_cgroup_cores(ROOT "/nothing/here", ROOT), 0);
  put("cpu.max", "max 100000\n");
  put("a/cpu.max", "250000 100000\n");
  put("a/b/cpu.max", "max 100000\n");
  put("a/b/c/cpu.max", "100000 50000\n");
  assert_int_equal(quota("0::/\n"), 0);
  assert_int_equal(quota("0::/a\n"), 3);   /* 2.5, rounded up */
  assert_int_equal(quota("0::/a/b\n"), 3); /* the parent's */
  assert_int_equal(quota("0::/a/b/c\n"), 2);
  assert_int_equal(quota("0::/a/b/c/gone/away\n"), 2);
  assert_int_equal(quota("0::/elsewhere\n"), 0);
  assert_int_equal(quota(""), 0);
  assert_int_equal(quota("nonsense\n\n:\n::\n0:x\n"), 0);
  put("a/b/c/cpu.max", "garbage\n");
  assert_int_equal(quota("0::/a/b/c\n"), 3);
  put("a/b/c/cpu.max", "100 0\n");
  assert_int_equal(quota("0::/a/b/c\n"), 3);
  put("a/b/c/cpu.max", "1000 100000");
  assert_int_equal(quota("0::/a/b/c"), 1);
  /* Version 1, beside a hybrid version 2 line. */
  put("cpu,cpuacct/g/cpu.cfs_quota_us", "150000\n");
  put("cpu,cpuacct/g/cpu.cfs_period_us", "100000\n");
  put("cpu,cpuacct/h/cpu.cfs_quota_us", "-1\n");
  put("cpu,cpuacct/h/cpu.cfs_period_us", "100000\n");
  assert_int_equal(quota("5:memory:/g\n4:cpuacct,cpu:/g\n0::/\n"), 2);
  assert_int_equal(quota("4:cpu,cpuacct:/h\n"), 0);
  assert_int_equal(quota("4:cpuset,cpuacct:/g\n"), 0);
  assert_int_equal(quota("4:cpu,cpuacct:/g\n0::/a/b/c\n"), 1); /* the least of both */
  put("cpu/cpu.cfs_quota_us", "400000\n"); /* a container: its own group is the mount's root */
  put("cpu/cpu.cfs_period_us", "100000\n");
  assert_int_equal(quota("4:cpu:/docker/0123\n"), 4);
  assert_int_equal(nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
}

static int64_t memory(const char *membership) {
  put("membership", membership);
  return pkv_cgroup_memory(ROOT "/membership", ROOT);
}

static void cgroup_memory(void **state) {
  (void)state;
  nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS);
  assert_int_equal(pkv_cgroup_memory(ROOT "/nothing/here", ROOT), 0);
  put("memory.max", "max\n");
  put("a/memory.max", "3000000000\n");
  put("a/b/memory.max", "max\n");
  assert_int_equal(memory("0::/\n"), 0);
  assert_int_equal(memory("0::/a/b\n"), 3000000000);
  put("a/b/memory.max", "1000\n");
  assert_int_equal(memory("0::/a/b\n"), 1000);
  put("a/b/memory.max", "a lot\n");
  assert_int_equal(memory("0::/a/b\n"), 3000000000);
  put("memory/g/memory.limit_in_bytes", "2000\n");
  assert_int_equal(memory("5:memory:/g\n4:cpu:/a\n0::/a\n"), 2000);
  assert_int_equal(memory("5:cpu:/g\n"), 0);
  assert_int_equal(nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
  assert_true(pkv_host_memory() > 1 << 20);
}

static int64_t left(const char *membership) {
  put("membership", membership);
  return pkv_cgroup_memory_left(ROOT "/membership", ROOT);
}

static void cgroup_memory_left(void **state) {
  (void)state;
  nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS);
  assert_int_equal(pkv_cgroup_memory_left(ROOT "/nothing/here", ROOT), 0);
  put("a/memory.max", "1000000\n");
  put("a/memory.current", "900000\n");
  put("a/b/memory.max", "max\n");
  put("a/b/memory.current", "5\n");
  put("a/b/c/memory.max", "50000\n");
  put("a/b/c/memory.current", "10000\n");
  assert_int_equal(left("0::/\n"), 0);
  assert_int_equal(left("0::/a\n"), 100000);
  assert_int_equal(left("0::/a/b\n"), 100000); /* the parent's */
  assert_int_equal(left("0::/a/b/c\n"), 40000);
  /* files in memory count as free, and names that only begin alike do not */
  put("a/memory.stat", "anon 1\ninactive_file 300000\nactive_file_x 7\nactive_file 100000\n");
  assert_int_equal(left("0::/a/b\n"), 500000);
  put("a/memory.stat", "inactive_file 99999999999999999999999999\nactive_file\n");
  assert_int_equal(left("0::/a/b\n"), 100000);
  put("a/memory.stat", "inactive_file 9223372036854775807\nactive_file 9223372036854775807\n");
  assert_int_equal(left("0::/a\n"), 1000000);
  put("a/memory.stat", "anon 1\n");
  put("a/memory.current", "2000000\n"); /* more than the limit: a byte is left */
  assert_int_equal(left("0::/a\n"), 1);
  put("a/memory.current", "garbage\n");
  assert_int_equal(left("0::/a\n"), 0);
  put("memory/g/memory.limit_in_bytes", "70000\n");
  put("memory/g/memory.usage_in_bytes", "30000\n");
  assert_int_equal(left("5:memory:/g\n0::/\n"), 40000);
  assert_int_equal(left("5:cpu:/g\n"), 0);
  assert_int_equal(nftw(ROOT, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
  assert_true(pkv_host_memory_left() > 1 << 20);
  assert_true(pkv_host_memory_left() <= pkv_host_memory());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(names),
      cmocka_unit_test(details),
      cmocka_unit_test(struct_sizes),
      cmocka_unit_test(version),
      cmocka_unit_test(logging),
      cmocka_unit_test(environment),
      cmocka_unit_test(clock_runs),
      cmocka_unit_test(cpu_features),
      cmocka_unit_test(cores_follow_affinity),
      cmocka_unit_test(cgroup_quota),
      cmocka_unit_test(cgroup_memory),
      cmocka_unit_test(cgroup_memory_left),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
