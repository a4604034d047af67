/* SPDX-License-Identifier: Apache-2.0 */
/* Products of few rows: one file of their kernels. */
#include "backend/cuda/dense_few.cuh"

PKV_FEW_SET(pkv_few_q5_0, pkv_few_packed<PKV_WTYPE_Q5_0>)
PKV_FEW_SET(pkv_few_q5_1, pkv_few_packed<PKV_WTYPE_Q5_1>)
PKV_FEW_SET(pkv_few_q5_k, pkv_few_packed<PKV_WTYPE_Q5_K>)
