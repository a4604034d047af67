/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds stop strings in a text that comes token by token. Each string is matched byte by byte with
 * its failure table, so that no text is kept and one byte costs constant time, whatever the tokens'
 * borders.
 */
#ifndef PKV_ENGINE_STOP_MATCH_H
#define PKV_ENGINE_STOP_MATCH_H

#include <stdbool.h>

#include "base/alloc.h"
#include "pkv/engine.h"

typedef struct pkv_stop_match {
  int32_t count;
  int32_t length[PKV_MAX_STOPS], at[PKV_MAX_STOPS]; /* at: bytes matched so far */
  unsigned char *text; /* [capacity]: the strings one after the other; kept with the slot */
  int16_t *failure;    /* [capacity]: longest proper prefix that ends here too */
  int32_t capacity;
} pkv_stop_match;

/* How many bytes there are together. */
int32_t pkv_stop_bytes(const char *const *stop, int32_t count);
/* Room for so many bytes. */
pkv_status pkv_stop_reserve(pkv_stop_match *match, int32_t bytes, const pkv_allocator *allocator,
                            pkv_error *err);
/* Strings of 1 .. PKV_MAX_STOP_BYTES bytes that fit; nothing is matched yet. */
void pkv_stop_set(pkv_stop_match *match, const char *const *stop, int32_t count);
void pkv_stop_free(pkv_stop_match *match, const pkv_allocator *allocator);
/*
 * The text of one more token. True: string *index ends in it, the first to do so, of several the
 * longest; *bytes at the end of the text belong to the string or stand behind it.
 */
bool pkv_stop_feed(int32_t *index, int32_t *bytes, pkv_stop_match *match, const char *text,
                   size_t count);
/* Whether a string is this whole text: -1 or which. */
int32_t pkv_stop_equals(const pkv_stop_match *match, const char *text, size_t count);

#endif
