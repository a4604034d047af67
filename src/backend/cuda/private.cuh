/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, the rows' private parts: grid (half parts, tiles of 8 query rows), 4 warps a CTA,
 * the slices, ring and exchange of decode.cuh. Every piece leaves its states in its slot, but for
 * a row that shares nothing and is whole. Where a half has many pieces, a short one is one warp's,
 * the warps in turn: more slices for it, but no meeting of warps, which takes longer. It runs
 * beside the node kernel ahead of it in the stream and ends after it, so that what comes next may
 * wait for this kernel alone.
 *
 * Where there are no nodes it is `balanced`'s kernel on `balanced`'s plan, which writes results
 * and leaves nothing to fold.
 */
#ifndef PKV_CUDA_PRIVATE_CUH
#define PKV_CUDA_PRIVATE_CUH

#include "backend/cuda/decode.cuh"

#define PKV_PRIVATE_CTAS 2               /* an SM */
#define PKV_ALONE_TOKENS 128             /* the longest piece that one warp takes */
#define PKV_ALONE_PIECES (2 * PKV_WARPS) /* of a half, from which on warps do */

/* A walk of one warp over the pieces of half a part, in order: those of all warps and its own. */
struct pkv_private_walk : pkv_walk {
  pkv_private_cursor at_cursor;
  int slot;
  bool whole, alone; /* alone: this piece is the warp's own */
  int number;        /* of the piece, for this warp */
  int turn;          /* the warp that the next short piece falls to */

  __device__ __forceinline__ int step() const {
    return alone ? PKV_SLICE_TOKENS : PKV_STEP_TOKENS;
  }
  __device__ __forceinline__ int share(int warp) const {
    return alone ? 0 : warp * PKV_SLICE_TOKENS;
  }
};

/* Where the work ends, and where its pieces are looked up. */
struct pkv_private_work {
  const pkv_tree_view *view;
  pkv_private_cursor end;
  int warp;
  int alone; /* most tokens of a piece for one warp */
};

template <typename P>
static __device__ __forceinline__ void pkv_walk_next(pkv_private_walk &w, const P &p,
                                                     const pkv_private_work &work) {
  pkv_private_piece piece;
  for (;;) {
    if (!pkv_tree_next_private_piece(&piece, work.view, &w.at_cursor, &work.end)) {
      w.row = -1;
      return;
    }
    const int units = piece.unit_end - piece.unit_begin;
    if (units == 0 && !piece.whole) continue; /* it writes nothing */
    w.alone = units * p.unit_tokens <= work.alone;
    if (!w.alone) break;
    const bool mine = w.turn == work.warp;
    w.turn = w.turn + 1 == PKV_WARPS ? 0 : w.turn + 1;
    if (mine) break;
  }
  w.row = piece.row;
  w.head = piece.kv_head;
  w.len = piece.length;
  w.at = piece.unit_begin * p.unit_tokens;
  w.end = min(piece.length, piece.unit_end * p.unit_tokens);
  w.slot = piece.slot;
  w.whole = piece.whole;
  ++w.number;
}

static __device__ __forceinline__ uint4 pkv_load_ahead4(const void *at) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}

/* Read at once, whatever comes of it. */
static __device__ __forceinline__ pkv_private_cursor
pkv_private_cursor_at(const pkv_private_cursor *from) {
  static_assert(sizeof(pkv_private_cursor) == 32, "two vectors");
  union {
    pkv_private_cursor cursor;
    uint4 half[2];
  } c;
  c.half[0] = pkv_load_ahead4(from);
  c.half[1] = pkv_load_ahead4((const uint4 *)from + 1);
  return c.cursor;
}

/* pkv_plain_params but for the type of q: beside e4m3 caches it is often not the products'. */
struct pkv_plain8_params : pkv_plain_params {};
template <> struct pkv_kind_of<pkv_plain8_params> { static constexpr bool plain = true; };
static __device__ __forceinline__ int pkv_q_is_operand(const pkv_plain8_params &p) {
  return p.q_is_operand;
}
/* Of a batch that shares nothing; by bytes of an element. */
template <int BYTES> struct pkv_line_params { typedef pkv_plain_params type; };
template <> struct pkv_line_params<1> { typedef pkv_plain8_params type; };

/* Two CTAs an SM, whatever the type: they run beside the nodes. */
template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS, PKV_PRIVATE_CTAS)
    pkv_cuda_private(const __grid_constant__ pkv_cuda_shared_params s) {
  typedef typename K::template of<HD> KV;
  typedef pkv_decode_config<KV, HD> C;
  extern __shared__ __align__(128) unsigned char memory[];
  const pkv_cuda_decode_params &p = s.base;
  /* The last halves first: those at the front belong to parts with node work and are empty, and
     CTAs that the first wave has no room for start when the node kernel ends. */
  const int half = 2 * s.parts - 1 - (int)blockIdx.x;
  /* The node kernel has ended or waited for the plan: it may be read. Read beside the cursors, this
     word would cost some batches that share less, and those that share nothing 2 to 5 % more: they
     are but fetched into the cache. */
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(s.view.private_cursors + half));
  if (pkv_shares_nothing(s)) {
    pkv_decode_part<K, HD, 1, false, PKV_PRIVATE_CTAS>(
        *(const typename pkv_line_params<KV::bytes>::type *)&s.line);
    return;
  }
  pkv_private_walk now;
  now.at_cursor = pkv_private_cursor_at(s.view.private_cursors + half);
  const pkv_private_cursor end = pkv_private_cursor_at(s.view.private_cursors + half + 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tile = blockIdx.y;
  const int states = p.q_len * p.group, rows = min(8, states - tile * 8);
  const int ring_bytes = p.stages * C::stage_bytes;
  pkv_exchange<HD> x;
  x.init(memory + PKV_WARPS * ring_bytes, rows, false);
  __syncthreads();
  pkv_grid_release();
  pkv_private_work work = {&s.view, end, warp, 0};
  const int pieces = (work.end.rank - now.at_cursor.rank) * s.view.kv_heads + work.end.kv_head -
                     now.at_cursor.kv_head;
  if (pieces >= PKV_ALONE_PIECES) work.alone = PKV_ALONE_TOKENS;
  now.next_len = 0;
  now.number = now.turn = 0;
  pkv_walk_next(now, p, work);
  pkv_feed<KV, HD, pkv_private_walk> feed;
  feed.start(now, p, work, (uint32_t)__cvta_generic_to_shared(memory + warp * ring_bytes), warp,
             lane);
  pkv_query<HD, 1> q, ahead;
  int ahead_of = 0, open_piece = 0;
  if (now.row >= 0) {
    pkv_load_q<KV, HD, 1>(ahead, p, now.row, now.head, tile, lane);
    ahead_of = now.number;
  }
  pkv_state<HD, 1> state;
  float scale = 0.0f;
  int slot = 0, filling = p.stages - 1;
  for (;;) {
    while (filling == 0 && (open_piece == 0 || now.at >= now.end)) {
      if (open_piece) {
        const auto out = [&](int m, int d, const pkv_item &item) {
          if (now.whole) {
            pkv_item_store(p, now.row, now.head, tile * 8 + m, d, item);
            return;
          }
          float *to =
              s.private_slots + ((int64_t)now.slot * states + tile * 8) * pkv_slot_row<HD>::floats;
          pkv_item_to_slot<HD>(to, m, d, item);
        };
        if (now.alone)
          pkv_fold_alone<KV, HD, 1>(state, x, rows, warp, lane, out);
        else
          pkv_fold_warps<KV, HD, 1>(state, x, rows, warp, lane, out);
        pkv_walk_next(now, p, work);
      }
      if (now.row < 0) break;
      open_piece = now.number;
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
    if (feed.walk.row >= 0 && feed.walk.number == now.number + 1 && ahead_of == now.number) {
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
  pkv_copy_wait<0>();
  pkv_grid_wait();
}

#endif
