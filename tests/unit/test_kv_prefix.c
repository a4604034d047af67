/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache against a plain model, at random; collisions; order of eviction; memory. */
#include "kv/prefix.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/test_alloc.h"

#define PAGE  2
#define PAGES 40
#define DEEP  6
#define USERS 5

static pkv_error err;

static pkv_pool *open_pool(int64_t pages) {
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  pkv_pool *pool = NULL;
  o.kv_heads = 1, o.head_dim = 8, o.page_tokens = PAGE, o.pages = pages;
  assert_int_equal(pkv_pool_create(&pool, &o, &err), PKV_OK);
  return pool;
}

static pkv_prefix *open_prefix(pkv_pool *pool, bool keep) {
  pkv_prefix *prefix = NULL;
  assert_int_equal(pkv_prefix_create(&prefix, pool, keep, NULL, &err), PKV_OK);
  return prefix;
}

/* A user: a text, and the pages it holds; as the engine does it. */
typedef struct user {
  int32_t tokens[DEEP * PAGE];
  uint64_t digests[DEEP];
  pkv_prefix_key key;
  int32_t pages[DEEP];
  int32_t held, locked; /* pages; of them entries */
  bool live;
} user;

static pkv_prefix_path path_of(const user *u) {
  return (pkv_prefix_path){u->digests, u->tokens, u->key};
}

/* Few different texts, so that they meet often. */
static void think(user *u, pkv_rng *rng, bool collide) {
  u->key = (pkv_prefix_key){pkv_rng_below(rng, 2), 0};
  uint64_t digest = pkv_prefix_seed(u->key);
  for (int32_t i = 0; i < DEEP; i++) {
    for (int32_t j = 0; j < PAGE; j++)
      u->tokens[i * PAGE + j] = (int32_t)pkv_rng_below(rng, 2);
    digest = pkv_prefix_digest(digest, u->tokens + (size_t)(i * PAGE), PAGE);
    u->digests[i] = collide ? 7 : digest;
  }
}

static void check(const pkv_prefix *prefix, const pkv_pool *pool, const user *users, int step) {
  pkv_pool_stats p;
  pkv_prefix_stats s;
  bool used[PAGES] = {false};
  int64_t in_use = 0;
  const char *const wrong = pkv_prefix_check(prefix);
  if (wrong != NULL) fail_msg("step %d: %s", step, wrong);
  pkv_pool_get_stats(&p, pool);
  pkv_prefix_get_stats(&s, prefix);
  for (int i = 0; i < USERS; i++)
    for (int32_t j = 0; users[i].live && j < users[i].held; j++)
      used[users[i].pages[j]] = true;
  for (int i = 0; i < PAGES; i++)
    in_use += used[i];
  if (p.pages_free + s.idle + in_use != p.pages_total)
    fail_msg("step %d: %d free + %d cached + %d in use of %d", step, (int)p.pages_free, (int)s.idle,
             (int)in_use, (int)p.pages_total);
}

/* Takes what is cached, computes the rest, offers it. */
static void begin(user *u, pkv_prefix *prefix, pkv_pool *pool, pkv_rng *rng) {
  const pkv_prefix_path path = path_of(u);
  const int32_t want = (int32_t)pkv_rng_range(rng, 1, DEEP);
  int32_t idle = 0;
  u->held = u->locked = pkv_prefix_match(u->pages, &idle, prefix, &path, want);
  assert_in_range(idle, 0, u->held);
  for (int32_t i = 0; i < u->held; i++) { /* the pages have the tokens asked for */
    pkv_prefix_entry e;
    assert_true(pkv_prefix_get(&e, prefix, u->pages[i]));
    assert_memory_equal(e.tokens, u->tokens + (size_t)(i * PAGE), PAGE * sizeof(int32_t));
    assert_int_equal(e.key.salt, u->key.salt);
    assert_int_equal(e.parent, i == 0 ? -1 : u->pages[i - 1]);
  }
  pkv_prefix_lock(prefix, u->pages, u->held);
  assert_int_equal(pkv_pool_retain(pool, u->pages, u->held, &err), PKV_OK);
  bool apart = false;
  while (u->held < want) {
    pkv_pool_stats p;
    pkv_pool_get_stats(&p, pool);
    if (p.pages_free == 0 && pkv_prefix_evict(prefix, 1) == 0) break;
    assert_int_equal(pkv_pool_alloc(&u->pages[u->held], pool, 1, &err), PKV_OK);
    u->held++;
    if (apart || u->locked + 1 != u->held) continue;
    apart = !pkv_prefix_insert(prefix, u->pages, u->locked, &path);
    u->locked += !apart;
  }
  u->live = true;
}

static void end(user *u, pkv_prefix *prefix, pkv_pool *pool) {
  pkv_prefix_unlock(prefix, u->pages, u->locked);
  assert_int_equal(pkv_pool_release(pool, u->pages, u->held, &err), PKV_OK);
  u->live = false;
}

static void random_run(uint64_t seed, int64_t pages, bool keep, bool collide) {
  pkv_pool *const pool = open_pool(pages);
  pkv_prefix *const prefix = open_prefix(pool, keep);
  user users[USERS] = {0};
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  int64_t found = 0;
  for (int step = 0; step < 20000; step++) {
    user *const u = &users[pkv_rng_below(&rng, USERS)];
    if (u->live) {
      end(u, prefix, pool);
    } else {
      think(u, &rng, collide);
      begin(u, prefix, pool, &rng);
      found += u->locked > 0;
    }
    if (pkv_rng_below(&rng, 200) == 0)
      (void)pkv_prefix_evict(prefix, (int64_t)pkv_rng_below(&rng, 20));
    check(prefix, pool, users, step);
  }
  for (int i = 0; i < USERS; i++)
    if (users[i].live) end(&users[i], prefix, pool);
  check(prefix, pool, users, -1);
  pkv_prefix_stats s;
  pkv_prefix_get_stats(&s, prefix);
  assert_int_equal(s.entries, s.idle);
  assert_int_equal(s.shared, 0);
  if (!keep) assert_int_equal(s.entries, 0);
  if (collide) assert_true(s.collisions > 0);
  assert_true(found > 1000);
  pkv_prefix_destroy(prefix);
  pkv_pool_stats p;
  pkv_pool_get_stats(&p, pool);
  assert_int_equal(p.pages_free, p.pages_total);
  pkv_pool_destroy(pool);
}

static void test_random(void **state) {
  (void)state;
  random_run(1, PAGES, true, false);
  random_run(2, 12, true, false);
  random_run(3, PAGES, false, false);
  random_run(4, 20, true, true); /* every digest the same: tokens decide */
}

/* The least recently used leaves first, and never one that others stand behind. */
static void test_order(void **state) {
  (void)state;
  pkv_pool *const pool = open_pool(8);
  pkv_prefix *const prefix = open_prefix(pool, true);
  user a = {0}, b = {0};
  int32_t idle = 0;
  pkv_rng rng;
  pkv_rng_init(&rng, 9);
  think(&a, &rng, false);
  b = a;
  b.tokens[2] ^= 1; /* shares its first page */
  uint64_t digest = pkv_prefix_seed(b.key);
  for (int32_t i = 0; i < DEEP; i++)
    b.digests[i] = digest = pkv_prefix_digest(digest, b.tokens + (size_t)(i * PAGE), PAGE);
  const pkv_prefix_path pa = path_of(&a), pb = path_of(&b);
  assert_int_equal(pkv_pool_alloc(a.pages, pool, 3, &err), PKV_OK);
  for (int32_t i = 0; i < 3; i++)
    assert_true(pkv_prefix_insert(prefix, a.pages, i, &pa));
  assert_int_equal(pkv_prefix_match(b.pages, &idle, prefix, &pb, 3), 1);
  assert_int_equal(idle, 0);
  pkv_prefix_lock(prefix, b.pages, 1);
  assert_int_equal(pkv_pool_alloc(b.pages + 1, pool, 2, &err), PKV_OK);
  assert_true(pkv_prefix_insert(prefix, b.pages, 1, &pb));
  assert_true(pkv_prefix_insert(prefix, b.pages, 2, &pb));
  assert_false(pkv_prefix_insert(prefix, (const int32_t[]){7}, 0, &pb)); /* equal one is here */
  assert_int_equal(pkv_prefix_evict(prefix, 9), 0);                      /* all protected */
  pkv_prefix_unlock(prefix, a.pages, 3);
  pkv_prefix_unlock(prefix, b.pages, 3);
  const int32_t order[] = {a.pages[2], a.pages[1], b.pages[2], b.pages[1], a.pages[0]};
  int32_t list[8];
  assert_int_equal(pkv_prefix_idle(list, 8, prefix), 5);
  for (int32_t i = 0; i < 5; i++)
    assert_int_equal(list[i], order[4 - i]);
  for (int32_t i = 0; i < 5; i++) {
    pkv_prefix_entry e;
    assert_true(pkv_prefix_get(&e, prefix, order[i]));
    assert_int_equal(pkv_prefix_evict(prefix, 1), 1);
    assert_false(pkv_prefix_get(&e, prefix, order[i]));
    assert_null(pkv_prefix_check(prefix));
  }
  assert_int_equal(pkv_prefix_evict(prefix, 1), 0);
  assert_int_equal(pkv_pool_release(pool, a.pages, 3, &err), PKV_OK);
  assert_int_equal(pkv_pool_release(pool, b.pages + 1, 2, &err), PKV_OK);
  pkv_prefix_destroy(prefix);
  pkv_pool_destroy(pool);
}

static pkv_status build(void *ctx, const pkv_allocator *allocator) {
  pkv_prefix *prefix = NULL;
  const pkv_status status = pkv_prefix_create(&prefix, ctx, true, allocator, NULL);
  pkv_prefix_destroy(prefix);
  return status;
}

static void test_failing_allocations(void **state) {
  (void)state;
  pkv_pool *const pool = open_pool(8);
  assert_int_equal(test_alloc_torture(build, pool), 4);
  pkv_pool_destroy(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random),
      cmocka_unit_test(test_order),
      cmocka_unit_test(test_failing_allocations),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
