/* SPDX-License-Identifier: Apache-2.0 */
/* What an answer has to be: response_format, grammar, json_schema, guided_*. */
#ifndef PKV_SERVER_API_CONSTRAINT_H
#define PKV_SERVER_API_CONSTRAINT_H

#include "server/api_fields.h"

/* *out is NULL where nothing is asked for, else the caller's to destroy. */
bool pkv_api_read_constraint(pkv_constraint **out, pkv_api_error *error, const pkv_model *model,
                             pkv_constraint_cache *cache, const json_t *root);
/* Texts that satisfy a schema; `param` is the field it comes from. */
bool pkv_api_use_schema(pkv_constraint **out, pkv_api_error *error, const pkv_model *model,
                        pkv_constraint_cache *cache, const char *param, const json_t *schema);

#endif
