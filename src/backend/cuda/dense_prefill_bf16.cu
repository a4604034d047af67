/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill attention: one file of its kernels. */
#include "backend/cuda/dense_prefill.cuh"

PKV_PREFILL_SET(pkv_prefill_bf16, pkv_bf16_type)
