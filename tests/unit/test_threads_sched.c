/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A scheduler behind a queue, as an engine uses one: clients on threads of their own leave requests
 * and cancellations in a mailbox, one thread owns the handle and drives it. For ThreadSanitizer,
 * and that every request comes to exactly one end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/sched_drive.h"

enum { CLIENTS = 4, EACH = 400, ROOM = 64, ROWS = 12, LENGTH = 512, SHARED = 384 };

typedef enum note_kind { NOTE_REQUEST, NOTE_CANCEL, NOTE_DONE } note_kind;

typedef struct note {
  note_kind kind;
  uint64_t id;
  int32_t *tokens; /* the owner's from then on */
} note;

typedef struct mailbox {
  pthread_mutex_t lock;
  pthread_cond_t news, room;
  note notes[ROOM];
  int first, count;
} mailbox;

typedef struct client {
  mailbox *box;
  int number;
  int sent, cancels;
} client;

static void leave(mailbox *box, note n) {
  (void)pthread_mutex_lock(&box->lock);
  while (box->count == ROOM)
    (void)pthread_cond_wait(&box->room, &box->lock);
  box->notes[(box->first + box->count++) % ROOM] = n;
  (void)pthread_cond_signal(&box->news);
  (void)pthread_mutex_unlock(&box->lock);
}

/* False: there is none and `wait` is not set. */
static bool fetch(mailbox *box, note *out, bool wait) {
  (void)pthread_mutex_lock(&box->lock);
  while (box->count == 0 && wait)
    (void)pthread_cond_wait(&box->news, &box->lock);
  const bool found = box->count > 0;
  if (found) {
    *out = box->notes[box->first];
    box->first = (box->first + 1) % ROOM;
    box->count--;
    (void)pthread_cond_signal(&box->room);
  }
  (void)pthread_mutex_unlock(&box->lock);
  return found;
}

static void *client_main(void *arg) {
  client *c = arg;
  pkv_rng rng;
  pkv_rng_init(&rng, 40 + (uint64_t)c->number);
  for (int i = 0; i < EACH; i++) {
    const uint64_t id = (uint64_t)(c->number * EACH + i);
    leave(c->box,
          (note){NOTE_REQUEST, id, sd_prompt(1 + c->number % 2, SHARED, (int32_t)id, LENGTH)});
    c->sent++;
    if (pkv_rng_below(&rng, 5) == 0) { /* one of its own, perhaps long gone */
      leave(c->box, (note){NOTE_CANCEL, id - pkv_rng_below(&rng, (uint64_t)i + 1), NULL});
      c->cancels++;
    }
  }
  leave(c->box, (note){NOTE_DONE, 0, NULL});
  return NULL;
}

typedef struct owner {
  pkv_sched *s;
  int32_t **tokens; /* by id */
  uint64_t batch[ROWS];
  int rows, clients, finished, cancelled;
} owner;

static void end(owner *o, uint64_t id) {
  free(o->tokens[id]);
  o->tokens[id] = NULL;
}

static void take_in(owner *o, const note *n) {
  pkv_error err;
  if (n->kind == NOTE_DONE) {
    o->clients--;
  } else if (n->kind == NOTE_REQUEST) {
    o->tokens[n->id] = n->tokens;
    sd_insert(o->s, n->id, n->tokens, LENGTH);
  } else if (pkv_sched_cancel(o->s, n->id, &err) == PKV_OK) {
    for (int i = 0; i < o->rows; i++)
      if (o->batch[i] == n->id) o->batch[i] = o->batch[--o->rows];
    end(o, n->id);
    o->cancelled++;
  }
}

static void step(owner *o, pkv_rng *rng) {
  pkv_error err;
  for (int i = o->rows - 1; i >= 0; i--)
    if (pkv_rng_below(rng, 3) == 0) {
      sd_finish(o->s, o->batch[i]);
      end(o, o->batch[i]);
      o->batch[i] = o->batch[--o->rows];
      o->finished++;
    }
  while (o->rows < ROWS) {
    const pkv_sched_pick pick = sd_best(o->s);
    if (pick.verdict != PKV_SCHED_ADD) break;
    sd_admit(o->s, pick.id);
    o->batch[o->rows++] = pick.id;
  }
  if (o->rows > 0) assert_int_equal(pkv_sched_reward(o->s, o->rows, 0.001, &err), PKV_OK);
}

static void drive(pkv_sched_order order, pkv_sched_policy policy) {
  mailbox box = {.lock = PTHREAD_MUTEX_INITIALIZER,
                 .news = PTHREAD_COND_INITIALIZER,
                 .room = PTHREAD_COND_INITIALIZER};
  client clients[CLIENTS];
  pthread_t threads[CLIENTS];
  pkv_sched_options options = PKV_SCHED_OPTIONS_INIT;
  options.order = order;
  options.policy = policy;
  owner o = {.s = sd_create(&options), .clients = CLIENTS};
  o.tokens = calloc(CLIENTS * EACH, sizeof *o.tokens);
  assert_non_null(o.tokens);
  for (int i = 0; i < CLIENTS; i++) {
    clients[i] = (client){&box, i, 0, 0};
    assert_int_equal(pthread_create(&threads[i], NULL, client_main, &clients[i]), 0);
  }
  pkv_rng rng;
  pkv_rng_init(&rng, 9);
  while (o.clients > 0 || o.rows > 0 || sd_stats(o.s).waiting > 0) {
    note n;
    const bool idle = o.clients > 0 && o.rows == 0 && sd_stats(o.s).waiting == 0;
    if (fetch(&box, &n, idle)) take_in(&o, &n);
    step(&o, &rng);
  }
  int sent = 0;
  for (int i = 0; i < CLIENTS; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    sent += clients[i].sent;
  }
  const pkv_sched_stats stats = sd_stats(o.s);
  if (o.finished + o.cancelled != sent || stats.inserted != sent || stats.finished != o.finished ||
      stats.cancelled != o.cancelled || stats.active != 0)
    fail_msg("%d sent, %d finished, %d cancelled; stats: %lld, %lld, %lld", sent, o.finished,
             o.cancelled, (long long)stats.inserted, (long long)stats.finished,
             (long long)stats.cancelled);
  assert_true(o.cancelled > 0 && o.finished > sent / 2);
  for (int i = 0; i < CLIENTS * EACH; i++)
    assert_null(o.tokens[i]);
  free(o.tokens);
  pkv_sched_destroy(o.s);
}

static void every_order(void **state) {
  (void)state;
  for (int order = 0; order < PKV_SCHED_ORDERS; order++)
    drive((pkv_sched_order)order, (pkv_sched_policy)(order % PKV_SCHED_POLICIES));
}

/* Each thread a handle of its own: nothing is shared behind the interface. */
static void *alone(void *arg) {
  pkv_sched_options options = PKV_SCHED_OPTIONS_INIT;
  options.policy = PKV_SCHED_UCB;
  pkv_sched *s = sd_create(&options);
  int32_t *prompts[50];
  for (int i = 0; i < 50; i++) {
    prompts[i] = sd_prompt(1, SHARED, i, LENGTH);
    sd_insert(s, (uint64_t)i, prompts[i], LENGTH);
  }
  for (int i = 0; i < 50; i++) {
    pkv_sched_pick pick = sd_best(s);
    sd_admit(s, pick.id);
    *(uint64_t *)arg = *(uint64_t *)arg * 31 + pick.id;
  }
  pkv_sched_destroy(s);
  for (int i = 0; i < 50; i++)
    free(prompts[i]);
  return NULL;
}

static void handles_side_by_side(void **state) {
  (void)state;
  uint64_t sums[CLIENTS] = {0};
  pthread_t threads[CLIENTS];
  for (int i = 0; i < CLIENTS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, alone, &sums[i]), 0);
  for (int i = 0; i < CLIENTS; i++)
    assert_int_equal(pthread_join(threads[i], NULL), 0);
  for (int i = 1; i < CLIENTS; i++)
    assert_int_equal(sums[i], sums[0]);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_order),
                                     cmocka_unit_test(handles_side_by_side)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
