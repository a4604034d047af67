/* SPDX-License-Identifier: Apache-2.0 */
/* One step: cancellations, admission, batch, forward, sampling, events. Every request ends in
 * end_request. */
#include "engine/engine_state.h"

#include <math.h>

#include "base/clock.h"
#include "base/status.h"

static pkv_event *push_event(pkv_event_sink *sink, const pkv_seq *s) {
  PKV_ASSERT(sink->count < sink->capacity);
  pkv_event *const event = &sink->events[sink->count++];
  event->request = s->id;
  event->user = s->user;
  event->token = -1;
  event->position = s->known;
  event->from_prompt = 0;
  event->finish = PKV_FINISH_NONE;
  event->logprob = NAN;
  event->top_count = 0;
  event->choice = s->choice;
  event->cached_tokens = s->cached_tokens;
  event->preemptions = s->preemptions;
  event->stop_index = -1;
  event->stop_bytes = 0;
  event->started_ns = s->started_ns;
  return event;
}

/* The one way an answer ends: pages and row given back, slot free. Its last event is written. */
static pkv_status end_request(pkv_engine *e, int32_t slot, pkv_finish finish, pkv_error *err) {
  pkv_seq *const s = &e->seqs[slot];
  pkv_status status = PKV_OK;
  e->stats.cancelled += finish == PKV_FINISH_CANCELLED;
  e->stats.failed += finish == PKV_FINISH_ERROR;
  e->stats.stopped += finish == PKV_FINISH_STOP;
  if (s->state == PKV_SEQ_RUNNING) status = pkv_engine_leave(e, slot, err);
  pkv_swap_drop(e, s);
  pkv_guide_leave(e, s);
  const pkv_status removed = pkv_queue_remove(e, slot, err);
  return status != PKV_OK ? status : removed;
}

static pkv_status end_without_token(pkv_engine *e, int32_t slot, pkv_finish finish,
                                    pkv_event_sink *sink, pkv_error *err) {
  push_event(sink, &e->seqs[slot])->finish = finish;
  return end_request(e, slot, finish, err);
}

static pkv_status cancel_running(pkv_engine *e, pkv_event_sink *sink, pkv_error *err) {
  for (int32_t i = e->running_count; i-- > 0;) {
    const int32_t slot = e->running[i];
    if (e->seqs[slot].cancelled)
      PKV_TRY(end_without_token(e, slot, PKV_FINISH_CANCELLED, sink, err));
  }
  return PKV_OK;
}

/* They may be many: as far as there is room for events, the others in the next step. */
static pkv_status cancel_waiting(pkv_engine *e, pkv_event_sink *sink, pkv_error *err) {
  for (int32_t i = e->waiting_count; i-- > 0 && sink->count < sink->capacity;) {
    const int32_t slot = e->waiting[i];
    if (e->seqs[slot].cancelled)
      PKV_TRY(end_without_token(e, slot, PKV_FINISH_CANCELLED, sink, err));
  }
  return PKV_OK;
}

/* Of `token` and the best ones by these logits. */
static void fill_logprobs(const pkv_engine *e, const pkv_seq *s, const float *logits,
                          pkv_event *event) {
  if (!s->logprobs) return;
  const double log_sum = pkv_logits_log_sum(logits, e->vocab);
  if (event->token >= 0 && event->token < e->vocab)
    event->logprob = (float)((double)logits[event->token] - log_sum);
  event->top_count = pkv_logits_top(event->top, s->top_logprobs, logits, e->vocab, log_sum);
}

/* The event of prompt token `index`; logits of the token before, or NULL. */
static pkv_status echo_token(pkv_engine *e, int32_t slot, int32_t index, const float *logits,
                             pkv_event_sink *sink, pkv_error *err) {
  pkv_seq *const s = &e->seqs[slot];
  float max = 0.0f;
  if (logits != NULL && !pkv_logits_max(&max, logits, e->vocab))
    return end_without_token(e, slot, PKV_FINISH_ERROR, sink, err);
  pkv_event *const event = push_event(sink, s);
  event->token = s->tokens[index];
  event->position = index;
  event->from_prompt = 1;
  if (logits != NULL) fill_logprobs(e, s, logits, event);
  s->echoed = index + 1;
  if (s->echoed < s->prompt || s->limit > s->prompt) return PKV_OK;
  event->finish = PKV_FINISH_LENGTH;
  return end_request(e, slot, PKV_FINISH_LENGTH, err);
}

/* Prompt tokens whose events need no logits: the first, or all of them when none are asked for. */
static pkv_status echo_plain(pkv_engine *e, pkv_event_sink *sink, pkv_error *err) {
  for (int32_t i = e->running_count; i-- > 0;) {
    const int32_t slot = e->running[i];
    const pkv_seq *const s = &e->seqs[slot];
    if (!s->echo || s->planned == 0) continue;
    int32_t end = s->computed < s->prompt ? s->computed : s->prompt;
    if (s->scoring && end > 1) end = 1;
    while (s->state == PKV_SEQ_RUNNING && s->echoed < end)
      PKV_TRY(echo_token(e, slot, s->echoed, NULL, sink, err));
  }
  return PKV_OK;
}

/* The next token by the request's own rules, or -1 when the logits allow none. */
static int32_t choose_token(pkv_engine *e, pkv_seq *s, int32_t row, const float *logits) {
  if (logits == NULL) return e->sampled[row];
  const bool early = s->known - s->prompt < s->min_tokens;
  const pkv_edit_context context = {s->tokens, s->prompt, s->known, e->ends,
                                    early ? e->end_count : 0};
  float max = 0.0f;
  if (!pkv_logit_edit_needed(&s->edit, &context) && s->guide < 0)
    return pkv_sample(logits, e->vocab, &s->sampling, s->known, &e->scratch);
  if (!pkv_logits_max(&max, logits, e->vocab)) return -1;
  pkv_logit_edit_apply(e->edited, logits, e->vocab, &s->edit, &context, e->counts);
  if (s->guide >= 0 && !pkv_guide_mask(e->edited, e, s)) return -1;
  return pkv_sample_edited(e->edited, e->vocab, &s->sampling, s->known, &e->scratch);
}

/* Whether the answer ends with this token's text. A control token has none: its own text counts
   only as a whole. */
static bool meets_stop(const pkv_engine *e, pkv_seq *s, pkv_event *event) {
  const char *text = NULL;
  size_t bytes = 0;
  if (s->stops.count == 0 || s->known - s->prompt <= s->min_tokens) return false;
  if (pkv_token_text(&text, &bytes, e->model, event->token, 0, NULL) != PKV_OK) return false;
  if (bytes > 0)
    return pkv_stop_feed(&event->stop_index, &event->stop_bytes, &s->stops, text, bytes);
  if (pkv_token_text(&text, &bytes, e->model, event->token, 1, NULL) != PKV_OK) return false;
  event->stop_index = pkv_stop_equals(&s->stops, text, bytes);
  return event->stop_index >= 0;
}

/* logits: of this row of the step, or NULL where the device has chosen. */
static pkv_status sample_token(pkv_engine *e, int32_t row, const float *logits,
                               pkv_event_sink *sink, pkv_error *err) {
  const int32_t slot = e->logit_rows[row].seq;
  pkv_seq *const s = &e->seqs[slot];
  const int32_t token = choose_token(e, s, row, logits);
  if (token < 0) return end_without_token(e, slot, PKV_FINISH_ERROR, sink, err);
  pkv_event *const event = push_event(sink, s);
  event->token = token;
  fill_logprobs(e, s, logits, event);
  s->tokens[s->known++] = token;
  e->stats.generated_tokens++;
  const bool complete = s->guide >= 0 && pkv_guide_completes(e, s);
  const bool stopped = meets_stop(e, s, event);
  if (complete || stopped || (!s->ignore_end && pkv_model_is_end(e->model, token) != 0))
    event->finish = PKV_FINISH_STOP;
  else if (s->known == s->limit)
    event->finish = PKV_FINISH_LENGTH;
  return event->finish == PKV_FINISH_NONE ? PKV_OK : end_request(e, slot, event->finish, err);
}

static pkv_status publish(pkv_engine *e, pkv_event_sink *sink, pkv_error *err) {
  PKV_TRY(echo_plain(e, sink, err));
  for (int32_t i = 0; i < e->logit_count; i++) {
    const pkv_logit_row at = e->logit_rows[i];
    const pkv_seq *const s = &e->seqs[at.seq];
    const bool here = e->weights == NULL || e->reads_logits;
    const float *const logits = here ? e->logits + (size_t)i * (size_t)e->shape.vocab : NULL;
    /* Ended by an earlier row of this step, or since it was begun. */
    if (s->state != PKV_SEQ_RUNNING || s->order != at.order) continue;
    if (at.position + 1 < s->prompt)
      PKV_TRY(echo_token(e, at.seq, at.position + 1, logits, sink, err));
    else
      PKV_TRY(sample_token(e, i, logits, sink, err));
  }
  return PKV_OK;
}

static pkv_forward_batch batch_of(const pkv_engine *e) {
  const bool samples = e->device != NULL && pkv_device_forward_samples(e->device);
  return (pkv_forward_batch){
      .tokens = e->tokens,
      .ids = e->ids,
      .positions = e->positions,
      .slots = e->slots,
      .groups = e->groups,
      .group_count = e->group_count,
      .logit_tokens = e->logit_tokens,
      .logit_count = e->logit_count,
      .logits = e->weights == NULL || e->reads_logits ? e->logits : NULL,
      .sampled = e->sampled,
      .sample_rows = samples ? e->sample_rows : NULL,
  };
}

static pkv_status begin_forward(pkv_engine *e, pkv_error *err) {
  const pkv_forward_batch batch = batch_of(e);
  if (e->weights == NULL) return pkv_forward_run(e->forward, e->caches, &batch, err);
  /* For good: what the page should hold is nowhere else. */
  if (e->copy_status != PKV_OK && err != NULL) *err = e->copy_error;
  return e->copy_status != PKV_OK ? e->copy_status
                                  : pkv_device_forward_begin(e->device, &batch, err);
}

static pkv_status finish_forward(pkv_engine *e, pkv_error *err) {
  const pkv_forward_batch batch = batch_of(e);
  return e->weights == NULL ? PKV_OK : pkv_device_forward_finish(e->device, &batch, err);
}

/* After a failure: rows back to what is really computed, so that the step can be tried again. */
static void roll_back(pkv_engine *e) {
  pkv_batch_forget(e);
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    s->planned = 0;
    if (pkv_table_seq_len(e->table, s->row) > s->computed)
      (void)!pkv_table_truncate(e->table, s->row, s->computed, NULL);
  }
}

static void count_step(pkv_engine *e, int64_t nanoseconds) {
  const double seconds = (double)nanoseconds * 1e-9;
  const double share = (double)e->decode_rows / (double)e->tokens;
  e->stats.decode_steps += e->decode_rows > 0;
  e->stats.decode_tokens += e->decode_rows;
  e->stats.prefill_tokens += e->tokens - e->decode_rows;
  e->stats.decode_seconds += seconds * share;
  e->stats.prefill_seconds += seconds * (1.0 - share);
  if (e->tokens > e->decode_rows) pkv_swap_note_step(e, seconds, e->tokens);
}

static void note_peak(pkv_engine *e) {
  pkv_pool_stats pool;
  pkv_prefix_stats prefix;
  pkv_pool_get_stats(&pool, e->pool);
  pkv_prefix_get_stats(&prefix, e->prefix);
  const int64_t used = pool.pages_in_use - prefix.idle;
  if (used > e->stats.pages_peak) e->stats.pages_peak = used;
}

/* The next step is laid out and begun; nothing to compute: none. */
static pkv_status begin_step(pkv_engine *e, pkv_error *err) {
  e->begun_ns = pkv_clock_ns();
  pkv_status status = pkv_engine_reserve(e, err);
  note_peak(e);
  if (status == PKV_OK) status = pkv_batch_build(e, err);
  if (status == PKV_OK && e->tokens > 0) status = begin_forward(e, err);
  if (status != PKV_OK) {
    roll_back(e);
    return status;
  }
  if (e->tokens == 0) return PKV_OK;
  e->flights++;
  e->stats.steps++;
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    if (s->planned > 0 && s->started_ns == 0) s->started_ns = e->begun_ns;
  }
  return PKV_OK;
}

/* The oldest step on its way: its tokens, and what follows from them. */
static pkv_status end_step(pkv_engine *e, pkv_event_sink *sink, pkv_error *err) {
  const pkv_status status = finish_forward(e, err);
  if (status != PKV_OK) {
    e->flights = 0;
    roll_back(e);
    return status;
  }
  e->flights--;
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    s->computed += s->planned;
  }
  pkv_engine_publish_pages(e);
  PKV_TRY(pkv_batch_count_routes(e, err));
  PKV_TRY(publish(e, sink, err));
  const int64_t now = pkv_clock_ns(), spent = now - e->begun_ns;
  if (e->tokens > 0) count_step(e, spent);
  e->begun_ns = now;
  PKV_TRY(pkv_queue_reward(e, (double)spent * 1e-9, err));
  if (e->flights > 0) pkv_ahead_take(e);
  return PKV_OK;
}

/* With nothing running, nobody but the cache owns a page. */
static pkv_status check_idle(const pkv_engine *e, pkv_error *err) {
  pkv_pool_stats pool;
  pkv_prefix_stats prefix;
  if (e->running_count > 0) return PKV_OK;
  pkv_pool_get_stats(&pool, e->pool);
  pkv_prefix_get_stats(&prefix, e->prefix);
  PKV_CHECK(err,
            pool.pages_in_use == prefix.idle && prefix.entries == prefix.idle &&
                pool.pages_free + prefix.idle == pool.pages_total,
            PKV_E_INTERNAL,
            "nothing runs, but of %lld pages %lld are in use, %lld cached (%lld idle), %lld free",
            (long long)pool.pages_total, (long long)pool.pages_in_use, (long long)prefix.entries,
            (long long)prefix.idle, (long long)pool.pages_free);
  return PKV_OK;
}

static bool someone_echoes(const pkv_engine *e) {
  for (int32_t i = 0; i < e->running_count; i++)
    if (e->seqs[e->running[i]].echo) return true;
  for (int32_t i = 0; i < e->waiting_count; i++)
    if (e->seqs[e->waiting[i]].echo) return true;
  return false;
}

pkv_status pkv_engine_step(pkv_event *events, size_t capacity, size_t *count, pkv_engine *engine,
                           pkv_error *err) {
  PKV_CHECK(err, count != NULL, PKV_E_INVALID, "count is NULL");
  *count = 0;
  PKV_CHECK(err, engine != NULL, PKV_E_INVALID, "engine is NULL");
  PKV_CHECK(err, events != NULL, PKV_E_INVALID, "events is NULL");
  const size_t echo = someone_echoes(engine) ? (size_t)engine->options.prefill_chunk : 0;
  const size_t least = (size_t)engine->options.max_rows + echo;
  PKV_CHECK(err, capacity >= least, PKV_E_TOO_SMALL, "capacity is %zu events, a step may need %zu",
            capacity, least);

  pkv_event_sink sink = {events, capacity, 0};
  pkv_status status = cancel_running(engine, &sink, err);
  if (status == PKV_OK && engine->flights > 0) status = pkv_ahead_begin(engine, err);
  if (status == PKV_OK && engine->flights > 0) status = end_step(engine, &sink, err);
  if (status == PKV_OK && engine->flights == 0) {
    /* A cancellation has used up the event of its row: who takes the row over may need one more,
       where the step ends in this call. */
    const size_t used = engine->lags ? 0 : sink.count;
    status = pkv_engine_admit(engine, capacity - echo - used, err);
    if (status == PKV_OK) status = begin_step(engine, err);
    if (status == PKV_OK && engine->flights > 0 && !engine->lags)
      status = end_step(engine, &sink, err);
  }
  if (status == PKV_OK) status = cancel_waiting(engine, &sink, err);
  if (status == PKV_OK) status = check_idle(engine, err);
  *count = sink.count;
  return status;
}
