/* SPDX-License-Identifier: Apache-2.0 */
/* The inputs of the next step from those of the last, for rows that go on. */
#include "backend/cuda/cuda_advance.h"

#define THREADS 128

/* One thread a row. A token that could not be chosen is -1: it embeds as zeros. */
static __global__ void __launch_bounds__(THREADS)
    dense_advance(const __grid_constant__ pkv_device_advance p) {
  const int i = (int)(blockIdx.x * THREADS + threadIdx.x);
  if (i >= p.rows) return;
  const int32_t at = p.positions[i] + 1;
  p.ids[i] = p.chosen[i];
  p.positions[i] = at;
  p.seq_len[i] += 1;
  p.sample_rows[i].position += 1;
  p.slots[i] = (int64_t)p.table[i * p.table_stride + at / p.page_tokens] * p.page_tokens +
               at % p.page_tokens;
}

extern "C" cudaError_t pkv_cuda_launch_advance(const pkv_device_advance *p, cudaStream_t stream) {
  if (p->rows == 0) return cudaSuccess;
  dense_advance<<<(unsigned)((p->rows + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*p);
  return cudaGetLastError();
}
