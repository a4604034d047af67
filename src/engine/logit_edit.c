/* SPDX-License-Identifier: Apache-2.0 */
/* The order: repetition, then presence and frequency, then biases, then bans. */
#include "engine/logit_edit.h"

#include <math.h>
#include <string.h>

/* A count's lowest bit: the prompt holds it. The others: how often the answer does. */
#define IN_PROMPT  1
#define ONE_ANSWER 2
/* A bias from here on means never. */
#define NEVER (-100.0f)

static bool penalises(const pkv_logit_edit *edit) {
  return edit->repetition != 1.0f || edit->presence != 0.0f || edit->frequency != 0.0f;
}

bool pkv_logit_edit_needed(const pkv_logit_edit *edit, const pkv_edit_context *context) {
  return penalises(edit) || edit->bias_count > 0 || context->banned_count > 0;
}

/* From the tokens each time: nothing to keep in step with preemption or forks. */
static void penalise(float *out, int32_t vocab, const pkv_logit_edit *edit,
                     const pkv_edit_context *c, int32_t *counts) {
  for (int32_t i = 0; i < c->known; i++) {
    const int32_t token = c->tokens[i];
    if (token >= vocab) continue; /* a padding row of the head */
    if (i < c->prompt)
      counts[token] |= IN_PROMPT;
    else
      counts[token] += ONE_ANSWER;
  }
  for (int32_t i = 0; i < c->known; i++) {
    const int32_t token = c->tokens[i];
    if (token >= vocab || counts[token] == 0) continue; /* done already */
    const int32_t times = counts[token] / ONE_ANSWER;
    float x = out[token];
    if (edit->repetition != 1.0f) x = x > 0.0f ? x / edit->repetition : x * edit->repetition;
    if (times > 0) x -= edit->presence + edit->frequency * (float)times;
    out[token] = x;
    counts[token] = 0;
  }
}

void pkv_logit_edit_apply(float *out, const float *logits, int32_t vocab,
                          const pkv_logit_edit *edit, const pkv_edit_context *context,
                          int32_t *counts) {
  memcpy(out, logits, (size_t)vocab * sizeof *out);
  if (penalises(edit)) penalise(out, vocab, edit, context, counts);
  for (int32_t i = 0; i < edit->bias_count; i++) {
    const pkv_logit_bias b = edit->bias[i];
    if (b.token >= vocab) continue;
    out[b.token] = b.bias <= NEVER ? -INFINITY : out[b.token] + b.bias;
  }
  for (int32_t i = 0; i < context->banned_count; i++)
    out[context->banned[i]] = -INFINITY;
}
