/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv explain`: which route each policy takes for a batch, what each route is predicted to take,
 * and why. Runs no attention. */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "cli/bench_cells.h"
#include "cli/profile_file.h"
#include "pkv/flashinfer.h"

typedef struct explain_options {
  const char *lens, *profile, *policy, *flashinfer;
  int32_t dtype, query_heads, kv_heads, head_dim, page_tokens, q_len, layers;
} explain_options;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};

#define O explain_options
static const pkv_option options_table[] = {
    PKV_REQUIRED(O, lens, 0, "lens", "LIST",
                 "lengths of the rows: 32k,1k,600x14 (k = 1024); or 8x32x2048+128: 8 groups of 32 "
                 "rows that share 2048 tokens and have 128 more each"),
    PKV_TEXT(O, profile, 'p', "profile", "FILE", NULL, "what pkv calibrate wrote"),
    PKV_TEXT(O, policy, 0, "policy", "POLICY", NULL,
             "static, roofline, calibrated or fixed:ROUTE; default: calibrated with a profile, "
             "else roofline"),
    PKV_TEXT(O, flashinfer, 0, "flashinfer", "FILE", NULL,
             "FlashInfer's kernels; default: pkv_flashinfer.so beside the program"),
    PKV_INT(O, layers, 0, "layers", "N", "32", 1, 1024, "layers that one plan serves"),
    PKV_CHOICE(O, dtype, 0, "kv-dtype", dtype_choices, "f16", "element type of the cache"),
    PKV_INT(O, query_heads, 0, "query-heads", "N", "32", 1, 1024, "query heads"),
    PKV_INT(O, kv_heads, 0, "kv-heads", "N", "8", 1, 1024, "KV heads"),
    PKV_INT(O, head_dim, 0, "head-dim", "N", "128", 8, 256, "head dimension"),
    PKV_INT(O, page_tokens, 0, "page", "TOKENS", "16", 1, 1024, "tokens of a page"),
    PKV_INT(O, q_len, 0, "q-len", "N", "1", 1, 64, "query tokens of a row"),
};
#undef O

/* "32k" and "32kx3" into rows; anything else is a word of bench_rows.h. */
static pkv_status add_word(bench_row *rows, int32_t *count, const char *word, pkv_error *err) {
  char plain[64];
  const size_t digits = strspn(word, "0123456789");
  int64_t thousands;
  (void)snprintf(plain, sizeof plain, "%.*s", (int)digits, word);
  if ((word[digits] != 'k' && word[digits] != 'K') ||
      !pkv_parse_i64(&thousands, plain, 1, BENCH_MAX_LENGTH / 1024))
    return bench_rows_word(rows, count, word, err);
  (void)snprintf(plain, sizeof plain, "%lld%.40s", (long long)thousands * 1024, word + digits + 1);
  return bench_rows_word(rows, count, plain, err);
}

static pkv_status parse(bench_row *rows, int32_t *count, const char *text, pkv_error *err) {
  *count = 0;
  PKV_CHECK(err, text[0] != '\0', PKV_E_INVALID, "--lens is empty");
  for (const char *at = text; at != NULL;) {
    char word[64];
    const size_t size = strcspn(at, ",");
    PKV_CHECK(err, size > 0 && size < sizeof word, PKV_E_INVALID,
              "--lens '%s': a length like 4096, 32k or 600x14 expected at '%s'", text, at);
    memcpy(word, at, size);
    word[size] = '\0';
    PKV_TRY(add_word(rows, count, word, err));
    at = at[size] == ',' ? at + size + 1 : NULL;
  }
  return PKV_OK;
}

/* Counters of the plan that reads shared prefixes once; *tree->route stays AUTO where none is. */
static pkv_status look_at_sharing(pkv_plan_stats *tree, const bench_batch *b,
                                  const pkv_shape *shape, pkv_dtype dtype, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_sharing sharing = PKV_SHARING_INIT;
  const pkv_plan *plan;
  size_t bytes, workspace;
  int32_t longest = 0;
  bool shares = false;
  for (int32_t r = 0; r < b->rows; r++) {
    if (b->lengths[r] > longest) longest = b->lengths[r];
    shares = shares || b->borrowed[r] > 0;
  }
  *tree = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  if (!shares) return PKV_OK;
  options.route = PKV_ROUTE_SHARED;
  PKV_TRY(pkv_plan_size(&bytes, &workspace, shape, &options, b->rows, longest, err));
  void *memory = pkv_alloc(&a, bytes);
  PKV_CHECK(err, memory, PKV_E_NOMEM, "no memory for a plan of %zu bytes", bytes);
  sharing.block_table = b->ids;
  sharing.max_pages = b->max_pages;
  pkv_status status = pkv_plan_build_shared(&plan, memory, bytes, shape, &options, b->rows,
                                            b->lengths, &sharing, err);
  if (status == PKV_OK) status = pkv_plan_get_stats(tree, plan, dtype, err);
  pkv_free(&a, memory, bytes);
  return status;
}

static void print_predictions(const pkv_prediction *p, const pkv_cost_model *m) {
  (void)printf("\npredictions, us      attention      plan  a layer  splits  fit is off by\n");
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    const pkv_route_cost *c = &m->cost[kind];
    if (p[kind].available)
      (void)printf("  %-16s %11.1f %9.1f %8.1f %7s%d  %.1f%% on average, %.1f%% at worst\n",
                   pkv_cost_kind_name(kind), p[kind].attend_us, p[kind].plan_us, p[kind].step_us,
                   "", p[kind].splits, c->error_mean * 100, c->error_worst * 100);
    else if (c->points == 0)
      (void)printf("  %-16s not in the profile\n", pkv_cost_kind_name(kind));
    else
      (void)printf("  %-16s not for this batch: no rows share a prefix\n",
                   pkv_cost_kind_name(kind));
  }
}

/* Without a cost model: the seed's roofline for each route that is planned from lengths. */
static pkv_status print_estimates(const pkv_shape *shape, pkv_dtype dtype, const bench_batch *b,
                                  pkv_error *err) {
  pkv_profile seed = PKV_PROFILE_INIT;
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_FLASHINFER; route++)
    seed.routes |= 1u << route;
  (void)printf("\nroofline of the seed's device, us\n");
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_FLASHINFER; route++) {
    pkv_choice choice = PKV_CHOICE_INIT;
    if (route == PKV_ROUTE_SHARED) continue; /* its estimate needs the plan */
    PKV_TRY(pkv_policy_choose(&choice, PKV_POLICY_FIXED, (pkv_route)route, shape, dtype, b->rows,
                              b->lengths, &seed, err));
    (void)printf("  %-16s %11.1f\n", pkv_route_name((pkv_route)route), choice.predicted_us);
  }
  return PKV_OK;
}

/* What one policy says. */
static pkv_status print_choice(const char *label, pkv_policy policy, pkv_route fixed,
                               const pkv_shape *shape, pkv_dtype dtype, const bench_batch *b,
                               const pkv_profile *profile, pkv_error *err) {
  pkv_choice choice = PKV_CHOICE_INIT;
  PKV_TRY(
      pkv_policy_choose(&choice, policy, fixed, shape, dtype, b->rows, b->lengths, profile, err));
  (void)printf("  %-24s %-13s %s\n", label, pkv_route_name(choice.route), choice.reason);
  return PKV_OK;
}

/* Whether that route could be executed on this machine, and if not, why. */
static void print_flashinfer(const char *path) {
  const pkv_flashinfer_api *api;
  pkv_error why = {PKV_OK, NULL, {0}};
  if (pkv_flashinfer_open(&api, path, &why) == PKV_OK)
    (void)printf("flashinfer %s's kernels are here: bench attention --route flashinfer runs them\n",
                 api->version);
  else
    (void)printf("flashinfer cannot be run here: %s\n", why.text);
}

static pkv_status explain(const explain_options *o, const bench_batch *b, const pkv_shape *shape,
                          pkv_error *err) {
  const pkv_dtype dtype = (pkv_dtype)o->dtype;
  profile_file file;
  pkv_plan_stats tree;
  pkv_prediction p[PKV_COST_KINDS];
  pkv_policy policy = o->profile ? PKV_POLICY_CALIBRATED : PKV_POLICY_ROOFLINE;
  pkv_route fixed = PKV_ROUTE_AUTO;
  if (o->policy) PKV_TRY(policy_from_word(&policy, &fixed, o->policy, err));
  PKV_CHECK(err, o->profile || policy != PKV_POLICY_CALIBRATED, PKV_E_INVALID,
            "policy calibrated needs --profile: see pkv calibrate");
  const pkv_profile *profile = NULL;
  if (o->profile) {
    PKV_TRY(profile_file_load(&file, o->profile, err));
    file.profile.layers = o->layers;
    profile = &file.profile;
  }
  PKV_TRY(look_at_sharing(&tree, b, shape, dtype, err));
  const pkv_plan_stats *shared = tree.route == PKV_ROUTE_SHARED ? &tree : NULL;
  (void)printf("%d rows, %lld tokens, %.1f MB of K and V\n", b->rows, (long long)b->tokens,
               (double)b->tokens * 2 * shape->kv_heads * shape->head_dim *
                   (double)pkv_dtype_bytes(dtype) * 1e-6);
  (void)printf("chosen\n");
  PKV_TRY(print_choice("", policy, fixed, shape, dtype, b, profile, err));
  (void)printf("the others would take\n");
  PKV_TRY(print_choice("static", PKV_POLICY_STATIC, fixed, shape, dtype, b, profile, err));
  PKV_TRY(print_choice("roofline, seed's device", PKV_POLICY_ROOFLINE, fixed, shape, dtype, b, NULL,
                       err));
  print_flashinfer(o->flashinfer);
  if (profile == NULL) return print_estimates(shape, dtype, b, err);
  PKV_TRY(print_choice("roofline, this device", PKV_POLICY_ROOFLINE, fixed, shape, dtype, b,
                       profile, err));
  PKV_TRY(print_choice("calibrated", PKV_POLICY_CALIBRATED, fixed, shape, dtype, b, profile, err));
  PKV_TRY(pkv_policy_predict(p, shape, dtype, b->rows, b->lengths, shared, profile, err));
  print_predictions(p, &file.model);
  if (shared)
    (void)printf("\nrows share: %lld nodes, %.1f of %.1f MB are read\n", (long long)tree.nodes,
                 (double)tree.unique_kv_bytes * 1e-6, (double)tree.total_kv_bytes * 1e-6);
  const pkv_shape *s = &file.model.shape;
  (void)printf("\nprofile: %s, %s, library %s, %s; measured %d/%dx%d page %d %s\n",
               file.model.device, file.model.driver, file.model.library, file.model.date,
               s->query_heads, s->kv_heads, s->head_dim, s->page_tokens,
               pkv_dtype_name(file.model.kv_dtype));
  return PKV_OK;
}

static int run(const pkv_cli *cli, const void *options) {
  const explain_options *o = options;
  static bench_row rows[BENCH_MAX_ROWS];
  int32_t count;
  bench_cell cell;
  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  shape.query_heads = o->query_heads;
  shape.kv_heads = o->kv_heads;
  shape.head_dim = o->head_dim;
  shape.page_tokens = o->page_tokens;
  shape.q_len = o->q_len;
  if (parse(rows, &count, o->lens, &err) != PKV_OK) return pkv_cli_usage(cli, "%s", err.text);
  const bench_cell_options cells = {.page_tokens = o->page_tokens, .seed = 1};
  memset(&cell, 0, sizeof cell);
  pkv_status status = bench_cell_rows(&cell, &cells, rows, count, &err);
  if (status == PKV_OK) status = explain(o, cell.batches, &shape, &err);
  bench_cell_free(&cell);
  return status == PKV_OK ? PKV_EXIT_OK : pkv_cli_fail(cli, &err);
}

const pkv_command pkv_command_explain = {
    .name = "explain",
    .summary = "say which attention route a policy takes for a batch, and why",
    .details =
        "Prints what the policy chooses for rows of these lengths and the reason, what the other "
        "policies would choose, and with --profile what each route is predicted to take: the "
        "attention call, the plan, and both for one of --layers layers.\n\n"
        "Without a profile the roofline's constants are those of the seed's device, an RTX 3060, "
        "and what is predicted are its estimates.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(explain_options),
    .run = run,
};
