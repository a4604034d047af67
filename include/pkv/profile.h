/* SPDX-License-Identifier: Apache-2.0 */
/*
 * profile.h - what the policy `calibrated` knows of a device: a cost model fitted to measured
 * times, and the profile file that keeps it.
 *
 * The model. Microseconds of a route = sum of coefficient * feature, all coefficients >= 0, one set
 * for the attention call and one for making the plan. Features follow from lengths, shape and
 * route in closed form (pkv_policy_features); nothing is looked up in a table of measured times.
 * A step is judged by attention + plan / layers, as one plan serves all layers.
 *
 * All functions are pure: no state, no clock, no allocation; any thread.
 */
#ifndef PKV_PROFILE_H
#define PKV_PROFILE_H

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* By pkv_route, and variants of two of them that are chosen apart. Kind 0 is not used. */
#define PKV_COST_FLASHINFER_CORES                                                                  \
  8 /* flashinfer on CUDA cores; PKV_ROUTE_FLASHINFER: tensor cores */
/* workqueue in one launch, merged by the last arriver: pkv_device_plan_set_fused; GPU only */
#define PKV_COST_WORKQUEUE_FUSED 9
#define PKV_COST_KINDS           10

typedef enum pkv_cost_feature {
  PKV_COST_ONE = 0,      /* 1 */
  PKV_COST_LAUNCHES = 1, /* launches beyond the first */
  PKV_COST_BYTES = 2,    /* MB (10^6) of K and V that are read, a bucket's padding included */
  PKV_COST_RAMP = 3,     /* the first 32 MB of them: a short read does not reach full speed */
  /* KB of a slot, summed over launches: its even share, and what is read when the last task of rows
     in order ends, as a root of squares; shared: of the longest part */
  PKV_COST_SPAN = 4,
  PKV_COST_WAVES = 5,  /* rounds of tasks over the slots, summed over launches, less one each */
  PKV_COST_TASKS = 6,  /* thousands of tasks */
  PKV_COST_STATES = 7, /* MB of partial states */
  /* states beyond 4 of the deepest merge of each launch, since merges run side by side; shared:
     thousands of (node, KV head) */
  PKV_COST_MERGES = 8,
  PKV_COST_FILL = 9,  /* MB of K and V that whole tiles hold beyond the last token */
  PKV_COST_ROWS = 10, /* rows */
  PKV_COST_WORK = 11, /* shared: MB of K and V as if each row read its own: the arithmetic */
  PKV_COST_FEATURES = 12
} pkv_cost_feature;

PKV_API const char *pkv_cost_feature_name(int32_t feature); /* "bytes"; "?" for an unknown value */
PKV_API const char *pkv_cost_kind_name(int32_t kind); /* the route's, "flashinfer_cores"; "?" */

typedef struct pkv_route_cost {
  int32_t points; /* measured batches behind the fit; 0 = the route is not in the model */
  double attend[PKV_COST_FEATURES], plan[PKV_COST_FEATURES]; /* us a unit of the feature */
  /* |predicted - measured| / measured of attention over those batches */
  double error_mean, error_worst;
} pkv_route_cost;

struct pkv_cost_model {
  uint32_t struct_size;
  char device[96], driver[96], library[16], date[24]; /* printable ASCII */
  pkv_shape shape;                                    /* what was measured */
  pkv_dtype kv_dtype;
  int32_t parts; /* of balanced and shared: plans are to use as many */
  pkv_route_cost cost[PKV_COST_KINDS];
};

typedef struct pkv_prediction {
  int32_t available;                  /* in profile->routes and in the model; else all below is 0 */
  int32_t splits;                     /* S as pkv_plan_options takes it; 0 = the route's own rule */
  double attend_us, plan_us, step_us; /* step_us = attend_us + plan_us / layers */
} pkv_prediction;

/*
 * The features of one batch on one kind. `shared` only: `tree` holds the counters of the plan made
 * from the block tables (pkv_plan_get_stats); else it is not read and may be NULL. profile gives
 * slots (sms * min_ctas) and, with a model, parts. *splits as in pkv_prediction.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_policy_features(double *features, int32_t *splits,
                                                      int32_t kind, const pkv_shape *shape,
                                                      pkv_dtype kv_dtype, int32_t rows,
                                                      const int32_t *seq_len,
                                                      const pkv_plan_stats *tree,
                                                      const pkv_profile *profile, pkv_error *err);

/*
 * Non-negative least squares of relative errors: coefficients [PKV_COST_FEATURES] that minimise
 * sum ((features . coefficients - us) / us)^2. features [points, PKV_COST_FEATURES], us [points],
 * each > 0. mask: bit f set = feature f may be used.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_cost_fit(double *coefficients, const double *features,
                                               const double *us, int32_t points, uint32_t mask,
                                               pkv_error *err);

/* What each kind would take: out [PKV_COST_KINDS]. profile->model must be there. tree: counters of
 * a plan of route shared for this batch, or NULL: shared is not available then. */
PKV_API PKV_MUST_CHECK pkv_status pkv_policy_predict(pkv_prediction *out, const pkv_shape *shape,
                                                     pkv_dtype kv_dtype, int32_t rows,
                                                     const int32_t *seq_len,
                                                     const pkv_plan_stats *tree,
                                                     const pkv_profile *profile, pkv_error *err);

/*
 * As pkv_plan_size and pkv_plan_build, the route chosen by a policy for each batch: `policy` fixed
 * takes options->route, options->splits is the policy's to set. What is planned from lengths alone
 * can be chosen (bucket_exact .. balanced; with batch invariance `balanced`); a choice that cannot
 * be planned is replaced as pkv_policy_choose does, and choice->reason says so. Memory of the size
 * that the first says holds whatever the second chooses. profile NULL: the seed's device.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_plan_size_policy(size_t *plan_bytes, size_t *workspace_bytes,
                                                       const pkv_shape *shape,
                                                       const pkv_plan_options *options,
                                                       const pkv_profile *profile, int32_t max_rows,
                                                       int32_t max_seq_len, pkv_error *err);
PKV_API PKV_MUST_CHECK pkv_status
pkv_plan_build_policy(const pkv_plan **out, pkv_choice *choice, void *memory, size_t memory_bytes,
                      const pkv_shape *shape, const pkv_plan_options *options, pkv_policy policy,
                      const pkv_profile *profile, pkv_dtype kv_dtype, int32_t rows,
                      const int32_t *seq_len, pkv_error *err);

#define PKV_PROFILE_MAX_BYTES 65536 /* of the text of a profile */

/* The text of a profile, terminated; *bytes without the terminator. E_TOO_SMALL names the bytes. */
PKV_API PKV_MUST_CHECK pkv_status pkv_profile_format(char *text, size_t capacity, size_t *bytes,
                                                     const pkv_profile *profile, pkv_error *err);
/*
 * Reads the text of a profile, untrusted; `model` becomes out->model and must stay. E_FORMAT names
 * the line and the fault: an unknown version or key, a key twice or missing, a number that is not
 * finite or out of its range. Nothing is written on failure.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_profile_parse(pkv_profile *out, pkv_cost_model *model,
                                                    const char *text, size_t bytes, pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
