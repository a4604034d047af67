/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_fma.h"

#if defined(__x86_64__)
#include <immintrin.h>

float bench_fma_avx512(int64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
  __m512 chain[12];
  for (int i = 0; i < 12; i++)
    chain[i] = _mm512_set1_ps((float)i);
  for (int64_t n = 0; n < rounds; n++) {
    _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) chain[i] =
        _mm512_fmadd_ps(chain[i], x, y);
  }
  for (int i = 1; i < 12; i++)
    chain[0] = _mm512_add_ps(chain[0], chain[i]);
  return _mm512_cvtss_f32(chain[0]);
}
#endif
