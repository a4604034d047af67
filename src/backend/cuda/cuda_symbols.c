/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/cuda_symbols.h"

#include <dlfcn.h>
#include <string.h>

pkv_status pkv_cuda_symbols(void *library, const char *called, const pkv_cuda_symbol *symbols,
                            size_t count, pkv_error *err) {
  for (size_t i = 0; i < count; i++) {
    void *found = dlsym(library, symbols[i].name);
    PKV_CHECK(err, found, PKV_E_UNSUPPORTED, "%s has no %s: another version is needed", called,
              symbols[i].name);
    memcpy(symbols[i].to, &found, sizeof found);
  }
  return PKV_OK;
}
