/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which kernels run on which machine, by made-up features: what a processor lacks is never chosen,
 * and nothing is left out that it has. That the chosen ones compute alike: tests/diff.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_isa.h"
#include "backend/cpu/dense_kernels.h"
#include "base/cpu.h"

/* The tables of an instruction set on a machine with these features. */
#define TABLES(isa, have, attend, dense)                                                           \
  do {                                                                                             \
    assert_true(pkv_cpu_isa_table((isa), (have)) == (attend));                                     \
    assert_true(pkv_cpu_dense_table((isa), (have)) == (dense));                                    \
  } while (0)

static void test_everywhere(void **state) {
  (void)state;
  pkv_cpu_features none, all;
  memset(&none, 0, sizeof none);
  memset(&all, 1, sizeof all); /* every flag */
  for (int i = 0; i < 2; i++) {
    const pkv_cpu_features *have = i ? &all : &none;
    TABLES(PKV_ISA_REFERENCE, have, &pkv_cpu_reference_ops, &pkv_dense_scalar);
    TABLES(PKV_ISA_SCALAR, have, &pkv_cpu_scalar_ops, &pkv_dense_scalar);
  }
  for (int isa = PKV_ISA_AVX2; isa <= PKV_ISA_NEON; isa++)
    assert_null(pkv_cpu_isa_table((pkv_isa)isa, &none));
}

static void test_x86(void **state) {
  (void)state;
#if defined(__x86_64__)
  pkv_cpu_features f;
  memset(&f, 0, sizeof f);
  f.avx2 = f.fma = f.f16c = true;
  TABLES(PKV_ISA_AVX2, &f, &pkv_cpu_avx2_ops, &pkv_dense_avx2);
  assert_null(pkv_cpu_isa_table(PKV_ISA_AVX512, &f));
  bool *const needs[] = {&f.avx2,     &f.fma,      &f.f16c,    &f.avx512f,
                         &f.avx512bw, &f.avx512dq, &f.avx512vl};
  f.avx512f = f.avx512bw = f.avx512dq = f.avx512vl = true;
  TABLES(PKV_ISA_AVX512, &f, &pkv_cpu_avx512_ops, &pkv_dense_avx2);
  f.avx512_vnni = true;
  TABLES(PKV_ISA_AVX512, &f, &pkv_cpu_avx512_ops, &pkv_dense_avx512vnni);
  f.avx512_bf16 = true;
  TABLES(PKV_ISA_AVX512, &f, &pkv_cpu_avx512_ops, &pkv_dense_avx512bf16);
  f.avx512_vnni = false; /* no processor is so: what needs neither is right */
  TABLES(PKV_ISA_AVX512, &f, &pkv_cpu_avx512_ops, &pkv_dense_avx2);
  f.avx512_vnni = true;
  TABLES(PKV_ISA_AVX2, &f, &pkv_cpu_avx2_ops, &pkv_dense_avx2);
  for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
    *needs[i] = false;
    assert_null(pkv_cpu_isa_table(PKV_ISA_AVX512, &f));
    if (i < 3) assert_null(pkv_cpu_isa_table(PKV_ISA_AVX2, &f));
    *needs[i] = true;
  }
  f.neon = true;
  assert_null(pkv_cpu_isa_table(PKV_ISA_NEON, &f));
#else
  print_message("skipped: not an x86-64 build\n");
  skip();
#endif
}

static void test_neon(void **state) {
  (void)state;
#if defined(__aarch64__)
  pkv_cpu_features f;
  memset(&f, 0, sizeof f);
  f.neon = true;
  TABLES(PKV_ISA_NEON, &f, &pkv_cpu_neon_ops, &pkv_dense_neon);
  f.neon_dotprod = true;
  TABLES(PKV_ISA_NEON, &f, &pkv_cpu_neon_ops, &pkv_dense_neondot);
  f.avx2 = f.fma = f.f16c = true;
  assert_null(pkv_cpu_isa_table(PKV_ISA_AVX2, &f));
#else
  print_message("skipped: not an AArch64 build; test neon runs this one\n");
  skip();
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_everywhere),
      cmocka_unit_test(test_x86),
      cmocka_unit_test(test_neon),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
