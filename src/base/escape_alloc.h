/* SPDX-License-Identifier: Apache-2.0 */
/*
 * malloc and free for a library that does not look at every failure of its own (Jansson's reader
 * drops bytes of a string that it has no memory for, and then aborts or reads on). Within a span
 * that was begun, memory that is refused ends the span: control goes back to its beginning, and
 * what was allocated in it is freed.
 *
 *   pkv_escape escape;
 *   if (setjmp(escape.back) == 0) {
 *     pkv_escape_begin(&escape);
 *     ... the library's call; no lock is held and nothing else is allocated ...
 *     pkv_escape_end(&escape);
 *   } else { ... there was no memory ... }
 *
 * Outside of spans they are malloc and free. Spans of a thread do not nest.
 */
#ifndef PKV_BASE_ESCAPE_ALLOC_H
#define PKV_BASE_ESCAPE_ALLOC_H

#include <setjmp.h>
#include <stddef.h>

struct pkv_escape_block;

typedef struct pkv_escape {
  jmp_buf back;
  struct pkv_escape_block *blocks; /* allocated since it began, and not freed */
} pkv_escape;

void pkv_escape_begin(pkv_escape *escape);
void pkv_escape_end(pkv_escape *escape);

void *pkv_escape_malloc(size_t size);
void pkv_escape_free(void *block); /* any thread */

#endif
