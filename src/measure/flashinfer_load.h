/* SPDX-License-Identifier: Apache-2.0 */
/* Opens pkv_flashinfer.so at run time. Once opened it stays: kernels of it may be in graphs. */
#ifndef PKV_MEASURE_FLASHINFER_LOAD_H
#define PKV_MEASURE_FLASHINFER_LOAD_H

#include "base/status.h"
#include "measure/flashinfer_shim.h"

/*
 * Opens `path`, or where it is NULL the one beside the program or where the system's loader looks.
 * E_UNSUPPORTED: not there, or not for this program; the text says which.
 */
pkv_status pkv_flashinfer_load(const pkv_flashinfer_api **out, const char *path, pkv_error *err);

#endif
