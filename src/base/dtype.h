/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar conversions between float and the 16- and 8-bit element types. Round to nearest even; NaN
 * stays NaN. */
#ifndef PKV_BASE_DTYPE_H
#define PKV_BASE_DTYPE_H

#include "pkv/pkv.h"

float pkv_f16_to_f32(uint16_t h);
uint16_t pkv_f32_to_f16(float f); /* overflow -> infinity */
float pkv_bf16_to_f32(uint16_t h);
uint16_t pkv_f32_to_bf16(float f);
float pkv_e4m3_to_f32(uint8_t b);
uint8_t pkv_f32_to_e4m3(float f); /* saturates at +-448; NaN -> 0x7f */

/* Element i of an array of `dtype`, and the reverse. */
float pkv_load(const void *base, pkv_dtype dtype, int64_t i);
void pkv_store(void *base, pkv_dtype dtype, int64_t i, float value);

#endif
