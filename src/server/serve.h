/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP server over one model: routes, limits, and how it ends. */
#ifndef PKV_SERVER_SERVE_H
#define PKV_SERVER_SERVE_H

#include "pkv/engine.h"

typedef struct pkv_serve_options {
  const char *host;     /* a numeric address, or localhost */
  int32_t port;         /* 0 = any free one */
  const char *name;     /* of the model, as clients see it; UTF-8 */
  const char *key_file; /* keys that clients must know, one a line; NULL = none are asked for */
  pkv_engine_options engine;
  int64_t max_body; /* bytes */
  int32_t max_connections;
  int32_t header_s, body_s, idle_s; /* to send the headers, the body, the next request */
  int32_t stall_s;                  /* a client that reads nothing of its answer */
  int32_t drain_s;                  /* for what runs when the server is told to end */
  void (*ready)(void *user, int32_t port);
  void *user;
} pkv_serve_options;

/*
 * Serves until SIGTERM or SIGINT, which it blocks in the calling thread and those it starts; then
 * takes no more requests, finishes those that run, and returns PKV_OK. After a second signal, or
 * drain_s, what still runs is cancelled: E_STATE. E_IO: the address or the file
 * of keys cannot be had.
 */
pkv_status pkv_serve(const pkv_serve_options *options, const pkv_model *model, pkv_error *err);

#endif
