/* SPDX-License-Identifier: Apache-2.0 */
/* One question to a server on its own probes, as a supervisor or a container asks it. */
#ifndef PKV_SERVER_PROBE_H
#define PKV_SERVER_PROBE_H

#include "pkv/pkv.h"

typedef struct pkv_probe {
  const char *host; /* what the server listens on: any address means loopback here */
  int32_t port;
  const char *path;     /* "/health" */
  const char *key_file; /* as the server's: the first key is used; NULL = none */
  const char *keys;
  int32_t timeout_s; /* for all of it */
} pkv_probe;

/* *http is the status of the answer. E_IO: there is none in time, or it is no HTTP. */
pkv_status pkv_probe_ask(int32_t *http, const pkv_probe *probe, pkv_error *err);

#endif
