/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One row of logits to a token, on the device: the choices of the engine's sampling.c, in its own
 * arithmetic. Weights are the same doubles; sums along sorted candidates are made one by one, in
 * that order, and are the same too. Sums over all tokens are made in parallel, and where a choice
 * depends on their last bits (1e-11 of the whole), once more one by one. So the token is always the
 * CPU's.
 *
 * A cluster of 8 CTAs of 512 threads a row, each an eighth of the tokens, read once a pass from L2;
 * clusters take rows in turn. Greedy: one pass. Temperature alone: sums of warps, then the warp
 * that holds the draw walks its tokens. top_k and top_p: tokens are counted in 256 bins of their
 * distance to the best; those of the first bins, up to 1,024, are gathered, sorted and walked by
 * the first CTA. Where that is not enough (a flat distribution), the places where a count or a sum
 * of weights ends are found by narrowing: counts and sums in 256 bins, then in 256 parts of the bin
 * that holds the place, until 1,024 tokens are left, which are sorted and walked. Only choices that
 * have to be made again sort all tokens in the scratch memory: milliseconds.
 */
#include <math_constants.h>

#include "backend/cuda/cluster.cuh"
#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/mma.cuh"

#define SPLIT    8
#define THREADS  512
#define WARPS    (THREADS / 32)
#define BEST     1024 /* candidates that are sorted in shared memory */
#define BINS     256  /* the last one: too far away to count */
#define SLOTS    16   /* clusters at a time */
#define CLOSE    1e-11
#define DIGITS   16    /* of a pass of the sort */
#define PER_UNIT 12.0f /* bins for a factor of e */
#define FAR      64.0  /* temperatures: what lies farther from the best weighs nothing */
#define FAR_BITS 40    /* of a place: distance to the best, and behind it ... */
#define ID_BITS  24    /* ... the id */
#define DIGIT    8

/* exp(x) for x <= 0: pkv_exp_negative, operation by operation. */
static __device__ __forceinline__ double step(double p, double r, double c) {
  return __dadd_rn(__dmul_rn(p, r), c);
}
static __device__ __forceinline__ double exp_negative(double x) {
  const double shift = 0x1.8p52;
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = __dadd_rn(__dmul_rn(clamped, 0x1.71547652b82fep0), shift);
  const double n = __dsub_rn(shifted, shift);
  const double r = __dsub_rn(__dsub_rn(clamped, __dmul_rn(n, 0x1.62e42fefa3800p-1)),
                             __dmul_rn(n, 0x1.ef35793c76730p-45));
  double p = 1.0 / 6227020800.0;
  p = step(p, r, 1.0 / 479001600.0);
  p = step(p, r, 1.0 / 39916800.0);
  p = step(p, r, 1.0 / 3628800.0);
  p = step(p, r, 1.0 / 362880.0);
  p = step(p, r, 1.0 / 40320.0);
  p = step(p, r, 1.0 / 5040.0);
  p = step(p, r, 1.0 / 720.0);
  p = step(p, r, 1.0 / 120.0);
  p = step(p, r, 1.0 / 24.0);
  p = step(p, r, 1.0 / 6.0);
  p = step(p, r, 0.5);
  p = step(p, r, 1.0);
  p = step(p, r, 1.0);
  const unsigned long long bits = (unsigned long long)__double_as_longlong(shifted) + 1023u;
  const double scale = __longlong_as_double((long long)(bits << 52));
  return x < -708.0 ? 0.0 : __dmul_rn(p, scale);
}

static __device__ __forceinline__ uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
/* pkv_hash_uniform. */
static __device__ double uniform_of(const pkv_dense_sample_row &s) {
  const uint64_t by = 0x9e3779b97f4a7c15ull;
  uint64_t z = mix64(s.seed + by);
  z = mix64(z + mix64(s.stream + 2 * by));
  z = mix64(z + mix64((uint64_t)s.position + 3 * by));
  return (double)(z >> 11) * 0x1p-53;
}

/* Keys order as logits do, of equal ones the lower id first: larger is better. 0 is none. */
static __device__ __forceinline__ uint64_t key_of(float logit, int id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f); /* -0 is 0 */
  const uint32_t up = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)up << 32 | (0xffffffffu - (uint32_t)id);
}
static __device__ __forceinline__ float logit_of(uint64_t key) {
  const uint32_t up = (uint32_t)(key >> 32);
  return __uint_as_float(up & 0x80000000u ? up & 0x7fffffffu : ~up);
}
static __device__ __forceinline__ int id_of(uint64_t key) {
  return (int)(0xffffffffu - (uint32_t)key);
}

/* What CTAs of a cluster show each other. */
struct shown {
  uint64_t best;
  double sums[WARPS];
  int bad, place;
  int bins[BINS];
  double weights[BINS];
  uint32_t low, high; /* of logits, as the upper half of keys */
  uint64_t key;       /* what narrowing found: the last token, the sum up to it, whether */
  double sum;
  int state;
};
struct sorted {
  uint64_t keys[BEST];
  double weights[BEST];
};
struct sample_shared {
  shown mine;
  uint64_t warp_best[WARPS];
  int warp_bad[WARPS];
  int totals[BINS], before[BINS]; /* of the cluster; of the ranks before this one */
  double sums[BINS];              /* of the cluster */
  int last_bin, count, place;
  int close, count_before; /* of the chosen bin */
  double sum_before, sum_all;
  union {
    sorted s;
    uint32_t digits[DIGITS][THREADS];
  };
};

/* In shared memory, so that functions that are not inlined reach it. */
struct row_state {
  const float *logits;
  int vocab, begin, end; /* tokens of this CTA */
  float max;
  double temperature;
  double per_unit; /* of distance, places */
  int clamped;     /* some lie so far away that their places are one */
  pkv_dense_sample_row s;
};

static __device__ __forceinline__ double weight(const row_state &r, float logit) {
  return exp_negative(__ddiv_rn(__dsub_rn((double)logit, (double)r.max), r.temperature));
}
/* With the tokens below min_p taken out: of draws from all tokens. */
static __device__ __forceinline__ double weight_or_none(const row_state &r, float logit) {
  const double w = weight(r, logit);
  return r.s.min_p > 0.0f && w < (double)r.s.min_p ? 0.0 : w;
}

/* The best token of all, and whether every logit is finite; to every thread. */
static __device__ bool find_best(uint64_t *best, const row_state &r, sample_shared &m) {
  uint64_t mine = 0;
  int bad = 0;
#pragma unroll 8
  for (int i = r.begin + (int)threadIdx.x; i < r.end; i += THREADS) {
    const float x = __ldcg(r.logits + i);
    bad |= !(fabsf(x) < CUDART_INF_F);
    const uint64_t key = key_of(x, i);
    mine = key > mine ? key : mine;
  }
  for (int d = 16; d > 0; d >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, mine, d);
    mine = other > mine ? other : mine;
  }
  bad = __any_sync(0xffffffffu, bad);
  if ((threadIdx.x & 31) == 0) {
    m.warp_best[threadIdx.x / 32] = mine;
    m.warp_bad[threadIdx.x / 32] = bad;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) {
      mine = m.warp_best[w] > mine ? m.warp_best[w] : mine;
      bad |= m.warp_bad[w];
    }
    m.mine.best = mine;
    m.mine.bad = bad;
  }
  pkv_cluster_sync();
  mine = 0;
  bad = 0;
  for (int rank = 0; rank < SPLIT; ++rank) {
    const uint64_t other = pkv_cluster_word(&m.mine.best, rank);
    mine = other > mine ? other : mine;
    bad |= pkv_cluster_word(&m.mine.bad, rank);
  }
  *best = mine;
  return bad == 0;
}

/* Tokens of this warp: first and end. */
static __device__ __forceinline__ int2 warp_tokens(const row_state &r) {
  const int each = ((r.end - r.begin + WARPS - 1) / WARPS + 31) & ~31;
  const int begin = min(r.begin + (int)threadIdx.x / 32 * each, r.end);
  return make_int2(begin, min(begin + each, r.end));
}

/* Sums of the weights by warps of all CTAs in order; *before: of those before this warp. */
template <bool CUT>
static __device__ double sum_all(double *before, const row_state &r, sample_shared &m, int rank) {
  const int2 own = warp_tokens(r);
  double sum = 0.0;
  for (int i = own.x + (int)(threadIdx.x & 31); i < own.y; i += 32) {
    const float x = __ldcg(r.logits + i);
    sum += CUT ? weight_or_none(r, x) : weight(r, x);
  }
  for (int d = 16; d > 0; d >>= 1)
    sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 31) == 0) m.mine.sums[threadIdx.x / 32] = sum;
  pkv_cluster_sync();
  double total = 0.0;
  for (int i = 0; i < SPLIT * WARPS; ++i) {
    if (i == rank * WARPS + (int)threadIdx.x / 32) *before = total;
    total += pkv_cluster_word(&m.mine.sums[i % WARPS], i / WARPS);
  }
  return total;
}

/* One by one, in the order of ids: the CPU's own sum and draw. */
static __device__ __noinline__ double exact_total(const row_state &r, bool cut) {
  double total = 0.0;
  for (int i = 0; i < r.vocab; ++i) {
    const float x = __ldcg(r.logits + i);
    total = __dadd_rn(total, cut ? weight_or_none(r, x) : weight(r, x));
  }
  return total;
}
static __device__ __noinline__ int exact_draw(const row_state &r, double u) {
  const double target = __dmul_rn(u, exact_total(r, true));
  double sum = 0.0;
  int last = 0;
  for (int i = 0; i < r.vocab; ++i) {
    const double w = weight_or_none(r, __ldcg(r.logits + i));
    if (w > 0.0) last = i;
    sum = __dadd_rn(sum, w);
    if (sum > target) return i;
  }
  return last;
}

/* Temperature and min_p: the warp in which the sums pass the target walks its tokens. */
static __device__ void sample_all(int *id, const row_state &r, sample_shared &m, int rank) {
  const double u = uniform_of(r.s);
  double before = 0.0;
  const double total = sum_all<true>(&before, r, m, rank), target = u * total;
  const double close = CLOSE * total, own = m.mine.sums[threadIdx.x / 32];
  const int lane = threadIdx.x & 31;
  /* Of the warps that may hold it the first decides; a draw near the end of a warp is exact. */
  const bool mine = before <= target && target < before + own;
  if (!mine) {
    const bool nobody =
        rank == SPLIT - 1 && threadIdx.x / 32 == WARPS - 1 && target >= before + own;
    if (nobody && lane == 0) *id = exact_draw(r, u);
    return;
  }
  double sum = before;
  int found = -1;
  bool near = target - before < close;
  const int2 tokens = warp_tokens(r);
  for (int i = tokens.x; i < tokens.y && found < 0; i += 32) {
    const bool there = i + lane < tokens.y;
    double w = there ? weight_or_none(r, __ldcg(r.logits + i + lane)) : 0.0;
    for (int d = 1; d < 32; d <<= 1) {
      const double other = __shfl_up_sync(0xffffffffu, w, d);
      if (lane >= d) w += other;
    }
    const unsigned past = __ballot_sync(0xffffffffu, there && sum + w > target);
    near |= __any_sync(0xffffffffu, there && fabs(sum + w - target) < close);
    if (past) found = i + __ffs(past) - 1;
    sum += __shfl_sync(0xffffffffu, w, 31);
  }
  if (lane == 0) *id = found < 0 || near ? exact_draw(r, u) : found;
}

/* Counts tokens by their distance to the best; then the last bin whose tokens are all gathered, or
   -1; *count of them. want: how many there must be, 0 = as many as there is room for. */
static __device__ int choose_bins(int *count, const row_state &r, sample_shared &m, int rank,
                                  float per_unit, int want) {
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    m.mine.bins[b] = 0;
  __syncthreads();
  for (int i = r.begin + (int)threadIdx.x; i < r.end; i += THREADS) {
    const int b = (int)fminf((r.max - __ldcg(r.logits + i)) * per_unit, BINS - 1.0f);
    if (b < BINS - 1) atomicAdd(&m.mine.bins[b], 1);
  }
  pkv_cluster_sync();
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    int total = 0, before = 0;
    for (int k = 0; k < SPLIT; ++k) {
      const int there = pkv_cluster_word(&m.mine.bins[b], k);
      total += there;
      if (k < rank) before += there;
    }
    m.totals[b] = total;
    m.before[b] = before;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int last = -1, sum = 0, place = 0, held = 0;
    for (int b = 0; b < BINS - 1 && (want == 0 || held < want); ++b) {
      sum += m.totals[b];
      if (sum > BEST) break;
      last = b;
      held = sum;
      place += m.before[b];
    }
    m.last_bin = want > 0 && held < want ? -1 : last;
    m.count = held;
    m.place = place;
  }
  __syncthreads();
  *count = m.count;
  return m.last_bin;
}

/* The tokens of bins 0 .. last to `keys`, in any order. */
static __device__ void gather(uint64_t *keys, const row_state &r, sample_shared &m, float per_unit,
                              int last) {
  for (int i = r.begin + (int)threadIdx.x; i < r.end; i += THREADS) {
    const float x = __ldcg(r.logits + i);
    const int b = (int)fminf((r.max - x) * per_unit, BINS - 1.0f);
    if (b <= last) keys[atomicAdd(&m.place, 1)] = key_of(x, i);
  }
}

/* Bitonic, the best first. */
static __device__ void sort_best(sorted &s) {
  for (int size = 2; size <= BEST; size <<= 1)
    for (int apart = size >> 1; apart > 0; apart >>= 1) {
      for (int t = threadIdx.x; t < BEST / 2; t += THREADS) {
        const int i = 2 * t - (t & (apart - 1)), j = i + apart;
        const uint64_t a = s.keys[i], b = s.keys[j];
        if ((a < b) == ((i & size) == 0)) {
          s.keys[i] = b;
          s.keys[j] = a;
        }
      }
      __syncthreads();
    }
}

/* All tokens to sorted keys, the best first: 4 bits a pass, stable, by one CTA. keys [2, vocab];
   the result is in the first half. */
static __device__ __noinline__ void sort_all(uint64_t *keys, const row_state &r, sample_shared &m) {
  const int each = (r.vocab + THREADS - 1) / THREADS, t = threadIdx.x;
  const int begin = min(t * each, r.vocab), end = min(begin + each, r.vocab);
  for (int i = t; i < r.vocab; i += THREADS)
    keys[i] = key_of(__ldcg(r.logits + i), i);
  for (int pass = 0; pass < 8; ++pass) {
    const uint64_t *from = keys + (pass & 1) * (int64_t)r.vocab;
    uint64_t *to = keys + (1 - (pass & 1)) * (int64_t)r.vocab;
    const int shift = 32 + 4 * pass; /* ids are in order already */
    for (int d = 0; d < DIGITS; ++d)
      m.digits[d][t] = 0;
    __syncthreads();
    for (int i = begin; i < end; ++i)
      m.digits[15 - (from[i] >> shift & 15)][t]++;
    __syncthreads();
    if (t < 32) { /* exclusive sums over digits, then threads */
      uint32_t sum = 0;
      for (int i = 0; i < DIGITS * THREADS; i += 32) {
        uint32_t *const at = &m.digits[0][0] + i + t;
        const uint32_t own = *at;
        uint32_t x = own;
        for (int d = 1; d < 32; d <<= 1) {
          const uint32_t other = __shfl_up_sync(0xffffffffu, x, d);
          if (t >= d) x += other;
        }
        *at = sum + x - own;
        sum += __shfl_sync(0xffffffffu, x, 31);
      }
    }
    __syncthreads();
    for (int i = begin; i < end; ++i) {
      const uint64_t key = from[i];
      to[m.digits[15 - (key >> shift & 15)][t]++] = key;
    }
    __syncthreads();
  }
}

/* The walk of sample_best over sorted candidates, by one thread. limit: as many may be chosen;
   there: candidates. total: of all tokens, used where limit is the vocabulary. -1: more candidates
   are needed. */
static __device__ __noinline__ int walk(const row_state &r, const uint64_t *keys,
                                        const double *weights, int there, int limit, double total,
                                        double u) {
  const bool cut = r.s.top_p > 0.0f && r.s.top_p < 1.0f;
  bool exact = limit < r.vocab;
  double kept = 0.0;
  int count = 0;
  if (exact) {
    total = 0.0;
    for (int i = 0; i < limit; ++i)
      total = __dadd_rn(total, weights[i]);
  }
  double enough = cut ? __dmul_rn((double)r.s.top_p, total) : total;
  while (count < limit) {
    if (count == there) return -1;
    const double w = weights[count];
    if (w < (double)r.s.min_p) break;
    kept = __dadd_rn(kept, w);
    ++count;
    if (cut && !exact && fabs(kept - enough) < CLOSE * total) {
      total = exact_total(r, false);
      enough = __dmul_rn((double)r.s.top_p, total);
      exact = true;
    }
    if (cut && kept >= enough) break;
  }
  const double target = __dmul_rn(u, kept);
  double sum = 0.0;
  int last = 0;
  for (int i = 0; i < count; ++i) {
    if (weights[i] > 0.0) last = i;
    sum = __dadd_rn(sum, weights[i]);
    if (sum > target) return id_of(keys[i]);
  }
  return id_of(keys[last]);
}

/* ---- narrowing ---- */

/* Where the first tokens end: after so many, where their weights reach a sum, or pass it. */
enum aim_kind { AIM_COUNT, AIM_REACH, AIM_PASS };
struct aim {
  aim_kind kind;
  int want;             /* of AIM_COUNT */
  double target, close; /* of the others; what is nearer to the target than `close` is doubtful */
};
/* How a search ended: at a token; before the aim; too close to it to tell from these sums. */
enum ending { FOUND, SHORT, CLOSE_BY };

/* Weights of this CTA's tokens to `weights`, and how far the worst of all lies from the best. */
static __device__ void weigh(double *weights, row_state &r, sample_shared &m) {
  uint32_t low = 0xffffffffu;
  if (threadIdx.x == 0) m.mine.low = low;
  __syncthreads();
  for (int i = r.begin + (int)threadIdx.x; i < r.end; i += THREADS) {
    const float x = __ldcg(r.logits + i);
    weights[i] = weight(r, x);
    low = min(low, (uint32_t)(key_of(x, 0) >> 32));
  }
  low = __reduce_min_sync(0xffffffffu, low);
  if ((threadIdx.x & 31) == 0) atomicMin(&m.mine.low, low);
  pkv_cluster_sync();
  if (threadIdx.x == 0) {
    for (int rank = 0; rank < SPLIT; ++rank)
      low = min(low, pkv_cluster_word(&m.mine.low, rank));
    const double all = (double)r.max - (double)logit_of((uint64_t)low << 32);
    r.clamped = all > FAR * r.temperature;
    r.per_unit = (double)((1ull << FAR_BITS) - 1) / (r.clamped ? FAR * r.temperature : all);
  }
  pkv_cluster_sync();
}

/* Rises along the order of tokens; the caller tells equal distances that are unequal logits. */
static __device__ __forceinline__ uint64_t place_of(const row_state &r, float x, int id) {
  const uint64_t most = (1ull << FAR_BITS) - 1;
  const double part = __dmul_rn(__dsub_rn((double)r.max, (double)x), r.per_unit);
  const uint64_t far = part < (double)most ? (uint64_t)part : most; /* all equal: NaN */
  return far << ID_BITS | (uint32_t)id;
}

/* Of all lanes of a warp at once; lanes of one bin make one addition. */
static __device__ __forceinline__ void add_to_bin(shown &mine, int bin, double w, bool in) {
  const unsigned there = __ballot_sync(0xffffffffu, in);
  if (there == 0) return;
  const int first = __shfl_sync(0xffffffffu, bin, __ffs(there) - 1);
  if (__all_sync(0xffffffffu, !in || bin == first)) {
    double sum = in ? w : 0.0;
    for (int d = 16; d > 0; d >>= 1)
      sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if ((threadIdx.x & 31) == 0) {
      atomicAdd(&mine.weights[first], sum);
      atomicAdd(&mine.bins[first], __popc(there));
    }
  } else if (in) {
    atomicAdd(&mine.weights[bin], w);
    atomicAdd(&mine.bins[bin], 1);
  }
}

/* The tokens that a search goes over: those of the first `fixed` bits of their places, up to the
   token `floor`, of weights that min_p leaves. */
struct narrowed {
  uint64_t floor, prefix;
  int fixed;
};
static __device__ __forceinline__ bool takes_part(const row_state &r, const narrowed &n, float x,
                                                  int id, double w, uint64_t place) {
  return key_of(x, id) >= n.floor && !(w < (double)r.s.min_p) &&
         (n.fixed == 0 || place >> (64 - n.fixed) == n.prefix);
}

/* Counts and sums of the next digit; low and high of the logits that take part. */
static __device__ void fill_bins(const row_state &r, sample_shared &m, const narrowed &n,
                                 const double *weights) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    m.mine.bins[b] = 0;
    m.mine.weights[b] = 0.0;
  }
  if (threadIdx.x == 0) {
    m.mine.low = 0xffffffffu;
    m.mine.high = 0;
  }
  __syncthreads();
  uint32_t low = 0xffffffffu, high = 0;
  for (int first = r.begin; first < r.end; first += THREADS) {
    const int i = first + (int)threadIdx.x;
    bool in = i < r.end;
    const float x = in ? __ldcg(r.logits + i) : 0.0f;
    const double w = in ? weights[i] : 0.0;
    const uint64_t place = place_of(r, x, i);
    in = in && takes_part(r, n, x, i, w, place);
    add_to_bin(m.mine, (int)(place >> (64 - DIGIT - n.fixed)) & (BINS - 1), w, in);
    if (!in) continue;
    low = min(low, (uint32_t)(key_of(x, 0) >> 32));
    high = max(high, (uint32_t)(key_of(x, 0) >> 32));
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  if ((threadIdx.x & 31) == 0) {
    atomicMin(&m.mine.low, low);
    atomicMax(&m.mine.high, high);
  }
  pkv_cluster_sync();
}

static __device__ __forceinline__ bool meets(const aim &a, int count, double sum) {
  return a.kind == AIM_COUNT   ? count >= a.want
         : a.kind == AIM_REACH ? sum >= a.target
                               : sum > a.target;
}
static __device__ __forceinline__ bool doubtful(const aim &a, double sum) {
  return a.kind != AIM_COUNT && fabs(sum - a.target) < a.close;
}

/* By the first warp: the bin in which the aim is met, to m.last_bin (-1: none), and what lies
   before it. Each lane has 8 bins. */
static __device__ void find_bin(sample_shared &m, const aim &a) {
  const int lane = threadIdx.x, each = BINS / 32;
  int own = 0;
  double own_sum = 0.0;
  for (int i = 0; i < each; ++i) {
    own += m.totals[lane * each + i];
    own_sum += m.sums[lane * each + i];
  }
  int count = own;
  double sum = own_sum;
  for (int d = 1; d < 32; d <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, count, d);
    const double other_sum = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) count += other, sum += other_sum;
  }
  const double before = __shfl_up_sync(0xffffffffu, sum, 1);
  const unsigned met =
      __ballot_sync(0xffffffffu, own > 0 && meets(a, m.count_before + count, m.sum_before + sum));
  if (lane == (met ? __ffs(met) - 1 : 31)) {
    const int base_count = m.count_before + count - own;
    const double base = m.sum_before + (lane > 0 ? before : 0.0);
    m.last_bin = -1;
    m.sum_all = m.sum_before + sum;
    m.close = doubtful(a, m.sum_all);
    int held = base_count;
    double reached = base;
    for (int i = 0; i < each && met; ++i) {
      const int bin = lane * each + i;
      if (m.totals[bin] == 0) continue;
      m.last_bin = bin;
      m.count_before = held;
      m.sum_before = reached;
      m.count = m.totals[bin];
      held += m.totals[bin];
      reached += m.sums[bin];
      if (meets(a, held, reached)) break;
    }
    if (met) m.close = doubtful(a, m.sum_before) || doubtful(a, reached);
  }
}

/* Totals of the cluster, then the bin; every CTA comes to the same. */
static __device__ void choose_digit(sample_shared &m, int rank, const aim &a) {
  for (int b = threadIdx.x; b < BINS; b += THREADS) {
    int total = 0, before = 0;
    double sum = 0.0;
    for (int k = 0; k < SPLIT; ++k) {
      const int there = pkv_cluster_word(&m.mine.bins[b], k);
      total += there;
      if (k < rank) before += there;
      sum += pkv_cluster_word(&m.mine.weights[b], k);
    }
    m.totals[b] = total;
    m.before[b] = before;
    m.sums[b] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) find_bin(m, a);
  __syncthreads();
}

/* Whether the tokens that took part differ in their logits. */
static __device__ bool differ(const sample_shared &m) {
  uint32_t low = 0xffffffffu, high = 0;
  for (int k = 0; k < SPLIT; ++k) {
    low = min(low, pkv_cluster_word(&m.mine.low, k));
    high = max(high, pkv_cluster_word(&m.mine.high, k));
  }
  return low != high;
}

/* Up to BEST gathered tokens, sorted, with their weights; the rest are empty. */
static __device__ void sort_gathered(const row_state &r, sample_shared &m, const uint64_t *keys,
                                     int count) {
  for (int i = threadIdx.x; i < BEST; i += THREADS)
    m.s.keys[i] = i < count ? __ldcg(keys + i) : 0;
  __syncthreads();
  sort_best(m.s);
  for (int i = threadIdx.x; i < count; i += THREADS)
    m.s.weights[i] = weight(r, logit_of(m.s.keys[i]));
  __syncthreads();
}

/* The first CTA, over the sorted tokens of the last bin: the token at which the aim is met. */
static __device__ void finish_search(const row_state &r, sample_shared &m, const uint64_t *keys,
                                     int count, const aim &a) {
  sort_gathered(r, m, keys, count);
  if (threadIdx.x == 0) {
    double sum = m.sum_before;
    int at = 0;
    bool near = false;
    for (; at < count; ++at) {
      sum += m.s.weights[at];
      near |= doubtful(a, sum);
      if (meets(a, m.count_before + at + 1, sum)) break;
    }
    m.mine.key = m.s.keys[at < count ? at : count - 1];
    m.mine.sum = sum;
    m.mine.state = near || at == count ? CLOSE_BY : FOUND;
  }
}

/* The end of the shortest run of first tokens that meets the aim. *last: its last token's key, *sum
   of its weights, or of all where the aim is not met. One state for the whole cluster. */
static __device__ __noinline__ int narrow(uint64_t *last, double *sum, const row_state &r,
                                          sample_shared &m, uint64_t *keys, const double *weights,
                                          int rank, uint64_t floor, const aim &a) {
  narrowed n = {floor, 0, 0};
  if (threadIdx.x == 0) {
    m.count_before = 0;
    m.sum_before = 0.0;
  }
  for (;;) {
    fill_bins(r, m, n, weights);
    choose_digit(m, rank, a);
    /* Of equal distances ids decide, where the logits are equal too. */
    const bool unequal = n.fixed == FAR_BITS && differ(m);
    if (m.close || unequal || m.last_bin < 0) {
      /* So far away that what is among them changes no sum. */
      const bool weightless =
          unequal && a.kind == AIM_COUNT && r.clamped != 0 && n.prefix == (1ull << FAR_BITS) - 1;
      *last = 0;
      *sum = m.sum_all;
      pkv_cluster_sync();
      return weightless ? FOUND : m.close || unequal ? CLOSE_BY : SHORT;
    }
    n.prefix = n.prefix << DIGIT | (uint32_t)m.last_bin;
    n.fixed += DIGIT;
    if (m.count <= BEST) break;
    pkv_cluster_sync(); /* before others' bins are written */
  }
  const int count = m.count;
  if (threadIdx.x == 0) m.place = m.before[m.last_bin];
  __syncthreads();
  for (int i = r.begin + (int)threadIdx.x; i < r.end; i += THREADS) {
    const float x = __ldcg(r.logits + i);
    if (takes_part(r, n, x, i, weights[i], place_of(r, x, i)))
      keys[atomicAdd(&m.place, 1)] = key_of(x, i);
  }
  pkv_cluster_sync();
  if (rank == 0) finish_search(r, m, keys, count, a);
  pkv_cluster_sync();
  *last = pkv_cluster_word(&m.mine.key, 0);
  *sum = pkv_cluster_word(&m.mine.sum, 0);
  const int state = pkv_cluster_word(&m.mine.state, 0);
  pkv_cluster_sync();
  return state;
}

/* What sample_best chooses, by narrowing; -1: it must be made again one by one. total: of all
   tokens, used where top_k does not limit them. */
static __device__ __noinline__ int sample_far(row_state &r, sample_shared &m, uint64_t *keys,
                                              double *weights, int rank, int limit, double total,
                                              double u) {
  const bool cut = r.s.top_p > 0.0f && r.s.top_p < 1.0f;
  uint64_t floor = 0;
  int state = FOUND;
  weigh(weights, r, m);
  if (limit < r.vocab) {
    const float min_p = r.s.min_p;
    __syncthreads();
    if (threadIdx.x == 0) r.s.min_p = 0.0f; /* counts before it */
    __syncthreads();
    const aim a = {AIM_COUNT, limit, 0.0, 0.0};
    state = narrow(&floor, &total, r, m, keys, weights, rank, 0, a);
    if (threadIdx.x == 0) r.s.min_p = min_p;
    __syncthreads();
  }
  if (state != FOUND) return -1;
  double kept = total;
  const double close = CLOSE * total;
  if (cut || r.s.min_p > 0.0f) {
    const double enough = cut ? __dmul_rn((double)r.s.top_p, total) : CUDART_INF;
    const aim a = {AIM_REACH, 0, enough, close};
    uint64_t last = 0;
    state = narrow(&last, &kept, r, m, keys, weights, rank, floor, a);
    if (state == CLOSE_BY) return -1;
    if (state == FOUND) floor = last;
  }
  const aim a = {AIM_PASS, 0, __dmul_rn(u, kept), close};
  uint64_t chosen = 0;
  state = narrow(&chosen, &kept, r, m, keys, weights, rank, floor, a);
  return state == FOUND ? id_of(chosen) : -1;
}

/* The first CTA: from the up to BEST gathered tokens; -1: they do not suffice. */
static __device__ int sample_gathered(const row_state &r, sample_shared &m, const uint64_t *keys,
                                      int count, int limit, double total, double u) {
  int chosen = -1;
  sort_gathered(r, m, keys, count);
  if (threadIdx.x == 0) chosen = walk(r, m.s.keys, m.s.weights, count, limit, total, u);
  return chosen;
}

/* top_k and top_p. keys: the slot's memory, [2 vocab], then weights [vocab]. */
static __device__ void sample_best(int *id, row_state &r, sample_shared &m, uint64_t *keys,
                                   int rank) {
  const bool all_k = r.s.top_k <= 0 || r.s.top_k >= r.vocab;
  const int limit = all_k ? r.vocab : r.s.top_k;
  const double u = uniform_of(r.s);
  const float per_unit = fminf(PER_UNIT / r.s.temperature, 1e30f);
  double *const weights = (double *)(keys + 2 * (int64_t)r.vocab);
  double before = 0.0, total = 0.0;
  int count = 0;
  if (all_k) total = sum_all<false>(&before, r, m, rank);
  const int last = choose_bins(&count, r, m, rank, per_unit, all_k ? 0 : limit);
  if (last >= 0) {
    gather(keys, r, m, per_unit, last);
    pkv_cluster_sync();
    if (rank == 0) {
      const int chosen = sample_gathered(r, m, keys, count, limit, total, u);
      if (threadIdx.x == 0) {
        m.mine.place = chosen >= 0;
        if (chosen >= 0) *id = chosen;
      }
    }
    pkv_cluster_sync();
    if (pkv_cluster_word(&m.mine.place, 0)) return;
  }
  pkv_cluster_sync();
  const int far = sample_far(r, m, keys, weights, rank, limit, total, u);
  if (rank > 0) return;
  if (far >= 0) {
    if (threadIdx.x == 0) *id = far;
    return;
  }
  sort_all(keys, r, m);
  for (int i = threadIdx.x; i < r.vocab; i += THREADS)
    weights[i] = weight(r, logit_of(keys[i]));
  __syncthreads();
  if (threadIdx.x == 0) *id = walk(r, keys, weights, r.vocab, limit, total, u);
  __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    dense_sample(const __grid_constant__ pkv_dense_sample_params p) {
#if __CUDA_ARCH__ >= 900
  __shared__ sample_shared m;
  const int rank = (int)pkv_cluster_rank(), slot = (int)blockIdx.x / SPLIT;
  uint64_t *const keys = (uint64_t *)p.scratch + (int64_t)slot * 3 * p.vocab;
  __shared__ row_state r;
  if (threadIdx.x == 0) {
    const int each = (p.vocab + SPLIT - 1) / SPLIT;
    r.vocab = p.vocab;
    r.begin = min(rank * each, p.vocab);
    r.end = min(r.begin + each, p.vocab);
  }
  pkv_grid_release();
  pkv_grid_wait();
  for (int row = slot; row < p.m; row += (int)gridDim.x / SPLIT) {
    uint64_t best = 0;
    if (threadIdx.x == 0) {
      r.logits = p.logits + row * p.stride;
      if (p.rows) r.s = p.rows[row];
    }
    __syncthreads();
    const bool fine = find_best(&best, r, m);
    if (!fine || p.rows == NULL || !(r.s.temperature > 0.0f)) {
      if (rank == 0 && threadIdx.x == 0) p.ids[row] = fine ? id_of(best) : -1;
    } else {
      if (threadIdx.x == 0) {
        r.max = logit_of(best);
        r.temperature = (double)r.s.temperature;
      }
      __syncthreads();
      const bool all_k = r.s.top_k <= 0 || r.s.top_k >= r.vocab;
      const bool all_p = r.s.top_p <= 0.0f || r.s.top_p >= 1.0f;
      if (all_k && all_p)
        sample_all(&p.ids[row], r, m, rank);
      else
        sample_best(&p.ids[row], r, m, keys, rank);
    }
    pkv_cluster_sync(); /* before the next row's words are written */
  }
#endif
}

extern "C" size_t pkv_dense_sample_bytes(int32_t m, int32_t vocab) {
  return (size_t)(m < SLOTS ? m : SLOTS) * 3 * (size_t)vocab * sizeof(uint64_t);
}

extern "C" cudaError_t pkv_dense_launch_sample(const pkv_dense_sample_params *p, int32_t dependent,
                                               cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  if (p->vocab > 1 << ID_BITS) return cudaErrorInvalidValue;
  const int slots = p->m < SLOTS ? p->m : SLOTS;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = SPLIT;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)(slots * SPLIT));
  config.blockDim = dim3(THREADS);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  void *arguments[] = {(void *)p};
  return cudaLaunchKernelExC(&config, (const void *)dense_sample, arguments);
}
