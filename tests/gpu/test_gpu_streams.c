/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two streams at once with a plan each, and plans after a launch that did not end: whatever such a
 * launch may leave in a plan's memory, the next build or upload makes it right.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"
#include "gpu/gpu_stream.h"

/* ------------------------------------------------------------------ two streams */

/* One stream's work: a case, a plan, and what it gives alone. */
typedef struct lane {
  attn_case c;
  gpu_case g;
  pkv_device_plan *plan;
  void *stream;
  unsigned char *want;
} lane;

static void lane_init(lane *l, pkv_dtype kv, uint64_t seed, const int32_t *lens, int32_t rows,
                      const pkv_plan_options *options) {
  attn_spec s = gpu_spec(kv, seed, rows, lens);
  s.group = 4;
  attn_case_init(&l->c, &s);
  attn_case_answer(&l->c);
  gpu_case_init(&l->g, &l->c);
  l->plan = gpu_plan(&l->g, options, 0);
  l->stream = gpu_stream_create();
  gpu_run(&l->g, l->plan);
  attn_check(&l->c, "alone");
  l->want = malloc(l->c.out_bytes);
  memcpy(l->want, l->c.out, l->c.out_bytes);
  gpu_mark(&l->g, 0x5a);
}

static void lane_deinit(lane *l) {
  free(l->want);
  gpu_stream_destroy(l->stream);
  pkv_device_plan_destroy(l->plan);
  gpu_case_deinit(&l->g);
  attn_case_deinit(&l->c);
}

static void lane_step(lane *l, bool build) {
  if (build) OK(pkv_device_plan_build(l->plan, l->c.spec.rows, l->g.seq_len, l->stream, err));
  for (int layer = 0; layer < 3; layer++)
    OK(pkv_device_attention(gpu, l->plan, &l->g.args, l->stream, err));
}

static void run_lanes(lane lanes[2], bool build) {
  for (int round = 0; round < (gpu_opt.small ? 3 : 25); round++) {
    gpu_wait();
    for (int i = 0; i < 8; i++)
      lane_step(&lanes[i % 2], build);
    gpu_wait();
    for (int i = 0; i < 2; i++) {
      gpu_fetch(&lanes[i].g);
      if (memcmp(lanes[i].want, lanes[i].c.out, lanes[i].c.out_bytes) != 0)
        fail_msg("round %d: stream %d gives other bits beside another stream", round, i);
      gpu_mark(&lanes[i].g, 0x5a);
    }
  }
}

static void test_two_streams_two_plans(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t a[] = {6000, 1, 300, 64}, b[] = {700, 0, 4097, 33, 129, 2500};
  for (int overlap = 0; overlap < 3; overlap++)
    for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
      lane lanes[2];
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.flags = flags;
      lane_init(&lanes[0], PKV_DTYPE_F16, 3, a, (int32_t)COUNT(a), &options);
      lane_init(&lanes[1], PKV_DTYPE_BF16, 4, b, (int32_t)COUNT(b), &options);
      for (int i = 0; i < 2; i++)
        pkv_device_plan_set_overlap(lanes[i].plan, overlap);
      run_lanes(lanes, true);
      for (int i = 0; i < 2; i++)
        lane_deinit(&lanes[i]);
    }
}

static void test_two_streams_fused_routes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t a[] = {6000, 1, 300, 64}, b[] = {700, 0, 4097, 33, 129, 2500};
  lane lanes[2];
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_WORKQUEUE;
  lane_init(&lanes[0], PKV_DTYPE_F16, 3, a, (int32_t)COUNT(a), &options);
  lane_init(&lanes[1], PKV_DTYPE_FP8_E4M3, 4, b, (int32_t)COUNT(b), &options);
  for (int fused = 0; fused < 2; fused++) {
    for (int i = 0; i < 2; i++)
      pkv_device_plan_set_fused(lanes[i].plan, fused);
    run_lanes(lanes, false);
  }
  for (int i = 0; i < 2; i++)
    lane_deinit(&lanes[i]);
}

int gpu_suite_streams(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_two_streams_two_plans),
      cmocka_unit_test(test_two_streams_fused_routes),
  };
  return cmocka_run_group_tests_name("streams", tests, gpu_setup, gpu_teardown);
}
