/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it gains that preempted requests keep their pages on the host: 64 requests of a Llama-3-8B
 * shape with random weights in a cache of six tenths of what they need at last, with and without.
 * Also how long an engine takes to be made. Figures, no judgement; with --ranks of several devices.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/clock.h"
#include "engine/engine_state.h"
#include "gpu/gpu_case.h"
#include "support/engine_drive.h"

#define REQUESTS 64
#define PROMPT   1024
#define ANSWER   512

static int32_t prompts[REQUESTS][PROMPT];

static double since(int64_t begin) {
  return (double)(pkv_clock_ns() - begin) * 1e-9;
}

static void run(const pkv_model *model, int64_t swap_bytes, int64_t cache_tokens) {
  static pkv_event events[REQUESTS + 4096];
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine *engine = NULL;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.tensor_parallel = gpu_opt.ranks;
  o.max_rows = REQUESTS;
  o.max_seq_len = PROMPT + ANSWER;
  o.cache_tokens = cache_tokens;
  o.swap_bytes = swap_bytes;
  int64_t begin = pkv_clock_ns();
  OK(pkv_engine_create(&engine, model, &o, err));
  const double made = since(begin);
  begin = pkv_clock_ns();
  for (int i = 0; i < REQUESTS; i++) {
    pkv_request r = PKV_REQUEST_INIT;
    int64_t id;
    r.prompt = prompts[i];
    r.prompt_tokens = PROMPT;
    r.max_tokens = ANSWER;
    r.ignore_end = 1;
    OK(pkv_engine_submit(&id, engine, &r, err));
  }
  while (pkv_engine_pending(engine) > 0) {
    size_t count = 0;
    OK(pkv_engine_step(events, COUNT(events), &count, engine, err));
  }
  const double seconds = since(begin);
  pkv_engine_get_stats(&s, engine);
  printf(
      "swap_bytes %lld, cache %lld: made in %.2f s; %.3f s, %.0f tokens/s; %lld preemptions, "
      "%lld prompt tokens computed, %lld out (%lld pages), %lld in (%lld), %lld full, %lld given "
      "up; %zu MiB, a page out %.1f us, in %.1f us, a token %.2f us\n",
      (long long)swap_bytes, (long long)cache_tokens, made, seconds, REQUESTS * ANSWER / seconds,
      (long long)s.preemptions, (long long)s.prefill_tokens, (long long)s.swap_outs,
      (long long)s.swap_pages_out, (long long)s.swap_ins, (long long)s.swap_pages_in,
      (long long)s.swap_full, (long long)s.swap_drops, s.swap_bytes >> 20,
      engine->swap.out_seconds * 1e6, engine->swap.in_seconds * 1e6,
      engine->swap.token_seconds * 1e6);
  pkv_engine_destroy(engine);
}

static void test_pressure(void **state) {
  (void)state;
  NEED_GPU();
  const int64_t whole = (int64_t)REQUESTS * (PROMPT + ANSWER + 64);
  pkv_model *const model = gpu_random_model(gpu_llama_8b, 1);
  for (int i = 0; i < REQUESTS; i++)
    drive_prompt(prompts[i], PROMPT, 128256, 300 + (uint64_t)i);
  run(model, 0, whole);
  for (int gib = 0; gib <= 4; gib += 2)
    run(model, (int64_t)gib << 30, whole * 6 / 10);
  pkv_model_close(model);
}

int gpu_suite_swap(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_pressure)};
  return cmocka_run_group_tests_name("swap", tests, gpu_setup, gpu_teardown);
}
