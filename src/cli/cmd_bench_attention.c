/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench attention`: every route on the seed's traces and on fixed mixes of lengths, against a
 * null read and a plain read of the same bytes by the same number of threads in the same run.
 *
 * Order of the measuring: for each repetition, for each step of the cell, every route and both
 * reads one after another, starting one further each time; so what the machine does in the meantime
 * hits all of them. Figures are medians over repetitions, then means over steps. Each call gets the
 * batch at another place of the storage. Before anything of a cell is timed, each route's
 * output is compared with the reference executor's for its shortest rows.
 */
#include "cli/commands.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/json_memory.h"
#include "base/rng.h"
#include "base/sort.h"
#include "base/text.h"
#include "cli/bench_attention.h"
#include "cli/bench_chosen.h"
#include "cli/bench_fma.h"
#include "cli/bench_store.h"

#define MAX_REPEATS  BENCH_MAX_REPEATS
#define MAX_THREADS  8    /* different thread counts in one run */
#define MOST_CHECKED 1e-4 /* float sums against double ones, relative to the largest output */
#define ROUTES       6
#define COLD_BYTES   (INT64_C(1) << 30) /* read in between before a page is read again */

#define CPU_REPEATS 5
#define CPU_MIB     4096

static const char *const route_choices[] = {
    "all",      "bucket_exact", "bucket_padded",   "split",      "workqueue",
    "balanced", "shared",       "workqueue_fused", "flashinfer", "flashinfer_cores",
    NULL};
static const char *const device_choices[] = {"cpu", "cuda", NULL};
static const char *const graph_choices[] = {"one", "each", NULL};
static const char *const dtype_choices[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};
static const char *const layout_choices[] = {"hnd", "nhd", "interleaved", NULL};
static const char *const isa_choices[] = {"auto",   "reference", "scalar", "avx2",
                                          "avx512", "neon",      NULL};

#define O bench_options
static const pkv_option options_table[] = {
    PKV_CHOICE(O, device, 0, "device", device_choices, "cpu", "where to measure"),
    PKV_TEXT(
        O, cells, 0, "cells", "NAMES|FILE", NULL,
        "built-in cells, separated by commas; or a file of lines NAME LENGTH LENGTH ..., known "
        "by a '/' or '.' in its name"),
    PKV_TEXT(O, anchors, 0, "anchors", "FILE", NULL,
             "cells from JSON with what others were measured at: h200_decode_anchors.json"),
    PKV_TEXT(O, lengths, 0, "lengths", "LIST", NULL,
             "one more cell: 1024,4096x3; 8x32x2048+128 = 8 groups of 32 rows that share 2048 "
             "tokens and have 128 more each; 512/8x32x2048+128 = and 512 before that all share"),
    PKV_TEXT(O, trace_file, 0, "trace", "FILE", NULL,
             "one more cell: requests from CSV or JSON (prompt_len, decode_len, arrival)"),
    PKV_TEXT(O, mooncake, 0, "mooncake", "FILE", NULL,
             "one more cell: Mooncake's requests, --active that arrived one after another at "
             "--steps places of the file; equal hash_ids are one block of 512 tokens"),
    PKV_TEXT(O, only, 0, "only", "NAMES", NULL, "of all these cells the ones named"),
    PKV_INT(O, active, 0, "active", "N", "8", 1, 4096, "rows together of --trace and --mooncake"),
    PKV_CHOICE(O, route, 'r', "route", route_choices, "all",
               "route to measure; shared: with balanced beside it (all: where rows share); "
               "flashinfer: its kernels on tensor cores"),
    PKV_TEXT(O, threads, 't', "threads", "LIST", "0",
             "thread counts, separated by commas; 0 = all cores"),
    PKV_CHOICE(O, isa, 0, "isa", isa_choices, "auto", "instruction set"),
    PKV_CHOICE(O, dtype, 0, "kv-dtype", dtype_choices, "f16", "element type of the cache"),
    PKV_CHOICE(O, layout, 0, "layout", layout_choices, "hnd",
               "order of a page's elements; interleaved (GPU): nhd with K and V in one page"),
    PKV_INT(O, query_heads, 0, "query-heads", "N", "32", 1, 1024, "query heads"),
    PKV_INT(O, kv_heads, 0, "kv-heads", "N", "8", 1, 1024, "KV heads"),
    PKV_INT(O, head_dim, 0, "head-dim", "N", "128", 8, 256, "head dimension"),
    PKV_INT(O, page_tokens, 0, "page", "TOKENS", "16", 1, 1024, "tokens of a page"),
    PKV_INT(O, q_len, 0, "q-len", "N", "1", 1, 64, "query tokens of a row"),
    PKV_INT(O, window, 0, "window", "TOKENS", "0", 0, 1 << 24, "sliding window; 0 = none"),
    PKV_INT(O, parts, 0, "parts", "N", "0", 0, 65536, "parts of balanced; 0 = default"),
    PKV_INT(O, splits, 0, "splits", "N", "32", 1, 1024, "S of split and the bucket routes"),
    PKV_INT(O, bucket, 0, "bucket", "TOKENS", "0", 0, 1 << 20,
            "bucket_padded rounds lengths up to this; 0 = default"),
    PKV_INT(O, segment_cost, 0, "segment-cost", "N", "0", 0, 1 << 20,
            "balanced: what starting a row costs where a tile of 64 tokens costs 8; 0 = default"),
    PKV_TEXT(O, shared_costs, 0, "shared-costs", "LIST", NULL,
             "shared: what 64 tokens of a row cost, starting it, 64 tokens of a node, each row of "
             "it besides, starting a node; like 64,120,96,0,384; default: the library's"),
    PKV_FLAG(O, invariant, 0, "batch-invariant",
             "balanced and shared in their batch-invariant mode"),
    PKV_FLAG(O, chained, 0, "chained",
             "shared: plans may search, as equal pages have equal pages before them"),
    PKV_FLAG(O, rows_permuted, 0, "rows-permuted", "the rows of each batch in another order"),
    PKV_INT(O, steps, 0, "steps", "N", "4", 1, 64,
            "steps of a trace or of Mooncake's requests, evenly spread"),
    PKV_INT(O, repeats, 'n', "repeats", "N", "0", 0, MAX_REPEATS,
            "repetitions of each step; 0 = 5, on a GPU 25"),
    PKV_INT(O, memory_mib, 0, "memory", "MIB", "0", 0, 1 << 20,
            "largest cache storage; 0 = 4096, on a GPU three quarters of what is free"),
    PKV_INT(O, check_tokens, 0, "check", "TOKENS", "8192", 0, 1 << 24,
            "cached tokens to compare with the reference first; 0 = none (on a GPU: all or none)"),
    PKV_INT(O, needles, 0, "needles", "N", "32", 0, 65536,
            "GPU: pages of each row that hold the only key that counts, one after another"),
    PKV_CHOICE(O, graphs, 0, "graphs", graph_choices, "one",
               "GPU: all that is compared in one graph, or each in a graph of its own"),
    PKV_INT(O, seed, 0, "seed", "N", "20260623", 1, INT64_C(4294967295), "of traces and data"),
    PKV_FLAG(O, best, 0, "best", "shortest repetition instead of the median, for a busy machine"),
    PKV_FLAG(O, cpu_time, 0, "cpu-time",
             "CPU time over threads instead of the clock, for a busy machine"),
    PKV_FLAG(O, huge, 0, "huge-pages", "cache storage on transparent huge pages"),
    PKV_TEXT(O, policy, 0, "policy", "POLICY", NULL,
             "each batch by the route that static, roofline, calibrated or fixed:ROUTE chooses, "
             "beside the fastest"),
    PKV_TEXT(O, profile, 'p', "profile", "FILE", NULL, "--policy: what pkv calibrate wrote"),
    PKV_TEXT(O, flashinfer, 0, "flashinfer", "FILE", NULL,
             "on a GPU: FlashInfer's kernels; default: pkv_flashinfer.so beside the program"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "append result rows"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
    PKV_FLAG(O, json, 0, "json", "print one JSON object instead of the table"),
};
#undef O

typedef struct bench {
  bench_frame frame;
  const bench_options *o;
  int32_t routes, thread_counts, repeats; /* routes: of the cell */
  bool shares;                            /* route shared is one of them */
  pkv_route route[ROUTES];
  int32_t threads[MAX_THREADS];
  bench_store store;
  uint64_t checksum; /* of the reads, so that they are not for nothing */
} bench;

/* What a cell needs in memory besides the store; sized for its largest batch. */
typedef struct scratch {
  float *q, *out, *expected;
  int32_t *ids;
  void *plan, *workspace;
  size_t q_bytes, ids_bytes, plan_bytes, workspace_bytes;
} scratch;

/* Nanoseconds: of the clock, or what this process has used of each of its `threads` cores. */
static int64_t now_ns(const bench *b, int32_t threads) {
  struct timespec used;
  if (!b->o->cpu_time || clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) != 0) return pkv_clock_ns();
  return ((int64_t)used.tv_sec * 1000000000 + used.tv_nsec) / threads;
}

/* "64,120,96,0,384" into the costs of route shared; false: it is no such list. */
static bool take_costs(pkv_plan_options *options, const char *text) {
  uint32_t *const to[] = {&options->tile_cost, &options->segment_cost, &options->node_tile_cost,
                          &options->node_row_cost, &options->node_segment_cost};
  for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
    char word[12];
    const size_t size = strcspn(text, ",");
    int64_t cost;
    if (size == 0 || size >= sizeof word || (text[size] == ',') != (i < 4)) return false;
    memcpy(word, text, size);
    word[size] = '\0';
    if (!pkv_parse_i64(&cost, word, 0, 1 << 20)) return false;
    *to[i] = (uint32_t)cost;
    text += size + (text[size] == ',');
  }
  return true;
}

pkv_plan_options bench_plan_options(const bench_options *o, pkv_route route) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = route;
  options.parts = o->parts;
  if (route != PKV_ROUTE_WORKQUEUE) options.splits = o->splits;
  options.bucket_tokens = o->bucket;
  options.segment_cost = (uint32_t)o->segment_cost;
  if (o->invariant && (route == PKV_ROUTE_BALANCED || route == PKV_ROUTE_SHARED))
    options.flags = PKV_PLAN_BATCH_INVARIANT;
  if (route == PKV_ROUTE_SHARED && o->shared_costs != NULL)
    (void)take_costs(&options, o->shared_costs);
  return options;
}

static void scratch_free(scratch *s) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, s->q, s->q_bytes);
  pkv_free(&a, s->out, s->q_bytes);
  pkv_free(&a, s->expected, s->q_bytes);
  pkv_free(&a, s->ids, s->ids_bytes);
  pkv_free(&a, s->plan, s->plan_bytes);
  pkv_free(&a, s->workspace, s->workspace_bytes);
}

static pkv_status scratch_init(scratch *s, const bench *b, const bench_cell *cell, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  int64_t rows = 1, entries = 1;
  memset(s, 0, sizeof *s);
  for (int32_t i = 0; i < cell->count; i++) {
    const bench_batch *batch = &cell->batches[i];
    const int64_t count = (int64_t)batch->rows * batch->max_pages;
    if (batch->rows > rows) rows = batch->rows;
    if (count > entries) entries = count;
    int32_t longest = 0;
    for (int32_t row = 0; row < batch->rows; row++)
      if (batch->lengths[row] > longest) longest = batch->lengths[row];
    for (int32_t r = 0; r < b->routes; r++) {
      const pkv_plan_options options = bench_plan_options(b->o, b->route[r]);
      size_t plan, workspace;
      PKV_TRY(
          pkv_plan_size(&plan, &workspace, &b->frame.shape, &options, batch->rows, longest, err));
      if (plan > s->plan_bytes) s->plan_bytes = plan;
      if (workspace > s->workspace_bytes) s->workspace_bytes = workspace;
    }
  }
  if (s->workspace_bytes == 0) s->workspace_bytes = 64;
  s->q_bytes = (size_t)rows * (size_t)b->frame.shape.q_len * (size_t)b->frame.shape.query_heads *
               (size_t)b->frame.shape.head_dim * sizeof(float);
  s->ids_bytes = (size_t)entries * sizeof(int32_t);
  s->q = pkv_alloc(&a, s->q_bytes);
  s->out = pkv_alloc(&a, s->q_bytes);
  s->expected = pkv_alloc(&a, s->q_bytes);
  s->ids = pkv_alloc(&a, s->ids_bytes);
  s->plan = pkv_alloc(&a, s->plan_bytes);
  s->workspace = pkv_alloc(&a, s->workspace_bytes);
  PKV_CHECK(err, s->q && s->out && s->expected && s->ids && s->plan && s->workspace, PKV_E_NOMEM,
            "no memory for %lld rows", (long long)rows);
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)b->o->seed + 1);
  for (size_t i = 0; i < s->q_bytes / sizeof(float); i++)
    s->q[i] = (float)pkv_rng_normal(&rng);
  memset(s->workspace, 0xff, s->workspace_bytes); /* NaN: it needs no initialisation */
  return PKV_OK;
}

static pkv_status build_plan(const pkv_plan **out, const bench *b, const scratch *s,
                             const pkv_plan_options *options, const bench_batch *batch,
                             pkv_error *err) {
  pkv_sharing sharing = PKV_SHARING_INIT;
  if (options->route != PKV_ROUTE_SHARED)
    return pkv_plan_build(out, s->plan, s->plan_bytes, &b->frame.shape, options, batch->rows,
                          batch->lengths, err);
  sharing.flags = b->o->chained ? PKV_TABLE_CHAINED : 0u;
  sharing.block_table = s->ids;
  sharing.max_pages = batch->max_pages;
  return pkv_plan_build_shared(out, s->plan, s->plan_bytes, &b->frame.shape, options, batch->rows,
                               batch->lengths, &sharing, err);
}

/* One attention call over the batch's rows as they lie in s->ids; times in nanoseconds. */
static pkv_status attend(const bench *b, const scratch *s, pkv_executor *executor,
                         const pkv_plan_options *options, const bench_batch *batch, float *out,
                         int64_t *plan_ns, int64_t *attend_ns, pkv_plan_stats *stats,
                         pkv_error *err) {
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  const int32_t threads = pkv_executor_threads(executor);
  const int64_t t0 = now_ns(b, 1); /* the plan is built by this thread alone */
  PKV_TRY(build_plan(&args.plan, b, s, options, batch, err));
  *plan_ns = now_ns(b, 1) - t0;
  const int64_t t1 = now_ns(b, threads);
  args.cache = &b->store.cache;
  args.block_table = s->ids;
  args.max_pages = batch->max_pages;
  args.q = s->q;
  args.out = out;
  args.workspace = s->workspace;
  args.workspace_bytes = s->workspace_bytes;
  PKV_TRY(pkv_attention_run(executor, &args, err));
  *attend_ns = now_ns(b, threads) - t1;
  return stats ? pkv_plan_get_stats(stats, args.plan, b->store.cache.dtype, err) : PKV_OK;
}

/* The batch's shortest rows of at most `budget` tokens together, at least one: marks them in keep.
 */
static void choose_rows(const bench_batch *batch, int64_t budget, unsigned char *keep) {
  int64_t used = 0;
  memset(keep, 0, (size_t)batch->rows);
  for (int32_t n = 0; n < batch->rows; n++) {
    int32_t best = -1;
    for (int32_t row = 0; row < batch->rows; row++)
      if (!keep[row] && (best < 0 || batch->lengths[row] < batch->lengths[best])) best = row;
    used += batch->lengths[best];
    if (n > 0 && used > budget) return;
    keep[best] = 1;
  }
}

/*
 * The first batch by every route against the reference executor, the other rows emptied for the
 * latter. *error[route]: the largest difference over the largest value.
 */
static pkv_status check(bench *b, scratch *s, const bench_cell *cell, pkv_executor *executor,
                        double *error, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const bench_batch *batch = &cell->batches[0];
  const size_t rows = (size_t)batch->rows;
  const size_t stride = (size_t)b->frame.shape.q_len * (size_t)b->frame.shape.query_heads *
                        (size_t)b->frame.shape.head_dim;
  pkv_executor_options reference = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *oracle = NULL;
  int64_t ns[2];
  pkv_status status = PKV_OK;
  bench_batch few = *batch;
  unsigned char *keep = pkv_alloc_zeroed(&a, rows, 1);
  few.lengths = pkv_alloc_zeroed(&a, rows, sizeof(int32_t));
  if (keep == NULL || few.lengths == NULL) {
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu rows", rows);
    goto done;
  }
  choose_rows(batch, b->o->check_tokens, keep);
  for (size_t row = 0; row < rows; row++)
    few.lengths[row] = keep[row] ? batch->lengths[row] : 0;
  bench_store_place(s->ids, &b->store, batch);
  reference.isa = PKV_ISA_REFERENCE;
  status = pkv_executor_create(&oracle, &reference, err);
  if (status != PKV_OK) goto done;
  const pkv_plan_options whole = bench_plan_options(b->o, b->route[0]);
  status = attend(b, s, oracle, &whole, &few, s->expected, &ns[0], &ns[1], NULL, err);
  for (int32_t r = 0; r < b->routes && status == PKV_OK; r++) {
    const pkv_plan_options options = bench_plan_options(b->o, b->route[r]);
    double most = 0, largest = 0;
    memset(s->workspace, 0xff, s->workspace_bytes);
    status = attend(b, s, executor, &options, batch, s->out, &ns[0], &ns[1], NULL, err);
    for (size_t i = 0; i < rows * stride && status == PKV_OK; i++) {
      if (!keep[i / stride]) continue;
      const double difference = fabs((double)s->out[i] - (double)s->expected[i]);
      if (!(difference <= most)) most = difference; /* NaN is not smaller */
      if (fabs((double)s->expected[i]) > largest) largest = fabs((double)s->expected[i]);
    }
    error[r] = largest > 0 ? most / largest : most;
    if (status == PKV_OK && !(error[r] <= MOST_CHECKED))
      status = PKV_FAIL(err, PKV_E_INTERNAL, "%s on %s is wrong: error %g, at most %g",
                        pkv_route_name(b->route[r]), cell->name, error[r], MOST_CHECKED);
  }
done:
  pkv_executor_destroy(oracle);
  pkv_free(&a, keep, rows);
  pkv_free(&a, few.lengths, rows * sizeof(int32_t));
  return status;
}

double bench_median(double *values, int32_t count) {
  pkv_sort_doubles(values, (size_t)count);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* What stands for the repetitions: their median, or with --best their minimum. */
static double typical_us(const bench *b, double *ns, int32_t count) {
  const double middle = bench_median(ns, count);
  return (b->o->best ? ns[0] : middle) / 1e3;
}

/* Times of one step in nanoseconds, by repetition. */
typedef struct step_times {
  double attend[ROUTES][MAX_REPEATS], plan[ROUTES][MAX_REPEATS];
  double null[MAX_REPEATS], plain[MAX_REPEATS], fma[MAX_REPEATS];
  double fma_flops;
  pkv_plan_stats stats[ROUTES];
} step_times;

/* What is timed beside the routes, by number. The FMA rate right behind route shared: the clock
   follows what the cores just did. */
enum { NULL_READ, PLAIN_READ, OTHERS, FMA_RATE = OTHERS };

static void measure_other(bench *b, step_times *t, int32_t n, int32_t which,
                          const bench_batch *batch, const int32_t *ids, pkv_workers *workers,
                          pkv_isa isa) {
  double *const into[] = {t->null, t->plain, t->fma};
  const int32_t threads = pkv_workers_threads(workers);
  const int64_t start = now_ns(b, threads);
  if (which == NULL_READ) b->checksum += bench_null_read(workers, &b->store, batch, ids);
  if (which == PLAIN_READ)
    b->checksum += bench_plain_read(workers, &b->store, bench_store_bytes(&b->store, batch));
  if (which == FMA_RATE) b->checksum += (uint64_t)bench_fma_run(&t->fma_flops, workers, isa);
  into[which][n] = (double)(now_ns(b, threads) - start);
}

/* Products and sums of one attention call over the batch: of scores and of values. */
static double flops_of(const bench *b, const bench_batch *batch) {
  const pkv_shape *shape = &b->frame.shape;
  double pairs = 0;
  for (int32_t row = 0; row < batch->rows; row++)
    for (int32_t t = 0; t < shape->q_len; t++) {
      const int64_t seen = (int64_t)batch->lengths[row] - shape->q_len + t + 1;
      if (seen > 0)
        pairs += (double)(shape->window > 0 && seen > shape->window ? shape->window : seen);
    }
  return 4 * pairs * shape->query_heads * shape->head_dim;
}

static pkv_status add_step(bench *b, step_times *t, const bench_batch *batch, bench_result *results,
                           pkv_error *err) {
  const int32_t repeats = b->repeats;
  double balanced_us = 0;
  for (int32_t r = 0; r < b->routes; r++) {
    PKV_TRY(bench_result_raw(&results[r], "gpu", t->attend[r], repeats, 1e3, err));
    PKV_TRY(bench_result_raw(&results[r], "plan", t->plan[r], repeats, 1e3, err));
    PKV_TRY(bench_result_raw(&results[r], "null", t->null, repeats, 1e3, err));
    PKV_TRY(bench_result_raw(&results[r], "plain", t->plain, repeats, 1e3, err));
    if (t->fma_flops > 0) PKV_TRY(bench_result_raw(&results[r], "fma", t->fma, repeats, 1e3, err));
  }
  const double null_us = typical_us(b, t->null, repeats),
               plain_us = typical_us(b, t->plain, repeats), fma_us = typical_us(b, t->fma, repeats);
  for (int32_t r = 0; r < b->routes; r++) {
    const pkv_plan_stats *stats = &t->stats[r];
    const double us = typical_us(b, t->attend[r], repeats);
    if (b->route[r] == PKV_ROUTE_BALANCED) balanced_us = us;
    results[r].rows += batch->rows;
    results[r].launches += stats->launches;
    results[r].tasks += (double)stats->tasks;
    results[r].plan_us += typical_us(b, t->plan[r], repeats);
    results[r].attend_us += us;
    results[r].null_us += null_us;
    results[r].plain_us += plain_us;
    results[r].kv_bytes += (double)stats->unique_kv_bytes;
    results[r].total_bytes += (double)stats->total_kv_bytes;
    results[r].padded_bytes += (double)stats->padded_kv_bytes;
    results[r].state_bytes += (double)stats->merge_state_bytes;
    results[r].nodes += (double)stats->nodes;
    results[r].tile_fill += stats->tile_fill;
    if (t->fma_flops > 0) results[r].fma_us += fma_us * flops_of(b, batch) / t->fma_flops;
    if (b->route[r] == PKV_ROUTE_SHARED) results[r].balanced_us += balanced_us;
  }
  return PKV_OK;
}

/* One step, all contenders interleaved; adds its medians and counters to results[routes]. */
static pkv_status measure_step(bench *b, scratch *s, const bench_batch *batch,
                               pkv_executor *executor, pkv_workers *workers, bench_result *results,
                               pkv_error *err) {
  step_times t;
  const int32_t contenders = b->routes + OTHERS;
  const pkv_isa isa = pkv_executor_isa(executor);
  memset(&t, 0, sizeof t);
  for (int32_t n = 0; n < b->repeats; n++)
    for (int32_t i = 0; i < contenders; i++) {
      const int32_t which = (i + n) % contenders;
      bench_store_place(s->ids, &b->store, batch);
      if (which < b->routes) {
        const pkv_plan_options options = bench_plan_options(b->o, b->route[which]);
        int64_t plan, run;
        t.stats[which] = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
        PKV_TRY(attend(b, s, executor, &options, batch, s->out, &plan, &run, &t.stats[which], err));
        t.plan[which][n] = (double)plan;
        t.attend[which][n] = (double)run;
        if (b->route[which] == PKV_ROUTE_SHARED)
          measure_other(b, &t, n, FMA_RATE, batch, s->ids, workers, isa);
      } else {
        measure_other(b, &t, n, which - b->routes, batch, s->ids, workers, isa);
      }
      if (pkv_cli_interrupted()) return PKV_FAIL(err, PKV_E_STATE, "interrupted");
    }
  return add_step(b, &t, batch, results, err);
}

pkv_status bench_report(bench_frame *frame, const bench_result *result, pkv_error *err) {
  if (frame->o->json)
    pkv_json_add(&frame->rows, bench_json_row(result));
  else if (frame->o->device)
    bench_device_row(result);
  else
    bench_table_row(result);
  if (!frame->o->json && result->nodes > 0) bench_table_sharing(result);
  PKV_CHECK(err, frame->csv == NULL || bench_csv_row(frame->csv, &frame->run, result), PKV_E_IO,
            "cannot write %s", frame->o->csv);
  return PKV_OK;
}

static pkv_status report(bench *b, bench_result *results, int32_t steps, pkv_error *err) {
  for (int32_t r = 0; r < b->routes; r++) {
    bench_result *result = &results[r];
    double *const sums[] = {&result->rows,        &result->launches,    &result->tasks,
                            &result->plan_us,     &result->attend_us,   &result->null_us,
                            &result->plain_us,    &result->kv_bytes,    &result->padded_bytes,
                            &result->state_bytes, &result->total_bytes, &result->nodes,
                            &result->tile_fill,   &result->fma_us,      &result->balanced_us};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
      *sums[i] /= steps;
    result->wall_us = result->plan_us + result->attend_us;
    PKV_TRY(bench_report(&b->frame, result, err));
  }
  return PKV_OK;
}

static pkv_status run_cell(bench *b, const bench_cell *cell, int32_t threads, pkv_error *err) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  bench_result results[ROUTES];
  double error[ROUTES];
  pkv_executor *executor = NULL;
  pkv_workers *workers = NULL;
  scratch s;
  options.threads = threads;
  options.isa = (pkv_isa)b->o->isa;
  for (int32_t r = 0; r < b->routes; r++) {
    bench_result_init(&results[r], cell->name, pkv_route_name(b->route[r]));
    results[r].threads = threads;
    error[r] = -1;
  }
  pkv_status status = scratch_init(&s, b, cell, err);
  if (status == PKV_OK) status = pkv_executor_create(&executor, &options, err);
  if (status == PKV_OK) status = pkv_workers_create(&workers, threads, NULL, err);
  if (status == PKV_OK && b->o->check_tokens > 0) status = check(b, &s, cell, executor, error, err);
  for (int32_t i = 0; i < cell->count && status == PKV_OK; i++)
    status = measure_step(b, &s, &cell->batches[i], executor, workers, results, err);
  for (int32_t r = 0; r < b->routes; r++)
    results[r].error = error[r];
  if (status == PKV_OK) status = report(b, results, cell->count, err);
  for (int32_t r = 0; r < b->routes; r++)
    bench_result_deinit(&results[r]);
  pkv_workers_destroy(workers);
  pkv_executor_destroy(executor);
  scratch_free(&s);
  return status;
}

/* Storage for the largest cell that fits, and a gigabyte more to keep caches cold. */
static pkv_status open_store(bench *b, pkv_error *err) {
  const int64_t page_bytes = 2 * (int64_t)b->frame.shape.kv_heads * b->frame.shape.head_dim *
                             b->frame.shape.page_tokens *
                             (int64_t)pkv_dtype_bytes((pkv_dtype)b->o->dtype);
  const int32_t mib = b->o->memory_mib > 0 ? b->o->memory_mib : CPU_MIB;
  const int64_t limit = ((int64_t)mib << 20) / page_bytes;
  int64_t pages = 1;
  for (int32_t i = 0; i < b->frame.cells; i++) {
    bench_cell cell;
    const pkv_status status = bench_cell_make(&cell, &b->frame.cell_options, i, err);
    const int64_t need = bench_cell_pages(&cell);
    bench_cell_free(&cell);
    if (status != PKV_OK) return status;
    if (need <= limit && need > pages) pages = need;
  }
  pages += COLD_BYTES / page_bytes;
  if (pages > limit) pages = limit;
  PKV_CHECK(err, pages >= 1, PKV_E_TOO_SMALL, "--memory %d MiB does not hold a page of %lld bytes",
            mib, (long long)page_bytes);
  return bench_store_init(&b->store, &b->frame.shape, (pkv_dtype)b->o->dtype,
                          (pkv_layout)b->o->layout, pages, b->o->huge != 0, (uint64_t)b->o->seed,
                          err);
}

/* `shared` where rows share, or where it is asked for, with `balanced` beside it. */
static void choose_routes(bench *b, const bench_cell *cell) {
  const int32_t asked = b->o->route;
  b->shares = asked == PKV_ROUTE_SHARED || (asked == BENCH_ROUTE_ALL && bench_cell_shares(cell));
  b->routes = 0;
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++)
    if (asked == BENCH_ROUTE_ALL || asked == route ||
        (asked == PKV_ROUTE_SHARED && route == PKV_ROUTE_BALANCED))
      b->route[b->routes++] = (pkv_route)route;
  if (b->shares) b->route[b->routes++] = PKV_ROUTE_SHARED;
}

static pkv_status run_cells(bench *b, pkv_error *err) {
  for (int32_t i = 0; i < b->frame.cells; i++) {
    bench_cell cell;
    pkv_status status = bench_cell_make(&cell, &b->frame.cell_options, i, err);
    if (status == PKV_OK && bench_cell_pages(&cell) > b->store.cache.pages) {
      pkv_cli_error(b->frame.cli, "%s skipped: %lld pages, the storage has %lld (see --memory)",
                    cell.name, (long long)bench_cell_pages(&cell), (long long)b->store.cache.pages);
      b->frame.skipped++;
    } else {
      choose_routes(b, &cell);
      for (int32_t t = 0; t < b->thread_counts && status == PKV_OK; t++)
        status = run_cell(b, &cell, b->threads[t], err);
    }
    bench_cell_free(&cell);
    PKV_TRY(status);
  }
  return PKV_OK;
}

/* "1,2" into threads[]; 0 = all cores. */
static bool parse_threads(bench *b) {
  const char *at = b->o->threads;
  do {
    char word[8];
    const size_t size = strcspn(at, ",");
    int64_t count;
    if (size == 0 || size >= sizeof word || b->thread_counts == MAX_THREADS) return false;
    memcpy(word, at, size);
    word[size] = '\0';
    if (!pkv_parse_i64(&count, word, 0, 1024)) return false;
    b->threads[b->thread_counts++] = count > 0 ? (int32_t)count : pkv_cpu_cores();
    at += size + (at[size] == ',');
  } while (*at != '\0');
  return true;
}

static pkv_status run_on_cpu(bench_frame *frame, bench *b, pkv_error *err) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  const bench_options *o = frame->o;
  b->frame = *frame;
  b->repeats = o->repeats > 0 ? o->repeats : CPU_REPEATS;
  options.isa = (pkv_isa)o->isa;
  pkv_status status = pkv_executor_create(&executor, &options, err);
  if (status == PKV_OK) {
    bench_run_describe(&b->frame.run, pkv_isa_name(pkv_executor_isa(executor)));
    pkv_executor_destroy(executor);
    status = open_store(b, err);
  }
  if (status == PKV_OK && !b->o->json) bench_table_head(&b->frame.run);
  if (status == PKV_OK) status = run_cells(b, err);
  bench_store_deinit(&b->store);
  *frame = b->frame;
  return status;
}

static int finish(bench_frame *frame, pkv_status status, const pkv_error *err) {
  int code = PKV_EXIT_OK;
  if (status != PKV_OK)
    code = pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : pkv_cli_fail(frame->cli, err);
  else if (frame->o->json)
    code =
        pkv_cli_json(frame->cli, json_pack("{s:s, s:s, s:s, s:s, s:i, s:O}", "commit",
                                           frame->run.commit, "device", frame->run.device, "driver",
                                           frame->run.driver, "setup", frame->run.setup, "skipped",
                                           (int)frame->skipped, "rows", frame->rows));
  else if (frame->skipped > 0)
    (void)printf("%d cells skipped\n", frame->skipped);
  if (frame->csv != NULL && fclose(frame->csv) != 0 && code == PKV_EXIT_OK) {
    pkv_cli_error(frame->cli, "cannot write %s", frame->o->csv);
    code = PKV_EXIT_FAILURE;
  }
  json_decref(frame->rows);
  return code;
}

static void set_up(bench_frame *frame) {
  const bench_options *o = frame->o;
  frame->shape = (pkv_shape)PKV_SHAPE_INIT;
  frame->shape.query_heads = o->query_heads;
  frame->shape.kv_heads = o->kv_heads;
  frame->shape.head_dim = o->head_dim;
  frame->shape.page_tokens = o->page_tokens;
  frame->shape.q_len = o->q_len;
  frame->shape.window = o->window;
  frame->cell_options = (bench_cell_options){.page_tokens = o->page_tokens,
                                             .steps = o->steps,
                                             .active = o->active,
                                             .seed = (uint64_t)o->seed,
                                             .rows_permuted = o->rows_permuted,
                                             .lengths = o->lengths,
                                             .trace_file = o->trace_file,
                                             .mooncake = o->mooncake,
                                             .only = o->only,
                                             .names = o->cells};
  frame->run.commit = o->commit;
  char more[64] = "";
  if (o->q_len > 1 || o->window > 0)
    (void)snprintf(more, sizeof more, " q%d w%d", (int)o->q_len, (int)o->window);
  (void)snprintf(frame->run.setup, sizeof frame->run.setup, "%s %d/%dx%d p%d %s%s%s%s%s%s%s",
                 dtype_choices[o->dtype], o->query_heads, o->kv_heads, o->head_dim, o->page_tokens,
                 layout_choices[o->layout], more, o->rows_permuted ? " permuted" : "",
                 o->huge ? " huge" : "", o->best ? " best" : "", o->cpu_time ? " cpu-time" : "",
                 o->invariant ? " invariant" : "");
}

/* What makes sense on the other device only; returns an exit code. */
static int check_device_options(const pkv_cli *cli, const bench_options *o) {
  if (o->policy && (o->csv || o->json || o->route != BENCH_ROUTE_ALL))
    return pkv_cli_usage(cli, "--policy goes without --route, --csv and --json");
  if (!o->policy && o->profile) return pkv_cli_usage(cli, "--profile is for --policy");
  if (!o->policy && o->route < BENCH_FLASHINFER && o->flashinfer)
    return pkv_cli_usage(cli, "--flashinfer is for --policy and --route flashinfer");
  if (o->device == 0 && o->layout == BENCH_INTERLEAVED)
    return pkv_cli_usage(cli, "--layout interleaved needs --device cuda");
  if (o->device == 0 && o->route >= BENCH_WORKQUEUE_FUSED)
    return pkv_cli_usage(cli, "--route %s needs --device cuda", route_choices[o->route]);
  if (o->device != 0 && (o->huge || o->best || o->cpu_time))
    return pkv_cli_usage(cli, "--%s is for the CPU, not for --device cuda",
                         o->huge   ? "huge-pages"
                         : o->best ? "best"
                                   : "cpu-time");
  if (o->device != 0 && o->dtype == 0 /* f32 */)
    return pkv_cli_usage(cli, "--kv-dtype f32 is for the CPU; a GPU has f16, bf16 and fp8_e4m3");
  return PKV_EXIT_OK;
}

/* Cells from files, before the names are looked at. */
static pkv_status read_cells(bench_frame *frame, bench_cell_list *list, pkv_error *err) {
  const bench_options *o = frame->o;
  if (o->cells != NULL && strpbrk(o->cells, "/.") != NULL) {
    frame->cell_options.names = NULL;
    PKV_TRY(bench_cell_list_text(list, o->cells, err));
  }
  if (o->anchors != NULL) PKV_TRY(bench_cell_list_anchors(list, o->anchors, err));
  if (list->count > 0) frame->cell_options.list = list;
  return PKV_OK;
}

static pkv_status open_results(bench_frame *frame, pkv_error *err) {
  const bench_options *o = frame->o;
  pkv_buffer command;
  if (o->json) frame->rows = json_array();
  if (o->csv == NULL) return PKV_OK;
  pkv_buffer_init(&command, (size_t)1 << 20, NULL);
  pkv_status status = pkv_options_text(&command, frame->cli->command, o, "csv,commit,json", err);
  if (status == PKV_OK) status = bench_csv_open(&frame->csv, o->csv, command.data, err);
  pkv_buffer_deinit(&command);
  return status;
}

static int run(const pkv_cli *cli, const void *options) {
  bench b = {.o = options};
  bench_frame frame = {.cli = cli, .o = options};
  bench_cell_list list = {0};
  pkv_error err = {PKV_OK, NULL, {0}};
  int code = check_device_options(cli, b.o);
  if (code != PKV_EXIT_OK) return code;
  set_up(&frame);
  if (!parse_threads(&b))
    return pkv_cli_usage(cli, "--threads is '%s'; it takes up to %d counts like 1,2", b.o->threads,
                         MAX_THREADS);
  pkv_plan_options costs;
  if (b.o->shared_costs != NULL && !take_costs(&costs, b.o->shared_costs))
    return pkv_cli_usage(cli, "--shared-costs is '%s'; it takes five like 64,120,96,0,384",
                         b.o->shared_costs);
  pkv_status status = read_cells(&frame, &list, &err);
  if (status != PKV_OK) {
    bench_cell_list_free(&list);
    return pkv_cli_fail(cli, &err);
  }
  if (bench_cell_count(&frame.cells, &frame.cell_options, &err) != PKV_OK) {
    bench_cell_list_free(&list);
    return pkv_cli_usage(cli, "%s", err.text);
  }
  status = open_results(&frame, &err);
  if (status == PKV_OK)
    status = b.o->policy   ? bench_chosen_run(&frame, &err)
             : b.o->device ? bench_device_run(&frame, &err)
                           : run_on_cpu(&frame, &b, &err);
  code = finish(&frame, status, &err);
  bench_cell_list_free(&list);
  return code;
}

const pkv_command pkv_command_bench_attention = {
    .name = "bench attention",
    .summary = "measure the attention routes against the speed of memory",
    .details =
        "Runs every route over the seed's traces and over fixed mixes of lengths. Each figure is a "
        "median of repetitions, interleaved with two other readers: the null read goes through the "
        "same pages by the same block table, page after page, and computes a checksum only, the "
        "plain read goes "
        "through as many bytes from front to back. '% null' and '% plain' say how close attention "
        "comes to either. Outputs are compared with a double-precision reference before anything "
        "is timed.\n\n"
        "Cells: " BENCH_CELL_NAMES
        ". Without --cells, --anchors, --lengths, --trace or --mooncake all up to b8_zipf "
        "run.\n\n"
        "Where rows share prefixes, route shared is timed beside the others, with the rate at "
        "which "
        "the same cores multiply and add; the null read and the plain read take shared pages "
        "once.\n\n"
        "With --device cuda the same cells run on a GPU, layers with caches of their own so that "
        "each is read from memory. All rows are compared with the answer in double, then with one "
        "key of huge score in page after page, while pages that no row owns and the workspace hold "
        "NaN; a wrong route is named and not timed. Then the routes, plans, steps of 32 layers and "
        "the null read are timed as stretches of one graph.\n\n"
        "A CSV has the columns that bench/results/README.md explains, every repetition, and the "
        "command that made it; ./run bench --verify FILE runs it again. Of a CPU gpu_us is the "
        "time of the attention call and floor_us the null read.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(bench_options),
    .run = run,
};
