/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: the part of device.h that is particular to route shared. */
#ifndef PKV_ATTENTION_DEVICE_SHARED_H
#define PKV_ATTENTION_DEVICE_SHARED_H

#include "backend/device_ops.h"
#include "pkv/device.h"

/* Limits, parts and memory of a plan whose shape, options and limits of rows and lengths are set.
   What it took before it failed is the plan's. */
pkv_status pkv_device_create_shared(pkv_device_plan *plan, pkv_error *err);

#endif
