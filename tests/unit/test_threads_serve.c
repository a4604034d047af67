/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole server over a small model under mixed load: whole answers, streams read or left, bodies
 * for the text worker, constraints, several choices, requests cut off, resets, a full queue. Every
 * answer is one of those a client may get, nothing runs afterwards, and the server ends well. Its
 * point is TSan's view of it: `test_threads_serve SECONDS` goes on for longer than the few of a
 * test run.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/rng.h"
#include "model/model.h"
#include "server/serve.h"
#include "support/small_llama.h"

#define CLIENTS    8
#define PATIENCE_S 60
#define LONG_BYTES ((size_t)100 << 10) /* more than the HTTP thread reads itself */

static int64_t seconds = 4;
static _Atomic int32_t port;
static _Atomic bool over;
static _Atomic int64_t answered[6], left, reset, accesses;
static _Atomic bool wrong;
static pkv_model *model;
static unsigned char *model_bytes;
static pkv_error server_error;
static pkv_status server_status;

static pkv_status load(void *user, pkv_model **out, pkv_error *err) {
  small_llama shape = SMALL_LLAMA_INIT;
  size_t size = 0;
  (void)user;
  shape.context = 256;
  model_bytes = small_llama_bytes(&shape, &size);
  const pkv_status status = pkv_model_open_memory(&model, model_bytes, size, NULL, err);
  *out = model;
  return status;
}

static void listening(void *user, int32_t at) {
  (void)user;
  port = at;
}

static void on_access(void *user, const pkv_access *access) {
  (void)user;
  (void)access;
  accesses++;
}

static void *run_server(void *user) {
  (void)user;
  pkv_serve_options o = {.host = "127.0.0.1",
                         .name = "small",
                         .engine = PKV_ENGINE_OPTIONS_INIT,
                         .max_body = 1 << 20,
                         .max_connections = 64,
                         .header_s = PATIENCE_S,
                         .body_s = PATIENCE_S,
                         .idle_s = PATIENCE_S,
                         .stall_s = PATIENCE_S,
                         .drain_s = PATIENCE_S,
                         .progress_s = PATIENCE_S,
                         .load = load,
                         .listening = listening,
                         .access = on_access};
  o.engine.threads = 2;
  o.engine.page_tokens = 4;
  o.engine.cache_tokens = 512; /* of 8 clients with up to 3 choices: preemption, eviction */
  o.engine.max_seq_len = 256;
  o.engine.max_rows = 6;
  o.engine.max_requests = 7; /* less than the clients ask for */
  o.engine.prefix_cache = 1;
  server_status = pkv_serve(&o, &server_error);
  return NULL;
}

/* --- a client ------------------------------------------------------------------------------ */

static int dial(void) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const struct timeval patience = {PATIENCE_S, 0};
  struct sockaddr_in to;
  memset(&to, 0, sizeof to);
  to.sin_family = AF_INET;
  to.sin_port = htons((uint16_t)port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) return fd;
  (void)close(fd);
  return -1;
}

static bool say(int fd, const char *text, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = send(fd, text, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    text += sent;
    bytes -= (size_t)sent;
  }
  return true;
}

/* The status and the beginning of an answer, after at least `enough` bytes of it or all; 0 = none.
 */
static int hear(int fd, char *out, size_t room, size_t enough) {
  size_t total = 0;
  char block[4096];
  for (ssize_t got = 1; got > 0 && total < enough;) {
    got = recv(fd, block, sizeof block, 0);
    for (ssize_t i = 0; i < got && total + (size_t)i + 1 < room; i++)
      out[total + (size_t)i] = block[i];
    if (got > 0) total += (size_t)got;
  }
  out[total < room ? total : room - 1] = '\0';
  return total > 12 ? (int)strtol(out + 9, NULL, 10) : 0;
}

static bool may_be(int status) {
  return status == 200 || status == 400 || status == 404 || status == 413 || status == 503;
}

static void count(int status, const char *text, const char *path) {
  if (may_be(status)) {
    answered[status / 100]++;
    return;
  }
  (void)fprintf(stderr, "%s: status %d, %.300s\n", path, status, text);
  wrong = true;
}

typedef enum leaving { STAYS, LEAVES, RESETS, CUTS } leaving;

static void ask(const char *path, const char *body, size_t bytes, leaving how) {
  char head[256], text[2048];
  const struct linger now = {1, 0};
  const int n = snprintf(head, sizeof head,
                         "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                         "Content-Length: %zu\r\n\r\n",
                         bytes > 0 ? "POST" : "GET", path, bytes);
  const int fd = dial();
  if (fd < 0) {
    wrong = true;
    return;
  }
  const bool sent = say(fd, head, (size_t)n) && say(fd, body, how == CUTS ? bytes / 2 : bytes);
  if (how == STAYS) {
    const int status = hear(fd, text, sizeof text, SIZE_MAX);
    if (sent || status != 0) count(status, text, path);
  } else if (how == LEAVES) {
    (void)hear(fd, text, sizeof text, 300);
    left++;
  } else {
    if (how == RESETS) (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    reset++;
  }
  (void)close(fd);
}

static void ask_json(const char *path, const char *body, leaving how) {
  ask(path, body, strlen(body), how);
}

static void ask_long(leaving how) {
  char *const body = malloc(LONG_BYTES + 32);
  if (body == NULL) abort();
  const int head = snprintf(body, 32, "{\"content\":\"");
  for (size_t i = 0; i < LONG_BYTES; i++)
    body[(size_t)head + i] = "ab cd"[i % 5];
  memcpy(body + head + LONG_BYTES, "\"}", 3);
  ask("/tokenize", body, (size_t)head + LONG_BYTES + 2, how);
  free(body);
}

static void ask_any(pkv_rng *rng) {
  static const char *const plain[] = {"/health", "/ready",     "/metrics",        "/slots",
                                      "/props",  "/v1/models", "/dashboard/state"};
  char body[512];
  const leaving how = (leaving)(pkv_rng_below(rng, 7) < 4 ? STAYS : 1 + pkv_rng_below(rng, 3));
  const int tokens = 1 + (int)pkv_rng_below(rng, 60);
  const char *const stream = pkv_rng_below(rng, 2) == 0 ? "false" : "true";
  const char *const prompt = pkv_rng_below(rng, 2) == 0 ? "a b c d a b c d a b c d" : "d c b a";
  switch (pkv_rng_below(rng, 8)) {
  case 0:
    ask(plain[pkv_rng_below(rng, sizeof plain / sizeof *plain)], "", 0, how);
    return;
  case 1:
    ask_long(how);
    return;
  case 2: /* constraints, often the same */
    (void)snprintf(body, sizeof body,
                   "{\"prompt\":\"%s\",\"n_predict\":%d,\"stream\":%s,"
                   "\"grammar\":\"root ::= [a-d ]{1,%d}\"}",
                   prompt, tokens, stream, 20 + (int)pkv_rng_below(rng, 5));
    ask_json("/completion", body, how);
    return;
  case 3:
    (void)snprintf(body, sizeof body,
                   "{\"prompt\":[\"a\",\"b c\"],\"max_tokens\":%d,\"n\":%d,\"stream\":%s,"
                   "\"logprobs\":3}",
                   tokens, 1 + (int)pkv_rng_below(rng, 3), stream);
    ask_json("/v1/completions", body, how);
    return;
  case 4:
    ask_json("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":", how);
    return;
  default:
    (void)snprintf(body, sizeof body,
                   "{\"prompt\":\"%s\",\"max_tokens\":%d,\"stream\":%s,\"ignore_eos\":true,"
                   "\"temperature\":%d,\"stop\":[\"dddd\"]}",
                   prompt, tokens, stream, (int)pkv_rng_below(rng, 2));
    ask_json("/v1/completions", body, how);
  }
}

static void *run_client(void *user) {
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)(uintptr_t)user);
  while (!over)
    ask_any(&rng);
  return NULL;
}

/* --- the test ------------------------------------------------------------------------------ */

static int64_t metric(const char *name) {
  char text[65536];
  const int fd = dial();
  static const char request[] = "GET /metrics HTTP/1.0\r\n\r\n";
  assert_true(fd >= 0 && say(fd, request, sizeof request - 1));
  assert_int_equal(hear(fd, text, sizeof text, SIZE_MAX), 200);
  (void)close(fd);
  const char *const at = strstr(text, name);
  assert_non_null(at);
  return strtoll(at + strlen(name), NULL, 10);
}

static void wait_ready(void) {
  char text[256];
  for (int status = 0, tries = 0; status != 200; tries++) {
    assert_true(tries < 20000);
    (void)usleep(5000);
    const int fd = port != 0 ? dial() : -1;
    if (fd < 0) continue;
    (void)say(fd, "GET /ready HTTP/1.0\r\n\r\n", 23);
    status = hear(fd, text, sizeof text, SIZE_MAX);
    (void)close(fd);
  }
}

static void test_mixed_load(void **state) {
  pthread_t server, clients[CLIENTS];
  (void)state;
  assert_int_equal(pthread_create(&server, NULL, run_server, NULL), 0);
  wait_ready();
  for (uintptr_t i = 0; i < CLIENTS; i++)
    assert_int_equal(pthread_create(&clients[i], NULL, run_client, (void *)(i + 1)), 0);
  const int64_t end = pkv_clock_ns() + seconds * 1000000000;
  while (pkv_clock_ns() < end && !wrong)
    (void)usleep(50000);
  over = true;
  for (int i = 0; i < CLIENTS; i++)
    assert_int_equal(pthread_join(clients[i], NULL), 0);
  for (int tries = 0; metric("\npkv_num_requests_live ") != 0; tries++) {
    assert_true(tries < 20000); /* those whose clients left are cancelled */
    (void)usleep(5000);
  }
  assert_int_equal(kill(getpid(), SIGTERM), 0);
  assert_int_equal(pthread_join(server, NULL), 0);
  (void)printf(
      "%lld s: %lld answered well, %lld refused as bad, %lld as too much; %lld left in the "
      "middle, %lld cut or reset, %lld records\n",
      (long long)seconds, (long long)answered[2], (long long)answered[4], (long long)answered[5],
      (long long)left, (long long)reset, (long long)accesses);
  if (server_status != PKV_OK) print_error("%s\n", server_error.text);
  assert_int_equal(server_status, PKV_OK);
  assert_false(wrong);
  assert_true(answered[2] > 10 && answered[4] > 0 && left > 0 && reset > 0);
  pkv_model_close(model);
  gguf_build_drop(model_bytes);
}

static void test_arguments(void **state) {
  (void)state;
  pkv_error err = {0};
  const pkv_serve_options nothing = {0};
  assert_int_equal(pkv_serve(NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_serve(&nothing, &err), PKV_E_INVALID);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_mixed_load),
                                     cmocka_unit_test(test_arguments)};
  sigset_t signals;
  if (argc > 1) seconds = strtoll(argv[1], NULL, 10);
  if (seconds < 1) return 2;
  (void)sigemptyset(&signals); /* for the server's signalfd */
  (void)sigaddset(&signals, SIGTERM);
  (void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
  return cmocka_run_group_tests_name("test_threads_serve", tests, NULL, NULL);
}
