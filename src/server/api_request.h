/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The body of a completion request, checked field by field before anything is made of it. Fields
 * that this server has no meaning for are ignored, as other servers do; fields it knows but cannot
 * serve are refused unless they ask for what happens anyway.
 */
#ifndef PKV_SERVER_API_REQUEST_H
#define PKV_SERVER_API_REQUEST_H

#include "server/engine_loop.h"

typedef struct pkv_api_request {
  bool chat, stream, include_usage;
  pkv_job_spec job;
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
 * Reads body[bytes] into *out, prompt tokenized; `longest` is the longest sequence of the engine.
 * On success the prompt is the caller's to free; on failure nothing is.
 */
bool pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                  int32_t longest, bool chat, const char *body, size_t bytes);

#endif
