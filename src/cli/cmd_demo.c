/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv demo`: many questions about few documents, decoded together from one paged cache; what a
 * newcomer sees first. Every figure of the closing table is measured in this run.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_memory.h"
#include "base/sort.h"
#include "cli/bench_figures.h"
#include "cli/commands.h"
#include "cli/demo_requests.h"
#include "cli/demo_serve.h"
#include "cli/terminal.h"
#include "server/text_stream.h"

#define ANSWER_BYTES ((size_t)1 << 20)
#define INDENT       4
/* Prompt tokens in a step: half the default, so that answers and bars move more often. */
#define DEMO_CHUNK 256
/* Of the server's batch. */
#define SERVED_ROWS 8

typedef struct demo_options {
  const char *model, *schedules, *report;
  int32_t requests, groups, tokens, prefix, show, threads, json;
} demo_options;

static const pkv_option options_table[] = {
    PKV_REQUIRED(demo_options, model, 'm', "model", "FILE", "GGUF file, or folder of safetensors"),
    PKV_INT(demo_options, requests, 'r', "requests", "N", "32", 1, PKV_DEMO_REQUESTS,
            "questions asked in all"),
    PKV_INT(demo_options, groups, 'g', "groups", "N", "4", 1, PKV_DEMO_GROUPS,
            "documents; the questions are spread over them"),
    PKV_INT(demo_options, tokens, 'n', "tokens", "N", "48", 1, 4096, "longest answer"),
    PKV_INT(demo_options, prefix, 0, "prefix", "N", "1200", 16, 100000,
            "tokens of each document that the prompts start with"),
    PKV_INT(demo_options, show, 0, "show", "N", "4", 0, PKV_DEMO_REQUESTS, "answers to print"),
    PKV_TEXT(demo_options, schedules, 's', "schedules", "LIST", "fcfs,tree/marginal",
             "orders of admission that the server is run in afterwards; tree/marginal is Feather; "
             "empty = none"),
    PKV_TEXT(demo_options, report, 0, "report", "FILE", "pkv-demo.html",
             "page with plots of these runs; empty = none"),
    PKV_INT(demo_options, threads, 0, "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_FLAG(demo_options, json, 0, "json", "print one JSON object at the end"),
};

typedef struct demo_answer {
  pkv_text_stream stream;
  size_t printed; /* bytes of its text */
  bool titled;
  pkv_finish finish;
  int32_t tokens;
  double first_s; /* from the common start */
} demo_answer;

typedef struct demo {
  const pkv_cli *cli;
  const demo_options *options;
  pkv_terminal terminal;
  pkv_model *model;
  pkv_engine *engine;
  pkv_demo_request requests[PKV_DEMO_REQUESTS];
  demo_answer answers[PKV_DEMO_REQUESTS];
  pkv_event events[PKV_DEMO_REQUESTS];
  int count, shown; /* shown: which of the printed answers is being printed */
  int64_t prompt_tokens, begin_ns;
  double total_s;
  bool interrupted;
  pkv_engine_stats stats; /* when all is answered */
  /* The server in several orders of admission. */
  bench_schedule schedules[PKV_BENCH_SCHEDULES];
  bench_outcome outcomes[PKV_BENCH_SCHEDULES];
  bench_workload workload;
  int32_t schedule_count;
  FILE *report; /* NULL = none */
} demo;

/* Leading tokens that two prompts have in common. */
static size_t common_tokens(const pkv_tokens *a, const pkv_tokens *b) {
  size_t n = 0;
  while (n < a->count && n < b->count && a->ids[n] == b->ids[n])
    n++;
  return n;
}

static pkv_status create_engine(demo *d, pkv_error *err) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  int64_t cache = 0, longest = 0;
  for (int i = 0; i < d->count; i++) {
    const pkv_tokens *const prompt = &d->requests[i].prompt;
    const int64_t length = (int64_t)prompt->count + d->options->tokens;
    /* The first of a group pays for the document, the others for what is their own. */
    const size_t shared = i >= d->options->groups
                              ? common_tokens(prompt, &d->requests[i % d->options->groups].prompt)
                              : 0;
    d->prompt_tokens += (int64_t)prompt->count;
    cache += length - (int64_t)shared + 4 * o.page_tokens;
    if (length > longest) longest = length;
  }
  PKV_CHECK(err, longest <= INT32_MAX, PKV_E_LIMIT, "prompts of %lld tokens are too long",
            (long long)longest);
  o.threads = d->options->threads;
  o.max_rows = o.max_requests = d->count;
  o.cache_tokens = cache > longest ? cache : longest;
  o.max_seq_len = (int32_t)longest;
  o.prefill_chunk = DEMO_CHUNK;
  o.route_stats = 1;
  return pkv_engine_create(&d->engine, d->model, &o, err);
}

static pkv_status submit_all(demo *d, pkv_error *err) {
  d->begin_ns = pkv_clock_ns();
  for (int i = 0; i < d->count; i++) {
    pkv_request request = PKV_REQUEST_INIT;
    int64_t id = 0;
    request.prompt = d->requests[i].prompt.ids;
    request.prompt_tokens = (int32_t)d->requests[i].prompt.count;
    request.max_tokens = d->options->tokens;
    request.user = &d->answers[i];
    PKV_TRY(pkv_engine_submit(&id, d->engine, &request, err));
  }
  return PKV_OK;
}

static double elapsed(const demo *d) {
  return (double)(pkv_clock_ns() - d->begin_ns) * 1e-9;
}

static pkv_status take_event(demo *d, const pkv_event *event, pkv_error *err) {
  demo_answer *const a = event->user;
  a->finish = event->finish;
  if (event->token >= 0) {
    if (a->tokens++ == 0) a->first_s = elapsed(d);
    if (event->finish != PKV_FINISH_STOP)
      PKV_TRY(pkv_text_stream_token(&a->stream, event->token, err));
  }
  return event->finish == PKV_FINISH_NONE ? PKV_OK : pkv_text_stream_end(&a->stream, err);
}

/* Prints the lines of one answer that are complete; false while more of it will come. */
static bool print_answer(demo *d, int index) {
  demo_answer *const a = &d->answers[index];
  const bool final = a->finish != PKV_FINISH_NONE;
  if (a->tokens == 0 && !final) return false;
  if (!a->titled)
    pkv_terminal_line(&d->terminal, "\n[%d] %s: %s", index + 1, d->requests[index].document,
                      d->requests[index].question);
  a->titled = true;
  while (a->printed < a->stream.text.size) {
    char *const text = a->stream.text.data + a->printed;
    const size_t bytes = pkv_wrap_line(text, a->stream.text.size - a->printed,
                                       d->terminal.width - INDENT - 1, final);
    if (bytes == 0) break;
    size_t shown = bytes;
    while (shown > 0 && (text[shown - 1] == ' ' || text[shown - 1] == '\n'))
      shown--;
    pkv_text_tame(text, shown);
    if (shown > 0) pkv_terminal_line(&d->terminal, "%*s%.*s", INDENT, "", (int)shown, text);
    a->printed += bytes;
  }
  return final;
}

static void show_progress(demo *d, bool now) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  char note[64];
  if (d->options->json) return;
  pkv_engine_get_stats(&stats, d->engine);
  while (d->shown < d->options->show && d->shown < d->count && print_answer(d, d->shown))
    d->shown++;
  int ended = 0;
  for (int i = 0; i < d->count; i++)
    ended += d->answers[i].finish != PKV_FINISH_NONE;
  const double all = (double)d->count * d->options->tokens;
  double answered = (double)stats.generated_tokens;
  for (int i = 0; i < d->count; i++)
    if (d->answers[i].finish != PKV_FINISH_NONE)
      answered += d->options->tokens - d->answers[i].tokens;
  (void)snprintf(note, sizeof note, "%d of %d done, %.0f s", ended, d->count, elapsed(d));
  const pkv_bar bars[2] = {{"prompts", (double)(stats.prefill_tokens + stats.prompt_tokens_reused) /
                                           (double)d->prompt_tokens},
                           {"answers", answered / all}};
  pkv_terminal_bars(&d->terminal, bars, 2, note, now);
}

static pkv_status generate(demo *d, pkv_error *err) {
  PKV_TRY(submit_all(d, err));
  while (pkv_engine_pending(d->engine) > 0) {
    size_t count = 0;
    if (pkv_cli_interrupted() || ferror(stdout)) {
      d->interrupted = true;
      return PKV_OK; /* destroying the engine ends what runs */
    }
    PKV_TRY(pkv_engine_step(d->events, PKV_DEMO_REQUESTS, &count, d->engine, err));
    for (size_t i = 0; i < count; i++)
      PKV_TRY(take_event(d, &d->events[i], err));
    show_progress(d, false);
  }
  d->total_s = elapsed(d);
  pkv_engine_get_stats(&d->stats, d->engine);
  show_progress(d, true);
  pkv_terminal_clear(&d->terminal);
  return PKV_OK;
}

/* Of the times to the first token: the value with `share` of them at or below. */
static double first_quantile(const demo *d, double share) {
  double times[PKV_DEMO_REQUESTS];
  int n = 0;
  for (int i = 0; i < d->count; i++)
    if (d->answers[i].tokens > 0) times[n++] = d->answers[i].first_s;
  if (n == 0) return 0.0;
  pkv_sort_doubles(times, (size_t)n);
  int at = (int)(share * n + 0.999999) - 1;
  return times[at < 0 ? 0 : at >= n ? n - 1 : at];
}

static double per(double amount, double by) {
  return by > 0.0 ? amount / by : 0.0;
}

static void print_routes(const pkv_engine_stats *s) {
  static const struct {
    pkv_route route;
    const char *note;
  } routes[] = {{PKV_ROUTE_SHARED, "this run: what requests share is read once"},
                {PKV_ROUTE_BALANCED, "without sharing: each request reads all of its own"},
                {PKV_ROUTE_WORKQUEUE, "what its plans would read"},
                {PKV_ROUTE_SPLIT, "what its plans would read"},
                {PKV_ROUTE_BUCKET_EXACT, "what its plans would read"},
                {PKV_ROUTE_BUCKET_PADDED, "what its plans would read"}};
  const double least = (double)s->kv_bytes_route[PKV_ROUTE_SHARED];
  (void)puts("\nKV cache bytes read a generated token, by attention route");
  for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
    const double bytes = (double)s->kv_bytes_route[routes[i].route];
    (void)printf("  %-22s %8.2f MB   %5.2fx  %s\n", pkv_route_name(routes[i].route),
                 per(bytes, (double)s->decode_tokens) * 1e-6, per(bytes, least), routes[i].note);
  }
}

static void print_table(const demo *d) {
  const pkv_engine_stats s = d->stats;
  const double kib = per((double)s.cache_bytes, (double)s.pages_total) / 1024.0;
  (void)printf("\n%-24s %d, questions about %d documents\n", "requests", d->count,
               (int)(d->options->groups < d->count ? d->options->groups : d->count));
  (void)printf("%-24s %lld, of which %lld (%.0f %%) were taken from pages of another request\n",
               "prompt tokens", (long long)s.prompt_tokens, (long long)s.prompt_tokens_reused,
               100.0 * per((double)s.prompt_tokens_reused, (double)s.prompt_tokens));
  (void)printf("%-24s %lld\n", "generated tokens", (long long)s.generated_tokens);
  (void)printf("%-24s %.1f tokens/s computed\n", "prefill",
               per((double)s.prefill_tokens, s.prefill_seconds));
  (void)printf("%-24s %.1f tokens/s\n", "decode", per((double)s.decode_tokens, s.decode_seconds));
  (void)printf("%-24s median %.2f s, 95 %% within %.2f s (all submitted at once)\n",
               "time to first token", first_quantile(d, 0.5), first_quantile(d, 0.95));
  (void)printf("%-24s %.2f s\n", "total time", d->total_s);
  (void)printf("%-24s peak %lld of %lld, now %lld in use (%.0f KiB each)\n", "pages",
               (long long)s.pages_peak, (long long)s.pages_total, (long long)s.pages_in_use, kib);
  (void)printf("%-24s %lld\n", "prefix pages reused", (long long)s.prefix_pages_reused);
  (void)printf("%-24s %lld of %lld read shared prefixes once for all\n", "steps",
               (long long)s.shared_steps, (long long)s.steps);
  if (s.preemptions > 0) (void)printf("%-24s %lld\n", "preemptions", (long long)s.preemptions);
  print_routes(&s);
}

/* --- the server, once in each order -------------------------------------------------------- */

static void show_serving(void *user, double share, double seconds) {
  demo *const d = user;
  char note[64];
  const pkv_bar bar = {"answers", share};
  if (d->options->json) return;
  (void)snprintf(note, sizeof note, "%.0f s", seconds);
  pkv_terminal_bars(&d->terminal, &bar, 1, note, false);
}

/* A batch of few rows, and a cache for two documents: who is admitted next decides what is shared
   and what is computed again. */
static pkv_engine_options serving_engine(demo *d) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  const int32_t groups = d->options->groups;
  int64_t common = INT64_MAX, longest = 0;
  for (int i = 0; i < d->count; i++) {
    const pkv_tokens *const prompt = &d->requests[i].prompt;
    const size_t same = i >= groups ? common_tokens(prompt, &d->requests[i % groups].prompt) : 0;
    if (i >= groups && (int64_t)same < common) common = (int64_t)same;
    if ((int64_t)prompt->count > longest) longest = (int64_t)prompt->count;
  }
  if (common == INT64_MAX) common = 0; /* nobody shares */
  const int64_t own = longest - common, page = o.page_tokens;
  d->workload = (bench_workload){
      d->count, groups, (int32_t)common, (int32_t)own, d->options->tokens, 0.0, 2.0, 0.2, 0};
  o.threads = d->options->threads;
  o.max_rows = d->count < SERVED_ROWS ? d->count : SERVED_ROWS;
  o.max_seq_len = (int32_t)longest + d->options->tokens;
  o.cache_tokens = 2 * (common + page) + o.max_rows * (own + d->options->tokens + 4 * page);
  if (o.cache_tokens < o.max_seq_len + 4 * page) o.cache_tokens = o.max_seq_len + 4 * page;
  return o;
}

static pkv_status serve_all(demo *d, pkv_error *err) {
  if (d->schedule_count == 0 || d->interrupted) return PKV_OK;
  const pkv_engine_options engine = serving_engine(d);
  const pkv_demo_load load = {
      d->requests,  d->count, d->options->tokens, d->workload.slo_ttft, d->workload.slo_tpot,
      show_serving, d};
  pkv_engine_destroy(d->engine); /* its cache would stand beside the server's */
  d->engine = NULL;
  for (int32_t i = 0; i < d->schedule_count; i++) {
    const pkv_status status =
        pkv_demo_serve(&d->outcomes[i], d->model, &engine, &d->schedules[i], &load, err);
    pkv_terminal_clear(&d->terminal);
    d->interrupted = pkv_cli_interrupted() != 0;
    if (d->interrupted) return PKV_OK;
    PKV_TRY(status);
    if (d->options->json) continue;
    const bench_outcome *const r = &d->outcomes[i];
    if (i == 0)
      pkv_terminal_line(&d->terminal,
                        "\nThe same questions to the server, %d at a time, with room for two "
                        "documents, by order of\nadmission (first tokens in s)\n%-15s %8s %9s %8s "
                        "%8s %10s %9s %8s",
                        (int)engine.max_rows, "", "s", "tokens/s", "median", "90 %", "prompts",
                        "KV MB a", "reused");
    pkv_terminal_line(&d->terminal, "%-15s %8.2f %9.1f %8.2f %8.2f %10lld %9.2f %6.0f %%",
                      d->schedules[i].name, r->seconds, r->tokens_per_s, r->ttft.p50 * 1e-3,
                      r->ttft.p90 * 1e-3, (long long)r->prefill_tokens, r->kv_mb_a_token,
                      100.0 * r->reused);
  }
  return PKV_OK;
}

static pkv_status open_report(demo *d, pkv_error *err) {
  const char *const path = d->options->report;
  return d->schedule_count > 0 && path[0] != '\0' ? bench_report_open(&d->report, path, err)
                                                  : PKV_OK;
}

static pkv_status write_report(demo *d, pkv_error *err) {
  const char *const path = d->options->report;
  pkv_buffer command;
  if (d->report == NULL || d->interrupted) return PKV_OK;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, d->model);
  pkv_buffer_init(&command, 4096, NULL);
  pkv_status status = pkv_buffer_append(&command, "pkv ", 4, err);
  if (status == PKV_OK) status = pkv_options_text(&command, d->cli->command, d->options, "", err);
  if (status == PKV_OK) {
    bench_model_run about;
    bench_model_describe(&about, "auto", d->options->model);
    const bench_report report = {info.name,    command.data, about.run.device, &d->workload,
                                 d->schedules, d->outcomes,  d->schedule_count};
    status = bench_report_close(d->report, &report, path, err);
    d->report = NULL;
  }
  pkv_buffer_deinit(&command);
  if (status == PKV_OK && !d->options->json) (void)printf("\nPlots: %s\n", path);
  return status;
}

static json_t *schedules_json(const demo *d) {
  json_t *list = json_array();
  for (int32_t i = 0; i < d->schedule_count; i++) {
    const bench_outcome *const r = &d->outcomes[i];
    pkv_json_add(&list, json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I}", "schedule",
                                  d->schedules[i].name, "seconds", r->seconds, "tokens_per_s",
                                  r->tokens_per_s, "first_token_ms_p50", r->ttft.p50,
                                  "first_token_ms_p90", r->ttft.p90, "decode_rows", r->mean_rows,
                                  "kv_mb_a_token", r->kv_mb_a_token, "prompt_reused", r->reused,
                                  "prefill_tokens", (json_int_t)r->prefill_tokens, "preemptions",
                                  (json_int_t)r->preemptions));
  }
  return list;
}

static json_t *answers_json(const demo *d) {
  json_t *list = json_array();
  for (int i = 0; i < d->count; i++) {
    const demo_answer *const a = &d->answers[i];
    pkv_json_add(&list, json_pack("{s:s, s:s, s:s%, s:s, s:i, s:i, s:f}", "document",
                                  d->requests[i].document, "question", d->requests[i].question,
                                  "text", a->stream.text.size > 0 ? a->stream.text.data : "",
                                  a->stream.text.size, "finish", pkv_finish_text(a->finish),
                                  "prompt_tokens", (int)d->requests[i].prompt.count,
                                  "generated_tokens", (int)a->tokens, "first_token_s", a->first_s));
  }
  return list;
}

static int print_json(const demo *d) {
  const pkv_engine_stats s = d->stats;
  json_t *routes = json_object();
  for (int r = PKV_ROUTE_BUCKET_EXACT; r <= PKV_ROUTE_SHARED; r++)
    pkv_json_set(&routes, pkv_route_name((pkv_route)r),
                 json_real(per((double)s.kv_bytes_route[r], (double)s.decode_tokens)));
  return pkv_cli_json(
      d->cli,
      json_pack("{s:i, s:i, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, "
                "s:I, s:I, s:o, s:o, s:o}",
                "requests", d->count, "groups", (int)d->options->groups, "prompt_tokens",
                (json_int_t)s.prompt_tokens, "prompt_tokens_reused",
                (json_int_t)s.prompt_tokens_reused, "prefill_tokens", (json_int_t)s.prefill_tokens,
                "generated_tokens", (json_int_t)s.generated_tokens, "prefill_tokens_per_s",
                per((double)s.prefill_tokens, s.prefill_seconds), "decode_tokens_per_s",
                per((double)s.decode_tokens, s.decode_seconds), "first_token_s_median",
                first_quantile(d, 0.5), "first_token_s_p95", first_quantile(d, 0.95), "total_s",
                d->total_s, "pages_total", (json_int_t)s.pages_total, "pages_peak",
                (json_int_t)s.pages_peak, "pages_in_use", (json_int_t)s.pages_in_use,
                "prefix_pages_reused", (json_int_t)s.prefix_pages_reused, "preemptions",
                (json_int_t)s.preemptions, "steps", (json_int_t)s.steps, "shared_steps",
                (json_int_t)s.shared_steps, "kv_bytes_per_token", routes, "answers",
                answers_json(d), "schedules", schedules_json(d)));
}

static pkv_status work(demo *d, pkv_error *err) {
  const pkv_model_options model_options = PKV_MODEL_OPTIONS_INIT;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  PKV_TRY(pkv_model_open_named(&d->model, d->options->model, &model_options, err));
  PKV_TRY(open_report(d, err));
  pkv_model_get_info(&info, d->model);
  for (int i = 0; i < d->count; i++)
    pkv_text_stream_init(&d->answers[i].stream, d->model, ANSWER_BYTES);
  PKV_TRY(pkv_demo_requests(d->requests, d->count, (int)d->options->groups, (int)d->options->prefix,
                            d->model, err));
  PKV_TRY(create_engine(d, err));
  if (!d->options->json)
    pkv_terminal_line(&d->terminal,
                      "%s, %.0f million parameters: %d questions about %d documents, %lld prompt "
                      "tokens, answered together.",
                      info.name, (double)info.parameters * 1e-6, d->count,
                      (int)(d->options->groups < d->count ? d->options->groups : d->count),
                      (long long)d->prompt_tokens);
  PKV_TRY(generate(d, err));
  for (int i = 0; i < d->count; i++)
    PKV_CHECK(err, d->answers[i].finish != PKV_FINISH_ERROR, PKV_E_INTERNAL,
              "the model's output for request %d is not finite: damaged weights?", i + 1);
  return PKV_OK;
}

static int run(const pkv_cli *cli, const void *opaque) {
  const demo_options *const options = opaque;
  pkv_error err = {PKV_OK, "", ""};
  int code = PKV_EXIT_OK;
  bench_schedule schedules[PKV_BENCH_SCHEDULES];
  const int32_t schedule_count = bench_schedules_parse(schedules, options->schedules);
  if (schedule_count == 0 && options->schedules[0] != '\0')
    return pkv_cli_usage(cli,
                         "--schedules is '%s'; it takes up to %d, separated by commas, of tree, "
                         "fcfs, priority, cht, lpm, dfs-weight, each alone or as ORDER/POLICY",
                         options->schedules, PKV_BENCH_SCHEDULES);
  const pkv_allocator memory = pkv_allocator_default();
  demo *const d = pkv_alloc_zeroed(&memory, 1, sizeof *d);
  if (d == NULL) {
    pkv_cli_error(cli, "out of memory");
    return PKV_EXIT_FAILURE;
  }
  d->cli = cli;
  d->options = options;
  d->count = (int)options->requests;
  memcpy(d->schedules, schedules, sizeof schedules);
  d->schedule_count = schedule_count;
  pkv_terminal_init(&d->terminal);
  d->stats = (pkv_engine_stats)PKV_ENGINE_STATS_INIT;
  pkv_status status = work(d, &err);
  pkv_terminal_clear(&d->terminal);
  if (status == PKV_OK && !d->interrupted && !options->json) print_table(d);
  if (status == PKV_OK) status = serve_all(d, &err);
  const pkv_status measured = status;
  if (status == PKV_OK) status = write_report(d, &err);
  if (d->interrupted)
    code = PKV_EXIT_INTERRUPTED;
  else if (measured == PKV_OK && options->json)
    code = print_json(d);
  if (status != PKV_OK) code = pkv_cli_fail(cli, &err);
  if (d->report != NULL) (void)fclose(d->report);
  pkv_engine_destroy(d->engine);
  for (int i = 0; i < d->count; i++)
    pkv_text_stream_deinit(&d->answers[i].stream);
  pkv_demo_requests_free(d->requests, d->count);
  pkv_model_close(d->model);
  pkv_free(&memory, d, sizeof *d);
  return code;
}

const pkv_command pkv_command_demo = {
    .name = "demo",
    .summary = "Answer many questions about a few documents at once",
    .details = "Takes licence texts that every Debian system has, asks different questions about "
               "each, and decodes all answers together from one paged cache. Questions about the "
               "same document share its pages, and attention reads them once for all. Then the "
               "same questions go to the HTTP server, which runs in this process, once in each of "
               "--schedules: who is admitted next decides what requests share. Ends with tables "
               "of what was measured, and a page of plots.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(demo_options),
    .run = run,
};
