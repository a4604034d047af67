/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: arguments checked as far as the host can see, defaults resolved. */
#ifndef PKV_ATTENTION_CHECK_H
#define PKV_ATTENTION_CHECK_H

#include "backend/backend.h"

/* All but the workspace and the contents of the block table. `plan` is the header of args' plan. */
pkv_status pkv_attention_resolve(pkv_attention_params *p, const pkv_attention_args *args,
                                 const struct pkv_plan *plan, int on_device, pkv_error *err);
/* Elements of a token row do not coincide: heads inside tokens, or tokens inside heads. */
int pkv_strides_nest(int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                     int64_t head_dim);
/* A cache; scales of heads in device memory cannot be looked at from here. */
pkv_status pkv_check_view(const pkv_cache *cache, int on_device, pkv_error *err);
/* Scales belong to fp8; other dtypes hold the values themselves. */
void pkv_resolve_scales(pkv_cache *cache);
/* All but the values of the slots. */
pkv_status pkv_append_resolve(pkv_append_params *p, const pkv_append_args *args, int on_device,
                              pkv_error *err);

#endif
