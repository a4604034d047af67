/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes the place of the C library's calls that can fail, in a program that links it: allocation,
 * files, threads, sockets. Each call is counted while faults are armed, and the one asked for
 * fails, in whatever library it is made. What lives is counted all the time, so that leaks show.
 *
 * Not seen: what the C library calls inside itself past its own symbols (fread's read), and what a
 * sanitizer has taken already: for plain builds.
 */
#ifndef PKV_FAULT_SHIM_H
#define PKV_FAULT_SHIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* From now on the `at`-th call fails (at >= 1; 0 = none), and every later one with from_then_on. */
void pkv_fault_arm(int64_t at, bool from_then_on);
/* Nothing fails any more. How many calls there were since it was armed. */
int64_t pkv_fault_disarm(void);
/* The name of the latest call that failed. */
const char *pkv_fault_name(void);
/* Blocks that are allocated and not freed; pages that are mapped; streams and descriptors that are
   open. */
int64_t pkv_fault_live(void);
/* A thread, whatever is armed. */
int pkv_fault_thread(pthread_t *out, void *(*run)(void *), void *arg);

#endif
