/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda_fp16.h beside it. */
#ifndef PKV_TEST_MATH_CONSTANTS_H
#define PKV_TEST_MATH_CONSTANTS_H

#define CUDART_NAN_F NAN
#define CUDART_INF_F INFINITY
#define CUDART_INF   ((double)INFINITY)

#endif
