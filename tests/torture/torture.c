/* SPDX-License-Identifier: Apache-2.0 */
/*
 * torture [--count N] [--seed S] [--at K] [SCENARIO...]: each scenario once more for each of its
 * calls that can fail, with that one failing, then with all from it on. What is asked: a status
 * with a text or success, nothing left allocated or open, and the same scenario right at once
 * afterwards. A crash, an abort and a hang are failures, and so are too few calls that could fail.
 * --count: so many places a scenario, drawn by the seed, which the clock gives where nobody does,
 * and which is printed; --at: the K-th alone.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/rng.h"
#include "model/model.h"
#include "pkv/sched.h"
#include "support/small_llama.h"
#include "support/small_server.h"
#include "torture/fault_shim.h"
#include "torture/torture_parts.h"

#define PATIENCE_S 120
#define PROMPT     13
#define ANSWER     5
#define MOST       1000000

static char folder[] = "/tmp/pkv-torture-XXXXXX", model_path[64], cache_path[64];
static unsigned char *model_bytes;
static pkv_model *kept_model;
static pkv_engine *kept_engine;
static char now[256]; /* what is tried, for whoever reads of a crash */

/* --- scenarios: PKV_OK only when everything was right ---------------------------------------- */

pkv_status torture_wrong(pkv_error *err, const char *what) {
  (void)snprintf(err->text, sizeof err->text, "wrong: %s", what);
  return err->status = PKV_E_INTERNAL;
}

static pkv_status load_file(pkv_error *err) {
  pkv_model *model = NULL;
  const pkv_status status = pkv_model_open(&model, model_path, NULL, err);
  pkv_model_close(model);
  return status;
}

static pkv_status load_folder(pkv_error *err) {
  pkv_model *model = NULL;
  const pkv_status status =
      pkv_model_open(&model, PKV_SOURCE_DIR "/tests/data/tiny_folders/llama3", NULL, err);
  pkv_model_close(model);
  return status;
}

static pkv_status tokens(pkv_error *err) {
  static const pkv_message turns[] = {{"user", "a b"}};
  int32_t ids[64];
  size_t count = 0;
  pkv_status status = pkv_tokenize(ids, 64, &count, kept_model, "ab a b", 6, 0, err);
  if (status == PKV_OK && count == 0) return torture_wrong(err, "no tokens");
  if (status == PKV_OK) status = pkv_chat_tokenize(ids, 64, &count, kept_model, turns, 1, 1, err);
  return status;
}

/* The answer to one prompt, greedy: always the same. */
static pkv_status ask(pkv_engine *engine, pkv_error *err) {
  static int32_t right[ANSWER];
  static bool known;
  int32_t prompt[PROMPT], got[ANSWER];
  pkv_event events[64];
  pkv_request r = PKV_REQUEST_INIT;
  int64_t id = 0;
  int count = 0;
  for (int i = 0; i < PROMPT; i++)
    prompt[i] = 3 + i % 5;
  r.prompt = prompt;
  r.prompt_tokens = PROMPT;
  r.max_tokens = ANSWER;
  r.ignore_end = 1;
  pkv_status status = pkv_engine_submit(&id, engine, &r, err);
  if (status != PKV_OK) return status;
  for (int step = 0; pkv_engine_pending(engine) > 0; step++) {
    size_t written = 0;
    if (step == 100) return torture_wrong(err, "no end");
    status = pkv_engine_step(events, 64, &written, engine, err);
    if (status != PKV_OK) break;
    for (size_t i = 0; i < written; i++)
      if (events[i].token >= 0 && count < ANSWER) got[count++] = events[i].token;
  }
  if (status != PKV_OK) { /* it may not stay behind */
    pkv_fault_disarm();
    for (int step = 0; pkv_engine_pending(engine) > 0 && step < 100; step++) {
      size_t written = 0;
      pkv_engine_cancel(engine, id);
      if (pkv_engine_step(events, 64, &written, engine, NULL) != PKV_OK) break;
    }
    return pkv_engine_pending(engine) > 0 ? torture_wrong(err, "a request stays") : status;
  }
  if (count != ANSWER) return torture_wrong(err, "answer of another length");
  if (!known) memcpy(right, got, sizeof right);
  known = true;
  return memcmp(right, got, sizeof right) == 0 ? PKV_OK : torture_wrong(err, "another answer");
}

static pkv_status whole_engine(pkv_error *err) {
  const pkv_engine_options o = small_server_engine();
  pkv_engine *engine = NULL;
  pkv_status status = pkv_engine_create(&engine, kept_model, &o, err);
  if (status == PKV_OK) status = ask(engine, err);
  pkv_engine_destroy(engine);
  return status;
}

static pkv_status request(pkv_error *err) {
  return ask(kept_engine, err);
}

static pkv_status snapshot(pkv_error *err) {
  const pkv_engine_options o = small_server_engine();
  pkv_engine *engine = NULL;
  int64_t saved = 0, loaded = 0;
  pkv_status status = pkv_engine_save_cache(&saved, kept_engine, cache_path, err);
  if (status == PKV_OK) status = pkv_engine_create(&engine, kept_model, &o, err);
  if (status == PKV_OK) status = pkv_engine_load_cache(&loaded, engine, cache_path, err);
  if (status == PKV_OK && loaded != saved) status = torture_wrong(err, "pages lost");
  if (status == PKV_OK) status = ask(engine, err);
  pkv_engine_destroy(engine);
  return status;
}

static pkv_status schedule(pkv_error *err) {
  static const pkv_sched_order orders[] = {PKV_SCHED_FCFS, PKV_SCHED_CHT, PKV_SCHED_TREE};
  static int32_t prompts[6][8];
  pkv_status status = PKV_OK;
  for (size_t k = 0; status == PKV_OK && k < sizeof orders / sizeof *orders; k++) {
    pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
    pkv_sched *sched = NULL;
    o.order = orders[k];
    o.max_requests = 8;
    o.chunk_tokens = 2;
    status = pkv_sched_create(&sched, &o, err);
    for (int i = 0; status == PKV_OK && i < 6; i++) {
      pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
      for (int t = 0; t < 8; t++)
        prompts[i][t] = t < 4 ? i % 2 : i;
      r.id = (uint64_t)i + 1;
      r.tokens = prompts[i];
      r.prompt_tokens = 8;
      status = pkv_sched_insert(sched, &r, err);
    }
    for (int i = 0; status == PKV_OK && i < 6; i++) {
      pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
      status = pkv_sched_best(&pick, sched, -1, err);
      if (status == PKV_OK) status = pkv_sched_admit(sched, pick.id, err);
      if (status == PKV_OK && i % 2) status = pkv_sched_finish(sched, pick.id, err);
    }
    pkv_sched_destroy(sched);
  }
  return status;
}

/* --- the server: calls of the client's side go past the shim --------------------------------- */

static small_server served;
static _Atomic bool ended;
static pkv_error server_error;
static pkv_status server_status;

static void *serve_thread(void *user) {
  served.model = kept_model;
  const pkv_serve_options o = small_server_options(&served);
  (void)user;
  server_status = pkv_serve(&o, &server_error);
  ended = true;
  return NULL;
}

static char odd_answer[1024], right_answer[2048];

/* The status of a completion, 0 when the connection brought none, -1 when the answer is another
   than the first: it is kept then. */
static int completion(int wait_ms) {
  char got[4096];
  if (small_server_ask(got, sizeof got, &served,
                       "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                       "Content-Length: 60\r\n\r\n{\"prompt\":\"a b\",\"max_tokens\":3,"
                       "\"temperature\":0,\"logprobs\":2}",
                       wait_ms) < 12)
    return 0;
  const int status = (int)strtol(got + 9, NULL, 10);
  if (status != 200) return status;
  const char *const length = strstr(got, "Content-Length: "), *const end = strstr(got, "\r\n\r\n");
  if (length == NULL || end == NULL || strlen(end + 4) < strtoul(length + 16, NULL, 10))
    return 0; /* its connection broke on the way */
  const char *const choices = strstr(end, "\"choices\":");
  if (choices != NULL && right_answer[0] == '\0')
    (void)snprintf(right_answer, sizeof right_answer, "%s", choices);
  if (choices != NULL && strcmp(right_answer, choices) == 0) return 200;
  (void)snprintf(odd_answer, sizeof odd_answer, "%s", end + 4);
  return -1;
}

/* A server's whole life, with a request while calls may fail and one when they do not any more. */
static pkv_status server(pkv_error *err) {
  pthread_t thread;
  served.port = 0;
  ended = false;
  memset(&server_error, 0, sizeof server_error);
  if (pkv_fault_thread(&thread, serve_thread, NULL) != 0) return torture_wrong(err, "no thread");
  const bool early = small_server_ready(&served, &ended, 20, 50);
  const int first = early ? completion(200) : 0;
  (void)pkv_fault_disarm();
  const bool ready = small_server_ready(&served, &ended, 20000, 1000);
  const int second = ready ? completion(20000) : 0;
  if (!ended) (void)kill(getpid(), SIGTERM);
  (void)pthread_join(thread, NULL);
  sigset_t pending; /* of a server that had ended by itself */
  if (sigpending(&pending) == 0 && sigismember(&pending, SIGTERM)) {
    int number;
    (void)sigemptyset(&pending);
    (void)sigaddset(&pending, SIGTERM);
    (void)sigwait(&pending, &number);
  }
  if (first == -1 || second == -1)
    (void)fprintf(stderr, "torture: answered %s\nright: %s\n", odd_answer, right_answer);
  if (first == -1) return torture_wrong(err, "a request was answered wrongly");
  if (ready && second != 200) {
    (void)torture_wrong(err, "the next request was not answered");
    (void)snprintf(err->text + strlen(err->text), 32, ", status %d", second);
    return err->status;
  }
  if (server_status != PKV_OK) *err = server_error;
  return server_status;
}

/* --- the loop -------------------------------------------------------------------------------- */

typedef struct scenario {
  const char *name;
  pkv_status (*run)(pkv_error *err);
  int64_t least; /* calls that can fail, or the shim does not see them; negative: exactly so many */
} scenario;

/* A running engine has all it needs, and looks at its file, which is mapped, once a step. */
static const scenario scenarios[] = {
    {"load", load_file, 20},
    {"folder", load_folder, 20},
    {"tokens", tokens, 8},
    {"engine", whole_engine, 40},
    {"request", request, -ANSWER},
    {"snapshot", snapshot, 55},
    {"sched", schedule, 20},
    {"server", server, 70},
    {"keys", torture_keys, 2},
    {"chats", torture_chats, 200},
    {"schemas", torture_schemas, 200},
    {"calls", torture_calls, 30},
};

static void on_end(int number) {
  static const char in_time[] = "torture: ended by a signal: ", late[] = "torture: out of time: ";
  const char *const word = number == SIGALRM ? late : in_time;
  (void)!syscall(SYS_write, 2, word, strlen(word));
  (void)!syscall(SYS_write, 2, now, strlen(now));
  (void)!syscall(SYS_write, 2, "\n", 1);
  (void)signal(number, SIG_DFL);
  (void)raise(number);
}

static int complain(const scenario *s, int64_t at, bool onwards, const char *what,
                    const char *detail) {
  (void)fprintf(stderr, "torture: %s, call %lld (%s)%s: %s: %s\n", s->name, (long long)at,
                pkv_fault_name(), onwards ? " and all later ones" : "", what, detail);
  return 1;
}

/* Whether the shim stood before what the scenario calls. */
static int check_places(const scenario *s, int64_t places) {
  char text[96];
  if (s->least < 0 ? places == -s->least : places >= s->least) return 0;
  (void)snprintf(text, sizeof text, "%lld calls that can fail, %s%lld were expected",
                 (long long)places, s->least < 0 ? "" : "at least ",
                 (long long)(s->least < 0 ? -s->least : s->least));
  return complain(s, 0, false, "not what is known of it", text);
}

/* False in *reached when the scenario has fewer calls. */
static int try_once(const scenario *s, int64_t at, bool onwards, bool *reached) {
  pkv_error err = {PKV_OK, NULL, {0}};
  (void)snprintf(now, sizeof now, "%s, call %lld%s", s->name, (long long)at, onwards ? "+" : "");
  (void)alarm(PATIENCE_S);
  pkv_fault_arm(at, onwards);
  const pkv_status status = s->run(&err);
  *reached = pkv_fault_disarm() >= at;
  if (status != PKV_OK && err.text[0] == '\0')
    return complain(s, at, onwards, "no text for", pkv_status_name(status));
  if (strncmp(err.text, "wrong", 5) == 0) return complain(s, at, onwards, "went on", err.text);
  memset(&err, 0, sizeof err);
  const pkv_status next = s->run(&err);
  return next == PKV_OK ? 0 : complain(s, at, onwards, "the next one failed", err.text);
}

/* One place. The C library keeps blocks of threads that have ended, as many as ran at once: only
   what is left each time was left by the failure. */
static int try_place(const scenario *s, int64_t at, bool onwards, bool *reached, int64_t *live) {
  char text[64];
  int64_t more = 1;
  for (int again = 0; again < 3 && more != 0; again++) {
    const int bad = try_once(s, at, onwards, reached);
    if (bad > 0) return bad;
    more = pkv_fault_live() - *live;
    *live += more;
  }
  if (more == 0) return 0;
  (void)snprintf(text, sizeof text, "%lld more", (long long)more);
  return complain(s, at, onwards, "left behind", text);
}

static int run_scenario(const scenario *s, int64_t count, int64_t only, pkv_rng *rng) {
  pkv_error err = {PKV_OK, NULL, {0}};
  int64_t live = 0, places = 0, tried = 0;
  (void)snprintf(now, sizeof now, "%s, nothing fails", s->name);
  /* A busy machine may not come far with a server before its calls are left alone. */
  for (int warm = 0; warm < 3 || (warm < 20 && (pkv_fault_live() != live || places < s->least));
       warm++) {
    live = pkv_fault_live();
    pkv_fault_arm(0, false);
    const pkv_status status = s->run(&err);
    places = pkv_fault_disarm();
    if (status != PKV_OK) return complain(s, 0, false, "does not work", err.text);
  }
  if (pkv_fault_live() != live) return complain(s, 0, false, "leaks", "without any fault");
  int bad = check_places(s, places);
  for (int onwards = 0; onwards < 2; onwards++) {
    bool reached = true;
    for (int64_t at = 1; reached && at < MOST && bad < 20; at++) {
      const bool drawn = only > 0
                             ? at == only
                             : count == 0 || (int64_t)pkv_rng_below(rng, (uint64_t)places) < count;
      if (!drawn && at <= places) continue;
      bad += try_place(s, at, onwards != 0, &reached, &live);
      tried += reached;
    }
  }
  (void)alarm(0);
  (void)printf("%s: %lld calls that can fail, %lld runs with failures, %d wrong\n", s->name,
               (long long)places, (long long)tried, bad);
  (void)fflush(stdout);
  return bad;
}

static bool prepare(void) {
  small_llama shape = SMALL_LLAMA_INIT;
  const pkv_engine_options o = small_server_engine();
  pkv_error err;
  size_t size = 0;
  if (mkdtemp(folder) == NULL) return false;
  (void)snprintf(model_path, sizeof model_path, "%s/model.gguf", folder);
  (void)snprintf(cache_path, sizeof cache_path, "%s/cache", folder);
  gguf_build b;
  gguf_build_init(&b);
  small_llama_build(&b, &shape);
  gguf_build_string(&b, "tokenizer.chat_template",
                    "{% for m in messages %}{{ (m.content ~ ' ' ~ m.content)|trim }}{% endfor %}");
  model_bytes = gguf_build_exact(&b, &size);
  gguf_build_deinit(&b);
  pkv_model_options mapped = PKV_MODEL_OPTIONS_INIT;
  mapped.weights = PKV_WEIGHTS_MAPPED;
  FILE *const file = fopen(model_path, "wb");
  const bool written = file != NULL && fwrite(model_bytes, 1, size, file) == size;
  return file != NULL && fclose(file) == 0 && written &&
         pkv_model_open(&kept_model, model_path, &mapped, &err) == PKV_OK &&
         pkv_engine_create(&kept_engine, kept_model, &o, &err) == PKV_OK && torture_json_begin();
}

static bool is_asked(const char *name, char **names, int count) {
  for (int i = 0; i < count; i++)
    if (strcmp(name, names[i]) == 0) return true;
  return count == 0;
}

int main(int argc, char **argv) {
  static const int ends[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGALRM};
  int64_t count = 0, only = 0;
  uint64_t seed = (uint64_t)time(NULL);
  int first = 1, bad = 0;
  sigset_t signals;
  for (; first + 1 < argc && argv[first][0] == '-'; first += 2) {
    if (strcmp(argv[first], "--count") == 0) count = strtoll(argv[first + 1], NULL, 10);
    if (strcmp(argv[first], "--at") == 0) only = strtoll(argv[first + 1], NULL, 10);
    if (strcmp(argv[first], "--seed") == 0) seed = strtoull(argv[first + 1], NULL, 10);
  }
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
    (void)signal(ends[i], on_end);
  (void)sigemptyset(&signals); /* for the server's signalfd */
  (void)sigaddset(&signals, SIGTERM);
  (void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  if (!prepare()) return fputs("torture: cannot prepare\n", stderr), 2;
  (void)printf("seed %llu\n", (unsigned long long)seed);
  for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
    if (is_asked(scenarios[i].name, argv + first, argc - first))
      bad += run_scenario(&scenarios[i], count, only, &rng);
  torture_json_end();
  pkv_engine_destroy(kept_engine);
  pkv_model_close(kept_model);
  gguf_build_drop(model_bytes);
  (void)remove(model_path);
  (void)remove(cache_path);
  return rmdir(folder) != 0 || bad > 0;
}
