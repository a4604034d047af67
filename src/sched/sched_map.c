/* SPDX-License-Identifier: Apache-2.0 */
/* Linear probing; removal closes the gap, so that there are no tombstones. */
#include "sched/sched_map.h"

#define FREE UINT32_MAX

pkv_status pkv_sched_map_init(pkv_sched_map *map, uint32_t most, const pkv_allocator *allocator,
                              pkv_error *err) {
  const size_t count = (size_t)most + most / 4 + 2; /* at most four fifths full */
  map->entries = pkv_alloc(allocator, count * sizeof *map->entries);
  PKV_CHECK(err, map->entries, PKV_E_NOMEM, "no memory for a table of %zu entries", count);
  map->size = (uint32_t)count;
  for (size_t i = 0; i < count; i++)
    map->entries[i] = (pkv_sched_map_entry){FREE, 0};
  return PKV_OK;
}

size_t pkv_sched_map_bytes(const pkv_sched_map *map) {
  return map->entries == NULL ? 0 : (size_t)map->size * sizeof *map->entries;
}

void pkv_sched_map_deinit(pkv_sched_map *map, const pkv_allocator *allocator) {
  pkv_free(allocator, map->entries, pkv_sched_map_bytes(map));
  map->entries = NULL;
}

static uint32_t tag_of(uint64_t hash) {
  return (uint32_t)(pkv_sched_mix(hash) >> 32);
}

static uint32_t home_of(const pkv_sched_map *map, uint32_t tag) {
  return (uint32_t)((uint64_t)tag * map->size >> 32);
}

static uint32_t after(const pkv_sched_map *map, uint32_t at) {
  return at + 1 < map->size ? at + 1 : 0;
}

static uint32_t seek(const pkv_sched_map *map, uint32_t tag, uint32_t at) {
  while (map->entries[at].ref != FREE) {
    if (map->entries[at].tag == tag) return at;
    at = after(map, at);
  }
  return UINT32_MAX;
}

uint32_t pkv_sched_map_first(const pkv_sched_map *map, uint64_t hash) {
  const uint32_t tag = tag_of(hash);
  return seek(map, tag, home_of(map, tag));
}

uint32_t pkv_sched_map_next(const pkv_sched_map *map, uint64_t hash, uint32_t at) {
  return seek(map, tag_of(hash), after(map, at));
}

void pkv_sched_map_add(pkv_sched_map *map, uint64_t hash, uint32_t ref) {
  const uint32_t tag = tag_of(hash);
  uint32_t at = home_of(map, tag);
  while (map->entries[at].ref != FREE)
    at = after(map, at);
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

static uint32_t distance(const pkv_sched_map *map, uint32_t from, uint32_t to) {
  return to >= from ? to - from : to + map->size - from;
}

void pkv_sched_map_remove(pkv_sched_map *map, uint64_t hash, uint32_t ref) {
  uint32_t gap = find(map, hash, ref);
  if (gap == UINT32_MAX) return;
  for (uint32_t at = after(map, gap); map->entries[at].ref != FREE; at = after(map, at)) {
    /* An entry may move into the gap when that is not before the place it would like. */
    const uint32_t home = home_of(map, map->entries[at].tag);
    if (distance(map, home, at) < distance(map, gap, at)) continue;
    map->entries[gap] = map->entries[at];
    gap = at;
  }
  map->entries[gap].ref = FREE;
}
