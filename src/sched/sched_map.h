/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hash table of fixed size from 64-bit hashes to 32-bit references, several of which may have the
 * same hash. It keeps 32 bits of each hash; whether a reference is the one that is sought, its
 * owner says.
 */
#ifndef PKV_SCHED_MAP_H
#define PKV_SCHED_MAP_H

#include "base/alloc.h"

typedef struct pkv_sched_map_entry {
  uint32_t ref; /* UINT32_MAX = free */
  uint32_t tag; /* the place it would like is tag / 2^32 of the table */
} pkv_sched_map_entry;

typedef struct pkv_sched_map {
  pkv_sched_map_entry *entries;
  uint32_t size;
} pkv_sched_map;

/* For at most `most` references. E_NOMEM. */
pkv_status pkv_sched_map_init(pkv_sched_map *map, uint32_t most, const pkv_allocator *allocator,
                              pkv_error *err);
void pkv_sched_map_deinit(pkv_sched_map *map, const pkv_allocator *allocator);
size_t pkv_sched_map_bytes(const pkv_sched_map *map);

/*
 * for (uint32_t at = pkv_sched_map_first(map, hash); at != UINT32_MAX;
 *      at = pkv_sched_map_next(map, hash, at))   map->entries[at].ref is a candidate
 */
uint32_t pkv_sched_map_first(const pkv_sched_map *map, uint64_t hash);
uint32_t pkv_sched_map_next(const pkv_sched_map *map, uint64_t hash, uint32_t at);
void pkv_sched_map_add(pkv_sched_map *map, uint64_t hash, uint32_t ref);
/* Removes, or replaces, a reference that is there. */
void pkv_sched_map_remove(pkv_sched_map *map, uint64_t hash, uint32_t ref);
void pkv_sched_map_replace(pkv_sched_map *map, uint64_t hash, uint32_t ref, uint32_t other);

/* A bijection of 64 bits that spreads them (splitmix64's). */
static inline uint64_t pkv_sched_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

#endif
