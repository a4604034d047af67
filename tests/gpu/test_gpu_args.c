/* SPDX-License-Identifier: Apache-2.0 */
/* Bad arguments to device.h: a clear status, and nothing broken afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"

static void test_refusals(void **state) {
  (void)state;
  NEED_GPU();
  pkv_error err = {0};
  void *p = (void *)1;
  assert_int_equal(pkv_device_alloc(&p, gpu, (size_t)1 << 46, &err), PKV_E_NOMEM);
  assert_null(p);
  assert_non_null(strstr(err.text, "free"));
}

int gpu_suite_args(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests_name("args", tests, gpu_setup, gpu_teardown);
}
