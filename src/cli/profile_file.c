/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/profile_file.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"

#define PATH_BYTES (PATH_MAX + 5)

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

static bool write_text(FILE *file, const char *text, size_t bytes, bool to_disk) {
  const bool good = fwrite(text, 1, bytes, file) == bytes && fflush(file) == 0 &&
                    (!to_disk || fsync(fileno(file)) == 0);
  return fclose(file) == 0 && good;
}

/* Beside the file, then in its place: whatever fails, the one before is whole. */
static pkv_status replace(const char *path, const struct stat *before, const char *text,
                          size_t bytes, pkv_error *err) {
  char fresh[PATH_BYTES];
  const int size = snprintf(fresh, sizeof fresh, "%s.new", path);
  PKV_CHECK(err, size > 0 && (size_t)size < sizeof fresh, PKV_E_RANGE, "%.60s...: too long", path);
  FILE *const file = fopen(fresh, "we");
  PKV_CHECK(err, file, PKV_E_IO, "%s: %s", fresh, strerror(errno));
  const bool kept = before == NULL || fchmod(fileno(file), before->st_mode & 07777) == 0;
  if (write_text(file, text, bytes, true) && kept && rename(fresh, path) == 0) return PKV_OK;
  const int reason = errno;
  (void)remove(fresh);
  return PKV_FAIL(err, PKV_E_IO, "cannot write %s: %s", path, strerror(reason));
}

pkv_status profile_file_save(const char *path, const pkv_profile *profile, pkv_error *err) {
  static char text[PKV_PROFILE_MAX_BYTES];
  char target[PATH_MAX];
  struct stat before;
  size_t bytes;
  PKV_TRY(pkv_profile_format(text, sizeof text, &bytes, profile, err));
  if (stat(path, &before) != 0) return replace(path, NULL, text, bytes, err);
  if (!S_ISREG(before.st_mode)) { /* a pipe or a device: nothing that could be replaced */
    FILE *const file = fopen(path, "we");
    PKV_CHECK(err, file != NULL && write_text(file, text, bytes, false), PKV_E_IO,
              "cannot write %s: %s", path, strerror(errno));
    return PKV_OK;
  }
  PKV_CHECK(err, realpath(path, target) != NULL, PKV_E_IO, "cannot write %s: %s", path,
            strerror(errno));
  return replace(target, &before, text, bytes, err); /* a link stays one */
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
