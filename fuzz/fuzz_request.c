/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the bodies that clients send: the first byte says whose interface, the rest is the
 * body. It is refused with a status, a field and a message, none of which holds a byte of the
 * body that could end a line; or every number of what comes out is within its limits.
 */
#include "server/api_request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"
#include "support/small_llama.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define LONGEST 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned char *model_bytes;
static pkv_model *model;
static pkv_constraint_cache *cache;
static int32_t vocab;

static void prepare(void) {
  small_llama shape = SMALL_LLAMA_INIT;
  size_t size = 0;
  vocab = shape.vocab;
  model_bytes = small_llama_bytes(&shape, &size);
  REQUIRE(pkv_model_open_memory(&model, model_bytes, size, NULL, NULL) == PKV_OK);
  REQUIRE(pkv_constraint_cache_create(&cache, NULL) == PKV_OK);
}

static void check_refusal(const pkv_api_error *error) {
  REQUIRE(error->http >= 400 && error->http < 600 && error->message[0] != '\0');
  for (const char *at = error->message; *at != '\0'; at++)
    REQUIRE(*at >= ' ' && *at <= '~');
  for (const char *at = error->param; *at != '\0'; at++)
    REQUIRE(*at >= ' ' && *at <= '~');
}

static void check_request(const pkv_api_request *r) {
  REQUIRE(r->prompt_count >= 1 && r->prompt_count <= PKV_CHOICES);
  for (int32_t i = 0; i < r->prompt_count; i++) {
    REQUIRE(r->prompts[i].count >= 1 && r->prompts[i].count <= LONGEST);
    for (size_t t = 0; t < r->prompts[i].count; t++)
      REQUIRE(r->prompts[i].ids[t] >= 0 && r->prompts[i].ids[t] < vocab);
  }
  const pkv_request *const job = &r->job.request;
  REQUIRE(r->job.n >= 1 && r->job.n * r->prompt_count <= PKV_CHOICES && job->max_tokens >= 0);
  REQUIRE(r->job.stops.count >= 0 && r->job.stops.count <= PKV_MAX_STOPS);
  for (int32_t i = 0; i < r->job.stops.count; i++)
    REQUIRE(r->job.stops.text[i][0] != '\0');
  REQUIRE(job->temperature >= 0.0f && job->temperature <= 100.0f);
  REQUIRE(r->job.bias_count >= 0 && r->job.bias_count <= PKV_MAX_LOGIT_BIAS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const pkv_api_kind kinds[] = {PKV_API_COMPLETIONS, PKV_API_CHAT, PKV_API_LLAMA};
  pkv_api_request request;
  pkv_api_error error;
  if (model == NULL) prepare();
  if (size == 0) return 0;
  memset(&request, 0, sizeof request);
  memset(&error, 0, sizeof error);
  if (!pkv_api_read(&request, &error, model, cache, LONGEST, kinds[data[0] % 3],
                    (const char *)data + 1, size - 1)) {
    check_refusal(&error);
    return 0;
  }
  check_request(&request);
  pkv_api_free(&request);
  return 0;
}
