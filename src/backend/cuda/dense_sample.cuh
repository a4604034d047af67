/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sampling, what its passes share (dense_sample.cu): the CPU's arithmetic, keys of candidates,
 * sums over all tokens, counting by distance to the best, sorting.
 */
#ifndef PKV_CUDA_DENSE_SAMPLE_CUH
#define PKV_CUDA_DENSE_SAMPLE_CUH

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

#endif
