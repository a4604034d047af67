/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda.so.1 of a machine whose driver is there and of no use: too old, without a device, not to
 * be started. USELESS_VERSION is what it says of itself (13000), USELESS_ERROR what it answers to
 * everything else (999).
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int cuInit(unsigned flags);
EXPORT int cuDriverGetVersion(int *version);
EXPORT int cuGetExportTable(const void **table, const void *id);
EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                               int *found);

static int number(const char *name, int otherwise) {
  const char *const text = getenv(name);
  return text != NULL ? (int)strtol(text, NULL, 10) : otherwise;
}

static int refuse(void) {
  return number("USELESS_ERROR", 999);
}

int cuInit(unsigned flags) {
  (void)flags;
  return refuse();
}

int cuDriverGetVersion(int *version) {
  *version = number("USELESS_VERSION", 13000);
  return 0;
}

int cuGetExportTable(const void **table, const void *id) {
  (void)id;
  *table = NULL;
  return refuse();
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *found) {
  int (*const other)(void) = refuse, (*const driver_version)(int *) = cuDriverGetVersion;
  int (*const self)(const char *, void **, int, uint64_t, int *) = cuGetProcAddress_v2;
  (void)version;
  (void)flags;
  memcpy(function, &other, sizeof other);
  if (strcmp(name, "cuDriverGetVersion") == 0)
    memcpy(function, &driver_version, sizeof driver_version);
  if (strcmp(name, "cuGetProcAddress") == 0) memcpy(function, &self, sizeof self);
  if (found != NULL) *found = 0;
  return 0;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
