/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drivers of the matrix products: check, round the activations once, cut columns (and rows) into
 * items and hand them to the workers. How the work is cut never changes a result: every output is
 * computed whole, by one worker, in an order that depends on k alone.
 */
#include "backend/cpu/cpu_dense.h"

#include "backend/cpu/cpu_isa.h"
#include "backend/cpu/dense_kernels.h"
#include "base/status.h"

#define MAX_PRODUCTS   8
#define TILE_COLUMNS   16  /* columns are cut at multiples of this: what a kernel unpacks at once */
#define ROW_BLOCK      128 /* rows that share one unpacked tile */
#define ITEMS_A_WORKER 8
/* Multiply-adds (8-bit) below which a launch costs more than it saves. */
#define SERIAL_WORK   (64 * 1024)
#define QUANTIZE_ROWS 8 /* rows a work item when many are rounded */

const pkv_dense_kernels *pkv_dense_kernels_of(const pkv_executor *executor) {
  const pkv_cpu_state *state = executor->device_state;
  return state->dense;
}

bool pkv_dense_block(pkv_wtype type, int64_t *elements, int64_t *bytes) {
  *elements = PKV_QK;
  switch (type) {
  case PKV_WTYPE_F32:
    *elements = 1;
    *bytes = 4;
    return true;
  case PKV_WTYPE_F16:
  case PKV_WTYPE_BF16:
    *elements = 1;
    *bytes = 2;
    return true;
  case PKV_WTYPE_Q4_0:
    *bytes = 18;
    return true;
  case PKV_WTYPE_Q4_1:
    *bytes = 20;
    return true;
  case PKV_WTYPE_Q5_0:
    *bytes = 22;
    return true;
  case PKV_WTYPE_Q5_1:
    *bytes = 24;
    return true;
  case PKV_WTYPE_Q8_0:
    *bytes = 34;
    return true;
  case PKV_WTYPE_Q4_K:
  case PKV_WTYPE_Q5_K:
  case PKV_WTYPE_Q6_K:
    *elements = PKV_SUPER;
    *bytes = type == PKV_WTYPE_Q4_K ? 144 : (type == PKV_WTYPE_Q5_K ? 176 : 210);
    return true;
  }
  return false;
}

static size_t round_up(size_t n) {
  return (n + 63) / 64 * 64;
}

/* Layout of the scratch: q, scale, scaled_sum, sum, first, half, each on a cache line. */
static void lay_out(pkv_dense_x *x, void *scratch) {
  unsigned char *at = scratch;
  const size_t cells = round_up((size_t)(x->m * ((x->k + PKV_QK - 1) / PKV_QK)) * sizeof(float));
  x->q = (int8_t *)at;
  at += round_up((size_t)(x->m * x->k));
  x->scale = (float *)(void *)at;
  x->scaled_sum = (float *)(void *)(at + cells);
  x->sum = (int32_t *)(void *)(at + 2 * cells);
  x->first = (int32_t *)(void *)(at + 3 * cells);
  x->half = (uint16_t *)(void *)(at + 4 * cells);
}

size_t pkv_cpu_matmul_scratch_bytes(int64_t m, int64_t k) {
  const size_t cells = round_up((size_t)(m * ((k + PKV_QK - 1) / PKV_QK)) * sizeof(float));
  return round_up((size_t)(m * k)) + 4 * cells + (size_t)(m * pkv_half_stride(k)) * 2 + 64;
}

static bool is_float(pkv_wtype type) {
  return type == PKV_WTYPE_F32 || type == PKV_WTYPE_F16 || type == PKV_WTYPE_BF16;
}

/* Which of a call's activations a product reads. */
typedef enum form { FORM_FLOATS, FORM_BYTES, FORM_HALVES } form;

static form form_of(const pkv_matmul_params *p) {
  if (p->compute == PKV_COMPUTE_F32) return FORM_FLOATS;
  if (p->w.type == PKV_WTYPE_BF16) return FORM_HALVES;
  return is_float(p->w.type) ? FORM_FLOATS : FORM_BYTES;
}

static pkv_status check_product(const pkv_matmul_params *p, const pkv_matmul_params *first,
                                pkv_error *err) {
  int64_t elements = 1, bytes = 1;
  PKV_CHECK(err, pkv_dense_block(p->w.type, &elements, &bytes), PKV_E_UNSUPPORTED,
            "weight type %d is not supported", (int)p->w.type);
  PKV_CHECK(err, p->w.k > 0 && p->w.k % elements == 0, PKV_E_INVALID,
            "k is %lld, not a positive multiple of the weight type's block of %lld",
            (long long)p->w.k, (long long)elements);
  PKV_CHECK(err, p->w.row_bytes >= p->w.k / elements * bytes, PKV_E_INVALID,
            "row_bytes is %lld, a row needs %lld", (long long)p->w.row_bytes,
            (long long)(p->w.k / elements * bytes));
  PKV_CHECK(err,
            p->m == first->m && p->w.k == first->w.k && p->x == first->x &&
                p->x_stride == first->x_stride && p->compute == first->compute,
            PKV_E_INVALID, "products of one call must share m, k, x and compute");
  return PKV_OK;
}

typedef struct round_context {
  void (*round)(const pkv_dense_x *x, int64_t row0, int64_t row1);
  const pkv_dense_x *x;
} round_context;

static void round_item(void *ctx, int64_t item, int32_t worker) {
  const round_context *c = ctx;
  const int64_t row0 = item * QUANTIZE_ROWS;
  const int64_t row1 = row0 + QUANTIZE_ROWS < c->x->m ? row0 + QUANTIZE_ROWS : c->x->m;
  (void)worker;
  c->round(c->x, row0, row1);
}

static void round_rows(pkv_executor *executor, const round_context *c) {
  if (c->x->m < 2 * QUANTIZE_ROWS || pkv_workers_threads(executor->workers) == 1) {
    c->round(c->x, 0, c->x->m);
    return;
  }
  round_context copy = *c;
  pkv_workers_run(executor->workers, round_item, &copy,
                  (c->x->m + QUANTIZE_ROWS - 1) / QUANTIZE_ROWS);
}

typedef struct product {
  pkv_dense_job job;
  pkv_dense_tile_fn tile;
  int64_t first_item, column_items;
} product;

typedef struct matmul_context {
  product products[MAX_PRODUCTS];
  int32_t count;
  int64_t columns; /* of an item */
  int64_t m;
} matmul_context;

static void matmul_item(void *ctx, int64_t item, int32_t worker) {
  const matmul_context *c = ctx;
  int32_t i = c->count - 1;
  (void)worker;
  while (c->products[i].first_item > item)
    i--;
  const product *p = &c->products[i];
  const int64_t local = item - p->first_item;
  const int64_t n = p->job.p->w.n;
  const int64_t col0 = local % p->column_items * c->columns;
  const int64_t row0 = local / p->column_items * ROW_BLOCK;
  p->tile(&p->job, col0, col0 + c->columns < n ? col0 + c->columns : n, row0,
          row0 + ROW_BLOCK < c->m ? row0 + ROW_BLOCK : c->m);
}

static void run_products(pkv_executor *executor, const pkv_dense_kernels *kernels,
                         const pkv_dense_x *x, const pkv_matmul_params *p, int32_t count) {
  matmul_context c;
  int64_t total_n = 0, items = 0;
  for (int32_t i = 0; i < count; i++)
    total_n += p[i].w.n;
  const int64_t wanted = (int64_t)pkv_workers_threads(executor->workers) * ITEMS_A_WORKER;
  const int64_t row_blocks = (x->m + ROW_BLOCK - 1) / ROW_BLOCK;
  const int64_t per_item = total_n * row_blocks / wanted;
  c.columns = (per_item / TILE_COLUMNS + 1) * TILE_COLUMNS;
  c.count = count;
  c.m = x->m;
  for (int32_t i = 0; i < count; i++) {
    product *out = &c.products[i];
    const form f = form_of(&p[i]);
    out->job.p = &p[i];
    out->job.x = x;
    out->tile = f == FORM_BYTES    ? kernels->tile_i8
                : f == FORM_HALVES ? kernels->tile_bf16
                                   : kernels->tile_f32;
    out->first_item = items;
    out->column_items = (p[i].w.n + c.columns - 1) / c.columns;
    items += out->column_items * row_blocks;
  }
  if (total_n * x->k * x->m <= SERIAL_WORK || pkv_workers_threads(executor->workers) == 1) {
    for (int64_t i = 0; i < items; i++)
      matmul_item(&c, i, 0);
  } else {
    pkv_workers_run(executor->workers, matmul_item, &c, items);
  }
}

pkv_status pkv_cpu_matmul_many(pkv_executor *executor, const pkv_matmul_params *p, int32_t count,
                               pkv_error *err) {
  PKV_CHECK(err, count >= 0 && count <= MAX_PRODUCTS, PKV_E_INVALID,
            "count is %d, limits are 0..%d", (int)count, MAX_PRODUCTS);
  if (count == 0 || p[0].m <= 0) return PKV_OK;
  bool bytes = false, halves = false;
  for (int32_t i = 0; i < count; i++) {
    PKV_TRY(check_product(&p[i], &p[0], err));
    bytes = bytes || form_of(&p[i]) == FORM_BYTES;
    halves = halves || form_of(&p[i]) == FORM_HALVES;
  }
  const pkv_dense_kernels *kernels = pkv_dense_kernels_of(executor);
  pkv_dense_x x = {.x = p[0].x,
                   .x_stride = p[0].x_stride,
                   .m = p[0].m,
                   .k = p[0].w.k,
                   .blocks = p[0].w.k / PKV_QK};
  if (bytes || halves) {
    PKV_CHECK(err, p[0].scratch, PKV_E_INVALID, "scratch is NULL");
    lay_out(&x, p[0].scratch);
  }
  if (bytes) round_rows(executor, &(round_context){kernels->quantize, &x});
  if (halves) round_rows(executor, &(round_context){kernels->narrow, &x});
  run_products(executor, kernels, &x, p, count);
  return PKV_OK;
}

pkv_status pkv_cpu_matmul(pkv_executor *executor, const pkv_matmul_params *p, pkv_error *err) {
  return pkv_cpu_matmul_many(executor, p, 1, err);
}
