/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_results.h"

#include <string.h>
#include <sys/utsname.h>

#include "base/cpu.h"
#include "base/json_memory.h"

#define RAW_BYTES ((size_t)4 << 20)
#define HEAD                                                                                       \
  "commit,device,driver,cell,route,gpu_us,plan_us,wall_us,bytes,floor_us,error,peers,null_us,"     \
  "wait_us,event_us,launch_us,step_us,rows,launches,ctas_sm,state_bytes,padded_bytes,gb_s,"        \
  "limit_us,setup,raw\n"

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

void bench_run_describe_device(bench_run *run, const char *device, const char *driver) {
  (void)snprintf(run->device, sizeof run->device, "%s", device);
  (void)snprintf(run->driver, sizeof run->driver, "%s", driver);
  plain_text(run->device);
  plain_text(run->driver);
}

void bench_result_init(bench_result *r, const char *cell, const char *route) {
  memset(r, 0, sizeof *r);
  r->cell = cell;
  r->route = route;
  r->peers = "";
  r->error = -1;
  pkv_buffer_init(&r->raw, RAW_BYTES, NULL);
}

void bench_result_deinit(bench_result *r) {
  pkv_buffer_deinit(&r->raw);
}

pkv_status bench_result_raw(bench_result *r, const char *name, const double *us, int32_t count,
                            double divisor, pkv_error *err) {
  PKV_TRY(pkv_buffer_printf(&r->raw, err, "%s%s=", r->raw.size > 0 ? ";" : "", name));
  for (int32_t i = 0; i < count; i++)
    PKV_TRY(pkv_buffer_printf(&r->raw, err, "%s%.3f", i > 0 ? " " : "", us[i] / divisor));
  return PKV_OK;
}

static double gb_s(const bench_result *r) {
  return r->attend_us > 0 ? r->kv_bytes / r->attend_us / 1e3 : 0;
}

static double ratio(double part, double whole) {
  return whole > 0 ? part / whole : 0;
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
      r->state_bytes / 1048576, 100 * ratio(r->padded_bytes, r->kv_bytes), r->attend_us, r->plan_us,
      gb_s(r), 100 * ratio(r->null_us, r->attend_us), 100 * ratio(r->plain_us, r->attend_us));
  (void)fflush(stdout);
}

void bench_table_sharing(const bench_result *r) {
  (void)printf(
      "  %.1f shared prefixes, read once: %.1f of %.1f MiB (%.2f times less), tiles %.0f %% "
      "full",
      r->nodes, r->kv_bytes / 1048576, r->total_bytes / 1048576, ratio(r->total_bytes, r->kv_bytes),
      100 * r->tile_fill);
  if (r->balanced_us > 0)
    (void)printf("; %.2f times as fast as balanced", ratio(r->balanced_us, r->attend_us));
  if (r->limit_us > 0)
    (void)printf("; %.2f times the limit of %.1f us", ratio(r->attend_us, r->limit_us),
                 r->limit_us);
  if (r->fma_us > 0)
    (void)printf("; %.1f %% of the FMA rate", 100 * ratio(r->fma_us, r->attend_us));
  (void)printf("\n");
  (void)fflush(stdout);
}

void bench_device_head(const bench_run *run) {
  (void)printf("%s, driver %s, %s\nmicroseconds a layer; step: plan and 32 layers\n", run->device,
               run->driver, run->setup);
  (void)printf("%-16s %-15s %5s %8s %8s %6s %6s %8s %8s %8s %6s %7s %8s %8s %8s %8s %9s %8s\n",
               "cell", "route", "rows", "KV MiB", "st. MiB", "pad %", "launch", "floor", "null",
               "gpu", "/null", "GB/s", "plan", "event", "wall", "graph", "step", "error");
}

/* A time, or a dash where there is none. */
static void time_field(double us, int width) {
  if (us >= 0)
    (void)printf(" %*.2f", width, us);
  else
    (void)printf(" %*s", width, "-");
}

void bench_device_row(const bench_result *r) {
  (void)printf("%-16s %-15s %5.1f %8.1f %8.2f %6.1f %6.1f", r->cell, r->route, r->rows,
               r->kv_bytes / 1048576, r->state_bytes / 1048576,
               100 * ratio(r->padded_bytes, r->kv_bytes), r->launches);
  time_field(r->floor_us, 8);
  time_field(r->null_us, 8);
  time_field(r->attend_us, 8);
  (void)printf(" %6.3f %7.0f", ratio(r->attend_us, r->null_us), gb_s(r));
  time_field(r->plan_us, 8);
  time_field(r->event_us, 8);
  time_field(r->wall_us, 8);
  time_field(r->launch_us, 8);
  time_field(r->step_us, 9);
  (void)printf(" %8.1e\n", r->error);
  (void)fflush(stdout);
}

/* A number, or null where it was not measured. */
static json_t *number(double value) {
  return value < 0 ? json_null() : json_real(value);
}

json_t *bench_json_row(const bench_result *r) {
  const struct {
    const char *name;
    double value;
  } fields[] = {{"rows", r->rows},
                {"launches", r->launches},
                {"tasks", r->tasks},
                {"kv_bytes", r->kv_bytes},
                {"total_bytes", r->total_bytes},
                {"nodes", r->nodes},
                {"tile_fill", r->tile_fill},
                {"padded_bytes", r->padded_bytes},
                {"state_bytes", r->state_bytes},
                {"attend_us", r->attend_us},
                {"plan_us", r->plan_us},
                {"wall_us", r->wall_us},
                {"null_us", r->null_us},
                {"error", r->error},
                {"gb_s", gb_s(r)},
                {"percent_null", 100 * ratio(r->null_us, r->attend_us)},
                {"speedup", r->balanced_us > 0 ? ratio(r->balanced_us, r->attend_us) : -1}};
  const struct {
    const char *name;
    double value;
  } cpu[] = {{"plain_us", r->plain_us},
             {"percent_plain", 100 * ratio(r->plain_us, r->attend_us)},
             {"percent_fma", r->fma_us > 0 ? 100 * ratio(r->fma_us, r->attend_us) : -1}},
    device[] = {{"floor_us", r->floor_us},
                {"wait_us", r->wait_us},
                {"event_us", r->event_us},
                {"launch_us", r->launch_us},
                {"step_us", r->step_us},
                {"ctas_sm", r->ctas_sm},
                {"limit_us", r->limit_us > 0 ? r->limit_us : -1}};
  json_t *row = json_pack("{s:s, s:s}", "cell", r->cell, "route", r->route);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    pkv_json_set(&row, fields[i].name, number(fields[i].value));
  if (r->threads > 0) pkv_json_set(&row, "threads", json_integer(r->threads));
  for (size_t i = 0; i < sizeof cpu / sizeof *cpu && r->threads > 0; i++)
    pkv_json_set(&row, cpu[i].name, number(cpu[i].value));
  for (size_t i = 0; i < sizeof device / sizeof *device && r->threads == 0; i++)
    pkv_json_set(&row, device[i].name, number(device[i].value));
  return row;
}

/* The first line of a file that is there already must be our head. */
static pkv_status check_head(FILE *file, const char *path, pkv_error *err) {
  char line[sizeof HEAD + 1];
  rewind(file);
  if (fgets(line, sizeof line, file) == NULL) return PKV_OK;
  PKV_CHECK(err, strcmp(line, HEAD) == 0, PKV_E_FORMAT,
            "%s has other columns than this version writes: choose another file", path);
  return PKV_OK;
}

pkv_status bench_csv_open(FILE **out, const char *path, const char *command, pkv_error *err) {
  *out = NULL;
  FILE *const file = fopen(path, "a+e");
  PKV_CHECK(err, file, PKV_E_IO, "cannot open %s", path);
  pkv_status status = check_head(file, path, err);
  (void)fseek(file, 0, SEEK_END);
  if (status == PKV_OK && ftell(file) == 0) (void)fputs(HEAD, file);
  if (status == PKV_OK) (void)fprintf(file, "# command: pkv %s\n", command);
  if (status == PKV_OK && (fflush(file) != 0 || ferror(file)))
    status = PKV_FAIL(err, PKV_E_IO, "cannot write %s", path);
  if (status != PKV_OK) {
    (void)fclose(file);
    return status;
  }
  *out = file;
  return PKV_OK;
}

static void csv_time(FILE *file, double us) {
  if (us >= 0)
    (void)fprintf(file, "%.3f,", us);
  else
    (void)fputc(',', file);
}

bool bench_csv_row(FILE *file, const bench_run *run, const bench_result *r) {
  const bool cpu = r->threads > 0;
  (void)fprintf(file, "%s,%s,%s,%s", run->commit, run->device, run->driver, r->cell);
  if (cpu) (void)fprintf(file, " %s %d threads", run->setup, r->threads);
  (void)fprintf(file, ",%s,", r->route);
  csv_time(file, r->attend_us);
  csv_time(file, r->plan_us);
  csv_time(file, r->wall_us);
  (void)fprintf(file, "%.0f,", r->kv_bytes);
  csv_time(file, cpu ? r->null_us : r->floor_us);
  if (r->error >= 0) (void)fprintf(file, "%.3g", r->error);
  if (!cpu)
    (void)fprintf(file, ",%s,", r->peers);
  else if (r->fma_us > 0)
    (void)fprintf(file, ",plain_read_us=%.2f;fma_us=%.2f,", r->plain_us, r->fma_us);
  else
    (void)fprintf(file, ",plain_read_us=%.2f,", r->plain_us);
  csv_time(file, r->null_us);
  csv_time(file, cpu ? -1 : r->wait_us);
  csv_time(file, cpu ? -1 : r->event_us);
  csv_time(file, cpu ? -1 : r->launch_us);
  csv_time(file, cpu ? -1 : r->step_us);
  (void)fprintf(file, "%.2f,%.2f,", r->rows, r->launches);
  csv_time(file, cpu ? -1 : r->ctas_sm);
  (void)fprintf(file, "%.0f,%.0f,%.2f,", r->state_bytes, r->padded_bytes, gb_s(r));
  csv_time(file, cpu || r->limit_us <= 0 ? -1 : r->limit_us);
  (void)fprintf(file, "%s,%s\n", run->setup, r->raw.size > 0 ? r->raw.data : "");
  return fflush(file) == 0 && !ferror(file);
}
