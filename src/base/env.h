/* SPDX-License-Identifier: Apache-2.0 */
/* The only place that reads the environment, by a closed list. */
#ifndef PKV_BASE_ENV_H
#define PKV_BASE_ENV_H

typedef enum pkv_env {
  PKV_ENV_LOG,           /* error|warn|info|debug: level of the command line's log */
  PKV_ENV_CPU,           /* reference|scalar|avx2|avx512|neon: forces an instruction set */
  PKV_ENV_CUDA_CHECK,    /* 1: synchronise and check after each launch */
  PKV_ENV_SERVE_API_KEYS /* as pkv serve's --api-keys, which goes first */
} pkv_env;

/* The value, or NULL when unset or empty. Borrowed from the environment. */
const char *pkv_env_get(pkv_env name);

#endif
