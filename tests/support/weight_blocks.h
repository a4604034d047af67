/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights for tests: made at random or from floats, and read back in double, by code that
   shares nothing with the library's. */
#ifndef PKV_TEST_WEIGHT_BLOCKS_H
#define PKV_TEST_WEIGHT_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/rng.h"

#define TEST_WTYPES 11
extern const pkv_wtype test_wtypes[TEST_WTYPES];

const char *test_wtype_name(pkv_wtype type);
int64_t test_wtype_block(pkv_wtype type);       /* elements of a block */
int64_t test_wtype_block_bytes(pkv_wtype type); /* bytes of a block */
bool test_wtype_is_float(pkv_wtype type);
bool test_wtype_is_super(pkv_wtype type); /* blocks of 256: Q4_K, Q5_K, Q6_K */
int64_t test_wtype_row_bytes(pkv_wtype type, int64_t k);

/* Random codes, scales of either sign between 2^-7 and 2^-5 and minima of like size; float types
   get normal numbers / 4. `bytes` holds n rows of test_wtype_row_bytes(type, k). */
void test_weights_random(unsigned char *bytes, pkv_wtype type, int64_t n, int64_t k, pkv_rng *rng);
/* All codes of a block at one value (0 .. 31, 0 .. 63 for Q6_K; as a byte for Q8_0), minimum 0;
   scale 1, or in super-blocks the largest: 63, -128 for Q6_K. */
void test_weights_constant(unsigned char *bytes, pkv_wtype type, int64_t n, int64_t k,
                           int32_t code);
/* The value of element i of a row, exact; *scale_part and *min_part (may be NULL) are its two
   terms. */
double test_weight_value(const unsigned char *row, pkv_wtype type, int64_t i);
/* |q d| + |m|: what roundings of the value are relative to. */
double test_weight_size(const unsigned char *row, pkv_wtype type, int64_t i);

#endif
