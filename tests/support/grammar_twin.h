/* SPDX-License-Identifier: Apache-2.0 */
/* A grammar as it stands, carried out by trying everything: slow, simple enough to trust. */
#ifndef PKV_TEST_GRAMMAR_TWIN_H
#define PKV_TEST_GRAMMAR_TWIN_H

#include "support/grammar_drive.h"

/* Texts of at most this many bytes. */
#define TWIN_BYTES 24

/* Every rule has a text, and none comes to itself before any byte. */
bool twin_is_sound(const pkv_syntax *tree, bool *left_recursive);
grammar_verdict twin_check(const pkv_syntax *tree, const char *text, size_t bytes);

#endif
