/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv healthcheck`: asks a server of this machine how it is, by the settings that it runs with. */
#include "cli/commands.h"
#include "server/probe.h"

typedef struct healthcheck_options {
  const char *config, *host, *key_file, *keys;
  int32_t port, ready, timeout_s;
} healthcheck_options;

static const pkv_option options_table[] = {
    PKV_TEXT(healthcheck_options, config, 0, "config", "FILE", NULL, "the server's settings"),
    PKV_TEXT(healthcheck_options, host, 0, "host", "ADDRESS", "127.0.0.1",
             "what the server listens on"),
    PKV_INT(healthcheck_options, port, 'p', "port", "N", "8080", 1, 65535, "its port"),
    PKV_TEXT(healthcheck_options, key_file, 0, "api-key-file", "FILE", NULL,
             "the server's keys; --ready needs one"),
    PKV_TEXT(healthcheck_options, keys, 0, "api-keys", "LIST", NULL, "more of them"),
    PKV_FLAG(healthcheck_options, ready, 0, "ready",
             "ask whether the model is there and its engine advances, not only whether the process "
             "answers"),
    PKV_INT(healthcheck_options, timeout_s, 0, "timeout", "S", "5", 1, 3600, "for the answer"),
};

static int run(const pkv_cli *cli, const void *opaque) {
  const healthcheck_options *const o = opaque;
  pkv_error err = {PKV_OK, "", ""};
  int32_t http = 0;
  const pkv_probe probe = {o->host,     o->port, o->ready ? "/ready" : "/health",
                           o->key_file, o->keys, o->timeout_s};
  if (pkv_probe_ask(&http, &probe, &err) != PKV_OK) return pkv_cli_fail(cli, &err);
  if (http == 200) return PKV_EXIT_OK;
  pkv_cli_error(cli, "%s says %d", probe.path, (int)http);
  return PKV_EXIT_FAILURE;
}

const pkv_command pkv_command_healthcheck = {
    .name = "healthcheck",
    .summary = "Ask a running server how it is",
    .details = "Exit status 0: it is well. Takes the settings of 'pkv serve' from the same file "
               "and environment, so that both agree on port and keys. For containers and "
               "supervisors.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(healthcheck_options),
    .settings_of = &pkv_command_serve,
    .env_prefix = "PKV_SERVE_",
    .run = run,
};
