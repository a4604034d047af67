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
#include "backend/cuda/dense_narrow.cuh"

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
