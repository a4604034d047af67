/* SPDX-License-Identifier: Apache-2.0 */
/* Reads cpu.max (version 2) and cpu.cfs_quota_us (version 1) from a group up to the root. */
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

/* The least quota from mount/group up to mount itself. Where a container sees its own group as the
 * mount's root, the deeper folders are missing and only the last one answers. */
static int64_t least_on_path(const char *mount, const char *group, int64_t (*quota)(const char *),
                             int64_t least) {
  char folder[1100];
  const int n = snprintf(folder, sizeof folder, "%s%s", mount, group);
  if (n < 0 || n >= (int)sizeof folder) return least;
  const size_t root = strlen(mount);
  for (;;) {
    const int64_t cores = quota(folder);
    if (cores > 0 && (least == 0 || cores < least)) least = cores;
    char *slash = strrchr(folder + root, '/');
    if (slash == NULL) return least;
    *slash = '\0';
  }
}

/* Whether the comma-separated list holds "cpu". */
static bool has_cpu(const char *list) {
  while (*list != '\0') {
    const size_t n = strcspn(list, ",");
    if (n == 3 && memcmp(list, "cpu", 3) == 0) return true;
    list += n + (list[n] == ',');
  }
  return false;
}

/* One line "id:controllers:group". */
static int64_t least_of_line(char *line, const char *root, int64_t least) {
  char *controllers = strchr(line, ':');
  if (controllers == NULL) return least;
  *controllers++ = '\0';
  char *group = strchr(controllers, ':');
  if (group == NULL) return least;
  *group++ = '\0';
  if (strcmp(line, "0") == 0 && controllers[0] == '\0')
    return least_on_path(root, group, quota_v2, least);
  if (!has_cpu(controllers)) return least;
  char mount[512];
  const char *const names[2] = {"cpu", "cpu,cpuacct"};
  for (int i = 0; i < 2; i++) {
    if (snprintf(mount, sizeof mount, "%s/%s", root, names[i]) >= (int)sizeof mount) continue;
    least = least_on_path(mount, group, quota_v1, least);
  }
  return least;
}

int32_t pkv_cgroup_cores(const char *membership, const char *root) {
  char text[4096];
  if (!read_small(text, sizeof text, membership)) return 0;
  int64_t least = 0;
  for (char *line = text; *line != '\0';) {
    const size_t n = strcspn(line, "\n");
    char *next = line + n + (line[n] == '\n');
    line[n] = '\0';
    least = least_of_line(line, root, least);
    line = next;
  }
  return least > INT32_MAX ? INT32_MAX : (int32_t)least;
}
