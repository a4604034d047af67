/* SPDX-License-Identifier: Apache-2.0 */
/* Submitting: everything is checked before the first slot is taken; a request of n answers takes n
 * slots or none. */
#include "pkv/engine.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "engine/engine_state.h"

#define LARGEST_BIAS    100.0f
#define LARGEST_PENALTY 2.0f

static pkv_status check_prompt(const pkv_engine *e, const pkv_request *r, pkv_error *err) {
  const int32_t longest = e->options.max_seq_len;
  PKV_CHECK(err, r->prompt != NULL, PKV_E_INVALID, "request->prompt is NULL");
  PKV_CHECK(err, r->prompt_tokens >= 1, PKV_E_INVALID,
            "request->prompt_tokens is %d, a prompt has at least 1", (int)r->prompt_tokens);
  PKV_CHECK(err, r->max_tokens >= 0, PKV_E_INVALID, "request->max_tokens is %d",
            (int)r->max_tokens);
  PKV_CHECK(err, r->max_tokens > 0 || r->echo, PKV_E_INVALID,
            "request->max_tokens is 0, which only makes sense with echo");
  for (int32_t i = 0; i < r->prompt_tokens; i++)
    PKV_CHECK(err, r->prompt[i] >= 0 && r->prompt[i] < e->shape.vocab, PKV_E_RANGE,
              "request->prompt[%d] is %d, the vocabulary has %d tokens", (int)i, (int)r->prompt[i],
              (int)e->shape.vocab);
  const int32_t most = r->max_tokens == 0 ? longest : longest - 1;
  PKV_CHECK(err, r->prompt_tokens <= most, PKV_E_LIMIT,
            "the prompt has %d tokens, at most %d fit (context and cache hold %d)",
            (int)r->prompt_tokens, (int)most, (int)longest);
  return PKV_OK;
}

static pkv_status check_sampling(const pkv_request *r, pkv_error *err) {
  PKV_CHECK(err, isfinite(r->temperature) && r->temperature >= 0.0f, PKV_E_RANGE,
            "request->temperature is %g, it is 0 or more", (double)r->temperature);
  PKV_CHECK(err, r->top_k >= 0, PKV_E_RANGE, "request->top_k is %d, it is 0 or more",
            (int)r->top_k);
  PKV_CHECK(err, r->top_p >= 0.0f && r->top_p <= 1.0f, PKV_E_RANGE,
            "request->top_p is %g, it lies in 0 to 1", (double)r->top_p);
  PKV_CHECK(err, r->min_p >= 0.0f && r->min_p <= 1.0f, PKV_E_RANGE,
            "request->min_p is %g, it lies in 0 to 1", (double)r->min_p);
  const float repetition = r->repetition_penalty;
  PKV_CHECK(err, repetition == 0.0f || (repetition >= 0.01f && repetition <= 100.0f), PKV_E_RANGE,
            "request->repetition_penalty is %g, it lies in 0.01 to 100", (double)repetition);
  PKV_CHECK(err, fabsf(r->presence_penalty) <= LARGEST_PENALTY, PKV_E_RANGE,
            "request->presence_penalty is %g, it lies in -2 to 2", (double)r->presence_penalty);
  PKV_CHECK(err, fabsf(r->frequency_penalty) <= LARGEST_PENALTY, PKV_E_RANGE,
            "request->frequency_penalty is %g, it lies in -2 to 2", (double)r->frequency_penalty);
  PKV_CHECK(err, r->top_logprobs >= 0 && r->top_logprobs <= PKV_MAX_TOP_LOGPROBS, PKV_E_RANGE,
            "request->top_logprobs is %d, possible are 0 to %d", (int)r->top_logprobs,
            PKV_MAX_TOP_LOGPROBS);
  PKV_CHECK(err, r->min_tokens >= 0, PKV_E_RANGE, "request->min_tokens is %d, it is 0 or more",
            (int)r->min_tokens);
  PKV_CHECK(err, r->min_tokens <= r->max_tokens, PKV_E_RANGE,
            "request->min_tokens is %d, more than max_tokens, %d", (int)r->min_tokens,
            (int)r->max_tokens);
  return PKV_OK;
}

static pkv_status check_lists(const pkv_engine *e, const pkv_request *r, pkv_error *err) {
  PKV_CHECK(err, r->logit_bias_count >= 0 && r->logit_bias_count <= PKV_MAX_LOGIT_BIAS, PKV_E_RANGE,
            "request->logit_bias_count is %d, possible are 0 to %d", (int)r->logit_bias_count,
            PKV_MAX_LOGIT_BIAS);
  PKV_CHECK(err, r->logit_bias != NULL || r->logit_bias_count == 0, PKV_E_INVALID,
            "request->logit_bias is NULL");
  for (int32_t i = 0; i < r->logit_bias_count; i++) {
    const pkv_logit_bias b = r->logit_bias[i];
    PKV_CHECK(err, b.token >= 0 && b.token < e->shape.vocab, PKV_E_RANGE,
              "request->logit_bias[%d].token is %d, the vocabulary has %d tokens", (int)i,
              (int)b.token, (int)e->shape.vocab);
    PKV_CHECK(err, fabsf(b.bias) <= LARGEST_BIAS, PKV_E_RANGE,
              "request->logit_bias[%d].bias is %g, it lies in -100 to 100", (int)i, (double)b.bias);
  }
  PKV_CHECK(err, r->stop_count >= 0 && r->stop_count <= PKV_MAX_STOPS, PKV_E_RANGE,
            "request->stop_count is %d, possible are 0 to %d", (int)r->stop_count, PKV_MAX_STOPS);
  PKV_CHECK(err, r->stop != NULL || r->stop_count == 0, PKV_E_INVALID, "request->stop is NULL");
  for (int32_t i = 0; i < r->stop_count; i++) {
    PKV_CHECK(err, r->stop[i] != NULL, PKV_E_INVALID, "request->stop[%d] is NULL", (int)i);
    const size_t bytes = strnlen(r->stop[i], PKV_MAX_STOP_BYTES + 1);
    PKV_CHECK(err, bytes >= 1 && bytes <= PKV_MAX_STOP_BYTES, PKV_E_RANGE,
              "request->stop[%d] has %s bytes, possible are 1 to %d", (int)i,
              bytes == 0 ? "no" : "more", PKV_MAX_STOP_BYTES);
  }
  PKV_CHECK(err, r->constraint == NULL || pkv_constraint_fits(r->constraint, e->model),
            PKV_E_INVALID, "request->constraint was made for another model");
  const int64_t longest = r->constraint != NULL ? pkv_constraint_longest(r->constraint) : -1;
  PKV_CHECK(err, longest < 0 || r->min_tokens <= longest, PKV_E_INVALID,
            "request->min_tokens is %d, the longest text of its constraint has %lld bytes",
            (int)r->min_tokens, (long long)longest);
  PKV_CHECK(err, r->stop_count == 0 || pkv_model_tokenizer(e->model) != NULL, PKV_E_UNSUPPORTED,
            "request->stop needs a tokenizer, the model has none");
  return PKV_OK;
}

static int32_t choices_of(const pkv_request *r) {
  return r->n > 1 ? r->n : 1;
}

static pkv_status check_request(const pkv_engine *e, const pkv_request *r, pkv_error *err) {
  PKV_TRY(check_prompt(e, r, err));
  PKV_TRY(check_sampling(r, err));
  PKV_TRY(check_lists(e, r, err));
  PKV_CHECK(err, r->n >= 0 && r->n <= PKV_MAX_CHOICES, PKV_E_RANGE,
            "request->n is %d, possible are 1 to %d", (int)r->n, PKV_MAX_CHOICES);
  PKV_CHECK(err, r->n <= 1 || !r->echo, PKV_E_INVALID, "request->n is %d, with echo it is 1",
            (int)r->n);
  PKV_CHECK(err, r->n <= e->options.max_requests, PKV_E_LIMIT,
            "request->n is %d, this engine takes at most %d requests", (int)r->n,
            (int)e->options.max_requests);
  PKV_CHECK(err, r->priority >= -PKV_SCHED_MAX_PRIORITY && r->priority <= PKV_SCHED_MAX_PRIORITY,
            PKV_E_RANGE, "request->priority is %d, possible are -%d to %d", (int)r->priority,
            PKV_SCHED_MAX_PRIORITY, PKV_SCHED_MAX_PRIORITY);
  PKV_CHECK(err, pkv_engine_pending(e) + choices_of(r) <= e->options.max_requests, PKV_E_LIMIT,
            "%d requests are running or waiting, %d is the most that this engine takes",
            (int)pkv_engine_pending(e), (int)e->options.max_requests);
  return PKV_OK;
}

void pkv_seq_free(const pkv_engine *engine, pkv_seq *s) {
  const pkv_allocator *const a = &engine->allocator;
  pkv_free(a, s->tokens, (size_t)s->capacity * sizeof *s->tokens);
  pkv_free(a, s->digests, (size_t)s->digest_capacity * sizeof *s->digests);
  pkv_free(a, s->host, (size_t)s->host_capacity * sizeof *s->host);
  pkv_free(a, s->edit.bias, (size_t)s->edit.bias_capacity * sizeof *s->edit.bias);
  pkv_stop_free(&s->stops, a);
}

/* A larger block in place of *block; what it held is lost. */
static pkv_status grow(void **block, int32_t *capacity, int32_t count, size_t size,
                       const pkv_allocator *a, pkv_error *err) {
  if (count <= *capacity) return PKV_OK;
  void *const grown = pkv_alloc(a, (size_t)count * size);
  PKV_CHECK(err, grown != NULL, PKV_E_NOMEM, "no memory for a request (%d items)", (int)count);
  pkv_free(a, *block, (size_t)*capacity * size);
  *block = grown;
  *capacity = count;
  return PKV_OK;
}

/* Room for what a request brings; kept with the slot for later ones. */
static pkv_status grow_slot(const pkv_engine *e, pkv_seq *s, const pkv_request *r, int32_t limit,
                            pkv_error *err) {
  const pkv_allocator *const a = &e->allocator;
  void *tokens = s->tokens, *digests = s->digests, *host = s->host, *bias = s->edit.bias;
  pkv_status status = grow(&tokens, &s->capacity, limit, sizeof *s->tokens, a, err);
  s->tokens = tokens;
  if (status == PKV_OK)
    status = grow(&digests, &s->digest_capacity, limit / e->options.page_tokens, sizeof *s->digests,
                  a, err);
  s->digests = digests;
  if (status == PKV_OK && e->swap.pages > 0)
    status = grow(&host, &s->host_capacity, pkv_pages_for(e, limit), sizeof *s->host, a, err);
  s->host = host;
  if (status == PKV_OK)
    status = grow(&bias, &s->edit.bias_capacity, r->logit_bias_count, sizeof *s->edit.bias, a, err);
  s->edit.bias = bias;
  if (status == PKV_OK)
    status = pkv_stop_reserve(&s->stops, pkv_stop_bytes(r->stop, r->stop_count), a, err);
  return status;
}

void pkv_seq_digest(const pkv_engine *engine, pkv_seq *s) {
  const int32_t page = engine->options.page_tokens, whole = s->known / page;
  while (s->digest_count < whole) {
    const int32_t i = s->digest_count;
    const uint64_t before = i == 0 ? pkv_prefix_seed(s->key) : s->digests[i - 1];
    s->digests[s->digest_count++] =
        pkv_prefix_digest(before, s->tokens + (size_t)i * (size_t)page, page);
  }
}

static void fill_slot(const pkv_engine *e, pkv_seq *s, const pkv_request *r, int32_t limit) {
  memcpy(s->tokens, r->prompt, (size_t)r->prompt_tokens * sizeof *s->tokens);
  s->row = -1;
  s->prompt = s->known = r->prompt_tokens;
  s->computed = s->planned = s->echoed = s->locked = s->digest_count = 0;
  s->cached_tokens = s->preemptions = s->swapped = 0;
  s->started_ns = 0;
  s->paused = false;
  s->limit = limit;
  s->echo = r->echo != 0;
  s->logprobs = r->logprobs != 0 || r->top_logprobs > 0;
  s->scoring = s->echo && s->logprobs;
  s->ignore_end = r->ignore_end != 0;
  s->cancelled = s->counted = s->apart = s->follows = s->forgotten = s->held = false;
  s->follow_pages = s->bypasses = 0;
  s->priority = r->priority;
  s->top_logprobs = r->top_logprobs;
  s->min_tokens = r->min_tokens;
  s->key = (pkv_prefix_key){r->cache_salt, r->adapter};
  s->sampling =
      (pkv_sampling){r->temperature, r->top_k, r->top_p, r->seed, (uint64_t)s->choice, r->min_p};
  s->edit.repetition = r->repetition_penalty == 0.0f ? 1.0f : r->repetition_penalty;
  s->edit.presence = r->presence_penalty;
  s->edit.frequency = r->frequency_penalty;
  s->edit.bias_count = r->logit_bias_count;
  if (r->logit_bias_count > 0)
    memcpy(s->edit.bias, r->logit_bias, (size_t)r->logit_bias_count * sizeof *s->edit.bias);
  pkv_stop_set(&s->stops, r->stop, r->stop_count);
  s->matched = (pkv_machine_state){0, 0};
  s->fed = 0;
  s->user = r->user;
  pkv_seq_digest(e, s);
}

/* The first free slot from `from` on; there is one: checked before. */
static int32_t free_slot(const pkv_engine *e, int32_t from) {
  while (e->seqs[from].state != PKV_SEQ_FREE)
    from++;
  return from;
}

/* Answers of a request that could not be queued whole. */
static void take_back(pkv_engine *e, int64_t id) {
  for (int32_t i = 0; i < e->options.max_requests; i++)
    if (e->seqs[i].state == PKV_SEQ_WAITING && e->seqs[i].id == id) {
      pkv_guide_leave(e, &e->seqs[i]);
      (void)!pkv_queue_remove(e, i, NULL);
    }
}

pkv_status pkv_engine_submit(int64_t *id, pkv_engine *engine, const pkv_request *request,
                             pkv_error *err) {
  pkv_engine *const e = engine;
  PKV_CHECK(err, id != NULL, PKV_E_INVALID, "id is NULL");
  *id = 0;
  PKV_CHECK(err, e != NULL, PKV_E_INVALID, "engine is NULL");
  PKV_CHECK_STRUCT(err, request, pkv_request);
  PKV_TRY(check_request(e, request, err));
  const int32_t room = e->options.max_seq_len - request->prompt_tokens;
  const int32_t limit =
      request->prompt_tokens + (request->max_tokens < room ? request->max_tokens : room);
  const int32_t n = choices_of(request);
  for (int32_t c = 0, slot = 0; c < n; c++, slot++) { /* all the memory, before the first one */
    slot = free_slot(e, slot);
    PKV_TRY(grow_slot(e, &e->seqs[slot], request, limit, err));
  }
  const int64_t first = e->next_order;
  e->asked = true;
  for (int32_t c = 0, slot = 0; c < n; c++, slot++) {
    slot = free_slot(e, slot);
    pkv_seq *const s = &e->seqs[slot];
    s->id = first;
    s->order = e->next_order++;
    s->choice = c;
    fill_slot(e, s, request, limit);
    pkv_status status = pkv_guide_take(&s->guide, e, request->constraint, err);
    if (status == PKV_OK) status = pkv_queue_add(e, slot, err);
    if (status == PKV_OK) continue;
    pkv_guide_leave(e, s);
    take_back(e, first);
    return status;
  }
  *id = first;
  return PKV_OK;
}
