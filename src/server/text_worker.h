/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread for long texts: parsing and tokenizing a MiB takes longer than others may wait. Tasks
 * are worked on in the order of their coming. Functions are for one other thread.
 */
#ifndef PKV_SERVER_TEXT_WORKER_H
#define PKV_SERVER_TEXT_WORKER_H

#include <stdbool.h>

#include "pkv/pkv.h"

typedef struct pkv_text_worker pkv_text_worker;

/* Part of what it works on, which must stay where it is until the task is done. */
typedef struct pkv_text_task {
  void (*work)(void *user);
  void *user;
  struct pkv_text_task *next;
  bool done; /* under the worker's lock */
} pkv_text_task;

/* wake_fd: an eventfd, borrowed; written when a task is done. */
pkv_status pkv_text_worker_create(pkv_text_worker **out, int wake_fd, pkv_error *err);
void pkv_text_worker_give(pkv_text_worker *worker, pkv_text_task *task);
bool pkv_text_worker_is_done(pkv_text_worker *worker, const pkv_text_task *task);
/* Finishes the task that runs; those behind it count as done and are not worked on. NULL is
 * allowed. */
void pkv_text_worker_end(pkv_text_worker *worker);
/* Ended already, or ends it. NULL is allowed. */
void pkv_text_worker_destroy(pkv_text_worker *worker);

#endif
