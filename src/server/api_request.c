/* SPDX-License-Identifier: Apache-2.0 */
/* The settings of a completion: one table of numbers, their bounds and whose fields they are. */
#include "server/api_request.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "server/api_constraint.h"
#include "server/api_fields.h"
#include "server/tools.h"

/* The numeric fields. A field that is null is absent. */
typedef struct number_field {
  const char *name;
  bool whole;
  double low, high;
  bool open;       /* `low` itself is refused */
  double fallback; /* of /v1 */
  double llama;    /* of llama-server's own route */
} number_field;

enum {
  FIELD_MAX_TOKENS,
  FIELD_MAX_COMPLETION_TOKENS,
  FIELD_N_PREDICT,
  FIELD_MIN_TOKENS,
  FIELD_TEMPERATURE,
  FIELD_TOP_P,
  FIELD_TOP_K,
  FIELD_MIN_P,
  FIELD_SEED,
  FIELD_N,
  FIELD_BEST_OF,
  FIELD_FREQUENCY_PENALTY,
  FIELD_PRESENCE_PENALTY,
  FIELD_REPETITION_PENALTY,
  FIELD_REPEAT_PENALTY,
  FIELD_TOP_LOGPROBS,
  FIELD_N_PROBS,
  NUMBER_FIELDS
};

static const number_field number_fields[NUMBER_FIELDS] = {
    [FIELD_MAX_TOKENS] = {"max_tokens", true, 0, INT32_MAX, false, 16, INT32_MAX},
    [FIELD_MAX_COMPLETION_TOKENS] = {"max_completion_tokens", true, 0, INT32_MAX, false, 0, 0},
    [FIELD_N_PREDICT] = {"n_predict", true, -1, INT32_MAX, false, -1, -1},
    [FIELD_MIN_TOKENS] = {"min_tokens", true, 0, INT32_MAX, false, 0, 0},
    [FIELD_TEMPERATURE] = {"temperature", false, 0, 100, false, 1, 0.8},
    [FIELD_TOP_P] = {"top_p", false, 0, 1, true, 1, 0.95},
    [FIELD_TOP_K] = {"top_k", true, -1, INT32_MAX, false, 0, 40},
    [FIELD_MIN_P] = {"min_p", false, 0, 1, false, 0, 0.05},
    [FIELD_SEED] = {"seed", true, -9223372036854775808.0, 9223372036854774784.0, false, 0, 0},
    [FIELD_N] = {"n", true, 1, PKV_API_N, false, 1, 1},
    [FIELD_BEST_OF] = {"best_of", true, 1, PKV_API_N, false, 1, 1},
    [FIELD_FREQUENCY_PENALTY] = {"frequency_penalty", false, -2, 2, false, 0, 0},
    [FIELD_PRESENCE_PENALTY] = {"presence_penalty", false, -2, 2, false, 0, 0},
    [FIELD_REPETITION_PENALTY] = {"repetition_penalty", false, 0.01, 100, false, 1, 1},
    [FIELD_REPEAT_PENALTY] = {"repeat_penalty", false, 0.01, 100, false, 1, 1},
    [FIELD_TOP_LOGPROBS] = {"top_logprobs", true, 0, PKV_MAX_TOP_LOGPROBS, false, 0, 0},
    [FIELD_N_PROBS] = {"n_probs", true, 0, PKV_MAX_TOP_LOGPROBS, false, 0, 0},
};

typedef struct number_value {
  bool given;
  double real;
  int64_t whole;
} number_value;

static bool read_number(number_value *out, pkv_api_error *error, const json_t *root,
                        const number_field *f, bool llama) {
  const json_t *const value = pkv_api_field(root, f->name);
  const double fallback = llama ? f->llama : f->fallback;
  *out = (number_value){false, fallback, (int64_t)fallback};
  if (value == NULL) return true;
  if (f->whole ? !json_is_integer(value) : !json_is_number(value))
    return pkv_api_refuse(error, 400, "invalid_type", f->name, "%s must be a %s", f->name,
                          f->whole ? "whole number" : "number");
  out->given = true;
  out->real = json_number_value(value);
  out->whole = json_is_integer(value) ? (int64_t)json_integer_value(value) : 0;
  if (!(out->real >= f->low && out->real <= f->high) || (f->open && out->real <= f->low))
    return pkv_api_refuse(error, 400, "out_of_range", f->name, "%s must be from %.17g%s to %.17g",
                          f->name, f->low, f->open ? " (itself excluded)" : "", f->high);
  return true;
}

static bool add_stop(pkv_stops *stops, pkv_api_error *error, const json_t *value) {
  if (!json_is_string(value))
    return pkv_api_refuse(error, 400, "invalid_type", "stop",
                          "stop must be a string or a list of strings");
  const size_t bytes = json_string_length(value);
  if (bytes < 1 || bytes > PKV_MAX_STOP_BYTES)
    return pkv_api_refuse(error, 400, "out_of_range", "stop",
                          "a stop string must have 1 to %d bytes", PKV_MAX_STOP_BYTES);
  if (stops->count == PKV_MAX_STOPS)
    return pkv_api_refuse(error, 400, "out_of_range", "stop", "at most %d stop strings are taken",
                          PKV_MAX_STOPS);
  memcpy(stops->text[stops->count++], json_string_value(value), bytes + 1);
  return true;
}

static bool read_stops(pkv_stops *stops, pkv_api_error *error, const json_t *root) {
  const json_t *const value = pkv_api_field(root, "stop");
  size_t i;
  const json_t *item;
  stops->count = 0;
  if (value == NULL) return true;
  if (!json_is_array(value)) return add_stop(stops, error, value);
  json_array_foreach(value, i, item) if (!add_stop(stops, error, item)) return false;
  return true;
}

/* Fields that may only say what happens anyway. */
static bool refuse_unserved(pkv_api_error *error, const json_t *root, bool chat) {
  static const char *const names[] = {
      "tools",          "functions",       "tool_choice",     "suffix",
      "stop_token_ids", "guided_regex",    "guided_choice",   "modalities",
      "audio",          "use_beam_search", "prompt_logprobs", "structured_outputs",
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const json_t *const value = pkv_api_field(root, names[i]);
    if (chat && strncmp(names[i], "tool", 4) == 0) continue;
    if (value == NULL || json_is_false(value)) continue;
    if ((json_is_array(value) && json_array_size(value) == 0) ||
        (json_is_object(value) && json_object_size(value) == 0) ||
        (json_is_integer(value) && json_integer_value(value) == 0) ||
        (json_is_string(value) &&
         (json_string_length(value) == 0 || strcmp(json_string_value(value), "none") == 0)))
      continue;
    return pkv_api_refuse(error, 400, "unsupported", names[i], "%s is not supported", names[i]);
  }
  return true;
}

static bool read_stream(pkv_api_request *out, pkv_api_error *error, const json_t *root) {
  const json_t *const options = pkv_api_field(root, "stream_options");
  if (!pkv_api_flag(&out->stream, error, root, "stream", false)) return false;
  out->include_usage = false;
  if (options == NULL) return true;
  if (!json_is_object(options))
    return pkv_api_refuse(error, 400, "invalid_type", "stream_options",
                          "stream_options must be an object");
  if (!out->stream)
    return pkv_api_refuse(error, 400, "invalid_value", "stream_options",
                          "stream_options needs stream to be true");
  return pkv_api_flag(&out->include_usage, error, options, "include_usage", false);
}

/* Chats: logprobs is a flag, top_logprobs how many others. Completions: logprobs is that number. */
static bool read_logprobs(pkv_api_request *out, pkv_api_error *error, const json_t *root,
                          const number_value *v) {
  static const number_field legacy = {"logprobs", true, 0, 5, false, 0, 0};
  pkv_request *const r = &out->job.request;
  number_value number = {false, 0.0, 0};
  if (out->kind == PKV_API_LLAMA) {
    out->logprobs = v[FIELD_N_PROBS].whole > 0;
    r->top_logprobs = (int32_t)v[FIELD_N_PROBS].whole;
  } else if (out->kind == PKV_API_CHAT) {
    if (!pkv_api_flag(&out->logprobs, error, root, "logprobs", false)) return false;
    if (v[FIELD_TOP_LOGPROBS].whole > 0 && !out->logprobs)
      return pkv_api_refuse(error, 400, "invalid_value", "top_logprobs",
                            "top_logprobs needs logprobs to be true");
    r->top_logprobs = (int32_t)v[FIELD_TOP_LOGPROBS].whole;
  } else if (!json_is_false(pkv_api_field(root, "logprobs"))) {
    if (!read_number(&number, error, root, &legacy, false)) return false;
    out->logprobs = number.given;
    r->top_logprobs = (int32_t)number.whole;
  }
  r->logprobs = out->logprobs;
  return true;
}

static bool add_bias(pkv_job_spec *job, pkv_api_error *error, const pkv_model *model, int64_t token,
                     const json_t *value) {
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, model);
  if (token < 0 || token >= info.vocab)
    return pkv_api_refuse(error, 400, "out_of_range", "logit_bias",
                          "logit_bias may name tokens from 0 to %d", (int)info.vocab - 1);
  const double bias = json_is_false(value) ? -100.0 : json_number_value(value);
  if (!(json_is_number(value) || json_is_false(value)) || !(bias >= -100.0 && bias <= 100.0))
    return pkv_api_refuse(error, 400, "out_of_range", "logit_bias",
                          "a logit_bias must be a number from -100 to 100");
  if (job->bias_count == PKV_MAX_LOGIT_BIAS)
    return pkv_api_refuse(error, 400, "out_of_range", "logit_bias",
                          "logit_bias may have %d entries", PKV_MAX_LOGIT_BIAS);
  job->bias[job->bias_count++] = (pkv_logit_bias){(int32_t)token, (float)bias};
  return true;
}

/* {"token": bias}, or llama-server's [[token, bias]]. */
static bool read_bias(pkv_job_spec *job, pkv_api_error *error, const pkv_model *model,
                      const json_t *root) {
  const json_t *const map = pkv_api_field(root, "logit_bias");
  const char *key;
  size_t i;
  json_t *value;
  job->bias_count = 0;
  if (map == NULL) return true;
  if (json_is_object(map)) {
    json_object_foreach((json_t *)(uintptr_t)map, key, value) {
      int64_t token = -1;
      if (!pkv_parse_i64(&token, key, 0, INT32_MAX)) token = -1;
      if (!add_bias(job, error, model, token, value)) return false;
    }
    return true;
  }
  if (!json_is_array(map))
    return pkv_api_refuse(error, 400, "invalid_type", "logit_bias",
                          "logit_bias must be an object of token ids and numbers");
  json_array_foreach(map, i, value) {
    const json_t *const id = json_array_get(value, 0);
    if (!json_is_integer(id) || json_array_size(value) != 2)
      return pkv_api_refuse(error, 400, "invalid_type", "logit_bias",
                            "an entry of logit_bias must be a pair of token id and number");
    if (!add_bias(job, error, model, json_integer_value(id), json_array_get(value, 1)))
      return false;
  }
  return true;
}

/* How many tokens the answer may have. */
static bool read_length(pkv_api_request *out, pkv_api_error *error, const number_value *v) {
  pkv_request *const r = &out->job.request;
  const char *name = "max_tokens";
  int64_t most = v[FIELD_MAX_TOKENS].whole;
  if (out->kind == PKV_API_CHAT && !v[FIELD_MAX_TOKENS].given) most = INT32_MAX;
  if (out->kind != PKV_API_LLAMA && v[FIELD_MAX_COMPLETION_TOKENS].given) {
    most = v[FIELD_MAX_COMPLETION_TOKENS].whole;
    name = number_fields[FIELD_MAX_COMPLETION_TOKENS].name;
  }
  if (out->kind == PKV_API_LLAMA && v[FIELD_N_PREDICT].given) {
    most = v[FIELD_N_PREDICT].whole < 0 ? INT32_MAX : v[FIELD_N_PREDICT].whole;
    name = number_fields[FIELD_N_PREDICT].name;
  }
  if (most == 0 && !r->echo)
    return pkv_api_refuse(error, 400, "out_of_range", name,
                          "%s may only be 0 where echo asks for the prompt", name);
  r->max_tokens = (int32_t)most;
  return true;
}

static bool read_sampling(pkv_api_request *out, pkv_api_error *error, const json_t *root,
                          const number_value *v) {
  pkv_request *const r = &out->job.request;
  bool ignore_end, echo;
  if (!pkv_api_flag(&ignore_end, error, root, "ignore_eos", false)) return false;
  if (!pkv_api_flag(&echo, error, root, "echo", false)) return false;
  if (echo && out->kind != PKV_API_COMPLETIONS)
    return pkv_api_refuse(error, 400, "unsupported", "echo", "echo is for /v1/completions only");
  r->echo = echo;
  r->ignore_end = ignore_end;
  r->temperature = (float)v[FIELD_TEMPERATURE].real;
  r->top_p = (float)v[FIELD_TOP_P].real;
  r->top_k = v[FIELD_TOP_K].whole > 0 ? (int32_t)v[FIELD_TOP_K].whole : 0;
  const bool seeded =
      v[FIELD_SEED].given && !(out->kind == PKV_API_LLAMA && v[FIELD_SEED].whole < 0);
  r->seed = seeded ? (uint64_t)v[FIELD_SEED].whole : (uint64_t)pkv_clock_ns();
  out->job.n = (int32_t)v[FIELD_N].whole;
  if (v[FIELD_BEST_OF].given && v[FIELD_BEST_OF].whole != out->job.n)
    return pkv_api_refuse(error, 400, "unsupported", "best_of", "best_of may only be what n is");
  const json_t *const salt = pkv_api_field(root, "cache_salt");
  if (salt != NULL && (!json_is_string(salt) || json_string_length(salt) == 0))
    return pkv_api_refuse(error, 400, "invalid_type", "cache_salt",
                          "cache_salt must be a string that is not empty");
  if (salt != NULL)
    r->cache_salt = pkv_hash_bytes(json_string_value(salt), json_string_length(salt), 1);
  if (echo && out->job.n > 1)
    return pkv_api_refuse(error, 400, "unsupported", "n", "n must be 1 where echo is true");
  const int repetition =
      v[FIELD_REPETITION_PENALTY].given ? FIELD_REPETITION_PENALTY : FIELD_REPEAT_PENALTY;
  r->min_p = (float)v[FIELD_MIN_P].real;
  r->repetition_penalty = (float)v[repetition].real;
  r->presence_penalty = (float)v[FIELD_PRESENCE_PENALTY].real;
  r->frequency_penalty = (float)v[FIELD_FREQUENCY_PENALTY].real;
  r->min_tokens = (int32_t)v[FIELD_MIN_TOKENS].whole;
  return true;
}

static bool read_settings(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                          const json_t *root) {
  number_value v[NUMBER_FIELDS];
  const bool llama = out->kind == PKV_API_LLAMA;
  const json_t *const name = pkv_api_field(root, "model");
  (void)model;
  if (name != NULL && !json_is_string(name))
    return pkv_api_refuse(error, 400, "invalid_type", "model", "model must be a string");
  for (int i = 0; i < NUMBER_FIELDS; i++)
    if (!read_number(&v[i], error, root, &number_fields[i], llama)) return false;
  out->job.request = (pkv_request)PKV_REQUEST_INIT;
  if (!read_stream(out, error, root)) return false;
  if (!read_stops(&out->job.stops, error, root)) return false;
  if (!refuse_unserved(error, root, out->kind == PKV_API_CHAT)) return false;
  if (!read_sampling(out, error, root, v)) return false;
  if (!read_bias(&out->job, error, model, root)) return false;
  return read_length(out, error, v) && read_logprobs(out, error, root, v);
}

static bool check_lengths(pkv_api_request *out, pkv_api_error *error, int32_t longest) {
  const char *const param = out->kind == PKV_API_CHAT ? "messages" : "prompt";
  /* A prompt that is only scored needs no room for an answer. */
  const size_t most = (size_t)longest - (out->job.request.max_tokens > 0);
  for (int32_t i = 0; i < out->prompt_count; i++) {
    const size_t count = out->prompts[i].count;
    if (count < 1) return pkv_api_refuse(error, 400, "invalid_value", param, "%s is empty", param);
    if (count > most)
      return pkv_api_refuse(error, 400, "context_length_exceeded", param,
                            "%s has %zu tokens; with an answer at most %d fit", param, count,
                            (int)longest);
  }
  if (out->job.request.min_tokens > out->job.request.max_tokens)
    return pkv_api_refuse(error, 400, "out_of_range", "min_tokens",
                          "min_tokens is %d, more than the %d tokens that the answer may have",
                          (int)out->job.request.min_tokens, (int)out->job.request.max_tokens);
  if (out->prompt_count * out->job.n > PKV_CHOICES)
    return pkv_api_refuse(error, 400, "out_of_range", "n",
                          "a request may ask for %d answers, all its prompts together",
                          PKV_CHOICES);
  return true;
}

/* A call that is demanded constrains the answer. */
static bool demand_call(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                        pkv_constraint_cache *cache) {
  if (!out->tools.demanded) return true;
  if (out->job.constraint != NULL)
    return pkv_api_refuse(error, 400, "invalid_value", "tool_choice",
                          "tool_choice and another constraint cannot be asked for at once");
  json_t *const schema = pkv_tools_schema(&out->tools);
  const bool made = pkv_api_use_schema(&out->job.constraint, error, model, cache, "tools", schema);
  json_decref(schema);
  return made;
}

/* A constraint may leave no room for so many tokens. */
static bool check_least(const pkv_api_request *r, pkv_api_error *error) {
  const int64_t longest =
      r->job.constraint != NULL ? pkv_constraint_longest(r->job.constraint) : -1;
  if (longest < 0 || r->job.request.min_tokens <= longest) return true;
  return pkv_api_refuse(error, 400, "out_of_range", "min_tokens",
                        "min_tokens is %d, the longest text that the constraint allows has %lld "
                        "bytes",
                        (int)r->job.request.min_tokens, (long long)longest);
}

static bool read_root(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                      pkv_constraint_cache *cache, int32_t longest, const json_t *root,
                      size_t body_bytes) {
  if (!read_settings(out, error, model, root)) return false;
  if (out->kind == PKV_API_CHAT) {
    out->prompt_count = 1;
    if (!pkv_tools_read_prompt(&out->prompts[0], &out->tools, error, model, root, body_bytes))
      return false;
    if (pkv_tools_marker(&out->job.shown, &out->tools, model) != PKV_OK) {
      pkv_api_free(out);
      return pkv_api_refuse_tokens(error, PKV_E_NOMEM, "tools", "");
    }
  } else if (!pkv_api_read_prompts(out->prompts, &out->prompt_count,
                                   out->kind == PKV_API_LLAMA ? 1 : PKV_CHOICES, error, model,
                                   "prompt", root)) {
    return false;
  }
  if (check_lengths(out, error, longest) &&
      pkv_api_read_constraint(&out->job.constraint, error, model, cache, root) &&
      demand_call(out, error, model, cache) && check_least(out, error))
    return true;
  pkv_api_free(out);
  return false;
}

bool pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                  pkv_constraint_cache *cache, int32_t longest, pkv_api_kind kind, const char *body,
                  size_t bytes) {
  memset(out, 0, sizeof *out);
  out->kind = kind;
  out->job.shown = -1;
  json_t *const root = pkv_api_parse(error, body, bytes);
  if (root == NULL) return false;
  const bool ok = read_root(out, error, model, cache, longest, root, bytes);
  json_decref(root);
  return ok;
}

void pkv_api_free(pkv_api_request *request) {
  for (int32_t i = 0; i < request->prompt_count; i++)
    pkv_tokens_free(&request->prompts[i]);
  request->prompt_count = 0;
  pkv_constraint_destroy(request->job.constraint);
  request->job.constraint = NULL;
  pkv_tools_free(&request->tools);
}
