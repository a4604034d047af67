/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program `pkv`: the table of commands, dispatch, signals, the log sink, and what happens when
 * stdout cannot be written. Commands live in their own files.
 */
#include "cli/command.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "cli/commands.h"

/* clang-format off */
const pkv_command *const pkv_commands[] = {
    &pkv_command_run,
    &pkv_command_serve,
    &pkv_command_healthcheck,
    &pkv_command_demo,
    &pkv_command_inspect,
    &pkv_command_tokenize,
    &pkv_command_bench_attention,
    &pkv_command_bench_model,
    &pkv_command_bench_layer,
    &pkv_command_bench_paper,
    &pkv_command_bench_policy,
    &pkv_command_bench_sched,
    &pkv_command_bench_serve,
    &pkv_command_calibrate,
    &pkv_command_explain,
    &pkv_command_doctor,
};
/* clang-format on */
const int pkv_command_count = (int)(sizeof pkv_commands / sizeof *pkv_commands);

/* The one mutable global of the program: set by the signal handler. */
static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) {
  interrupted = 1;
  (void)signal(number, SIG_DFL); /* the second one kills */
}

bool pkv_cli_interrupted(void) {
  return interrupted != 0;
}

static void print_message(const pkv_cli *cli, const char *format, va_list args) {
  (void)fflush(stdout);
  if (cli != NULL && cli->command != NULL)
    (void)fprintf(stderr, "pkv %s: ", cli->command->name);
  else
    (void)fputs("pkv: ", stderr);
  (void)vfprintf(stderr, format, args);
  (void)fputc('\n', stderr);
}

void pkv_cli_error(const pkv_cli *cli, const char *format, ...) {
  va_list args;
  va_start(args, format);
  print_message(cli, format, args);
  va_end(args);
}

int pkv_cli_fail(const pkv_cli *cli, const pkv_error *err) {
  pkv_cli_error(cli, "%s", err->text[0] != '\0' ? err->text : pkv_status_text(err->status));
  return PKV_EXIT_FAILURE;
}

int pkv_cli_usage(const pkv_cli *cli, const char *format, ...) {
  va_list args;
  va_start(args, format);
  print_message(cli, format, args);
  va_end(args);
  if (cli != NULL && cli->command != NULL)
    (void)fprintf(stderr, "Try 'pkv %s --help'.\n", cli->command->name);
  else
    (void)fputs("Try 'pkv --help'.\n", stderr);
  return PKV_EXIT_USAGE;
}

bool pkv_cli_write(const char *bytes, size_t count) {
  return fwrite(bytes, 1, count, stdout) == count && fflush(stdout) == 0;
}

int pkv_cli_json(const pkv_cli *cli, json_t *value) {
  if (value == NULL) {
    pkv_cli_error(cli, "out of memory while writing JSON");
    return PKV_EXIT_FAILURE;
  }
  const int failed =
      json_dumpf(value, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
  json_decref(value);
  (void)fputc('\n', stdout);
  return failed != 0 ? PKV_EXIT_FAILURE : PKV_EXIT_OK;
}

static const char *const level_names[] = {"error", "warn", "info", "debug"};

/* user: the highest level that is shown. */
static void log_to_stderr(void *user, pkv_log_level level, const char *room, const char *text) {
  const pkv_log_level *const shown = user;
  if ((int)level < 0 || level > *shown) return;
  (void)fprintf(stderr, "pkv: %s: %s: %s\n", level_names[level], room, text);
}

static bool log_level_from_env(pkv_log_level *level) {
  const char *const text = pkv_env_get(PKV_ENV_LOG);
  if (text == NULL) return false;
  for (int i = 0; i < 4; i++) {
    if (strcmp(text, level_names[i]) == 0) {
      *level = (pkv_log_level)i;
      return true;
    }
  }
  (void)fprintf(stderr, "pkv: PKV_LOG is '%s'; it may be error, warn, info or debug\n", text);
  return false;
}

/* The command that argv[1] (and argv[2]) name; *words is how many of them were its name. */
static const pkv_command *find_command(int *words, int argc, char **argv) {
  for (int i = 0; i < pkv_command_count; i++) {
    const char *const name = pkv_commands[i]->name;
    const char *const blank = strchr(name, ' ');
    if (blank == NULL) {
      if (strcmp(argv[1], name) == 0) {
        *words = 1;
        return pkv_commands[i];
      }
    } else if (argc > 2 && strlen(argv[1]) == (size_t)(blank - name) &&
               strncmp(argv[1], name, (size_t)(blank - name)) == 0 &&
               strcmp(argv[2], blank + 1) == 0) {
      *words = 2;
      return pkv_commands[i];
    }
  }
  return NULL;
}

/* argv[1] is no command: says what is near, or what may follow "bench". */
static int unknown_command(int argc, char **argv) {
  const char *names[64];
  int count = 0;
  const size_t length = strlen(argv[1]);
  char family[256] = "";
  for (int i = 0; i < pkv_command_count && count < 64; i++) {
    const char *const name = pkv_commands[i]->name;
    const size_t used = strlen(family);
    names[count++] = name;
    if (strncmp(name, argv[1], length) == 0 && name[length] == ' ')
      (void)snprintf(family + used, sizeof family - used, "%s'%s'", used > 0 ? ", " : "", name);
  }
  if (argv[1][0] == '-') return pkv_cli_usage(NULL, "unknown option '%s'", argv[1]);
  if (family[0] != '\0' && argc > 2)
    return pkv_cli_usage(NULL, "unknown command '%s %s'; there is %s", argv[1], argv[2], family);
  if (family[0] != '\0')
    return pkv_cli_usage(NULL, "'%s' alone is no command; there is %s", argv[1], family);
  const char *const near = pkv_nearest_word(argv[1], names, count);
  if (near != NULL)
    return pkv_cli_usage(NULL, "unknown command '%s'; did you mean '%s'?", argv[1], near);
  return pkv_cli_usage(NULL, "unknown command '%s'", argv[1]);
}

static int run_command(const pkv_command *command, int argc, char **argv) {
  _Alignas(max_align_t) unsigned char options[PKV_OPTIONS_BYTES];
  pkv_cli cli = {command, 0, argv, {NULL, 0, 0, 0, pkv_allocator_default()}};
  bool help = false;
  if (command->options_bytes > sizeof options) {
    pkv_cli_error(&cli, "options struct of %zu bytes is too large", command->options_bytes);
    return PKV_EXIT_FAILURE;
  }
  int code = pkv_options_parse(&cli, options, &help, argc, argv);
  if (help) {
    pkv_help_command(command);
    return PKV_EXIT_OK;
  }
  if (code == PKV_EXIT_OK) code = command->run(&cli, options);
  pkv_buffer_deinit(&cli.settings);
  return code;
}

static int dispatch(int argc, char **argv) {
  int words = 0;
  if (argc < 2) {
    pkv_help_program();
    return PKV_EXIT_USAGE;
  }
  const char *const first = argv[1];
  if (strcmp(first, "--help") == 0 || strcmp(first, "-h") == 0 ||
      (strcmp(first, "help") == 0 && argc == 2)) {
    pkv_help_program();
    return PKV_EXIT_OK;
  }
  if (strcmp(first, "--version") == 0) {
    (void)printf("pkv %s\n", pkv_version());
    return PKV_EXIT_OK;
  }
  if (strcmp(first, "--help-man") == 0) {
    pkv_help_man();
    return PKV_EXIT_OK;
  }
  if (strcmp(first, "--help-markdown") == 0) {
    pkv_help_markdown();
    return PKV_EXIT_OK;
  }
  if (strcmp(first, "help") == 0) {
    const pkv_command *const about = find_command(&words, argc - 1, argv + 1);
    if (about == NULL) return unknown_command(argc - 1, argv + 1);
    pkv_help_command(about);
    return PKV_EXIT_OK;
  }
  const pkv_command *const command = find_command(&words, argc, argv);
  if (command == NULL) return unknown_command(argc, argv);
  return run_command(command, argc - 1 - words, argv + 1 + words);
}

int main(int argc, char **argv) {
  pkv_log_level level = PKV_LOG_ERROR;
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  (void)sigemptyset(&action.sa_mask);
  (void)sigaction(SIGINT, &action, NULL); /* no SA_RESTART: a read of stdin ends too */
  (void)signal(SIGPIPE, SIG_IGN);         /* writes fail with EPIPE instead */
  if (log_level_from_env(&level)) pkv_log_set(log_to_stderr, &level);

  int code = dispatch(argc, argv);

  pkv_log_set(NULL, NULL);
  errno = 0;
  if (fflush(stdout) != 0 || ferror(stdout)) {
    if (errno == EPIPE || errno == 0) return PKV_EXIT_CLOSED;
    (void)fprintf(stderr, "pkv: cannot write to standard output: %s\n", strerror(errno));
    if (code == PKV_EXIT_OK) code = PKV_EXIT_FAILURE;
  }
  return code;
}
