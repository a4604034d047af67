/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_sim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sort.h"
#include "cli/bench_sched_chunks.h"
#include "cli/bench_sched_memory.h"

#define PAGE       16
#define WALK_STEPS 8 /* L2 is looked at anew after so many, or when one row in 16 is new or gone */
#define WALK_READS 16384 /* that it is looked at with, about */

typedef struct sim_job {
  double admitted, first, ended; /* seconds; < 0 = not yet */
} sim_job;

typedef struct sim_row {
  int32_t job, left; /* tokens still to come */
} sim_row;

typedef struct sim {
  const sched_setup *o;
  pkv_sched *sched;
  sched_chunks chunks;
  sim_job *jobs;  /* [count] */
  sim_row *rows;  /* [max_batch] */
  double *values; /* [count] scratch of percentiles */
  int32_t row_count, next, ended, inserted;
  int64_t total, generated; /* tokens of the batch: prompts; answers so far */
  int64_t reserved;         /* answers of the batch's rows, in tokens */
  int64_t capacity;         /* pages */
  double held;              /* as in sched_load, found for a batch of held_rows at step held_step */
  int32_t held_rows;
  int64_t held_step;
  double now;
  int64_t prompt_tokens, cached_tokens, own_ns;
  sched_outcome *out;
} sim;

static int64_t sim_clock(void *ctx) {
  const sim *const s = ctx;
  return (int64_t)(s->now * 1e9);
}

static double sim_cost(void *ctx, const pkv_sched_batch *batch) {
  const sim *const s = ctx;
  const double mean = s->row_count > 0 ? (double)s->generated / s->row_count : 0;
  const double answers = mean * batch->rows;
  const sched_load load = {
      .rows = batch->rows,
      .total = (double)batch->total_tokens + answers,
      .unique = (double)batch->unique_tokens + answers,
      .shared = (double)batch->common_tokens,
      .held = -1,
  };
  return sched_decode_s(s->o->device, s->o->shape, s->o->route, &load);
}

static pkv_status sim_insert(sim *s, pkv_error *err) {
  static const uint64_t none = 0; /* hashes that are not read, so that no tokens are asked for */
  const sched_work *const w = s->o->work;
  while (s->next < w->count && w->jobs[s->next].arrival_s <= s->now) {
    const sched_job *const job = &w->jobs[s->next];
    pkv_sched_request request = PKV_SCHED_REQUEST_INIT;
    request.id = (uint64_t)s->next;
    request.prompt_tokens = job->prompt;
    request.output_tokens = job->output;
    request.hashes = job->hashes > 0 ? &w->hashes[job->first_hash] : &none;
    request.hash_count = job->hashes;
    request.arrival_ns = (int64_t)(job->arrival_s * 1e9) + 1;
    s->jobs[s->next] = (sim_job){-1, -1, -1};
    if (((int64_t)job->prompt + job->output) / PAGE + 2 > s->capacity) {
      s->out->refused++;
    } else {
      const int64_t begin = pkv_clock_ns();
      PKV_TRY(pkv_sched_insert(s->sched, &request, err));
      s->own_ns += pkv_clock_ns() - begin;
      s->inserted++;
    }
    s->next++;
  }
  return PKV_OK;
}

static pkv_status sim_admit(sim *s, double *prefill, pkv_error *err) {
  const sched_work *const w = s->o->work;
  for (*prefill = 0; s->row_count < s->o->max_batch;) {
    pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
    const int64_t used =
        (s->chunks.unique + s->reserved) / PAGE + 2 * (int64_t)s->row_count; /* ends of pages */
    const int64_t begin = pkv_clock_ns();
    PKV_TRY(pkv_sched_best(&pick, s->sched, used < s->capacity ? s->capacity - used : 0, err));
    if (pick.verdict == PKV_SCHED_ADD) PKV_TRY(pkv_sched_admit(s->sched, pick.id, err));
    s->own_ns += pkv_clock_ns() - begin;
    if (pick.verdict != PKV_SCHED_ADD) break;
    const sched_job *const job = &w->jobs[pick.id];
    const int32_t cached = sched_chunks_prefix(&s->chunks, w, job, s->o->warm);
    *prefill += sched_prefill_s(s->o->device, s->o->shape, cached, job->prompt - cached);
    s->prompt_tokens += job->prompt;
    s->cached_tokens += cached;
    sched_chunks_add(&s->chunks, w, job, 1);
    s->rows[s->row_count++] = (sim_row){(int32_t)pick.id, job->output};
    s->total += job->prompt;
    s->reserved += job->output;
    s->jobs[pick.id].admitted = s->now;
  }
  return PKV_OK;
}

/* The scheduler's books of the batch against ours. */
static pkv_status sim_check(const sim *s, pkv_error *err) {
  pkv_sched_stats stats = PKV_SCHED_STATS_INIT;
  pkv_sched_get_stats(&stats, s->sched);
  PKV_CHECK(err,
            stats.active == s->row_count && stats.total_tokens == s->total &&
                stats.unique_tokens == s->chunks.unique && stats.common_tokens == s->chunks.shared,
            PKV_E_INTERNAL,
            "%d rows, %lld unique tokens, %lld in common; the scheduler has %d, %lld and %lld",
            (int)s->row_count, (long long)s->chunks.unique, (long long)s->chunks.shared,
            (int)stats.active, (long long)stats.unique_tokens, (long long)stats.common_tokens);
  return PKV_OK;
}

static pkv_status sim_end(sim *s, int32_t row, pkv_error *err) {
  const int32_t id = s->rows[row].job;
  const sched_job *const job = &s->o->work->jobs[id];
  sched_chunks_add(&s->chunks, s->o->work, job, -1);
  s->total -= job->prompt;
  s->generated -= job->output;
  s->reserved -= job->output;
  s->jobs[id].ended = s->now;
  s->ended++;
  s->rows[row] = s->rows[--s->row_count];
  const int64_t begin = pkv_clock_ns();
  PKV_TRY(pkv_sched_finish(s->sched, (uint64_t)id, err));
  s->own_ns += pkv_clock_ns() - begin;
  return PKV_OK;
}

/* What L2 holds of this batch, by its rows as they lie in it; of every so many chunks one. */
static double sim_walk(const sim *s) {
  const sched_work *const w = s->o->work;
  const double layer = sched_kv_bytes(s->o->shape) / s->o->shape->layers;
  const double chunks = (double)s->total / w->chunk * s->o->shape->kv_heads;
  const int32_t stride = 1 + (int32_t)(chunks / WALK_READS);
  sched_reuse_begin(s->o->reuse);
  for (int32_t i = 0; i < s->row_count; i++) {
    const sched_job *const job = &w->jobs[s->rows[i].job];
    sched_reuse_row(s->o->reuse, job->prompt + job->output - s->rows[i].left);
    for (int32_t at = stride / 2; at < job->hashes; at += stride)
      sched_reuse_place(s->o->reuse, w->hashes[job->first_hash + (size_t)at],
                        fmin((at + 0.5) * w->chunk, job->prompt));
  }
  const int64_t own = s->chunks.unique + s->generated - s->chunks.shared;
  return sched_reuse_share(s->o->reuse, (double)s->chunks.shared * layer, (double)own * layer,
                           s->o->device->l2_mb * 1e6);
}

/* The same, walked anew only now and then. */
static double sim_held(sim *s) {
  const int32_t change = abs(s->row_count - s->held_rows);
  if (s->o->reuse == NULL || s->o->route != SCHED_ORDINARY || s->chunks.shared == 0) return -1;
  if (s->out->steps - s->held_step >= WALK_STEPS || change * 16 > s->held_rows) {
    s->held = sim_walk(s);
    s->held_rows = s->row_count;
    s->held_step = s->out->steps;
  }
  return s->held;
}

/* One token of every row. */
static pkv_status sim_decode(sim *s, double prefill, pkv_error *err) {
  const int32_t rows = s->row_count;
  const sched_load load = {rows, (double)(s->total + s->generated),
                           (double)(s->chunks.unique + s->generated), (double)s->chunks.shared,
                           sim_held(s)};
  const double decode = sched_decode_s(s->o->device, s->o->shape, s->o->route, &load);
  const double token = sched_kv_bytes(s->o->shape);
  s->now += prefill + decode;
  s->out->steps++;
  s->out->rows += rows;
  s->out->output_tokens += rows;
  s->out->total_gb += load.total * token / 1e9;
  s->out->unique_gb += load.unique * token / 1e9;
  const int64_t begin = pkv_clock_ns();
  PKV_TRY(pkv_sched_reward(s->sched, rows, prefill + decode, err));
  s->own_ns += pkv_clock_ns() - begin;
  s->generated += rows;
  for (int32_t i = rows - 1; i >= 0; i--) {
    sim_job *const job = &s->jobs[s->rows[i].job];
    if (job->first < 0) job->first = s->now;
    if (--s->rows[i].left == 0) PKV_TRY(sim_end(s, i, err));
  }
  return PKV_OK;
}

static pkv_status sim_run(sim *s, pkv_error *err) {
  const sched_work *const w = s->o->work;
  while (s->ended < s->inserted || s->next < w->count) {
    double prefill;
    PKV_TRY(sim_insert(s, err));
    PKV_TRY(sim_admit(s, &prefill, err));
    PKV_TRY(sim_check(s, err));
    if (s->row_count > 0) {
      PKV_TRY(sim_decode(s, prefill, err));
    } else if (s->next < w->count && s->ended == s->inserted) {
      s->now = fmax(s->now, w->jobs[s->next].arrival_s);
    } else {
      PKV_CHECK(err, s->ended == s->inserted, PKV_E_INTERNAL,
                "an empty batch, %d requests wait, and none is admitted",
                (int)(s->inserted - s->ended));
    }
  }
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * Results
 * ------------------------------------------------------------------------------------------ */

static double quantile(const double *sorted, int32_t count, double q) {
  return count > 0 ? sorted[(int32_t)((count - 1) * q)] : 0;
}

static void sum_up(sim *s) {
  sched_outcome *const out = s->out;
  const sched_work *const w = s->o->work;
  int32_t n = 0, m = 0;
  double sum = 0, squares = 0;
  for (int32_t i = 0; i < w->count; i++) {
    const sim_job *const job = &s->jobs[i];
    if (job->ended < 0) continue;
    const double speed = w->jobs[i].output / (job->ended - w->jobs[i].arrival_s);
    sum += speed;
    squares += speed * speed;
    out->longest_wait = fmax(out->longest_wait, job->admitted - w->jobs[i].arrival_s);
    s->values[n++] = job->first - w->jobs[i].arrival_s;
  }
  pkv_sort_doubles(s->values, (size_t)n);
  out->ttft_p50 = quantile(s->values, n, 0.5);
  out->ttft_p90 = quantile(s->values, n, 0.9);
  out->ttft_p99 = quantile(s->values, n, 0.99);
  for (int32_t i = 0; i < w->count; i++)
    if (s->jobs[i].ended >= 0 && w->jobs[i].output > 1)
      s->values[m++] = (s->jobs[i].ended - s->jobs[i].first) / (w->jobs[i].output - 1);
  pkv_sort_doubles(s->values, (size_t)m);
  out->tpot_p50 = quantile(s->values, m, 0.5);
  out->tpot_p99 = quantile(s->values, m, 0.99);
  out->requests = n;
  out->jain = squares > 0 ? sum * sum / (n * squares) : 1;
  out->seconds = s->now;
  out->tokens_s = s->now > 0 ? (double)out->output_tokens / s->now : 0;
  out->hit_rate = s->prompt_tokens > 0 ? (double)s->cached_tokens / (double)s->prompt_tokens : 0;
  out->rows = out->steps > 0 ? out->rows / (double)out->steps : 0;
  out->sched_us_step = out->steps > 0 ? (double)s->own_ns / 1e3 / (double)out->steps : 0;
}

static bool learns(const sched_setup *o) {
  return o->learner != NULL && (o->policy == PKV_SCHED_UCB || o->policy == PKV_SCHED_Q_LEARNING);
}

static pkv_status sim_init(sim *s, pkv_error *err) {
  const sched_setup *const o = s->o;
  const size_t count = (size_t)o->work->count;
  pkv_sched_options options = PKV_SCHED_OPTIONS_INIT;
  options.order = o->order;
  options.policy = o->policy;
  options.ageing = o->ageing;
  options.bypass_limit = o->bypass_limit;
  options.max_wait_s = o->max_wait_s;
  options.max_requests = o->work->count + 1;
  options.max_prompt_tokens = 1 << 24;
  options.chunk_tokens = o->work->chunk;
  options.page_tokens = PAGE;
  options.max_rows = o->max_batch;
  options.cost = sim_cost;
  options.cost_ctx = s;
  options.clock = sim_clock;
  options.clock_ctx = s;
  options.seed = o->seed;
  options.ucb_bonus = o->ucb_bonus;
  options.q_rate = o->q_rate;
  options.q_discount = o->q_discount;
  options.q_explore = o->q_explore;
  options.prior_weight = o->prior_weight;
  s->capacity = (int64_t)(o->device->cache_gb * 1e9 / sched_kv_bytes(o->shape) / PAGE);
  s->jobs = sched_alloc(count, sizeof *s->jobs);
  s->values = sched_alloc(count, sizeof *s->values);
  s->rows = sched_alloc((size_t)o->max_batch, sizeof *s->rows);
  PKV_CHECK(err, s->jobs && s->values && s->rows, PKV_E_NOMEM, "no memory for %zu requests", count);
  PKV_TRY(sched_chunks_init(&s->chunks, o->work, err));
  PKV_TRY(pkv_sched_create(&s->sched, &options, err));
  FILE *const table = learns(o) ? fopen(o->learner, "rb") : NULL;
  if (table == NULL) return PKV_OK; /* from the shipped prior */
  (void)fclose(table);
  return pkv_sched_load_learner(s->sched, o->learner, err);
}

pkv_status sched_simulate(sched_outcome *out, const sched_setup *setup, pkv_error *err) {
  sim s = {.o = setup, .out = out};
  memset(out, 0, sizeof *out);
  pkv_status status = sim_init(&s, err);
  if (status == PKV_OK) status = sim_run(&s, err);
  if (status == PKV_OK) sum_up(&s);
  if (status == PKV_OK && learns(setup))
    status = pkv_sched_save_learner(s.sched, setup->learner, err);
  pkv_sched_destroy(s.sched);
  sched_chunks_free(&s.chunks);
  sched_free(s.jobs, (size_t)setup->work->count, sizeof *s.jobs);
  sched_free(s.values, (size_t)setup->work->count, sizeof *s.values);
  sched_free(s.rows, (size_t)setup->max_batch, sizeof *s.rows);
  return status;
}
