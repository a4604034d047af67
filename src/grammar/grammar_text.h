/* SPDX-License-Identifier: Apache-2.0 */
/* Grammars as llama.cpp's users write them (GBNF), into a tree. */
#ifndef PKV_GRAMMAR_TEXT_H
#define PKV_GRAMMAR_TEXT_H

#include "base/limits.h"
#include "grammar/syntax.h"

/* The failure, with line and column, stays with the tree. */
void pkv_grammar_read(pkv_syntax *tree, const char *text, size_t bytes);

#endif
