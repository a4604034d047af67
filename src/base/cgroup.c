/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a limit's files, of version 2 or 1, from a group up to the root. */
#include "base/cgroup.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"

/* The file's first size - 1 bytes, terminated; false when it cannot be read. */
static bool read_small(char *text, size_t size, const char *path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  size_t used = 0;
  while (used + 1 < size) {
    const ssize_t n = read(fd, text + used, size - 1 - used);
    if (n <= 0) break;
    used += (size_t)n;
  }
  close(fd);
  text[used] = '\0';
  return used > 0;
}

static int64_t cores_of(int64_t quota, int64_t period) {
  return quota / period + (quota % period != 0);
}

/* "max 100000" or "150000 100000"; 0 = no limit. */
static int64_t quota_v2(const char *folder) {
  char path[1200], text[64];
  if (snprintf(path, sizeof path, "%s/cpu.max", folder) >= (int)sizeof path) return 0;
  if (!read_small(text, sizeof text, path)) return 0;
  char *blank = strchr(text, ' ');
  if (blank == NULL) return 0;
  *blank = '\0';
  blank[1 + strcspn(blank + 1, " \n")] = '\0';
  int64_t quota, period;
  if (!pkv_parse_i64(&quota, text, 1, INT64_MAX)) return 0;
  if (!pkv_parse_i64(&period, blank + 1, 1, INT64_MAX)) return 0;
  return cores_of(quota, period);
}

static bool read_number(int64_t *value, const char *folder, const char *name) {
  char path[1200], text[64];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return false;
  if (!read_small(text, sizeof text, path)) return false;
  text[strcspn(text, "\n")] = '\0';
  return pkv_parse_i64(value, text, 1, INT64_MAX);
}

/* A quota of -1 means none and fails to parse as >= 1. */
static int64_t quota_v1(const char *folder) {
  int64_t quota, period;
  if (!read_number(&quota, folder, "cpu.cfs_quota_us")) return 0;
  if (!read_number(&period, folder, "cpu.cfs_period_us")) return 0;
  return cores_of(quota, period);
}

static int64_t memory_v2(const char *folder) {
  int64_t bytes;
  return read_number(&bytes, folder, "memory.max") ? bytes : 0; /* "max" is no number */
}

static int64_t memory_v1(const char *folder) {
  int64_t bytes;
  return read_number(&bytes, folder, "memory.limit_in_bytes") ? bytes : 0;
}

/* What a line "name number", with or without a unit, says; 0 = there is none. */
static int64_t number_of(const char *text, const char *name) {
  const size_t n = strlen(name);
  for (const char *line = text; *line != '\0';) {
    if (strncmp(line, name, n) == 0 && line[n] == ' ') {
      const char *const number = line + n + strspn(line + n, " ");
      const size_t length = strspn(number, "0123456789");
      char digits[24];
      int64_t value;
      if (length >= sizeof digits || strchr(" \n", number[length]) == NULL) return 0;
      memcpy(digits, number, length);
      digits[length] = '\0';
      return pkv_parse_i64(&value, digits, 0, INT64_MAX) ? value : 0;
    }
    line += strcspn(line, "\n");
    line += *line == '\n';
  }
  return 0;
}

static int64_t left_of(int64_t limit, const char *folder, const char *use_name) {
  char path[1200], text[8192];
  int64_t use;
  if (limit == 0 || !read_number(&use, folder, use_name)) return 0;
  if (snprintf(path, sizeof path, "%s/memory.stat", folder) >= (int)sizeof path) return 0;
  if (read_small(text, sizeof text, path)) { /* one after the other: no sum of two overflows */
    use -= number_of(text, "inactive_file");
    if (use > 0) use -= number_of(text, "active_file");
  }
  return use < limit ? limit - (use > 0 ? use : 0) : 1;
}

static int64_t memory_left_v2(const char *folder) {
  return left_of(memory_v2(folder), folder, "memory.current");
}

static int64_t memory_left_v1(const char *folder) {
  return left_of(memory_v1(folder), folder, "memory.usage_in_bytes");
}

/* A limit: its controller, where version 1 mounts that, and who reads it in a folder (0 = none). */
typedef struct limit {
  const char *controller;
  const char *mounts[2];
  int64_t (*v2)(const char *folder);
  int64_t (*v1)(const char *folder);
} limit;

static const limit cpu_limit = {"cpu", {"cpu", "cpu,cpuacct"}, quota_v2, quota_v1};
static const limit memory_limit = {"memory", {"memory", NULL}, memory_v2, memory_v1};
static const limit memory_left = {"memory", {"memory", NULL}, memory_left_v2, memory_left_v1};

/* The least limit from mount/group up to mount itself. Where a container sees its own group as the
 * mount's root, the deeper folders are missing and only the last one answers. */
static int64_t least_on_path(const char *mount, const char *group, int64_t (*read)(const char *),
                             int64_t least) {
  char folder[1100];
  const int n = snprintf(folder, sizeof folder, "%s%s", mount, group);
  if (n < 0 || n >= (int)sizeof folder) return least;
  const size_t root = strlen(mount);
  for (;;) {
    const int64_t here = read(folder);
    if (here > 0 && (least == 0 || here < least)) least = here;
    char *slash = strrchr(folder + root, '/');
    if (slash == NULL) return least;
    *slash = '\0';
  }
}

/* Whether the comma-separated list holds `name`. */
static bool holds(const char *list, const char *name) {
  while (*list != '\0') {
    const size_t n = strcspn(list, ",");
    if (n == strlen(name) && memcmp(list, name, n) == 0) return true;
    list += n + (list[n] == ',');
  }
  return false;
}

/* One line "id:controllers:group". */
static int64_t least_of_line(char *line, const char *root, const limit *what, int64_t least) {
  char *controllers = strchr(line, ':');
  if (controllers == NULL) return least;
  *controllers++ = '\0';
  char *group = strchr(controllers, ':');
  if (group == NULL) return least;
  *group++ = '\0';
  if (strcmp(line, "0") == 0 && controllers[0] == '\0')
    return least_on_path(root, group, what->v2, least);
  if (!holds(controllers, what->controller)) return least;
  char mount[512];
  for (int i = 0; i < 2 && what->mounts[i] != NULL; i++) {
    if (snprintf(mount, sizeof mount, "%s/%s", root, what->mounts[i]) >= (int)sizeof mount)
      continue;
    least = least_on_path(mount, group, what->v1, least);
  }
  return least;
}

static int64_t least_of(const char *membership, const char *root, const limit *what) {
  char text[4096];
  if (!read_small(text, sizeof text, membership)) return 0;
  int64_t least = 0;
  for (char *line = text; *line != '\0';) {
    const size_t n = strcspn(line, "\n");
    char *next = line + n + (line[n] == '\n');
    line[n] = '\0';
    least = least_of_line(line, root, what, least);
    line = next;
  }
  return least;
}

int32_t pkv_cgroup_cores(const char *membership, const char *root) {
  const int64_t least = least_of(membership, root, &cpu_limit);
  return least > INT32_MAX ? INT32_MAX : (int32_t)least;
}

int64_t pkv_cgroup_memory(const char *membership, const char *root) {
  return least_of(membership, root, &memory_limit);
}

int64_t pkv_cgroup_memory_left(const char *membership, const char *root) {
  return least_of(membership, root, &memory_left);
}

/* Of two limits the lower, 0 = none known. */
static int64_t lower(int64_t a, int64_t b) {
  return a > 0 && (b == 0 || a < b) ? a : b;
}

int64_t pkv_host_memory_left(void) {
  char text[4096];
  int64_t kib = 0;
  if (read_small(text, sizeof text, "/proc/meminfo")) kib = number_of(text, "MemAvailable:");
  return lower(pkv_cgroup_memory_left("/proc/self/cgroup", "/sys/fs/cgroup"),
               kib <= INT64_MAX / 1024 ? kib * 1024 : 0);
}

int64_t pkv_host_memory(void) {
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  return lower(pkv_cgroup_memory("/proc/self/cgroup", "/sys/fs/cgroup"),
               pages > 0 && page > 0 ? pages * page : 0);
}
