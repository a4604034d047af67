/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv serve`: an HTTP server that OpenAI's clients can talk to. */
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/prompt_text.h"
#include "server/serve.h"

typedef struct serve_options {
  const char *host, *name, *key_file;
  int32_t port, threads, kv_dtype, activations, ctx, page, chunk, rows, requests, connections;
  int32_t header_s, body_s, idle_s, stall_s, drain_s;
  int64_t cache, max_body;
} serve_options;

static const char *const kv_dtypes[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};
static const char *const activation_names[] = {"i8", "f32", NULL};

static const pkv_option options_table[] = {
    PKV_TEXT(serve_options, host, 0, "host", "ADDRESS", "127.0.0.1", "address to listen on"),
    PKV_INT(serve_options, port, 'p', "port", "N", "8080", 0, 65535, "0 = any free one"),
    PKV_TEXT(serve_options, name, 0, "name", "TEXT", NULL,
             "the model's name for clients; by default the file's"),
    PKV_TEXT(serve_options, key_file, 0, "api-key-file", "FILE", NULL,
             "keys, one a line: all but /health then needs one of them"),
    PKV_INT(serve_options, threads, 0, "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_CHOICE(serve_options, kv_dtype, 0, "kv-dtype", kv_dtypes, "f16", "type of the KV cache"),
    PKV_CHOICE(serve_options, activations, 0, "activations", activation_names, "i8",
               "i8 is fast, f32 exact"),
    PKV_INT(serve_options, ctx, 0, "ctx", "N", "0", 0, INT32_MAX,
            "longest sequence in tokens, 0 = the model's"),
    PKV_INT(serve_options, cache, 0, "cache", "N", "0", 0, INT64_MAX,
            "tokens the KV cache holds, 0 = the longest sequence"),
    PKV_INT(serve_options, page, 0, "page", "N", "16", 1, 1024, "tokens in a cache page"),
    PKV_INT(serve_options, chunk, 0, "chunk", "N", "512", 1, 65536, "prompt tokens in a step"),
    PKV_INT(serve_options, rows, 0, "rows", "N", "32", 1, 4096, "requests in the batch at once"),
    PKV_INT(serve_options, requests, 0, "requests", "N", "256", 1, 65536,
            "requests that run or wait; more are answered 503"),
    PKV_INT(serve_options, connections, 0, "connections", "N", "512", 1, 65536,
            "open connections; more wait to be accepted"),
    PKV_INT(serve_options, max_body, 0, "max-body", "BYTES", "8388608", 1, 1073741824,
            "largest body of a request"),
    PKV_INT(serve_options, header_s, 0, "header-timeout", "S", "10", 1, 3600,
            "for a request's headers"),
    PKV_INT(serve_options, body_s, 0, "body-timeout", "S", "30", 1, 3600, "for a request's body"),
    PKV_INT(serve_options, idle_s, 0, "idle-timeout", "S", "60", 1, 3600,
            "between two requests of a connection"),
    PKV_INT(serve_options, stall_s, 0, "stall-timeout", "S", "30", 1, 3600,
            "for a client that does not read its answer"),
    PKV_INT(serve_options, drain_s, 0, "drain-timeout", "S", "30", 0, 3600,
            "for running requests after SIGTERM"),
};

typedef struct serve_state {
  const pkv_cli *cli;
  const char *host;
} serve_state;

static void on_ready(void *user, int32_t port) {
  const serve_state *const s = user;
  const bool v6 = strchr(s->host, ':') != NULL;
  pkv_cli_error(s->cli, "listening on http://%s%s%s:%d", v6 ? "[" : "", s->host, v6 ? "]" : "",
                (int)port);
}

/* The file's name without its folders and ending, into name[bytes]; "model" if it is no UTF-8. */
static void name_of_file(char *name, size_t bytes, const char *path) {
  const char *const slash = strrchr(path, '/');
  (void)snprintf(name, bytes, "%s", slash != NULL ? slash + 1 : path);
  char *const dot = strrchr(name, '.');
  if (dot != NULL && dot != name) *dot = '\0';
  if (name[0] == '\0' || !pkv_utf8_valid(name, strlen(name))) (void)snprintf(name, bytes, "model");
}

static int run(const pkv_cli *cli, const void *opaque) {
  const serve_options *const o = opaque;
  const pkv_model_options model_options = PKV_MODEL_OPTIONS_INIT;
  pkv_serve_options options;
  pkv_model *model = NULL;
  pkv_error err = {PKV_OK, "", ""};
  char name[256];
  serve_state state = {cli, o->host};
  name_of_file(name, sizeof name, cli->operands[0]);
  if (o->name != NULL && (o->name[0] == '\0' || !pkv_utf8_valid(o->name, strlen(o->name))))
    return pkv_cli_usage(cli, "--name must be some text in UTF-8");
  memset(&options, 0, sizeof options);
  options.engine = (pkv_engine_options)PKV_ENGINE_OPTIONS_INIT;
  options.engine.threads = o->threads;
  options.engine.kv_dtype = (pkv_dtype)o->kv_dtype;
  options.engine.activations = (pkv_activations)o->activations;
  options.engine.max_seq_len = o->ctx;
  options.engine.cache_tokens = o->cache;
  options.engine.page_tokens = o->page;
  options.engine.prefill_chunk = o->chunk;
  options.engine.max_rows = o->rows;
  options.engine.max_requests = o->requests;
  options.host = o->host;
  options.port = o->port;
  options.name = o->name != NULL ? o->name : name;
  options.key_file = o->key_file;
  options.max_body = o->max_body;
  options.max_connections = o->connections;
  options.header_s = o->header_s;
  options.body_s = o->body_s;
  options.idle_s = o->idle_s;
  options.stall_s = o->stall_s;
  options.drain_s = o->drain_s;
  options.ready = on_ready;
  options.user = &state;
  pkv_status status = pkv_model_open_named(&model, cli->operands[0], &model_options, &err);
  if (status == PKV_OK) status = pkv_serve(&options, model, &err);
  pkv_model_close(model);
  return status == PKV_OK ? PKV_EXIT_OK : pkv_cli_fail(cli, &err);
}

const pkv_command pkv_command_serve = {
    .name = "serve",
    .summary = "Serve a model over HTTP",
    .details = "Answers GET /health, /v1/models and /metrics, and POST /v1/completions and "
               "/v1/chat/completions as OpenAI's clients expect them, streamed or whole. Listens "
               "on this machine alone unless --host says more; there is no TLS, so anything more "
               "belongs behind a proxy.\n\nSIGTERM or SIGINT: no more requests are "
               "taken, and those that run are finished; a second one cancels them.",
    .operands = "MODEL",
    .min_operands = 1,
    .max_operands = 1,
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(serve_options),
    .run = run,
};
