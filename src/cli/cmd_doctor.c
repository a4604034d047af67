/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv doctor`: what this machine offers, what is linked, and what is missing. Facts are collected
 * as a list of checks first; text and JSON are two ways to print that list.
 */
#include "cli/commands.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/env.h"
#include "base/json_memory.h"
#include "cli/prompt_text.h"

typedef struct doctor_options {
  const char *model;
  int32_t json;
} doctor_options;

static const pkv_option options_table[] = {
    PKV_TEXT(doctor_options, model, 'm', "model", "FILE", NULL, "check this model file too"),
    PKV_FLAG(doctor_options, json, 0, "json", "print one JSON object"),
};

/* How a check came out. MISSING makes the exit code 1, ABSENT is worth knowing only. */
typedef enum check_state { CHECK_OK, CHECK_ABSENT, CHECK_MISSING } check_state;

static const char *const state_names[] = {"ok", "absent", "missing"};

typedef struct report {
  json_t *checks;
  int missing;
} report;

static void add(report *r, const char *section, const char *name, check_state state,
                const char *format, ...) __attribute__((format(printf, 5, 6)));

static void add(report *r, const char *section, const char *name, check_state state,
                const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  (void)vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (state == CHECK_MISSING) r->missing++;
  pkv_json_add(&r->checks, json_pack("{s:s, s:s, s:s, s:s%}", "section", section, "name", name,
                                     "state", state_names[state], "text", text, strlen(text)));
}

/* First line of a small file without its newline; false when it cannot be read. */
static bool read_line(char *text, size_t size, const char *path) {
  FILE *const file = fopen(path, "re");
  if (file == NULL) return false;
  const bool ok = fgets(text, (int)size, file) != NULL;
  (void)fclose(file);
  if (ok) text[strcspn(text, "\n")] = '\0';
  return ok;
}

static void check_program(report *r) {
#if defined(__clang__)
  const char *const compiler = "clang " __clang_version__;
#else
  const char *const compiler = "gcc " __VERSION__;
#endif
#ifdef PKV_ASSERTS
  const char *const asserts = ", internal checks on";
#else
  const char *const asserts = "";
#endif
  add(r, "program", "pkv", CHECK_OK, "%s", pkv_version());
  add(r, "program", "built by", CHECK_OK, "%s%s", compiler, asserts);
}

static void check_cpu(report *r) {
  pkv_cpu_features features;
  char text[400];
  pkv_cpu_detect(&features);
  pkv_cpu_describe(text, sizeof text, &features);
  add(r, "cpu", "name", CHECK_OK, "%s", features.name[0] != '\0' ? features.name : "unknown");
  add(r, "cpu", "features", CHECK_OK, "%s", text);
  add(r, "cpu", "cores", CHECK_OK, "%d usable of %ld online", (int)pkv_cpu_cores(),
      sysconf(_SC_NPROCESSORS_ONLN));

  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  pkv_error err;
  const char *const forced = pkv_env_get(PKV_ENV_CPU);
  if (pkv_executor_create(&executor, &options, &err) != PKV_OK) {
    add(r, "cpu", "kernels", CHECK_MISSING, "%s", err.text);
    return;
  }
  add(r, "cpu", "kernels", CHECK_OK, "%s, %d threads%s%s", pkv_isa_name(pkv_executor_isa(executor)),
      (int)pkv_executor_threads(executor), forced != NULL ? ", forced by PKV_CPU=" : "",
      forced != NULL ? forced : "");
  pkv_executor_destroy(executor);
}

static void check_caches(report *r) {
  for (int i = 0; i < 8; i++) {
    char path[96], level[16], type[32], size[32], name[64];
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", i);
    if (!read_line(level, sizeof level, path)) break;
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", i);
    if (!read_line(type, sizeof type, path)) break;
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
    if (!read_line(size, sizeof size, path)) break;
    (void)snprintf(name, sizeof name, "L%s %s", level, type);
    add(r, "memory", name, CHECK_OK, "%s", size);
  }
}

static void check_memory(report *r) {
  char line[160];
  FILE *const file = fopen("/proc/meminfo", "re");
  long long total = 0, available = 0;
  if (file != NULL) {
    while (fgets(line, sizeof line, file) != NULL) {
      (void)sscanf(line, "MemTotal: %lld", &total);
      (void)sscanf(line, "MemAvailable: %lld", &available);
    }
    (void)fclose(file);
    add(r, "memory", "main memory", CHECK_OK, "%.1f GiB, %.1f GiB available",
        (double)total / 1048576.0, (double)available / 1048576.0);
  }
  if (read_line(line, sizeof line, "/sys/kernel/mm/transparent_hugepage/enabled")) {
    const bool never = strstr(line, "[never]") != NULL;
    add(r, "memory", "huge pages", never ? CHECK_ABSENT : CHECK_OK, "transparent_hugepage: %s%s",
        line, never ? "; reads of a long cache are slower without them" : "");
  } else {
    add(r, "memory", "huge pages", CHECK_ABSENT, "this kernel has no transparent huge pages");
  }
  check_caches(r);
}

/* Looks a symbol up in what is loaded; function pointers need the detour of memcpy. */
static bool find_symbol(void *function, void *library, const char *name) {
  void *const symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static void check_libraries(report *r) {
  unsigned (*xxhash)(void) = NULL;
  int (*pcre2)(uint32_t, void *) = NULL;
  const char *(*utf8proc)(void) = NULL;
  void *const self = dlopen(NULL, RTLD_LAZY);
  enum { PCRE2_VERSION_OF_CONFIG = 11 }; /* PCRE2_CONFIG_VERSION of pcre2.h */
  char text[64];
  if (self == NULL) return;
  if (find_symbol(&xxhash, self, "XXH_versionNumber"))
    add(r, "libraries", "xxHash", CHECK_OK, "%u.%u.%u", xxhash() / 10000u, xxhash() / 100u % 100u,
        xxhash() % 100u);
  else
    add(r, "libraries", "xxHash", CHECK_OK, "linked statically");
  if (find_symbol(&pcre2, self, "pcre2_config_8") && pcre2(PCRE2_VERSION_OF_CONFIG, NULL) > 0 &&
      pcre2(PCRE2_VERSION_OF_CONFIG, NULL) <= (int)sizeof text &&
      pcre2(PCRE2_VERSION_OF_CONFIG, text) > 0)
    add(r, "libraries", "PCRE2", CHECK_OK, "%s", text);
  else
    add(r, "libraries", "PCRE2", CHECK_OK, "linked statically");
  if (find_symbol(&utf8proc, self, "utf8proc_version"))
    add(r, "libraries", "utf8proc", CHECK_OK, "%s", utf8proc());
  else
    add(r, "libraries", "utf8proc", CHECK_OK, "linked statically");
  add(r, "libraries", "Jansson", CHECK_OK, "%s", jansson_version_str());
  (void)dlclose(self);
}

static int count_device_files(void) {
  DIR *const folder = opendir("/dev");
  int count = 0;
  if (folder == NULL) return 0;
  for (const struct dirent *e = readdir(folder); e != NULL; e = readdir(folder)) {
    static const char prefix[] = "nvidia";
    const char *const rest = e->d_name + sizeof prefix - 1;
    if (strncmp(e->d_name, prefix, sizeof prefix - 1) == 0 && *rest >= '0' && *rest <= '9') count++;
  }
  (void)closedir(folder);
  return count;
}

/* The driver's own functions, by its published C interface. */
static void check_gpu_devices(report *r, void *driver) {
  int (*init)(unsigned) = NULL, (*version)(int *) = NULL, (*device_count)(int *) = NULL;
  int (*device_get)(int *, int) = NULL, (*device_name)(char *, int, int) = NULL;
  int number = 0, count = 0;
  if (!find_symbol(&init, driver, "cuInit") ||
      !find_symbol(&version, driver, "cuDriverGetVersion") ||
      !find_symbol(&device_count, driver, "cuDeviceGetCount") ||
      !find_symbol(&device_get, driver, "cuDeviceGet") ||
      !find_symbol(&device_name, driver, "cuDeviceGetName")) {
    add(r, "gpu", "driver", CHECK_ABSENT, "libcuda.so.1 lacks functions every driver has");
    return;
  }
  const int status = init(0);
  if (status != 0) {
    add(r, "gpu", "driver", CHECK_ABSENT, "libcuda.so.1 is here, cuInit gives error %d", status);
    return;
  }
  if (version(&number) == 0)
    add(r, "gpu", "driver", CHECK_OK, "CUDA %d.%d", number / 1000, number % 1000 / 10);
  if (device_count(&count) != 0) count = 0;
  if (count == 0) add(r, "gpu", "device", CHECK_ABSENT, "the driver sees none");
  for (int i = 0; i < count && i < 16; i++) {
    char name[128] = "unknown", label[32];
    int device = 0;
    if (device_get(&device, i) == 0) (void)device_name(name, (int)sizeof name, device);
    (void)snprintf(label, sizeof label, "device %d", i);
    add(r, "gpu", label, CHECK_OK, "%s", name);
  }
}

static void check_gpu(report *r) {
  void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  const int files = count_device_files();
  if (driver != NULL) {
    check_gpu_devices(r, driver);
    (void)dlclose(driver);
  } else {
    add(r, "gpu", "driver", CHECK_ABSENT,
        files > 0 ? "%d device files, but no libcuda.so.1: install the driver's user part"
                  : "no device file (%d) and no libcuda.so.1: everything runs on the CPU",
        files);
  }
  /* What the library itself says of the device. */
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *executor = NULL;
  pkv_error err = {PKV_OK, "", ""};
  options.device = PKV_DEVICE_CUDA;
  const bool works = pkv_executor_create(&executor, &options, &err) == PKV_OK;
  add(r, "gpu", "kernels", works ? CHECK_OK : CHECK_ABSENT, "%s", works ? "ready" : err.text);
  pkv_executor_destroy(executor);
}

static void check_model(report *r, const char *path) {
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model *model = NULL;
  pkv_error err;
  options.check_tensors = 1;
  options.weights = PKV_WEIGHTS_MAPPED; /* read once */
  if (path == NULL) {
    add(r, "model", "file", CHECK_ABSENT, "none given (--model FILE checks one)");
    return;
  }
  if (pkv_model_open_named(&model, path, &options, &err) != PKV_OK) {
    add(r, "model", "file", CHECK_MISSING, "%s", err.text);
    return;
  }
  pkv_model_get_info(&info, model);
  add(r, "model", "file", CHECK_OK, "%s, %.1f MiB", path, (double)info.file_bytes / 1048576.0);
  add(r, "model", "name", CHECK_OK, "%s (%s), %.1f M parameters", info.name, info.architecture,
      (double)info.parameters / 1e6);
  add(r, "model", "context", CHECK_OK, "%d tokens, %.0f KiB of f16 cache for each 16 tokens",
      (int)info.context,
      2.0 * 2.0 * 16.0 * (double)info.layers * (double)info.kv_heads * (double)info.head_dim /
          1024.0);
  add(r, "model", "weights", CHECK_OK, "all finite");
  pkv_model_close(model);
}

static void print_text(const report *r) {
  size_t index;
  json_t *check;
  const char *last = "";
  json_array_foreach(r->checks, index, check) {
    const char *const section = json_string_value(json_object_get(check, "section"));
    const char *const state = json_string_value(json_object_get(check, "state"));
    if (strcmp(section, last) != 0) (void)printf("%s%s\n", index > 0 ? "\n" : "", section);
    last = section;
    (void)printf("  %-8s %-16s %s\n", strcmp(state, "ok") == 0 ? "" : state,
                 json_string_value(json_object_get(check, "name")),
                 json_string_value(json_object_get(check, "text")));
  }
  if (r->missing == 0)
    (void)puts("\nNothing that pkv needs is missing.");
  else
    (void)printf("\n%d missing.\n", r->missing);
}

static int run(const pkv_cli *cli, const void *opaque) {
  const doctor_options *const options = opaque;
  report r = {json_array(), 0};
  if (r.checks == NULL) {
    pkv_cli_error(cli, "out of memory");
    return PKV_EXIT_FAILURE;
  }
  check_program(&r);
  check_cpu(&r);
  check_memory(&r);
  check_libraries(&r);
  check_gpu(&r);
  check_model(&r, options->model);
  const int missing = r.missing;
  int code = PKV_EXIT_OK;
  if (options->json) {
    code = pkv_cli_json(cli, json_pack("{s:s, s:i, s:o}", "version", pkv_version(), "missing",
                                       missing, "checks", r.checks));
  } else {
    print_text(&r);
    json_decref(r.checks);
  }
  return missing > 0 ? PKV_EXIT_FAILURE : code;
}

const pkv_command pkv_command_doctor = {
    .name = "doctor",
    .summary = "Show what this machine offers and what is missing",
    .details = "Looks at the processor, memory, linked libraries and the GPU driver, and with "
               "--model opens that file and checks its weights. Exit status 1 when something that "
               "pkv needs is missing.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(doctor_options),
    .run = run,
};
