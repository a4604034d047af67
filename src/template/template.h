/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interpreter of the template language (Jinja's) as far as chat templates use it, with the settings
 * that the transformers library gives it: a newline behind a tag and blanks before one are dropped,
 * nothing is escaped, lists and maps cannot be changed. What it takes stands in
 * tests/data/template_constructs.json.
 *
 * A template is a program of somebody else's: it reaches nothing but the variables it is given, and
 * its steps, memory, output and nesting are bounded. Errors name the line and column of the
 * template, and never hold a byte of the variables' text.
 *
 * Every byte of the output knows where it comes from: from the template (and from texts that the
 * caller marks as trusted), or from the variables. Filters, methods, slices and macros keep that.
 */
#ifndef PKV_TEMPLATE_TEMPLATE_H
#define PKV_TEMPLATE_TEMPLATE_H

#include <stdbool.h>

#include "base/alloc.h"
#include "base/limits.h"

/* Immutable once compiled: share freely. Rendering takes memory from its allocator. */
typedef struct pkv_template pkv_template;

/* Copies source. E_FORMAT: not a template; E_UNSUPPORTED: a statement we do not know; E_LIMIT. */
pkv_status pkv_template_compile(pkv_template **out, const char *source, size_t bytes,
                                const pkv_allocator *allocator, pkv_error *err);
void pkv_template_destroy(pkv_template *t); /* NULL is allowed */
/* Whether a variable of that name is looked at anywhere. */
bool pkv_template_names(const pkv_template *t, const char *name);

/* ------------------------------------------------------------------------------------------
 * Variables: a tree as JSON has them, the caller's, borrowed during the call
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_template_kind {
  PKV_TEMPLATE_NONE = 0,
  PKV_TEMPLATE_BOOL = 1, /* as_int */
  PKV_TEMPLATE_INT = 2,
  PKV_TEMPLATE_REAL = 3,
  PKV_TEMPLATE_TEXT = 4, /* UTF-8; other bytes count as a character each */
  PKV_TEMPLATE_LIST = 5,
  PKV_TEMPLATE_MAP = 6 /* in this order; keys differ */
} pkv_template_kind;

typedef struct pkv_template_value {
  pkv_template_kind kind;
  bool trusted; /* a text that counts as the template's own */
  int64_t as_int;
  double as_real;
  const char *text;
  const struct pkv_template_value *items;    /* [count] of a list */
  const struct pkv_template_member *members; /* [count] of a map */
  size_t count;                              /* bytes of a text, items, members */
} pkv_template_value;

typedef struct pkv_template_member {
  const char *key;
  size_t key_bytes;
  pkv_template_value value;
} pkv_template_member;

pkv_template_value pkv_template_text(const char *text, size_t bytes, bool trusted);

/* ------------------------------------------------------------------------------------------
 * Rendering
 * ------------------------------------------------------------------------------------------ */

/* 0 = the default. */
typedef struct pkv_template_limits {
  uint64_t steps;      /* 1e6: one for each node that is evaluated and for every 64 bytes moved */
  size_t output_bytes; /* 32 MiB */
  size_t memory_bytes; /* 256 MiB, of all values that come up */
  uint32_t depth;      /* 600: expressions, statements and macro calls within each other */
} pkv_template_limits;

typedef struct pkv_template_run {
  size_t bytes; /* of the text that follow the runs before */
  bool trusted;
} pkv_template_run;

typedef struct pkv_template_output {
  char *text;
  size_t bytes;
  pkv_template_run *runs; /* neighbours differ */
  size_t run_count;
  size_t text_size, run_size; /* allocated, bytes */
  pkv_allocator allocator;
} pkv_template_output;

/*
 * variables: a map. now: seconds of local time since 1970 for strftime_now; a negative one leaves
 * that function undefined. *out is filled on success only.
 *
 * E_LIMIT names the limit. E_INVALID: the template refuses these variables by raise_exception; its
 * message follows, without what the variables put into it. E_FORMAT: an operation does not go with
 * its operands; E_UNSUPPORTED: an unknown filter, test or method.
 */
pkv_status pkv_template_render(pkv_template_output *out, const pkv_template *t,
                               const pkv_template_value *variables, int64_t now,
                               const pkv_template_limits *limits, pkv_error *err);
void pkv_template_output_free(pkv_template_output *out);

#endif
