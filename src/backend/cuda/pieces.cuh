/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A warp's way through many pieces of which the short ones are one warp's alone, the warps in
 * turn: more slices for that warp, but no meeting of warps, which takes longer than 128 tokens do.
 * For parts of `balanced` with many pieces.
 */
#ifndef PKV_CUDA_PIECES_CUH
#define PKV_CUDA_PIECES_CUH

#include "backend/cuda/feed.cuh"

/* A walk of one warp over pieces, in order: those of all warps and its own. */
struct pkv_alone_walk : pkv_walk {
  bool alone; /* this piece is the warp's own */
  int number; /* of the piece, for this warp; 0 before the first */
  int turn;   /* the warp that the next short piece falls to */

  __device__ __forceinline__ int step() const {
    return alone ? PKV_SLICE_TOKENS : PKV_STEP_TOKENS;
  }
  __device__ __forceinline__ int share(int warp) const {
    return alone ? 0 : warp * PKV_SLICE_TOKENS;
  }
  /* Whether the warp has a share of the next piece, which has so many tokens. */
  __device__ __forceinline__ bool takes(int tokens, int most, int warp) {
    alone = tokens <= most;
    const bool mine = !alone || turn == warp;
    if (alone) turn = turn + 1 == PKV_WARPS ? 0 : turn + 1;
    if (mine) ++number;
    return mine;
  }
};

/*
 * All pieces from `now` on; out(walk, m, d, item) gets every query row m of a piece, dimensions d
 * .. d + 3. Not `waited`: before wait() others may still be writing q and the newest tokens.
 */
template <typename KV, int HD, typename Walk, typename Work, typename P, typename Wait,
          typename Out>
static __device__ __forceinline__ void
pkv_run_pieces(Walk &now, const P &p, const Work &work, pkv_exchange<HD> &x, uint32_t ring,
               bool waited, int rows, int tile, int warp, int lane, Wait wait, Out out) {
  typedef pkv_decode_config<KV, HD> C;
  pkv_feed<KV, HD, Walk> feed;
  feed.start(now, p, work, ring, warp, lane);
  pkv_query<HD, 1> q, ahead;
  pkv_state<HD, 1> state;
  float scale = 0.0f;
  int ahead_of = now.number, slot = 0, filling = p.stages - 1;
  bool open = false;
  if (waited && now.row >= 0) pkv_load_q<KV, HD, 1>(ahead, p, now.row, now.head, tile, lane);
  for (;;) {
    if (!waited && (filling == 0 || p.wait_tokens || !feed.is_old(p))) {
      wait();
      waited = true;
      if (now.row >= 0) pkv_load_q<KV, HD, 1>(ahead, p, now.row, now.head, tile, lane);
    }
    while (filling == 0 && (!open || now.at >= now.end)) {
      if (open) {
        const auto done = [&](int m, int d, const pkv_item &item) { out(now, m, d, item); };
        if (now.alone)
          pkv_fold_alone<KV, HD, 1>(state, x, rows, warp, lane, done);
        else
          pkv_fold_warps<KV, HD, 1>(state, x, rows, warp, lane, done);
        pkv_walk_next(now, p, work);
      }
      if (now.row < 0) break;
      open = true;
      if (ahead_of == now.number)
        q = ahead;
      else
        pkv_load_q<KV, HD, 1>(q, p, now.row, now.head, tile, lane);
      scale = pkv_scale_of(p, now.head);
      pkv_state_reset(state);
    }
    if (now.row < 0) break;
    feed.push(p, work, warp, lane);
    if (filling > 0) {
      --filling;
      continue;
    }
    if (feed.walk.row >= 0 && feed.walk.number == now.number + 1 && ahead_of <= now.number) {
      pkv_load_q<KV, HD, 1>(ahead, p, feed.walk.row, feed.walk.head, tile, lane);
      ahead_of = feed.walk.number;
    }
    pkv_ring_wait(p.stages);
    __syncwarp();
    pkv_slice_attend<KV, HD, 1>(state, q, now, p, scale,
                                feed.ring + (uint32_t)(slot * C::stage_bytes), tile, warp, lane);
    __syncwarp();
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    now.at += now.step();
  }
}

#endif
