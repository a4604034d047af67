/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products for every AArch64 processor. */
#include "backend/cpu/dense_kernels.h"

#if defined(__aarch64__)
#if defined(__ARM_FEATURE_DOTPROD)
#error "matmul_neon.c is what processors without the dot product run: build it for the baseline"
#endif
#define NEON_TABLE pkv_dense_neon
#include "backend/cpu/matmul_neon_impl.h"
#endif
