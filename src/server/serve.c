/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The HTTP thread: listens, waits for sockets, the engine and signals, and watches the clock and
 * the far ends of connections, which libmicrohttpd does not while an answer is being made.
 */
#include "server/serve.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json_memory.h"
#include "base/log.h"
#include "base/status.h"
#include "server/http_parts.h"
#include "server/notify.h"

#define EVENTS  64
#define TICK_MS 250 /* how late a time limit may be */
#define BACKLOG 128
#define SECOND  INT64_C(1000000000)
/* What the kernel holds of an answer that its client does not take: beyond that, we know that it
 * does not read. */
#define SEND_BYTES (256 << 10)
/* For the last bytes of answers, once nothing runs any more. */
#define FLUSH_NS (2 * SECOND)

/* --- connections --------------------------------------------------------------------------- */

static void open_connection(pkv_server *server, struct MHD_Connection *http, void **slot) {
  const pkv_allocator a = pkv_allocator_default();
  const union MHD_ConnectionInfo *const info =
      MHD_get_connection_info(http, MHD_CONNECTION_INFO_CONNECTION_FD);
  pkv_connection *const c = pkv_alloc_zeroed(&a, 1, sizeof *c);
  if (c == NULL || info == NULL) { /* requests on it are then refused */
    pkv_free(&a, c, sizeof *c);
    return;
  }
  c->server = server;
  c->fd = info->connect_fd;
  c->owed = PKV_OWED_HEADER;
  c->since_ns = pkv_clock_ns();
  c->at = &server->connections;
  c->next = server->connections;
  if (c->next != NULL) c->next->at = &c->next;
  server->connections = c;
  server->counters.connections++;
  /* Resets and hang-ups are reported unasked. A FIN alone is no hang-up, but libmicrohttpd does not
   * see one that came with the bytes before it. */
  struct epoll_event event = {.events = EPOLLET | EPOLLRDHUP, .data.ptr = c};
  (void)epoll_ctl(server->poll_fd, EPOLL_CTL_ADD, c->fd, &event);
  *slot = c;
}

static void close_connection(pkv_server *server, pkv_connection *c) {
  const pkv_allocator a = pkv_allocator_default();
  (void)epoll_ctl(server->poll_fd, EPOLL_CTL_DEL, c->fd, NULL);
  pkv_http_forget(c);
  *c->at = c->next;
  if (c->next != NULL) c->next->at = c->at;
  server->counters.connections--;
  pkv_free(&a, c, sizeof *c);
}

static void on_connection(void *user, struct MHD_Connection *http, void **slot,
                          enum MHD_ConnectionNotificationCode what) {
  if (what == MHD_CONNECTION_NOTIFY_STARTED)
    open_connection(user, http, slot);
  else if (*slot != NULL)
    close_connection(user, *slot);
}

static void drop_connection(pkv_connection *c) {
  if (c->gone) return;
  c->gone = true;
  (void)shutdown(c->fd, SHUT_RDWR);
  if (c->exchange != NULL) pkv_exchange_drop(c->exchange);
}

/* We wait for the client, it sends nothing more, and all it sent was read, twice in a row: between
 * the two looks libmicrohttpd had its turn with what it holds. */
static bool is_over(pkv_server *server, pkv_connection *c) {
  char byte;
  const bool ours = c->owed == PKV_OWED_READ || c->owed == PKV_OWED_NOTHING;
  const bool over =
      c->half && !ours && !c->gone && recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  const bool twice = over && c->last;
  c->last = over;
  server->look_again = server->look_again || (over && !twice);
  return twice;
}

static void enforce_times(pkv_server *server) {
  const pkv_serve_options *const o = server->options;
  const int64_t now = pkv_clock_ns();
  const int64_t limits[] = {
      [PKV_OWED_HEADER] = o->header_s * SECOND, [PKV_OWED_NEXT] = o->idle_s * SECOND,
      [PKV_OWED_BODY] = o->body_s * SECOND,     [PKV_OWED_READ] = o->stall_s * SECOND,
      [PKV_OWED_NOTHING] = INT64_MAX,
  };
  for (pkv_connection *c = server->connections, *next; c != NULL; c = next) {
    next = c->next;
    const bool idle = c->owed == PKV_OWED_NEXT || (c->owed == PKV_OWED_HEADER && !c->exchange);
    const bool late = now - c->since_ns > limits[c->owed];
    if (late && !c->gone) server->counters.timeouts[c->owed]++;
    if (late || (server->draining && idle) || is_over(server, c))
      drop_connection(c);
    else if (c->exchange != NULL)
      pkv_exchange_ping(c->exchange, now);
  }
}

static void poke_all(pkv_server *server) {
  for (pkv_connection *c = server->connections; c != NULL; c = c->next)
    if (c->exchange != NULL) pkv_exchange_poke(c->exchange);
}

/* --- start and end ------------------------------------------------------------------------- */

static bool is_loopback(const struct sockaddr *address) {
  if (address->sa_family == AF_INET) {
    struct sockaddr_in in;
    memcpy(&in, address, sizeof in);
    return ntohl(in.sin_addr.s_addr) >> 24 == 127;
  }
  struct sockaddr_in6 in6;
  memcpy(&in6, address, sizeof in6);
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

static pkv_status listen_on(pkv_server *server, pkv_error *err) {
  const pkv_serve_options *const o = server->options;
  struct addrinfo hints, *found = NULL;
  char port[16];
  int on = 1;
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  if (strcmp(o->host, "localhost") != 0) hints.ai_flags |= AI_NUMERICHOST;
  (void)snprintf(port, sizeof port, "%d", (int)o->port);
  const int failed = getaddrinfo(o->host, port, &hints, &found);
  PKV_CHECK(err, failed == 0, PKV_E_INVALID, "host \"%s\" is no address: %s", o->host,
            gai_strerror(failed));
  server->loopback = is_loopback(found->ai_addr);
  server->listen_fd =
      socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  bool ok = server->listen_fd >= 0;
  ok = ok && setsockopt(server->listen_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0;
  const int send_bytes = SEND_BYTES; /* connections inherit it */
  (void)setsockopt(server->listen_fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
  ok = ok && bind(server->listen_fd, found->ai_addr, found->ai_addrlen) == 0;
  ok = ok && listen(server->listen_fd, BACKLOG) == 0;
  const int why = errno;
  freeaddrinfo(found);
  PKV_CHECK(err, ok, PKV_E_IO, "cannot listen on %s, port %d: %s", o->host, (int)o->port,
            strerror(why));
  return PKV_OK;
}

static int32_t bound_port(int fd) {
  struct sockaddr_storage address;
  socklen_t size = sizeof address;
  char port[16] = "0";
  int64_t number = 0;
  if (getsockname(fd, (struct sockaddr *)&address, &size) != 0) return 0;
  if (getnameinfo((struct sockaddr *)&address, size, NULL, 0, port, sizeof port, NI_NUMERICSERV) !=
      0)
    return 0;
  return pkv_parse_i64(&number, port, 0, 65535) ? (int32_t)number : 0;
}

static pkv_status watch(const pkv_server *server, int fd, const void *what, pkv_error *err) {
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = (void *)(uintptr_t)what};
  PKV_CHECK(err, epoll_ctl(server->poll_fd, EPOLL_CTL_ADD, fd, &event) == 0, PKV_E_IO,
            "cannot watch a descriptor: %s", strerror(errno));
  return PKV_OK;
}

static void log_http(void *user, const char *format, va_list args) {
  char text[256];
  (void)user;
  (void)vsnprintf(text, sizeof text, format, args);
  text[strcspn(text, "\r\n")] = '\0';
  pkv_log(PKV_LOG_INFO, "server", "%s", text);
}

static pkv_status start_http(pkv_server *server, pkv_error *err) {
  const struct MHD_OptionItem options[] = {
      {MHD_OPTION_EXTERNAL_LOGGER, (intptr_t)log_http, server},
      {MHD_OPTION_LISTEN_SOCKET, server->listen_fd, NULL},
      {MHD_OPTION_CONNECTION_LIMIT, server->options->max_connections, NULL},
      {MHD_OPTION_CONNECTION_MEMORY_LIMIT, (intptr_t)(2 * PKV_HEADER_BYTES), NULL},
      {MHD_OPTION_CONNECTION_TIMEOUT, 0, NULL}, /* enforce_times does that */
      {MHD_OPTION_STRICT_FOR_CLIENT, 1, NULL},
      {MHD_OPTION_URI_LOG_CALLBACK, (intptr_t)pkv_http_begin, server},
      {MHD_OPTION_NOTIFY_COMPLETED, (intptr_t)pkv_http_end, server},
      {MHD_OPTION_NOTIFY_CONNECTION, (intptr_t)on_connection, server},
      {MHD_OPTION_END, 0, NULL},
  };
  const unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
  server->daemon = MHD_start_daemon(flags, 0, NULL, NULL, pkv_http_request, server,
                                    MHD_OPTION_ARRAY, options, MHD_OPTION_END);
  PKV_CHECK(err, server->daemon != NULL, PKV_E_IO, "the HTTP server does not start");
  server->listen_fd = -1; /* the daemon's now */
  const union MHD_DaemonInfo *const info =
      MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_EPOLL_FD);
  PKV_CHECK(err, info != NULL, PKV_E_INTERNAL, "the HTTP server has no descriptor to wait on");
  return watch(server, info->epoll_fd, &server->daemon, err);
}

static uint64_t read_secret(void) {
  uint64_t secret = 0;
  FILE *const file = fopen("/dev/urandom", "rb");
  if (file == NULL || fread(&secret, sizeof secret, 1, file) != 1)
    secret = (uint64_t)pkv_clock_ns();
  if (file != NULL) (void)fclose(file);
  return secret;
}

static pkv_status start(pkv_server *server, pkv_error *err) {
  sigset_t signals;
  if (server->options->key_file != NULL)
    PKV_TRY(pkv_api_keys_read(&server->keys, server->options->key_file, err));
  if (server->options->keys != NULL)
    PKV_TRY(pkv_api_keys_add(&server->keys, server->options->keys, err));
  server->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  server->poll_fd = epoll_create1(EPOLL_CLOEXEC);
  (void)sigemptyset(&signals);
  (void)sigaddset(&signals, SIGTERM);
  (void)sigaddset(&signals, SIGINT);
  (void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
  server->signal_fd = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
  PKV_CHECK(err, server->wake_fd >= 0 && server->poll_fd >= 0 && server->signal_fd >= 0, PKV_E_IO,
            "no descriptor to wait on: %s", strerror(errno));
  PKV_TRY(listen_on(server, err));
  const int32_t port = bound_port(server->listen_fd);
  server->created = (int64_t)time(NULL);
  server->started_ns = pkv_clock_ns();
  server->secret = read_secret();
  PKV_TRY(watch(server, server->wake_fd, &server->wake_fd, err));
  PKV_TRY(watch(server, server->signal_fd, &server->signal_fd, err));
  PKV_TRY(start_http(server, err));
  const pkv_serve_options *const o = server->options;
  const pkv_loop_options loop = {o->load, o->user, o->engine, server->wake_fd};
  PKV_TRY(pkv_constraint_cache_create(&server->constraints, err));
  PKV_TRY(pkv_text_worker_create(&server->texts, server->wake_fd, err));
  PKV_TRY(pkv_loop_create(&server->loop, &loop, err));
  if (o->listening != NULL) o->listening(o->user, port);
  return PKV_OK;
}

static void stop(pkv_server *server) {
  server->aborting = true;
  pkv_text_worker_end(server->texts); /* what it has is done then, and can be resumed */
  /* libmicrohttpd does not stop while a connection is suspended. */
  for (pkv_connection *c = server->connections, *next; c != NULL; c = next) {
    next = c->next;
    drop_connection(c);
    if (c->exchange != NULL) pkv_exchange_poke(c->exchange); /* gone before, with a text in work */
  }
  if (server->daemon != NULL) {
    (void)MHD_run(server->daemon);
    const MHD_socket fd = MHD_quiesce_daemon(server->daemon); /* when it was not before */
    if (fd != MHD_INVALID_SOCKET) (void)close(fd);
    MHD_stop_daemon(server->daemon);
  }
  pkv_text_worker_destroy(server->texts);
  pkv_constraint_cache_destroy(server->constraints);
  pkv_loop_destroy(server->loop);
  const int fds[] = {server->listen_fd, server->wake_fd, server->signal_fd, server->poll_fd};
  for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
    if (fds[i] >= 0) (void)close(fds[i]);
}

/* --- the loop ------------------------------------------------------------------------------ */

static void drain_counter(int fd) {
  uint64_t count;
  const ssize_t got = read(fd, &count, sizeof count);
  (void)got;
}

static int read_signals(int fd) {
  struct signalfd_siginfo info;
  int count = 0;
  while (read(fd, &info, sizeof info) == (ssize_t)sizeof info)
    count++;
  return count;
}

static void begin_drain(pkv_server *server) {
  if (!server->failed) pkv_log(PKV_LOG_INFO, "server", "ending: no more requests are taken");
  pkv_notify("STOPPING=1");
  server->draining = true;
  const MHD_socket fd = MHD_quiesce_daemon(server->daemon);
  if (fd != MHD_INVALID_SOCKET) (void)close(fd);
}

/* The model came, or it never will, or the engine is given up. */
static void take_phase(pkv_server *server) {
  pkv_loop_counters counters;
  pkv_loop_get_counters(&counters, server->loop);
  if (counters.phase == PKV_LOOP_FAILED) server->failed = true;
  if (counters.phase != PKV_LOOP_READY || server->model != NULL) return;
  server->longest = counters.engine.max_seq_len;
  server->model = pkv_loop_model(server->loop);
  pkv_log(PKV_LOG_INFO, "server", "the model is ready");
  pkv_notify("READY=1");
}

/* A write that wakes us can fail: what it would have told is seen a tick later. */
static void look_unasked(pkv_server *server) {
  const int64_t now = pkv_clock_ns();
  if (now - server->looked_ns < TICK_MS * (SECOND / 1000)) return;
  server->looked_ns = now;
  take_phase(server);
  poke_all(server);
}

/* Waits once and does what there is to do; *signals counts. */
static void turn(pkv_server *server, int *signals) {
  struct epoll_event events[EVENTS];
  MHD_UNSIGNED_LONG_LONG wanted = TICK_MS;
  int wait = TICK_MS;
  if (MHD_get_timeout(server->daemon, &wanted) == MHD_YES && wanted < TICK_MS) wait = (int)wanted;
  const int count = epoll_wait(server->poll_fd, events, EVENTS, server->look_again ? 0 : wait);
  server->look_again = false;
  for (int i = 0; i < count; i++) {
    void *const what = events[i].data.ptr;
    if (what == &server->daemon) continue;
    if (what == &server->wake_fd) {
      drain_counter(server->wake_fd);
      take_phase(server);
      poke_all(server);
    } else if (what == &server->signal_fd) {
      *signals += read_signals(server->signal_fd);
    } else if ((events[i].events & (EPOLLERR | EPOLLHUP)) != 0u) {
      pkv_connection *const c = what;
      if (!c->gone && c->exchange != NULL) server->counters.hang_ups++;
      drop_connection(c);
    } else {
      ((pkv_connection *)what)->half = true;
    }
  }
  look_unasked(server);
  /* In this order: bytes that came while this thread had no processor came in time. */
  (void)MHD_run(server->daemon);
  enforce_times(server);
}

static bool nothing_runs(const pkv_server *server) {
  for (const pkv_connection *c = server->connections; c != NULL; c = c->next)
    if (c->exchange != NULL) return false;
  return true;
}

static pkv_status serve(pkv_server *server, pkv_error *err) {
  int signals = 0;
  while (signals == 0 && !server->failed)
    turn(server, &signals);
  const int64_t begin = pkv_clock_ns();
  begin_drain(server);
  while (signals < 2 && !nothing_runs(server) &&
         pkv_clock_ns() - begin < server->options->drain_s * SECOND)
    turn(server, &signals);
  const bool finished = nothing_runs(server);
  /* What was just answered may still be on its way out. */
  const int64_t end = pkv_clock_ns();
  while (finished && signals < 2 && server->connections != NULL && pkv_clock_ns() - end < FLUSH_NS)
    turn(server, &signals);
  if (server->failed) { /* ends, so that whoever watches this process starts it again */
    pkv_error why = {PKV_OK, "", ""};
    pkv_loop_get_failure(&why, server->loop);
    if (err != NULL) *err = why;
    return why.status;
  }
  PKV_CHECK(err, finished, PKV_E_STATE, "requests were cancelled when the server ended%s",
            signals < 2 ? "" : " (second signal)");
  return PKV_OK;
}

pkv_status pkv_serve(const pkv_serve_options *options, pkv_error *err) {
  pkv_server server;
  memset(&server, 0, sizeof server);
  server.options = options;
  server.listen_fd = server.wake_fd = server.signal_fd = server.poll_fd = -1;
  PKV_CHECK(err, options != NULL && options->load != NULL, PKV_E_INVALID,
            "options or options->load is NULL");
  pkv_json_watch_memory();
  pkv_status status = start(&server, err);
  if (status == PKV_OK) status = serve(&server, err);
  stop(&server);
  pkv_api_keys_free(&server.keys);
  return status;
}
