/* SPDX-License-Identifier: Apache-2.0 */
/* Which tokens an answer's constraint allows next. */
#ifndef PKV_ENGINE_CONSTRAINT_H
#define PKV_ENGINE_CONSTRAINT_H

#include "engine/json_state.h"
#include "pkv/engine.h"

/* logits[vocab]: those of tokens that may not follow become -infinity. */
void pkv_constraint_mask(float *logits, int32_t vocab, const pkv_constraint *constraint,
                         const pkv_json_state *state);
/* A token that was allowed; true: the answer is complete. */
bool pkv_constraint_advance(pkv_json_state *state, const pkv_constraint *constraint, int32_t token);
/* Whether it was made for this model. */
bool pkv_constraint_fits(const pkv_constraint *constraint, const pkv_model *model);

#endif
