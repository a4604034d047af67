/* SPDX-License-Identifier: Apache-2.0 */
/* The route `shared` on the CPU. */
#ifndef PKV_BACKEND_CPU_CPU_SHARED_H
#define PKV_BACKEND_CPU_CPU_SHARED_H

#include "backend/cpu/cpu_isa.h"

/* Runs a plan of route `shared`; arguments as pkv_cpu_attention. */
void pkv_cpu_shared_attention(pkv_executor *executor, const pkv_attention_params *p);

#endif
