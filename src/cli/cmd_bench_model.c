/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench model`: tokens a second of a real model, in the cells that llama-bench and
 * llama-batched-bench have, so that the two can stand side by side (bench/compare_llamacpp.py).
 */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/cpu.h"
#include "base/json_memory.h"
#include "base/status.h"
#include "base/text.h"
#include "cli/bench_decode.h"
#include "cli/bench_figures.h"
#include "cli/bench_llama_tables.h"
#include "cli/prompt_text.h"
#include "measure/meter.h"

#define MAX_LIST   16
#define MAX_TOKENS (1 << 22)
#define MAX_ROWS   1024

typedef struct bench_model_options {
  const char *model, *random, *prompts, *depths, *parallel, *csv, *commit, *products;
  int32_t generate, each_prompt, each_tokens, shared, groups, suffix, no_start, device, ranks,
      waits, weights;
  int32_t threads, isa, kv_dtype, activations, page, chunk, variant, repeats, json, llama;
  int64_t seed;
} bench_model_options;

static const char *const kv_dtypes[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};
static const char *const activation_names[] = {"i8", "f32", NULL};
static const char *const devices[] = {"cpu", "cuda", NULL};
static const char *const isas[] = {"auto", "reference", "scalar", "avx2", "avx512", "neon", NULL};

#define O bench_model_options
static const pkv_option options_table[] = {
    PKV_TEXT(O, model, 'm', "model", "FILE", NULL, "GGUF file, or folder of safetensors"),
    PKV_TEXT(O, random, 0, "random-weights", "CONFIG", NULL,
             "in its place: a model of this config.json's shape, of random bf16 weights"),
    PKV_CHOICE(O, device, 0, "device", devices, "cpu", "where the model runs"),
    PKV_INT(O, ranks, 0, "tensor-parallel-size", "N", "1", 1, PKV_MAX_RANKS,
            "with --device cuda: devices that compute together, the first N seen"),
    PKV_TEXT(O, products, 0, "products-file", "FILE", NULL,
             "with --device cuda: keeps which matrix products are the fastest, for faster starts"),
    PKV_FLAG(O, waits, 0, "no-overlap", "with --device cuda: wait for each step before the next"),
    PKV_WEIGHTS_OPTION(O),
    PKV_TEXT(O, prompts, 'p', "prompt", "LIST", "512",
             "prefill: prompts of so many tokens, separated by commas; 0 = none"),
    PKV_INT(O, generate, 'n', "generate", "N", "64", 0, MAX_TOKENS,
            "decode: tokens of one sequence; 0 = none"),
    PKV_TEXT(O, depths, 'd', "depth", "LIST", "0,2048,7936",
             "cached tokens that --generate starts behind"),
    PKV_TEXT(O, parallel, 0, "parallel", "LIST", "1,4,8,16,32",
             "sequences decoded together; 0 = none"),
    PKV_INT(O, each_prompt, 0, "npp", "N", "128", 1, MAX_TOKENS, "prompt of each with --parallel"),
    PKV_INT(O, each_tokens, 0, "ntg", "N", "32", 1, MAX_TOKENS, "tokens of each with --parallel"),
    PKV_FLAG(O, shared, 0, "shared-prompt", "with --parallel: all have the same prompt"),
    PKV_INT(O, groups, 0, "groups", "N", "0", 0, MAX_ROWS,
            "with --parallel: so many prompts, each that of as many sequences; 0 = of one"),
    PKV_INT(O, suffix, 0, "suffix", "N", "0", 0, MAX_TOKENS,
            "with --parallel: tokens of each sequence's own behind its prompt"),
    PKV_FLAG(O, no_start, 0, "no-start", "leave out the start of a fresh process"),
    PKV_INT(O, repeats, 'r', "repeats", "N", "5", 1, PKV_BENCH_MAX_REPEATS,
            "repetitions of each cell"),
    PKV_INT(O, threads, 't', "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_CHOICE(O, isa, 0, "isa", isas, "auto", "instruction set"),
    PKV_CHOICE(O, kv_dtype, 0, "kv-dtype", kv_dtypes, "f16", "type of the KV cache"),
    PKV_CHOICE(O, activations, 0, "activations", activation_names, "i8", "i8 is fast, f32 exact"),
    PKV_INT(O, page, 0, "page", "N", "16", 1, 1024, "tokens in a cache page"),
    PKV_INT(O, chunk, 0, "chunk", "N", "0", 0, 65536,
            "prompt tokens in a step, 0 = 512, on a device 2048"),
    PKV_FLAG(O, variant, 0, "no-invariant",
             "let a sequence's rounding depend on what runs beside it"),
    PKV_INT(O, seed, 0, "seed", "N", "1", 0, INT64_C(4294967295), "of the random tokens"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "append result rows"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
    PKV_FLAG(O, json, 0, "json", "print one JSON object instead of the table"),
    PKV_FLAG(O, llama, 0, "llama-tables",
             "print the tables of llama-bench and llama-batched-bench instead"),
};
#undef O

typedef struct int_list {
  int32_t count, value[MAX_LIST];
} int_list;

typedef struct bench_model {
  const pkv_cli *cli;
  const bench_model_options *o;
  int_list prompts, depths, parallel;
  pkv_model *model;
  pkv_model_info info;
  bench_subject subject;
  bench_model_run run;
  FILE *csv;
  json_t *rows; /* --json */
  int32_t skipped;
} bench_model;

/* "1,4,8"; a lone 0 is the empty list where `none` is set. */
static bool parse_list(int_list *out, const char *text, int32_t highest, bool none) {
  const char *at = text;
  out->count = 0;
  do {
    char word[16];
    const size_t size = strcspn(at, ",");
    int64_t value;
    if (size == 0 || size >= sizeof word || out->count == MAX_LIST) return false;
    memcpy(word, at, size);
    word[size] = '\0';
    if (!pkv_parse_i64(&value, word, 0, highest)) return false;
    out->value[out->count++] = (int32_t)value;
    at += size;
    if (*at == ',' && *++at == '\0') return false;
  } while (*at != '\0');
  if (!none) return true;
  if (out->count == 1 && out->value[0] == 0) out->count = 0;
  for (int32_t i = 0; i < out->count; i++)
    if (out->value[i] == 0) return false;
  return true;
}

static pkv_status give(bench_model *b, const bench_figure *figure, pkv_error *err) {
  if (b->o->json)
    pkv_json_add(&b->rows, bench_figures_json(figure));
  else if (!b->o->llama)
    bench_figures_row(figure);
  PKV_CHECK(err, b->csv == NULL || bench_figures_csv(b->csv, &b->run, figure), PKV_E_IO,
            "cannot write %s", b->o->csv);
  return PKV_OK;
}

/* False, with a word about it, when the cell's sequences are longer than the model's context. */
static bool fits(bench_model *b, int64_t tokens, const char *what, int32_t value) {
  if (tokens <= b->subject.context) return true;
  pkv_cli_error(b->cli, "%s %d skipped: %lld tokens, the model's context is %d", what, (int)value,
                (long long)tokens, (int)b->subject.context);
  b->skipped++;
  return false;
}

/* A cell of one sequence. */
static pkv_status give_single(bench_model *b, const bench_figure *figure, pkv_error *err) {
  const char *const backend = b->o->device == PKV_DEVICE_CUDA ? "CUDA" : "CPU";
  if (b->o->llama) bench_llama_row(&b->run, backend, &b->info, figure);
  return give(b, figure, err);
}

static pkv_status run_single(bench_model *b, pkv_error *err) {
  bench_figure figure;
  for (int32_t i = 0; i < b->prompts.count; i++) {
    const int32_t prompt = b->prompts.value[i];
    if (!fits(b, (int64_t)prompt + 1, "--prompt", prompt)) continue;
    PKV_TRY(bench_prefill(&figure, &b->subject, prompt, err));
    PKV_TRY(give_single(b, &figure, err));
  }
  for (int32_t i = 0; i < b->depths.count && b->o->generate > 0; i++) {
    const int32_t depth = b->depths.value[i];
    if (!fits(b, (int64_t)depth + b->o->generate + 2, "--depth", depth)) continue;
    PKV_TRY(bench_generate(&figure, &b->subject, b->o->generate, depth, err));
    PKV_TRY(give_single(b, &figure, err));
  }
  return PKV_OK;
}

static pkv_status run_parallel(bench_model *b, pkv_error *err) {
  bench_figure figures[2];
  for (int32_t i = 0; i < b->parallel.count; i++) {
    const int32_t sequences = b->parallel.value[i];
    const bench_crowd crowd = {sequences, b->o->each_prompt, b->o->each_tokens,
                               b->o->shared ? 1 : b->o->groups, b->o->suffix};
    if (!fits(b, bench_crowd_longest(&crowd, &b->subject), "--parallel", sequences)) continue;
    PKV_TRY(bench_together(figures, &b->subject, &crowd, err));
    if (b->o->llama) bench_llama_batched_row(&crowd, figures);
    PKV_TRY(give(b, &figures[0], err));
    PKV_TRY(give(b, &figures[1], err));
  }
  return PKV_OK;
}

static pkv_status run_start(bench_model *b, pkv_error *err) {
  bench_figure figures[2];
  if (b->o->no_start || b->o->llama || b->o->random != NULL || b->o->device != PKV_DEVICE_CPU)
    return PKV_OK;
  PKV_TRY(bench_start(figures, b->o->model, b->o->threads, b->o->repeats, err));
  PKV_TRY(give(b, &figures[0], err));
  return give(b, &figures[1], err);
}

/* Results of a device name it and its driver, not the processor beside it. Where there is none, the
   engine's own words about that come next. */
static void name_device(bench_run *run, int32_t count) {
  pkv_meter *meter = NULL;
  char name[sizeof run->device + 16];
  if (pkv_meter_create(&meter, NULL) != PKV_OK) return;
  (void)snprintf(name, sizeof name, "%d x %s", (int)count, meter->info.device);
  bench_run_describe_device(run, count > 1 ? name : meter->info.device, meter->info.driver);
  pkv_meter_destroy(meter);
}

static pkv_status open_model(bench_model *b, pkv_error *err) {
  const pkv_model_options model_options = pkv_model_options_for(b->o->weights, b->o->device);
  pkv_executor_options executor_options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  const bool cuda = b->o->device == PKV_DEVICE_CUDA;
  if (b->o->random != NULL)
    PKV_TRY(pkv_model_open_random(&b->model, b->o->random, cuda, &model_options, err));
  else
    PKV_TRY(pkv_model_open_named(&b->model, b->o->model, &model_options, err));
  b->info = (pkv_model_info)PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&b->info, b->model);
  b->subject.model = b->model;
  b->subject.vocab = b->info.vocab;
  b->subject.context = b->info.context;
  executor_options.isa = (pkv_isa)b->o->isa;
  PKV_TRY(pkv_executor_create(&executor, &executor_options, err));
  bench_model_describe(&b->run, cuda ? "cuda" : pkv_isa_name(pkv_executor_isa(executor)),
                       b->o->random != NULL ? b->o->random : b->o->model);
  pkv_executor_destroy(executor);
  if (cuda) name_device(&b->run.run, b->o->ranks);
  return PKV_OK;
}

static pkv_status work(bench_model *b, pkv_error *err) {
  PKV_TRY(open_model(b, err));
  if (b->o->llama)
    bench_llama_head();
  else if (!b->o->json)
    bench_figures_head(&b->run);
  PKV_TRY(run_start(b, err));
  PKV_TRY(run_single(b, err));
  if (b->o->llama && b->parallel.count > 0) bench_llama_batched_head();
  return run_parallel(b, err);
}

static void set_up(bench_model *b) {
  const bench_model_options *o = b->o;
  pkv_engine_options *const e = &b->subject.options;
  *e = (pkv_engine_options)PKV_ENGINE_OPTIONS_INIT;
  e->threads = o->threads > 0 ? o->threads : pkv_cpu_cores();
  e->isa = (pkv_isa)o->isa;
  e->kv_dtype = (pkv_dtype)o->kv_dtype;
  e->activations = (pkv_activations)o->activations;
  e->page_tokens = o->page;
  const int32_t chunk = o->device == PKV_DEVICE_CPU ? 512 : 2048; /* the engine's own */
  e->prefill_chunk = o->chunk > 0 ? o->chunk : chunk;
  e->batch_invariant = !o->variant && o->device == PKV_DEVICE_CPU;
  e->device = (pkv_device)o->device;
  e->tensor_parallel = o->ranks;
  e->overlap = !o->waits;
  e->products_file = o->products;
  b->subject.repeats = o->repeats;
  b->subject.seed = (uint64_t)o->seed << 20;
  b->run.run.commit = o->commit;
  b->run.kv_dtype = kv_dtypes[o->kv_dtype];
  b->run.activations = activation_names[o->activations];
  b->run.threads = e->threads;
}

static int finish(bench_model *b, pkv_status status, const pkv_error *err) {
  int code = PKV_EXIT_OK;
  const double peak = bench_peak_memory();
  if (status != PKV_OK) {
    code = pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : pkv_cli_fail(b->cli, err);
  } else if (b->o->json) {
    code = pkv_cli_json(
        b->cli, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:s, s:s, s:f, s:i, s:O}", "commit",
                          b->run.run.commit, "date", b->run.date, "device", b->run.run.device,
                          "driver", b->run.run.driver, "load", b->run.load, "model", b->run.model,
                          "threads", (int)b->run.threads, "kv_dtype", b->run.kv_dtype,
                          "activations", b->run.activations, "peak_memory_mb", peak, "skipped",
                          (int)b->skipped, "rows", b->rows));
  } else if (!b->o->llama) {
    (void)printf("\nmost memory of this process: %.0f MB\n", peak);
  }
  if (b->csv != NULL && fclose(b->csv) != 0 && code == PKV_EXIT_OK) {
    pkv_cli_error(b->cli, "cannot write %s", b->o->csv);
    code = PKV_EXIT_FAILURE;
  }
  json_decref(b->rows);
  pkv_model_close(b->model);
  return code;
}

static int run(const pkv_cli *cli, const void *options) {
  bench_model b = {.cli = cli, .o = options};
  pkv_error err = {PKV_OK, NULL, {0}};
  if ((b.o->model == NULL) == (b.o->random == NULL))
    return pkv_cli_usage(cli, b.o->model == NULL
                                  ? "--model FILE or --random-weights CONFIG is missing"
                                  : "--model and --random-weights exclude each other");
  if (b.o->shared && b.o->groups > 0)
    return pkv_cli_usage(cli, "--shared-prompt and --groups exclude each other");
  if (!parse_list(&b.prompts, b.o->prompts, MAX_TOKENS, true))
    return pkv_cli_usage(cli, "--prompt is '%s'; it takes token counts like 128,512", b.o->prompts);
  if (!parse_list(&b.depths, b.o->depths, MAX_TOKENS, false))
    return pkv_cli_usage(cli, "--depth is '%s'; it takes token counts like 0,2048", b.o->depths);
  if (!parse_list(&b.parallel, b.o->parallel, MAX_ROWS, true))
    return pkv_cli_usage(cli, "--parallel is '%s'; it takes counts up to %d like 1,8",
                         b.o->parallel, MAX_ROWS);
  if (b.o->json && b.o->llama)
    return pkv_cli_usage(cli, "--json and --llama-tables exclude each other");
  set_up(&b);
  if (b.o->csv != NULL && (b.csv = fopen(b.o->csv, "ae")) == NULL) {
    pkv_cli_error(cli, "cannot open %s", b.o->csv);
    return PKV_EXIT_FAILURE;
  }
  if (b.o->json) b.rows = json_array();
  return finish(&b, work(&b, &err), &err);
}

const pkv_command pkv_command_bench_model = {
    .name = "bench model",
    .summary = "measure a model's prefill, decode and start",
    .details =
        "Cells: pp512 is a prompt of 512 tokens up to its first answer token; tg64 is 64 tokens "
        "decoded from an empty cache, tg64@d2048 behind 2,048 cached ones; pp128x8 and tg32x8 are "
        "8 sequences together, prompts first (until the last one has a token), then 32 tokens of "
        "each; an s behind them says that all share one prompt, g4 that they share 4, which then "
        "count once; pp2048+32 has 32 tokens of each sequence's own behind them. start is the "
        "time from the start of a fresh process to the first byte of its answer, memory the most "
        "that process held.\n\n"
        "Tokens are random, speeds are tokens a second of whole engine steps, the choice of the "
        "likeliest token included. One unrecorded run comes before each cell. The CSV keeps every "
        "repetition.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(bench_model_options),
    .run = run,
};
