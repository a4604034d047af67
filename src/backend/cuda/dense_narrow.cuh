/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sampling from flat logits (dense_sample.cu): the places at which a count or a sum ends are
 * found by narrowing the interval that holds them.
 */
#ifndef PKV_CUDA_DENSE_NARROW_CUH
#define PKV_CUDA_DENSE_NARROW_CUH

#include "backend/cuda/dense_sample.cuh"

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

#endif
