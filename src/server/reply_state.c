/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_state.h"

#include "base/clock.h"
#include "server/json_out.h"
#include "server/prefix_tree.h"

#define MAX_SLOTS 1024

const char *pkv_server_phase(const pkv_server *server, const pkv_loop_counters *counters) {
  const int64_t limit = (int64_t)server->options->progress_s * 1000000000;
  if (counters->phase == PKV_LOOP_FAILED) return "failed";
  /* The engine may be there a tick before the server has heard of it and takes requests. */
  if (counters->phase == PKV_LOOP_LOADING || server->model == NULL) return "loading";
  if (server->draining) return "draining";
  if (counters->live > 0 && pkv_clock_ns() - counters->worked_ns > limit) return "stalled";
  return "ready";
}

static int32_t row_count(const pkv_server *server) {
  return server->options->engine.max_rows > 0 ? server->options->engine.max_rows : 32;
}

static json_t *slots_json(const pkv_server *server, bool idle_ones) {
  const pkv_allocator a = pkv_allocator_default();
  const int32_t rows = row_count(server);
  pkv_slot *const slots = pkv_alloc_zeroed(&a, MAX_SLOTS, sizeof *slots);
  if (slots == NULL) return NULL;
  json_t *list = json_array();
  const int32_t count = pkv_loop_get_slots(slots, MAX_SLOTS, server->loop);
  for (int32_t i = 0; i < count; i++) {
    const pkv_slot *const s = &slots[i];
    pkv_json_add(&list,
                 json_pack("{s:i, s:i, s:b, s:b, s:I, s:i, s:i, s:i, s:i, s:i, s:f}", "id", (int)i,
                           "n_ctx", (int)server->longest, "speculative", 0, "is_processing", 1,
                           "id_task", (json_int_t)s->job, "choice", (int)s->choice,
                           "n_prompt_tokens", (int)s->prompt_tokens, "n_prompt_tokens_cached",
                           (int)s->cached_tokens, "n_decoded", (int)s->generated, "n_predict",
                           (int)s->max_tokens, "age_s", s->age_s));
  }
  for (int32_t i = count; idle_ones && i < rows && i < MAX_SLOTS; i++)
    pkv_json_add(&list, json_pack("{s:i, s:i, s:b, s:b}", "id", (int)i, "n_ctx",
                                  (int)server->longest, "speculative", 0, "is_processing", 0));
  pkv_free(&a, slots, MAX_SLOTS * sizeof *slots);
  return list;
}

pkv_status pkv_reply_slots(pkv_buffer *out, const pkv_server *server, pkv_error *err) {
  return pkv_json_append(out, slots_json(server, true), err);
}

static json_t *token_json(const pkv_model *model, int32_t token) {
  const char *text = "";
  size_t bytes = 0;
  if (token < 0 || pkv_token_text(&text, &bytes, model, token, 1, NULL) != PKV_OK)
    return json_null();
  return json_stringn(text, bytes);
}

pkv_status pkv_reply_props(pkv_buffer *out, const pkv_server *server, pkv_error *err) {
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, server->model);
  json_t *const params = json_pack("{s:f, s:i, s:f, s:i, s:i, s:i, s:b, s:b}", "temperature", 0.8,
                                   "top_k", 40, "top_p", 0.95, "seed", -1, "n_predict", -1,
                                   "n_probs", 0, "stream", 0, "ignore_eos", 0);
  json_t *const settings =
      json_pack("{s:i, s:i, s:b, s:b, s:o}", "id", 0, "n_ctx", (int)server->longest, "speculative",
                0, "is_processing", 0, "params", params);
  return pkv_json_append(
      out,
      json_pack("{s:o, s:i, s:s, s:s, s:s, s:{s:b, s:b}, s:o, s:o, s:i, s:i, s:I, s:s}",
                "default_generation_settings", settings, "total_slots", (int)row_count(server),
                "model_alias", server->options->name, "model_path", server->options->name,
                "architecture", info.architecture, "modalities", "vision", 0, "audio", 0,
                "bos_token", token_json(server->model, info.bos), "eos_token",
                token_json(server->model, info.eos), "vocab", (int)info.vocab, "n_ctx_train",
                (int)info.context, "parameters", (json_int_t)info.parameters, "build_info",
                pkv_version()),
      err);
}

static json_t *histogram_json(const pkv_histogram *h, pkv_measure what) {
  int count = 0;
  const double *const bounds = pkv_measure_bounds(&count, what);
  json_t *edges = json_array(), *counts = json_array();
  for (int i = 0; i < count; i++)
    pkv_json_add(&edges, json_real(bounds[i]));
  for (int i = 0; i <= count; i++)
    pkv_json_add(&counts, json_integer((json_int_t)h->counts[i]));
  return json_pack("{s:o, s:o, s:I, s:f}", "bounds", edges, "counts", counts, "count",
                   (json_int_t)h->count, "sum", h->sum);
}

static json_t *engine_json(const pkv_engine_stats *e) {
  return json_pack("{s:I, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "steps",
                   (json_int_t)e->steps, "running", (int)e->rows_running, "waiting",
                   (int)e->rows_waiting, "preemptions", (json_int_t)e->preemptions, "prompt_tokens",
                   (json_int_t)e->prompt_tokens, "reused_tokens",
                   (json_int_t)e->prompt_tokens_reused, "prefill_tokens",
                   (json_int_t)e->prefill_tokens, "decode_tokens", (json_int_t)e->decode_tokens,
                   "pages_total", (json_int_t)e->pages_total, "pages_in_use",
                   (json_int_t)e->pages_in_use, "pages_shared", (json_int_t)e->pages_shared,
                   "kv_bytes_each", (json_int_t)e->kv_bytes_route[PKV_ROUTE_BALANCED],
                   "kv_bytes_shared", (json_int_t)e->kv_bytes_route[PKV_ROUTE_SHARED]);
}

pkv_status pkv_reply_state(pkv_buffer *out, const pkv_server *server, pkv_error *err) {
  static const pkv_measure shown[] = {PKV_MEASURE_TTFT, PKV_MEASURE_TPOT, PKV_MEASURE_DECODE_ROWS};
  static const char *const names[] = {"ttft", "tpot", "rows"};
  pkv_loop_counters c;
  pkv_loop_get_counters(&c, server->loop);
  json_t *times = json_object();
  for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
    pkv_json_set(&times, names[i], histogram_json(&c.times.of[shown[i]], shown[i]));
  json_t *engine = engine_json(&c.engine);
  pkv_json_set(&engine, "pages_cached", json_integer(c.engine.pages_cached));
  const int32_t page = server->options->engine.page_tokens;
  return pkv_json_append(
      out,
      json_pack("{s:s, s:s, s:f, s:i, s:i, s:I, s:I, s:I, s:i, s:o, s:o, s:o, s:o}", "phase",
                pkv_server_phase(server, &c), "model", server->options->name, "uptime_s",
                (double)(pkv_clock_ns() - server->started_ns) * 1e-9, "context",
                (int)server->longest, "live", (int)c.live, "accepted", (json_int_t)c.accepted,
                "refused", (json_int_t)c.refused_full, "generated", (json_int_t)c.generated_tokens,
                "rows", (int)row_count(server), "engine", engine, "times", times, "slots",
                slots_json(server, false), "tree", pkv_prefix_tree(server->loop, page)),
      err);
}
