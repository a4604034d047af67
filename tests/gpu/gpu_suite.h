/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_tests: one program of all tests that want a device, a suite a file. They use device.h alone,
 * but those marked so, and therefore also run on support/fake_device.h (--fake), where no GPU is.
 */
#ifndef PKV_TEST_GPU_SUITE_H
#define PKV_TEST_GPU_SUITE_H

#include <stdbool.h>
#include <stdint.h>

#include "pkv/device.h"

typedef struct gpu_options {
  bool small;        /* a subset that takes seconds where each launch takes long (sanitizers) */
  bool fake;         /* on the CPU */
  bool need_gpu;     /* no device is a failure */
  const char *model; /* a model file to compare text of; NULL: none */
  int32_t ranks;     /* devices that compute it together, in turn with one; 0 = one alone */
} gpu_options;
extern gpu_options gpu_opt;

/* The executor of the running suite; NULL = no device, every test skips. */
extern pkv_executor *gpu;

/* cmocka's group functions. The setup fails when a device is here but cannot be used. */
int gpu_setup(void **state);
int gpu_teardown(void **state);

#define NEED_GPU()                                                                                 \
  do {                                                                                             \
    if (gpu == NULL) skip();                                                                       \
  } while (0)

/* Each runs its group and returns the number of failed tests. */
int gpu_suite_append(void);
int gpu_suite_args(void);
int gpu_suite_bits(void);
int gpu_suite_complaints(void);
int gpu_suite_grid(void);
int gpu_suite_plans(void);
int gpu_suite_graphs(void);
int gpu_suite_router(void);
int gpu_suite_sanitized(void);
int gpu_suite_streams(void);
int gpu_suite_tree(void);
int gpu_suite_shared(void);
/* With CUDA: engines make their own executors. */
int gpu_suite_dense(void);
int gpu_suite_model(void);
int gpu_suite_ranks(void);
int gpu_suite_steps(void);
int gpu_suite_swap(void);
/* With the CUDA runtime. */
int gpu_suite_few(void);
int gpu_suite_faults(void);
int gpu_suite_prefill(void);
int gpu_suite_sample(void);
int gpu_suite_perf(void);
int gpu_suite_status(void);
/* Processes of their own: a server whose device can be broken, one that takes the memory, and one
   that makes an engine. */
int gpu_broken_server(void);
int gpu_hog(void);
int gpu_one_engine(void);

#endif
