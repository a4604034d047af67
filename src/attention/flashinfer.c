/* SPDX-License-Identifier: Apache-2.0 */
#include "pkv/flashinfer.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

#define NAME "pkv_flashinfer.so"

/* "FOLDER OF THE PROGRAM/pkv_flashinfer.so" where such a file is. */
static bool beside_program(char *path, size_t bytes) {
  char program[512];
  const ssize_t size = readlink("/proc/self/exe", program, sizeof program - 1);
  if (size <= 0) return false;
  program[size] = '\0';
  char *slash = strrchr(program, '/');
  if (slash == NULL) return false;
  slash[1] = '\0';
  const int length = snprintf(path, bytes, "%s" NAME, program);
  return length > 0 && (size_t)length < bytes && access(path, R_OK) == 0;
}

pkv_status pkv_flashinfer_open(const pkv_flashinfer_api **out, const char *path, pkv_error *err) {
  char found[600];
  pkv_flashinfer_open_fn open;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  if (path == NULL || path[0] == '\0') path = beside_program(found, sizeof found) ? found : NAME;
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    const char *why = dlerror();
    return PKV_FAIL(err, PKV_E_UNSUPPORTED, "FlashInfer's kernels are not here: %.120s",
                    why ? why : path);
  }
  void *symbol = dlsym(library, PKV_FLASHINFER_OPEN);
  memcpy(&open, &symbol, sizeof open);
  const pkv_flashinfer_api *api = symbol ? open() : NULL;
  if (api == NULL || api->abi != PKV_FLASHINFER_ABI) {
    (void)dlclose(library);
    return PKV_FAIL(err, PKV_E_UNSUPPORTED, "%.120s is not of this version of pkv", path);
  }
  *out = api;
  return PKV_OK;
}
