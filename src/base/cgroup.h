/* SPDX-License-Identifier: Apache-2.0 */
/* CPU quotas and memory limits of Linux control groups, versions 1 and 2. */
#ifndef PKV_BASE_CGROUP_H
#define PKV_BASE_CGROUP_H

#include <stdint.h>

/*
 * The least CPU quota of the groups listed in the file `membership` (the form of
 * /proc/self/cgroup) and of their parents, mounted under `root` (/sys/fs/cgroup), rounded up to
 * whole cores. 0 when nothing limits, or nothing can be read.
 */
int32_t pkv_cgroup_cores(const char *membership, const char *root);
/* The least memory limit in the same way, in bytes. */
int64_t pkv_cgroup_memory(const char *membership, const char *root);
/* Bytes that these limits leave, what the groups keep of files counted as free: 1 of a full group,
   0 when nothing limits. */
int64_t pkv_cgroup_memory_left(const char *membership, const char *root);
/* Bytes of the host's memory that this process may use at most; 0 when nothing can be read. */
int64_t pkv_host_memory(void);
/* Bytes of it that are left without swapping, a guess that others change; 0 when nothing can be
   read. */
int64_t pkv_host_memory_left(void);

#endif
