/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuBLASLt behind dlopen. A row-major y[m, n] = x[m, k] w[n, k]^T is, column-major, y^T = w x^T:
 * w transposed is the first operand, x as it stands the second.
 *
 * The library proposes algorithms by shape. For few rows, where weights are read at memory speed,
 * its first proposal is not always the best: up to TUNE_ROWS rows all proposals are timed once,
 * with the last-level cache filled by something else before each run. That happens when a shape
 * first occurs outside of a graph's capture; within one the first proposal is taken. For more rows
 * it is too dear for each number of them: CLASS_ROWS numbers share what was found for one. What was
 * found can be listed and told to another process (product_choices.h).
 */
#include "backend/cuda/cuda_products.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cuda_symbols.h"
#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/dense_pack.h"

#define WORKSPACE  ((size_t)64 << 20) /* larger than an H200's last-level cache */
#define SHAPES     4096               /* whose algorithms are kept; a power of two */
#define CANDIDATES PKV_PRODUCT_PROPOSALS
#define TUNE_ROWS  256
#define CLASS_ROWS 64
#define CLASSED    1024 /* rows up to which classes are tuned */
#define TUNE_RUNS  3
#define SLICE      ((size_t)32 << 20) /* stays in the last-level cache until it is multiplied */

typedef struct library {
  void *handle;
  cublasStatus_t (*create)(cublasLtHandle_t *);
  cublasStatus_t (*destroy)(cublasLtHandle_t);
  cublasStatus_t (*layout_init)(cublasLtMatrixLayout_t, size_t, cudaDataType, uint64_t, uint64_t,
                                int64_t);
  cublasStatus_t (*desc_init)(cublasLtMatmulDesc_t, size_t, cublasComputeType_t, cudaDataType_t);
  cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                             size_t);
  cublasStatus_t (*preference_init)(cublasLtMatmulPreference_t, size_t);
  cublasStatus_t (*preference_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                   const void *, size_t);
  cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                              cublasLtMatmulHeuristicResult_t[], int *);
  cublasStatus_t (*check)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                          cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                          const cublasLtMatmulAlgo_t *, cublasLtMatmulHeuristicResult_t *);
  cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                           cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                           const void *, const void *, cublasLtMatrixLayout_t, void *,
                           cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                           cudaStream_t);
  size_t (*version)(void);
} library;

/* What an algorithm is picked for; compared as bytes. */
typedef struct shape {
  int64_t n, k, x_stride, y_stride;
  int32_t m, act, y_f32, accumulate;
} shape;

/* of an entry of the table */
enum { FREE = 0, TOLD, PICKED };

typedef struct picked {
  shape shape;
  int32_t used, tuned; /* TOLD: `proposal` is known, and no more */
  int32_t proposal;    /* which of the library's; -1 = it was not measured */
  int32_t first;       /* of a class: the rows that it was measured with */
  cublasLtMatrixLayoutOpaque_t w, x, y;
  cublasLtMatmulAlgo_t algorithm;
} picked;

struct pkv_cuda_products {
  library lib;
  cublasLtHandle_t handle;
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatmulPreferenceOpaque_t preference;
  void *workspace;
  void *spare; /* [WORKSPACE]: where timed products go */
  void *slice; /* [SLICE]: packed weights, written out */
  cudaEvent_t begin, end;
  int32_t timed; /* shapes and classes measured by this process */
  picked table[SHAPES];
};

/* ---- the library ---- */

static pkv_status open_library(library *lib, pkv_error *err) {
  static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                      "/usr/local/cuda/lib64/libcublasLt.so"};
  for (size_t i = 0; i < sizeof names / sizeof names[0] && !lib->handle; i++)
    lib->handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  const char *why = lib->handle ? NULL : dlerror();
  PKV_CHECK(err, lib->handle, PKV_E_UNSUPPORTED,
            "a model on CUDA needs NVIDIA's libcublasLt.so.13 (or .12) of the CUDA toolkit: %s",
            why ? why : "not found");
  return PKV_OK;
}

static pkv_status load_library(library *lib, pkv_error *err) {
  const pkv_cuda_symbol symbols[] = {
      {"cublasLtCreate", &lib->create},
      {"cublasLtDestroy", &lib->destroy},
      {"cublasLtMatrixLayoutInit_internal", &lib->layout_init},
      {"cublasLtMatmulDescInit_internal", &lib->desc_init},
      {"cublasLtMatmulDescSetAttribute", &lib->desc_set},
      {"cublasLtMatmulPreferenceInit_internal", &lib->preference_init},
      {"cublasLtMatmulPreferenceSetAttribute", &lib->preference_set},
      {"cublasLtMatmulAlgoGetHeuristic", &lib->heuristic},
      {"cublasLtMatmulAlgoCheck", &lib->check},
      {"cublasLtMatmul", &lib->matmul},
      {"cublasLtGetVersion", &lib->version}};
  PKV_TRY(open_library(lib, err));
  return pkv_cuda_symbols(lib->handle, "libcublasLt", symbols, sizeof symbols / sizeof symbols[0],
                          err);
}

#define LT(err, call, what)                                                                        \
  do {                                                                                             \
    const cublasStatus_t lt_status = (call);                                                       \
    PKV_CHECK(err, lt_status == CUBLAS_STATUS_SUCCESS, PKV_E_DEVICE, "cuBLASLt: %s: status %d",    \
              (what), (int)lt_status);                                                             \
  } while (0)

static pkv_status init(pkv_cuda_products *p, pkv_error *err) {
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const size_t workspace = WORKSPACE;
  PKV_TRY(load_library(&p->lib, err));
  LT(err, p->lib.create(&p->handle), "create");
  LT(err, p->lib.desc_init(&p->desc, sizeof p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
  LT(err, p->lib.desc_set(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
     "transpose");
  LT(err, p->lib.preference_init(&p->preference, sizeof p->preference), "preference");
  LT(err,
     p->lib.preference_set(&p->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                           sizeof workspace),
     "workspace");
  PKV_CUDA(err, cudaMalloc(&p->workspace, WORKSPACE));
  PKV_CUDA(err, cudaMalloc(&p->spare, WORKSPACE));
  PKV_CUDA(err, cudaMalloc(&p->slice, SLICE));
  PKV_CUDA(err, cudaEventCreate(&p->begin));
  PKV_CUDA(err, cudaEventCreate(&p->end));
  return PKV_OK;
}

pkv_status pkv_cuda_products_create(pkv_cuda_products **out, pkv_executor *executor,
                                    pkv_error *err) {
  *out = NULL;
  pkv_cuda_products *p = pkv_alloc_zeroed(&executor->allocator, 1, sizeof *p);
  PKV_CHECK(err, p, PKV_E_NOMEM, "%zu bytes for the products", sizeof *p);
  const pkv_status status = init(p, err);
  if (status != PKV_OK) {
    pkv_cuda_products_destroy(p, executor);
    return status;
  }
  *out = p;
  return PKV_OK;
}

void pkv_cuda_products_destroy(pkv_cuda_products *p, pkv_executor *executor) {
  if (!p) return;
  if (p->begin) (void)cudaEventDestroy(p->begin);
  if (p->end) (void)cudaEventDestroy(p->end);
  if (p->workspace) (void)cudaFree(p->workspace);
  if (p->spare) (void)cudaFree(p->spare);
  if (p->slice) (void)cudaFree(p->slice);
  if (p->handle) (void)p->lib.destroy(p->handle);
  if (p->lib.handle) (void)dlclose(p->lib.handle);
  (void)cudaGetLastError();
  pkv_free(&executor->allocator, p, sizeof *p);
}

/* ---- algorithms ---- */

static cublasStatus_t launch(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *a,
                             const cublasLtMatmulAlgo_t *algorithm, cudaStream_t stream) {
  const float one = 1.0f, beta = a->accumulate ? 1.0f : 0.0f;
  return p->lib.matmul(p->handle, &p->desc, &one, a->w.data, &e->w, a->x, &e->x, &beta, a->y, &e->y,
                       a->y, &e->y, algorithm, p->workspace, WORKSPACE, stream);
}

/* Milliseconds of the faster of a few runs, each from memory; 0 = it did not run. */
static float time_one(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *a,
                      const cublasLtMatmulAlgo_t *algorithm, cudaStream_t stream) {
  float best = 0.0f;
  for (int i = 0; i < TUNE_RUNS; i++) {
    float ms = 0.0f;
    if (cudaMemsetAsync(p->workspace, 0, WORKSPACE, stream) != cudaSuccess ||
        cudaEventRecord(p->begin, stream) != cudaSuccess)
      return 0.0f;
    const cublasStatus_t ran = launch(p, e, a, algorithm, stream);
    if (cudaEventRecord(p->end, stream) != cudaSuccess ||
        cudaEventSynchronize(p->end) != cudaSuccess || ran != CUBLAS_STATUS_SUCCESS ||
        cudaEventElapsedTime(&ms, p->begin, p->end) != cudaSuccess)
      return 0.0f;
    if (i == 0 || ms < best) best = ms;
  }
  return best;
}

/* A product that adds to what is there is timed elsewhere: it runs many times. */
static void tune(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *given,
                 const cublasLtMatmulHeuristicResult_t *results, int count, cudaStream_t stream) {
  float best = 0.0f;
  pkv_dense_matmul_params copy = *given;
  const pkv_dense_matmul_params *const a = &copy;
  if (given->accumulate) {
    if ((size_t)given->m * (size_t)given->y_stride * sizeof(float) > WORKSPACE) return;
    copy.y = p->spare;
  }
  for (int i = 0; i < count; i++) {
    const float ms = time_one(p, e, a, &results[i].algo, stream);
    if (ms == 0.0f || (best > 0.0f && ms >= best)) continue;
    best = ms;
    e->algorithm = results[i].algo;
    e->proposal = i;
  }
  p->timed += best > 0.0f;
  (void)cudaGetLastError();
}

static bool is_capturing(cudaStream_t stream) {
  return pkv_cuda_capture_of(stream) != cudaStreamCaptureStatusNone;
}

static shape shape_of(const pkv_dense_matmul_params *a) {
  shape s;
  memset(&s, 0, sizeof s);
  s.n = a->w.n;
  s.k = a->w.k;
  s.x_stride = a->x_stride;
  s.y_stride = a->y_stride;
  s.m = a->m;
  s.act = (int32_t)a->act;
  s.y_f32 = a->y_f32;
  s.accumulate = a->accumulate;
  return s;
}

/* The entry of a shape, or the one that it may take: a few places from its hash on. */
static picked *entry_of(pkv_cuda_products *p, const shape *s) {
  uint64_t hash = 0;
  const int64_t parts[] = {s->n,        s->k, s->x_stride,
                           s->y_stride, s->m, (int64_t)s->act * 4 + s->y_f32 * 2 + s->accumulate};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
    hash = (hash ^ (uint64_t)parts[i]) * UINT64_C(0x9e3779b97f4a7c15) + (hash >> 29);
  picked *const first = &p->table[hash >> 52 & (SHAPES - 1)];
  for (int i = 0; i < 16; i++) {
    picked *const e = &p->table[((hash >> 52) + (uint64_t)i) & (SHAPES - 1)];
    if (e->used == FREE || memcmp(&e->shape, s, sizeof *s) == 0) return e;
  }
  first->used = FREE;
  return first;
}

/* Whether an algorithm that another number of rows likes runs for these. */
static bool runs(pkv_cuda_products *p, picked *e, const cublasLtMatmulAlgo_t *algorithm) {
  cublasLtMatmulHeuristicResult_t result;
  memset(&result, 0, sizeof result);
  return p->lib.check(p->handle, &p->desc, &e->w, &e->x, &e->y, &e->y, algorithm, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= WORKSPACE;
}

/* Layouts, and what the library proposes for them; the best first, as it thinks. */
static pkv_status propose(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *a,
                          cublasLtMatmulHeuristicResult_t results[CANDIDATES], int *count,
                          pkv_error *err) {
  const cudaDataType act = a->act == PKV_DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
  const cudaDataType out = a->y_f32 ? CUDA_R_32F : act;
  const uint64_t n = (uint64_t)a->w.n, k = (uint64_t)a->w.k, m = (uint64_t)a->m;
  *count = 0;
  LT(err, p->lib.layout_init(&e->w, sizeof e->w, act, k, n, a->w.k), "layout of the weights");
  LT(err, p->lib.layout_init(&e->x, sizeof e->x, act, k, m, a->x_stride), "layout of x");
  LT(err, p->lib.layout_init(&e->y, sizeof e->y, out, n, m, a->y_stride), "layout of y");
  const cublasStatus_t status = p->lib.heuristic(p->handle, &p->desc, &e->w, &e->x, &e->y, &e->y,
                                                 &p->preference, CANDIDATES, results, count);
  PKV_CHECK(err, status == CUBLAS_STATUS_SUCCESS && *count > 0, PKV_E_UNSUPPORTED,
            "cuBLASLt has no product of %d rows with [%lld, %lld] (status %d)", (int)a->m,
            (long long)a->w.n, (long long)a->w.k, (int)status);
  return PKV_OK;
}

/* What an earlier process measured for a class: the same proposal for the same rows. */
static void recall_class(pkv_cuda_products *p, picked *found, const pkv_dense_matmul_params *a) {
  cublasLtMatmulHeuristicResult_t results[CANDIDATES];
  pkv_dense_matmul_params then = *a;
  int count = 0;
  then.m = found->first;
  const bool known =
      propose(p, found, &then, results, &count, NULL) == PKV_OK && found->proposal < count;
  found->used = known ? PICKED : FREE;
  if (known) found->algorithm = results[found->proposal].algo;
}

/* More than TUNE_ROWS rows: what the first of the class was found to like. */
static void pick_of_class(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *a,
                          const cublasLtMatmulHeuristicResult_t *results, int count,
                          cudaStream_t stream) {
  shape s = shape_of(a);
  s.m = -((a->m + CLASS_ROWS - 1) / CLASS_ROWS); /* no shape's own */
  picked *const found = entry_of(p, &s);
  if (found == e) return; /* the table is full */
  if (found->used == TOLD) recall_class(p, found, a);
  if (found->used == FREE && !is_capturing(stream)) {
    tune(p, e, a, results, count, stream);
    found->shape = s;
    found->algorithm = e->algorithm;
    found->proposal = e->proposal;
    found->first = a->m;
    found->used = PICKED;
    found->tuned = 1;
  }
  if (found->used == FREE) return;
  if (runs(p, e, &found->algorithm)) e->algorithm = found->algorithm;
  e->tuned = 1;
}

/* told: the number of the proposal that an earlier process found the fastest; -1 = none. */
static pkv_status pick(pkv_cuda_products *p, picked *e, const pkv_dense_matmul_params *a,
                       int32_t told, cudaStream_t stream, pkv_error *err) {
  cublasLtMatmulHeuristicResult_t results[CANDIDATES];
  int count = 0;
  PKV_TRY(propose(p, e, a, results, &count, err));
  e->algorithm = results[0].algo;
  e->proposal = -1;
  e->tuned = a->m > CLASSED || !is_capturing(stream);
  if (told >= 0 && told < count) {
    e->algorithm = results[told].algo;
    e->proposal = told;
    e->tuned = 1;
  } else if (a->m <= TUNE_ROWS && e->tuned) {
    tune(p, e, a, results, count, stream);
  } else if (a->m > TUNE_ROWS && a->m <= CLASSED) {
    pick_of_class(p, e, a, results, count, stream);
    e->proposal = -1; /* its class has it */
  }
  return PKV_OK;
}

/* ---- what was measured once ---- */

void pkv_cuda_products_maker(char maker[PKV_PRODUCT_MAKER], const pkv_cuda_products *products,
                             pkv_executor *executor) {
  struct cudaDeviceProp about;
  memset(&about, 0, sizeof about);
  if (cudaGetDeviceProperties(&about, pkv_cuda_state_of(executor)->device) != cudaSuccess)
    (void)cudaGetLastError();
  (void)snprintf(maker, PKV_PRODUCT_MAKER, "cuBLASLt %zu on %.80s, sm_%d%d, %d multiprocessors",
                 products->lib.version(), about.name, about.major, about.minor,
                 about.multiProcessorCount);
}

void pkv_cuda_products_take(pkv_cuda_products *products, const pkv_product_choice *choices,
                            int32_t count) {
  for (int32_t i = 0; i < count; i++) {
    const pkv_product_choice *c = &choices[i];
    shape s;
    memset(&s, 0, sizeof s);
    s.n = c->n;
    s.k = c->k;
    s.x_stride = c->x_stride;
    s.y_stride = c->y_stride;
    s.m = c->m <= TUNE_ROWS ? c->m : -((c->m + CLASS_ROWS - 1) / CLASS_ROWS);
    s.act = c->act;
    s.y_f32 = c->y_f32;
    s.accumulate = c->accumulate;
    picked *const e = entry_of(products, &s);
    if (e->used == PICKED) continue;
    memset(e, 0, sizeof *e);
    e->shape = s;
    e->used = TOLD;
    e->proposal = c->proposal;
    e->first = c->m;
  }
}

int32_t pkv_cuda_products_list(pkv_product_choice out[PKV_PRODUCT_CHOICES], int32_t *timed,
                               const pkv_cuda_products *products) {
  int32_t count = 0;
  _Static_assert(SHAPES <= PKV_PRODUCT_CHOICES, "the list has room for the table");
  for (int i = 0; i < SHAPES; i++) {
    const picked *e = &products->table[i];
    const shape *s = &e->shape;
    if (e->used == FREE || e->proposal < 0) continue;
    out[count++] = (pkv_product_choice){
        s->n,   s->k,     s->x_stride,   s->y_stride, s->m > 0 ? s->m : e->first,
        s->act, s->y_f32, s->accumulate, e->proposal};
  }
  *timed = products->timed;
  return count;
}

/* ---- products ---- */

pkv_status pkv_cuda_products_run(pkv_cuda_products *products, pkv_executor *executor,
                                 const pkv_dense_matmul_params *p, cudaStream_t stream,
                                 pkv_error *err) {
  const shape s = shape_of(p);
  picked *const e = entry_of(products, &s);
  if (e->used != PICKED || (!e->tuned && !is_capturing(stream))) {
    const int32_t told = e->used == TOLD ? e->proposal : -1;
    e->shape = s;
    e->used = PICKED; /* so that it is nobody else's meanwhile */
    const pkv_status status = pick(products, e, p, told, stream, err);
    if (status != PKV_OK) e->used = FREE;
    PKV_TRY(status);
  }
  const cublasStatus_t status = launch(products, e, p, &e->algorithm, stream);
  PKV_CHECK(err, status == CUBLAS_STATUS_SUCCESS, PKV_E_DEVICE,
            "cuBLASLt: product of %d rows with [%lld, %lld]: status %d", (int)p->m,
            (long long)p->w.n, (long long)p->w.k, (int)status);
  return pkv_cuda_launched(executor, cudaSuccess, "product", stream, err);
}

pkv_status pkv_cuda_products_run_packed(pkv_cuda_products *products, pkv_executor *executor,
                                        const pkv_dense_matmul_params *p, cudaStream_t stream,
                                        pkv_error *err) {
  const int64_t at_once = (int64_t)(SLICE / sizeof(uint16_t)) / p->w.k / 16 * 16;
  const int64_t element = p->y_f32 ? (int64_t)sizeof(float) : (int64_t)sizeof(uint16_t);
  const pkv_pack_layout layout = pkv_pack_layout_of((int32_t)p->w.type);
  PKV_CHECK(err, at_once > 0, PKV_E_LIMIT, "rows of %lld elements are too long", (long long)p->w.k);
  for (int64_t first = 0; first < p->w.n; first += at_once) {
    pkv_weight packed = p->w;
    pkv_dense_matmul_params part = *p;
    packed.n = p->w.n - first < at_once ? p->w.n - first : at_once;
    packed.data = (const char *)p->w.data + first / PKV_PACK_ROWS * pkv_pack_strip(&layout, p->w.k);
    PKV_TRY(pkv_cuda_launched(executor,
                              pkv_dense_launch_dequant(&packed, p->act, products->slice, stream),
                              "dense_dequant", stream, err));
    part.w.type = p->act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
    part.w.n = packed.n;
    part.w.data = products->slice;
    part.w.row_bytes = p->w.k * (int64_t)sizeof(uint16_t);
    part.y = (char *)p->y + first * element;
    PKV_TRY(pkv_cuda_products_run(products, executor, &part, stream, err));
  }
  return PKV_OK;
}
