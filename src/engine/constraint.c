/* SPDX-License-Identifier: Apache-2.0 */
/* The texts of all tokens in one run of bytes, so that a step walks memory in order. */
#include "engine/constraint.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"
#include "model/model.h"

struct pkv_constraint {
  pkv_allocator allocator;
  const pkv_model *model;
  int32_t vocab;
  size_t *start; /* [vocab + 1] */
  char *bytes;
  size_t size;
};

/* Bytes of all texts; with `to` they are copied, and the starts are set. */
static pkv_status gather(size_t *size, pkv_constraint *c, bool copy, pkv_error *err) {
  size_t at = 0;
  for (int32_t i = 0; i < c->vocab; i++) {
    const char *text = NULL;
    size_t bytes = 0;
    PKV_TRY(pkv_token_text(&text, &bytes, c->model, i, 0, err));
    c->start[i] = at;
    if (copy && bytes > 0) memcpy(c->bytes + at, text, bytes);
    at += bytes;
  }
  c->start[c->vocab] = *size = at;
  return PKV_OK;
}

static pkv_status fill(pkv_constraint *c, pkv_error *err) {
  c->start = pkv_alloc(&c->allocator, ((size_t)c->vocab + 1) * sizeof *c->start);
  PKV_CHECK(err, c->start != NULL, PKV_E_NOMEM, "no memory for %d tokens", (int)c->vocab);
  PKV_TRY(gather(&c->size, c, false, err));
  c->bytes = pkv_alloc(&c->allocator, c->size + 1);
  PKV_CHECK(err, c->bytes != NULL, PKV_E_NOMEM, "no memory for %zu bytes of tokens", c->size);
  return gather(&c->size, c, true, err);
}

pkv_status pkv_constraint_create_json(pkv_constraint **out, const pkv_model *model,
                                      const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, model != NULL, PKV_E_INVALID, "model is NULL");
  const pkv_tokenizer *const tokenizer = pkv_model_tokenizer(model);
  PKV_CHECK(err, tokenizer != NULL, PKV_E_UNSUPPORTED, "the model has no tokenizer");
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_constraint *const c = pkv_alloc_zeroed(&a, 1, sizeof *c);
  PKV_CHECK(err, c != NULL, PKV_E_NOMEM, "no memory for a constraint");
  c->allocator = a;
  c->model = model;
  c->vocab = pkv_tokenizer_vocab_used(tokenizer);
  const pkv_status status = fill(c, err);
  if (status != PKV_OK) {
    pkv_constraint_destroy(c);
    return status;
  }
  *out = c;
  return PKV_OK;
}

void pkv_constraint_destroy(pkv_constraint *constraint) {
  if (constraint == NULL) return;
  const pkv_allocator a = constraint->allocator;
  pkv_free(&a, constraint->bytes, constraint->size + 1);
  pkv_free(&a, constraint->start, ((size_t)constraint->vocab + 1) * sizeof *constraint->start);
  pkv_free(&a, constraint, sizeof *constraint);
}

bool pkv_constraint_fits(const pkv_constraint *constraint, const pkv_model *model) {
  return constraint->model == model;
}

void pkv_constraint_mask(float *logits, int32_t vocab, const pkv_constraint *constraint,
                         const pkv_json_state *state) {
  const pkv_constraint *const c = constraint;
  bool first[256];
  for (int b = 0; b < 256; b++) { /* most tokens fall at their first byte */
    pkv_json_state next = *state;
    const char byte = (char)b;
    first[b] = pkv_json_feed(&next, &byte, 1);
  }
  for (int32_t i = 0; i < vocab; i++) {
    const size_t size = i < c->vocab ? c->start[i + 1] - c->start[i] : 0;
    const char *const text = size > 0 ? c->bytes + c->start[i] : NULL;
    bool allowed = size > 0 && first[(unsigned char)text[0]];
    if (allowed && size > 1) {
      pkv_json_state next = *state;
      allowed = pkv_json_feed(&next, text, size);
    }
    if (!allowed) logits[i] = -INFINITY;
  }
}

bool pkv_constraint_advance(pkv_json_state *state, const pkv_constraint *constraint,
                            int32_t token) {
  const pkv_constraint *const c = constraint;
  (void)pkv_json_feed(state, c->bytes + c->start[token], c->start[token + 1] - c->start[token]);
  return pkv_json_done(state);
}
