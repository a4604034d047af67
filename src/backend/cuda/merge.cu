/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that fold states and depend on the head dimension only, so that each is there once. */
#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/fold.cuh"

/* The seed's second launch: grid (merges, tiles of query rows). */
template <int HD>
__global__ void __launch_bounds__(PKV_THREADS)
    pkv_cuda_merge(const __grid_constant__ pkv_cuda_decode_params p) {
  pkv_grid_wait();
  pkv_grid_release();
  const pkv_plan_merge to = p.merges[blockIdx.x];
  const int tile = blockIdx.y, rows = min(p.tile_rows, p.q_len * p.group - tile * p.tile_rows);
  if (to.count > 0 && p.fused_merge) return; /* its last task has merged it */
  if (to.count > 0) {
    pkv_fold_slots<HD>(p, to.row, to.kv_head, tile, to.first_slot, to.count, p.slot_stride, rows);
    return;
  }
  for (int i = threadIdx.x; i < rows * (HD / 4); i += PKV_THREADS)
    pkv_item_store(p, to.row, to.kv_head, tile * p.tile_rows + i / (HD / 4), i % (HD / 4) * 4,
                   pkv_item_neutral());
}

/*
 * The rows' results: grid (ranks, KV heads), 4 warps. Folds the states of the path's nodes from the
 * root down and the private ones, in slot order. A warp has query rows of its own.
 */
template <int HD>
__global__ void __launch_bounds__(PKV_THREADS)
    pkv_cuda_fold_paths(const __grid_constant__ pkv_cuda_shared_params s) {
  constexpr int parts = (HD + 127) / 128, pitch = pkv_slot_row<HD>::floats;
  __shared__ pkv_tree_states runs[PKV_TREE_MAX_PATH + 1];
  const pkv_cuda_decode_params &p = s.base;
  const int rank_id = blockIdx.x, head = blockIdx.y, states = p.q_len * p.group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const uint32_t nodes = pkv_load_ahead(&s.view.tree->nodes);
  const bool stored = pkv_tree_stored(&s.view, rank_id, head);
  if (s.has_line && nodes == 0) { /* the kernel ahead writes all: one CTA ends behind it */
    pkv_grid_release();
    if (rank_id == 0 && head == 0) pkv_grid_wait();
    return;
  }
  if (stored) { /* by the kernel ahead, which has to be through */
    pkv_grid_wait();
    return;
  }
  const pkv_tree_rank *rank = s.view.ranks + rank_id;
  const int depth = rank->depth;
  if (threadIdx.x < depth)
    runs[threadIdx.x] = pkv_tree_node_states(&s.view, rank->path[threadIdx.x], rank_id, head);
  if (threadIdx.x == depth) runs[depth] = pkv_tree_private_states(&s.view, rank_id, head);
  __syncthreads();
  pkv_grid_wait();
  pkv_grid_release();
  for (int m = warp; m < states; m += PKV_WARPS)
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int d = min(part * 128 + lane * 4, HD - 4);
      pkv_item sum = pkv_item_neutral();
      for (int i = 0; i <= depth; ++i) {
        const pkv_tree_states run = runs[i];
        const float *at = (i < depth ? s.node_slots : s.private_slots) +
                          ((int64_t)run.first * states + m) * pitch;
        const int64_t step = (int64_t)run.stride * states * pitch;
#pragma unroll 4
        for (int k = 0; k < run.count; ++k) {
          const float4 stats = pkv_load_state(at + k * step + HD);
          pkv_item_fold(sum, {stats.x, stats.y, pkv_load_state(at + k * step + d)});
        }
      }
      if (part * 128 + lane * 4 < HD) pkv_item_store(p, rank->row, head, m, d, sum);
    }
}

extern "C" const void *pkv_cuda_merge_kernel(int32_t head_dim) {
  return head_dim <= 64    ? (const void *)pkv_cuda_merge<64>
         : head_dim <= 128 ? (const void *)pkv_cuda_merge<128>
                           : (const void *)pkv_cuda_merge<256>;
}

extern "C" const void *pkv_cuda_paths_kernel(int32_t head_dim) {
  return head_dim <= 64 ? (const void *)pkv_cuda_fold_paths<64>
                        : (const void *)pkv_cuda_fold_paths<128>;
}
