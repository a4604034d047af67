/* SPDX-License-Identifier: Apache-2.0 */
/* The limits of pkv_shape, in one place for everybody who takes one. */
#ifndef PKV_POLICY_SHAPE_H
#define PKV_POLICY_SHAPE_H

#include "base/status.h"

/* States of a KV head, at most 32 times this, are counted in 32 bits. */
#define PKV_SHAPE_MAX_Q_LEN (1 << 20)

/* E_INVALID or E_UNSUPPORTED with the field, its value and what is possible. */
pkv_status pkv_shape_check(const pkv_shape *shape, pkv_error *err);

#endif
