/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv tokenize` as a program: output forms, sources of the text, exit codes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/vocab_build.h"

static char model[] = "/tmp/pkv_tokenize_XXXXXX";

static int setup(void **state) {
  (void)state;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  (void)vocab_build_merge(&v, "h", "i");          /* 256 */
  (void)vocab_build_token(&v, "<|im_start|>", 3); /* 257 */
  (void)vocab_build_token(&v, "<|im_end|>", 3);   /* 258 */
  gguf_build_u32(&v.file, "tokenizer.ggml.bos_token_id", 257);
  gguf_build_bool(&v.file, "tokenizer.ggml.add_bos_token", true);
  gguf_build_string(&v.file, "tokenizer.chat_template",
                    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
                    "message['content'] + '<|im_end|>\n'}}{% endfor %}"
                    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}");
  vocab_build_finish(&v);
  const int fd = mkstemp(model);
  const bool ok =
      fd >= 0 && write(fd, v.file.file.data, v.file.file.size) == (ssize_t)v.file.file.size;
  if (fd >= 0) (void)close(fd);
  vocab_build_deinit(&v);
  return ok ? 0 : -1;
}

static int teardown(void **state) {
  (void)state;
  return unlink(model);
}

/* Runs `pkv tokenize -m MODEL arguments` in a shell; "before" goes in front of it. */
static void check(const char *before, const char *arguments, int code, const char *want) {
  char command[1024], output[4096];
  (void)snprintf(command, sizeof command, "%s '%s/pkv' tokenize -m %s %s 2>&1", before,
                 PKV_BINARY_DIR, model, arguments);
  FILE *pipe = popen(command, "r");
  assert_non_null(pipe);
  const size_t n = fread(output, 1, sizeof output - 1, pipe);
  output[n] = 0;
  const int status = pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != code || strcmp(output, want) != 0)
    fail_msg("%s\nexit status %d, want %d; output:\n%swant:\n%s", arguments, WEXITSTATUS(status),
             code, output, want);
}

static void test_output(void **state) {
  (void)state;
  check("", "-p 'hi<|im_end|>'", 0, "256 60 124 105 109 95 101 110 100 124 62\n");
  check("", "-p 'hi<|im_end|>' --special", 0, "256 258\n");
  check("", "-p hi --add-special", 0, "257 256\n");
  check("", "-p hi --chat", 0,
        "257 117 115 101 114 10 256 258 10 257 97 115 115 105 115 116 97 110 116 10\n");
  check("", "-p hihi --count", 0, "2\n");
  check("", "-p ''", 0, "");
  check("", "-p '' --count", 0, "0\n");
  check("", "-p 'hi\"\\n' --pieces", 0, "256\t\"hi\"\n34\t\"\\\"\"\n92\t\"\\\\\"\n110\t\"n\"\n");
  check("", "-e -p 'hi\\n\\xff\\x01' --pieces", 0,
        "256\t\"hi\"\n10\t\"\\n\"\n255\t\"\\xff\"\n1\t\"\\x01\"\n");
  check("", "-p hi --json", 0, "{\n  \"count\": 1,\n  \"ids\": [\n    256\n  ]\n}\n");
  check("", "-p hi --json --count", 0, "{\n  \"count\": 1\n}\n");
  check("", "-e -p 'h\\xff' --json --pieces", 0,
        "{\n  \"count\": 2,\n  \"tokens\": [\n    {\n      \"id\": 104,\n      \"piece\": \"h\"\n"
        "    },\n    {\n      \"id\": 255,\n      \"piece\": [\n        255\n      ]\n    }\n  "
        "]\n}\n");
}

static void test_sources(void **state) {
  (void)state;
  check("printf hi |", "", 0, "256\n");
  check("printf hi |", "-f -", 0, "256\n");
  check("printf 'a\\0b' |", "", 0, "97 0 98\n");
  check("", "-f /dev/null --count", 0, "0\n");
}

static void test_refusals(void **state) {
  (void)state;
  check("", "-p a -f b", 2,
        "pkv tokenize: --prompt and --file exclude each other\nTry 'pkv tokenize --help'.\n");
  check("", "-p a --chat --special", 2,
        "pkv tokenize: --chat takes neither --special nor --add-special\n"
        "Try 'pkv tokenize --help'.\n");
  check("printf 'a\\0b' |", "--chat", 1,
        "pkv tokenize: the text holds a zero byte, which --chat cannot take\n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_output),
      cmocka_unit_test(test_sources),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
