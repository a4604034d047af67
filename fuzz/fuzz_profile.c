/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of pkv_profile_parse: any text is either refused with a line and a reason, nothing
 * written, or gives a profile that is written back the same, predicts finite times, and chooses a
 * route that is there.
 */
#include "pkv/profile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void refused(const pkv_profile *profile, const pkv_cost_model *model, pkv_status status,
                    const pkv_error *err) {
  static const pkv_profile untouched = PKV_PROFILE_INIT;
  static const pkv_cost_model empty;
  REQUIRE(status == PKV_E_FORMAT && err->text[0] != '\0');
  REQUIRE(memcmp(profile, &untouched, sizeof untouched) == 0);
  REQUIRE(memcmp(model, &empty, sizeof empty) == 0);
}

static void use(const pkv_profile *profile) {
  static const int32_t lens[] = {1, 300, 70000};
  pkv_prediction p[PKV_COST_KINDS];
  pkv_choice choice = PKV_CHOICE_INIT;
  const pkv_cost_model *m = profile->model;
  pkv_error err = {PKV_OK, NULL, {0}};
  REQUIRE(pkv_policy_predict(p, &m->shape, m->kv_dtype, 3, lens, NULL, profile, &err) == PKV_OK);
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    REQUIRE(!p[kind].available || (isfinite(p[kind].step_us) && p[kind].step_us >= 0));
  const pkv_status status = pkv_policy_choose(&choice, PKV_POLICY_CALIBRATED, PKV_ROUTE_AUTO,
                                              &m->shape, m->kv_dtype, 3, lens, profile, &err);
  if (status != PKV_OK)
    REQUIRE(status == PKV_E_INVALID && err.text[0] != '\0'); /* none of its routes is fitted */
  else
    REQUIRE(profile->routes >> choice.route & 1u);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static char text[PKV_PROFILE_MAX_BYTES], again[PKV_PROFILE_MAX_BYTES];
  pkv_profile profile = PKV_PROFILE_INIT, second = PKV_PROFILE_INIT;
  pkv_cost_model model, other;
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t bytes, more;
  memset(&model, 0, sizeof model);
  const pkv_status status = pkv_profile_parse(&profile, &model, (const char *)data, size, &err);
  if (status != PKV_OK) {
    refused(&profile, &model, status, &err);
    return 0;
  }
  use(&profile);
  REQUIRE(pkv_profile_format(text, sizeof text, &bytes, &profile, &err) == PKV_OK);
  REQUIRE(pkv_profile_parse(&second, &other, text, bytes, &err) == PKV_OK);
  REQUIRE(pkv_profile_format(again, sizeof again, &more, &second, &err) == PKV_OK);
  REQUIRE(more == bytes && memcmp(text, again, bytes) == 0);
  return 0;
}
