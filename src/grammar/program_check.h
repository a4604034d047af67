/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of a program before it is carried out, each in time linear in its nodes. */
#ifndef PKV_GRAMMAR_PROGRAM_CHECK_H
#define PKV_GRAMMAR_PROGRAM_CHECK_H

#include "grammar/grammar_program.h"

/* Fills `need` of all nodes and `longest`. E_INVALID: a rule that comes to itself before any
   byte, or a root that no text satisfies. */
pkv_status pkv_program_check(pkv_program *program, pkv_error *err);

#endif
