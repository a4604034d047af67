/* SPDX-License-Identifier: Apache-2.0 */
/* The only place that reads the environment, by a closed list: PKV_LOG, PKV_CPU, PKV_CUDA_CHECK. */
#ifndef PKV_BASE_ENV_H
#define PKV_BASE_ENV_H

typedef enum pkv_env {
  PKV_ENV_LOG,       /* error|warn|info|debug: level of the command line's log */
  PKV_ENV_CPU,       /* reference|scalar|avx2|avx512|neon: forces an instruction set */
  PKV_ENV_CUDA_CHECK /* 1: synchronise and check after each launch */
} pkv_env;

/* The value, or NULL when unset or empty. Borrowed from the environment. */
const char *pkv_env_get(pkv_env name);

#endif
