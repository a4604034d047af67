/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of a whole model: whatever the bytes, opening fails with a text, or the model's text
 * functions and a short prompt run to their end. The target aborts on a broken promise.
 */
#include <stdio.h>
#include <stdlib.h>

#include "support/run_model.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void run(const pkv_model *model) {
  static const int32_t prompt[] = {3, 0, 4, 8, 5};
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_finish finish = PKV_FINISH_NONE;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_model_get_info(&info, model);
  int32_t ids[5];
  for (int i = 0; i < 5; i++)
    ids[i] = prompt[i] % info.vocab;
  /* What a pass computes grows with these; the file's own size bounds their product, not the time
     that one input may take. */
  if (info.layers > 8 || info.width > 512 || info.feed_forward > 1024 || info.vocab > 4096) return;
  for (int k = 0; k < 2; k++) {
    const pkv_status status = run_model_tokens(&finish, model, ids, 5, (pkv_activations)k, &err);
    REQUIRE(status == PKV_OK || status == PKV_E_UNSUPPORTED || status == PKV_E_RANGE ||
            status == PKV_E_LIMIT);
    REQUIRE(status != PKV_OK || finish != PKV_FINISH_NONE);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_model *model = NULL;
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  options.check_tensors = 1;
  const pkv_status checked = pkv_model_open_memory(&model, data, size, &options, &err);
  pkv_model_close(model);
  options.check_tensors = 0;
  const pkv_status status = pkv_model_open_memory(&model, data, size, &options, &err);
  REQUIRE(checked != PKV_OK || status == PKV_OK);
  if (status == PKV_OK) {
    REQUIRE(run_model_text(model));
    run(model);
    pkv_model_close(model);
    return 0;
  }
  REQUIRE(model == NULL && err.status == status && err.text[0] != '\0');
  REQUIRE(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED || status == PKV_E_LIMIT);
  options.tokenizer_only = 1;
  if (pkv_model_open_memory(&model, data, size, &options, &err) == PKV_OK)
    REQUIRE(run_model_text(model));
  pkv_model_close(model);
  return 0;
}
