/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Constraints as requests use them. Each different one has a machine, which stays when its last
 * request ends until another needs the place. A machine may forget an answer's state: its tokens
 * are all there, they are fed again. So preemption, forks and the prefix cache need no care.
 */
#include <math.h>

#include "base/status.h"
#include "engine/engine_state.h"

static void clear(pkv_guide *g) {
  pkv_machine_destroy(g->machine); /* before what it borrows */
  pkv_constraint_release(g->constraint);
  *g = (pkv_guide){NULL, NULL, 0, 0};
}

/* The constraint's own place, else a free one, else that which was not used the longest. */
static pkv_guide *find(pkv_engine *e, const pkv_constraint *constraint) {
  pkv_guide *best = NULL;
  for (int32_t i = 0; i < PKV_MAX_CONSTRAINTS; i++) {
    pkv_guide *const g = &e->guides[i];
    if (g->constraint == constraint) return g;
    if (g->users == 0 && (best == NULL || g->used < best->used)) best = g;
  }
  return best;
}

pkv_status pkv_guide_take(int32_t *guide, pkv_engine *engine, const pkv_constraint *constraint,
                          pkv_error *err) {
  *guide = -1;
  if (constraint == NULL) return PKV_OK;
  pkv_guide *const g = find(engine, constraint);
  PKV_CHECK(err, g != NULL, PKV_E_LIMIT, "requests with %d different constraints are here already",
            PKV_MAX_CONSTRAINTS);
  if (g->constraint != constraint) {
    if (g->constraint != NULL) clear(g);
    PKV_TRY(pkv_machine_create(&g->machine, pkv_constraint_program(constraint),
                               pkv_constraint_trie(constraint), &engine->allocator, err));
    g->constraint = pkv_constraint_hold(constraint);
  }
  g->users++;
  g->used = engine->next_order;
  *guide = (int32_t)(g - engine->guides);
  return PKV_OK;
}

void pkv_guide_leave(pkv_engine *engine, pkv_seq *s) {
  if (s->guide >= 0) engine->guides[s->guide].users--;
  s->guide = -1;
}

void pkv_guides_destroy(pkv_engine *engine) {
  for (int32_t i = 0; i < PKV_MAX_CONSTRAINTS; i++)
    if (engine->guides[i].constraint != NULL) clear(&engine->guides[i]);
}

/* Feeds what the answer has become since, or all of it where the machine has forgotten it. */
static bool catch_up(const pkv_engine *e, pkv_machine *m, pkv_seq *s) {
  if (!pkv_machine_knows(m, s->matched)) {
    if (!pkv_machine_begin(&s->matched, m)) return false;
    s->fed = 0;
  }
  for (; s->fed < s->known - s->prompt; s->fed++) {
    const char *text = NULL;
    size_t bytes = 0;
    const int32_t token = s->tokens[s->prompt + s->fed];
    if (pkv_token_text(&text, &bytes, e->model, token, 0, NULL) != PKV_OK) return false;
    if (!pkv_machine_feed(&s->matched, m, text, bytes)) return false;
  }
  return true;
}

static void apply(float *logits, int32_t vocab, const uint64_t *bits) {
  for (int32_t first = 0; first < vocab; first += 64) {
    const uint64_t allowed = bits[first / 64];
    const int32_t count = vocab - first < 64 ? vocab - first : 64;
    for (int32_t i = 0; i < count; i++)
      logits[first + i] = (allowed >> i & 1) != 0 ? logits[first + i] : -INFINITY;
  }
}

bool pkv_guide_mask(float *logits, pkv_engine *engine, pkv_seq *s) {
  const pkv_engine *const e = engine;
  pkv_machine *const m = e->guides[s->guide].machine;
  if (!catch_up(e, m, s)) return false;
  const uint64_t *const bits = pkv_machine_mask(m, &s->matched);
  if (bits == NULL) return false;
  const bool may_end = !s->ignore_end && pkv_machine_may_end(m, s->matched);
  for (int32_t i = 0; i < e->end_count; i++)
    e->end_logits[i] = may_end ? logits[e->ends[i]] : -INFINITY;
  apply(logits, e->vocab, bits);
  for (int32_t i = 0; i < e->end_count; i++)
    logits[e->ends[i]] = e->end_logits[i];
  return true;
}

bool pkv_guide_completes(pkv_engine *engine, pkv_seq *s) {
  pkv_machine *const m = engine->guides[s->guide].machine;
  return catch_up(engine, m, s) && !pkv_machine_may_go_on(m, s->matched);
}
