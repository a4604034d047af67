/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention_null_read: attention on the CPU against a null read of the same pages through the same
 * table in the same run, interleaved. The null read loads every byte of K and V that some query
 * sees, piece by piece in the plan's order, and keeps an exclusive or: what a perfect kernel cannot
 * beat. Of two null reads, with and without fetching the next page ahead, the faster one counts.
 *
 *   attention_null_read [rounds [isa]]
 *
 * Prints one line a shape: share = time of the null read / time of attention, medians over rounds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/rng.h"
#include "plan/plan_core.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_AVX2 1
#else
#define HAVE_AVX2 0
#endif

#define MAX_LAYERS 8

typedef struct bench_shape {
  const char *name;
  int32_t kv_heads, group, head_dim, page_tokens, rows;
  pkv_layout layout;
  pkv_dtype dtype;
  int32_t least, most; /* row lengths, mixed */
} bench_shape;

typedef struct bench {
  bench_shape shape;
  int32_t layers;
  int32_t seq_len[64];
  pkv_pool *pool;
  pkv_cache cache[MAX_LAYERS];
  int32_t *table, max_pages;
  const pkv_plan *plan;
  void *memory, *workspace;
  size_t workspace_bytes;
  float *q, *out;
  int64_t kv_bytes; /* a layer */
} bench;

typedef struct null_read {
  const bench *b;
  const pkv_cache *cache;
  int ahead;
  _Alignas(64) uint64_t sink[64];
} null_read;

#if HAVE_AVX2
__attribute__((target("avx2"))) static uint64_t read_run(const unsigned char *p, size_t bytes,
                                                         const unsigned char *next) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  size_t i = 0;
  for (; i + 128 <= bytes; i += 128) {
    if (next != NULL) {
      _mm_prefetch((const char *)next + i, _MM_HINT_T0);
      _mm_prefetch((const char *)next + i + 64, _MM_HINT_T0);
    }
    a = _mm256_xor_si256(a, _mm256_loadu_si256((const void *)(p + i)));
    b = _mm256_xor_si256(b, _mm256_loadu_si256((const void *)(p + i + 32)));
    c = _mm256_xor_si256(c, _mm256_loadu_si256((const void *)(p + i + 64)));
    d = _mm256_xor_si256(d, _mm256_loadu_si256((const void *)(p + i + 96)));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  uint64_t words[4], sum;
  _mm256_storeu_si256((void *)words, a);
  sum = words[0] ^ words[1] ^ words[2] ^ words[3];
  for (; i < bytes; i++)
    sum ^= p[i];
  return sum;
}
#else
static uint64_t read_run(const unsigned char *p, size_t bytes, const unsigned char *next) {
  uint64_t sum = 0, word;
  size_t i = 0;
  (void)next;
  for (; i + 8 <= bytes; i += 8) {
    memcpy(&word, p + i, 8);
    sum ^= word;
  }
  for (; i < bytes; i++)
    sum ^= p[i];
  return sum;
}
#endif

/* Tokens [begin, end) of one row and head: page by page, one run a page (HND) or one a token. */
static uint64_t read_tokens(const null_read *n, const int32_t *pages, int32_t head, int64_t begin,
                            int64_t end) {
  const pkv_cache *c = n->cache;
  const int64_t e = (int64_t)pkv_dtype_bytes(c->dtype), d = c->head_dim;
  const unsigned char *k = c->k, *v = c->v;
  uint64_t sum = 0;
  for (int64_t t = begin; t < end;) {
    const int64_t in = t % c->page_tokens, left = c->page_tokens - in;
    const int64_t run = left < end - t ? left : end - t;
    const int64_t at = pages[t / c->page_tokens] * c->k_page_stride + in * c->k_token_stride +
                       head * c->k_head_stride;
    const int64_t then =
        t + run < end ? pages[t / c->page_tokens + 1] * c->k_page_stride + head * c->k_head_stride
                      : at;
    if (c->k_token_stride == d) {
      const size_t bytes = (size_t)(run * d * e);
      sum ^= read_run(k + at * e, bytes, n->ahead ? k + then * e : NULL);
      sum ^= read_run(v + at * e, bytes, n->ahead ? v + then * e : NULL);
    } else {
      for (int64_t i = 0; i < run; i++) {
        const int64_t step = i * c->k_token_stride * e;
        sum ^= read_run(k + at * e + step, (size_t)(d * e), n->ahead ? k + then * e + step : NULL);
        sum ^= read_run(v + at * e + step, (size_t)(d * e), n->ahead ? v + then * e + step : NULL);
      }
    }
    t += run;
  }
  return sum;
}

static void null_part(void *ctx, int64_t item, int32_t worker) {
  null_read *n = ctx;
  const struct pkv_plan *plan = n->b->plan;
  const pkv_plan_core core = pkv_plan_core_of(plan);
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
  pkv_plan_cursor at = cursors[item];
  const pkv_plan_cursor end = cursors[item + 1];
  pkv_plan_piece piece;
  while (pkv_plan_next_piece(&piece, &core, seq_len, &at, &end)) {
    const int64_t first = (int64_t)(piece.first_unit + piece.unit_begin) * core.unit_tokens;
    int64_t last = (int64_t)(piece.first_unit + piece.unit_end) * core.unit_tokens;
    if (last > seq_len[piece.row]) last = seq_len[piece.row];
    n->sink[worker * 8] ^= read_tokens(n, n->b->table + (int64_t)piece.row * n->b->max_pages,
                                       piece.kv_head, first, last);
  }
}

static void check(pkv_status status, const pkv_error *err) {
  if (status == PKV_OK) return;
  fprintf(stderr, "attention_null_read: %s: %s\n", err->where, err->text);
  exit(1);
}

static void *take(size_t bytes) {
  void *p = NULL;
  if (posix_memalign(&p, 64, bytes + 64) != 0) exit(1);
  return p;
}

static void make_plan(bench *b) {
  pkv_error err = {0};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = b->shape.kv_heads * b->shape.group;
  shape.kv_heads = b->shape.kv_heads;
  shape.head_dim = b->shape.head_dim;
  shape.page_tokens = b->shape.page_tokens;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  size_t bytes;
  check(pkv_plan_size(&bytes, &b->workspace_bytes, &shape, &options, b->shape.rows, b->shape.most,
                      &err),
        &err);
  b->memory = take(bytes);
  b->workspace = take(b->workspace_bytes);
  check(
      pkv_plan_build(&b->plan, b->memory, bytes, &shape, &options, b->shape.rows, b->seq_len, &err),
      &err);
}

/* Lengths from least to most, doubling and halving; pages permuted; at least 1 GiB over layers. */
static void make_bench(bench *b, const bench_shape *shape) {
  memset(b, 0, sizeof *b);
  b->shape = *shape;
  int64_t tokens = 0, pages = 0;
  int32_t len = shape->most;
  for (int32_t r = 0; r < shape->rows; r++) {
    b->seq_len[r] = len - 7 * r > 0 ? len - 7 * r : 1;
    len = len / 2 < shape->least ? shape->most : len / 2;
    tokens += b->seq_len[r];
    const int32_t need = (b->seq_len[r] + shape->page_tokens - 1) / shape->page_tokens;
    if (need > b->max_pages) b->max_pages = need;
    pages += need;
  }
  b->kv_bytes =
      tokens * shape->kv_heads * shape->head_dim * 2 * (int64_t)pkv_dtype_bytes(shape->dtype);
  b->layers = (int32_t)((INT64_C(1) << 30) / b->kv_bytes) + 1;
  if (b->layers > MAX_LAYERS) b->layers = MAX_LAYERS;
  pkv_error err = {0};
  pkv_pool_options options = PKV_POOL_OPTIONS_INIT;
  options.dtype = shape->dtype;
  options.layout = shape->layout;
  options.layers = b->layers;
  options.kv_heads = shape->kv_heads;
  options.head_dim = shape->head_dim;
  options.page_tokens = shape->page_tokens;
  options.pages = pages;
  check(pkv_pool_create(&b->pool, &options, &err), &err);
  const size_t element = pkv_dtype_bytes(shape->dtype);
  for (int32_t l = 0; l < b->layers; l++) {
    check(pkv_pool_cache(&b->cache[l], b->pool, l, &err), &err);
    const size_t bytes = (size_t)(pages * b->cache[l].k_page_stride) * element;
    memset(b->cache[l].k, 0x2c, bytes); /* small numbers in every dtype */
    memset(b->cache[l].v, 0x2d, bytes);
  }
  pkv_rng rng;
  pkv_rng_init(&rng, 7);
  int32_t *order = take((size_t)pages * sizeof *order);
  for (int64_t i = 0; i < pages; i++) {
    const int64_t j = (int64_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    order[i] = order[j];
    order[j] = (int32_t)i;
  }
  b->table = take((size_t)(shape->rows * b->max_pages) * sizeof *b->table);
  int64_t next = 0;
  for (int32_t r = 0; r < shape->rows; r++)
    for (int32_t i = 0; i < (b->seq_len[r] + shape->page_tokens - 1) / shape->page_tokens; i++)
      b->table[r * b->max_pages + i] = order[next++];
  free(order);
  make_plan(b);
  const size_t floats = (size_t)(shape->rows * shape->kv_heads * shape->group * shape->head_dim);
  b->q = take(floats * sizeof(float));
  b->out = take(floats * sizeof(float));
  for (size_t i = 0; i < floats; i++)
    b->q[i] = (float)pkv_rng_normal(&rng);
}

static void free_bench(bench *b) {
  pkv_pool_destroy(b->pool);
  free(b->table);
  free(b->memory);
  free(b->workspace);
  free(b->q);
  free(b->out);
}

static double time_attention(const bench *b, pkv_executor *executor) {
  pkv_error err = {0};
  const int64_t start = pkv_clock_ns();
  for (int32_t l = 0; l < b->layers; l++) {
    pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
    args.plan = b->plan;
    args.cache = &b->cache[l];
    args.block_table = b->table;
    args.max_pages = b->max_pages;
    args.q = b->q;
    args.out = b->out;
    args.workspace = b->workspace;
    args.workspace_bytes = b->workspace_bytes;
    check(pkv_attention_run(executor, &args, &err), &err);
  }
  return (double)(pkv_clock_ns() - start) / b->layers;
}

static double time_null(const bench *b, pkv_executor *executor, int ahead) {
  static null_read n;
  const int64_t start = pkv_clock_ns();
  for (int32_t l = 0; l < b->layers; l++) {
    n.b = b;
    n.cache = &b->cache[l];
    n.ahead = ahead;
    pkv_workers_run(executor->workers, null_part, &n, b->plan->parts);
  }
  return (double)(pkv_clock_ns() - start) / b->layers;
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *x, int n) {
  qsort(x, (size_t)n, sizeof *x, by_value);
  return x[n / 2];
}

static void run(const bench_shape *shape, pkv_isa isa, int32_t threads, int rounds) {
  bench b;
  pkv_error err = {0};
  make_bench(&b, shape);
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.threads = threads;
  options.isa = isa;
  pkv_executor *executor;
  check(pkv_executor_create(&executor, &options, &err), &err);
  double attention[64], plain[64], ahead[64], share[64];
  if (rounds > 64) rounds = 64;
  time_attention(&b, executor);
  for (int i = 0; i < rounds; i++) {
    plain[i] = time_null(&b, executor, 0);
    attention[i] = time_attention(&b, executor);
    ahead[i] = time_null(&b, executor, 1);
    share[i] = (plain[i] < ahead[i] ? plain[i] : ahead[i]) / attention[i];
  }
  const double bytes = (double)b.kv_bytes;
  printf("%-28s %-8s threads %d  attention %6.2f GB/s  null %6.2f  null ahead %6.2f  share %.2f "
         "(pairs: %.2f)\n",
         shape->name, pkv_isa_name(pkv_executor_isa(executor)), threads,
         bytes / median(attention, rounds), bytes / median(plain, rounds),
         bytes / median(ahead, rounds),
         (median(plain, rounds) < median(ahead, rounds) ? median(plain, rounds)
                                                        : median(ahead, rounds)) /
             median(attention, rounds),
         median(share, rounds));
  fflush(stdout);
  pkv_executor_destroy(executor);
  free_bench(&b);
}

int main(int argc, char **argv) {
  static const bench_shape shapes[] = {
      {"32/8 x128, 1 row 64K", 8, 4, 128, 16, 1, PKV_LAYOUT_HND, PKV_DTYPE_F16, 65536, 65536},
      {"32/8 x128, 16 rows 1K..64K", 8, 4, 128, 16, 16, PKV_LAYOUT_HND, PKV_DTYPE_F16, 1024, 65536},
      {"9/3 x64, 1 row 64K", 3, 3, 64, 16, 1, PKV_LAYOUT_HND, PKV_DTYPE_F16, 65536, 65536},
      {"9/3 x64, 16 rows 1K..64K", 3, 3, 64, 16, 16, PKV_LAYOUT_HND, PKV_DTYPE_F16, 1024, 65536},
      {"32/8 x128, 16 rows, NHD", 8, 4, 128, 16, 16, PKV_LAYOUT_NHD, PKV_DTYPE_F16, 1024, 65536},
      {"32/8 x128, 16 rows, page 64", 8, 4, 128, 64, 16, PKV_LAYOUT_HND, PKV_DTYPE_F16, 1024,
       65536},
      {"32/8 x128, 16 rows, bf16", 8, 4, 128, 16, 16, PKV_LAYOUT_HND, PKV_DTYPE_BF16, 1024, 65536},
      {"32/8 x128, 16 rows, fp8", 8, 4, 128, 16, 16, PKV_LAYOUT_HND, PKV_DTYPE_FP8_E4M3, 1024,
       65536},
      {"64/8 x128, 16 rows", 8, 8, 128, 16, 16, PKV_LAYOUT_HND, PKV_DTYPE_F16, 1024, 65536},
  };
  const int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 7;
  const char *only = argc > 3 ? argv[3] : NULL;
  pkv_isa isa = PKV_ISA_AUTO;
  for (int i = PKV_ISA_REFERENCE; argc > 2 && i <= PKV_ISA_NEON; i++)
    if (strcmp(argv[2], pkv_isa_name((pkv_isa)i)) == 0) isa = (pkv_isa)i;
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    if (only != NULL && strtol(only, NULL, 10) != (long)i) continue;
    for (int32_t threads = 1; threads <= 2; threads++)
      run(&shapes[i], isa, threads, rounds);
  }
  return 0;
}
