/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the scheduler: a stream of operations on one handle. Promises: nothing is refused
 * without a text, what is refused changes no count, everything inside fits together after each
 * operation (pkv_sched_check), and best answers the same twice, with a request that waits and fits.
 *
 *   byte 0  order, byte 1 policy, byte 2 faults, byte 3 chunk (low bits) and other options,
 *   byte 4  kind of hash, byte 5 number of requests
 *   then operations of one byte (low 3 bits: which; the rest: an argument) and what they take
 */
#include "sched/sched_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0                                                                           \
               : (void)(fprintf(stderr, "broken: %s: %s\n", #condition, err.text), abort()))

enum { IDS = 32, LONGEST = 32, MOST_STEPS = 2000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
  const uint8_t *at, *end;
} input;

typedef struct prompt {
  int32_t tokens[LONGEST];
  uint64_t hashes[LONGEST];
} prompt;

static pkv_error err;
static int64_t clock_ns;
static int hash_kind;

static uint8_t byte(input *in) {
  return in->at < in->end ? *in->at++ : 0;
}

static int64_t clock_fn(void *ctx) {
  (void)ctx;
  return clock_ns;
}

static uint64_t hash_fn(void *ctx, const void *bytes, size_t count, uint64_t seed) {
  (void)ctx;
  (void)seed;
  return hash_kind == 1 ? 1 : *(const uint8_t *)bytes % 2 + count;
}

static void set_options(pkv_sched_options *o, input *in) {
  o->order = (pkv_sched_order)(byte(in) % PKV_SCHED_ORDERS);
  o->policy = (pkv_sched_policy)(byte(in) % PKV_SCHED_POLICIES);
  o->faults = byte(in) & PKV_SCHED_FAULTS_ALL;
  const uint8_t bits = byte(in);
  o->chunk_tokens = 1 + bits % 4;
  o->page_tokens = 1 + bits / 4 % 4;
  o->ageing = bits & 16 ? PKV_SCHED_AGEING_OLDEST : PKV_SCHED_AGEING_EACH;
  o->bypass_limit = bits & 32 ? 3 : -1;
  o->max_wait_s = bits & 64 ? 50e-9 : 0;
  o->lpm_in_batch_tokens = bits & 128 ? 2 : 0;
  hash_kind = byte(in) % 3;
  o->hash_fn = hash_kind > 0 ? hash_fn : NULL;
  o->max_requests = 1 + byte(in) % IDS;
  o->max_prompt_tokens = LONGEST - 2;
  o->clock = clock_fn;
}

/* A prompt of few letters, so that prompts share; given by hashes, any hashes, now and then. */
static pkv_status insert(pkv_sched *s, input *in, prompt *p, uint64_t id) {
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  const uint8_t length = byte(in), shape = byte(in), extra = byte(in);
  r.id = id;
  r.prompt_tokens = length % (LONGEST + 1);
  r.priority = extra % 3 - 1;
  r.deadline_ns = extra & 64 ? clock_ns + extra : 0;
  r.output_tokens = extra / 4 % 8;
  r.arrival_ns = extra & 128 ? clock_ns / 2 : 0;
  for (int i = 0; i < LONGEST; i++)
    p->tokens[i] = (shape >> (i % 7)) & 1;
  if (length >= 128) p->tokens[length % LONGEST] ^= shape;
  for (int i = 0; i < LONGEST; i++)
    p->hashes[i] = (uint64_t)p->tokens[i];
  if (shape & 128) {
    r.hashes = p->hashes;
    r.hash_count = extra % LONGEST;
  } else {
    r.tokens = p->tokens;
  }
  if (extra & 32) return pkv_sched_insert_before(s, &r, shape % IDS, &err);
  return pkv_sched_insert(s, &r, &err);
}

static pkv_status best(pkv_sched *s, int64_t budget, bool admit) {
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT, again = PKV_SCHED_PICK_INIT;
  REQUIRE(pkv_sched_best(&pick, s, budget, &err) == PKV_OK);
  REQUIRE(pkv_sched_best(&again, s, budget, &err) == PKV_OK);
  REQUIRE(memcmp(&pick, &again, sizeof pick) == 0);
  if (pick.verdict == PKV_SCHED_EMPTY) return PKV_OK;
  REQUIRE(pkv_sched_get_state(s, pick.id) == PKV_SCHED_WAITING);
  REQUIRE(pick.shared_tokens >= 0 && pick.new_tokens >= 0 && pick.waiting_sharers >= 0);
  REQUIRE(pick.verdict == PKV_SCHED_BLOCKED || budget < 0 || pick.new_pages <= budget);
  if (!admit || pick.verdict != PKV_SCHED_ADD) return PKV_OK;
  return pkv_sched_admit(s, pick.id, &err);
}

static pkv_status step(pkv_sched *s, input *in, prompt *prompts) {
  const uint8_t op = byte(in);
  const uint64_t id = (op >> 3) % IDS;
  switch (op & 7) {
  case 0:
    /* The prompt of a request that is held must not be written over. */
    if (pkv_sched_get_state(s, id) != PKV_SCHED_UNKNOWN) return PKV_OK;
    return insert(s, in, &prompts[id], id);
  case 1:
    return best(s, op & 128 ? (int64_t)(op >> 3) % 8 : -1, op & 64);
  case 2:
    return pkv_sched_admit(s, id, &err);
  case 3:
    return pkv_sched_finish(s, id, &err);
  case 4:
    return pkv_sched_cancel(s, id, &err);
  case 5:
    return pkv_sched_preempt(s, id, &err);
  case 6:
    return pkv_sched_return(s, id, &err);
  default:
    clock_ns = op & 128 ? clock_ns / 2 : clock_ns + (op >> 3);
    return pkv_sched_reward(s, op >> 4, 0.25, &err);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static prompt prompts[IDS];
  input in = {data, data + size};
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = NULL;
  clock_ns = 100;
  set_options(&o, &in);
  REQUIRE(pkv_sched_create(&s, &o, &err) == PKV_OK);
  for (int i = 0; i < MOST_STEPS && in.at < in.end; i++) {
    const int32_t held = pkv_sched_snapshot(NULL, 0, s);
    err.text[0] = '\0';
    const pkv_status status = step(s, &in, prompts);
    const int32_t now = pkv_sched_snapshot(NULL, 0, s);
    REQUIRE(status == PKV_OK || (err.text[0] != '\0' && now == held));
    REQUIRE(now >= held - 1 && now <= held + 1);
    REQUIRE(pkv_sched_check(s, &err) == PKV_OK);
  }
  pkv_sched_destroy(s);
  return 0;
}
