/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/serve_log.h"

#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "base/json_memory.h"
#include "base/text.h"

#define LINE_BYTES 8192
#define TIME_BYTES 32

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static void stamp(char out[TIME_BYTES]) {
  struct timespec now = {0, 0};
  struct tm parts;
  char seconds[24] = "";
  (void)clock_gettime(CLOCK_REALTIME, &now);
  if (gmtime_r(&now.tv_sec, &parts) != NULL)
    (void)strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &parts);
  (void)snprintf(out, TIME_BYTES, "%s.%03dZ", seconds, (int)(now.tv_nsec / 1000000));
}

/* Bytes of the character at `at` that may stand in a line as it is; 0: its first byte may not. */
static size_t plain(const char *at, size_t left) {
  const unsigned char first = (unsigned char)*at;
  const size_t count = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (first < 0x20 || first == 0x7f || first == '\\' || count > left) return 0;
  if (!pkv_utf8_valid(at, count)) return 0;
  if (first == 0xc2 && (unsigned char)at[1] < 0xa0) return 0; /* C1 controls */
  if (count == 3 && memcmp(at, "\xe2\x80", 2) == 0 &&
      ((unsigned char)at[2] & 0xfe) == 0xa8) /* line and paragraph separators */
    return 0;
  return count;
}

static void escape(char *out, size_t bytes, const char *text) {
  size_t used = 0;
  const size_t length = strlen(text);
  for (size_t at = 0; at < length && used + 5 < bytes;) {
    const size_t count = plain(text + at, length - at);
    if (count > 0) {
      memcpy(out + used, text + at, count);
      used += count;
      at += count;
    } else {
      used += (size_t)snprintf(out + used, bytes - used, "\\x%02x", (unsigned char)text[at++]);
    }
  }
  out[used] = '\0';
}

/* Writes what the reader has room for: a pipe that is ready takes PIPE_BUF bytes at once. */
static bool write_ready(const char *line, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const size_t piece = bytes - at < PIPE_BUF ? bytes - at : PIPE_BUF;
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&out, 1, 0) != 1 || (out.revents & POLLOUT) == 0) return false;
    const ssize_t written = write(STDERR_FILENO, line + at, piece);
    if (written <= 0) return false;
    at += (size_t)written;
  }
  return true;
}

/* A log that nobody reads must not stop the server: its lines are left out, and counted. */
static void write_line(const char *line, size_t bytes, bool json) {
  static atomic_int lost;
  const int count = atomic_exchange(&lost, 0);
  if (count > 0) {
    char text[160], time[TIME_BYTES];
    stamp(time);
    const int n = snprintf(text, sizeof text,
                           json ? "{\"time\":\"%s\",\"level\":\"warn\",\"room\":\"server\","
                                  "\"message\":\"%d lines were not written\"}\n"
                                : "%s warn server: %d lines were not written\n",
                           time, count);
    if (!write_ready(text, (size_t)n)) (void)atomic_fetch_add(&lost, count);
  }
  if (!write_ready(line, bytes)) (void)atomic_fetch_add(&lost, 1);
}

static void write_json(json_t *record) {
  char line[LINE_BYTES];
  if (record == NULL) return;
  const size_t bytes = json_dumpb(record, line, sizeof line - 1,
                                  JSON_COMPACT | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(9));
  json_decref(record);
  if (bytes > sizeof line - 1) return;
  line[bytes] = '\n';
  write_line(line, bytes + 1, true);
}

void pkv_serve_log_line(void *user, pkv_log_level level, const char *room, const char *text) {
  const pkv_serve_log *const log = user;
  char time[TIME_BYTES], clean[4096], line[LINE_BYTES];
  if ((int)level < 0 || level > log->level) return;
  stamp(time);
  escape(clean, sizeof clean, text);
  if (log->json) {
    write_json(json_pack("{s:s, s:s, s:s, s:s}", "time", time, "level", level_names[level], "room",
                         room, "message", clean));
    return;
  }
  const int n =
      snprintf(line, sizeof line, "%s %s %s: %s\n", time, level_names[level], room, clean);
  if (n > 0 && (size_t)n < sizeof line) write_line(line, (size_t)n, false);
}

static json_t *access_json(const pkv_access *a, const char *time) {
  json_t *record = json_pack(
      "{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:b, s:b, s:f, s:i, s:i, s:i, s:s}", "time",
      time, "level", level_names[a->probe ? PKV_LOG_DEBUG : PKV_LOG_INFO], "room", "request", "id",
      a->id, "client", a->client, "method", a->method, "path", a->path, "key", (int)a->key,
      "status", (int)a->status, "stream", (int)a->streamed, "complete", (int)a->complete, "seconds",
      a->seconds, "prompt_tokens", (int)a->prompt_tokens, "cached_tokens", (int)a->cached_tokens,
      "generated_tokens", (int)a->generated_tokens, "finish", a->finish);
  if (record == NULL || a->ttft < 0.0) return record;
  pkv_json_set(&record, "queue_seconds", json_real(a->queue));
  pkv_json_set(&record, "ttft_seconds", json_real(a->ttft));
  return record;
}

void pkv_serve_log_access(const pkv_serve_log *log, const pkv_access *a) {
  char time[TIME_BYTES], line[LINE_BYTES], times[64] = "";
  const pkv_log_level level = a->probe ? PKV_LOG_DEBUG : PKV_LOG_INFO;
  if (log->level < level) return;
  stamp(time);
  if (log->json) {
    write_json(access_json(a, time));
    return;
  }
  if (a->ttft >= 0.0)
    (void)snprintf(times, sizeof times, " queue=%.4fs ttft=%.4fs", a->queue, a->ttft);
  const int n = snprintf(line, sizeof line,
                         "%s %s request: id=%s client=%s key=%d method=%s path=%s status=%d "
                         "stream=%d complete=%d seconds=%.4f prompt=%d cached=%d generated=%d "
                         "finish=%s%s\n",
                         time, level_names[level], a->id, a->client, (int)a->key, a->method,
                         a->path, (int)a->status, (int)a->streamed, (int)a->complete, a->seconds,
                         (int)a->prompt_tokens, (int)a->cached_tokens, (int)a->generated_tokens,
                         a->finish, times);
  if (n > 0 && (size_t)n < sizeof line) write_line(line, (size_t)n, false);
}
