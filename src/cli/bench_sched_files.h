/* SPDX-License-Identifier: Apache-2.0 */
/* CSV files of `pkv bench sched`. */
#ifndef PKV_CLI_BENCH_SCHED_FILES_H
#define PKV_CLI_BENCH_SCHED_FILES_H

#include <stdio.h>

#include "base/status.h"

/* Opens a file to append rows: an empty one gets `head`, a line of column names; then come `about`,
   lines that begin with '#', and "# command: pkv COMMAND". E_FORMAT: it has other columns. */
pkv_status sched_csv_open(FILE **out, const char *path, const char *head, const char *about,
                          const char *command, pkv_error *err);

#endif
