/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --sandbox: what this process may still do once it reads what strangers made. Two halves, because
 * one must come before there are threads and the other after the socket listens:
 *
 *   files   Landlock: only the model and named files can be opened, and only to be read
 *   calls   seccomp: no program is started, no connection made, no code written and run
 *
 * Both stay until the process ends, and both are refused (E_UNSUPPORTED) where the kernel lacks
 * them: half a sandbox is none.
 */
#ifndef PKV_CLI_SANDBOX_H
#define PKV_CLI_SANDBOX_H

#include <stddef.h>

#include "pkv/pkv.h"

/*
 * From now on this thread and those it starts can open the model (a file with the shards named like
 * it, or all files of a folder, links followed), the `count` files of `more` (NULL among them is
 * skipped), and what the C library and we read of the machine. E_IO: one of them is not there.
 */
pkv_status pkv_sandbox_files(const char *model, const char *const *more, size_t count,
                             pkv_error *err);

/* All threads of the process: the calls named in sandbox.c fail with EPERM. */
pkv_status pkv_sandbox_calls(pkv_error *err);

#endif
