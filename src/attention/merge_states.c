/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_merge_states: attention over disjoint key sets, merged by log-sum-exp. Host code, any
 * thread. */
#include <math.h>

#include "base/status.h"

/* One query token and head: o and lse at the first state; strides between states, in elements. */
static void merge_one(float *out, float *lse_out, const float *o, const float *lse, int32_t states,
                      int64_t o_stride, int64_t lse_stride, int32_t head_dim) {
  double top = -INFINITY, sum = 0.0;
  for (int32_t s = 0; s < states; s++) {
    const double x = (double)lse[s * lse_stride];
    if (x > top) top = x;
  }
  for (int32_t s = 0; s < states; s++) {
    const double x = (double)lse[s * lse_stride];
    if (x != -INFINITY) sum += exp(x - top);
  }
  const double total = sum != 0.0 ? top + log(sum) : -INFINITY;
  int first = 1;
  for (int32_t s = 0; s < states; s++) {
    if (lse[s * lse_stride] == -INFINITY) continue;
    const float weight = (float)exp((double)lse[s * lse_stride] - total);
    const float *from = o + s * o_stride;
    for (int32_t i = 0; i < head_dim; i++)
      out[i] = first ? weight * from[i] : out[i] + weight * from[i];
    first = 0;
  }
  for (int32_t i = 0; first && i < head_dim; i++)
    out[i] = 0.0f;
  if (lse_out != NULL) *lse_out = (float)total;
}

pkv_status pkv_merge_states(float *out, float *lse_out, const float *o, const float *lse,
                            int32_t states, int64_t tokens, int32_t heads, int32_t head_dim,
                            pkv_error *err) {
  PKV_CHECK(err, states >= 0, PKV_E_INVALID, "states is %d, must be >= 0", states);
  PKV_CHECK(err, tokens >= 0, PKV_E_INVALID, "tokens is %lld, must be >= 0", (long long)tokens);
  PKV_CHECK(err, heads >= 1, PKV_E_INVALID, "heads is %d, must be >= 1", heads);
  PKV_CHECK(err, head_dim >= 1, PKV_E_INVALID, "head_dim is %d, must be >= 1", head_dim);
  PKV_CHECK(err, out != NULL || tokens == 0, PKV_E_INVALID, "out is NULL");
  PKV_CHECK(err, (o != NULL && lse != NULL) || tokens == 0 || states == 0, PKV_E_INVALID,
            "%s is NULL", o == NULL ? "o" : "lse");
  int64_t rows, elements;
  const int overflow = __builtin_mul_overflow(tokens, (int64_t)heads, &rows) ||
                       __builtin_mul_overflow(rows, (int64_t)head_dim, &elements) ||
                       (states > 0 && elements > INT64_MAX / 4 / states);
  PKV_CHECK(err, !overflow, PKV_E_INVALID,
            "%d states of %lld tokens, %d heads and head_dim %d overflow", states,
            (long long)tokens, heads, head_dim);
  for (int64_t row = 0; row < rows; row++)
    merge_one(out + row * head_dim, lse_out != NULL ? lse_out + row : NULL,
              states > 0 ? o + row * head_dim : o, states > 0 ? lse + row : lse, states, elements,
              rows, head_dim);
  return PKV_OK;
}
