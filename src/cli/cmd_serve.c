/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv serve`: an HTTP server that OpenAI's clients can talk to. */
#include <stdio.h>
#include <string.h>

#include "base/limits.h"
#include "base/log.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/prompt_text.h"
#include "cli/sandbox.h"
#include "cli/serve_log.h"
#include "server/serve.h"

typedef struct serve_options {
  const char *config, *model, *host, *name, *key_file, *keys, *cors, *products;
  int32_t port, threads, kv_dtype, activations, ctx, page, chunk, rows, requests, connections;
  int32_t header_s, body_s, idle_s, stall_s, drain_s, progress_s;
  int32_t order, admission, beside, no_cache, shared_cache, device, ranks, weights;
  int32_t log_format, log_level, no_access_log, sandbox;
  int64_t cache, max_body;
  double swap;
} serve_options;

static const char *const kv_dtypes[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};
static const char *const activation_names[] = {"i8", "f32", NULL};

/* As pkv_sched_order and pkv_sched_policy count them. */
static const char *const orders[] = {"tree", "fcfs", "priority", "cht", "lpm", "dfs-weight", NULL};
static const char *const admissions[] = {"always",   "static", "static-chain", "ucb", "q-learning",
                                         "marginal", NULL};

static const char *const log_formats[] = {"text", "json", NULL};
/* As pkv_log_level counts them. */
static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};
static const char *const devices[] = {"cpu", "cuda", NULL};

static const pkv_option options_table[] = {
    PKV_TEXT(serve_options, config, 0, "config", "FILE", NULL,
             "settings, a line each: NAME = VALUE, with the names of these options"),
    PKV_TEXT(serve_options, model, 'm', "model", "FILE", NULL, "the same as MODEL"),
    PKV_TEXT(serve_options, host, 0, "host", "ADDRESS", "127.0.0.1", "address to listen on"),
    PKV_INT(serve_options, port, 'p', "port", "N", "8080", 0, 65535, "0 = any free one"),
    PKV_TEXT(serve_options, name, 0, "name", "TEXT", NULL,
             "the model's name for clients; by default the file's"),
    PKV_TEXT(serve_options, key_file, 0, "api-key-file", "FILE", NULL,
             "keys, one a line: all but /health then needs one of them"),
    PKV_TEXT(serve_options, keys, 0, "api-keys", "LIST", NULL,
             "more keys, separated by commas; in PKV_SERVE_API_KEYS other users do not see them"),
    PKV_TEXT(serve_options, cors, 0, "cors", "LIST", NULL,
             "origins whose pages may ask, separated by commas"),
    PKV_CHOICE(serve_options, device, 0, "device", devices, "cpu", "where the model runs"),
    PKV_INT(serve_options, ranks, 0, "tensor-parallel-size", "N", "1", 1, PKV_MAX_RANKS,
            "with --device cuda: devices that compute together, the first N seen"),
    PKV_TEXT(serve_options, products, 0, "products-file", "FILE", NULL,
             "with --device cuda: keeps which matrix products are the fastest, for faster starts"),
    PKV_NUMBER(serve_options, swap, 0, "swap-space", "GIB", "0", 0.0, 65536.0,
               "with --device cuda: host memory in which preempted requests keep their pages"),
    PKV_WEIGHTS_OPTION(serve_options),
    PKV_INT(serve_options, threads, 0, "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_CHOICE(serve_options, kv_dtype, 0, "kv-dtype", kv_dtypes, "f16", "type of the KV cache"),
    PKV_CHOICE(serve_options, activations, 0, "activations", activation_names, "i8",
               "i8 is fast, f32 exact"),
    PKV_INT(serve_options, ctx, 0, "ctx", "N", "0", 0, INT32_MAX,
            "longest sequence in tokens, 0 = the model's"),
    PKV_INT(serve_options, cache, 0, "cache", "N", "0", 0, INT64_MAX,
            "tokens the KV cache holds, 0 = the longest sequence; on a device what fits"),
    PKV_INT(serve_options, page, 0, "page", "N", "16", 1, 1024, "tokens in a cache page"),
    PKV_INT(serve_options, chunk, 0, "chunk", "N", "0", 0, 65536,
            "prompt tokens in a step, 0 = 512, on a device 2048"),
    PKV_INT(serve_options, beside, 0, "chunk-beside", "N", "0", 0, 65536,
            "prompt tokens in a step while others decode, 0 = as --chunk"),
    PKV_CHOICE(serve_options, order, 0, "order", orders, "fcfs", "who is admitted next"),
    PKV_CHOICE(serve_options, admission, 0, "admission", admissions, "always",
               "when to stop admitting"),
    PKV_FLAG(serve_options, no_cache, 0, "no-prefix-cache", "keep no pages of requests that ended"),
    PKV_FLAG(serve_options, shared_cache, 0, "share-between-keys",
             "clients with different keys share cached prefixes"),
    PKV_INT(serve_options, rows, 0, "rows", "N", "32", 1, 4096, "requests in the batch at once"),
    PKV_INT(serve_options, requests, 0, "requests", "N", PKV_LIMIT_TEXT(PKV_REQUESTS), 1, 65536,
            "requests that run or wait; more are answered 503"),
    PKV_INT(serve_options, connections, 0, "connections", "N", PKV_LIMIT_TEXT(PKV_CONNECTIONS), 1,
            65536, "open connections; more wait to be accepted"),
    PKV_INT(serve_options, max_body, 0, "max-body", "BYTES", PKV_LIMIT_TEXT(PKV_BODY_BYTES), 1,
            1073741824, "largest body of a request"),
    PKV_INT(serve_options, header_s, 0, "header-timeout", "S", PKV_LIMIT_TEXT(PKV_HEADER_S), 1,
            3600, "for a request's headers"),
    PKV_INT(serve_options, body_s, 0, "body-timeout", "S", PKV_LIMIT_TEXT(PKV_BODY_S), 1, 3600,
            "for a request's body"),
    PKV_INT(serve_options, idle_s, 0, "idle-timeout", "S", PKV_LIMIT_TEXT(PKV_IDLE_S), 1, 3600,
            "between two requests of a connection"),
    PKV_INT(serve_options, stall_s, 0, "stall-timeout", "S", PKV_LIMIT_TEXT(PKV_STALL_S), 1, 3600,
            "for a client that does not read its answer"),
    PKV_INT(serve_options, drain_s, 0, "drain-timeout", "S", "30", 0, 3600,
            "for running requests after SIGTERM"),
    PKV_INT(serve_options, progress_s, 0, "progress-timeout", "S", "60", 1, 3600,
            "without a step while there is work: /ready says no"),
    PKV_CHOICE(serve_options, log_format, 0, "log-format", log_formats, "text",
               "lines of the log on stderr"),
    PKV_CHOICE(serve_options, log_level, 0, "log-level", log_levels, "info",
               "info: one record a request, never what it says"),
    PKV_FLAG(serve_options, no_access_log, 0, "no-access-log", "no records of requests"),
    PKV_FLAG(serve_options, sandbox, 0, "sandbox",
             "open no file but the model's, start no program, connect nowhere"),
};

typedef struct serve_state {
  const pkv_cli *cli;
  const char *host, *path;
  pkv_model *model;
  pkv_serve_log log;
  bool sandbox;
  pkv_model_options opening;
} serve_state;

static void on_listening(void *user, int32_t port) {
  const serve_state *const s = user;
  const bool v6 = strchr(s->host, ':') != NULL;
  pkv_log(PKV_LOG_INFO, "serve", "listening on http://%s%s%s:%d", v6 ? "[" : "", s->host,
          v6 ? "]" : "", (int)port);
}

static void on_access(void *user, const pkv_access *access) {
  const serve_state *const s = user;
  pkv_serve_log_access(&s->log, access);
}

static pkv_status load(void *user, pkv_model **out, pkv_error *err) {
  serve_state *const s = user;
  *out = NULL;
  if (s->sandbox) PKV_TRY(pkv_sandbox_calls(err)); /* the socket listens, nothing was read yet */
  const pkv_status status = pkv_model_open_named(&s->model, s->path, &s->opening, err);
  *out = s->model;
  return status;
}

/* The file's name without its folders and ending, into name[bytes]; "model" if it is no UTF-8. */
static void name_of_file(char *name, size_t bytes, const char *path) {
  const char *const slash = strrchr(path, '/');
  (void)snprintf(name, bytes, "%s", slash != NULL ? slash + 1 : path);
  char *const dot = strrchr(name, '.');
  if (dot != NULL && dot != name) *dot = '\0';
  if (name[0] == '\0' || !pkv_utf8_valid(name, strlen(name))) (void)snprintf(name, bytes, "model");
}

static void fill_engine(pkv_engine_options *engine, const serve_options *o) {
  *engine = (pkv_engine_options)PKV_ENGINE_OPTIONS_INIT;
  engine->threads = o->threads;
  engine->kv_dtype = (pkv_dtype)o->kv_dtype;
  engine->activations = (pkv_activations)o->activations;
  engine->max_seq_len = o->ctx;
  engine->cache_tokens = o->cache;
  engine->page_tokens = o->page;
  engine->prefill_chunk = o->chunk;
  engine->max_rows = o->rows;
  engine->max_requests = o->requests;
  engine->device = (pkv_device)o->device;
  engine->tensor_parallel = o->ranks;
  engine->swap_bytes = (int64_t)(o->swap * 1073741824.0);
  engine->products_file = o->products;
  engine->batch_invariant = o->device == PKV_DEVICE_CPU;
  engine->route_stats = 1;
  engine->order = (pkv_sched_order)o->order;
  engine->admission = (pkv_sched_policy)o->admission;
  engine->prefill_beside = o->beside;
  engine->prefix_cache = !o->no_cache;
}

static void fill_limits(pkv_serve_options *options, const serve_options *o) {
  options->max_body = o->max_body;
  options->max_connections = o->connections;
  options->header_s = o->header_s;
  options->body_s = o->body_s;
  options->idle_s = o->idle_s;
  options->stall_s = o->stall_s;
  options->drain_s = o->drain_s;
  options->progress_s = o->progress_s;
}

static void fill_options(pkv_serve_options *options, const serve_options *o, const char *name) {
  memset(options, 0, sizeof *options);
  fill_engine(&options->engine, o);
  fill_limits(options, o);
  options->host = o->host;
  options->port = o->port;
  options->name = o->name != NULL ? o->name : name;
  options->key_file = o->key_file;
  options->keys = o->keys;
  options->origins = o->cors;
  options->shared_cache = o->shared_cache != 0;
  options->load = load;
  options->listening = on_listening;
  if (!o->no_access_log) options->access = on_access;
}

static int run(const pkv_cli *cli, const void *opaque) {
  const serve_options *const o = opaque;
  pkv_serve_options options;
  pkv_error err = {PKV_OK, "", ""};
  char name[256];
  const char *const path = cli->operand_count > 0 ? cli->operands[0] : o->model;
  serve_state state = {.cli = cli, .host = o->host, .path = path, .sandbox = o->sandbox != 0};
  state.log = (pkv_serve_log){o->log_format == 1, (pkv_log_level)o->log_level};
  state.opening = pkv_model_options_for(o->weights, o->device);
  if (path == NULL) return pkv_cli_usage(cli, "MODEL is missing");
  name_of_file(name, sizeof name, path);
  if (o->name != NULL && (o->name[0] == '\0' || !pkv_utf8_valid(o->name, strlen(o->name))))
    return pkv_cli_usage(cli, "--name must be some text in UTF-8");
  fill_options(&options, o, name);
  options.user = &state;
  if (state.sandbox && o->device != PKV_DEVICE_CPU)
    return pkv_cli_usage(cli, "--sandbox is for --device cpu: a driver opens files as it goes");
  pkv_log_set(pkv_serve_log_line, &state.log);
  pkv_status status = state.sandbox ? pkv_sandbox_files(path, &o->key_file, 1, &err) : PKV_OK;
  if (status == PKV_OK) status = pkv_serve(&options, &err);
  if (status != PKV_OK)
    pkv_log(PKV_LOG_ERROR, "serve", "%s",
            err.text[0] != '\0' ? err.text : pkv_status_text(err.status));
  pkv_log_set(NULL, NULL);
  pkv_model_close(state.model);
  return status == PKV_OK ? PKV_EXIT_OK : PKV_EXIT_FAILURE;
}

const pkv_command pkv_command_serve = {
    .name = "serve",
    .summary = "Serve a model over HTTP",
    .details = "Answers GET /health, /ready, /metrics, /v1/models, /props and /slots, and POST "
               "/v1/completions, /v1/chat/completions, /completion, /tokenize, /detokenize and "
               "/apply-template as the clients of OpenAI and llama-server expect them; / is a "
               "page that shows what it does. The port is open before the model is loaded: /ready "
               "says when it is. Listens "
               "on this machine alone unless --host says more; there is no TLS, so anything more "
               "belongs behind a proxy.\n\nWith --sandbox the kernel refuses this process, "
               "from before the model is read until its end, what it does not need: Landlock all "
               "files but the model's, --api-key-file and some of the system's, those to be read "
               "only; seccomp new programs, processes, connections and code. A kernel that has not "
               "both is an error.\n\nSIGTERM or SIGINT: no more requests are "
               "taken, and those that run are finished; a second one cancels them.\n\nEvery "
               "option is also a variable (--api-keys: PKV_SERVE_API_KEYS) and a line of the file "
               "of --config (api-keys = ...; flags take true or false). The command line goes "
               "first, then the environment, then the file; what is not known is refused.",
    .operands = "[MODEL]",
    .max_operands = 1,
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(serve_options),
    .settings_of = &pkv_command_serve,
    .env_prefix = "PKV_SERVE_",
    .run = run,
};
