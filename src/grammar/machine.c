/* SPDX-License-Identifier: Apache-2.0 */
/* States and their ways on. The stacks are in machine_stacks.c. */
#include "grammar/machine.h"

#include <string.h>

#include "base/hash.h"
#include "base/status.h"
#include "grammar/machine_parts.h"

#define DEAD    0
#define UNKNOWN UINT16_MAX

/* --- states -------------------------------------------------------------------------------- */

static uint64_t hash_of(const pkv_way *ways, int32_t count, bool may_end) {
  return pkv_hash_bytes(ways, (size_t)count * sizeof *ways, may_end);
}

static void sort_ways(pkv_way *w, int32_t count) {
  int32_t gap = 1;
  while (gap < count / 3)
    gap = gap * 3 + 1;
  for (; gap > 0; gap /= 3)
    for (int32_t i = gap; i < count; i++) {
      const pkv_way moving = w[i];
      int32_t at = i;
      for (; at >= gap && w[at - gap].node > moving.node; at -= gap)
        w[at] = w[at - gap];
      w[at] = moving;
    }
}

static uint16_t *find_state(pkv_machine *m, const pkv_way *ways, int32_t count, bool may_end) {
  uint64_t i = hash_of(ways, count, may_end) % PKV_STATE_SLOTS;
  for (; m->state_table[i] != 0; i = (i + 1) % PKV_STATE_SLOTS) {
    const pkv_state *const s = &m->states[m->state_table[i]];
    if (s->count == count && s->may_end == may_end &&
        memcmp(m->ways + s->first, ways, (size_t)count * sizeof *ways) == 0)
      break;
  }
  return &m->state_table[i];
}

/* The state of these ways, which are sorted; -1: no room. */
static int32_t intern_state(pkv_machine *m, const pkv_way *ways, int32_t count, bool may_end) {
  if (count == 0 && !may_end) return DEAD;
  uint16_t *const slot = find_state(m, ways, count, may_end);
  if (*slot != 0) return *slot;
  if (m->state_count == PKV_MACHINE_STATES || m->way_count + count > PKV_MACHINE_WAYS) return -1;
  const int32_t id = m->state_count++;
  m->states[id] = (pkv_state){m->way_count, count, -1, may_end};
  if (count > 0) memcpy(m->ways + m->way_count, ways, (size_t)count * sizeof *ways);
  m->way_count += count;
  uint16_t *const row = m->next + (size_t)id * (size_t)m->program->class_count;
  memset(row, 0xff, (size_t)m->program->class_count * sizeof *row);
  *slot = (uint16_t)id;
  m->stats.states++;
  return id;
}

/* --- ways on ------------------------------------------------------------------------------- */

static bool push(pkv_machine *m, int32_t node, int32_t stack) {
  if (m->work_count == PKV_MACHINE_WORK) return false;
  m->work[m->work_count++] = (pkv_way){node, stack};
  return true;
}

/* The node is reached with these stacks: *stack becomes all it is reached with in this step; 0:
   nothing new, -1: no room. */
static int reach(pkv_machine *m, int32_t node, int32_t *stack) {
  pkv_reached *const r = &m->reached[node];
  const uint8_t kind = m->program->nodes[node].kind;
  if (r->step == m->step) {
    const int32_t both = pkv_stacks_union(m, r->stack, *stack);
    if (both < 0) return -1;
    if (both == r->stack) return 0;
    r->stack = *stack = both;
    return 1;
  }
  *r = (pkv_reached){m->step, *stack};
  if (kind != PKV_NODE_BYTE && kind != PKV_NODE_SET) return 1;
  if (m->found_count == PKV_MACHINE_FOUND) return -1;
  m->found[m->found_count++] = node;
  return 1;
}

static bool leave_rule(pkv_machine *m, int32_t stack, bool *may_end) {
  const pkv_stack *const s = &m->stacks[stack];
  *may_end = *may_end || s->bottom;
  for (int32_t i = 0; i < s->count; i++) {
    const pkv_way back = m->frames[s->first + i];
    if (!push(m, back.node, back.stack)) return false;
  }
  return true;
}

static bool enter_rule(pkv_machine *m, const pkv_program_node *n, int32_t stack) {
  /* What would only return needs no place on the stack: repetitions by recursion stay flat. */
  if (m->program->nodes[n->next].kind == PKV_NODE_RET) return push(m, n->arg, stack);
  const int32_t deeper = pkv_stacks_push(m, n->next, stack);
  return deeper >= 0 && push(m, n->arg, deeper);
}

/* Follows what needs no byte, from all that waits. */
static bool close_ways(pkv_machine *m, bool *may_end) {
  while (m->work_count > 0) {
    if (++m->steps > PKV_MACHINE_STEPS) return false;
    const pkv_way at = m->work[--m->work_count];
    const pkv_program_node *const n = &m->program->nodes[at.node];
    int32_t stack = at.stack;
    if (n->need == PKV_NEED_NEVER || n->need + m->stacks[stack].depth > PKV_PROGRAM_STACK) continue;
    const int news = reach(m, at.node, &stack);
    if (news < 0) return false;
    if (news == 0) continue;
    bool room = true;
    if (n->kind == PKV_NODE_SPLIT)
      room = push(m, n->next, stack) && push(m, n->arg, stack);
    else if (n->kind == PKV_NODE_CALL)
      room = enter_rule(m, n, stack);
    else if (n->kind == PKV_NODE_RET)
      room = leave_rule(m, stack, may_end);
    if (!room) return false;
  }
  return true;
}

/* The state of what waits; -1: no room. */
static int32_t settle(pkv_machine *m) {
  bool may_end = false;
  m->found_count = 0;
  m->step++;
  if (!close_ways(m, &may_end)) return -1;
  pkv_way *const ways = m->work; /* free again */
  for (int32_t i = 0; i < m->found_count; i++)
    ways[i] = (pkv_way){m->found[i], m->reached[m->found[i]].stack};
  sort_ways(ways, m->found_count);
  return intern_state(m, ways, m->found_count, may_end);
}

static bool takes(const pkv_program *p, const pkv_program_node *n, int byte) {
  return n->kind == PKV_NODE_BYTE ? n->arg == byte : pkv_set_has(&p->sets[n->arg], byte);
}

/* The state behind a byte of this class; -1: no room. */
static int32_t go(pkv_machine *m, int32_t from, int class) {
  const pkv_program *const p = m->program;
  uint16_t *const known = m->next + (size_t)from * (size_t)p->class_count + class;
  if (*known != UNKNOWN) return *known;
  const pkv_state s = m->states[from];
  m->work_count = 0;
  for (int32_t i = 0; i < s.count; i++) {
    const pkv_way w = m->ways[s.first + i];
    const pkv_program_node *const n = &p->nodes[w.node];
    if (takes(p, n, p->example[class]) && !push(m, n->next, w.stack)) return -1;
  }
  const int32_t to = settle(m);
  if (to >= 0) *known = (uint16_t)to;
  return to;
}

/* --- forgetting ---------------------------------------------------------------------------- */

static void clear_states(pkv_machine *m) {
  memset(m->state_table, 0, PKV_STATE_SLOTS * sizeof *m->state_table);
  for (int32_t i = 0; i < m->mask_slots; i++)
    m->masks[i].state = -1;
  m->state_count = 1;
  m->way_count = 0;
  m->states[DEAD] = (pkv_state){0, 0, -1, false};
  memset(m->next, 0, (size_t)m->program->class_count * sizeof *m->next); /* dead stays dead */
}

/* Only this state is kept; returns its new number. */
static int32_t forget_others(pkv_machine *m, int32_t id) {
  const pkv_state s = m->states[id];
  pkv_way *const ways = m->work;
  m->epoch++;
  m->stats.forgotten++;
  memcpy(ways, m->ways + s.first, (size_t)s.count * sizeof *ways);
  pkv_stacks_keep(m, ways, s.count);
  clear_states(m);
  return intern_state(m, ways, s.count, s.may_end); /* the dead state is the dead state */
}

/* --- calls --------------------------------------------------------------------------------- */

bool pkv_machine_begin(pkv_machine_state *state, pkv_machine *machine) {
  pkv_machine *const m = machine;
  for (int attempt = 0; attempt < 2; attempt++) {
    m->work_count = 0;
    m->steps = 0;
    (void)push(m, m->program->start, 0);
    const int32_t id = settle(m);
    if (id >= 0) {
      *state = (pkv_machine_state){m->epoch, id};
      return true;
    }
    (void)forget_others(m, DEAD);
  }
  return false;
}

bool pkv_machine_feed(pkv_machine_state *state, pkv_machine *machine, const char *bytes,
                      size_t count) {
  pkv_machine *const m = machine;
  int32_t at = state->id;
  m->steps = 0;
  for (size_t i = 0; i < count; i++) {
    const int class = m->program->class_of[(unsigned char)bytes[i]];
    int32_t to = go(m, at, class);
    if (to < 0) {
      at = forget_others(m, at);
      m->steps = 0;
      to = go(m, at, class);
    }
    if (to < 0) return false;
    at = to;
  }
  *state = (pkv_machine_state){m->epoch, at};
  return true;
}

bool pkv_machine_knows(const pkv_machine *machine, pkv_machine_state state) {
  return state.epoch == machine->epoch;
}

bool pkv_machine_may_end(const pkv_machine *machine, pkv_machine_state state) {
  return machine->states[state.id].may_end;
}

bool pkv_machine_may_go_on(const pkv_machine *machine, pkv_machine_state state) {
  return machine->states[state.id].count > 0;
}

/* --- masks --------------------------------------------------------------------------------- */

/* The walk over the vocabulary: at[d] is the state behind d bytes of the way to the node. */
static bool walk(pkv_machine *m, uint64_t *bits, int32_t id) {
  const pkv_token_trie *const t = m->trie;
  const uint8_t *const class_of = m->program->class_of;
  const size_t classes = (size_t)m->program->class_count;
  int32_t at[PKV_TRIE_DEPTH + 1];
  m->steps = 0;
  at[0] = id;
  memset(bits, 0, m->mask_words * sizeof *bits);
  for (int32_t i = 0; i < t->node_count;) {
    const pkv_trie_node *const n = &t->nodes[i];
    const int class = class_of[n->byte];
    const int32_t from = at[n->depth - 1];
    int32_t to = m->next[(size_t)from * classes + (size_t) class];
    if (to == UNKNOWN) to = go(m, from, class);
    if (to < 0) return false;
    if (to == DEAD) {
      i = n->after;
      continue;
    }
    at[n->depth] = to;
    for (int32_t k = n->token; k < n[1].token; k++)
      bits[t->tokens[k] >> 6] |= UINT64_C(1) << (t->tokens[k] & 63);
    i++;
  }
  return true;
}

/* The mask that was not asked for the longest. */
static int32_t take_mask(pkv_machine *m) {
  int32_t oldest = 0;
  for (int32_t i = 0; i < m->mask_slots; i++) {
    if (m->masks[i].state < 0) return i;
    if (m->masks[i].used < m->masks[oldest].used) oldest = i;
  }
  m->states[m->masks[oldest].state].mask = -1;
  return oldest;
}

const uint64_t *pkv_machine_mask(pkv_machine *machine, pkv_machine_state *state) {
  pkv_machine *const m = machine;
  int32_t slot = m->states[state->id].mask;
  if (slot < 0) {
    slot = take_mask(m);
    uint64_t *const bits = m->mask_bits + (size_t)slot * m->mask_words;
    m->masks[slot].state = -1;
    m->stats.masks++;
    if (!walk(m, bits, state->id)) {
      *state = (pkv_machine_state){0, forget_others(m, state->id)};
      state->epoch = m->epoch;
      if (!walk(m, bits, state->id)) return NULL;
    }
    m->masks[slot].state = state->id;
    m->states[state->id].mask = slot;
  }
  m->masks[slot].used = ++m->uses;
  return m->mask_bits + (size_t)slot * m->mask_words;
}

/* --- memory -------------------------------------------------------------------------------- */

typedef struct part {
  void **at;
  size_t bytes;
} part;

#define PARTS 13

static void list_parts(part *parts, pkv_machine *m) {
  const size_t classes = (size_t)m->program->class_count;
  const part all[PARTS] = {
      {(void **)&m->states, PKV_MACHINE_STATES * sizeof *m->states},
      {(void **)&m->ways, PKV_MACHINE_WAYS * sizeof *m->ways},
      {(void **)&m->next, PKV_MACHINE_STATES * classes * sizeof *m->next},
      {(void **)&m->state_table, PKV_STATE_SLOTS * sizeof *m->state_table},
      {(void **)&m->stacks, PKV_MACHINE_STACKS * sizeof *m->stacks},
      {(void **)&m->frames, PKV_MACHINE_FRAMES * sizeof *m->frames},
      {(void **)&m->spare, PKV_MACHINE_FRAMES * sizeof *m->spare},
      {(void **)&m->stack_table, PKV_STACK_SLOTS * sizeof *m->stack_table},
      {(void **)&m->unions, PKV_UNION_SLOTS * sizeof *m->unions},
      {(void **)&m->reached, m->program->node_count * sizeof *m->reached},
      {(void **)&m->found, PKV_MACHINE_FOUND * sizeof *m->found},
      {(void **)&m->work, PKV_MACHINE_WORK * sizeof *m->work},
      {(void **)&m->mask_bits, (size_t)m->mask_slots * m->mask_words * sizeof *m->mask_bits},
  };
  memcpy(parts, all, sizeof all);
}

pkv_status pkv_machine_create(pkv_machine **out, const pkv_program *program,
                              const pkv_token_trie *trie, const pkv_allocator *allocator,
                              pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  part parts[PARTS];
  *out = NULL;
  pkv_machine *const m = pkv_alloc_zeroed(&a, 1, sizeof *m);
  PKV_CHECK(err, m != NULL, PKV_E_NOMEM, "no memory for a grammar");
  m->allocator = a;
  m->program = program;
  m->trie = trie;
  m->mask_words = trie != NULL ? ((size_t)trie->vocab + 63) / 64 : 1;
  m->mask_slots = PKV_MACHINE_MASKS;
  m->epoch = 1;
  list_parts(parts, m);
  for (size_t i = 0; i < PARTS; i++) {
    *parts[i].at = pkv_alloc(&a, parts[i].bytes);
    m->stats.bytes += parts[i].bytes;
    if (*parts[i].at != NULL) continue;
    pkv_machine_destroy(m);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for a grammar");
  }
  memset(m->reached, 0, program->node_count * sizeof *m->reached);
  pkv_stacks_clear(m);
  clear_states(m);
  *out = m;
  return PKV_OK;
}

void pkv_machine_destroy(pkv_machine *machine) {
  if (machine == NULL) return;
  const pkv_allocator a = machine->allocator;
  part parts[PARTS];
  list_parts(parts, machine);
  for (size_t i = 0; i < PARTS; i++)
    if (*parts[i].at != NULL) pkv_free(&a, *parts[i].at, parts[i].bytes);
  pkv_free(&a, machine, sizeof *machine);
}

void pkv_machine_get_stats(pkv_machine_stats *out, const pkv_machine *machine) {
  *out = machine->stats;
}
