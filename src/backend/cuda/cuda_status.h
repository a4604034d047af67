/* SPDX-License-Identifier: Apache-2.0 */
/* Failures of the CUDA runtime as a status and words that say what to do. */
#ifndef PKV_CUDA_STATUS_H
#define PKV_CUDA_STATUS_H

#include <cuda_runtime_api.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is known where a call failed; 0 = unknown. */
typedef struct pkv_cuda_facts {
  int driver, runtime;      /* CUDA versions: 1000 * major + 10 * minor; driver 0: there is none */
  int major, minor;         /* compute capability of the device */
  size_t free_bytes, bytes; /* of its memory */
  const char *targets;      /* what the kernels were compiled for */
} pkv_cuda_facts;

/* Of this process now. Leaves no error behind. */
pkv_cuda_facts pkv_cuda_facts_now(void);

/* Fills *err from the failed call (its text up to the bracket is its name) and returns the status.
   A pure function. */
pkv_status pkv_cuda_describe(pkv_error *err, cudaError_t e, const char *call,
                             const pkv_cuda_facts *facts);

/* The same with the facts of now; takes the runtime's remembered error away, so that the next call
   starts clean. */
pkv_status pkv_cuda_fail(pkv_error *err, cudaError_t e, const char *call);

/* Whether the error ends all use of the device by this process. */
int pkv_cuda_is_fatal(cudaError_t e);

#ifdef __cplusplus
}
#endif
#endif
