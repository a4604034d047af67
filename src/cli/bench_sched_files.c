/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_files.h"

#include <stdbool.h>
#include <string.h>

#define LINE_BYTES 1024

pkv_status sched_csv_open(FILE **out, const char *path, const char *head, const char *about,
                          const char *command, pkv_error *err) {
  char line[LINE_BYTES];
  *out = NULL;
  FILE *const file = fopen(path, "a+e");
  PKV_CHECK(err, file, PKV_E_IO, "cannot open %s", path);
  rewind(file);
  const bool empty = fgets(line, sizeof line, file) == NULL;
  pkv_status status = PKV_OK;
  if (!empty && strcmp(line, head) != 0)
    status = PKV_FAIL(err, PKV_E_FORMAT, "%s has other columns", path);
  (void)fseek(file, 0, SEEK_END);
  if (status == PKV_OK) {
    if (empty) (void)fputs(head, file);
    (void)fprintf(file, "%s# command: pkv %s\n", about, command);
    if (fflush(file) != 0 || ferror(file))
      status = PKV_FAIL(err, PKV_E_IO, "cannot write %s", path);
  }
  if (status != PKV_OK) {
    (void)fclose(file);
    return status;
  }
  *out = file;
  return PKV_OK;
}
