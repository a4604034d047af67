/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes wrong on a device, and whom it may touch: padded rows of a graph, too little memory at
 * the start, a runtime whose calls fail, and a device that fails under a server.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/cuda/dense_launch.h"
#include "base/clock.h"
#include "gpu/gpu_case.h"
#include "gpu/gpu_fault_shim.h"
#include "model/device_forward_parts.h"
#include "server/serve.h"
#include "support/engine_drive.h"
#include "support/small_llama.h"

enum { REQUESTS = 8, LONGEST = 64, VOCAB = 512 };
enum { TELLS = 3, HEARS = 4 }; /* descriptors between a child's process and the test's */

static small_llama small_shape(int32_t vocab) {
  small_llama t = SMALL_LLAMA_INIT;
  t.layers = 2;
  t.width = 256;
  t.feed_forward = 512;
  t.query_heads = 4;
  t.kv_heads = 2;
  t.head_dim = 64;
  t.weight_type = 1;
  t.context = 512;
  t.vocab = vocab;
  t.seed = 5;
  return t;
}

static unsigned char *small_model(pkv_model **model, int32_t vocab) {
  const small_llama t = small_shape(vocab);
  size_t size = 0;
  unsigned char *const bytes = small_llama_bytes(&t, &size);
  OK(pkv_model_open_memory(model, bytes, size, NULL, err));
  return bytes;
}

static pkv_engine_options device_options(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.max_rows = REQUESTS;
  o.max_seq_len = LONGEST;
  o.cache_tokens = 1024;
  o.device = PKV_DEVICE_CUDA;
  o.batch_invariant = 0;
  o.prefix_sharing = 0;
  return o;
}

/* ------------------------------------------------------------------ padded rows */

enum { PAGE = 16, PAGES = 64, MOST = 16, LENGTH = 40 };

typedef struct forward_case {
  pkv_model *model;
  pkv_device_weights *weights;
  pkv_device_forward *forward;
  pkv_cache caches[2];
  size_t bytes; /* of the cache */
  void *storage;
  int32_t table[MOST][PAGES];
} forward_case;

static void open_forward(forward_case *c) {
  pkv_device_forward_options o = {0};
  OK(pkv_device_weights_create(&c->weights, c->model, gpu, MOST, 0, NULL, err));
  o.max_tokens = o.max_logits = o.max_rows[0] = MOST;
  o.max_seq_len = PAGES * PAGE;
  o.page_tokens = PAGE;
  o.max_pages = PAGES;
  o.sampled_vocab = c->model->hp.vocab;
  o.kv_dtype = c->weights->act;
  o.shares = true;
  const pkv_device_rank rank = {c->model, c->weights};
  OK(pkv_device_forward_create(&c->forward, &rank, 1, &o, err));
}

static void attach(forward_case *c) {
  const pkv_hparams *hp = &c->model->hp;
  const int64_t page = (int64_t)PAGE * hp->kv_heads * hp->head_dim, each = page * PAGES;
  c->bytes = (size_t)(2 * hp->layers * each) * 2;
  OK(pkv_device_alloc(&c->storage, gpu, c->bytes, err));
  const pkv_dense_random_params any =
      pkv_dense_random_run(c->storage, c->weights->act, (int64_t)c->bytes / 2, 3, 1.0f);
  OK(gpu->dense->weight_random(gpu, &any, NULL, err));
  OK(pkv_device_synchronize(gpu, NULL, err));
  for (int32_t i = 0; i < hp->layers; i++) {
    pkv_cache *const k = &c->caches[i];
    *k = (pkv_cache)PKV_CACHE_INIT;
    k->dtype = c->weights->act;
    k->pages = PAGES;
    k->page_tokens = PAGE;
    k->kv_heads = hp->kv_heads;
    k->head_dim = hp->head_dim;
    k->k_scale = k->v_scale = 1.0f;
    k->k_token_stride = k->v_token_stride = hp->head_dim;
    k->k_head_stride = k->v_head_stride = PAGE * hp->head_dim;
    k->k_page_stride = k->v_page_stride = page;
    k->k = (uint16_t *)c->storage + 2 * i * each;
    k->v = (uint16_t *)k->k + each;
  }
  OK(pkv_device_forward_attach(c->forward, c->caches, err));
}

/* A row has one page of all, one of its own, and page r with its newest token, number LENGTH. */
static void decode(forward_case *c, int32_t rows, bool shares) {
  int32_t ids[MOST], positions[MOST], seq_len[MOST], logit_tokens[MOST], sampled[MOST];
  int64_t slots[MOST];
  for (int32_t r = 0; r < rows; r++) {
    c->table[r][0] = 3 * MOST; /* of all */
    c->table[r][1] = MOST + r;
    c->table[r][2] = r;
    ids[r] = 10 + r;
    positions[r] = LENGTH - 1;
    seq_len[r] = LENGTH;
    slots[r] = (int64_t)r * PAGE + (LENGTH - 1) % PAGE;
    logit_tokens[r] = r;
  }
  const pkv_forward_group group = {.block_table = c->table[0],
                                   .block_table_stride = PAGES,
                                   .max_pages = PAGES,
                                   .rows = rows,
                                   .q_len = 1,
                                   .seq_len = seq_len,
                                   .shares = shares};
  const pkv_forward_batch batch = {.tokens = rows,
                                   .ids = ids,
                                   .positions = positions,
                                   .slots = slots,
                                   .groups = &group,
                                   .group_count = 1,
                                   .logit_tokens = logit_tokens,
                                   .logit_count = rows,
                                   .sampled = sampled};
  OK(pkv_device_forward_run(c->forward, &batch, err));
  for (int32_t r = 0; r < rows; r++)
    assert_in_range(sampled[r], 0, c->model->hp.vocab - 1);
}

/* Whether byte `at` of the cache belongs to the newest token of one of the rows. */
static bool is_written(const forward_case *c, size_t at, int32_t rows) {
  const pkv_hparams *hp = &c->model->hp;
  const size_t head = (size_t)hp->head_dim * 2, page = (size_t)hp->kv_heads * PAGE * head;
  const size_t in_half = at % (PAGES * page), token = in_half % page / head % PAGE;
  return in_half / page < (size_t)rows && token == (LENGTH - 1) % PAGE;
}

/* Batches whose rows are fewer than their graph's: nothing but their own tokens' places changes. */
static void test_padded_rows(void **state) {
  (void)state;
  static const int32_t counts[] = {1, 3, 5, 9, 11, 16};
  forward_case c = {0};
  NEED_GPU();
  unsigned char *const bytes = small_model(&c.model, VOCAB);
  open_forward(&c);
  attach(&c);
  unsigned char *const before = malloc(c.bytes), *const after = malloc(c.bytes);
  for (size_t i = 0; i < COUNT(counts); i++)
    for (int shares = 0; shares < 2; shares++) {
      size_t changed = 0;
      gpu_copy(before, c.storage, c.bytes);
      decode(&c, counts[i], shares != 0);
      gpu_copy(after, c.storage, c.bytes);
      for (size_t b = 0; b < c.bytes; b++) {
        if (before[b] == after[b]) continue;
        if (!is_written(&c, b, counts[i]))
          fail_msg("%d rows, shares %d: byte %zu of the cache changed", (int)counts[i], shares, b);
        changed++;
      }
      if (shares == 0 && i == 0) assert_true(changed > 0);
    }
  free(before);
  free(after);
  pkv_device_forward_destroy(c.forward);
  pkv_device_free(gpu, c.storage);
  pkv_device_weights_destroy(c.weights);
  pkv_model_close(c.model);
  gguf_build_drop(bytes);
}

/* ------------------------------------------------------------------ memory */

static void refused(const pkv_model *model, const pkv_engine_options *o) {
  pkv_engine *engine = NULL;
  pkv_error why = {0};
  const pkv_status status = pkv_engine_create(&engine, model, o, &why);
  printf("%s\n", why.text);
  assert_int_equal(status, PKV_E_NOMEM);
  assert_non_null(strstr(why.text, "missing"));
  assert_null(engine);
}

/* Too little at the start: how much is missing is said, and nothing stays behind. */
static void test_too_little_memory(void **state) {
  (void)state;
  pkv_model *model = NULL;
  size_t bytes = 0, again = 0;
  void *hog = NULL;
  NEED_GPU();
  unsigned char *const file = small_model(&model, VOCAB);
  pkv_engine_options o = device_options();
  pkv_engine *const engine = drive_engine(model, &o); /* what libraries keep is there then */
  drive_finish(engine);
  OK(gpu->dense->free_bytes(&bytes, gpu, err));
  o.cache_tokens = (int64_t)1 << 38;
  refused(model, &o);
  OK(pkv_device_alloc(&hog, gpu, bytes - ((size_t)200 << 20), err));
  o.cache_tokens = 0;
  refused(model, &o);
  o.cache_tokens = 1024;
  refused(model, &o);
  pkv_device_free(gpu, hog);
  OK(gpu->dense->free_bytes(&again, gpu, err));
  assert_true(again + ((size_t)64 << 20) > bytes);
  pkv_model_close(model);
  gguf_build_drop(file);
}

/* A process that takes all but a little of the memory, until its input ends. */
int gpu_hog(void) {
  static const size_t steps[] = {(size_t)1 << 33, (size_t)1 << 28, (size_t)1 << 23};
  char byte;
  void *p = NULL;
  pkv_executor *executor = NULL;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.device = PKV_DEVICE_CUDA;
  if (pkv_executor_create(&executor, &options, NULL) != PKV_OK) return 9;
  for (size_t i = 0; i < COUNT(steps); i++)
    while (pkv_device_alloc(&p, executor, steps[i], NULL) == PKV_OK)
      continue;
  if (write(TELLS, "x", 1) != 1) return 9;
  return read(HEARS, &byte, 1) == 0 ? 0 : 9;
}

/* An engine in a process of its own: 0 when there is one, 1 when it is refused with a text. */
int gpu_one_engine(void) {
  pkv_model *model = NULL;
  pkv_engine *engine = NULL;
  pkv_error why = {0};
  unsigned char *const bytes = small_model(&model, VOCAB);
  const pkv_engine_options o = device_options();
  const pkv_status status = pkv_engine_create(&engine, model, &o, &why);
  if (status != PKV_OK) printf("refused: %s\n", why.text);
  pkv_engine_destroy(engine);
  pkv_model_close(model);
  gguf_build_drop(bytes);
  if (status == PKV_OK) return 0;
  return why.status == status && why.text[0] != '\0' ? 1 : 8;
}

/* ------------------------------------------------------------------ calls that fail */

enum { LIVES_S = 12 };

static void submit_three(pkv_engine *engine, drive_answer *answer) {
  static int32_t prompt[20];
  pkv_request r = PKV_REQUEST_INIT;
  drive_prompt(prompt, 20, VOCAB, 3);
  r.prompt = prompt;
  r.prompt_tokens = 20;
  r.max_tokens = 3;
  r.ignore_end = 1;
  drive_submit(engine, &r, answer);
}

static bool known_failure(const pkv_error *why) {
  return (why->status == PKV_E_DEVICE || why->status == PKV_E_NOMEM ||
          why->status == PKV_E_UNSUPPORTED) &&
         why->text[0] != '\0';
}

/* An engine's life in which this call fails, once or with all after it: no engine, or steps that
   say so; then, with a runtime that works again, the same request and the next one are right. */
static bool life_with_failure(const pkv_model *model, int at, bool on, const drive_answer *right) {
  static drive_answer first, next;
  const pkv_engine_options o = device_options();
  pkv_engine *engine = NULL;
  pkv_error why = {0};
  size_t count = 0;
  gpu_faults = (gpu_fault_state){0, at, on};
  const pkv_status status = pkv_engine_create(&engine, model, &o, &why);
  if (status != PKV_OK) {
    gpu_faults = (gpu_fault_state){0, 0, false};
    if (!known_failure(&why)) fail_msg("call %d: status %d, \"%s\"", at, (int)status, why.text);
    return false;
  }
  submit_three(engine, &first);
  for (int i = 0; i < 6 && pkv_engine_pending(engine) > 0; i++)
    if (drive_try_step(&count, engine, &why) != PKV_OK && !known_failure(&why))
      fail_msg("call %d: a step with status %d, \"%s\"", at, (int)why.status, why.text);
  gpu_faults = (gpu_fault_state){0, 0, false};
  (void)drive_all(engine, 1000);
  submit_three(engine, &next);
  (void)drive_all(engine, 1000);
  drive_equal(right, &first, "the same request");
  drive_equal(right, &next, "the next request");
  drive_finish(engine);
  return true;
}

static int common_divisor(int a, int b) {
  return b == 0 ? a : common_divisor(b, a % b);
}

/* As many of them as go in some seconds, spread over the life: see the printed line. */
static void test_calls_of_a_life(void **state) {
  (void)state;
  static drive_answer right;
  pkv_model *model = NULL;
  size_t before = 0, after = 0;
  int made = 0, lives = 0;
  NEED_GPU();
  unsigned char *const file = small_model(&model, VOCAB);
  const pkv_engine_options o = device_options();
  for (int i = 0; i < 2; i++) { /* what libraries set up once is not of a life */
    gpu_faults = (gpu_fault_state){0, 0, false};
    pkv_engine *const engine = drive_engine(model, &o);
    submit_three(engine, &right);
    (void)drive_all(engine, 1000);
    drive_finish(engine);
  }
  const int calls = gpu_faults.calls;
  assert_true(calls > 50);
  OK(gpu->dense->free_bytes(&before, gpu, err));
  int step = calls * 5 / 8;
  while (common_divisor(calls, step) != 1)
    step++;
  const int64_t end = pkv_clock_ns() + (int64_t)LIVES_S * 1000000000;
  for (int i = 0; i < calls && pkv_clock_ns() < end; i++)
    for (int on = 0; on < 2; on++, lives++)
      made += life_with_failure(model, 1 + (int)((int64_t)i * step % calls), on != 0, &right);
  OK(gpu->dense->free_bytes(&after, gpu, err));
  printf("%d calls of the runtime in a life, %d lives with one that fails: %d engines were made; "
         "%lld KiB more are taken\n",
         calls, lives, made, ((long long)before - (long long)after) / 1024);
  assert_true(made > 0 && made < lives);
  assert_true(after + ((size_t)16 << 20) > before);
  pkv_model_close(model);
  gguf_build_drop(file);
}

/* ------------------------------------------------------------------ a server whose device fails */

static pkv_model *served;

static pkv_status load_served(void *user, pkv_model **out, pkv_error *why) {
  (void)user;
  (void)why;
  *out = served;
  return PKV_OK;
}

static void tell_port(void *user, int32_t port) {
  (void)user;
  if (write(TELLS, &port, sizeof port) != (ssize_t)sizeof port) _exit(9);
}

/* Waits for a byte, then writes where there is no memory: the device is lost to this process. */
static void *break_device(void *user) {
  char byte;
  (void)user;
  if (read(HEARS, &byte, 1) == 1) {
    const pkv_dense_random_params nowhere =
        pkv_dense_random_run((void *)(uintptr_t)4096, PKV_DTYPE_F16, 4096, 1, 1.0f);
    const cudaError_t e = pkv_dense_launch_random(&nowhere, NULL);
    fprintf(stderr, "broken: %d\n", (int)e);
  }
  return NULL;
}

int gpu_broken_server(void) {
  pkv_error why = {0};
  pthread_t breaker;
  const pkv_serve_options o = {.host = "127.0.0.1",
                               .name = "small",
                               .engine = device_options(),
                               .max_body = 65536,
                               .max_connections = 16,
                               .header_s = 30,
                               .body_s = 30,
                               .idle_s = 30,
                               .stall_s = 30,
                               .drain_s = 30,
                               .progress_s = 60,
                               .load = load_served,
                               .listening = tell_port};
  (void)small_model(&served, VOCAB);
  if (pthread_create(&breaker, NULL, break_device, NULL) != 0) return 9;
  const pkv_status status = pkv_serve(&o, &why);
  fprintf(stderr, "the server ended: %s\n", why.text);
  /* As the command does, but that a lost device is not cleaned up after. */
  _exit(status == PKV_OK ? 0 : status == PKV_E_DEVICE ? 3 : 4);
}

/* The status of one request, 0 where no answer came. */
static int ask(int32_t port, const char *text) {
  char got[4096];
  size_t count = 0;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const struct timeval patience = {10, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (connect(fd, (struct sockaddr *)&to, sizeof to) == 0 &&
      send(fd, text, strlen(text), MSG_NOSIGNAL) > 0) {
    ssize_t part = 1;
    while (part > 0 && count + 1 < sizeof got) {
      part = recv(fd, got + count, sizeof got - 1 - count, 0);
      if (part > 0) count += (size_t)part;
    }
  }
  (void)close(fd);
  got[count] = '\0';
  return count > 12 ? (int)strtol(got + 9, NULL, 10) : 0;
}

static const char ready[] = "GET /ready HTTP/1.0\r\n\r\n";
static const char completion[] =
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    "Content-Length: 48\r\n\r\n{\"prompt\":\"a b\",\"max_tokens\":20,\"temperature\":0}";

/* This program again, with that argument and the two descriptors. */
static pid_t start_child(const char *what, int *tell, int *hear) {
  int up[2], down[2];
  assert_int_equal(pipe(up), 0);
  assert_int_equal(pipe(down), 0);
  const pid_t child = fork();
  if (child == 0) {
    (void)dup2(down[0], 200); /* out of the way of the places they go to */
    (void)dup2(up[1], 201);
    (void)dup2(201, TELLS);
    (void)dup2(200, HEARS);
    (void)close(down[1]); /* its input ends with the test */
    (void)execl("/proc/self/exe", "gpu_tests", what, (char *)NULL);
    _exit(9);
  }
  (void)close(up[1]);
  (void)close(down[0]);
  *tell = down[1];
  *hear = up[0];
  return child;
}

static pid_t start_server(int *tell, int32_t *port) {
  int hear = -1;
  const pid_t child = start_child("--broken-server", tell, &hear);
  struct pollfd wait = {.fd = hear, .events = POLLIN};
  assert_int_equal(poll(&wait, 1, 60000), 1);
  assert_int_equal(read(hear, port, sizeof *port), sizeof *port);
  (void)close(hear);
  return child;
}

/* The status it ended with; a server that does not end in time is ended, and -1. */
static int end_of(pid_t child, double *seconds) {
  const int64_t begin = pkv_clock_ns();
  int status = 0;
  pid_t done = 0;
  while (done == 0 && pkv_clock_ns() - begin < INT64_C(20000000000)) {
    done = waitpid(child, &status, WNOHANG);
    (void)usleep(5000);
  }
  *seconds = (double)(pkv_clock_ns() - begin) * 1e-9;
  if (done == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
  (void)kill(child, SIGKILL);
  (void)waitpid(child, &status, 0);
  return -1;
}

/* Others have the memory: not even the driver's own finds room, or what follows does not. An engine
   is refused with a text, and there is one as soon as they are gone. */
static void test_memory_of_others(void **state) {
  (void)state;
  int tell = -1, hear = -1, other = -1, unheard = -1;
  double seconds = 0.0;
  NEED_GPU();
  const pid_t hog = start_child("--hog", &tell, &hear);
  struct pollfd wait = {.fd = hear, .events = POLLIN};
  const int told = poll(&wait, 1, 60000);
  const int without =
      told == 1 ? end_of(start_child("--one-engine", &other, &unheard), &seconds) : -3;
  (void)close(tell);
  (void)close(hear);
  const int hogged = end_of(hog, &seconds);
  assert_int_equal(told, 1);
  assert_int_equal(hogged, 0);
  assert_int_equal(without, 1);
  (void)close(other);
  (void)close(unheard);
  assert_int_equal(end_of(start_child("--one-engine", &other, &unheard), &seconds), 0);
  (void)close(other);
  (void)close(unheard);
}

/* A server over a device that fails: the next step ends its readiness, requests get an error, and
   the process ends with a status that is not 0. */
static void test_device_lost(void **state) {
  (void)state;
  int tell = -1, answered = 0;
  int32_t port = 0;
  double seconds = 0.0;
  NEED_GPU();
  const pid_t child = start_server(&tell, &port);
  for (int i = 0; i < 300 && answered != 200; i++) {
    answered = ask(port, ready);
    if (answered != 200) (void)usleep(100000);
  }
  if (answered != 200) {
    (void)end_of(child, &seconds);
    fail_msg("the server was not ready in 30 s");
  }
  assert_int_equal(ask(port, completion), 200);
  assert_int_equal(write(tell, "x", 1), 1);
  (void)usleep(300000);
  const int status = ask(port, completion);
  const int after = ask(port, ready);
  const int end = end_of(child, &seconds);
  printf("a request got %d, readiness %d, the process ended with %d after %.2f s\n", status, after,
         end, seconds);
  (void)close(tell);
  assert_int_not_equal(status, 200);
  assert_int_not_equal(after, 200);
  assert_int_equal(end, 3);
  assert_true(seconds < 10.0);
}

/* ------------------------------------------------------------------ logits that are not finite */

enum { BAD = 9, PROMPT = 40 };

static drive_answer nan_answers[3][REQUESTS];

/* A model whose token BAD has an embedding of NaN, and a head of its own. */
static unsigned char *nan_model(pkv_model **model) {
  small_llama t = small_shape(VOCAB);
  pkv_model *plain = NULL;
  size_t size = 0;
  t.output = true;
  unsigned char *const bytes = small_llama_bytes(&t, &size);
  OK(pkv_model_open_memory(&plain, bytes, size, NULL, err));
  const pkv_weight embed = plain->embed;
  const size_t row =
      (size_t)((const unsigned char *)embed.data - bytes) + BAD * (size_t)embed.row_bytes;
  pkv_model_close(plain);
  assert_int_equal(embed.type, PKV_WTYPE_F16);
  memset(bytes + row, 0x7f, (size_t)embed.row_bytes);
  OK(pkv_model_open_memory(model, bytes, size, NULL, err));
  return bytes;
}

/* Eight requests together; bad: request 3 has the token. */
static void answer_all(pkv_engine *engine, bool bad, drive_answer *answers) {
  static int32_t prompts[REQUESTS][PROMPT];
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt_tokens = PROMPT;
  r.max_tokens = 16;
  r.ignore_end = 1;
  for (int i = 0; i < REQUESTS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, 100 + (uint64_t)i);
    for (int j = 0; j < PROMPT; j++)
      if (prompts[i][j] == BAD) prompts[i][j] = BAD + 1;
    if (i == 3 && bad) prompts[i][20] = BAD;
    r.prompt = prompts[i];
    drive_submit(engine, &r, &answers[i]);
  }
  (void)drive_all(engine, 200);
}

/* NaN in one request's logits ends that request with an error. Those beside it, and those that have
   its pages later, are answered as without it. */
static void test_logits_not_finite(void **state) {
  (void)state;
  pkv_model *model = NULL;
  NEED_GPU();
  unsigned char *const bytes = nan_model(&model);
  pkv_engine_options o = device_options();
  o.cache_tokens = REQUESTS * LONGEST; /* no page but theirs */
  pkv_engine *const engine = drive_engine(model, &o);
  answer_all(engine, false, nan_answers[0]);
  answer_all(engine, true, nan_answers[1]);
  answer_all(engine, false, nan_answers[2]);
  drive_finish(engine);
  for (int i = 0; i < REQUESTS; i++) {
    drive_equal(&nan_answers[2][i], &nan_answers[0][i], "after a request that failed");
    if (i != 3) drive_equal(&nan_answers[1][i], &nan_answers[0][i], "beside a request that fails");
  }
  assert_int_equal(nan_answers[1][3].finish, PKV_FINISH_ERROR);
  assert_int_equal(nan_answers[1][3].count, 0);
  pkv_model_close(model);
  gguf_build_drop(bytes);
}

int gpu_suite_faults(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_padded_rows),       cmocka_unit_test(test_too_little_memory),
      cmocka_unit_test(test_calls_of_a_life),   cmocka_unit_test(test_memory_of_others),
      cmocka_unit_test(test_logits_not_finite), cmocka_unit_test(test_device_lost)};
  return cmocka_run_group_tests_name("faults", tests, gpu_setup, gpu_teardown);
}
