/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PKV_BASE_LOG_H
#define PKV_BASE_LOG_H

#include "pkv/pkv.h"

/* Formats one line and hands it to the installed sink; free when there is none. Never log prompts
 * at info or above. */
void pkv_log(pkv_log_level level, const char *room, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
