/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The route `shared` on the CPU: what one piece of a node's tile is, and who computes it.
 * cpu_shared.c runs plans; pkv_cpu_attend_node is where faster node kernels plug in.
 */
#ifndef PKV_BACKEND_CPU_CPU_SHARED_H
#define PKV_BACKEND_CPU_CPU_SHARED_H

#include "backend/cpu/cpu_isa.h"
#include "plan/plan_tree.h"

/*
 * Query rows of a tile and the node whose keys they all see. Query row i belongs to rank i /
 * (q_len * group), query token i / group % q_len and query head kv_head * group + i % group.
 */
typedef struct pkv_cpu_node {
  const pkv_attention_params *p;
  const int32_t *pages;       /* of a row that sees every token of the node */
  const pkv_tree_rank *ranks; /* [count]: row (of q) and length (for the window) of each */
  int32_t count;
  int32_t kv_head, group;
} pkv_cpu_node;

/*
 * Attends all query rows of `n` to tokens [begin, end), from neutral on, and saves the states: rank
 * i's to slots + i * slot_floats, which hold all m, then all l, then all acc of its q_len * group
 * states. begin and end are multiples of the tile; no row needs a causal mask; with a window each
 * query's lower bound holds (it may exclude all). A state's bits are those that ops->attend over
 * the same tokens gives (batch invariance).
 */
void pkv_cpu_attend_node(const pkv_cpu_isa_ops *ops, void *scratch, const pkv_cpu_node *n,
                         int64_t begin, int64_t end, float *slots, int64_t slot_floats);

/* Runs a plan of route `shared`; arguments as pkv_cpu_attention. */
void pkv_cpu_shared_attention(pkv_executor *executor, const pkv_attention_params *p);

#endif
