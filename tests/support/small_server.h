/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A server over a small model, for programs that run one in their own process. The client's side
 * makes its calls past the C library, so that a shim before it (torture) does not see them.
 */
#ifndef PKV_TEST_SMALL_SERVER_H
#define PKV_TEST_SMALL_SERVER_H

#include <stdatomic.h>

#include "server/serve.h"

#define SMALL_SERVER_PATIENCE_S 120 /* of every deadline: a slow machine is no finding */

typedef struct small_server {
  pkv_model *model;     /* what is served */
  _Atomic int32_t port; /* 0: it does not listen yet */
} small_server;

/* Two threads, pages of 4, 128 tokens, sequences of 64, four rows. */
pkv_engine_options small_server_engine(void);
/* For pkv_serve; `server` outlives it. */
pkv_serve_options small_server_options(small_server *server);

/* A connection whose reads and writes wait so long; -1: none was had. */
int small_server_dial(const small_server *server, int wait_ms);
/* One request and all that comes until the end, terminated: the bytes of it that had room. */
size_t small_server_ask(char *out, size_t room, const small_server *server, const char *text,
                        int wait_ms);
/* Asks /ready, so many times at most. */
bool small_server_ready(const small_server *server, const _Atomic bool *ended, int tries,
                        int wait_ms);

#endif
