/* SPDX-License-Identifier: Apache-2.0 */
/* Completions: jobs begun for a request, and their choices told, whole or as a stream. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/status.h"
#include "server/http_parts.h"

#define STREAM_BYTES ((size_t)64 << 20)
#define BLOCK_BYTES  16384

bool pkv_http_has_jobs(const pkv_exchange *x) {
  return x->jobs != NULL;
}

void pkv_http_release_jobs(pkv_exchange *x) {
  const pkv_allocator a = pkv_allocator_default();
  if (x->jobs == NULL) return;
  for (int32_t i = 0; i < x->job_count; i++)
    pkv_loop_release(x->connection->server->loop, x->jobs[i]);
  pkv_free(&a, x->jobs, (size_t)x->job_count * sizeof(pkv_job *));
  x->jobs = NULL;
}

static bool has_news(const pkv_exchange *x) {
  pkv_loop *const loop = x->connection->server->loop;
  for (int32_t i = 0; x->jobs != NULL && i < x->job_count; i++)
    if (pkv_loop_has_news(loop, x->jobs[i])) return true;
  return false;
}

static bool all_done(const pkv_exchange *x) {
  pkv_loop *const loop = x->connection->server->loop;
  for (int32_t i = 0; x->jobs != NULL && i < x->job_count; i++)
    if (!pkv_loop_is_done(loop, x->jobs[i])) return false;
  return true;
}

/* --- streams ------------------------------------------------------------------------------- */

static pkv_status tell_choice(pkv_exchange *x, int32_t c, pkv_piece *piece) {
  pkv_told *const told = &x->told[c];
  if (x->jobs == NULL || told->ended) return PKV_OK;
  pkv_piece_clear(piece);
  PKV_TRY(pkv_loop_take(piece, &x->states[c], x->connection->server->loop, x->jobs[c / x->n],
                        c % x->n, NULL));
  const bool news = piece->text.size > 0 || piece->records.size > 0;
  /* With the first text, not before: clients take the first event for the first token. */
  if (!told->opened && (news || x->states[c].done)) {
    PKV_TRY(pkv_reply_open(&x->out, &x->reply, c, NULL));
    told->opened = true;
  }
  if (news) PKV_TRY(pkv_reply_delta(&x->out, &x->reply, c, piece, &told->parser, NULL));
  if (!x->states[c].done) return PKV_OK;
  told->ended = true;
  return pkv_reply_end(&x->out, &x->reply, c, &x->states[c], &told->parser, NULL);
}

/* Turns what is new into events. */
static pkv_status fill(pkv_exchange *x) {
  pkv_piece piece;
  pkv_status status = PKV_OK;
  bool all = true;
  pkv_buffer_clear(&x->out);
  x->sent = 0;
  pkv_piece_init(&piece);
  for (int32_t c = 0; c < x->choice_count && status == PKV_OK; c++) {
    status = tell_choice(x, c, &piece);
    all = all && x->told[c].ended;
  }
  pkv_piece_deinit(&piece);
  if (status != PKV_OK || !all) return status;
  x->closed = true;
  pkv_http_release_jobs(x);
  return pkv_reply_close(&x->out, &x->reply, x->states, x->choice_count, x->n, NULL);
}

static ssize_t read_stream(void *user, uint64_t position, char *block, size_t room) {
  pkv_exchange *const x = user;
  (void)position;
  if (x->connection->gone || x->connection->server->aborting)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  if (x->sent == x->out.size) {
    if (x->closed) return MHD_CONTENT_READER_END_OF_STREAM;
    if (fill(x) != PKV_OK) return MHD_CONTENT_READER_END_WITH_ERROR;
  }
  /* Not a comment: there are clients that read all that is no blank line as JSON. */
  if (x->out.size == 0 && x->ping && pkv_buffer_append(&x->out, "\n\n", 2, NULL) != PKV_OK)
    return MHD_CONTENT_READER_END_WITH_ERROR;
  const size_t left = x->out.size - x->sent;
  if (left == 0) {
    pkv_http_owes(x->connection, PKV_OWED_NOTHING);
    x->suspended = true;
    MHD_suspend_connection(x->http);
    return 0;
  }
  const size_t count = left < room ? left : room;
  memcpy(block, x->out.data + x->sent, count);
  x->sent += count;
  x->ping = false;
  x->spoke_ns = pkv_clock_ns();
  pkv_http_owes(x->connection, PKV_OWED_READ);
  return (ssize_t)count;
}

static enum MHD_Result respond_stream(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  struct MHD_Response *const response =
      MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, x, NULL);
  if (response == NULL) return MHD_NO;
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                "text/event-stream; charset=utf-8");
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
  pkv_http_add_headers(x, response);
  const enum MHD_Result queued = MHD_queue_response(x->http, MHD_HTTP_OK, response);
  MHD_destroy_response(response);
  server->counters.requests++;
  server->counters.by_class[2]++;
  x->status = 200;
  x->spoke_ns = pkv_clock_ns();
  pkv_http_owes(x->connection, PKV_OWED_READ);
  return queued;
}

/* --- begin --------------------------------------------------------------------------------- */

static enum MHD_Result refuse_submit(pkv_exchange *x, pkv_status status, const pkv_error *err) {
  pkv_api_error error;
  pkv_http_release_jobs(x);
  if (status == PKV_E_LIMIT) return pkv_http_respond_busy(x, "queue_full", err->text);
  if (status == PKV_E_NOMEM)
    return pkv_http_respond_busy(x, "no_memory", "there is no memory for this request");
  (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the engine has failed");
  return pkv_http_respond_error(x, &error, NULL, NULL);
}

static pkv_status submit_all(pkv_exchange *x, pkv_api_request *request, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_server *const server = x->connection->server;
  x->n = request->job.n;
  x->job_count = request->prompt_count;
  x->choice_count = x->n * x->job_count;
  /* Nobody else submits: what has room now has room below. */
  PKV_CHECK(err, pkv_loop_has_room(server->loop, x->choice_count), PKV_E_LIMIT,
            "too many requests are waiting; try again later");
  x->told = pkv_alloc_zeroed(&a, (size_t)x->choice_count, sizeof *x->told);
  x->states = pkv_alloc_zeroed(&a, (size_t)x->choice_count, sizeof *x->states);
  x->jobs = pkv_alloc_zeroed(&a, (size_t)x->job_count, sizeof *x->jobs);
  if (x->told == NULL || x->states == NULL || x->jobs == NULL) return PKV_E_NOMEM;
  for (int32_t c = 0; c < x->choice_count && x->reply.tools != NULL; c++)
    pkv_reply_parser(&x->told[c].parser, &x->reply, c);
  request->job.window = x->stream ? PKV_STREAM_WINDOW_BYTES / (size_t)x->job_count : 0;
  for (int32_t i = 0; i < x->job_count; i++) {
    pkv_job_spec *const spec = &request->job;
    spec->prompt = request->prompts[i];
    const pkv_status status = pkv_loop_submit(&x->jobs[i], server->loop, spec, err);
    request->prompts[i] = spec->prompt;
    if (status != PKV_OK) return status;
  }
  return PKV_OK;
}

static void set_reply(pkv_exchange *x, pkv_api_request *request) {
  static const char *const prefixes[] = {"cmpl", "chatcmpl", "cmpl"};
  pkv_server *const server = x->connection->server;
  x->stream = request->stream;
  x->stops = request->job.stops;
  x->reply.kind = request->kind;
  x->reply.include_usage = request->include_usage;
  x->reply.logprobs = request->logprobs;
  x->reply.name = server->options->name;
  x->reply.model = server->model;
  x->reply.created = (int64_t)time(NULL);
  x->reply.stops = &x->stops;
  x->tools = request->tools; /* the exchange's from here on */
  request->tools.list = NULL;
  x->reply.tools = x->tools.list != NULL ? &x->tools : NULL;
  (void)snprintf(x->reply.id, sizeof x->reply.id, "%s-%" PRIx64 "%08" PRIx64,
                 prefixes[request->kind], (uint64_t)server->created, ++server->next_id);
}

void pkv_http_free_request(pkv_exchange *x) {
  const pkv_allocator a = pkv_allocator_default();
  if (x->request == NULL) return;
  pkv_api_free(x->request);
  pkv_free(&a, x->request, sizeof *x->request);
  x->request = NULL;
}

/* By either thread: touches nothing but the exchange, the model and the constraints. */
static void read_request(void *user) {
  pkv_exchange *const x = user;
  const pkv_server *const server = x->connection->server;
  const pkv_allocator a = pkv_allocator_default();
  const pkv_api_kind kind = x->route == PKV_ROUTE_CHAT    ? PKV_API_CHAT
                            : x->route == PKV_ROUTE_LLAMA ? PKV_API_LLAMA
                                                          : PKV_API_COMPLETIONS;
  x->request = pkv_alloc_zeroed(&a, 1, sizeof *x->request);
  x->understood =
      x->request != NULL
          ? pkv_api_read(x->request, &x->refusal, server->model, server->constraints,
                         server->longest, kind, x->body.size > 0 ? x->body.data : "", x->body.size)
          : pkv_api_refuse(&x->refusal, 503, "no_memory", "",
                           "there is no memory for this request");
  if (!x->understood && x->request != NULL) { /* freed already */
    x->request->prompt_count = 0;
    x->request->job.constraint = NULL;
  }
}

static enum MHD_Result begin_jobs(pkv_exchange *x) {
  pkv_server *const server = x->connection->server;
  if (!x->understood) return pkv_http_respond_error(x, &x->refusal, NULL, NULL);
  pkv_buffer_deinit(&x->body);
  x->out.limit = STREAM_BYTES;
  set_reply(x, x->request);
  /* One client's prompts do not show in another's times, whatever salts they choose. */
  pkv_request *const r = &x->request->job.request;
  if (!server->options->shared_cache)
    r->cache_salt =
        pkv_hash_bytes(&r->cache_salt, sizeof(uint64_t), server->secret + (uint64_t)x->key);
  pkv_error err = {PKV_OK, "", ""};
  const pkv_status status = submit_all(x, x->request, &err);
  pkv_http_free_request(x);
  if (status != PKV_OK) return refuse_submit(x, status, &err);
  pkv_http_owes(x->connection, PKV_OWED_NOTHING);
  if (x->stream) return respond_stream(x);
  x->suspended = true;
  MHD_suspend_connection(x->http);
  return MHD_YES;
}

enum MHD_Result pkv_http_start_jobs(pkv_exchange *x) {
  return pkv_http_read_text(x, read_request, begin_jobs);
}

/* --- whole answers ------------------------------------------------------------------------- */

static pkv_status take_whole(pkv_exchange *x, pkv_whole *all) {
  for (int32_t c = 0; c < x->choice_count; c++) {
    pkv_piece_init(&all[c].piece);
    PKV_TRY(pkv_loop_take(&all[c].piece, &all[c].state, x->connection->server->loop,
                          x->jobs[c / x->n], c % x->n, NULL));
    x->states[c] = all[c].state;
  }
  return PKV_OK;
}

static enum MHD_Result tell_whole(pkv_exchange *x, const pkv_whole *all) {
  for (int32_t c = 0; c < x->choice_count; c++) {
    if (all[c].state.finish == PKV_FINISH_STOP || all[c].state.finish == PKV_FINISH_LENGTH)
      continue;
    pkv_api_error error;
    (void)pkv_api_refuse(&error, 500, "engine_failed", "", "the answer could not be finished");
    return pkv_http_respond_error(x, &error, NULL, NULL);
  }
  if (pkv_reply_whole(&x->out, &x->reply, all, x->choice_count, x->n, NULL) != PKV_OK)
    return MHD_NO;
  return pkv_http_respond(x, 200, PKV_TYPE_JSON, NULL, NULL);
}

enum MHD_Result pkv_http_finish_jobs(pkv_exchange *x) {
  const pkv_allocator a = pkv_allocator_default();
  if (x->connection->gone || x->connection->server->aborting) return MHD_NO;
  if (!all_done(x)) {
    x->suspended = true;
    MHD_suspend_connection(x->http);
    return MHD_YES;
  }
  const size_t count = (size_t)x->choice_count;
  pkv_whole *const all = pkv_alloc_zeroed(&a, count, sizeof *all);
  if (all == NULL) return MHD_NO;
  const pkv_status status = take_whole(x, all);
  pkv_http_release_jobs(x);
  const enum MHD_Result result = status == PKV_OK ? tell_whole(x, all) : MHD_NO;
  for (size_t c = 0; c < count; c++)
    pkv_piece_deinit(&all[c].piece);
  pkv_free(&a, all, count * sizeof *all);
  return result;
}

/* --- waking -------------------------------------------------------------------------------- */

void pkv_exchange_poke(pkv_exchange *x) {
  const pkv_server *const server = x->connection->server;
  if (!x->suspended) return;
  if (x->text_given && !pkv_text_worker_is_done(x->connection->server->texts, &x->text)) return;
  if (x->text_given) {
    x->suspended = false;
    MHD_resume_connection(x->http);
    return;
  }
  /* A whole answer needs no visit before its end. */
  const bool due = x->stream ? has_news(x) : all_done(x);
  if (!x->connection->gone && !server->aborting && x->jobs != NULL && !due) return;
  x->suspended = false;
  MHD_resume_connection(x->http);
}

void pkv_exchange_ping(pkv_exchange *x, int64_t now_ns) {
  if (!x->stream || !x->suspended || now_ns - x->spoke_ns < PKV_PING_NS) return;
  x->ping = true;
  x->suspended = false;
  MHD_resume_connection(x->http);
}

void pkv_exchange_drop(pkv_exchange *x) {
  pkv_http_release_jobs(x);
  pkv_exchange_poke(x);
}
