/* SPDX-License-Identifier: Apache-2.0 */
/* The closed list of environment variables. */
#include "base/env.h"

#include <stdlib.h>

const char *pkv_env_get(pkv_env name) {
  const char *key = NULL;
  switch (name) {
  case PKV_ENV_LOG:
    key = "PKV_LOG";
    break;
  case PKV_ENV_CPU:
    key = "PKV_CPU";
    break;
  case PKV_ENV_CUDA_CHECK:
    key = "PKV_CUDA_CHECK";
    break;
  case PKV_ENV_SERVE_API_KEYS:
    key = "PKV_SERVE_API_KEYS";
    break;
  }
  const char *value = key != NULL ? getenv(key) : NULL;
  return value != NULL && value[0] != '\0' ? value : NULL;
}
