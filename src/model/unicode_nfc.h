/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Normalization form C of untrusted text in linear time: marks of one character are put in order by
 * counting, so that a long row of them in the wrong order costs no more than any other text.
 */
#ifndef PKV_MODEL_UNICODE_NFC_H
#define PKV_MODEL_UNICODE_NFC_H

#include "base/text.h"

/* Appends the normal form of text to out. Bytes that are not UTF-8 are copied, and nothing is
   composed across them. */
pkv_status pkv_nfc(pkv_buffer *out, const char *text, size_t bytes, pkv_error *err);

#endif
