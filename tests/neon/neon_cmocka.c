/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

jmp_buf neon_skipped;

int neon_run(const struct CMUnitTest *tests, size_t count, neon_fixture_fn setup,
             neon_fixture_fn teardown) {
  void *state = NULL;
  volatile size_t skipped = 0;
  if (setup != NULL && setup(&state) != 0) fail_msg("the set-up failed");
  for (volatile size_t i = 0; i < count; i = i + 1) {
    void *own = state;
    if (tests[i].setup != NULL && tests[i].setup(&own) != 0) fail_msg("the set-up failed");
    if (setjmp(neon_skipped) == 0)
      tests[i].run(&own);
    else
      skipped = skipped + 1;
    if (tests[i].teardown != NULL) (void)tests[i].teardown(&own);
    print_message("ok %s\n", tests[i].name);
    (void)fflush(stdout);
  }
  if (teardown != NULL) (void)teardown(&state);
  print_message("%zu tests passed, %zu of them skipped\n", count, (size_t)skipped);
  return 0;
}
