/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_results.h"

#include <string.h>
#include <sys/utsname.h>

#include "base/cpu.h"

/* CSV fields of ours hold no quotes; commas and line ends become blanks. */
static void plain_text(char *text) {
  for (; *text != '\0'; text++)
    if (*text == ',' || *text == '"' || *text == '\n') *text = ' ';
}

void bench_run_describe(bench_run *run, const char *isa) {
  pkv_cpu_features features;
  struct utsname name;
  pkv_cpu_detect(&features);
  (void)snprintf(run->device, sizeof run->device, "%.64s %s", features.name, isa);
  if (uname(&name) == 0)
    (void)snprintf(run->driver, sizeof run->driver, "%.30s %.60s", name.sysname, name.release);
  plain_text(run->device);
  plain_text(run->driver);
}

static double gb_s(double bytes, double us) {
  return us > 0 ? bytes / us / 1e3 : 0;
}

static double percent(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

void bench_table_head(const bench_run *run) {
  (void)printf("%s, %s\n", run->device, run->setup);
  (void)printf("%-14s %3s %-13s %5s %8s %7s %8s %8s %6s %9s %7s %6s %6s %8s\n", "cell", "thr",
               "route", "rows", "launches", "tasks", "KV MiB", "st. MiB", "pad %", "attend us",
               "plan us", "GB/s", "% null", "% plain");
}

void bench_table_row(const bench_result *r) {
  (void)printf(
      "%-14s %3d %-13s %5.1f %8.1f %7.0f %8.1f %8.2f %6.1f %9.0f %7.1f %6.2f %6.1f %8.1f\n",
      r->cell, r->threads, r->route, r->rows, r->launches, r->tasks, r->kv_bytes / 1048576,
      r->state_bytes / 1048576, percent(r->padded_bytes, r->kv_bytes), r->attend_us, r->plan_us,
      gb_s(r->kv_bytes, r->attend_us), percent(r->null_us, r->attend_us),
      percent(r->plain_us, r->attend_us));
  (void)fflush(stdout);
}

json_t *bench_json_row(const bench_result *r) {
  json_t *row = json_pack(
      "{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
      "cell", r->cell, "route", r->route, "threads", (int)r->threads, "rows", r->rows, "launches",
      r->launches, "tasks", r->tasks, "kv_bytes", r->kv_bytes, "padded_bytes", r->padded_bytes,
      "state_bytes", r->state_bytes, "attend_us", r->attend_us, "plan_us", r->plan_us, "wall_us",
      r->plan_us + r->attend_us, "null_us", r->null_us, "plain_us", r->plain_us, "gb_s",
      gb_s(r->kv_bytes, r->attend_us), "percent_null", percent(r->null_us, r->attend_us),
      "percent_plain", percent(r->plain_us, r->attend_us));
  if (row != NULL)
    (void)json_object_set_new(row, "error", r->error < 0 ? json_null() : json_real(r->error));
  return row;
}

bool bench_csv_row(FILE *file, const bench_run *run, const bench_result *r) {
  char error[32] = "";
  if (ftell(file) == 0)
    (void)fputs("commit,device,driver,cell,route,gpu_us,plan_us,wall_us,bytes,floor_us,error,"
                "peers\n",
                file);
  if (r->error >= 0) (void)snprintf(error, sizeof error, "%.3g", r->error);
  (void)fprintf(file,
                "%s,%s,%s,%s %s %d threads,%s,%.2f,%.2f,%.2f,%.0f,%.2f,%s,plain_read_us=%.2f\n",
                run->commit, run->device, run->driver, r->cell, run->setup, r->threads, r->route,
                r->attend_us, r->plan_us, r->attend_us + r->plan_us, r->kv_bytes, r->null_us, error,
                r->plain_us);
  return fflush(file) == 0 && !ferror(file);
}
