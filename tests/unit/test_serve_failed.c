/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A server whose engine fails at work (R11, O14): the linker puts a device that is none under its
 * engine (support/fake_device.h), whose calls fail in the middle of an answer. The stream ends in
 * an error, requests that come too late are answered with one, and the server ends with the cause.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/engine_state.h"
#include "server/api_request.h"
#include "support/engine_drive.h"
#include "support/fake_device.h"
#include "support/small_llama.h"
#include "support/small_server.h"

#define WAIT_MS    60000
#define GOOD_CALLS 400         /* the prompt, and some tokens of the answer */
#define LONG_BYTES (100 << 10) /* more than the HTTP thread reads itself */

static small_server served;
static unsigned char *model_bytes;
static pkv_error server_error;
static pkv_status server_status;
static _Atomic bool ended, engine_failed;

pkv_status __wrap_pkv_engine_create(pkv_engine **out, const pkv_model *model,
                                    const pkv_engine_options *options, pkv_error *err);

/* In the engine's thread, which makes all the device's calls. */
pkv_status __wrap_pkv_engine_create(pkv_engine **out, const pkv_model *model,
                                    const pkv_engine_options *options, pkv_error *err) {
  pkv_executor *const executor = fake_device_create();
  const pkv_status status = pkv_engine_create_on(out, model, &executor, 1, options, err);
  fake_device_state.fail_at = fake_device_state.calls + GOOD_CALLS;
  fake_device_state.fail_on = true;
  return status;
}

bool __real_pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                         pkv_constraint_cache *cache, int32_t longest, pkv_api_kind kind,
                         const char *body, size_t bytes);
bool __wrap_pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                         pkv_constraint_cache *cache, int32_t longest, pkv_api_kind kind,
                         const char *body, size_t bytes);

/* A long body is not read before the engine has failed. */
bool __wrap_pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                         pkv_constraint_cache *cache, int32_t longest, pkv_api_kind kind,
                         const char *body, size_t bytes) {
  while (bytes >= LONG_BYTES && !engine_failed)
    (void)usleep(1000);
  return __real_pkv_api_read(out, error, model, cache, longest, kind, body, bytes);
}

static void *run_server(void *user) {
  pkv_serve_options o = small_server_options(&served);
  (void)user;
  o.engine = (pkv_engine_options)PKV_ENGINE_OPTIONS_INIT;
  o.engine.threads = 2;
  o.engine.device = PKV_DEVICE_CUDA;
  o.engine.batch_invariant = 0;
  o.drain_s = WAIT_MS / 1000;
  o.max_body = 2 * LONG_BYTES;
  server_status = pkv_serve(&o, &server_error);
  ended = true;
  return NULL;
}

static void open_model(void) {
  const small_llama t = drive_device_llama(2, 64);
  served.model = drive_model(&model_bytes, &t);
}

static void send_all(int fd, const char *text, size_t bytes) {
  for (ssize_t sent = 0; bytes > 0; text += sent, bytes -= (size_t)sent) {
    sent = send(fd, text, bytes, MSG_NOSIGNAL);
    assert_true(sent > 0);
  }
}

static int say(const char *text) {
  const int fd = small_server_dial(&served, WAIT_MS);
  assert_true(fd >= 0);
  send_all(fd, text, strlen(text));
  return fd;
}

/* All that comes until the end. */
static void hear(int fd, char *out, size_t room) {
  size_t total = 0;
  for (ssize_t got = 1; got > 0 && total + 1 < room; total += got > 0 ? (size_t)got : 0)
    got = recv(fd, out + total, room - 1 - total, 0);
  out[total] = '\0';
  (void)close(fd);
}

static void expect(const char *text, const char *part) {
  if (strstr(text, part) == NULL) fail_msg("no '%s' in '%s'", part, text);
}

#define HEAD "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"

static int say_long(void) {
  static char body[LONG_BYTES + 1];
  static const char fields[] = "{\"prompt\":\"a b\",\"max_tokens\":2}";
  char head[200];
  memset(body, ' ', LONG_BYTES);
  memcpy(body, fields, sizeof fields - 1);
  (void)snprintf(head, sizeof head, HEAD "Content-Length: %d\r\n\r\n", LONG_BYTES);
  const int fd = say(head);
  send_all(fd, body, LONG_BYTES);
  return fd;
}

static void test_engine_fails(void **state) {
  (void)state;
  static char text[65536];
  static const char end[] = "Connection: close\r\n\r\n";
  pthread_t thread;
  open_model();
  assert_int_equal(pthread_create(&thread, NULL, run_server, NULL), 0);
  assert_true(small_server_ready(&served, &ended, 20000, WAIT_MS));
  /* Two requests that have begun when the engine fails, and end behind that. */
  const int late = say_long(), health = say("GET /health HTTP/1.1\r\nHost: localhost\r\n");
  const int stream = say(HEAD "Content-Length: 65\r\n\r\n{\"prompt\":\"a b\",\"max_tokens\":200,"
                              "\"stream\":true,\"ignore_eos\":true}");
  hear(stream, text, sizeof text);
  engine_failed = true;
  expect(text, "HTTP/1.1 200");
  expect(text, "\"text\":");
  expect(text, "data: {\"error\":");
  expect(text, "the answer could not be finished");
  assert_null(strstr(text, "[DONE]"));
  assert_null(strstr(text, "finish_reason\":\"")); /* of no choice */
  send_all(health, end, sizeof end - 1);
  hear(health, text, sizeof text);
  expect(text, "HTTP/1.1 503");
  expect(text, "the engine has failed");
  hear(late, text, sizeof text);
  expect(text, "HTTP/1.1 500");
  expect(text, "the engine has failed");
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(server_status, PKV_E_DEVICE);
  assert_true(server_error.text[0] != '\0');
  assert_int_equal(fake_device_state.live, 0);
  pkv_model_close(served.model);
  gguf_build_drop(model_bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_engine_fails)};
  sigset_t signals;
  (void)sigemptyset(&signals);
  (void)sigaddset(&signals, SIGTERM);
  (void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
  return cmocka_run_group_tests(tests, NULL, NULL);
}
