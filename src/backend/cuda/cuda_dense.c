/* SPDX-License-Identifier: Apache-2.0 */
/* The dense table of the CUDA backend: which kernel or library does what, and the host's side of
   streams and graphs. */
#include <stdbool.h>
#include <string.h>

#include "backend/cuda/cuda_group.h"
#include "backend/cuda/cuda_products.h"
#include "backend/cuda/dense_launch.h"
#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/dense_pack.h"
#include "backend/device_ops.h"

static int32_t dependent_of(const pkv_executor *executor) {
  return pkv_cuda_state_of(executor)->major >= 9;
}

static pkv_status dense_prepare(pkv_executor *executor, pkv_error *err) {
  pkv_cuda_state *state = pkv_cuda_state_of(executor);
  if (state->products) return PKV_OK;
  PKV_CUDA(err, cudaSetDevice(state->device));
  PKV_CUDA(err, pkv_dense_kernels_prepare());
  if (!state->stream_sums) /* zeroed */
    PKV_TRY(executor->device_ops->alloc(&state->stream_sums, executor,
                                        pkv_dense_stream_scratch(state->sms), err));
  return pkv_cuda_products_create(&state->products, executor, err);
}

void pkv_cuda_dense_deinit(pkv_executor *executor) {
  pkv_cuda_state *state = pkv_cuda_state_of(executor);
  if (!state) return;
  pkv_cuda_products_destroy(state->products, executor);
  if (state->stream_sums && cudaFree(state->stream_sums) != cudaSuccess) (void)cudaGetLastError();
}

static pkv_status dense_free_bytes(size_t *bytes, pkv_executor *executor, pkv_error *err) {
  size_t total = 0;
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  PKV_CUDA(err, cudaMemGetInfo(bytes, &total));
  return PKV_OK;
}

static pkv_status dense_host_alloc(void **out, pkv_executor *executor, size_t bytes,
                                   pkv_error *err) {
  *out = NULL;
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  const cudaError_t e = cudaHostAlloc(out, bytes, cudaHostAllocDefault);
  if (e != cudaErrorMemoryAllocation) {
    PKV_CUDA(err, e);
    return PKV_OK;
  }
  (void)cudaGetLastError();
  *out = NULL;
  return PKV_FAIL(err, PKV_E_NOMEM, "cudaHostAlloc: no %zu bytes of pinned host memory", bytes);
}

static void dense_host_free(pkv_executor *executor, void *ptr) {
  (void)executor;
  if (ptr && cudaFreeHost(ptr) != cudaSuccess) (void)cudaGetLastError();
}

static pkv_status dense_stream_create(void **stream, pkv_executor *executor, pkv_error *err) {
  cudaStream_t made = NULL;
  *stream = NULL;
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  PKV_CUDA(err, cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  *stream = made;
  return PKV_OK;
}

static void dense_stream_destroy(pkv_executor *executor, void *stream) {
  (void)executor;
  if (stream && cudaStreamDestroy((cudaStream_t)stream) != cudaSuccess) (void)cudaGetLastError();
}

/* ---- graphs ---- */

static pkv_status dense_graph_begin(pkv_executor *executor, void *stream, pkv_error *err) {
  (void)executor;
  /* Relaxed: a rank's graph is made while other ranks' streams still capture. */
  PKV_CUDA(err, cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeRelaxed));
  return PKV_OK;
}

static pkv_status dense_graph_end(void **graph, pkv_executor *executor, void *stream,
                                  pkv_error *err) {
  cudaGraph_t kept = NULL;
  cudaGraphExec_t made = NULL;
  (void)executor;
  *graph = NULL;
  PKV_CUDA(err, cudaStreamEndCapture((cudaStream_t)stream, &kept));
  const cudaError_t e = cudaGraphInstantiate(&made, kept, 0);
  (void)cudaGraphDestroy(kept);
  if (e != cudaSuccess) return pkv_cuda_fail(err, e, "cudaGraphInstantiate");
  *graph = made; /* the caller's, also where its upload fails */
  PKV_CUDA(err, cudaGraphUpload(made, (cudaStream_t)stream));
  return PKV_OK;
}

static pkv_status dense_graph_launch(pkv_executor *executor, void *graph, void *stream,
                                     pkv_error *err) {
  return pkv_cuda_launched(executor, cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream),
                           "graph", (cudaStream_t)stream, err);
}

static void dense_graph_destroy(pkv_executor *executor, void *graph) {
  (void)executor;
  if (graph && cudaGraphExecDestroy((cudaGraphExec_t)graph) != cudaSuccess)
    (void)cudaGetLastError();
}

/* ---- weights ---- */

#define PACKED_ROWS 8

#define RAW ((size_t)64 << 20) /* of a file's rows on their way into the device's layout */

static bool is_packed(const pkv_weight *w) {
  return pkv_pack_layout_of((int32_t)w->type).cell_bytes > 0;
}

/* Packed weights stay so for few rows: from 16 on the library multiplies by 16-bit ones faster. */
static pkv_wtype dense_weight_type(pkv_executor *executor, pkv_wtype type, pkv_dtype act,
                                   int32_t rows) {
  const bool packed = pkv_pack_layout_of((int32_t)type).cell_bytes > 0;
  if (packed && rows <= PACKED_ROWS && pkv_cuda_state_of(executor)->major >= 9) return type;
  return act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
}

static size_t dense_weight_bytes(const pkv_weight *w) {
  if (is_packed(w)) return pkv_dense_quant_bytes(w->type, w->n, w->k);
  return (size_t)w->n * (size_t)w->row_bytes;
}

/* Rows of the host's matrix to where they lie without gaps. */
static cudaError_t copy_rows(void *to, int64_t row_bytes, const pkv_weight *host, int64_t row,
                             int64_t rows) {
  return cudaMemcpy2D(to, (size_t)row_bytes, (const char *)host->data + row * host->row_bytes,
                      (size_t)host->row_bytes, (size_t)row_bytes, (size_t)rows,
                      cudaMemcpyHostToDevice);
}

/* Rows of a file through `raw` into their places. */
static pkv_status pack_rows(void *to, void *raw, int64_t at_once, const pkv_weight *w,
                            int64_t first, const pkv_weight *host, pkv_error *err) {
  for (int64_t row = 0; row < host->n; row += at_once) {
    pkv_weight some = *host;
    some.n = host->n - row < at_once ? host->n - row : at_once;
    some.data = raw;
    some.row_bytes = w->row_bytes;
    PKV_CUDA(err, copy_rows(raw, w->row_bytes, host, row, some.n));
    PKV_CUDA(err, pkv_dense_launch_pack(to, &some, w->n, first + row, NULL));
    PKV_CUDA(err, cudaStreamSynchronize(NULL));
  }
  return PKV_OK;
}

static pkv_status pack_quantised(void *to, const pkv_weight *w, int64_t first,
                                 const pkv_weight *host, pkv_error *err) {
  void *raw = NULL;
  const int64_t most = (int64_t)(RAW / (size_t)w->row_bytes);
  const int64_t at_once = most > host->n ? host->n : most;
  PKV_CHECK(err, at_once > 0, PKV_E_LIMIT, "rows of %lld bytes are too long",
            (long long)w->row_bytes);
  PKV_CUDA(err, cudaMalloc(&raw, (size_t)at_once * (size_t)w->row_bytes));
  const pkv_status status = pack_rows(to, raw, at_once, w, first, host, err);
  if (cudaFree(raw) != cudaSuccess) (void)cudaGetLastError();
  return status;
}

static pkv_status dense_weight_pack(pkv_executor *executor, const pkv_weight *w, int64_t first,
                                    const pkv_weight *host, pkv_error *err) {
  char *to;
  PKV_CHECK(err, host->type == w->type && host->k == w->k, PKV_E_INTERNAL,
            "a matrix of type %d into one of type %d", (int)host->type, (int)w->type);
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  memcpy(&to, &w->data, sizeof to);
  if (is_packed(w)) return pack_quantised(to, w, first, host, err);
  PKV_CUDA(err, copy_rows(to + first * w->row_bytes, w->row_bytes, host, 0, host->n));
  return PKV_OK;
}

static pkv_status dense_weight_random(pkv_executor *executor, const pkv_dense_random_params *p,
                                      void *stream, pkv_error *err) {
  return pkv_cuda_launched(executor, pkv_dense_launch_random(p, (cudaStream_t)stream),
                           "dense_random", (cudaStream_t)stream, err);
}

/* ---- a step ---- */

static pkv_status dense_embed(pkv_executor *executor, const pkv_dense_embed_params *p, void *stream,
                              pkv_error *err) {
  /* The copies of a step's inputs come before it: nothing of it may start earlier. */
  return pkv_cuda_launched(executor, pkv_dense_launch_embed(p, 0, (cudaStream_t)stream),
                           "dense_embed", (cudaStream_t)stream, err);
}

/* Few rows, by own kernels: *e is what their launch said. The kernels know how many rows they are
   faster for than the library. */
static const char *multiply_few(pkv_executor *executor, const pkv_dense_matmul_params *p,
                                cudaStream_t stream, cudaError_t *e) {
  const pkv_cuda_state *const state = pkv_cuda_state_of(executor);
  const int32_t dependent = dependent_of(executor);
  if (pkv_dense_gemv_takes(p)) {
    *e = pkv_dense_launch_gemv(p, dependent, stream);
    return "dense_few";
  }
  if (state->tensor_encoder && pkv_dense_stream_takes(p)) {
    *e = pkv_dense_launch_stream(p, state->tensor_encoder, state->stream_sums, state->sms,
                                 dependent, stream);
    return "dense_stream";
  }
  return NULL;
}

static pkv_status multiply_by_library(pkv_executor *executor, const pkv_dense_matmul_params *p,
                                      cudaStream_t stream, pkv_error *err) {
  pkv_cuda_products *products = pkv_cuda_state_of(executor)->products;
  return is_packed(&p->w) ? pkv_cuda_products_run_packed(products, executor, p, stream, err)
                          : pkv_cuda_products_run(products, executor, p, stream, err);
}

static pkv_status dense_matmul(pkv_executor *executor, const pkv_dense_matmul_params *p,
                               void *stream, pkv_error *err) {
  cudaError_t e = cudaSuccess;
  PKV_CHECK(err, pkv_cuda_state_of(executor)->products, PKV_E_STATE, "products were not prepared");
  if (p->m == 0) return PKV_OK;
  const char *const few = multiply_few(executor, p, (cudaStream_t)stream, &e);
  if (few) return pkv_cuda_launched(executor, e, few, (cudaStream_t)stream, err);
  if (p->gate == PKV_DENSE_NO_GATE)
    return multiply_by_library(executor, p, (cudaStream_t)stream, err);
  pkv_dense_matmul_params both = *p;
  both.y = p->gate_scratch;
  both.y_stride = p->w.n;
  PKV_TRY(multiply_by_library(executor, &both, (cudaStream_t)stream, err));
  e = pkv_dense_launch_gate(p, dependent_of(executor), (cudaStream_t)stream);
  return pkv_cuda_launched(executor, e, "dense_gate", (cudaStream_t)stream, err);
}

static pkv_status dense_norm(pkv_executor *executor, const pkv_dense_norm_params *p, void *stream,
                             pkv_error *err) {
  PKV_CHECK(err, p->n % 4 == 0 && p->n <= PKV_DENSE_MOST_WIDTH, PKV_E_UNSUPPORTED,
            "rows of %d elements: possible on CUDA are multiples of 4 up to %d", (int)p->n,
            PKV_DENSE_MOST_WIDTH);
  return pkv_cuda_launched(executor,
                           pkv_dense_launch_norm(p, dependent_of(executor), (cudaStream_t)stream),
                           "dense_norm", (cudaStream_t)stream, err);
}

static pkv_status dense_rope(pkv_executor *executor, const pkv_dense_rope_params *p, void *stream,
                             pkv_error *err) {
  return pkv_cuda_launched(executor,
                           pkv_dense_launch_rope(p, dependent_of(executor), (cudaStream_t)stream),
                           "dense_rope", (cudaStream_t)stream, err);
}

static int32_t dense_prefill_takes(pkv_executor *executor, const pkv_dense_prefill_params *p) {
  (void)executor;
  return pkv_dense_prefill_takes(p);
}

static pkv_status dense_prefill(pkv_executor *executor, const pkv_dense_prefill_params *p,
                                void *stream, pkv_error *err) {
  return pkv_cuda_launched(executor, pkv_dense_launch_prefill(p, (cudaStream_t)stream),
                           "dense_prefill", (cudaStream_t)stream, err);
}

/* Clusters: sm_90 and later. Elsewhere only the likeliest token is found. */
static int32_t dense_samples(pkv_executor *executor) {
  return pkv_cuda_state_of(executor)->major >= 9;
}

static size_t dense_sample_bytes(int32_t m, int32_t vocab) {
  return pkv_dense_sample_bytes(m, vocab);
}

static pkv_status dense_sample(pkv_executor *executor, const pkv_dense_sample_params *p,
                               void *stream, pkv_error *err) {
  const int32_t dependent = dependent_of(executor);
  PKV_CHECK(err, !p->rows || dense_samples(executor), PKV_E_UNSUPPORTED,
            "only greedy sampling on this device");
  if (!p->rows)
    return pkv_cuda_launched(executor, pkv_dense_launch_argmax(p, dependent, (cudaStream_t)stream),
                             "dense_argmax", (cudaStream_t)stream, err);
  return pkv_cuda_launched(executor, pkv_dense_launch_sample(p, dependent, (cudaStream_t)stream),
                           "dense_sample", (cudaStream_t)stream, err);
}

static pkv_status dense_select(pkv_executor *executor, pkv_error *err) {
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  return PKV_OK;
}

const pkv_dense_ops pkv_cuda_dense_ops = {
    .prepare = dense_prepare,
    .free_bytes = dense_free_bytes,
    .host_alloc = dense_host_alloc,
    .host_free = dense_host_free,
    .stream_create = dense_stream_create,
    .stream_destroy = dense_stream_destroy,
    .graph_begin = dense_graph_begin,
    .graph_end = dense_graph_end,
    .graph_launch = dense_graph_launch,
    .graph_destroy = dense_graph_destroy,
    .weight_type = dense_weight_type,
    .weight_bytes = dense_weight_bytes,
    .weight_pack = dense_weight_pack,
    .weight_random = dense_weight_random,
    .embed = dense_embed,
    .matmul = dense_matmul,
    .norm = dense_norm,
    .rope = dense_rope,
    .prefill_takes = dense_prefill_takes,
    .prefill = dense_prefill,
    .samples = dense_samples,
    .sample_bytes = dense_sample_bytes,
    .sample = dense_sample,
    .select = dense_select,
    .group_reaches = pkv_cuda_group_reaches,
    .group_create = pkv_cuda_group_create,
    .group_destroy = pkv_cuda_group_destroy,
    .group_norm = pkv_cuda_group_norm,
    .group_gather = pkv_cuda_group_gather,
    .group_wait = pkv_cuda_group_wait,
};
