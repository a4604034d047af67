/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the loop over sockets (serve.c) and the requests on them (http_exchange.c) share. All of it
 * belongs to the one HTTP thread.
 */
#ifndef PKV_SERVER_HTTP_PARTS_H
#define PKV_SERVER_HTTP_PARTS_H

#include <microhttpd.h>

#include "server/api_keys.h"
#include "server/reply_text.h"
#include "server/serve.h"

/* Of one request line and its headers; libmicrohttpd's memory for a connection is twice that. */
#define PKV_HEADER_BYTES ((size_t)16 << 10)

/* A stream says something at least so often, while its prompt waits or is worked on: clients see
 * that it lives, and a write that fails tells us that they do not. */
#define PKV_PING_NS INT64_C(1000000000)

typedef struct pkv_server pkv_server;
typedef struct pkv_exchange pkv_exchange;

/* What a client owes us, and since when. */
typedef enum pkv_owed {
  PKV_OWED_HEADER, /* the first request, or the rest of a begun one */
  PKV_OWED_NEXT,   /* nothing, but it may not wait for ever */
  PKV_OWED_BODY,
  PKV_OWED_NOTHING /* it is our turn */
} pkv_owed;

/* One TCP connection. */
typedef struct pkv_connection {
  pkv_server *server;
  struct pkv_connection *next, **at; /* in the server's list */
  int fd;
  pkv_owed owed;
  int64_t since_ns;
  bool gone; /* hung up, or its time is over */
  pkv_exchange *exchange;
} pkv_connection;

struct pkv_server {
  const pkv_serve_options *options;
  const pkv_model *model;
  pkv_loop *loop;
  struct MHD_Daemon *daemon;
  pkv_connection *connections;
  int64_t connection_count, request_count, created;
  uint64_t next_id;
  int32_t longest;
  pkv_api_keys keys;
  bool loopback, draining, aborting;
  int wake_fd, poll_fd, signal_fd, listen_fd;
};

/* One request and its answer. */
struct pkv_exchange {
  pkv_connection *connection;
  struct MHD_Connection *http;
  bool begun;     /* the headers were seen */
  bool too_large; /* the body is dropped */
  bool suspended;
  bool stream, opened, closed; /* the stream's first and last events are in `out` */
  bool ping;                   /* the stream was silent for long: a comment is due */
  int64_t spoke_ns;            /* when the stream last gave something */
  pkv_buffer body, text, out;
  size_t sent, dropped; /* bytes of `out`; bytes of a body that is too large */
  pkv_reply reply;
  pkv_job *job;
  pkv_job_state state;
};

/* Callbacks of libmicrohttpd; the user pointer is the server. */
void *pkv_http_begin(void *user, const char *uri, struct MHD_Connection *http);
enum MHD_Result pkv_http_request(void *user, struct MHD_Connection *http, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *data_size, void **slot);
void pkv_http_end(void *user, struct MHD_Connection *http, void **slot,
                  enum MHD_RequestTerminationCode why);

/* Lets a suspended exchange go on when there is something for it. */
void pkv_exchange_poke(pkv_exchange *exchange);
/* Lets a stream that was silent for PKV_PING_NS say so. */
void pkv_exchange_ping(pkv_exchange *exchange, int64_t now_ns);
/* The client is gone: cancels the exchange's job at once. */
void pkv_exchange_drop(pkv_exchange *exchange);

#endif
