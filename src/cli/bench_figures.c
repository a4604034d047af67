/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_figures.h"
#include "base/json_memory.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

void bench_model_describe(bench_model_run *run, const char *isa, const char *model_path) {
  const time_t now = time(NULL);
  struct tm parts;
  double load[3];
  bench_run_describe(&run->run, isa);
  const char *const slash = strrchr(model_path, '/');
  (void)snprintf(run->model, sizeof run->model, "%s", slash != NULL ? slash + 1 : model_path);
  for (char *c = run->model; *c != '\0'; c++)
    if (*c == ',' || *c == '"' || (unsigned char)*c < ' ') *c = ' ';
  if (gmtime_r(&now, &parts) != NULL)
    (void)strftime(run->date, sizeof run->date, "%Y-%m-%dT%H:%M:%SZ", &parts);
  if (getloadavg(load, 1) == 1) (void)snprintf(run->load, sizeof run->load, "%.2f", load[0]);
}

void bench_figures_head(const bench_model_run *run) {
  (void)printf("%s, %s\n%d threads, KV %s, activations %s, load of the machine %s\n\n", run->model,
               run->run.device, (int)run->threads, run->kv_dtype, run->activations, run->load);
  (void)printf("%-14s %-9s %10s %10s %10s %5s\n", "cell", "unit", "least", "median", "most",
               "runs");
}

void bench_figures_row(const bench_figure *figure) {
  const int places = strcmp(figure->unit, "s") == 0 ? 3 : 1;
  (void)printf("%-14s %-9s %10.*f %10.*f %10.*f %5d\n", figure->cell, figure->unit, places,
               bench_figure_quantile(figure, 0.0), places, bench_figure_quantile(figure, 0.5),
               places, bench_figure_quantile(figure, 1.0), (int)figure->count);
  (void)fflush(stdout);
}

json_t *bench_figures_json(const bench_figure *figure) {
  json_t *samples = json_array();
  for (int32_t i = 0; i < figure->count; i++)
    pkv_json_add(&samples, json_real(figure->sample[i]));
  return json_pack("{s:s, s:s, s:f, s:f, s:f, s:o}", "cell", figure->cell, "unit", figure->unit,
                   "min", bench_figure_quantile(figure, 0.0), "median",
                   bench_figure_quantile(figure, 0.5), "max", bench_figure_quantile(figure, 1.0),
                   "samples", samples);
}

bool bench_figures_csv(FILE *file, const bench_model_run *run, const bench_figure *figure) {
  if (ftell(file) == 0)
    (void)fputs("commit,date,device,driver,load,engine,model,cell,threads,kv_dtype,activations,"
                "unit,repetitions,min,median,max,samples\n",
                file);
  (void)fprintf(file, "%s,%s,%s,%s,%s,pkv,%s,%s,%d,%s,%s,%s,%d,%.4f,%.4f,%.4f,", run->run.commit,
                run->date, run->run.device, run->run.driver, run->load, run->model, figure->cell,
                (int)run->threads, run->kv_dtype, run->activations, figure->unit,
                (int)figure->count, bench_figure_quantile(figure, 0.0),
                bench_figure_quantile(figure, 0.5), bench_figure_quantile(figure, 1.0));
  for (int32_t i = 0; i < figure->count; i++)
    (void)fprintf(file, "%s%.4f", i > 0 ? " " : "", figure->sample[i]);
  (void)fputc('\n', file);
  return fflush(file) == 0 && !ferror(file);
}
