/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/demo_serve.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/text.h"
#include "cli/command.h"
#include "server/serve.h"

#define POLL_MS      100
#define ANSWER_BYTES ((size_t)16 << 20)
#define PLAIN_BYTES  ((size_t)1 << 20)
#define LIMIT_NS     INT64_C(600000000000) /* for the server to come up */

/* --- the server ---------------------------------------------------------------------------- */

typedef struct demo_server {
  pkv_serve_options options;
  pkv_model *model;
  pthread_t thread;
  pthread_mutex_t lock; /* guards what follows */
  pthread_cond_t changed;
  int32_t port; /* 0 = not yet */
  bool ended;
  pkv_status status;
  pkv_error err;
} demo_server;

static pkv_status give_model(void *user, pkv_model **out, pkv_error *err) {
  (void)err;
  *out = ((demo_server *)user)->model;
  return PKV_OK;
}

static void on_listening(void *user, int32_t port) {
  demo_server *const s = user;
  (void)pthread_mutex_lock(&s->lock);
  s->port = port;
  (void)pthread_cond_signal(&s->changed);
  (void)pthread_mutex_unlock(&s->lock);
}

static void *serve(void *user) {
  demo_server *const s = user;
  pkv_error err = {PKV_OK, "", ""};
  const pkv_status status = pkv_serve(&s->options, &err);
  (void)pthread_mutex_lock(&s->lock);
  s->status = status;
  s->err = err;
  s->ended = true;
  (void)pthread_cond_signal(&s->changed);
  (void)pthread_mutex_unlock(&s->lock);
  return NULL;
}

static void set_options(demo_server *s, const pkv_engine_options *engine,
                        const bench_schedule *schedule, const pkv_demo_load *load) {
  pkv_serve_options *const o = &s->options;
  o->host = "127.0.0.1";
  o->name = "demo";
  o->engine = *engine;
  o->engine.order = schedule->order;
  o->engine.admission = schedule->policy;
  o->engine.max_requests = load->count;
  o->engine.route_stats = 1;
  o->max_body = (int64_t)64 << 20;
  o->max_connections = load->count + 8;
  o->header_s = o->body_s = o->idle_s = o->stall_s = 600;
  o->drain_s = 5;
  o->progress_s = 600;
  o->load = give_model;
  o->listening = on_listening;
  o->user = s;
}

/* The thread starts with these signals blocked: only what is sent to it reaches it. */
static pkv_status start_server(demo_server *s, pkv_error *err) {
  sigset_t ours, before;
  (void)sigemptyset(&ours);
  (void)sigaddset(&ours, SIGTERM);
  (void)sigaddset(&ours, SIGINT);
  (void)pthread_mutex_init(&s->lock, NULL);
  (void)pthread_cond_init(&s->changed, NULL);
  (void)pthread_sigmask(SIG_BLOCK, &ours, &before);
  const int failed = pthread_create(&s->thread, NULL, serve, s);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  PKV_CHECK(err, failed == 0, PKV_E_NOMEM, "cannot start the server's thread: error %d", failed);
  (void)pthread_mutex_lock(&s->lock);
  while (s->port == 0 && !s->ended)
    (void)pthread_cond_wait(&s->changed, &s->lock);
  (void)pthread_mutex_unlock(&s->lock);
  return PKV_OK;
}

static pkv_status stop_server(demo_server *s, pkv_error *err) {
  (void)pthread_kill(s->thread, SIGTERM);
  (void)pthread_join(s->thread, NULL);
  (void)pthread_mutex_destroy(&s->lock);
  (void)pthread_cond_destroy(&s->changed);
  if (s->status != PKV_OK && err != NULL) *err = s->err;
  return s->status;
}

/* --- its clients --------------------------------------------------------------------------- */

typedef struct demo_client {
  int fd; /* -1: closed */
  pkv_buffer answer;
  size_t seen; /* bytes of it that were looked at */
  int32_t events;
  int64_t sent_ns, first_ns, last_ns;
} demo_client;

static pkv_status send_all(int fd, const char *data, size_t bytes, pkv_error *err) {
  while (bytes > 0) {
    const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);
    PKV_CHECK(err, sent > 0, PKV_E_IO, "the demo's server closed a connection");
    data += sent;
    bytes -= (size_t)sent;
  }
  return PKV_OK;
}

static pkv_status open_client(demo_client *c, int32_t port, const pkv_buffer *request,
                              pkv_error *err) {
  struct sockaddr_in to = {0};
  to.sin_family = AF_INET;
  to.sin_port = htons((uint16_t)port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  PKV_CHECK(err, c->fd >= 0 && connect(c->fd, (const struct sockaddr *)&to, sizeof to) == 0,
            PKV_E_IO, "cannot connect to the demo's server");
  c->sent_ns = pkv_clock_ns();
  return send_all(c->fd, request->data, request->size, err);
}

static void close_client(demo_client *c) {
  if (c->fd >= 0) (void)close(c->fd);
  c->fd = -1;
}

/* Takes what has come; the connection is closed at its end. */
static pkv_status receive(demo_client *c, pkv_error *err) {
  char block[16384];
  const ssize_t got = recv(c->fd, block, sizeof block, MSG_DONTWAIT);
  if (got < 0) return PKV_OK;
  if (got == 0) close_client(c);
  return got > 0 ? pkv_buffer_append(&c->answer, block, (size_t)got, err) : PKV_OK;
}

/* One question at a time, for the server itself. */
static pkv_status get(pkv_buffer *answer, int32_t port, const char *path, pkv_error *err) {
  pkv_buffer request;
  demo_client c = {.fd = -1};
  pkv_buffer_init(&request, 4096, NULL);
  pkv_buffer_init(&c.answer, PLAIN_BYTES, NULL);
  pkv_status status = pkv_buffer_printf(
      &request, err, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
  if (status == PKV_OK) status = open_client(&c, port, &request, err);
  while (status == PKV_OK && c.fd >= 0) {
    struct pollfd at = {c.fd, POLLIN, 0};
    (void)poll(&at, 1, POLL_MS);
    status = receive(&c, err);
    if (status == PKV_OK && pkv_cli_interrupted())
      status = PKV_FAIL(err, PKV_E_STATE, "interrupted");
  }
  close_client(&c);
  if (status == PKV_OK)
    status = pkv_buffer_append(answer, c.answer.size > 0 ? c.answer.data : "", c.answer.size, err);
  pkv_buffer_deinit(&c.answer);
  pkv_buffer_deinit(&request);
  return status;
}

static pkv_status wait_ready(const demo_server *s, pkv_error *err) {
  const int64_t end = pkv_clock_ns() + LIMIT_NS;
  for (bool ready = false; !ready;) {
    pkv_buffer answer;
    pkv_buffer_init(&answer, PLAIN_BYTES, NULL);
    const pkv_status status = get(&answer, s->port, "/ready", err);
    ready = status == PKV_OK && answer.size > 0 && strstr(answer.data, " 200 ") != NULL;
    pkv_buffer_deinit(&answer);
    PKV_TRY(status);
    PKV_CHECK(err, ready || pkv_clock_ns() < end, PKV_E_STATE, "the demo's server is not ready");
    if (!ready) (void)poll(NULL, 0, 10);
  }
  return PKV_OK;
}

static pkv_status write_request(pkv_buffer *out, const pkv_tokens *prompt, int32_t tokens,
                                pkv_error *err) {
  pkv_buffer body;
  pkv_buffer_init(&body, ANSWER_BYTES, NULL);
  pkv_status status = pkv_buffer_printf(&body, err,
                                        "{\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,"
                                        "\"stream_options\":{\"include_usage\":true},\"prompt\":[",
                                        (int)tokens);
  for (size_t i = 0; i < prompt->count && status == PKV_OK; i++)
    status = pkv_buffer_printf(&body, err, "%s%d", i > 0 ? "," : "", (int)prompt->ids[i]);
  if (status == PKV_OK) status = pkv_buffer_append(&body, "]}", 2, err);
  if (status == PKV_OK)
    status = pkv_buffer_printf(out, err,
                               "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                               "Connection: close\r\nContent-Length: %zu\r\n\r\n%s",
                               body.size, body.data);
  pkv_buffer_deinit(&body);
  return status;
}

/* --- the load ------------------------------------------------------------------------------ */

typedef struct demo_run {
  const pkv_demo_load *load;
  const demo_server *server;
  demo_client *clients; /* [count] */
  struct pollfd *polls; /* [count] */
  double *gaps;         /* [count * tokens] */
  double *scratch;      /* [count] */
  size_t gap_count;
  int64_t begin_ns, end_ns;
} demo_run;

static void see_events(demo_run *r, demo_client *c) {
  const int64_t now = pkv_clock_ns();
  const char *at;
  while (c->answer.size > c->seen && (at = strstr(c->answer.data + c->seen, "data: {")) != NULL) {
    c->seen = (size_t)(at - c->answer.data) + 7;
    if (c->first_ns == 0)
      c->first_ns = now;
    else if (c->events < r->load->tokens)
      r->gaps[r->gap_count++] = (double)(now - c->last_ns) * 1e-9;
    if (c->events++ < r->load->tokens) c->last_ns = now;
  }
}

static pkv_status send_requests(demo_run *r, pkv_error *err) {
  r->begin_ns = pkv_clock_ns();
  for (int32_t i = 0; i < r->load->count; i++) {
    pkv_buffer request;
    pkv_buffer_init(&request, 2 * ANSWER_BYTES, NULL);
    pkv_status status = write_request(&request, &r->load->requests[i].prompt, r->load->tokens, err);
    if (status == PKV_OK) status = open_client(&r->clients[i], r->server->port, &request, err);
    pkv_buffer_deinit(&request);
    PKV_TRY(status);
  }
  return PKV_OK;
}

static pkv_status read_answers(demo_run *r, pkv_error *err) {
  const int32_t count = r->load->count;
  int32_t open = count;
  while (open > 0) {
    double events = 0.0;
    for (int32_t i = 0; i < count; i++)
      r->polls[i] = (struct pollfd){r->clients[i].fd, POLLIN, 0}; /* poll() skips those below 0 */
    (void)poll(r->polls, (nfds_t)count, POLL_MS);
    open = 0;
    for (int32_t i = 0; i < count; i++) {
      demo_client *const c = &r->clients[i];
      if (c->fd >= 0 && r->polls[i].revents != 0) PKV_TRY(receive(c, err));
      see_events(r, c);
      open += c->fd >= 0;
      events += c->events < r->load->tokens ? c->events : r->load->tokens;
    }
    PKV_CHECK(err, !pkv_cli_interrupted(), PKV_E_STATE, "interrupted");
    r->load->progress(r->load->user, events / ((double)count * r->load->tokens),
                      (double)(pkv_clock_ns() - r->begin_ns) * 1e-9);
  }
  r->end_ns = pkv_clock_ns();
  return PKV_OK;
}

/* --- figures ------------------------------------------------------------------------------- */

/* A sample of the metrics by its name; 0 where there is none. */
static double metric(const pkv_buffer *text, const char *name) {
  char line[96];
  (void)snprintf(line, sizeof line, "\npkv_%s ", name);
  const char *const at = text->size > 0 ? strstr(text->data, line) : NULL;
  return at != NULL ? strtod(at + strlen(line), NULL) : 0.0;
}

static double per(double amount, double by) {
  return by > 0.0 ? amount / by : 0.0;
}

static pkv_status count_engine(bench_outcome *out, const demo_server *s, pkv_error *err) {
  pkv_buffer m;
  pkv_buffer_init(&m, PLAIN_BYTES, NULL);
  const pkv_status status = get(&m, s->port, "/metrics", err);
  const double decoded = metric(&m, "decode_tokens_total");
  out->mean_rows =
      per(metric(&m, "decode_rows_per_step_sum"), metric(&m, "decode_rows_per_step_count"));
  out->kv_mb_a_token = per(metric(&m, "kv_bytes_read_total") * 1e-6, decoded);
  out->kv_mb_each = per(metric(&m, "kv_bytes_each_total") * 1e-6, decoded);
  out->reused =
      per(metric(&m, "prefix_cache_hits_total"), metric(&m, "prefix_cache_queries_total"));
  out->steps = (int64_t)metric(&m, "engine_steps_total");
  out->preemptions = (int64_t)metric(&m, "num_preemptions_total");
  out->prefill_tokens = (int64_t)metric(&m, "prefill_tokens_total");
  pkv_buffer_deinit(&m);
  return status;
}

static pkv_status check_answer(const demo_client *c, int32_t index, pkv_error *err) {
  const char *const text = c->answer.size > 0 ? c->answer.data : "";
  PKV_CHECK(err, strncmp(text, "HTTP/1.1 200 ", 13) == 0, PKV_E_INTERNAL,
            "the demo's server answers question %d with '%.*s'", (int)index + 1,
            (int)strcspn(text, "\r"), text);
  PKV_CHECK(err, strstr(text, "data: [DONE]") != NULL, PKV_E_INTERNAL,
            "the answer to question %d ends too early", (int)index + 1);
  return PKV_OK;
}

static pkv_status measure(bench_outcome *out, demo_run *r, pkv_error *err) {
  const int32_t count = r->load->count;
  const double tokens = r->load->tokens;
  double good = 0.0;
  out->count = count;
  out->seconds = (double)(r->end_ns - r->begin_ns) * 1e-9;
  for (int32_t i = 0; i < count; i++) {
    const demo_client *const c = &r->clients[i];
    PKV_TRY(check_answer(c, i, err));
    const double first = (double)(c->first_ns - c->sent_ns) * 1e-9;
    const double tpot = per((double)(c->last_ns - c->first_ns) * 1e-9, tokens - 1.0);
    out->first_s[i] = first;
    r->scratch[i] = tpot;
    good += first <= r->load->slo_ttft && tpot <= r->load->slo_tpot;
  }
  out->ttft = bench_spread_of(out->first_s, (size_t)count);
  out->tpot = bench_spread_of(r->scratch, (size_t)count);
  out->itl = bench_spread_of(r->gaps, r->gap_count);
  out->queue = (bench_spread){-1.0, -1.0, -1.0}; /* not seen from outside */
  out->tokens_per_s = per(tokens * count, out->seconds);
  out->requests_per_s = per(count, out->seconds);
  out->goodput = per(good, out->seconds);
  return count_engine(out, r->server, err);
}

static pkv_status run_load(bench_outcome *out, const demo_server *server, const pkv_demo_load *load,
                           pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t count = (size_t)load->count, gaps = count * (size_t)load->tokens;
  demo_run r = {.load = load, .server = server};
  r.clients = pkv_alloc_zeroed(&a, count, sizeof *r.clients);
  r.polls = pkv_alloc_zeroed(&a, count, sizeof *r.polls);
  r.gaps = pkv_alloc_zeroed(&a, gaps, sizeof *r.gaps);
  r.scratch = pkv_alloc_zeroed(&a, count, sizeof *r.scratch);
  pkv_status status = PKV_OK;
  if (r.clients == NULL || r.polls == NULL || r.gaps == NULL || r.scratch == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu clients", count);
  for (size_t i = 0; r.clients != NULL && i < count; i++) {
    r.clients[i].fd = -1;
    pkv_buffer_init(&r.clients[i].answer, ANSWER_BYTES, NULL);
  }
  if (status == PKV_OK) status = wait_ready(server, err);
  if (status == PKV_OK) status = send_requests(&r, err);
  if (status == PKV_OK) status = read_answers(&r, err);
  if (status == PKV_OK) status = measure(out, &r, err);
  for (size_t i = 0; r.clients != NULL && i < count; i++) {
    close_client(&r.clients[i]);
    pkv_buffer_deinit(&r.clients[i].answer);
  }
  pkv_free(&a, r.clients, count * sizeof *r.clients);
  pkv_free(&a, r.polls, count * sizeof *r.polls);
  pkv_free(&a, r.gaps, gaps * sizeof *r.gaps);
  pkv_free(&a, r.scratch, count * sizeof *r.scratch);
  return status;
}

pkv_status pkv_demo_serve(bench_outcome *out, pkv_model *model, const pkv_engine_options *engine,
                          const bench_schedule *schedule, const pkv_demo_load *load,
                          pkv_error *err) {
  demo_server server;
  memset(&server, 0, sizeof server);
  memset(out, 0, sizeof *out);
  server.model = model;
  set_options(&server, engine, schedule, load);
  PKV_TRY(start_server(&server, err));
  pkv_error ending = {PKV_OK, "", ""};
  pkv_status status = server.port != 0 ? run_load(out, &server, load, err) : PKV_OK;
  const pkv_status ended = stop_server(&server, &ending);
  /* The server's own reason explains why its clients failed; that it cancelled what they left
     behind does not. */
  if (ended == PKV_OK || (status != PKV_OK && ended == PKV_E_STATE)) return status;
  if (err != NULL) *err = ending;
  return ended;
}
