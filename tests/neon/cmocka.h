/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernel tests use of cmocka, where this machine has no cmocka for the processor: the same
 * names, one failure ends the program.
 */
#ifndef PKV_TEST_NEON_CMOCKA_H
#define PKV_TEST_NEON_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*neon_fixture_fn)(void **state);

struct CMUnitTest {
  const char *name;
  void (*run)(void **state);
  neon_fixture_fn setup, teardown;
};

extern jmp_buf neon_skipped; /* of the test that runs */

#define cmocka_unit_test(f)                                                                        \
  { #f, f, NULL, NULL }
#define cmocka_unit_test_setup_teardown(f, up, down)                                               \
  { #f, f, up, down }

#define print_message(...) ((void)printf(__VA_ARGS__))
#define fail_msg(...)                                                                              \
  ((void)printf(__VA_ARGS__), (void)printf("\n%s:%d: failed\n", __FILE__, __LINE__), exit(1))
#define skip()                 longjmp(neon_skipped, 1)
#define assert_true(x)         ((x) ? (void)0 : fail_msg("%s is false", #x))
#define assert_false(x)        assert_true(!(x))
#define assert_non_null(x)     ((x) != NULL ? (void)0 : fail_msg("%s is NULL", #x))
#define assert_null(x)         ((x) == NULL ? (void)0 : fail_msg("%s is not NULL", #x))
#define assert_int_equal(x, y) neon_same((long long)(x), (long long)(y), #x, __FILE__, __LINE__)
#define assert_in_range(x, lo, hi)                                                                 \
  ((x) >= (lo) && (x) <= (hi) ? (void)0 : fail_msg("%s is not in range", #x))
#define assert_string_equal(x, y) assert_true(strcmp((x), (y)) == 0)
#define assert_memory_equal(x, y, n)                                                               \
  (memcmp((x), (y), (n)) == 0 ? (void)0 : fail_msg("%s and %s differ", #x, #y))

static inline void neon_same(long long x, long long y, const char *what, const char *file,
                             int line) {
  if (x == y) return;
  (void)printf("%s is %lld, want %lld\n%s:%d: failed\n", what, x, y, file, line);
  exit(1);
}

int neon_run(const struct CMUnitTest *tests, size_t count, neon_fixture_fn setup,
             neon_fixture_fn teardown);

#define cmocka_run_group_tests(tests, up, down)                                                    \
  neon_run(tests, sizeof(tests) / sizeof *(tests), up, down)
#define cmocka_run_group_tests_name(name, tests, up, down) cmocka_run_group_tests(tests, up, down)

#endif
