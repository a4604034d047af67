/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: arguments checked as far as the host can see, defaults resolved. */
#ifndef PKV_ATTENTION_CHECK_H
#define PKV_ATTENTION_CHECK_H

#include "backend/backend.h"

/* All but the workspace and the contents of the block table. `plan` is the header of args' plan. */
pkv_status pkv_attention_resolve(pkv_attention_params *p, const pkv_attention_args *args,
                                 const struct pkv_plan *plan, int on_device, pkv_error *err);
/* All but the values of the slots. */
pkv_status pkv_append_resolve(pkv_append_params *p, const pkv_append_args *args, int on_device,
                              pkv_error *err);

#endif
