/* SPDX-License-Identifier: Apache-2.0 */
/* Products of few rows: one file of their kernels. */
#include "backend/cuda/dense_few.cuh"

PKV_FEW_SET(pkv_few_f16, pkv_few_plain<pkv_half_type>)
PKV_FEW_SET(pkv_few_bf16, pkv_few_plain<pkv_bf16_type>)
