/* SPDX-License-Identifier: Apache-2.0 */
/* Where a prompt comes from: the command line, a file or stdin. */
#ifndef PKV_CLI_PROMPT_TEXT_H
#define PKV_CLI_PROMPT_TEXT_H

#include "base/text.h"
#include "pkv/engine.h"
#include "server/token_list.h"

#define PKV_PROMPT_BYTES ((size_t)64 << 20)

/* Copies `plain` to *err with the path in front, unless it is in the text already; returns its
 * status. */
pkv_status pkv_fail_named(pkv_error *err, const pkv_error *plain, const char *path);
/* Choices of --weights, in the order of pkv_weights; NULL ends them. */
extern const char *const pkv_weights_choices[];
#define PKV_WEIGHTS_OPTION(type)                                                                   \
  PKV_CHOICE(type, weights, 0, "weights", pkv_weights_choices, "auto",                             \
             "mapped: in the system's cache of the file; copied: on huge pages, faster to read; "  \
             "auto: copied for a CPU that has the memory")
/* Options for a model that will run on that device. */
pkv_model_options pkv_model_options_for(int32_t weights, int32_t device);
/* pkv_model_open, with the path in every message. */
pkv_status pkv_model_open_named(pkv_model **out, const char *path, const pkv_model_options *options,
                                pkv_error *err);
/* All of stdin, or of a file ("-" is stdin), into an initialised buffer. */
pkv_status pkv_prompt_read(pkv_buffer *text, const char *path, pkv_error *err);
/* Replaces \n \t \r \\ \" \' \xHH in place; E_FORMAT names what else follows a backslash. */
pkv_status pkv_prompt_unescape(pkv_buffer *text, pkv_error *err);

#endif
