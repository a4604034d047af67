/* SPDX-License-Identifier: Apache-2.0 */
/* Products of few rows: one file of their kernels. */
#include "backend/cuda/dense_few.cuh"

PKV_FEW_SET(pkv_few_q6_k, pkv_few_packed<PKV_WTYPE_Q6_K>)
PKV_FEW_SET(pkv_few_q8_0, pkv_few_packed<PKV_WTYPE_Q8_0>)
