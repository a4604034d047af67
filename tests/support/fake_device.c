/* SPDX-License-Identifier: Apache-2.0 */
#include "support/fake_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device_ops.h"
#include "base/status.h"
#include "support/fake_dense.h"

#define FAKE_PARTS      11
#define FAKE_WIDE_PARTS 8 /* of more than 8 query rows */

fake_device fake_device_state;

/* ------------------------------------------------------------------ streams */

enum { MOST_NODES = 256 };

/* A captured call: of build, the plan as the host prepared it then. */
typedef struct fake_node {
  struct pkv_device_plan *plan;
  struct pkv_plan header;
  const int32_t *seq_len; /* build; NULL: attention */
  int32_t max_seq_len;
  bool shared; /* build: from block tables */
  pkv_sharing sharing;
  pkv_attention_params params;
  fake_call run; /* any other call, with the parameters it had; NULL: none */
  pkv_executor *executor;
  bool meets; /* a call of all ranks of a group: the leader's has `given`, of all */
  _Alignas(16) unsigned char given[FAKE_CALL_BYTES];
} fake_node;

struct fake_graph {
  fake_meeting *meeting; /* NULL: of one rank alone */
  int rank;
  int count;
  fake_node node[MOST_NODES];
};

struct fake_stream {
  fake_graph *graph; /* being captured */
};

fake_stream *fake_stream_create(void) {
  fake_stream *stream = calloc(1, sizeof *stream);
  assert_non_null(stream);
  return stream;
}

void fake_stream_destroy(fake_stream *stream) {
  free(stream);
}

void fake_capture_begin(fake_stream *stream) {
  assert_null(stream->graph);
  stream->graph = calloc(1, sizeof *stream->graph);
  assert_non_null(stream->graph);
}

fake_graph *fake_capture_end(fake_stream *stream) {
  fake_graph *graph = stream->graph;
  assert_non_null(graph);
  stream->graph = NULL;
  return graph;
}

void fake_graph_destroy(fake_graph *graph) {
  free(graph);
}

static bool capturing(const void *stream) {
  return stream != NULL && ((const fake_stream *)stream)->graph != NULL;
}

static fake_node *next_node(void *stream, struct pkv_device_plan *plan) {
  fake_graph *graph = ((fake_stream *)stream)->graph;
  assert_true(graph->count < MOST_NODES);
  fake_node *node = &graph->node[graph->count++];
  node->plan = plan;
  if (plan != NULL) node->header = plan->header;
  return node;
}

pkv_status fake_put(void *stream, fake_call run, pkv_executor *executor, const void *params,
                    size_t bytes, pkv_error *err) {
  if (!capturing(stream)) return run(executor, params, err);
  fake_node *node = next_node(stream, NULL);
  assert_true(bytes <= sizeof node->given);
  node->run = run;
  node->executor = executor;
  memcpy(node->given, params, bytes);
  return PKV_OK;
}

pkv_status fake_put_all(fake_meeting *meeting, void *const *streams, fake_call run,
                        pkv_executor *executor, const void *params, size_t bytes, pkv_error *err) {
  if (!capturing(streams[0])) return run(executor, params, err);
  for (int r = 0; r < meeting->count; r++) {
    fake_graph *const graph = ((fake_stream *)streams[r])->graph;
    assert_non_null(graph);
    fake_node *const node = next_node(streams[r], NULL);
    assert_true(bytes <= sizeof node->given);
    graph->meeting = meeting;
    graph->rank = r;
    node->meets = true;
    node->run = run;
    node->executor = executor;
    memcpy(node->given, params, bytes);
  }
  return PKV_OK;
}

/* ------------------------------------------------------------------ the device */

/* Counts a call; a failure when it is one that should fail. */
pkv_status fake_counted(const char *name, pkv_error *err) {
  fake_device *f = &fake_device_state;
  f->calls++;
  if (f->calls == f->fail_at || (f->fail_on && f->calls > f->fail_at))
    return PKV_FAIL(err, PKV_E_DEVICE, "%s: told to fail as call %d", name, f->calls);
  return PKV_OK;
}

static pkv_status fake_alloc(void **out, pkv_executor *executor, size_t bytes, pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("alloc", err));
  *out = NULL;
  if (bytes >= (size_t)1 << 40 || posix_memalign(out, 256, bytes) != 0)
    return PKV_FAIL(err, PKV_E_NOMEM, "%zu bytes: more than are free", bytes);
  memset(*out, 0, bytes);
  fake_device_state.live++;
  return PKV_OK;
}

static void fake_free(pkv_executor *executor, void *ptr) {
  (void)executor;
  fake_device_state.live--;
  free(ptr);
}

static pkv_status fake_copy(pkv_executor *executor, void *to, const void *from, size_t bytes,
                            void *stream, pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("copy", err));
  PKV_CHECK(err, bytes != (size_t)fake_device_state.fail_copies_of, PKV_E_DEVICE,
            "copy of %zu bytes: told to fail", bytes);
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "copy while the stream captures");
  memcpy(to, from, bytes);
  return PKV_OK;
}

static pkv_status fake_copy_rows(pkv_executor *executor, void *to, size_t to_stride,
                                 const void *from, size_t from_stride, size_t bytes, int32_t rows,
                                 void *stream, pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("copy_rows", err));
  PKV_CHECK(err, !fake_device_state.fail_copied_rows, PKV_E_DEVICE, "copy of rows: told to fail");
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "copy while the stream captures");
  for (int32_t i = 0; i < rows; i++)
    memcpy((char *)to + (size_t)i * to_stride, (const char *)from + (size_t)i * from_stride, bytes);
  fake_device_state.copied_rows += rows;
  return PKV_OK;
}

static pkv_status fake_advance(pkv_executor *executor, const pkv_device_advance *p, void *stream,
                               pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("advance", err));
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "advance while the stream captures");
  for (int32_t i = 0; i < p->rows; i++) {
    const int32_t at = ++p->positions[i];
    p->ids[i] = p->chosen[i];
    p->seq_len[i]++;
    p->sample_rows[i].position++;
    p->slots[i] = (int64_t)p->table[i * p->table_stride + at / p->page_tokens] * p->page_tokens +
                  at % p->page_tokens;
  }
  fake_device_state.advances++;
  return PKV_OK;
}

static pkv_status fake_event_create(void **event, pkv_executor *executor, pkv_error *err) {
  *event = NULL;
  PKV_TRY(fake_counted("event_create", err));
  return executor->device_ops->alloc(event, executor, 1, err);
}

static void fake_event_destroy(pkv_executor *executor, void *event) {
  if (event != NULL) executor->device_ops->free(executor, event);
}

static pkv_status fake_event_record(pkv_executor *executor, void *event, void *stream,
                                    pkv_error *err) {
  (void)executor;
  (void)event;
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "an event while the stream captures");
  return fake_counted("event_record", err);
}

static pkv_status fake_event_wait(pkv_executor *executor, void *event, pkv_error *err) {
  (void)executor;
  assert_non_null(event);
  return fake_counted("event_wait", err);
}

static pkv_status fake_synchronize(pkv_executor *executor, void *stream, pkv_error *err) {
  (void)executor;
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "synchronize while the stream captures");
  return fake_counted("synchronize", err);
}

static pkv_status fake_parts(int32_t *parts, pkv_executor *executor, pkv_dtype kv_dtype,
                             int32_t head_dim, int32_t query_rows, pkv_error *err) {
  (void)executor;
  (void)kv_dtype;
  (void)head_dim;
  PKV_TRY(fake_counted("parts", err));
  *parts = query_rows > 8 ? FAKE_WIDE_PARTS : FAKE_PARTS;
  return PKV_OK;
}

static pkv_status fake_sizes(int64_t *slot_bytes, struct pkv_device_plan *plan, pkv_error *err) {
  const pkv_shape *shape = &plan->shape;
  PKV_TRY(fake_counted("sizes", err));
  const int64_t rows = (int64_t)(shape->query_heads / shape->kv_heads) * shape->q_len;
  *slot_bytes = 16 * (shape->head_dim + 2) * 4;
  plan->tile_rows = 16;
  plan->tiles = (int32_t)((rows + 15) / 16);
  return PKV_OK;
}

static pkv_status build_now(struct pkv_device_plan *plan, int32_t rows, int32_t max_seq_len,
                            const int32_t *seq_len, const pkv_sharing *sharing, pkv_error *err) {
  const pkv_plan *out;
  int32_t *lens = malloc((size_t)(rows + 1) * sizeof *lens);
  for (int32_t r = 0; r < rows; r++)
    lens[r] = seq_len[r] < 0 ? 0 : seq_len[r] > max_seq_len ? max_seq_len : seq_len[r];
  const pkv_status status =
      sharing != NULL
          ? pkv_plan_build_shared(&out, plan->plan, plan->limits.plan_bytes, &plan->shape,
                                  &plan->options, rows, lens, sharing, err)
          : pkv_plan_build(&out, plan->plan, plan->limits.plan_bytes, &plan->shape, &plan->options,
                           rows, lens, err);
  free(lens);
  memset(plan->counters, 0, plan->counter_bytes);
  *plan->fault = 0;
  return status;
}

static pkv_status fake_build(struct pkv_device_plan *plan, int32_t max_seq_len,
                             const int32_t *seq_len, void *stream, pkv_error *err) {
  PKV_TRY(fake_counted("build", err));
  if (!capturing(stream))
    return build_now(plan, plan->header.rows, max_seq_len, seq_len, NULL, err);
  fake_node *node = next_node(stream, plan);
  node->seq_len = seq_len;
  node->max_seq_len = max_seq_len;
  return PKV_OK;
}

static pkv_status fake_tree_parts(int32_t *parts, pkv_executor *executor, pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("tree_parts", err));
  *parts = 7;
  return PKV_OK;
}

static pkv_status fake_build_tree(struct pkv_device_plan *plan, const int32_t *seq_len,
                                  const pkv_sharing *sharing, void *stream, pkv_error *err) {
  const int32_t most = plan->limits.max_seq_len;
  PKV_TRY(fake_counted("build_tree", err));
  if (!capturing(stream)) return build_now(plan, plan->header.rows, most, seq_len, sharing, err);
  fake_node *node = next_node(stream, plan);
  node->seq_len = seq_len;
  node->max_seq_len = most;
  node->sharing = *sharing;
  node->shared = true;
  return PKV_OK;
}

static pkv_status fake_reset(struct pkv_device_plan *plan, void *stream, pkv_error *err) {
  PKV_TRY(fake_counted("reset", err));
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "reset while the stream captures");
  memset(plan->counters, 0, plan->counter_bytes);
  *plan->fault = 0;
  return PKV_OK;
}

/* First key that some query of a row of `len` tokens sees. */
static int64_t first_key(const struct pkv_plan *plan, int64_t len) {
  const int64_t position = len > plan->q_len ? len - plan->q_len : 0;
  return plan->window > 0 && position + 1 > plan->window ? position + 1 - plan->window : 0;
}

/* The last row whose table names a page outside the cache, counted from 1; 0 = none. */
static int32_t faulty_row(const struct pkv_plan *plan, const pkv_attention_params *p) {
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  int32_t fault = 0;
  for (int32_t r = 0; r < plan->rows; r++)
    for (int64_t t = first_key(plan, seq_len[r]) / plan->page_tokens;
         t * plan->page_tokens < seq_len[r]; t++) {
      const int32_t id = p->block_table[r * p->block_table_stride + t];
      if (id < 0 || id >= p->cache.pages) fault = r + 1;
    }
  return fault;
}

static pkv_status attend_now(struct pkv_device_plan *plan, const pkv_attention_params *p,
                             pkv_error *err) {
  const struct pkv_plan *made = plan->plan;
  const int32_t fault = faulty_row(made, p);
  if (fault != 0) {
    *plan->fault = fault;
    return PKV_OK;
  }
  pkv_attention_params run = *p;
  const size_t bytes = made->workspace_bytes > 0 ? (size_t)made->workspace_bytes : 64;
  run.plan = made;
  assert_int_equal(posix_memalign(&run.workspace, 64, bytes), 0);
  memset(run.workspace, 0xff, bytes);
  const pkv_status status = plan->executor->ops->attention(plan->executor, &run, err);
  free(run.workspace);
  return status;
}

static pkv_status fake_attention(struct pkv_device_plan *plan, const pkv_attention_params *p,
                                 void *stream, pkv_error *err) {
  PKV_TRY(fake_counted("attention", err));
  if (!capturing(stream)) return attend_now(plan, p, err);
  next_node(stream, plan)->params = *p;
  return PKV_OK;
}

static pkv_status run_node(const fake_node *node, pkv_error *err) {
  if (node->run != NULL) return node->run(node->executor, node->given, err);
  if (node->seq_len != NULL)
    return build_now(node->plan, node->header.rows, node->max_seq_len, node->seq_len,
                     node->shared ? &node->sharing : NULL, err);
  return attend_now(node->plan, &node->params, err);
}

/* From node *at to the next at which ranks meet, or the end. */
static pkv_status run_alone(const fake_graph *graph, int *at, pkv_error *err) {
  for (; *at < graph->count && !graph->node[*at].meets; (*at)++)
    PKV_TRY(run_node(&graph->node[*at], err));
  return PKV_OK;
}

/* All ranks' graphs, each as far as it goes by itself, then together. */
static pkv_status run_together(const fake_meeting *m, pkv_error *err) {
  int at[FAKE_RANKS] = {0};
  for (;;) {
    for (int r = 0; r < m->count; r++)
      PKV_TRY(run_alone(m->graph[r], &at[r], err));
    if (at[0] == m->graph[0]->count) return PKV_OK;
    PKV_TRY(run_node(&m->graph[0]->node[at[0]], err));
    for (int r = 0; r < m->count; r++)
      at[r]++;
  }
}

/* Graphs of several ranks run when the last of them is launched. */
pkv_status fake_graph_launch(const fake_graph *graph, pkv_error *err) {
  fake_meeting *const m = graph->meeting;
  int at = 0;
  if (m == NULL) return run_alone(graph, &at, err);
  m->graph[graph->rank] = graph;
  for (int r = 0; r < m->count; r++)
    if (m->graph[r] == NULL) return PKV_OK;
  const pkv_status status = run_together(m, err);
  memset(m->graph, 0, sizeof m->graph);
  return status;
}

static pkv_status fake_append(pkv_executor *executor, const pkv_append_params *p, void *stream,
                              pkv_error *err) {
  const int64_t slots = p->cache.pages * p->cache.page_tokens;
  pkv_append_params seen = *p;
  PKV_TRY(fake_counted("append", err));
  PKV_CHECK(err, !capturing(stream), PKV_E_DEVICE, "append while the stream captures");
  int64_t *inside = malloc((size_t)(p->tokens + 1) * sizeof *inside);
  for (int64_t i = 0; i < p->tokens; i++)
    inside[i] = p->slots[i] >= 0 && p->slots[i] < slots ? p->slots[i] : -1;
  seen.slots = inside;
  for (int32_t j = 0; j < p->rope.dims / 2 && p->rope.inverse_frequency != NULL; j++)
    seen.rope.frequency[j] = (double)p->rope.inverse_frequency[j];
  const pkv_status status = executor->ops->append(executor, &seen, err);
  free(inside);
  return status;
}

/* ------------------------------------------------------------------ products */

enum { MOST_PRODUCTS = 512 };
static struct fake_product {
  const pkv_executor *executor;
  pkv_product_choice choice;
  bool measured;
} products[MOST_PRODUCTS];
static int product_count;

static void keep_product(const pkv_executor *executor, pkv_product_choice c, bool measured) {
  for (int i = 0; i < product_count; i++) {
    const pkv_product_choice *o = &products[i].choice;
    if (products[i].executor == executor && o->n == c.n && o->k == c.k && o->m == c.m &&
        o->x_stride == c.x_stride && o->y_stride == c.y_stride && o->act == c.act &&
        o->y_f32 == c.y_f32 && o->accumulate == c.accumulate)
      return;
  }
  assert_true(product_count < MOST_PRODUCTS);
  products[product_count++] = (struct fake_product){executor, c, measured};
  fake_device_state.measured += measured;
}

void fake_note_product(const pkv_executor *executor, const pkv_dense_matmul_params *p) {
  if (fake_device_state.maker != NULL)
    keep_product(executor,
                 (pkv_product_choice){p->gate ? p->w.n / 2 : p->w.n, p->w.k, p->x_stride,
                                      p->y_stride, p->m, (int32_t)p->act, p->y_f32, p->accumulate,
                                      p->m % 8},
                 true);
}

static void fake_products_maker(char maker[PKV_PRODUCT_MAKER], pkv_executor *executor) {
  (void)executor;
  (void)snprintf(maker, PKV_PRODUCT_MAKER, "%s",
                 fake_device_state.maker != NULL ? fake_device_state.maker : "nobody");
}

static void fake_products_take(pkv_executor *executor, const pkv_product_choice *choices,
                               int32_t count) {
  for (int32_t i = 0; i < count; i++)
    keep_product(executor, choices[i], false);
}

static int32_t fake_products_list(pkv_product_choice out[PKV_PRODUCT_CHOICES], int32_t *timed,
                                  pkv_executor *executor) {
  int32_t count = 0;
  *timed = 0;
  for (int i = 0; i < product_count; i++) {
    if (products[i].executor != executor) continue;
    out[count++] = products[i].choice;
    *timed += products[i].measured;
  }
  return count;
}

static const pkv_device_ops fake_ops = {.alloc = fake_alloc,
                                        .free = fake_free,
                                        .copy = fake_copy,
                                        .synchronize = fake_synchronize,
                                        .parts = fake_parts,
                                        .sizes = fake_sizes,
                                        .build = fake_build,
                                        .tree_parts = fake_tree_parts,
                                        .build_tree = fake_build_tree,
                                        .reset = fake_reset,
                                        .attention = fake_attention,
                                        .append = fake_append,
                                        .copy_rows = fake_copy_rows,
                                        .advance = fake_advance,
                                        .event_create = fake_event_create,
                                        .event_destroy = fake_event_destroy,
                                        .event_record = fake_event_record,
                                        .event_wait = fake_event_wait,
                                        .products_maker = fake_products_maker,
                                        .products_take = fake_products_take,
                                        .products_list = fake_products_list};

pkv_executor *fake_device_create(void) {
  pkv_executor *const executor = fake_device_another();
  fake_device_state = (fake_device){.free_bytes = (size_t)16 << 30};
  product_count = 0;
  return executor;
}

pkv_executor *fake_device_another(void) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  pkv_error err = {0};
  options.threads = 2;
  if (pkv_executor_create(&executor, &options, &err) != PKV_OK) fail_msg("%s", err.text);
  executor->device_ops = &fake_ops;
  executor->dense = &fake_dense_ops;
  return executor;
}
