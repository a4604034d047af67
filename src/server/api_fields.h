/* SPDX-License-Identifier: Apache-2.0 */
/* Single fields of a JSON body, and prompts made of them. For the readers of bodies alone. */
#ifndef PKV_SERVER_API_FIELDS_H
#define PKV_SERVER_API_FIELDS_H

#include <jansson.h>

#include "base/limits.h"
#include "server/api_request.h"

/* The body as JSON within the server's bounds, to be released; NULL: refused. */
json_t *pkv_api_parse(pkv_api_error *error, const char *body, size_t bytes);
/* A field that is null is absent: NULL. */
const json_t *pkv_api_field(const json_t *root, const char *name);
bool pkv_api_flag(bool *out, pkv_api_error *error, const json_t *root, const char *name,
                  bool fallback);
/* What is answered when tokens cannot be made of `param`. */
bool pkv_api_refuse_tokens(pkv_api_error *error, pkv_status status, const char *param,
                           const char *text);
/* A list of token ids. */
bool pkv_api_read_ids(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                      const char *param, const json_t *list);
/* The field `param`: one string or list of ids, or several of these where `capacity` > 1. */
bool pkv_api_read_prompts(pkv_tokens *out, int32_t *count, int32_t capacity, pkv_api_error *error,
                          const pkv_model *model, const char *param, const json_t *root);
/* The field "messages". */
bool pkv_api_read_messages(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                           const json_t *root, size_t body_bytes);

#endif
