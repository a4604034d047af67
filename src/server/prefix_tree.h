/* SPDX-License-Identifier: Apache-2.0 */
/* The prefixes that live prompts have in common, as a tree, for people to look at. */
#ifndef PKV_SERVER_PREFIX_TREE_H
#define PKV_SERVER_PREFIX_TREE_H

#include <jansson.h>

#include "server/engine_loop.h"

/* A list of nodes {"parent": index or -1, "from", "to": tokens, "rows"}, parents first: rows whose
 * prompts agree from the start up to `to`, in whole pages; a node of one row is its rest. At most
 * 64 prompts are looked at, the oldest. NULL: no memory. */
json_t *pkv_prefix_tree(pkv_loop *loop, int32_t page_tokens);

#endif
