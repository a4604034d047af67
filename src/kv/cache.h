/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of cache views: what every call that takes one relies on. */
#ifndef PKV_KV_CACHE_H
#define PKV_KV_CACHE_H

#include "base/status.h"

/*
 * Everything pkv.h demands of one view: pointers present and aligned to an element, dtype, pages
 * 1 .. INT32_MAX, page_tokens 1 .. 1024, kv_heads >= 1, head_dim a multiple of 8 in 8 .. 256,
 * strides that nest (no two elements of K coincide, nor of V), extents that fit the address space,
 * scales 0 (= 1.0) or finite and positive. `prefix` goes before a field's name in the text:
 * "cache->", "caches[3].". Reads head scales, never K or V. K and V may be the same memory.
 */
pkv_status pkv_cache_check(const pkv_cache *cache, const char *prefix, pkv_error *err);
/* The part of it that needs no memory yet: dtype, sizes and scales. */
pkv_status pkv_cache_check_shape(const pkv_cache *cache, const char *prefix, pkv_error *err);

/*
 * False when a write through one base could change what the other shows: a and b are two bases (K
 * or V) of checked views of one shape and dtype. Interleavings whose strides agree, or whose page
 * strides agree, are recognised as apart; any other overlap of extents counts as touching.
 */
int pkv_cache_apart(const pkv_cache *a, int a_is_v, const pkv_cache *b, int b_is_v);

#endif
