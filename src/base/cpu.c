/* SPDX-License-Identifier: Apache-2.0 */
/* CPU features by CPUID and XGETBV, and how many cores this process may use. */
#include "base/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cgroup.h"

#ifdef __AVX__
#error "this file decides what may run and must itself be built for the baseline"
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* XCR0: which register states the operating system saves. Only after OSXSAVE was seen. */
static uint64_t xgetbv0(void) {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return ((uint64_t)hi << 32) | lo;
}

static bool bit(uint32_t word, unsigned n) {
  return ((word >> n) & 1) != 0;
}

static void brand(char name[64]) {
  unsigned a, b, c, d;
  if ((unsigned)__get_cpuid_max(0x80000000u, NULL) < 0x80000004u) return;
  char text[49] = {0};
  for (unsigned i = 0; i < 3; i++) {
    __cpuid(0x80000002u + i, a, b, c, d);
    const uint32_t words[4] = {a, b, c, d};
    memcpy(text + 16 * i, words, 16);
  }
  const char *start = text + strspn(text, " ");
  size_t n = strlen(start);
  while (n > 0 && start[n - 1] == ' ')
    n--;
  memcpy(name, start, n);
  name[n] = '\0';
}

static void detect(pkv_cpu_features *f) {
  unsigned a, b, c, d;
  brand(f->name);
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  f->sse42 = bit(c, 20);
  const uint64_t xcr0 = bit(c, 27) ? xgetbv0() : 0;
  const bool ymm = (xcr0 & 0x6) == 0x6, zmm = (xcr0 & 0xe6) == 0xe6;
  /* Tiles also need a permission of the kernel (arch_prctl) before the first use. */
  const bool tiles = (xcr0 & 0x60000) == 0x60000;
  f->avx = ymm && bit(c, 28);
  f->f16c = f->avx && bit(c, 29);
  f->fma = f->avx && bit(c, 12);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  const unsigned subleaves = a;
  f->avx2 = f->avx && bit(b, 5);
  f->avx512f = f->avx2 && zmm && bit(b, 16);
  f->avx512dq = f->avx512f && bit(b, 17);
  f->avx512bw = f->avx512f && bit(b, 30);
  f->avx512vl = f->avx512f && bit(b, 31);
  f->avx512_vnni = f->avx512f && bit(c, 11);
  f->avx512_fp16 = f->avx512f && bit(d, 23);
  f->amx_tile = tiles && bit(d, 24);
  f->amx_bf16 = f->amx_tile && bit(d, 22);
  f->amx_int8 = f->amx_tile && bit(d, 25);
  if (subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
  f->avx_vnni = f->avx2 && bit(a, 4);
  f->avx512_bf16 = f->avx512f && bit(a, 5);
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

#define HWCAP_DOTPROD (1ul << 20) /* HWCAP_ASIMDDP of Linux */

static void detect(pkv_cpu_features *f) {
  f->neon = true; /* part of the architecture */
  f->neon_dotprod = (getauxval(AT_HWCAP) & HWCAP_DOTPROD) != 0;
  memcpy(f->name, "aarch64", sizeof "aarch64");
}
#else
static void detect(pkv_cpu_features *f) {
  (void)f;
}
#endif

void pkv_cpu_detect(pkv_cpu_features *out) {
  memset(out, 0, sizeof *out);
  detect(out);
  if (out->name[0] == '\0') memcpy(out->name, "unknown CPU", sizeof "unknown CPU");
}

void pkv_cpu_describe(char *text, size_t size, const pkv_cpu_features *f) {
  if (size == 0) return;
  const struct {
    bool on;
    const char *name;
  } list[] = {
      {f->sse42, "sse4.2"},
      {f->avx, "avx"},
      {f->f16c, "f16c"},
      {f->fma, "fma"},
      {f->avx2, "avx2"},
      {f->avx_vnni, "avx_vnni"},
      {f->avx512f, "avx512f"},
      {f->avx512bw, "avx512bw"},
      {f->avx512vl, "avx512vl"},
      {f->avx512dq, "avx512dq"},
      {f->avx512_vnni, "avx512_vnni"},
      {f->avx512_bf16, "avx512_bf16"},
      {f->avx512_fp16, "avx512_fp16"},
      {f->amx_tile, "amx_tile"},
      {f->amx_int8, "amx_int8"},
      {f->amx_bf16, "amx_bf16"},
      {f->neon, "neon"},
      {f->neon_dotprod, "dotprod"},
  };
  size_t used = 0;
  text[0] = '\0';
  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
    if (!list[i].on) continue;
    const int n = snprintf(text + used, size - used, "%s%s", used > 0 ? " " : "", list[i].name);
    if (n < 0 || (size_t)n >= size - used) return;
    used += (size_t)n;
  }
}

static int32_t allowed_cores(void) {
#ifdef __linux__
  cpu_set_t sets[8]; /* 8192 CPUs: more than the kernel's own limit on x86 */
  memset(sets, 0, sizeof sets);
  if (sched_getaffinity(0, sizeof sets, sets) == 0) {
    const int n = CPU_COUNT_S(sizeof sets, sets);
    if (n > 0) return n;
  }
#endif
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : n > INT32_MAX ? INT32_MAX : (int32_t)n;
}

int32_t pkv_cpu_cores(void) {
  const int32_t allowed = allowed_cores();
  const int32_t quota = pkv_cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  return quota > 0 && quota < allowed ? quota : allowed;
}
