/* SPDX-License-Identifier: Apache-2.0 */
#include "support/small_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

pkv_engine_options small_server_engine(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.isa = PKV_ISA_SCALAR;
  o.page_tokens = 4;
  o.cache_tokens = 128;
  o.max_seq_len = 64;
  o.max_rows = 4;
  o.max_requests = 8;
  return o;
}

static pkv_status load(void *user, pkv_model **out, pkv_error *err) {
  small_server *const s = user;
  (void)err;
  *out = s->model;
  return PKV_OK;
}

static void listening(void *user, int32_t at) {
  small_server *const s = user;
  s->port = at;
}

pkv_serve_options small_server_options(small_server *server) {
  server->port = 0;
  return (pkv_serve_options){.host = "127.0.0.1",
                             .name = "small",
                             .engine = small_server_engine(),
                             .max_body = 65536,
                             .max_connections = 64,
                             .header_s = SMALL_SERVER_PATIENCE_S,
                             .body_s = SMALL_SERVER_PATIENCE_S,
                             .idle_s = SMALL_SERVER_PATIENCE_S,
                             .stall_s = SMALL_SERVER_PATIENCE_S,
                             .drain_s = 1,
                             .progress_s = SMALL_SERVER_PATIENCE_S,
                             .load = load,
                             .listening = listening,
                             .user = server};
}

int small_server_dial(const small_server *server, int wait_ms) {
  const struct timeval patience = {wait_ms / 1000, wait_ms % 1000 * 1000};
  struct sockaddr_in to;
  memset(&to, 0, sizeof to);
  to.sin_family = AF_INET;
  to.sin_port = htons((uint16_t)server->port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = (int)syscall(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0) return fd;
  (void)syscall(SYS_close, fd);
  return -1;
}

size_t small_server_ask(char *out, size_t room, const small_server *server, const char *text,
                        int wait_ms) {
  size_t count = 0;
  out[0] = '\0';
  const int fd = small_server_dial(server, wait_ms);
  if (fd < 0) return 0;
  long part = syscall(SYS_sendto, fd, text, strlen(text), MSG_NOSIGNAL, NULL, 0);
  while (part > 0 && count + 1 < room) {
    part = syscall(SYS_recvfrom, fd, out + count, room - 1 - count, 0, NULL, NULL);
    if (part > 0) count += (size_t)part;
  }
  out[count] = '\0';
  (void)syscall(SYS_close, fd);
  return count;
}

bool small_server_ready(const small_server *server, const _Atomic bool *ended, int tries,
                        int wait_ms) {
  char text[1024];
  for (; tries > 0 && !*ended; tries--) {
    if (server->port != 0 &&
        small_server_ask(text, sizeof text, server, "GET /ready HTTP/1.0\r\n\r\n", wait_ms) > 12 &&
        memcmp(text + 9, "200", 3) == 0)
      return true;
    (void)usleep(2000);
  }
  return false;
}
