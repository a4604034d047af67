/* SPDX-License-Identifier: Apache-2.0 */
/* The only place that reads the environment: by a closed list, and by tables of options. */
#ifndef PKV_BASE_ENV_H
#define PKV_BASE_ENV_H

typedef enum pkv_env {
  PKV_ENV_LOG,          /* error|warn|info|debug: level of the command line's log */
  PKV_ENV_CPU,          /* reference|scalar|avx2|avx512|neon: forces an instruction set */
  PKV_ENV_CUDA_CHECK,   /* 1: synchronise and check after each launch */
  PKV_ENV_CUDA_SUM,     /* nccl: several devices add up by NCCL, also where they need not */
  PKV_ENV_NOTIFY_SOCKET /* systemd's: where a service says that it is ready */
} pkv_env;

/* The value, or NULL when unset or empty. Borrowed from the environment. */
const char *pkv_env_get(pkv_env name);

/* The variable that stands for a command's option, or NULL when unset or empty: prefix "PKV_SERVE_"
 * and option "api-keys" are PKV_SERVE_API_KEYS. */
const char *pkv_env_option(const char *prefix, const char *option);
/* The first variable with this prefix that stands for none of the options, which are visited by
 * index until `option_name` gives NULL; NULL = there is none. */
const char *pkv_env_unknown(const char *prefix,
                            const char *(*option_name)(const void *user, int index),
                            const void *user);

#endif
