/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler's calls: what they refuse and how they say it, orders on small queues, ages,
 * budgets, memory. Random sequences are in test_sched_model_*.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched/sched_tree.h"
#include "support/sched_drive.h"
#include "support/test_alloc.h"

static pkv_error err;

#define REFUSED(call, status, words)                                                               \
  do {                                                                                             \
    memset(&err, 0, sizeof err);                                                                   \
    const pkv_status got_ = (call);                                                                \
    if (got_ != (status) || strstr(err.text, words) == NULL)                                       \
      fail_msg("%s: %s (%s), expected %s with \"%s\"", #call, pkv_status_name(got_), err.text,     \
               pkv_status_name(status), words);                                                    \
  } while (0)

/* ---- options and requests ---- */

static void options_are_checked(void **state) {
  (void)state;
  pkv_sched *s = (pkv_sched *)&err;
#define BAD(field, value, words)                                                                   \
  do {                                                                                             \
    pkv_sched_options o_ = PKV_SCHED_OPTIONS_INIT;                                                 \
    o_.field = value;                                                                              \
    REFUSED(pkv_sched_create(&s, &o_, &err), PKV_E_INVALID, words);                                \
    assert_null(s);                                                                                \
  } while (0)
  BAD(struct_size, 8, "struct_size");
  BAD(order, (pkv_sched_order)6, "order is 6");
  BAD(policy, (pkv_sched_policy)-1, "policy is -1");
  BAD(max_requests, -1, "max_requests");
  BAD(max_requests, (1 << 21) + 1, "max_requests");
  BAD(max_prompt_tokens, (1 << 24) + 1, "max_prompt_tokens");
  BAD(chunk_tokens, (1 << 16) + 1, "chunk_tokens");
  BAD(page_tokens, -1, "page_tokens");
  BAD(pool_pages, -1, "pool_pages");
  BAD(bypass_limit, -2, "bypass_limit");
  BAD(ageing, (pkv_sched_ageing)2, "ageing");
  BAD(max_wait_s, -1, "max_wait_s");
  BAD(max_wait_s, 0.0 / 0.0, "max_wait_s");
  BAD(share_weight, -0.5, "share_weight");
  BAD(share_weight, 1001, "share_weight");
  BAD(age_tokens_per_s, 1e10, "age_tokens_per_s");
  BAD(fit_tries, 65, "fit_tries");
  BAD(q_rate, 1.5, "q_rate");
  BAD(q_explore, 2, "q_explore");
  BAD(prior_weight, -2, "prior_weight");
  BAD(cost_base_us, -1, "cost_base_us");
  BAD(hash, (pkv_sched_hash)2, "hash");
  BAD(faults, 128, "faults");
#undef BAD
  REFUSED(pkv_sched_create(&s, NULL, &err), PKV_E_INVALID, "NULL");
  pkv_sched_destroy(NULL);
}

static void requests_are_checked(void **state) {
  (void)state;
  static const int32_t tokens[200];
  static const uint64_t hashes[200];
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.max_requests = 2;
  o.max_prompt_tokens = 150;
  o.pool_pages = 12;
  pkv_sched *s = sd_create(&o);
#define BAD(status, words, ...)                                                                    \
  do {                                                                                             \
    pkv_sched_request r_ = PKV_SCHED_REQUEST_INIT;                                                 \
    r_.id = 7;                                                                                     \
    r_.tokens = tokens;                                                                            \
    r_.prompt_tokens = 100;                                                                        \
    __VA_ARGS__;                                                                                   \
    REFUSED(pkv_sched_insert(s, &r_, &err), status, words);                                        \
    assert_int_equal(pkv_sched_get_state(s, 7), PKV_SCHED_UNKNOWN);                                \
  } while (0)
  BAD(PKV_E_INVALID, "struct_size", r_.struct_size = 0);
  BAD(PKV_E_INVALID, "prompt_tokens is -1", r_.prompt_tokens = -1);
  BAD(PKV_E_LIMIT, "prompt_tokens is 151, at most 150", r_.prompt_tokens = 151);
  BAD(PKV_E_LIMIT, "needs 13 pages, the cache has 12", r_.output_tokens = 93);
  BAD(PKV_E_LIMIT, "needs 99 pages", r_.pages = 99);
  BAD(PKV_E_INVALID, "neither tokens nor hashes", r_.tokens = NULL);
  BAD(PKV_E_INVALID, "both", r_.hashes = hashes);
  BAD(PKV_E_INVALID, "hash_count is 1", r_.hash_count = 1);
  BAD(PKV_E_INVALID, "hash_count is 3", r_.tokens = NULL; r_.hashes = hashes; r_.hash_count = 3);
  BAD(PKV_E_INVALID, "output_tokens is -1", r_.output_tokens = -1);
  BAD(PKV_E_INVALID, "priority is 1000001", r_.priority = 1000001);
  BAD(PKV_E_INVALID, "deadline_ns -1", r_.deadline_ns = -1);
#undef BAD
  sd_insert(s, 1, tokens, 100);
  pkv_sched_request again = PKV_SCHED_REQUEST_INIT;
  again.id = 1;
  REFUSED(pkv_sched_insert(s, &again, &err), PKV_E_STATE, "request 1 is held already");
  sd_insert(s, 2, NULL, 0);
  again.id = 3;
  REFUSED(pkv_sched_insert(s, &again, &err), PKV_E_LIMIT, "max_requests");
  REFUSED(pkv_sched_finish(s, 1, &err), PKV_E_STATE, "request 1 is waiting, not active");
  REFUSED(pkv_sched_preempt(s, 9, &err), PKV_E_STATE, "request 9 is not held");
  REFUSED(pkv_sched_return(s, 1, &err), PKV_E_STATE, "not preempted");
  REFUSED(pkv_sched_cancel(s, 9, &err), PKV_E_STATE, "request 9 is not held");
  REFUSED(pkv_sched_reward(s, 1, 0, &err), PKV_E_INVALID, "seconds");
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  REFUSED(pkv_sched_best(&pick, s, -2, &err), PKV_E_INVALID, "page_budget is -2");
  pkv_sched_destroy(s);
}

static void priorities_are_limited(void **state) {
  (void)state;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  for (int32_t i = 0; i <= PKV_SCHED_MAX_PRIORITIES; i++) {
    r.id = (uint64_t)i;
    r.priority = (i * 7919) % 10007 - 5000; /* in no order */
    if (i < PKV_SCHED_MAX_PRIORITIES)
      assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
    else
      REFUSED(pkv_sched_insert(s, &r, &err), PKV_E_LIMIT, "1024 other priorities");
  }
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  int32_t last = INT32_MIN;
  for (int32_t i = 0; i < PKV_SCHED_MAX_PRIORITIES; i++) { /* the most urgent first */
    const uint64_t id = sd_admit_best(s);
    const int32_t priority = ((int32_t)id * 7919) % 10007 - 5000;
    assert_true(priority > last);
    last = priority;
    sd_finish(s, id);
  }
  pkv_sched_destroy(s);
}

/* ---- nothing, one, everything ---- */

static void empty_and_single(void **state) {
  (void)state;
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = (pkv_sched_order)order;
    o.max_requests = 1;
    pkv_sched *s = sd_create(&o);
    int32_t *p = sd_prompt(1, 100, 0, 100);
    assert_int_equal(sd_best(s).verdict, PKV_SCHED_EMPTY);
    assert_int_equal(pkv_sched_snapshot(NULL, 0, s), 0);
    for (int i = 0; i < 3; i++) { /* the same id again */
      sd_insert(s, 5, p, 100);
      const pkv_sched_pick pick = sd_best(s);
      assert_int_equal(pick.verdict, PKV_SCHED_ADD);
      assert_int_equal(pick.forced, 1);
      assert_int_equal(pick.id, 5);
      assert_int_equal(pick.new_tokens, 100);
      assert_int_equal(pick.new_pages, 7);
      assert_int_equal(pick.chain_after, 2);
      sd_admit(s, 5);
      assert_int_equal(sd_best(s).verdict, PKV_SCHED_EMPTY);
      assert_int_equal(sd_stats(s).chain_chunks, 2);
      assert_int_equal(sd_stats(s).unique_tokens, 100);
      sd_finish(s, 5);
      assert_int_equal(sd_stats(s).total_tokens, 0);
    }
    pkv_sched_destroy(s);
    free(p);
  }
}

static void cancel_everything(void **state) {
  (void)state;
  enum { N = 300 };
  int32_t *prompts[N];
  for (int i = 0; i < N; i++)
    prompts[i] = sd_prompt(i % 3, i % 200, i, 64 + i % 190);
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = (pkv_sched_order)order;
    o.chunk_tokens = 16;
    pkv_sched *s = sd_create(&o);
    int64_t used = 0;
    for (int round = 0; round < 3; round++) {
      for (int i = 0; i < N; i++)
        sd_insert(s, (uint64_t)i, prompts[i], 64 + i % 190);
      for (int i = 0; i < 40; i++)
        (void)sd_admit_best(s);
      for (int i = 0; i < N; i++) {
        const uint64_t id = (uint64_t)((i * 7 + round) % N);
        if (i % 9 == 0 && pkv_sched_get_state(s, id) == PKV_SCHED_ACTIVE)
          assert_int_equal(pkv_sched_preempt(s, id, &err), PKV_OK);
        assert_int_equal(pkv_sched_cancel(s, id, &err), PKV_OK);
        if (pkv_sched_check(s, &err) != PKV_OK) fail_msg("after cancel %d: %s", i, err.text);
      }
      const pkv_sched_stats n = sd_stats(s);
      assert_int_equal(n.waiting + n.active + n.preempted, 0);
      assert_int_equal(n.unique_tokens, 0);
      assert_int_equal(n.tree_nodes, 0);
      if (round > 0) assert_true(n.used_bytes <= used);
      used = n.used_bytes;
    }
    pkv_sched_destroy(s);
  }
  for (int i = 0; i < N; i++)
    free(prompts[i]);
}

/* ---- ages ---- */

static void clock_going_backwards(void **state) {
  (void)state;
  int64_t now_ns = 1000;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.clock = sd_clock;
  o.clock_ctx = &now_ns;
  o.max_wait_s = 1e-6;
  o.order = PKV_SCHED_PRIORITY;
  pkv_sched *s = sd_create(&o);
  sd_insert(s, 1, NULL, 0);
  now_ns = 10;
  sd_insert(s, 2, NULL, 0); /* not earlier than the first */
  assert_int_equal(sd_best(s).waited_ns, 0);
  now_ns = 1999;
  assert_int_equal(sd_best(s).reason, PKV_SCHED_BY_ORDER);
  now_ns = 2000;
  assert_int_equal(sd_best(s).reason, PKV_SCHED_BY_WAIT);
  now_ns = 5; /* stands still: what was late stays late */
  pkv_sched_pick pick = sd_best(s);
  assert_int_equal(pick.reason, PKV_SCHED_BY_WAIT);
  assert_int_equal(pick.waited_ns, 1000);
  assert_int_equal(pick.id, 1);
  pkv_sched_entry e[2];
  assert_int_equal(pkv_sched_snapshot(e, 2, s), 2);
  assert_int_equal(e[1].waiting_since_ns, 1000);
  pkv_sched_destroy(s);
}

static void deadlines_move_up(void **state) {
  (void)state;
  int64_t now_ns = 1;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = PKV_SCHED_FCFS;
  o.clock = sd_clock;
  o.clock_ctx = &now_ns;
  o.deadline_slack_s = 10e-9;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  for (uint64_t id = 1; id <= 6; id++) {
    r.id = id;
    r.deadline_ns = id == 4 ? 100 : id == 5 ? 90 : id == 6 ? 90 : 0;
    assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
  }
  assert_int_equal(sd_best(s).id, 1);
  now_ns = 80;
  pkv_sched_pick pick = sd_best(s);
  assert_int_equal(pick.reason, PKV_SCHED_BY_DEADLINE);
  assert_int_equal(pick.id, 5); /* of equal deadlines the older */
  sd_admit(s, 5);
  assert_int_equal(pkv_sched_cancel(s, 6, &err), PKV_OK);
  assert_int_equal(sd_best(s).id, 1); /* 4 is not near yet */
  now_ns = 90;
  assert_int_equal(sd_best(s).id, 4);
  /* It was admitted in time once: preempted, it is as urgent as any. */
  assert_int_equal(pkv_sched_preempt(s, 5, &err), PKV_OK);
  assert_int_equal(pkv_sched_return(s, 5, &err), PKV_OK);
  sd_admit(s, 4);
  assert_int_equal(sd_best(s).id, 1);
  pkv_sched_destroy(s);
}

/* Ages are counted in 32 bits: two requests 2^31 insertions apart cannot be told apart. */
static void insertions_wrap(void **state) {
  (void)state;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  sd_insert(s, 1, NULL, 0);
  s->queue.next_ord = (uint32_t)INT32_MAX - 1;
  sd_insert(s, 2, NULL, 0);
  r.id = 3;
  REFUSED(pkv_sched_insert(s, &r, &err), PKV_E_LIMIT, "request 1 has seen 2147483648 insertions");
  assert_int_equal(pkv_sched_cancel(s, 1, &err), PKV_OK);
  sd_insert(s, 3, NULL, 0);
  sd_insert(s, 4, NULL, 0);
  for (uint64_t id = 2; id <= 4; id++)
    assert_int_equal(sd_admit_best(s), id);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  pkv_sched_destroy(s);
}

static void insert_ahead(pkv_sched *s, uint64_t id, uint64_t before) {
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.id = id;
  const pkv_status status =
      before == 0 ? pkv_sched_insert(s, &r, &err) : pkv_sched_insert_before(s, &r, before, &err);
  if (status != PKV_OK) fail_msg("%llu: %s", (unsigned long long)id, err.text);
}

static void ahead_of_another(void **state) {
  (void)state;
  int64_t now_ns = 1000;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = PKV_SCHED_PRIORITY;
  o.bypass_limit = 3;
  o.clock = sd_clock;
  o.clock_ctx = &now_ns;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  insert_ahead(s, 1, 0);
  now_ns = 2000;
  insert_ahead(s, 2, 0);
  insert_ahead(s, 3, 2);
  r.id = 4;
  r.arrival_ns = 1;
  assert_int_equal(pkv_sched_insert_before(s, &r, 1, &err), PKV_OK);
  r.id = 5;
  REFUSED(pkv_sched_insert_before(s, &r, 9, &err), PKV_E_STATE, "request 9 is not held");
  r.priority = 1;
  REFUSED(pkv_sched_insert_before(s, &r, 1, &err), PKV_E_INVALID,
          "request->priority is 1, request 1 has 0");
  r.id = 3;
  REFUSED(pkv_sched_insert_before(s, &r, 1, &err), PKV_E_STATE, "request 3 is held already");
  sd_admit(s, 2); /* the older three are passed over, and what comes among them counts so */
  insert_ahead(s, 6, 3);
  insert_ahead(s, 7, 2);
  pkv_sched_entry e[6];
  const uint64_t wanted[6] = {4, 1, 6, 3, 7, 2};
  const int64_t since[6] = {1000, 1000, 2000, 2000, 2000, 2000};
  assert_int_equal(pkv_sched_snapshot(e, 6, s), 6);
  for (int i = 0; i < 6; i++) {
    assert_int_equal(e[i].id, wanted[i]);
    assert_int_equal(e[i].waiting_since_ns, since[i]);
  }
  for (int i = 0; i < 5; i++) {
    assert_int_equal(sd_best(s).bypasses, i < 4);
    assert_int_equal(sd_admit_best(s), wanted[i]);
  }
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  pkv_sched_destroy(s);
}

/* The place of request i in the order of insertions that a pattern asks for. */
static int32_t arrival(int pattern, int32_t i, int32_t count) {
  if (pattern == 0) return (int32_t)((int64_t)i * 7919 % count); /* here and there */
  if (pattern == 1) return i == 0 ? count : i;                   /* all before the first one */
  return i == 0 ? 0 : count - i;                                 /* each before the one before */
}

/* Whatever the order in which requests come, few others get another number for each. */
static void moves_are_few(void **state) {
  (void)state;
  enum { N = 20011 };
  static uint64_t at[N + 1]; /* the request of each place */
  for (int pattern = 0; pattern < 3; pattern++) {
    for (int order = 0; order < 2; order++) {
      pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
      o.order = order == 0 ? PKV_SCHED_TREE : PKV_SCHED_CHT;
      o.max_requests = N;
      pkv_sched *s = sd_create(&o);
      memset(at, 0, sizeof at);
      for (int32_t i = 0; i < N; i++) {
        const int32_t place = arrival(pattern, i, N);
        int32_t behind = place + 1;
        while (behind <= N && at[behind] == 0)
          behind++;
        at[place] = (uint64_t)i + 1;
        insert_ahead(s, at[place], behind <= N ? at[behind] : 0);
      }
      if (s->queue.moved > 40ull * N)
        fail_msg("pattern %d: %llu moves for %d insertions", pattern,
                 (unsigned long long)s->queue.moved, N);
      assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
      for (int32_t place = 0; place <= N; place++)
        if (at[place] != 0) assert_int_equal(sd_admit_best(s), at[place]);
      pkv_sched_destroy(s);
    }
  }
}

/* Near the end of the numbers there may be no room: said, and nothing has changed. */
static void no_room_ahead(void **state) {
  (void)state;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  insert_ahead(s, 1, 0);
  insert_ahead(s, 2, 0);
  insert_ahead(s, 3, 1);
  s->queue.next_ord = (uint32_t)INT32_MAX - 20;
  insert_ahead(s, 4, 0);
  r.id = 5;
  REFUSED(pkv_sched_insert_before(s, &r, 3, &err), PKV_E_LIMIT, "it must leave first");
  assert_int_equal(pkv_sched_snapshot(NULL, 0, s), 4);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  assert_int_equal(pkv_sched_cancel(s, 3, &err), PKV_OK);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  for (uint64_t id = 1; id <= 4; id++)
    if (id != 3) assert_int_equal(sd_admit_best(s), id);
  pkv_sched_destroy(s);
}

/* Numbers go faster once one was put ahead of another: the limit is met by ordinary insertions too,
   and the old pace returns with an empty queue. */
static void gaps_are_counted(void **state) {
  (void)state;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  insert_ahead(s, 1, 0);
  insert_ahead(s, 2, 1);
  const uint32_t gap = s->queue.gap, oldest = s->queue.next_ord - 1 - gap;
  assert_true(gap > 1);
  s->queue.next_ord = oldest + (uint32_t)INT32_MAX - 1;
  insert_ahead(s, 3, 0);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  r.id = 4;
  char text[64];
  (void)snprintf(text, sizeof text, "request 2 has seen %u insertions", (1u << 31) / gap);
  REFUSED(pkv_sched_insert(s, &r, &err), PKV_E_LIMIT, text);
  REFUSED(pkv_sched_insert_before(s, &r, 3, &err), PKV_E_LIMIT, text);
  assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
  assert_int_equal(pkv_sched_cancel(s, 2, &err), PKV_OK);
  assert_int_equal(pkv_sched_cancel(s, 1, &err), PKV_OK);
  assert_int_equal(s->queue.gap, gap);
  assert_int_equal(pkv_sched_cancel(s, 3, &err), PKV_OK);
  assert_int_equal(s->queue.gap, 1);
  insert_ahead(s, 4, 0);
  insert_ahead(s, 5, 0);
  for (uint64_t id = 4; id <= 5; id++)
    assert_int_equal(sd_admit_best(s), id);
  pkv_sched_destroy(s);
}

/* Each request is passed over at most K times, whatever shares: counted here by hand. */
static void bypasses_are_bounded(void **state) {
  (void)state;
  enum { N = 120, K = 7 };
  int32_t *prompts[N];
  for (int i = 0; i < N; i++)
    prompts[i] = sd_prompt(i * 31 % 4, 256, i, 300);
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = (pkv_sched_order)order;
    o.bypass_limit = K;
    pkv_sched *s = sd_create(&o);
    int passed[N] = {0}, most = 0, reordered = 0;
    for (int i = 0; i < N; i++)
      sd_insert(s, (uint64_t)i, prompts[i], 300);
    for (int i = 0; i < N; i++) {
      const int id = (int)sd_admit_best(s);
      reordered += id != i;
      for (int j = 0; j < id; j++)
        if (pkv_sched_get_state(s, (uint64_t)j) == PKV_SCHED_WAITING && ++passed[j] > most)
          most = passed[j];
      if (i >= 8) { /* rows come free, so that the rankings are made anew */
        int32_t k = 0;
        while (pkv_sched_get_state(s, (uint64_t)k) != PKV_SCHED_ACTIVE)
          k++;
        sd_finish(s, (uint64_t)k);
      }
    }
    assert_true(most <= K);
    if (order == PKV_SCHED_TREE || order == PKV_SCHED_CHT) assert_true(reordered > 0);
    pkv_sched_destroy(s);
  }
  for (int i = 0; i < N; i++)
    free(prompts[i]);
}

/* ---- the page budget ---- */

static void page_budgets(void **state) {
  (void)state;
  int32_t *big = sd_prompt(1, 256, 0, 256), *shares = sd_prompt(1, 192, 1, 256),
          *small = sd_prompt(2, 32, 2, 32);
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.bypass_limit = 2;
  pkv_sched *s = sd_create(&o);
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  sd_insert(s, 1, big, 256);
  assert_int_equal(pkv_sched_best(&pick, s, 15, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_BLOCKED);
  assert_int_equal(pick.id, 1);
  assert_int_equal(pick.new_pages, 16);
  assert_int_equal(pkv_sched_best(&pick, s, 16, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_ADD);
  sd_admit(s, 1);
  /* 16 pages, 12 of them covered: 4 are enough (users' complaint 38). */
  sd_insert(s, 2, shares, 256);
  assert_int_equal(pkv_sched_best(&pick, s, 4, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_ADD);
  assert_int_equal(pick.new_pages, 4);
  assert_int_equal(pkv_sched_best(&pick, s, 3, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_BLOCKED);
  /* A small one goes by, but not more often than the bound; then nothing does. */
  for (uint64_t id = 10; id < 12; id++) {
    sd_insert(s, id, small, 32);
    assert_int_equal(pkv_sched_best(&pick, s, 3, &err), PKV_OK);
    assert_int_equal(pick.verdict, PKV_SCHED_ADD);
    assert_int_equal(pick.id, id);
    sd_admit(s, id);
    sd_finish(s, id);
  }
  sd_insert(s, 12, small, 32);
  assert_int_equal(pkv_sched_best(&pick, s, 3, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_BLOCKED);
  assert_int_equal(pick.id, 2);
  assert_int_equal(pick.reason, PKV_SCHED_BY_BYPASSES);
  /* Budget 0: only what needs no page. */
  assert_int_equal(pkv_sched_cancel(s, 2, &err), PKV_OK);
  assert_int_equal(pkv_sched_best(&pick, s, 0, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_BLOCKED);
  sd_insert(s, 13, big, 256);
  assert_int_equal(pkv_sched_best(&pick, s, 0, &err), PKV_OK);
  assert_int_equal(pick.verdict, PKV_SCHED_ADD);
  assert_int_equal(pick.id, 13);
  assert_int_equal(pick.new_pages, 0);
  pkv_sched_destroy(s);
  free(big);
  free(shares);
  free(small);
}

/* ---- the baselines ---- */

static void expect_order(pkv_sched *s, const int *ids, int count) {
  for (int i = 0; i < count; i++) {
    const uint64_t id = sd_admit_best(s);
    if (id != (uint64_t)ids[i]) fail_msg("place %d: request %d, expected %d", i, (int)id, ids[i]);
  }
}

/* Two groups, A of 3 and B of 5 waiting requests, and strangers; both groups are in the batch. */
static pkv_sched *two_groups(pkv_sched_options *o, int32_t **prompts) {
  static const int group[] = {1, 2, 3, 1, 2, 2, 4, 1, 2, 1, 2, 2};
  pkv_sched *s = sd_create(o);
  for (int i = 0; i < 12; i++) {
    /* B's later ones share more with each other. */
    prompts[i] = sd_prompt(group[i],
                           group[i] > 2              ? 0
                           : i >= 8 && group[i] == 2 ? 320
                                                     : 256,
                           i, 400);
    sd_insert(s, (uint64_t)i, prompts[i], 400);
  }
  sd_admit(s, 0);
  sd_admit(s, 1);
  /* Anything but an admission makes the ranking anew. */
  sd_insert(s, 99, NULL, 0);
  assert_int_equal(pkv_sched_cancel(s, 99, &err), PKV_OK);
  return s;
}

static void lpm_and_dfs_weight(void **state) {
  (void)state;
  static const int lpm[] = {3, 4, 5, 7, 8, 9, 10, 11, 2, 6};
  /* A: 3, 7, 9; B: 4, 5, 8, 10, 11; B is heavier. */
  static const int dfs[] = {4, 5, 8, 10, 11, 3, 7, 9, 2, 6};
  int32_t *prompts[12];
  for (int k = 0; k < 2; k++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = k == 0 ? PKV_SCHED_LPM : PKV_SCHED_DFS_WEIGHT;
    o.bypass_limit = -1;
    pkv_sched *s = two_groups(&o, prompts);
    expect_order(s, k == 0 ? lpm : dfs, 10);
    pkv_sched_destroy(s);
    for (int i = 0; i < 12; i++)
      free(prompts[i]);
  }
}

/* Above 128 waiting requests SGLang's lpm is fcfs. */
static void lpm_falls_back(void **state) {
  (void)state;
  int32_t *shares = sd_prompt(1, 128, 0, 128);
  for (int more = 0; more < 2; more++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = PKV_SCHED_LPM;
    o.lpm_fallback = 128;
    pkv_sched *s = sd_create(&o);
    sd_insert(s, 1, shares, 128);
    sd_admit(s, 1);
    for (uint64_t id = 2; id < 129 + (uint64_t)more; id++)
      sd_insert(s, id, NULL, 0);
    sd_insert(s, 1000, shares, 128);
    assert_int_equal(sd_stats(s).waiting, 128 + more);
    assert_int_equal(sd_best(s).id, more ? 2 : 1000);
    pkv_sched_destroy(s);
  }
  free(shares);
}

/* Of requests that share an uncovered prefix, one goes; the others wait until it covers it. */
static void lpm_in_batch(void **state) {
  (void)state;
  int32_t *prompts[6];
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = PKV_SCHED_LPM;
  o.lpm_in_batch_tokens = 32;
  pkv_sched *s = sd_create(&o);
  for (int i = 0; i < 6; i++) {
    prompts[i] = sd_prompt(i / 2, i < 4 ? 128 : 0, i, 160);
    sd_insert(s, (uint64_t)i, prompts[i], 160);
  }
  static const int ids[] = {0, 2, 4, 5, 1, 3};
  expect_order(s, ids, 6);
  pkv_sched_destroy(s);
  for (int i = 0; i < 6; i++)
    free(prompts[i]);
}

/* ---- digests ---- */

static void digests_are_cumulative(void **state) {
  (void)state;
  enum { N = 103, CHUNK = 10 };
  int32_t a[N], b[N];
  for (int i = 0; i < N; i++)
    a[i] = b[i] = i * 3;
  b[57]++;
  for (int k = 0; k < 2; k++) {
    const pkv_sched_hash hash = k == 0 ? PKV_SCHED_HASH_BULK : PKV_SCHED_HASH_TOKENWISE;
    uint64_t x[11], y[11], z[11];
    assert_int_equal(pkv_sched_digests(NULL, a, N, CHUNK, hash), 11);
    assert_int_equal(pkv_sched_digests(x, a, N, CHUNK, hash), 11);
    assert_int_equal(pkv_sched_digests(y, b, N, CHUNK, hash), 11);
    assert_int_equal(pkv_sched_digests(z, a, 95, CHUNK, hash), 10);
    for (int i = 0; i < 11; i++) {
      assert_int_equal(x[i] == y[i], i < 5);             /* all after the token that differs */
      if (i < 10) assert_int_equal(x[i] == z[i], i < 9); /* a partial chunk is another */
      for (int j = 0; j < i; j++)
        assert_true(x[i] != x[j]);
    }
    assert_int_equal(pkv_sched_digests(x, a, N, 0, hash), 0);
    assert_int_equal(pkv_sched_digests(x, a, 0, CHUNK, hash), 0);
  }
  /* XXH64 of "abcd" and "abcdefgh", as little-endian tokens. */
  static const int32_t text[] = {0x64636261, 0x68676665};
  uint64_t d[2];
  assert_int_equal(pkv_sched_digests(d, text, 2, 1, PKV_SCHED_HASH_TOKENWISE), 2);
  assert_true(d[0] == UINT64_C(0xde0327b0d25d92cc));
  assert_true(d[1] == UINT64_C(0x3ad351775b4634b7));
}

/* ---- memory ---- */

typedef struct torture_case {
  pkv_sched_order order;
  pkv_sched_policy policy;
} torture_case;

static pkv_status torture(void *ctx, const pkv_allocator *allocator) {
  const torture_case *c = ctx;
  static const int32_t tokens[300];
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.order = c->order;
  o.policy = c->policy;
  o.max_requests = 40;
  o.chunk_tokens = 2;
  o.allocator = allocator;
  pkv_sched *s = NULL;
  pkv_status status = pkv_sched_create(&s, &o, &err);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  for (int i = 0; i < 20 && status == PKV_OK; i++) {
    r.id = (uint64_t)i;
    r.tokens = tokens + i;
    r.prompt_tokens = 10 * i;
    r.deadline_ns = i == 10;
    const int32_t before = sd_stats(s).waiting;
    status = pkv_sched_insert(s, &r, &err);
    assert_int_equal(sd_stats(s).waiting, before + (status == PKV_OK)); /* all or nothing */
    assert_int_equal(pkv_sched_check(s, &err), PKV_OK);
    if (status == PKV_OK && i % 3 == 0) (void)sd_admit_best(s);
  }
  pkv_sched_destroy(s);
  return status;
}

static void allocations_fail(void **state) {
  (void)state;
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    torture_case c = {(pkv_sched_order)order, PKV_SCHED_UCB};
    print_message("  %s: %lld allocations\n", pkv_sched_order_name(c.order),
                  (long long)test_alloc_torture(torture, &c));
  }
}

/* After warm-up nothing is allocated, and no more memory is held than was taken. */
static void hot_path_allocates_nothing(void **state) {
  (void)state;
  enum { N = 200 };
  int32_t *prompts[N];
  for (int i = 0; i < N; i++)
    prompts[i] = sd_prompt(i % 5, 256, i, 320);
  for (int order = 0; order < PKV_SCHED_ORDERS; order++) {
    test_alloc ta;
    test_alloc_init(&ta);
    const pkv_allocator a = test_alloc_allocator(&ta);
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    o.order = (pkv_sched_order)order;
    o.policy = PKV_SCHED_Q_LEARNING;
    o.allocator = &a;
    pkv_sched *s = sd_create(&o);
    int64_t calls = 0;
    for (int step = 0; step < 6 * N; step++) {
      if (step == 2 * N) calls = test_alloc_calls(&ta);
      if (pkv_sched_get_state(s, (uint64_t)(step % N)) == PKV_SCHED_UNKNOWN)
        sd_insert(s, (uint64_t)(step % N), prompts[step % N], 320);
      if (step % 2) sd_finish(s, sd_admit_best(s));
      assert_int_equal(pkv_sched_reward(s, 4, 0.01, &err), PKV_OK);
    }
    if (test_alloc_calls(&ta) != calls)
      fail_msg("%s: %lld calls of the allocator", pkv_sched_order_name(o.order),
               (long long)(test_alloc_calls(&ta) - calls));
    assert_int_equal(sd_stats(s).memory_bytes, (int64_t)ta.live_bytes);
    pkv_sched_destroy(s);
    test_alloc_finish(&ta);
  }
  for (int i = 0; i < N; i++)
    free(prompts[i]);
}

static void bytes_a_request(void **state) {
  (void)state;
  enum { N = 4096 };
  static uint64_t hashes[N][N / 16];
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.max_requests = N;
  o.chunk_tokens = 1;
  pkv_sched *s = sd_create(&o);
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.prompt_tokens = r.hash_count = N / 16;
  for (int i = 0; i < N; i++) { /* prompts that branch everywhere: as many nodes as there can be */
    for (int k = 0; k < N / 16; k++)
      hashes[i][k] = k < i / 16 ? 1 : (uint64_t)i + 2;
    for (int k = 0; k < 8; k++)
      hashes[i][i / 16 + k < N / 16 ? i / 16 + k : N / 16 - 1] = (uint64_t)(i % 16 >> (7 - k)) + 3;
    r.id = (uint64_t)i;
    r.hashes = hashes[i];
    assert_int_equal(pkv_sched_insert(s, &r, &err), PKV_OK);
  }
  const pkv_sched_stats n = sd_stats(s);
  print_message("  %d nodes, %.0f bytes a request in use, %.0f taken\n", n.tree_nodes,
                (double)n.used_bytes / N, (double)n.memory_bytes / N);
  assert_true(n.tree_nodes > N / 2);
  assert_true(n.used_bytes <= 320 * N);
  pkv_sched_destroy(s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(options_are_checked),    cmocka_unit_test(requests_are_checked),
      cmocka_unit_test(priorities_are_limited), cmocka_unit_test(empty_and_single),
      cmocka_unit_test(cancel_everything),      cmocka_unit_test(clock_going_backwards),
      cmocka_unit_test(deadlines_move_up),      cmocka_unit_test(bypasses_are_bounded),
      cmocka_unit_test(page_budgets),           cmocka_unit_test(lpm_and_dfs_weight),
      cmocka_unit_test(lpm_falls_back),         cmocka_unit_test(lpm_in_batch),
      cmocka_unit_test(digests_are_cumulative), cmocka_unit_test(insertions_wrap),
      cmocka_unit_test(ahead_of_another),       cmocka_unit_test(moves_are_few),
      cmocka_unit_test(no_room_ahead),          cmocka_unit_test(gaps_are_counted),
      cmocka_unit_test(allocations_fail),       cmocka_unit_test(hot_path_allocates_nothing),
      cmocka_unit_test(bytes_a_request),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
