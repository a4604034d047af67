/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Settings of a command beside its command line: the environment, and a file. Both have the names
 * and bounds of the option table.
 *
 *   # a comment
 *   port = 8080
 *   no-prefix-cache = true
 *
 * A value is the rest of its line, without quotes; a line is blank, a comment, or NAME = VALUE.
 */
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "cli/command.h"

#define FILE_BYTES ((size_t)64 << 10)
#define CONFIG     "config" /* the option that names the file: the only one a file cannot have */

typedef struct settings_state {
  pkv_cli *cli;
  void *options;
  const char *path;
  uint64_t given, seen; /* by option of this command; by option of the settings' command */
  int line;
} settings_state;

static const char *option_name(const void *user, int index) {
  const pkv_command *const command = user;
  return index < command->option_count ? command->options[index].name : NULL;
}

static uint64_t bit_of(const pkv_command *command, const pkv_option *o) {
  return UINT64_C(1) << (unsigned)(o - command->options);
}

/* Takes the value of option `known` of the settings' command where this one has it too. */
static int take(settings_state *s, const pkv_option *known, const char *text, const char *where) {
  const pkv_command *const command = s->cli->command;
  const pkv_option *const o = pkv_option_find(command, known->name, strlen(known->name));
  char bounds[320];
  if (o == NULL || (s->given & bit_of(command, o)) != 0u) return PKV_EXIT_OK;
  if (pkv_option_store(o, s->options, text)) {
    s->given |= bit_of(command, o);
    return PKV_EXIT_OK;
  }
  pkv_option_bounds(bounds, sizeof bounds, o);
  return pkv_cli_usage(s->cli, "%s is '%s'; %s", where, text, bounds);
}

static int from_environment(settings_state *s) {
  const pkv_command *const of = s->cli->command->settings_of;
  const char *const prefix = s->cli->command->env_prefix;
  const char *const unknown = pkv_env_unknown(prefix, option_name, of);
  if (unknown != NULL)
    return pkv_cli_usage(s->cli, "the variable %.*s stands for no option of 'pkv %s'",
                         (int)strcspn(unknown, "="), unknown, of->name);
  for (int i = 0; i < of->option_count; i++) {
    const char *const value = pkv_env_option(prefix, of->options[i].name);
    char where[96];
    (void)snprintf(where, sizeof where, "the variable for --%s", of->options[i].name);
    const int code = value != NULL ? take(s, &of->options[i], value, where) : PKV_EXIT_OK;
    if (code != PKV_EXIT_OK) return code;
  }
  return PKV_EXIT_OK;
}

static char *trim(char *text) {
  text += strspn(text, " \t");
  size_t length = strlen(text);
  while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL)
    text[--length] = '\0';
  return text;
}

static int unknown_key(const settings_state *s, const char *name) {
  const pkv_command *const of = s->cli->command->settings_of;
  const char *names[64];
  int count = 0;
  for (; count < of->option_count && count < 64; count++)
    names[count] = of->options[count].name;
  const char *const near = pkv_nearest_word(name, names, count);
  return pkv_cli_usage(s->cli, "%s, line %d: '%.48s' is no setting of 'pkv %s'%s%s%s", s->path,
                       s->line, name, of->name, near != NULL ? "; did you mean '" : "",
                       near != NULL ? near : "", near != NULL ? "'?" : "");
}

static int take_line(settings_state *s, char *line) {
  const pkv_command *const of = s->cli->command->settings_of;
  char where[1200];
  char *const text = trim(line);
  if (*text == '\0' || *text == '#') return PKV_EXIT_OK;
  char *const equals = strchr(text, '=');
  if (equals == NULL)
    return pkv_cli_usage(s->cli, "%s, line %d: NAME = VALUE is wanted", s->path, s->line);
  *equals = '\0';
  const char *const name = trim(text);
  const char *const value = trim(equals + 1);
  const pkv_option *const o = pkv_option_find(of, name, strlen(name));
  if (o == NULL) return unknown_key(s, name);
  if (strcmp(name, CONFIG) == 0)
    return pkv_cli_usage(s->cli, "%s, line %d: a file cannot name another one", s->path, s->line);
  if ((s->seen & bit_of(of, o)) != 0u)
    return pkv_cli_usage(s->cli, "%s, line %d: %s is there twice", s->path, s->line, name);
  s->seen |= bit_of(of, o);
  (void)snprintf(where, sizeof where, "%.1000s, line %d: %s", s->path, s->line, name);
  return take(s, o, value, where);
}

static int from_file(settings_state *s) {
  pkv_error err = {PKV_OK, "", ""};
  pkv_buffer *const file = &s->cli->settings;
  pkv_buffer_init(file, FILE_BYTES, NULL);
  if (pkv_buffer_read_file(file, s->path, &err) != PKV_OK) return pkv_cli_fail(s->cli, &err);
  if (file->size == 0) return PKV_EXIT_OK;
  if (!pkv_utf8_valid(file->data, file->size) || strlen(file->data) != file->size)
    return pkv_cli_usage(s->cli, "%s is no text in UTF-8", s->path);
  for (char *at = file->data, *next; at != NULL; at = next) {
    next = strchr(at, '\n');
    if (next != NULL) *next++ = '\0';
    s->line++;
    const int code = take_line(s, at);
    if (code != PKV_EXIT_OK) return code;
  }
  return PKV_EXIT_OK;
}

int pkv_options_settings(pkv_cli *cli, void *options, uint64_t *given) {
  settings_state s = {cli, options, NULL, *given, 0, 0};
  int code = from_environment(&s);
  const pkv_option *const config = pkv_option_find(cli->command, CONFIG, strlen(CONFIG));
  if (config != NULL)
    memcpy(&s.path, (const unsigned char *)options + config->offset, sizeof s.path);
  if (code == PKV_EXIT_OK && s.path != NULL) code = from_file(&s);
  *given = s.given;
  return code;
}
