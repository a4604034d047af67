/* SPDX-License-Identifier: Apache-2.0 */
/* A worker pool whose threads cannot all be started: those that were are ended, nothing leaks. */
#include "base/workers.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "support/sanitized.h"
#include "support/test_alloc.h"

#if !TEST_SANITIZED /* sanitizers put their own pthread_create there */
typedef int (*create_fn)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static int creates_left;

/* Stands before the C library's: refuses when the allowance is used up. */
__attribute__((visibility("default"))) int
pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
  if (creates_left-- <= 0) return EAGAIN;
  create_fn real;
  void *symbol = dlsym(RTLD_NEXT, "pthread_create");
  memcpy(&real, &symbol, sizeof real);
  return real(thread, attr, start, arg);
}
#endif

static void threads_refused(void **state) {
  (void)state;
#if TEST_SANITIZED
  print_message("skipped: the sanitizer owns pthread_create\n");
  skip();
#else
  for (int allowed = 0; allowed < 5; allowed++) {
    test_alloc ta;
    test_alloc_init(&ta);
    const pkv_allocator a = test_alloc_allocator(&ta);
    pkv_error err;
    pkv_workers *w = (pkv_workers *)&err;
    creates_left = allowed;
    const pkv_status status = pkv_workers_create(&w, 5, &a, &err);
    if (allowed < 4) {
      assert_int_equal(status, PKV_E_NOMEM);
      assert_null(w);
      assert_non_null(strstr(err.text, "of 5 could not be started"));
      assert_int_equal(err.text[7], '2' + allowed); /* "thread 2": the caller is the first */
    } else {
      assert_int_equal(status, PKV_OK);
      pkv_workers_destroy(w);
    }
    test_alloc_finish(&ta);
  }
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(threads_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
