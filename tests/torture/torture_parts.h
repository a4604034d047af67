/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the torture program share. A scenario returns PKV_OK only when everything was
 * right; what went on although it was wrong begins with "wrong". */
#ifndef PKV_TORTURE_PARTS_H
#define PKV_TORTURE_PARTS_H

#include <stdbool.h>

#include "pkv/engine.h"

pkv_status torture_wrong(pkv_error *err, const char *what);

/* torture_json.c: what is put together from JSON, and keys. */
bool torture_json_begin(void); /* nothing is armed */
pkv_status torture_chats(pkv_error *err);
pkv_status torture_schemas(pkv_error *err);
pkv_status torture_calls(pkv_error *err); /* of tools, in the text of an answer */
pkv_status torture_keys(pkv_error *err);
void torture_json_end(void);

#endif
