/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: routes, who may ask, bodies; and what all answers have in common. */
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "server/http_parts.h"

#define ANSWER_BYTES ((size_t)32 << 20)
/* Bytes of a chunked body that are read and dropped before the connection is cut. */
#define DROP_FACTOR 2
#define BLOCK_BYTES 16384

static const struct {
  const char *path, *method;
  bool open;  /* no key is asked for */
  bool early; /* answers before the model is there */
} routes[PKV_ROUTE_NONE] = {
    [PKV_ROUTE_PAGE] = {"/", "GET", false, true},
    [PKV_ROUTE_HEALTH] = {"/health", "GET", true, true},
    [PKV_ROUTE_READY] = {"/ready", "GET", false, true},
    [PKV_ROUTE_METRICS] = {"/metrics", "GET", false, true},
    [PKV_ROUTE_STATE] = {"/dashboard/state", "GET", false, true},
    [PKV_ROUTE_MODELS] = {"/v1/models", "GET", false, false},
    [PKV_ROUTE_PROPS] = {"/props", "GET", false, false},
    [PKV_ROUTE_SLOTS] = {"/slots", "GET", false, false},
    [PKV_ROUTE_TOKENIZE] = {"/tokenize", "POST", false, false},
    [PKV_ROUTE_DETOKENIZE] = {"/detokenize", "POST", false, false},
    [PKV_ROUTE_TEMPLATE] = {"/apply-template", "POST", false, false},
    [PKV_ROUTE_COMPLETIONS] = {"/v1/completions", "POST", false, false},
    [PKV_ROUTE_CHAT] = {"/v1/chat/completions", "POST", false, false},
    [PKV_ROUTE_LLAMA] = {"/completion", "POST", false, false},
};

/* The same under other names, as clients of llama-server know them. */
static const struct {
  const char *path;
  pkv_http_route route;
} aliases[] = {
    {"/v1/health", PKV_ROUTE_HEALTH},
    {"/models", PKV_ROUTE_MODELS},
    {"/completions", PKV_ROUTE_LLAMA},
    {"/chat/completions", PKV_ROUTE_CHAT},
};

static pkv_connection *connection_of(struct MHD_Connection *http) {
  const union MHD_ConnectionInfo *const info =
      MHD_get_connection_info(http, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  return info != NULL ? info->socket_context : NULL;
}

static const char *header_of(const pkv_exchange *x, const char *name) {
  return MHD_lookup_connection_value(x->http, MHD_HEADER_KIND, name);
}

void pkv_http_owes(pkv_connection *connection, pkv_owed owed) {
  connection->owed = owed;
  connection->since_ns = pkv_clock_ns();
}

void *pkv_http_begin(void *user, const char *uri, struct MHD_Connection *http) {
  pkv_connection *const connection = connection_of(http);
  const pkv_allocator a = pkv_allocator_default();
  (void)user;
  (void)uri;
  if (connection == NULL) return NULL;
  pkv_http_forget(connection);
  pkv_http_owes(connection, PKV_OWED_HEADER);
  pkv_exchange *const exchange = pkv_alloc_zeroed(&a, 1, sizeof *exchange);
  if (exchange == NULL) return NULL;
  exchange->connection = connection;
  exchange->http = http;
  exchange->route = PKV_ROUTE_NONE;
  exchange->method = "-";
  exchange->begun_ns = pkv_clock_ns();
  pkv_buffer_init(&exchange->body, (size_t)connection->server->options->max_body, NULL);
  pkv_buffer_init(&exchange->out, ANSWER_BYTES, NULL);
  connection->exchange = exchange;
  return exchange;
}

static void client_address(char *out, size_t bytes, struct MHD_Connection *http) {
  const union MHD_ConnectionInfo *const info =
      MHD_get_connection_info(http, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  const struct sockaddr *const at = info != NULL ? info->client_addr : NULL;
  const socklen_t size = at == NULL                  ? 0
                         : at->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                     : sizeof(struct sockaddr_in);
  (void)snprintf(out, bytes, "-");
  if (at != NULL) (void)getnameinfo(at, size, out, (socklen_t)bytes, NULL, 0, NI_NUMERICHOST);
}

static void tell_access(const pkv_exchange *x, bool complete) {
  const pkv_serve_options *const o = x->connection->server->options;
  static const char *const finishes[] = {"-", "stop", "length", "abort", "error"};
  if (o->access == NULL || !x->begun) return;
  char client[64];
  pkv_access access = {.id = x->request_id,
                       .method = x->method,
                       .path = "-",
                       .client = client,
                       .key = x->key,
                       .status = x->status,
                       .streamed = x->stream,
                       .complete = complete,
                       .queue = -1.0,
                       .ttft = -1.0,
                       .finish = "-"};
  client_address(client, sizeof client, x->http);
  access.probe = x->status == 200 && (x->route == PKV_ROUTE_HEALTH || x->route == PKV_ROUTE_READY ||
                                      x->route == PKV_ROUTE_METRICS || x->route == PKV_ROUTE_STATE);
  if (x->route != PKV_ROUTE_NONE) access.path = routes[x->route].path;
  access.seconds = (double)(pkv_clock_ns() - x->begun_ns) * 1e-9;
  for (int32_t c = 0; x->states != NULL && c < x->choice_count; c++) {
    const pkv_choice_state *const s = &x->states[c];
    if (c % x->n == 0) access.prompt_tokens += s->prompt_tokens;
    if (c % x->n == 0) access.cached_tokens += s->cached_tokens;
    access.generated_tokens += s->generated;
    if (c == 0) access.finish = s->done ? finishes[s->finish] : finishes[PKV_FINISH_CANCELLED];
    if (c == 0 && s->started_ns != 0) access.queue = (double)(s->started_ns - s->arrived_ns) * 1e-9;
    if (c == 0 && s->first_ns != 0) access.ttft = (double)(s->first_ns - s->arrived_ns) * 1e-9;
  }
  o->access(o->user, &access);
}

static void end_exchange(pkv_exchange *x, bool complete) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_http_release_jobs(x);
  tell_access(x, complete);
  x->connection->exchange = NULL;
  pkv_http_owes(x->connection, PKV_OWED_NEXT);
  pkv_http_free_request(x);
  pkv_buffer_deinit(&x->body);
  pkv_buffer_deinit(&x->out);
  for (int32_t c = 0; x->told != NULL && x->reply.tools != NULL && c < x->choice_count; c++)
    pkv_tool_parser_deinit(&x->told[c].parser);
  pkv_tools_free(&x->tools);
  pkv_free(&a, x->told, (size_t)x->choice_count * sizeof *x->told);
  pkv_free(&a, x->states, (size_t)x->choice_count * sizeof *x->states);
  pkv_free(&a, x, sizeof *x);
}

void pkv_http_end(void *user, struct MHD_Connection *http, void **slot,
                  enum MHD_RequestTerminationCode why) {
  pkv_exchange *const x = *slot;
  (void)user;
  (void)http;
  *slot = NULL;
  if (x != NULL) end_exchange(x, why == MHD_REQUEST_TERMINATED_COMPLETED_OK);
}

void pkv_http_forget(pkv_connection *connection) {
  if (connection->exchange != NULL) end_exchange(connection->exchange, false);
}

/* --- answers ------------------------------------------------------------------------------- */

/* Is text[bytes] one of a list separated by commas? */
static bool in_list(const char *list, const char *text) {
  const size_t bytes = strlen(text);
  for (const char *at = list; at != NULL && *at != '\0';) {
    const size_t length = strcspn(at, ",");
    if (length == bytes && memcmp(at, text, bytes) == 0) return true;
    at += length + (at[length] == ',');
  }
  return false;
}

/* The web page that asks, where it may; else NULL. */
static const char *allowed_origin(const pkv_exchange *x) {
  const char *const origin = header_of(x, MHD_HTTP_HEADER_ORIGIN);
  const char *const allowed = x->connection->server->options->origins;
  return origin != NULL && origin[0] != '\0' && in_list(allowed, origin) ? origin : NULL;
}

void pkv_http_add_headers(pkv_exchange *x, struct MHD_Response *response) {
  const char *const origin = allowed_origin(x);
  (void)MHD_add_response_header(response, "X-Request-Id", x->request_id);
  (void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  if (origin != NULL) {
    (void)MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_VARY, "Origin");
  }
  if (x->connection->server->draining)
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
}

/* Called whenever the client has taken what it was given before. */
static ssize_t read_whole(void *user, uint64_t position, char *block, size_t room) {
  pkv_exchange *const x = user;
  const size_t left = position < x->out.size ? x->out.size - (size_t)position : 0;
  const size_t count = left < room ? left : room;
  if (x->connection->gone || count == 0) return MHD_CONTENT_READER_END_WITH_ERROR;
  memcpy(block, x->out.data + position, count);
  pkv_http_owes(x->connection, PKV_OWED_READ);
  return (ssize_t)count;
}

enum MHD_Result pkv_http_respond(pkv_exchange *x, int code, const char *type, const char *header,
                                 const char *value) {
  struct MHD_Response *const response =
      x->out.size == 0
          ? MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT)
          : MHD_create_response_from_callback(x->out.size, BLOCK_BYTES, read_whole, x, NULL);
  if (response == NULL) return MHD_NO;
  pkv_server *const server = x->connection->server;
  if (type != NULL) (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
  if (header != NULL) (void)MHD_add_response_header(response, header, value);
  pkv_http_add_headers(x, response);
  const enum MHD_Result queued = MHD_queue_response(x->http, (unsigned)code, response);
  MHD_destroy_response(response);
  server->counters.requests++;
  server->counters.by_class[code / 100 % 6]++;
  x->status = code;
  pkv_http_owes(x->connection, PKV_OWED_READ);
  return queued;
}

enum MHD_Result pkv_http_respond_error(pkv_exchange *x, const pkv_api_error *error,
                                       const char *header, const char *value) {
  pkv_buffer_clear(&x->out);
  if (pkv_reply_error(&x->out, error, NULL) != PKV_OK) return MHD_NO;
  return pkv_http_respond(x, error->http, PKV_TYPE_JSON, header, value);
}

enum MHD_Result pkv_http_respond_busy(pkv_exchange *x, const char *code, const char *message) {
  pkv_api_error error;
  (void)pkv_api_refuse(&error, 503, code, "", "%s", message);
  return pkv_http_respond_error(x, &error, MHD_HTTP_HEADER_RETRY_AFTER, "1");
}

/* A web page asks whether it may ask. */
static enum MHD_Result respond_preflight(pkv_exchange *x) {
  struct MHD_Response *const response =
      MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
  if (response == NULL) return MHD_NO;
  (void)MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, POST");
  (void)MHD_add_response_header(response, "Access-Control-Allow-Headers",
                                "Authorization, Content-Type, X-Request-Id");
  (void)MHD_add_response_header(response, "Access-Control-Max-Age", "600");
  pkv_http_add_headers(x, response);
  const enum MHD_Result queued = MHD_queue_response(x->http, MHD_HTTP_NO_CONTENT, response);
  MHD_destroy_response(response);
  x->connection->server->counters.requests++;
  x->connection->server->counters.by_class[2]++;
  x->status = 204;
  pkv_http_owes(x->connection, PKV_OWED_READ);
  return queued;
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

typedef struct seen_headers {
  int count, hosts, lengths, encodings;
  bool unknown; /* an encoding, or what one may have been */
} seen_headers;

/* libmicrohttpd leaves blanks before a colon in the name, and puts a folded line at its end. */
static bool may_be(const char *key, const char *name) {
  return strncasecmp(key, name, strlen(name)) == 0 && strcasecmp(key, name) != 0;
}

static bool good_name(const char *key) {
  static const char good[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                             "!#$%&'*+-.^_`|~";
  return key[strspn(key, good)] == '\0' && !may_be(key, MHD_HTTP_HEADER_CONTENT_LENGTH) &&
         !may_be(key, MHD_HTTP_HEADER_TRANSFER_ENCODING);
}

static enum MHD_Result see_header(void *user, enum MHD_ValueKind kind, const char *key,
                                  const char *value) {
  seen_headers *const seen = user;
  (void)kind;
  const bool encoding = strcasecmp(key, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0;
  seen->count++;
  seen->hosts += strcasecmp(key, MHD_HTTP_HEADER_HOST) == 0;
  seen->lengths += strcasecmp(key, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0;
  seen->encodings += encoding;
  if (!good_name(key) || (encoding && (value == NULL || strcasecmp(value, "chunked") != 0)))
    seen->unknown = true;
  return MHD_YES;
}

/* The client's name for the request, if it is one that can stand in a log line and a header. */
static void set_request_id(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  const char *const given = header_of(x, "X-Request-Id");
  const size_t bytes = given != NULL ? strlen(given) : 0;
  bool good = bytes > 0 && bytes < sizeof x->request_id;
  for (size_t i = 0; good && i < bytes; i++)
    good = given[i] > ' ' && given[i] <= '~' && given[i] != '"' && given[i] != '\\';
  if (good)
    memcpy(x->request_id, given, bytes + 1);
  else
    (void)snprintf(x->request_id, sizeof x->request_id, "req-%" PRIx64 "%08" PRIx64,
                   (uint64_t)server->created, ++server->next_id);
}

static bool find_route(pkv_exchange *x, pkv_api_error *error, const char *url, const char *method,
                       const char **allow) {
  for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
    if (strcmp(url, aliases[i].path) == 0) url = routes[aliases[i].route].path;
  for (int i = 0; i < PKV_ROUTE_NONE; i++) {
    if (strcmp(url, routes[i].path) != 0) continue;
    x->route = (pkv_http_route)i;
    *allow = routes[i].method;
    if (strcmp(method, routes[i].method) == 0) return true;
    return pkv_api_refuse(error, 405, "method_not_allowed", "", "this path takes %s only",
                          routes[i].method);
  }
  return pkv_api_refuse(error, 404, "not_found", "", "there is nothing at this path");
}

/* Which key the request has, in Authorization or, as other clients send it, X-Api-Key. */
static int32_t find_key(const pkv_exchange *x) {
  const pkv_api_keys *const keys = &x->connection->server->keys;
  const char *const header = header_of(x, MHD_HTTP_HEADER_AUTHORIZATION);
  const char *const bare = header_of(x, "X-Api-Key");
  char as_bearer[PKV_KEY_BYTES + 16];
  if (header != NULL || bare == NULL || strlen(bare) >= PKV_KEY_BYTES)
    return pkv_api_keys_find(keys, header);
  (void)snprintf(as_bearer, sizeof as_bearer, "Bearer %s", bare);
  return pkv_api_keys_find(keys, as_bearer);
}

/* libmicrohttpd's own memory ends somewhere above this. */
static bool check_size(const pkv_exchange *x, pkv_api_error *error, const seen_headers *seen) {
  const union MHD_ConnectionInfo *const info =
      MHD_get_connection_info(x->http, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
  if (info != NULL && info->header_size > PKV_HEADER_BYTES)
    return pkv_api_refuse(error, 431, "header_too_large", "",
                          "request line and headers may have %zu bytes", PKV_HEADER_BYTES);
  if (seen->count > PKV_HEADERS)
    return pkv_api_refuse(error, 431, "too_many_headers", "", "a request may have %d headers",
                          PKV_HEADERS);
  return true;
}

/* Where the body ends must be said once: a proxy that believes the other of two takes what follows
 * for somebody else's request. */
static bool check_framing(const seen_headers *seen, pkv_api_error *error) {
  if (seen->lengths + seen->encodings <= 1 && !seen->unknown) return true;
  return pkv_api_refuse(error, 400, "bad_framing", "",
                        "a body has one Content-Length, or the one Transfer-Encoding chunked, and "
                        "a header a name without blanks, on one line");
}

/* A browser sends the key that its user typed with every request to this server, also with those of
 * other servers' pages. Such a page can post forms and plain text; before JSON it would be asked
 * whether it may (respond_preflight). */
static bool may_be_foreign(const pkv_exchange *x) {
  const char *const type = header_of(x, MHD_HTTP_HEADER_CONTENT_TYPE);
  return strcmp(x->method, "GET") != 0 &&
         pkv_api_keys_unasked(header_of(x, MHD_HTTP_HEADER_AUTHORIZATION)) &&
         (type == NULL || strncasecmp(type, PKV_TYPE_JSON, strlen(PKV_TYPE_JSON)) != 0);
}

/* Who asks, and whom. */
static bool check_who(pkv_exchange *x, pkv_api_error *error, const seen_headers *seen) {
  const pkv_server *const server = x->connection->server;
  if (seen->hosts > 1 || !good_host(server, header_of(x, MHD_HTTP_HEADER_HOST)))
    return pkv_api_refuse(error, 400, "bad_host", "", "the Host header does not name this server");
  const bool open = x->route != PKV_ROUTE_NONE && routes[x->route].open;
  x->key = find_key(x);
  if (!open && x->key < 0)
    return pkv_api_refuse(error, 401, "invalid_api_key", "",
                          "this server needs a key: Authorization: Bearer KEY");
  if (server->keys.count > 0 && may_be_foreign(x))
    return pkv_api_refuse(error, 415, "content_type", "",
                          "with a browser's password a body must be " PKV_TYPE_JSON);
  return true;
}

/* What can be said of a body before it comes. One that is a little too large is taken and dropped:
 * a client that sends all before it reads would find the connection closed, and no answer. */
static bool check_body(pkv_exchange *x, pkv_api_error *error) {
  const int64_t most = x->connection->server->options->max_body;
  const char *const length = header_of(x, MHD_HTTP_HEADER_CONTENT_LENGTH);
  int64_t bytes = 0;
  if (header_of(x, MHD_HTTP_HEADER_CONTENT_ENCODING) != NULL)
    return pkv_api_refuse(error, 415, "content_encoding", "", "bodies are taken uncompressed only");
  if (length == NULL || pkv_parse_i64(&bytes, length, 0, most)) return true;
  x->too_large = header_of(x, MHD_HTTP_HEADER_EXPECT) == NULL &&
                 pkv_parse_i64(&bytes, length, 0, DROP_FACTOR * most);
  return x->too_large || pkv_api_refuse(error, 413, "body_too_large", "",
                                        "the body may have %lld bytes", (long long)most);
}

static enum MHD_Result refuse_head(pkv_exchange *x, const pkv_api_error *error, const char *allow) {
  /* Who opens the page is asked by the browser; programs are not, and know Bearer. */
  if (error->http == 401)
    return pkv_http_respond_error(x, error, MHD_HTTP_HEADER_WWW_AUTHENTICATE,
                                  x->route == PKV_ROUTE_PAGE
                                      ? "Basic realm=\"PersistentKV: the API key as password\""
                                      : "Bearer");
  return pkv_http_respond_error(x, error, error->http == 405 ? MHD_HTTP_HEADER_ALLOW : NULL, allow);
}

static const char *known_method(const char *method) {
  static const char *const names[] = {"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strcmp(method, names[i]) == 0) return names[i];
  return "-";
}

/* The headers are here. */
static enum MHD_Result take_head(pkv_exchange *x, const char *url, const char *method) {
  pkv_api_error error;
  const char *allow = NULL;
  x->begun = true;
  x->method = known_method(method);
  set_request_id(x);
  pkv_http_owes(x->connection, PKV_OWED_BODY);
  const bool found = find_route(x, &error, url, method, &allow);
  pkv_api_error who;
  seen_headers seen = {0, 0, 0, 0, false};
  (void)MHD_get_connection_values(x->http, MHD_HEADER_KIND, see_header, &seen);
  if (!check_size(x, &who, &seen) || !check_framing(&seen, &who)) return refuse_head(x, &who, NULL);
  if (strcmp(method, "OPTIONS") == 0 && allowed_origin(x) != NULL &&
      header_of(x, "Access-Control-Request-Method") != NULL && x->route != PKV_ROUTE_NONE)
    return respond_preflight(x);
  /* Without a key nobody learns what is here. */
  if (!check_who(x, &who, &seen)) return refuse_head(x, &who, NULL);
  if (found && check_body(x, &error)) return MHD_YES;
  return refuse_head(x, &error, allow);
}

/* libmicrohttpd gives a chunk, or what came of it, at a time: work for each, however small. */
static bool too_many_chunks(pkv_exchange *x) {
  if (header_of(x, MHD_HTTP_HEADER_CONTENT_LENGTH) != NULL) return false;
  return ++x->pieces > PKV_BODY_CHUNKS && x->pieces > x->body.size / PKV_CHUNK_BYTES;
}

static enum MHD_Result take_body(pkv_exchange *x, const char *data, size_t *data_size) {
  const size_t count = *data_size;
  *data_size = 0;
  x->too_many = x->too_many || (!x->too_large && too_many_chunks(x));
  if (!x->too_large && !x->too_many && pkv_buffer_append(&x->body, data, count, NULL) == PKV_OK)
    return MHD_YES;
  x->too_large = true;
  pkv_buffer_clear(&x->body);
  x->dropped += count;
  return x->dropped > DROP_FACTOR * x->body.limit ? MHD_NO : MHD_YES;
}

/* All of the request is here. */
static enum MHD_Result answer(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  if (x->too_large) {
    pkv_api_error error;
    if (x->too_many)
      (void)pkv_api_refuse(&error, 413, "too_many_chunks", "",
                           "the body came in more than %d chunks, of less than %d bytes on average",
                           PKV_BODY_CHUNKS, PKV_CHUNK_BYTES);
    else
      (void)pkv_api_refuse(&error, 413, "body_too_large", "", "the body may have %lld bytes",
                           (long long)server->options->max_body);
    return pkv_http_respond_error(x, &error, NULL, NULL);
  }
  if (!routes[x->route].early && server->model == NULL)
    return pkv_http_respond_busy(x, "loading", "the model is being loaded");
  const bool work = x->route == PKV_ROUTE_COMPLETIONS || x->route == PKV_ROUTE_CHAT ||
                    x->route == PKV_ROUTE_LLAMA;
  if (!work) return pkv_http_plain(x);
  if (server->draining) return pkv_http_respond_busy(x, "shutting_down", "the server is ending");
  return pkv_http_start_jobs(x);
}

enum MHD_Result pkv_http_read_text(pkv_exchange *x, void (*work)(void *x),
                                   enum MHD_Result (*next)(pkv_exchange *x)) {
  pkv_http_owes(x->connection, PKV_OWED_NOTHING);
  if (x->body.size < PKV_LONG_BODY) {
    work(x);
    return next(x);
  }
  x->text.work = work;
  x->text.user = x;
  x->text_next = next;
  x->text_given = x->suspended = true;
  pkv_text_worker_give(x->connection->server->texts, &x->text);
  MHD_suspend_connection(x->http);
  return MHD_YES;
}

enum MHD_Result pkv_http_request(void *user, struct MHD_Connection *http, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *data_size, void **slot) {
  pkv_exchange *const x = *slot;
  const pkv_server *const server = user;
  (void)http;
  (void)version;
  if (x == NULL) return MHD_NO;
  if (x->text_given) {
    x->text_given = false;
    return x->connection->gone || server->aborting ? MHD_NO : x->text_next(x);
  }
  if (pkv_http_has_jobs(x)) return pkv_http_finish_jobs(x);
  if (!x->begun) return take_head(x, url, method);
  if (*data_size > 0) return take_body(x, data, data_size);
  if (x->connection->gone || server->aborting) return MHD_NO;
  return answer(x);
}
