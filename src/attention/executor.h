/* SPDX-License-Identifier: Apache-2.0 */
/* Executors of one device among several. */
#ifndef PKV_ATTENTION_EXECUTOR_H
#define PKV_ATTENTION_EXECUTOR_H

#include "pkv/pkv.h"

/* pkv_executor_create on the device of this index among those that the process sees; -1 = the
   calling thread's own, as there. */
pkv_status pkv_executor_create_at(pkv_executor **out, const pkv_executor_options *options,
                                  int32_t index, pkv_error *err);

#endif
