/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paged decode attention.
 *
 * pkv_cuda_decode: one persistent launch over the parts of a `balanced` plan. Grid (CTAs, tiles of
 * 8 or 16 query rows), 4 warps a CTA. A step is 64 tokens of one (row, KV head); each warp takes 16
 * of them with its own copy ring, softmax statistics and accumulator. The group's query rows are
 * the N side of m16n8k16. There is no barrier: at the end of a piece the warps hand their states
 * over in shared memory (fold.cuh), and only the end of a segment that was cut waits for other
 * CTAs, after all else.
 *
 * Copies run ahead across pieces: the ring is refilled from a second walk some steps in
 * front of the arithmetic; page ids, the next piece's query and the next row's length are on their
 * way before they are needed, so that a short row costs no bubble. A launch that waits for the
 * kernel ahead asks for its first query before the first pages: behind the 26 MB that all rings ask
 * for at once it would wait 5 us. One that overlaps it fills its ring with old tokens meanwhile.
 *
 * Plain calls, which most are, have a kernel of their own (walk.cuh). Where they have many segments
 * they go to the general kernel, which has a way for parts of short pieces (pieces.cuh): a warp
 * takes one alone. The host sees that from rows and parts, so that a graph may hold it, and the
 * others' kernel stays small; whether a part's pieces are short the kernel sees from the plan.
 *
 * Shared memory: 4 warps x stages x (K and V of 16 tokens), swizzled against bank conflicts, plus
 * the exchange. Bytes read a token and KV head: 2 * head_dim * element bytes.
 *
 * pkv_cuda_decode_items: the seed's scheduling on the same slices: one CTA a task, a state a task.
 */
#ifndef PKV_CUDA_DECODE_CUH
#define PKV_CUDA_DECODE_CUH

#include "backend/cuda/pieces.cuh"

/* The query rows of the piece in work and, read ahead, of the one after it. */
template <typename KV, int HD, int NT, int CTAS> struct pkv_queries {
  /* beyond, the registers are worth more */
  static constexpr bool ahead = HD <= 128 && HD * NT * CTAS <= 256;
  pkv_query<HD, NT> now, next;

  template <typename P>
  __device__ __forceinline__ void start(const P &p, const pkv_walk &w, int tile, int lane) {
    if (ahead && w.row >= 0) pkv_load_q<KV, HD, NT>(next, p, w.row, w.head, tile, lane);
  }
  template <typename P>
  __device__ __forceinline__ void enter(const P &p, const pkv_walk &w, const pkv_work &work,
                                        int tile, int lane) {
    if (!ahead) {
      pkv_load_q<KV, HD, NT>(now, p, w.row, w.head, tile, lane);
      return;
    }
    now = next;
    const bool same_row = w.head > 0;
    const int row = same_row ? w.row : w.row - 1;
    if (row >= work.begin.row)
      pkv_load_q<KV, HD, NT>(next, p, row, same_row ? w.head - 1 : p.cache.kv_heads - 1, tile,
                             lane);
  }
};

/* What becomes of a piece. */
struct pkv_target {
  bool starts_cut, ends_cut; /* others have a part of the segment before, after it */
  int merge, slot;           /* where cut */
};

static __device__ __forceinline__ pkv_target pkv_target_of(const pkv_walk &w, const pkv_work &work,
                                                           bool invariant) {
  pkv_target t;
  t.starts_cut = pkv_same_segment(w, work.begin) && work.begin.unit > 0;
  t.ends_cut = pkv_same_segment(w, work.end);
  t.merge = t.starts_cut ? work.begin.merge : work.end.merge;
  t.slot = t.starts_cut ? work.begin.slot : invariant ? work.end.slot : work.end.slot - 1;
  if (invariant && t.starts_cut) t.slot += work.begin.unit;
  return t;
}

/*
 * Folds one chunk of a piece into the running result; stores it after the last. The lanes of a row
 * read its m and l, then the last writes them: a row has 16 lanes or more, all in order of d.
 */
template <int HD, typename P>
static __device__ __forceinline__ void
pkv_run_chunk(const pkv_exchange<HD> &x, const P &p, const pkv_walk &w, int tile, int m, int d,
              pkv_item item, bool first, bool last, int lane) {
  float4 *kept = (float4 *)(x.kept() + m * pkv_fold<HD>::pitch + d);
  float2 *stats = x.kept_stats() + m;
  if (!first) {
    pkv_item sum = {stats->x, stats->y, *kept};
    pkv_item_fold(sum, item);
    item = sum;
  }
  __syncwarp(0xffffu << (lane & 16)); /* a row has 16 lanes or more */
  if (last) {
    pkv_item_store(p, w.row, w.head, tile * p.tile_rows + m, d, item);
    return;
  }
  *kept = item.acc;
  if (d == HD - 4) *stats = make_float2(item.m, item.l); /* all of the row have read them */
}

/* Batch-invariant: this CTA's chunks of a cut segment are in their slots. All threads. */
template <int HD, typename P>
static __device__ void pkv_merge_chunks(const P &p, int merge, int tile, int units, int rows) {
  const pkv_plan_merge to = p.merges[merge];
  if (pkv_arrive(p.counters + tile * p.counters_stride + merge, units, to.count))
    pkv_fold_slots<HD>(p, to.row, to.kv_head, tile, to.first_slot, to.count, 1, rows);
}

/* Everything a warp keeps of the piece in work. */
template <typename KV, int HD, int NT, int CTAS> struct pkv_piece {
  pkv_walk walk;
  pkv_target to;
  pkv_queries<KV, HD, NT, CTAS> q;
  pkv_state<HD, NT> s;
  float scale;
  int until; /* where the state that is growing ends: the piece's end, or a chunk's */
  int units; /* chunks that are out */

  template <typename P> __device__ __forceinline__ void begin_state(const P &p) {
    until =
        pkv_invariant(p) ? min(walk.end, (walk.at / p.unit_tokens + 1) * p.unit_tokens) : walk.end;
    pkv_state_reset(s);
  }
};

/* Stores the zeros of rows without tokens, a segment a warp in turn, and walks past them; whether
   there were any. Such segments are never cut. */
template <int HD, int NT, typename P>
static __device__ __forceinline__ bool pkv_pass_empty(pkv_walk &w, const P &p, const pkv_work &work,
                                                      int rows, int tile, int warp, int lane) {
  bool any = false;
  while (w.row >= 0 && w.len == 0) {
    if ((w.row + w.head) % PKV_WARPS == warp)
      for (int i = lane; i < rows * (HD / 4); i += 32)
        pkv_item_store(p, w.row, w.head, tile * NT * 8 + i / (HD / 4), i % (HD / 4) * 4,
                       pkv_item_neutral());
    pkv_walk_next(w, p, work);
    any = true;
  }
  return any;
}

/* All pieces of a part, each of them all warps' work. */
template <typename KV, int HD, int NT, bool EMPTIES, int CTAS, typename P>
static __device__ __forceinline__ void
pkv_decode_pieces(const P &p, const pkv_work &work, pkv_exchange<HD> &x, uint32_t ring, bool waited,
                  int rows, int tile, int warp, int lane, int *units_begin, int *units_end) {
  typedef pkv_decode_config<KV, HD> C;
  const bool invariant = pkv_invariant(p);
  pkv_piece<KV, HD, NT, CTAS> piece;
  pkv_feed<KV, HD> feed;
  pkv_walk_start(piece.walk, p, work);
  feed.start(piece.walk, p, work, ring, warp, lane);
  if (waited) {
    pkv_grid_release();
    piece.q.start(p, piece.walk, tile, lane);
  }

  bool open = false;
  int slot = 0, filling = p.stages - 1;
  for (;;) {
    /* Before this only plan, table and old tokens are read: where launches overlap, the kernel
       ahead may still be writing q and the newest tokens. */
    if (!waited && (filling == 0 || p.wait_tokens || !feed.is_old(p))) {
      pkv_grid_wait();
      pkv_grid_release();
      piece.q.start(p, piece.walk, tile, lane);
      waited = true;
    }
    /* What is complete goes out, and the next piece comes in. */
    while (filling == 0 && (!open || piece.walk.at >= piece.until)) {
      if (open) {
        const pkv_target to = piece.to;
        const bool last = !invariant || piece.walk.at >= piece.walk.end;
        pkv_fold_warps<KV, HD, NT>(
            piece.s, x, rows, warp, lane, [&](int m, int d, const pkv_item &item) {
              if (to.starts_cut || to.ends_cut)
                pkv_item_to_slot<HD>(pkv_slot<HD>(p, tile, to.slot + piece.units), m, d, item);
              else if (invariant)
                pkv_run_chunk<HD>(x, p, piece.walk, tile, m, d, item, piece.units == 0, last, lane);
              else
                pkv_item_store(p, piece.walk.row, piece.walk.head, tile * NT * 8 + m, d, item);
            });
        ++piece.units;
        if (invariant && to.starts_cut) *units_begin = piece.units;
        if (invariant && !to.starts_cut && to.ends_cut) *units_end = piece.units;
        if (!last) {
          piece.begin_state(p);
          continue;
        }
        pkv_walk_next(piece.walk, p, work);
      }
      if (EMPTIES && !invariant &&
          pkv_pass_empty<HD, NT>(piece.walk, p, work, rows, tile, warp, lane))
        piece.q.start(p, piece.walk, tile, lane); /* the one read ahead was an empty row's */
      if (piece.walk.row < 0) break;
      open = true;
      piece.to = pkv_target_of(piece.walk, work, invariant);
      piece.q.enter(p, piece.walk, work, tile, lane);
      piece.scale = pkv_scale_of(p, piece.walk.head);
      piece.units = 0;
      piece.begin_state(p);
    }
    if (piece.walk.row < 0) break;

    feed.push(p, work, warp, lane);
    if (filling > 0) {
      --filling;
      continue;
    }
    pkv_ring_wait(p.stages);
    __syncwarp();
    pkv_slice_attend<KV, HD, NT>(piece.s, piece.q.now, piece.walk, p, piece.scale,
                                 feed.ring + (uint32_t)(slot * C::stage_bytes), tile, warp, lane);
    __syncwarp();
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    piece.walk.at += PKV_STEP_TOKENS;
  }
}

/* The pieces of a part of `balanced`. Lengths are read 32 rows at a time, a lane each. */
struct pkv_short_walk : pkv_alone_walk {
  int lens, lens_row; /* of rows lens_row, lens_row - 1, ... */
};
struct pkv_short_work : pkv_work {
  int warp, alone; /* alone: most tokens of a piece for one warp */
};

template <typename P>
static __device__ __forceinline__ void pkv_short_lens(pkv_short_walk &w, const P &p, int row) {
  const int lane = threadIdx.x & 31;
  w.lens_row = row;
  w.lens = 0;
  if (row - lane >= 0) w.lens = (int)pkv_load_ahead(p.seq_len + row - lane);
}

template <typename P>
static __device__ __forceinline__ void pkv_walk_next(pkv_short_walk &w, const P &p,
                                                     const pkv_short_work &work) {
  do {
    if (--w.head < 0) {
      w.head = p.cache.kv_heads - 1;
      if (--w.row < 0) return;
      if (w.lens_row - w.row >= 32) pkv_short_lens(w, p, w.row);
      w.len = __shfl_sync(0xffffffffu, w.lens, w.lens_row - w.row);
    }
    pkv_walk_enter(w, p, work);
    if (w.row < 0) return;
  } while (!w.takes(w.end - w.at, work.alone, work.warp));
}

template <typename P>
static __device__ __forceinline__ void pkv_walk_start(pkv_short_walk &w, const P &p,
                                                      const pkv_short_work &work) {
  w.row = work.end.row;
  w.head = work.end.kv_head;
  w.len = work.end.length;
  w.next_len = 0;
  w.number = w.turn = 0;
  pkv_short_lens(w, p, w.row - 1);
  if (work.end.unit > 0) {
    pkv_walk_enter(w, p, work);
    if (w.row < 0 || w.takes(w.end - w.at, work.alone, work.warp)) return;
  }
  pkv_walk_next(w, p, work);
}

/* As pkv_decode_pieces, where there are many short ones: plain calls. */
template <typename KV, int HD, typename P>
static __device__ __forceinline__ void
pkv_decode_short(const P &p, const pkv_work &part, pkv_exchange<HD> &x, uint32_t ring, bool waited,
                 int rows, int tile, int warp, int lane) {
  pkv_short_work work;
  static_cast<pkv_work &>(work) = part;
  work.warp = warp;
  work.alone = PKV_CUDA_ALONE_UNITS * PKV_TILE_TOKENS;
  pkv_short_walk now;
  pkv_walk_start(now, p, work);
  if (waited) pkv_grid_release();
  pkv_run_pieces<KV, HD>(
      now, p, work, x, ring, waited, rows, tile, warp, lane,
      [] {
        pkv_grid_wait();
        pkv_grid_release();
      },
      [&](const pkv_walk &w, int m, int d, const pkv_item &item) {
        const pkv_target to = pkv_target_of(w, part, false);
        if (to.starts_cut || to.ends_cut)
          pkv_item_to_slot<HD>(pkv_slot<HD>(p, tile, to.slot), m, d, item);
        else
          pkv_item_store(p, w.row, w.head, tile * 8 + m, d, item);
      });
}

/* Whether a part has many pieces, and pieces are on average no longer than a warp takes alone. */
static __device__ __forceinline__ bool pkv_is_short(const pkv_cuda_decode_params &p,
                                                    const pkv_work &work, int64_t total_cost) {
  const int pieces =
      (work.end.row - work.begin.row) * p.cache.kv_heads + work.end.kv_head - work.begin.kv_head;
  return pieces >= PKV_WARPS && total_cost <= (pieces + 1) * p.alone_cost;
}

/*
 * A launch of few segments has few CTAs that fold, each for long, with what they read coming
 * through one multiprocessor. There query row m of a cut segment is folded by the m-th CTA after
 * the one with the last piece, which still waits for CTAs before it only; behind the last part are
 * CTAs that do nothing else. Bit m of the result: row m of a segment, whose merge lane m has.
 */
template <typename P>
static __device__ __forceinline__ uint32_t pkv_rows_to_fold(const P &p, int parts, int rows,
                                                            int lane, int *merge) {
  const int part = (int)blockIdx.x - lane;
  bool mine = lane < rows && part >= 0 && part < parts;
  if (mine) {
    const pkv_plan_cursor *begin = p.cursors + part, *end = begin + 1;
    *merge = begin->merge;
    mine = begin->unit > 0 && (begin->row != end->row || begin->kv_head != end->kv_head);
  }
  return __ballot_sync(0xffffffffu, mine);
}

/* MANY: with the way for parts of short pieces. CTAS: of the kernel an SM. */
template <typename K, int HD, int NT, bool MANY = false,
          int CTAS = pkv_decode_config<typename K::template of<HD>, HD>::ctas(NT), typename P>
static __device__ __forceinline__ void pkv_decode_part(const P &p) {
  typedef typename K::template of<HD> KV;
  typedef pkv_decode_config<KV, HD> C;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tile = blockIdx.y;
  const int rows = min(NT * 8, pkv_q_len(p) * p.group - tile * NT * 8);
  const int ring_bytes = p.stages * C::stage_bytes;
  unsigned char *ring = memory + warp * ring_bytes;
  const uint32_t ring_at = (uint32_t)__cvta_generic_to_shared(ring);
  const bool invariant = pkv_invariant(p);
  constexpr bool empties = MANY || !pkv_kind_of<P>::plain;
  pkv_exchange<HD> x;
  x.init(memory + PKV_WARPS * ring_bytes, rows, invariant);
  __syncthreads();

  if (p.wait_first) pkv_grid_wait();
  const bool few = !MANY && p.few_rows > 0;
  int parts = (int)gridDim.x, part = (int)blockIdx.x;
  if (few) {
    parts -= p.few_rows - 1;
    part = min(part, parts);
  }
  pkv_work work;
  work.begin = p.cursors[part];
  work.end = p.cursors[few ? min(part + 1, parts) : part + 1];
  uint32_t folds = 0;
  int fold_merge = 0;
  constexpr bool plain = pkv_kind_of<P>::plain; /* else registers are short: later */
  if (few && plain) folds = pkv_rows_to_fold(p, parts, rows, lane, &fold_merge);
  int units_begin = 0, units_end = 0;
  if (MANY && pkv_is_short(p, work, *p.total_cost))
    pkv_decode_short<KV, HD>(p, work, x, ring_at, p.wait_first, rows, tile, pkv_from_here(warp),
                             pkv_from_here(lane));
  else
    pkv_decode_pieces<KV, HD, NT, empties, CTAS>(p, work, x, ring_at, p.wait_first, rows, tile,
                                                 pkv_from_here(warp), pkv_from_here(lane),
                                                 &units_begin, &units_end);
  pkv_copy_wait<0>();

  if (invariant) { /* the cut segments, now that all warps' states are out */
    if (units_end > 0) pkv_merge_chunks<HD>(p, work.end.merge, tile, units_end, rows);
    if (units_begin > 0) pkv_merge_chunks<HD>(p, work.begin.merge, tile, units_begin, rows);
    return;
  }
  if (few) {
    if (!plain) folds = pkv_rows_to_fold(p, parts, rows, lane, &fold_merge);
    if (folds == 0) return;
    __syncthreads();
    for (; folds != 0; folds &= folds - 1) {
      const int m = __ffs((int)folds) - 1;
      const pkv_plan_merge to = p.merges[__shfl_sync(0xffffffffu, fold_merge, m)];
      pkv_fold_row<HD>(p, to, m, tile, x, ring, ring_bytes, warp, lane);
    }
    return;
  }
  /* A segment that was cut before and ends here. */
  const bool ends_here = work.begin.row != work.end.row || work.begin.kv_head != work.end.kv_head;
  if (work.begin.unit == 0 || !ends_here) return;
  __syncwarp();
  const pkv_plan_merge to = p.merges[work.begin.merge];
  if (MANY)
    pkv_fold_segment_apart<HD>(p, to, tile, rows, ring, ring_bytes, warp, lane);
  else
    pkv_fold_segment<HD>(p, to, tile, rows, ring, ring_bytes, warp, lane);
}

template <typename K, int HD, int NT>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas(NT))
    pkv_cuda_decode(const __grid_constant__ pkv_cuda_decode_params p) {
  if (NT == 1 && p.many)
    pkv_decode_part<K, HD, 1, true>(*(const pkv_plain_params *)&p);
  else
    pkv_decode_part<K, HD, NT>(p);
}

template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas(1))
    pkv_cuda_decode_plain(const __grid_constant__ pkv_plain_params p) {
  pkv_decode_part<K, HD, 1>(p);
}

/* One task of the seed's routes: grid (items, tiles of query rows). */
template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas(1))
    pkv_cuda_decode_items(const __grid_constant__ pkv_cuda_decode_params p) {
  constexpr int NT = 1;
  typedef typename K::template of<HD> KV;
  typedef pkv_decode_config<KV, HD> C;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tile = blockIdx.y;
  const int rows = min(NT * 8, p.q_len * p.group - tile * NT * 8);
  const int ring_bytes = p.stages * C::stage_bytes;
  pkv_exchange<HD> x;
  x.init(memory + PKV_WARPS * ring_bytes, rows, false);
  __syncthreads();
  pkv_grid_wait();
  pkv_grid_release();
  const pkv_plan_item item = p.items[blockIdx.x];

  /* One piece: the walk ends after it. */
  pkv_feed<KV, HD> feed;
  pkv_walk &ahead = feed.walk;
  pkv_work work = {};
  work.begin.row = work.end.row = item.row;
  work.begin.kv_head = work.end.kv_head = item.kv_head;
  ahead.row = item.row;
  ahead.head = item.kv_head;
  ahead.len = p.seq_len[item.row];
  ahead.next_len = 0;
  ahead.at = item.unit_begin * p.unit_tokens;
  ahead.end = item.unit_end * p.unit_tokens;
  /* a unit past the row's last is padding, which is read; a unit that holds the row's end is not */
  if (ahead.end - p.unit_tokens < ahead.len) ahead.end = min(ahead.end, ahead.len);
  if (ahead.len == 0) ahead.end = ahead.at;
  pkv_walk now = ahead;
  feed.start(now, p, work, (uint32_t)__cvta_generic_to_shared(memory + warp * ring_bytes), warp,
             lane);
  pkv_query<HD, NT> q;
  pkv_load_q<KV, HD, NT>(q, p, now.row, now.head, tile, lane);
  const float scale = pkv_scale_of(p, now.head);
  pkv_state<HD, NT> s;
  pkv_state_reset(s);
  int slot = 0, filling = p.stages - 1;
  while (now.at < now.end) {
    feed.push(p, work, warp, lane);
    if (filling > 0) {
      --filling;
      continue;
    }
    pkv_ring_wait(p.stages);
    __syncwarp();
    pkv_slice_attend<KV, HD, NT>(s, q, now, p, scale, feed.ring + (uint32_t)(slot * C::stage_bytes),
                                 tile, warp, lane);
    __syncwarp();
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    now.at += PKV_STEP_TOKENS;
  }
  const int id = (p.split_first[item.row] + item.split) * p.cache.kv_heads + item.kv_head;
  pkv_fold_warps<KV, HD, NT>(s, x, rows, warp, lane, [&](int m, int d, const pkv_item &state) {
    pkv_item_to_slot<HD>(pkv_slot<HD>(p, tile, id), m, d, state);
  });
  pkv_copy_wait<0>();
  if (!p.fused_merge) return;
  const int count = p.split_first[item.row + 1] - p.split_first[item.row];
  if (pkv_arrive(p.counters + tile * p.counters_stride + item.row * p.cache.kv_heads + item.kv_head,
                 1, count))
    pkv_fold_slots<HD>(p, item.row, item.kv_head, tile,
                       p.split_first[item.row] * p.cache.kv_heads + item.kv_head, count,
                       p.cache.kv_heads, rows);
}

#endif
