/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - request traces for benchmarks: the seed's five seeded kinds, and traces from files.
 *
 * A trace is a list of requests and, for each, the pages it owns; a step is what decodes together.
 * Time counts in decode steps. At step t a request is live while arrival <= t < arrival +
 * decode_tokens, and its row is prompt_tokens + (t - arrival) tokens long; the active set is the
 * first max_active live requests in the order of the list. (That is the seed's harness: a live
 * request that finds no place still grows and ends.)
 *
 * Pages of a request are consecutive slices of one random permutation of the physical pages, of
 * which there are ceil(all pages / (1 - hole_fraction)).
 *
 * The seeded kinds (lengths in tokens, all bounds included; prompts then rounded up to a page)
 *   bucketed     prompt cycles 8192, 16384, 32768, 65536;  decode 32..96
 *   homogeneous  prompt 32768;                             decode 32..96
 *   bimodal      each 4th request, from the first on: prompt 24576..65536, decode 32..128;
 *                else prompt 2048..12288,                  decode 8..64
 *   uniform      prompt 4096..32768,                       decode 16..96
 *   zipf         rank 1..32, then max(1024, floor(2048 + 65536 / sqrt(rank)) + (-512..512)),
 *                                                          decode 8..128
 * drawn in this order for each request (zipf: rank, jitter, decode) from mt19937 initialised with
 * the seed's low 32 bits; a number of n is r mod n. arrival = index / max_active. The permutation
 * comes from a generator of its own, seeded with seed + 99: for i = 0 .. n - 2 swap place i with
 * i + r mod (n - i). That is how the seed's harness drew, so these are its very traces: page counts
 * and KV bytes of all its published runs come out the same (tests/unit/test_trace.c).
 *
 * Calibrate with PKV_TRACE_SEED_CALIBRATION only and report on the held-out seeds only.
 */
#ifndef PKV_TRACE_H
#define PKV_TRACE_H

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_TRACE_SEED_CALIBRATION 20260622u
#define PKV_TRACE_SEED_HELD_OUT    20260623u /* and the four after it */
#define PKV_TRACE_HELD_OUT_SEEDS   5

typedef enum pkv_trace_kind {
  PKV_TRACE_BUCKETED = 0,
  PKV_TRACE_HOMOGENEOUS = 1,
  PKV_TRACE_BIMODAL = 2,
  PKV_TRACE_UNIFORM = 3,
  PKV_TRACE_ZIPF = 4
} pkv_trace_kind;

PKV_API const char *pkv_trace_kind_name(pkv_trace_kind kind); /* "?" for an unknown value */

typedef struct pkv_trace_options {
  uint32_t struct_size;
  pkv_trace_kind kind; /* pkv_trace_create only */
  int32_t requests; /* 0 = the seed's: 24 from max_active 8 on, else 16; files: at most, 0 = all */
  int32_t max_active;   /* 0 = 8 */
  int32_t page_tokens;  /* 0 = 16 */
  double hole_fraction; /* 0 .. 0.99 */
  uint64_t seed;        /* 0 = PKV_TRACE_SEED_CALIBRATION */
  const pkv_allocator *allocator;
} pkv_trace_options;
#define PKV_TRACE_OPTIONS_INIT                                                                     \
  { (uint32_t)sizeof(pkv_trace_options), PKV_TRACE_BUCKETED, 0, 0, 0, 0.0, 0u, NULL }

typedef struct pkv_trace_request {
  int32_t prompt_tokens; /* a multiple of the page */
  int32_t decode_tokens; /* >= 1 */
  int32_t arrival;       /* step */
  int32_t pages;         /* ceil((prompt_tokens + decode_tokens) / page_tokens) */
} pkv_trace_request;

/* Immutable. */
typedef struct pkv_trace pkv_trace;

PKV_API PKV_MUST_CHECK pkv_status pkv_trace_create(pkv_trace **out,
                                                   const pkv_trace_options *options,
                                                   pkv_error *err);
/*
 * Requests from text, untrusted: a JSON list of objects, or CSV with a line of names first.
 * Fields prompt_len (or prompt), decode_len (or decode), and optionally arrival (or arrival_step;
 * the request's index if absent); whole numbers; others are ignored. Text whose first character
 * is '[' is JSON. E_FORMAT names line and fault; E_LIMIT: more than 2^20 requests, 2^24 tokens of
 * a prompt, 2^20 of an answer, 2^30 steps, or 2^26 pages in all.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_trace_parse(pkv_trace **out, const char *text, size_t bytes,
                                                  const pkv_trace_options *options, pkv_error *err);
/* The same from a file of at most 64 MiB. */
PKV_API PKV_MUST_CHECK pkv_status pkv_trace_load(pkv_trace **out, const char *path,
                                                 const pkv_trace_options *options, pkv_error *err);
PKV_API void pkv_trace_destroy(pkv_trace *trace); /* NULL is allowed */

/* The list, [*count]; borrowed. */
PKV_API const pkv_trace_request *pkv_trace_requests(const pkv_trace *trace, int32_t *count);
PKV_API int32_t pkv_trace_max_active(const pkv_trace *trace);
PKV_API int64_t pkv_trace_pages(const pkv_trace *trace); /* physical pages, holes included */
/* Page ids of a request, [its pages]; borrowed. NULL = no such request. */
PKV_API const int32_t *pkv_trace_table(const pkv_trace *trace, int32_t request);
/* The first step >= from with a live request; -1 = none. */
PKV_API int32_t pkv_trace_next_step(const pkv_trace *trace, int32_t from);
/*
 * The active set of a step into request[max_active] and seq_len[max_active]; returns how many there
 * are. seq_len includes the token that is decoded: it never exceeds the request's pages.
 */
PKV_API int32_t pkv_trace_step(int32_t *request, int32_t *seq_len, const pkv_trace *trace,
                               int32_t step);

#ifdef __cplusplus
}
#endif
#endif
