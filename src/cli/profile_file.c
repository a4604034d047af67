/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/profile_file.h"

#include <stdlib.h>
#include <string.h>

#include "base/replace_file.h"
#include "base/text.h"

pkv_status profile_file_load(profile_file *out, const char *path, pkv_error *err) {
  pkv_error why = {PKV_OK, NULL, {0}};
  pkv_buffer text;
  pkv_buffer_init(&text, PKV_PROFILE_MAX_BYTES + 1, NULL);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK) {
    status =
        pkv_profile_parse(&out->profile, &out->model, text.data ? text.data : "", text.size, &why);
    if (status != PKV_OK) status = PKV_FAIL(err, status, "%s: %s", path, why.text);
  }
  pkv_buffer_deinit(&text);
  return status;
}

pkv_status profile_file_save(const char *path, const pkv_profile *profile, pkv_error *err) {
  static char text[PKV_PROFILE_MAX_BYTES];
  size_t bytes;
  PKV_TRY(pkv_profile_format(text, sizeof text, &bytes, profile, err));
  return pkv_replace_file(path, pkv_write_bytes, &(pkv_bytes){text, bytes}, err);
}

pkv_status policy_from_word(pkv_policy *policy, pkv_route *fixed, const char *word,
                            pkv_error *err) {
  static const char prefix[] = "fixed:";
  *fixed = PKV_ROUTE_AUTO;
  for (int p = PKV_POLICY_STATIC; p <= PKV_POLICY_CALIBRATED; p++)
    if (strcmp(word, pkv_policy_name((pkv_policy)p)) == 0) {
      *policy = (pkv_policy)p;
      return PKV_OK;
    }
  *policy = PKV_POLICY_FIXED;
  if (strncmp(word, prefix, sizeof prefix - 1) == 0)
    for (int r = PKV_ROUTE_BUCKET_EXACT; r <= PKV_ROUTE_FLASHINFER; r++)
      if (strcmp(word + sizeof prefix - 1, pkv_route_name((pkv_route)r)) == 0) {
        *fixed = (pkv_route)r;
        return PKV_OK;
      }
  return PKV_FAIL(err, PKV_E_INVALID,
                  "'%s' is no policy: static, roofline, calibrated, or fixed: and one of "
                  "bucket_exact, bucket_padded, split, workqueue, balanced, shared, flashinfer",
                  word);
}
