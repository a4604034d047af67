/* SPDX-License-Identifier: Apache-2.0 */
#include "server/api_keys.h"

#include <string.h>
#include <strings.h>

#include "base/status.h"
#include "base/text.h"

#define FILE_BYTES ((size_t)256 << 10)
#define USER_BYTES 256 /* of the name that a browser asks for beside a password */
#define KEYS_BYTES ((size_t)PKV_MAX_KEYS * PKV_KEY_BYTES)

/* Printable ASCII without blanks: what can stand behind "Bearer ". */
static bool is_key(const char *line, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (line[i] <= ' ' || line[i] > '~') return false;
  return bytes < PKV_KEY_BYTES;
}

static pkv_status take_lines(pkv_api_keys *out, const pkv_buffer *text, const char *path,
                             pkv_error *err) {
  int line = 1;
  for (size_t at = 0; at < text->size; line++) {
    const char *const begin = text->data + at;
    const char *const end = memchr(begin, '\n', text->size - at);
    const size_t whole = end != NULL ? (size_t)(end - begin) : text->size - at;
    const size_t bytes = whole > 0 && begin[whole - 1] == '\r' ? whole - 1 : whole;
    at += whole + 1;
    if (bytes == 0 || begin[0] == '#') continue;
    PKV_CHECK(err, is_key(begin, bytes), PKV_E_FORMAT,
              "%s: line %d is no key (1 to %d characters of ASCII, no blanks)", path, line,
              PKV_KEY_BYTES - 1);
    PKV_CHECK(err, out->count < PKV_MAX_KEYS, PKV_E_LIMIT, "%s: there are more than %d keys", path,
              PKV_MAX_KEYS);
    memcpy(out->keys[out->count++], begin, bytes);
  }
  PKV_CHECK(err, out->count > 0, PKV_E_FORMAT, "%s: there is no key", path);
  return PKV_OK;
}

static pkv_status make_room(pkv_api_keys *keys, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  keys->count = 0;
  keys->keys = pkv_alloc_zeroed(&a, PKV_MAX_KEYS, PKV_KEY_BYTES);
  PKV_CHECK(err, keys->keys != NULL, PKV_E_NOMEM, "no memory for keys");
  return PKV_OK;
}

pkv_status pkv_api_keys_add(pkv_api_keys *keys, const char *list, pkv_error *err) {
  int number = 1;
  if (keys->keys == NULL) PKV_TRY(make_room(keys, err));
  for (const char *at = list; *at != '\0'; number++) {
    const size_t bytes = strcspn(at, ",");
    PKV_CHECK(err, bytes > 0 && is_key(at, bytes), PKV_E_FORMAT,
              "key %d of the list is none (1 to %d characters of ASCII, no blanks)", number,
              PKV_KEY_BYTES - 1);
    PKV_CHECK(err, keys->count < PKV_MAX_KEYS, PKV_E_LIMIT, "there are more than %d keys",
              PKV_MAX_KEYS);
    memcpy(keys->keys[keys->count++], at, bytes);
    at += bytes + (at[bytes] == ',');
  }
  PKV_CHECK(err, keys->count > 0, PKV_E_FORMAT, "there is no key in the list");
  return PKV_OK;
}

pkv_status pkv_api_keys_read(pkv_api_keys *out, const char *path, pkv_error *err) {
  pkv_buffer text;
  PKV_TRY(make_room(out, err));
  pkv_buffer_init(&text, FILE_BYTES, NULL);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK) status = take_lines(out, &text, path, err);
  pkv_buffer_deinit(&text);
  if (status != PKV_OK) pkv_api_keys_free(out);
  return status;
}

void pkv_api_keys_free(pkv_api_keys *keys) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, keys->keys, KEYS_BYTES);
  *keys = (pkv_api_keys){0, NULL};
}

/* The bytes of base64, its padding there or not; SIZE_MAX: it is none, or has more than `room`. */
static size_t decode(char *out, size_t room, const char *text) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const size_t length = strcspn(text, "=");
  const size_t padding = strlen(text + length);
  size_t count = 0;
  uint32_t bits = 0;
  if (strspn(text + length, "=") != padding || length % 4 == 1) return SIZE_MAX;
  if (padding != 0 && (padding > 2 || (length + padding) % 4 != 0)) return SIZE_MAX;
  for (size_t i = 0; i < length; i++) {
    const char *const digit = strchr(digits, text[i]);
    if (digit == NULL) return SIZE_MAX;
    bits = bits << 6 | (uint32_t)(digit - digits);
    if (i % 4 == 0) continue;
    if (count == room) return SIZE_MAX;
    out[count++] = (char)(unsigned char)(bits >> (6u - 2u * (unsigned)(i % 4)) & 0xffu);
  }
  return count;
}

/* What stands behind the scheme's name; NULL: it is another scheme. */
static const char *behind(const char *header, const char *scheme) {
  const size_t bytes = strlen(scheme);
  return strncasecmp(header, scheme, bytes) == 0 ? header + bytes : NULL;
}

/* The key in the value of Authorization; NULL: there is none. */
static const char *given_key(char *room, size_t bytes, const char *header) {
  const char *const bearer = behind(header, "Bearer ");
  const char *const basic = behind(header, "Basic ");
  if (bearer != NULL || basic == NULL) return bearer;
  const size_t count = decode(room, bytes - 1, basic);
  if (count == SIZE_MAX || memchr(room, '\0', count) != NULL) return NULL;
  room[count] = '\0';
  const char *const colon = strchr(room, ':');
  return colon != NULL ? colon + 1 : NULL;
}

bool pkv_api_keys_unasked(const char *header) {
  return header != NULL && behind(header, "Basic ") != NULL;
}

int32_t pkv_api_keys_find(const pkv_api_keys *keys, const char *header) {
  char room[USER_BYTES + PKV_KEY_BYTES], given[PKV_KEY_BYTES] = "";
  uint32_t found = 0;
  if (keys->count == 0) return 0;
  const char *const key = header != NULL ? given_key(room, sizeof room, header) : NULL;
  const size_t bytes = key != NULL ? strlen(key) : 0;
  if (bytes < 1 || bytes >= sizeof given) return -1;
  memcpy(given, key, bytes);
  for (int32_t i = 0; i < keys->count; i++) {
    unsigned differ = 0;
    for (size_t j = 0; j < sizeof given; j++)
      differ |= (unsigned)((unsigned char)given[j] ^ (unsigned char)keys->keys[i][j]);
    const uint32_t same = 0u - ((differ - 1u) >> 31); /* all ones where nothing differs */
    found |= same & (uint32_t)(i + 1);
  }
  return found != 0u ? (int32_t)found : -1;
}
