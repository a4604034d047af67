/* SPDX-License-Identifier: Apache-2.0 */
/* The tools of a request: which there are, and whether they have to be called. */
#ifndef PKV_SERVER_TOOLS_H
#define PKV_SERVER_TOOLS_H

#include <jansson.h>

#include "server/api_request.h"

/*
 * Reads tools, tool_choice and parallel_tool_calls (without tools tools->list stays NULL), and the
 * field "messages" with them as tokens. Where calls are demanded, their beginning is part of the
 * prompt. False: nothing is to be freed.
 */
bool pkv_tools_read_prompt(pkv_tokens *out, pkv_tools *tools, pkv_api_error *error,
                           const pkv_model *model, const json_t *root, size_t body_bytes);
void pkv_tools_free(pkv_tools *tools);
bool pkv_tools_have(const pkv_tools *tools, const char *name);

/* What a demanded call has to be, as a schema to be released. */
json_t *pkv_tools_schema(const pkv_tools *tools);
/* The control token that begins calls, whose text has to be seen; -1 = none. E_NOMEM. */
pkv_status pkv_tools_marker(int32_t *out, const pkv_tools *tools, const pkv_model *model);

#endif
