/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folding of partial states.
 *
 * Inside a CTA, the 4 warps' states of a piece: each warp puts its state into shared memory and
 * goes on with its next piece; the last of the four to do so folds them, in warp order. So no warp
 * waits for another, and which warp folds does not show in the result.
 *
 * Between CTAs, the pieces of a segment that was cut, in slot order. The CTA with the last piece
 * folds. Its partners leave their states in slots that hold PKV_CUDA_EMPTY in every word before, so
 * that a word that differs has arrived: no fence, no counter, no second trip. It waits for CTAs
 * before it in the grid only, which have been started before it, and empties the slots again. In
 * launches of few segments CTAs behind it fold a query row each (pkv_rows_to_fold).
 * Batch-invariant plans and the seed's fused merge have a slot for each chunk or split; there
 * arrivals are counted.
 */
#ifndef PKV_CUDA_FOLD_CUH
#define PKV_CUDA_FOLD_CUH

#include "backend/cuda/slice.cuh"

#define PKV_TURN_ROWS   8         /* query rows that are folded together at most */
#define PKV_FOLD_PIECES 64        /* pieces of a cut segment whose states are read together */
#define PKV_FOLD_BATCH  8         /* chunks of one, where arrivals are counted */
#define PKV_PATIENCE    (1 << 20) /* reads of an empty slot, about a second, before it is a fault */

template <int HD> struct pkv_fold {
  static constexpr int pitch = HD + 4; /* floats between rows: keeps the warps' stores apart */
  static constexpr int floats = PKV_WARPS * PKV_TURN_ROWS * pitch;
  static constexpr int stats = PKV_WARPS * PKV_TURN_ROWS;
  static constexpr int bytes = floats * 4 + stats * 8 + 64; /* and words to meet by */
};

/* Four values of one query row, and that row's m and l. */
struct pkv_item {
  float m, l;
  float4 acc;
};

static __device__ __forceinline__ pkv_item pkv_item_neutral() {
  return {-CUDART_INF_F, 0.0f, make_float4(0, 0, 0, 0)};
}
static __device__ __forceinline__ void pkv_scale4(float4 &a, float x) {
  a = make_float4(a.x * x, a.y * x, a.z * x, a.w * x);
}
static __device__ __forceinline__ void pkv_add4(float4 &a, const float4 &b, float x) {
  a = make_float4(a.x + b.x * x, a.y + b.y * x, a.z + b.z * x, a.w + b.w * x);
}

/* a := a folded with b, which comes later in token order. */
static __device__ __forceinline__ void pkv_item_fold(pkv_item &a, const pkv_item &b) {
  const float m = fmaxf(a.m, b.m), ref = m == -CUDART_INF_F ? 0.0f : m;
  const float wa = pkv_exp2(a.m - ref), wb = pkv_exp2(b.m - ref);
  a.m = m;
  a.l = a.l * wa + b.l * wb;
  pkv_scale4(a.acc, wa);
  pkv_add4(a.acc, b.acc, wb);
}

/* Four neighbouring outputs. */
template <typename P>
static __device__ __forceinline__ void pkv_store_out(const P &p, int64_t at, const float4 &x) {
  const float v[4] = {x.x, x.y, x.z, x.w};
  if (p.out_dtype == PKV_DTYPE_F32) {
    float *out = (float *)p.out + at;
    if (pkv_out_vectors(p)) {
      *(float4 *)out = x;
      return;
    }
    for (int i = 0; i < 4; ++i)
      out[i] = v[i];
    return;
  }
  const bool half = p.out_dtype == PKV_DTYPE_F16;
  uint2 two;
  two.x = half ? pkv_half_type::pack(x.x, x.y) : pkv_bf16_type::pack(x.x, x.y);
  two.y = half ? pkv_half_type::pack(x.z, x.w) : pkv_bf16_type::pack(x.z, x.w);
  uint16_t *out = (uint16_t *)p.out + at;
  if (pkv_out_vectors(p)) {
    *(uint2 *)out = two;
    return;
  }
  out[0] = (uint16_t)two.x;
  out[1] = (uint16_t)(two.x >> 16);
  out[2] = (uint16_t)two.y;
  out[3] = (uint16_t)(two.y >> 16);
}

/* Normalises, adds the sink, and stores an item: query row q of the segment, from d on. */
template <typename P>
static __device__ __forceinline__ void pkv_item_store(const P &p, int row, int head, int q, int d,
                                                      const pkv_item &item) {
  const int t = pkv_q_len(p) == 1 ? 0 : q / p.group, g = q - t * p.group, h = head * p.group + g;
  const int64_t token = (int64_t)row * pkv_q_len(p) + t;
  float m = item.m, l = item.l, keep = 1.0f;
  if (pkv_sinks(p) && m != -CUDART_INF_F) {
    const float sink = pkv_sinks(p)[h] * PKV_LOG2_E;
    const float top = fmaxf(m, sink);
    keep = pkv_exp2(m - top);
    l = l * keep + pkv_exp2(sink - top);
    m = top;
  }
  if (d == 0 && p.lse) {
    const float lse2 = m == -CUDART_INF_F ? -CUDART_INF_F : m + log2f(l);
    p.lse[token * p.lse_token_stride + h] = p.lse_base2 ? lse2 : lse2 * 0.693147181f;
  }
  if (d >= p.cache.head_dim) return; /* a multiple of 8 */
  const float v_scale = pkv_v_head_scale(p) ? p.v_scale * pkv_v_head_scale(p)[head] : p.v_scale;
  float4 x = item.acc;
  pkv_scale4(x, l > 0.0f ? keep / l * v_scale : 0.0f);
  pkv_store_out(p, token * p.out_token_stride + (int64_t)h * p.out_head_stride + d, x);
}

/* A row of a slot: acc[HD], m, l, two words of padding. */
template <int HD> struct pkv_slot_row { static constexpr int floats = HD + 4; };

template <int HD, typename P>
static __device__ __forceinline__ float *pkv_slot(const P &p, int tile, int slot) {
  return p.slots +
         ((int64_t)tile * p.slots_stride + slot) * (p.tile_rows * pkv_slot_row<HD>::floats);
}

/* A value that is not PKV_CUDA_EMPTY. */
static __device__ __forceinline__ float pkv_not_empty(float x) {
  return __float_as_uint(x) == PKV_CUDA_EMPTY ? CUDART_NAN_F : x;
}

template <int HD>
static __device__ __forceinline__ void pkv_item_to_slot(float *slot, int m, int d,
                                                        const pkv_item &item) {
  const float4 a = item.acc;
  float *row = slot + m * pkv_slot_row<HD>::floats;
  *(float4 *)(row + d) =
      make_float4(pkv_not_empty(a.x), pkv_not_empty(a.y), pkv_not_empty(a.z), pkv_not_empty(a.w));
  if (d == 0)
    *(float4 *)(row + HD) = make_float4(pkv_not_empty(item.m), pkv_not_empty(item.l), 0.0f, 0.0f);
}

/* ------------------------------------------------------------------------------------------
 * Between the warps of a CTA
 * ---------------------------------------------------------------------------------------- */

/* The area in shared memory through which warps hand states over; events are numbered. */
template <int HD> struct pkv_exchange {
  float *states;  /* [buffers][warps][turn_rows][pitch] */
  float2 *stats;  /* [buffers][warps][turn_rows] of m, l */
  uint32_t words; /* [buffers] warps that have arrived, [buffers] events that are through */
  int turn_rows;  /* query rows an event holds */
  int buffers;    /* 1 or 2 */
  int event;      /* of this warp: the next */

  __device__ __forceinline__ void init(unsigned char *memory, int rows, bool keep_half) {
    states = (float *)memory;
    stats = (float2 *)(states + pkv_fold<HD>::floats);
    int *sync = (int *)(stats + pkv_fold<HD>::stats);
    words = (uint32_t)__cvta_generic_to_shared(sync);
    const bool half = keep_half || rows <= PKV_TURN_ROWS / 2;
    turn_rows = half ? PKV_TURN_ROWS / 2 : PKV_TURN_ROWS;
    buffers = half && !keep_half ? 2 : 1;
    event = 0;
    if (threadIdx.x < 4) sync[threadIdx.x] = 0;
  }
  /* With keep_half: room for 16 rows of a running result. */
  __device__ __forceinline__ float *kept() const {
    return states + pkv_fold<HD>::floats / 2;
  }
  __device__ __forceinline__ float2 *kept_stats() const {
    return stats + pkv_fold<HD>::stats / 2;
  }

  __device__ __forceinline__ int buffer() const {
    return event & (buffers - 1);
  }
  __device__ __forceinline__ float *state_of(int buffer, int warp, int r) const {
    return states + ((buffer * PKV_WARPS + warp) * turn_rows + r) * pkv_fold<HD>::pitch;
  }
  __device__ __forceinline__ float2 *stats_of(int buffer, int warp) const {
    return stats + (buffer * PKV_WARPS + warp) * turn_rows;
  }
  /* Waits until the event that used the buffer before is through. */
  __device__ __forceinline__ void acquire() const {
    const int before = buffers == 2 ? event >> 1 : event;
    while (pkv_shared_acquire(words + 8 + buffer() * 4) < before) {}
  }
  /* Announces this warp's states; true in the whole warp if it is the last. */
  __device__ __forceinline__ bool arrive(int lane) const {
    int before = 0;
    __syncwarp();
    if (lane == 0) before = pkv_shared_add(words + buffer() * 4, 1);
    before = __shfl_sync(0xffffffffu, before, 0);
    __syncwarp();
    return before == PKV_WARPS - 1;
  }
  __device__ __forceinline__ void release(int lane) const {
    const uint32_t arrived = words + buffer() * 4;
    __syncwarp();
    if (lane == 0) {
      pkv_shared_release(arrived, 0);
      pkv_shared_release(arrived + 8, (buffers == 2 ? event >> 1 : event) + 1);
    }
  }
};

/* l of all lanes; the state's statistics are then the same in all lanes of a column. */
template <int HD, int NT>
static __device__ __forceinline__ void pkv_state_finish(pkv_state<HD, NT> &s) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      s.l[n][j] += __shfl_xor_sync(0xffffffffu, s.l[n][j], 4);
      s.l[n][j] += __shfl_xor_sync(0xffffffffu, s.l[n][j], 8);
      s.l[n][j] += __shfl_xor_sync(0xffffffffu, s.l[n][j], 16);
    }
}

/* Puts query rows [first, first + turn_rows) of this warp's state into the exchange. */
template <typename KV, int HD, int NT>
static __device__ __forceinline__ void pkv_deposit(const pkv_state<HD, NT> &s,
                                                   const pkv_exchange<HD> &x, int first, int rows,
                                                   int warp, int lane) {
  const int buffer = x.buffer();
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = 8 * n + 2 * (lane & 3) + j, r = m - first;
      if (r < 0 || r >= x.turn_rows || m >= rows) continue;
      float *to = x.state_of(buffer, warp, r);
#pragma unroll
      for (int b = 0; b < HD / 16; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          to[KV::dim_of(b, half, lane)] = s.acc[n][b][half * 2 + j];
      if (lane < 4) x.stats_of(buffer, warp)[r] = make_float2(s.m[n][j], s.l[n][j]);
    }
}

/*
 * Hands this warp's state of a piece over, in turns; the warp that comes last folds the four, in
 * warp order, and calls done(m, d, item) for every query row m and dimensions d .. d + 3. Its lane
 * 4 r + k has the statistics of row r of the turn from warp k. Moves x.event on.
 */
template <typename KV, int HD, int NT, typename F>
static __device__ __forceinline__ void pkv_fold_warps(pkv_state<HD, NT> &s, pkv_exchange<HD> &x,
                                                      int rows, int warp, int lane, F done) {
  pkv_state_finish(s);
  for (int first = 0; first < rows; first += x.turn_rows) {
    x.acquire();
    pkv_deposit<KV, HD, NT>(s, x, first, rows, warp, lane);
    if (x.arrive(lane)) {
      const int buffer = x.buffer(), here = min(x.turn_rows, rows - first);
      float2 ml = make_float2(-CUDART_INF_F, 0.0f);
      if (lane / 4 < here) ml = x.stats_of(buffer, lane & 3)[lane / 4];
      float high = fmaxf(ml.x, __shfl_xor_sync(0xffffffffu, ml.x, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
      const float weight = pkv_exp2(ml.x - (high == -CUDART_INF_F ? 0.0f : high));
      float l = ml.y * weight;
      l += __shfl_xor_sync(0xffffffffu, l, 1);
      l += __shfl_xor_sync(0xffffffffu, l, 2);
#pragma unroll 1
      for (int from = 0; from < here * (HD / 4); from += 32) {
        const int r = (from + lane) / (HD / 4), d = (from + lane) % (HD / 4) * 4;
        const int at = min(r, here - 1);
        pkv_item item = {__shfl_sync(0xffffffffu, high, 4 * at),
                         __shfl_sync(0xffffffffu, l, 4 * at), make_float4(0, 0, 0, 0)};
#pragma unroll
        for (int k = 0; k < PKV_WARPS; ++k)
          pkv_add4(item.acc, *(const float4 *)(x.state_of(buffer, k, at) + d),
                   __shfl_sync(0xffffffffu, weight, 4 * at + k));
        if (r < here) done(first + r, d, item);
        __syncwarp();
      }
      x.release(lane);
    }
    ++x.event;
  }
}

/*
 * As pkv_fold_warps for a piece that this warp has had alone: its place in the exchange, where no
 * other warp looks before it announces an event, turns the state round.
 */
template <typename KV, int HD, int NT, typename F>
static __device__ __forceinline__ void pkv_fold_alone(pkv_state<HD, NT> &s,
                                                      const pkv_exchange<HD> &x, int rows, int warp,
                                                      int lane, F done) {
  pkv_state_finish(s);
  for (int first = 0; first < rows; first += x.turn_rows) {
    x.acquire();
    pkv_deposit<KV, HD, NT>(s, x, first, rows, warp, lane);
    __syncwarp();
    const int buffer = x.buffer(), here = min(x.turn_rows, rows - first);
#pragma unroll 1
    for (int i = lane; i < here * (HD / 4); i += 32) {
      const int r = i / (HD / 4), d = i % (HD / 4) * 4;
      const float2 ml = x.stats_of(buffer, warp)[r];
      done(first + r, d, pkv_item{ml.x, ml.y, *(const float4 *)(x.state_of(buffer, warp, r) + d)});
    }
    __syncwarp();
  }
}

/* ------------------------------------------------------------------------------------------
 * Between CTAs
 * ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool pkv_is_empty(const float4 &x) {
  return __float_as_uint(x.x) == PKV_CUDA_EMPTY || __float_as_uint(x.y) == PKV_CUDA_EMPTY ||
         __float_as_uint(x.z) == PKV_CUDA_EMPTY || __float_as_uint(x.w) == PKV_CUDA_EMPTY;
}

/* Copies row m of `count` slots to shared memory. The whole warp. */
template <int HD>
static __device__ __forceinline__ void pkv_copy_pieces(uint32_t to, const float *row, int64_t step,
                                                       int count, int lane) {
  constexpr int vectors = pkv_slot_row<HD>::floats / 4;
  if (lane < vectors)
#pragma unroll 8
    for (int k = 0; k < count; ++k)
      pkv_copy16(to + (uint32_t)(k * vectors + lane) * 16, row + k * step + lane * 4, 16);
  if (vectors > 32) /* what is left over, of all pieces: a lane each */
    for (int i = lane; i < count * (vectors - 32); i += 32) {
      const int k = i / (vectors - 32), v = 32 + i % (vectors - 32);
      pkv_copy16(to + (uint32_t)(k * vectors + v) * 16, row + k * step + v * 4, 16);
    }
  pkv_copy_commit();
}

/* Whether any word of the rows of slots at `pieces` is empty. The whole warp. */
template <int HD>
static __device__ __noinline__ bool pkv_any_empty(const float *pieces, int count, int lane) {
  bool empty = false;
#pragma unroll 1
  for (int i = lane; i < count * (pkv_slot_row<HD>::floats / 4); i += 32)
    empty |= pkv_is_empty(((const float4 *)pieces)[i]);
  return __any_sync(0xffffffffu, empty);
}

/*
 * Folds into sum the rows of slots at `pieces`, in order: lanes have their m and l, two each, and
 * each lane dimensions lane * 4 + 128 i. False, and sum is of no use, if a word has not arrived: it
 * is a NaN and makes the sum one. So do others; only if `exact` are words looked at for that.
 */
template <int HD>
static __device__ __forceinline__ bool pkv_fold_rows(pkv_item sum[(HD + 127) / 128],
                                                     const float *pieces, int count, int lane,
                                                     bool exact) {
  constexpr int pitch = pkv_slot_row<HD>::floats, parts = (HD + 127) / 128, turn = 8;
  float4 stats[2];
  float high = sum[0].m, weight[2], l = 0.0f;
  bool missing = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = lane + i * 32;
    stats[i] = k < count ? *(const float4 *)(pieces + k * pitch + HD)
                         : make_float4(-CUDART_INF_F, 0, 0, 0);
    missing |= pkv_is_empty(stats[i]);
    high = fmaxf(high, stats[i].x);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, i));
  const float ref = high == -CUDART_INF_F ? 0.0f : high, shrink = pkv_exp2(sum[0].m - ref);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weight[i] = pkv_exp2(stats[i].x - ref);
    l += stats[i].y * weight[i];
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    l += __shfl_xor_sync(0xffffffffu, l, i);
#pragma unroll
  for (int i = 0; i < parts; ++i) {
    sum[i].m = high;
    sum[i].l = sum[i].l * shrink + l;
    pkv_scale4(sum[i].acc, shrink);
  }
  const auto add = [&](int k, float of) {
    const float w = __shfl_sync(0xffffffffu, of, k);
#pragma unroll
    for (int i = 0; i < parts; ++i)
      pkv_add4(sum[i].acc, *(const float4 *)(pieces + k * pitch + min(i * 128 + lane * 4, HD - 4)),
               w);
  };
  int k = 0;
#pragma unroll 1
  for (; k + turn <= count; k += turn) {
    const float of = k < 32 ? weight[0] : weight[1];
#pragma unroll
    for (int j = 0; j < turn; ++j)
      add(k + j, of);
  }
#pragma unroll 1
  for (; k < count; ++k)
    add(k, k < 32 ? weight[0] : weight[1]);
#pragma unroll
  for (int i = 0; i < parts; ++i) {
    const float4 a = sum[i].acc;
    missing |= a.x != a.x || a.y != a.y || a.z != a.z || a.w != a.w;
  }
  if (!__any_sync(0xffffffffu, missing)) return true;
  return exact && !pkv_any_empty<HD>(pieces, count, lane);
}

/* Leaves row m of `count` slots empty. */
template <int HD>
static __device__ __forceinline__ void pkv_empty_pieces(float *row, int64_t step, int count,
                                                        int lane) {
  constexpr int vectors = pkv_slot_row<HD>::floats / 4;
  constexpr int turns = vectors < 32 ? 1 : vectors / 32, rest = vectors < 32 ? 0 : vectors % 32;
  const uint4 empty = make_uint4(PKV_CUDA_EMPTY, PKV_CUDA_EMPTY, PKV_CUDA_EMPTY, PKV_CUDA_EMPTY);
  if (lane < vectors)
#pragma unroll 4
    for (int k = 0; k < count; ++k)
#pragma unroll
      for (int i = 0; i < turns; ++i)
        *(uint4 *)(row + k * step + (i * 32 + lane) * 4) = empty;
  if (rest > 0)
#pragma unroll 1
    for (int i = lane; i < count * rest; i += 32) { /* what is left over, of all pieces */
      const int k = i / (rest > 0 ? rest : 1), v = vectors - rest + i % (rest > 0 ? rest : 1);
      *(uint4 *)(row + k * step + v * 4) = empty;
    }
}

/*
 * Folds `count` slots from `row` on, `step` floats apart, into sum, in order: waits for each. The
 * caller empties them. The whole warp, with `room` bytes of `memory` of its own.
 */
template <int HD, typename P>
static __device__ __forceinline__ void
pkv_fold_run(pkv_item sum[(HD + 127) / 128], const P &p, int segment_row, const float *row,
             int64_t step, int count, unsigned char *memory, int room, int lane) {
  constexpr int parts = (HD + 127) / 128, row_bytes = pkv_slot_row<HD>::floats * 4;
  const int most = min(PKV_FOLD_PIECES, room / row_bytes);
  for (int k = 0; k < count; k += most) {
    const int here = min(most, count - k);
    pkv_item before[parts];
#pragma unroll
    for (int i = 0; i < parts; ++i)
      before[i] = sum[i];
    int patience = PKV_PATIENCE;
    for (;;) {
      __syncwarp(); /* what was there has been read */
      pkv_copy_pieces<HD>((uint32_t)__cvta_generic_to_shared(memory), row + k * step, step, here,
                          lane);
      pkv_copy_wait<0>();
      __syncwarp();
      const bool exact = patience % 16 == 1; /* now and then: a result may be a NaN */
      if (pkv_fold_rows<HD>(sum, (const float *)memory, here, lane, exact) || --patience == 0)
        break;
#pragma unroll
      for (int i = 0; i < parts; ++i)
        sum[i] = before[i];
    }
    if (patience == 0 && lane == 0) atomicMax(p.fault, 1 + segment_row);
  }
}

/*
 * The result of a cut segment whose pieces come into slots to.first_slot on: waits for them, folds
 * them in order, stores, and empties the slots. Each warp has query rows of its own, and `room`
 * bytes of `memory`. The whole warp.
 */
template <int HD, typename P>
static __device__ void pkv_fold_segment(const P &p, const pkv_plan_merge &to, int tile, int rows,
                                        unsigned char *memory, int room, int warp, int lane) {
  constexpr int parts = (HD + 127) / 128;
  const int64_t step = p.tile_rows * pkv_slot_row<HD>::floats;
  for (int m = warp; m < rows; m += PKV_WARPS) {
    float *row = pkv_slot<HD>(p, tile, to.first_slot) + m * pkv_slot_row<HD>::floats;
    pkv_item sum[parts];
#pragma unroll
    for (int i = 0; i < parts; ++i)
      sum[i] = pkv_item_neutral();
    pkv_fold_run<HD>(sum, p, to.row, row, step, to.count, memory, room, lane);
#pragma unroll
    for (int i = 0; i < parts; ++i)
      if (i * 128 + lane * 4 < HD)
        pkv_item_store(p, to.row, to.kv_head, tile * p.tile_rows + m, i * 128 + lane * 4, sum[i]);
    pkv_empty_pieces<HD>(row, step, to.count, lane);
  }
}

/* The same, not inline: where registers are short and few segments are cut. */
template <int HD, typename P>
static __device__ __noinline__ void pkv_fold_segment_apart(const P &p, pkv_plan_merge to, int tile,
                                                           int rows, unsigned char *memory,
                                                           int room, int warp, int lane) {
  pkv_fold_segment<HD>(p, to, tile, rows, memory, room, warp, lane);
}

/*
 * One query row of such a segment by a whole CTA: each warp folds a quarter of the pieces, the
 * first warp then the quarters. All threads, after a barrier behind the last event in x.
 */
template <int HD, typename P>
static __device__ __forceinline__ void
pkv_fold_row(const P &p, const pkv_plan_merge &to, int m, int tile, const pkv_exchange<HD> &x,
             unsigned char *memory, int room, int warp, int lane) {
  constexpr int parts = (HD + 127) / 128;
  const int64_t step = p.tile_rows * pkv_slot_row<HD>::floats;
  const int each = (to.count + PKV_WARPS - 1) / PKV_WARPS, first = min(warp * each, to.count);
  const int count = min(each, to.count - first);
  float *row = pkv_slot<HD>(p, tile, to.first_slot + first) + m * pkv_slot_row<HD>::floats;
  pkv_item sum[parts];
#pragma unroll
  for (int i = 0; i < parts; ++i)
    sum[i] = pkv_item_neutral();
  pkv_fold_run<HD>(sum, p, to.row, row, step, count, memory, room, lane);
#pragma unroll
  for (int i = 0; i < parts; ++i)
    if (i * 128 + lane * 4 < HD)
      *(float4 *)(x.state_of(0, warp, 0) + i * 128 + lane * 4) = sum[i].acc;
  if (lane == 0) *x.stats_of(0, warp) = make_float2(sum[0].m, sum[0].l);
  __syncthreads();
  if (warp == 0)
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int d = i * 128 + lane * 4;
      if (d >= HD) continue;
#pragma unroll
      for (int k = 1; k < PKV_WARPS; ++k) {
        const float2 ml = *x.stats_of(0, k);
        pkv_item_fold(sum[i], {ml.x, ml.y, *(const float4 *)(x.state_of(0, k, 0) + d)});
      }
      pkv_item_store(p, to.row, to.kv_head, tile * p.tile_rows + m, d, sum[i]);
    }
  pkv_empty_pieces<HD>(row, step, count, lane);
  __syncthreads();
}

/* Announces `units` arrivals at a merge; true for the CTA that completes it, in all threads. */
static __device__ __forceinline__ bool pkv_arrive(uint32_t *counter, int units, int count) {
  __shared__ int last_arriver;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, (uint32_t)units) + (uint32_t)units == (uint32_t)count;
    if (last) *counter = 0; /* ready for the next launch */
    __threadfence();
    last_arriver = last;
  }
  __syncthreads();
  return last_arriver;
}

/*
 * Folds `count` pieces from slot `first` on, `stride` slots apart, one by one and in order, and
 * stores the result. All threads; all pieces have arrived.
 */
template <int HD, typename P>
static __device__ void pkv_fold_slots(const P &p, int row, int head, int tile, int first, int count,
                                      int stride, int rows) {
  const float *slots = pkv_slot<HD>(p, tile, first);
  const int64_t step = (int64_t)stride * (p.tile_rows * pkv_slot_row<HD>::floats);
  for (int i = threadIdx.x; i < rows * (HD / 4); i += PKV_THREADS) {
    const int m = i / (HD / 4), d = (i - m * (HD / 4)) * 4;
    const float *at = slots + m * pkv_slot_row<HD>::floats;
    pkv_item sum = pkv_item_neutral();
    for (int k = 0; k < count; k += PKV_FOLD_BATCH) {
      float4 stats[PKV_FOLD_BATCH], acc[PKV_FOLD_BATCH];
#pragma unroll
      for (int j = 0; j < PKV_FOLD_BATCH; ++j) {
        const float *piece = at + min(k + j, count - 1) * step;
        stats[j] = pkv_load_state(piece + HD);
        acc[j] = pkv_load_state(piece + d);
      }
#pragma unroll
      for (int j = 0; j < PKV_FOLD_BATCH; ++j)
        if (k + j < count) pkv_item_fold(sum, {stats[j].x, stats[j].y, acc[j]});
    }
    pkv_item_store(p, row, head, tile * p.tile_rows + m, d, sum);
  }
}

/* Whether the batch shares nothing and `balanced` serves it. The plan must be complete. */
static __device__ __forceinline__ bool pkv_shares_nothing(const pkv_cuda_shared_params &s) {
  return s.has_line && s.view.tree->nodes == 0;
}

#endif
