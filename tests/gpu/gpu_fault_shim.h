/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of the CUDA runtime that fail: the linker puts a function of ours before each (--wrap),
 * which counts, and fails the one that it is told to. What it fails is not done, and the error is
 * the last one until somebody asks, as with the runtime's own. Calls that give back never fail.
 */
#ifndef PKV_TEST_GPU_FAULT_SHIM_H
#define PKV_TEST_GPU_FAULT_SHIM_H

#include <stdbool.h>

typedef struct gpu_fault_state {
  int calls;    /* so far */
  int fail_at;  /* the number of the call that fails, 0 = none */
  bool fail_on; /* those after it fail too */
} gpu_fault_state;
extern gpu_fault_state gpu_faults;

#endif
