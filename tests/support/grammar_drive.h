/* SPDX-License-Identifier: Apache-2.0 */
/* Grammars and schemas from text to a machine, for tests without a model. */
#ifndef PKV_TEST_GRAMMAR_DRIVE_H
#define PKV_TEST_GRAMMAR_DRIVE_H

#include "grammar/grammar_text.h"
#include "grammar/machine.h"
#include "grammar/schema.h"

typedef struct grammar_drive {
  pkv_syntax tree;
  pkv_program program;
  bool compiled;        /* program is there */
  pkv_machine *machine; /* NULL: refused */
  pkv_status status;
  pkv_error err;
} grammar_drive;

typedef enum grammar_verdict {
  GRAMMAR_DEAD,  /* no text begins like this */
  GRAMMAR_BEGUN, /* some text does */
  GRAMMAR_WHOLE, /* it is one, and may go on */
  GRAMMAR_DONE   /* it is one, and nothing may follow */
} grammar_verdict;

/* trie may be NULL. */
void grammar_open(grammar_drive *out, const char *text, const pkv_token_trie *trie);
void schema_open(grammar_drive *out, const char *text, const pkv_token_trie *trie);
/* One JSON object, as pkv_constraint_create_json has it. */
void json_open(grammar_drive *out);
void grammar_close(grammar_drive *drive);
grammar_verdict grammar_check(const grammar_drive *drive, const char *text, size_t bytes);
grammar_verdict grammar_verdict_of(const grammar_drive *drive, pkv_machine_state state);

#endif
