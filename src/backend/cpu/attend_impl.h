/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over one block of states, written once over the vector operations that an instruction
 * set's file defines before it includes this one:
 *   VL                     lanes (8 or 16)
 *   vf                     VL floats
 *   vf_zero set1 load store add sub mul div   as named; load and store take any address
 *   vf_fma(a, b, c)        a * b + c
 *   vf_max(a, b)           b where either is NaN
 *   vf_sum, vf_top         sum (fixed tree) and maximum of the lanes
 *   vf_sum4(out, a,b,c,d)  four sums, each the same tree as vf_sum
 *   vf_exponent(t)         the bits of t shifted into the exponent's place (left by 23)
 *   vf_abs, vf_copysign
 *   vf_kv(dtype, p)        VL elements of a K or V row as floats (fp8: VF_FP8_FACTOR too small)
 *   vf_kv_half, vf_load_half  the same for 8 elements, other lanes 0 (VL 16 only)
 *   QK_TOKENS(rows)        tokens a step of the score kernel takes for 1..4 rows: 1, 2 or 4
 *   PV_CHUNKS(rows)        vectors of the head dimension a step of the value kernel takes
 *   vf_prefetch(p)
 *   WIDE_FROM, WIDE_..     what attend_wide_impl.h needs, where many rows go their own way
 *   ATTEND_OPS, ATTEND_ISA the table's name and instruction set
 *
 * Bits. In this file every state's arithmetic is one fixed sequence that depends on its query, on
 * the tokens and on the tile's start only: score = VL partial sums over the head dimension in
 * order, then a fixed tree; the tile's denominators by lane (token mod VL), then a fixed tree;
 * values token by token. How many rows and tokens a kernel takes at once never shows.
 * Batch-invariant plans have this sequence in attend_wide_impl.h too; others leave the tree out.
 * Masked tokens are not read: the score is -inf and the value product is skipped.
 *
 * Units. Scores are kept in base 2: the softmax scale times log2(e) goes into the queries.
 */
#include "backend/cpu/cpu_isa.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/dtype.h"

#define TILE   PKV_TILE_TOKENS
#define INLINE static inline __attribute__((always_inline))

#define EXP2_MAGIC (12582912.0f + 127.0f) /* 1.5 * 2^23 + 127 */
#define LOG2_E     1.44269504088896340736
#define LN_2       0.69314718055994530942

/* Blocks of at least WIDE_FROM states go through attend_wide_impl.h. */
#ifdef WIDE_TOKENS
#define LEVELS (VL == 16 ? 4 : 3)
#define HELD   (PANEL_VECTORS * VL * WIDE_TOKENS)
#else
#define WIDE_FROM (PKV_CPU_BLOCK_ROWS + 1)
#endif

/* Whether to store floats and read them again costs less than to convert once more. */
#ifdef WIDE_TOKENS
#define CONVERTS_SLOWLY(dtype) ((dtype) == PKV_DTYPE_FP8_E4M3)
#else
#define CONVERTS_SLOWLY(dtype) ((dtype) != PKV_DTYPE_F32)
#endif

typedef const unsigned char *token_ptr;

/* Consecutive rows of a block that see the same tokens [lo, hi) of the tile. */
typedef struct row_run {
  int32_t first, rows, lo, hi;
} row_run;

/* Rows are `stride` floats apart: head_dim rounded up to VL, padding lanes zero in q. */
typedef struct attend_scratch {
  union {
    _Alignas(64) float q[PKV_CPU_BLOCK_ROWS * PKV_CPU_MAX_HEAD_DIM];
    _Alignas(64) float sums[PKV_CPU_BLOCK_ROWS * PKV_CPU_MAX_HEAD_DIM]; /* wide: acc in stripes */
  };
  _Alignas(64) float acc[PKV_CPU_BLOCK_ROWS * PKV_CPU_MAX_HEAD_DIM];
  _Alignas(64) float total[PKV_CPU_BLOCK_ROWS * PKV_CPU_MAX_HEAD_DIM];
  _Alignas(64) float tile[TILE * PKV_CPU_MAX_HEAD_DIM]; /* K, then V, of one tile as floats */
#ifdef WIDE_TOKENS
  _Alignas(64) float turned[PKV_CPU_BLOCK_ROWS * PKV_CPU_MAX_HEAD_DIM]; /* queries as lanes */
  _Alignas(64) float held[LEVELS * HELD];                               /* partial sums */
#endif
  _Alignas(64) float scores[PKV_CPU_BLOCK_ROWS * TILE];
  _Alignas(64) float m[PKV_CPU_BLOCK_ROWS], l[PKV_CPU_BLOCK_ROWS];
  float total_m[PKV_CPU_BLOCK_ROWS], total_l[PKV_CPU_BLOCK_ROWS];
  token_ptr k[2][TILE], v[2][TILE]; /* this tile's tokens and the next one's */
  token_ptr rows[TILE];             /* rows of `tile` */
  row_run runs[PKV_CPU_BLOCK_ROWS];
} attend_scratch;

INLINE int32_t row_stride(int32_t head_dim) {
  return (head_dim + VL - 1) / VL * VL;
}

/* As pkv_dtype_bytes, known to the compiler. */
INLINE int64_t element_bytes(const pkv_dtype dtype) {
  return dtype == PKV_DTYPE_F32 ? 4 : dtype == PKV_DTYPE_FP8_E4M3 ? 1 : 2;
}

/*
 * 2^x for x <= 0 (or NaN) is 2^n (1 + y f) with n = round(x), f = x - n in [-0.5, 0.5] and y a
 * polynomial in f, minimax for the relative error (2e-9 before rounding; 1 ulp after, 2 without
 * fused multiply-add). Returns y; *power is 2^n, 0 below -126.5.
 */
INLINE vf exp2_parts(vf x, vf *f, vf *power) {
  x = vf_max(vf_set1(-127.0f), x);
  const vf t = vf_add(x, vf_set1(EXP2_MAGIC)); /* its low bits are n + 127 */
  *f = vf_sub(x, vf_sub(t, vf_set1(EXP2_MAGIC)));
  *power = vf_exponent(t);
  vf y = vf_set1(0x1.41fbbcp-13f);
  y = vf_fma(y, *f, vf_set1(0x1.5f3e52p-10f));
  y = vf_fma(y, *f, vf_set1(0x1.3b2d4cp-7f));
  y = vf_fma(y, *f, vf_set1(0x1.c6aee8p-5f));
  y = vf_fma(y, *f, vf_set1(0x1.ebfbdcp-3f));
  return vf_fma(y, *f, vf_set1(0x1.62e430p-1f));
}

INLINE vf exp2_nonpositive(vf x) {
  vf f, power;
  const vf y = exp2_parts(x, &f, &power);
  return vf_mul(vf_fma(y, f, vf_set1(1.0f)), power);
}

/* 2^x - 1, exact to a few ulp also next to 0. */
INLINE vf exp2_minus_one(vf x) {
  vf f, power;
  const vf y = exp2_parts(x, &f, &power);
  return vf_fma(vf_mul(y, f), power, vf_add(power, vf_set1(-1.0f)));
}

static float exp2_one(float x) {
  float lanes[VL];
  vf_store(lanes, exp2_nonpositive(vf_set1(x)));
  return lanes[0];
}

/* ---------------------------------------------------------------------------------- kernels */

/* scores[r * TILE + j] = q_r . k_j for `rows` rows and `count` tokens from j on. */
INLINE void qk_step(float *scores, const float *q, int32_t stride, const token_ptr *k, int32_t j,
                    int32_t head_dim, const pkv_dtype dtype, const int rows, const int count) {
  const int64_t bytes = element_bytes(dtype);
  vf acc[4][4];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int t = 0; t < count; t++)
      acc[r][t] = vf_zero();
  }
  int32_t c = 0;
  for (; c + VL <= head_dim; c += VL) {
    /* Queries are held, keys come one by one: three rows by four tokens fill 16 registers. */
    vf query[4];
    UNROLL
    for (int r = 0; r < rows; r++)
      query[r] = vf_load(q + r * stride + c);
    UNROLL
    for (int t = 0; t < count; t++) {
      const vf key = vf_kv(dtype, k[j + t] + c * bytes);
      UNROLL
      for (int r = 0; r < rows; r++)
        acc[r][t] = vf_fma(query[r], key, acc[r][t]);
    }
  }
#if VL == 16
  if (c < head_dim) {
    for (int r = 0; r < rows; r++) {
      const vf query = vf_load(q + r * stride + c);
      for (int t = 0; t < count; t++)
        acc[r][t] = vf_fma(query, vf_kv_half(dtype, k[j + t] + c * bytes), acc[r][t]);
    }
  }
#endif
  float sums[4];
  if (count == 4) {
    UNROLL
    for (int r = 0; r < rows; r++)
      vf_sum4(scores + r * TILE + j, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  } else if (count == 2) {
    UNROLL
    for (int r = 0; r < rows; r += 2) {
      const int s = r + 1 < rows ? r + 1 : r;
      vf_sum4(sums, acc[r][0], acc[r][1], acc[s][0], acc[s][1]);
      memcpy(scores + r * TILE + j, sums, 8);
      memcpy(scores + s * TILE + j, sums + 2, 8);
    }
  } else {
    UNROLL
    for (int r = 0; r < rows; r++)
      scores[r * TILE + j] = vf_sum(acc[r][0]);
  }
}

/* next: pointers of the tile to come, fetched `lines` cache lines a token; NULL = none. */
INLINE void qk_rows(float *scores, const float *q, int32_t stride, const token_ptr *k, int32_t lo,
                    int32_t hi, int32_t head_dim, const token_ptr *next, int32_t lines,
                    const pkv_dtype dtype, const int rows) {
  const int step = QK_TOKENS(rows);
  int32_t j = lo;
  for (; j + step <= hi; j += step) {
    if (next != NULL) {
      for (int t = 0; t < step; t++)
        for (int32_t i = 0; i < lines; i++)
          vf_prefetch(next[j + t] + i * 64);
    }
    qk_step(scores, q, stride, k, j, head_dim, dtype, rows, step);
  }
  for (; j < hi; j++)
    qk_step(scores, q, stride, k, j, head_dim, dtype, rows, 1);
}

/* acc[r][c ..] += sum_j p_rj v_j[c ..] for `chunks` vectors from c on. */
INLINE void pv_step(float *acc, const float *p, int32_t stride, const token_ptr *v, int32_t lo,
                    int32_t hi, int32_t c, const pkv_dtype dtype, const int rows,
                    const int chunks) {
  const int64_t bytes = element_bytes(dtype);
  vf sum[4][8];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int i = 0; i < chunks; i++)
      sum[r][i] = vf_load(acc + r * stride + c + i * VL);
  }
  for (int32_t j = lo; j < hi; j++) {
    const token_ptr at = v[j] + c * bytes;
    vf weight[4];
    UNROLL
    for (int r = 0; r < rows; r++)
      weight[r] = vf_set1(p[r * TILE + j]);
    UNROLL
    for (int i = 0; i < chunks; i++) {
      const vf value = vf_kv(dtype, at + i * VL * bytes);
      UNROLL
      for (int r = 0; r < rows; r++)
        sum[r][i] = vf_fma(weight[r], value, sum[r][i]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int i = 0; i < chunks; i++)
      vf_store(acc + r * stride + c + i * VL, sum[r][i]);
  }
}

/*
 * While K of a tile is used K of the next tile is fetched, while V is used V of the next: a whole
 * tile ahead, into the second-level cache (docs/notes/cpu-attention.md). Fetches come in small
 * sequential bursts, a token or an equal share of the tile's tokens before each step: all at once
 * they outnumber the places for them, and line by line across tokens the machine's own prefetchers
 * lose the thread.
 */
INLINE void pv_rows(float *acc, const float *p, int32_t stride, const token_ptr *v, int32_t lo,
                    int32_t hi, int32_t head_dim, const token_ptr *next, int32_t from,
                    int32_t lines, const pkv_dtype dtype, const int rows) {
  const int chunks = PV_CHUNKS(rows);
  const int32_t share = (TILE * chunks * VL + head_dim - 1) / head_dim;
  int32_t c = 0;
  for (int32_t j = from; c + chunks * VL <= head_dim; c += chunks * VL) {
    const int32_t to = next == NULL ? 0 : j + share < TILE ? j + share : TILE;
    for (; j < to; j++)
      for (int32_t i = 0; i < lines; i++)
        vf_prefetch(next[j] + i * 64);
    pv_step(acc, p, stride, v, lo, hi, c, dtype, rows, chunks);
  }
  for (; c + VL <= head_dim; c += VL)
    pv_step(acc, p, stride, v, lo, hi, c, dtype, rows, 1);
#if VL == 16
  for (int r = 0; c < head_dim && r < rows; r++) {
    vf sum = vf_load(acc + r * stride + c);
    for (int32_t j = lo; j < hi; j++)
      sum =
          vf_fma(vf_set1(p[r * TILE + j]), vf_kv_half(dtype, v[j] + c * element_bytes(dtype)), sum);
    vf_store(acc + r * stride + c, sum);
  }
#endif
}

typedef void (*qk_fn)(float *scores, const float *q, int32_t stride, const token_ptr *k, int32_t lo,
                      int32_t hi, int32_t head_dim, const token_ptr *next, int32_t lines);
typedef void (*pv_fn)(float *acc, const float *p, int32_t stride, const token_ptr *v, int32_t lo,
                      int32_t hi, int32_t head_dim, const token_ptr *next, int32_t from,
                      int32_t lines);

#define KERNELS(name, dtype, rows)                                                                 \
  static void qk_##name##_##rows(float *scores, const float *q, int32_t stride,                    \
                                 const token_ptr *k, int32_t lo, int32_t hi, int32_t head_dim,     \
                                 const token_ptr *next, int32_t lines) {                           \
    qk_rows(scores, q, stride, k, lo, hi, head_dim, next, lines, dtype, rows);                     \
  }                                                                                                \
  static void pv_##name##_##rows(float *acc, const float *p, int32_t stride, const token_ptr *v,   \
                                 int32_t lo, int32_t hi, int32_t head_dim, const token_ptr *next,  \
                                 int32_t from, int32_t lines) {                                    \
    pv_rows(acc, p, stride, v, lo, hi, head_dim, next, from, lines, dtype, rows);                  \
  }
#define KERNELS_OF(name, dtype)                                                                    \
  KERNELS(name, dtype, 1) KERNELS(name, dtype, 2) KERNELS(name, dtype, 3) KERNELS(name, dtype, 4)

KERNELS_OF(f32, PKV_DTYPE_F32)
KERNELS_OF(f16, PKV_DTYPE_F16)
KERNELS_OF(bf16, PKV_DTYPE_BF16)
KERNELS_OF(fp8, PKV_DTYPE_FP8_E4M3)

/* By dtype and rows - 1. */
static const qk_fn qk_kernels[4][4] = {{qk_f32_1, qk_f32_2, qk_f32_3, qk_f32_4},
                                       {qk_f16_1, qk_f16_2, qk_f16_3, qk_f16_4},
                                       {qk_bf16_1, qk_bf16_2, qk_bf16_3, qk_bf16_4},
                                       {qk_fp8_1, qk_fp8_2, qk_fp8_3, qk_fp8_4}};
static const pv_fn pv_kernels[4][4] = {{pv_f32_1, pv_f32_2, pv_f32_3, pv_f32_4},
                                       {pv_f16_1, pv_f16_2, pv_f16_3, pv_f16_4},
                                       {pv_bf16_1, pv_bf16_2, pv_bf16_3, pv_bf16_4},
                                       {pv_fp8_1, pv_fp8_2, pv_fp8_3, pv_fp8_4}};

/* Rows the next kernel call takes of `left`: 4, or what avoids a lonely last row. */
static int32_t kernel_rows(int32_t left) {
  if (left == 5 || left == 6 || left == 9) return 3;
  return left < 4 ? left : 4;
}

INLINE void widen_row(float *dst, token_ptr src, int32_t head_dim, const pkv_dtype dtype) {
  const int64_t bytes = element_bytes(dtype);
  int32_t c = 0;
  for (; c + VL <= head_dim; c += VL)
    vf_store(dst + c, vf_kv(dtype, src + c * bytes));
#if VL == 16
  if (c < head_dim) vf_store(dst + c, vf_kv_half(dtype, src + c * bytes));
#endif
}

/* Rows [lo, hi) of a tile as floats, for blocks of many rows: each is converted once. */
static void widen_tile(attend_scratch *s, const token_ptr *src, int32_t lo, int32_t hi,
                       int32_t head_dim, pkv_dtype dtype, const token_ptr *next, int32_t lines) {
  const int32_t stride = row_stride(head_dim);
  for (int32_t j = lo; j < hi; j++) {
    for (int32_t i = 0; next != NULL && i < lines; i++)
      vf_prefetch(next[j] + i * 64);
    float *dst = s->tile + j * stride;
    s->rows[j] = (token_ptr)dst;
    if (dtype == PKV_DTYPE_F32) widen_row(dst, src[j], head_dim, PKV_DTYPE_F32);
    if (dtype == PKV_DTYPE_F16) widen_row(dst, src[j], head_dim, PKV_DTYPE_F16);
    if (dtype == PKV_DTYPE_BF16) widen_row(dst, src[j], head_dim, PKV_DTYPE_BF16);
    if (dtype == PKV_DTYPE_FP8_E4M3) widen_row(dst, src[j], head_dim, PKV_DTYPE_FP8_E4M3);
  }
}

/* ---------------------------------------------------------------------------------- softmax */

/*
 * Soft cap c: a score s in base 2 becomes c log2(e) tanh(s / (c log2(e))). With e = exp(-2 x),
 * tanh(x) = (1 - e) / (1 + e), and 1 - e is computed as a whole: a large cap changes small scores
 * by nothing. Caps beyond the normal range of 2 / c or of c log2(e) act as the nearest one within.
 */
static void cap_scores(float *scores, int32_t lo, int32_t hi, float cap) {
  const float c = cap < 0x1p126f ? cap : 0x1p126f;
  const vf two = vf_set1(2.0f), minus = vf_set1(-1.0f), top = vf_set1(c * (float)LOG2_E);
  const vf by = vf_set1(c > 0x1p-126f ? 2.0f / c : 0x1p127f);
  for (int32_t j = lo; j < hi; j += VL) {
    const vf x = vf_mul(vf_load(scores + j), by);
    const vf e = exp2_minus_one(vf_mul(vf_abs(x), minus));
    const vf tanh = vf_div(vf_mul(e, minus), vf_add(two, e));
    vf_store(scores + j, vf_mul(vf_copysign(tanh, x), top));
  }
}

static int holds_nan(const float *scores, int32_t lo, int32_t hi) {
  for (int32_t j = lo; j < hi; j++)
    if (isnan(scores[j])) return 1;
  return 0;
}

/*
 * Scores [lo, hi) of one row become weights 2^(score - m); m and l move on, acc is rescaled where m
 * moved. Returns 0 when every score is -inf: the state stays as it was.
 */
static int softmax_row(attend_scratch *s, int32_t r, int32_t lo, int32_t hi, int32_t stride,
                       float cap) {
  float *scores = s->scores + r * TILE;
  const int32_t from = lo / VL * VL, to = (hi + VL - 1) / VL * VL;
  if (cap > 0.0f) cap_scores(scores, from, to, cap);
  for (int32_t j = from; j < lo; j++)
    scores[j] = -INFINITY;
  for (int32_t j = hi; j < to; j++)
    scores[j] = -INFINITY;
  vf top = vf_set1(-INFINITY);
  for (int32_t j = from; j < to; j += VL)
    top = vf_max(top, vf_load(scores + j));
  float tile_m = vf_top(top);
  const float old_m = s->m[r];
  /* A maximum may lose NaN, whose row must not pass for one that saw nothing. */
  if (tile_m == -INFINITY && holds_nan(scores, lo, hi)) tile_m = NAN;
  if (tile_m == -INFINITY) return 0;
  const float m = old_m > tile_m ? old_m : tile_m;
  vf sum = vf_zero();
  const vf minus_m = vf_set1(-m);
  for (int32_t j = from; j < to; j += VL) {
    const vf w = exp2_nonpositive(vf_add(vf_load(scores + j), minus_m));
    vf_store(scores + j, w);
    sum = vf_add(sum, w);
  }
  const float keep = old_m == m ? 1.0f : old_m == -INFINITY ? 0.0f : exp2_one(old_m - m);
  s->m[r] = m;
  s->l[r] = s->l[r] * keep + vf_sum(sum);
  if (keep != 1.0f) {
    float *acc = s->acc + r * stride;
    const vf factor = vf_set1(keep);
    for (int32_t c = 0; c < stride; c += VL)
      vf_store(acc + c, vf_mul(vf_load(acc + c), factor));
  }
  return 1;
}

/* ---------------------------------------------------------------------------------- tiles */

/* Pointers to K and V of tokens [first + lo, first + hi): one division, then page by page. */
static void find_tokens(token_ptr *k, token_ptr *v, const pkv_cpu_block *b, int64_t first,
                        int32_t lo, int32_t hi) {
  const pkv_cache *c = &b->p->cache;
  const int64_t bytes = (int64_t)pkv_dtype_bytes(c->dtype);
  const int64_t k_step = c->k_token_stride * bytes, v_step = c->v_token_stride * bytes;
  const token_ptr k0 = (token_ptr)c->k + b->kv_head * c->k_head_stride * bytes;
  const token_ptr v0 = (token_ptr)c->v + b->kv_head * c->v_head_stride * bytes;
  int64_t index = (first + lo) / c->page_tokens;
  int64_t offset = (first + lo) % c->page_tokens;
  for (int32_t j = lo; j < hi; index++, offset = 0) {
    const int64_t page = b->pages[index];
    PKV_ASSERT(page >= 0 && page < c->pages);
    token_ptr kp = k0 + page * c->k_page_stride * bytes + offset * k_step;
    token_ptr vp = v0 + page * c->v_page_stride * bytes + offset * v_step;
    int32_t run = (int32_t)(c->page_tokens - offset);
    if (run > hi - j) run = hi - j;
    for (int32_t i = 0; i < run; i++, j++) {
      k[j] = kp + i * k_step;
      v[j] = vp + i * v_step;
    }
  }
}

static int32_t clamp_to_tile(int64_t x) {
  return (int32_t)(x < 0 ? 0 : x > TILE ? TILE : x);
}

/* Groups the block's rows by what they see of tokens [first, first + count); returns the runs. */
static int32_t find_runs(row_run *runs, const pkv_cpu_block *b, int64_t first, int32_t count) {
  int32_t n = 0;
  for (int32_t r = 0; r < b->rows;) {
    int32_t rows = b->group - (b->first + r) % b->group;
    if (rows > b->rows - r) rows = b->rows - r;
    int64_t lo64, hi64;
    pkv_cpu_visible(b, r, &lo64, &hi64);
    const int32_t lo = clamp_to_tile(lo64 - first);
    int32_t hi = clamp_to_tile(hi64 - first);
    if (hi > count) hi = count;
    if (lo < hi) {
      if (n > 0 && runs[n - 1].first + runs[n - 1].rows == r && runs[n - 1].lo == lo &&
          runs[n - 1].hi == hi) {
        runs[n - 1].rows += rows;
      } else {
        runs[n++] = (row_run){r, rows, lo, hi};
      }
    }
    r += rows;
  }
  return n;
}

/* Tokens [some_lo, some_hi) from the first to the last that some state sees, and those that all
   see. */
typedef struct block_span {
  int64_t some_lo, some_hi, all_lo, all_hi;
} block_span;

static block_span find_span(const pkv_cpu_block *b) {
  block_span s = {INT64_MAX, 0, 0, INT64_MAX};
  for (int32_t r = 0; r < b->rows; r += b->group - (b->first + r) % b->group) {
    int64_t lo, hi;
    pkv_cpu_visible(b, r, &lo, &hi);
    if (lo < hi && lo < s.some_lo) s.some_lo = lo;
    if (hi > s.some_hi) s.some_hi = hi;
    if (lo > s.all_lo) s.all_lo = lo;
    if (hi < s.all_hi) s.all_hi = hi;
  }
  return s;
}

/* Tokens of the tile that some row sees, and their pointers. */
static void tile_span(const row_run *runs, int32_t n, int32_t *lo, int32_t *hi) {
  *lo = TILE;
  *hi = 0;
  for (int32_t i = 0; i < n; i++) {
    if (runs[i].lo < *lo) *lo = runs[i].lo;
    if (runs[i].hi > *hi) *hi = runs[i].hi;
  }
}

typedef struct tile_work {
  const token_ptr *k, *v, *k_next, *v_next; /* NULL at the last tile */
  int32_t runs, lo, hi, lines;
} tile_work;

/* next: pointers of the next tile's V, of which `from` are fetched already; NULL = none. */
static void tile_values(attend_scratch *s, const pkv_cpu_block *b, const row_run *run,
                        const token_ptr *v, pkv_dtype dtype, const token_ptr *next, int32_t from,
                        int32_t lines) {
  const int32_t head_dim = b->p->cache.head_dim, stride = row_stride(head_dim);
  int32_t done = 0;
  while (done < run->rows) {
    const int32_t r = run->first + done, rows = kernel_rows(run->rows - done);
    pv_kernels[dtype][rows - 1](s->acc + r * stride, s->scores + r * TILE, stride, v, run->lo,
                                run->hi, head_dim, done == 0 ? next : NULL, from, lines);
    done += rows;
  }
}

static void tile_scores(attend_scratch *s, const pkv_cpu_block *b, const row_run *run,
                        const token_ptr *k, pkv_dtype dtype, const token_ptr *next, int32_t lines) {
  const int32_t head_dim = b->p->cache.head_dim, stride = row_stride(head_dim);
  int32_t done = 0;
  while (done < run->rows) {
    const int32_t r = run->first + done, rows = kernel_rows(run->rows - done);
    qk_kernels[dtype][rows - 1](s->scores + r * TILE, s->q + r * stride, stride, k, run->lo,
                                run->hi, head_dim, done == 0 ? next : NULL, lines);
    done += rows;
  }
}

static void attend_tile(attend_scratch *s, const pkv_cpu_block *b, const tile_work *w) {
  const int32_t head_dim = b->p->cache.head_dim, stride = row_stride(head_dim);
  const pkv_dtype stored = b->p->cache.dtype;
  const int widen = b->rows > 4 && CONVERTS_SLOWLY(stored);
  const pkv_dtype dtype = widen ? PKV_DTYPE_F32 : stored;
  const token_ptr *k = w->k, *v = w->v;
  if (widen) {
    widen_tile(s, w->k, w->lo, w->hi, head_dim, stored, w->v, w->lines);
    k = s->rows;
  }
  for (int32_t i = 0; i < w->runs; i++)
    tile_scores(s, b, &s->runs[i], k, dtype, widen ? NULL : w->k_next, w->lines);
  if (widen) {
    widen_tile(s, w->v, w->lo, w->hi, head_dim, stored, w->k_next, w->lines);
    v = s->rows;
  }
  const token_ptr *next = widen ? NULL : w->v_next;
  int32_t fetched = 0; /* of the next tile's values: two a row during the softmax */
  for (int32_t i = 0; i < w->runs; i++) {
    const row_run *run = &s->runs[i];
    int32_t live = 0;
    for (int32_t r = run->first; r < run->first + run->rows; r++) {
      for (int32_t to = fetched + 2; next != NULL && fetched < to && fetched < TILE; fetched++)
        for (int32_t line = 0; line < w->lines; line++)
          vf_prefetch(next[fetched] + line * 64);
      const int moved = softmax_row(s, r, run->lo, run->hi, stride, b->p->soft_cap);
      /* Weights of a row that saw nothing: zero, so that the kernel may take it along. */
      if (!moved) memset(s->scores + r * TILE, 0, TILE * sizeof(float));
      live += moved;
    }
    if (live > 0) tile_values(s, b, run, v, dtype, next, fetched, w->lines);
  }
}

#ifdef WIDE_TOKENS
#include "backend/cpu/attend_wide_impl.h"
#else
#define wide_tile          attend_tile
#define turn_queries(s, b) ((void)0)
#define wide_begin(s, b)   ((void)0)
#define wide_end(s, b)     ((void)0)
#endif

static void attend_attend(void *scratch, const pkv_cpu_block *b, int64_t begin, int64_t end) {
  attend_scratch *s = scratch;
  const pkv_cache *c = &b->p->cache;
  const int32_t stride = row_stride(c->head_dim);
  const int32_t lines = (c->head_dim * (int32_t)pkv_dtype_bytes(c->dtype) + 63) / 64;
  for (int32_t r = 0; r < b->rows || r % VL != 0; r++) {
    s->m[r] = -INFINITY;
    s->l[r] = 0.0f;
  }
  const int wide = b->rows >= WIDE_FROM;
  if (wide)
    wide_begin(s, b);
  else
    memset(s->acc, 0, (size_t)b->rows * (size_t)stride * sizeof(float));
  const block_span span = find_span(b);
  if (end > span.some_hi) end = span.some_hi;
  int64_t ahead = b->until > end ? b->until : end; /* may be fetched, if it lies in the pages */
  if (ahead > span.some_hi) ahead = span.some_hi;
  int64_t first = begin;
  if (span.some_lo > begin) first += (span.some_lo - begin) / TILE * TILE;
  int at = 0, found = 0; /* found: this tile's pointers are there already */
  for (; first < end; first += TILE, at ^= 1) {
    const int32_t count = (int32_t)(end - first < TILE ? end - first : TILE);
    const int64_t then = first + TILE;
    tile_work w = {s->k[at], s->v[at], NULL, NULL, 0, 0, 0, lines};
    if (first >= span.all_lo && first + count <= span.all_hi) {
      s->runs[0] = (row_run){0, b->rows, 0, count};
      w.runs = 1;
    } else {
      w.runs = find_runs(s->runs, b, first, count);
    }
    tile_span(s->runs, w.runs, &w.lo, &w.hi);
    if (!found && w.runs > 0) find_tokens(s->k[at], s->v[at], b, first, w.lo, w.hi);
    found = 0;
    if (then < ahead && w.runs > 0) {
      const int32_t more = (int32_t)(ahead - then < TILE ? ahead - then : TILE);
      find_tokens(s->k[at ^ 1], s->v[at ^ 1], b, then, 0, more);
      for (int32_t j = more; j < TILE; j++) {
        s->k[at ^ 1][j] = s->k[at ^ 1][more - 1];
        s->v[at ^ 1][j] = s->v[at ^ 1][more - 1];
      }
      w.k_next = s->k[at ^ 1];
      w.v_next = s->v[at ^ 1];
      found = 1;
    }
    if (w.runs > 0) (wide ? wide_tile : attend_tile)(s, b, &w);
  }
  if (wide) wide_end(s, b);
}

static void attend_begin(void *scratch, const pkv_cpu_block *b) {
  attend_scratch *s = scratch;
  const pkv_attention_params *p = b->p;
  const int32_t d = p->cache.head_dim, stride = row_stride(d);
  float factor = p->scale * pkv_cpu_k_scale(b) * (float)LOG2_E;
  if (p->cache.dtype == PKV_DTYPE_FP8_E4M3) factor *= VF_FP8_FACTOR;
  const vf scale = vf_set1(factor);
  const int64_t bytes = (int64_t)pkv_dtype_bytes(p->q_dtype);
  for (int32_t r = 0; r < b->rows; r++) {
    const int64_t at =
        pkv_cpu_query_token(b, r) * p->q_token_stride + pkv_cpu_query_head(b, r) * p->q_head_stride;
    const token_ptr src = (token_ptr)p->q + at * bytes;
    float *q = s->q + r * stride;
    if (p->q_dtype == PKV_DTYPE_F32) memcpy(q, src, (size_t)d * sizeof(float));
    if (p->q_dtype == PKV_DTYPE_F16) widen_row(q, src, d, PKV_DTYPE_F16);
    if (p->q_dtype == PKV_DTYPE_BF16) widen_row(q, src, d, PKV_DTYPE_BF16);
    for (int32_t c = d; c < stride; c++)
      q[c] = 0.0f;
    for (int32_t c = 0; c < stride; c += VL)
      vf_store(q + c, vf_mul(vf_load(q + c), scale));
  }
  if (b->rows >= WIDE_FROM) turn_queries(s, b);
}

/* ---------------------------------------------------------------------------------- folding */

static void attend_fold_begin(void *scratch, const pkv_cpu_block *b) {
  attend_scratch *s = scratch;
  const int32_t stride = row_stride(b->p->cache.head_dim);
  for (int32_t r = 0; r < b->rows; r++) {
    s->total_m[r] = -INFINITY;
    s->total_l[r] = 0.0f;
  }
  memset(s->total, 0, (size_t)b->rows * (size_t)stride * sizeof(float));
}

/* total := total (+) (m, l, acc); a neutral state changes nothing, a neutral total is replaced. */
static void fold_row(attend_scratch *s, int32_t r, float m, float l, const float *acc, int32_t d) {
  const int32_t stride = row_stride(d);
  float *total = s->total + r * stride;
  const float old = s->total_m[r];
  if (m == -INFINITY) return;
  if (old == -INFINITY) {
    s->total_m[r] = m;
    s->total_l[r] = l;
    memcpy(total, acc, (size_t)d * sizeof(float));
    return;
  }
  const float top = old > m ? old : m;
  const float a = exp2_one(old - top), w = exp2_one(m - top);
  const vf keep = vf_set1(a), weight = vf_set1(w);
  s->total_m[r] = top;
  s->total_l[r] = s->total_l[r] * a + l * w;
  int32_t c = 0;
  for (; c + VL <= d; c += VL)
    vf_store(total + c, vf_fma(vf_load(acc + c), weight, vf_mul(vf_load(total + c), keep)));
#if VL == 16
  if (c < d)
    vf_store(total + c, vf_fma(vf_load_half(acc + c), weight, vf_mul(vf_load(total + c), keep)));
#endif
}

static void attend_fold_own(void *scratch, const pkv_cpu_block *b) {
  attend_scratch *s = scratch;
  const int32_t d = b->p->cache.head_dim, stride = row_stride(d);
  for (int32_t r = 0; r < b->rows; r++)
    fold_row(s, r, s->m[r], s->l[r], s->acc + r * stride, d);
}

static void attend_fold_slot(void *scratch, const pkv_cpu_block *b, pkv_cpu_states slot) {
  const int32_t d = b->p->cache.head_dim;
  for (int32_t r = 0; r < b->rows; r++)
    fold_row(scratch, r, slot.m[r], slot.l[r], slot.acc + (int64_t)r * d, d);
}

static void attend_save(void *scratch, const pkv_cpu_block *b, int32_t from, int32_t count,
                        pkv_cpu_states slot) {
  attend_scratch *s = scratch;
  const int32_t d = b->p->cache.head_dim, stride = row_stride(d);
  memcpy(slot.m, s->m + from, (size_t)count * sizeof(float));
  memcpy(slot.l, s->l + from, (size_t)count * sizeof(float));
  for (int32_t r = 0; r < count; r++)
    memcpy(slot.acc + (int64_t)r * d, s->acc + (from + r) * stride, (size_t)d * sizeof(float));
}

/* ---------------------------------------------------------------------------------- results */

static void attend_convert(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                           float divisor) {
  int64_t i = 0;
  if (dtype != PKV_DTYPE_FP8_E4M3) i = vf_narrow(dst, dtype, src, count, divisor);
  for (; i < count; i++)
    pkv_store(dst, dtype, i, src[i] / divisor);
}

/* sinks join the denominator here: after all tokens, once. */
static void store_rows(attend_scratch *s, const pkv_cpu_block *b, const float *ms, const float *ls,
                       const float *accs) {
  const pkv_attention_params *p = b->p;
  const int32_t d = p->cache.head_dim, stride = row_stride(d);
  const int64_t bytes = (int64_t)pkv_dtype_bytes(p->out_dtype);
  float v_scale = pkv_cpu_v_scale(b);
  if (p->cache.dtype == PKV_DTYPE_FP8_E4M3) v_scale *= VF_FP8_FACTOR;
  for (int32_t r = 0; r < b->rows; r++) {
    const int64_t token = pkv_cpu_query_token(b, r);
    const int32_t head = pkv_cpu_query_head(b, r);
    const int64_t at = token * p->out_token_stride + head * p->out_head_stride;
    const int empty = ms[r] == -INFINITY;
    float m = ms[r], l = ls[r], keep = 1.0f;
    if (!empty && p->sinks != NULL) {
      const float sink = p->sinks[head] * (float)LOG2_E;
      const float top = sink > m ? sink : m;
      keep = exp2_one(m - top);
      l = l * keep + exp2_one(sink - top);
      m = top;
    }
    const vf factor = vf_set1(empty ? 0.0f : keep * v_scale / l);
    const float *acc = accs + r * stride;
    float *row = s->scores; /* free by now */
    for (int32_t c = 0; c < stride; c += VL)
      vf_store(row + c, empty ? vf_zero() : vf_mul(vf_load(acc + c), factor));
    attend_convert((unsigned char *)p->out + at * bytes, p->out_dtype, row, d, 1.0f);
    if (p->lse == NULL) continue;
    const float log2_sum = empty ? -INFINITY : m + log2f(l);
    p->lse[token * p->lse_token_stride + head] =
        p->lse_base2 || empty ? log2_sum : log2_sum * (float)LN_2;
  }
}

static void attend_store_own(void *scratch, const pkv_cpu_block *b) {
  attend_scratch *s = scratch;
  store_rows(s, b, s->m, s->l, s->acc);
}

static void attend_store_total(void *scratch, const pkv_cpu_block *b) {
  attend_scratch *s = scratch;
  store_rows(s, b, s->total_m, s->total_l, s->total);
}

static uint32_t attend_touch(const void *data, size_t bytes) {
  const unsigned char *at = data;
  uint32_t sum = 0;
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t word;
    memcpy(&word, at + i, 4);
    sum += word;
  }
  return sum;
}

const pkv_cpu_isa_ops ATTEND_OPS = {
    .isa = ATTEND_ISA,
    .scratch_bytes = sizeof(attend_scratch),
    .begin = attend_begin,
    .attend = attend_attend,
    .fold_begin = attend_fold_begin,
    .fold_own = attend_fold_own,
    .fold_slot = attend_fold_slot,
    .save = attend_save,
    .store_own = attend_store_own,
    .store_total = attend_store_total,
    .convert = attend_convert,
    .touch = attend_touch,
};
