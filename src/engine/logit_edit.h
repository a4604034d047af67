/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What changes logits before a token is chosen: penalties, biases, tokens that may not come yet.
 * Log-probabilities are always of the logits before.
 */
#ifndef PKV_ENGINE_LOGIT_EDIT_H
#define PKV_ENGINE_LOGIT_EDIT_H

#include <stdbool.h>

#include "pkv/engine.h"

typedef struct pkv_logit_edit {
  float repetition; /* 1 = none */
  float presence, frequency;
  pkv_logit_bias *bias; /* [bias_capacity], kept with the slot */
  int32_t bias_capacity, bias_count;
} pkv_logit_edit;

/* The tokens there are (prompt first), and those that may not come (or none). */
typedef struct pkv_edit_context {
  const int32_t *tokens;
  int32_t prompt, known;
  const int32_t *banned;
  int32_t banned_count;
} pkv_edit_context;

/* Whether anything would change. */
bool pkv_logit_edit_needed(const pkv_logit_edit *edit, const pkv_edit_context *context);
/* out[vocab] = logits[vocab] edited; counts[vocab] is 0 before and after. */
void pkv_logit_edit_apply(float *out, const float *logits, int32_t vocab,
                          const pkv_logit_edit *edit, const pkv_edit_context *context,
                          int32_t *counts);

#endif
