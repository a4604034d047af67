/* SPDX-License-Identifier: Apache-2.0 */
/* Executors: options refused by name, instruction sets forced, memory failures survived. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/cpu.h"
#include "pkv/pkv.h"
#include "support/test_alloc.h"

static void refused(const pkv_executor_options *options, pkv_status want, const char *word) {
  pkv_executor *executor = (pkv_executor *)(uintptr_t)1;
  pkv_error err = {0};
  const pkv_status got = pkv_executor_create(&executor, options, &err);
  if (got != want || strstr(err.text, word) == NULL)
    fail_msg("status %s, wanted %s; text \"%s\" should hold \"%s\"", pkv_status_name(got),
             pkv_status_name(want), err.text, word);
  assert_null(executor);
}

static void test_bad_options(void **state) {
  (void)state;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  refused(NULL, PKV_E_INVALID, "options is NULL");
  options.struct_size = 7;
  refused(&options, PKV_E_INVALID, "struct_size is 7");
  options = (pkv_executor_options)PKV_EXECUTOR_OPTIONS_INIT;
  options.threads = -3;
  refused(&options, PKV_E_RANGE, "-3");
  options = (pkv_executor_options)PKV_EXECUTOR_OPTIONS_INIT;
  options.device = PKV_DEVICE_CUDA;
  refused(&options, PKV_E_UNSUPPORTED, "CUDA");
  options.device = (pkv_device)9;
  refused(&options, PKV_E_INVALID, "9");
  options = (pkv_executor_options)PKV_EXECUTOR_OPTIONS_INIT;
  options.isa = (pkv_isa)77;
  refused(&options, PKV_E_INVALID, "77");
  options.isa = PKV_ISA_NEON;
  refused(&options, PKV_E_UNSUPPORTED, "neon");
  pkv_error err;
  assert_int_equal(pkv_executor_create(NULL, &options, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "out is NULL"));
}

static void test_forced_isa(void **state) {
  (void)state;
  pkv_cpu_features have;
  pkv_cpu_detect(&have);
  const bool avx2 = have.avx2 && have.fma && have.f16c;
  static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2};
  for (size_t i = 0; i < 3; i++) {
    pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
    options.isa = isas[i];
    options.threads = 1 + (int32_t)i;
    if (isas[i] == PKV_ISA_AVX2 && !avx2) {
      refused(&options, PKV_E_UNSUPPORTED, "avx2");
      continue;
    }
    pkv_executor *executor = NULL;
    assert_int_equal(pkv_executor_create(&executor, &options, NULL), PKV_OK);
    assert_int_equal(pkv_executor_isa(executor), isas[i]);
    assert_int_equal(pkv_executor_threads(executor), options.threads);
    pkv_executor_destroy(executor);
  }
  pkv_executor_destroy(NULL);
}

static void test_environment(void **state) {
  (void)state;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.threads = 1;
  pkv_executor *executor = NULL;
  assert_int_equal(setenv("PKV_CPU", "scalar", 1), 0);
  assert_int_equal(pkv_executor_create(&executor, &options, NULL), PKV_OK);
  assert_string_equal(pkv_isa_name(pkv_executor_isa(executor)), "scalar");
  pkv_executor_destroy(executor);
  assert_int_equal(setenv("PKV_CPU", "pentium", 1), 0);
  refused(&options, PKV_E_INVALID, "pentium");
  /* A set named in the options is not the environment's business. */
  options.isa = PKV_ISA_REFERENCE;
  assert_int_equal(pkv_executor_create(&executor, &options, NULL), PKV_OK);
  assert_int_equal(pkv_executor_isa(executor), PKV_ISA_REFERENCE);
  pkv_executor_destroy(executor);
  assert_int_equal(unsetenv("PKV_CPU"), 0);
}

static pkv_status create_and_destroy(void *ctx, const pkv_allocator *allocator) {
  (void)ctx;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.threads = 2;
  options.allocator = allocator;
  pkv_executor *executor = NULL;
  const pkv_status status = pkv_executor_create(&executor, &options, NULL);
  pkv_executor_destroy(executor);
  return status;
}

static void test_torture(void **state) {
  (void)state;
  assert_true(test_alloc_torture(create_and_destroy, NULL) >= 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bad_options),
      cmocka_unit_test(test_forced_isa),
      cmocka_unit_test(test_environment),
      cmocka_unit_test(test_torture),
  };
  return cmocka_run_group_tests_name("executor", tests, NULL, NULL);
}
