/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_serve.h"

#include <math.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/sort.h"
#include "base/status.h"
#include "cli/command.h"
#include "server/engine_loop.h"

#define POLL_MS 50

typedef struct bench_client {
  pkv_job *job;
  double due_s;
  int64_t sent_ns, first_ns, last_ns;
  int32_t seen; /* tokens */
  bool done;
  pkv_choice_state state;
} bench_client;

typedef struct bench_load {
  const bench_workload *w;
  pkv_loop *loop;
  pkv_model *model;
  int wake_fd;
  bench_client *clients; /* [requests] */
  double *gaps;          /* [requests * tokens]: seconds between tokens */
  size_t gap_count;
  int32_t *prefixes; /* [groups, prefix] */
  int32_t vocab, sent, ended;
  int64_t begin_ns, end_ns;
} bench_load;

/* --- names --------------------------------------------------------------------------------- */

static int find_word(const char *const *words, const char *text, size_t bytes) {
  for (int i = 0; words[i] != NULL; i++)
    if (strlen(words[i]) == bytes && memcmp(words[i], text, bytes) == 0) return i;
  return -1;
}

bool bench_schedule_parse(bench_schedule *out, const char *text, size_t bytes) {
  static const char *const orders[] = {"tree", "fcfs",       "priority", "cht",
                                       "lpm",  "dfs-weight", NULL};
  static const char *const policies[] = {"always",   "static", "static-chain", "ucb", "q-learning",
                                         "marginal", NULL};
  const char *const slash = memchr(text, '/', bytes);
  const size_t first = slash != NULL ? (size_t)(slash - text) : bytes;
  const int order = find_word(orders, text, first);
  const int policy = slash != NULL ? find_word(policies, slash + 1, bytes - first - 1) : 0;
  if (order < 0 || policy < 0 || bytes >= sizeof out->name) return false;
  memcpy(out->name, text, bytes);
  out->name[bytes] = '\0';
  out->order = (pkv_sched_order)order;
  out->policy = (pkv_sched_policy)policy;
  return true;
}

int32_t bench_schedules_parse(bench_schedule out[PKV_BENCH_SCHEDULES], const char *text) {
  int32_t count = 0;
  for (const char *at = text; *at != '\0';) {
    const size_t bytes = strcspn(at, ",");
    if (count == PKV_BENCH_SCHEDULES || !bench_schedule_parse(&out[count++], at, bytes)) return 0;
    at += bytes + (at[bytes] == ',');
  }
  return count;
}

/* --- the clients --------------------------------------------------------------------------- */

static pkv_status give_model(void *user, pkv_model **out, pkv_error *err) {
  (void)err;
  *out = user;
  return PKV_OK;
}

static void random_tokens(int32_t *out, int32_t count, int32_t vocab, uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  /* Low ids may be control tokens. */
  for (int32_t i = 0; i < count; i++)
    out[i] = (int32_t)pkv_rng_range(&rng, vocab / 8, vocab - 1);
}

static void set_times(bench_load *l) {
  pkv_rng rng;
  double at = 0.0;
  pkv_rng_init(&rng, l->w->seed + 1);
  for (int32_t i = 0; i < l->w->requests; i++) {
    if (l->w->rate > 0.0) at -= log(1.0 - pkv_rng_uniform(&rng)) / l->w->rate;
    l->clients[i].due_s = at;
  }
}

static pkv_status send_request(bench_load *l, int32_t index, pkv_job_spec *spec, pkv_error *err) {
  const bench_workload *const w = l->w;
  const pkv_allocator a = pkv_allocator_default();
  const size_t count = (size_t)w->prefix + (size_t)w->own;
  int32_t *const ids = pkv_alloc(&a, count * sizeof *ids);
  PKV_CHECK(err, ids != NULL, PKV_E_NOMEM, "no memory for a prompt of %zu tokens", count);
  memcpy(ids, l->prefixes + (size_t)(index % w->groups) * (size_t)w->prefix,
         (size_t)w->prefix * sizeof *ids);
  random_tokens(ids + w->prefix, w->own, l->vocab, w->seed + 1000 + (uint64_t)index);
  memset(spec, 0, sizeof *spec);
  spec->request = (pkv_request)PKV_REQUEST_INIT;
  spec->request.max_tokens = w->tokens;
  spec->request.ignore_end = 1;
  spec->n = 1;
  spec->shown = -1;
  spec->prompt = (pkv_tokens){ids, count};
  l->clients[index].sent_ns = pkv_clock_ns();
  const pkv_status status = pkv_loop_submit(&l->clients[index].job, l->loop, spec, err);
  pkv_tokens_free(&spec->prompt); /* nothing, where the job has it */
  return status;
}

static pkv_status take_tokens(bench_load *l, bench_client *c, pkv_piece *piece, pkv_error *err) {
  const int64_t now = pkv_clock_ns();
  pkv_piece_clear(piece);
  PKV_TRY(pkv_loop_take(piece, &c->state, l->loop, c->job, 0, err));
  for (; c->seen < c->state.generated; c->seen++) {
    if (c->first_ns == 0)
      c->first_ns = now;
    else if (l->gap_count < (size_t)l->w->requests * (size_t)l->w->tokens)
      l->gaps[l->gap_count++] = (double)(now - c->last_ns) * 1e-9;
    c->last_ns = now;
  }
  if (!c->state.done) return PKV_OK;
  PKV_CHECK(err, c->state.finish == PKV_FINISH_LENGTH || c->state.finish == PKV_FINISH_STOP,
            PKV_E_INTERNAL, "a request ended with %s", pkv_finish_text(c->state.finish));
  pkv_loop_release(l->loop, c->job);
  c->job = NULL;
  c->done = true;
  l->ended++;
  return PKV_OK;
}

static pkv_status send_due(bench_load *l, pkv_job_spec *spec, int *wait_ms, pkv_error *err) {
  *wait_ms = POLL_MS;
  while (l->sent < l->w->requests) {
    const double left = l->clients[l->sent].due_s - (double)(pkv_clock_ns() - l->begin_ns) * 1e-9;
    if (left > 0.0) {
      if (left < POLL_MS * 1e-3) *wait_ms = (int)(left * 1e3) + 1;
      break;
    }
    PKV_TRY(send_request(l, l->sent, spec, err));
    l->sent++;
  }
  return PKV_OK;
}

static pkv_status drive(bench_load *l, pkv_job_spec *spec, pkv_piece *piece, pkv_error *err) {
  l->begin_ns = pkv_clock_ns();
  while (l->ended < l->w->requests) {
    struct pollfd at = {l->wake_fd, POLLIN, 0};
    uint64_t count;
    int wait = 0;
    PKV_CHECK(err, !pkv_cli_interrupted(), PKV_E_STATE, "interrupted");
    PKV_TRY(send_due(l, spec, &wait, err));
    if (poll(&at, 1, wait) > 0 && read(l->wake_fd, &count, sizeof count) < 0) continue;
    for (int32_t i = 0; i < l->sent; i++) {
      bench_client *const c = &l->clients[i];
      if (!c->done && pkv_loop_has_news(l->loop, c->job)) PKV_TRY(take_tokens(l, c, piece, err));
    }
    pkv_error why = {PKV_OK, "", ""};
    pkv_loop_counters counters;
    pkv_loop_get_counters(&counters, l->loop);
    pkv_loop_get_failure(&why, l->loop);
    PKV_CHECK(err, counters.phase != PKV_LOOP_FAILED, PKV_E_INTERNAL, "%s", why.text);
  }
  l->end_ns = pkv_clock_ns();
  return PKV_OK;
}

static pkv_status wait_ready(const bench_load *l, pkv_error *err) {
  for (;;) {
    pkv_loop_counters counters;
    struct pollfd at = {l->wake_fd, POLLIN, 0};
    pkv_loop_get_counters(&counters, l->loop);
    if (counters.phase == PKV_LOOP_READY) return PKV_OK;
    if (counters.phase == PKV_LOOP_FAILED) {
      pkv_error why = {PKV_OK, "", ""};
      pkv_loop_get_failure(&why, l->loop);
      if (err != NULL) *err = why;
      return why.status;
    }
    (void)poll(&at, 1, POLL_MS);
  }
}

/* --- figures ------------------------------------------------------------------------------- */

static double at_share(const double *sorted, size_t count, double share) {
  if (count == 0) return 0.0;
  size_t at = (size_t)ceil(share * (double)count);
  return 1e3 * sorted[at > 0 ? at - 1 : 0];
}

bench_spread bench_spread_of(double *seconds, size_t count) {
  pkv_sort_doubles(seconds, count);
  return (bench_spread){at_share(seconds, count, 0.5), at_share(seconds, count, 0.9),
                        at_share(seconds, count, 0.99)};
}

static double per(double amount, double by) {
  return by > 0.0 ? amount / by : 0.0;
}

static void count_engine(bench_outcome *out, const bench_load *l) {
  pkv_loop_counters c;
  pkv_loop_get_counters(&c, l->loop);
  const pkv_engine_stats *const e = &c.engine;
  const double tokens = (double)e->decode_tokens;
  out->mean_rows = per(tokens, (double)e->decode_steps);
  out->kv_mb_a_token = per((double)e->kv_bytes_route[PKV_ROUTE_SHARED] * 1e-6, tokens);
  out->kv_mb_each = per((double)e->kv_bytes_route[PKV_ROUTE_BALANCED] * 1e-6, tokens);
  out->reused = per((double)e->prompt_tokens_reused, (double)e->prompt_tokens);
  out->steps = e->steps;
  out->preemptions = e->preemptions;
  out->prefill_tokens = e->prefill_tokens;
}

static void measure(bench_outcome *out, bench_load *l, double *scratch) {
  const bench_workload *const w = l->w;
  double generated = 0.0, good = 0.0;
  out->count = w->requests;
  out->seconds = (double)(l->end_ns - l->begin_ns) * 1e-9;
  for (int32_t i = 0; i < w->requests; i++) {
    const bench_client *const c = &l->clients[i];
    const double tpot = per((double)(c->last_ns - c->first_ns) * 1e-9, (double)(c->seen - 1));
    out->first_s[i] = (double)(c->first_ns - c->sent_ns) * 1e-9;
    scratch[i] = tpot;
    generated += c->seen;
    good += out->first_s[i] <= w->slo_ttft && tpot <= w->slo_tpot;
  }
  out->tpot = bench_spread_of(scratch, (size_t)w->requests);
  for (int32_t i = 0; i < w->requests; i++)
    scratch[i] = (double)(l->clients[i].state.started_ns - l->clients[i].state.arrived_ns) * 1e-9;
  out->queue = bench_spread_of(scratch, (size_t)w->requests);
  out->ttft = bench_spread_of(out->first_s, (size_t)w->requests);
  out->itl = bench_spread_of(l->gaps, l->gap_count);
  out->tokens_per_s = per(generated, out->seconds);
  out->requests_per_s = per(w->requests, out->seconds);
  out->goodput = per(good, out->seconds);
  count_engine(out, l);
}

/* --- one run ------------------------------------------------------------------------------- */

static pkv_status run_load(bench_outcome *out, bench_load *l, const pkv_engine_options *engine,
                           pkv_job_spec *spec, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const pkv_loop_options options = {give_model, l->model, *engine, l->wake_fd};
  const size_t requests = (size_t)l->w->requests;
  double *const scratch = pkv_alloc_zeroed(&a, requests, sizeof *scratch);
  pkv_piece piece;
  pkv_piece_init(&piece);
  pkv_status status =
      scratch != NULL ? PKV_OK : PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu times", requests);
  if (status == PKV_OK) status = pkv_loop_create(&l->loop, &options, err);
  if (status == PKV_OK) status = wait_ready(l, err);
  if (status == PKV_OK) status = drive(l, spec, &piece, err);
  if (status == PKV_OK) measure(out, l, scratch);
  for (size_t i = 0; i < requests; i++)
    pkv_loop_release(l->loop, l->clients[i].job);
  pkv_loop_destroy(l->loop);
  pkv_piece_deinit(&piece);
  pkv_free(&a, scratch, requests * sizeof *scratch);
  return status;
}

pkv_status bench_serve_run(bench_outcome *out, pkv_model *model, const pkv_engine_options *engine,
                           const bench_schedule *schedule, const bench_workload *workload,
                           pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const bench_workload *const w = workload;
  const size_t requests = (size_t)w->requests, gaps = requests * (size_t)w->tokens;
  const size_t prefixes = (size_t)w->groups * (size_t)w->prefix + 1;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  bench_load l = {.w = w, .model = model};
  pkv_engine_options o = *engine;
  o.order = schedule->order;
  o.admission = schedule->policy;
  o.max_requests = w->requests;
  o.route_stats = 1;
  pkv_model_get_info(&info, model);
  l.vocab = info.vocab;
  l.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  l.clients = pkv_alloc_zeroed(&a, requests, sizeof *l.clients);
  l.gaps = pkv_alloc_zeroed(&a, gaps, sizeof *l.gaps);
  l.prefixes = pkv_alloc_zeroed(&a, prefixes, sizeof *l.prefixes);
  pkv_job_spec *const spec = pkv_alloc_zeroed(&a, 1, sizeof *spec);
  pkv_status status = PKV_OK;
  if (l.wake_fd < 0 || !l.clients || !l.gaps || !l.prefixes || spec == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu requests", requests);
  if (status == PKV_OK) {
    for (int32_t g = 0; g < w->groups; g++)
      random_tokens(l.prefixes + (size_t)g * (size_t)w->prefix, w->prefix, l.vocab,
                    w->seed + 100 + (uint64_t)g);
    set_times(&l);
    status = run_load(out, &l, &o, spec, err);
  }
  if (l.wake_fd >= 0) (void)close(l.wake_fd);
  pkv_free(&a, spec, sizeof *spec);
  pkv_free(&a, l.prefixes, prefixes * sizeof *l.prefixes);
  pkv_free(&a, l.gaps, gaps * sizeof *l.gaps);
  pkv_free(&a, l.clients, requests * sizeof *l.clients);
  return status;
}
