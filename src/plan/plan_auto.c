/* SPDX-License-Identifier: Apache-2.0 */
/* Plans whose route a policy chooses: pkv_plan_size_policy and pkv_plan_build_policy. */
#include "base/status.h"
#include "pkv/profile.h"

#define BIT(route)    (1u << (unsigned)(route))
#define HOST_ROUTES   0x3eu /* bucket_exact .. balanced: planned from lengths alone */
#define MOST_SPLITS   48    /* of the seed's rules, for one bucket */
#define STATIC_SPLITS 24    /* of its first policy's work queue */

/* The profile with what can be planned here only; batch-invariant: `balanced` alone. */
static pkv_status narrow(pkv_profile *out, const pkv_profile *profile,
                         const pkv_plan_options *options, pkv_error *err) {
  PKV_CHECK_STRUCT(err, options, pkv_plan_options);
  *out = (pkv_profile)PKV_PROFILE_INIT;
  if (profile) {
    PKV_CHECK_STRUCT(err, profile, pkv_profile);
    *out = *profile;
  }
  if (out->routes == 0) out->routes = HOST_ROUTES;
  out->routes &= options->flags & PKV_PLAN_BATCH_INVARIANT ? BIT(PKV_ROUTE_BALANCED) : HOST_ROUTES;
  PKV_CHECK(err, out->routes != 0, PKV_E_UNSUPPORTED,
            "profile->routes is 0x%x: none of them is planned from lengths%s",
            profile ? (unsigned)profile->routes : 0u,
            options->flags & PKV_PLAN_BATCH_INVARIANT ? " and batch-invariant" : "");
  return PKV_OK;
}

static int32_t parts_of(const pkv_plan_options *options, const pkv_profile *profile) {
  return options->parts == 0 && profile->model ? profile->model->parts : options->parts;
}

pkv_status pkv_plan_size_policy(size_t *plan_bytes, size_t *workspace_bytes, const pkv_shape *shape,
                                const pkv_plan_options *options, const pkv_profile *profile,
                                int32_t max_rows, int32_t max_seq_len, pkv_error *err) {
  static const int32_t queue_splits[] = {0, STATIC_SPLITS};
  pkv_profile here = PKV_PROFILE_INIT;
  PKV_CHECK(err, plan_bytes && workspace_bytes, PKV_E_INVALID, "%s is NULL",
            plan_bytes ? "workspace_bytes" : "plan_bytes");
  *plan_bytes = *workspace_bytes = 0;
  PKV_TRY(narrow(&here, profile, options, err));
  size_t most_plan = 0, most_workspace = 0;
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_BALANCED; route++)
    for (int i = 0; i < (route == PKV_ROUTE_WORKQUEUE ? 2 : 1); i++) {
      pkv_plan_options o = *options;
      size_t plan, workspace;
      if ((here.routes & BIT(route)) == 0) continue;
      o.route = (pkv_route)route;
      o.parts = parts_of(options, &here);
      o.splits = route == PKV_ROUTE_WORKQUEUE ? queue_splits[i] : MOST_SPLITS;
      PKV_TRY(pkv_plan_size(&plan, &workspace, shape, &o, max_rows, max_seq_len, err));
      if (plan > most_plan) most_plan = plan;
      if (workspace > most_workspace) most_workspace = workspace;
    }
  *plan_bytes = most_plan;
  *workspace_bytes = most_workspace;
  return PKV_OK;
}

pkv_status pkv_plan_build_policy(const pkv_plan **out, pkv_choice *choice, void *memory,
                                 size_t memory_bytes, const pkv_shape *shape,
                                 const pkv_plan_options *options, pkv_policy policy,
                                 const pkv_profile *profile, pkv_dtype kv_dtype, int32_t rows,
                                 const int32_t *seq_len, pkv_error *err) {
  pkv_profile here = PKV_PROFILE_INIT;
  PKV_CHECK(err, out && choice, PKV_E_INVALID, "%s is NULL", out ? "choice" : "out");
  *out = NULL;
  PKV_TRY(narrow(&here, profile, options, err));
  PKV_TRY(pkv_policy_choose(choice, policy, options->route, shape, kv_dtype, rows, seq_len, &here,
                            err));
  pkv_plan_options o = *options;
  o.route = choice->route;
  o.splits = choice->splits;
  o.parts = parts_of(options, &here);
  return pkv_plan_build(out, memory, memory_bytes, shape, &o, rows, seq_len, err);
}
