/* SPDX-License-Identifier: Apache-2.0 */
/* Escapes by code point; the ranges are those of Unicode's control and format characters. */
#include "cli/safe_text.h"

#include <stdlib.h>

/* Bytes of the character at the start of well-formed text; 0 where it is malformed. */
static size_t character_bytes(const char *bytes, size_t count) {
  for (size_t n = 1; n <= 4 && n <= count; n++)
    if (pkv_utf8_valid(bytes, n)) return n;
  return 0;
}

static uint32_t code_point(const char *bytes, size_t n) {
  const unsigned char *p = (const unsigned char *)bytes;
  if (n == 1) return p[0];
  uint32_t code = p[0] & (0xffu >> (n + 1));
  for (size_t i = 1; i < n; i++)
    code = code << 6 | (p[i] & 0x3fu);
  return code;
}

/* Characters that show nothing, move the cursor, or turn the direction of what follows. */
static bool hides(uint32_t code) {
  static const struct {
    uint32_t first, last;
  } ranges[] = {{0x00, 0x1f},     {0x7f, 0x9f},     {0xad, 0xad},      {0x61c, 0x61c},
                {0x180e, 0x180e}, {0x200b, 0x200f}, {0x2028, 0x202e},  {0x2060, 0x206f},
                {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe0fff}};
  for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
    if (code >= ranges[i].first && code <= ranges[i].last) return true;
  return false;
}

static pkv_status append_one(pkv_buffer *out, const char *bytes, size_t n, pkv_error *err) {
  if (n == 0) return pkv_buffer_printf(out, err, "\\x%02x", (unsigned)(unsigned char)bytes[0]);
  const uint32_t code = code_point(bytes, n);
  switch (code) {
  case '\\':
    return pkv_buffer_append(out, "\\\\", 2, err);
  case '\n':
    return pkv_buffer_append(out, "\\n", 2, err);
  case '\r':
    return pkv_buffer_append(out, "\\r", 2, err);
  case '\t':
    return pkv_buffer_append(out, "\\t", 2, err);
  default:
    break;
  }
  if (!hides(code)) return pkv_buffer_append(out, bytes, n, err);
  return n == 1 ? pkv_buffer_printf(out, err, "\\x%02x", (unsigned)code)
                : pkv_buffer_printf(out, err, "\\u{%x}", (unsigned)code);
}

pkv_status pkv_safe_append(pkv_buffer *out, const char *bytes, size_t count, pkv_error *err) {
  for (size_t at = 0; at < count;) {
    const size_t n = character_bytes(bytes + at, count - at);
    PKV_TRY(append_one(out, bytes + at, n, err));
    at += n > 0 ? n : 1;
  }
  return PKV_OK;
}

json_t *pkv_safe_json(const char *bytes, size_t count) {
  json_t *value = json_stringn(bytes, count);
  if (value != NULL) return value;
  pkv_buffer repaired;
  pkv_buffer_init(&repaired, SIZE_MAX / 4, NULL);
  pkv_status status = PKV_OK;
  for (size_t at = 0; at < count && status == PKV_OK;) {
    const size_t n = character_bytes(bytes + at, count - at);
    status = n > 0 ? pkv_buffer_append(&repaired, bytes + at, n, NULL)
                   : pkv_buffer_append(&repaired, "\xef\xbf\xbd", 3, NULL);
    at += n > 0 ? n : 1;
  }
  if (status == PKV_OK) value = json_stringn(repaired.data, repaired.size);
  pkv_buffer_deinit(&repaired);
  return value;
}
