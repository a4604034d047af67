/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program of all GPU tests.
 *
 *   gpu_tests [--suite NAME]... [--filter PATTERN] [--small] [--fake] [--need-gpu] [--model FILE]
 *             [--ranks N]
 *   gpu_tests --list      the suites; those that only run when named last
 *   gpu_tests --probe     says what device there is: 0 = one to test on, 77 = none, 1 = one that
 *                         does not work
 *
 * Without --suite all run but those marked so. Exit 1 when a test failed. Without a device every
 * test is skipped and counted; a device that cannot be used is a failure.
 */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_suite.h"
#include "support/fake_device.h"

gpu_options gpu_opt;
pkv_executor *gpu;

enum { WHEN_NAMED = 1, NOT_FAKE = 2 };

typedef struct suite {
  const char *name;
  int (*run)(void);
  int flags;
} suite;

/* clang-format off */
static const suite suites[] = {
    {"args", gpu_suite_args, 0},
    {"plans", gpu_suite_plans, 0},
    {"grid", gpu_suite_grid, 0},
    {"bits", gpu_suite_bits, 0},
    {"append", gpu_suite_append, 0},
    {"complaints", gpu_suite_complaints, 0},
    {"sanitized", gpu_suite_sanitized, 0},
    {"graphs", gpu_suite_graphs, 0},
    {"streams", gpu_suite_streams, 0},
    {"tree", gpu_suite_tree, 0},
    {"router", gpu_suite_router, 0},
#ifdef PKV_HAVE_CUDA
    {"dense", gpu_suite_dense, NOT_FAKE},
    {"model", gpu_suite_model, NOT_FAKE},
    {"ranks", gpu_suite_ranks, NOT_FAKE},
    {"steps", gpu_suite_steps, NOT_FAKE | WHEN_NAMED},
    {"swap", gpu_suite_swap, NOT_FAKE | WHEN_NAMED},
    {"shared", gpu_suite_shared, NOT_FAKE},
    {"few", gpu_suite_few, NOT_FAKE},
    {"faults", gpu_suite_faults, NOT_FAKE},
    {"prefill", gpu_suite_prefill, NOT_FAKE},
    {"sample", gpu_suite_sample, NOT_FAKE},
    {"status", gpu_suite_status, NOT_FAKE},
    {"perf", gpu_suite_perf, NOT_FAKE | WHEN_NAMED},
#endif
};
/* clang-format on */
enum { SUITES = sizeof suites / sizeof suites[0] };

/* A GPU that the driver has a file for, whether or not it can be used. */
static bool device_files(void) {
  DIR *const folder = opendir("/dev");
  bool found = false;
  if (folder == NULL) return false;
  for (const struct dirent *e = readdir(folder); e != NULL; e = readdir(folder))
    if (strncmp(e->d_name, "nvidia", 6) == 0 && e->d_name[6] >= '0' && e->d_name[6] <= '9')
      found = true;
  (void)closedir(folder);
  return found;
}

static pkv_executor *open_device(pkv_error *err) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  options.device = PKV_DEVICE_CUDA;
  return pkv_executor_create(&executor, &options, err) == PKV_OK ? executor : NULL;
}

int gpu_setup(void **state) {
  static bool told;
  pkv_error err = {0};
  (void)state;
  gpu = gpu_opt.fake ? fake_device_create() : open_device(&err);
  if (gpu != NULL) return 0;
  if (!told) printf("no device: %s\n", err.text);
  told = true;
  return gpu_opt.need_gpu || device_files() ? -1 : 0;
}

int gpu_teardown(void **state) {
  (void)state;
  pkv_executor_destroy(gpu);
  gpu = NULL;
  return 0;
}

static int probe(void) {
  pkv_error err = {0};
  pkv_executor *executor = open_device(&err);
  if (executor != NULL) {
    puts("a device to test on");
    pkv_executor_destroy(executor);
    return 0;
  }
  printf("%s\n", err.text);
  return device_files() ? 1 : 77;
}

static int list(void) {
  for (int named = 0; named < 2; named++)
    for (int i = 0; i < SUITES; i++)
      if (((suites[i].flags & WHEN_NAMED) != 0) == (named != 0))
        printf("%s%s\n", suites[i].name, named ? " (when named)" : "");
  return 0;
}

static const suite *find(const char *name) {
  for (int i = 0; i < SUITES; i++)
    if (name != NULL && strcmp(suites[i].name, name) == 0) return &suites[i];
  return NULL;
}

static int usage(const char *what) {
  fprintf(stderr,
          "gpu_tests: cannot use '%s'; takes --suite NAME, --filter PATTERN, --small, --fake, "
          "--need-gpu, --model FILE, --ranks N, --list, --probe\n",
          what);
  return 2;
}

int main(int argc, char **argv) {
  const suite *chosen[SUITES];
  int count = 0, failed = 0;
  for (int i = 1; i < argc; i++) {
    const char *const value = i + 1 < argc ? argv[i + 1] : NULL;
    if (strcmp(argv[i], "--list") == 0) return list();
    if (strcmp(argv[i], "--probe") == 0) return probe();
#ifdef PKV_HAVE_CUDA
    if (strcmp(argv[i], "--broken-server") == 0) return gpu_broken_server(); /* test_gpu_faults.c */
    if (strcmp(argv[i], "--hog") == 0) return gpu_hog();
    if (strcmp(argv[i], "--one-engine") == 0) return gpu_one_engine();
#endif
    if (strcmp(argv[i], "--small") == 0) {
      gpu_opt.small = true;
    } else if (strcmp(argv[i], "--fake") == 0) {
      gpu_opt.fake = true;
    } else if (strcmp(argv[i], "--need-gpu") == 0) {
      gpu_opt.need_gpu = true;
    } else if (strcmp(argv[i], "--model") == 0 && value != NULL) {
      gpu_opt.model = argv[++i];
    } else if (strcmp(argv[i], "--ranks") == 0 && value != NULL && value[0] > '0' &&
               value[0] <= '8') {
      gpu_opt.ranks = argv[++i][0] - '0';
    } else if (strcmp(argv[i], "--filter") == 0 && value != NULL) {
      cmocka_set_test_filter(argv[++i]);
    } else if (strcmp(argv[i], "--suite") == 0 && find(value) != NULL && count < SUITES) {
      chosen[count++] = find(argv[++i]);
    } else {
      return usage(value != NULL ? value : argv[i]);
    }
  }
  const int without = WHEN_NAMED | (gpu_opt.fake ? NOT_FAKE : 0);
  for (int i = 0; i < SUITES && count == 0; i++)
    if ((suites[i].flags & without) == 0) failed += suites[i].run();
  for (int i = 0; i < count; i++)
    failed += chosen[i]->run();
  return failed != 0;
}
