/* SPDX-License-Identifier: Apache-2.0 */
/* A million random operations on each baseline order against a naive twin. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "support/sanitized.h"
#include "support/sched_world.h"

#define MANY (TEST_SANITIZED ? 200000 : 1000000)

static void fcfs(void **state) {
  (void)state;
  sched_world_run(PKV_SCHED_FCFS, 1, MANY);
}

static void priority(void **state) {
  (void)state;
  sched_world_run(PKV_SCHED_PRIORITY, 10000, MANY);
}

static void lpm(void **state) {
  (void)state;
  sched_world_run(PKV_SCHED_LPM, 20000, MANY);
}

static void dfs_weight(void **state) {
  (void)state;
  sched_world_run(PKV_SCHED_DFS_WEIGHT, 30000, MANY);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(fcfs), cmocka_unit_test(priority),
                                     cmocka_unit_test(lpm), cmocka_unit_test(dfs_weight)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
