/* SPDX-License-Identifier: Apache-2.0 */
/* A template's variables from JSON. */
#ifndef PKV_TESTS_SUPPORT_JSON_VARS_H
#define PKV_TESTS_SUPPORT_JSON_VARS_H

#include <jansson.h>

#include "template/template.h"

/* A tree on the heap that borrows texts and keys from json. Texts under the name "bos_token" and
   "eos_token", and roles, are trusted. */
pkv_template_value json_vars(const json_t *json);
void json_vars_free(pkv_template_value *v);

#endif
