/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_text.h"

#include <jansson.h>

#include "base/status.h"

static int append_piece(const char *bytes, size_t count, void *opaque) {
  return pkv_buffer_append(opaque, bytes, count, NULL) == PKV_OK ? 0 : -1;
}

/* Takes the value over; NULL is a failure. */
static pkv_status append_json(pkv_buffer *out, json_t *value, pkv_error *err) {
  const int failed =
      value == NULL ? -1 : json_dump_callback(value, append_piece, out, JSON_COMPACT);
  json_decref(value);
  PKV_CHECK(err, failed == 0, PKV_E_NOMEM, "an answer could not be written");
  return PKV_OK;
}

static pkv_status append_event(pkv_buffer *out, json_t *value, pkv_error *err) {
  const pkv_status begun = pkv_buffer_append(out, "data: ", 6, err);
  if (begun != PKV_OK) {
    json_decref(value);
    return begun;
  }
  PKV_TRY(append_json(out, value, err));
  return pkv_buffer_append(out, "\n\n", 2, err);
}

static const char *finish_text(pkv_finish finish) {
  return finish == PKV_FINISH_LENGTH ? "length" : "stop";
}

static json_t *usage_json(const pkv_job_state *state) {
  return json_pack("{s:i, s:i, s:i}", "prompt_tokens", (int)state->prompt_tokens,
                   "completion_tokens", (int)state->generated, "total_tokens",
                   (int)(state->prompt_tokens + state->generated));
}

pkv_status pkv_reply_error(pkv_buffer *out, const pkv_api_error *error, pkv_error *err) {
  const char *const type = error->http == 503   ? "overloaded_error"
                           : error->http >= 500 ? "server_error"
                           : error->http == 404 ? "not_found_error"
                           : error->http == 401 ? "authentication_error"
                                                : "invalid_request_error";
  return append_json(out,
                     json_pack("{s:{s:s, s:s, s:s?, s:s?}}", "error", "message", error->message,
                               "type", type, "param", error->param[0] != '\0' ? error->param : NULL,
                               "code", error->code),
                     err);
}

pkv_status pkv_reply_whole(pkv_buffer *out, const pkv_reply *reply, const char *text, size_t bytes,
                           const pkv_job_state *state, pkv_error *err) {
  json_t *choice = reply->chat ? json_pack("{s:i, s:{s:s, s:s%}, s:n, s:s}", "index", 0, "message",
                                           "role", "assistant", "content", text, bytes, "logprobs",
                                           "finish_reason", finish_text(state->finish))
                               : json_pack("{s:i, s:s%, s:n, s:s}", "index", 0, "text", text, bytes,
                                           "logprobs", "finish_reason", finish_text(state->finish));
  return append_json(out,
                     json_pack("{s:s, s:s, s:I, s:s, s:[o], s:o}", "id", reply->id, "object",
                               reply->chat ? "chat.completion" : "text_completion", "created",
                               (json_int_t)reply->created, "model", reply->model, "choices", choice,
                               "usage", usage_json(state)),
                     err);
}

/* One event; takes `choices` over. `usage` is NULL for all but the last one. */
static pkv_status append_chunk(pkv_buffer *out, const pkv_reply *reply, json_t *choices,
                               json_t *usage, pkv_error *err) {
  json_t *const chunk =
      json_pack("{s:s, s:s, s:I, s:s, s:o}", "id", reply->id, "object",
                reply->chat ? "chat.completion.chunk" : "text_completion", "created",
                (json_int_t)reply->created, "model", reply->model, "choices", choices);
  if (reply->include_usage)
    (void)json_object_set_new(chunk, "usage", usage != NULL ? usage : json_null());
  return append_event(out, chunk, err);
}

pkv_status pkv_reply_open(pkv_buffer *out, const pkv_reply *reply, pkv_error *err) {
  if (!reply->chat) return PKV_OK;
  return append_chunk(out, reply,
                      json_pack("[{s:i, s:{s:s, s:s}, s:n, s:n}]", "index", 0, "delta", "role",
                                "assistant", "content", "", "logprobs", "finish_reason"),
                      NULL, err);
}

pkv_status pkv_reply_delta(pkv_buffer *out, const pkv_reply *reply, const char *text, size_t bytes,
                           pkv_error *err) {
  json_t *const choices = reply->chat
                              ? json_pack("[{s:i, s:{s:s%}, s:n, s:n}]", "index", 0, "delta",
                                          "content", text, bytes, "logprobs", "finish_reason")
                              : json_pack("[{s:i, s:s%, s:n, s:n}]", "index", 0, "text", text,
                                          bytes, "logprobs", "finish_reason");
  return append_chunk(out, reply, choices, NULL, err);
}

pkv_status pkv_reply_close(pkv_buffer *out, const pkv_reply *reply, const pkv_job_state *state,
                           pkv_error *err) {
  if (state->finish != PKV_FINISH_STOP && state->finish != PKV_FINISH_LENGTH) {
    PKV_TRY(pkv_buffer_append(out, "data: ", 6, err));
    pkv_api_error error = {500, NULL, "", ""};
    (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the answer could not be finished");
    PKV_TRY(pkv_reply_error(out, &error, err));
    return pkv_buffer_append(out, "\n\n", 2, err);
  }
  const char *const reason = finish_text(state->finish);
  json_t *const choices = reply->chat ? json_pack("[{s:i, s:{}, s:n, s:s}]", "index", 0, "delta",
                                                  "logprobs", "finish_reason", reason)
                                      : json_pack("[{s:i, s:s, s:n, s:s}]", "index", 0, "text", "",
                                                  "logprobs", "finish_reason", reason);
  PKV_TRY(append_chunk(out, reply, choices, NULL, err));
  if (reply->include_usage) PKV_TRY(append_chunk(out, reply, json_array(), usage_json(state), err));
  return pkv_buffer_append(out, "data: [DONE]\n\n", 14, err);
}

pkv_status pkv_reply_models(pkv_buffer *out, const char *model, int64_t created, int32_t longest,
                            pkv_error *err) {
  return append_json(out,
                     json_pack("{s:s, s:[{s:s, s:s, s:I, s:s, s:i}]}", "object", "list", "data",
                               "id", model, "object", "model", "created", (json_int_t)created,
                               "owned_by", "persistentkv", "max_model_len", (int)longest),
                     err);
}

static pkv_status metric(pkv_buffer *out, const char *name, const char *type, const char *help,
                         int64_t value, pkv_error *err) {
  return pkv_buffer_printf(out, err, "# HELP pkv_%s %s\n# TYPE pkv_%s %s\npkv_%s %lld\n", name,
                           help, name, type, name, (long long)value);
}

pkv_status pkv_reply_metrics(pkv_buffer *out, const pkv_loop_counters *c, int64_t connections,
                             int64_t requests, pkv_error *err) {
  static const char *const reasons[] = {NULL, "stop", "length", "abort", "error"};
  const pkv_engine_stats *const e = &c->engine;
  const struct {
    const char *name, *type, *help;
    int64_t value;
  } rows[] = {
      {"num_requests_live", "gauge", "Requests accepted and not finished", c->live},
      {"num_requests_running", "gauge", "Requests in the batch", e->rows_running},
      {"num_requests_waiting", "gauge", "Requests that wait inside the engine", e->rows_waiting},
      {"http_connections", "gauge", "Open connections", connections},
      {"http_requests_total", "counter", "HTTP requests that were answered", requests},
      {"requests_accepted_total", "counter", "Requests given to the engine", c->accepted},
      {"requests_refused_total", "counter", "Requests refused because the queue was full",
       c->refused_full},
      {"prompt_tokens_total", "counter", "Prompt tokens of accepted requests", c->prompt_tokens},
      {"prompt_tokens_reused_total", "counter", "Prompt tokens found in pages of live requests",
       e->prompt_tokens_reused},
      {"prefill_tokens_total", "counter", "Tokens computed in prefill", e->prefill_tokens},
      {"generation_tokens_total", "counter", "Tokens generated", c->generated_tokens},
      {"engine_steps_total", "counter", "Steps of the engine", e->steps},
      {"num_preemptions_total", "counter", "Requests that lost their pages and came back",
       e->preemptions},
      {"kv_pages_total", "gauge", "Pages of the cache", e->pages_total},
      {"kv_pages_in_use", "gauge", "Pages that requests hold", e->pages_in_use},
      {"kv_pages_shared", "gauge", "Pages that more than one request holds", e->pages_shared},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    PKV_TRY(metric(out, rows[i].name, rows[i].type, rows[i].help, rows[i].value, err));
  PKV_TRY(pkv_buffer_printf(out, err,
                            "# HELP pkv_request_finished_total Requests by how they ended\n"
                            "# TYPE pkv_request_finished_total counter\n"));
  for (int i = 1; i <= 4; i++)
    PKV_TRY(pkv_buffer_printf(out, err, "pkv_request_finished_total{finished_reason=\"%s\"} %lld\n",
                              reasons[i], (long long)c->finished[i]));
  return PKV_OK;
}
