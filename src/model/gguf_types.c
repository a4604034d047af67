/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of GGUF's two type numberings: of tensors (blocks and bytes) and of keys' values. */
#include "model/gguf_parts.h"

typedef struct type_info {
  const char *name;
  int32_t block, block_bytes; /* elements, bytes; 0 bytes = the format removed this type */
} type_info;

static const type_info types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [4] = {"Q4_2", 0, 0},        [5] = {"Q4_3", 0, 0},
    [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},      [8] = {"Q8_0", 32, 34},
    [9] = {"Q8_1", 32, 36},      [10] = {"Q2_K", 256, 84},    [11] = {"Q3_K", 256, 110},
    [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},   [14] = {"Q6_K", 256, 210},
    [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66}, [17] = {"IQ2_XS", 256, 74},
    [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},   [20] = {"IQ4_NL", 32, 18},
    [21] = {"IQ3_S", 256, 110},  [22] = {"IQ2_S", 256, 82},   [23] = {"IQ4_XS", 256, 136},
    [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},        [26] = {"I32", 1, 4},
    [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},        [29] = {"IQ1_M", 256, 56},
    [30] = {"BF16", 1, 2},       [31] = {"Q4_0_4_4", 0, 0},   [32] = {"Q4_0_4_8", 0, 0},
    [33] = {"Q4_0_8_8", 0, 0},   [34] = {"TQ1_0", 256, 54},   [35] = {"TQ2_0", 256, 66},
    [36] = {"IQ4_NL_4_4", 0, 0}, [37] = {"IQ4_NL_4_8", 0, 0}, [38] = {"IQ4_NL_8_8", 0, 0},
    [39] = {"MXFP4", 32, 17},    [40] = {"NVFP4", 64, 36},    [41] = {"Q1_0", 128, 18},
    [42] = {"Q2_0", 64, 18},
};

bool pkv_gguf_type_info(uint32_t type, const char **name, int64_t *block, int64_t *block_bytes) {
  if (name != NULL) *name = NULL;
  if (type >= sizeof types / sizeof types[0]) return false;
  if (name != NULL) *name = types[type].name;
  if (block != NULL) *block = types[type].block;
  if (block_bytes != NULL) *block_bytes = types[type].block_bytes;
  return types[type].block_bytes != 0;
}

const char *pkv_gguf_type_name(pkv_gguf_type type) {
  static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                      "bool", "string", "array", "u64", "i64", "f64"};
  const size_t i = (size_t)type;
  return i < sizeof names / sizeof names[0] ? names[i] : "unknown";
}

size_t pkv_gguf_scalar_bytes(pkv_gguf_type type) {
  static const unsigned char sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  const size_t i = (size_t)type;
  return i < sizeof sizes ? sizes[i] : 0;
}
