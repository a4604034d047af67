/* SPDX-License-Identifier: Apache-2.0 */
/* The commands, one a file cmd_<name>.c; main.c lists them in the order of the help. */
#ifndef PKV_CLI_COMMANDS_H
#define PKV_CLI_COMMANDS_H

#include "cli/command.h"

extern const pkv_command pkv_command_demo;
extern const pkv_command pkv_command_bench_attention;
extern const pkv_command pkv_command_bench_layer;
extern const pkv_command pkv_command_bench_model;
extern const pkv_command pkv_command_bench_paper;
extern const pkv_command pkv_command_bench_policy;
extern const pkv_command pkv_command_bench_sched;
extern const pkv_command pkv_command_bench_serve;
extern const pkv_command pkv_command_calibrate;
extern const pkv_command pkv_command_explain;
extern const pkv_command pkv_command_doctor;
extern const pkv_command pkv_command_healthcheck;
extern const pkv_command pkv_command_inspect;
extern const pkv_command pkv_command_run;
extern const pkv_command pkv_command_serve;
extern const pkv_command pkv_command_tokenize;

#endif
