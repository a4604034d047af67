/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of stacks, each there once. */
#include <string.h>

#include "base/hash.h"
#include "grammar/machine_parts.h"

/* The set of frames[first .. first + count), which are sorted; where it is new, they stay there. */
static int32_t intern(pkv_machine *m, int32_t first, int32_t count, bool bottom) {
  const pkv_way *const frames = m->frames + first;
  uint64_t i = pkv_hash_bytes(frames, (size_t)count * sizeof *frames, bottom) % PKV_STACK_SLOTS;
  uint16_t depth = 0;
  for (; m->stack_table[i] >= 0; i = (i + 1) % PKV_STACK_SLOTS) {
    const pkv_stack *const s = &m->stacks[m->stack_table[i]];
    if (s->count == count && s->bottom == bottom &&
        memcmp(m->frames + s->first, frames, (size_t)count * sizeof *frames) == 0)
      return m->stack_table[i];
  }
  if (m->stack_count == PKV_MACHINE_STACKS) return -1;
  for (int32_t k = 0; k < count; k++) {
    const uint16_t below = m->stacks[frames[k].stack].depth;
    if (below >= depth) depth = (uint16_t)(below + 1);
  }
  m->stacks[m->stack_count] = (pkv_stack){first, count, depth, bottom};
  m->stack_table[i] = m->stack_count;
  return m->stack_count++;
}

/* The same, for frames that are the last ones so far, with `room` for more behind them. */
static int32_t intern_last(pkv_machine *m, int32_t first, int32_t count, int32_t room,
                           bool bottom) {
  const int32_t before = m->stack_count;
  const int32_t id = intern(m, first, count, bottom);
  if (m->frame_count == first + room) /* nothing came behind them meanwhile */
    m->frame_count = first + (id == before && id >= 0 ? count : 0);
  return id;
}

void pkv_stacks_clear(pkv_machine *machine) {
  pkv_machine *const m = machine;
  memset(m->stack_table, 0xff, PKV_STACK_SLOTS * sizeof *m->stack_table);
  for (size_t i = 0; i < PKV_UNION_SLOTS; i++)
    m->unions[i].a = -1;
  m->stack_count = m->frame_count = 0;
  (void)intern(m, 0, 0, true);
}

int32_t pkv_stacks_push(pkv_machine *machine, int32_t node, int32_t below) {
  pkv_machine *const m = machine;
  if (m->frame_count == PKV_MACHINE_FRAMES) return -1;
  const int32_t first = m->frame_count++;
  m->frames[first] = (pkv_way){node, below};
  return intern_last(m, first, 1, 1, false);
}

/* Both sorted lists as one; where a frame is in both, all that lies below either. */
static int32_t merge(pkv_machine *m, int32_t a, int32_t b) {
  const pkv_stack x = m->stacks[a], y = m->stacks[b];
  const int32_t first = m->frame_count, room = x.count + y.count;
  int32_t i = 0, k = 0, count = 0;
  if (room > PKV_MACHINE_FRAMES - first) return -1;
  m->frame_count += room; /* sets that are made for what lies below come behind */
  while (i < x.count || k < y.count) {
    const pkv_way *const p = i < x.count ? &m->frames[x.first + i] : NULL;
    const pkv_way *const q = k < y.count ? &m->frames[y.first + k] : NULL;
    pkv_way out;
    if (q == NULL || (p != NULL && p->node < q->node)) {
      out = *p;
      i++;
    } else if (p == NULL || q->node < p->node) {
      out = *q;
      k++;
    } else {
      out = (pkv_way){p->node, pkv_stacks_union(m, p->stack, q->stack)};
      if (out.stack < 0) return -1;
      i++;
      k++;
    }
    m->frames[first + count++] = out;
  }
  return intern_last(m, first, count, room, x.bottom || y.bottom);
}

int32_t pkv_stacks_union(pkv_machine *machine, int32_t a, int32_t b) {
  pkv_machine *const m = machine;
  if (a == b) return a;
  if (a > b) return pkv_stacks_union(m, b, a);
  const uint64_t slot = ((uint64_t)a * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)b * 40503u) >> 7;
  pkv_union *const u = &m->unions[slot % PKV_UNION_SLOTS];
  if (u->a == a && u->b == b) return u->both;
  const int32_t both = merge(m, a, b);
  if (both >= 0) *u = (pkv_union){a, b, both};
  return both;
}

/* What lies below a set has a smaller number: upwards, its new one is known. */
void pkv_stacks_keep(pkv_machine *machine, pkv_way *ways, int32_t count) {
  pkv_machine *const m = machine;
  int32_t *const moved = m->stack_table; /* made anew below; has as many places at least */
  int32_t kept = 0, frames = 0;
  for (int32_t i = 0; i < m->stack_count; i++)
    moved[i] = i == 0 ? 0 : -1;
  for (int32_t i = 0; i < count; i++)
    moved[ways[i].stack] = 0;
  for (int32_t i = m->stack_count; i-- > 0;) {
    const pkv_stack s = m->stacks[i];
    for (int32_t k = 0; moved[i] >= 0 && k < s.count; k++)
      moved[m->frames[s.first + k].stack] = 0;
  }
  for (int32_t i = 0; i < m->stack_count; i++) {
    const pkv_stack s = m->stacks[i];
    if (moved[i] < 0) continue;
    for (int32_t k = 0; k < s.count; k++) {
      const pkv_way f = m->frames[s.first + k];
      m->spare[frames + k] = (pkv_way){f.node, moved[f.stack]};
    }
    m->stacks[kept] = s;
    m->stacks[kept].first = frames;
    frames += s.count;
    moved[i] = kept++;
  }
  for (int32_t i = 0; i < count; i++)
    ways[i].stack = moved[ways[i].stack];
  pkv_way *const old = m->frames;
  m->frames = m->spare;
  m->spare = old;
  m->frame_count = frames;
  m->stack_count = 0;
  memset(m->stack_table, 0xff, PKV_STACK_SLOTS * sizeof *m->stack_table);
  for (size_t i = 0; i < PKV_UNION_SLOTS; i++)
    m->unions[i].a = -1;
  while (m->stack_count < kept) {
    const pkv_stack s = m->stacks[m->stack_count];
    (void)intern(m, s.first, s.count, s.bottom);
  }
}
