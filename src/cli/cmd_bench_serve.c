/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv bench serve`: one workload on the server's engine, in several orders of admission. */
#include <stdio.h>
#include <string.h>

#include "base/json_memory.h"
#include "base/status.h"
#include "cli/bench_figures.h"
#include "cli/bench_serve.h"
#include "cli/commands.h"
#include "cli/prompt_text.h"

typedef struct bench_serve_options {
  const char *model, *schedules, *csv, *commit, *report;
  int32_t requests, groups, prefix, own, tokens, rows, threads, chunk, repeats, json, weights;
  int64_t cache, seed;
  double rate, slo_ttft, slo_tpot;
} bench_serve_options;

#define O bench_serve_options
static const pkv_option options_table[] = {
    PKV_REQUIRED(O, model, 'm', "model", "FILE", "GGUF file, or folder of safetensors"),
    PKV_TEXT(O, schedules, 's', "schedules", "LIST", "fcfs,lpm,tree,tree/marginal",
             "orders of admission, each with a policy behind a slash or always; tree is Feather's"),
    PKV_INT(O, requests, 'r', "requests", "N", "32", 1, PKV_BENCH_REQUESTS, "requests in all"),
    PKV_INT(O, groups, 'g', "groups", "N", "4", 1, PKV_BENCH_REQUESTS,
            "groups that they belong to by turns"),
    PKV_INT(O, prefix, 0, "prefix", "N", "600", 0, 1000000,
            "prompt tokens that a group has in common; 0 = no sharing"),
    PKV_INT(O, own, 0, "own", "N", "24", 1, 1000000, "prompt tokens of each request's own"),
    PKV_INT(O, tokens, 'n', "tokens", "N", "24", 1, 65536, "tokens of each answer"),
    PKV_NUMBER(O, rate, 0, "rate", "R", "0", 0, 1e6,
               "requests a second, at random times; 0 = all at once"),
    PKV_NUMBER(O, slo_ttft, 0, "slo-ttft", "S", "2", 0, 1e6, "a good first token comes within"),
    PKV_NUMBER(O, slo_tpot, 0, "slo-tpot", "S", "0.2", 0, 1e6, "and the others each within"),
    PKV_INT(O, rows, 0, "rows", "N", "8", 1, 4096, "requests in the batch at once"),
    PKV_INT(O, cache, 0, "cache", "N", "0", 0, INT64_MAX,
            "tokens the KV cache holds; 0 = two groups' prompts and the rows' own tokens"),
    PKV_INT(O, chunk, 0, "chunk", "N", "512", 1, 65536, "prompt tokens in a step"),
    PKV_INT(O, repeats, 0, "repeats", "N", "1", 1, 100, "runs of each schedule, taken in turn"),
    PKV_WEIGHTS_OPTION(O),
    PKV_INT(O, threads, 't', "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_INT(O, seed, 0, "seed", "N", "1", 0, INT64_C(4294967295), "of tokens and arrivals"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "append result rows"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
    PKV_TEXT(O, report, 0, "report", "FILE", NULL, "write a page with plots of the last runs"),
    PKV_FLAG(O, json, 0, "json", "print one JSON list instead of the table"),
};
#undef O

typedef struct bench_serve {
  const pkv_cli *cli;
  const bench_serve_options *o;
  bench_workload workload;
  bench_schedule schedules[PKV_BENCH_SCHEDULES];
  bench_outcome outcomes[PKV_BENCH_SCHEDULES];
  int32_t count;
  pkv_engine_options engine;
  pkv_model *model;
  bench_model_run about;
  FILE *csv, *report; /* NULL = none */
  json_t *rows;
} bench_serve;

static void set_engine(bench_serve *b) {
  const bench_serve_options *const o = b->o;
  const pkv_engine_options init = PKV_ENGINE_OPTIONS_INIT;
  const int64_t longest = (int64_t)o->prefix + o->own + o->tokens;
  const int64_t page = init.page_tokens;
  const int64_t least = longest + 4 * page;
  const int64_t usual =
      2 * ((int64_t)o->prefix + page) + o->rows * ((int64_t)o->own + o->tokens + 4 * page);
  b->engine = init;
  b->engine.threads = o->threads;
  b->engine.max_rows = o->rows;
  b->engine.prefill_chunk = o->chunk;
  b->engine.max_seq_len = (int32_t)longest;
  b->engine.cache_tokens = o->cache > 0 ? o->cache : usual > least ? usual : least;
}

static void print_row(const bench_schedule *s, const bench_outcome *r) {
  (void)printf("%-16s %8.2f %9.1f %7.2f  %7.0f %7.0f %7.0f  %7.1f %7.1f  %7.1f  %5.1f %8.2f %5.0f "
               "%%\n",
               s->name, r->seconds, r->tokens_per_s, r->goodput, r->ttft.p50, r->ttft.p90,
               r->ttft.p99, r->tpot.p50, r->tpot.p90, r->itl.p99, r->mean_rows, r->kv_mb_a_token,
               100.0 * r->reused);
  (void)fflush(stdout);
}

static json_t *spread_json(const bench_spread *s) {
  return json_pack("{s:f, s:f, s:f}", "p50", s->p50, "p90", s->p90, "p99", s->p99);
}

static json_t *row_json(const bench_schedule *s, const bench_outcome *r) {
  return json_pack(
      "{s:s, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:I, s:I, s:I}",
      "schedule", s->name, "seconds", r->seconds, "tokens_per_s", r->tokens_per_s, "requests_per_s",
      r->requests_per_s, "goodput_per_s", r->goodput, "ttft_ms", spread_json(&r->ttft), "tpot_ms",
      spread_json(&r->tpot), "itl_ms", spread_json(&r->itl), "queue_ms", spread_json(&r->queue),
      "mean_decode_rows", r->mean_rows, "kv_mb_per_token", r->kv_mb_a_token, "kv_mb_per_token_each",
      r->kv_mb_each, "prompt_reused", r->reused, "steps", (json_int_t)r->steps, "preemptions",
      (json_int_t)r->preemptions, "prefill_tokens", (json_int_t)r->prefill_tokens);
}

static pkv_status write_csv(bench_serve *b, const bench_schedule *s, const bench_outcome *r,
                            int32_t repeat, pkv_error *err) {
  if (b->csv == NULL) return PKV_OK;
  const bench_workload *const w = &b->workload;
  (void)fprintf(b->csv, "%s,%s,%s,%s,%s,%d,%d,%d,%d,%d,%g,%d,%lld,%d,", b->o->commit, b->about.date,
                b->about.run.device, b->about.model, s->name, (int)w->requests, (int)w->groups,
                (int)w->prefix, (int)w->own, (int)w->tokens, w->rate, (int)b->o->rows,
                (long long)b->engine.cache_tokens, (int)repeat);
  (void)fprintf(b->csv,
                "%.3f,%.2f,%.3f,%.1f,%.1f,%.1f,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.1f,%.2f,%.3f,%.3f,"
                "%.4f,%lld,%lld\n",
                r->seconds, r->tokens_per_s, r->goodput, r->ttft.p50, r->ttft.p90, r->ttft.p99,
                r->tpot.p50, r->tpot.p90, r->tpot.p99, r->itl.p50, r->itl.p90, r->itl.p99,
                r->queue.p50, r->mean_rows, r->kv_mb_a_token, r->kv_mb_each, r->reused,
                (long long)r->prefill_tokens, (long long)r->preemptions);
  PKV_CHECK(err, fflush(b->csv) == 0 && !ferror(b->csv), PKV_E_IO, "cannot write %s", b->o->csv);
  return PKV_OK;
}

static pkv_status open_csv(bench_serve *b, pkv_error *err) {
  pkv_buffer command;
  if (b->o->csv == NULL) return PKV_OK;
  pkv_buffer_init(&command, 4096, NULL);
  pkv_status status = pkv_options_text(&command, b->cli->command, b->o, "csv,commit,report", err);
  b->csv = status == PKV_OK ? fopen(b->o->csv, "a") : NULL;
  if (status == PKV_OK && b->csv == NULL)
    status = PKV_FAIL(err, PKV_E_IO, "cannot open %s", b->o->csv);
  if (status == PKV_OK && ftell(b->csv) <= 0)
    (void)fputs("commit,date,device,model,schedule,requests,groups,prefix,own,tokens,rate,rows,"
                "cache,repeat,seconds,tokens_per_s,goodput_per_s,ttft_p50_ms,ttft_p90_ms,"
                "ttft_p99_ms,tpot_p50_ms,tpot_p90_ms,tpot_p99_ms,itl_p50_ms,itl_p90_ms,itl_p99_ms,"
                "queue_p50_ms,decode_rows,kv_mb_a_token,kv_mb_each,prompt_reused,prefill_tokens,"
                "preemptions\n",
                b->csv);
  if (status == PKV_OK) (void)fprintf(b->csv, "# command: pkv %s\n", command.data);
  pkv_buffer_deinit(&command);
  return status;
}

static pkv_status write_report(bench_serve *b, pkv_error *err) {
  pkv_buffer command;
  if (b->report == NULL) return PKV_OK;
  pkv_buffer_init(&command, 4096, NULL);
  pkv_status status = pkv_buffer_append(&command, "pkv ", 4, err);
  if (status == PKV_OK) status = pkv_options_text(&command, b->cli->command, b->o, "", err);
  if (status == PKV_OK) {
    const bench_report report = {b->about.model, command.data, b->about.run.device,
                                 &b->workload,   b->schedules, b->outcomes,
                                 b->count};
    status = bench_report_close(b->report, &report, b->o->report, err);
    b->report = NULL;
  }
  pkv_buffer_deinit(&command);
  return status;
}

static pkv_status work(bench_serve *b, pkv_error *err) {
  const pkv_model_options model_options = pkv_model_options_for(b->o->weights, PKV_DEVICE_CPU);
  PKV_TRY(pkv_model_open_named(&b->model, b->o->model, &model_options, err));
  PKV_TRY(open_csv(b, err));
  if (b->o->report != NULL) PKV_TRY(bench_report_open(&b->report, b->o->report, err));
  if (!b->o->json)
    (void)printf("%-16s %8s %9s %7s  %23s  %15s  %7s  %5s %8s %7s\n%-16s %8s %9s %7s  %7s %7s %7s  "
                 "%7s %7s  %7s  %5s %8s %7s\n",
                 "", "", "", "good", "first token, ms", "a token, ms", "gap, ms", "", "KV MB",
                 "prompt", "schedule", "s", "tokens/s", "req/s", "p50", "p90", "p99", "p50", "p90",
                 "p99", "rows", "a token", "reused");
  for (int32_t repeat = 0; repeat < b->o->repeats; repeat++) {
    for (int32_t i = 0; i < b->count; i++) {
      /* In turn, forth and back, so that a machine that slows down slows all of them. */
      const int32_t at = repeat % 2 == 0 ? i : b->count - 1 - i;
      const bench_schedule *const s = &b->schedules[at];
      bench_outcome *const r = &b->outcomes[at];
      PKV_TRY(bench_serve_run(r, b->model, &b->engine, s, &b->workload, err));
      if (!b->o->json)
        print_row(s, r);
      else
        pkv_json_add(&b->rows, row_json(s, r));
      PKV_TRY(write_csv(b, s, r, repeat, err));
    }
  }
  return write_report(b, err);
}

static int run_all(bench_serve *b) {
  pkv_error err = {PKV_OK, "", ""};
  const bench_serve_options *const o = b->o;
  b->workload = (bench_workload){o->requests, o->groups,   o->prefix,   o->own,           o->tokens,
                                 o->rate,     o->slo_ttft, o->slo_tpot, (uint64_t)o->seed};
  bench_model_describe(&b->about, "auto", o->model);
  set_engine(b);
  if (o->json) b->rows = json_array();
  const pkv_status status = work(b, &err);
  if (b->csv != NULL) (void)fclose(b->csv);
  if (b->report != NULL) (void)fclose(b->report);
  pkv_model_close(b->model);
  if (status != PKV_OK) {
    json_decref(b->rows);
    return pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : pkv_cli_fail(b->cli, &err);
  }
  return o->json ? pkv_cli_json(b->cli, b->rows) : PKV_EXIT_OK;
}

static int run(const pkv_cli *cli, const void *opaque) {
  const bench_serve_options *const o = opaque;
  const pkv_allocator a = pkv_allocator_default();
  bench_serve *const b = pkv_alloc_zeroed(&a, 1, sizeof *b);
  if (b == NULL) {
    pkv_cli_error(cli, "out of memory");
    return PKV_EXIT_FAILURE;
  }
  b->cli = cli;
  b->o = o;
  b->count = bench_schedules_parse(b->schedules, o->schedules);
  const int code = b->count > 0
                       ? run_all(b)
                       : pkv_cli_usage(cli,
                                       "--schedules is '%s'; it takes 1 to %d, separated by "
                                       "commas, of tree, fcfs, priority, cht, lpm, dfs-weight, "
                                       "each alone or as ORDER/POLICY",
                                       o->schedules, PKV_BENCH_SCHEDULES);
  pkv_free(&a, b, sizeof *b);
  return code;
}

const pkv_command pkv_command_bench_serve = {
    .name = "bench serve",
    .summary = "Measure the server's engine under a workload, in several orders of admission",
    .details =
        "Runs the same requests on the server's engine thread and queue, once for each schedule, "
        "and measures what their clients see: time to first token (TTFT), time per output token "
        "(TPOT), gaps between tokens (ITL), and how many requests a second were good. Requests of "
        "different groups arrive by turns, and the cache holds two groups by default: who is "
        "admitted when decides what is shared and what is computed again. HTTP is left out; "
        "bench/serve_load.py measures with it.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(bench_serve_options),
    .run = run,
};
