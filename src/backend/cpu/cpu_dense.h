/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense half of the CPU backend: matrix products and the small per-row operations of a layer
 * graph. Signatures are those of pkv_backend_ops; the executor's table points here.
 *
 * What holds for all of them
 *   - Arguments arrive checked; what is refused here (an unknown weight type, k not a multiple of
 *     the type's block) is refused before the first write.
 *   - Nothing is allocated. Results are complete on return.
 *   - Row i of a result depends on row i of the inputs only: its bits are the same alone and inside
 *     any batch, on any number of workers. A NaN or infinity in one row stays in that row.
 *   - In one compute mode all kernels (scalar, AVX2, AVX-512) do the same roundings in the same
 *     order: matmul, embed, rms_norm, rope, swiglu and add give the same bits on each (but for BF16
 *     weights in the I8 mode where numbers are below 2^-126, see there).
 *
 * Products, exactly. Blocks of 32 along k, b = 0, 1, ...; w = (q + offset) * d [+ m].
 *   F32  lane j (0..7) sums w[i] * x[i] over i = j mod 8 in rising i with fused multiply-adds;
 *        result = ((l0+l4) + (l2+l6)) + ((l1+l5) + (l3+l7)).
 *   I8   acc = fma(float(sum q * qx), d * dx, acc), then acc = fma(m, dx * float(sum qx), acc), for
 *        each block in turn; the integer sums are exact. dx = max|x| / 127 of the block.
 *   BF16 weights in the I8 mode: activations are rounded to bf16 (below 2^-126: 0). Lane j (0..15)
 *        takes elements 32 i + 2 j + 1, then 32 i + 2 j for i = 0, 1, ... with fused multiply-adds;
 *        l[j] += l[j + 8], then as F32. Where the processor has the instruction for it, weights and
 *        sums below 2^-126 count as 0 too.
 * A block of activations that holds NaN or infinity gets dx = NaN: every output of that row is NaN.
 */
#ifndef PKV_BACKEND_CPU_CPU_DENSE_H
#define PKV_BACKEND_CPU_CPU_DENSE_H

#include "backend/backend.h"

size_t pkv_cpu_matmul_scratch_bytes(int64_t m, int64_t k);
pkv_status pkv_cpu_matmul(pkv_executor *executor, const pkv_matmul_params *p, pkv_error *err);
pkv_status pkv_cpu_matmul_many(pkv_executor *executor, const pkv_matmul_params *p, int32_t count,
                               pkv_error *err);
pkv_status pkv_cpu_embed(pkv_executor *executor, float *y, int64_t y_stride, const pkv_weight *w,
                         const int32_t *ids, int64_t m, float scale, pkv_error *err);
pkv_status pkv_cpu_rms_norm(pkv_executor *executor, float *y, int64_t y_stride, const float *x,
                            int64_t x_stride, const float *weight, int64_t m, int64_t n, float eps,
                            pkv_error *err);
pkv_status pkv_cpu_rope(pkv_executor *executor, float *x, int64_t x_stride, int64_t m,
                        int32_t heads, int32_t head_dim, int32_t rope_dim, int32_t pairs_adjacent,
                        const float *cos_sin, const int32_t *position, pkv_error *err);
pkv_status pkv_cpu_geglu(pkv_executor *executor, float *y, const float *gate, const float *up,
                         int64_t count, pkv_error *err);
pkv_status pkv_cpu_swiglu(pkv_executor *executor, float *y, const float *gate, const float *up,
                          int64_t count, pkv_error *err);
pkv_status pkv_cpu_add(pkv_executor *executor, float *y, const float *x, int64_t count,
                       pkv_error *err);

#endif
