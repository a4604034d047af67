/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench sched`: what the scheduler's calls cost, cell by cell; with --simulate, what its
 * orders and policies are worth on a device that is given by a cost model.
 */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "cli/bench_figures.h"
#include "cli/bench_sched_cells.h"
#include "cli/bench_sched_files.h"
#include "cli/bench_sched_sim.h"
#include "cli/bench_sched_words.h"

#define MAX_WAITING 1000000
#define MAX_TOKENS  (1 << 20)
#define MAX_CHUNK   65536
#define CELLS_HEAD                                                                                 \
  "commit,date,device,driver,load,order,waiting,tokens,groups,chunk,input,repeats,op,count,p50_"   \
  "us,"                                                                                            \
  "p99_us,max_us,raw_p50_us,raw_p99_us,raw_max_us,used_bytes_request,memory_bytes,mean_us\n"

#define SIM_HEAD                                                                                   \
  "commit,device,model,workload,requests,rate,prefix_cache,max_batch,ageing,bypass_limit,"         \
  "max_wait_s,order,policy,route,finished,refused,steps,seconds,tokens_s,ttft_p50_s,ttft_p90_s,"   \
  "ttft_p99_s,tpot_p50_ms,tpot_p99_ms,longest_wait_s,jain,hit_rate,rows,total_gb,unique_gb,"       \
  "sched_us_step\n"
#define SIM_ABOUT                                                                                  \
  "# Simulated. Profile h200: its attention is fitted to steps of route balanced, nothing else "   \
  "is.\n"

typedef struct bench_sched_options {
  const char *orders, *waiting, *tokens, *groups, *chunk, *csv, *commit;
  const char *profile, *trace, *policies, *routes, *prefix, *decode;
  int32_t steps, repeats, memory;
  int32_t simulate, model, requests, own, shift, max_batch, ageing, bypass_limit, prefix_cache;
  double seconds, rate, max_wait_s;
  double ucb_bonus, q_rate, q_discount, q_explore, prior_weight;
  const char *learner;
  int64_t seed;
} bench_sched_options;

static const char *const model_names[] = {"llama-3-8b", "qwen-0.5b",    "qwen-1.5b",
                                          "qwen-8b",    "longchat-13b", NULL};
static const char *const ageings[] = {"each", "oldest", NULL};
static const char *const prefix_caches[] = {"batch", "all", NULL};

#define O bench_sched_options
static const pkv_option options_table[] = {
    PKV_TEXT(O, orders, 0, "order", "LIST", "tree,cht,lpm,dfs-weight", "orders, or all"),
    PKV_TEXT(O, waiting, 'w', "waiting", "LIST", "1K", "requests that wait"),
    PKV_TEXT(O, tokens, 0, "tokens", "LIST", "10K", "tokens of a prompt"),
    PKV_TEXT(O, groups, 'g', "groups", "LIST", "1,8,64,none",
             "groups of requests that share, none, and (no simulation) chain"),
    PKV_TEXT(O, chunk, 0, "chunk", "LIST", "64", "tokens that sharing is counted in"),
    PKV_INT(O, steps, 0, "steps", "N", "5000", 10, 1000000, "steps of a cell, at most"),
    PKV_NUMBER(O, seconds, 0, "seconds", "S", "2", 0.01, 3600.0,
               "no more steps once they took so long"),
    PKV_INT(O, repeats, 'r', "repeats", "N", "4", 1, SCHED_REPEATS,
            "repetitions; each call counts with its least time"),
    PKV_INT(O, memory, 0, "memory", "MIB", "2048", 1, 1 << 20,
            "most for prompts, and for what cht keeps of them"),
    PKV_FLAG(O, simulate, 0, "simulate", "replay requests on a simulated device instead"),
    PKV_TEXT(O, profile, 0, "profile", "NAME", "h200",
             "h200, h200-fa3, rtx6000-ada, or a JSON file"),
    PKV_CHOICE(O, model, 0, "model", model_names, "llama-3-8b", "shape"),
    PKV_TEXT(O, policies, 0, "policy", "LIST", "always", "stop policies, or all"),
    PKV_TEXT(O, routes, 0, "route", "LIST", "ordinary,shared",
             "attention: ordinary reads every row, shared reads a prefix once"),
    PKV_TEXT(O, trace, 0, "trace", "FILE", NULL, "requests of a trace; else they are drawn"),
    PKV_INT(O, requests, 'n', "requests", "N", "800", 0, SCHED_MAX_WORK,
            "requests; 0 = all of the trace"),
    PKV_TEXT(O, prefix, 0, "prefix", "RANGE", "10240", "tokens that a group shares"),
    PKV_INT(O, own, 0, "own", "N", "32", 1, MAX_TOKENS, "tokens of a prompt behind them"),
    PKV_TEXT(O, decode, 0, "decode", "RANGE", "1-200", "tokens of an answer"),
    PKV_NUMBER(O, rate, 0, "rate", "R", "0", 0.0, 1e6, "Poisson arrivals a second; 0 = at once"),
    PKV_FLAG(O, shift, 0, "shift", "from the middle on 4 times the rate and no sharing"),
    PKV_INT(O, max_batch, 0, "max-batch", "N", "500", 1, 65536, "rows of a batch"),
    PKV_CHOICE(O, ageing, 0, "ageing", ageings, "oldest", "what --bypass-limit bounds"),
    PKV_INT(O, bypass_limit, 0, "bypass-limit", "N", "32", -1, 1000000, "-1 = none"),
    PKV_NUMBER(O, max_wait_s, 0, "max-wait", "S", "0", 0.0, 1e6, "0 = none"),
    PKV_CHOICE(O, prefix_cache, 0, "prefix-cache", prefix_caches, "batch",
               "prompts that need no prefill: held by the batch, or all that came before"),
    PKV_NUMBER(O, ucb_bonus, 0, "ucb-bonus", "C", "0", 0.0, 1e12, "of ucb; 0 = 200"),
    PKV_NUMBER(O, q_rate, 0, "q-rate", "R", "0", 0.0, 1.0, "of q-learning; 0 = 0.1"),
    PKV_NUMBER(O, q_discount, 0, "q-discount", "D", "0", 0.0, 1.0, "0 = 0.9"),
    PKV_NUMBER(O, q_explore, 0, "q-explore", "E", "0", -1.0, 1.0, "0 = 0.05, -1 = never"),
    PKV_NUMBER(O, prior_weight, 0, "prior-weight", "N", "0", -1.0, 1e6,
               "visits that the learners' prior counts for; 0 = 4, -1 = no prior"),
    PKV_TEXT(O, learner, 0, "learner", "FILE", NULL,
             "table of one learner: read if it is there, written after each run"),
    PKV_INT(O, seed, 0, "seed", "N", "1", 0, INT64_C(4294967295), "of everything that is drawn"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "append result rows"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
};
#undef O

typedef struct bench_sched {
  const pkv_cli *cli;
  const bench_sched_options *o;
  sched_list orders, waiting, tokens, groups, chunk, policies, routes;
  int32_t prefix[2], decode[2];
  bench_model_run run; /* date, load, machine */
  FILE *csv;
  int32_t skipped;
} bench_sched;

static const char *order_name(int32_t i) {
  return sched_subject_name(i);
}

static const char *policy_name(int32_t i) {
  return pkv_sched_policy_name((pkv_sched_policy)i);
}

static void groups_text(char text[16], int32_t groups) {
  if (groups > 0)
    (void)snprintf(text, 16, "%d", (int)groups);
  else
    (void)snprintf(text, 16, "%s", groups == SCHED_GROUPS_NONE ? "none" : "chain");
}

static pkv_status give(bench_sched *b, const sched_prompts *p, const char *order,
                       const sched_cell *cell, pkv_error *err) {
  char groups[16];
  groups_text(groups, p->groups);
  const int32_t waiting = p->requests - SCHED_CELL_BATCH;
  const sched_times *const step = &cell->op[SCHED_OP_STEP], *insert = &cell->op[SCHED_OP_INSERT];
  (void)printf("%-13s %7d %7d %6s %5d %-7s %7d %9.2f %9.2f %9.2f %9.2f %9.2f %10.1f %7.0f\n", order,
               (int)waiting, (int)p->tokens, groups, (int)p->chunk, p->hashed ? "hashes" : "tokens",
               (int)step->count, step->p50, step->p99, step->max, insert->p50, insert->p99,
               cell->op[SCHED_OP_FILL].max, cell->used_bytes);
  (void)fflush(stdout);
  if (b->csv == NULL) return PKV_OK;
  for (int32_t op = 0; op < SCHED_OPS; op++) {
    const sched_times *const t = &cell->op[op];
    (void)fprintf(b->csv, "%s,%s,%s,%s,%s,%s,%d,%d,%s,%d,%s,%d,%s,%d,", b->run.run.commit,
                  b->run.date, b->run.run.device, b->run.run.driver, b->run.load, order,
                  (int)waiting, (int)p->tokens, groups, (int)p->chunk,
                  p->hashed ? "hashes" : "tokens", (int)cell->repeats, sched_op_name((sched_op)op),
                  (int)t->count);
    (void)fprintf(b->csv, "%.3f,%.3f,%.3f,%.3f,%.3f,%.3f,%.1f,%.0f,%.3f\n", t->p50, t->p99, t->max,
                  t->raw_p50, t->raw_p99, t->raw_max, cell->used_bytes, cell->memory_bytes,
                  t->mean);
  }
  PKV_CHECK(err, fflush(b->csv) == 0 && !ferror(b->csv), PKV_E_IO, "cannot write %s", b->o->csv);
  return PKV_OK;
}

/* The published tree keeps each chunk of each request, about 48 bytes for one. */
static bool affordable(bench_sched *b, const sched_prompts *p, int32_t order) {
  const double mib = (double)p->requests * p->hashes * 48 / 1048576.0;
  if ((order != PKV_SCHED_CHT && order != SCHED_PUBLISHED) || mib <= b->o->memory) return true;
  pkv_cli_error(b->cli, "cht skipped, %d waiting, %d tokens, chunk %d: about %.0f MiB",
                (int)p->requests - SCHED_CELL_BATCH, (int)p->tokens, (int)p->chunk, mib);
  b->skipped++;
  return false;
}

static pkv_status run_cell(bench_sched *b, int32_t waiting, int32_t tokens, int32_t groups,
                           int32_t chunk, pkv_error *err) {
  sched_prompts prompts;
  pkv_status status = sched_prompts_init(&prompts, waiting, tokens, groups, chunk,
                                         (size_t)b->o->memory << 20, (uint64_t)b->o->seed, err);
  if (status == PKV_E_LIMIT) {
    pkv_cli_error(b->cli, "%d waiting, %d tokens, chunk %d skipped: %s", (int)waiting, (int)tokens,
                  (int)chunk, err->text);
    b->skipped++;
    return PKV_OK;
  }
  for (int32_t i = 0; i < b->orders.count && status == PKV_OK; i++) {
    sched_cell cell;
    const int32_t order = b->orders.value[i];
    if (!affordable(b, &prompts, order)) continue;
    status = sched_cell_run(&cell, &prompts, order, b->o->steps, b->o->seconds, b->o->repeats,
                            (uint64_t)b->o->seed, err);
    if (status == PKV_OK) status = give(b, &prompts, order_name(order), &cell, err);
    if (status == PKV_OK && pkv_cli_interrupted())
      status = PKV_FAIL(err, PKV_E_STATE, "interrupted");
  }
  sched_prompts_free(&prompts);
  return status;
}

static pkv_status run_cells(bench_sched *b, pkv_error *err) {
  (void)printf("%s, load of the machine %s\nTimes in us: least of %d repetitions of the same run; "
               "batch %d\n\n",
               b->run.run.device, b->run.load, (int)b->o->repeats, SCHED_CELL_BATCH);
  (void)printf("%-13s %7s %7s %6s %5s %-7s %7s %9s %9s %9s %9s %9s %10s %7s\n", "order", "waiting",
               "tokens", "groups", "chunk", "input", "steps", "step p50", "p99", "max", "insert",
               "p99", "fill 100", "B/req");
  for (int32_t w = 0; w < b->waiting.count; w++)
    for (int32_t t = 0; t < b->tokens.count; t++)
      for (int32_t c = 0; c < b->chunk.count; c++)
        for (int32_t g = 0; g < b->groups.count; g++)
          PKV_TRY(run_cell(b, b->waiting.value[w], b->tokens.value[t], b->groups.value[g],
                           b->chunk.value[c], err));
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * Simulation
 * ------------------------------------------------------------------------------------------ */

static pkv_status give_outcome(bench_sched *b, const sched_setup *s, const sched_outcome *r,
                               pkv_error *err) {
  const char *const order = order_name((int32_t)s->order);
  const char *const policy = policy_name((int32_t)s->policy);
  const char *const route = sched_route_name((int32_t)s->route);
  (void)printf("%-10s %-12s %-8s %9.0f %8.2f %8.2f %8.2f %8.1f %8.1f %8.2f %5.3f %5.3f %6.1f %9.0f "
               "%9.0f\n",
               order, policy, route, r->tokens_s, r->ttft_p50, r->ttft_p90, r->ttft_p99,
               r->tpot_p50 * 1e3, r->tpot_p99 * 1e3, r->longest_wait, r->jain, r->hit_rate, r->rows,
               r->total_gb, r->unique_gb);
  (void)fflush(stdout);
  if (b->csv == NULL) return PKV_OK;
  const bench_sched_options *const o = b->o;
  (void)fprintf(b->csv, "%s,%s,%s,%s,%d,%g,%s,%d,%s,%d,%g,%s,%s,%s,%d,%d,%lld,", o->commit,
                s->device->name, s->shape->name, s->work->name, (int)s->work->count, o->rate,
                prefix_caches[o->prefix_cache], (int)s->max_batch, ageings[o->ageing],
                (int)s->bypass_limit, s->max_wait_s, order, policy, route, (int)r->requests,
                (int)r->refused, (long long)r->steps);
  (void)fprintf(b->csv, "%.4f,%.2f,%.5f,%.5f,%.5f,%.4f,%.4f,%.5f,%.5f,%.5f,%.2f,%.3f,%.3f,%.3f\n",
                r->seconds, r->tokens_s, r->ttft_p50, r->ttft_p90, r->ttft_p99, r->tpot_p50 * 1e3,
                r->tpot_p99 * 1e3, r->longest_wait, r->jain, r->hit_rate, r->rows, r->total_gb,
                r->unique_gb, r->sched_us_step);
  PKV_CHECK(err, fflush(b->csv) == 0 && !ferror(b->csv), PKV_E_IO, "cannot write %s", o->csv);
  return PKV_OK;
}

static pkv_status simulate_each(bench_sched *b, sched_setup *setup, pkv_error *err) {
  for (int32_t o = 0; o < b->orders.count; o++)
    for (int32_t p = 0; p < b->policies.count; p++)
      for (int32_t r = 0; r < b->routes.count; r++) {
        sched_outcome outcome;
        setup->order = (pkv_sched_order)b->orders.value[o];
        setup->policy = (pkv_sched_policy)b->policies.value[p];
        setup->route = (sched_route)b->routes.value[r];
        PKV_TRY(sched_simulate(&outcome, setup, err));
        PKV_TRY(give_outcome(b, setup, &outcome, err));
        PKV_CHECK(err, !pkv_cli_interrupted(), PKV_E_STATE, "interrupted");
      }
  return PKV_OK;
}

static pkv_status make_work(sched_work *out, const bench_sched *b, int32_t groups, pkv_error *err) {
  const bench_sched_options *const o = b->o;
  if (o->trace != NULL) return sched_work_load(out, o->trace, o->requests, err);
  const sched_draw draw = {.requests = o->requests,
                           .groups = groups,
                           .prefix = {b->prefix[0], b->prefix[1]},
                           .decode = {b->decode[0], b->decode[1]},
                           .own = o->own,
                           .rate = o->rate,
                           .shift = o->shift != 0,
                           .chunk = b->chunk.value[0],
                           .seed = (uint64_t)o->seed};
  return sched_work_draw(out, &draw, err);
}

/* Every order, policy and route on one set of requests. */
static pkv_status simulate_work(bench_sched *b, sched_setup *setup, int32_t groups,
                                pkv_error *err) {
  sched_work work;
  PKV_TRY(make_work(&work, b, groups, err));
  (void)printf("\n%d requests, %s\n%-10s %-12s %-8s %9s %8s %8s %8s %8s %8s %8s %5s %5s %6s %9s "
               "%9s\n",
               (int)work.count, work.name, "order", "policy", "route", "tokens/s", "TTFT p50",
               "p90", "p99 s", "TPOT p50", "p99 ms", "wait s", "Jain", "hit", "rows", "total GB",
               "unique GB");
  setup->work = &work;
  const pkv_status status = simulate_each(b, setup, err);
  sched_work_free(&work);
  return status;
}

static pkv_status run_simulation(bench_sched *b, pkv_error *err) {
  const bench_sched_options *const o = b->o;
  sched_device device;
  PKV_TRY(sched_device_load(&device, o->profile, err));
  sched_setup setup = {.device = &device,
                       .shape = &sched_shapes[o->model],
                       .ageing = (pkv_sched_ageing)o->ageing,
                       .bypass_limit = o->bypass_limit,
                       .max_wait_s = o->max_wait_s,
                       .max_batch = o->max_batch,
                       .warm = o->prefix_cache != 0,
                       .seed = (uint64_t)o->seed,
                       .ucb_bonus = o->ucb_bonus,
                       .q_rate = o->q_rate,
                       .q_discount = o->q_discount,
                       .q_explore = o->q_explore,
                       .prior_weight = o->prior_weight,
                       .learner = o->learner};
  (void)printf("Simulated: %s, %s. Of profile h200 attention is fitted, of others nothing is.\n",
               device.name, setup.shape->name);
  pkv_status status = PKV_OK;
  if (device.parts >= 1)
    status = sched_reuse_init(&setup.reuse, (int32_t)device.parts, setup.shape->kv_heads,
                              device.spread, err);
  const int32_t works = o->trace != NULL ? 1 : b->groups.count;
  for (int32_t g = 0; g < works && status == PKV_OK; g++)
    status = simulate_work(b, &setup, b->groups.value[g], err);
  sched_reuse_free(setup.reuse);
  return status;
}

static pkv_status open_csv(bench_sched *b, const char *head, const char *about, pkv_error *err) {
  pkv_buffer command;
  if (b->o->csv == NULL) return PKV_OK;
  pkv_buffer_init(&command, 4096, NULL);
  pkv_status status = pkv_options_text(&command, b->cli->command, b->o, "csv,commit", err);
  if (status == PKV_OK) status = sched_csv_open(&b->csv, b->o->csv, head, about, command.data, err);
  pkv_buffer_deinit(&command);
  return status;
}

static int parse(bench_sched *b) {
  const bench_sched_options *const o = b->o;
  const pkv_cli *const cli = b->cli;
  if (!sched_list_names(&b->orders, o->orders, order_name,
                        o->simulate ? PKV_SCHED_ORDERS : SCHED_SUBJECTS))
    return pkv_cli_usage(cli, "--order is '%s'; it takes names like tree,lpm", o->orders);
  if (!sched_list_numbers(&b->waiting, o->waiting, 1, MAX_WAITING, false))
    return pkv_cli_usage(cli, "--waiting is '%s'; it takes counts like 100,10K", o->waiting);
  if (!sched_list_numbers(&b->tokens, o->tokens, 1, MAX_TOKENS, false))
    return pkv_cli_usage(cli, "--tokens is '%s'; it takes counts like 1K,100K", o->tokens);
  if (!sched_list_numbers(&b->groups, o->groups, 1, MAX_WAITING, true))
    return pkv_cli_usage(cli, "--groups is '%s'; it takes counts, none and chain", o->groups);
  if (!sched_list_numbers(&b->chunk, o->chunk, 1, MAX_CHUNK, false))
    return pkv_cli_usage(cli, "--chunk is '%s'; it takes counts like 16,64", o->chunk);
  return PKV_EXIT_OK;
}

static int parse_simulation(bench_sched *b) {
  const bench_sched_options *const o = b->o;
  const pkv_cli *const cli = b->cli;
  if (!sched_list_names(&b->policies, o->policies, policy_name, PKV_SCHED_POLICIES))
    return pkv_cli_usage(cli, "--policy is '%s'; it takes names like always,marginal", o->policies);
  if (!sched_list_names(&b->routes, o->routes, sched_route_name, SCHED_ROUTES))
    return pkv_cli_usage(cli, "--route is '%s'; it takes ordinary and shared", o->routes);
  if (!sched_range(b->prefix, o->prefix, 1, MAX_TOKENS))
    return pkv_cli_usage(cli, "--prefix is '%s'; it takes 10K or 1K-10K", o->prefix);
  if (!sched_range(b->decode, o->decode, 1, MAX_TOKENS))
    return pkv_cli_usage(cli, "--decode is '%s'; it takes 64 or 1-200", o->decode);
  if (!o->simulate) return PKV_EXIT_OK;
  for (int32_t i = 0; i < b->groups.count; i++)
    if (b->groups.value[i] == SCHED_GROUPS_CHAIN)
      return pkv_cli_usage(cli, "--groups chain cannot be simulated; it takes counts and none");
  if (o->trace == NULL && o->requests == 0)
    return pkv_cli_usage(cli, "--requests 0 takes a --trace");
  if (o->simulate && b->chunk.count > 1)
    return pkv_cli_usage(cli, "--simulate takes one --chunk, not %d", (int)b->chunk.count);
  return PKV_EXIT_OK;
}

static int run(const pkv_cli *cli, const void *options) {
  bench_sched b = {.cli = cli, .o = options};
  pkv_error err = {PKV_OK, NULL, {0}};
  int code = parse(&b);
  if (code == PKV_EXIT_OK) code = parse_simulation(&b);
  if (code != PKV_EXIT_OK) return code;
  bench_model_describe(&b.run, "", "");
  b.run.run.commit = b.o->commit;
  pkv_status status =
      b.o->simulate ? open_csv(&b, SIM_HEAD, SIM_ABOUT, &err) : open_csv(&b, CELLS_HEAD, "", &err);
  if (status == PKV_OK) status = b.o->simulate ? run_simulation(&b, &err) : run_cells(&b, &err);
  if (b.csv != NULL && fclose(b.csv) != 0 && status == PKV_OK)
    status = PKV_FAIL(&err, PKV_E_IO, "cannot write %s", b.o->csv);
  if (status == PKV_OK) return PKV_EXIT_OK;
  return pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : pkv_cli_fail(cli, &err);
}

const pkv_command pkv_command_bench_sched = {
    .name = "bench sched",
    .summary = "measure the scheduler's calls, or simulate what it is worth",
    .details =
        "A cell holds so many waiting requests and a batch of 100. A step finishes one request, "
        "asks for the best and admits it. The run is deterministic, so it is repeated and each "
        "call counts with the least of its times; the CSV has the times of all repetitions too "
        "(raw). Besides the orders a cell may measure cht-published (all its published faults, "
        "hashed "
        "token by token) and radix-dfs (a plain radix tree of the batch and a pass over the queue "
        "each "
        "step, as servers make it). Prompts that would take more than --memory come as digests, "
        "one a chunk; what does "
        "not fit then is skipped, and said. Ageing is of the oldest request (1 admission in "
        "33).\n\n"
        "--simulate replays requests, drawn or of a trace, through a model of a device: continuous "
        "batching, whole prompts prefilled in the step that admits them, the same result for the "
        "same seed (but for the scheduler's own measured time in the CSV). Of profile h200 "
        "attention is fitted to measured steps, of the others nothing is: compare with what is "
        "measured before you believe it. Traces: Mooncake's JSON lines, "
        "Azure's CSV, or prompt_len,decode_len,arrival (ms). A profile is a JSON object: name, "
        "read_tb_s, read_us, l2_mb, l2_tb_s, step_us, gemm_tflops, attention_tflops, cache_gb, "
        "and row_us, overlap, parts, spread where they are known.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(bench_sched_options),
    .run = run,
};
