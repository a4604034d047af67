/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A seeded request gives the same answer alone and cold as in any engine, drawn at random: every
 * option of requests (sampling, penalties, bias, stop strings, n, log-probabilities, echo,
 * grammars, salts, priorities) in every kind of engine (order, policy, element type of the cache,
 * cache kept or not, pages, chunks, rows, threads, route, pool), cold, warm, restored from a file,
 * with others that leave in the middle and readers that pause. `test_engine_matrix WORLDS [FIRST]`
 * draws more.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/engine_drive.h"
#include "support/tiny_model.h"

#define REQUESTS 14
#define PROMPT   900 /* of a long world; else 300 */
#define VOCAB    320
#define MOST     4 /* choices */
#define ENGINES  6 /* of a world */
#define LEAVERS  3 /* requests that are cancelled, in each round */
#define GUIDES   3

static int32_t worlds = 6, first_world;
static int32_t most_prompt, longest; /* of this world */
static tiny_model tiny;
static pkv_constraint *guides[GUIDES];
static int32_t prompts[REQUESTS][PROMPT];
static pkv_request requests[REQUESTS];
static pkv_logit_bias biases[REQUESTS][4];
static char stop_text[REQUESTS][3][8];
static const char *stop_list[REQUESTS][3];
static drive_answer base[REQUESTS][MOST], got[REQUESTS][MOST], leaving[LEAVERS][MOST];

/* What all worlds together must have reached, or the test would show less than it says. */
static struct {
  int64_t answers, preemptions, evictions, forks, cached, shared_steps, copies, cancelled, pauses,
      restored, ends[5], by_stop, guided;
} seen;

static bool often(pkv_rng *rng, uint64_t of_ten) {
  return pkv_rng_below(rng, 10) < of_ten;
}

static float between(pkv_rng *rng, double low, double high) {
  return (float)(low + (high - low) * pkv_rng_uniform(rng));
}

static void draw_sampling(pkv_request *r, pkv_rng *rng) {
  static const float cold[] = {0.0f, 1e-5f, 0.3f};
  r->seed = pkv_rng_next(rng);
  r->temperature = often(rng, 4) ? cold[pkv_rng_below(rng, 3)] : between(rng, 0.4, 2.0);
  if (often(rng, 3)) r->top_k = (int32_t)pkv_rng_range(rng, 1, 100);
  if (often(rng, 3)) r->top_p = between(rng, 0.1, 1.0);
  if (often(rng, 2)) r->min_p = between(rng, 0.0, 0.3);
  if (often(rng, 3)) r->repetition_penalty = between(rng, 0.8, 1.5);
  if (often(rng, 3)) r->presence_penalty = between(rng, -1.0, 2.0);
  if (often(rng, 3)) r->frequency_penalty = between(rng, -1.0, 2.0);
  r->logprobs = often(rng, 7);
  if (often(rng, 3)) r->top_logprobs = (int32_t)pkv_rng_range(rng, 1, PKV_MAX_TOP_LOGPROBS);
}

static void draw_lists(int i, pkv_rng *rng) {
  pkv_request *const r = &requests[i];
  if (often(rng, 3)) {
    r->logit_bias = biases[i];
    r->logit_bias_count = (int32_t)pkv_rng_range(rng, 1, 4);
    for (int k = 0; k < 4; k++) /* different ids */
      biases[i][k] = (pkv_logit_bias){4 * (int32_t)pkv_rng_below(rng, VOCAB / 4) + k,
                                      k % 2 ? between(rng, -5.0, 5.0) : -100.0f};
  }
  if (often(rng, 5)) {
    r->stop = stop_list[i];
    r->stop_count = (int32_t)pkv_rng_range(rng, 1, 3);
    for (int k = 0; k < 3; k++) { /* two characters: within a word and across tokens */
      (void)snprintf(stop_text[i][k], sizeof stop_text[i][k], "%c%c",
                     (char)('!' + (int)pkv_rng_below(rng, 94)),
                     k == 0 ? 'w' : (char)('0' + (int)pkv_rng_below(rng, 10)));
      stop_list[i][k] = stop_text[i][k];
    }
  }
}

/* Prompts of a tree of prefixes; of a long world the first 512 tokens are everybody's, so that
   route `shared` reads a whole chunk once. */
static void draw_prompt(int i, pkv_rng *rng) {
  drive_prompt(prompts[i], PROMPT, VOCAB, pkv_rng_next(rng));
  if (i > 0 && often(rng, 8)) {
    const int from = (int)pkv_rng_below(rng, (uint64_t)i);
    memcpy(prompts[i], prompts[from],
           (size_t)pkv_rng_below(rng, (uint64_t)most_prompt) * sizeof(int32_t));
  }
  if (most_prompt > 512) memcpy(prompts[i], prompts[0], 512 * sizeof(int32_t));
}

static void draw_request(int i, pkv_rng *rng) {
  pkv_request *const r = &requests[i];
  *r = (pkv_request)PKV_REQUEST_INIT;
  draw_prompt(i, rng);
  r->prompt = prompts[i];
  r->prompt_tokens = (int32_t)pkv_rng_range(rng, often(rng, 2) ? 1 : most_prompt / 2, most_prompt);
  r->max_tokens = (int32_t)pkv_rng_range(rng, 1, often(rng, 1) ? 500 : 70);
  draw_sampling(r, rng);
  draw_lists(i, rng);
  if (often(rng, 3)) r->min_tokens = (int32_t)pkv_rng_below(rng, (uint64_t)r->max_tokens + 1);
  r->ignore_end = often(rng, 3);
  r->priority = (int32_t)pkv_rng_below(rng, 3);
  r->cache_salt = often(rng, 2);
  r->adapter = often(rng, 1);
  if (often(rng, 3)) {
    r->constraint = guides[pkv_rng_below(rng, GUIDES)];
    r->min_tokens = 0;
  }
  if (often(rng, 2))
    r->n = (int32_t)pkv_rng_range(rng, 2, MOST);
  else
    r->echo = often(rng, 2);
}

static int32_t choices_of(const pkv_request *r) {
  return r->n > 1 ? r->n : 1;
}

static pkv_engine_options draw_engine(pkv_dtype dtype, int number, pkv_rng *rng) {
  static const int32_t pages[] = {16, 1, 4, 32, 64}, chunks[] = {512, 1, 7, 16, 33, 64, 100, 384};
  static const pkv_route routes[] = {PKV_ROUTE_AUTO, PKV_ROUTE_BALANCED, PKV_ROUTE_SHARED};
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.kv_dtype = dtype;
  o.k_scale = 0.25f;
  o.v_scale = 0.5f;
  o.max_seq_len = longest;
  o.max_requests = 128;
  /* Every order and every policy in turn, whatever else is drawn. */
  o.order = (pkv_sched_order)(number % PKV_SCHED_ORDERS);
  o.admission = (pkv_sched_policy)((number / PKV_SCHED_ORDERS + number) % PKV_SCHED_POLICIES);
  o.threads = (int32_t)pkv_rng_range(rng, 1, 3);
  o.page_tokens = pages[pkv_rng_below(rng, 5)];
  o.max_rows = (int32_t)pkv_rng_range(rng, 1, 12);
  o.prefill_chunk = chunks[pkv_rng_below(rng, 8)];
  if (often(rng, 4)) o.prefill_beside = (int32_t)pkv_rng_range(rng, 1, o.prefill_chunk);
  o.cache_tokens = often(rng, 6) ? longest + (int64_t)pkv_rng_below(rng, 400) : 12288;
  o.prefix_sharing = !often(rng, 1);
  o.prefix_cache = o.prefix_sharing && !often(rng, 3);
  o.route = o.prefix_sharing ? routes[pkv_rng_below(rng, 3)] : PKV_ROUTE_BALANCED;
  o.route_stats = often(rng, 3);
  return o;
}

/* Alone, cold, the prompt in one piece. */
static void run_alone(pkv_dtype dtype) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 1;
  o.kv_dtype = dtype;
  o.k_scale = 0.25f;
  o.v_scale = 0.5f;
  o.max_seq_len = longest;
  o.cache_tokens = 4096;
  o.prefix_sharing = 0;
  o.route = PKV_ROUTE_BALANCED;
  for (int i = 0; i < REQUESTS; i++) {
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    drive_submit_choices(engine, &requests[i], base[i], choices_of(&requests[i]));
    (void)drive_all(engine, 2000);
    for (int32_t c = 0; c < choices_of(&requests[i]); c++) {
      seen.ends[base[i][c].finish]++;
      seen.by_stop += base[i][c].stop_index >= 0;
      seen.guided += requests[i].constraint != NULL && base[i][c].finish == PKV_FINISH_STOP;
    }
    drive_finish(engine);
  }
}

static void submit_leaver(pkv_engine *engine, int k, pkv_rng *rng) {
  pkv_request r = requests[pkv_rng_below(rng, REQUESTS)];
  r.seed++;
  r.max_tokens = 300;
  r.min_tokens = 0;
  drive_submit_choices(engine, &r, leaving[k], choices_of(&r));
}

/* Steps with what clients do meanwhile: one leaves, one stops to read and goes on. */
static void some_steps(pkv_engine *engine, uint64_t steps, int submitted, pkv_rng *rng) {
  for (; steps > 0; steps--) {
    (void)drive_step(engine);
    if (submitted > 0 && often(rng, 2)) {
      const int64_t id = got[pkv_rng_below(rng, (uint64_t)submitted)][0].id;
      const int32_t paused = often(rng, 4);
      pkv_engine_pause(engine, id, paused);
      seen.pauses += paused;
    }
    if (often(rng, 1)) pkv_engine_cancel(engine, leaving[pkv_rng_below(rng, LEAVERS)][0].id);
  }
}

static void compare_answers(const char *what) {
  char text[96];
  for (int i = 0; i < REQUESTS; i++)
    for (int32_t c = 0; c < choices_of(&requests[i]); c++) {
      (void)snprintf(text, sizeof text, "%s, request %d, answer %d", what, i, (int)c);
      drive_equal(&got[i][c], &base[i][c], text);
      assert_int_equal(got[i][c].stop_index, base[i][c].stop_index);
      assert_int_equal(got[i][c].stop_bytes, base[i][c].stop_bytes);
      seen.cached += got[i][c].cached_tokens;
      seen.answers++;
    }
}

static void round_of(pkv_engine *engine, const char *what, pkv_rng *rng) {
  int order[REQUESTS];
  for (int i = 0; i < REQUESTS; i++) {
    const int j = (int)pkv_rng_below(rng, (uint64_t)i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  memset(leaving, 0, sizeof leaving);
  memset(got, 0, sizeof got);
  for (int k = 0; k < REQUESTS; k++) {
    const int i = order[k];
    drive_submit_choices(engine, &requests[i], got[i], choices_of(&requests[i]));
    if (k % (REQUESTS / LEAVERS) == 1 && k / (REQUESTS / LEAVERS) < LEAVERS)
      submit_leaver(engine, k / (REQUESTS / LEAVERS), rng);
    some_steps(engine, pkv_rng_below(rng, 4), i + 1, rng);
  }
  some_steps(engine, 40, REQUESTS, rng);
  for (int i = 0; i < REQUESTS; i++)
    pkv_engine_pause(engine, got[i][0].id, 0);
  for (int k = 0; k < LEAVERS; k++)
    pkv_engine_cancel(engine, leaving[k][0].id);
  (void)drive_all(engine, 200000);
  compare_answers(what);
}

static void count_stats(const pkv_engine *engine) {
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&s, engine);
  seen.preemptions += s.preemptions;
  seen.evictions += s.evictions;
  seen.forks += s.forks;
  seen.copies += s.page_copies;
  seen.shared_steps += s.shared_steps;
  seen.cancelled += s.cancelled;
}

/* The same cache in a new engine, by way of a file. */
static pkv_engine *restore(pkv_engine *engine, const pkv_engine_options *o) {
  char path[64];
  pkv_error err = {PKV_OK, "", ""};
  int64_t saved = 0, loaded = 0;
  (void)snprintf(path, sizeof path, "test_engine_matrix.%d.cache", (int)getpid());
  drive_ok(pkv_engine_save_cache(&saved, engine, path, &err), &err, "save");
  count_stats(engine);
  drive_finish(engine);
  engine = drive_engine(tiny.model, o);
  drive_ok(pkv_engine_load_cache(&loaded, engine, path, &err), &err, "load");
  assert_int_equal(loaded, saved);
  seen.restored += loaded;
  (void)remove(path);
  return engine;
}

static void run_engine(pkv_dtype dtype, int32_t world, int e, pkv_rng *rng) {
  static const char *const rounds[] = {"cold", "warm", "restored"};
  const pkv_engine_options o = draw_engine(dtype, (int)world * ENGINES + e, rng);
  char what[64];
  pkv_engine *engine = drive_engine(tiny.model, &o);
  for (int round = 0; round < (o.prefix_cache ? 3 : 1); round++) {
    if (round == 2) engine = restore(engine, &o);
    (void)snprintf(what, sizeof what, "world %d, engine %d, %s", (int)world, e, rounds[round]);
    round_of(engine, what, rng);
    if (often(rng, 1)) pkv_engine_clear_cache(engine);
  }
  count_stats(engine);
  drive_finish(engine);
}

static void run_world(int32_t world) {
  static const pkv_dtype dtypes[] = {PKV_DTYPE_F16, PKV_DTYPE_FP8_E4M3};
  const pkv_dtype dtype = dtypes[world % 2];
  pkv_rng rng;
  pkv_rng_init(&rng, 77000 + (uint64_t)world);
  most_prompt = world % 3 == 2 ? PROMPT : 300;
  longest = most_prompt + 84;
  for (int i = 0; i < REQUESTS; i++)
    draw_request(i, &rng);
  run_alone(dtype);
  for (int e = 0; e < ENGINES; e++)
    run_engine(dtype, world, e, &rng);
}

static void make_guides(void) {
  static const char grammar[] = "root ::= ([a-f] | \"w\" [0-9]{2,3} | \"\xc3\xa9\"){3,40} \".\"?";
  static const char schema[] =
      "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\",\"minimum\":-9,\"maximum\":"
      "40},\"b\":{\"enum\":[\"w12\",\"x\"]},\"c\":{\"type\":\"array\",\"items\":{\"type\":"
      "\"boolean\"},\"maxItems\":3}},\"required\":[\"a\",\"b\"]}";
  pkv_error err = {PKV_OK, "", ""};
  drive_ok(pkv_constraint_create_json(&guides[0], tiny.model, NULL, &err), &err, "JSON");
  drive_ok(
      pkv_constraint_create_grammar(&guides[1], tiny.model, grammar, strlen(grammar), NULL, &err),
      &err, "grammar");
  drive_ok(pkv_constraint_create_schema(&guides[2], tiny.model, schema, strlen(schema), NULL, &err),
           &err, "schema");
}

static void test_matrix(void **state) {
  tiny_model_options options = TINY_MODEL_INIT;
  (void)state;
  options.spread = 1.5f;
  options.eos = 310;
  options.spelled = 1;
  tiny_model_open(&tiny, &options);
  make_guides();
  for (int32_t w = first_world; w < first_world + worlds; w++)
    run_world(w);
  print_message("%d worlds: %lld answers equal; %lld preemptions, %lld evictions, %lld forks, "
                "%lld pages copied, %lld tokens cached, %lld pages restored, %lld shared steps, "
                "%lld cancelled, %lld pauses\n",
                (int)worlds, (long long)seen.answers, (long long)seen.preemptions,
                (long long)seen.evictions, (long long)seen.forks, (long long)seen.copies,
                (long long)seen.cached, (long long)seen.restored, (long long)seen.shared_steps,
                (long long)seen.cancelled, (long long)seen.pauses);
  print_message(
      "ends alone: %lld stop (%lld by a stop string, %lld with a constraint), %lld length, "
      "%lld error\n",
      (long long)seen.ends[PKV_FINISH_STOP], (long long)seen.by_stop, (long long)seen.guided,
      (long long)seen.ends[PKV_FINISH_LENGTH], (long long)seen.ends[PKV_FINISH_ERROR]);
  assert_true(seen.preemptions > 0 && seen.evictions > 0 && seen.forks > 0 && seen.cached > 0);
  assert_true(seen.cancelled > 0 && seen.pauses > 0 && seen.restored > 0 && seen.shared_steps > 0);
  assert_true(seen.by_stop > 0 && seen.guided > 0 && seen.ends[PKV_FINISH_LENGTH] > 0);
  for (int i = 0; i < GUIDES; i++)
    pkv_constraint_destroy(guides[i]);
  tiny_model_close(&tiny);
}

int main(int argc, char **argv) {
  if (argc > 1) worlds = (int32_t)strtol(argv[1], NULL, 10);
  if (argc > 2) first_world = (int32_t)strtol(argv[2], NULL, 10);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_matrix),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
