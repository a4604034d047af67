/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_cells.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/rng.h"
#include "cli/bench_sched_memory.h"
#include "cli/bench_sched_radix.h"

#define CANCELS 1000

const char *sched_op_name(sched_op op) {
  static const char *const names[SCHED_OPS] = {"insert", "fill", "finish", "best",
                                               "admit",  "step", "cancel"};
  return names[op];
}

const char *sched_subject_name(int32_t subject) {
  if (subject == SCHED_PUBLISHED) return "cht-published";
  return subject == SCHED_RADIX ? "radix-dfs" : pkv_sched_order_name((pkv_sched_order)subject);
}

/* ------------------------------------------------------------------------------------------
 * Prompts
 * ------------------------------------------------------------------------------------------ */

/* How many of request i's tokens come from the prompt of its group, and which that is. */
static int32_t common_tokens(const sched_prompts *p, int32_t i, uint64_t *source) {
  pkv_rng rng;
  *source = 1;
  if (p->groups == SCHED_GROUPS_NONE) return 0;
  pkv_rng_init(&rng, (uint64_t)i);
  if (p->groups == SCHED_GROUPS_CHAIN) return (int32_t)pkv_rng_below(&rng, (uint64_t)p->tokens);
  *source = 1 + pkv_rng_below(&rng, (uint64_t)p->groups);
  return (int32_t)((int64_t)p->tokens * 9 / 10);
}

static void write_prompt(const sched_prompts *p, int32_t i, uint64_t seed) {
  uint64_t source;
  const int32_t common = common_tokens(p, i, &source);
  const int32_t count = p->hashed ? p->hashes : p->tokens;
  const int32_t shared = p->hashed ? common / p->chunk : common;
  int32_t *const tokens = (int32_t *)p->data + (size_t)i * (size_t)p->tokens;
  uint64_t *const hashes = (uint64_t *)p->data + (size_t)i * (size_t)p->hashes;
  pkv_rng rng;
  pkv_rng_init(&rng, seed + (source << 32));
  for (int32_t at = 0; at < count; at++) {
    if (at == shared) pkv_rng_init(&rng, seed + ((uint64_t)i << 8) + 77);
    const uint64_t value = pkv_rng_next(&rng);
    if (p->hashed)
      hashes[at] = value;
    else
      tokens[at] = (int32_t)(value % 128000);
  }
}

pkv_status sched_prompts_init(sched_prompts *out, int32_t waiting, int32_t tokens, int32_t groups,
                              int32_t chunk, size_t limit, uint64_t seed, pkv_error *err) {
  sched_prompts p = {.requests = waiting + SCHED_CELL_BATCH,
                     .tokens = tokens,
                     .groups = groups,
                     .chunk = chunk,
                     .hashes = (tokens + chunk - 1) / chunk};
  memset(out, 0, sizeof *out);
  p.bytes = (size_t)p.requests * (size_t)tokens * sizeof(int32_t);
  if (p.bytes > limit) {
    p.hashed = true;
    p.bytes = (size_t)p.requests * (size_t)p.hashes * sizeof(uint64_t);
  }
  PKV_CHECK(err, p.bytes <= limit, PKV_E_LIMIT,
            "prompts take %zu MiB as digests, the limit is %zu MiB", p.bytes >> 20, limit >> 20);
  p.data = sched_alloc(p.bytes, 1);
  PKV_CHECK(err, p.data, PKV_E_NOMEM, "no memory for prompts of %zu bytes", p.bytes);
  for (int32_t i = 0; i < p.requests; i++)
    write_prompt(&p, i, seed);
  *out = p;
  return PKV_OK;
}

void sched_prompts_free(sched_prompts *prompts) {
  sched_free(prompts->data, prompts->bytes, 1);
  memset(prompts, 0, sizeof *prompts);
}

/* ------------------------------------------------------------------------------------------
 * One repetition
 * ------------------------------------------------------------------------------------------ */

/* Nanoseconds of every call: of this repetition, the least, and all repetitions one by one. */
typedef struct op_log {
  int32_t count, capacity;
  int32_t *least; /* [capacity] */
  int32_t *all;   /* [SCHED_REPEATS][capacity], packed when read */
} op_log;

typedef struct cell_run {
  const sched_prompts *prompts;
  pkv_sched *sched;
  sched_radix *radix; /* instead */
  int64_t now;        /* of the scheduler's clock */
  int32_t *slot;      /* [requests]: id % requests -> prompt; see put() */
  int32_t batch[SCHED_CELL_BATCH], filled;
  int32_t repeat;
  uint64_t checksum; /* of what was picked */
  op_log log[SCHED_OPS];
} cell_run;

static int64_t counter(void *ctx) {
  cell_run *const r = ctx;
  return r->now;
}

static void note(cell_run *r, sched_op op, int64_t ns) {
  op_log *const log = &r->log[op];
  if (log->count == log->capacity) return;
  const int32_t value = ns > INT32_MAX ? INT32_MAX : (int32_t)ns;
  const size_t at = (size_t)log->count++;
  if (r->repeat == 0 || value < log->least[at]) log->least[at] = value;
  log->all[(size_t)r->repeat * (size_t)log->capacity + at] = value;
}

/* Request ids are generation * requests + prompt, so that the prompt follows from the id. */
static pkv_status put(cell_run *r, int32_t prompt, int64_t *ns, pkv_error *err) {
  const sched_prompts *const p = r->prompts;
  pkv_sched_request request = PKV_SCHED_REQUEST_INIT;
  if (r->radix != NULL) {
    const int64_t start = pkv_clock_ns();
    sched_radix_insert(r->radix, prompt);
    *ns = pkv_clock_ns() - start;
    return PKV_OK;
  }
  request.id = (uint64_t)r->slot[prompt]++ * (uint64_t)p->requests + (uint64_t)prompt;
  request.prompt_tokens = p->tokens;
  request.output_tokens = 100;
  if (p->hashed) {
    request.hashes = (const uint64_t *)p->data + (size_t)prompt * (size_t)p->hashes;
    request.hash_count = p->hashes;
  } else {
    request.tokens = (const int32_t *)p->data + (size_t)prompt * (size_t)p->tokens;
  }
  r->now += 1000;
  const int64_t begin = pkv_clock_ns();
  const pkv_status status = pkv_sched_insert(r->sched, &request, err);
  *ns = pkv_clock_ns() - begin;
  return status;
}

static uint64_t held_id(const cell_run *r, int32_t prompt) {
  return (uint64_t)(r->slot[prompt] - 1) * (uint64_t)r->prompts->requests + (uint64_t)prompt;
}

/* A pass takes longer than the time slices of a busy machine, so the processor's time counts. */
static int64_t pass_clock(void) {
  struct timespec used;
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) != 0) return pkv_clock_ns();
  return (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}

/* What the radix tree says that the batch has of a prompt, now and then, against the prompts. */
static pkv_status check_match(const cell_run *r, int32_t at, pkv_error *err) {
  const sched_prompts *const p = r->prompts;
  const size_t unit = p->hashed ? sizeof(uint64_t) : sizeof(int32_t);
  const int32_t units = p->hashed ? p->hashes : p->tokens;
  const char *const own = (const char *)p->data + (size_t)r->batch[at] * (size_t)units * unit;
  int32_t most = 0;
  if (r->repeat > 0 || r->log[SCHED_OP_STEP].count > 20) return PKV_OK;
  for (int32_t i = 0; i < r->filled; i++) {
    const char *const other = (const char *)p->data + (size_t)r->batch[i] * (size_t)units * unit;
    if (i == at) continue;
    while (most < units && memcmp(own, other, ((size_t)most + 1) * unit) == 0)
      most++;
  }
  const int32_t got = sched_radix_match(r->radix, r->batch[at]);
  PKV_CHECK(err, got == most, PKV_E_INTERNAL, "prompt %d: the radix tree has %d, the batch %d",
            (int)r->batch[at], (int)got, (int)most);
  return PKV_OK;
}

/* The same of the radix tree; a ranking serves as long as only admissions follow. */
static pkv_status take_ranked(cell_run *r, int32_t at, int64_t *best_ns, int64_t *admit_ns,
                              bool again, pkv_error *err) {
  int32_t *const prompt = &r->batch[at];
  const int64_t begin = pass_clock();
  *prompt = again ? sched_radix_pass(r->radix) : sched_radix_next(r->radix);
  const int64_t middle = pass_clock();
  PKV_CHECK(err, *prompt >= 0, PKV_E_INTERNAL, "nothing waits");
  PKV_TRY(check_match(r, at, err));
  sched_radix_admit(r->radix, *prompt);
  *admit_ns = pass_clock() - middle;
  *best_ns = middle - begin;
  r->checksum = (r->checksum ^ (uint64_t)*prompt) * UINT64_C(0x9e3779b97f4a7c15);
  return PKV_OK;
}

/* best and admit, into the batch. `again`: something has changed since. */
static pkv_status take(cell_run *r, int32_t at, int64_t *best_ns, int64_t *admit_ns, bool again,
                       pkv_error *err) {
  if (r->radix != NULL) return take_ranked(r, at, best_ns, admit_ns, again, err);
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  const int64_t begin = pkv_clock_ns();
  PKV_TRY(pkv_sched_best(&pick, r->sched, -1, err));
  const int64_t middle = pkv_clock_ns();
  PKV_CHECK(err, pick.verdict == PKV_SCHED_ADD, PKV_E_INTERNAL, "verdict %d of a full queue",
            (int)pick.verdict);
  PKV_TRY(pkv_sched_admit(r->sched, pick.id, err));
  *admit_ns = pkv_clock_ns() - middle;
  *best_ns = middle - begin;
  r->batch[at] = (int32_t)(pick.id % (uint64_t)r->prompts->requests);
  r->checksum = (r->checksum ^ pick.id) * UINT64_C(0x9e3779b97f4a7c15);
  return PKV_OK;
}

static pkv_status one_step(cell_run *r, int32_t at, pkv_error *err) {
  const int32_t ended = r->batch[at];
  int64_t best = 0, admit = 0, insert;
  r->now += 5000000;
  const int64_t begin = r->radix != NULL ? pass_clock() : pkv_clock_ns();
  if (r->radix != NULL)
    sched_radix_finish(r->radix, ended);
  else
    PKV_TRY(pkv_sched_finish(r->sched, held_id(r, ended), err));
  const int64_t finish = (r->radix != NULL ? pass_clock() : pkv_clock_ns()) - begin;
  PKV_TRY(take(r, at, &best, &admit, true, err));
  note(r, SCHED_OP_FINISH, finish);
  note(r, SCHED_OP_BEST, best);
  note(r, SCHED_OP_ADMIT, admit);
  note(r, SCHED_OP_STEP, finish + best + admit);
  return put(r, ended, &insert, err);
}

static pkv_status cancel_some(cell_run *r, uint64_t seed, pkv_error *err) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed + 5);
  const int32_t tries = r->log[SCHED_OP_CANCEL].capacity;
  for (int32_t i = 0; i < tries; i++) {
    const int32_t prompt = (int32_t)pkv_rng_below(&rng, (uint64_t)r->prompts->requests);
    const uint64_t id = held_id(r, prompt);
    if (pkv_sched_get_state(r->sched, id) != PKV_SCHED_WAITING) continue;
    const int64_t begin = pkv_clock_ns();
    PKV_TRY(pkv_sched_cancel(r->sched, id, err));
    note(r, SCHED_OP_CANCEL, pkv_clock_ns() - begin);
  }
  return PKV_OK;
}

/* *steps: how many; in the first repetition it falls to what fits `seconds`, the filling apart. */
static pkv_status repetition(cell_run *r, sched_cell *out, int32_t *steps, double seconds,
                             uint64_t seed, pkv_error *err) {
  int64_t ns, best = 0, admit = 0, fill = 0;
  for (int32_t i = 0; i < r->prompts->requests; i++) {
    PKV_TRY(put(r, i, &ns, err));
    note(r, SCHED_OP_INSERT, ns);
  }
  for (int32_t i = 0; i < SCHED_CELL_BATCH; i++) {
    PKV_TRY(take(r, i, &best, &admit, i == 0, err));
    r->filled++;
    fill += best + admit;
  }
  note(r, SCHED_OP_FILL, fill);
  const int64_t begin = pkv_clock_ns();
  for (int32_t i = 0; i < *steps; i++) {
    PKV_TRY(one_step(r, i % SCHED_CELL_BATCH, err));
    if (r->repeat == 0 && i >= 9 && (double)(pkv_clock_ns() - begin) > seconds * 1e9)
      *steps = i + 1;
  }
  pkv_sched_stats stats = PKV_SCHED_STATS_INIT;
  if (r->radix != NULL) return PKV_OK;
  pkv_sched_get_stats(&stats, r->sched);
  out->used_bytes = (double)stats.used_bytes / (double)r->prompts->requests;
  out->memory_bytes = (double)stats.memory_bytes;
  return cancel_some(r, seed, err);
}

/* ------------------------------------------------------------------------------------------
 * A cell
 * ------------------------------------------------------------------------------------------ */

static int ascending(const void *a, const void *b) {
  const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

static double mean_us(const int32_t *ns, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += ns[i];
  return count > 0 ? sum / 1e3 / (double)count : 0;
}

static void quantiles(double *p50, double *p99, double *max, int32_t *ns, size_t count) {
  *p50 = *p99 = *max = 0;
  if (count == 0) return;
  qsort(ns, count, sizeof *ns, ascending);
  *p50 = ns[(count - 1) / 2] / 1e3;
  *p99 = ns[(count - 1) * 99 / 100] / 1e3;
  *max = ns[count - 1] / 1e3;
}

static void sum_up(sched_times *out, op_log *log, int32_t repeats) {
  const size_t count = (size_t)log->count;
  out->count = log->count;
  for (int32_t k = 1; k < repeats; k++)
    memmove(log->all + (size_t)k * count, log->all + (size_t)k * (size_t)log->capacity,
            count * sizeof *log->all);
  out->mean = mean_us(log->least, count);
  quantiles(&out->p50, &out->p99, &out->max, log->least, count);
  quantiles(&out->raw_p50, &out->raw_p99, &out->raw_max, log->all, count * (size_t)repeats);
}

static pkv_status logs_init(cell_run *r, int32_t steps, pkv_error *err) {
  for (int32_t op = 0; op < SCHED_OPS; op++) {
    op_log *const log = &r->log[op];
    log->capacity = op == SCHED_OP_INSERT   ? r->prompts->requests
                    : op == SCHED_OP_FILL   ? 1
                    : op == SCHED_OP_CANCEL ? CANCELS
                                            : steps;
    log->least = sched_alloc((size_t)log->capacity, sizeof(int32_t));
    log->all = sched_alloc((size_t)log->capacity * SCHED_REPEATS, sizeof(int32_t));
    PKV_CHECK(err, log->least && log->all, PKV_E_NOMEM, "no memory for the times of %d calls",
              (int)log->capacity);
  }
  r->slot = sched_alloc((size_t)r->prompts->requests, sizeof(int32_t));
  PKV_CHECK(err, r->slot, PKV_E_NOMEM, "no memory for %d requests", (int)r->prompts->requests);
  return PKV_OK;
}

static void logs_free(cell_run *r) {
  for (int32_t op = 0; op < SCHED_OPS; op++) {
    const size_t count = (size_t)r->log[op].capacity;
    sched_free(r->log[op].least, count, sizeof(int32_t));
    sched_free(r->log[op].all, count * SCHED_REPEATS, sizeof(int32_t));
  }
  sched_free(r->slot, (size_t)r->prompts->requests, sizeof(int32_t));
}

static pkv_status start(cell_run *r, int32_t subject, uint64_t seed, pkv_error *err) {
  pkv_sched_options options = PKV_SCHED_OPTIONS_INIT;
  if (subject == SCHED_RADIX) return sched_radix_create(&r->radix, r->prompts, err);
  options.order = subject == SCHED_PUBLISHED ? PKV_SCHED_CHT : (pkv_sched_order)subject;
  if (subject == SCHED_PUBLISHED) {
    options.faults = PKV_SCHED_FAULTS_ALL;
    options.hash = PKV_SCHED_HASH_TOKENWISE;
  }
  options.max_requests = r->prompts->requests + 1;
  options.max_prompt_tokens = r->prompts->tokens;
  options.chunk_tokens = r->prompts->chunk;
  options.ageing =
      PKV_SCHED_AGEING_OLDEST; /* EACH would make every order first come, first served */
  options.clock = counter;
  options.clock_ctx = r;
  options.seed = seed;
  return pkv_sched_create(&r->sched, &options, err);
}

static pkv_status one_repetition(cell_run *r, sched_cell *out, int32_t subject, int32_t *steps,
                                 double seconds, uint64_t seed, pkv_error *err) {
  r->now = 1;
  r->checksum = 0;
  r->filled = 0;
  for (int32_t op = 0; op < SCHED_OPS; op++)
    r->log[op].count = 0;
  memset(r->slot, 0, (size_t)r->prompts->requests * sizeof *r->slot);
  PKV_TRY(start(r, subject, seed, err));
  const pkv_status status = repetition(r, out, steps, seconds, seed, err);
  pkv_sched_destroy(r->sched);
  sched_radix_destroy(r->radix);
  r->sched = NULL;
  r->radix = NULL;
  return status;
}

pkv_status sched_cell_run(sched_cell *out, const sched_prompts *prompts, int32_t subject,
                          int32_t steps, double seconds, int32_t repeats, uint64_t seed,
                          pkv_error *err) {
  cell_run r = {.prompts = prompts};
  uint64_t first = 0;
  memset(out, 0, sizeof *out);
  out->repeats = repeats;
  pkv_status status = logs_init(&r, steps, err);
  for (r.repeat = 0; r.repeat < repeats && status == PKV_OK; r.repeat++) {
    status = one_repetition(&r, out, subject, &steps, seconds, seed, err);
    if (r.repeat == 0) first = r.checksum;
    if (status == PKV_OK && r.checksum != first)
      status = PKV_FAIL(err, PKV_E_INTERNAL, "repetition %d picked other requests than the first",
                        (int)r.repeat + 1);
  }
  for (int32_t op = 0; op < SCHED_OPS && status == PKV_OK; op++)
    sum_up(&out->op[op], &r.log[op], repeats);
  logs_free(&r);
  return status;
}
