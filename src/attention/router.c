/* SPDX-License-Identifier: Apache-2.0 */
#include "pkv/router.h"

#include <stdbool.h>
#include <string.h>

#include "attention/attention_check.h"
#include "base/alloc.h"
#include "base/status.h"
#include "plan/plan_prepare.h"
#include "policy/shape.h"

#define BIT(route)     (1u << (unsigned)(route))
#define OURS           0x3eu /* bucket_exact .. balanced */
#define USUAL          (BIT(PKV_ROUTE_SPLIT) | BIT(PKV_ROUTE_WORKQUEUE) | BIT(PKV_ROUTE_FLASHINFER))
#define MOST_SPLITS    48 /* of the seed's rules, for one bucket */
#define STATIC_SPLITS  24 /* of its first policy's work queue */
#define TENSOR_GROUP   4  /* query heads a KV head from which tensor cores are taken */
#define FLASH_HEAD_DIM 128

struct pkv_router {
  pkv_executor *executor;
  pkv_shape shape;
  pkv_router_options options;
  pkv_profile profile; /* routes: what is here */
  pkv_dtype kv_dtype;
  int32_t max_rows;
  pkv_device_plan *plan[PKV_ROUTE_BALANCED + 1]; /* by route */
  void *host_plan;
  size_t host_bytes;
  pkv_flashinfer *flashinfer[2]; /* tensor cores, CUDA cores; NULL = no kernel for the shape */
  const char *no_flashinfer;
  pkv_device_plan *taken; /* by the last batch; NULL = flashinfer */
  pkv_flashinfer *handle; /* likewise */
  const int32_t *table;   /* whose pages the handle has listed; NULL = none since its plan */
  int64_t table_stride, table_pages;
  int32_t row_pages;      /* of its longest row */
  struct pkv_plan header; /* of a batch that flashinfer takes: what arguments are checked against */
};

/* Parts of `balanced`: the profile's, or 0 where the device takes so many by itself: it then may
 * leave places free (device.c). So, too, where the profile is of another cache type. */
static pkv_status own_parts(int32_t *parts, const pkv_router *r, pkv_error *err) {
  *parts = 0;
  if (!r->profile.model || r->profile.model->kv_dtype != r->kv_dtype) return PKV_OK;
  PKV_TRY(pkv_device_parts(parts, r->executor, &r->shape, r->kv_dtype, err));
  *parts = r->profile.model->parts == *parts ? 0 : r->profile.model->parts;
  return PKV_OK;
}

/* The memory of the routes that are planned here: the most that the policies ask of each. */
static pkv_status create_ours(pkv_router *r, int32_t max_seq_len, pkv_error *err) {
  for (int32_t route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++) {
    pkv_plan_options o = PKV_PLAN_OPTIONS_INIT;
    size_t bytes, unused;
    if ((r->profile.routes & BIT(route)) == 0) continue;
    o.route = (pkv_route)route;
    if (route == PKV_ROUTE_BALANCED)
      PKV_TRY(own_parts(&o.parts, r, err));
    else
      o.splits = route == PKV_ROUTE_WORKQUEUE ? STATIC_SPLITS : MOST_SPLITS;
    if (route == PKV_ROUTE_WORKQUEUE) { /* its own rule may ask for more than the fixed splits */
      size_t own;
      pkv_plan_options rule = o;
      rule.splits = 0;
      PKV_TRY(pkv_plan_size(&own, &unused, &r->shape, &rule, r->max_rows, max_seq_len, err));
      PKV_TRY(pkv_plan_size(&bytes, &unused, &r->shape, &o, r->max_rows, max_seq_len, err));
      if (own > bytes) o.splits = 0;
    }
    PKV_TRY(pkv_device_plan_create(&r->plan[route], r->executor, &r->shape, &o, r->kv_dtype,
                                   r->max_rows, max_seq_len, err));
    if (route == PKV_ROUTE_BALANCED) continue; /* planned on the device */
    PKV_TRY(pkv_plan_size(&bytes, &unused, &r->shape, &o, r->max_rows, max_seq_len, err));
    if (bytes > r->host_bytes) r->host_bytes = bytes;
  }
  if (r->host_bytes == 0) return PKV_OK;
  r->host_plan = pkv_alloc(&r->executor->allocator, r->host_bytes);
  PKV_CHECK(err, r->host_plan, PKV_E_NOMEM, "no memory for a plan of %zu bytes", r->host_bytes);
  return PKV_OK;
}

/* What keeps flashinfer from this shape whatever its kernels say; NULL = nothing. */
static const char *unfit(const pkv_router *r, int32_t max_seq_len) {
  const pkv_shape *s = &r->shape;
  if ((r->profile.routes & BIT(PKV_ROUTE_FLASHINFER)) == 0)
    return "it is not among the routes that may be taken";
  if (r->options.flashinfer == NULL) return "its kernels are not here";
  if (r->kv_dtype != PKV_DTYPE_F16 || s->head_dim != FLASH_HEAD_DIM)
    return "its kernels are built for f16 and head_dim 128";
  if (s->q_len != 1 || s->window != 0) return "it takes one query token a row and no window";
  return r->max_rows == 0 || max_seq_len == 0 ? "there are no rows or no tokens" : NULL;
}

/* Handles for both kinds of its kernels; one of them is enough. */
static void create_flashinfer(pkv_router *r, int32_t max_seq_len) {
  const pkv_shape *s = &r->shape;
  r->no_flashinfer = unfit(r, max_seq_len);
  if (r->no_flashinfer == NULL) {
    pkv_flashinfer_shape shape = {.query_heads = s->query_heads,
                                  .kv_heads = s->kv_heads,
                                  .head_dim = s->head_dim,
                                  .page_tokens = s->page_tokens,
                                  .most_rows = r->max_rows,
                                  .most_pages = (int64_t)r->max_rows *
                                                ((max_seq_len - 1) / s->page_tokens + 1)};
    const char *why = NULL;
    for (int32_t i = 0; i < 2; i++) {
      shape.tensor_cores = i == 0;
      const char *text = r->options.flashinfer->create(&r->flashinfer[i], &shape);
      if (text != NULL) why = text;
    }
    if (r->flashinfer[0] == NULL && r->flashinfer[1] == NULL) r->no_flashinfer = why;
  }
  if (r->no_flashinfer != NULL) r->profile.routes &= ~BIT(PKV_ROUTE_FLASHINFER);
}

static pkv_status create(pkv_router *r, const pkv_shape *shape, int32_t max_seq_len,
                         pkv_error *err) {
  const pkv_router_options *o = &r->options;
  const uint32_t may = (o->routes != 0 ? o->routes : USUAL) | BIT(PKV_ROUTE_BALANCED);
  PKV_CHECK(err, (may & ~(OURS | BIT(PKV_ROUTE_FLASHINFER))) == 0, PKV_E_INVALID,
            "options->routes is 0x%x, known bits: 0x%x", (unsigned)o->routes,
            (unsigned)(OURS | BIT(PKV_ROUTE_FLASHINFER)));
  PKV_CHECK(err,
            o->flashinfer_kind == 0 || o->flashinfer_kind == PKV_ROUTE_FLASHINFER ||
                o->flashinfer_kind == PKV_COST_FLASHINFER_CORES,
            PKV_E_INVALID, "options->flashinfer_kind is %d, known: 0, %d and %d",
            o->flashinfer_kind, PKV_ROUTE_FLASHINFER, PKV_COST_FLASHINFER_CORES);
  PKV_CHECK(err, o->flashinfer == NULL || o->flashinfer->abi == PKV_FLASHINFER_ABI,
            PKV_E_UNSUPPORTED, "options->flashinfer is of ABI %d, this library knows %d",
            o->flashinfer ? o->flashinfer->abi : 0, PKV_FLASHINFER_ABI);
  r->profile = (pkv_profile)PKV_PROFILE_INIT;
  if (o->profile) {
    PKV_CHECK_STRUCT(err, o->profile, pkv_profile);
    r->profile = *o->profile;
  }
  PKV_CHECK(err, o->policy != PKV_POLICY_CALIBRATED || r->profile.model, PKV_E_INVALID,
            "policy calibrated needs a profile with a cost model: see pkv calibrate");
  r->profile.routes = may;
  r->options.profile = NULL;
  PKV_CHECK_STRUCT(err, shape, pkv_shape);
  PKV_TRY(pkv_shape_check(shape, err));
  r->shape = *shape;
  PKV_TRY(create_ours(r, max_seq_len, err));
  create_flashinfer(r, max_seq_len);
  return PKV_OK;
}

pkv_status pkv_router_create(pkv_router **out, pkv_executor *executor, const pkv_shape *shape,
                             const pkv_router_options *options, pkv_dtype kv_dtype,
                             int32_t max_rows, int32_t max_seq_len, pkv_error *err) {
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, executor, PKV_E_INVALID, "executor is NULL");
  PKV_CHECK_STRUCT(err, options, pkv_router_options);
  PKV_CHECK(err, max_rows >= 0 && max_seq_len >= 0, PKV_E_INVALID,
            "max_rows is %d, max_seq_len is %d: negative", max_rows, max_seq_len);
  pkv_router *r = pkv_alloc_zeroed(&executor->allocator, 1, sizeof *r);
  PKV_CHECK(err, r, PKV_E_NOMEM, "%zu bytes for the router", sizeof *r);
  r->executor = executor;
  r->options = *options;
  r->kv_dtype = kv_dtype;
  r->max_rows = max_rows;
  const pkv_status status = create(r, shape, max_seq_len, err);
  if (status != PKV_OK) {
    pkv_router_destroy(r);
    return status;
  }
  *out = r;
  return PKV_OK;
}

void pkv_router_destroy(pkv_router *r) {
  if (r == NULL) return;
  pkv_executor *executor = r->executor;
  for (int32_t route = 0; route <= PKV_ROUTE_BALANCED; route++)
    pkv_device_plan_destroy(r->plan[route]);
  for (int32_t i = 0; i < 2; i++)
    if (r->flashinfer[i]) r->options.flashinfer->destroy(r->flashinfer[i]);
  pkv_free(&executor->allocator, r->host_plan, r->host_bytes);
  pkv_free(&executor->allocator, r, sizeof *r);
}

const char *pkv_router_no_flashinfer(const pkv_router *r) {
  return r->no_flashinfer;
}

/* Which of FlashInfer's two: as the policy says, as the caller does, or by the group. */
static pkv_flashinfer *handle_of(const pkv_router *r, const pkv_choice *choice) {
  int32_t kind = choice->kind > 0 ? choice->kind : r->options.flashinfer_kind;
  if (kind == 0)
    kind = r->shape.query_heads / r->shape.kv_heads >= TENSOR_GROUP ? PKV_ROUTE_FLASHINFER
                                                                    : PKV_COST_FLASHINFER_CORES;
  const int32_t at = kind == PKV_COST_FLASHINFER_CORES;
  return r->flashinfer[at] ? r->flashinfer[at] : r->flashinfer[!at];
}

static pkv_status plan_flashinfer(pkv_router *r, pkv_choice *choice, int32_t rows,
                                  const int32_t *seq_len, void *stream, pkv_error *err) {
  const pkv_plan_options balanced = PKV_PLAN_OPTIONS_INIT;
  pkv_flashinfer *handle = handle_of(r, choice);
  PKV_TRY(pkv_plan_prepare(&r->header, &r->shape, &balanced, rows, err));
  choice->kind = handle == r->flashinfer[0] ? PKV_ROUTE_FLASHINFER : PKV_COST_FLASHINFER_CORES;
  const char *why = r->options.flashinfer->plan(handle, rows, seq_len, stream);
  PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "flashinfer: plan: %s", why);
  r->handle = handle;
  r->table = NULL;
  r->row_pages = 0;
  for (int32_t row = 0; row < rows; row++) {
    const int32_t pages = (seq_len[row] - 1) / r->shape.page_tokens + 1;
    if (pages > r->row_pages) r->row_pages = pages;
  }
  return PKV_OK;
}

static pkv_status plan_ours(pkv_router *r, const pkv_choice *choice, int32_t rows,
                            const int32_t *seq_len, const int32_t *device_seq_len, void *stream,
                            pkv_error *err) {
  pkv_device_plan *to = r->plan[choice->route];
  pkv_plan_options o = PKV_PLAN_OPTIONS_INIT;
  const pkv_plan *plan;
  if (choice->route == PKV_ROUTE_BALANCED) {
    PKV_TRY(pkv_device_plan_build(to, rows, device_seq_len, stream, err));
  } else {
    o.route = choice->route;
    o.splits = choice->splits;
    PKV_TRY(pkv_plan_build(&plan, r->host_plan, r->host_bytes, &r->shape, &o, rows, seq_len, err));
    PKV_TRY(pkv_device_plan_upload(to, plan, stream, err));
  }
  pkv_device_plan_set_fused(to, choice->kind == PKV_COST_WORKQUEUE_FUSED);
  r->taken = to;
  return PKV_OK;
}

pkv_status pkv_router_plan(pkv_choice *choice, pkv_router *r, int32_t rows, const int32_t *seq_len,
                           const int32_t *device_seq_len, void *stream, pkv_error *err) {
  PKV_CHECK(err, choice && r, PKV_E_INVALID, "%s is NULL", choice ? "router" : "choice");
  PKV_CHECK(err, rows >= 0 && rows <= r->max_rows, PKV_E_RANGE,
            "rows is %d, the router was created for 0 to %d", rows, r->max_rows);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  pkv_profile here = r->profile;
  bool empty = rows == 0;
  for (int32_t row = 0; row < rows; row++)
    empty = empty || seq_len[row] == 0;
  if (empty) here.routes &= ~BIT(PKV_ROUTE_FLASHINFER);
  r->taken = NULL;
  r->handle = NULL;
  *choice = (pkv_choice)PKV_CHOICE_INIT;
  PKV_TRY(pkv_policy_choose(choice, r->options.policy, r->options.fixed, &r->shape, r->kv_dtype,
                            rows, seq_len, &here, err));
  if (choice->route == PKV_ROUTE_FLASHINFER)
    return plan_flashinfer(r, choice, rows, seq_len, stream, err);
  return plan_ours(r, choice, rows, seq_len, device_seq_len, stream, err);
}

void pkv_router_set_overlap(pkv_router *r, int32_t overlap) {
  if (r->taken) pkv_device_plan_set_overlap(r->taken, overlap);
}

/* What its kernels do not do; NULL = nothing. */
static const char *refuses(const pkv_attention_params *p) {
  const int64_t dim = p->cache.head_dim, row = p->plan->query_heads * dim;
  const pkv_cache *c = &p->cache;
  if (c->dtype != PKV_DTYPE_F16 || p->q_dtype != PKV_DTYPE_F16 || p->out_dtype != PKV_DTYPE_F16)
    return "args: cache, q and out must be f16";
  if (p->q_token_stride != row || p->q_head_stride != dim || p->out_token_stride != row ||
      p->out_head_stride != dim)
    return "args: q and out must be contiguous";
  if (p->lse || p->sinks || p->soft_cap != 0) return "args: lse, sinks and soft_cap are not for it";
  if (c->k_page_stride != c->v_page_stride || c->k_token_stride != c->v_token_stride ||
      c->k_head_stride != c->v_head_stride)
    return "args->cache: K and V must have the same strides";
  return NULL;
}

/* The pages of this table, unless they are listed already. */
static pkv_status list_pages(pkv_router *r, const pkv_attention_params *p, void *stream,
                             pkv_error *err) {
  if (r->table == p->block_table && r->table_stride == p->block_table_stride &&
      r->table_pages == p->cache.pages)
    return PKV_OK;
  PKV_CHECK(err, p->block_table, PKV_E_INVALID, "args->block_table is NULL with %d rows",
            p->plan->rows);
  PKV_CHECK(err, r->row_pages <= p->max_pages, PKV_E_RANGE,
            "args->max_pages is %d, a row has %d pages", p->max_pages, r->row_pages);
  const char *why = r->options.flashinfer->list(r->handle, p->block_table, p->block_table_stride,
                                                p->cache.pages, stream);
  PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "flashinfer: pages: %s", why);
  r->table = p->block_table;
  r->table_stride = p->block_table_stride;
  r->table_pages = p->cache.pages;
  return PKV_OK;
}

pkv_status pkv_router_attention(pkv_router *r, const pkv_attention_args *args, void *stream,
                                pkv_error *err) {
  pkv_attention_params p;
  PKV_CHECK(err, r, PKV_E_INVALID, "router is NULL");
  PKV_CHECK(err, r->taken || r->handle, PKV_E_STATE, "no batch has been planned");
  if (r->taken) return pkv_device_attention(r->executor, r->taken, args, stream, err);
  PKV_CHECK_STRUCT(err, args, pkv_attention_args);
  PKV_CHECK(err, args->plan == NULL, PKV_E_INVALID,
            "args->plan is set; the router's plan takes its place");
  PKV_TRY(pkv_attention_resolve(&p, args, &r->header, 1, err));
  const char *why = refuses(&p);
  PKV_CHECK(err, why == NULL, PKV_E_UNSUPPORTED, "flashinfer: %s", why);
  PKV_TRY(list_pages(r, &p, stream, err));
  const pkv_flashinfer_call call = {.q = p.q,
                                    .out = p.out,
                                    .k = p.cache.k,
                                    .v = p.cache.v,
                                    .page_stride = p.cache.k_page_stride,
                                    .token_stride = p.cache.k_token_stride,
                                    .head_stride = p.cache.k_head_stride,
                                    .scale = p.scale};
  why = r->options.flashinfer->run(r->handle, &call, stream);
  PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "flashinfer: %s", why);
  return PKV_OK;
}
