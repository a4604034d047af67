/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU executor: picks an instruction set at run time (CPUID and XGETBV, PKV_CPU), owns the
 * workers and their scratch, and fills the backend's table. Built for the baseline.
 */
#include "backend/cpu/cpu_isa.h"

#include <string.h>

#include "backend/cpu/cpu_dense.h"
#include "backend/cpu/dense_kernels.h"
#include "base/cpu.h"
#include "base/env.h"

#if defined(__AVX__)
#error "cpu_executor.c decides at run time what may run: build it for the baseline"
#endif

static const pkv_backend_ops cpu_ops = {
    .name = "cpu",
    .attention = pkv_cpu_attention,
    .append = pkv_cpu_append,
    .matmul_scratch_bytes = pkv_cpu_matmul_scratch_bytes,
    .matmul = pkv_cpu_matmul,
    .matmul_many = pkv_cpu_matmul_many,
    .embed = pkv_cpu_embed,
    .rms_norm = pkv_cpu_rms_norm,
    .rope = pkv_cpu_rope,
    .swiglu = pkv_cpu_swiglu,
    .geglu = pkv_cpu_geglu,
    .add = pkv_cpu_add,
};

static pkv_status isa_from_environment(pkv_isa *isa, pkv_error *err) {
  const char *name = pkv_env_get(PKV_ENV_CPU);
  if (name == NULL) return PKV_OK;
  for (int i = PKV_ISA_REFERENCE; i <= PKV_ISA_NEON; i++) {
    if (strcmp(name, pkv_isa_name((pkv_isa)i)) == 0) {
      *isa = (pkv_isa)i;
      return PKV_OK;
    }
  }
  return PKV_FAIL(err, PKV_E_INVALID,
                  "PKV_CPU is \"%s\"; known are reference, scalar, avx2, avx512, neon", name);
}

const pkv_cpu_isa_ops *pkv_cpu_isa_table(pkv_isa isa, const pkv_cpu_features *have) {
  if (isa == PKV_ISA_REFERENCE) return &pkv_cpu_reference_ops;
  if (isa == PKV_ISA_SCALAR) return &pkv_cpu_scalar_ops;
#if defined(__x86_64__)
  const int avx2 = have->avx2 && have->fma && have->f16c;
  if (isa == PKV_ISA_AVX2 && avx2) return &pkv_cpu_avx2_ops;
  if (isa == PKV_ISA_AVX512 && avx2 && have->avx512f && have->avx512bw && have->avx512dq &&
      have->avx512vl)
    return &pkv_cpu_avx512_ops;
#endif
#if defined(__aarch64__)
  if (isa == PKV_ISA_NEON && have->neon) return &pkv_cpu_neon_ops;
#endif
  (void)have;
  return NULL;
}

const pkv_dense_kernels *pkv_cpu_dense_table(pkv_isa isa, const pkv_cpu_features *have) {
#if defined(__x86_64__)
  if (isa == PKV_ISA_AVX512 && have->avx512_vnni)
    return have->avx512_bf16 ? &pkv_dense_avx512bf16 : &pkv_dense_avx512vnni;
  if (isa == PKV_ISA_AVX512 || isa == PKV_ISA_AVX2) return &pkv_dense_avx2;
#endif
#if defined(__aarch64__)
  if (isa == PKV_ISA_NEON) return have->neon_dotprod ? &pkv_dense_neondot : &pkv_dense_neon;
#endif
  (void)isa;
  (void)have;
  return &pkv_dense_scalar;
}

static pkv_status choose_isa(const pkv_cpu_isa_ops **out, const pkv_cpu_features *have, pkv_isa isa,
                             pkv_error *err) {
  static const pkv_isa best_first[] = {PKV_ISA_AVX512, PKV_ISA_AVX2, PKV_ISA_NEON, PKV_ISA_SCALAR};
  if (isa == PKV_ISA_AUTO) PKV_TRY(isa_from_environment(&isa, err));
  if (isa == PKV_ISA_AUTO) {
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++) {
      *out = pkv_cpu_isa_table(best_first[i], have);
      if (*out != NULL) return PKV_OK;
    }
  }
  PKV_CHECK(err, isa >= PKV_ISA_REFERENCE && isa <= PKV_ISA_NEON, PKV_E_INVALID,
            "isa is %d, known are 0 .. %d", (int)isa, (int)PKV_ISA_NEON);
  *out = pkv_cpu_isa_table(isa, have);
  if (*out != NULL) return PKV_OK;
  char features[128];
  pkv_cpu_describe(features, sizeof features, have);
  return PKV_FAIL(err, PKV_E_UNSUPPORTED, "isa %s is not available; this build on this CPU has: %s",
                  pkv_isa_name(isa), features);
}

static pkv_status create_state(pkv_executor *executor, const pkv_cpu_isa_ops *ops, pkv_error *err) {
  const size_t line = PKV_CACHE_LINE;
  const size_t stride = (ops->scratch_bytes + line - 1) / line * line;
  const size_t threads = (size_t)pkv_workers_threads(executor->workers);
  _Static_assert(sizeof(pkv_cpu_state) <= PKV_CACHE_LINE, "pkv_cpu_scratch starts after one line");
  size_t bytes;
  if (!pkv_mul_size(&bytes, stride, threads) || !pkv_add_size(&bytes, bytes, line))
    return PKV_FAIL(err, PKV_E_LIMIT, "scratch of %zu threads is too large", threads);
  pkv_cpu_state *state = pkv_alloc(&executor->allocator, bytes);
  PKV_CHECK(err, state != NULL, PKV_E_NOMEM, "%zu bytes for the scratch of %zu threads", bytes,
            threads);
  *state = (pkv_cpu_state){.stride = stride, .bytes = bytes};
  executor->device_state = state;
  return PKV_OK;
}

pkv_status pkv_cpu_executor_init(pkv_executor *executor, const pkv_executor_options *options,
                                 pkv_error *err) {
  const pkv_cpu_isa_ops *ops = NULL;
  executor->workers = NULL;
  executor->device_state = NULL;
  pkv_cpu_features have;
  pkv_cpu_detect(&have);
  PKV_TRY(choose_isa(&ops, &have, options->isa, err));
  PKV_TRY(pkv_workers_create(&executor->workers, options->threads, &executor->allocator, err));
  const pkv_status status = create_state(executor, ops, err);
  if (status != PKV_OK) {
    pkv_cpu_executor_deinit(executor);
    return status;
  }
  executor->ops = &cpu_ops;
  executor->isa = ops->isa;
  executor->isa_ops = ops;
  ((pkv_cpu_state *)executor->device_state)->dense = pkv_cpu_dense_table(ops->isa, &have);
  return PKV_OK;
}

void pkv_cpu_executor_deinit(pkv_executor *executor) {
  pkv_cpu_state *state = executor->device_state;
  if (state != NULL) pkv_free(&executor->allocator, state, state->bytes);
  pkv_workers_destroy(executor->workers);
  executor->device_state = NULL;
  executor->workers = NULL;
}
