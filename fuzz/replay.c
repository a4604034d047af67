/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A main for fuzz targets where there is no libFuzzer: runs the target once on the empty input and
 * once on each file of the folders named. Fails when it finds no file, so that a lost corpus shows.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_INPUT (1L << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* 1 = run, 0 = not a readable file of a size that makes sense. */
static int run_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return 0;
  /* Of the exact size, so that a sanitizer sees a read past the end. */
  uint8_t *data = NULL;
  long size = -1;
  if (fseek(file, 0, SEEK_END) == 0) size = ftell(file);
  int ok = size >= 0 && size <= LARGEST_INPUT && fseek(file, 0, SEEK_SET) == 0;
  if (ok) {
    data = malloc(size > 0 ? (size_t)size : 1);
    ok = data != NULL && fread(data, 1, (size_t)size, file) == (size_t)size;
  }
  (void)fclose(file);
  if (ok) (void)LLVMFuzzerTestOneInput(data, (size_t)size);
  free(data);
  return ok;
}

static long run_folder(const char *folder) {
  DIR *dir = opendir(folder);
  if (dir == NULL) return 0;
  long count = 0;
  for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
    char path[4096];
    if (entry->d_name[0] == '.') continue;
    const int n = snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    if (n < 0 || (size_t)n >= sizeof path || !run_file(path)) {
      (void)fprintf(stderr, "cannot replay %s/%s\n", folder, entry->d_name);
      count = -1;
      break;
    }
    count++;
  }
  (void)closedir(dir);
  return count;
}

int main(int argc, char **argv) {
  const uint8_t nothing[1] = {0};
  (void)LLVMFuzzerTestOneInput(nothing, 0);
  for (int i = 1; i < argc; i++) {
    const long count = run_folder(argv[i]);
    (void)printf("%s: %ld inputs replayed\n", argv[i], count);
    if (count <= 0) return 1;
  }
  return argc > 1 ? 0 : 1;
}
