/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The body of a request, checked field by field before anything is made of it. Fields that this
 * server has no meaning for are ignored, as other servers do; fields it knows but cannot serve are
 * refused unless they ask for what happens anyway.
 */
#ifndef PKV_SERVER_API_REQUEST_H
#define PKV_SERVER_API_REQUEST_H

#include "base/limits.h"
#include "server/constraint_cache.h"
#include "server/engine_loop.h"

/* Whose interface a request speaks. */
typedef enum pkv_api_kind {
  PKV_API_COMPLETIONS, /* /v1/completions */
  PKV_API_CHAT,        /* /v1/chat/completions */
  PKV_API_LLAMA        /* llama-server's /completion */
} pkv_api_kind;

/* What the model may call, or has to. */
typedef struct pkv_tools {
  struct json_t *list; /* as the request has it; NULL: none */
  pkv_tool_style style;
  bool demanded, parallel;
  char only[PKV_TOOL_NAME + 1]; /* the one that is demanded; empty = any */
} pkv_tools;

typedef struct pkv_api_request {
  pkv_api_kind kind;
  bool stream, include_usage, logprobs;
  int32_t prompt_count;
  pkv_tokens prompts[PKV_CHOICES];
  pkv_tools tools;
  pkv_job_spec job; /* of each prompt; its own `prompt` is unused */
} pkv_api_request;

/* What is answered instead. The message never holds a byte of the request. */
typedef struct pkv_api_error {
  int http;         /* 400, 413, ... */
  const char *code; /* static; NULL = none */
  char param[48];   /* the field; empty = none */
  char message[256];
} pkv_api_error;

/* Fills *error and returns false, so that a check reads: return pkv_api_refuse(error, ...). */
bool pkv_api_refuse(pkv_api_error *error, int http, const char *code, const char *param,
                    const char *format, ...) __attribute__((format(printf, 5, 6)));

/*
 * Reads body[bytes] into *out, prompts tokenized; `longest` is the longest sequence of the engine.
 * On success the prompts and the constraint are the caller's to free; on failure nothing is.
 */
bool pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                  pkv_constraint_cache *cache, int32_t longest, pkv_api_kind kind, const char *body,
                  size_t bytes);
void pkv_api_free(pkv_api_request *request);

#endif
