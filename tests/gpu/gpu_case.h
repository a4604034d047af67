/* SPDX-License-Identifier: Apache-2.0 */
/* An attention problem of attn_case.h on the device. */
#ifndef PKV_TEST_GPU_CASE_H
#define PKV_TEST_GPU_CASE_H

#include "gpu/gpu_suite.h"
#include "pkv/engine.h"
#include "support/attn_case.h"

#define COUNT(a)        (sizeof(a) / sizeof(a)[0])
#define PICK(rng, list) (list)[pkv_rng_below((rng), COUNT(list))]

/* Fails the test with the library's own words. */
#define OK(call)                                                                                   \
  do {                                                                                             \
    pkv_error ok_error = {0};                                                                      \
    pkv_error *const err = &ok_error;                                                              \
    if ((call) != PKV_OK) fail_msg("%s: %s", #call, err->text);                                    \
  } while (0)

/* Device copies of everything a run touches; args points to them. */
typedef struct gpu_case {
  attn_case *host;
  pkv_attention_args args;
  pkv_cache cache;
  void *storage, *table, *q, *out, *lse, *sinks, *k_scale, *v_scale, *seq_len;
} gpu_case;

/* Unit roundoff of q and of weights on the tensor cores beside a cache of this type. */
double gpu_operand_u(pkv_dtype kv);
extern const pkv_dtype gpu_kv_dtypes[3];
/* Plans for every route, both modes of `balanced`, several part counts; returns how many. */
enum { GPU_PLANS = 8 };
int gpu_plan_options(pkv_plan_options options[GPU_PLANS]);
/* attn_spec_default with this cache type, 16-bit queries and outputs. */
attn_spec gpu_spec(pkv_dtype kv, uint64_t seed, int32_t rows, const int32_t *seq_len);

/* A model of random weights, of a config.json's text; on_device: for devices alone. */
pkv_model *gpu_random_model(const char *config, int32_t on_device);
extern const char gpu_llama_8b[]; /* Llama-3-8B's */

/* Device memory with a copy of host memory; NULL for none. */
void *gpu_up(const void *from, size_t bytes);
void gpu_copy(void *to, const void *from, size_t bytes);
void gpu_fill(void *device, int byte, size_t bytes);

void gpu_case_init(gpu_case *g, attn_case *c);
void gpu_case_deinit(gpu_case *g);
/* The host's lengths and table again, after attn_case_set_lengths or changes to the table; entries
   past a row's last page become -1 on the device. */
void gpu_case_refresh(gpu_case *g);
/* A plan for the case: balanced on the device, other routes uploaded; longest: 0 = the longest. */
pkv_device_plan *gpu_plan(gpu_case *g, const pkv_plan_options *options, int32_t longest);
/* Builds or uploads into it again. */
void gpu_replan(gpu_case *g, pkv_device_plan *plan, const pkv_plan_options *options);
/* Fills everything the plan owns on the device, its fault word included: a byte, -1 = random. */
void gpu_poison_plan(pkv_device_plan *plan, int byte, uint64_t seed);
/* gpu_run in two halves: marks the outputs on the device; fetches them into the host's case. */
void gpu_mark(gpu_case *g, int byte);
void gpu_fetch(gpu_case *g);
/* Marks the outputs, runs, fetches out and lse into the host's case. */
void gpu_run(gpu_case *g, pkv_device_plan *plan);
/* Every route, twice each, against the answer; then the device's fault word. */
void gpu_run_routes(attn_case *c);

/*
 * One row's K, V and queries become a function of `seed`, the token's and the element's place, not
 * of the row, the batch or the page. Queries by position: query t of q_len stands at
 * seq_len - q_len + t.
 */
void gpu_fill_row(attn_case *c, int32_t row, uint64_t seed);
/* The bytes of one query token's outputs (all heads, contiguous) in the host's case. */
const unsigned char *gpu_out_of(const attn_case *c, int32_t row, int32_t t, size_t *bytes);

#endif
