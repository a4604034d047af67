/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the safetensors reader: whatever the bytes, opening fails with a text, or the
 * tensors lie one behind the other from the header to the end of the file. The target aborts on a
 * broken promise.
 */
#include "model/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_safetensors *file = NULL;
  pkv_error err = {0};
  const pkv_status status = pkv_safetensors_open_memory(&file, data, size, NULL, &err);
  if (status != PKV_OK) {
    REQUIRE(file == NULL && err.status == status && err.text[0] != '\0');
    REQUIRE(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED || status == PKV_E_LIMIT);
    for (const char *c = err.text; *c != '\0'; c++)
      REQUIRE(*c >= 0x20 && *c < 0x7f);
    return 0;
  }
  size_t header = 0;
  for (unsigned i = 0; i < 8; i++)
    header |= (size_t)data[i] << 8 * i;
  const uint8_t *at = data + 8 + header;
  for (size_t i = 0; i < pkv_safetensors_count(file); i++) {
    const pkv_gguf_tensor *t = pkv_safetensors_at(file, i);
    int64_t block = 0, block_bytes = 0;
    REQUIRE(t->data == at && t->data == data + t->offset);
    REQUIRE(t->bytes > 0 && t->bytes <= (size_t)(data + size - at));
    REQUIRE(t->name.size > 0 && strlen(t->name.data) == t->name.size);
    REQUIRE(pkv_gguf_type_info(t->type, NULL, &block, &block_bytes) && block == 1);
    REQUIRE((uint64_t)(t->extent[0] * t->extent[1] * t->extent[2] * t->extent[3] * block_bytes) ==
            t->bytes);
    sink = sink + t->data[0] + t->data[t->bytes - 1];
    at += t->bytes;
  }
  REQUIRE(at == data + size);
  pkv_safetensors_close(file);
  return 0;
}
