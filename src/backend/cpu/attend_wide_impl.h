/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles for blocks of many rows: included by attend_impl.h, with its vector operations and
 *   vf_transpose4(out, rows, at)  out[i] lane t = rows[t][at + i] of VL rows of floats, i = 0 .. 3
 *   vf_unequal(a, b)              a bit for each lane that does not compare equal
 *   WIDE_TOKENS                   tokens a step of the score kernel takes
 *   WIDE_CHUNKS                   vectors of the head dimension a step of the value kernel takes
 *
 * Lanes are query rows. Queries are turned over once a block, K and V become floats once a tile and
 * then serve all rows from the first-level cache: scores are broadcast K times queries, the softmax
 * has nothing to do across lanes, values are broadcast weights times V.
 *
 * Rows lie in *panels* of one to three vectors. Of a panel whose first row is r and which is w rows
 * wide: queries [stride, w] at turned + r * stride, scores, then weights [TILE, w] at
 * scores + r * TILE. Rows of a panel beyond the block's last are zero queries whose results nobody
 * reads.
 *
 * Bits. In batch-invariant mode those of the narrow kernels: partial sum l of a score takes
 * dimensions l, l + VL, ..., and the partial sums meet in the tree of vf_sum; everything else is in
 * the narrow order anyway. Without that mode a score simply adds one dimension after the other,
 * which needs no tree.
 */

#define UNROLL_LOOP _Pragma("GCC unroll 4")
#define UNROLL_ALL  _Pragma("GCC unroll 16")
#define VALUE_ROWS  6 /* query rows a step of the value kernel takes */

/* Vectors of the next panel when `left` remain: 3, but never a lonely one after others. */
static int32_t panel_vectors(int32_t left) {
  return left <= PANEL_VECTORS ? left : left < 2 * PANEL_VECTORS ? (left + 1) / 2 : PANEL_VECTORS;
}

/* Width of the panel that starts at row r. */
static int32_t panel_width(const pkv_cpu_block *b, int32_t r) {
  return panel_vectors((b->rows - r + VL - 1) / VL) * VL;
}

/* ---------------------------------------------------------------------------------- kernels */

/*
 * Values and their sums lie in stripes of WIDE_CHUNKS vectors of the head dimension, those that
 * are left over one by one: so a step of the value kernel reads and writes whole runs.
 */
INLINE int32_t stripe_start(int32_t stride, int32_t c) {
  const int32_t step = WIDE_CHUNKS * VL;
  return c < stride / step * step ? c / step * step : c / VL * VL;
}
INLINE int32_t stripe_width(int32_t stride, int32_t c) {
  const int32_t step = WIDE_CHUNKS * VL;
  return c < stride / step * step ? step : VL;
}
/* Where element c of row r lies; `most` rows there are at most. */
INLINE int32_t stripe_at(int32_t stride, int32_t most, int32_t r, int32_t c) {
  const int32_t start = stripe_start(stride, c);
  return start * most + r * stripe_width(stride, c) + (c - start);
}
INLINE int32_t sum_at(int32_t stride, int32_t r, int32_t c) {
  return stripe_at(stride, PKV_CPU_BLOCK_ROWS, r, c);
}

/* Which partial sum is leaf `leaf` of vf_sum's tree, whose leaves are added two by two. */
INLINE int32_t tree_lane(int32_t leaf) {
  return VL == 16 ? (leaf >> 1) + (leaf & 1) * 8 : leaf;
}

typedef vf wide_sums[WIDE_TOKENS][PANEL_VECTORS];

/* sums := products of dimensions first, first + step, ..; keys [WIDE_TOKENS, stride]. */
INLINE void wide_dot(wide_sums sums, const float *turned, const float *keys, int32_t stride,
                     int32_t first, int32_t step, const int vectors) {
  UNROLL
  for (int t = 0; t < WIDE_TOKENS; t++) {
    UNROLL
    for (int v = 0; v < vectors; v++)
      sums[t][v] = vf_zero();
  }
  UNROLL_LOOP
  for (int32_t c = first; c < stride; c += step) {
    vf query[PANEL_VECTORS];
    UNROLL
    for (int v = 0; v < vectors; v++)
      query[v] = vf_load(turned + (c * vectors + v) * VL);
    UNROLL
    for (int t = 0; t < WIDE_TOKENS; t++) {
      const vf key = vf_set1(keys[t * stride + c]);
      UNROLL
      for (int v = 0; v < vectors; v++)
        sums[t][v] = vf_fma(query[v], key, sums[t][v]);
    }
  }
}

INLINE void wide_put(float *to, wide_sums sums, const int vectors) {
  UNROLL
  for (int t = 0; t < WIDE_TOKENS; t++) {
    UNROLL
    for (int v = 0; v < vectors; v++)
      vf_store(to + (t * vectors + v) * VL, sums[t][v]);
  }
}

/* Scores [WIDE_TOKENS, width] of a panel. */
INLINE void wide_scores(float *scores, const float *turned, const float *keys, int32_t stride,
                        const int vectors) {
  wide_sums sums;
  wide_dot(sums, turned, keys, stride, 0, 1, vectors);
  wide_put(scores, sums, vectors);
}

/* Two leaves of the tree for half the tokens: as many sums as wide_dot has. */
typedef vf wide_pair[WIDE_TOKENS / 2][PANEL_VECTORS];

INLINE void wide_dot_pair(wide_pair even, wide_pair odd, const float *turned, const float *keys,
                          int32_t stride, int32_t first, int32_t second, const int vectors) {
  UNROLL
  for (int t = 0; t < WIDE_TOKENS / 2; t++) {
    UNROLL
    for (int v = 0; v < vectors; v++)
      even[t][v] = odd[t][v] = vf_zero();
  }
  UNROLL_LOOP
  for (int32_t c = 0; c < stride; c += VL) {
    UNROLL
    for (int leaf = 0; leaf < 2; leaf++) {
      const int32_t at = c + (leaf == 0 ? first : second);
      vf(*const sums)[PANEL_VECTORS] = leaf == 0 ? even : odd;
      vf query[PANEL_VECTORS];
      UNROLL
      for (int v = 0; v < vectors; v++)
        query[v] = vf_load(turned + (at * vectors + v) * VL);
      UNROLL
      for (int t = 0; t < WIDE_TOKENS / 2; t++) {
        const vf key = vf_set1(keys[t * stride + at]);
        UNROLL
        for (int v = 0; v < vectors; v++)
          sums[t][v] = vf_fma(query[v], key, sums[t][v]);
      }
    }
  }
}

/*
 * The same in the order of the narrow kernels. The tree is climbed as a binary counter of pairs of
 * leaves: held[n], HELD floats each, waits for its neighbour of 2^n pairs.
 */
INLINE void wide_tree(float *scores, const float *turned, const float *keys, int32_t stride,
                      float *held, const int vectors) {
  for (int32_t pair = 0; pair < VL / 2; pair++) {
    wide_pair sums, odd;
    wide_dot_pair(sums, odd, turned, keys, stride, tree_lane(2 * pair), tree_lane(2 * pair + 1),
                  vectors);
    UNROLL
    for (int t = 0; t < WIDE_TOKENS / 2; t++) {
      UNROLL
      for (int v = 0; v < vectors; v++)
        sums[t][v] = vf_add(sums[t][v], odd[t][v]);
    }
    int level = 0;
    for (; level < LEVELS - 1 && (pair >> level & 1) != 0; level++) {
      UNROLL
      for (int t = 0; t < WIDE_TOKENS / 2; t++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
          sums[t][v] = vf_add(vf_load(held + level * HELD + (t * vectors + v) * VL), sums[t][v]);
      }
    }
    float *const to = level == LEVELS - 1 ? scores : held + level * HELD;
    UNROLL
    for (int t = 0; t < WIDE_TOKENS / 2; t++) {
      UNROLL
      for (int v = 0; v < vectors; v++)
        vf_store(to + (t * vectors + v) * VL, sums[t][v]);
    }
  }
}

/* sums[r] += sum_j p[j][r] v_j for `chunks` vectors; sums [rows, chunks * VL], p [TILE, width],
   values [TILE, chunks * VL]. */
INLINE void wide_values(float *sums, const float *p, int32_t width, const float *values, int32_t lo,
                        int32_t hi, const int rows, const int chunks) {
  vf sum[VALUE_ROWS][WIDE_CHUNKS];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int i = 0; i < chunks; i++)
      sum[r][i] = vf_load(sums + (r * chunks + i) * VL);
  }
  UNROLL_LOOP
  for (int32_t j = lo; j < hi; j++) {
    vf value[WIDE_CHUNKS];
    UNROLL
    for (int i = 0; i < chunks; i++)
      value[i] = vf_load(values + (j * chunks + i) * VL);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const vf weight = vf_set1(p[j * width + r]);
      UNROLL
      for (int i = 0; i < chunks; i++)
        sum[r][i] = vf_fma(weight, value[i], sum[r][i]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int i = 0; i < chunks; i++)
      vf_store(sums + (r * chunks + i) * VL, sum[r][i]);
  }
}

typedef void (*wide_scores_fn)(float *scores, const float *turned, const float *keys,
                               int32_t stride, float *held);
typedef void (*wide_values_fn)(float *sums, const float *p, int32_t width, const float *values,
                               int32_t lo, int32_t hi);

#define SCORE_KERNELS(vectors)                                                                     \
  static void wide_scores_##vectors(float *scores, const float *turned, const float *keys,         \
                                    int32_t stride, float *held) {                                 \
    (void)held;                                                                                    \
    wide_scores(scores, turned, keys, stride, vectors);                                            \
  }                                                                                                \
  static void wide_tree_##vectors(float *scores, const float *turned, const float *keys,           \
                                  int32_t stride, float *held) {                                   \
    wide_tree(scores, turned, keys, stride, held, vectors);                                        \
    wide_tree(scores + WIDE_TOKENS / 2 * vectors * VL, turned, keys + WIDE_TOKENS / 2 * stride,    \
              stride, held, vectors);                                                              \
  }
#define VALUE_KERNELS(rows)                                                                        \
  static void wide_value_##rows(float *sums, const float *p, int32_t width, const float *values,   \
                                int32_t lo, int32_t hi) {                                          \
    wide_values(sums, p, width, values, lo, hi, rows, 1);                                          \
  }                                                                                                \
  static void wide_values_##rows(float *sums, const float *p, int32_t width, const float *values,  \
                                 int32_t lo, int32_t hi) {                                         \
    wide_values(sums, p, width, values, lo, hi, rows, WIDE_CHUNKS);                                \
  }

SCORE_KERNELS(1)
SCORE_KERNELS(2)
#if PANEL_VECTORS == 3
SCORE_KERNELS(3)
#endif

VALUE_KERNELS(1)
VALUE_KERNELS(2)
VALUE_KERNELS(3)
VALUE_KERNELS(4)
VALUE_KERNELS(5)
VALUE_KERNELS(6)

/* [batch-invariant][vectors - 1] */
static const wide_scores_fn wide_scores_of[2][PANEL_VECTORS] = {
#if PANEL_VECTORS == 3
    {wide_scores_1, wide_scores_2, wide_scores_3},
    {wide_tree_1, wide_tree_2, wide_tree_3},
#else
    {wide_scores_1, wide_scores_2},
    {wide_tree_1, wide_tree_2},
#endif
};
/* [0 = one vector, 1 = WIDE_CHUNKS of them][rows - 1] */
static const wide_values_fn wide_values_of[2][VALUE_ROWS] = {
    {wide_value_1, wide_value_2, wide_value_3, wide_value_4, wide_value_5, wide_value_6},
    {wide_values_1, wide_values_2, wide_values_3, wide_values_4, wide_values_5, wide_values_6}};

/* Rows the next value kernel takes of `left`: 6, or halves of what is left before the end. */
static int32_t value_rows(int32_t left) {
  return left <= VALUE_ROWS ? left : left < 2 * VALUE_ROWS ? (left + 1) / 2 : VALUE_ROWS;
}

/* Queries of the block, rows as lanes, panel by panel. */
static void turn_queries(attend_scratch *s, const pkv_cpu_block *b) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  for (int32_t first = 0, width; first < b->rows; first += width) {
    width = panel_width(b, first);
    for (int32_t r = first; r < first + width; r += VL) {
      const float *lanes[VL];
      for (int t = 0; t < VL; t++)
        lanes[t] = s->q + (r + t < b->rows ? r + t : b->rows - 1) * stride;
      float *out = s->turned + first * stride + (r - first);
      for (int32_t i = 0; i < stride; i += 4) {
        vf turned[4];
        vf_transpose4(turned, lanes, i);
        for (int k = 0; k < 4; k++)
          vf_store(out + (i + k) * width, turned[k]);
      }
    }
  }
}

/* ---------------------------------------------------------------------------------- softmax */

/* Sum of VL vectors as vf_sum adds the lanes of one. */
INLINE vf sum_parts(const vf part[VL]) {
  vf leaf[8];
  UNROLL
  for (int i = 0; i < 8; i++)
    leaf[i] = VL == 16 ? vf_add(part[i], part[(i + 8) % VL]) : part[i];
  return vf_add(vf_add(vf_add(leaf[0], leaf[1]), vf_add(leaf[2], leaf[3])),
                vf_add(vf_add(leaf[4], leaf[5]), vf_add(leaf[6], leaf[7])));
}

/* Sums of the rows r + i of which bit i is set, by the factors in keep. */
static void rescale_rows(attend_scratch *s, const pkv_cpu_block *b, int32_t r, vf keep,
                         uint32_t bits) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  float factors[VL];
  vf_store(factors, keep);
  for (; bits != 0; bits &= bits - 1) {
    const int32_t i = __builtin_ctz(bits);
    const vf factor = vf_set1(factors[i]);
    for (int32_t c = 0; c < stride; c += VL) {
      float *at = s->sums + sum_at(stride, r + i, c);
      vf_store(at, vf_mul(vf_load(at), factor));
    }
  }
}

/* The maximum may have lost NaN, whose row must not pass for one that saw nothing. */
static void keep_nan(attend_scratch *s, int32_t r) {
  for (int32_t i = r; i < r + VL; i++)
    if (s->m[i] == -INFINITY && isnan(s->l[i])) s->m[i] = NAN;
}

/* Scores [lo, hi) of rows [r, r + VL), `width` apart, become weights; m, l and acc move on. */
static void softmax_rows(attend_scratch *s, const pkv_cpu_block *b, int32_t r, float *scores,
                         int32_t width, int32_t lo, int32_t hi) {
  vf tops[4], part[VL];
  for (int i = 0; i < 4; i++)
    tops[i] = vf_set1(-INFINITY);
  int32_t j0 = lo;
  for (; j0 + 4 <= hi; j0 += 4) {
    UNROLL
    for (int i = 0; i < 4; i++)
      tops[i] = vf_max(tops[i], vf_load(scores + (j0 + i) * width));
  }
  for (; j0 < hi; j0++)
    tops[0] = vf_max(tops[0], vf_load(scores + j0 * width));
  const vf top = vf_max(vf_max(tops[0], tops[1]), vf_max(tops[2], tops[3]));
  const vf old = vf_load(s->m + r), m = vf_max(old, top);
  const vf from = vf_max(vf_set1(-FLT_MAX), m); /* -inf less -inf is no number */
  UNROLL_ALL
  for (int i = 0; i < VL; i++)
    part[i] = vf_zero();
  UNROLL_LOOP
  for (int32_t j = lo; j < hi; j++) {
    const vf w = exp2_nonpositive(vf_sub(vf_load(scores + j * width), from));
    vf_store(scores + j * width, w);
    part[j & (VL - 1)] = vf_add(part[j & (VL - 1)], w);
  }
  const vf keep = exp2_nonpositive(vf_sub(old, from));
  vf_store(s->m + r, m);
  vf_store(s->l + r, vf_add(vf_mul(vf_load(s->l + r), keep), sum_parts(part)));
  rescale_rows(s, b, r, keep, vf_unequal(keep, vf_set1(1.0f)));
  if (vf_unequal(from, m) != 0) keep_nan(s, r);
}

/* ---------------------------------------------------------------------------------- tiles */

/* Fetches tokens [at, end) of a tile, an even share before each of `calls` kernel calls. */
typedef struct wide_fetch {
  const token_ptr *next; /* NULL = none */
  int32_t at, end, share, lines;
} wide_fetch;

static wide_fetch wide_fetch_of(const token_ptr *next, int32_t begin, int32_t end, int32_t calls,
                                int32_t lines) {
  return (wide_fetch){next, begin, end, (end - begin + calls - 1) / calls, lines};
}

static void wide_fetch_more(wide_fetch *f) {
  if (f->next == NULL) return;
  for (int32_t i = 0; i < f->share && f->at < f->end; i++, f->at++)
    for (int32_t line = 0; line < f->lines; line++)
      vf_prefetch(f->next[f->at] + line * 64);
}

/* The tile's tokens that a row does not see, as scores; rows that see none of them included. */
static void hide_scores(attend_scratch *s, const pkv_cpu_block *b, const tile_work *w,
                        int32_t first, int32_t width) {
  int32_t i = 0;
  for (int32_t r = first; r < first + width && r < b->rows; r++) {
    while (i < w->runs && s->runs[i].first + s->runs[i].rows <= r)
      i++;
    const int seen = i < w->runs && s->runs[i].first <= r;
    const int32_t lo = seen ? s->runs[i].lo : w->hi, hi = seen ? s->runs[i].hi : w->hi;
    float *scores = s->scores + first * TILE + (r - first);
    for (int32_t j = w->lo; j < w->hi; j++)
      if (j < lo || j >= hi) scores[j * width] = -INFINITY;
  }
}

static void wide_tile_scores(attend_scratch *s, const pkv_cpu_block *b, const tile_work *w) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  const int invariant = (b->p->plan->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  const int even = w->runs == 1 && s->runs[0].rows == b->rows;
  const int32_t panels = (b->rows + PANEL_VECTORS * VL - 1) / (PANEL_VECTORS * VL);
  wide_fetch fetch = wide_fetch_of(w->v, w->lo, w->hi, panels * (TILE / WIDE_TOKENS), w->lines);
  for (int32_t first = 0, width; first < b->rows; first += width) {
    width = panel_width(b, first);
    float *scores = s->scores + first * TILE;
    for (int32_t j = w->lo / WIDE_TOKENS * WIDE_TOKENS; j < w->hi; j += WIDE_TOKENS) {
      wide_fetch_more(&fetch);
      wide_scores_of[invariant][width / VL - 1](scores + j * width, s->turned + first * stride,
                                                s->tile + j * stride, stride, s->held);
    }
    if (b->p->soft_cap > 0.0f) cap_scores(scores, w->lo * width, w->hi * width, b->p->soft_cap);
    if (!even) hide_scores(s, b, w, first, width);
    for (int32_t r = 0; r < width; r += VL)
      softmax_rows(s, b, first + r, scores + r, width, w->lo, w->hi);
  }
}

INLINE void widen_value(float *tile, token_ptr src, int32_t j, int32_t head_dim,
                        const pkv_dtype dtype) {
  const int64_t bytes = element_bytes(dtype);
  const int32_t stride = row_stride(head_dim), step = WIDE_CHUNKS * VL;
  int32_t c = 0;
  for (; c + step <= head_dim; c += step) {
    UNROLL
    for (int i = 0; i < WIDE_CHUNKS; i++)
      vf_store(tile + c * TILE + j * step + i * VL, vf_kv(dtype, src + (c + i * VL) * bytes));
  }
  for (; c + VL <= head_dim; c += VL)
    vf_store(tile + stripe_at(stride, TILE, j, c), vf_kv(dtype, src + c * bytes));
#if VL == 16
  if (c < head_dim)
    vf_store(tile + stripe_at(stride, TILE, j, c), vf_kv_half(dtype, src + c * bytes));
#endif
}

/* V of tokens [lo, hi), in stripes. */
static void widen_values(float *tile, const token_ptr *v, int32_t lo, int32_t hi, int32_t head_dim,
                         pkv_dtype dtype) {
  for (int32_t j = lo; j < hi; j++) {
    if (dtype == PKV_DTYPE_F32) widen_value(tile, v[j], j, head_dim, PKV_DTYPE_F32);
    if (dtype == PKV_DTYPE_F16) widen_value(tile, v[j], j, head_dim, PKV_DTYPE_F16);
    if (dtype == PKV_DTYPE_BF16) widen_value(tile, v[j], j, head_dim, PKV_DTYPE_BF16);
    if (dtype == PKV_DTYPE_FP8_E4M3) widen_value(tile, v[j], j, head_dim, PKV_DTYPE_FP8_E4M3);
  }
}

/* One stripe, which starts at c, for the rows of a run that lie in the panel [first, ..). */
static void stripe_values(attend_scratch *s, const pkv_cpu_block *b, const row_run *run,
                          int32_t first, int32_t c, wide_fetch *fetch) {
  const int32_t stride = row_stride(b->p->cache.head_dim), width = panel_width(b, first);
  const int many = stripe_width(stride, c) > VL;
  int32_t r = run->first > first ? run->first : first, end = run->first + run->rows;
  if (end > first + width) end = first + width;
  for (int32_t rows; r < end; r += rows) {
    rows = value_rows(end - r);
    wide_fetch_more(fetch);
    wide_values_of[many][rows - 1](s->sums + sum_at(stride, r, c),
                                   s->scores + first * TILE + (r - first), width,
                                   s->tile + c * TILE, run->lo, run->hi);
  }
}

static void wide_tile_values(attend_scratch *s, const pkv_cpu_block *b, const tile_work *w) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  const int32_t calls = (b->rows + VALUE_ROWS - 1) / VALUE_ROWS;
  wide_fetch fetch = wide_fetch_of(w->k_next, 0, TILE, calls, w->lines);
  for (int32_t c = 0; c < stride; c += stripe_width(stride, c))
    for (int32_t first = 0; first < b->rows; first += panel_width(b, first))
      for (int32_t i = 0; i < w->runs; i++)
        stripe_values(s, b, &s->runs[i], first, c, &fetch);
}

static void wide_tile(attend_scratch *s, const pkv_cpu_block *b, const tile_work *w) {
  const int32_t head_dim = b->p->cache.head_dim;
  const pkv_dtype dtype = b->p->cache.dtype;
  widen_tile(s, w->k, w->lo, w->hi, head_dim, dtype, NULL, 0);
  wide_tile_scores(s, b, w);
  widen_values(s->tile, w->v, w->lo, w->hi, head_dim, dtype);
  wide_tile_values(s, b, w);
}

static void wide_begin(attend_scratch *s, const pkv_cpu_block *b) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  memset(s->sums, 0, (size_t)PKV_CPU_BLOCK_ROWS * (size_t)stride * sizeof(float));
}

/* The sums, row by row. */
static void wide_end(attend_scratch *s, const pkv_cpu_block *b) {
  const int32_t stride = row_stride(b->p->cache.head_dim);
  for (int32_t r = 0; r < b->rows; r++)
    for (int32_t c = 0; c < stride; c += VL)
      vf_store(s->acc + r * stride + c, vf_load(s->sums + sum_at(stride, r, c)));
}
