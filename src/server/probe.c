/* SPDX-License-Identifier: Apache-2.0 */
#include "server/probe.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/text.h"
#include "server/api_keys.h"

/* "HTTP/1.1 200" */
#define STATUS_AT    9
#define STATUS_BYTES 12

/* Who listens everywhere is asked on loopback. */
static const char *reachable(const char *host) {
  if (strcmp(host, "0.0.0.0") == 0) return "127.0.0.1";
  return strcmp(host, "::") == 0 ? "::1" : host;
}

static int left_ms(int64_t end_ns) {
  const int64_t left = (end_ns - pkv_clock_ns()) / 1000000;
  return left > 0 ? (int)left : 0;
}

/* Waits until the socket can do what is asked. */
static bool wait_for(int fd, short events, int64_t end_ns) {
  struct pollfd at = {fd, events, 0};
  int got;
  do {
    got = poll(&at, 1, left_ms(end_ns));
  } while (got < 0 && errno == EINTR);
  return got > 0;
}

static pkv_status open_socket(int *fd, const pkv_probe *p, int64_t end_ns, pkv_error *err) {
  struct addrinfo hints, *found = NULL;
  char port[16];
  const char *const host = reachable(p->host);
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (strcmp(host, "localhost") != 0 ? AI_NUMERICHOST : 0);
  (void)snprintf(port, sizeof port, "%d", (int)p->port);
  const int failed = getaddrinfo(host, port, &hints, &found);
  PKV_CHECK(err, failed == 0, PKV_E_INVALID, "host \"%s\" is no address: %s", host,
            gai_strerror(failed));
  *fd = socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int why = 0;
  socklen_t size = sizeof why;
  if (*fd < 0 || (connect(*fd, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS))
    why = errno;
  else if (!wait_for(*fd, POLLOUT, end_ns))
    why = ETIMEDOUT;
  else if (getsockopt(*fd, SOL_SOCKET, SO_ERROR, &why, &size) != 0)
    why = errno;
  freeaddrinfo(found);
  PKV_CHECK(err, why == 0, PKV_E_IO, "nothing answers on %s, port %d: %s", host, (int)p->port,
            strerror(why));
  return PKV_OK;
}

/* The head of the request. */
static pkv_status write_head(pkv_buffer *out, const pkv_probe *p, pkv_error *err) {
  pkv_api_keys keys = {0, NULL};
  pkv_status status = PKV_OK;
  if (p->key_file != NULL) status = pkv_api_keys_read(&keys, p->key_file, err);
  if (status == PKV_OK && p->keys != NULL) status = pkv_api_keys_add(&keys, p->keys, err);
  if (status == PKV_OK)
    status = pkv_buffer_printf(out, err,
                               "GET %s HTTP/1.1\r\nHost: localhost\r\n%s%s%s"
                               "Connection: close\r\n\r\n",
                               p->path, keys.count > 0 ? "Authorization: Bearer " : "",
                               keys.count > 0 ? keys.keys[0] : "", keys.count > 0 ? "\r\n" : "");
  pkv_api_keys_free(&keys);
  return status;
}

static pkv_status exchange(int32_t *http, int fd, const pkv_buffer *head, int64_t end_ns,
                           pkv_error *err) {
  char answer[STATUS_BYTES + 1];
  size_t sent = 0, got = 0;
  while (got < STATUS_BYTES) {
    const bool sending = sent < head->size;
    PKV_CHECK(err, wait_for(fd, sending ? POLLOUT : POLLIN, end_ns), PKV_E_IO,
              "no answer came in time");
    const ssize_t n = sending ? send(fd, head->data + sent, head->size - sent, MSG_NOSIGNAL)
                              : recv(fd, answer + got, STATUS_BYTES - got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    PKV_CHECK(err, n > 0, PKV_E_IO, "the connection ended before an answer");
    if (sending)
      sent += (size_t)n;
    else
      got += (size_t)n;
  }
  answer[STATUS_BYTES] = '\0';
  int64_t number = 0;
  const bool good =
      strncmp(answer, "HTTP/1.", 7) == 0 && pkv_parse_i64(&number, answer + STATUS_AT, 100, 599);
  PKV_CHECK(err, good, PKV_E_IO, "the answer is no HTTP");
  *http = (int32_t)number;
  return PKV_OK;
}

pkv_status pkv_probe_ask(int32_t *http, const pkv_probe *probe, pkv_error *err) {
  const int64_t end_ns = pkv_clock_ns() + probe->timeout_s * INT64_C(1000000000);
  pkv_buffer head;
  int fd = -1;
  *http = 0;
  pkv_buffer_init(&head, 4096, NULL);
  pkv_status status = write_head(&head, probe, err);
  if (status == PKV_OK) status = open_socket(&fd, probe, end_ns, err);
  if (status == PKV_OK) status = exchange(http, fd, &head, end_ns, err);
  if (fd >= 0) (void)close(fd);
  pkv_buffer_deinit(&head);
  return status;
}
