/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two groups of requests, each with a long prefix in common, arrive mixed. The scheduler fills a
 * batch of four rows, again and again, and says what each batch shares.
 */
#include <stdio.h>
#include <stdlib.h>

#include "pkv/sched.h"

enum { REQUESTS = 12, PREFIX = 512, PROMPT = 576, ROWS = 4 };

static pkv_error err;

static void must(pkv_status status) {
  if (status == PKV_OK) return;
  (void)fprintf(stderr, "%s: %s\n", pkv_status_name(status), err.text);
  exit(1);
}

int main(void) {
  static int32_t prompts[REQUESTS][PROMPT];
  pkv_sched_options options = PKV_SCHED_OPTIONS_INIT;
  options.policy = PKV_SCHED_STATIC; /* add while at most 128 tokens are new */
  options.static_new_tokens = 128;
  pkv_sched *sched = NULL;
  must(pkv_sched_create(&sched, &options, &err));

  for (int i = 0; i < REQUESTS; i++) {
    for (int t = 0; t < PROMPT; t++)
      prompts[i][t] = t < PREFIX ? 1000 * (i % 2) + t : 100000 * (i + 1) + t;
    pkv_sched_request request = PKV_SCHED_REQUEST_INIT;
    request.id = (uint64_t)i;
    request.tokens = prompts[i]; /* borrowed until the request has left */
    request.prompt_tokens = PROMPT;
    must(pkv_sched_insert(sched, &request, &err));
  }

  for (int batch = 0;; batch++) {
    uint64_t rows[ROWS];
    int count = 0;
    pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
    while (count < ROWS) {
      must(pkv_sched_best(&pick, sched, -1, &err));
      if (pick.verdict != PKV_SCHED_ADD) break;
      must(pkv_sched_admit(sched, pick.id, &err));
      rows[count++] = pick.id;
    }
    if (count == 0) break;
    pkv_sched_stats stats = PKV_SCHED_STATS_INIT;
    pkv_sched_get_stats(&stats, sched);
    (void)printf("batch %d:", batch);
    for (int i = 0; i < count; i++)
      (void)printf(" %d", (int)rows[i]);
    (void)printf(", %lld tokens, %lld of them different\n", (long long)stats.total_tokens,
                 (long long)stats.unique_tokens);
    must(pkv_sched_reward(sched, count, 0.005, &err)); /* here the batch would run */
    for (int i = 0; i < count; i++)
      must(pkv_sched_finish(sched, rows[i], &err));
  }
  pkv_sched_destroy(sched);
  return 0;
}
