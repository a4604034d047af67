/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Chunked Hash Tree as its authors have it: a table of every different chunk prefix (a *key*:
 * level and cumulative digest) with its holders and how many of them are active; for each waiting
 * request the number of its keys that no active request holds; a heap over those numbers with lazy
 * deletion; and the chain that all active requests share, kept up to date at its tip.
 *
 * It costs what they say it costs: an admission that covers n keys new to the batch touches each of
 * their waiting holders. Three things differ unless the faults are asked for: a key is told from
 * another of equal digest by its tokens and the key before it; stale heap entries are swept once
 * they are the majority; and what is preempted comes back.
 */
#include "sched/sched_hash.h"

#include <string.h>

#define NONE PKV_SCHED_NONE

typedef struct cht_key {
  uint64_t digest;
  uint32_t before; /* the key one level up; NONE */
  int32_t level;   /* 1 = the first chunk */
  int32_t active, waiting;
  uint32_t holder; /* list of all requests that have it, by their entry at `level` */
  uint32_t next;   /* in its bucket; of unused records: the next one */
} cht_key;

typedef struct cht_entry {
  uint32_t key, next, prev; /* slots */
} cht_entry;

typedef struct cht_req {
  cht_entry *entries; /* [levels] of `room` */
  int32_t levels;
  int32_t missing;  /* while it waits: keys that are not active */
  uint32_t version; /* heap entries of another one are stale */
  bool in_heap;     /* by an entry that is not */
  uint32_t room;    /* log2 of the block's size; block given back: NULL above */
  uint32_t next_active, prev_active;
} cht_req;

typedef struct cht_item {
  pkv_sched_key k;
  uint32_t version;
} cht_item;

#define ROOMS 25 /* blocks of 1 .. 2^24 entries */

struct pkv_cht {
  cht_req *reqs; /* [capacity] */
  cht_key *keys;
  uint32_t key_room, key_fresh, key_free, key_count;
  uint32_t *buckets;
  uint32_t bucket_count; /* a power of two */
  cht_item *heap;        /* binary heap */
  size_t heap_room, heap_count, heap_live;
  uint64_t *digests; /* of the prompt being inserted */
  size_t digest_room;
  cht_entry *blocks[ROOMS]; /* unused ones, linked through their first bytes */
  uint32_t actives;         /* list */
  int32_t active;
  int32_t chain; /* levels */
  int64_t entries_used;
};

/* ---- memory: grows while warming up ---- */

static pkv_status grow(pkv_sched *s, void **array, size_t *room, size_t need, size_t size,
                       pkv_error *err) {
  if (need <= *room) return PKV_OK;
  size_t more = *room < 64 ? 64 : *room;
  while (more < need)
    more *= 2;
  void *p = pkv_sched_take(s, more, size);
  PKV_CHECK(err, p, PKV_E_NOMEM, "no memory for %zu entries of %zu bytes", more, size);
  if (*array != NULL) memcpy(p, *array, *room * size);
  pkv_sched_give(s, *array, *room, size);
  *array = p;
  *room = more;
  return PKV_OK;
}

static uint32_t bucket_of(const pkv_cht *c, uint64_t digest, int32_t level) {
  return (uint32_t)(pkv_sched_mix(digest + (uint64_t)(uint32_t)level)) & (c->bucket_count - 1);
}

static pkv_status grow_keys(pkv_sched *s, uint32_t need, pkv_error *err) {
  pkv_cht *c = s->cht;
  size_t room = c->key_room;
  if (need <= c->key_room) return PKV_OK;
  PKV_CHECK(err, need < NONE / 4, PKV_E_LIMIT, "%u different chunks are too many", need);
  void *keys = c->keys;
  PKV_TRY(grow(s, &keys, &room, need, sizeof *c->keys, err));
  c->keys = keys;
  c->key_room = (uint32_t)room;
  uint32_t *buckets = pkv_sched_take(s, room, sizeof *buckets);
  PKV_CHECK(err, buckets, PKV_E_NOMEM, "no memory for %zu buckets", room);
  pkv_sched_give(s, c->buckets, c->bucket_count, sizeof *buckets);
  c->buckets = buckets;
  c->bucket_count = (uint32_t)room;
  memset(buckets, 0xff, room * sizeof *buckets);
  for (uint32_t i = 0; i < c->key_fresh; i++) {
    if (c->keys[i].level == 0) continue; /* unused */
    const uint32_t b = bucket_of(c, c->keys[i].digest, c->keys[i].level);
    c->keys[i].next = buckets[b];
    buckets[b] = i;
  }
  return PKV_OK;
}

static void *next_block(const cht_entry *block) {
  void *next;
  memcpy(&next, block, sizeof next);
  return next;
}

static pkv_status take_block(pkv_sched *s, cht_req *r, int32_t levels, pkv_error *err) {
  pkv_cht *c = s->cht;
  r->levels = levels;
  r->entries = NULL;
  if (levels == 0) return PKV_OK;
  r->room = 0;
  while (((int64_t)1 << r->room) < levels)
    r->room++;
  r->entries = c->blocks[r->room];
  if (r->entries != NULL) {
    c->blocks[r->room] = next_block(r->entries);
    return PKV_OK;
  }
  r->entries = pkv_sched_take(s, (size_t)1 << r->room, sizeof *r->entries);
  PKV_CHECK(err, r->entries, PKV_E_NOMEM, "no memory for a prompt of %d chunks", levels);
  return PKV_OK;
}

static void give_block(pkv_cht *c, cht_req *r) {
  if (r->entries == NULL) return;
  void *next = c->blocks[r->room];
  memcpy(r->entries, &next, sizeof next);
  c->blocks[r->room] = r->entries;
  r->entries = NULL;
}

pkv_status pkv_cht_create(pkv_sched *s, pkv_error *err) {
  pkv_cht *c = pkv_sched_take(s, 1, sizeof *c);
  PKV_CHECK(err, c, PKV_E_NOMEM, "no memory for a hash tree");
  memset(c, 0, sizeof *c);
  s->cht = c;
  c->key_free = c->actives = NONE;
  c->reqs = pkv_sched_take(s, s->capacity, sizeof *c->reqs);
  PKV_CHECK(err, c->reqs, PKV_E_NOMEM, "no memory for %u requests", s->capacity);
  memset(c->reqs, 0, s->capacity * sizeof *c->reqs);
  return PKV_OK;
}

void pkv_cht_destroy(pkv_sched *s) {
  pkv_cht *c = s->cht;
  if (c == NULL) return;
  if (c->reqs != NULL)
    for (uint32_t i = 0; i < s->capacity; i++)
      give_block(c, &c->reqs[i]);
  for (uint32_t room = 0; room < ROOMS; room++)
    while (c->blocks[room] != NULL) {
      cht_entry *block = c->blocks[room];
      c->blocks[room] = next_block(block);
      pkv_sched_give(s, block, (size_t)1 << room, sizeof *block);
    }
  pkv_sched_give(s, c->digests, c->digest_room, sizeof *c->digests);
  pkv_sched_give(s, c->heap, c->heap_room, sizeof *c->heap);
  pkv_sched_give(s, c->buckets, c->bucket_count, sizeof *c->buckets);
  pkv_sched_give(s, c->keys, c->key_room, sizeof *c->keys);
  pkv_sched_give(s, c->reqs, s->capacity, sizeof *c->reqs);
  pkv_sched_give(s, c, 1, sizeof *c);
}

/* ---- the heap ---- */

static bool is_stale(const pkv_sched *s, const cht_item *i) {
  return s->reqs[i->k.slot].place != PKV_SCHED_IS_WAITING ||
         s->cht->reqs[i->k.slot].version != i->version;
}

static void sift_down(pkv_cht *c, size_t at, cht_item item) {
  for (;;) {
    size_t child = 2 * at + 1;
    if (child >= c->heap_count) break;
    if (child + 1 < c->heap_count && pkv_sched_before(&c->heap[child + 1].k, &c->heap[child].k))
      child++;
    if (!pkv_sched_before(&c->heap[child].k, &item.k)) break;
    c->heap[at] = c->heap[child];
    at = child;
  }
  c->heap[at] = item;
}

static void pop(pkv_cht *c) {
  const cht_item last = c->heap[--c->heap_count];
  if (c->heap_count > 0) sift_down(c, 0, last);
}

static void sweep(pkv_sched *s) {
  pkv_cht *c = s->cht;
  size_t kept = 0;
  for (size_t i = 0; i < c->heap_count; i++)
    if (!is_stale(s, &c->heap[i])) c->heap[kept++] = c->heap[i];
  c->heap_count = kept;
  for (size_t i = kept / 2; i-- > 0;)
    sift_down(c, i, c->heap[i]);
}

static int64_t score(const pkv_sched *s, uint32_t slot) {
  const cht_req *r = &s->cht->reqs[slot];
  const int64_t shared = r->levels - r->missing;
  if (pkv_sched_fault(s, PKV_SCHED_FAULT_ABSOLUTE)) return (int64_t)PKV_SCHED_UNIT * r->missing;
  return PKV_SCHED_UNIT * (int64_t)r->missing - s->share8 * shared;
}

static bool shares(const pkv_sched *s, uint32_t slot) {
  const cht_req *r = &s->cht->reqs[slot];
  int64_t shared = (int64_t)(r->levels - r->missing) * s->o.chunk_tokens;
  if (shared > s->reqs[slot].hashed) shared = s->reqs[slot].hashed;
  return pkv_sched_fault(s, PKV_SCHED_FAULT_ABSOLUTE) || shared >= s->o.share_min_tokens;
}

/* Room is there for every waiting request once and as many stale entries (pkv_cht_insert). */
static void push(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  cht_req *r = &c->reqs[slot];
  r->version++;
  c->heap_live -= r->in_heap;
  r->in_heap = !s->reqs[slot].lost && shares(s, slot);
  if (!r->in_heap) return;
  c->heap_live++;
  if (c->heap_count == c->heap_room) {
    void *heap = c->heap;
    const bool keep = pkv_sched_fault(s, PKV_SCHED_FAULT_STALE_HEAP);
    if (!keep || grow(s, &heap, &c->heap_room, c->heap_room + 1, sizeof *c->heap, NULL) != PKV_OK)
      sweep(s);
    c->heap = heap;
  }
  const cht_item item = {{pkv_sched_base_key(s, slot, score(s, slot)), s->cells[slot].k.ord, slot},
                         r->version};
  size_t at = c->heap_count++;
  while (at > 0 && pkv_sched_before(&item.k, &c->heap[(at - 1) / 2].k)) {
    c->heap[at] = c->heap[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  c->heap[at] = item;
}

uint32_t pkv_cht_choose(pkv_sched *s) {
  pkv_cht *c = s->cht;
  while (c->heap_count > 0 && is_stale(s, &c->heap[0]))
    pop(c);
  return c->heap_count > 0 ? c->heap[0].k.slot : NONE;
}

/* ---- keys ---- */

static bool same_chunk(const pkv_sched *s, uint32_t slot, uint32_t other, int32_t level) {
  const pkv_sched_req *a = &s->reqs[slot], *b = &s->reqs[other];
  if (a->by_hash) return true;
  const int32_t chunk = s->o.chunk_tokens, at = (level - 1) * chunk;
  const int32_t na = a->hashed - at < chunk ? a->hashed - at : chunk;
  const int32_t nb = b->hashed - at < chunk ? b->hashed - at : chunk;
  return na == nb && memcmp((const int32_t *)a->data + at, (const int32_t *)b->data + at,
                            (size_t)na * sizeof(int32_t)) == 0;
}

/* The key of a request at a level, `before` the one above it; NONE = it is new. */
static uint32_t find_key(pkv_sched *s, uint32_t slot, uint32_t before, int32_t level,
                         uint64_t digest) {
  const pkv_cht *c = s->cht;
  if (c->bucket_count == 0) return NONE;
  for (uint32_t i = c->buckets[bucket_of(c, digest, level)]; i != NONE; i = c->keys[i].next) {
    const cht_key *k = &c->keys[i];
    if (k->digest != digest || k->level != level) continue;
    if (pkv_sched_fault(s, PKV_SCHED_FAULT_TRUST_DIGESTS)) return i;
    if (k->before != before || s->reqs[k->holder].by_hash != s->reqs[slot].by_hash) continue;
    if (same_chunk(s, slot, k->holder, level)) return i;
    s->stats.collisions++;
  }
  return NONE;
}

static uint32_t new_key(pkv_cht *c, uint32_t before, int32_t level, uint64_t digest) {
  uint32_t i = c->key_free;
  if (i != NONE)
    c->key_free = c->keys[i].next;
  else
    i = c->key_fresh++;
  const uint32_t b = bucket_of(c, digest, level);
  c->keys[i] = (cht_key){digest, before, level, 0, 0, NONE, c->buckets[b]};
  c->buckets[b] = i;
  c->key_count++;
  return i;
}

static void drop_key(pkv_cht *c, uint32_t i) {
  cht_key *k = &c->keys[i];
  uint32_t *at = &c->buckets[bucket_of(c, k->digest, k->level)];
  while (*at != i)
    at = &c->keys[*at].next;
  *at = k->next;
  k->level = 0;
  k->next = c->key_free;
  c->key_free = i;
  c->key_count--;
}

static void hold(pkv_cht *c, uint32_t slot, int32_t level, uint32_t key) {
  cht_key *k = &c->keys[key];
  cht_entry *e = &c->reqs[slot].entries[level - 1];
  *e = (cht_entry){key, k->holder, NONE};
  if (k->holder != NONE) c->reqs[k->holder].entries[level - 1].prev = slot;
  k->holder = slot;
}

static void release(pkv_cht *c, uint32_t slot, int32_t level) {
  const cht_entry e = c->reqs[slot].entries[level - 1];
  cht_key *k = &c->keys[e.key];
  if (e.prev != NONE)
    c->reqs[e.prev].entries[level - 1].next = e.next;
  else
    k->holder = e.next;
  if (e.next != NONE) c->reqs[e.next].entries[level - 1].prev = e.prev;
  if (k->holder == NONE) drop_key(c, e.key);
}

static inline cht_key *key_at(const pkv_cht *c, uint32_t slot, int32_t level) {
  return &c->keys[c->reqs[slot].entries[level - 1].key];
}

/* ---- coming and going ---- */

/* Starts to wait. */
static void begin_waiting(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  cht_req *r = &c->reqs[slot];
  r->missing = 0;
  for (int32_t level = 1; level <= r->levels; level++) {
    cht_key *k = key_at(c, slot, level);
    k->waiting++;
    r->missing += k->active == 0;
  }
  push(s, slot);
}

static void end_waiting(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  for (int32_t level = 1; level <= c->reqs[slot].levels; level++)
    key_at(c, slot, level)->waiting--;
  c->heap_live -= c->reqs[slot].in_heap;
  c->reqs[slot].in_heap = false;
  if (c->heap_live == 0 && !pkv_sched_fault(s, PKV_SCHED_FAULT_STALE_HEAP)) c->heap_count = 0;
}

pkv_status pkv_cht_insert(pkv_sched *s, uint32_t slot, pkv_error *err) {
  pkv_cht *c = s->cht;
  const pkv_sched_req *q = &s->reqs[slot];
  const int32_t levels = pkv_sched_chunks(s, q->hashed);
  const size_t held = (size_t)s->waiting + (size_t)s->active + (size_t)s->preempted + 1;
  void *digests = c->digests, *heap = c->heap;
  PKV_TRY(grow(s, &digests, &c->digest_room, (size_t)levels, sizeof *c->digests, err));
  c->digests = digests;
  PKV_TRY(grow(s, &heap, &c->heap_room, 2 * held, sizeof *c->heap, err));
  c->heap = heap;
  PKV_TRY(grow_keys(s, c->key_count + (uint32_t)levels, err));
  PKV_TRY(take_block(s, &c->reqs[slot], levels, err));
  if (q->by_hash && levels > 0)
    memcpy(c->digests, q->data, (size_t)levels * sizeof *c->digests);
  else if (levels > 0)
    pkv_sched_hash_prompt(c->digests, s, q->data, (size_t)q->hashed);
  uint32_t before = NONE;
  for (int32_t level = 1; level <= levels; level++) {
    const uint64_t digest = c->digests[level - 1];
    uint32_t key = find_key(s, slot, before, level, digest);
    if (key == NONE) key = new_key(c, before, level, digest);
    hold(c, slot, level, key);
    before = key;
  }
  c->entries_used += levels;
  begin_waiting(s, slot);
  return PKV_OK;
}

/* Waiting holders of a key that joined, or left, the working set. */
static void tell_holders(pkv_sched *s, uint32_t key, int32_t change) {
  pkv_cht *c = s->cht;
  const int32_t level = c->keys[key].level;
  for (uint32_t i = c->keys[key].holder; i != NONE; i = c->reqs[i].entries[level - 1].next) {
    if (s->reqs[i].place != PKV_SCHED_IS_WAITING) continue;
    c->reqs[i].missing += change;
    push(s, i);
  }
}

/* The longest prefix of the request, at most `most` levels, that `holders` active requests have. */
static int32_t held_by(const pkv_cht *c, uint32_t slot, int32_t most, int32_t holders) {
  int32_t low = 0, high = c->reqs[slot].levels < most ? c->reqs[slot].levels : most;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (key_at(c, slot, middle)->active >= holders)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

static void activate(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  cht_req *r = &c->reqs[slot];
  for (int32_t level = 1; level <= r->levels; level++) {
    cht_key *k = key_at(c, slot, level);
    if (k->active++ == 0) tell_holders(s, r->entries[level - 1].key, -1);
  }
  r->prev_active = NONE;
  r->next_active = c->actives;
  if (c->actives != NONE) c->reqs[c->actives].prev_active = slot;
  c->actives = slot;
  c->active++;
  c->chain = c->active == 1 ? r->levels : held_by(c, slot, c->chain, c->active);
}

static void deactivate(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  cht_req *r = &c->reqs[slot];
  for (int32_t level = 1; level <= r->levels; level++) {
    cht_key *k = key_at(c, slot, level);
    if (--k->active == 0) tell_holders(s, r->entries[level - 1].key, 1);
  }
  if (r->prev_active != NONE)
    c->reqs[r->prev_active].next_active = r->next_active;
  else
    c->actives = r->next_active;
  if (r->next_active != NONE) c->reqs[r->next_active].prev_active = r->prev_active;
  c->active--;
  if (c->active == 0) {
    c->chain = 0;
    return;
  }
  const uint32_t a = c->actives; /* the chain may grow: its tip moves along any of them */
  while (c->chain < c->reqs[a].levels && key_at(c, a, c->chain + 1)->active == c->active)
    c->chain++;
}

void pkv_cht_move(pkv_sched *s, uint32_t slot, pkv_sched_place to) {
  const pkv_sched_place from = (pkv_sched_place)s->reqs[slot].place;
  s->reqs[slot].place = (uint8_t)to;
  if (from == PKV_SCHED_IS_WAITING) end_waiting(s, slot);
  if (from == PKV_SCHED_IS_ACTIVE) deactivate(s, slot);
  if (to == PKV_SCHED_IS_ACTIVE) activate(s, slot);
  if (to == PKV_SCHED_IS_PREEMPTED && pkv_sched_fault(s, PKV_SCHED_FAULT_LOST_PREEMPTED))
    s->reqs[slot].lost = true;
  if (to == PKV_SCHED_IS_WAITING) begin_waiting(s, slot);
}

void pkv_cht_set_ord(pkv_sched *s, uint32_t slot, uint32_t ord) {
  s->cells[slot].k.ord = ord;
  push(s, slot);
}

void pkv_cht_remove(pkv_sched *s, uint32_t slot) {
  pkv_cht *c = s->cht;
  cht_req *r = &c->reqs[slot];
  pkv_cht_move(s, slot, PKV_SCHED_FREE);
  for (int32_t level = r->levels; level >= 1; level--)
    release(c, slot, level);
  c->entries_used -= r->levels;
  r->version++;
  give_block(c, r);
}

/* ---- what is shared ---- */

static int32_t tokens_of(const pkv_sched *s, uint32_t slot, int32_t levels) {
  const int64_t tokens = (int64_t)levels * s->o.chunk_tokens;
  return tokens < s->reqs[slot].hashed ? (int32_t)tokens : s->reqs[slot].hashed;
}

int32_t pkv_cht_shared(const pkv_sched *s, uint32_t slot, int32_t others) {
  const int32_t self = s->reqs[slot].place == PKV_SCHED_IS_ACTIVE;
  const int32_t levels = held_by(s->cht, slot, INT32_MAX, self + others);
  return tokens_of(s, slot, levels);
}

/* The other waiting requests that have the first chunk that is not covered. */
static int32_t peers(const pkv_sched *s, uint32_t slot, int32_t self) {
  const int32_t covered = held_by(s->cht, slot, INT32_MAX, 1);
  if (covered == s->cht->reqs[slot].levels) return 0;
  return key_at(s->cht, slot, covered + 1)->waiting - self;
}

int32_t pkv_cht_chain(const pkv_sched *s) {
  return s->cht->active == 0 ? 0 : tokens_of(s, s->cht->actives, s->cht->chain);
}

void pkv_cht_view(pkv_sched_view *view, const pkv_sched *s, uint32_t slot) {
  const pkv_cht *c = s->cht;
  const int32_t self = s->reqs[slot].place == PKV_SCHED_IS_WAITING;
  const int32_t levels =
      c->active == 0 ? c->reqs[slot].levels : held_by(c, slot, c->chain, c->active);
  view->shared_tokens = pkv_cht_shared(s, slot, 1);
  view->peers = peers(s, slot, self);
  view->chain_before = pkv_cht_chain(s);
  view->chain_after = tokens_of(s, slot, levels);
  view->sharers = (levels > 0 ? key_at(c, slot, levels)->waiting : s->waiting) - self;
}

size_t pkv_cht_used(const pkv_sched *s) {
  const pkv_cht *c = s->cht;
  const size_t held = (size_t)s->waiting + (size_t)s->active + (size_t)s->preempted;
  return held * sizeof *c->reqs + (size_t)c->entries_used * sizeof(cht_entry) +
         c->key_count * (sizeof *c->keys + sizeof *c->buckets) + c->heap_count * sizeof *c->heap;
}

int32_t pkv_cht_keys(const pkv_sched *s) {
  return (int32_t)s->cht->key_count;
}

int64_t pkv_cht_stale(const pkv_sched *s) {
  return (int64_t)(s->cht->heap_count - s->cht->heap_live);
}

/* ---- the integrity check ---- */

static pkv_status check_request(const pkv_sched *s, uint32_t slot, pkv_error *err) {
  const pkv_cht *c = s->cht;
  int32_t missing = 0;
  for (int32_t level = 1; level <= c->reqs[slot].levels; level++) {
    const cht_key *k = key_at(c, slot, level);
    PKV_CHECK(err, k->level == level, PKV_E_INTERNAL, "slot %u level %d: a key of level %d", slot,
              level, k->level);
    missing += k->active == 0;
  }
  PKV_CHECK(err, s->reqs[slot].place != PKV_SCHED_IS_WAITING || missing == c->reqs[slot].missing,
            PKV_E_INTERNAL, "slot %u misses %d chunks, not %d", slot, missing,
            c->reqs[slot].missing);
  return PKV_OK;
}

static pkv_status check_key(const pkv_sched *s, uint32_t i, pkv_error *err) {
  const pkv_cht *c = s->cht;
  const cht_key *k = &c->keys[i];
  int32_t active = 0, waiting = 0;
  uint32_t prev = NONE;
  for (uint32_t slot = k->holder; slot != NONE;) {
    const cht_entry *e = &c->reqs[slot].entries[k->level - 1];
    PKV_CHECK(err, e->key == i && e->prev == prev, PKV_E_INTERNAL, "key %u: bad holder %u", i,
              slot);
    active += s->reqs[slot].place == PKV_SCHED_IS_ACTIVE;
    waiting += s->reqs[slot].place == PKV_SCHED_IS_WAITING;
    prev = slot;
    slot = e->next;
  }
  PKV_CHECK(err, prev != NONE && active == k->active && waiting == k->waiting, PKV_E_INTERNAL,
            "key %u has %d active and %d waiting holders, not %d and %d", i, active, waiting,
            k->active, k->waiting);
  return PKV_OK;
}

pkv_status pkv_cht_check(const pkv_sched *s, pkv_error *err) {
  const pkv_cht *c = s->cht;
  uint32_t keys = 0;
  for (uint32_t i = 0; i < c->key_fresh; i++) {
    if (c->keys[i].level == 0) continue;
    keys++;
    PKV_TRY(check_key(s, i, err));
  }
  PKV_CHECK(err, keys == c->key_count, PKV_E_INTERNAL, "%u keys, not %u", keys, c->key_count);
  for (uint32_t slot = 0; slot < s->fresh; slot++)
    if (s->reqs[slot].place != PKV_SCHED_FREE) PKV_TRY(check_request(s, slot, err));
  for (size_t i = 1; i < c->heap_count; i++)
    PKV_CHECK(err, !pkv_sched_before(&c->heap[i].k, &c->heap[(i - 1) / 2].k), PKV_E_INTERNAL,
              "heap entry %zu comes before the one above it", i);
  size_t live = 0;
  for (size_t i = 0; i < c->heap_count; i++)
    live += !is_stale(s, &c->heap[i]);
  PKV_CHECK(err, live == c->heap_live, PKV_E_INTERNAL, "%zu live heap entries, not %zu", live,
            c->heap_live);
  PKV_CHECK(err, c->active == s->active, PKV_E_INTERNAL, "%d active requests, not %d", c->active,
            s->active);
  return PKV_OK;
}
