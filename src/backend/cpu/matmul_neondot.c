/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products for AArch64 processors with the dot product of bytes. */
#include "backend/cpu/dense_kernels.h"

#if defined(__aarch64__)
#if !defined(__ARM_FEATURE_DOTPROD)
#error "matmul_neondot.c needs -march=armv8.2-a+dotprod"
#endif
#define NEON_TABLE pkv_dense_neondot
#include "backend/cpu/matmul_neon_impl.h"
#endif
