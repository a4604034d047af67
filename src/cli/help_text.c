/* SPDX-License-Identifier: Apache-2.0 */
/* Help, the manual page and docs/options.md, all written from the option tables. */
#include "cli/command.h"

#include <stdio.h>
#include <string.h>

#define HELP_WIDTH    80
#define HELP_COLUMN   30
#define CHOICES_WIDTH 70 /* of values beside an option's name */

static const char *const exit_codes[][2] = {
    {"0", "success"},
    {"1", "something failed; stderr says what"},
    {"2", "the command line was wrong"},
    {"130", "interrupted (SIGINT)"},
    {"141", "the reader of standard output went away"},
};
static const char *const environment[][2] = {
    {"PKV_LOG", "error, warn, info or debug: the log goes to stderr"},
    {"PKV_CPU", "reference, scalar, avx2, avx512 or neon: forces an instruction set"},
    {"PKV_CUDA_CHECK", "1: a GPU is waited for and checked after each launch; not of several GPUs"},
    {"PKV_CUDA_SUM",
     "nccl: several GPUs add up by NCCL also where they reach each other's memory. NCCL's own "
     "variables are the user's: where NVLink multicast must stay off, NCCL_NVLS_ENABLE=0"},
    {"PKV_SERVE_NAME", "option --name of pkv serve, for each of them: PKV_SERVE_API_KEYS, ..."},
};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Prints words up to the width, continuation lines at `indent`; `column` is where we stand. */
static void print_wrapped(const char *text, int indent, int column) {
  while (*text != '\0') {
    const size_t length = strcspn(text, " \n");
    if (column > indent && column + 1 + (int)length > HELP_WIDTH) {
      (void)printf("\n%*s", indent, "");
      column = indent;
    } else if (column > indent) {
      (void)putchar(' ');
      column++;
    }
    (void)printf("%.*s", (int)length, text);
    column += (int)length;
    text += length;
    if (*text == '\n') {
      (void)printf("\n%*s", indent, "");
      column = indent;
    }
    if (*text != '\0') text++;
  }
  (void)putchar('\n');
}

static void choice_list(char *text, size_t size, const pkv_option *o) {
  size_t used = 0;
  text[0] = '\0';
  for (int i = 0; o->choices[i] != NULL && used < size; i++) {
    const int n = snprintf(text + used, size - used, "%s%s", i == 0 ? "" : "|", o->choices[i]);
    used += n > 0 ? (size_t)n : 0;
  }
}

/* What follows the option's name: " FILE", " f32|f16", or nothing. */
static void value_text(char *text, size_t size, const pkv_option *o) {
  char list[256];
  text[0] = '\0';
  if (o->type == PKV_OPTION_CHOICE) {
    choice_list(list, sizeof list, o);
    (void)snprintf(text, size, " %s", list);
  } else if (o->value != NULL) {
    (void)snprintf(text, size, " %s", o->value);
  }
}

/* "(default 16)", "(required)", or nothing. */
static void note_text(char *text, size_t size, const pkv_option *o) {
  text[0] = '\0';
  if (o->required)
    (void)snprintf(text, size, " (required)");
  else if (o->fallback != NULL)
    (void)snprintf(text, size, " (default %s)", o->fallback);
}

/* "; one of a, b, c" for values that are too many to stand beside the option's name. */
static void move_choices(char *text, size_t size, const pkv_option *o) {
  size_t used = (size_t)snprintf(text, size, "; one of ");
  for (int i = 0; o->choices[i] != NULL && used < size; i++) {
    const int n = snprintf(text + used, size - used, "%s%s", i == 0 ? "" : ", ", o->choices[i]);
    used += n > 0 ? (size_t)n : 0;
  }
}

static void print_option(const pkv_option *o) {
  char left[320], value[280], note[80], choices[280], help[1024];
  value_text(value, sizeof value, o);
  note_text(note, sizeof note, o);
  choices[0] = '\0';
  if (o->type == PKV_OPTION_CHOICE && strlen(value) > CHOICES_WIDTH) {
    move_choices(choices, sizeof choices, o);
    (void)snprintf(value, sizeof value, " NAME");
  }
  if (o->letter != 0)
    (void)snprintf(left, sizeof left, "  -%c, --%s%s", o->letter, o->name, value);
  else
    (void)snprintf(left, sizeof left, "      --%s%s", o->name, value);
  (void)snprintf(help, sizeof help, "%s%s%s", o->help, choices, note);
  (void)printf("%s", left);
  if ((int)strlen(left) > HELP_COLUMN - 2)
    (void)printf("\n%*s", HELP_COLUMN, "");
  else
    (void)printf("%*s", HELP_COLUMN - (int)strlen(left), "");
  print_wrapped(help, HELP_COLUMN, HELP_COLUMN);
}

void pkv_help_command(const pkv_command *command) {
  (void)printf("pkv %s - %s\n\nUsage: pkv %s [options]%s%s\n", command->name, command->summary,
               command->name, command->operands != NULL ? " " : "",
               command->operands != NULL ? command->operands : "");
  if (command->details != NULL) {
    (void)putchar('\n');
    print_wrapped(command->details, 0, 0);
  }
  (void)puts("\nOptions:");
  for (int i = 0; i < command->option_count; i++)
    print_option(&command->options[i]);
  static const pkv_option help_option = {
      .type = PKV_OPTION_FLAG, .name = "help", .letter = 'h', .help = "show this text"};
  print_option(&help_option);
  (void)puts("\nExit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.");
}

void pkv_help_program(void) {
  (void)printf("pkv %s - run language models from a paged KV cache\n\n"
               "Usage: pkv COMMAND [options]\n\nCommands:\n",
               pkv_version());
  for (int i = 0; i < pkv_command_count; i++)
    (void)printf("  %-18s %s\n", pkv_commands[i]->name, pkv_commands[i]->summary);
  (void)puts("\n'pkv COMMAND --help' shows a command's options; 'pkv --version' the version.\n\n"
             "Exit status:");
  for (size_t i = 0; i < COUNT(exit_codes); i++)
    (void)printf("  %-18s %s\n", exit_codes[i][0], exit_codes[i][1]);
  (void)puts("\nEnvironment:");
  for (size_t i = 0; i < COUNT(environment); i++)
    (void)printf("  %-18s %s\n", environment[i][0], environment[i][1]);
}

/* Text for roff: backslashes and dashes escaped, a leading dot or quote made harmless. */
static void roff(const char *text) {
  bool line_start = true;
  for (; *text != '\0'; text++) {
    if (line_start && (*text == '.' || *text == '\'')) (void)fputs("\\&", stdout);
    line_start = *text == '\n';
    if (*text == '\\')
      (void)fputs("\\e", stdout);
    else if (*text == '-')
      (void)fputs("\\-", stdout);
    else
      (void)putchar(*text);
  }
}

static void man_option(const pkv_option *o) {
  char value[280], note[80];
  value_text(value, sizeof value, o);
  note_text(note, sizeof note, o);
  (void)puts(".TP");
  (void)fputs(".B ", stdout);
  if (o->letter != 0) (void)printf("\\-%c, ", o->letter);
  (void)fputs("\\-\\-", stdout);
  roff(o->name);
  roff(value);
  (void)putchar('\n');
  roff(o->help);
  roff(note);
  (void)putchar('\n');
}

void pkv_help_man(void) {
  (void)printf(".TH PKV 1 \"\" \"pkv %s\" \"User Commands\"\n.SH NAME\n", pkv_version());
  (void)puts("pkv \\- run language models from a paged KV cache\n.SH SYNOPSIS\n.B pkv\n"
             ".I command\n[options]\n.SH COMMANDS");
  for (int c = 0; c < pkv_command_count; c++) {
    const pkv_command *const command = pkv_commands[c];
    (void)fputs(".SS pkv ", stdout);
    roff(command->name);
    if (command->operands != NULL) {
      (void)putchar(' ');
      roff(command->operands);
    }
    (void)putchar('\n');
    roff(command->summary);
    (void)puts(".");
    if (command->details != NULL) {
      (void)puts(".PP");
      roff(command->details);
      (void)putchar('\n');
    }
    for (int i = 0; i < command->option_count; i++)
      man_option(&command->options[i]);
  }
  (void)puts(".SH \"EXIT STATUS\"");
  for (size_t i = 0; i < COUNT(exit_codes); i++)
    (void)printf(".TP\n.B %s\n%s\n", exit_codes[i][0], exit_codes[i][1]);
  (void)puts(".SH ENVIRONMENT");
  for (size_t i = 0; i < COUNT(environment); i++)
    (void)printf(".TP\n.B %s\n%s\n", environment[i][0], environment[i][1]);
}

/* A table cell: a bar would end it. */
static void cell(const char *text) {
  for (; *text != '\0'; text++) {
    if (*text == '|') (void)putchar('\\');
    (void)putchar(*text == '\n' ? ' ' : *text);
  }
}

static void markdown_option(const pkv_option *o) {
  char value[280];
  value_text(value, sizeof value, o);
  (void)fputs("| ", stdout);
  if (o->letter != 0) (void)printf("`-%c`, ", o->letter);
  (void)printf("`--%s", o->name);
  cell(value);
  (void)fputs("` | ", stdout);
  cell(o->help);
  (void)fputs(" | ", stdout);
  if (o->required)
    (void)fputs("required", stdout);
  else if (o->fallback != NULL)
    cell(o->fallback);
  (void)fputs(" | ", stdout);
  if (o->type == PKV_OPTION_INT)
    (void)printf("%lld to %lld", (long long)o->lo, (long long)o->hi);
  else if (o->type == PKV_OPTION_NUMBER)
    (void)printf("%g to %g", o->low, o->high);
  (void)puts(" |");
}

void pkv_help_markdown(void) {
  (void)puts("# Commands and options\n\nWritten by `pkv --help-markdown`; do not edit.\n");
  for (int c = 0; c < pkv_command_count; c++) {
    const pkv_command *const command = pkv_commands[c];
    (void)printf("## pkv %s%s%s\n\n%s.\n\n", command->name, command->operands != NULL ? " " : "",
                 command->operands != NULL ? command->operands : "", command->summary);
    if (command->details != NULL) (void)printf("%s\n\n", command->details);
    if (command->option_count > 0) {
      (void)puts("| option | what | default | bounds |\n| --- | --- | --- | --- |");
      for (int i = 0; i < command->option_count; i++)
        markdown_option(&command->options[i]);
      (void)putchar('\n');
    }
  }
  (void)puts("## Exit status\n\n| code | meaning |\n| --- | --- |");
  for (size_t i = 0; i < COUNT(exit_codes); i++)
    (void)printf("| %s | %s |\n", exit_codes[i][0], exit_codes[i][1]);
  (void)puts("\n## Environment\n\n| variable | meaning |\n| --- | --- |");
  for (size_t i = 0; i < COUNT(environment); i++)
    (void)printf("| `%s` | %s |\n", environment[i][0], environment[i][1]);
}
