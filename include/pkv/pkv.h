/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv.h - libpkv: decode attention straight on paged KV caches.
 *
 * What it does. Given a paged K/V cache (block tables, grouped-query heads, any strides), the
 * lengths of the rows of a batch and their query vectors, it computes softmax(q k^T) v for each
 * row, without repacking the cache.
 *
 * The order of calls in a decode step
 *   1. pkv_plan_size()     once, from limits: how much memory plan and workspace need
 *   2. pkv_plan_build()    once a step: lengths -> work list; serves every layer of the same shape
 *   3. pkv_append()        once a layer: the new tokens' K and V go into their pages
 *   4. pkv_attention_run() once a layer
 *
 * Caveats, before anything else
 *   - Sizes are counted in tokens and strides in *elements* of the dtype, never in bytes, unless
 *     the name ends in _bytes.
 *   - The head dimension is contiguous. Every other stride is free.
 *   - seq_len counts the tokens of a row *including* the q_len query tokens themselves: append
 *     first, then attend.
 *   - Each options or arguments struct starts with struct_size; use its _INIT macro. 0 or NULL
 *     always means the default.
 *   - Results go to the first parameter. The last parameter of a call that can fail is an optional
 *     pkv_error.
 *   - Nothing here exits, aborts, prints, or keeps a global last error.
 *
 * Threads. Three kinds of object: *immutable* (share freely), *single-owner* (one thread at a
 * time), *thread-safe*. The comment of each type says which.
 */
#ifndef PKV_PKV_H
#define PKV_PKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_VERSION_MAJOR 0
#define PKV_VERSION_MINOR 1
#define PKV_VERSION_PATCH 0

#if defined(__GNUC__)
#define PKV_API        __attribute__((visibility("default")))
#define PKV_MUST_CHECK __attribute__((warn_unused_result))
#else
#define PKV_API
#define PKV_MUST_CHECK
#endif

/* ------------------------------------------------------------------------------------------
 * Status and errors
 * ------------------------------------------------------------------------------------------ */

/* Codes are pinned: a value never changes its meaning. X(name, value, text) */
#define PKV_STATUS_MAP(X)                                                                          \
  X(OK, 0, "ok")                                                                                   \
  X(E_INVALID, -1, "invalid argument")                                                             \
  X(E_NOMEM, -2, "out of memory")                                                                  \
  X(E_UNSUPPORTED, -3, "not supported")                                                            \
  X(E_RANGE, -4, "value out of range")                                                             \
  X(E_TOO_SMALL, -5, "caller's memory too small")                                                  \
  X(E_NO_PAGES, -6, "no free pages")                                                               \
  X(E_IO, -7, "input/output error")                                                                \
  X(E_FORMAT, -8, "malformed data")                                                                \
  X(E_STATE, -9, "call not allowed in this state")                                                 \
  X(E_LIMIT, -10, "limit exceeded")                                                                \
  X(E_DEVICE, -11, "device error")                                                                 \
  X(E_INTERNAL, -12, "internal error")

typedef enum pkv_status {
#define PKV_STATUS_ENUM(name, value, text) PKV_##name = (value),
  PKV_STATUS_MAP(PKV_STATUS_ENUM)
#undef PKV_STATUS_ENUM
} pkv_status;

#define PKV_ERROR_TEXT_BYTES 192

/* Detail of a failure, filled by the failing call when the caller passes one. No allocation,
 * nothing to free. */
typedef struct pkv_error {
  pkv_status status;
  const char *where;               /* static string: the function that refused */
  char text[PKV_ERROR_TEXT_BYTES]; /* names the argument, what was given, what was possible; always
                                      terminated */
} pkv_error;

/* The code's name ("E_INVALID"), or its plain text. Static strings, never NULL whatever the value.
 */
PKV_API const char *pkv_status_name(pkv_status status);
PKV_API const char *pkv_status_text(pkv_status status);

/* Of the library that is linked: "major.minor.patch", and 1000000*major + 1000*minor + patch. */
PKV_API const char *pkv_version(void);
PKV_API int32_t pkv_version_number(void);

/* ------------------------------------------------------------------------------------------
 * Memory and logging
 * ------------------------------------------------------------------------------------------ */

/*
 * Where a handle takes its memory from. alloc gets a size > 0 and a power-of-two alignment and
 * returns NULL when there is none; free gets what alloc returned and the same size. A NULL
 * allocator in an options struct means the C library. The struct is copied; ctx must outlive the
 * handle.
 */
typedef struct pkv_allocator {
  void *(*alloc)(void *ctx, size_t size, size_t align);
  void (*free)(void *ctx, void *ptr, size_t size);
  void *ctx;
} pkv_allocator;

typedef enum pkv_log_level {
  PKV_LOG_ERROR = 0,
  PKV_LOG_WARN = 1,
  PKV_LOG_INFO = 2,
  PKV_LOG_DEBUG = 3
} pkv_log_level;

/* room: "kv", "plan", ...; text: one line without newline, valid during the call only. */
typedef void (*pkv_log_fn)(void *user, pkv_log_level level, const char *room, const char *text);

/* Installs the process's log sink. Silent by default; NULL makes it silent again. Call before other
 * threads start. */
PKV_API void pkv_log_set(pkv_log_fn fn, void *user);

/* ------------------------------------------------------------------------------------------
 * Element types
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_dtype {
  PKV_DTYPE_F32 = 0,
  PKV_DTYPE_F16 = 1,
  PKV_DTYPE_BF16 = 2,
  PKV_DTYPE_FP8_E4M3 = 3 /* the OCP "fn" kind: no infinities, 0x7f and 0xff are NaN, largest 448 */
} pkv_dtype;

PKV_API const char *pkv_dtype_name(pkv_dtype dtype); /* "f16"; "?" for an unknown value */
PKV_API size_t pkv_dtype_bytes(pkv_dtype dtype);     /* 4, 2, 2, 1; 0 for an unknown value */

/* ------------------------------------------------------------------------------------------
 * Executor: what runs the work (a CPU worker pool today)
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_device { PKV_DEVICE_CPU = 0, PKV_DEVICE_CUDA = 1 } pkv_device;

typedef enum pkv_isa {
  /* The best one this machine has, or what the environment variable PKV_CPU names. */
  PKV_ISA_AUTO = 0,
  PKV_ISA_REFERENCE = 1, /* double precision, slow on purpose: the oracle of the tests */
  PKV_ISA_SCALAR = 2,
  PKV_ISA_AVX2 = 3,   /* AVX2 + FMA + F16C */
  PKV_ISA_AVX512 = 4, /* F, BW, DQ, VL; products use VNNI where it is there */
  PKV_ISA_NEON = 5    /* not in this version */
} pkv_isa;

PKV_API const char *pkv_isa_name(pkv_isa isa); /* "avx2"; "?" for an unknown value */

typedef struct pkv_executor_options {
  uint32_t struct_size;
  pkv_device device;
  pkv_isa isa; /* CPU only */
  /* CPU only: workers, the caller's thread included; 0 = one a core this process may use. */
  int32_t threads;
  const pkv_allocator *allocator;
} pkv_executor_options;
#define PKV_EXECUTOR_OPTIONS_INIT                                                                  \
  { (uint32_t)sizeof(pkv_executor_options), PKV_DEVICE_CPU, PKV_ISA_AUTO, 0, NULL }

/* Single-owner. Workers sleep between calls. Results never depend on the number of workers. */
typedef struct pkv_executor pkv_executor;

/* *out is NULL on failure. E_UNSUPPORTED: the device or the instruction set is not here (the text
 * says what is). */
PKV_API PKV_MUST_CHECK pkv_status pkv_executor_create(pkv_executor **out,
                                                      const pkv_executor_options *options,
                                                      pkv_error *err);
PKV_API void pkv_executor_destroy(pkv_executor *executor); /* NULL is allowed */
PKV_API pkv_isa pkv_executor_isa(const pkv_executor *executor);
PKV_API int32_t pkv_executor_threads(const pkv_executor *executor);

/* ------------------------------------------------------------------------------------------
 * The cache of one layer, as attention sees it
 * ------------------------------------------------------------------------------------------ */

/*
 * A view: borrowed pointers, copied by value. Element (page, token, head, i) of K is
 *   k[page*k_page_stride + token*k_token_stride + head*k_head_stride + i],   0 <= i < head_dim,
 * in 64-bit arithmetic. That covers [page, token, head, d] (NHD), [page, head, token, d] (HND), K
 * and V interleaved in one buffer, and token-major pools (page_tokens 1). Strides must be such that
 * no two elements coincide. fp8: a stored value x stands for x * scale * head_scale[head]; the
 * scales are ignored for other dtypes.
 */
typedef struct pkv_cache {
  uint32_t struct_size;
  pkv_dtype dtype;
  void *k;
  void *v;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  int64_t pages;       /* page ids are 0 .. pages-1; at most INT32_MAX */
  int32_t page_tokens; /* 1 .. 1024 */
  int32_t kv_heads;
  int32_t head_dim; /* a multiple of 8, 8 .. 256 */
  float k_scale;    /* per tensor; 0 = 1.0 */
  float v_scale;
  const float *k_head_scale; /* [kv_heads] or NULL */
  const float *v_head_scale;
} pkv_cache;
#define PKV_CACHE_INIT                                                                             \
  {                                                                                                \
    (uint32_t)sizeof(pkv_cache), PKV_DTYPE_F32, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0f,    \
        0.0f, NULL, NULL                                                                           \
  }

/* ------------------------------------------------------------------------------------------
 * Pool: pages with reference counts, and the K/V storage of all layers behind them
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_layout {
  /* [page, head, token, d]: K (and V) of a page and KV head is one contiguous run (default). */
  PKV_LAYOUT_HND = 0,
  PKV_LAYOUT_NHD = 1 /* [page, token, head, d] */
} pkv_layout;

typedef struct pkv_pool_options {
  uint32_t struct_size;
  pkv_dtype dtype;
  pkv_layout layout;
  int32_t layers; /* 0 = 1; every layer has the same shape and shares the page ids */
  int32_t kv_heads;
  int32_t head_dim;
  int32_t page_tokens; /* 0 = 16 */
  int64_t pages;
  float k_scale, v_scale; /* fp8, all layers; 0 = 1.0 */
  const pkv_allocator *allocator;
} pkv_pool_options;
#define PKV_POOL_OPTIONS_INIT                                                                      \
  {                                                                                                \
    (uint32_t)sizeof(pkv_pool_options), PKV_DTYPE_F16, PKV_LAYOUT_HND, 1, 0, 0, 16, 0, 0.0f, 0.0f, \
        NULL                                                                                       \
  }

/* Single-owner. */
typedef struct pkv_pool pkv_pool;

typedef struct pkv_pool_stats {
  int64_t pages_total, pages_free, pages_in_use; /* free + in use = total, always */
  int64_t pages_shared;                          /* in use with more than one owner */
  int64_t peak_in_use;
  int64_t copies; /* pages copied because a writer found them shared */
  size_t storage_bytes;
} pkv_pool_stats;

/* Owns its storage. Storage is not touched before it is written: a large pool costs address space
 * only. */
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_create(pkv_pool **out, const pkv_pool_options *options,
                                                  pkv_error *err);
/* Borrows foreign storage: `caches` [layers] of one shape (pages, page_tokens, heads, head_dim,
 * dtype), none overlapping another. The views are copied; their memory must outlive the pool. */
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_wrap(pkv_pool **out, const pkv_cache *caches,
                                                int32_t layers, const pkv_allocator *allocator,
                                                pkv_error *err);
/* After its tables. NULL is allowed. */
PKV_API void pkv_pool_destroy(pkv_pool *pool);
/* The view of one layer, for pkv_append and pkv_attention_run. */
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_cache(pkv_cache *out, const pkv_pool *pool,
                                                 int32_t layer, pkv_error *err);

/* Takes `count` free pages with reference count 1 into ids[count], all or none (E_NO_PAGES). */
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_alloc(int32_t *ids, pkv_pool *pool, int64_t count,
                                                 pkv_error *err);
/* One more / one less owner of each page; all or none. E_RANGE: no such page; E_STATE: a free page,
 * or one that stands in ids more often than it has owners. */
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_retain(pkv_pool *pool, const int32_t *ids, int64_t count,
                                                  pkv_error *err);
PKV_API PKV_MUST_CHECK pkv_status pkv_pool_release(pkv_pool *pool, const int32_t *ids,
                                                   int64_t count, pkv_error *err);
/* Owners of a page: 0 = free; -1 = no such page. */
PKV_API int32_t pkv_pool_refcount(const pkv_pool *pool, int32_t page);
PKV_API void pkv_pool_get_stats(pkv_pool_stats *out, const pkv_pool *pool);

/* ------------------------------------------------------------------------------------------
 * Block tables: which pages a row's tokens lie in
 * ------------------------------------------------------------------------------------------ */

/* Single-owner, with its pool. Rows keep references to their pages; entries past a row's last page
 * hold -1. Calls that fail change nothing: E_RANGE no such row or token, E_LIMIT more than
 * max_pages, E_NO_PAGES, E_STATE a row that should be empty is not. */
typedef struct pkv_table pkv_table;

/* `rows` empty rows of up to max_pages pages. The pool must outlive the table. */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_create(pkv_table **out, pkv_pool *pool, int32_t rows,
                                                   int32_t max_pages,
                                                   const pkv_allocator *allocator, pkv_error *err);
/* Releases the pages of all rows; before its pool. NULL is allowed. */
PKV_API void pkv_table_destroy(pkv_table *table);
/*
 * Makes room for `tokens` more tokens and adds them to the row's length. New pages are taken as
 * needed; a partly filled last page that others share is copied first (all layers), so that nobody
 * else sees the writes.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_extend(pkv_table *table, int32_t row, int32_t tokens,
                                                   pkv_error *err);
/* Shortens the row to `tokens`; pages no longer needed are released. */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_truncate(pkv_table *table, int32_t row, int32_t tokens,
                                                     pkv_error *err);
/* The empty row dst becomes the first `tokens` tokens of src; pages are shared, a partly filled
 * last one included. */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_fork(pkv_table *table, int32_t dst, int32_t src,
                                                 int32_t tokens, pkv_error *err);
/* The empty row takes over `pages` (each retained once more) as its first `tokens` tokens. */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_attach(pkv_table *table, int32_t row,
                                                   const int32_t *pages, int32_t page_count,
                                                   int32_t tokens, pkv_error *err);
/* slots[i] = page * page_tokens + offset of token first + i: what pkv_append takes. */
PKV_API PKV_MUST_CHECK pkv_status pkv_table_slots(int64_t *slots, const pkv_table *table,
                                                  int32_t row, int32_t first, int32_t count,
                                                  pkv_error *err);
PKV_API int32_t pkv_table_seq_len(const pkv_table *table, int32_t row); /* -1 = no such row */
/* The row's page ids, [max_pages]; borrowed, valid until the table is destroyed. NULL = no such
 * row. */
PKV_API const int32_t *pkv_table_row(const pkv_table *table, int32_t row);
PKV_API int64_t pkv_table_stride(const pkv_table *table); /* entries between rows */

/* ------------------------------------------------------------------------------------------
 * Appending new tokens
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_rope_pairs {
  PKV_ROPE_HALVES = 0,  /* element j turns with j + dims / 2: GPT-NeoX's order, most checkpoints' */
  PKV_ROPE_ADJACENT = 1 /* 2j turns with 2j + 1: the order of GGUF's llama family */
} pkv_rope_pairs;

/*
 * Rotary embedding of K on its way into the cache: pair j of a head of the token at `position`
 * turns by the angle position * frequency of j. Angles, cosine and sine are computed in double and
 * rounded to float; the products are float's.
 */
typedef struct pkv_rope {
  uint32_t struct_size;
  pkv_rope_pairs pairs;
  int32_t dims; /* the head's first `dims` elements turn, even; 0 = head_dim */
  double base;  /* frequency of j: base^(-2j / dims) radians a position; 0 = 10000 */
  /* [dims / 2]: these frequencies, whatever base is; or NULL. Memory as the call's other arrays. */
  const float *inverse_frequency;
  const int32_t *positions; /* [tokens] */
} pkv_rope;
#define PKV_ROPE_INIT                                                                              \
  { (uint32_t)sizeof(pkv_rope), PKV_ROPE_HALVES, 0, 0.0, NULL, NULL }

/* The struct of version 0.1.0 ended before `dtype`; its size is accepted. */
typedef struct pkv_append_args {
  uint32_t struct_size;
  const pkv_cache *cache;
  int64_t tokens;
  const int64_t *slots; /* [tokens]: page * page_tokens + offset; -1 = skip this token */
  const void *k;        /* [tokens, kv_heads, head_dim] of `dtype` */
  const void *v;
  int64_t k_token_stride, v_token_stride; /* elements; 0 = kv_heads * the head stride */
  pkv_dtype dtype;                        /* of k and v: f32, f16 or bf16 */
  int64_t k_head_stride, v_head_stride;   /* 0 = head_dim */
  const pkv_rope *rope;                   /* K is turned first; or NULL */
} pkv_append_args;
#define PKV_APPEND_ARGS_INIT                                                                       \
  { (uint32_t)sizeof(pkv_append_args), NULL, 0, NULL, NULL, NULL, 0, 0, PKV_DTYPE_F32, 0, 0, NULL }

/* Writes K and V, converted to the cache's dtype through float (fp8: divided by the scales,
 * saturating). All slots are checked first. Of a slot given twice the later token stays. */
PKV_API PKV_MUST_CHECK pkv_status pkv_append(pkv_executor *executor, const pkv_append_args *args,
                                             pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Plan: lengths -> work list
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_route {
  PKV_ROUTE_AUTO = 0, /* pkv_plan_build: balanced */
  /* A decode and a merge launch for each distinct length (baseline). */
  PKV_ROUTE_BUCKET_EXACT = 1,
  /* A decode and a merge launch for each length bucket, rows padded to it (baseline). */
  PKV_ROUTE_BUCKET_PADDED = 2,
  /* One bucket, S splits with each row's own bounds, separate merge. */
  PKV_ROUTE_SPLIT = 3,
  /* One list of the non-empty row x split x KV head tasks, separate merge. */
  PKV_ROUTE_WORKQUEUE = 4,
  /* Equal-cost cuts of the (row, KV head, tile) line, merged in the same launch. */
  PKV_ROUTE_BALANCED = 5,
  /* `balanced` over a tree of shared prefixes, each read once (pkv_plan_build_shared). */
  PKV_ROUTE_SHARED = 6,
  PKV_ROUTE_FLASHINFER = 7 /* FlashInfer's kernels where installed: pkv/router.h alone runs it */
} pkv_route;

PKV_API const char *pkv_route_name(pkv_route route); /* "balanced"; "?" for an unknown value */

/* What all layers of one class have in common. */
typedef struct pkv_shape {
  uint32_t struct_size;
  int32_t query_heads; /* a multiple of kv_heads, at most 32 a KV head */
  int32_t kv_heads;
  int32_t head_dim; /* a multiple of 8, 8 .. 256 */
  int32_t page_tokens;
  /* Query tokens a row, 1 .. 2^20; token t sits at position seq_len - q_len + t and sees no
     later key. */
  int32_t q_len;
  int32_t window; /* keys a query sees, its own included; 0 = all */
} pkv_shape;
#define PKV_SHAPE_INIT                                                                             \
  { (uint32_t)sizeof(pkv_shape), 0, 0, 0, 16, 1, 0 }

/* A row's bits do not depend on its neighbours, on the batch, on the number of workers, nor on
 * q_len. */
#define PKV_PLAN_BATCH_INVARIANT 1u
/* balanced: `parts` is the most; batches of few and short rows are cut in fewer, and those of equal
 * ones where none need then be cut (a device's default number of parts implies it). Not with
 * PKV_PLAN_BATCH_INVARIANT. */
#define PKV_PLAN_FEWER_PARTS 2u
/* shared: a tree whose nodes save less than a twentieth of the tokens that the rows read has none
 * (a device's default costs imply it). */
#define PKV_PLAN_ENOUGH_SHARED 4u

#define PKV_TILE_TOKENS      64 /* cut unit of `balanced`, counted from the row's start */
#define PKV_SEED_TILE_TOKENS 32 /* tile of the seed's routes */

typedef struct pkv_plan_options {
  uint32_t struct_size;
  pkv_route route;
  uint32_t flags;
  int32_t parts; /* balanced: how many equal-cost parts; 0 = 16 */
  /* split, bucket_*: S, 0 = 16. workqueue: S for each row, 0 = the seed's rule. */
  int32_t splits;
  int32_t bucket_tokens; /* bucket_padded: lengths are rounded up to a multiple of this; 0 = 4096 */
  int32_t chunk_tokens;  /* batch-invariant: absolute chunk, a multiple of 64; 0 = 512 */
  /* balanced: integer cost of 64 tokens of a row and KV head; 0 = 8 (shared: 64) ... */
  uint32_t tile_cost;
  uint32_t segment_cost; /* ... and of starting a (row, KV head) segment; 0 = 4 (shared: 32) */
  /*
   * shared: 64 tokens of a node and KV head for up to 128 query rows (0 = tile_cost), and for each
   * batch row among them (0 = 0); starting such a segment (0 = 2 * segment_cost); writing and
   * reading the partial states of one batch row and KV head (0 = tile_cost * q_len * G / 32).
   */
  uint32_t node_tile_cost, node_row_cost, node_segment_cost, state_cost;
} pkv_plan_options;
#define PKV_PLAN_OPTIONS_INIT                                                                      \
  { (uint32_t)sizeof(pkv_plan_options), PKV_ROUTE_BALANCED, 0u, 0, 0, 0, 0, 0u, 0u, 0u, 0u, 0u, 0u }

/* A built plan: immutable, plain bytes without pointers in the caller's memory; the address is the
 * handle. */
typedef struct pkv_plan pkv_plan;

/*
 * Bytes needed for any batch within the limits, in closed form: size once, then plan each step into
 * the same memory. Both memories must be aligned to 64 bytes. The workspace needs no
 * initialisation.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_plan_size(size_t *plan_bytes, size_t *workspace_bytes,
                                                const pkv_shape *shape,
                                                const pkv_plan_options *options, int32_t max_rows,
                                                int32_t max_seq_len, pkv_error *err);
/*
 * Builds the plan for `rows` rows of seq_len[rows] tokens (>= 0) at the start of `memory`; *out
 * points there. Allocates nothing, calls no device. A row of length 0 gives zeros and lse -inf.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_plan_build(const pkv_plan **out, void *memory,
                                                 size_t memory_bytes, const pkv_shape *shape,
                                                 const pkv_plan_options *options, int32_t rows,
                                                 const int32_t *seq_len, pkv_error *err);

/* A promise of callers with a prefix cache: an equal page id at an index implies equal pages at all
 * indices before it. Common prefixes are then found by binary search. */
#define PKV_TABLE_CHAINED 1u

/* A run of pages that neighbouring rows share: indices [first_page, first_page + page_count) of
 * their block tables are the same pages. */
typedef struct pkv_prefix_node {
  int32_t first_row, row_count; /* places in `order` */
  int32_t first_page, page_count;
} pkv_prefix_node;

/*
 * What rows share: read from their block tables, or told by a scheduler that knows.
 * Without nodes and order: from the block table, rows in any order; equal leading page ids are
 * shared tokens. Else from the nodes, and rows are expected in an order in which sharers meet.
 * Nodes come in preorder (a parent, its children by first_row, each followed by its own): a child
 * lies inside its parent's rows, has fewer of them, and starts where the parent's pages end; a root
 * starts at page 0. Nodes of one row are allowed and mean nothing. With a block table the pages of
 * each node are compared; without, the caller's word counts.
 */
typedef struct pkv_sharing {
  uint32_t struct_size;
  uint32_t flags;             /* PKV_TABLE_CHAINED */
  const int32_t *block_table; /* [rows, max_pages], as pkv_attention_args; NULL with nodes only */
  int64_t block_table_stride; /* entries between rows; 0 = max_pages */
  int32_t max_pages;
  int32_t node_count;
  const pkv_prefix_node *nodes; /* [node_count] or NULL */
  const int32_t *order; /* [rows]: the row at each place, each row once; NULL = 0, 1, 2, ... */
} pkv_sharing;
#define PKV_SHARING_INIT                                                                           \
  { (uint32_t)sizeof(pkv_sharing), 0u, NULL, 0, 0, 0, NULL, NULL }

/*
 * As pkv_plan_build for PKV_ROUTE_SHARED: prefixes that several rows share become nodes, read once
 * for all of them where that pays; sizes are those that pkv_plan_size says for the route. Whole
 * tiles are shared (batch-invariant: whole chunks), up to what every query of every sharer sees.
 * Row order of q, out and block table stays the caller's. A malformed node list, or one that does
 * not fit lengths and tables, is E_INVALID: the text says which node and why.
 * With a window, entries of pages that no query sees are compared like any other; what they hold
 * can cost sharing, never correctness.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_plan_build_shared(const pkv_plan **out, void *memory,
                                                        size_t memory_bytes, const pkv_shape *shape,
                                                        const pkv_plan_options *options,
                                                        int32_t rows, const int32_t *seq_len,
                                                        const pkv_sharing *sharing, pkv_error *err);

/* Counters of one step with a plan, for one layer. KV bytes are those of a cache of `kv_dtype`. */
typedef struct pkv_plan_stats {
  uint32_t struct_size;
  pkv_route route;
  int32_t rows;
  int32_t launches;          /* kernel launches a step */
  int64_t tasks;             /* work items, or non-empty parts */
  int64_t partial_states;    /* (row, query head, query token) states written to the workspace */
  int64_t merge_state_bytes; /* partial_states * (head_dim + 2) * 4 */
  int64_t useful_kv_bytes;   /* K and V bytes of tokens that some query may see */
  int64_t padded_kv_bytes;   /* K and V bytes beyond them in whole tiles and buckets */
  int64_t max_part_cost, total_cost;  /* balanced, shared: the largest part against the whole */
  size_t plan_bytes, workspace_bytes; /* what this plan really uses */
  int64_t nodes;                      /* shared prefixes that are read once */
  int64_t unique_kv_bytes;            /* useful bytes with each node's counted once ... */
  int64_t total_kv_bytes;             /* ... and as if every row read its own: useful_kv_bytes */
  double dedup_ratio;                 /* total / unique; 1 where nothing is read */
  double tile_fill; /* query rows in nodes' tiles of 128, averaged over their work; 0 = no nodes */
} pkv_plan_stats;
#define PKV_PLAN_STATS_INIT                                                                        \
  {                                                                                                \
    (uint32_t)sizeof(pkv_plan_stats), PKV_ROUTE_AUTO, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    \
        0.0, 0.0                                                                                   \
  }

PKV_API PKV_MUST_CHECK pkv_status pkv_plan_get_stats(pkv_plan_stats *out, const pkv_plan *plan,
                                                     pkv_dtype kv_dtype, pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Policy: which route
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_policy {
  PKV_POLICY_FIXED = 0,    /* the route the caller names */
  PKV_POLICY_STATIC = 1,   /* the seed's first thresholds */
  PKV_POLICY_ROOFLINE = 2, /* its second rule: smallest roofline estimate above its thresholds */
  /* The smallest prediction of the profile's cost model (profile.h), which must be there. */
  PKV_POLICY_CALIBRATED = 3
} pkv_policy;

PKV_API const char *pkv_policy_name(pkv_policy policy); /* "roofline"; "?" for an unknown value */

/* Coefficients fitted on a device (profile.h). */
typedef struct pkv_cost_model pkv_cost_model;

/* What the policy knows of a device. Zero fields take the seed's constants (RTX 3060). */
typedef struct pkv_profile {
  uint32_t struct_size;
  char name[64];
  double read_gb_s; /* read bandwidth, 10^9 bytes a second; 0 = 302 */
  double launch_us; /* cost of one launch; 0 = 8 */
  int32_t sms;      /* multiprocessors, or cores; 0 = 28 */
  int32_t min_ctas; /* CTAs a multiprocessor that saturate it; 0 = 4 */
  uint32_t routes;  /* bit (1 << route) set = available; 0 = all but shared and flashinfer */
  int32_t layers;   /* calibrated: layers of a step that one plan serves; 0 = 32 */
  const pkv_cost_model *model; /* borrowed; NULL = none */
} pkv_profile;
#define PKV_PROFILE_INIT                                                                           \
  { (uint32_t)sizeof(pkv_profile), {0}, 0.0, 0.0, 0, 0, 0u, 0, NULL }

typedef struct pkv_choice {
  uint32_t struct_size;
  pkv_route wanted; /* what the rule names */
  pkv_route route;  /* what is used: wanted where available */
  int32_t splits;   /* 0 = the route's own rule */
  int32_t kind;     /* of profile.h: calibrated names the route's variant; 0 = any */
  double predicted_us;
  char reason[160];
} pkv_choice;
#define PKV_CHOICE_INIT                                                                            \
  {                                                                                                \
    (uint32_t)sizeof(pkv_choice), PKV_ROUTE_AUTO, PKV_ROUTE_AUTO, 0, 0, 0.0, {                     \
      0                                                                                            \
    }                                                                                              \
  }

/* A pure function of its arguments: same input, same choice. `fixed` is read by PKV_POLICY_FIXED
 * only. */
PKV_API PKV_MUST_CHECK pkv_status pkv_policy_choose(pkv_choice *out, pkv_policy policy,
                                                    pkv_route fixed, const pkv_shape *shape,
                                                    pkv_dtype kv_dtype, int32_t rows,
                                                    const int32_t *seq_len,
                                                    const pkv_profile *profile, pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Attention
 * ------------------------------------------------------------------------------------------ */

typedef struct pkv_attention_args {
  uint32_t struct_size;
  const pkv_plan *plan;
  const pkv_cache *cache;
  /* [rows, max_pages] page ids; entries past ceil(seq_len / page_tokens) are never read. */
  const int32_t *block_table;
  int64_t block_table_stride; /* entries between rows; 0 = max_pages */
  int32_t max_pages;
  pkv_dtype q_dtype;                     /* f32, f16 or bf16 */
  const void *q;                         /* [rows * q_len, query_heads, head_dim] */
  int64_t q_token_stride, q_head_stride; /* 0 = contiguous */
  pkv_dtype out_dtype;                   /* f32, f16 or bf16 */
  void *out;                             /* like q */
  int64_t out_token_stride, out_head_stride;
  /* [rows * q_len, query_heads] or NULL: log of the softmax denominator, sink included. */
  float *lse;
  int64_t lse_token_stride; /* 0 = query_heads */
  int32_t lse_base2;        /* 0: natural logarithm (default); 1: base 2, as FlashInfer */
  float scale;              /* 0 = 1 / sqrt(head_dim) */
  float soft_cap;           /* c > 0: logit = c * tanh(logit / c); 0 = none */
  /* [query_heads] or NULL: one more logit in the denominator, without a value. */
  const float *sinks;
  void *workspace; /* aligned to 64 bytes, at least what pkv_plan_size said */
  size_t workspace_bytes;
} pkv_attention_args;
#define PKV_ATTENTION_ARGS_INIT                                                                    \
  {                                                                                                \
    (uint32_t)sizeof(pkv_attention_args), NULL, NULL, NULL, 0, 0, PKV_DTYPE_F32, NULL, 0, 0,       \
        PKV_DTYPE_F32, NULL, 0, 0, NULL, 0, 0, 0.0f, 0.0f, NULL, NULL, 0                           \
  }

/*
 * Runs the plan. Everything is checked before the first write: pointers, strides, the shape of plan
 * against cache, the page ids of each row (E_RANGE names row, index and id), the workspace.
 * Allocates nothing. Single call at a time for one executor and one workspace.
 * A query without keys (a row of length 0, or q_len > seq_len) gives zeros and lse -inf, sinks or
 * not. With a window, table entries of pages that no query sees are not read. What no row owns
 * (other pages, page tails, the workspace's content) may hold anything, NaN included.
 * Source: FlashAttention's online softmax; split merge by log-sum-exp.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_attention_run(pkv_executor *executor,
                                                    const pkv_attention_args *args, pkv_error *err);

/*
 * Merges attention over disjoint key sets: out = sum_s exp(lse_s - lse_out) o_s.
 *   o        [states, tokens, heads, head_dim], each normalised
 *   lse      [states, tokens, heads], natural logarithm
 *   out      [tokens, heads, head_dim]
 *   lse_out  [tokens, heads] or NULL
 * Folded in the order of `states`. A state with lse -inf is neutral, its o is not read (it may hold
 * NaN); where all are, out is 0 and lse_out -inf. Host memory, allocates nothing, any thread.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_merge_states(float *out, float *lse_out, const float *o,
                                                   const float *lse, int32_t states, int64_t tokens,
                                                   int32_t heads, int32_t head_dim, pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
