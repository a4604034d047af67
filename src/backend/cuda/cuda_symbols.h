/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of a library that was opened at run time. */
#ifndef PKV_CUDA_SYMBOLS_H
#define PKV_CUDA_SYMBOLS_H

#include "base/status.h"

typedef struct pkv_cuda_symbol {
  const char *name;
  void *to; /* the pointer to the function */
} pkv_cuda_symbol;

/* Fills all pointers. E_UNSUPPORTED where `library`, called `called`, lacks one; the text says
   which. */
pkv_status pkv_cuda_symbols(void *library, const char *called, const pkv_cuda_symbol *symbols,
                            size_t count, pkv_error *err);

#endif
