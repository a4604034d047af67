/* SPDX-License-Identifier: Apache-2.0 */
/* The closed list of environment variables, and those of option tables. */
#include "base/env.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

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
  case PKV_ENV_CUDA_SUM:
    key = "PKV_CUDA_SUM";
    break;
  case PKV_ENV_NOTIFY_SOCKET:
    key = "NOTIFY_SOCKET";
    break;
  }
  const char *value = key != NULL ? getenv(key) : NULL;
  return value != NULL && value[0] != '\0' ? value : NULL;
}

/* Is the name of the variable `entry` ("NAME=value") prefix and option? */
static bool stands_for(const char *entry, const char *prefix, const char *option) {
  const size_t skip = strlen(prefix);
  if (strncmp(entry, prefix, skip) != 0) return false;
  entry += skip;
  for (; *option != '\0'; option++, entry++) {
    const bool letter = *option >= 'a' && *option <= 'z';
    const char want = *option == '-' ? '_' : letter ? (char)(*option - 'a' + 'A') : *option;
    if (*entry != want) return false;
  }
  return *entry == '=';
}

const char *pkv_env_option(const char *prefix, const char *option) {
  for (char **at = environ; at != NULL && *at != NULL; at++) {
    if (!stands_for(*at, prefix, option)) continue;
    const char *const value = strchr(*at, '=') + 1;
    return *value != '\0' ? value : NULL;
  }
  return NULL;
}

const char *pkv_env_unknown(const char *prefix,
                            const char *(*option_name)(const void *user, int index),
                            const void *user) {
  for (char **at = environ; at != NULL && *at != NULL; at++) {
    bool known = strncmp(*at, prefix, strlen(prefix)) != 0;
    const char *name = NULL;
    for (int i = 0; !known && (name = option_name(user, i)) != NULL; i++)
      known = stands_for(*at, prefix, name);
    if (!known) return *at;
  }
  return NULL;
}
