/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The step behind one that a device still computes. Where that one has decoding rows alone, whose
 * tokens the device chooses, the next has the same rows, each one token on: it is begun before
 * these tokens are known to the host. What the host would not have computed, because a row ended
 * with its token, is computed in vain and dropped: its page is given to another only behind it, in
 * the order of the stream. Nobody is preempted for such a step, and none is begun where somebody
 * could start, in a free row or in that of a paused one, where a row ends by its length, or where
 * the host has to look at logits.
 */
#include "base/status.h"
#include "engine/engine_state.h"

static bool row_goes_on(const pkv_engine *e, const pkv_logit_row *row) {
  const pkv_seq *const s = &e->seqs[row->seq];
  return s->state == PKV_SEQ_RUNNING && s->order == row->order && !s->cancelled && !s->paused &&
         !s->echo && s->planned == 1 && s->known == row->position + 1 && s->known + 1 < s->limit;
}

/* Whether admission has to be asked before the next step: first come, first served says no again
   until somebody comes or goes; a scheduler looks at each step, and at how long they wait. */
static bool must_ask(const pkv_engine *e, int32_t paused) {
  return e->waiting_count > 0 && (e->asked || e->sched != NULL) &&
         (e->free_row_count > 0 || paused > 0);
}

static bool may_begin(const pkv_engine *e) {
  if (e->flights != 1 || e->reads_logits || e->copy_status != PKV_OK) return false;
  if (pkv_device_forward_goes_on(e->device) != e->logit_count || e->logit_count == 0) return false;
  int32_t running = 0;
  for (int32_t i = 0; i < e->running_count; i++)
    running += !e->seqs[e->running[i]].paused;
  for (int32_t i = 0; i < e->logit_count; i++)
    if (!row_goes_on(e, &e->logit_rows[i])) return false;
  return running == e->logit_count && !must_ask(e, e->running_count - running);
}

/* The rows before `end` are as long as the step on its way makes them. */
static void shorten(pkv_engine *e, int32_t end) {
  for (int32_t i = 0; i < end; i++) {
    const pkv_logit_row *const row = &e->logit_rows[i];
    (void)!pkv_table_truncate(e->table, e->seqs[row->seq].row, row->position + 1, NULL);
  }
}

/* A page for each row's next token; false: there are not so many. */
static bool extend(pkv_engine *e) {
  for (int32_t i = 0; i < e->logit_count; i++) {
    const int32_t row = e->seqs[e->logit_rows[i].seq].row;
    if (pkv_engine_make_room(e, row, 1) && pkv_table_extend(e->table, row, 1, NULL) == PKV_OK)
      continue;
    shorten(e, i);
    return false;
  }
  return true;
}

pkv_status pkv_ahead_begin(pkv_engine *engine, pkv_error *err) {
  pkv_engine *const e = engine;
  if (!may_begin(e) || !extend(e)) return PKV_OK;
  if (e->copy_status != PKV_OK) { /* the next step says so */
    shorten(e, e->logit_count);
    return PKV_OK;
  }
  const pkv_status status = pkv_device_forward_go_on(e->device, pkv_batch_go_on(e), err);
  if (status != PKV_OK) {
    shorten(e, e->logit_count);
    pkv_batch_forget(e);
    return status;
  }
  e->flights++;
  e->stats.steps++;
  e->stats.ahead_steps++;
  if (e->groups[0].shares) e->stats.shared_steps++;
  return PKV_OK;
}

void pkv_ahead_take(pkv_engine *engine) {
  pkv_engine *const e = engine;
  for (int32_t i = 0; i < e->logit_count; i++)
    e->logit_rows[i].position++;
  pkv_batch_note_rows(e);
  e->tokens = e->decode_rows;
}
