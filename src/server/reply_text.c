/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_text.h"

#include <string.h>

#include "base/hash.h"
#include "base/status.h"
#include "server/json_out.h"
#include "server/reply_logprobs.h"

static bool is_good(pkv_finish finish) {
  return finish == PKV_FINISH_STOP || finish == PKV_FINISH_LENGTH;
}

static const char *finish_text(pkv_finish finish, bool calls) {
  return finish == PKV_FINISH_LENGTH ? "length" : calls ? "tool_calls" : "stop";
}

static bool news_init(pkv_tool_news *news) {
  pkv_buffer_init(&news->content, PKV_ANSWER_BYTES, NULL);
  news->deltas = json_array();
  return news->deltas != NULL;
}

static void news_deinit(pkv_tool_news *news) {
  pkv_buffer_deinit(&news->content);
  json_decref(news->deltas);
}

static uint64_t answer_number(const pkv_reply *reply, int32_t choice) {
  return pkv_hash_bytes(reply->id, strlen(reply->id), (uint64_t)choice);
}

void pkv_reply_parser(pkv_tool_parser *parser, const pkv_reply *reply, int32_t choice) {
  pkv_tool_parser_init(parser, reply->tools, answer_number(reply, choice));
}

/* A prompt counts once, whatever its n. */
static json_t *usage_json(const pkv_choice_state *states, size_t stride, int32_t count, int32_t n) {
  json_int_t prompt = 0, cached = 0, generated = 0;
  for (int32_t i = 0; i < count; i++) {
    const pkv_choice_state *const s =
        (const void *)((const char *)(const void *)states + (size_t)i * stride);
    if (i % n == 0) {
      prompt += s->prompt_tokens;
      cached += s->cached_tokens;
    }
    generated += s->generated;
  }
  return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", prompt, "completion_tokens",
                   generated, "total_tokens", prompt + generated, "prompt_tokens_details",
                   "cached_tokens", cached);
}

pkv_status pkv_reply_error(pkv_buffer *out, const pkv_api_error *error, pkv_error *err) {
  const char *const type = error->http == 503   ? "overloaded_error"
                           : error->http >= 500 ? "server_error"
                           : error->http == 404 ? "not_found_error"
                           : error->http == 401 ? "authentication_error"
                                                : "invalid_request_error";
  return pkv_json_append(
      out,
      json_pack("{s:{s:s, s:s, s:s?, s:s?}}", "error", "message", error->message, "type", type,
                "param", error->param[0] != '\0' ? error->param : NULL, "code", error->code),
      err);
}

/* --- llama-server's own route -------------------------------------------------------------- */

static double milliseconds(int64_t from, int64_t to) {
  return from > 0 && to > from ? (double)(to - from) * 1e-6 : 0.0;
}

static double per_second(int32_t tokens, double ms) {
  return ms > 0.0 ? tokens / ms * 1e3 : 0.0;
}

static json_t *timings_json(const pkv_choice_state *s) {
  const double prompt_ms = milliseconds(s->arrived_ns, s->first_ns);
  const double predicted_ms = milliseconds(s->first_ns, s->last_ns);
  const int32_t read = s->prompt_tokens - s->cached_tokens, made = s->generated;
  return json_pack("{s:i, s:i, s:f, s:f, s:f, s:i, s:f, s:f, s:f}", "cache_n", s->cached_tokens,
                   "prompt_n", read, "prompt_ms", prompt_ms, "prompt_per_token_ms",
                   read > 0 ? prompt_ms / read : 0.0, "prompt_per_second",
                   per_second(read, prompt_ms), "predicted_n", made, "predicted_ms", predicted_ms,
                   "predicted_per_token_ms", made > 1 ? predicted_ms / (made - 1) : 0.0,
                   "predicted_per_second", per_second(made - 1, predicted_ms));
}

static json_t *llama_end(const pkv_reply *reply, const pkv_choice_state *s, const char *text,
                         size_t bytes) {
  const bool word = s->finish == PKV_FINISH_STOP && s->stop >= 0;
  const char *const why = s->finish == PKV_FINISH_LENGTH ? "limit" : word ? "word" : "eos";
  return json_pack("{s:i, s:s%, s:[], s:i, s:b, s:s, s:i, s:i, s:b, s:s, s:s, s:i, s:o}", "index",
                   0, "content", text, bytes, "tokens", "id_slot", 0, "stop", 1, "model",
                   reply->name, "tokens_predicted", s->generated, "tokens_evaluated",
                   s->prompt_tokens, "truncated", 0, "stop_type", why, "stopping_word",
                   word ? reply->stops->text[s->stop] : "", "tokens_cached", s->cached_tokens,
                   "timings", timings_json(s));
}

static json_t *llama_whole(const pkv_reply *reply, const pkv_whole *w) {
  json_t *body = llama_end(reply, &w->state, w->piece.text.size > 0 ? w->piece.text.data : "",
                           w->piece.text.size);
  if (reply->logprobs)
    pkv_json_set(&body, "completion_probabilities", pkv_logprobs_llama(reply, &w->piece));
  return body;
}

static json_t *llama_delta(const pkv_reply *reply, const pkv_piece *piece) {
  json_t *body = json_pack("{s:i, s:s%, s:[], s:b}", "index", 0, "content",
                           piece->text.size > 0 ? piece->text.data : "", piece->text.size, "tokens",
                           "stop", 0);
  if (reply->logprobs)
    pkv_json_set(&body, "completion_probabilities", pkv_logprobs_llama(reply, piece));
  return body;
}

/* --- OpenAI's ------------------------------------------------------------------------------ */

/* A whole answer that may hold calls; without any content that is null, as clients expect it. */
static json_t *tools_json(const pkv_reply *reply, int32_t index, const pkv_whole *w) {
  pkv_tool_parser parser;
  pkv_tool_news news;
  json_t *choice = NULL;
  pkv_reply_parser(&parser, reply, index);
  if (news_init(&news) &&
      pkv_tool_parser_feed(&news, &parser, w->piece.text.data, w->piece.text.size) == PKV_OK &&
      pkv_tool_parser_end(&news, &parser) == PKV_OK) {
    const bool calls = json_array_size(news.deltas) > 0;
    json_t *const content =
        news.content.size > 0 || !calls
            ? json_stringn(news.content.size > 0 ? news.content.data : "", news.content.size)
            : json_null();
    json_t *message =
        json_pack("{s:s, s:o, s:n}", "role", "assistant", "content", content, "refusal");
    if (calls) pkv_json_set(&message, "tool_calls", pkv_tool_calls(news.deltas));
    choice = json_pack("{s:i, s:o, s:o, s:s}", "index", index, "message", message, "logprobs",
                       pkv_logprobs_chat(reply, &w->piece), "finish_reason",
                       finish_text(w->state.finish, calls));
  }
  news_deinit(&news);
  pkv_tool_parser_deinit(&parser);
  return choice;
}

static json_t *choice_json(const pkv_reply *reply, int32_t index, const pkv_whole *w) {
  const char *const text = w->piece.text.size > 0 ? w->piece.text.data : "";
  if (reply->tools != NULL) return tools_json(reply, index, w);
  const char *const finish = finish_text(w->state.finish, false);
  if (reply->kind == PKV_API_CHAT)
    return json_pack("{s:i, s:{s:s, s:s%, s:n}, s:o, s:s}", "index", index, "message", "role",
                     "assistant", "content", text, w->piece.text.size, "refusal", "logprobs",
                     pkv_logprobs_chat(reply, &w->piece), "finish_reason", finish);
  return json_pack("{s:i, s:s%, s:o, s:s}", "index", index, "text", text, w->piece.text.size,
                   "logprobs", pkv_logprobs_legacy(reply, &w->piece), "finish_reason", finish);
}

pkv_status pkv_reply_whole(pkv_buffer *out, const pkv_reply *reply, const pkv_whole *choices,
                           int32_t count, int32_t n, pkv_error *err) {
  if (reply->kind == PKV_API_LLAMA) return pkv_json_append(out, llama_whole(reply, choices), err);
  json_t *list = json_array();
  for (int32_t i = 0; i < count; i++)
    pkv_json_add(&list, choice_json(reply, i, &choices[i]));
  return pkv_json_append(
      out,
      json_pack("{s:s, s:s, s:I, s:s, s:o, s:o}", "id", reply->id, "object",
                reply->kind == PKV_API_CHAT ? "chat.completion" : "text_completion", "created",
                (json_int_t)reply->created, "model", reply->name, "choices", list, "usage",
                usage_json(&choices->state, sizeof *choices, count, n)),
      err);
}

/* One event; takes `choices` over. `usage` is NULL for all but the last one. */
static pkv_status append_chunk(pkv_buffer *out, const pkv_reply *reply, json_t *choices,
                               json_t *usage, pkv_error *err) {
  json_t *chunk =
      json_pack("{s:s, s:s, s:I, s:s, s:o}", "id", reply->id, "object",
                reply->kind == PKV_API_CHAT ? "chat.completion.chunk" : "text_completion",
                "created", (json_int_t)reply->created, "model", reply->name, "choices", choices);
  if (reply->include_usage) pkv_json_set(&chunk, "usage", usage != NULL ? usage : json_null());
  return pkv_json_append_event(out, chunk, err);
}

pkv_status pkv_reply_open(pkv_buffer *out, const pkv_reply *reply, int32_t choice, pkv_error *err) {
  if (reply->kind != PKV_API_CHAT) return PKV_OK;
  return append_chunk(out, reply,
                      json_pack("[{s:i, s:{s:s, s:s}, s:n, s:n}]", "index", choice, "delta", "role",
                                "assistant", "content", "", "logprobs", "finish_reason"),
                      NULL, err);
}

/* Events of what a parser made of text. */
static pkv_status append_news(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                              const pkv_tool_news *news, json_t *logprobs, pkv_error *err) {
  pkv_status status = PKV_OK;
  if (news->content.size > 0 || !json_is_null(logprobs))
    status = append_chunk(out, reply,
                          json_pack("[{s:i, s:{s:s%}, s:O, s:n}]", "index", choice, "delta",
                                    "content", news->content.size > 0 ? news->content.data : "",
                                    news->content.size, "logprobs", logprobs, "finish_reason"),
                          NULL, err);
  if (status == PKV_OK && json_array_size(news->deltas) > 0)
    status = append_chunk(out, reply,
                          json_pack("[{s:i, s:{s:O}, s:n, s:n}]", "index", choice, "delta",
                                    "tool_calls", news->deltas, "logprobs", "finish_reason"),
                          NULL, err);
  json_decref(logprobs);
  return status;
}

static pkv_status tools_delta(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                              const pkv_piece *piece, pkv_tool_parser *parser, pkv_error *err) {
  pkv_tool_news news;
  pkv_status status = PKV_E_NOMEM;
  if (news_init(&news)) {
    status = piece != NULL ? pkv_tool_parser_feed(&news, parser, piece->text.data, piece->text.size)
                           : pkv_tool_parser_end(&news, parser);
    if (status == PKV_OK)
      status = append_news(out, reply, choice, &news,
                           piece != NULL ? pkv_logprobs_chat(reply, piece) : json_null(), err);
  }
  news_deinit(&news);
  return status;
}

pkv_status pkv_reply_delta(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                           const pkv_piece *piece, pkv_tool_parser *parser, pkv_error *err) {
  if (reply->tools != NULL) return tools_delta(out, reply, choice, piece, parser, err);
  const char *const text = piece->text.size > 0 ? piece->text.data : "";
  const size_t bytes = piece->text.size;
  if (reply->kind == PKV_API_LLAMA)
    return pkv_json_append_event(out, llama_delta(reply, piece), err);
  json_t *const choices =
      reply->kind == PKV_API_CHAT
          ? json_pack("[{s:i, s:{s:s%}, s:o, s:n}]", "index", choice, "delta", "content", text,
                      bytes, "logprobs", pkv_logprobs_chat(reply, piece), "finish_reason")
          : json_pack("[{s:i, s:s%, s:o, s:n}]", "index", choice, "text", text, bytes, "logprobs",
                      pkv_logprobs_legacy(reply, piece), "finish_reason");
  return append_chunk(out, reply, choices, NULL, err);
}

pkv_status pkv_reply_end(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                         const pkv_choice_state *state, pkv_tool_parser *parser, pkv_error *err) {
  if (!is_good(state->finish)) {
    PKV_TRY(pkv_buffer_append(out, "data: ", 6, err));
    pkv_api_error error = {500, NULL, "", ""};
    (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the answer could not be finished");
    PKV_TRY(pkv_reply_error(out, &error, err));
    return pkv_buffer_append(out, "\n\n", 2, err);
  }
  if (reply->kind == PKV_API_LLAMA)
    return pkv_json_append_event(out, llama_end(reply, state, "", 0), err);
  if (reply->tools != NULL) PKV_TRY(tools_delta(out, reply, choice, NULL, parser, err));
  const char *const reason = finish_text(state->finish, reply->tools != NULL && parser->calls > 0);
  json_t *const choices = reply->kind == PKV_API_CHAT
                              ? json_pack("[{s:i, s:{}, s:n, s:s}]", "index", choice, "delta",
                                          "logprobs", "finish_reason", reason)
                              : json_pack("[{s:i, s:s, s:n, s:s}]", "index", choice, "text", "",
                                          "logprobs", "finish_reason", reason);
  return append_chunk(out, reply, choices, NULL, err);
}

pkv_status pkv_reply_close(pkv_buffer *out, const pkv_reply *reply, const pkv_choice_state *states,
                           int32_t count, int32_t n, pkv_error *err) {
  for (int32_t i = 0; i < count; i++)
    if (!is_good(states[i].finish)) return PKV_OK; /* the error was the last event */
  if (reply->kind == PKV_API_LLAMA) return PKV_OK;
  if (reply->include_usage)
    PKV_TRY(
        append_chunk(out, reply, json_array(), usage_json(states, sizeof *states, count, n), err));
  return pkv_buffer_append(out, "data: [DONE]\n\n", 14, err);
}

pkv_status pkv_reply_models(pkv_buffer *out, const char *name, int64_t created, int32_t longest,
                            pkv_error *err) {
  return pkv_json_append(out,
                         json_pack("{s:s, s:[{s:s, s:s, s:I, s:s, s:i}]}", "object", "list", "data",
                                   "id", name, "object", "model", "created", (json_int_t)created,
                                   "owned_by", "persistentkv", "max_model_len", (int)longest),
                         err);
}
