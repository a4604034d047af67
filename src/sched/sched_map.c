/* SPDX-License-Identifier: Apache-2.0 */
/* Linear probing; removal closes the gap, so that there are no tombstones. */
#include "sched/sched_map.h"

#define FREE UINT32_MAX

pkv_status pkv_sched_map_init(pkv_sched_map *map, uint32_t most, const pkv_allocator *allocator,
                              pkv_error *err) {
  uint32_t bits = 4;
  while (((uint64_t)1 << bits) < (uint64_t)most + most / 2 + 1) /* at most two thirds full */
    bits++;
  const size_t count = (size_t)1 << bits;
  map->entries = pkv_alloc(allocator, count * sizeof *map->entries);
  PKV_CHECK(err, map->entries, PKV_E_NOMEM, "no memory for a table of %zu entries", count);
  map->mask = (uint32_t)(count - 1);
  map->shift = 32 - bits;
  for (size_t i = 0; i < count; i++)
    map->entries[i] = (pkv_sched_map_entry){FREE, 0};
  return PKV_OK;
}

size_t pkv_sched_map_bytes(const pkv_sched_map *map) {
  return map->entries == NULL ? 0 : ((size_t)map->mask + 1) * sizeof *map->entries;
}

void pkv_sched_map_deinit(pkv_sched_map *map, const pkv_allocator *allocator) {
  pkv_free(allocator, map->entries, pkv_sched_map_bytes(map));
  map->entries = NULL;
}

static uint32_t tag_of(uint64_t hash) {
  return (uint32_t)(pkv_sched_mix(hash) >> 32);
}

static uint32_t seek(const pkv_sched_map *map, uint32_t tag, uint32_t at) {
  while (map->entries[at].ref != FREE) {
    if (map->entries[at].tag == tag) return at;
    at = (at + 1) & map->mask;
  }
  return UINT32_MAX;
}

uint32_t pkv_sched_map_first(const pkv_sched_map *map, uint64_t hash) {
  const uint32_t tag = tag_of(hash);
  return seek(map, tag, tag >> map->shift);
}

uint32_t pkv_sched_map_next(const pkv_sched_map *map, uint64_t hash, uint32_t at) {
  return seek(map, tag_of(hash), (at + 1) & map->mask);
}

void pkv_sched_map_add(pkv_sched_map *map, uint64_t hash, uint32_t ref) {
  const uint32_t tag = tag_of(hash);
  uint32_t at = tag >> map->shift;
  while (map->entries[at].ref != FREE)
    at = (at + 1) & map->mask;
  map->entries[at] = (pkv_sched_map_entry){ref, tag};
}

static uint32_t find(const pkv_sched_map *map, uint64_t hash, uint32_t ref) {
  uint32_t at = pkv_sched_map_first(map, hash);
  while (at != UINT32_MAX && map->entries[at].ref != ref)
    at = pkv_sched_map_next(map, hash, at);
  PKV_ASSERT(at != UINT32_MAX);
  return at;
}

void pkv_sched_map_replace(pkv_sched_map *map, uint64_t hash, uint32_t ref, uint32_t other) {
  const uint32_t at = find(map, hash, ref);
  if (at != UINT32_MAX) map->entries[at].ref = other;
}

void pkv_sched_map_remove(pkv_sched_map *map, uint64_t hash, uint32_t ref) {
  uint32_t gap = find(map, hash, ref);
  if (gap == UINT32_MAX) return;
  for (uint32_t at = (gap + 1) & map->mask; map->entries[at].ref != FREE;
       at = (at + 1) & map->mask) {
    /* An entry may move into the gap when that is not before the place it would like. */
    const uint32_t home = map->entries[at].tag >> map->shift;
    if (((at - home) & map->mask) < ((at - gap) & map->mask)) continue;
    map->entries[gap] = map->entries[at];
    gap = at;
  }
  map->entries[gap].ref = FREE;
}
