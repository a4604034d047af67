/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv run`: one prompt, one answer, streamed. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_memory.h"
#include "cli/commands.h"
#include "cli/prompt_text.h"
#include "server/text_stream.h"

typedef struct run_options {
  const char *model, *prompt, *file, *system;
  int32_t escape, chat, special, ignore_end, json, stats;
  int32_t max_tokens, top_k, threads, kv_dtype, activations, ctx, page, chunk, ranks, logprobs;
  double temperature, top_p;
  int64_t seed;
  int32_t device, weights;
  const char *products;
} run_options;

static const char *const kv_dtypes[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};
static const char *const activation_names[] = {"i8", "f32", NULL};

static const char *const devices[] = {"cpu", "cuda", NULL};

static const pkv_option options_table[] = {
    PKV_REQUIRED(run_options, model, 'm', "model", "FILE", "GGUF file, or folder of safetensors"),
    PKV_TEXT(run_options, prompt, 'p', "prompt", "TEXT", NULL, "the prompt"),
    PKV_TEXT(run_options, file, 'f', "file", "FILE", NULL,
             "read the prompt from a file, - is stdin"),
    PKV_FLAG(run_options, escape, 'e', "escape", "replace \\n, \\t, \\xHH and so on in the prompt"),
    PKV_FLAG(run_options, chat, 'c', "chat",
             "the prompt is a user's turn of the model's chat format"),
    PKV_TEXT(run_options, system, 's', "system", "TEXT", NULL, "system message, with --chat"),
    PKV_FLAG(run_options, special, 0, "special",
             "text that spells a control token becomes that token (without --chat)"),
    PKV_INT(run_options, max_tokens, 'n', "max-tokens", "N", "128", 1, INT32_MAX,
            "tokens to generate at most"),
    PKV_FLAG(run_options, ignore_end, 0, "ignore-end", "go on past the model's end tokens"),
    PKV_NUMBER(run_options, temperature, 't', "temperature", "T", "0", 0.0, 1000.0,
               "0 takes the likeliest token, 1 samples as the model says"),
    PKV_INT(run_options, top_k, 0, "top-k", "K", "0", 0, INT32_MAX,
            "sample among the K likeliest, 0 = all"),
    PKV_NUMBER(run_options, top_p, 0, "top-p", "P", "1", 0.0, 1.0,
               "sample among the likeliest that together have probability P"),
    PKV_INT(run_options, seed, 0, "seed", "N", "0", 0, INT64_MAX,
            "the same seed gives the same text"),
    PKV_CHOICE(run_options, device, 0, "device", devices, "cpu", "where the model runs"),
    PKV_INT(run_options, ranks, 0, "tensor-parallel-size", "N", "1", 1, PKV_MAX_RANKS,
            "with --device cuda: devices that compute together, the first N seen"),
    PKV_TEXT(run_options, products, 0, "products-file", "FILE", NULL,
             "with --device cuda: keeps which matrix products are the fastest, for faster starts"),
    PKV_WEIGHTS_OPTION(run_options),
    PKV_INT(run_options, threads, 0, "threads", "N", "0", 0, 1024, "0 = one a core"),
    PKV_CHOICE(run_options, kv_dtype, 0, "kv-dtype", kv_dtypes, "f16", "type of the KV cache"),
    PKV_CHOICE(run_options, activations, 0, "activations", activation_names, "i8",
               "i8 is fast, f32 exact"),
    PKV_INT(run_options, ctx, 0, "ctx", "N", "0", 0, INT32_MAX,
            "longest sequence in tokens, 0 = the model's"),
    PKV_INT(run_options, page, 0, "page", "N", "16", 1, 1024, "tokens in a cache page"),
    PKV_INT(run_options, chunk, 0, "chunk", "N", "0", 0, 65536,
            "prompt tokens in a step, 0 = 512, on a device 2048"),
    PKV_INT(run_options, logprobs, 0, "logprobs", "N", "0", 0, PKV_MAX_TOP_LOGPROBS,
            "with --json: log-probabilities, of the N likeliest too"),
    PKV_FLAG(run_options, stats, 0, "stats", "timings on stderr at the end"),
    PKV_FLAG(run_options, json, 0, "json", "print one JSON object at the end, do not stream"),
};

/* What one run owns. */
typedef struct run_state {
  const pkv_cli *cli;
  const run_options *options;
  pkv_model *model;
  pkv_engine *engine;
  pkv_buffer prompt;
  pkv_tokens tokens;
  pkv_text_stream stream;
  json_t *generated; /* [{id, logprob, top}] */
  pkv_finish finish;
  int32_t count;
  bool closed; /* stdout cannot be written any more */
  int64_t loaded_ns, begin_ns, first_ns, end_ns;
} run_state;

static pkv_status read_prompt(run_state *s, pkv_error *err) {
  const run_options *const o = s->options;
  if (o->prompt != NULL)
    PKV_TRY(pkv_buffer_append(&s->prompt, o->prompt, strlen(o->prompt), err));
  else
    PKV_TRY(pkv_prompt_read(&s->prompt, o->file, err));
  if (o->escape) PKV_TRY(pkv_prompt_unescape(&s->prompt, err));
  PKV_CHECK(err, s->prompt.size > 0, PKV_E_INVALID, "the prompt is empty");
  PKV_CHECK(err, !o->chat || memchr(s->prompt.data, 0, s->prompt.size) == NULL, PKV_E_INVALID,
            "the prompt holds a zero byte, which --chat cannot take");
  return PKV_OK;
}

static pkv_status tokenize_prompt(run_state *s, pkv_error *err) {
  const run_options *const o = s->options;
  if (!o->chat) {
    const uint32_t flags = PKV_TEXT_ADD_SPECIAL | (o->special ? PKV_TEXT_PARSE_SPECIAL : 0u);
    PKV_TRY(pkv_tokens_from_text(&s->tokens, s->model, s->prompt.data, s->prompt.size, flags, err));
    PKV_CHECK(err, s->tokens.count > 0, PKV_E_INVALID, "the prompt has no tokens");
    return PKV_OK;
  }
  const pkv_message messages[] = {{"system", o->system}, {"user", s->prompt.data}};
  const size_t skip = o->system == NULL ? 1 : 0;
  return pkv_tokens_from_chat(&s->tokens, s->model, messages + skip, 2 - skip, err);
}

static pkv_status create_engine(run_state *s, pkv_error *err) {
  const run_options *const o = s->options;
  pkv_engine_options options = PKV_ENGINE_OPTIONS_INIT;
  options.threads = o->threads;
  options.kv_dtype = (pkv_dtype)o->kv_dtype;
  options.activations = (pkv_activations)o->activations;
  options.page_tokens = o->page;
  options.prefill_chunk = o->chunk;
  options.max_seq_len = o->ctx;
  options.device = (pkv_device)o->device;
  options.tensor_parallel = o->ranks;
  options.products_file = o->products;
  options.batch_invariant = o->device == PKV_DEVICE_CPU;
  options.max_rows = 1;
  options.max_requests = 1;
  return pkv_engine_create(&s->engine, s->model, &options, err);
}

static pkv_status submit(run_state *s, int64_t *id, pkv_error *err) {
  const run_options *const o = s->options;
  pkv_request request = PKV_REQUEST_INIT;
  PKV_CHECK(err, s->tokens.count <= INT32_MAX, PKV_E_LIMIT, "the prompt has %zu tokens",
            s->tokens.count);
  request.prompt = s->tokens.ids;
  request.prompt_tokens = (int32_t)s->tokens.count;
  request.max_tokens = o->max_tokens;
  request.temperature = (float)o->temperature;
  request.top_k = o->top_k;
  request.top_p = (float)o->top_p;
  request.seed = (uint64_t)o->seed;
  request.ignore_end = o->ignore_end;
  request.logprobs = o->json && o->logprobs > 0;
  request.top_logprobs = o->json ? o->logprobs : 0;
  return pkv_engine_submit(id, s->engine, &request, err);
}

static json_t *event_json(const pkv_event *event) {
  json_t *object = json_pack("{s:i}", "id", (int)event->token), *top = json_array();
  for (int32_t i = 0; i < event->top_count; i++)
    pkv_json_add(&top, json_pack("{s:i, s:f}", "id", (int)event->top[i].token, "logprob",
                                 (double)event->top[i].logprob));
  if (isnan(event->logprob)) {
    json_decref(top);
    return object;
  }
  pkv_json_set(&object, "logprob", json_real((double)event->logprob));
  pkv_json_set(&object, "top", top);
  return object;
}

static pkv_status take_event(run_state *s, const pkv_event *event, pkv_error *err) {
  s->finish = event->finish;
  if (event->token >= 0) {
    if (s->count++ == 0) s->first_ns = pkv_clock_ns();
    /* The end token itself is no text of the answer. */
    if (event->finish != PKV_FINISH_STOP)
      PKV_TRY(pkv_text_stream_token(&s->stream, event->token, err));
    if (s->options->json) pkv_json_add(&s->generated, event_json(event));
  }
  if (event->finish != PKV_FINISH_NONE) PKV_TRY(pkv_text_stream_end(&s->stream, err));
  if (s->options->json) return PKV_OK;
  size_t bytes = 0;
  const char *const text = pkv_text_stream_take(&s->stream, &bytes);
  if (bytes > 0 && !pkv_cli_write(text, bytes)) s->closed = true;
  return PKV_OK;
}

static pkv_status generate(run_state *s, pkv_error *err) {
  int64_t id = 0;
  s->begin_ns = pkv_clock_ns();
  PKV_TRY(submit(s, &id, err));
  while (s->finish == PKV_FINISH_NONE) {
    pkv_event event;
    size_t count = 0;
    if (pkv_cli_interrupted() || s->closed) pkv_engine_cancel(s->engine, id);
    PKV_TRY(pkv_engine_step(&event, 1, &count, s->engine, err));
    if (count > 0) PKV_TRY(take_event(s, &event, err));
  }
  s->end_ns = pkv_clock_ns();
  PKV_CHECK(err, s->finish != PKV_FINISH_ERROR, PKV_E_INTERNAL,
            "the model's output is not finite after %d tokens: damaged weights?", (int)s->count);
  return PKV_OK;
}

static double seconds_between(int64_t from, int64_t to) {
  return to > from ? (double)(to - from) * 1e-9 : 0.0;
}

static double rate(double tokens, double seconds) {
  return tokens > 0.0 && seconds > 0.0 ? tokens / seconds : 0.0;
}

static int print_json(const run_state *s) {
  const double first = s->count > 0 ? seconds_between(s->begin_ns, s->first_ns) : 0.0;
  const double rest = s->count > 0 ? seconds_between(s->first_ns, s->end_ns) : 0.0;
  return pkv_cli_json(
      s->cli, json_pack("{s:s%, s:s, s:i, s:i, s:O, s:{s:f, s:f, s:f, s:f, s:f}}", "text",
                        s->stream.text.size > 0 ? s->stream.text.data : "", s->stream.text.size,
                        "finish", pkv_finish_text(s->finish), "prompt_tokens", (int)s->tokens.count,
                        "generated_tokens", (int)s->count, "tokens", s->generated, "timings",
                        "load_s", seconds_between(0, s->loaded_ns), "first_token_s", first,
                        "total_s", seconds_between(s->begin_ns, s->end_ns), "prefill_tokens_per_s",
                        rate((double)s->tokens.count, first), "decode_tokens_per_s",
                        rate((double)s->count - 1.0, rest)));
}

static void print_stats(const run_state *s) {
  const double first = s->count > 0 ? seconds_between(s->begin_ns, s->first_ns) : 0.0;
  const double rest = s->count > 0 ? seconds_between(s->first_ns, s->end_ns) : 0.0;
  (void)fflush(stdout);
  (void)fprintf(stderr,
                "pkv run: loaded in %.2f s; prompt of %zu tokens, first token after %.2f s "
                "(%.1f tokens/s); %d generated, %.1f tokens/s\n",
                seconds_between(0, s->loaded_ns), s->tokens.count, first,
                rate((double)s->tokens.count, first), (int)s->count,
                rate((double)s->count - 1.0, rest));
}

static pkv_status work(run_state *s, pkv_error *err) {
  const pkv_model_options model_options =
      pkv_model_options_for(s->options->weights, s->options->device);
  const int64_t begin = pkv_clock_ns();
  PKV_TRY(pkv_model_open_named(&s->model, s->options->model, &model_options, err));
  PKV_TRY(read_prompt(s, err));
  PKV_TRY(tokenize_prompt(s, err));
  PKV_TRY(create_engine(s, err));
  pkv_text_stream_init(&s->stream, s->model, PKV_PROMPT_BYTES);
  s->generated = json_array();
  s->loaded_ns = pkv_clock_ns() - begin;
  return generate(s, err);
}

static int run(const pkv_cli *cli, const void *opaque) {
  const run_options *const o = opaque;
  run_state s = {.cli = cli, .options = o};
  pkv_error err = {PKV_OK, "", ""};
  int code = PKV_EXIT_OK;
  if ((o->prompt == NULL) == (o->file == NULL))
    return pkv_cli_usage(cli, o->prompt == NULL ? "--prompt TEXT or --file FILE is missing"
                                                : "--prompt and --file exclude each other");
  if (o->system != NULL && !o->chat) return pkv_cli_usage(cli, "--system needs --chat");
  pkv_buffer_init(&s.prompt, PKV_PROMPT_BYTES, NULL);
  const pkv_status status = work(&s, &err);
  if (!o->json && s.stream.text.size > 0 && s.stream.text.data[s.stream.text.size - 1] != '\n')
    (void)pkv_cli_write("\n", 1);
  if (status != PKV_OK)
    code = pkv_cli_fail(cli, &err);
  else if (o->json)
    code = print_json(&s);
  if (status == PKV_OK && o->stats) print_stats(&s);
  if (s.finish == PKV_FINISH_CANCELLED) code = PKV_EXIT_INTERRUPTED;
  json_decref(s.generated);
  pkv_text_stream_deinit(&s.stream);
  pkv_engine_destroy(s.engine);
  pkv_tokens_free(&s.tokens);
  pkv_buffer_deinit(&s.prompt);
  pkv_model_close(s.model);
  return code;
}

const pkv_command pkv_command_run = {
    .name = "run",
    .summary = "Generate text from a prompt",
    .details = "Streams the answer to standard output and ends it with a newline. Takes the "
               "likeliest token unless --temperature is given.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(run_options),
    .run = run,
};
