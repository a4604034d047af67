/* SPDX-License-Identifier: Apache-2.0 */
/* Jansson's values into buffers. */
#ifndef PKV_SERVER_JSON_OUT_H
#define PKV_SERVER_JSON_OUT_H

#include "base/json_memory.h"
#include "base/text.h"

/* Both take the value over; NULL is E_NOMEM. */
pkv_status pkv_json_append(pkv_buffer *out, json_t *value, pkv_error *err);
/* As a server-sent event. */
pkv_status pkv_json_append_event(pkv_buffer *out, json_t *value, pkv_error *err);

#endif
