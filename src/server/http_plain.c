/* SPDX-License-Identifier: Apache-2.0 */
/* Routes that are answered at once. */
#include <string.h>

#include "base/status.h"
#include "server/api_fields.h"
#include "server/dashboard_page.h"
#include "server/http_parts.h"
#include "server/json_out.h"
#include "server/reply_state.h"
#include "server/tools.h"

/* Tokens to text, at most so much. */
#define TEXT_BYTES ((size_t)32 << 20)

/* --- tokenize, detokenize, apply-template -------------------------------------------------- */

/* Text of tokens, control tokens spelled out, as well-formed UTF-8. */
static pkv_status spell(pkv_text_stream *text, const pkv_tokens *tokens) {
  for (size_t i = 0; i < tokens->count; i++) {
    const char *bytes = "";
    size_t count = 0;
    PKV_TRY(pkv_token_text(&bytes, &count, text->model, tokens->ids[i], 1, NULL));
    PKV_TRY(pkv_text_stream_bytes(text, bytes, count, NULL));
  }
  return pkv_text_stream_end(text, NULL);
}

static json_t *spelled(const pkv_model *model, const pkv_tokens *tokens) {
  pkv_text_stream text;
  pkv_text_stream_init(&text, model, TEXT_BYTES);
  const pkv_status status = spell(&text, tokens);
  json_t *const value = status == PKV_OK
                            ? json_stringn(text.text.size > 0 ? text.text.data : "", text.text.size)
                            : NULL;
  pkv_text_stream_deinit(&text);
  return value;
}

/* A piece that is no UTF-8 is the list of its bytes, as llama-server has it. */
static json_t *piece_json(const pkv_model *model, int32_t token) {
  const char *bytes = "";
  size_t count = 0;
  if (pkv_token_text(&bytes, &count, model, token, 1, NULL) != PKV_OK) count = 0;
  if (pkv_utf8_valid(bytes, count)) return json_stringn(bytes, count);
  json_t *list = json_array();
  for (size_t i = 0; i < count; i++)
    pkv_json_add(&list, json_integer((unsigned char)bytes[i]));
  return list;
}

static json_t *tokens_json(const pkv_model *model, const pkv_tokens *tokens, bool pieces) {
  json_t *list = json_array();
  for (size_t i = 0; i < tokens->count; i++) {
    json_t *const id = json_integer(tokens->ids[i]);
    pkv_json_add(&list, pieces ? json_pack("{s:o, s:o}", "id", id, "piece",
                                           piece_json(model, tokens->ids[i]))
                               : id);
  }
  return list;
}

/* A conversation as a request would have it, its tools shown. */
static bool read_messages(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                          const json_t *root, size_t bytes) {
  pkv_tools tools;
  if (!pkv_tools_read_prompt(out, &tools, error, model, root, bytes)) return false;
  pkv_tools_free(&tools);
  return true;
}

/* llama-server's "content", or vLLM's "prompt" or "messages". */
static bool read_text(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                      const json_t *root, size_t bytes) {
  const bool content = pkv_api_field(root, "content") != NULL;
  const char *const param = content ? "content" : "prompt";
  const json_t *const text = pkv_api_field(root, param);
  bool add, parse;
  pkv_error err = {PKV_OK, "", ""};
  if (pkv_api_field(root, "messages") != NULL) return read_messages(out, error, model, root, bytes);
  if (text == NULL) return pkv_api_refuse(error, 400, "missing", "content", "content is missing");
  if (!json_is_string(text))
    return pkv_api_refuse(error, 400, "invalid_type", param, "%s must be a string", param);
  if (!pkv_api_flag(&add, error, root, content ? "add_special" : "add_special_tokens", !content) ||
      !pkv_api_flag(&parse, error, root, "parse_special", true))
    return false;
  const uint32_t flags = (add ? PKV_TEXT_ADD_SPECIAL : 0u) | (parse ? PKV_TEXT_PARSE_SPECIAL : 0u);
  const pkv_status status = pkv_tokens_from_text(out, model, json_string_value(text),
                                                 json_string_length(text), flags, &err);
  if (status == PKV_OK) return true;
  pkv_tokens_free(out);
  return pkv_api_refuse_tokens(error, status, param, err.text);
}

static json_t *tokenize(pkv_api_error *error, const pkv_server *server, const json_t *root,
                        size_t bytes) {
  pkv_tokens tokens = {NULL, 0};
  bool pieces;
  if (!pkv_api_flag(&pieces, error, root, "with_pieces", false)) return NULL;
  if (!read_text(&tokens, error, server->model, root, bytes)) return NULL;
  json_t *const value =
      json_pack("{s:o, s:I, s:i}", "tokens", tokens_json(server->model, &tokens, pieces), "count",
                (json_int_t)tokens.count, "max_model_len", (int)server->longest);
  pkv_tokens_free(&tokens);
  return value;
}

static json_t *detokenize(pkv_api_error *error, const pkv_server *server, const json_t *root) {
  const json_t *const list = pkv_api_field(root, "tokens");
  pkv_tokens tokens = {NULL, 0};
  if (!json_is_array(list)) {
    (void)pkv_api_refuse(error, 400, "invalid_type", "tokens",
                         "tokens must be a list of token ids");
    return NULL;
  }
  if (!pkv_api_read_ids(&tokens, error, server->model, "tokens", list)) return NULL;
  json_t *const text = spelled(server->model, &tokens);
  pkv_tokens_free(&tokens);
  return json_pack("{s:O, s:o}", "content", text, "prompt", text);
}

static json_t *apply_template(pkv_api_error *error, const pkv_server *server, const json_t *root,
                              size_t bytes) {
  pkv_tokens tokens = {NULL, 0};
  if (!read_messages(&tokens, error, server->model, root, bytes)) return NULL;
  json_t *const text = spelled(server->model, &tokens);
  pkv_tokens_free(&tokens);
  return json_pack("{s:o}", "prompt", text);
}

/* By either thread: touches nothing but the exchange and the model. */
static void make_text(void *user) {
  pkv_exchange *const x = user;
  const pkv_server *const server = x->connection->server;
  pkv_api_error *const error = &x->refusal;
  const size_t bytes = x->body.size;
  error->http = 0;
  x->understood = false;
  json_t *const root = pkv_api_parse(error, bytes > 0 ? x->body.data : "", bytes);
  if (root == NULL) return;
  json_t *const value = x->route == PKV_ROUTE_TOKENIZE ? tokenize(error, server, root, bytes)
                        : x->route == PKV_ROUTE_DETOKENIZE
                            ? detokenize(error, server, root)
                            : apply_template(error, server, root, bytes);
  json_decref(root);
  if (value == NULL && error->http != 0) return;
  x->understood = pkv_json_append(&x->out, value, NULL) == PKV_OK;
}

static enum MHD_Result tell_text(pkv_exchange *x) {
  if (x->understood) return pkv_http_respond(x, 200, PKV_TYPE_JSON, NULL, NULL);
  return x->refusal.http != 0 ? pkv_http_respond_error(x, &x->refusal, NULL, NULL) : MHD_NO;
}

/* --- state --------------------------------------------------------------------------------- */

/* The process and its loop live: this answer is the proof. */
static enum MHD_Result answer_health(pkv_exchange *x) {
  const pkv_server *const server = x->connection->server;
  pkv_loop_counters c;
  pkv_loop_get_counters(&c, server->loop);
  if (c.phase == PKV_LOOP_FAILED)
    return pkv_http_respond_busy(x, "engine_failed", "the engine has failed");
  if (server->draining) return pkv_http_respond_busy(x, "shutting_down", "the server is ending");
  const char *const word = c.phase == PKV_LOOP_LOADING || !server->model ? "loading" : "ok";
  if (pkv_buffer_printf(&x->out, NULL, "{\"status\":\"%s\"}", word) != PKV_OK) return MHD_NO;
  return pkv_http_respond(x, 200, PKV_TYPE_JSON, NULL, NULL);
}

/* The model is there, and the engine does what it is asked. */
static enum MHD_Result answer_ready(pkv_exchange *x) {
  const pkv_server *const server = x->connection->server;
  pkv_loop_counters c;
  pkv_loop_get_counters(&c, server->loop);
  const char *const phase = pkv_server_phase(server, &c);
  const bool ready = strcmp(phase, "ready") == 0;
  json_t *const body =
      json_pack("{s:s, s:s, s:i, s:I}", "status", phase, "model", server->options->name, "live",
                (int)c.live, "steps", (json_int_t)c.engine.steps);
  if (pkv_json_append(&x->out, body, NULL) != PKV_OK) return MHD_NO;
  return pkv_http_respond(x, ready ? 200 : 503, PKV_TYPE_JSON,
                          ready ? NULL : MHD_HTTP_HEADER_RETRY_AFTER, "1");
}

static enum MHD_Result answer_page(pkv_exchange *x) {
  if (pkv_buffer_append(&x->out, pkv_dashboard_page, pkv_dashboard_page_bytes, NULL) != PKV_OK)
    return MHD_NO;
  return pkv_http_respond(x, 200, "text/html; charset=utf-8", "Content-Security-Policy",
                          "default-src 'none'; script-src 'unsafe-inline'; style-src "
                          "'unsafe-inline'; connect-src 'self'; img-src data:; "
                          "frame-ancestors 'none'; base-uri 'none'");
}

enum MHD_Result pkv_http_plain(pkv_exchange *x) {
  const pkv_server *const server = x->connection->server;
  pkv_status status = PKV_OK;
  switch (x->route) {
  case PKV_ROUTE_PAGE:
    return answer_page(x);
  case PKV_ROUTE_HEALTH:
    return answer_health(x);
  case PKV_ROUTE_READY:
    return answer_ready(x);
  case PKV_ROUTE_TOKENIZE:
  case PKV_ROUTE_DETOKENIZE:
  case PKV_ROUTE_TEMPLATE:
    return pkv_http_read_text(x, make_text, tell_text);
  case PKV_ROUTE_METRICS:
    if (pkv_reply_metrics(&x->out, server, NULL) != PKV_OK) return MHD_NO;
    return pkv_http_respond(x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, NULL);
  case PKV_ROUTE_MODELS:
    status =
        pkv_reply_models(&x->out, server->options->name, server->created, server->longest, NULL);
    break;
  case PKV_ROUTE_PROPS:
    status = pkv_reply_props(&x->out, server, NULL);
    break;
  case PKV_ROUTE_SLOTS:
    status = pkv_reply_slots(&x->out, server, NULL);
    break;
  case PKV_ROUTE_STATE:
    status = pkv_reply_state(&x->out, server, NULL);
    break;
  case PKV_ROUTE_COMPLETIONS:
  case PKV_ROUTE_CHAT:
  case PKV_ROUTE_LLAMA:
  case PKV_ROUTE_NONE:
    return MHD_NO;
  }
  if (status != PKV_OK) return MHD_NO;
  return pkv_http_respond(x, 200, PKV_TYPE_JSON, NULL, NULL);
}
