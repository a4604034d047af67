/* SPDX-License-Identifier: Apache-2.0 */
/* A million random operations on order cht against a naive twin. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "support/sched_world.h"

static void million(void **state) {
  (void)state;
  sched_world_run(PKV_SCHED_CHT, 1, 1000000);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(million)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
