/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's thread as the HTTP thread sees it: what is new, who is refused, who leaves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/engine_loop.h"
#include "support/engine_drive.h"
#include "support/tiny_model.h"

static tiny_model tiny;
static pkv_loop *loop;
static int wake_fd;

static pkv_status give_model(void *user, pkv_model **out, pkv_error *err) {
  (void)user;
  (void)err;
  *out = tiny.model;
  return PKV_OK;
}

static void sleep_until_woken(void) {
  uint64_t count = 0;
  assert_int_equal(read(wake_fd, &count, sizeof count), sizeof count);
}

static int open_loop(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  pkv_loop_options o = {give_model, NULL, PKV_ENGINE_OPTIONS_INIT, 0};
  pkv_error err = {PKV_OK, "", ""};
  options.eos = 7;
  tiny_model_open(&tiny, &options);
  o.wake_fd = wake_fd = eventfd(0, EFD_CLOEXEC);
  o.engine.threads = 1;
  o.engine.max_requests = 100;
  o.engine.max_rows = 4;
  o.engine.cache_tokens = 2048;
  drive_ok(pkv_loop_create(&loop, &o, &err), &err, "loop");
  while (pkv_loop_model(loop) == NULL)
    sleep_until_woken();
  return 0;
}

static int close_loop(void **state) {
  (void)state;
  pkv_loop_destroy(loop);
  tiny_model_close(&tiny);
  return close(wake_fd);
}

/* Of the jobs of `submit`: bytes that may wait for a client, and alternatives with each token. */
static size_t window;
static int32_t alternatives;

static pkv_status submit(pkv_job **job, int32_t n, int32_t tokens, pkv_constraint *constraint,
                         pkv_error *err) {
  static pkv_job_spec spec;
  memset(&spec, 0, sizeof spec);
  const pkv_allocator a = pkv_allocator_default();
  spec.prompt = (pkv_tokens){pkv_alloc_zeroed(&a, 8 + 1, sizeof(int32_t)), 8};
  drive_prompt(spec.prompt.ids, 8, 320, 5);
  spec.request = (pkv_request)PKV_REQUEST_INIT;
  spec.request.max_tokens = tokens;
  spec.request.ignore_end = 1;
  spec.request.temperature = 1.0f;
  spec.shown = -1;
  spec.n = n;
  spec.constraint = constraint;
  spec.window = window;
  spec.request.logprobs = alternatives > 0;
  spec.request.top_logprobs = alternatives;
  const pkv_status status = pkv_loop_submit(job, loop, &spec, err);
  pkv_tokens_free(&spec.prompt);
  return status;
}

static void wait_done(pkv_job *job) {
  while (!pkv_loop_is_done(loop, job))
    sleep_until_woken();
}

/* Taking one answer's news leaves the others' to be found. */
static void test_news_of_each(void **state) {
  (void)state;
  pkv_error err = {PKV_OK, "", ""};
  pkv_job *job = NULL;
  drive_ok(submit(&job, 3, 6, NULL, &err), &err, "submit");
  wait_done(job);
  for (int32_t c = 0; c < 3; c++) {
    pkv_piece piece;
    pkv_choice_state s;
    assert_true(pkv_loop_has_news(loop, job));
    pkv_piece_init(&piece);
    drive_ok(pkv_loop_take(&piece, &s, loop, job, c, &err), &err, "take");
    assert_true(s.done);
    assert_int_equal(s.generated, 6);
    pkv_piece_deinit(&piece);
  }
  assert_false(pkv_loop_has_news(loop, job));
  pkv_loop_release(loop, job);
}

/* More answers than there is room for at all: refused where the queue is, too, though the server
   looks before. */
static void test_too_many_answers(void **state) {
  (void)state;
  pkv_error err = {PKV_OK, "", ""};
  pkv_job *job = NULL;
  pkv_loop_counters before, after;
  pkv_loop_get_counters(&before, loop);
  assert_int_equal(submit(&job, 101, 2, NULL, &err), PKV_E_LIMIT);
  assert_null(job);
  assert_string_equal(err.text, "100 requests are here already; try again later");
  pkv_loop_get_counters(&after, loop);
  assert_int_equal(after.refused_full, before.refused_full + 1);
  assert_int_equal(after.live, before.live);
}

/* As many different constraints as the engine takes; one more is refused before it gets there, one
   that is there already is not, and there is room again when one has ended. */
static void test_many_constraints(void **state) {
  (void)state;
  static pkv_job *jobs[PKV_MAX_CONSTRAINTS], *another;
  static pkv_constraint *all[PKV_MAX_CONSTRAINTS + 1];
  pkv_error err = {PKV_OK, "", ""};
  for (int i = 0; i <= PKV_MAX_CONSTRAINTS; i++) {
    char text[64];
    const int bytes = snprintf(text, sizeof text, "root ::= [^!]{0,%d}", 9000 + i);
    drive_ok(pkv_constraint_create_grammar(&all[i], tiny.model, text, (size_t)bytes, NULL, &err),
             &err, "grammar");
  }
  for (int i = 0; i <= PKV_MAX_CONSTRAINTS; i++) { /* at once: none has ended when the last comes */
    const pkv_status status =
        submit(i < PKV_MAX_CONSTRAINTS ? &jobs[i] : &another, 1, 1500, all[i], &err);
    if (i < PKV_MAX_CONSTRAINTS)
      drive_ok(status, &err, "submit");
    else
      assert_int_equal(status, PKV_E_LIMIT);
  }
  assert_non_null(strstr(err.text, "64 different"));
  drive_ok(submit(&another, 1, 2, all[5], &err), &err, "one that is there");
  pkv_loop_release(loop, another);
  pkv_loop_release(loop, jobs[3]);
  int tries = 0;
  while (submit(&another, 1, 2, all[PKV_MAX_CONSTRAINTS], &err) != PKV_OK) {
    (void)usleep(1000);
    assert_true(++tries < 60000);
  }
  for (int i = 0; i < PKV_MAX_CONSTRAINTS; i++)
    if (i != 3) pkv_loop_release(loop, jobs[i]);
  wait_done(another);
  pkv_piece piece;
  pkv_choice_state s;
  pkv_piece_init(&piece);
  drive_ok(pkv_loop_take(&piece, &s, loop, another, 0, &err), &err, "take");
  assert_int_not_equal(s.finish, PKV_FINISH_ERROR);
  pkv_piece_deinit(&piece);
  pkv_loop_release(loop, another);
  for (int i = 0; i <= PKV_MAX_CONSTRAINTS; i++)
    pkv_constraint_destroy(all[i]);
}

/* The same answer each time, nothing of it taken before its end or its pause: how often it paused;
 * *bytes is what its text and tokens weigh. */
static int64_t pauses_of(size_t limit, size_t *bytes) {
  pkv_error err = {PKV_OK, "", ""};
  pkv_job *job = NULL;
  pkv_loop_counters before, after;
  pkv_piece piece;
  pkv_choice_state s = {0};
  window = limit;
  pkv_loop_get_counters(&before, loop);
  drive_ok(submit(&job, 1, 40, NULL, &err), &err, "submit");
  pkv_piece_init(&piece);
  do {
    pkv_loop_get_counters(&after, loop);
    if (after.pauses == before.pauses && !pkv_loop_is_done(loop, job)) {
      sleep_until_woken();
      continue;
    }
    drive_ok(pkv_loop_take(&piece, &s, loop, job, 0, &err), &err, "take");
  } while (!s.done);
  pkv_loop_get_counters(&after, loop);
  *bytes = piece.text.size +
           piece.records.size / sizeof(pkv_token_record) * 128 * (size_t)(1 + alternatives);
  pkv_piece_deinit(&piece);
  pkv_loop_release(loop, job);
  window = 0;
  return after.pauses - before.pauses;
}

/* What waits for a client may have just so many bytes: at them nothing pauses, at one less it does,
 * and the answer is whole all the same. */
static void test_window(void **state) {
  (void)state;
  for (alternatives = 0; alternatives <= 2; alternatives += 2) {
    size_t whole = 0, bytes = 0;
    assert_int_equal(pauses_of(0, &whole), 0);
    assert_true(whole > 40);
    assert_int_equal(pauses_of(whole, &bytes), 0);
    assert_int_equal(bytes, whole);
    assert_int_equal(pauses_of(whole - 1, &bytes), 1);
    assert_int_equal(bytes, whole);
  }
  alternatives = 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_news_of_each),
      cmocka_unit_test(test_too_many_answers),
      cmocka_unit_test(test_many_constraints),
      cmocka_unit_test(test_window),
  };
  return cmocka_run_group_tests(tests, open_loop, close_loop);
}
