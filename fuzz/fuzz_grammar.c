/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of grammars and schemas. The first byte says which; up to the first zero byte the
 * text is read, what follows is fed to its machine. Broken promises: a state that is alive and can
 * neither end nor go on, a mask that is not what feeding each token says.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/grammar_text.h"
#include "grammar/machine.h"
#include "grammar/schema.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define TOKENS 300

static char bytes_of[TOKENS][4];

static void token_text(const void *user, int32_t token, const char **bytes, size_t *count) {
  (void)user;
  *bytes = bytes_of[token];
  *count = token < 256 ? 1 : 1 + (size_t)token % 4;
}

static pkv_token_trie *vocabulary(void) {
  static pkv_token_trie *trie = NULL;
  if (trie != NULL) return trie;
  for (int i = 0; i < TOKENS; i++) {
    const char *const some = "{\"a\":1,b]}\xc3\xa9 \\u0";
    bytes_of[i][0] = i < 256 ? (char)i : some[i % 17];
    for (int k = 1; k < 4; k++)
      bytes_of[i][k] = some[(i * k + i / 5) % 17];
  }
  REQUIRE(pkv_token_trie_create(&trie, TOKENS, token_text, NULL, NULL, NULL) == PKV_OK);
  return trie;
}

static void read_text(pkv_syntax *tree, bool schema, const char *text, size_t bytes) {
  pkv_json_rules rules;
  if (!schema) {
    pkv_grammar_read(tree, text, bytes);
    return;
  }
  json_t *const root = pkv_schema_parse(tree, text, bytes);
  if (root == NULL) return;
  pkv_json_rules_init(&rules, tree);
  const int32_t node = pkv_schema_read(&rules, root, NULL);
  tree->root = pkv_syntax_new_rule(tree, 0);
  pkv_syntax_define(tree, tree->root, node);
  json_decref(root);
}

static void check_mask(pkv_machine *m, pkv_machine_state *s) {
  uint64_t mask[(TOKENS + 63) / 64];
  const uint64_t *const bits = pkv_machine_mask(m, s);
  if (bits == NULL) return;
  memcpy(mask, bits, sizeof mask);
  for (int32_t i = 0; i < TOKENS; i += 7) {
    pkv_machine_state next = *s;
    const char *text = NULL;
    size_t bytes = 0;
    token_text(NULL, i, &text, &bytes);
    if (!pkv_machine_knows(m, next) || !pkv_machine_feed(&next, m, text, bytes)) return;
    REQUIRE((next.id != 0) == ((mask[i / 64] >> (i % 64) & 1) != 0));
    if (!pkv_machine_knows(m, *s)) return;
  }
}

static void carry_out(pkv_machine *m, const char *text, size_t bytes) {
  pkv_machine_state s;
  if (!pkv_machine_begin(&s, m)) return;
  for (size_t i = 0; i < bytes && s.id != 0; i++) {
    REQUIRE(pkv_machine_may_end(m, s) || pkv_machine_may_go_on(m, s));
    if (i % 8 == 0) check_mask(m, &s);
    if (!pkv_machine_knows(m, s)) return;
    if (!pkv_machine_feed(&s, m, text + i, 1)) return;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *const text = (const char *)data + 1;
  if (size < 2) return 0;
  const char *const zero = memchr(text, 0, size - 1);
  const size_t bytes = zero != NULL ? (size_t)(zero - text) : size - 1;
  pkv_syntax tree;
  pkv_program program;
  pkv_machine *machine = NULL;
  pkv_syntax_init(&tree, NULL);
  read_text(&tree, (data[0] & 1) != 0, text, bytes);
  if (pkv_program_create(&program, &tree, NULL, NULL) == PKV_OK) {
    REQUIRE(pkv_machine_create(&machine, &program, vocabulary(), NULL, NULL) == PKV_OK);
    if (zero != NULL) carry_out(machine, zero + 1, size - 2 - bytes);
    pkv_machine_destroy(machine);
    pkv_program_deinit(&program);
  }
  pkv_syntax_deinit(&tree);
  return 0;
}
