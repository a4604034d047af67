/* SPDX-License-Identifier: Apache-2.0 */
/* Stop policies against their formulas, learners, and learners' tables in files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/rng.h"
#include "sched/sched_parts.h"
#include "support/sched_drive.h"

static pkv_error err;

enum { CHUNK = 64, PREFIX = 10 * CHUNK, LENGTH = PREFIX + CHUNK };

/*
 * A batch of `rows` that share 10 chunks and a candidate that shares `keeps` of them, with `crowd`
 * more like it behind. Ids: rows 0, 1, ...; the candidate 100; the crowd from 200 on.
 */
typedef struct scene {
  pkv_sched *s;
  int32_t *prompts[64];
  int count;
  int32_t *candidate;
} scene;

static void scene_insert(scene *c, uint64_t id, int32_t keeps) {
  int32_t *p = sd_prompt(1, keeps * CHUNK, (int32_t)id, LENGTH);
  c->prompts[c->count++] = p;
  if (id == 100) c->candidate = p;
  sd_insert(c->s, id, p, LENGTH);
}

static void scene_begin(scene *c, const pkv_sched_options *o, int rows, int32_t keeps, int crowd) {
  memset(c, 0, sizeof *c);
  c->s = sd_create(o);
  for (int i = 0; i < rows; i++) {
    scene_insert(c, (uint64_t)i, 10);
    sd_admit(c->s, (uint64_t)i);
  }
  scene_insert(c, 100, keeps);
  for (int i = 0; i < crowd; i++) { /* the same prefix as the candidate's, and some more */
    int32_t *p = sd_prompt(1, keeps * CHUNK, 1000 + i, LENGTH);
    c->prompts[c->count++] = p;
    sd_insert(c->s, 200 + (uint64_t)i, p, LENGTH);
  }
}

static void scene_end(scene *c) {
  pkv_sched_destroy(c->s);
  for (int i = 0; i < c->count; i++)
    free(c->prompts[i]);
}

static pkv_sched_options with_policy(pkv_sched_policy policy) {
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  o.policy = policy;
  return o;
}

static int verdict(const pkv_sched_options *o, int rows, int32_t keeps, int crowd) {
  scene c;
  scene_begin(&c, o, rows, keeps, crowd);
  const pkv_sched_pick pick = sd_best(c.s);
  assert_int_equal(pick.id, 100);
  assert_int_equal(pick.forced, 0);
  assert_int_equal(pick.shared_tokens, keeps * CHUNK);
  assert_int_equal(pick.chain_before, 10);
  assert_int_equal(pick.chain_after, keeps);
  assert_int_equal(pick.waiting_sharers, crowd);
  scene_end(&c);
  return (int)pick.verdict;
}

/* ---- the static ones ---- */

static void static_new_tokens(void **state) {
  (void)state;
  pkv_sched_options o = with_policy(PKV_SCHED_STATIC);
  o.static_new_tokens = 3 * CHUNK; /* 11 - keeps chunks are new */
  assert_int_equal(verdict(&o, 3, 8, 0), PKV_SCHED_ADD);
  assert_int_equal(verdict(&o, 3, 7, 0), PKV_SCHED_STOP);
  o.static_new_tokens = 0; /* 500 */
  assert_int_equal(verdict(&o, 3, 4, 0), PKV_SCHED_ADD);
  assert_int_equal(verdict(&o, 3, 3, 0), PKV_SCHED_STOP);
}

static void static_chain(void **state) {
  (void)state;
  pkv_sched_options o = with_policy(PKV_SCHED_STATIC_CHAIN);
  assert_int_equal(verdict(&o, 3, 5, 0), PKV_SCHED_ADD);   /* loses 5 */
  assert_int_equal(verdict(&o, 3, 4, 0), PKV_SCHED_STOP);  /* 6 */
  assert_int_equal(verdict(&o, 3, 4, 9), PKV_SCHED_STOP);  /* not crowded */
  assert_int_equal(verdict(&o, 3, 3, 10), PKV_SCHED_ADD);  /* 7, crowded */
  assert_int_equal(verdict(&o, 3, 2, 10), PKV_SCHED_STOP); /* 8 */
}

/* Each add within the loss raises the floor, up to its limit; below the floor all is added. */
static void static_chain_floor(void **state) {
  (void)state;
  for (int sticky = 0; sticky < 2; sticky++) {
    pkv_sched_options o = with_policy(PKV_SCHED_STATIC_CHAIN);
    o.floor_max = 5;
    o.faults = sticky ? PKV_SCHED_FAULT_STICKY_FLOOR : 0;
    scene c;
    scene_begin(&c, &o, 2, 1, 0); /* the candidate loses 9 chunks */
    assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_STOP);
    for (uint64_t id = 2; id < 8; id++) {
      scene_insert(&c, id, 10);
      assert_int_equal(sd_admit_best(c.s), id); /* within the loss */
    }
    assert_int_equal(c.s->floor, 5);
    assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_STOP); /* 8 rows */
    for (uint64_t id = 0; id < 4; id++)
      sd_finish(c.s, id);
    assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_ADD); /* 4 rows: below the floor */
    for (uint64_t id = 4; id < 8; id++)
      sd_finish(c.s, id);
    assert_int_equal(c.s->floor, sticky ? 5 : 1); /* the published one never falls */
    scene_end(&c);
  }
}

/*
 * 3 rows that share 640 tokens, 64 more each: 2112 tokens, 832 different, 640 common. The candidate
 * has 704, of which it shares 64 * keeps, and `crowd` peers want the rest of them too. With the
 * costs base + k * rows * common, now and at half of the rows (2 of 3, 2 of 4, 1 of 1), a lone
 * candidate costs 2 * base apart from the rest, and k * 640 * (4 + 2 - 3 - 2) together.
 */
static double crossed_cost(void *ctx, const pkv_sched_batch *b) {
  const double *k = ctx;
  return k[0] + k[1] * b->rows * (double)b->common_tokens;
}

static void marginal(void **state) {
  (void)state;
  double k[2] = {319, 1};
  pkv_sched_options o = with_policy(PKV_SCHED_MARGINAL);
  o.cost = crossed_cost;
  o.cost_ctx = k;
  assert_int_equal(verdict(&o, 3, 6, 0), PKV_SCHED_STOP); /* 640 more, against 638 */
  k[0] = 320;
  assert_int_equal(verdict(&o, 3, 6, 0), PKV_SCHED_ADD);
  assert_int_equal(verdict(&o, 3, 6, 5), PKV_SCHED_ADD); /* what they share is read already */
  k[0] = (double)NAN;                                    /* no cost is no cost */
  assert_int_equal(verdict(&o, 3, 5, 0), PKV_SCHED_ADD);
  o.cost = NULL; /* the built-in one never gains by waiting */
  assert_int_equal(verdict(&o, 3, 0, 0), PKV_SCHED_ADD);
  assert_int_equal(verdict(&o, 3, 6, 9), PKV_SCHED_ADD);
}

static pkv_sched_pick pick_at(pkv_sched *s, double *base, double value, int64_t budget) {
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  *base = value;
  assert_int_equal(pkv_sched_best(&pick, s, budget, &err), PKV_OK);
  return pick;
}

/*
 * Peers are those who want the first chunk that the batch does not hold. The pick, 640 tokens, of
 * them 256 new, and one peer: 5 rows and 3 at half, 640 + 256 common, 8 * 896, against 5 * 640 and
 * (2 + 1) * 640 of their own, and two steps more.
 */
static void marginal_counts_peers(void **state) {
  (void)state;
  static const pkv_sched_order orders[] = {PKV_SCHED_TREE, PKV_SCHED_CHT, PKV_SCHED_FCFS};
  for (int i = 0; i < 3; i++) {
    double k[2] = {0, 1};
    pkv_sched_options o = with_policy(PKV_SCHED_MARGINAL);
    o.order = orders[i];
    o.cost = crossed_cost;
    o.cost_ctx = k;
    scene c;
    scene_begin(&c, &o, 3, 6, 3);                                   /* the crowd goes other ways */
    int32_t *prefix = sd_prompt(1, 6 * CHUNK, 100, LENGTH - CHUNK); /* of the candidate's prompt */
    sd_insert(c.s, 300, prefix, LENGTH - CHUNK);
    const bool fcfs = o.order == PKV_SCHED_FCFS;
    pkv_sched_pick pick = pick_at(c.s, k, fcfs ? 319 : 1023, -1);
    assert_int_equal(pick.waiting_peers, 1);
    assert_int_equal(pick.id, fcfs ? 100 : 300);
    assert_int_equal(pick.verdict, PKV_SCHED_STOP);
    /* fcfs would not take the peer next, so that it does not count */
    assert_int_equal(pick_at(c.s, k, fcfs ? 320 : 1024, -1).verdict, PKV_SCHED_ADD);
    if (!fcfs) { /* 16 pages are new, a peer takes one at least */
      assert_int_equal(pick.new_pages, 16);
      assert_int_equal(pick_at(c.s, k, 1023, 17).verdict, PKV_SCHED_STOP);
      assert_int_equal(pick_at(c.s, k, 320, 16).verdict, PKV_SCHED_ADD);
      assert_int_equal(pick_at(c.s, k, 319, 16).verdict, PKV_SCHED_STOP);
      c.s->o.max_rows = 4;
      assert_int_equal(pick_at(c.s, k, 320, -1).verdict, PKV_SCHED_ADD);
      c.s->o.max_rows = 5;
      assert_int_equal(pick_at(c.s, k, 1023, -1).verdict, PKV_SCHED_STOP);
    }
    scene_end(&c);
    free(prefix);
  }
}

/* ---- no choice ---- */

/* Whatever a learner has come to believe: stopping is worth everything. */
static void teach_to_stop(pkv_sched *s) {
  if (s->learner == NULL) return;
  s->learner->rewards = 1e6;
  s->learner->reward_sum = 1e9;
  for (int i = 0; i < PKV_SCHED_STATES; i++) {
    s->learner->arms[i][PKV_SCHED_ADD] = (pkv_sched_arm){1e6, 0};
    s->learner->arms[i][PKV_SCHED_STOP] = (pkv_sched_arm){1e6, 1e12};
  }
}

/* Without sharing every policy admits what fcfs admits, when fcfs does; learners too, taught or
   not: so they are never slower than fcfs there, by any per cent. */
static void without_sharing_as_fcfs(void **state) {
  (void)state;
  enum { N = 300, ROWS = 16 };
  int32_t *prompts[N], lengths[N];
  uint64_t fcfs[N];
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  for (int i = 0; i < N; i++) {
    lengths[i] = 1 + (int32_t)pkv_rng_below(&rng, 900);
    prompts[i] = sd_prompt(0, 0, i, lengths[i]);
  }
  for (int order = 0; order < PKV_SCHED_ORDERS; order++)
    for (int policy = 0; policy < PKV_SCHED_POLICIES; policy++) {
      pkv_sched_options o = with_policy((pkv_sched_policy)policy);
      o.order = order == 0 ? PKV_SCHED_FCFS : order == 1 ? PKV_SCHED_TREE : (pkv_sched_order)order;
      pkv_sched *s = sd_create(&o);
      if (order % 2) teach_to_stop(s);
      uint64_t admitted[N];
      int n = 0, inserted = 0;
      while (n < N) {
        while (inserted < N && inserted < n + 60) {
          sd_insert(s, (uint64_t)inserted, prompts[inserted], lengths[inserted]);
          inserted++;
        }
        while (n < N && sd_stats(s).active < ROWS) {
          const pkv_sched_pick pick = sd_best(s);
          if (pick.verdict != PKV_SCHED_ADD)
            fail_msg("%s, %s: verdict %d after %d", pkv_sched_order_name(o.order),
                     pkv_sched_policy_name(o.policy), pick.verdict, n);
          sd_admit(s, pick.id);
          admitted[n++] = pick.id;
        }
        assert_int_equal(pkv_sched_reward(s, ROWS, 0.01, &err), PKV_OK);
        sd_finish(s, admitted[n - ROWS + (int)pkv_rng_below(&rng, 1)]);
      }
      if (order == 0 && policy == 0) memcpy(fcfs, admitted, sizeof fcfs);
      assert_memory_equal(fcfs, admitted, sizeof fcfs);
      pkv_sched_destroy(s);
    }
  for (int i = 0; i < N; i++)
    free(prompts[i]);
}

/* ---- learners ---- */

/* One round: what it says about the candidate is done, and rewarded. */
static pkv_sched_verdict round_of(scene *c, double add_reward, double stop_reward) {
  const pkv_sched_pick pick = sd_best(c->s);
  assert_int_equal(pick.id, 100);
  assert_int_equal(pick.forced, 0);
  if (pick.verdict == PKV_SCHED_ADD) sd_admit(c->s, 100);
  const double reward = pick.verdict == PKV_SCHED_ADD ? add_reward : stop_reward;
  assert_int_equal(pkv_sched_reward(c->s, 8, 8 / reward, &err), PKV_OK);
  if (pick.verdict == PKV_SCHED_ADD) {
    sd_finish(c->s, 100);
    sd_insert(c->s, 100, c->candidate, LENGTH);
  }
  return pick.verdict;
}

static void ucb_follows_its_formula(void **state) {
  (void)state;
  pkv_sched_options o = with_policy(PKV_SCHED_UCB);
  o.prior_weight = -1;
  scene c;
  scene_begin(&c, &o, 3, 7, 0);
  double n[2] = {0, 0}, sum[2] = {0, 0};
  int stops = 0;
  for (int i = 0; i < 400; i++) {
    double score[2];
    for (int a = 0; a < 2; a++)
      score[a] = n[a] == 0 ? INFINITY : sum[a] / n[a] + 200 * sqrt(log(n[0] + n[1] + 1) / n[a]);
    const int expected = score[1] > score[0];
    const double reward[2] = {900 + 10 * (i % 5), 1000 - 10 * (i % 3)};
    const int got = (int)round_of(&c, reward[0], reward[1]);
    if (got != expected) fail_msg("round %d: %d, expected %d", i, got, expected);
    sum[got] += 8 / (8 / reward[got]);
    n[got]++;
    stops += got;
  }
  assert_in_range(stops, 201, 399); /* the better one more often, the other not never */
  scene_end(&c);
}

static void ucb_begins_with_the_prior(void **state) {
  (void)state;
  pkv_sched_options o = with_policy(PKV_SCHED_UCB);
  o.ucb_bonus = 1e-9; /* the means alone */
  scene c;
  scene_begin(&c, &o, 12, 5, 0); /* a loss of 5 with nobody waiting: 0.75 against 0.925 */
  assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_ADD); /* no reward yet: a tie */
  assert_int_equal(pkv_sched_reward(c.s, 8, 0.1, &err), PKV_OK);
  assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_STOP);
  scene_end(&c);
  scene_begin(&c, &o, 2, 9, 0); /* a loss of 1, two rows: 0.95 against 0.7 */
  assert_int_equal(pkv_sched_reward(c.s, 8, 0.1, &err), PKV_OK);
  assert_int_equal(sd_best(c.s).verdict, PKV_SCHED_ADD);
  scene_end(&c);
}

static void q_learning_learns(void **state) {
  (void)state;
  for (int better = 0; better < 2; better++) {
    pkv_sched_options o = with_policy(PKV_SCHED_Q_LEARNING);
    o.seed = 3;
    scene c;
    scene_begin(&c, &o, 6, 6, 0);
    int right = 0;
    for (int i = 0; i < 1200; i++) {
      const int v = (int)round_of(&c, better ? 80 : 120, better ? 120 : 80);
      if (i >= 800) right += v == better;
    }
    print_message("  better to %s: %d of 400 right\n", better ? "stop" : "add", right);
    assert_true(right >= 360);
    scene_end(&c);
  }
}

/* The same calls give the same verdicts; asking twice changes nothing. */
static void q_learning_is_repeatable(void **state) {
  (void)state;
  static pkv_sched_verdict first[300];
  for (int run = 0; run < 3; run++) {
    pkv_sched_options o = with_policy(PKV_SCHED_Q_LEARNING);
    o.q_explore = 0.5;
    o.seed = run < 2 ? 11 : 12;
    scene c;
    scene_begin(&c, &o, 6, 6, 0);
    int same = 0;
    for (int i = 0; i < 300; i++) {
      for (int k = 0; k < (run == 1 ? 3 : 0); k++)
        (void)sd_best(c.s);
      const pkv_sched_verdict v = round_of(&c, 100, 100);
      same += v == first[i];
      if (run == 0) first[i] = v;
    }
    if (run == 1) assert_int_equal(same, 300);
    if (run == 2) assert_true(same < 250); /* another seed explores elsewhere */
    scene_end(&c);
  }
}

/* ---- files ---- */

static char logged[512];

static void log_line(void *user, pkv_log_level level, const char *room, const char *text) {
  (void)user;
  if (level == PKV_LOG_WARN) (void)snprintf(logged, sizeof logged, "%s: %s", room, text);
}

static void file_path(char path[64]) {
  (void)snprintf(path, 64, "/tmp/pkv_test_learner_%ld", (long)getpid());
}

static size_t read_all(const char *path, unsigned char *bytes, size_t most) {
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  const size_t n = fread(bytes, 1, most, f);
  (void)fclose(f);
  return n;
}

static void write_all(const char *path, const unsigned char *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, n, f), n);
  (void)fclose(f);
}

static void tables_come_back(void **state) {
  (void)state;
  char path[64];
  file_path(path);
  for (int k = 0; k < 2; k++) {
    pkv_sched_options o = with_policy(k == 0 ? PKV_SCHED_UCB : PKV_SCHED_Q_LEARNING);
    scene a, b;
    scene_begin(&a, &o, 3, 7, 0);
    for (int i = 0; i < 50; i++)
      (void)round_of(&a, 100 + i, 120);
    assert_int_equal(pkv_sched_save_learner(a.s, path, &err), PKV_OK);
    scene_begin(&b, &o, 3, 7, 0);
    assert_int_equal(pkv_sched_load_learner(b.s, path, &err), PKV_OK);
    assert_memory_equal(a.s->learner->arms, b.s->learner->arms, sizeof a.s->learner->arms);
    assert_true(a.s->learner->reward_sum == b.s->learner->reward_sum);
    assert_true(b.s->learner->rewards == 50);
    scene_end(&a);
    scene_end(&b);
  }
  (void)remove(path);
}

/* The checksum of a table that was changed on purpose. */
static void seal(unsigned char *bytes, size_t n) {
  const uint64_t sum = pkv_hash_bytes(bytes, n - 8, 0);
  for (int i = 0; i < 8; i++)
    bytes[n - 8 + (size_t)i] = (unsigned char)(sum >> (8 * i));
}

static void refused(pkv_sched *s, const char *path, pkv_status status, const char *words) {
  static pkv_sched_learner before;
  before = *s->learner;
  memset(&err, 0, sizeof err);
  logged[0] = '\0';
  const pkv_status got = pkv_sched_load_learner(s, path, &err);
  if (got != status || strstr(err.text, words) == NULL)
    fail_msg("%s (%s), expected %s with \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(status), words);
  assert_memory_equal(&before, s->learner, sizeof before); /* the table it had */
  if (strstr(logged, "keeps the table it has") == NULL) fail_msg("the log says \"%s\"", logged);
}

static void damaged_tables_are_refused(void **state) {
  (void)state;
  static unsigned char good[65536], bad[65536];
  char path[64];
  file_path(path);
  pkv_sched_options o = with_policy(PKV_SCHED_UCB);
  pkv_sched *s = sd_create(&o);
  assert_int_equal(pkv_sched_reward(s, 3, 0.5, &err), PKV_OK);
  assert_int_equal(pkv_sched_save_learner(s, path, &err), PKV_OK);
  const size_t n = read_all(path, good, sizeof good);
  pkv_log_set(log_line, NULL);
  pkv_rng rng;
  pkv_rng_init(&rng, 1);
  for (int i = 0; i < 300; i++) { /* one bit anywhere, the head more often */
    memcpy(bad, good, n);
    bad[pkv_rng_below(&rng, i < 100 ? 48 : n)] ^= (unsigned char)(1u << pkv_rng_below(&rng, 8));
    write_all(path, bad, n);
    refused(s, path, PKV_E_FORMAT, path);
  }
  for (size_t size = 0; size < n; size += size < 60 ? 1 : 4999) { /* cut short */
    write_all(path, good, size);
    refused(s, path, PKV_E_FORMAT, "no learner's table");
  }
  write_all(path, bad, sizeof bad); /* too long */
  refused(s, path, PKV_E_FORMAT, "no learner's table");
  static const struct {
    size_t at;
    unsigned char value;
    const char *words;
  } cases[] = {{8, 2, "version 2"},
               {12, PKV_SCHED_Q_LEARNING, "of policy q-learning, not ucb"},
               {12, 77, "of policy ?"},
               {16, 1, "states"},
               {40 + 7, 0x7f, "is not possible"},  /* visits: a NaN, or huge */
               {40 + 7, 0xbf, "is not possible"}}; /* negative */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    memcpy(bad, good, n);
    bad[cases[i].at] = cases[i].value;
    if (cases[i].value == 0x7f || cases[i].value == 0xbf) bad[cases[i].at - 1] = 0xf0;
    seal(bad, n);
    write_all(path, bad, n);
    refused(s, path, PKV_E_FORMAT, cases[i].words);
  }
  (void)remove(path);
  refused(s, path, PKV_E_IO, path);
  pkv_log_set(NULL, NULL);
  /* It is the shipped prior that is still used, and the file can be written again. */
  assert_int_equal(pkv_sched_save_learner(s, path, &err), PKV_OK);
  assert_int_equal(read_all(path, bad, sizeof bad), n);
  assert_memory_equal(good, bad, n);
  (void)remove(path);
  assert_int_equal(pkv_sched_save_learner(s, "/nonexistent/x", &err), PKV_E_IO);
  pkv_sched_destroy(s);
  o.policy = PKV_SCHED_MARGINAL;
  s = sd_create(&o);
  assert_int_equal(pkv_sched_save_learner(s, path, &err), PKV_E_UNSUPPORTED);
  assert_int_equal(pkv_sched_load_learner(s, path, &err), PKV_E_UNSUPPORTED);
  pkv_sched_destroy(s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(static_new_tokens),       cmocka_unit_test(static_chain),
      cmocka_unit_test(static_chain_floor),      cmocka_unit_test(marginal),
      cmocka_unit_test(marginal_counts_peers),   cmocka_unit_test(without_sharing_as_fcfs),
      cmocka_unit_test(ucb_follows_its_formula), cmocka_unit_test(ucb_begins_with_the_prior),
      cmocka_unit_test(q_learning_learns),       cmocka_unit_test(q_learning_is_repeatable),
      cmocka_unit_test(tables_come_back),        cmocka_unit_test(damaged_tables_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
