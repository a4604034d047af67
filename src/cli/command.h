/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a command of `pkv` is. A new command is one file cmd_<name>.c that defines a pkv_command,
 * and one line in the table of main.c. The command's option table is its only description: parsing,
 * --help, the manual page and docs/options.md all come from it.
 *
 * Rules of the command line
 *   --name VALUE, --name=VALUE, -x VALUE, -xVALUE; flags without a value may be grouped: -ej
 *   a VALUE is taken as it stands, a leading '-' included; "--" ends the options
 *   an option given twice: the last one counts
 *   results go to stdout, everything else to stderr as "pkv <command>: <text>"
 *   a command with settings takes its options also from the environment and a file
 *   (options_file.c): the command line goes first, then the environment, the file, the defaults
 */
#ifndef PKV_CLI_COMMAND_H
#define PKV_CLI_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/text.h"
#include "pkv/pkv.h"

/* Exit codes of every command. */
#define PKV_EXIT_OK          0
#define PKV_EXIT_FAILURE     1
#define PKV_EXIT_USAGE       2
#define PKV_EXIT_INTERRUPTED 130 /* SIGINT */
#define PKV_EXIT_CLOSED      141 /* the reader of stdout went away */

typedef enum pkv_option_type {
  PKV_OPTION_FLAG,   /* int32_t: 1 when given */
  PKV_OPTION_INT,    /* int32_t or int64_t, lo .. hi */
  PKV_OPTION_NUMBER, /* double, low .. high */
  PKV_OPTION_TEXT,   /* const char *, borrowed from argv; NULL = not given */
  PKV_OPTION_CHOICE  /* int32_t: index into choices */
} pkv_option_type;

typedef struct pkv_option {
  pkv_option_type type;
  const char *name; /* long name, without dashes */
  char letter;      /* 0 = none */
  bool required;
  const char *value;          /* placeholder in help: "FILE"; NULL for flags and choices */
  const char *const *choices; /* NULL-terminated */
  const char *fallback;       /* default, as one would type it; NULL = unset (0, NULL) */
  const char *help;           /* a phrase without a full stop */
  int64_t lo, hi;
  double low, high;
  size_t offset, bytes; /* of the target in the command's options struct */
} pkv_option;

#define PKV_OPTION_TARGET(type_, member_)                                                          \
  .offset = offsetof(type_, member_), .bytes = sizeof(((type_ *)0)->member_)
#define PKV_FLAG(type_, member_, letter_, name_, help_)                                            \
  {                                                                                                \
    .type = PKV_OPTION_FLAG, .name = (name_), .letter = (letter_), .help = (help_),                \
    PKV_OPTION_TARGET(type_, member_)                                                              \
  }
#define PKV_INT(type_, member_, letter_, name_, value_, fallback_, lo_, hi_, help_)                \
  {                                                                                                \
    .type = PKV_OPTION_INT, .name = (name_), .letter = (letter_), .value = (value_),               \
    .fallback = (fallback_), .lo = (lo_), .hi = (hi_), .help = (help_),                            \
    PKV_OPTION_TARGET(type_, member_)                                                              \
  }
#define PKV_NUMBER(type_, member_, letter_, name_, value_, fallback_, low_, high_, help_)          \
  {                                                                                                \
    .type = PKV_OPTION_NUMBER, .name = (name_), .letter = (letter_), .value = (value_),            \
    .fallback = (fallback_), .low = (low_), .high = (high_), .help = (help_),                      \
    PKV_OPTION_TARGET(type_, member_)                                                              \
  }
#define PKV_TEXT(type_, member_, letter_, name_, value_, fallback_, help_)                         \
  {                                                                                                \
    .type = PKV_OPTION_TEXT, .name = (name_), .letter = (letter_), .value = (value_),              \
    .fallback = (fallback_), .help = (help_), PKV_OPTION_TARGET(type_, member_)                    \
  }
#define PKV_REQUIRED(type_, member_, letter_, name_, value_, help_)                                \
  {                                                                                                \
    .type = PKV_OPTION_TEXT, .name = (name_), .letter = (letter_), .value = (value_),              \
    .required = true, .help = (help_), PKV_OPTION_TARGET(type_, member_)                           \
  }
#define PKV_CHOICE(type_, member_, letter_, name_, choices_, fallback_, help_)                     \
  {                                                                                                \
    .type = PKV_OPTION_CHOICE, .name = (name_), .letter = (letter_), .choices = (choices_),        \
    .fallback = (fallback_), .help = (help_), PKV_OPTION_TARGET(type_, member_)                    \
  }

typedef struct pkv_command pkv_command;

/* One invocation. */
typedef struct pkv_cli {
  const pkv_command *command;
  int operand_count; /* arguments that are no options */
  char **operands;
  pkv_buffer settings; /* text of the file of settings, which options point into */
} pkv_cli;

struct pkv_command {
  const char *name;     /* one word, or two: "bench attention" */
  const char *summary;  /* one line, no full stop */
  const char *details;  /* paragraphs for --help and the manual; NULL = none */
  const char *operands; /* as shown in the usage line: "MODEL"; NULL = takes none */
  int min_operands, max_operands;
  const pkv_option *options;
  int option_count;
  size_t options_bytes; /* of the options struct, at most PKV_OPTIONS_BYTES */
  /* The command that a file of settings is for, often this one; its option table says which keys
   * there may be, and this command takes those that are also its own. NULL = no settings. */
  const pkv_command *settings_of;
  const char *env_prefix; /* "PKV_SERVE_"; with settings_of */
  /* options: the filled struct; returns an exit code. */
  int (*run)(const pkv_cli *cli, const void *options);
};

#define PKV_OPTIONS_BYTES 1024

/* The table, in the order of `pkv --help`; defined in main.c. */
extern const pkv_command *const pkv_commands[];
extern const int pkv_command_count;

/* Fills `options` (options_bytes) with defaults, then from argv (without program and command
 * words); operands move to the front of argv. Returns PKV_EXIT_OK or, after a message,
 * PKV_EXIT_USAGE. *help is set when -h or --help was met. */
int pkv_options_parse(pkv_cli *cli, void *options, bool *help, int argc, char **argv);
/* Stores a value as the option's type reads it; flags take true and false. */
bool pkv_option_store(const pkv_option *option, void *options, const char *text);
/* Says, as part of a message, what the option would take. */
void pkv_option_bounds(char *out, size_t bytes, const pkv_option *option);
const pkv_option *pkv_option_find(const pkv_command *command, const char *name, size_t length);
/* For those options that bit i of *given does not have: the environment's value, or the file's that
 * --config or the environment names; sets their bits. Returns an exit code, after a message. */
int pkv_options_settings(pkv_cli *cli, void *options, uint64_t *given);
/* Appends the command's name and those of its filled options that differ from their defaults, as a
 * shell takes them, but for the options named in `without`, which is separated by commas. */
pkv_status pkv_options_text(pkv_buffer *out, const pkv_command *command, const void *options,
                            const char *without, pkv_error *err);
/* The candidate nearest to `word`, or NULL when none is near. */
const char *pkv_nearest_word(const char *word, const char *const *candidates, int count);

void pkv_help_program(void);
void pkv_help_command(const pkv_command *command);
void pkv_help_man(void);      /* pkv.1, every command */
void pkv_help_markdown(void); /* docs/options.md */

/* "pkv <command>: <text>" on stderr. */
void pkv_cli_error(const pkv_cli *cli, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The error's text on stderr; returns PKV_EXIT_FAILURE. */
int pkv_cli_fail(const pkv_cli *cli, const pkv_error *err);
/* A message about how the command was called; returns PKV_EXIT_USAGE. */
int pkv_cli_usage(const pkv_cli *cli, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Writes to stdout and flushes; false once stdout cannot be written (stop then: main reports). */
bool pkv_cli_write(const char *bytes, size_t count);
/* Prints and releases a JSON value with a newline, in ASCII: text that steers a terminal stays
 * escaped. NULL is a failure. Returns an exit code. */
int pkv_cli_json(const pkv_cli *cli, json_t *value);
/* SIGINT came: finish cleanly and return PKV_EXIT_INTERRUPTED. A second one kills. */
bool pkv_cli_interrupted(void);

#endif
