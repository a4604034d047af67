/* SPDX-License-Identifier: Apache-2.0 */
#include "server/notify.h"

#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/env.h"

void pkv_notify(const char *state) {
  const char *const path = pkv_env_get(PKV_ENV_NOTIFY_SOCKET);
  struct sockaddr_un to;
  const size_t bytes = path != NULL ? strlen(path) : 0;
  if (bytes < 2 || bytes >= sizeof to.sun_path || (path[0] != '/' && path[0] != '@')) return;
  memset(&to, 0, sizeof to);
  to.sun_family = AF_UNIX;
  memcpy(to.sun_path, path, bytes);
  if (path[0] == '@') to.sun_path[0] = '\0'; /* of the abstract namespace */
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
  /* Nobody is told when it fails: the manager's own time limit then says so. */
  const ssize_t sent =
      sendto(fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&to, size);
  (void)sent;
  (void)close(fd);
}
