/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of what a socket can bring: a server over a small model, and the input as the bytes
 * of one connection. The first byte says how: the writes are that long (0 = all at once), and an
 * odd one closes its side for writing first and reads all there is, an even one leaves in the
 * middle. An answer begins as one of HTTP/1.1 with a status that we give; after every 16th input
 * the server still answers a good request.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "model/model.h"
#include "support/small_llama.h"
#include "support/small_server.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define PATIENCE_S 60

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static small_server server;

static void *run_server(void *user) {
  pkv_serve_options options = small_server_options(&server);
  pkv_error err = {PKV_OK, NULL, {0}};
  (void)user;
  options.engine.threads = 1;
  if (pkv_serve(&options, &err) != PKV_OK) fprintf(stderr, "broken: %s\n", err.text);
  abort(); /* nobody asked it to end */
}

/* False: the server closed the connection before it had all. */
static bool say(int fd, const uint8_t *data, size_t size, size_t step) {
  int waits = 0;
  for (size_t at = 0; at < size;) {
    const size_t count = step > 0 && step < size - at ? step : size - at;
    const ssize_t sent = send(fd, data + at, count, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      REQUIRE(++waits < PATIENCE_S);
      continue;
    }
    if (sent < 0) {
      REQUIRE(errno == EPIPE || errno == ECONNRESET);
      return false;
    }
    at += (size_t)sent;
  }
  return true;
}

/* All that comes until the end, and the beginning of it. No end in time is a finding; time is
 * counted in short waits, so that a pause of the whole process is one of them. */
static size_t hear(int fd, char *out, size_t room) {
  char block[8192];
  size_t total = 0;
  for (int waits = 0;;) {
    const ssize_t got = recv(fd, block, sizeof block, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      REQUIRE(++waits < PATIENCE_S);
      continue;
    }
    if (got < 0) REQUIRE(errno == ECONNRESET);
    if (got <= 0) return total;
    for (ssize_t i = 0; i < got && total + (size_t)i + 1 < room; i++)
      out[total + (size_t)i] = block[i];
    total += (size_t)got;
  }
}

static void check_status(const char *text, size_t bytes) {
  static const int known[] = {100, 200, 204, 400, 401, 404, 405, 408, 413,
                              414, 415, 417, 431, 500, 501, 503, 505};
  if (bytes == 0) return;
  REQUIRE(bytes > 12 && memcmp(text, "HTTP/1.", 7) == 0);
  const int status = (int)strtol(text + 9, NULL, 10);
  bool found = false;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    found = found || known[i] == status;
  if (!found) fprintf(stderr, "status %d\n", status);
  REQUIRE(found);
}

static void check_alive(void) {
  char text[1024];
  REQUIRE(small_server_ask(text, sizeof text, &server,
                           "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                           "Content-Length: 17\r\n\r\n{\"content\":\"a b\"}",
                           PATIENCE_S * 1000) > 0);
  REQUIRE(strstr(text, " 200 ") != NULL && strstr(text, "\"tokens\"") != NULL);
}

static void prepare(void) {
  static const _Atomic bool never;
  small_llama shape = SMALL_LLAMA_INIT;
  pthread_t thread;
  size_t size = 0;
  const unsigned char *const bytes = small_llama_bytes(&shape, &size);
  REQUIRE(pkv_model_open_memory(&server.model, bytes, size, NULL, NULL) == PKV_OK);
  REQUIRE(pthread_create(&thread, NULL, run_server, NULL) == 0);
  REQUIRE(small_server_ready(&server, &never, PATIENCE_S * 500, PATIENCE_S * 1000));
  check_alive();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static unsigned count;
  char text[64];
  if (server.port == 0) prepare();
  if (size == 0) return 0;
  memset(text, 0, sizeof text);
  const int fd = small_server_dial(&server, 1000);
  REQUIRE(fd >= 0);
  const bool said = say(fd, data + 1, size - 1, data[0] / 2);
  if (data[0] % 2 != 0) {
    (void)shutdown(fd, SHUT_WR);
    check_status(text, hear(fd, text, sizeof text));
  } else if (!said) {
    (void)hear(fd, text, sizeof text);
  }
  (void)close(fd);
  if (++count % 16 == 0) check_alive();
  return 0;
}
