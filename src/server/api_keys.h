/* SPDX-License-Identifier: Apache-2.0 */
/* The keys that clients must know. Comparing takes the same time whatever is compared. */
#ifndef PKV_SERVER_API_KEYS_H
#define PKV_SERVER_API_KEYS_H

#include <stdbool.h>

#include "pkv/pkv.h"

#define PKV_MAX_KEYS  256
#define PKV_KEY_BYTES 256

typedef struct pkv_api_keys {
  int32_t count; /* 0: none are asked for */
  char (*keys)[PKV_KEY_BYTES];
} pkv_api_keys;

/* One key a line; blank lines and lines that begin with # are none. E_FORMAT names the line that is
 * none either, or says that there is no key at all. Leaves nothing to free on failure. */
pkv_status pkv_api_keys_read(pkv_api_keys *out, const char *path, pkv_error *err);
/* Adds the keys of a list separated by commas. E_FORMAT counts the one that is none. */
pkv_status pkv_api_keys_add(pkv_api_keys *keys, const char *list, pkv_error *err);
void pkv_api_keys_free(pkv_api_keys *keys);
/* Which key `header`, the value of Authorization or NULL, has: 1 and up; 0: none are asked for; -1:
 * it has none. "Bearer KEY", or "Basic" with the key as password of any user. */
int32_t pkv_api_keys_find(const pkv_api_keys *keys, const char *header);
/* Is it what a browser, once it was told, sends by itself, also where another's page has it ask? */
bool pkv_api_keys_unasked(const char *header);

#endif
