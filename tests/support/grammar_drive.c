/* SPDX-License-Identifier: Apache-2.0 */
#include "support/grammar_drive.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void finish(grammar_drive *d, const pkv_token_trie *trie) {
  d->machine = NULL;
  d->compiled = false;
  memset(&d->err, 0, sizeof d->err);
  d->status = pkv_program_create(&d->program, &d->tree, NULL, &d->err);
  d->compiled = d->status == PKV_OK;
  if (!d->compiled) return;
  d->status = pkv_machine_create(&d->machine, &d->program, trie, NULL, &d->err);
}

void grammar_open(grammar_drive *out, const char *text, const pkv_token_trie *trie) {
  pkv_syntax_init(&out->tree, NULL);
  pkv_grammar_read(&out->tree, text, strlen(text));
  finish(out, trie);
}

static void set_root(pkv_syntax *t, int32_t node) {
  t->root = pkv_syntax_new_rule(t, 0);
  pkv_syntax_define(t, t->root, node);
}

void schema_open(grammar_drive *out, const char *text, const pkv_token_trie *trie) {
  pkv_json_rules rules;
  pkv_syntax_init(&out->tree, NULL);
  json_t *const schema = pkv_schema_parse(&out->tree, text, strlen(text));
  if (schema != NULL) {
    pkv_json_rules_init(&rules, &out->tree);
    set_root(&out->tree, pkv_schema_read(&rules, schema, NULL));
    json_decref(schema);
  }
  finish(out, trie);
}

void json_open(grammar_drive *out) {
  pkv_json_rules rules;
  pkv_syntax *const t = &out->tree;
  pkv_syntax_init(t, NULL);
  pkv_json_rules_init(&rules, t);
  set_root(t,
           pkv_syntax_join(t, pkv_json_blanks(&rules), pkv_json_object(&rules, PKV_JSON_LEVELS)));
  finish(out, NULL);
}

void grammar_close(grammar_drive *drive) {
  pkv_machine_destroy(drive->machine);
  if (drive->compiled) pkv_program_deinit(&drive->program);
  pkv_syntax_deinit(&drive->tree);
}

grammar_verdict grammar_verdict_of(const grammar_drive *drive, pkv_machine_state state) {
  if (state.id == 0) return GRAMMAR_DEAD;
  const bool end = pkv_machine_may_end(drive->machine, state);
  const bool more = pkv_machine_may_go_on(drive->machine, state);
  assert_true(end || more);
  return !end ? GRAMMAR_BEGUN : more ? GRAMMAR_WHOLE : GRAMMAR_DONE;
}

grammar_verdict grammar_check(const grammar_drive *drive, const char *text, size_t bytes) {
  pkv_machine_state state;
  assert_true(pkv_machine_begin(&state, drive->machine));
  assert_true(pkv_machine_feed(&state, drive->machine, text, bytes));
  return grammar_verdict_of(drive, state);
}
