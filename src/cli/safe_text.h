/* SPDX-License-Identifier: Apache-2.0 */
/* Text of foreign files made fit for a terminal, and for JSON. */
#ifndef PKV_CLI_SAFE_TEXT_H
#define PKV_CLI_SAFE_TEXT_H

#include <jansson.h>

#include "base/text.h"

/*
 * Appends the bytes so that a terminal only ever shows them: control characters, malformed UTF-8
 * and characters that hide or reorder text come out as \n, \xHH or \u{HHHH}, a backslash as two.
 */
pkv_status pkv_safe_append(pkv_buffer *out, const char *bytes, size_t count, pkv_error *err);
/* A JSON string of any bytes: what is not UTF-8 becomes U+FFFD. NULL: out of memory. */
json_t *pkv_safe_json(const char *bytes, size_t count);

#endif
