/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a step computes. Each running request contributes `planned` tokens, cut into rows of q_len
 * 64, 32, .. 1 by the binary digits of their number. Rows of one q_len form a group with one plan;
 * groups lie in the batch by falling q_len, so that the tokens of one request keep their order.
 */
#include "engine/engine_state.h"

#include <string.h>

#include "base/status.h"
#include "kv/pool.h"

/* Routes whose plans a step may build for decoding rows. */
static const pkv_route decode_routes[] = {
    PKV_ROUTE_BUCKET_EXACT, PKV_ROUTE_BUCKET_PADDED, PKV_ROUTE_SPLIT,
    PKV_ROUTE_WORKQUEUE,    PKV_ROUTE_BALANCED,      PKV_ROUTE_SHARED,
};
#define DECODE_ROUTES ((int)(sizeof decode_routes / sizeof *decode_routes))

static pkv_plan_options plan_options(const pkv_engine *e, pkv_route route) {
  pkv_plan_options o = PKV_PLAN_OPTIONS_INIT;
  o.route = route;
  o.flags = e->options.batch_invariant ? PKV_PLAN_BATCH_INVARIANT : 0u;
  return o;
}

static size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

/* Plan memory of a class that may be planned by any route of the policy, with one of its shapes. */
static pkv_status size_class(size_t *plan_bytes, const pkv_engine *e, const pkv_q_class *c,
                             const pkv_shape *shape, size_t *workspace, pkv_error *err) {
  const bool chooses = c->shape.q_len == 1 && e->options.policy != PKV_POLICY_FIXED;
  for (int i = 0; i < DECODE_ROUTES; i++) {
    size_t plan = 0, work = 0;
    const bool shares = decode_routes[i] == PKV_ROUTE_SHARED;
    if (shares ? !c->shares : !chooses && decode_routes[i] != c->plan_options.route) continue;
    const pkv_plan_options o = plan_options(e, decode_routes[i]);
    PKV_TRY(pkv_plan_size(&plan, &work, shape, &o, c->max_rows, e->options.max_seq_len, err));
    *plan_bytes = larger(*plan_bytes, plan);
    *workspace = larger(*workspace, work);
  }
  PKV_CHECK(err, *plan_bytes > 0, PKV_E_UNSUPPORTED, "route %s cannot be planned by the engine",
            pkv_route_name(c->plan_options.route));
  return PKV_OK;
}

/* A device makes its own. */
static pkv_status create_plans(pkv_engine *e, pkv_q_class *c, size_t *workspace, pkv_error *err) {
  PKV_TRY(size_class(&c->plan_bytes, e, c, &c->shape, workspace, err));
  c->plan = pkv_alloc(&e->allocator, c->plan_bytes);
  PKV_CHECK(err, c->plan != NULL, PKV_E_NOMEM, "no memory for plans of %zu bytes", c->plan_bytes);
  if (e->shape.window == 0 || e->options.max_seq_len <= e->shape.window) return PKV_OK;
  PKV_TRY(size_class(&c->local_plan_bytes, e, c, &c->local_shape, workspace, err));
  c->local_plan = pkv_alloc(&e->allocator, c->local_plan_bytes);
  PKV_CHECK(err, c->local_plan != NULL, PKV_E_NOMEM, "no memory for plans of %zu bytes",
            c->local_plan_bytes);
  return PKV_OK;
}

/* Each request has at most one row of a class but of the largest. */
int32_t pkv_batch_max_rows(const pkv_engine *engine, int32_t q_len) {
  const pkv_engine_options *o = &engine->options;
  const int32_t rows = o->prefill_chunk / q_len;
  if (q_len == 1) return o->max_rows;
  return q_len < PKV_Q_LARGEST && rows > o->max_rows ? o->max_rows : rows;
}

static pkv_status create_class(pkv_engine *e, int index, size_t *workspace, pkv_error *err) {
  pkv_q_class *const c = &e->classes[index];
  const int32_t q_len = 1 << index;
  const pkv_shape shape = PKV_SHAPE_INIT;
  c->shape = shape;
  c->shape.query_heads = e->shape.query_heads;
  c->shape.kv_heads = e->shape.kv_heads;
  c->shape.head_dim = e->shape.head_dim;
  c->shape.page_tokens = e->options.page_tokens;
  c->shape.q_len = q_len;
  c->max_rows = pkv_batch_max_rows(e, q_len);
  if (c->max_rows == 0) return PKV_OK;
  c->shares =
      q_len == 1 && e->options.route == PKV_ROUTE_SHARED && e->options.policy == PKV_POLICY_FIXED;
  c->plan_options =
      plan_options(e, q_len == 1 && e->options.route != PKV_ROUTE_SHARED ? e->options.route
                                                                         : PKV_ROUTE_BALANCED);
  c->local_shape = c->shape;
  c->local_shape.window = e->shape.window;
  if (e->weights == NULL) PKV_TRY(create_plans(e, c, workspace, err));
  c->seq_len = pkv_alloc_zeroed(&e->allocator, (size_t)c->max_rows, sizeof *c->seq_len);
  c->table =
      pkv_alloc_zeroed(&e->allocator, (size_t)c->max_rows * (size_t)e->max_pages, sizeof *c->table);
  if (q_len == 1) {
    c->held = pkv_alloc_zeroed(&e->allocator, (size_t)c->max_rows, sizeof *c->held);
    c->changed = pkv_alloc_zeroed(&e->allocator, (size_t)c->max_rows, sizeof *c->changed);
  }
  const bool noted = q_len > 1 || (c->held != NULL && c->changed != NULL);
  PKV_CHECK(err, c->seq_len != NULL && c->table != NULL && noted, PKV_E_NOMEM,
            "no memory for the plans of rows of %d tokens", (int)q_len);
  return PKV_OK;
}

/* For the statistics: the engine's own route as it runs it, the others as they are. */
static pkv_plan_options stats_options(const pkv_engine *e, pkv_route route) {
  pkv_plan_options o = plan_options(e, route);
  const bool own = route == e->options.route ||
                   (e->options.route == PKV_ROUTE_SHARED && route == PKV_ROUTE_BALANCED);
  if (e->options.policy != PKV_POLICY_FIXED || !own) o.flags = 0u;
  return o;
}

static pkv_status create_stats_plan(pkv_engine *e, pkv_error *err) {
  if (!e->options.route_stats) return PKV_OK;
  for (int i = 0; i < DECODE_ROUTES; i++) {
    const pkv_plan_options o = stats_options(e, decode_routes[i]);
    size_t plan = 0, work = 0;
    for (int local = 0; local < 2; local++) {
      const pkv_shape *shape = local ? &e->classes[0].local_shape : &e->classes[0].shape;
      PKV_TRY(
          pkv_plan_size(&plan, &work, shape, &o, e->options.max_rows, e->options.max_seq_len, err));
      e->stats_plan_bytes = larger(e->stats_plan_bytes, plan);
    }
  }
  e->stats_plan = pkv_alloc(&e->allocator, e->stats_plan_bytes);
  e->decode_table = pkv_alloc_zeroed(&e->allocator, (size_t)e->options.max_rows,
                                     (size_t)e->max_pages * sizeof *e->decode_table);
  PKV_CHECK(err, e->stats_plan != NULL && e->decode_table != NULL, PKV_E_NOMEM,
            "no memory for %zu bytes of route statistics", e->stats_plan_bytes);
  return PKV_OK;
}

pkv_status pkv_batch_create(pkv_engine *engine, size_t *workspace_bytes, pkv_error *err) {
  pkv_engine *const e = engine;
  const pkv_allocator *const a = &e->allocator;
  const size_t tokens = (size_t)e->max_tokens, logits = (size_t)e->max_logits;
  const size_t head = (size_t)e->shape.vocab;
  size_t logit_bytes = 0;
  *workspace_bytes = 0;
  for (int i = 0; i < PKV_Q_CLASSES; i++)
    PKV_TRY(create_class(e, i, workspace_bytes, err));
  PKV_TRY(create_stats_plan(e, err));
  PKV_CHECK(err, pkv_mul_size(&logit_bytes, logits * sizeof(float), head), PKV_E_LIMIT,
            "%zu rows of %zu logits are too many", logits, head);
  e->ids = pkv_alloc_zeroed(a, tokens, sizeof *e->ids);
  e->positions = pkv_alloc_zeroed(a, tokens, sizeof *e->positions);
  e->slots = pkv_alloc_zeroed(a, tokens, sizeof *e->slots);
  e->logit_tokens = pkv_alloc_zeroed(a, logits, sizeof *e->logit_tokens);
  e->logit_rows = pkv_alloc_zeroed(a, logits, sizeof *e->logit_rows);
  e->logits = pkv_alloc(a, logit_bytes);
  e->sampled = pkv_alloc_zeroed(a, logits, sizeof *e->sampled);
  e->sample_rows = pkv_alloc_zeroed(a, logits, sizeof *e->sample_rows);
  e->decode_len = pkv_alloc_zeroed(a, (size_t)e->options.max_rows, sizeof *e->decode_len);
  e->scratch.candidates = pkv_alloc_zeroed(a, head, sizeof *e->scratch.candidates);
  e->scratch.weights = pkv_alloc_zeroed(a, head, sizeof *e->scratch.weights);
  e->edited = pkv_alloc_zeroed(a, head, sizeof *e->edited);
  e->counts = pkv_alloc_zeroed(a, head, sizeof *e->counts);
  PKV_CHECK(err,
            e->ids != NULL && e->positions != NULL && e->slots != NULL && e->logit_tokens != NULL &&
                e->logit_rows != NULL && e->logits != NULL && e->sampled != NULL &&
                e->sample_rows != NULL && e->decode_len != NULL && e->scratch.candidates != NULL &&
                e->scratch.weights != NULL && e->edited != NULL && e->counts != NULL,
            PKV_E_NOMEM, "no memory for a batch of %zu tokens and %zu rows of %zu logits", tokens,
            logits, head);
  return PKV_OK;
}

void pkv_batch_destroy(pkv_engine *engine) {
  pkv_engine *const e = engine;
  const pkv_allocator *const a = &e->allocator;
  const size_t tokens = (size_t)e->max_tokens, logits = (size_t)e->max_logits;
  const size_t head = (size_t)e->shape.vocab;
  for (int i = 0; i < PKV_Q_CLASSES; i++) {
    pkv_q_class *const c = &e->classes[i];
    pkv_free(a, c->plan, c->plan_bytes);
    pkv_free(a, c->local_plan, c->local_plan_bytes);
    pkv_free(a, c->seq_len, (size_t)c->max_rows * sizeof *c->seq_len);
    pkv_free(a, c->held, (size_t)c->max_rows * sizeof *c->held);
    pkv_free(a, c->changed, (size_t)c->max_rows * sizeof *c->changed);
    pkv_free(a, c->table, (size_t)c->max_rows * (size_t)e->max_pages * sizeof *c->table);
  }
  pkv_free(a, e->stats_plan, e->stats_plan_bytes);
  pkv_free(a, e->decode_table,
           (size_t)e->options.max_rows * (size_t)e->max_pages * sizeof *e->decode_table);
  pkv_free(a, e->ids, tokens * sizeof *e->ids);
  pkv_free(a, e->positions, tokens * sizeof *e->positions);
  pkv_free(a, e->slots, tokens * sizeof *e->slots);
  pkv_free(a, e->logit_tokens, logits * sizeof *e->logit_tokens);
  pkv_free(a, e->logit_rows, logits * sizeof *e->logit_rows);
  pkv_free(a, e->logits, logits * head * sizeof *e->logits);
  pkv_free(a, e->sampled, logits * sizeof *e->sampled);
  pkv_free(a, e->sample_rows, logits * sizeof *e->sample_rows);
  pkv_free(a, e->decode_len, (size_t)e->options.max_rows * sizeof *e->decode_len);
  pkv_free(a, e->scratch.candidates, head * sizeof *e->scratch.candidates);
  pkv_free(a, e->scratch.weights, head * sizeof *e->scratch.weights);
  pkv_free(a, e->edited, head * sizeof *e->edited);
  pkv_free(a, e->counts, head * sizeof *e->counts);
}

/* Does the model's answer behind this token matter? */
static bool needs_logits(const pkv_seq *s, int32_t position) {
  if (position == s->known - 1) return s->known < s->limit;
  return s->scoring && position + 1 < s->prompt && position + 1 >= s->echoed;
}

/* The row's pages, where they are not there already: hundreds a row, of which one changes now and
   then. A row of one token is the last of its request: all pages are copied. */
static void copy_table(const pkv_engine *e, pkv_q_class *c, int32_t row, int32_t length) {
  const uint64_t change = pkv_table_change(e->table, row);
  if (c->held != NULL) {
    c->changed[c->rows] = c->held[c->rows] != change;
    c->held[c->rows] = change;
    if (!c->changed[c->rows]) return;
  }
  memcpy(c->table + (size_t)c->rows * (size_t)e->max_pages, pkv_table_row(e->table, row),
         (size_t)pkv_pages_for(e, length) * sizeof *c->table);
}

void pkv_batch_forget(pkv_engine *engine) {
  pkv_q_class *const c = &engine->classes[0];
  if (c->held != NULL) memset(c->held, 0, (size_t)c->max_rows * sizeof *c->held);
}

/* Adds tokens [first, first + q_len) of a request as one row of a class. */
static pkv_status add_row(pkv_engine *e, pkv_q_class *c, int32_t slot, int32_t first,
                          pkv_error *err) {
  const pkv_seq *const s = &e->seqs[slot];
  const int32_t q_len = c->shape.q_len, length = first + q_len;
  PKV_CHECK(err, c->rows < c->max_rows && e->tokens + q_len <= e->max_tokens, PKV_E_INTERNAL,
            "the batch has no room for row %d of %d tokens", (int)c->rows, (int)q_len);
  copy_table(e, c, s->row, length);
  c->seq_len[c->rows++] = length;
  PKV_TRY(pkv_table_slots(e->slots + e->tokens, e->table, s->row, first, q_len, err));
  for (int32_t i = 0; i < q_len; i++) {
    const int32_t at = e->tokens + i;
    e->ids[at] = s->tokens[first + i];
    e->positions[at] = first + i;
    if (!needs_logits(s, first + i)) continue;
    PKV_CHECK(err, e->logit_count < e->max_logits, PKV_E_INTERNAL,
              "a step needs more than %d rows of logits", (int)e->max_logits);
    e->logit_tokens[e->logit_count] = at;
    if (e->weights != NULL) pkv_engine_device_row(e, e->logit_count, s);
    e->logit_rows[e->logit_count++] = (pkv_logit_row){slot, first + i, s->order};
  }
  e->tokens += q_len;
  return PKV_OK;
}

static pkv_status fill_class(pkv_engine *e, int index, pkv_error *err) {
  pkv_q_class *const c = &e->classes[index];
  const int32_t q_len = c->shape.q_len;
  c->rows = 0;
  if (c->max_rows == 0) return PKV_OK;
  for (int32_t i = 0; i < e->running_count; i++) {
    const int32_t slot = e->running[i];
    const pkv_seq *const s = &e->seqs[slot];
    if (q_len == PKV_Q_LARGEST) {
      for (int32_t at = 0; at + q_len <= s->planned; at += q_len)
        PKV_TRY(add_row(e, c, slot, s->computed + at, err));
    } else if ((s->planned & q_len) != 0) {
      /* Behind the rows of larger classes: the higher digits of the number. */
      const int32_t before = s->planned & ~(2 * q_len - 1);
      PKV_TRY(add_row(e, c, slot, s->computed + before, err));
    }
  }
  return PKV_OK;
}

static pkv_status choose_route(pkv_engine *e, pkv_q_class *c, pkv_error *err) {
  pkv_choice choice = PKV_CHOICE_INIT;
  const pkv_profile profile = PKV_PROFILE_INIT;
  if (c->shape.q_len != 1 || e->options.policy == PKV_POLICY_FIXED) return PKV_OK;
  PKV_TRY(pkv_policy_choose(&choice, e->options.policy, e->options.route, &c->shape,
                            e->options.kv_dtype, c->rows, c->seq_len, &profile, err));
  c->plan_options = plan_options(e, choice.route);
  c->plan_options.splits = choice.splits;
  return PKV_OK;
}

/* Rows of requests get pages of others' prompts from the start on: an equal page has equal ones
 * before it. */
static pkv_status build_shared(const pkv_plan **plan, pkv_engine *e, void *memory, size_t bytes,
                               const pkv_shape *shape, const pkv_plan_options *options,
                               const int32_t *table, int32_t rows, const int32_t *seq_len,
                               pkv_error *err) {
  pkv_sharing sharing = PKV_SHARING_INIT;
  sharing.flags = PKV_TABLE_CHAINED;
  sharing.block_table = table;
  sharing.block_table_stride = e->max_pages;
  sharing.max_pages = e->max_pages;
  return pkv_plan_build_shared(plan, memory, bytes, shape, options, rows, seq_len, &sharing, err);
}

/* Whether rows may read the same pages. */
static bool may_share(const pkv_engine *e, const pkv_q_class *c) {
  pkv_prefix_stats prefix;
  if (!c->shares || c->rows < 2) return false;
  pkv_prefix_get_stats(&prefix, e->prefix);
  return e->prefix == NULL || prefix.shared > 0;
}

/* *plan stays NULL where the rows share nothing that pays. */
static pkv_status plan_sharing(const pkv_plan **plan, pkv_engine *e, const pkv_q_class *c,
                               const pkv_shape *shape, void *memory, size_t bytes, pkv_error *err) {
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  *plan = NULL;
  if (!may_share(e, c)) return PKV_OK;
  const pkv_plan_options o = plan_options(e, PKV_ROUTE_SHARED);
  PKV_TRY(build_shared(plan, e, memory, bytes, shape, &o, c->table, c->rows, c->seq_len, err));
  PKV_TRY(pkv_plan_get_stats(&stats, *plan, e->options.kv_dtype, err));
  if (stats.nodes == 0) *plan = NULL;
  return PKV_OK;
}

static pkv_status build_plan(const pkv_plan **plan, pkv_engine *e, const pkv_q_class *c,
                             const pkv_shape *shape, void *memory, size_t bytes, bool *shared,
                             pkv_error *err) {
  PKV_TRY(plan_sharing(plan, e, c, shape, memory, bytes, err));
  *shared = *plan != NULL;
  if (*shared) return PKV_OK;
  return pkv_plan_build(plan, memory, bytes, shape, &c->plan_options, c->rows, c->seq_len, err);
}

static void describe_group(pkv_engine *e, const pkv_q_class *c, pkv_forward_group *g) {
  g->rows = c->rows;
  g->q_len = c->shape.q_len;
  g->seq_len = c->seq_len;
  g->shares = may_share(e, c);
  if (g->shares) e->stats.shared_steps++;
}

static pkv_status plan_group(pkv_engine *e, pkv_q_class *c, pkv_forward_group *g, pkv_error *err) {
  bool shared = false;
  PKV_TRY(choose_route(e, c, err));
  PKV_TRY(build_plan(&g->plan, e, c, &c->shape, c->plan, c->plan_bytes, &shared, err));
  if (shared) e->stats.shared_steps++;
  g->local_plan = NULL;
  if (c->local_plan != NULL)
    PKV_TRY(build_plan(&g->local_plan, e, c, &c->local_shape, c->local_plan, c->local_plan_bytes,
                       &shared, err));
  return PKV_OK;
}

static pkv_status build_group(pkv_engine *e, int index, int32_t first_token, pkv_error *err) {
  pkv_q_class *const c = &e->classes[index];
  pkv_forward_group *const g = &e->groups[e->group_count];
  if (c->rows == 0) return PKV_OK;
  *g = (pkv_forward_group){0};
  if (e->weights != NULL)
    describe_group(e, c, g);
  else
    PKV_TRY(plan_group(e, c, g, err));
  g->changed = c->changed;
  g->block_table = c->table;
  g->block_table_stride = e->max_pages;
  g->max_pages = e->max_pages;
  g->first_token = first_token;
  e->group_count++;
  return PKV_OK;
}

void pkv_batch_note_rows(pkv_engine *engine) {
  pkv_engine *const e = engine;
  e->decode_rows = 0;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const s = &e->seqs[e->running[i]];
    if (s->planned == 0 || !pkv_seq_decodes(s)) continue;
    if (e->decode_table != NULL)
      memcpy(e->decode_table + (size_t)e->decode_rows * (size_t)e->max_pages,
             pkv_table_row(e->table, s->row),
             (size_t)pkv_pages_for(e, s->known) * sizeof *e->decode_table);
    e->decode_len[e->decode_rows++] = s->known;
  }
}

pkv_status pkv_batch_build(pkv_engine *engine, pkv_error *err) {
  pkv_engine *const e = engine;
  e->tokens = e->logit_count = e->group_count = 0;
  e->reads_logits = false;
  for (int i = PKV_Q_CLASSES; i-- > 0;) {
    const int32_t first = e->tokens;
    PKV_TRY(fill_class(e, i, err));
    PKV_TRY(build_group(e, i, first, err));
  }
  pkv_batch_note_rows(e);
  return PKV_OK;
}

const pkv_forward_group *pkv_batch_go_on(pkv_engine *engine) {
  pkv_engine *const e = engine;
  pkv_q_class *const c = &e->classes[0];
  c->rows = 0;
  for (int32_t i = 0; i < e->logit_count; i++) {
    const int32_t length = e->logit_rows[i].position + 2;
    copy_table(e, c, e->seqs[e->logit_rows[i].seq].row, length);
    c->seq_len[c->rows++] = length;
  }
  return &e->groups[0];
}

static pkv_status count_routes(pkv_engine *e, const pkv_shape *shape, int32_t layers,
                               pkv_error *err) {
  for (int i = 0; i < DECODE_ROUTES; i++) {
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    const pkv_plan_options o = stats_options(e, decode_routes[i]);
    const pkv_plan *plan = NULL;
    if (o.route == PKV_ROUTE_SHARED)
      PKV_TRY(build_shared(&plan, e, e->stats_plan, e->stats_plan_bytes, shape, &o, e->decode_table,
                           e->decode_rows, e->decode_len, err));
    else
      PKV_TRY(pkv_plan_build(&plan, e->stats_plan, e->stats_plan_bytes, shape, &o, e->decode_rows,
                             e->decode_len, err));
    PKV_TRY(pkv_plan_get_stats(&stats, plan, e->options.kv_dtype, err));
    e->stats.kv_bytes_route[decode_routes[i]] +=
        (stats.unique_kv_bytes + stats.padded_kv_bytes) * layers;
  }
  return PKV_OK;
}

pkv_status pkv_batch_count_routes(pkv_engine *engine, pkv_error *err) {
  pkv_engine *const e = engine;
  const pkv_q_class *const c = &e->classes[0];
  const int32_t local = c->local_plan != NULL ? e->shape.local_layers : 0;
  if (!e->options.route_stats || e->decode_rows == 0) return PKV_OK;
  PKV_TRY(count_routes(e, &c->shape, e->shape.layers - local, err));
  return local > 0 ? count_routes(e, &c->local_shape, local, err) : PKV_OK;
}
