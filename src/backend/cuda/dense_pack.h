/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How quantised matrices lie on the device. GGUF's blocks (18, 34, 210 .. bytes) start on odd
 * addresses and hold their codes in an order that suits no tensor core; so they are laid out anew
 * at upload, in as many bytes (Q4_K and Q5_K: 2.8 % more, as their scales get a byte each).
 *
 * A strip is 8 rows, a run of cells of 128 elements of each row (256 where the type has
 * super-blocks); rows past n and blocks past k are zeros. A cell holds its halves of 128 elements,
 * each with planes of codes, high bits and scales by lane, and last what the rows of a super-block
 * share. Lane 4 r + c of a warp owns row r and block c, 32 elements: it reads its codes in accesses
 * of 16 bytes, and has one scale for all of them.
 *
 *   codes   4 bits: word j holds elements 8 j .. 8 j + 7, element e as nibble e / 2 + 4 (e & 1), so
 *           that a mask leaves a pair. 8 bits (Q8_0, plus 128): in order, 16 of each lane a plane.
 *   high    1 bit: pair i is bits i and 16 + i of a word. 2 bits: 2 i and 16 + 2 i of word i / 8.
 *   scales  d (f16), or d and m, or of super-blocks two bytes: factors of d and of the minimum,
 *           of Q6_K those of each 16 elements plus 128.
 *   tail    of each row d and minus the minimum (f16); of Q6_K d.
 *
 * Included by .c and .cu alike; the host and the device fill cells with the same code.
 */
#ifndef PKV_CUDA_DENSE_PACK_H
#define PKV_CUDA_DENSE_PACK_H

#include "backend/backend.h"

#define PKV_PACK_ROWS  8   /* of a strip */
#define PKV_PACK_LANES 32  /* rows and blocks of 128 elements */
#define PKV_PACK_HALF  128 /* elements of a row that lanes share */

/* type; elements of a row in a cell; bytes of codes, high bits and scales of a lane and 128
   elements; bytes of the tail; GGUF's block: elements, bytes. */
#define PKV_PACK_MAP(X)                                                                            \
  X(Q4_0, 128, 16, 0, 2, 0, 32, 18)                                                                \
  X(Q4_1, 128, 16, 0, 4, 0, 32, 20)                                                                \
  X(Q5_0, 128, 16, 4, 2, 0, 32, 22)                                                                \
  X(Q5_1, 128, 16, 4, 4, 0, 32, 24)                                                                \
  X(Q8_0, 128, 32, 0, 2, 0, 32, 34)                                                                \
  X(Q4_K, 256, 16, 0, 2, 32, 256, 144)                                                             \
  X(Q5_K, 256, 16, 4, 2, 32, 256, 176)                                                             \
  X(Q6_K, 256, 16, 8, 2, 16, 256, 210)

typedef struct pkv_pack_layout {
  int32_t cell_k, codes, high, scales, tail, cell_bytes;
  int32_t block_k, block_bytes;
} pkv_pack_layout;

#define PKV_PACK_HALF_BYTES(codes, high, scales) (PKV_PACK_LANES * ((codes) + (high) + (scales)))
#define PKV_PACK_CELL(cell, codes, high, scales, tail)                                             \
  ((cell) / PKV_PACK_HALF * PKV_PACK_HALF_BYTES(codes, high, scales) + (tail))

/* cell_bytes = 0: no kernel multiplies by the type. */
static inline PKV_HD pkv_pack_layout pkv_pack_layout_of(int32_t type) {
  pkv_pack_layout l = {0, 0, 0, 0, 0, 0, 1, 0};
#define PKV_PACK_CASE(name, cell, c, h, s, t, block, bytes)                                        \
  if (type == PKV_WTYPE_##name) {                                                                  \
    const pkv_pack_layout found = {                                                                \
        cell, c, h, s, t, PKV_PACK_CELL(cell, c, h, s, t), block, bytes};                          \
    l = found;                                                                                     \
  }
  PKV_PACK_MAP(PKV_PACK_CASE)
#undef PKV_PACK_CASE
  return l;
}

/* Bytes of a strip, a multiple of 16. */
static inline PKV_HD int64_t pkv_pack_strip(const pkv_pack_layout *l, int64_t k) {
  return (k + l->cell_k - 1) / l->cell_k * l->cell_bytes;
}

/* Code of element j of a block of 32 (part of a super-block), without its sign: q + zero point. */
static inline PKV_HD uint32_t pkv_pack_code(int32_t type, const unsigned char *src, int32_t part,
                                            int32_t j) {
  const int32_t at = j & 15, up = 4 * (j >> 4); /* the last 16 lie in the high nibbles */
  switch (type) {
  case PKV_WTYPE_Q4_0:
    return src[2 + at] >> up & 15u;
  case PKV_WTYPE_Q4_1:
    return src[4 + at] >> up & 15u;
  case PKV_WTYPE_Q5_0:
    return (src[6 + at] >> up & 15u) | (src[2 + j / 8] >> (j & 7) & 1u) << 4;
  case PKV_WTYPE_Q5_1:
    return (src[8 + at] >> up & 15u) | (src[4 + j / 8] >> (j & 7) & 1u) << 4;
  case PKV_WTYPE_Q8_0:
    return src[2 + j] ^ 0x80u;
  case PKV_WTYPE_Q4_K:
    return src[16 + 32 * (part / 2) + j] >> 4 * (part & 1) & 15u;
  case PKV_WTYPE_Q5_K:
    return (src[48 + 32 * (part / 2) + j] >> 4 * (part & 1) & 15u) | (src[16 + j] >> part & 1u)
                                                                         << 4;
  default: { /* Q6_K */
    const int32_t half = part / 4, quarter = part % 4;
    return (src[64 * half + 32 * (quarter & 1) + j] >> 4 * (quarter >> 1) & 15u) |
           (src[128 + 32 * half + j] >> 2 * quarter & 3u) << 4;
  }
  }
}

/* Scales of a block to `to`, and of a super-block's first block what its row shares to `tail`. */
static inline PKV_HD void pkv_pack_scales(unsigned char *to, unsigned char *tail, int32_t type,
                                          const unsigned char *src, int32_t part) {
  const int32_t i = part & 3;
  const unsigned char *six = src + 4;
  switch (type) {
  case PKV_WTYPE_Q4_K:
  case PKV_WTYPE_Q5_K:
    to[0] = (unsigned char)(part < 4 ? six[i] & 63 : (six[i + 8] & 15) | six[i] >> 6 << 4);
    to[1] = (unsigned char)(part < 4 ? six[i + 4] & 63 : six[i + 8] >> 4 | six[i + 4] >> 6 << 4);
    if (part == 0) {
      tail[0] = src[0];
      tail[1] = src[1];
      tail[2] = src[2];
      tail[3] = src[3] ^ 0x80;
    }
    break;
  case PKV_WTYPE_Q6_K:
    to[0] = src[192 + 2 * part] ^ 0x80;
    to[1] = src[193 + 2 * part] ^ 0x80;
    if (part == 0) {
      tail[0] = src[208];
      tail[1] = src[209];
    }
    break;
  case PKV_WTYPE_Q4_1:
  case PKV_WTYPE_Q5_1:
    to[2] = src[2];
    to[3] = src[3];
    to[0] = src[0];
    to[1] = src[1];
    break;
  default:
    to[0] = src[0];
    to[1] = src[1];
    break;
  }
}

/* Four bytes, lowest first: addresses are multiples of 4, but the host's aliasing rules hold. */
static inline PKV_HD void pkv_pack_word(unsigned char *to, uint32_t w) {
  to[0] = (unsigned char)w;
  to[1] = (unsigned char)(w >> 8);
  to[2] = (unsigned char)(w >> 16);
  to[3] = (unsigned char)(w >> 24);
}

/* Codes and high bits of a lane: codes and high point to its places. */
static inline PKV_HD void pkv_pack_codes(unsigned char *codes, unsigned char *high, int32_t type,
                                         const pkv_pack_layout *l, const unsigned char *src,
                                         int32_t part) {
  uint32_t up0 = 0, up1 = 0;
  for (int32_t j = 0; j < 4; j++) {
    uint32_t low = 0;
    for (int32_t e = 0; e < 8; e++) {
      const uint32_t code = pkv_pack_code(type, src, part, 8 * j + e);
      const int32_t pair = 4 * j + e / 2, second = e & 1;
      low |= (code & 15u) << 4 * (e / 2 + 4 * second);
      if (l->high == 4) up0 |= (code >> 4) << (pair + 16 * second);
      if (l->high == 8 && j < 2) up0 |= (code >> 4) << (2 * pair + 16 * second);
      if (l->high == 8 && j >= 2) up1 |= (code >> 4) << (2 * (pair - 8) + 16 * second);
      if (type == PKV_WTYPE_Q8_0)
        codes[j / 2 * PKV_PACK_LANES * 16 + (8 * j + e) % 16] = (unsigned char)code;
    }
    if (type != PKV_WTYPE_Q8_0) pkv_pack_word(codes + 4 * j, low);
  }
  if (l->high > 0) pkv_pack_word(high, up0);
  if (l->high > 4) pkv_pack_word(high + 4, up1);
}

/* Block b of 32 elements of a row to its strip; NULL: zeros. */
static inline PKV_HD void pkv_pack_block(unsigned char *strip, int32_t type,
                                         const pkv_pack_layout *l, const unsigned char *row,
                                         int32_t r, int64_t b) {
  const int32_t parts = l->block_k / 32, halves = l->cell_k / PKV_PACK_HALF;
  const int32_t inside = (int32_t)(b % (l->cell_k / 32)), half = inside / 4;
  const int32_t lane = 4 * r + inside % 4;
  unsigned char *const cell = strip + b / (l->cell_k / 32) * l->cell_bytes;
  const int32_t half_bytes = PKV_PACK_HALF_BYTES(l->codes, l->high, l->scales);
  unsigned char *const first = cell + half * half_bytes;
  unsigned char *const codes = first + lane * 16;
  unsigned char *const high = first + PKV_PACK_LANES * l->codes + lane * l->high;
  unsigned char *const scale = first + PKV_PACK_LANES * (l->codes + l->high) + lane * l->scales;
  unsigned char *const tail = cell + halves * half_bytes + r * (l->tail / PKV_PACK_ROWS);
  if (row != NULL) {
    const unsigned char *src = row + b / parts * l->block_bytes;
    pkv_pack_codes(codes, high, type, l, src, (int32_t)(b % parts));
    pkv_pack_scales(scale, tail, type, src, (int32_t)(b % parts));
    return;
  }
  for (int32_t i = 0; i < l->codes; i++)
    codes[i / 16 * PKV_PACK_LANES * 16 + i % 16] = 0;
  for (int32_t i = 0; i < l->high; i++)
    high[i] = 0;
  for (int32_t i = 0; i < l->scales; i++)
    scale[i] = 0;
  if (inside == 0)
    for (int32_t i = 0; i < l->tail / PKV_PACK_ROWS; i++)
      tail[i] = 0;
}

#endif
