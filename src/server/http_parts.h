/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the loop over sockets (serve.c), requests (http_exchange.c) and their answers (http_jobs.c,
 * http_plain.c) share. All of it belongs to the one HTTP thread.
 */
#ifndef PKV_SERVER_HTTP_PARTS_H
#define PKV_SERVER_HTTP_PARTS_H

#include <microhttpd.h>

#include "base/limits.h"
#include "server/api_keys.h"
#include "server/reply_text.h"
#include "server/serve.h"
#include "server/tool_parse.h"
#include "server/text_worker.h"

/* Longer bodies are read by the text worker: 64 KiB take 10 ms and more. */
#define PKV_LONG_BODY ((size_t)64 << 10)

/* A stream says something at least so often, while its prompt waits or is worked on: clients see
 * that it lives, and a write that fails tells us that they do not. */
#define PKV_PING_NS INT64_C(1000000000)

#define PKV_REQUEST_ID_BYTES 129
#define PKV_TYPE_JSON        "application/json"

typedef struct pkv_server pkv_server;
typedef struct pkv_exchange pkv_exchange;

typedef enum pkv_http_route {
  PKV_ROUTE_PAGE,
  PKV_ROUTE_HEALTH,
  PKV_ROUTE_READY,
  PKV_ROUTE_METRICS,
  PKV_ROUTE_STATE, /* what the page shows */
  PKV_ROUTE_MODELS,
  PKV_ROUTE_PROPS,
  PKV_ROUTE_SLOTS,
  PKV_ROUTE_TOKENIZE,
  PKV_ROUTE_DETOKENIZE,
  PKV_ROUTE_TEMPLATE,
  PKV_ROUTE_COMPLETIONS,
  PKV_ROUTE_CHAT,
  PKV_ROUTE_LLAMA,
  PKV_ROUTE_NONE
} pkv_http_route;

/* What a client owes us, and since when. */
typedef enum pkv_owed {
  PKV_OWED_HEADER, /* the first request, or the rest of a begun one */
  PKV_OWED_NEXT,   /* nothing, but it may not wait for ever */
  PKV_OWED_BODY,
  PKV_OWED_READ,   /* it has not taken what we wrote */
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
  bool half; /* the client sends nothing more: so far the kernel's word */
  bool last; /* and there was nothing to do for it at the latest look */
  pkv_exchange *exchange;
} pkv_connection;

typedef struct pkv_http_counters {
  int64_t connections, requests;                /* open now; answered so far */
  int64_t by_class[6];                          /* answers by the first digit of their status */
  int64_t hang_ups, timeouts[PKV_OWED_NOTHING]; /* connections cut, by what was owed */
} pkv_http_counters;

struct pkv_server {
  const pkv_serve_options *options;
  const pkv_model *model; /* NULL until it is loaded */
  pkv_loop *loop;
  pkv_text_worker *texts;
  pkv_constraint_cache *constraints;
  struct MHD_Daemon *daemon;
  pkv_connection *connections;
  pkv_http_counters counters;
  int64_t created, started_ns;
  int64_t looked_ns; /* when news were last looked for unasked */
  uint64_t next_id;
  uint64_t secret; /* of this process: salts cannot be computed outside */
  int32_t longest;
  pkv_api_keys keys;
  bool loopback, draining, aborting, failed;
  bool look_again; /* a connection may be over: see at once */
  int wake_fd, poll_fd, signal_fd, listen_fd;
};

/* What one choice of an answer has had. */
typedef struct pkv_told {
  bool opened, ended;
  pkv_tool_parser parser; /* where the request has tools */
} pkv_told;

/* One request and its answer. */
struct pkv_exchange {
  pkv_connection *connection;
  struct MHD_Connection *http;
  pkv_http_route route;
  const char *method; /* static */
  int64_t begun_ns;
  int32_t status, key; /* key: of the client, from 1; 0 = none are asked for */
  char request_id[PKV_REQUEST_ID_BYTES];
  bool begun;     /* the headers were seen */
  bool too_large; /* the body is dropped */
  bool too_many;  /* because it has too many chunks */
  bool suspended;
  bool stream, closed; /* closed: the stream's last event is in `out` */
  bool ping;           /* the stream was silent for long: a sign of life is due */
  int64_t spoke_ns;    /* when the stream last gave something */
  pkv_buffer body, out;
  /* What is made of a body, here or by the text worker. */
  pkv_text_task text;
  enum MHD_Result (*text_next)(pkv_exchange *x);
  bool text_given, understood; /* the worker has it, or had it last; what came out */
  pkv_api_request *request;    /* of completions; NULL = not there */
  pkv_api_error refusal;       /* where not understood */
  size_t sent, dropped;        /* bytes of `out`; bytes of a body that is too large */
  size_t pieces;               /* that a chunked body came in */
  pkv_reply reply;
  pkv_stops stops;
  pkv_tools tools;
  int32_t job_count, n, choice_count; /* choice = job * n + its index there */
  pkv_job **jobs;                     /* [job_count]; NULL once released */
  pkv_told *told;                     /* [choice_count] */
  pkv_choice_state *states;           /* [choice_count] */
};

/* Callbacks of libmicrohttpd; the user pointer is the server. */
void *pkv_http_begin(void *user, const char *uri, struct MHD_Connection *http);
enum MHD_Result pkv_http_request(void *user, struct MHD_Connection *http, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *data_size, void **slot);
void pkv_http_end(void *user, struct MHD_Connection *http, void **slot,
                  enum MHD_RequestTerminationCode why);
/* Ends the exchange of a connection, if one is left: libmicrohttpd tells of no end where its own
 * memory did not do for the rest of the head. */
void pkv_http_forget(pkv_connection *connection);

/* Lets a suspended exchange go on when there is something for it. */
void pkv_exchange_poke(pkv_exchange *exchange);
/* Lets a stream that was silent for PKV_PING_NS say so. */
void pkv_exchange_ping(pkv_exchange *exchange, int64_t now_ns);
/* The client is gone: cancels the exchange's jobs at once. */
void pkv_exchange_drop(pkv_exchange *exchange);

/* http_exchange.c: answers whose body is in exchange->out. header and value may be NULL. */
enum MHD_Result pkv_http_respond(pkv_exchange *x, int code, const char *type, const char *header,
                                 const char *value);
enum MHD_Result pkv_http_respond_error(pkv_exchange *x, const pkv_api_error *error,
                                       const char *header, const char *value);
/* 503, with Retry-After. */
enum MHD_Result pkv_http_respond_busy(pkv_exchange *x, const char *code, const char *message);
/* What every answer has in its head. */
void pkv_http_add_headers(pkv_exchange *x, struct MHD_Response *response);
/* It is the client's turn, or ours, from now on. */
void pkv_http_owes(pkv_connection *connection, pkv_owed owed);
/* Does `work`, which fills `understood` and `refusal`, then `next`; long bodies by the text
 * worker. */
enum MHD_Result pkv_http_read_text(pkv_exchange *x, void (*work)(void *x),
                                   enum MHD_Result (*next)(pkv_exchange *x));

/* http_jobs.c */
enum MHD_Result pkv_http_start_jobs(pkv_exchange *x);
void pkv_http_free_request(pkv_exchange *x);
/* A whole answer, when it is there; the exchange was resumed for it. */
enum MHD_Result pkv_http_finish_jobs(pkv_exchange *x);
bool pkv_http_has_jobs(const pkv_exchange *x);
void pkv_http_release_jobs(pkv_exchange *x);

/* http_plain.c: all other routes. */
enum MHD_Result pkv_http_plain(pkv_exchange *x);

#endif
