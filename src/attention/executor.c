/* SPDX-License-Identifier: Apache-2.0 */
/* Executors as handles: options checked, the device's backend asked to fill them. */
#include "attention/executor.h"

#include "backend/device_ops.h"
#include "base/status.h"

const char *pkv_isa_name(pkv_isa isa) {
  switch (isa) {
  case PKV_ISA_AUTO:
    return "auto";
  case PKV_ISA_REFERENCE:
    return "reference";
  case PKV_ISA_SCALAR:
    return "scalar";
  case PKV_ISA_AVX2:
    return "avx2";
  case PKV_ISA_AVX512:
    return "avx512";
  case PKV_ISA_NEON:
    return "neon";
  }
  return "?";
}

static pkv_status init(pkv_executor *executor, const pkv_executor_options *options, int32_t index,
                       pkv_error *err) {
#ifdef PKV_HAVE_CUDA
  if (options->device == PKV_DEVICE_CUDA) return pkv_cuda_executor_init(executor, index, err);
#else
  (void)index;
#endif
  return pkv_cpu_executor_init(executor, options, err);
}

static void deinit(pkv_executor *executor) {
#ifdef PKV_HAVE_CUDA
  if (executor->device == PKV_DEVICE_CUDA) {
    pkv_cuda_executor_deinit(executor);
    return;
  }
#endif
  pkv_cpu_executor_deinit(executor);
}

pkv_status pkv_executor_create(pkv_executor **out, const pkv_executor_options *options,
                               pkv_error *err) {
  return pkv_executor_create_at(out, options, -1, err);
}

pkv_status pkv_executor_create_at(pkv_executor **out, const pkv_executor_options *options,
                                  int32_t index, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK_STRUCT(err, options, pkv_executor_options);
  PKV_CHECK(err, options->threads >= 0, PKV_E_RANGE, "options->threads is %d, must be >= 0",
            options->threads);
#ifndef PKV_HAVE_CUDA
  PKV_CHECK(err, options->device != PKV_DEVICE_CUDA, PKV_E_UNSUPPORTED,
            "options->device is CUDA; this build has the CPU only");
#endif
  PKV_CHECK(err, options->device == PKV_DEVICE_CPU || options->device == PKV_DEVICE_CUDA,
            PKV_E_INVALID, "options->device is %d, known are 0 (CPU) and 1 (CUDA)",
            (int)options->device);
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  pkv_executor *executor = pkv_alloc_zeroed(&allocator, 1, sizeof *executor);
  PKV_CHECK(err, executor != NULL, PKV_E_NOMEM, "%zu bytes for the executor", sizeof *executor);
  executor->allocator = allocator;
  executor->device = options->device;
  const pkv_status status = init(executor, options, index, err);
  if (status != PKV_OK) {
    pkv_free(&allocator, executor, sizeof *executor);
    return status;
  }
  *out = executor;
  return PKV_OK;
}

void pkv_executor_destroy(pkv_executor *executor) {
  if (executor == NULL) return;
  const pkv_allocator allocator = executor->allocator;
  deinit(executor);
  pkv_free(&allocator, executor, sizeof *executor);
}

pkv_isa pkv_executor_isa(const pkv_executor *executor) {
  return executor->isa;
}

int32_t pkv_executor_threads(const pkv_executor *executor) {
  return executor->workers != NULL ? pkv_workers_threads(executor->workers) : 0;
}
