/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a model that may be damaged, for tests and fuzz targets: a short prompt through an engine of
 * its own, and its text functions. Anything may fail with a status; nothing may crash or hang.
 */
#ifndef PKV_TEST_RUN_MODEL_H
#define PKV_TEST_RUN_MODEL_H

#include <string.h>

#include "model/model.h"

/* A request that does not end within this many steps hangs. */
#define RUN_MODEL_STEPS 64

/* Generates up to two tokens after `prompt`; *finish is the request's end. E_INTERNAL: no end. */
static inline pkv_status run_model_tokens(pkv_finish *finish, const pkv_model *model,
                                          const int32_t *prompt, int32_t count,
                                          pkv_activations activations, pkv_error *err) {
  enum { EVENTS = 64 };
  pkv_event events[EVENTS];
  pkv_engine *engine = NULL;
  pkv_engine_options options = PKV_ENGINE_OPTIONS_INIT;
  pkv_request request = PKV_REQUEST_INIT;
  int64_t id = 0;
  *finish = PKV_FINISH_NONE;
  options.threads = 1;
  options.page_tokens = 8;
  options.cache_tokens = 16;
  options.max_seq_len = 16;
  options.max_rows = 1;
  options.max_requests = 1;
  options.prefill_chunk = 4;
  options.activations = activations;
  request.prompt = prompt;
  request.prompt_tokens = count;
  request.max_tokens = 2;
  request.ignore_end = 1;
  pkv_status status = pkv_engine_create(&engine, model, &options, err);
  if (status == PKV_OK) status = pkv_engine_submit(&id, engine, &request, err);
  for (int step = 0; status == PKV_OK && *finish == PKV_FINISH_NONE; step++) {
    size_t written = 0;
    if (step == RUN_MODEL_STEPS) {
      status = PKV_E_INTERNAL;
      break;
    }
    status = pkv_engine_step(events, EVENTS, &written, engine, err);
    for (size_t i = 0; i < written; i++)
      if (events[i].request == id) *finish = events[i].finish;
  }
  pkv_engine_destroy(engine);
  return status;
}

/* Every token's text, and some text's tokens; false where the two-call pattern is broken. */
static inline bool run_model_text(const pkv_model *model) {
  static const char text[] = "<|im_start|>a ab\xc3\xa9 12 <|im_end|>\xff";
  int32_t ids[256];
  size_t needed = 0, count = 0;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, model);
  for (int32_t token = -1; token <= info.vocab; token++) {
    const char *bytes = NULL;
    size_t size = 0, sum = 0;
    if (pkv_token_text(&bytes, &size, model, token, token % 2, NULL) != PKV_OK) continue;
    for (size_t i = 0; i < size; i++)
      sum += (unsigned char)bytes[i];
    if (sum > 255 * size) return false;
    (void)pkv_model_is_end(model, token);
  }
  const uint32_t flags = PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL;
  const pkv_status first = pkv_tokenize(NULL, 0, &needed, model, text, strlen(text), flags, NULL);
  if (first == PKV_E_TOO_SMALL && needed <= 256) {
    if (pkv_tokenize(ids, 256, &count, model, text, strlen(text), flags, NULL) != PKV_OK)
      return false;
    if (count != needed) return false;
    for (size_t i = 0; i < count; i++)
      if (ids[i] < 0 || ids[i] >= info.vocab) return false;
  }
  const pkv_message messages[] = {{"system", "a"}, {"user", "b <|im_end|> c"}};
  if (pkv_chat_tokenize(ids, 256, &count, model, messages, 2, 1, NULL) != PKV_OK) return true;
  return count <= 256;
}

#endif
