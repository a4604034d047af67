/* SPDX-License-Identifier: Apache-2.0 */
/* Failures of the CUDA runtime as statuses and words: a pure function, so no device is needed; and
   that a failed call leaves nothing behind, where there is one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cuda/cuda_status.h"
#include "gpu/gpu_case.h"

static const pkv_cuda_facts usual = {.driver = 12040,
                                     .runtime = 13000,
                                     .major = 7,
                                     .minor = 5,
                                     .free_bytes = 5,
                                     .bytes = 70,
                                     .targets = "90a-real"};

static void expect(cudaError_t e, const char *call, const pkv_cuda_facts *facts, pkv_status status,
                   const char *word, const char *second) {
  pkv_error err = {0};
  const pkv_status got = pkv_cuda_describe(&err, e, call, facts);
  if (got != status || err.status != status || strstr(err.text, word) == NULL ||
      strstr(err.text, second) == NULL)
    fail_msg("%s: got %s \"%s\", wanted %s with \"%s\" and \"%s\"", cudaGetErrorName(e),
             pkv_status_name(got), err.text, pkv_status_name(status), word, second);
  assert_int_equal(pkv_cuda_describe(NULL, e, call, facts), status); /* no error wanted */
}

static void test_what_the_user_can_do(void **state) {
  (void)state;
  const pkv_cuda_facts none = {.runtime = 13000, .targets = "80-real 90a-real"};
  expect(cudaErrorInsufficientDriver, "cudaGetDeviceCount(&count)", &none, PKV_E_UNSUPPORTED,
         "cudaGetDeviceCount: there is no CUDA driver", "libcuda.so.1");
  expect(cudaErrorInsufficientDriver, "cudaGetDeviceCount(&count)", &usual, PKV_E_UNSUPPORTED,
         "CUDA 12.4", "13.0");
  expect(cudaErrorNoDevice, "cudaGetDeviceCount(&count)", &usual, PKV_E_UNSUPPORTED, "no CUDA",
         "CUDA_VISIBLE_DEVICES");
  expect(cudaErrorNoKernelImageForDevice, "cudaFuncGetAttributes(&a, f)", &usual, PKV_E_UNSUPPORTED,
         "sm_75", "90a-real");
  expect(cudaErrorUnsupportedPtxVersion, "decode", &usual, PKV_E_UNSUPPORTED, "sm_75", "90a-real");
  expect(cudaErrorMemoryAllocation, "cudaMalloc(out, bytes)", &usual, PKV_E_NOMEM,
         "cudaMalloc:", "5 of 70");
  pkv_cuda_facts nothing = usual;
  nothing.free_bytes = nothing.bytes = 0;
  expect(cudaErrorMemoryAllocation, "cudaMalloc(out, bytes)", &nothing, PKV_E_NOMEM,
         "cudaMalloc: out of memory", "no room");
  expect(cudaErrorSystemDriverMismatch, "cudaSetDevice(d)", &usual, PKV_E_UNSUPPORTED,
         "cudaSetDevice: cudaErrorSystemDriverMismatch", "");
}

static void test_device_errors(void **state) {
  (void)state;
  static const cudaError_t fatal[] = {cudaErrorIllegalAddress, cudaErrorLaunchFailure,
                                      cudaErrorMisalignedAddress, cudaErrorECCUncorrectable,
                                      cudaErrorLaunchTimeout};
  for (size_t i = 0; i < COUNT(fatal); i++) {
    assert_true(pkv_cuda_is_fatal(fatal[i]));
    expect(fatal[i], "decode", &usual, PKV_E_DEVICE, "decode: cudaError", "no more");
  }
  assert_false(pkv_cuda_is_fatal(cudaErrorInvalidValue));
  expect(cudaErrorInvalidValue, "cudaMemcpyAsync(to, from)", &usual, PKV_E_DEVICE,
         "cudaMemcpyAsync: cudaErrorInvalidValue", "(");
  expect(cudaErrorLaunchOutOfResources, "planner", &usual, PKV_E_DEVICE, "planner:", "(");
  expect((cudaError_t)12345, "decode", &usual, PKV_E_DEVICE, "decode:", "");
}

/* Every error the runtime knows: a status that is a failure, and a text that ends. */
static void test_every_error_has_words(void **state) {
  (void)state;
  for (int e = 1; e < 1100; e++) {
    pkv_error err = {0};
    assert_true(pkv_cuda_describe(&err, (cudaError_t)e, "cudaCall(x)", &usual) < 0);
    assert_int_equal(strncmp(err.text, "cudaCall: ", 10), 0);
    assert_true(strlen(err.text) > 12 && strlen(err.text) < sizeof err.text);
  }
}

/* Works where there is no driver, too, and leaves no error. */
static void test_facts(void **state) {
  (void)state;
  const pkv_cuda_facts facts = pkv_cuda_facts_now();
  assert_true(facts.runtime >= 12000);
  assert_non_null(facts.targets);
  assert_true(strlen(facts.targets) > 1);
  /* without a driver every call of the runtime fails, this one too */
  if (facts.driver > 0) assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
}

static void test_failure_leaves_nothing_behind(void **state) {
  (void)state;
  NEED_GPU();
  pkv_error e = {0};
  void *p = NULL;
  cudaStream_t stream;
  cudaGraph_t graph = NULL;
  assert_int_equal(pkv_device_alloc(&p, gpu, (size_t)1 << 46, &e), PKV_E_NOMEM);
  assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
  /* a stream that captures cannot be waited for, and the capture is spoilt */
  assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  assert_int_equal(pkv_device_synchronize(gpu, stream, &e), PKV_E_DEVICE);
  assert_int_equal(strncmp(e.text, "cudaStreamSynchronize: cudaErrorStreamCapture", 45), 0);
  assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
  assert_int_not_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  (void)cudaGetLastError();
  assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
  OK(pkv_device_alloc(&p, gpu, 64, err));
  OK(pkv_device_synchronize(gpu, NULL, err));
  pkv_device_free(gpu, p);
}

int gpu_suite_status(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_the_user_can_do),          cmocka_unit_test(test_device_errors),
      cmocka_unit_test(test_every_error_has_words),         cmocka_unit_test(test_facts),
      cmocka_unit_test(test_failure_leaves_nothing_behind),
  };
  return cmocka_run_group_tests_name("status", tests, gpu_setup, gpu_teardown);
}
