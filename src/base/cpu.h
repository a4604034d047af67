/* SPDX-License-Identifier: Apache-2.0 */
/* What this CPU and its operating system can run: CPUID and XGETBV, not the build machine. */
#ifndef PKV_BASE_CPU_H
#define PKV_BASE_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pkv_cpu_features {
  bool sse42, avx, f16c, fma, avx2, avx_vnni;
  bool avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, avx512_fp16;
  bool amx_tile, amx_int8, amx_bf16;
  bool neon, neon_dotprod;
  char name[64]; /* brand string */
} pkv_cpu_features;

void pkv_cpu_detect(pkv_cpu_features *out);
/* Space-separated names of what is there, cut to `size`. */
void pkv_cpu_describe(char *text, size_t size, const pkv_cpu_features *features);
/* Cores this process may run on (affinity mask and cgroup quota), at least 1. */
int32_t pkv_cpu_cores(void);

#endif
