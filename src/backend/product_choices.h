/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which of a library's proposals for a matrix product was the fastest, as text: what was measured
 * once need not be measured at the next start. A choice is a number among what the library proposes
 * itself, so that a wrong one is slow at worst.
 *
 *   persistentkv products 1
 *   by MAKER
 *   N K X_STRIDE Y_STRIDE M ACT Y_F32 ACCUMULATE PROPOSAL     one line each
 *   end COUNT CHECKSUM                                        XXH3 of all before, 16 hex digits
 */
#ifndef PKV_BACKEND_PRODUCT_CHOICES_H
#define PKV_BACKEND_PRODUCT_CHOICES_H

#include "base/text.h"

#define PKV_PRODUCT_CHOICES   4096 /* at most, of a file */
#define PKV_PRODUCT_PROPOSALS 8    /* that are compared */
#define PKV_PRODUCT_MAKER     160  /* bytes of a maker, zero included */

/* y[m, n] of type act or float = x[m, k] w[n, k]^T, or added to it; strides in elements. */
typedef struct pkv_product_choice {
  int64_t n, k, x_stride, y_stride;
  int32_t m, act, y_f32, accumulate; /* act: pkv_dtype */
  int32_t proposal;
} pkv_product_choice;

/* maker: library, version and device, in one line. */
pkv_status pkv_product_choices_print(pkv_buffer *out, const char *maker,
                                     const pkv_product_choice *choices, int32_t count,
                                     pkv_error *err);
/* Into out[PKV_PRODUCT_CHOICES]. E_FORMAT: it is no such text, or damaged, by line; E_UNSUPPORTED:
   of another maker. *count is 0 then. */
pkv_status pkv_product_choices_parse(pkv_product_choice *out, int32_t *count, const char *maker,
                                     const char *text, size_t bytes, pkv_error *err);

#endif
