/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/constraint.h"

#include <stdatomic.h>

#include "base/status.h"
#include "grammar/grammar_text.h"
#include "grammar/schema.h"
#include "model/model.h"

typedef struct shared_count {
  atomic_int users;
} shared_count;

struct pkv_constraint {
  pkv_allocator allocator;
  const pkv_model *model;
  const pkv_token_trie *trie;
  pkv_program program;
  shared_count *count; /* apart: the rest never changes */
};

static void destroy(pkv_constraint *c) {
  const pkv_allocator a = c->allocator;
  pkv_program_deinit(&c->program);
  pkv_free(&a, c->count, sizeof *c->count);
  pkv_free(&a, c, sizeof *c);
}

static pkv_status fill(pkv_constraint *c, const pkv_syntax *tree, pkv_error *err) {
  c->count = pkv_alloc_zeroed(&c->allocator, 1, sizeof *c->count);
  PKV_CHECK(err, c->count != NULL, PKV_E_NOMEM, "no memory for a constraint");
  atomic_init(&c->count->users, 1);
  PKV_TRY(pkv_model_trie(&c->trie, c->model, err));
  return pkv_program_create(&c->program, tree, &c->allocator, err);
}

pkv_status pkv_constraint_create_tree(pkv_constraint **out, const pkv_model *model,
                                      const pkv_syntax *tree, const pkv_allocator *allocator,
                                      pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  *out = NULL;
  PKV_CHECK(err, tree->status == PKV_OK, tree->status, "%s", tree->error.text);
  pkv_constraint *const c = pkv_alloc_zeroed(&a, 1, sizeof *c);
  PKV_CHECK(err, c != NULL, PKV_E_NOMEM, "no memory for a constraint");
  c->allocator = a;
  c->model = model;
  c->program.allocator = a;
  const pkv_status status = fill(c, tree, err);
  if (status != PKV_OK) {
    destroy(c);
    return status;
  }
  *out = c;
  return PKV_OK;
}

/* Fills a tree from text. */
typedef void read_fn(pkv_syntax *tree, const char *text, size_t bytes, const pkv_allocator *a);

static pkv_status create(pkv_constraint **out, const pkv_model *model, read_fn *read,
                         const char *text, size_t bytes, const pkv_allocator *allocator,
                         pkv_error *err) {
  pkv_syntax tree;
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, model != NULL, PKV_E_INVALID, "model is NULL");
  PKV_CHECK(err, text != NULL, PKV_E_INVALID, "text is NULL");
  PKV_CHECK(err, pkv_model_tokenizer(model) != NULL, PKV_E_UNSUPPORTED,
            "the model has no tokenizer");
  pkv_syntax_init(&tree, allocator);
  read(&tree, text, bytes, allocator);
  const pkv_status status = pkv_constraint_create_tree(out, model, &tree, allocator, err);
  pkv_syntax_deinit(&tree);
  return status;
}

static void set_root(pkv_syntax *tree, int32_t node) {
  tree->root = pkv_syntax_new_rule(tree, 0);
  pkv_syntax_define(tree, tree->root, node);
}

static void read_json(pkv_syntax *tree, const char *text, size_t bytes, const pkv_allocator *a) {
  pkv_json_rules rules;
  (void)text;
  (void)bytes;
  (void)a;
  pkv_json_rules_init(&rules, tree);
  set_root(tree, pkv_syntax_join(tree, pkv_json_blanks(&rules),
                                 pkv_json_object(&rules, PKV_JSON_LEVELS)));
}

static void read_grammar(pkv_syntax *tree, const char *text, size_t bytes, const pkv_allocator *a) {
  (void)a;
  pkv_grammar_read(tree, text, bytes);
}

static void read_schema(pkv_syntax *tree, const char *text, size_t bytes, const pkv_allocator *a) {
  pkv_json_rules rules;
  json_t *const schema = pkv_schema_parse(tree, text, bytes);
  if (schema == NULL) return;
  pkv_json_rules_init(&rules, tree);
  set_root(tree, pkv_schema_read(&rules, schema, a));
  json_decref(schema);
}

pkv_status pkv_constraint_create_json(pkv_constraint **out, const pkv_model *model,
                                      const pkv_allocator *allocator, pkv_error *err) {
  return create(out, model, read_json, "", 0, allocator, err);
}

pkv_status pkv_constraint_create_grammar(pkv_constraint **out, const pkv_model *model,
                                         const char *text, size_t bytes,
                                         const pkv_allocator *allocator, pkv_error *err) {
  return create(out, model, read_grammar, text, bytes, allocator, err);
}

pkv_status pkv_constraint_create_schema(pkv_constraint **out, const pkv_model *model,
                                        const char *schema, size_t bytes,
                                        const pkv_allocator *allocator, pkv_error *err) {
  return create(out, model, read_schema, schema, bytes, allocator, err);
}

void pkv_constraint_release(const pkv_constraint *constraint) {
  if (constraint == NULL || atomic_fetch_sub(&constraint->count->users, 1) > 1) return;
  destroy((pkv_constraint *)(uintptr_t)constraint); /* its last user: nobody else sees it */
}

void pkv_constraint_destroy(pkv_constraint *constraint) {
  pkv_constraint_release(constraint);
}

pkv_constraint *pkv_constraint_retain(pkv_constraint *constraint) {
  (void)pkv_constraint_hold(constraint);
  return constraint;
}

const pkv_constraint *pkv_constraint_hold(const pkv_constraint *constraint) {
  (void)atomic_fetch_add(&constraint->count->users, 1);
  return constraint;
}

bool pkv_constraint_fits(const pkv_constraint *constraint, const pkv_model *model) {
  return constraint->model == model;
}

const pkv_program *pkv_constraint_program(const pkv_constraint *constraint) {
  return &constraint->program;
}

const pkv_token_trie *pkv_constraint_trie(const pkv_constraint *constraint) {
  return constraint->trie;
}

int64_t pkv_constraint_longest(const pkv_constraint *constraint) {
  return constraint->program.longest;
}
