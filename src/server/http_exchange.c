/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and their answers: routes, bodies, streams. */
#include "server/http_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"

/* One answer's events that wait for the client. */
#define STREAM_BYTES ((size_t)64 << 20)
#define BLOCK_BYTES  16384
/* Bytes of a chunked body that are read and dropped before the connection is cut. */
#define DROP_FACTOR 2

typedef enum route {
  ROUTE_HEALTH,
  ROUTE_MODELS,
  ROUTE_METRICS,
  ROUTE_COMPLETIONS,
  ROUTE_CHAT,
  ROUTE_COUNT
} route;

static const struct {
  const char *path, *method;
} routes[ROUTE_COUNT] = {
    [ROUTE_HEALTH] = {"/health", "GET"},
    [ROUTE_MODELS] = {"/v1/models", "GET"},
    [ROUTE_METRICS] = {"/metrics", "GET"},
    [ROUTE_COMPLETIONS] = {"/v1/completions", "POST"},
    [ROUTE_CHAT] = {"/v1/chat/completions", "POST"},
};

static pkv_connection *connection_of(struct MHD_Connection *http) {
  const union MHD_ConnectionInfo *const info =
      MHD_get_connection_info(http, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  return info != NULL ? info->socket_context : NULL;
}

static void now_owes(pkv_connection *connection, pkv_owed owed) {
  connection->owed = owed;
  connection->since_ns = pkv_clock_ns();
}

/* A stalled reader is libmicrohttpd's to time out; what a client owes us is ours (serve.c). */
static void time_out_after(struct MHD_Connection *http, int32_t seconds) {
  (void)MHD_set_connection_option(http, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)seconds);
}

void *pkv_http_begin(void *user, const char *uri, struct MHD_Connection *http) {
  pkv_connection *const connection = connection_of(http);
  const pkv_allocator a = pkv_allocator_default();
  (void)user;
  (void)uri;
  if (connection == NULL) return NULL;
  now_owes(connection, PKV_OWED_HEADER);
  pkv_exchange *const exchange = pkv_alloc_zeroed(&a, 1, sizeof *exchange);
  if (exchange == NULL) return NULL;
  exchange->connection = connection;
  exchange->http = http;
  pkv_buffer_init(&exchange->body, (size_t)connection->server->options->max_body, NULL);
  pkv_buffer_init(&exchange->text, PKV_ANSWER_BYTES, NULL);
  pkv_buffer_init(&exchange->out, STREAM_BYTES, NULL);
  connection->exchange = exchange;
  return exchange;
}

void pkv_http_end(void *user, struct MHD_Connection *http, void **slot,
                  enum MHD_RequestTerminationCode why) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_exchange *const exchange = *slot;
  pkv_server *const server = user;
  *slot = NULL;
  if (exchange == NULL) return;
  if (why != MHD_REQUEST_TERMINATED_COMPLETED_OK)
    pkv_log(PKV_LOG_INFO, "server", "a request ended early (%d)", (int)why);
  pkv_loop_release(server->loop, exchange->job);
  exchange->connection->exchange = NULL;
  now_owes(exchange->connection, PKV_OWED_NEXT);
  if (why == MHD_REQUEST_TERMINATED_COMPLETED_OK) time_out_after(http, 0);
  pkv_buffer_deinit(&exchange->body);
  pkv_buffer_deinit(&exchange->text);
  pkv_buffer_deinit(&exchange->out);
  pkv_free(&a, exchange, sizeof *exchange);
}

/* --- answers ------------------------------------------------------------------------------- */

static enum MHD_Result respond(pkv_exchange *x, int code, const char *type, const char *header,
                               const char *value) {
  struct MHD_Response *const response =
      MHD_create_response_from_buffer(x->out.size, x->out.data, MHD_RESPMEM_MUST_COPY);
  if (response == NULL) return MHD_NO;
  pkv_server *const server = x->connection->server;
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
  if (header != NULL) (void)MHD_add_response_header(response, header, value);
  if (server->draining)
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  const enum MHD_Result queued = MHD_queue_response(x->http, (unsigned)code, response);
  MHD_destroy_response(response);
  server->request_count++;
  pkv_log(PKV_LOG_INFO, "server", "%d %s", code, x->reply.id);
  now_owes(x->connection, PKV_OWED_NOTHING);
  time_out_after(x->http, server->options->stall_s);
  return queued;
}

static enum MHD_Result respond_error(pkv_exchange *x, const pkv_api_error *error,
                                     const char *header, const char *value) {
  pkv_buffer_clear(&x->out);
  if (pkv_reply_error(&x->out, error, NULL) != PKV_OK) return MHD_NO;
  return respond(x, error->http, "application/json", header, value);
}

static enum MHD_Result respond_full(pkv_exchange *x, const char *code, const char *message) {
  pkv_api_error error;
  (void)pkv_api_refuse(&error, 503, code, "", "%s", message);
  return respond_error(x, &error, MHD_HTTP_HEADER_RETRY_AFTER, "1");
}

/* --- streams ------------------------------------------------------------------------------- */

/* Turns what is new into events. */
static pkv_status fill(pkv_exchange *x) {
  pkv_loop *const loop = x->connection->server->loop;
  pkv_buffer_clear(&x->text);
  pkv_buffer_clear(&x->out);
  x->sent = 0;
  if (!x->opened) PKV_TRY(pkv_reply_open(&x->out, &x->reply, NULL));
  x->opened = true;
  if (x->job == NULL) return PKV_OK;
  PKV_TRY(pkv_loop_take(&x->text, &x->state, loop, x->job, NULL));
  if (x->text.size > 0)
    PKV_TRY(pkv_reply_delta(&x->out, &x->reply, x->text.data, x->text.size, NULL));
  if (!x->state.done) return PKV_OK;
  PKV_TRY(pkv_reply_close(&x->out, &x->reply, &x->state, NULL));
  x->closed = true;
  pkv_loop_release(loop, x->job);
  x->job = NULL;
  return PKV_OK;
}

static ssize_t read_stream(void *user, uint64_t position, char *block, size_t room) {
  pkv_exchange *const x = user;
  (void)position;
  if (x->connection->gone || x->connection->server->aborting)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  if (x->sent == x->out.size) {
    if (x->closed) return MHD_CONTENT_READER_END_OF_STREAM;
    if (fill(x) != PKV_OK) return MHD_CONTENT_READER_END_WITH_ERROR;
  }
  if (x->out.size == 0 && x->ping && pkv_buffer_append(&x->out, ": ping\n\n", 8, NULL) != PKV_OK)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  const size_t left = x->out.size - x->sent;
  if (left == 0) {
    x->suspended = true;
    MHD_suspend_connection(x->http);
    return 0;
  }
  const size_t count = left < room ? left : room;
  memcpy(block, x->out.data + x->sent, count);
  x->sent += count;
  x->ping = false;
  x->spoke_ns = pkv_clock_ns();
  return (ssize_t)count;
}

static enum MHD_Result respond_stream(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  struct MHD_Response *const response =
      MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, x, NULL);
  if (response == NULL) return MHD_NO;
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                "text/event-stream; charset=utf-8");
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
  const enum MHD_Result queued = MHD_queue_response(x->http, MHD_HTTP_OK, response);
  MHD_destroy_response(response);
  server->request_count++;
  x->spoke_ns = pkv_clock_ns();
  pkv_log(PKV_LOG_INFO, "server", "200 %s, streamed", x->reply.id);
  time_out_after(x->http, server->options->stall_s);
  return queued;
}

/* --- completions --------------------------------------------------------------------------- */

static enum MHD_Result start_job(pkv_exchange *x, bool chat) {
  pkv_server *const server = x->connection->server;
  pkv_api_request request;
  pkv_api_error error;
  pkv_error err = {PKV_OK, "", ""};
  if (!pkv_api_read(&request, &error, server->model, server->longest, chat,
                    x->body.size > 0 ? x->body.data : "", x->body.size))
    return respond_error(x, &error, NULL, NULL);
  pkv_buffer_deinit(&x->body);
  x->stream = request.stream;
  x->reply.chat = chat;
  x->reply.include_usage = request.include_usage;
  x->reply.model = server->options->name;
  x->reply.created = (int64_t)time(NULL);
  (void)snprintf(x->reply.id, sizeof x->reply.id, "%s-%" PRIx64 "%08" PRIx64,
                 chat ? "chatcmpl" : "cmpl", (uint64_t)server->created, ++server->next_id);
  const pkv_status status = pkv_loop_submit(&x->job, server->loop, &request.job, &err);
  pkv_tokens_free(&request.job.prompt);
  if (status == PKV_E_INTERNAL) {
    (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the engine has failed");
    return respond_error(x, &error, NULL, NULL);
  }
  if (status != PKV_OK)
    return respond_full(x, "queue_full", "too many requests are waiting; try again later");
  now_owes(x->connection, PKV_OWED_NOTHING);
  if (x->stream) return respond_stream(x);
  x->suspended = true;
  MHD_suspend_connection(x->http);
  return MHD_YES;
}

/* A whole answer, when it is there; the exchange was resumed for it. */
static enum MHD_Result finish_job(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  if (x->connection->gone || server->aborting) return MHD_NO;
  if (pkv_loop_take(&x->text, &x->state, server->loop, x->job, NULL) != PKV_OK) return MHD_NO;
  if (!x->state.done) {
    x->suspended = true;
    MHD_suspend_connection(x->http);
    return MHD_YES;
  }
  pkv_loop_release(server->loop, x->job);
  x->job = NULL;
  if (x->state.finish != PKV_FINISH_STOP && x->state.finish != PKV_FINISH_LENGTH) {
    pkv_api_error error;
    (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the answer could not be finished");
    return respond_error(x, &error, NULL, NULL);
  }
  if (pkv_reply_whole(&x->out, &x->reply, x->text.size > 0 ? x->text.data : "", x->text.size,
                      &x->state, NULL) != PKV_OK)
    return MHD_NO;
  return respond(x, 200, "application/json", NULL, NULL);
}

void pkv_exchange_poke(pkv_exchange *x) {
  const pkv_server *const server = x->connection->server;
  if (!x->suspended) return;
  /* A whole answer needs no visit for each of its pieces. */
  if (!x->connection->gone && !server->aborting && x->job != NULL &&
      !pkv_loop_has_news(server->loop, x->job))
    return;
  x->suspended = false;
  MHD_resume_connection(x->http);
}

void pkv_exchange_ping(pkv_exchange *x, int64_t now_ns) {
  if (!x->stream || !x->suspended || now_ns - x->spoke_ns < PKV_PING_NS) return;
  x->ping = true;
  x->suspended = false;
  MHD_resume_connection(x->http);
}

void pkv_exchange_drop(pkv_exchange *x) {
  pkv_loop_release(x->connection->server->loop, x->job);
  x->job = NULL;
  pkv_exchange_poke(x);
}

/* --- requests ------------------------------------------------------------------------------ */

/* On loopback only names of loopback may be in Host: a web page that had its own name resolve to
 * 127.0.0.1 would else talk to us through the user's browser. */
static bool good_host(const pkv_server *server, const char *host) {
  static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
  if (!server->loopback || host == NULL) return true;
  for (size_t i = 0; i <= sizeof names / sizeof *names; i++) {
    const char *const name = i < 3 ? names[i] : server->options->host;
    const size_t length = strlen(name);
    if (strncasecmp(host, name, length) != 0) continue;
    const char *port = host + length;
    if (*port == '\0') return true;
    if (*port++ == ':' && *port != '\0' && port[strspn(port, "0123456789")] == '\0') return true;
  }
  return false;
}

static bool find_route(route *out, pkv_api_error *error, const char *url, const char *method,
                       const char **allow) {
  for (int i = 0; i < ROUTE_COUNT; i++) {
    if (strcmp(url, routes[i].path) != 0) continue;
    *out = (route)i;
    *allow = routes[i].method;
    if (strcmp(method, routes[i].method) == 0) return true;
    return pkv_api_refuse(error, 405, "method_not_allowed", "", "this path takes %s only",
                          routes[i].method);
  }
  return pkv_api_refuse(error, 404, "not_found", "", "there is nothing at this path");
}

/* What can be refused before the body. */
static bool check_head(pkv_exchange *x, route which, pkv_api_error *error) {
  const pkv_server *const server = x->connection->server;
  const char *const length =
      MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
  int64_t bytes = 0;
  if (!good_host(server,
                 MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST)))
    return pkv_api_refuse(error, 400, "bad_host", "", "the Host header does not name this server");
  if (which != ROUTE_HEALTH &&
      !pkv_api_keys_allow(&server->keys,
                          MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, "Authorization")))
    return pkv_api_refuse(error, 401, "invalid_api_key", "",
                          "this server needs a key: Authorization: Bearer KEY");
  if (MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_ENCODING) !=
      NULL)
    return pkv_api_refuse(error, 415, "content_encoding", "", "bodies are taken uncompressed only");
  if (length != NULL && !pkv_parse_i64(&bytes, length, 0, server->options->max_body))
    return pkv_api_refuse(error, 413, "body_too_large", "", "the body may have %lld bytes",
                          (long long)server->options->max_body);
  return true;
}

static enum MHD_Result simple_answer(pkv_exchange *x, route which) {
  pkv_server *const server = x->connection->server;
  pkv_loop_counters counters;
  pkv_status status = PKV_OK;
  pkv_loop_get_counters(&counters, server->loop);
  if (which == ROUTE_HEALTH && (counters.broken || server->draining))
    return respond_full(x, counters.broken ? "engine_failed" : "shutting_down",
                        counters.broken ? "the engine has failed" : "the server is ending");
  if (which == ROUTE_HEALTH)
    status = pkv_buffer_append(&x->out, "{\"status\":\"ok\"}", 15, NULL);
  else if (which == ROUTE_MODELS)
    status =
        pkv_reply_models(&x->out, server->options->name, server->created, server->longest, NULL);
  else
    status = pkv_reply_metrics(&x->out, &counters, server->connection_count, server->request_count,
                               NULL);
  if (status != PKV_OK) return MHD_NO;
  return respond(x, 200,
                 which == ROUTE_METRICS ? "text/plain; version=0.0.4; charset=utf-8"
                                        : "application/json",
                 NULL, NULL);
}

static enum MHD_Result take_body(pkv_exchange *x, const char *data, size_t *data_size) {
  const size_t count = *data_size;
  *data_size = 0;
  if (!x->too_large && pkv_buffer_append(&x->body, data, count, NULL) == PKV_OK) return MHD_YES;
  x->too_large = true;
  pkv_buffer_clear(&x->body);
  x->dropped += count;
  return x->dropped > DROP_FACTOR * x->body.limit ? MHD_NO : MHD_YES;
}

enum MHD_Result pkv_http_request(void *user, struct MHD_Connection *http, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *data_size, void **slot) {
  pkv_exchange *const x = *slot;
  pkv_server *const server = user;
  pkv_api_error error;
  const char *allow = NULL;
  route which = ROUTE_HEALTH;
  (void)http;
  (void)version;
  if (x == NULL) return MHD_NO;
  if (x->job != NULL) return finish_job(x);
  const bool found = find_route(&which, &error, url, method, &allow);
  if (!x->begun) {
    x->begun = true;
    now_owes(x->connection, PKV_OWED_BODY);
    if (found && check_head(x, which, &error)) return MHD_YES;
    if (error.http == 401)
      return respond_error(x, &error, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    return respond_error(x, &error, error.http == 405 ? MHD_HTTP_HEADER_ALLOW : NULL, allow);
  }
  if (*data_size > 0) return take_body(x, data, data_size);
  if (x->connection->gone || server->aborting) return MHD_NO;
  if (which != ROUTE_COMPLETIONS && which != ROUTE_CHAT) return simple_answer(x, which);
  if (x->too_large) {
    (void)pkv_api_refuse(&error, 413, "body_too_large", "", "the body may have %lld bytes",
                         (long long)server->options->max_body);
    return respond_error(x, &error, NULL, NULL);
  }
  if (server->draining) return respond_full(x, "shutting_down", "the server is ending");
  return start_job(x, which == ROUTE_CHAT);
}
