/* SPDX-License-Identifier: Apache-2.0 */
/* Profiles from files, policies from words, for the commands that take --profile and --policy. */
#ifndef PKV_CLI_PROFILE_FILE_H
#define PKV_CLI_PROFILE_FILE_H

#include "base/status.h"
#include "pkv/profile.h"

typedef struct profile_file {
  pkv_profile profile;
  pkv_cost_model model;
} profile_file;

/* Must not move afterwards. */
pkv_status profile_file_load(profile_file *out, const char *path, pkv_error *err);

/* Writes the file whole or leaves what is there: a new file takes its place. */
pkv_status profile_file_save(const char *path, const pkv_profile *profile, pkv_error *err);

/* "static", "roofline", "calibrated", "fixed:ROUTE"; E_INVALID says which there are. */
pkv_status policy_from_word(pkv_policy *policy, pkv_route *fixed, const char *word, pkv_error *err);

#endif
