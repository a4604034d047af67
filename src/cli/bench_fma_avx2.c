/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_fma.h"

#if defined(__x86_64__)
#include <immintrin.h>

float bench_fma_avx2(int64_t rounds) {
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
  __m256 chain[12];
  for (int i = 0; i < 12; i++)
    chain[i] = _mm256_set1_ps((float)i);
  for (int64_t n = 0; n < rounds; n++) {
    _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) chain[i] =
        _mm256_fmadd_ps(chain[i], x, y);
  }
  for (int i = 1; i < 12; i++)
    chain[0] = _mm256_add_ps(chain[0], chain[i]);
  return _mm256_cvtss_f32(chain[0]);
}
#endif
