/* SPDX-License-Identifier: Apache-2.0 */
#include "support/sched_drive.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/clock.h"

static pkv_error err;

static void must(pkv_status status, const char *what) {
  if (status != PKV_OK) fail_msg("%s: %s (%s)", what, pkv_status_name(status), err.text);
}

int32_t *sd_prompt(int32_t group, int32_t shared, int32_t own, int32_t length) {
  int32_t *tokens = malloc(((size_t)length + 1) * sizeof *tokens);
  assert_non_null(tokens);
  for (int32_t i = 0; i < length; i++)
    tokens[i] =
        i < shared ? group * 100003 + i : (int32_t)(((uint32_t)own + 1) * 1000003u + (uint32_t)i);
  return tokens;
}

pkv_sched *sd_create(const pkv_sched_options *o) {
  pkv_sched *s = NULL;
  must(pkv_sched_create(&s, o, &err), "create");
  return s;
}

void sd_insert(pkv_sched *s, uint64_t id, const int32_t *tokens, int32_t length) {
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  r.id = id;
  r.tokens = tokens;
  r.prompt_tokens = length;
  must(pkv_sched_insert(s, &r, &err), "insert");
}

pkv_sched_pick sd_best(pkv_sched *s) {
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  must(pkv_sched_best(&pick, s, -1, &err), "best");
  return pick;
}

uint64_t sd_admit_best(pkv_sched *s) {
  const pkv_sched_pick pick = sd_best(s);
  assert_true(pick.verdict == PKV_SCHED_ADD || pick.verdict == PKV_SCHED_STOP);
  sd_admit(s, pick.id);
  return pick.id;
}

void sd_admit(pkv_sched *s, uint64_t id) {
  must(pkv_sched_admit(s, id, &err), "admit");
}

void sd_finish(pkv_sched *s, uint64_t id) {
  must(pkv_sched_finish(s, id, &err), "finish");
}

pkv_sched_stats sd_stats(const pkv_sched *s) {
  pkv_sched_stats stats = PKV_SCHED_STATS_INIT;
  pkv_sched_get_stats(&stats, s);
  return stats;
}

int64_t sd_clock(void *ctx) {
  return *(const int64_t *)ctx;
}

double sd_now_us(void) {
  return (double)pkv_clock_ns() * 1e-3;
}

double sd_slack(void) {
#ifdef PKV_ASSERTS
  return 40; /* debug builds and sanitizers */
#else
  return 1;
#endif
}
