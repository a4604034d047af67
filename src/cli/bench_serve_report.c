/* SPDX-License-Identifier: Apache-2.0 */
/* The page of `pkv bench serve --report`: tables and SVG, nothing fetched from anywhere. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "cli/bench_serve.h"

#define PLOT_WIDTH  640
#define PLOT_HEIGHT 260
#define LEFT        60
#define BOTTOM      40
#define BAR_HEIGHT  22

static const char *const colours[PKV_BENCH_SCHEDULES] = {
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"};

static void text(FILE *f, const char *words) {
  for (; *words != '\0'; words++) {
    if (*words == '<')
      (void)fputs("&lt;", f);
    else if (*words == '&')
      (void)fputs("&amp;", f);
    else
      (void)fputc(*words, f);
  }
}

static void head(FILE *f, const bench_report *r) {
  const bench_workload *const w = r->workload;
  (void)fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
              "<title>Orders of admission</title>\n<style>\n"
              "body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; "
              "padding: 0 1em; color: #222 }\n"
              "table { border-collapse: collapse; margin: 1em 0 }\n"
              "td, th { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right }\n"
              "td:first-child, th:first-child { text-align: left }\n"
              "svg { display: block; margin: 1em 0 } svg text { font: 12px system-ui, sans-serif; "
              "fill: #444 }\n"
              "code { background: #f3f3f3; padding: .1em .3em }\n</style></head><body>\n"
              "<h1>One workload, admitted in different orders</h1>\n<p>",
              f);
  (void)fprintf(f,
                "%d requests of %d groups: %d tokens that a group has in common, %d of each "
                "request's own, answers of %d tokens; ",
                (int)w->requests, (int)w->groups, (int)w->prefix, (int)w->own, (int)w->tokens);
  if (w->rate > 0.0)
    (void)fprintf(f, "%g of them a second at random times. ", w->rate);
  else
    (void)fputs("all of them at once. ", f);
  (void)fprintf(f, "Good is a first token within %g s and %g s a token after it.</p>\n<p>",
                w->slo_ttft, w->slo_tpot);
  text(f, r->model);
  (void)fputs(", ", f);
  text(f, r->machine);
  (void)fputs(". Made by <code>", f);
  text(f, r->command);
  (void)fputs("</code>.</p>\n", f);
}

static void table(FILE *f, const bench_report *r) {
  (void)fputs("<table><tr><th>schedule<th>s<th>tokens/s<th>good requests/s<th>TTFT p50, p90, p99 "
              "(ms)<th>TPOT p50, p90 (ms)<th>ITL p99 (ms)<th>queue p50 (ms)<th>decode rows<th>KV "
              "MB a token<th>prompt reused</tr>\n",
              f);
  for (int32_t i = 0; i < r->count; i++) {
    const bench_outcome *const o = &r->outcomes[i];
    (void)fprintf(f, "<tr><td>%s<td>%.2f<td>%.1f<td>%.2f<td>%.0f, %.0f, %.0f<td>%.1f, %.1f<td>%.1f",
                  r->schedules[i].name, o->seconds, o->tokens_per_s, o->goodput, o->ttft.p50,
                  o->ttft.p90, o->ttft.p99, o->tpot.p50, o->tpot.p90, o->itl.p99);
    if (o->queue.p50 >= 0.0)
      (void)fprintf(f, "<td>%.0f", o->queue.p50);
    else
      (void)fputs("<td>-", f);
    (void)fprintf(f, "<td>%.1f<td>%.2f<td>%.0f %%</tr>\n", o->mean_rows, o->kv_mb_a_token,
                  100.0 * o->reused);
  }
  (void)fputs("</table>\n", f);
}

static void legend(FILE *f, const bench_report *r) {
  for (int32_t i = 0; i < r->count; i++)
    (void)fprintf(f,
                  "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" "
                  "y=\"%d\">%s</text>\n",
                  PLOT_WIDTH + 10, 14 + 18 * (int)i, colours[i], PLOT_WIDTH + 28, 24 + 18 * (int)i,
                  r->schedules[i].name);
}

/* Share of the requests that have their first token by then. */
static void first_tokens(FILE *f, const bench_report *r) {
  double longest = 0.0;
  for (int32_t i = 0; i < r->count; i++) {
    const bench_outcome *const o = &r->outcomes[i];
    if (o->count > 0 && o->first_s[o->count - 1] > longest) longest = o->first_s[o->count - 1];
  }
  if (longest <= 0.0) return;
  (void)fprintf(f,
                "<h2>First tokens</h2>\n<svg width=\"%d\" height=\"%d\" role=\"img\" "
                "aria-label=\"share of requests with a first token over time\">\n",
                PLOT_WIDTH + 160, PLOT_HEIGHT + BOTTOM);
  for (int i = 0; i <= 4; i++) {
    const double x = LEFT + (PLOT_WIDTH - LEFT) * i / 4.0, y = PLOT_HEIGHT - 240.0 * i / 4.0;
    (void)fprintf(f,
                  "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/><text "
                  "x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d %%</text><text x=\"%.1f\" y=\"%d\" "
                  "text-anchor=\"middle\">%.2f s</text>\n",
                  LEFT, PLOT_WIDTH, y, y, LEFT - 6, y + 4, 25 * i, x, PLOT_HEIGHT + 18,
                  longest * i / 4.0);
  }
  for (int32_t s = 0; s < r->count; s++) {
    const bench_outcome *const o = &r->outcomes[s];
    (void)fprintf(f, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"%s\" points=\"%d,%d",
                  colours[s], LEFT, PLOT_HEIGHT);
    for (int32_t i = 0; i < o->count; i++) {
      const double x = LEFT + (PLOT_WIDTH - LEFT) * o->first_s[i] / longest;
      (void)fprintf(f, " %.1f,%.1f %.1f,%.1f", x, PLOT_HEIGHT - 240.0 * i / o->count, x,
                    PLOT_HEIGHT - 240.0 * (i + 1) / o->count);
    }
    (void)fputs("\"/>\n", f);
  }
  legend(f, r);
  (void)fputs("</svg>\n", f);
}

static void bars(FILE *f, const bench_report *r, const char *title, const char *unit,
                 const double *values) {
  double highest = 0.0;
  for (int32_t i = 0; i < r->count; i++)
    if (values[i] > highest) highest = values[i];
  if (highest <= 0.0) return;
  (void)fprintf(f, "<h2>%s</h2>\n<svg width=\"%d\" height=\"%d\" role=\"img\" aria-label=\"%s\">\n",
                title, PLOT_WIDTH + 160, BAR_HEIGHT * (int)r->count + 6, title);
  for (int32_t i = 0; i < r->count; i++) {
    const int y = BAR_HEIGHT * (int)i;
    const double width = (PLOT_WIDTH - 120) * values[i] / highest;
    (void)fprintf(f,
                  "<text x=\"112\" y=\"%d\" text-anchor=\"end\">%s</text><rect x=\"120\" y=\"%d\" "
                  "width=\"%.1f\" height=\"%d\" fill=\"%s\"/><text x=\"%.1f\" y=\"%d\">%.4g "
                  "%s</text>\n",
                  y + 15, r->schedules[i].name, y, width, BAR_HEIGHT - 4, colours[i], 126 + width,
                  y + 15, values[i], unit);
  }
  (void)fputs("</svg>\n", f);
}

void bench_serve_report(FILE *file, const bench_report *report) {
  double values[PKV_BENCH_SCHEDULES];
  head(file, report);
  table(file, report);
  first_tokens(file, report);
  for (int32_t i = 0; i < report->count; i++)
    values[i] = report->outcomes[i].tokens_per_s;
  bars(file, report, "Tokens a second", "tokens/s", values);
  for (int32_t i = 0; i < report->count; i++)
    values[i] = report->outcomes[i].tpot.p50;
  bars(file, report, "Time per output token, median", "ms", values);
  for (int32_t i = 0; i < report->count; i++)
    values[i] = report->outcomes[i].kv_mb_a_token;
  bars(file, report, "KV cache read a generated token", "MB", values);
  for (int32_t i = 0; i < report->count; i++)
    values[i] = (double)report->outcomes[i].prefill_tokens;
  bars(file, report, "Prompt tokens computed", "tokens", values);
  (void)fputs("</body></html>\n", file);
}

pkv_status bench_report_open(FILE **out, const char *path, pkv_error *err) {
  *out = fopen(path, "ae");
  PKV_CHECK(err, *out != NULL, PKV_E_IO, "cannot open %s: %s", path, strerror(errno));
  return PKV_OK;
}

pkv_status bench_report_close(FILE *file, const bench_report *report, const char *path,
                              pkv_error *err) {
  struct stat about;
  bool good = fstat(fileno(file), &about) == 0 &&
              (!S_ISREG(about.st_mode) || ftruncate(fileno(file), 0) == 0);
  if (good) bench_serve_report(file, report);
  good = good && ferror(file) == 0;
  good = fclose(file) == 0 && good;
  PKV_CHECK(err, good, PKV_E_IO, "cannot write %s: %s", path, strerror(errno));
  return PKV_OK;
}
