/* SPDX-License-Identifier: Apache-2.0 */
/* The HTTP server over one model: routes, limits, and how it ends. */
#ifndef PKV_SERVER_SERVE_H
#define PKV_SERVER_SERVE_H

#include <stdbool.h>

#include "pkv/engine.h"

/* One request that was answered, or not. Nothing that a client wrote is in it but the id, which is
 * printable ASCII without quotes and backslashes. */
typedef struct pkv_access {
  const char *id, *method, *path; /* path: of the route that matched; "-" = none */
  const char *client;             /* numeric address; "-" = unknown */
  int32_t key;                    /* which one, from 1; 0 = none asked for, -1 = none given */
  int32_t status;                 /* 0: ended before an answer */
  bool streamed, complete;        /* complete: the client got all of it */
  bool probe;                     /* one of those that ask how the server is, answered well */
  double seconds;
  double queue, ttft; /* seconds until the first answer ran, and its first token; -1 = never */
  int32_t prompt_tokens, cached_tokens, generated_tokens;
  const char *finish; /* of the first choice; "-" = there was none */
} pkv_access;

typedef struct pkv_serve_options {
  const char *host;     /* a numeric address, or localhost */
  int32_t port;         /* 0 = any free one */
  const char *name;     /* of the model, as clients see it; UTF-8 */
  const char *key_file; /* keys that clients must know, one a line; NULL = none */
  const char *keys;     /* more of them, separated by commas; NULL = none */
  const char *origins;  /* web pages that may ask, separated by commas; NULL = none */
  pkv_engine_options engine;
  bool shared_cache; /* clients with different keys share cached prefixes */
  int64_t max_body;  /* bytes */
  int32_t max_connections;
  int32_t header_s, body_s, idle_s; /* to send the headers, the body, the next request */
  int32_t stall_s;                  /* a client that reads nothing of its answer */
  int32_t drain_s;                  /* for what runs when the server is told to end */
  int32_t progress_s;               /* without a step while there is work: not ready any more */
  /* Opens the model, on a thread of the server's, when the port is bound already. It is the
   * caller's, and outlives the server. */
  pkv_status (*load)(void *user, pkv_model **out, pkv_error *err);
  void (*listening)(void *user, int32_t port);
  void (*access)(void *user, const pkv_access *access); /* NULL = no log of requests */
  void *user;
} pkv_serve_options;

/*
 * Serves until SIGTERM or SIGINT, which it blocks in the calling thread and those it starts; then
 * takes no more requests, finishes those that run, and returns PKV_OK. After a second signal, or
 * drain_s, what still runs is cancelled: E_STATE. E_IO: the address or the file of keys cannot be
 * had. What `load` says when the model cannot be opened; what the engine says when its steps fail
 * again and again.
 */
pkv_status pkv_serve(const pkv_serve_options *options, pkv_error *err);

#endif
