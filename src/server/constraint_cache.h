/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Constraints that requests asked for, the latest of them: the same one again is neither compiled
 * nor begun from nothing by the engine. Any thread.
 */
#ifndef PKV_SERVER_CONSTRAINT_CACHE_H
#define PKV_SERVER_CONSTRAINT_CACHE_H

#include <stddef.h>

#include "pkv/engine.h"

typedef struct pkv_constraint_cache pkv_constraint_cache;

typedef enum pkv_constraint_kind {
  PKV_CONSTRAINT_JSON, /* any object; without a text */
  PKV_CONSTRAINT_GRAMMAR,
  PKV_CONSTRAINT_SCHEMA
} pkv_constraint_kind;

pkv_status pkv_constraint_cache_create(pkv_constraint_cache **out, pkv_error *err);
void pkv_constraint_cache_destroy(pkv_constraint_cache *cache); /* NULL is allowed */
/* To be destroyed by the caller. */
pkv_status pkv_constraint_cache_get(pkv_constraint **out, pkv_constraint_cache *cache,
                                    const pkv_model *model, pkv_constraint_kind kind,
                                    const char *text, size_t bytes, pkv_error *err);

#endif
