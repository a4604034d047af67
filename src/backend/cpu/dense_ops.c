/* SPDX-License-Identifier: Apache-2.0 */
/* Drivers of the small operations of a layer: rows (or runs of elements) are independent, so they
   are spread over the workers once there is enough of them to pay for a launch. */
#include "backend/cpu/cpu_dense.h"

#include "backend/cpu/dense_kernels.h"
#include "base/status.h"

#define ROWS_ITEM     4
#define ELEMENTS_ITEM 8192
/* Elements below which the caller does the work alone: a launch costs about a microsecond. */
#define SERIAL 16384

typedef struct small_op {
  const pkv_dense_kernels *kernels;
  float *y;
  const float *a, *b;
  const pkv_weight *w;
  const int32_t *index; /* ids or positions */
  int64_t y_stride, a_stride, n, total;
  float number; /* eps or scale */
  int32_t heads, head_dim, rope_dim, adjacent;
} small_op;

/* Runs `fn` over items of `step` out of op->total; `elements` decides whether workers help. */
static void spread(pkv_executor *executor, pkv_work_fn fn, small_op *op, int64_t step,
                   int64_t elements) {
  const int64_t items = (op->total + step - 1) / step;
  if (elements <= SERIAL || pkv_workers_threads(executor->workers) == 1) {
    for (int64_t i = 0; i < items; i++)
      fn(op, i, 0);
  } else {
    pkv_workers_run(executor->workers, fn, op, items);
  }
}

static int64_t item_end(const small_op *op, int64_t item, int64_t step) {
  const int64_t end = (item + 1) * step;
  return end < op->total ? end : op->total;
}

static void embed_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  (void)worker;
  for (int64_t i = item * ROWS_ITEM; i < item_end(op, item, ROWS_ITEM); i++) {
    op->kernels->dequantize(op->y + i * op->y_stride, op->w, op->index[i], 0, op->w->k, op->number);
  }
}

pkv_status pkv_cpu_embed(pkv_executor *executor, float *y, int64_t y_stride, const pkv_weight *w,
                         const int32_t *ids, int64_t m, float scale, pkv_error *err) {
  int64_t elements = 1, bytes = 1;
  PKV_CHECK(err, pkv_dense_block(w->type, &elements, &bytes), PKV_E_UNSUPPORTED,
            "weight type %d is not supported", (int)w->type);
  PKV_CHECK(err, w->k % elements == 0, PKV_E_INVALID,
            "k is %lld, not a multiple of the weight type's block of %lld", (long long)w->k,
            (long long)elements);
  for (int64_t i = 0; i < m; i++) {
    PKV_CHECK(err, ids[i] >= 0 && ids[i] < w->n, PKV_E_RANGE, "ids[%lld] is %d, rows are 0..%lld",
              (long long)i, (int)ids[i], (long long)(w->n - 1));
  }
  small_op op = {.kernels = pkv_dense_kernels_of(executor),
                 .y = y,
                 .y_stride = y_stride,
                 .w = w,
                 .index = ids,
                 .total = m,
                 .number = scale};
  spread(executor, embed_item, &op, ROWS_ITEM, m * w->k);
  return PKV_OK;
}

static void norm_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  (void)worker;
  for (int64_t i = item * ROWS_ITEM; i < item_end(op, item, ROWS_ITEM); i++) {
    op->kernels->rms_norm(op->y + i * op->y_stride, op->a + i * op->a_stride, op->b, op->n,
                          op->number);
  }
}

pkv_status pkv_cpu_rms_norm(pkv_executor *executor, float *y, int64_t y_stride, const float *x,
                            int64_t x_stride, const float *weight, int64_t m, int64_t n, float eps,
                            pkv_error *err) {
  (void)err;
  small_op op = {.kernels = pkv_dense_kernels_of(executor),
                 .y = y,
                 .y_stride = y_stride,
                 .a = x,
                 .a_stride = x_stride,
                 .b = weight,
                 .n = n,
                 .total = m,
                 .number = eps};
  spread(executor, norm_item, &op, ROWS_ITEM, m * n);
  return PKV_OK;
}

/* Pairs (j, j + rope_dim / 2); kept in plain C: no model of the llama family uses it. */
static void rope_halves(float *x, const small_op *op, const float *cs) {
  const int32_t half = op->rope_dim / 2;
  for (int32_t h = 0; h < op->heads; h++) {
    float *head = x + (int64_t)h * op->head_dim;
    for (int32_t j = 0; j < half; j++)
      pkv_rope_turn(&head[j], &head[j + half], cs[2 * j], cs[2 * j + 1]);
  }
}

static void rope_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  (void)worker;
  for (int64_t i = item * ROWS_ITEM; i < item_end(op, item, ROWS_ITEM); i++) {
    const float *cs = op->a + (int64_t)op->index[i] * op->rope_dim;
    float *x = op->y + i * op->y_stride;
    if (op->adjacent) {
      op->kernels->rope_adjacent(x, op->heads, op->head_dim, op->rope_dim, cs);
    } else {
      rope_halves(x, op, cs);
    }
  }
}

pkv_status pkv_cpu_rope(pkv_executor *executor, float *x, int64_t x_stride, int64_t m,
                        int32_t heads, int32_t head_dim, int32_t rope_dim, int32_t pairs_adjacent,
                        const float *cos_sin, const int32_t *position, pkv_error *err) {
  PKV_CHECK(err, rope_dim >= 0 && rope_dim % 2 == 0 && rope_dim <= head_dim, PKV_E_INVALID,
            "rope_dim is %d, must be even and at most head_dim %d", (int)rope_dim, (int)head_dim);
  small_op op = {.kernels = pkv_dense_kernels_of(executor),
                 .y = x,
                 .y_stride = x_stride,
                 .a = cos_sin,
                 .index = position,
                 .total = m,
                 .heads = heads,
                 .head_dim = head_dim,
                 .rope_dim = rope_dim,
                 .adjacent = pairs_adjacent};
  spread(executor, rope_item, &op, ROWS_ITEM, m * heads * head_dim);
  return PKV_OK;
}

static void swiglu_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  const int64_t i = item * ELEMENTS_ITEM;
  (void)worker;
  op->kernels->swiglu(op->y + i, op->a + i, op->b + i, item_end(op, item, ELEMENTS_ITEM) - i);
}

pkv_status pkv_cpu_swiglu(pkv_executor *executor, float *y, const float *gate, const float *up,
                          int64_t count, pkv_error *err) {
  (void)err;
  small_op op = {
      .kernels = pkv_dense_kernels_of(executor), .y = y, .a = gate, .b = up, .total = count};
  spread(executor, swiglu_item, &op, ELEMENTS_ITEM, count);
  return PKV_OK;
}

static void geglu_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  const int64_t i = item * ELEMENTS_ITEM;
  (void)worker;
  op->kernels->geglu(op->y + i, op->a + i, op->b + i, item_end(op, item, ELEMENTS_ITEM) - i);
}

pkv_status pkv_cpu_geglu(pkv_executor *executor, float *y, const float *gate, const float *up,
                         int64_t count, pkv_error *err) {
  (void)err;
  small_op op = {
      .kernels = pkv_dense_kernels_of(executor), .y = y, .a = gate, .b = up, .total = count};
  spread(executor, geglu_item, &op, ELEMENTS_ITEM, count);
  return PKV_OK;
}

static void add_item(void *ctx, int64_t item, int32_t worker) {
  const small_op *op = ctx;
  const int64_t i = item * ELEMENTS_ITEM;
  (void)worker;
  op->kernels->add(op->y + i, op->a + i, item_end(op, item, ELEMENTS_ITEM) - i);
}

pkv_status pkv_cpu_add(pkv_executor *executor, float *y, const float *x, int64_t count,
                       pkv_error *err) {
  (void)err;
  small_op op = {.kernels = pkv_dense_kernels_of(executor), .y = y, .a = x, .total = count};
  spread(executor, add_item, &op, ELEMENTS_ITEM, 2 * count / 3);
  return PKV_OK;
}
