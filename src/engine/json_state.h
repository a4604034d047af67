/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON byte by byte: whether a text can still become one object. Every state that is reached can be
 * completed. Stricter than the format where that bounds a model: at most JSON_DEPTH levels, at most
 * JSON_BLANKS blanks in a row, JSON_DIGITS digits before and behind a point and JSON_POWER of an
 * exponent, no NUL, no unpaired surrogates, UTF-8 only.
 */
#ifndef PKV_ENGINE_JSON_STATE_H
#define PKV_ENGINE_JSON_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JSON_DEPTH  64
#define JSON_BLANKS 20
#define JSON_DIGITS 15
#define JSON_POWER  2

typedef struct pkv_json_state {
  uint64_t arrays; /* bit d: level d is an array, else an object */
  uint8_t depth;   /* open levels */
  uint8_t mode;    /* json_state.c */
  uint8_t blanks;  /* in a row */
  uint8_t count;   /* digits of an escape, or bytes of a literal or character, so far or to come */
  uint8_t low, high;   /* of the next byte of a character */
  uint16_t unit;       /* of an escape */
  bool key, pair;      /* this string is a key; a low surrogate has to follow */
  const char *literal; /* static */
} pkv_json_state;

void pkv_json_begin(pkv_json_state *state);
/* False: no object begins like this; the state is then of no use. */
bool pkv_json_feed(pkv_json_state *state, const char *bytes, size_t count);
/* The object is closed: nothing may follow. */
bool pkv_json_done(const pkv_json_state *state);

#endif
