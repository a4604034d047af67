/* SPDX-License-Identifier: Apache-2.0 */
/* /metrics: names as vLLM has them, with our prefix, and what only we have. */
#include "server/reply_state.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/status.h"

typedef struct metric_row {
  const char *name, *type, *help;
  double value;
} metric_row;

static pkv_status print_rows(pkv_buffer *out, const metric_row *rows, size_t count,
                             pkv_error *err) {
  for (size_t i = 0; i < count; i++) {
    const metric_row *const r = &rows[i];
    PKV_TRY(pkv_buffer_printf(out, err, "# HELP pkv_%s %s\n# TYPE pkv_%s %s\npkv_%s ", r->name,
                              r->help, r->name, r->type, r->name));
    const bool whole = r->value >= 0.0 && r->value < 9e15 && r->value <= (double)(int64_t)r->value;
    if (whole)
      PKV_TRY(pkv_buffer_printf(out, err, "%" PRId64 "\n", (int64_t)r->value));
    else
      PKV_TRY(pkv_buffer_printf(out, err, "%.9g\n", r->value));
  }
  return PKV_OK;
}

#define PRINT(rows) print_rows(out, rows, sizeof rows / sizeof *rows, err)

static pkv_status print_http(pkv_buffer *out, const pkv_http_counters *h, pkv_error *err) {
  static const char *const owed[PKV_OWED_NOTHING] = {"header", "idle", "body", "write"};
  const metric_row rows[] = {
      {"http_connections", "gauge", "Open connections", (double)h->connections},
      {"http_requests_total", "counter", "HTTP requests that were answered", (double)h->requests},
      {"http_hang_ups_total", "counter", "Connections that clients reset or closed early",
       (double)h->hang_ups},
  };
  PKV_TRY(PRINT(rows));
  PKV_TRY(pkv_buffer_printf(out, err,
                            "# HELP pkv_http_timeouts_total Connections cut, by what was waited "
                            "for\n# TYPE pkv_http_timeouts_total counter\n"));
  for (int i = 0; i < PKV_OWED_NOTHING; i++)
    PKV_TRY(pkv_buffer_printf(out, err, "pkv_http_timeouts_total{for=\"%s\"} %" PRId64 "\n",
                              owed[i], h->timeouts[i]));
  PKV_TRY(pkv_buffer_printf(out, err,
                            "# HELP pkv_http_answers_total Answers by the class of their status\n"
                            "# TYPE pkv_http_answers_total counter\n"));
  for (int i = 2; i <= 5; i++)
    PKV_TRY(pkv_buffer_printf(out, err, "pkv_http_answers_total{class=\"%dxx\"} %" PRId64 "\n", i,
                              h->by_class[i]));
  return PKV_OK;
}

static pkv_status print_requests(pkv_buffer *out, const pkv_loop_counters *c, pkv_error *err) {
  static const char *const reasons[] = {NULL, "stop", "length", "abort", "error"};
  const pkv_engine_stats *const e = &c->engine;
  const metric_row rows[] = {
      {"num_requests_live", "gauge", "Answers accepted and not finished", c->live},
      {"num_requests_running", "gauge", "Answers in the batch", e->rows_running},
      {"num_requests_waiting", "gauge", "Answers that wait inside the engine", e->rows_waiting},
      {"num_requests_paused", "gauge", "Answers in the batch whose clients do not keep up",
       e->rows_paused},
      {"request_pauses_total", "counter", "Times that a stream had to wait for its client",
       (double)c->pauses},
      {"requests_accepted_total", "counter", "Answers begun", (double)c->accepted},
      {"admission_rejections_total", "counter", "Requests refused because the queue was full",
       (double)c->refused_full},
      {"prompt_tokens_total", "counter",
       "Prompt tokens worked off, those found in the cache included; n answers count n times",
       (double)c->prompt_tokens},
      {"generation_tokens_total", "counter", "Tokens generated", (double)c->generated_tokens},
      {"num_preemptions_total", "counter", "Requests that lost their pages and came back",
       (double)e->preemptions},
  };
  PKV_TRY(PRINT(rows));
  PKV_TRY(pkv_buffer_printf(
      out, err,
      "# HELP pkv_num_requests_waiting_by_reason Answers that wait: for a row and pages "
      "(capacity), or for a client that does not keep up (deferred)\n"
      "# TYPE pkv_num_requests_waiting_by_reason gauge\n"
      "pkv_num_requests_waiting_by_reason{reason=\"capacity\"} %d\n"
      "pkv_num_requests_waiting_by_reason{reason=\"deferred\"} %d\n",
      (int)(e->rows_waiting - e->rows_deferred), (int)e->rows_deferred));
  PKV_TRY(pkv_buffer_printf(out, err,
                            "# HELP pkv_request_success_total Answers by how they ended\n"
                            "# TYPE pkv_request_success_total counter\n"));
  for (int i = 1; i <= 4; i++)
    PKV_TRY(pkv_buffer_printf(out, err,
                              "pkv_request_success_total{finished_reason=\"%s\"} %" PRId64 "\n",
                              reasons[i], c->finished[i]));
  return PKV_OK;
}

static pkv_status print_engine(pkv_buffer *out, const pkv_engine_stats *e, pkv_error *err) {
  const double whole = (double)e->kv_bytes_route[PKV_ROUTE_BALANCED];
  const double once = (double)e->kv_bytes_route[PKV_ROUTE_SHARED];
  const double pages = e->pages_total > 0 ? (double)e->pages_total : 1.0;
  const metric_row rows[] = {
      {"prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache",
       (double)e->prompt_tokens},
      {"prefix_cache_hits_total", "counter", "Of these, found there",
       (double)e->prompt_tokens_reused},
      {"prompt_tokens_cached_total", "counter", "Prompt tokens that were not computed",
       (double)e->prompt_tokens_reused},
      {"prefill_tokens_total", "counter", "Tokens computed in prefill", (double)e->prefill_tokens},
      {"decode_tokens_total", "counter", "Tokens computed one a row and step",
       (double)e->decode_tokens},
      {"engine_steps_total", "counter", "Steps of the engine", (double)e->steps},
      {"engine_shared_steps_total", "counter", "Steps that read shared prefixes once for all",
       (double)e->shared_steps},
      {"prefill_seconds_total", "counter", "Time of steps, the share of prefill",
       e->prefill_seconds},
      {"decode_seconds_total", "counter", "Time of steps, the share of decoding",
       e->decode_seconds},
      {"kv_cache_usage_perc", "gauge", "Pages that requests hold, 1 = all",
       (double)e->pages_in_use / pages},
      {"kv_pages_total", "gauge", "Pages of the cache", (double)e->pages_total},
      {"kv_pages_in_use", "gauge", "Pages that requests hold", (double)e->pages_in_use},
      {"kv_pages_peak", "gauge", "Most pages that requests held at once", (double)e->pages_peak},
      {"kv_pages_shared", "gauge", "Pages that more than one request holds",
       (double)e->pages_shared},
      {"kv_bytes_each_total", "counter",
       "Bytes of K and V that decoding rows would read, each on its own", whole},
      {"kv_bytes_read_total", "counter",
       "Bytes of K and V that they read: what is shared once, in whole chunks of 512 tokens", once},
      {"kv_dedup_ratio", "gauge", "The former by the latter", once > 0.0 ? whole / once : 1.0},
      {"kv_pages_cached", "gauge", "Pages kept for later requests", (double)e->pages_cached},
      {"kv_pages_free", "gauge", "Pages that hold nothing", (double)e->pages_free},
      {"kv_evictions_total", "counter", "Pages that left the cache for others",
       (double)e->evictions},
      {"kv_page_copies_total", "counter", "Pages copied because a writer found them shared",
       (double)e->page_copies},
      {"kv_swap_bytes", "gauge", "Host memory for pages of preempted requests",
       (double)e->swap_bytes},
      {"kv_swap_bytes_in_use", "gauge", "Of that, what holds pages", (double)e->swap_used_bytes},
      {"kv_swap_outs_total", "counter", "Preempted requests whose pages went to the host",
       (double)e->swap_outs},
      {"kv_swap_ins_total", "counter", "Requests that got them back", (double)e->swap_ins},
      {"kv_swap_pages_out_total", "counter", "Pages copied to the host", (double)e->swap_pages_out},
      {"kv_swap_pages_in_total", "counter", "Pages copied back", (double)e->swap_pages_in},
      {"kv_swap_full_total", "counter", "Preempted requests for which the host had no room",
       (double)e->swap_full},
      {"kv_swap_drops_total", "counter", "Requests whose pages on the host were of no use",
       (double)e->swap_drops},
      {"sched_admissions_total", "counter", "Requests that the scheduler let in",
       (double)e->admissions},
      {"sched_stops_total", "counter", "Times that the scheduler's policy said stop",
       (double)e->sched_stops},
      {"decode_steps_total", "counter", "Steps with decoding rows", (double)e->decode_steps},
  };
  return PRINT(rows);
}

/* A label's value as Prometheus reads it. */
static pkv_status print_info(pkv_buffer *out, const pkv_server *server, pkv_error *err) {
  PKV_TRY(pkv_buffer_printf(out, err,
                            "# HELP pkv_model_info The model that is served\n"
                            "# TYPE pkv_model_info gauge\npkv_model_info{model_name=\""));
  for (const char *c = server->options->name; *c != '\0'; c++) {
    if (*c == '\n')
      PKV_TRY(pkv_buffer_append(out, "\\n", 2, err));
    else if (*c == '"' || *c == '\\')
      PKV_TRY(pkv_buffer_printf(out, err, "\\%c", *c));
    else
      PKV_TRY(pkv_buffer_append(out, c, 1, err));
  }
  return pkv_buffer_printf(out, err, "\"} 1\n");
}

static pkv_status print_cache(pkv_buffer *out, const pkv_server *server, const pkv_engine_stats *e,
                              pkv_error *err) {
  static const char *const dtypes[] = {"f32", "f16", "bf16", "fp8_e4m3"};
  const pkv_engine_options *const o = &server->options->engine;
  return pkv_buffer_printf(out, err,
                           "# HELP pkv_cache_config_info How the cache is made\n"
                           "# TYPE pkv_cache_config_info gauge\n"
                           "pkv_cache_config_info{block_size=\"%d\",num_blocks=\"%lld\","
                           "cache_dtype=\"%s\",enable_prefix_caching=\"%s\"} 1\n",
                           (int)(o->page_tokens > 0 ? o->page_tokens : 16),
                           (long long)e->pages_total, dtypes[(int)o->kv_dtype & 3],
                           o->prefix_cache ? "True" : "False");
}

static pkv_status print_process(pkv_buffer *out, pkv_error *err) {
  const metric_row rows[] = {
      {"heap_bytes", "gauge", "Bytes of the memory blocks in use, K and V included",
       (double)pkv_heap_in_use()},
  };
  return PRINT(rows);
}

pkv_status pkv_reply_metrics(pkv_buffer *out, const pkv_server *server, pkv_error *err) {
  pkv_loop_counters c;
  pkv_loop_get_counters(&c, server->loop);
  PKV_TRY(print_info(out, server, err));
  PKV_TRY(print_requests(out, &c, err));
  PKV_TRY(print_cache(out, server, &c.engine, err));
  PKV_TRY(print_engine(out, &c.engine, err));
  PKV_TRY(print_http(out, &server->counters, err));
  PKV_TRY(print_process(out, err));
  return pkv_histograms_print(out, &c.times, err);
}
