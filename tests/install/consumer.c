/* SPDX-License-Identifier: Apache-2.0 */
/* What a user's program sees after the installation: headers, one library, a version. */
#ifdef CONSUMER_ENGINE
#include <pkv/engine.h>
#endif
#include <pkv/pkv.h>

#include <stdio.h>
#include <string.h>

int main(void) {
  char expected[32];
  (void)snprintf(expected, sizeof expected, "%d.%d.%d", PKV_VERSION_MAJOR, PKV_VERSION_MINOR,
                 PKV_VERSION_PATCH);
  if (strcmp(pkv_version(), expected) != 0) {
    (void)fprintf(stderr, "library %s, header %s\n", pkv_version(), expected);
    return 1;
  }
#ifdef CONSUMER_ENGINE
  pkv_model *model;
  pkv_error err;
  const pkv_status status = pkv_model_open(&model, "/nonexistent.gguf", NULL, &err);
  if (status != PKV_E_IO && status != PKV_E_INVALID) {
    (void)fprintf(stderr, "a missing model gave %s\n", pkv_status_name(status));
    return 1;
  }
#endif
  (void)printf("pkv %s\n", pkv_version());
  return 0;
}
