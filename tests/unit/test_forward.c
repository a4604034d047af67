/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_forward: what it refuses, by name and value and before it writes; mixed batches against the
   same tokens one sequence at a time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/forward_runner.h"
#include "support/tiny_llama.h"

#define SEED 3u /* 50 tokens of vocabulary, 8 heads on 4, 13 tokens */

typedef struct fixture {
  tiny_llama tiny;
  gguf_build file;
  pkv_model *model;
  forward_runner r;
} fixture;

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  f->tiny = tiny_llama_make(SEED);
  gguf_build_init(&f->file);
  tiny_llama_write(&f->file, &f->tiny, NULL, 0);
  gguf_build_finish(&f->file);
  if (pkv_model_open_memory(&f->model, f->file.file.data, f->file.file.size, NULL, NULL) != PKV_OK)
    return -1;
  const forward_runner_options options = {.threads = 2,
                                          .compute = PKV_COMPUTE_I8,
                                          .kv_dtype = PKV_DTYPE_F16,
                                          .rows = 3,
                                          .max_seq_len = 32,
                                          .max_tokens = 32,
                                          .page_tokens = 4};
  *state = f;
  return forward_runner_init(&f->r, f->model, &options);
}

static int teardown(void **state) {
  fixture *f = *state;
  forward_runner_deinit(&f->r);
  pkv_model_close(f->model);
  gguf_build_deinit(&f->file);
  free(f);
  return 0;
}

/* A valid batch of one prompt of four tokens, to be spoilt. */
typedef struct sample {
  int32_t ids[4], positions[4], logit_tokens[4], length;
  int64_t slots[4];
  float logits[4 * 64];
  pkv_forward_group group;
  pkv_forward_batch batch;
} sample;

static void build_plan(fixture *f, sample *s, int32_t kv_heads, int32_t q_len) {
  const pkv_hparams *hp = pkv_model_hparams(f->model);
  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  shape.query_heads = hp->query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = hp->head_dim;
  shape.page_tokens = 4;
  shape.q_len = q_len;
  assert_int_equal(pkv_plan_build(&s->group.plan, f->r.plan_memory, f->r.plan_bytes, &shape,
                                  &options, 1, &s->length, NULL),
                   PKV_OK);
}

static void make_sample(fixture *f, sample *s) {
  memset(s, 0, sizeof *s);
  forward_runner_reset(&f->r);
  assert_int_equal(pkv_table_extend(f->r.table, 0, 4, NULL), PKV_OK);
  assert_int_equal(pkv_table_slots(s->slots, f->r.table, 0, 0, 4, NULL), PKV_OK);
  for (int32_t i = 0; i < 4; i++) {
    s->ids[i] = s->positions[i] = s->logit_tokens[i] = i;
  }
  s->length = 4;
  build_plan(f, s, pkv_model_hparams(f->model)->kv_heads, 4);
  s->group.block_table = pkv_table_row(f->r.table, 0);
  s->group.block_table_stride = s->group.max_pages = (int32_t)pkv_table_stride(f->r.table);
  s->batch = (pkv_forward_batch){.tokens = 4,
                                 .ids = s->ids,
                                 .positions = s->positions,
                                 .slots = s->slots,
                                 .groups = &s->group,
                                 .group_count = 1,
                                 .logit_tokens = s->logit_tokens,
                                 .logit_count = 4,
                                 .logits = s->logits};
  s->logits[0] = 42.0f;
}

static void refused(fixture *f, const sample *s, pkv_status status, const char *part) {
  pkv_error err = {0};
  const pkv_status got = pkv_forward_run(f->r.forward, f->r.caches, &s->batch, &err);
  if (got != status || !strstr(err.text, part))
    fail_msg("%s \"%s\", expected %s with \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(status), part);
  assert_true(s->logits[0] == 42.0f);
}

static void test_refused_batches(void **state) {
  fixture *f = *state;
  sample s;
  make_sample(f, &s);
  assert_int_equal(pkv_forward_run(f->r.forward, f->r.caches, &s.batch, NULL), PKV_OK);
  assert_true(s.logits[0] != 42.0f);
#define SPOILT(change, status, part)                                                               \
  do {                                                                                             \
    make_sample(f, &s);                                                                            \
    change;                                                                                        \
    refused(f, &s, status, part);                                                                  \
  } while (0)
  SPOILT(s.batch.tokens = 0, PKV_E_LIMIT, "tokens is 0");
  SPOILT(s.batch.tokens = 33, PKV_E_LIMIT, "tokens is 33, max_tokens is 32");
  SPOILT(s.batch.logit_count = 33, PKV_E_LIMIT, "logit_count is 33");
  SPOILT(s.batch.logit_count = -1, PKV_E_LIMIT, "logit_count is -1");
  SPOILT(s.batch.logits = NULL, PKV_E_INVALID, "logits is NULL");
  SPOILT(s.batch.logit_tokens = NULL, PKV_E_INVALID, "logit_tokens is NULL");
  SPOILT(s.batch.ids = NULL, PKV_E_INVALID, "missing");
  SPOILT(s.batch.group_count = 0, PKV_E_INVALID, "missing");
  SPOILT(s.ids[2] = -1, PKV_E_RANGE, "ids[2] is -1, the vocabulary is 0..49");
  SPOILT(s.ids[3] = 50, PKV_E_RANGE, "ids[3] is 50");
  SPOILT(s.positions[1] = 32, PKV_E_RANGE, "positions[1] is 32");
  SPOILT(s.positions[1] = -1, PKV_E_RANGE, "positions[1] is -1");
  SPOILT(s.logit_tokens[3] = 4, PKV_E_RANGE, "logit_tokens[3] is 4, the batch has 4");
  SPOILT(s.batch.tokens = 3, PKV_E_INVALID, "the groups have 4 tokens, the batch has 3");
  SPOILT(s.group.first_token = 1, PKV_E_INVALID, "groups[0].first_token is 1");
  SPOILT(s.group.plan = NULL, PKV_E_INVALID, "groups[0].plan is NULL");
  SPOILT(build_plan(f, &s, 8, 4), PKV_E_INVALID, "8 query heads, 8 KV heads");
  SPOILT(s.slots[0] = 1 << 30, PKV_E_RANGE, "slots[0]");
#undef SPOILT
  make_sample(f, &s);
  pkv_cache caches[3];
  memcpy(caches, f->r.caches, (size_t)f->tiny.layers * sizeof caches[0]);
  caches[0].kv_heads = 2;
  pkv_error err = {0};
  assert_int_equal(pkv_forward_run(f->r.forward, caches, &s.batch, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "caches[0] has 2 KV heads"));
  assert_int_equal(pkv_forward_run(NULL, f->r.caches, &s.batch, &err), PKV_E_INVALID);
  assert_int_equal(pkv_forward_run(f->r.forward, NULL, &s.batch, &err), PKV_E_INVALID);
}

static void test_refused_options(void **state) {
  fixture *f = *state;
  pkv_forward *out = (pkv_forward *)(void *)f;
  pkv_error err = {0};
  const pkv_forward_options good = {.max_tokens = 1, .max_logits = 1, .max_positions = 1};
  pkv_forward_options o = good;
  o.max_tokens = 0;
  assert_int_equal(pkv_forward_create(&out, f->model, f->r.executor, &o, &err), PKV_E_INVALID);
  assert_null(out);
  assert_non_null(strstr(err.text, "max_tokens is 0"));
  o = good;
  o.max_positions = -5;
  assert_int_equal(pkv_forward_create(&out, f->model, f->r.executor, &o, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "max_positions is -5"));
  o = good;
  o.max_logits = -1;
  assert_int_equal(pkv_forward_create(&out, f->model, f->r.executor, &o, &err), PKV_E_INVALID);
  assert_int_equal(pkv_forward_create(&out, NULL, f->r.executor, &good, &err), PKV_E_INVALID);
  assert_int_equal(pkv_forward_create(&out, f->model, NULL, &good, &err), PKV_E_INVALID);
  assert_int_equal(pkv_forward_create(NULL, f->model, f->r.executor, &good, &err), PKV_E_INVALID);
  o = good;
  o.workspace_bytes = SIZE_MAX;
  assert_int_equal(pkv_forward_create(&out, f->model, f->r.executor, &o, &err), PKV_E_LIMIT);
}

/* Three rows stepped together give the logits of each row stepped alone; and logits asked for some
   tokens only are those of the same tokens when all are asked for. */
static void test_batches_equal_single_rows(void **state) {
  fixture *f = *state;
  const int32_t vocab = f->tiny.vocab, steps = f->tiny.tokens - 3;
  float *alone = calloc((size_t)(3 * steps * vocab), sizeof *alone);
  float *together = calloc((size_t)(3 * vocab), sizeof *together);
  for (int32_t row = 0; row < 3; row++) {
    forward_runner_reset(&f->r);
    forward_runner_feed(&f->r, 0, f->tiny.ids + row, row + 1, false, together);
    for (int32_t i = 0; i < steps - row; i++)
      forward_runner_feed(&f->r, 0, f->tiny.ids + 2 * row + 1 + i, 1, true,
                          alone + (row * steps + i) * vocab);
  }
  forward_runner_reset(&f->r);
  for (int32_t row = 0; row < 3; row++)
    forward_runner_feed(&f->r, row, f->tiny.ids + row, row + 1, false, NULL);
  for (int32_t i = 0; i < steps - 2; i++) {
    const int32_t ids[3] = {f->tiny.ids[1 + i], f->tiny.ids[3 + i], f->tiny.ids[5 + i]};
    forward_runner_step(&f->r, ids, 3, together);
    for (int32_t row = 0; row < 3; row++)
      assert_memory_equal(together + row * vocab, alone + (row * steps + i) * vocab,
                          (size_t)vocab * sizeof(float));
  }
  free(alone);
  free(together);
}

static void test_some_logits_equal_all(void **state) {
  fixture *f = *state;
  sample s;
  float all[4 * 64];
  make_sample(f, &s);
  assert_int_equal(pkv_forward_run(f->r.forward, f->r.caches, &s.batch, NULL), PKV_OK);
  memcpy(all, s.logits, sizeof all);
  make_sample(f, &s);
  s.batch.logit_count = 3;
  s.logit_tokens[0] = 3; /* any order, twice the same */
  s.logit_tokens[1] = 1;
  s.logit_tokens[2] = 3;
  assert_int_equal(pkv_forward_run(f->r.forward, f->r.caches, &s.batch, NULL), PKV_OK);
  const size_t vocab = (size_t)f->tiny.vocab;
  for (int i = 0; i < 3; i++)
    assert_memory_equal(s.logits + (size_t)i * vocab, all + (size_t)s.logit_tokens[i] * vocab,
                        vocab * sizeof(float));
  make_sample(f, &s);
  s.batch.logit_count = 0;
  s.batch.logits = NULL;
  s.batch.logit_tokens = NULL;
  assert_int_equal(pkv_forward_run(f->r.forward, f->r.caches, &s.batch, NULL), PKV_OK);
  assert_true(s.logits[0] == 42.0f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refused_batches),
      cmocka_unit_test(test_refused_options),
      cmocka_unit_test(test_batches_equal_single_rows),
      cmocka_unit_test(test_some_logits_equal_all),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
