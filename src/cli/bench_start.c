/* SPDX-License-Identifier: Apache-2.0 */
/* How long a fresh process takes to its first token, and what memory it needs. */
#include "cli/bench_decode.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

#define SELF   "/proc/self/exe"
#define PROMPT "The capital of France is"
#define ANSWER "16"

/* Kilobytes, as Linux counts them. */
static double megabytes(long maxrss) {
  return (double)maxrss * 1024.0 * 1e-6;
}

double bench_peak_memory(void) {
  struct rusage usage;
  return getrusage(RUSAGE_SELF, &usage) == 0 ? megabytes(usage.ru_maxrss) : 0.0;
}

/* Starts this program as `pkv run`, its stdout into the pipe. */
static int start_process(pid_t *pid, const int pipe_ends[2], const char *model,
                         const char *threads) {
  const char *const words[] = {"pkv", "run",  "-m",           model,       "-p",    PROMPT,
                               "-n",  ANSWER, "--ignore-end", "--threads", threads, NULL};
  char *argv[sizeof words / sizeof *words];
  posix_spawn_file_actions_t actions;
  memcpy(argv, words, sizeof argv);
  int code = posix_spawn_file_actions_init(&actions);
  if (code != 0) return code;
  code = posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  if (code == 0) code = posix_spawn_file_actions_addclose(&actions, pipe_ends[0]);
  if (code == 0) code = posix_spawn_file_actions_addclose(&actions, pipe_ends[1]);
  if (code == 0) code = posix_spawn(pid, SELF, &actions, NULL, argv, environ);
  (void)posix_spawn_file_actions_destroy(&actions);
  return code;
}

/* Reads to the end; *first_ns is when the first byte came, 0 without any. */
static void read_all(int64_t *first_ns, int end) {
  char bytes[4096];
  *first_ns = 0;
  for (;;) {
    const ssize_t got = read(end, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    if (*first_ns == 0) *first_ns = pkv_clock_ns();
  }
}

static pkv_status start_once(double *seconds, double *memory, const char *model,
                             const char *threads, pkv_error *err) {
  int pipe_ends[2], exit_code = 0;
  int64_t first_ns = 0;
  pid_t pid = 0;
  struct rusage usage;
  PKV_CHECK(err, pipe(pipe_ends) == 0, PKV_E_IO, "no pipe: error %d", errno);
  const int64_t begin = pkv_clock_ns();
  const int code = start_process(&pid, pipe_ends, model, threads);
  (void)close(pipe_ends[1]);
  if (code == 0) read_all(&first_ns, pipe_ends[0]);
  (void)close(pipe_ends[0]);
  PKV_CHECK(err, code == 0, PKV_E_IO, "%s could not be started: error %d", SELF, code);
  while (wait4(pid, &exit_code, 0, &usage) < 0)
    PKV_CHECK(err, errno == EINTR, PKV_E_IO, "waiting for `pkv run` failed: error %d", errno);
  PKV_CHECK(err, exit_code == 0 && first_ns != 0, PKV_E_IO,
            "`pkv run` in a process of its own failed: wait status %d", exit_code);
  *seconds = (double)(first_ns - begin) * 1e-9;
  *memory = megabytes(usage.ru_maxrss);
  return PKV_OK;
}

pkv_status bench_start(bench_figure out[2], const char *model, int32_t threads, int32_t repeats,
                       pkv_error *err) {
  char count[16];
  memset(out, 0, 2 * sizeof *out);
  (void)snprintf(count, sizeof count, "%d", (int)threads);
  (void)snprintf(out[0].cell, sizeof out[0].cell, "start");
  (void)snprintf(out[1].cell, sizeof out[1].cell, "memory");
  out[0].unit = "s";
  out[1].unit = "MB";
  for (int32_t i = -1; i < repeats; i++) {
    double seconds = 0.0, memory = 0.0;
    PKV_TRY(start_once(&seconds, &memory, model, count, err));
    if (i < 0) continue;
    out[0].sample[out[0].count++] = seconds;
    out[1].sample[out[1].count++] = memory;
  }
  return PKV_OK;
}
