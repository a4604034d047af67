/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark's own kernels: data, needles, the answer in double, and the null read. None uses
 * shared memory or barriers, and all but the null read are slow on purpose: one thread, one result.
 *
 * null_read is the judge: it reads what attention has to read (the K and V vectors of every token
 * that some query sees) through the same table, and keeps an exclusive or. Warps take equal,
 * contiguous shares of the batch's vectors, in page order and, within a page, in the order of
 * memory, whatever the layout. A lane has UNROLL loads of K and as many of V in flight; vectors
 * past the end of a row or of a share are replaced by the nearest one that belongs to it, which
 * costs no memory. 64 registers, no shared memory; `waves` blocks an SM.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include "measure/meter_kernels.h"

#define THREADS 256
#define UNROLL  4

#ifndef PKV_LAUNCH
#define PKV_LAUNCH(kernel, blocks, stream, ...)                                                    \
  kernel<<<(unsigned)(blocks), THREADS, 0, (stream)>>>(__VA_ARGS__)
#endif

/* Blocks for one thread an item, at most; the kernels stride over the rest. */
static unsigned blocks_for(int64_t items) {
  const int64_t blocks = (items + THREADS - 1) / THREADS;
  return blocks < 1 ? 1u : blocks > 65535 ? 65535u : (unsigned)blocks;
}

static __device__ __forceinline__ int64_t first_item(void) {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ int64_t item_step(void) {
  return (int64_t)gridDim.x * blockDim.x;
}

static __device__ float element(const void *base, int dtype, int64_t i) {
  if (dtype == PKV_DTYPE_F16) return __half2float(((const __half *)base)[i]);
  if (dtype == PKV_DTYPE_BF16) return __bfloat162float(((const __nv_bfloat16 *)base)[i]);
  if (dtype == PKV_DTYPE_FP8_E4M3)
    return __half2float(
        __half(__nv_cvt_fp8_to_halfraw(((const __nv_fp8_storage_t *)base)[i], __NV_E4M3)));
  return ((const float *)base)[i];
}

static __device__ void set_element(void *base, int dtype, int64_t i, float x) {
  if (dtype == PKV_DTYPE_F16)
    ((__half *)base)[i] = __float2half_rn(x);
  else if (dtype == PKV_DTYPE_BF16)
    ((__nv_bfloat16 *)base)[i] = __float2bfloat16_rn(x);
  else if (dtype == PKV_DTYPE_FP8_E4M3)
    ((__nv_fp8_storage_t *)base)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  else
    ((float *)base)[i] = x;
}

/* A number of a normal distribution from a counter: the same on every machine, in every layout. */
static __device__ float normal(uint64_t seed, int64_t index) {
  uint64_t z = (uint64_t)index * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  const float u = (float)(z & 0xffffff) / 16777216.0f + 1e-7f;
  const float angle = (float)((z >> 24) & 0xffffff) / 8388608.0f;
  return sqrtf(-2.0f * logf(u)) * cospif(angle);
}

/* Where (page, token, head, i) lies in K; V has strides of its own. */
static __device__ int64_t k_at(const pkv_cache *c, int64_t page, int token, int head) {
  return page * c->k_page_stride + token * c->k_token_stride + head * c->k_head_stride;
}

static __device__ int64_t v_at(const pkv_cache *c, int64_t page, int token, int head) {
  return page * c->v_page_stride + token * c->v_token_stride + head * c->v_head_stride;
}

static __global__ void __launch_bounds__(THREADS)
    fill(pkv_cache c, const int32_t *owned, uint64_t seed) {
  const int64_t count = c.pages * c.page_tokens * c.kv_heads * c.head_dim;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int x = (int)(i % c.head_dim), head = (int)(i / c.head_dim % c.kv_heads);
    const int64_t slot = i / c.head_dim / c.kv_heads, page = slot / c.page_tokens;
    const int token = (int)(slot % c.page_tokens);
    const bool mine = token < owned[page];
    const float k = mine ? normal(seed, i) / c.k_scale : CUDART_NAN_F;
    const float v = mine ? normal(seed + 1, i) / c.v_scale : CUDART_NAN_F;
    set_element(c.k, c.dtype, k_at(&c, page, token, head) + x, k);
    set_element(c.v, c.dtype, v_at(&c, page, token, head) + x, v);
  }
}

static __global__ void __launch_bounds__(THREADS)
    needle(pkv_cache c, pkv_meter_batch b, const int32_t *position, float value, uint64_t seed) {
  const int64_t count = (int64_t)b.rows * c.kv_heads * c.head_dim;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int x = (int)(i % c.head_dim), head = (int)(i / c.head_dim % c.kv_heads);
    const int64_t row = i / c.head_dim / c.kv_heads;
    const int at = position[row];
    if (at < 0) continue;
    const int64_t page = b.table[row * b.stride + at / c.page_tokens];
    const int token = at % c.page_tokens;
    const int64_t index = ((page * c.page_tokens + token) * c.kv_heads + head) * c.head_dim + x;
    const float k = value != 0.0f ? value * pkv_meter_sign(x) : normal(seed, index);
    set_element(c.k, c.dtype, k_at(&c, page, token, head) + x, k / c.k_scale);
  }
}

/* One thread a (row, query, query head): the largest difference from V at the row's position. */
static __global__ void __launch_bounds__(THREADS)
    needle_error(float *error, pkv_cache c, pkv_meter_batch b, const int32_t *position,
                 const void *out, int out_dtype) {
  const int64_t a_row = (int64_t)b.q_len * b.query_heads;
  const int group = b.query_heads / c.kv_heads;
  for (int64_t i = first_item(); i < b.rows * a_row; i += item_step()) {
    const int64_t row = i / a_row;
    const int head = (int)(i % b.query_heads) / group, at = position[row];
    float most = 0.0f;
    if (at >= 0) {
      const int64_t page = b.table[row * b.stride + at / c.page_tokens];
      const int64_t v = v_at(&c, page, at % c.page_tokens, head);
      for (int x = 0; x < c.head_dim; x++) {
        const float want = element(c.v, c.dtype, v + x) * c.v_scale;
        const float off = fabsf(element(out, out_dtype, i * c.head_dim + x) - want);
        if (!(off <= most)) most = off == off ? off : CUDART_INF_F; /* NaN counts */
      }
    }
    error[i] = most;
  }
}

/* What the kernels of one row of the answer share. Queries are (query token, query head). */
struct answer_row {
  pkv_cache cache;
  const int32_t *table; /* of the row */
  const void *q;        /* of the row */
  int q_dtype, length, queries, query_heads, q_len, window, chunks;
  double *weight; /* [queries, length]: logits, then exp(logit - top of its chunk) */
  double *top;    /* [queries, chunks] */
  double *sum;    /* [queries, chunks] */
  double *acc;    /* [queries, chunks, head_dim] */
};

static __global__ void __launch_bounds__(THREADS) answer_logits(answer_row r) {
  const pkv_cache *c = &r.cache;
  const int64_t count = (int64_t)r.queries * r.length;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int query = (int)(i / r.length), t = (int)(i % r.length);
    const int head = query % r.query_heads / (r.query_heads / c->kv_heads);
    const int sees = r.length - r.q_len + query / r.query_heads; /* the query's own position */
    double s = -CUDART_INF;
    if (t <= sees && (r.window == 0 || t > sees - r.window)) {
      const int64_t k = k_at(c, r.table[t / c->page_tokens], t % c->page_tokens, head);
      s = 0.0;
      for (int x = 0; x < c->head_dim; x++)
        s += (double)element(r.q, r.q_dtype, (int64_t)query * c->head_dim + x) *
             (double)element(c->k, c->dtype, k + x);
      s *= (double)c->k_scale / sqrt((double)c->head_dim);
    }
    r.weight[i] = s;
  }
}

static __global__ void __launch_bounds__(THREADS) answer_weights(answer_row r) {
  const int64_t count = (int64_t)r.queries * r.chunks;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int begin = (int)(i % r.chunks) * PKV_METER_CHUNK;
    const int end = begin + PKV_METER_CHUNK < r.length ? begin + PKV_METER_CHUNK : r.length;
    double *weight = r.weight + i / r.chunks * r.length;
    double top = -CUDART_INF, sum = 0.0;
    for (int t = begin; t < end; t++)
      top = fmax(top, weight[t]);
    for (int t = begin; t < end; t++) {
      weight[t] = weight[t] > -CUDART_INF ? exp(weight[t] - top) : 0.0;
      sum += weight[t];
    }
    r.top[i] = top;
    r.sum[i] = sum;
  }
}

/* One thread a (query, chunk, element). Weights of 0 do not touch V: it may hold NaN. */
static __global__ void __launch_bounds__(THREADS) answer_values(answer_row r) {
  const pkv_cache *c = &r.cache;
  const int64_t count = (int64_t)r.queries * r.chunks * c->head_dim;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int x = (int)(i % c->head_dim), chunk = (int)(i / c->head_dim % r.chunks);
    const int64_t query = i / c->head_dim / r.chunks;
    const int head = (int)(query % r.query_heads) / (r.query_heads / c->kv_heads);
    const int begin = chunk * PKV_METER_CHUNK;
    const int end = begin + PKV_METER_CHUNK < r.length ? begin + PKV_METER_CHUNK : r.length;
    double acc = 0.0;
    for (int t = begin; t < end; t++) {
      const double weight = r.weight[query * r.length + t];
      const int64_t v = v_at(c, r.table[t / c->page_tokens], t % c->page_tokens, head);
      if (weight > 0.0) acc += weight * (double)element(c->v, c->dtype, v + x);
    }
    r.acc[i] = acc;
  }
}

static __global__ void __launch_bounds__(THREADS) answer_fold(double *answer, answer_row r) {
  const int d = r.cache.head_dim;
  const int64_t count = (int64_t)r.queries * d;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const int64_t first = i / d * r.chunks;
    double top = -CUDART_INF, sum = 0.0, acc = 0.0;
    for (int j = 0; j < r.chunks; j++)
      top = fmax(top, r.top[first + j]);
    for (int j = 0; j < r.chunks && top > -CUDART_INF; j++) {
      const double weight = exp(r.top[first + j] - top);
      sum += weight * r.sum[first + j];
      acc += weight * r.acc[(first + j) * d + i % d];
    }
    answer[i] = sum > 0.0 ? acc / sum * (double)r.cache.v_scale : 0.0;
  }
}

/* Division by a number that is a power of two nearly always. */
struct divisor {
  uint32_t by;
  int shift; /* -1: not a power of two */
};

static divisor divisor_of(uint32_t by) {
  divisor d = {by, -1};
  if ((by & (by - 1)) == 0) d.shift = __builtin_ctz(by);
  return d;
}

static __device__ __forceinline__ uint32_t divided(uint32_t x, divisor d) {
  return d.shift >= 0 ? x >> d.shift : x / d.by;
}

struct null_read_args {
  const void *k, *v;
  const int32_t *table, *seq_len, *first_page, *borrowed;
  int64_t stride;
  /* in vectors */
  int64_t k_page, v_page;
  uint32_t token, head;
  uint32_t vectors; /* in all, of K */
  divisor a_page, a_row, inner;
  int rows, page_tokens, unseen; /* unseen: tokens at the end that only later queries see */
  int window, tokens_inside;     /* tokens_inside: a head's tokens follow each other (HND) */
  uint32_t *sink;
};

#ifndef PKV_METER_LOAD
#define PKV_METER_LOAD(p) load_vector(p)
#endif

template <typename V> static __device__ __forceinline__ V load_vector(const V *p) {
  return *p;
}
#ifdef __CUDA_ARCH__
template <> __device__ __forceinline__ uint4 load_vector<uint4>(const uint4 *p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}
#endif

static __device__ __forceinline__ uint32_t mixed(uint4 r) {
  return r.x ^ r.y ^ r.z ^ r.w;
}

static __device__ __forceinline__ uint32_t mixed(uint2 r) {
  return r.x ^ r.y;
}

/* Where vector `at` lies in K and V; *row only moves on. */
static __device__ __forceinline__ void locate(int64_t *k, int64_t *v, int *row, uint32_t at,
                                              const null_read_args *a) {
  const int page = (int)divided(at, a->a_page);
  const uint32_t in = at - (uint32_t)page * a->a_page.by;
  const uint32_t line = divided(in, a->a_row), outer = divided(line, a->inner);
  const uint32_t x = in - line * a->a_row.by, within = line - outer * a->inner.by;
  int token = (int)(a->tokens_inside ? within : outer);
  const uint32_t head = a->tokens_inside ? outer : within;
  while (a->first_page[*row + 1] <= page)
    ++*row;
  const int length = a->seq_len[*row];
  int first = a->window > 0 ? length - a->unseen - a->window : 0;
  first = first > 0 ? first : 0;
  int skipped = first / a->page_tokens;
  if (a->borrowed && a->borrowed[*row] > skipped) skipped = a->borrowed[*row];
  const int index = skipped + page - a->first_page[*row];
  const int low = first - index * a->page_tokens, high = length - 1 - index * a->page_tokens;
  token = token < low ? low : token > high ? high : token;
  const int64_t id = a->table[*row * a->stride + index];
  const int64_t inside = (int64_t)token * a->token + (int64_t)head * a->head + x;
  *k = id * a->k_page + inside;
  *v = id * a->v_page + inside;
}

/*
 * The row that page number `page` of the batch belongs to. Sixteen ways at a time: a search by
 * halves would wait for eight loads in turn among 200 rows, and attention has a plan for that.
 */
static __device__ __forceinline__ int row_of(int page, const null_read_args *a) {
  int row = 0, count = a->rows;
  while (count > 1) {
    const int step = (count + 15) / 16;
    int skip = 0;
#pragma unroll
    for (int i = 1; i < 16; i++) {
      const int at = row + i * step;
      if (a->first_page[at < a->rows ? at : a->rows] <= page) skip = i;
    }
    row += skip * step;
    count = step;
  }
  return row;
}

template <typename V>
static __global__ void __launch_bounds__(THREADS, 4) null_read(null_read_args a) {
  const uint32_t lane = threadIdx.x & 31u;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32u;
  const uint32_t warps = gridDim.x * blockDim.x / 32u;
  /* shares in groups of 32 vectors */
  const uint64_t groups = ((uint64_t)a.vectors + 31u) / 32u;
  const uint32_t begin = (uint32_t)(groups * warp / warps) * 32u;
  uint32_t end = (uint32_t)(groups * (warp + 1u) / warps) * 32u;
  if (end > a.vectors) end = a.vectors;
  if (begin >= end) return;
  const V *k = (const V *)a.k, *v = (const V *)a.v;
  int row = row_of((int)divided(begin, a.a_page), &a);
  uint32_t sum = 0;
  for (uint32_t i = begin; i < end; i += 32u * UNROLL) {
    int64_t k_from[UNROLL], v_from[UNROLL];
    V k_got[UNROLL], v_got[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const uint32_t at = i + 32u * (uint32_t)u + lane;
      locate(&k_from[u], &v_from[u], &row, at < end ? at : end - 1u, &a);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      k_got[u] = PKV_METER_LOAD(k + k_from[u]);
      v_got[u] = PKV_METER_LOAD(v + v_from[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      sum ^= mixed(k_got[u]) ^ mixed(v_got[u]);
  }
  if (sum == 0x12345677u) *a.sink = sum;
}

extern "C" cudaError_t pkv_meter_launch_fill(const pkv_cache *cache, const int32_t *owned,
                                             uint64_t seed, cudaStream_t stream) {
  const int64_t count = cache->pages * cache->page_tokens * cache->kv_heads * cache->head_dim;
  PKV_LAUNCH(fill, blocks_for(count), stream, *cache, owned, seed);
  return cudaGetLastError();
}

extern "C" cudaError_t pkv_meter_launch_needle(const pkv_cache *cache, const pkv_meter_batch *batch,
                                               const int32_t *position, float value, uint64_t seed,
                                               cudaStream_t stream) {
  const int64_t count = (int64_t)batch->rows * cache->kv_heads * cache->head_dim;
  PKV_LAUNCH(needle, blocks_for(count), stream, *cache, *batch, position, value, seed);
  return cudaGetLastError();
}

extern "C" cudaError_t pkv_meter_launch_needle_error(float *error, const pkv_cache *cache,
                                                     const pkv_meter_batch *batch,
                                                     const int32_t *position, const void *out,
                                                     pkv_dtype out_dtype, cudaStream_t stream) {
  const int64_t count = (int64_t)batch->rows * batch->q_len * batch->query_heads;
  PKV_LAUNCH(needle_error, blocks_for(count), stream, error, *cache, *batch, position, out,
             (int)out_dtype);
  return cudaGetLastError();
}

extern "C" cudaError_t pkv_meter_launch_answer(double *answer, double *scratch,
                                               const pkv_cache *cache, const pkv_meter_batch *batch,
                                               int32_t row, int32_t length, const void *q,
                                               pkv_dtype q_dtype, cudaStream_t stream) {
  const int64_t d = cache->head_dim, queries = (int64_t)batch->q_len * batch->query_heads;
  answer_row r = {};
  r.cache = *cache;
  r.table = batch->table + row * batch->stride;
  r.q = (const char *)q + row * queries * d * (int64_t)pkv_dtype_bytes(q_dtype);
  r.q_dtype = q_dtype;
  r.length = length;
  r.queries = (int)queries;
  r.query_heads = batch->query_heads;
  r.q_len = batch->q_len;
  r.window = batch->window;
  r.chunks = (length + PKV_METER_CHUNK - 1) / PKV_METER_CHUNK;
  r.weight = scratch;
  r.top = r.weight + queries * length;
  r.sum = r.top + queries * r.chunks;
  r.acc = r.sum + queries * r.chunks;
  if (length > 0) {
    PKV_LAUNCH(answer_logits, blocks_for(queries * length), stream, r);
    PKV_LAUNCH(answer_weights, blocks_for(queries * r.chunks), stream, r);
    PKV_LAUNCH(answer_values, blocks_for(queries * r.chunks * d), stream, r);
  }
  PKV_LAUNCH(answer_fold, blocks_for(queries * d), stream, answer + row * queries * d, r);
  return cudaGetLastError();
}

extern "C" cudaError_t pkv_meter_launch_null_read(uint32_t *sink, const pkv_cache *cache,
                                                  const pkv_meter_batch *batch, int32_t blocks,
                                                  cudaStream_t stream) {
  const int64_t element_bytes = (int64_t)pkv_dtype_bytes(cache->dtype);
  const int64_t row_bytes = cache->head_dim * element_bytes;
  const int64_t size = row_bytes % 16 == 0 ? 16 : 8, e = size / element_bytes; /* of a vector */
  const int64_t a_page = (int64_t)cache->page_tokens * cache->kv_heads * (row_bytes / size);
  if (batch->pages_read == 0) return cudaSuccess;
  if (batch->pages_read > (int64_t)UINT32_MAX / a_page - 1) return cudaErrorInvalidValue;
  null_read_args a = {};
  a.k = cache->k;
  a.v = cache->v;
  a.table = batch->table;
  a.seq_len = batch->seq_len;
  a.first_page = batch->first_page;
  a.borrowed = batch->borrowed;
  a.stride = batch->stride;
  a.k_page = cache->k_page_stride / e;
  a.v_page = cache->v_page_stride / e;
  a.token = (uint32_t)(cache->k_token_stride / e);
  a.head = (uint32_t)(cache->k_head_stride / e);
  a.vectors = (uint32_t)(batch->pages_read * a_page);
  a.a_page = divisor_of((uint32_t)a_page);
  a.a_row = divisor_of((uint32_t)(row_bytes / size));
  a.tokens_inside = cache->k_token_stride <= cache->k_head_stride && cache->page_tokens > 1;
  a.inner = divisor_of((uint32_t)(a.tokens_inside ? cache->page_tokens : cache->kv_heads));
  a.rows = batch->rows;
  a.page_tokens = cache->page_tokens;
  a.window = batch->window;
  a.unseen = batch->q_len - 1;
  a.sink = sink;
  if (size == 16)
    PKV_LAUNCH(null_read<uint4>, blocks, stream, a);
  else
    PKV_LAUNCH(null_read<uint2>, blocks, stream, a);
  return cudaGetLastError();
}

extern "C" int pkv_meter_null_read(const void *k, const void *v, const int32_t *table,
                                   int64_t stride, const int32_t *seq_len,
                                   const int32_t *first_page, int32_t rows, int64_t pages,
                                   int32_t kv_heads, int32_t head_dim, int32_t page_tokens,
                                   int32_t layout, int32_t dtype, void *sink, int32_t waves,
                                   void *stream) {
  const int64_t line = head_dim, page = line * page_tokens * kv_heads;
  int device = 0, multiprocessors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  pkv_cache c = PKV_CACHE_INIT;
  c.dtype = (pkv_dtype)dtype;
  c.k = const_cast<void *>(k);
  c.v = const_cast<void *>(v);
  c.k_page_stride = c.v_page_stride = page * (layout == 2 ? 2 : 1);
  c.k_token_stride = c.v_token_stride = layout == 0 ? line : line * kv_heads;
  c.k_head_stride = c.v_head_stride = layout == 0 ? line * page_tokens : line;
  c.page_tokens = page_tokens;
  c.kv_heads = kv_heads;
  c.head_dim = head_dim;
  pkv_meter_batch batch = {};
  batch.rows = rows;
  batch.q_len = 1;
  batch.stride = stride;
  batch.table = table;
  batch.seq_len = seq_len;
  batch.first_page = first_page;
  batch.pages_read = pages;
  return pkv_meter_launch_null_read((uint32_t *)sink, &c, &batch, waves * multiprocessors,
                                    (cudaStream_t)stream);
}
